"""Clips and texts of the evaluation sets that are also in the training set."""

import io
import json
import os
import shutil
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
from conftest import read_lines, write_manifest

from finetune.check import main as check
from finetune.config.load import load_config
from finetune.data import overlap
from finetune.data.overlap import Overlap, find_overlap
from finetune.data.run_file import open_sources
from finetune.errors import UserError
from finetune.split import main as split

ROW = {"audio_filepath": "0.wav", "text": "zero", "duration": 1.0}


@pytest.fixture
def compare(run_file: Any, tmp_path: Path) -> Any:
    """Compares rows as data.train and data.test of a run file."""

    def run(train: Any, test: Any, seconds: float = 60.0, **data: Any) -> Overlap:
        for name, rows in (("train", train), ("test", test)):
            if isinstance(rows, list):
                rows = str(write_manifest(tmp_path / f"{name}.jsonl", rows))
            data[name] = rows
        config, _ = load_config(run_file(**{f"data__{name}": value for name, value in data.items()}), [], [])
        return find_overlap(open_sources(config), config, seconds)

    return run


def same(found: Overlap) -> dict[str, int]:
    (one,) = found.by_set()
    return one["same_by"]


def test_the_same_row_and_the_same_file_however_written(compare: Any, tmp_path: Path) -> None:
    rows = [{**ROW, "audio_filepath": f"{i}.wav", "text": f"text {i}"} for i in range(6)]
    found = compare(rows, str(tmp_path / ".." / tmp_path.name / "train.jsonl"))
    assert same(found) == {"row": 6}
    (tmp_path / "link").symlink_to(tmp_path)
    other = [
        {**rows[0], "audio_filepath": str(tmp_path / "0.wav")},
        {**rows[1], "audio_filepath": str(tmp_path / "link" / "1.wav"), "text": "corrected"},
        {**rows[2], "audio_filepath": "./2.wav"},
        {**rows[3], "audio_filepath": "other/3.wav", "text": "another"},
    ]
    found = compare(rows, other)
    assert same(found) == {"audio": 3}
    clips, texts = found.said()
    assert clips[0].startswith("data.test: 3 of 4 clips are also in data.train (3 by their audio file): ")
    assert f"{tmp_path}/test.jsonl line 1 is {tmp_path}/train.jsonl line 1" in clips[0]
    assert texts == []


def test_parts_of_a_recording_are_the_same_where_they_share_most(compare: Any) -> None:
    def part(offset: float, duration: float | None) -> dict[str, Any]:
        return {"audio_filepath": "talk.wav", "text": f"at {offset}", "offset": offset, "duration": duration}

    train = [part(0.0, 10.0), part(20.0, 5.0)]
    found = compare(train, [part(9.5, 5.0), part(12.0, 6.0), part(21.0, 4.0), part(2.0, 1.0)])
    assert sorted(found.clips) == [2, 3]
    whole = [{"audio_filepath": "talk.wav", "text": "all of it"}]
    assert same(compare(train, whole)) == {"audio": 1}


def test_the_same_id_with_the_same_text_and_length(compare: Any) -> None:
    rows = [
        {"audio_filepath": f"a/{i}.wav", "id": f"clip-{i}", "text": f"text {i}", "duration": 1.0 + i} for i in range(5)
    ]
    other = [{**row, "audio_filepath": f"b/{i}.wav"} for i, row in enumerate(rows)]
    other[1] = {**other[1], "text": "another"}
    other[2] = {**other[2], "duration": 9.0}  # a number that both sets give to other clips
    other[3] = {"audio_filepath": "b/3.wav", "id": "clip-3", "text": "Text 3"}
    other[4] = {"audio_filepath": "b/4.wav", "id": "clip-4", "text": "another"}
    found = compare(rows, other)
    assert sorted(found.clips) == [0, 3]
    assert same(found) == {"id": 2}
    assert same(compare(rows * 2, other)) == {"id": 2}, "rows that come twice"


def test_an_id_that_several_clips_have_says_nothing(compare: Any) -> None:
    """The id is that of a speaker: each says "yes" in both sets, and something else in one of them."""

    def row(name: str, i: int, text: str) -> dict[str, Any]:
        return {"audio_filepath": f"{name}{i}.wav", "id": f"speaker-{i}", "text": text}

    yes, no = ([row(f"{answer}-", i, answer) for i in range(20)] for answer in ("yes", "no"))
    for train, test in ((yes, [*yes, *no]), ([*yes, *no], yes), ([*no, *yes], yes)):
        test = [{**own, "audio_filepath": f"test/{own['audio_filepath']}"} for own in test]
        found = compare(train, test)
        assert (found.clips, found.said()[0], found.same_rows <= 20) == ({}, [], True)
        assert found.by_set()[0]["same_texts"] == 20


def test_many_rows_of_a_recording_or_call_are_not_all_walked(compare: Any, monkeypatch: Any) -> None:
    def rows(count: int, first: float) -> list[dict[str, Any]]:
        file = {"audio_filepath": "call.wav", "id": "call", "duration": 1.0}
        return [{**file, "text": f"{first} {i}", "offset": first + 4.0 * i} for i in range(count)]

    compared, shares_most = [], overlap._shares_most
    monkeypatch.setattr(overlap, "_shares_most", lambda *parts: compared.append(parts) or shares_most(*parts))
    found = compare([*rows(400, 2.0), *rows(2, 0.2)], rows(400, 0.0)[::-1])
    assert sorted(found.held.rows[i].start for i in found.clips) == [0.0, 4.0]
    assert len(compared) < 2000
    assert max(map(len, found.held.by_key.values())) == 400
    assert min(map(len, found.held.by_key.values())) == 1


def test_texts_are_a_warning_with_their_share_of_the_words(compare: Any) -> None:
    train = [{"audio_filepath": f"{i}.wav", "text": text} for i, text in enumerate(["Good morning!", "Yes.", "No."])]
    test = ["good morning", "Good, morning", "see you later then", "yes"]
    found = compare(train, [{"audio_filepath": f"t{i}.wav", "text": text} for i, text in enumerate(test)])
    (one,) = found.by_set()
    assert (one["same_clips"], one["same_texts"]) == (0, 3)
    assert one["words_in_same_texts"] == pytest.approx(5 / 9)
    clips, texts = found.said()
    assert clips == []
    assert texts[0].startswith(
        "data.test: 3 of 4 clips share their text with data.train (55.6 % of the words): 'good morning' ("
    )


def test_only_what_is_trained_and_evaluated_counts(compare: Any, tmp_path: Path) -> None:
    rows = [{**ROW, "audio_filepath": f"{i}.wav", "text": f"text {i}"} for i in range(20)]
    assert same(compare(rows, rows[4:8])) == {"audio": 4}
    assert same(compare(rows, rows[4:8], max_eval_samples=3)) == {"audio": 3}
    assert same(compare(rows, rows[4:8], max_samples=6, shuffle=False)) == {"audio": 2}
    left_out = [{"source": f"{tmp_path}/train.jsonl line {n}", "reason": "also in data.test"} for n in (5, 6)]
    file = write_manifest(tmp_path / "problems.jsonl", left_out)
    found = compare(rows, rows[4:8], leave_out=str(file))
    assert (same(found), found.texts.keys()) == ({"audio": 2}, {2, 3})


def test_rows_that_nothing_can_be_made_of(compare: Any) -> None:
    odd: list[Any] = [
        "no json",
        {"audio_filepath": "a\0/b.wav", "text": "x", "id": "n"},
        {"audio_filepath": 5, "text": None, "id": {"a": [1]}},
        {"audio_filepath": "\ud800/a.wav", "text": "\ud800", "offset": 10**400},
        {"audio_filepath": "c.wav", "text": "y", "offset": "1 s", "duration": True},
    ]
    lines = [row if isinstance(row, str) else json.dumps(row) for row in odd]
    found = compare(lines, lines[1:])
    assert len(found.clips) >= 3
    assert found.said()[0]


def test_parquet_without_its_audio_and_what_was_compared(compare: Any, corpus: Path, monkeypatch: Any) -> None:
    shards = str(corpus / "shards")
    found = compare(str(corpus / "manifest.jsonl"), {"path": shards, "split": "validation"})
    assert (found.looked, found.whole, found.by_set()[0]["same_clips"]) == (47, True, 0)
    found = compare(str(corpus / "manifest.jsonl"), {"path": shards, "split": "train"})
    assert same(found) == {"id": 47}
    assert found.scope() == "47 rows of data.train compared with 47 of test by row, file, id and text"
    assert not compare(str(corpus / "manifest.jsonl"), str(corpus / "spoiled.jsonl"), seconds=0.0).whole
    monkeypatch.setattr(overlap, "HELD_ROWS", 30)
    found = compare(str(corpus / "manifest.jsonl"), {"path": shards, "split": "train"})
    assert (same(found), found.whole) == ({"id": 30}, False)
    assert found.scope() == "47 of 47 rows of data.train compared with 30 of test (a part) by row, file, id and text"


def test_the_same_audio_under_other_names(compare: Any, corpus: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Files are read where another has as many bytes; an id that others have as well hides nothing."""
    contents = [b"a" * 1000, b"b" * 1000, b"c" * 2000, b"d" * 3000]
    for i, content in enumerate(contents):
        (tmp_path / f"{i}.wav").write_bytes(content)
    os.mkfifo(tmp_path / "pipe.wav")
    train = [{"audio_filepath": name, "text": name, "id": "n"} for name in ("0.wav", "2.wav", "3.wav", "pipe.wav")]
    (tmp_path / "copy.wav").write_bytes(contents[0])
    test = [{"audio_filepath": name, "text": f"as {name}", "id": "n"} for name in ("1.wav", "copy.wav", "2.wav")]
    read, digest_of_file = [], overlap._digest_of_file
    monkeypatch.setattr(overlap, "_digest_of_file", lambda file: read.append(Path(file).name) or digest_of_file(file))
    found = compare(train, test)
    assert (sorted(found.clips), same(found), found.whole) == ([1, 2], {"bytes": 1, "audio": 1}, True)
    assert sorted(read) == ["0.wav", "1.wav", "copy.wav"]
    assert (
        found.scope()
        == "4 rows of data.train compared with 3 of test by row, file, id and text, the audio of 3 with that of 3"
    )
    found = compare(train[:1], test)
    assert found.scope() == "1 rows of data.train compared with 3 of test by row, file, id, text and audio"

    rows = pq.read_table(next((corpus / "shards" / "data").glob("train-00000*"))).to_pylist()
    (tmp_path / "copy.flac").write_bytes(rows[3]["audio"]["bytes"])
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for i, row in enumerate(rows):
            for name, data in ((f"{i}.flac", row["audio"]["bytes"]), (f"{i}.txt", b"some text")):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    found = compare(str(tmp_path / "a.tar"), [{"audio_filepath": "copy.flac", "text": "another"}])
    assert (same(found), found.scope().endswith("by row, file, id, text and audio")) == ({"bytes": 1}, True)


def test_what_cannot_be_read_was_not_compared(compare: Any, corpus: Path, tmp_path: Path) -> None:
    shutil.copytree(corpus / "shards" / "data", tmp_path / "shards")
    file = sorted((tmp_path / "shards").glob("train-*"))[3]
    train, test = {"path": str(tmp_path / "shards"), "split": "train"}, str(corpus / "manifest.jsonl")

    def damaged(train: Any, test: Any) -> Overlap:
        content, opened = file.read_bytes(), overlap.group_sources
        with pytest.MonkeyPatch.context() as patch:  # once it is open
            patch.setattr(overlap, "group_sources", lambda *a: file.write_bytes(b"PAR1" * 50) and opened(*a))
            found = compare(train, test)
        file.write_bytes(content)
        return found

    found = damaged(train, test)
    assert (found.looked, found.whole) == (32, False)
    compared = f"32 of 47 (68.1%) rows of data.train ({file} cannot be read) compared with 47 of test by row, "
    assert found.scope().startswith(compared)
    found = damaged(test, train)
    assert (found.whole, found.held.cut) == (False, ["test"])


# ---- in a run, a dry run and a check -------------------------------------------------------------------------------


@pytest.fixture
def copied(clips: Path, tmp_path: Path) -> SimpleNamespace:
    """train.jsonl of 20 clips; test.jsonl of the other four, and of two of the 20 as copies under other names."""
    rows = [{k: v for k, v in row.items() if k != "id"} for row in read_lines(clips / "manifest.jsonl")]
    rows = [{**row, "audio_filepath": str(clips / row["audio_filepath"])} for row in rows]
    train, test = rows[:20], rows[20:]
    for i in range(2):
        shutil.copy(train[i]["audio_filepath"], tmp_path / f"copy{i}.flac")
        test.append({**train[i], "audio_filepath": f"copy{i}.flac", "text": train[i]["text"].upper()})
    return SimpleNamespace(
        train=write_manifest(tmp_path / "train.jsonl", train),
        test=write_manifest(tmp_path / "test.jsonl", test),
    )


def test_a_run_refuses_clips_that_it_is_judged_on(refused: Any, tiny_run: Any, clips: Path) -> None:
    manifest = clips / "manifest.jsonl"
    said = refused(*tiny_run("data.allow_overlap=false", "data.test=null"))
    assert "data.validation: 24 of 24 clips are also in data.train (24 by their row)" in said
    assert f"Split the data again (parakeet-finetune split --data {manifest} --output DIR): all of data.train" in said
    assert "data.allow_overlap=true trains anyway" in said
    assert "leave_out" not in said, "which would leave nothing"


def test_a_run_refuses_copies_and_warns_of_texts(
    run_train: Any, tiny_run: Any, copied: Any, capsys: Any, monkeypatch: Any
) -> None:
    def build(*_: Any) -> None:
        raise UserError("so far")

    monkeypatch.setattr("finetune.training.run.build_model", build)
    data = {"train": str(copied.train), "validation": str(copied.test), "test": None, "allow_overlap": False}
    assert run_train(*tiny_run(data=data)) == 2
    said = capsys.readouterr().err
    assert "data.validation: 2 of 6 clips are also in data.train (2 by the bytes of their audio): " in said
    for copy in copied.test.parent.glob("copy*.flac"):
        copy.write_bytes(copy.read_bytes() + b"\0")
    assert run_train(*tiny_run(data=data)) == 2
    said = capsys.readouterr().err
    assert " warning: data.validation: 2 of 6 clips share their text with data.train (42.9 % of the words): " in said
    assert "error: so far" in said


def test_a_dry_run_is_a_no_go(run_train: Any, tiny_run: Any, capsys: Any, monkeypatch: Any) -> None:
    def build(*_: Any) -> None:
        raise RuntimeError("stands for a model that cannot be loaded")

    monkeypatch.setattr("finetune.training.run.build_model", build)
    assert run_train(*tiny_run("data.allow_overlap=false"), "--dry-run") == 1
    said = capsys.readouterr().err
    assert "NO-GO   overlap" in said
    assert "data.test: 24 of 24 clips are also in data.train (24 by their row)" in said
    assert "\\n" not in said, "several sets, one line"
    assert "NO-GO after" in said


def test_a_dry_run_reads_audio_for_30_seconds_at_most(
    run_train: Any, tiny_run: Any, corpus: Path, clips: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    bounds = []

    def compare(sources: Any, config: Any, seconds: float) -> None:
        bounds.append(seconds)
        raise UserError("so far")

    def build(*_: Any) -> None:
        raise UserError("so far")

    monkeypatch.setattr("finetune.tools.preflight.dry_run.find_overlap", compare)
    monkeypatch.setattr("finetune.training.run.build_model", build)
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.add(clips / "manifest.jsonl")
    tarred = {"path": str(clips / "manifest.jsonl"), "tarred_audio": str(tmp_path / "a.tar")}
    for train in (str(clips / "manifest.jsonl"), str(corpus / "shards"), tarred):
        assert run_train(*tiny_run(data={"train": train}), "--dry-run") == 1
    assert bounds == [300.0, 300.0, 30.0]


@pytest.mark.slow
def test_a_check_compares_the_audio_and_lists_what_to_leave_out(
    tiny_run: Any, copied: Any, refused: Any, tmp_path: Path, capsys: Any
) -> None:
    data = {"train": str(copied.train), "validation": None, "test": str(copied.test), "allow_overlap": False}
    run, out = tiny_run(data=data), tmp_path / "check"
    assert check([*run, "--output-dir", str(out), "--workers", "1"]) == 1
    said = capsys.readouterr().out
    assert "data.test: 2 of 6 clips are also in data.train (2 by the bytes of their audio)" in said
    assert "the bytes of their audio" in (out / "report.html").read_text()
    problems = {row["source"]: row["reason"] for row in read_lines(out / "problems.jsonl")}
    assert problems == {f"{copied.train} line {n}": "also in data.test" for n in (1, 2)}
    advice = f"data.leave_out={out / 'problems.jsonl'}"
    assert f"or add {advice} to train without these clips." in said
    config, _ = load_config(Path(run[1]), [], [advice])
    found = find_overlap(open_sources(config), config, 60.0)
    assert (found.clips, found.texts) == ({}, {})
    for _ in range(2):  # the list that it reads is the one that it writes
        assert check([*run, "--output-dir", str(out), "--workers", "1", "--overwrite", advice]) == 0
        assert "2  listed in data.leave_out" in capsys.readouterr().out
        assert [row["source"] for row in read_lines(out / "problems.jsonl")] == list(problems)
    rows = read_lines(copied.test)
    known = [{**row, "text": rows[-1]["text"]} for row in rows[:4]]
    data["test"] = str(write_manifest(tmp_path / "known.jsonl", known))
    assert check([*tiny_run(data=data), "--output-dir", str(out), "--workers", "1", "--overwrite"]) == 0
    assert capsys.readouterr().out.startswith("warning: data.test: 4 of 4 clips share their text with data.train (100")
    data["train"] = data["test"] = str(copied.test)
    assert check([*tiny_run(data=data), "--output-dir", str(out), "--workers", "1", "--overwrite"]) == 1
    said = capsys.readouterr().out
    assert f"--data {copied.test} --output DIR): all of data.train is evaluated as well" in said
    assert "leave_out" not in said


def test_what_split_writes_has_nothing_in_common(compare: Any, tmp_path: Path) -> None:
    rows = [{**ROW, "audio_filepath": f"{i}.wav", "text": f"Text {i % 300}."} for i in range(900)]
    data = write_manifest(tmp_path / "all.jsonl", rows)
    assert split(["--data", str(data), "--output", str(tmp_path / "out")]) == 0
    found = compare(str(tmp_path / "out" / "train.jsonl"), str(tmp_path / "out" / "test.jsonl"))
    assert (len(found.held.rows) > 9, found.clips, found.texts) == (True, {}, {})
    assert os.path.samefile(found.held.rows[0].place.split(" line")[0], tmp_path / "out" / "test.jsonl")
