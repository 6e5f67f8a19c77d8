"""`parakeet-finetune split`: data split by hashes into manifests that name the audio where it lies."""

import json
import random
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import read_lines, write_manifest
from stream_cases import ids, make_stream, read_epoch

from finetune.config.load import load_config
from finetune.data.leave_out import LeaveOut
from finetune.data.run_file import open_sources
from finetune.errors import UserError
from finetune.split import main

PARTS = ("train", "validation", "test")


def rows_of(count: int, **values: Any) -> list[dict[str, Any]]:
    """Rows of two seconds; each text comes twice, with other capitals and punctuation."""
    rows = [{"audio_filepath": f"audio/{i}.wav", "text": f"sentence {i // 2}", "duration": 2.0} for i in range(count)]
    for i, row in enumerate(rows):
        row["text"] = f"Sentence, {i // 2}!" if i % 2 else row["text"]
        row.update({name: value(i) if callable(value) else value for name, value in values.items()})
    return rows


@pytest.fixture
def divide(tmp_path: Path, capsys: Any) -> Any:
    """Calls the command, which has to end with this exit code; returns the parts by audio file, and what it said."""

    def run(code: int, rows: list[Any], *arguments: str, folder: str = "out") -> tuple[dict[str, list[Any]], str]:
        data = write_manifest(tmp_path / "all.jsonl", rows)
        assert main(["--data", str(data), "--output", str(tmp_path / folder), *arguments]) == code
        said = capsys.readouterr()
        there = {part: tmp_path / folder / f"{part}.jsonl" for part in PARTS}
        return {part: read_lines(file) for part, file in there.items() if file.exists()}, said.out + said.err

    return run


def names(rows: list[dict[str, Any]]) -> set[str]:
    return {Path(row["audio_filepath"]).name for row in rows}


def test_equal_texts_stay_together_and_more_data_move_nothing(divide: Any, tmp_path: Path) -> None:
    rows = rows_of(2000, lang="it")
    parts, said = divide(0, rows, "--json", str(tmp_path / "split.json"))
    assert sum(map(len, parts.values())) == 2000
    assert [len(parts[part]) for part in PARTS[1:]] == pytest.approx([100, 100], abs=40)
    texts = {part: {row["text"].lower().replace(",", "").strip("!") for row in own} for part, own in parts.items()}
    assert not texts["train"] & texts["test"]
    assert not texts["train"] & texts["validation"]
    assert not texts["validation"] & texts["test"]
    assert parts["test"][0]["audio_filepath"].startswith(f"{tmp_path}/audio/")
    assert parts["test"][0]["lang"] == "it"

    found = json.loads((tmp_path / "split.json").read_text())["parts"]["test"]
    assert found["hours"] == pytest.approx(len(parts["test"]) * 2 / 3600)
    assert f"test        {len(parts['test']):>9}  {found['hours']:8.2f}  {100 * found['share']:.1f} %" in said
    assert said.startswith("split by normalised text (1,000 texts); no column names speakers or sessions\n")
    block = yaml.safe_load(said[said.index("data:") : said.index("\nnext:")])
    assert block == {"data": {part: f"{tmp_path}/out/{part}.jsonl" for part in PARTS}}
    assert f"next: parakeet-finetune check --data {tmp_path}/out/train.jsonl" in said

    more = [*({**row, "text": f"more {i}"} for i, row in enumerate(rows_of(300))), *rows]
    random.Random(0).shuffle(more)
    again, _ = divide(0, more, folder="again")
    for part in PARTS:
        old = [row for row in again[part] if not row["text"].startswith("more")]
        assert sorted(row["text"] for row in old) == sorted(row["text"] for row in parts[part]), part


def test_an_earlier_result_is_not_written_over(divide: Any, tmp_path: Path) -> None:
    first, _ = divide(0, rows_of(400))
    _, said = divide(2, rows_of(40))
    assert "train.jsonl" in said
    assert "--overwrite" in said
    second, said = divide(0, rows_of(400), "--test", "0%", "--validation", "5%", "--overwrite")
    moved = names(second["train"]) & (names(first["test"]) | names(first["validation"]))
    assert f"warning: {len(moved)} clips of the earlier validation and test are now in train" in said
    assert len(moved) > 5
    assert "test" not in second
    data = tmp_path / "out" / "train.jsonl"
    assert main(["--data", str(data), "--output", str(tmp_path / "out"), "--overwrite"]) == 2
    assert read_lines(data) == second["train"]


def test_by_speaker_where_a_column_names_them(divide: Any) -> None:
    rows = rows_of(2000, speaker_id=lambda i: i % 200)
    parts, said = divide(0, rows)
    speakers = {part: {row["speaker_id"] for row in own} for part, own in parts.items()}
    assert not speakers["train"] & (speakers["test"] | speakers["validation"])
    assert said.startswith("split by speaker_id (200 values)\n")
    assert "have a text that others speak in train: --by text" in said
    by_text, said = divide(0, rows, "--by", "text", folder="texts")
    assert by_text != parts
    assert "others speak" not in said
    few, said = divide(0, rows_of(2000, speaker_id=lambda i: i % 3), folder="few")
    assert few["test"]
    assert (
        "speaker_id names only 3, too few to split by; splitting by text instead. --by speaker_id forces it." in said
    )
    _, said = divide(2, rows_of(20), "--by", "singer", folder="no")
    assert "no row has a column 'singer'" in said


def test_a_small_set_that_grows_moves_no_clip(divide: Any) -> None:
    def rows(count: int) -> list[dict[str, Any]]:
        return [{"audio_filepath": f"{i}.wav", "text": f"words {i}", "duration": 1.0} for i in range(count)]

    nothing, said = divide(2, rows(40))
    assert nothing == {}, "before anything is written"
    assert "none of 40 texts falls into validation; take --validation 6.7% --test 5%." in said
    shares = ("--test", "5%", "--validation", "6.7%")
    parts, _ = divide(0, rows(40), *shares)
    more, _ = divide(0, rows(80), *shares, folder="more")
    assert sorted(map(len, parts.values()))[0] >= 1
    for part, own in parts.items():
        assert names(own) <= names(more[part]), part


def test_a_language_far_from_its_share_is_named_and_can_have_its_own(divide: Any) -> None:
    texts = [("it", f"parola {i}") for i in range(3000)] + [("fi", f"words {i}") for i in range(40)] + [("sv", "hej")]
    rows = [{"audio_filepath": f"{i}.wav", "text": t, "lang": c, "duration": 1.0} for i, (c, t) in enumerate(texts)]
    parts, said = divide(0, rows[:-1])
    for part in PARTS[1:]:
        assert sum(row["lang"] == "it" for row in parts[part]) == pytest.approx(150, abs=50)
    assert re.search(r"\nit: train 2,\d+ \(\d\d\.\d%\), validation 1\d+ \([3-6]\.\d%\), test ", said), said
    advice = "--validation 5%,fi=6.7% --test 5%"
    assert "warning: fi: none of 40 texts falls into validation.\n" in said
    assert f"warning: for shares nearer to what was asked, take {advice}.\n" in said
    again, said = divide(0, rows[:-1], *advice.split(), folder="again")
    assert "warning" not in said
    assert f"to split more data the same way: --by text {advice}\n" in said
    finnish = [row for row in again["validation"] if row["lang"] == "fi"]
    assert len(finnish) == 2, "5 % of 40"
    assert [row for row in again["validation"] if row["lang"] == "it"] == parts["validation"]
    one, said = divide(0, rows, *advice.split(), folder="one")
    assert "warning: sv: none of 1 texts falls into train and validation; too few.\n" in said
    assert [row for row in one["validation"] if row["lang"] != "sv"] == again["validation"]
    both = [*rows[:-1], {**finnish[0], "lang": "it"}]  # a text in two languages stays together
    parts, _ = divide(0, both, *advice.split(), folder="both")
    assert len(parts["validation"]) == len(again["validation"]) + 1
    _, said = divide(2, rows, "--test", "5%,it=10%,de=20%", folder="no")
    assert "--test: no row is in de; the languages are: fi, it, sv." in said
    _, said = divide(2, rows, "--test", "5%,fi=96%", folder="no")
    assert "something for each part" in said
    for wrong in ("5%,fi", "5%,fi=3", "5%,=3%", "5%,fi=100%"):
        with pytest.raises(SystemExit):
            main(["--data", "d.jsonl", "--output", "no", f"--test={wrong}"])


def test_a_part_far_from_its_share_is_named(divide: Any) -> None:
    rows = rows_of(600, speaker=lambda i: "anna" if i % 3 == 0 else f"s{i}")
    _, said = divide(0, rows, "--validation", "0%", "--test", "5%")
    assert re.search(r"warning: test gets 3[5-9](\.\d)? % of 600 clips in place of 5 %\.\n", said), said
    assert "warning: for shares nearer to what was asked, take --by text.\n" in said
    _, said = divide(0, rows, "--validation", "0%", "--test", "5%", "--by", "text", folder="text")
    assert "warning" not in said


def test_nothing_is_written_where_nothing_is_left_to_train_on(divide: Any, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    before = write_manifest(tmp_path / "out" / "train.jsonl", [{"text": "an earlier one"}]).read_text()
    for count, advice in (
        (3, "2 texts falls into train; too few"),
        (6, "3 texts falls into train; take smaller parts"),
    ):
        _, said = divide(2, rows_of(count), "--test", "49.9%", "--validation", "50%", "--overwrite")
        assert f"none of {advice}." in said
    _, said = divide(2, rows_of(30, speaker="a"), "--by", "speaker", "--overwrite")
    assert re.search("none of 1 speaker falls into validation and test; take --by text.", said)
    assert (tmp_path / "out" / "train.jsonl").read_text() == before


def test_what_is_printed_is_typed_as_it_stands(divide: Any) -> None:
    """Options for more data repeat the split, with several columns of speakers too; paths are quoted."""
    rows = [row | {("speaker", "session")[i % 2]: f"s{i % 100}"} for i, row in enumerate(rows_of(2000))]
    for count in (2000, 1990):  # an odd share of clips
        parts, said = divide(0, rows[:count], "--test", "77", folder=f"a folder {count}")
        assert (
            f"next: parakeet-finetune check --data '{Path(parts['train'][0]['audio_filepath']).parents[1]}/a folder"
            in said
        )
        again = shlex.split(re.search("to split more data the same way: (.*)", said)[1])
        more, _ = divide(0, rows[:count], *again, folder=f"more{count}")
        assert more == parts


def test_rows_without_words_stay_where_they_are(divide: Any) -> None:
    rows = rows_of(300, text=lambda i: "...")
    parts, _ = divide(0, rows)
    again, _ = divide(0, rows_of(100) + rows, folder="again")
    for part, own in parts.items():
        assert names(own) == names([row for row in again[part] if row["text"] == "..."])


def test_what_cannot_be_read_or_written_is_said(divide: Any, tmp_path: Path, capsys: Any) -> None:
    def said(*arguments: str) -> str:
        assert main(["--output", str(tmp_path / "out"), *arguments]) in (1, 2)
        return capsys.readouterr().err

    assert "--data: no mapping in YAML" in said("--data", "{path: a.jsonl")
    manifest = str(write_manifest(tmp_path / "m.jsonl", [{"audio_filepath": "a.wav", "text": "a"}]))
    (tmp_path / "a.tar").write_bytes(b"no archive" * 100)
    tarred = json.dumps({"path": manifest, "tarred_audio": str(tmp_path / "a.tar")})
    assert re.search(
        "--data: .*a.tar cannot be read from row 0 on: ReadError", said("--data", tarred, "--write-audio")
    )
    _, text = divide(1, rows_of(400), "--json", str(tmp_path / "none" / "split.json"))
    assert f"--json: {tmp_path}/none/split.json cannot be written" in text
    (tmp_path / "file").write_text("")
    _, text = divide(1, rows_of(400), folder="file/out")
    assert f"--output: {tmp_path}/file/out cannot be written" in text


def test_counts_and_hours(divide: Any) -> None:
    parts, said = divide(0, rows_of(4000), "--validation", "400", "--test", "0.4h")
    assert len(parts["validation"]) == pytest.approx(400, rel=0.25)
    assert len(parts["test"]) == pytest.approx(720, rel=0.25)
    assert "to split more data the same way: --by text --validation 10% --test 18%" in said
    _, said = divide(2, rows_of(40), "--test", "40", folder="no")
    assert "something for each part" in said
    for wrong in ("0.05", "120%", "many", "-1"):
        with pytest.raises(SystemExit):
            main(["--data", "d.jsonl", "--output", "no", f"--test={wrong}"])


def test_rows_without_a_text_are_named(divide: Any, tmp_path: Path) -> None:
    rows: list[Any] = rows_of(200)
    rows[3], rows[7] = "not json", {**rows[7], "text": None}
    parts, said = divide(0, rows, "--test", "10%")
    assert sum(map(len, parts.values())) == 198
    assert (
        f"2 rows are in no part: 1 the line is not valid JSON, 1 no text, such as {tmp_path}/all.jsonl line 4" in said
    )


def test_what_a_check_of_the_data_listed_is_in_no_part(divide: Any, tmp_path: Path, run_file: Any) -> None:
    rows = rows_of(400)
    places = [f"{tmp_path}/all.jsonl line {n}" for n in (1, 8, 9)]
    lists = [write_manifest(tmp_path / f"{p[-1]}.jsonl", [{"source": p, "reason": "silent clips"}]) for p in places]
    whole, _ = divide(0, rows)
    parts, said = divide(0, rows, "--leave-out", *map(str, lists), folder="rest")
    assert "warning: 3 rows are in no part: 3 listed in --leave-out, such as" in said
    assert f"--validation 5% --test 5% --leave-out {lists[0]} {lists[1]} {lists[2]}\n" in said
    assert set.union(*map(names, whole.values())) - set.union(*map(names, parts.values())) == {
        "0.wav",
        "7.wav",
        "8.wav",
    }
    for part, own in parts.items():
        assert names(own) <= names(whole[part])

    settings = {"data__train": f"{tmp_path}/rest/train.jsonl", "data__validation": None, "data__test": None}
    config, _ = load_config(run_file(**settings, data__leave_out=str(lists[0])), [], [])
    with pytest.raises(UserError, match=rf"split them again with --leave-out {lists[0]}; else check data.train"):
        open_sources(config)
    other = write_manifest(tmp_path / "other.jsonl", [{"source": "other.jsonl line 1", "reason": "bad"}])
    _, said = divide(2, rows, "--leave-out", str(lists[0]), str(other), folder="no")
    assert f"--leave-out: {other} names rows of other.jsonl, but --data reads {tmp_path}/all.jsonl" in said
    rest = [{"source": f"{tmp_path}/rest/train.jsonl line {n}", "reason": "x"} for n in (1, 2)]
    own = [str(write_manifest(tmp_path / f"own{n}.jsonl", [row])) for n, row in enumerate(rest)]
    config, _ = load_config(run_file(**settings, data__leave_out=own), [], [])
    left_out = LeaveOut(own, "data.leave_out")
    assert (config.data.leave_out, bool(open_sources(config))) == (own, True)
    assert [left_out.reason(row["source"]) for row in rest] == ["in_leave_out"] * 2, "of several lists"


def test_parts_of_other_sources_train_as_before(corpus: Path, tmp_path: Path, capsys: Any) -> None:
    """Audio inside of parquet files is written out on demand; the column of a mapping, and a relative path, hold."""
    shards, out = str(corpus / "shards"), tmp_path / "out"
    assert main(["--data", shards, "--output", str(out)]) == 2
    assert "--write-audio" in capsys.readouterr().err
    assert not out.exists()
    assert main(["--data", shards, "--output", str(out), "--test", "20%", "--write-audio"]) == 0
    read = {b: make_stream(str(out / f"{b}.jsonl"), shuffle=False, check_durations=True) for b in PARTS}
    batches = [batch for stream in read.values() for batch in read_epoch(stream)]
    assert [q for b in batches for q in b.quarantined] == []
    assert sorted(ids(batches)) == sorted(ids(read_epoch(make_stream(shards, shuffle=False))))
    rows = {row["id"]: row for part in PARTS for row in read_lines(out / f"{part}.jsonl")}
    assert {row["language"] for row in rows.values()} == {"en", "fr"}
    assert rows["clip01"]["text"] == "text 1"

    renamed = [{"audio_filepath": f"clip{i:02d}.flac", "said": f"text {i}"} for i in range(40)]
    source = {"path": str(write_manifest(corpus / "said.jsonl", renamed)), "text_column": "said", "language": "sv"}
    assert main(["--data", json.dumps(source), "--output", str(tmp_path / "second"), "--validation", "10%"]) == 0
    batches = read_epoch(make_stream([str(tmp_path / "second" / f"{part}.jsonl") for part in PARTS], shuffle=False))
    assert [q for b in batches for q in b.quarantined] == []
    assert sorted(text for b in batches for text in b.texts) == sorted(row["said"] for row in renamed)
    assert {language for b in batches for language in b.languages} == {"sv"}
    assert main(["--data", json.dumps({**source, "weight": 2}), "--output", str(tmp_path / "third")]) == 2
    assert "weight" in capsys.readouterr().err


def test_a_folder_of_audio_with_a_table_of_texts(corpus: Path, tmp_path: Path, capsys: Any) -> None:
    for i in range(40):
        (tmp_path / f"{i}.flac").write_bytes((corpus / f"clip{i:02d}.flac").read_bytes())
    table = "".join(f"{i}.flac,words {i},speaker {i % 20},0.01\n" for i in range(40))
    (tmp_path / "metadata.csv").write_text(f"file_name,transcription,client_id,duration\n{table}")
    assert main(["--data", str(tmp_path), "--output", str(tmp_path / "out"), "--test", "20%"]) == 0
    assert capsys.readouterr().out.startswith("split by client_id (20 values)\n")
    rows = [row for part in PARTS for row in read_lines(tmp_path / "out" / f"{part}.jsonl")]
    assert not any("duration" in row for row in rows), "which cuts the audio that a manifest names"
    assert sorted((row["audio_filepath"], row["text"], row["client_id"]) for row in rows) == sorted(
        (str(tmp_path / f"{i}.flac"), f"words {i}", f"speaker {i % 20}") for i in range(40)
    )


@pytest.mark.slow
def test_as_a_module_of_the_data(tmp_path: Path) -> None:
    data = write_manifest(tmp_path / "all.jsonl", rows_of(400))
    command = [sys.executable, "-m", "finetune.data.split", "--data", str(data), "--output", str(tmp_path / "out")]
    done = subprocess.run([*command, "--validation", "5%", "--test", "5%"], capture_output=True, text=True, check=True)
    assert "data:\n  train:" in done.stdout
