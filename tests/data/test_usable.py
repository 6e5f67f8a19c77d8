"""How much of the data is left, in a line at the start of a run and of a dry run."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from conftest import ONLY_TRAIN, read_lines, write_manifest
from launching import BIN, TRAIN, start
from stream_cases import RATE, make_stream

from finetune.data.usable import judge, look_at_usable


def manifest_of(folder: Path, rows: int, **columns: Any) -> str:
    """Rows of four files of 0.5 to 2 s in turn; every tenth has no text, and every fourth is 2 s long."""
    for i in range(4):
        soundfile.write(folder / f"{i}.wav", 0.1 * np.random.default_rng(i).standard_normal(RATE * (i + 1) // 2), RATE)
    return str(
        write_manifest(
            folder / f"{rows}.jsonl",
            [
                {"audio_filepath": f"{i % 4}.wav", "text": " " if i % 10 == 1 else "abc", "id": f"c{i}", **columns}
                for i in range(rows)
            ],
        )
    )


def test_every_reason_is_counted(tmp_path: Path) -> None:
    path = Path(manifest_of(tmp_path, 40))
    rows = read_lines(path)
    for i in (0, 2, 4):
        rows[i]["text"] = None
    rows[6]["audio_filepath"] = "gone.wav"
    rows[8] = {**rows[8], "audio_filepath": "gone.wav", "duration": 1.0}
    rows[9]["text"] = "abc" * 50  # more tokens than frames, by this rule
    write_manifest(path, rows)

    def fits(samples: list[int], tokens: list[list[int]]) -> list[bool]:
        return [len(own) < n / 200 for n, own in zip(samples, tokens, strict=True)]

    found = look_at_usable(make_stream(str(path), max_duration=1.6, fits=fits))
    every = 50 - 1.5 + 0.5  # of two missing files one names 1 s in place of its 0.5 s
    assert (found.rows, found.looked, found.is_estimate) == (40, 40, False)
    assert found.left_out == {
        "longer than data.max_duration 1.6 s": 10,
        "without a text": 2,
        "bad: without a text (such as c0)": 3,
        "bad: without a file (such as c6)": 2,
        "with more tokens than their encoder frames can carry": 1,
    }
    assert found.clips == 40 - 18
    assert found.bad == 5
    assert found.all_seconds == pytest.approx(every)
    assert str(found).startswith(
        "training on 22 of 40 clips (0.4 of 0.8 min): 10 longer than data.max_duration 1.6 s, "
    )
    assert found.passes(100, 4, 0) == "; 100 steps pass over them 18.2 times"
    assert found.passes(2, 4, 0) == "; 2 steps see 36 % of them"
    problem, warnings = judge(found, 1.0)
    assert (problem.startswith("data.train: 54 % of the audio is left out. Fix the data or"), warnings) == (True, [])


def test_of_many_rows_some_are_looked_at(tmp_path: Path) -> None:
    path = manifest_of(tmp_path, 3000, duration=1.0)
    found = look_at_usable(make_stream(path, max_duration=60.0), rows=300)
    assert 250 < found.looked < 1200
    assert found.rows == 3000
    assert found.clips + found.left_out.total() == pytest.approx(3000, abs=2)
    assert found.left_out["without a text"] == pytest.approx(300, rel=0.2)
    assert f", estimated from {found.looked:,} rows: " in str(found)
    assert look_at_usable(make_stream(path)).left_out == {"without a text": 300}


def test_a_number_that_only_reading_tells(tmp_path: Path) -> None:
    stream = make_stream(manifest_of(tmp_path, 40))
    for group in stream.sources.groups:
        group[:] = [(source, replace(shard, rows=None)) for source, shard in group]
    assert look_at_usable(stream).passes(100, 4, 0) == "; 100 steps pass over them 11.1 times", (
        "as the source tells it"
    )
    for source in {id(source): source for source, _ in stream.sources.groups[0]}.values():
        source.clips = None
    found = look_at_usable(stream)
    assert (found.rows, found.is_estimate, found.clips) == (None, True, 36)
    assert ", so far read; the total is unknown: 4 without a text" in str(found)
    assert found.passes(100, 4, 0) == ""


def test_a_mixture_says_how_often_each_source_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    a, b = manifest_of(tmp_path, 40), manifest_of(tmp_path / "b", 400)
    mixture = [{"path": a, "weight": 1}, {"path": b, "weight": 3}]
    found = look_at_usable(make_stream(mixture))
    assert (found.rows, found.clips, found.left_out["without a text"]) == (440, 396, 44)
    assert not found.is_estimate
    # An epoch reads 40 rows of a and 120 of b, 9 of 10 of which have a text.
    assert found.passes(72, 4, 0) == f"; 72 steps pass 2.0 times over {a} and see 60 % of {b}"
    assert found.epochs("5 epochs", 5.0) == f"; 5 epochs pass 5.0 times over {a}, 1.5 times over {b}"
    found.passes_of_epoch = {f"{i}.jsonl": float(i) for i in range(1, 7)}
    assert found.epochs("a", 1.0) == (
        "; a pass 6.0 times over 6.jsonl (the most of 6 sources), 1.0 times over 1.jsonl (the least)"
    )
    stream = make_stream(mixture)
    for group in stream.sources.groups[1:]:
        for i, (source, shard) in enumerate(group):
            source.clips, group[i] = None, (source, replace(shard, rows=None))
    found = look_at_usable(stream)
    assert ", so far read; the total is unknown: " in str(found)
    assert found.passes(72, 4, 0) == f"; 72 steps pass 2.0 times over {a}"


def test_where_nothing_can_be_read_nothing_is_known(tmp_path: Path) -> None:
    manifest = Path(manifest_of(tmp_path, 40))
    stream = make_stream(str(manifest))
    manifest.unlink()
    found = look_at_usable(stream)
    assert str(found) == "no row could be read, so the amount of usable data is unknown"
    assert judge(found, 0.05) == (None, [])


def test_parquet_is_judged_without_its_audio(corpus: Path) -> None:
    found = look_at_usable(make_stream(str(corpus / "shards"), max_duration=0.3))
    durations = [row["duration"] for row in read_lines(corpus / "manifest.jsonl")]
    assert found.clips == sum(seconds <= 0.3 for seconds in durations)
    assert found.all_seconds == pytest.approx(sum(durations))


@pytest.mark.slow
def test_a_run_on_less_than_half_is_refused(
    failed: Any, run_train: Any, tiny_run: Any, clips: Path, tmp_path: Path, capsys: Any
) -> None:
    durations = [row["duration"] for row in read_lines(clips / "manifest.jsonl")]
    bound = sorted(durations)[7] + 1e-6  # 8 of 24 are left
    data = {**ONLY_TRAIN, "max_duration": bound}
    arguments = tiny_run(data=data, training={"max_steps": 2, "save_steps": 2})
    line = f"training on 8 of 24 clips (0.1 of {sum(durations) / 60:.1f} min): 16 longer than data.max_duration "
    message = failed(1, *arguments)
    assert "data.train: 77 % of the audio is left out." in message
    assert "data.allow_large_losses=true" in message
    assert line in message
    assert "2 steps pass over them 1.0 times" in message
    assert not (tmp_path / "run" / "config.yaml").exists()

    assert run_train(*arguments, "--dry-run") == 1
    capsys.readouterr()
    parts = {p["part"]: p for p in json.loads((tmp_path / "run" / "dry_run.json").read_text())["parts"]}
    assert not parts["what is left"]["go"]
    assert line in parts["what is left"]["said"]

    said = failed(0, *arguments, "data.allow_large_losses=true")
    assert line in said
    assert "77 % of the audio is left out" in said
    # What was begun goes on, with a warning.
    again = failed(0, *arguments, "training.resume_from_checkpoint=true", "training.max_steps=3")
    assert line in again
    assert "77 % of the audio is left out" in again


def test_a_run_on_much_less_begins_with_a_warning(failed: Any, tiny_run: Any, clips: Path) -> None:
    durations = sorted(row["duration"] for row in read_lines(clips / "manifest.jsonl"))
    arguments = tiny_run(data={**ONLY_TRAIN, "max_duration": durations[17] + 1e-6}, training={"save_steps": 0})
    lost = 100 * sum(durations[18:]) / sum(durations)
    assert 25 < lost < 50
    for run in (arguments, [*arguments, "--dry-run"]):
        said = failed(0, *run)
        assert "training on 18 of 24 clips" in said
        assert re.search(rf"(?m)^\d\d:\d\d:\d\d warning: data\.train: {lost:.0f} % of the audio is left out$", said)
    assert "GO after" in said


@pytest.mark.slow
def test_all_ranks_refuse_together(tiny_run: Any, clips: Path, tmp_path: Path) -> None:
    data = {**ONLY_TRAIN, "max_duration": sorted(row["duration"] for row in read_lines(clips / "manifest.jsonl"))[7]}
    command = [str(BIN / "torchrun"), "--standalone", "--nproc_per_node", "2", TRAIN, *tiny_run(data=data)]
    said = start(command, expect=1).stderr
    assert "% of the audio is left out. Fix the data" in said
    done = start([*command, "data.allow_large_losses=true", "training.max_steps=4"])
    assert "4 steps pass over them" in done.stderr
