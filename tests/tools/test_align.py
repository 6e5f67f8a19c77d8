"""finetune.align: its rows, files and summary, the worker, and the whole command."""

import itertools
import json
import statistics
from collections import Counter

import pytest

from finetune.align import job_of, main, parse_arguments
from finetune.tools.alignment.formats import file_name, intervals, text_grid
from finetune.tools.alignment.results import Summary, median, write_failed, write_results
from finetune.tools.jobs.job import Totals


def row(id_: str = "a", moved: float = 0.5) -> dict:
    words = [
        {"word": 'say "hi"', "start": 0.1, "end": 0.1, "confidence": 0.9},
        {"word": "there", "start": 0.5, "end": 1.0, "confidence": 0.2},
    ]
    tokens = [{"token": word["word"], "start": word["start"], "end": word["end"]} for word in words]
    return {
        "id": id_, "source": f"m.jsonl line {id_}", "language": "en", "duration": 1.0, "text": 'say "hi" there',
        "loss": 4.0, "words": words, "tokens": tokens, "moved_frames": [moved],
    }  # fmt: skip


def test_intervals_cover_the_clip_and_none_is_empty():
    found = intervals([(0.1, 0.1, "a"), (0.1, 0.5, "b"), (0.6, 1.0, "c")], 1.0)
    assert [text for *_, text in found] == ["", "a", "b", "", "c"]
    assert found[0][0] == 0
    assert found[-1][1] == 1.0
    assert all(start < end for start, end, _ in found)
    assert all(a[1] == b[0] for a, b in itertools.pairwise(found))
    assert intervals([], 2.0) == [(0.0, 2.0, "")]
    assert intervals([], 0.0)[0][1] > 0


def test_a_text_grid_is_read_by_its_rules():
    lines = text_grid(row()).splitlines()
    assert lines[:2] == ['File type = "ooTextFile"', 'Object class = "TextGrid"']
    assert lines.count('        class = "IntervalTier"') == 2
    assert '            text = "say ""hi"""' in lines
    limits = [float(line.split("=")[1]) for line in lines if line.startswith("            xm")]
    starts, ends = limits[::2], limits[1::2]
    assert all(a < b for a, b in zip(starts, ends, strict=True))
    assert ends.count(1.0) == 2


def test_names_of_files_are_safe_and_never_meet():
    taken: dict[str, int] = {}
    ids = ("../a/b.flac", "a_b.wav", "A/B", "a_b-3", "a_b-4", "a_b", "", "..", "x" * 999)
    names = [file_name(i, taken) for i in ids]
    assert names[:6] == ["a_b", "a_b-2", "A_B-3", "a_b-3-2", "a_b-4", "a_b-5"]
    assert len({name.casefold() for name in names}) == len(names)
    assert all("/" not in name and not name.startswith(".") and 0 < len(name) < 200 for name in names)


def test_rows_go_to_a_file_or_to_one_a_clip(tmp_path):
    summary = write_results([row("a"), row("b")], tmp_path / "rows.jsonl", ("json",))
    found = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [r["id"] for r in found] == ["a", "b"]
    assert "moved_frames" not in found[0]
    assert [p.name for p in tmp_path.iterdir()] == ["rows.jsonl"]
    write_results([row("a"), row("b")], tmp_path / "out", ("textgrid", "srt", "json"))
    names = ["a.TextGrid", "a.srt", "alignments.jsonl", "b.TextGrid", "b.srt"]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == names
    assert '00:00:00,100 --> 00:00:01,100\nsay "hi" there' in (tmp_path / "out" / "a.srt").read_text()
    assert summary.words == 4


def test_a_failing_writer_leaves_the_file_of_before(tmp_path):
    output = tmp_path / "rows.jsonl"
    output.write_text("before")

    def rows():
        yield row()
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_results(rows(), output, ("json",))
    assert [p.name for p in tmp_path.iterdir()] == ["rows.jsonl"]
    assert output.read_text() == "before"


def test_many_clips_of_one_id_take_little_time_and_memory(tmp_path):
    summary, taken = Summary(), {}
    for n in range(100_000):
        summary.add({**row(), "loss": (n % 1000) / 100}, [n % 7])
        assert file_name("talk.flac", taken)
    assert len(taken) == 100_000
    assert len(summary.token_losses) + len(summary.moved_frames) < 600
    assert (median(summary.token_losses), median(summary.moved_frames)) == (pytest.approx(2.5, abs=0.01), 3)


@pytest.mark.parametrize("values", [[1.0], [1.0, 2.0], [3.0, 1.0, 1.0], [1.0, 5.0, 2.0, 2.0, 7.0, 5.0]])
def test_the_median_of_counted_numbers_is_that_of_all(values):
    assert median(Counter(values)) == statistics.median(values)


def test_the_summary_counts_what_is_left_out_and_tells_a_shift(tmp_path):
    summary = write_results([row(str(i)) for i in range(20)], tmp_path / "rows.jsonl", ("json",))
    totals = Totals(clips=24)
    totals.filtered["empty_text"] = 3
    totals.failed = [{"kind": "bad", "id": "x\x1b", "source": "m line 4", "reason": "no piece for ж"}]
    said = "\n".join(summary.lines(0.35, totals))
    assert "20 clips aligned: 40 words in 20.0 s" in said
    assert "50.0% of the words" in said
    assert "--shift 0.85" in said
    assert "3  left out: empty text" in said
    assert "1  bad, such as x\\x1b: no piece for ж" in said
    file = write_failed(totals, tmp_path / "rows.jsonl", ("json",))
    assert file == tmp_path / "rows.failed.jsonl"
    assert json.loads(file.read_text())["reason"] == "no piece for ж"
    assert write_failed(Totals(), tmp_path / "rows.jsonl", ("json",)) is None
    assert not file.exists()
    before = (tmp_path / "rows.jsonl").read_bytes()
    assert write_results([], tmp_path / "rows.jsonl", ("json",)).clips == 0
    assert (tmp_path / "rows.jsonl").read_bytes() == before
    assert write_results([], tmp_path / "none", ("srt",)).clips == 0
    assert not (tmp_path / "none").exists()
    assert write_failed(totals, tmp_path / "none", ("srt",)) == tmp_path / "none" / "failed.jsonl"


@pytest.mark.parametrize(
    ("more", "said"),
    [(["--format", "json,pdf"], "there is no 'pdf'"), (["--shift", "99"], "--shift"), (["--shift", "nan"], "--shift")],
)
def test_wrong_options_are_named(more, said, capsys):
    with pytest.raises(SystemExit):
        parse_arguments(["--model", "m", "--data", "d", "--output", "o", *more])
    assert said in capsys.readouterr().err


def test_an_output_of_the_wrong_kind_is_refused(tmp_path, capsys):
    given = ["--model", "m", "--data", "d", "--output", str(tmp_path)]
    assert main(given) == 2
    assert "is a directory" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert main([*given[:-1], str(tmp_path / "file"), "--format", "srt"]) == 2
    assert "is a file" in capsys.readouterr().err
    assert main([*given[:-1], "/", "--format", "srt"]) == 2
    assert "--output: / is the root" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "job"), [(".", ".here.job"), ("..", ".{}.job"), ("there/new", ".new.job")])
def test_the_directory_that_one_is_in_can_be_the_output(manifest, tmp_path, monkeypatch, name, job):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    arguments = ["--model", "m", "--data", str(manifest[0]), "--output", name, "--format", "srt"]
    found = job_of(parse_arguments(arguments)).directory
    assert found.name == job.format(tmp_path.name)
    assert found.parent == (tmp_path / "here" / name).resolve().parent


# ---- with a model ---------------------------------------------------------------------------------------------------


@pytest.fixture
def manifest(clips, tmp_path):
    """Three good clips, and one each without a text, with letters that no piece has, without audio, and crowded."""
    rows = [json.loads(line) for line in (clips / "manifest.jsonl").read_text(encoding="utf-8").splitlines()][:7]
    for r in rows:
        r["audio_filepath"] = str(clips / r["audio_filepath"])
        r["id"] = r["audio_filepath"].rpartition("/")[2]
    rows[1]["text"] = " \u2026 "
    rows[3]["text"] = "привет"
    rows[4]["audio_filepath"] = str(tmp_path / "missing.flac")
    path = tmp_path / "manifest.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return path, rows


def test_the_worker_aligns_what_it_can_and_counts_the_rest(tiny_model, manifest):
    from finetune.data.sources import Source, open_source
    from finetune.tools.alignment.worker import AlignmentSettings, MakeAlignmentWorker
    from finetune.tools.jobs.clips import Clips, cut_into_shards

    path, given = manifest
    source = open_source(Source(path=str(path)), "--data")
    group = [(source, shard) for shard in source.shards]
    [pieces] = cut_into_shards(group, 100)
    clips = Clips(group, pieces)
    worker = MakeAlignmentWorker(AlignmentSettings(str(tiny_model), batch_size=2), "cpu")()
    rows = sorted(worker.process(clips), key=lambda found: found["source"])
    assert [r["id"] for r in rows] == [given[i]["id"] for i in (0, 2, 5, 6)]
    assert clips.filtered == {"empty_text": 1}
    assert [record["id"] for record in clips.failed] == [given[3]["id"], given[4]["id"]]
    assert "no piece for" in clips.failed[0]["reason"]
    for r in rows:
        assert [word["word"] for word in r["words"]] == r["text"].split()
        edges = [x for word in r["words"] for x in (word["start"], word["end"])]
        assert edges == sorted(edges)
        assert edges[-1] <= r["duration"]
        assert r["tokens"][0]["start"] == r["words"][0]["start"]
        json.dumps(r, allow_nan=False)


@pytest.mark.slow
def test_the_whole_command_counts_and_writes(tiny_model, manifest, tmp_path, capsys):
    path, _ = manifest
    output = tmp_path / "out" / "words.jsonl"
    given = ["--model", str(tiny_model), "--data", str(path), "--output", str(output), "--device", "cpu"]
    assert main([*given, "--max-failed", "0.9"]) == 0
    said = capsys.readouterr().out
    assert "4 clips aligned" in said
    assert "1  left out: empty text" in said
    assert len(output.read_text(encoding="utf-8").splitlines()) == 4
    assert sorted(p.name for p in output.parent.iterdir()) == ["words.failed.jsonl", "words.jsonl"]
    silent = tmp_path / "silent.jsonl"
    silent.write_text(json.dumps({**manifest[1][0], "text": ""}) + "\n", encoding="utf-8")
    before = output.read_bytes()
    assert main([*given[:3], str(silent), *given[4:]]) == 1
    said = capsys.readouterr()
    assert "holds no clip that can be aligned" in said.err
    assert "written" not in said.out
    assert output.read_bytes() == before
    assert main([*given, "--format", "textgrid", "--max-failed", "0.9"]) == 2
    assert main([*given[:-3], str(tmp_path / "grids"), "--format", "textgrid,srt", "--max-failed", "0.9"]) == 0
    assert len(list((tmp_path / "grids").glob("*.TextGrid"))) == 4
