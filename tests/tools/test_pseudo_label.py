"""python -m finetune.pseudo_label: what it promises, what it keeps, and that rounds go on where they ended."""

import dataclasses
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from conftest import read_lines, write_manifest
from stream_cases import flac, write_parquet

from finetune.data.order import Piece
from finetune.data.sources import OpenSource, open_source, parse_sources
from finetune.errors import UserError
from finetune.pseudo_label import main, print_summary
from finetune.tools.jobs.clips import Clips
from finetune.tools.jobs.engines import Done, EngineSettings, Event, Ready
from finetune.tools.jobs.job import Job, Totals
from finetune.tools.jobs.running import run_job
from finetune.tools.jobs.work import Outcome, Task, answer
from finetune.tools.pseudo_labels.audio import open_audio_sources, recordings_of
from finetune.tools.pseudo_labels.calibration import (
    Labelled,
    calibrate,
    clips_for,
    confidence_of_others,
    upper_rate,
)
from finetune.tools.pseudo_labels.labelling import SIGNALS, Labeller, MakeLabeller
from finetune.tools.pseudo_labels.labels import LabelSettings, clips_a_shard, label
from finetune.tools.pseudo_labels.outputs import summarise, table
from finetune.tools.pseudo_labels.rounds import Rounds, run_rounds
from finetune.tools.pseudo_labels.selection import read_labelled, select

RATE = 16_000


def simulated(clips: int, seed: int, wer: float = 0.3, told: float = 2.0, language: str = "en") -> Labelled:
    """Clips of which some are harder than others, and signals that tell so, more or less."""
    random = np.random.default_rng(seed)
    words_N = 1 + random.poisson(6, clips)
    hardness_N = random.standard_normal(clips)
    rate_N = 1 / (1 + np.exp(-(np.log(wer / (1 - wer)) + 2 * hardness_N)))
    signals_NF = random.standard_normal((clips, len(SIGNALS)))
    signals_NF[:, 0] -= told * hardness_N
    languages = np.asarray([language] * clips)
    return Labelled(signals_NF, words_N, random.binomial(words_N, rate_N), languages, np.arange(clips))


def joined(*parts: Labelled) -> Labelled:
    found = [np.concatenate([getattr(part, f.name) for part in parts]) for f in dataclasses.fields(Labelled)]
    found[-1] = np.arange(len(found[-1]))
    return Labelled(*found)


def reached(labelled: Labelled, confidence_N: np.ndarray, threshold: float) -> float:
    kept_N = confidence_N >= threshold
    return 1 - labelled.errors_N[kept_N].sum() / max(labelled.words_N[kept_N].sum(), 1)


# ---- what is promised ----------------------------------------------------------------------------------------------


def test_the_promise_holds_on_clips_that_the_calibration_has_not_seen():
    others = simulated(20_000, seed=99)
    precisions = []
    for seed in range(10):
        found = calibrate(simulated(400, seed), precision=0.9, certainty=0.9)
        assert found.together.point is not None
        assert found.together.point.bound >= 0.9
        precisions.append(
            reached(others, found.confidence(others.signals_NF.tolist()), found.together.point.threshold)
        )
    assert np.mean(np.asarray(precisions) >= 0.9) >= 0.8
    assert min(precisions) > 0.87


def test_the_threshold_is_the_lowest_that_keeps_the_promise():
    found = calibrate(simulated(600, 1), precision=0.85, certainty=0.9)
    curve = found.together.curve
    assert [p.threshold for p in curve] == sorted((p.threshold for p in curve), reverse=True)
    kept = found.together.point
    assert kept is not None
    assert all(p.bound < 0.85 for p in curve if p.threshold < kept.threshold)
    assert curve[-1].share == curve[-1].recall == 1
    assert kept.wer_interval is not None
    assert kept.wer_interval[0] <= 1 - kept.precision <= kept.wer_interval[1]
    stricter = calibrate(simulated(600, 1), precision=0.9, certainty=0.9).together.point
    assert stricter is not None
    assert stricter.threshold > kept.threshold


def test_few_clips_without_an_error_promise_little():
    words_N = np.full(10, 5)
    assert upper_rate(np.zeros(10, dtype=int), words_N, 0.9) == pytest.approx(1 / 11)
    assert clips_for(0.95) == 19
    assert upper_rate(np.zeros(19, dtype=int), np.full(19, 5), 0.9) == pytest.approx(0.05)


def test_a_clip_is_judged_by_a_fit_without_its_text():
    labelled = simulated(200, 3, told=0.0)  # signals of pure noise
    # Each text twice: a fit that saw one of them could know the other by its number, which is a signal here.
    labelled.texts_N = np.arange(200) // 2
    labelled.signals_NF[:, 1] = labelled.texts_N
    confidence_N = confidence_of_others(labelled)
    right_N = 1 - np.minimum(labelled.errors_N / labelled.words_N, 1)
    assert np.corrcoef(confidence_N, right_N)[0, 1] < 0.2


def test_what_cannot_be_promised_is_said_with_the_best_that_can():
    with pytest.raises(UserError, match=r"too few for --precision 0.95: it takes 19 ") as few:
        calibrate(simulated(12, 0), precision=0.95, certainty=0.9)
    assert few.value.exit_code == 2
    with pytest.raises(UserError, match=r"cannot be promised.*The highest that can: (0\.\d+), for \d+%") as caught:
        calibrate(simulated(100, 0, wer=0.5, told=0.3), precision=0.99, certainty=0.9)
    assert caught.value.exit_code == 2
    hopeless = simulated(100, 0)
    hopeless.errors_N = hopeless.words_N + 1
    with pytest.raises(UserError, match="no precision can be promised"):
        calibrate(hopeless, precision=0.5, certainty=0.9)
    best = float(str(caught.value).split("that can: ")[1].split(",")[0])
    found = calibrate(simulated(100, 0, wer=0.5, told=0.3), precision=best - 0.001, certainty=0.9)
    assert found.together.point is not None


def test_clips_that_calibrate_nothing_are_refused(tmp_path):
    alike = simulated(100, seed=5, wer=0.01)
    alike.texts_N[:] = 7
    with pytest.raises(UserError, match="all of its clips have the same text"):
        calibrate(alike, precision=0.8, certainty=0.9)
    manifest = write_manifest(tmp_path / "c.jsonl", [{"audio_filepath": "c.flac", "text": ""}])
    source = open_source(parse_sources(str(manifest), "x", "test")[0], "x")
    heard = {"text": "a", "reference": "", "lang": "", "duration": 1.0, "digest": "c", "signals": [0.0] * len(SIGNALS)}
    with pytest.raises(UserError, match="no clip in which the model hears words has a text"):
        read_labelled(done_job(tmp_path / "out", [source], [[heard]]), "basic")


def test_languages_have_thresholds_of_their_own_where_clips_are_enough():
    labelled = joined(
        simulated(400, 1, wer=0.15), simulated(400, 2, wer=0.45, language="fr"), simulated(8, 3, language="de")
    )
    found = calibrate(labelled, precision=0.9, certainty=0.9)
    easy, hard = found.by_language["en"].point, found.by_language["fr"].point
    assert easy is not None
    assert hard is not None
    assert easy.share > hard.share
    assert found.too_few == {"de": 8}
    assert found.choice("de") is found.together


# ---- what is kept --------------------------------------------------------------------------------------------------


@pytest.fixture
def jobs(tmp_path: Path) -> tuple[Job, Job]:
    """Results as a labelling leaves them: of 120 labelled clips, and of 7 rows of audio without texts."""
    calibration = simulated(120, 5, wer=0.05)
    rows = [
        {"audio_filepath": f"c{i}.flac", "text": "a " * w, "lang": "en"} for i, w in enumerate(calibration.words_N)
    ]
    labelled = open_source(parse_sources(str(write_manifest(tmp_path / "c.jsonl", rows)), "x", "test")[0], "x")
    results: list[dict[str, Any]] = []
    for i, (words, errors) in enumerate(zip(calibration.words_N, calibration.errors_N, strict=True)):
        heard = ("a " * (words - errors) + "b " * errors).strip()
        signals = calibration.signals_NF[i].tolist()
        results.append({"lang": "en", "duration": 1.0, "digest": f"c{i}", "text": heard, "signals": signals})
        results[-1]["reference"] = rows[i]["text"].strip()
    theirs = done_job(tmp_path / "out" / "calibration", [labelled], [[result] for result in results])
    clips = [{"audio": {"bytes": flac(np.zeros(800)), "path": None}, "id": f"clip{i}"} for i in range(7)]
    write_parquet(tmp_path / "audio.parquet", clips)
    sure, unsure = [6.0, 0, 0, 0, 0, 0], [-6.0, 0, 0, 0, 0, 0]
    parts = [{"text": "sure", "signals": sure}, {"text": "second", "signals": sure, "offset": 0.02, "duration": 0.03}]
    heard = [
        parts,
        [{"text": "unsure", "signals": unsure}],
        [{"text": "", "silence": 0.99}],
        [{"text": "", "silence": 0.3}],
        [{"text": "strange"}],
        [{"text": "other", "signals": sure, "lang": "fr"}],
        [{"text": "known", "signals": sure, "digest": "c7"}],
    ]
    base = {"lang": "en", "duration": 0.05, "digest": ""}
    found = [[{**base, "id": f"clip{i}", **result} for result in results] for i, results in enumerate(heard)]
    audio = open_audio_sources([str(tmp_path / "audio.parquet")], None, tmp_path)
    return theirs, done_job(tmp_path / "out" / "labels", audio, found)


def done_job(folder: Path, sources: list[OpenSource], results: list[list[dict[str, Any]]]) -> Job:
    """Return a job that has these results of each row."""
    job = Job("pseudo_label", folder, {}, sources, lambda: None)  # type: ignore[arg-type, return-value]
    job.begin()
    left = iter(results)
    for number, pieces in enumerate(job.shards):
        places = [job.group[p.shard][1].place(n) for p in pieces for n in range(p.start, p.stop or 0)]
        lines = [json.dumps({**r, "source": place}) + "\n" for place in places for r in next(left)]
        job.write(number, Outcome("".join(lines), clips=len(places), seconds=1.0))
    return job


@pytest.mark.parametrize("keep_silence", [False, True])
def test_sure_clips_go_into_a_manifest_that_training_reads_and_others_have_a_reason(
    jobs, tmp_path, capsys, keep_silence
):
    folder, (theirs, job) = tmp_path / "out", jobs
    heard = read_labelled(theirs, "basic")
    assert len(heard.labelled) == 120
    calibration = calibrate(heard.labelled, 0.9, 0.9)
    point = calibration.together.point
    assert point is not None
    selection = select(job, heard, calibration, folder, keep_silence, job.totals())
    kept, out = read_lines(folder / "manifest.jsonl"), read_lines(folder / "left_out.jsonl")
    silent = [{"text": "", "id": "clip2", "offset": None}] if keep_silence else []
    assert [{key: row.get(key) for key in ("text", "id", "offset")} for row in kept] == [
        {"text": "sure", "id": "clip0", "offset": None},
        {"text": "second", "id": "clip0@0.02", "offset": 0.02},
        *silent,
    ]
    assert {row["lang"] for row in kept} == {"en"}
    assert all(row["confidence"] >= round(point.threshold, 4) for row in kept if row["text"])
    kinds = {row["id"]: row["kind"] for row in out}
    assert kinds.pop("clip2", "nothing_heard") == "nothing_heard"
    assert kinds == {
        "clip1": "confidence", "clip3": "nothing_heard", "clip4": "no_alignment", "clip5": "language",
        "clip6": "calibration",
    }  # fmt: skip
    summary = summarise(calibration, heard, selection, {})
    assert summary["clips"] == 7, "parts count, and clips of the calibration do not"
    assert print_summary(summary, folder) == 0
    assert ("data.keep_empty_text=true" in capsys.readouterr().out) == keep_silence
    assert print_summary({**summary, "kept_clips": 0, "silent_clips": 0}, folder) == 1
    said = capsys.readouterr().out
    assert "no clip is kept" in said
    assert "to train on it" not in said
    assert summary["kept_clips"] == 2
    assert summary["silent_clips"] == len(silent)
    assert summary["expected_wer"] == pytest.approx(1 - point.precision)
    assert summary["kept_hours"] == pytest.approx((0.05 + 0.03) / 3600)
    assert "kept 2 of 7 clips" in table(summary)
    # The audio of the shards is written out, and the parts are cut from it.
    source = open_source(parse_sources(str(folder / "manifest.jsonl"), "x", "train")[0], "x")
    rows = [row for shard in source.shards for _, row in shard.read(0)]
    assert [round(soundfile.info(row["audio_filepath"]).duration, 3) for row in rows] == [0.05] * len(kept)


def test_parts_of_a_recording_that_calibrate_are_not_labelled(tmp_path):
    row = {"audio_filepath": "talk.flac", "lang": "en"}
    labelled = [{**row, "offset": 30.0, "duration": 5.0, "text": "a"}]
    result = {"id": "talk", "lang": "en", "duration": 5.0, "text": "a", "signals": [0.0] * len(SIGNALS)}
    sources = [
        open_source(parse_sources(str(write_manifest(tmp_path / name, rows)), "x", "test")[0], "x", needs_text=False)
        for name, rows in (("calibration.jsonl", labelled), ("audio.jsonl", [row]))
    ]
    heard = read_labelled(
        done_job(tmp_path / "a", sources[:1], [[{**result, "digest": "1", "reference": "a"}]]), "basic"
    )
    parts = [{**result, "digest": str(n + 2), "offset": offset} for n, offset in enumerate((20.0, 26.0, 35.0))]
    job = done_job(tmp_path / "b", sources[1:], [parts])
    select(job, heard, calibrate(simulated(400, 1, wer=0.1), 0.9, 0.9), tmp_path, False, job.totals())
    kinds = {row["offset"]: row["kind"] for row in read_lines(tmp_path / "left_out.jsonl")}
    assert kinds.pop(26.0) == "calibration"
    assert "calibration" not in kinds.values()


class KnownResults:
    """An engine without a model: rows hold their results."""

    workers = 1

    def __init__(self, job: Job, settings: EngineSettings):
        self.job = job
        self.events: list[Event] = []

    def start(self) -> int:
        self.events.append(Ready(1))
        return 1

    def submit(self, worker: int, task: Task) -> None:
        self.events.append(Done(worker, answer(self, self.job.group, task)))

    def process(self, clips: Clips) -> Iterator[dict[str, Any]]:
        for _, place, _, row in clips.rows():
            yield {**row["result"], "source": place}

    def wait(self, seconds: float) -> list[Event]:
        return [self.events.pop()]

    def close(self) -> None:
        pass


def test_the_task_of_an_array_that_ends_last_chooses(tmp_path):
    known = simulated(120, 5, wer=0.05)
    rows: dict[str, list[dict[str, Any]]] = {"c": [], "a": []}
    for i, (words, errors) in enumerate(zip(known.words_N, known.errors_N, strict=True)):
        text = ("a " * words).strip()
        heard = ("a " * (words - errors) + "b " * errors).strip()
        signals = known.signals_NF[i].tolist()
        for name, its in (("c", {"text": heard, "signals": signals}), ("a", {"text": "sure", "signals": [6.0] * 6})):
            result = {"id": f"{name}{i}", "lang": "en", "duration": 1.0, "digest": f"{name}{i}", **its}
            result |= {"reference": text} if name == "c" else {}
            row = {"audio_filepath": f"{name}{i}.flac", "duration": 1.0, "text": text, "result": result}
            rows[name].append(row)
    data = {name: str(write_manifest(tmp_path / f"{name}.jsonl", rows[name])) for name in rows}
    settings = LabelSettings([data["a"]], [data["c"]], precision=0.9)
    folder, found = tmp_path / "out", []

    def run(job: Job, engine: EngineSettings) -> Totals:
        if engine.part == (0, 2) and job.directory.name == "labels":  # its part of the calibration is done
            found.append(label("m.nemo", settings, EngineSettings(part=(1, 2)), folder, run))
        return run_job(job, engine, KnownResults)

    found.append(label("m.nemo", settings, EngineSettings(part=(0, 2)), folder, run))
    other, last = found
    assert other is None
    assert last is not None
    assert last["clips"] == last["kept_clips"] == len(read_lines(folder / "manifest.jsonl")) == 120


# ---- the model -----------------------------------------------------------------------------------------------------


def test_recordings_are_cut_at_pauses_and_clips_without_texts_are_heard(clips, tiny_model, tmp_path):
    rows = read_lines(clips / "manifest.jsonl")[:4]
    voices = [soundfile.read(clips / row["audio_filepath"], dtype="float32")[0] for row in rows]
    pause_S = np.zeros(RATE, dtype=np.float32)
    (tmp_path / "talks").mkdir()
    talk_S = np.concatenate([part for voice_S in voices for part in (voice_S, pause_S)])
    soundfile.write(tmp_path / "talks" / "talk.flac", talk_S, RATE)
    soundfile.write(tmp_path / "talks" / "clip.flac", voices[0], RATE)
    soundfile.write(tmp_path / "talks" / "nothing.flac", np.zeros(10 * RATE), RATE)
    labelled = open_source(parse_sources(str(clips / "manifest.jsonl"), "x", "test")[0], "x")
    audio = open_audio_sources([str(tmp_path / "talks")], None, tmp_path)
    found = []
    for source, rows in ((labelled, 2), (audio[0], 3)):
        make = MakeLabeller(str(tiny_model), source is labelled, language="en", longest=3.0, device="cpu")
        found += make().process(Clips([(source, source.shards[0])], [Piece(0, 0, rows)]))
    by_id: dict[str, list[dict[str, Any]]] = {}
    for result in found:
        by_id.setdefault(Path(result["id"]).name, []).append(result)
    assert sum("reference" in r for r in found) == 2
    (short,) = by_id["clip.flac"]
    assert "offset" not in short
    assert short["duration"] == pytest.approx(len(voices[0]) / RATE)
    parts = sorted(by_id["talk.flac"], key=lambda r: r["offset"])
    assert len(parts) >= 4, "one a voice at least"
    ends = [part["offset"] + part["duration"] for part in parts]
    assert all(end <= part["offset"] + 1e-6 for end, part in zip(ends, parts[1:]))
    assert ends[-1] <= len(talk_S) / RATE
    assert sum(part["duration"] for part in parts) < len(talk_S) / RATE - 2
    (nothing,) = by_id.pop("nothing.flac")
    assert nothing["duration"] == 10
    assert nothing["text"] == ""
    found.remove(nothing)
    check_results(found)


def test_another_set_of_recordings_or_a_used_directory_is_refused_and_nothing_is_touched(clips, tmp_path, capsys):
    out, calibrate = tmp_path / "out", str(clips / "manifest.jsonl")
    files = [str(clips / row["audio_filepath"]) for row in read_lines(clips / "manifest.jsonl")[:2]]
    open_audio_sources(files[:1], None, out)
    before = (out / "recordings.jsonl").stat()
    line = ["--model", "m.nemo", "--calibrate", calibrate, "--output", str(out), "--data"]
    assert main([*line, *files]) == 2
    assert "holds labels of other recordings" in capsys.readouterr().err
    assert (out / "recordings.jsonl").stat() == before
    open_audio_sources(files[:1], None, out)
    assert (out / "recordings.jsonl").stat() == before
    (out / "model.nemo").touch()
    assert main([*line, files[0]]) == 2
    assert "holds other things (model.nemo)" in capsys.readouterr().err


def test_what_lies_beside_recordings(tmp_path, caplog):
    """The command's own directory and hidden files do not count; a table makes a data source, and is named."""
    talks = tmp_path / "talks"
    for name in ("b.wav", "a/c.wav", "a/._c.wav", ".old/d.wav"):
        (talks / name).parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(talks / name, np.zeros(RATE), RATE)
    (talks / ".notes.json").touch()

    def listed(folder: Path) -> list[str]:
        open_audio_sources([str(talks)], None, folder)
        return [row["audio_filepath"] for row in read_lines(folder / "recordings.jsonl")]

    recordings = [str(talks / "b.wav"), str(talks / "a" / "c.wav")]
    for _ in range(2):  # the second start finds what the first one left
        assert listed(talks / "labels") == recordings
        (talks / "labels" / "manifest.jsonl").touch()
    shutil.rmtree(talks / "labels")
    (talks / "rounds").mkdir()
    (talks / "rounds" / "rounds.json").touch()
    for number in (1, 2):
        assert listed(talks / "rounds" / f"round-{number}") == recordings
    (talks / "a" / "texts.csv").write_text("file_name,text\n")
    with caplog.at_level("INFO", "finetune"):
        assert recordings_of(str(talks), talks / "rounds") == []
    assert f"{talks} is a data source and no folder of recordings, since it holds {talks}/a/texts.csv" in caplog.text


def test_long_recordings_come_in_smaller_shards(tmp_path):
    def shard(seconds: float) -> int:
        rows = [{"audio_filepath": "a.wav", "duration": seconds, "text": ""}] * 3
        path = str(write_manifest(tmp_path / f"{seconds}.jsonl", rows))
        return clips_a_shard([open_source(parse_sources(path, "x", "test")[0], "x")])

    assert [shard(seconds) for seconds in (3.0, 60.0, 3600.0, 9000.0)] == [None, 100, 2, 1]


def check_results(found: list[dict[str, Any]]) -> None:
    for result in found:
        if result["text"]:
            assert len(result["signals"]) == len(SIGNALS)
            assert np.isfinite(result["signals"]).all()
            assert max(result["signals"][:4]) <= 0, "logarithms of probabilities"
        else:
            assert 0 <= result["silence"] <= 1


@pytest.mark.parametrize("head", ["transducer", "ctc"])
def test_both_heads_of_a_hybrid_model_label(archive_of, clips, head):
    source = open_source(parse_sources(str(clips / "manifest.jsonl"), "x", "test")[0], "x")
    labeller = Labeller(MakeLabeller(str(archive_of("hybrid-rnnt")), False, head=head, device="cpu"))
    found = list(labeller.process(Clips([(source, source.shards[0])], [Piece(0, 0, 4)])))
    assert len(found) == 4
    check_results(found)


def test_data_without_a_column_of_texts_is_refused_where_texts_are_needed(tmp_path):
    write_parquet(tmp_path / "a.parquet", [{"audio": {"bytes": flac(np.zeros(800)), "path": None}}])
    source = parse_sources(str(tmp_path / "a.parquet"), "--data", "train")[0]
    with pytest.raises(UserError, match="no column of text"):
        open_source(source, "--data")
    assert open_source(source, "--data", needs_text=False).clips == 1


def test_training_takes_clips_without_words_where_it_is_told_to(run_train, tiny_run, clips, tmp_path):
    rows = read_lines(clips / "manifest.jsonl")[:8]
    for i, row in enumerate(rows):
        row.update(audio_filepath=str(clips / row["audio_filepath"]), text=row["text"] if i % 4 else "")
    data = {"train": str(write_manifest(tmp_path / "train.jsonl", rows)), "validation": None, "test": None}
    for keep in (False, True):
        training = {"output_dir": str(tmp_path / f"run{keep}"), "save_steps": 0, "max_steps": 2}
        settings = tiny_run(data={**data, "keep_empty_text": keep, "group_by_duration": False}, training=training)
        assert run_train(*settings) == 0
        summary = json.loads((tmp_path / f"run{keep}" / "summary.json").read_text())
        assert ("empty_text" in summary["filtered"]) != keep
        losses = [row["loss"] for row in read_lines(tmp_path / f"run{keep}" / "metrics.jsonl")]
        assert np.isfinite(losses).all()


# ---- rounds --------------------------------------------------------------------------------------------------------

TRAINING = """
import json, pathlib, sys
words = {k: json.loads(v) for k, v in (word.split("=", 1) for word in sys.argv[1:] if "=" in word)}
run = pathlib.Path(words["training.output_dir"])
run.mkdir(parents=True, exist_ok=True)
(run / "words.json").write_text(json.dumps(words))
if not (run.parents[1] / "allowed").exists():
    sys.exit("error: no disk")
(run / "summary.json").write_text('{"best_step": 3}')
"""


def test_rounds_label_train_and_label_again_and_go_on_after_a_failure(run_file, tmp_path):
    (tmp_path / "training.py").write_text(TRAINING)
    labelled: list[tuple[str, str]] = []

    def labelling(model: str, settings: LabelSettings, engine: EngineSettings, folder: Path) -> dict[str, Any]:
        labelled.append((model, folder.name))
        folder.mkdir(parents=True, exist_ok=True)
        summary: dict[str, Any] = dict.fromkeys(("kept_clips", "kept_hours", "share", "expected_wer"), len(labelled))
        for name in ("manifest.jsonl", "left_out.jsonl"):
            (folder / name).write_text(f"{folder.name}\n")
        (folder / "summary.json").write_text(json.dumps(summary))
        return summary

    settings = LabelSettings(["audio"], ["validation.jsonl"])
    folder = tmp_path / "rounds"
    plan = Rounds(
        "base.nemo", settings, run_file(), [], ["training.max_steps=5"], 3, None,
        (sys.executable, str(tmp_path / "training.py")), labelling,
    )  # fmt: skip
    with pytest.raises(UserError, match="no disk"):
        run_rounds(plan, EngineSettings(), folder)
    assert labelled == [("base.nemo", "round-1")]
    (folder / "allowed").touch()
    summary = run_rounds(plan, EngineSettings(), folder)
    runs = [str(folder / f"round-{n}" / "run") for n in (1, 2)]
    assert labelled == [("base.nemo", "round-1"), (runs[0], "round-2"), (runs[1], "round-3")]
    assert summary["kept_clips"] == 3
    assert (folder / "manifest.jsonl").read_text() == "round-3\n"
    words = json.loads((folder / "round-2" / "run" / "words.json").read_text())
    sources = [{"path": "train.jsonl"}, {"path": str(folder / "round-2" / "manifest.jsonl")}]
    assert words["data.train"] == sources
    assert words["training.max_steps"] == 5
    assert words["training.resume_from_checkpoint"] is True
    assert list(json.loads((folder / "rounds.json").read_text())["stages"]) == [
        "label 1", "train 1", "label 2", "train 2", "label 3",
    ]  # fmt: skip
    run_rounds(plan, EngineSettings(), folder)
    assert len(labelled) == 3, "nothing is left to do"
    other = dataclasses.replace(plan, settings=dataclasses.replace(settings, precision=0.8))
    with pytest.raises(UserError, match=r"holds other rounds: precision was 0.95, is 0.8"):
        run_rounds(other, EngineSettings(), folder)


@pytest.mark.parametrize(
    ("keys", "change", "message"),
    [
        ({}, {"weight": 2.0}, "--weight has no effect"),
        ({"data__train": [{"path": "a.jsonl", "weight": 1}]}, {}, "give the pseudo-labelled clips one with --weight"),
        ({"data__train": [{"path": "validation.jsonl"}]}, {}, "Calibrate on clips that no training sees"),
    ],
)
def test_run_files_that_rounds_cannot_use_are_refused(run_file, tmp_path, monkeypatch, keys, change, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "validation.jsonl").touch()
    plan = Rounds("m.nemo", LabelSettings(["audio"], ["validation.jsonl"]), run_file(**keys), [], [], 2)
    with pytest.raises(UserError, match=message):
        run_rounds(dataclasses.replace(plan, **change), EngineSettings(), tmp_path / "rounds")


def test_rounds_say_that_their_directory_cannot_be_made(run_file, tmp_path):
    (tmp_path / "file").touch()
    plan = Rounds("m.nemo", LabelSettings(["audio"], ["validation.jsonl"]), run_file(), [], [], 2)
    with pytest.raises(UserError, match=r"--output: .* cannot be written"):
        run_rounds(plan, EngineSettings(), tmp_path / "file" / "rounds")


# ---- the command ---------------------------------------------------------------------------------------------------

LINE = ["--model", "m.nemo", "--data", "a.wav", "--calibrate", "v.jsonl"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rounds", "2"], "name the run file with --config"),
        (["--config", "RUN.yaml"], "--config belong to --rounds 2 or more"),
        (["--rounds", "2", "--config", "RUN.yaml", "--shard", "0/2"], "--shard is for one labelling"),
    ],
)
def test_options_that_do_not_go_together(tmp_path, capsys, words, message):
    with pytest.raises(SystemExit) as stop:
        main([*LINE, "--output", str(tmp_path), *words])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--precision", "95"], "--precision: 95 is no share"),
        (["--certainty", "0.1"], "--certainty: 0.1"),
        (["--longest", "0"], "--longest: 0 s"),
        (["--address", "auto"], "add --engine ray"),
        ([], "no manifest v.jsonl"),
    ],
)
def test_bad_settings_are_said_at_once(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    assert main([*LINE, "--output", str(tmp_path / "out"), *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_folder_of_recordings_is_labelled_by_worker_processes(clips, tmp_path, capsys):
    base = Path(__file__).resolve().parents[2] / "examples" / "base" / "fastconformer_tdt_3m.nemo"
    prompts = base.parents[1] / "voice_prompts"
    (tmp_path / "recordings").mkdir()
    for file in clips.glob("*.flac"):
        (tmp_path / "recordings" / file.name).write_bytes(file.read_bytes())
    (tmp_path / "recordings" / "broken.flac").write_bytes(b"no audio")
    line = ["--model", str(base), "--data", str(tmp_path / "recordings"), "--calibrate", str(prompts)]
    line += ["--language", "en", "--output", str(tmp_path / "out"), "--max-failed", "0.1"]
    assert main([*line, "--precision", "0.95"]) == 2
    said = capsys.readouterr().err
    assert "--precision 0.95 cannot be promised" in said
    best = max(float(found) for found in re.findall(r"(?:can: |; )\w\w: (0\.\d+), for", said))
    assert main([*line, "--precision", f"{best - 0.01:.3f}"]) == 0, "transcribed before"
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["clips"] == 24
    assert summary["left_out"]["bad"] == 1
    kept = read_lines(tmp_path / "out" / "manifest.jsonl")
    assert len(kept) == summary["kept_clips"] > 0
    assert {row["audio_filepath"] for row in kept} <= {str(p) for p in (tmp_path / "recordings").glob("*.flac")}
    assert main([*line, "--precision", "0.5", "--longest", "10"]) == 2
    assert "holds another job: longest was 20.0, is 10.0" in capsys.readouterr().err
