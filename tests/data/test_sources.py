"""What data.train and its siblings may name, and the rows and columns that are found there."""

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import soundfile
import torch
from conftest import write_manifest
from stream_cases import HELD_OUT, RATE, ROWS, all_ids, encode, ids, make_stream, read_epoch, write_parquet

from finetune.data.decode import as_float
from finetune.data.shards import manifest_shards
from finetune.data.sources import open_source, parse_sources
from finetune.errors import UserError

# ---- sources -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        "shards",
        "shards/data/train-*.parquet",
        "manifest.jsonl",
        ["shards/data/train-0000[0-2]-*.parquet", {"path": "shards/data/train-0000[34]-*.parquet"}],
        ["shards/data/train-00000-of-00005.parquet", "shards/data/train-0000[1-4]-*.parquet"],
    ],
    ids=["folder", "glob", "manifest", "list", "file and glob"],
)
def test_every_form_of_source_gives_the_same_clips(corpus: Path, monkeypatch: pytest.MonkeyPatch, value: Any) -> None:
    monkeypatch.chdir(corpus)
    sources = [open_source(source, "data.train") for source in parse_sources(value, "data.train", "train")]
    assert sum(source.clips for source in sources) == ROWS
    batches = read_epoch(make_stream(value, shuffle=False))
    assert ids(batches) == all_ids()
    assert [t for b in batches for t in b.texts] == [f"text {i}" for i in range(ROWS)]
    assert [name for b in batches for name in b.languages] == ["en" if i % 3 else "fr" for i in range(ROWS)]
    for batch in batches:
        for i, clip_id in enumerate(batch.ids):
            samples_S, _ = soundfile.read(corpus / f"{clip_id}.flac", dtype="float32")
            length = int(batch.audio_lengths_B[i])
            assert length == len(samples_S)
            assert np.array_equal(as_float(batch.audio_BS)[i, :length].numpy(), samples_S)
            assert not batch.audio_BS[i, length:].any()
            assert batch.tokens_BU[i, : batch.token_lengths_B[i]].tolist() == encode(batch.texts[i])


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_of_16_bit_stay_so_where_a_whole_batch_has_them(tmp_path: Path, workers: int) -> None:
    samples_S = np.array([-32768, -1, 0, 1, 32767] * 200, dtype=np.int16)
    for name, subtype in (("a", "PCM_16"), ("b", "PCM_16"), ("c", "FLOAT"), ("d", "PCM_16")):
        written_S = samples_S if subtype == "PCM_16" else samples_S.astype(np.float32) / 32768
        soundfile.write(tmp_path / f"{name}.wav", written_S, RATE, subtype=subtype)
    rows = [{"audio_filepath": f"{name}.wav", "text": name, "id": name} for name in "abcd"]
    manifest = write_manifest(tmp_path / "m.jsonl", rows)
    stream = make_stream(str(manifest), shuffle=False, batch_size=2, workers=workers)
    first, second = (b for b in stream.batches() if b.ids)
    assert (first.audio_BS.dtype, second.audio_BS.dtype) == (torch.int16, torch.float32)
    assert torch.equal(as_float(first.audio_BS), as_float(second.audio_BS))
    assert np.array_equal(first.audio_BS[1].numpy(), samples_S)
    assert first.token_lengths_B.tolist() == [1, 1]


def test_splits_of_a_folder(corpus: Path) -> None:
    (source,) = parse_sources(str(corpus / "shards"), "data.validation", "validation")
    opened = open_source(source, "data.validation")
    assert (opened.clips, len(opened.shards)) == (HELD_OUT, 2)  # row groups of five
    named = make_stream({"path": str(corpus / "shards"), "split": "validation"}, shuffle=False)
    assert ids(read_epoch(named)) == [f"clip{i}" for i in range(ROWS, ROWS + HELD_OUT)]
    with pytest.raises(UserError, match=r"data.test: .*shards \(split test\) cannot be opened.*test"):
        open_source(parse_sources(str(corpus / "shards"), "data.test", "test")[0], "data.test")


def test_columns_by_name(corpus: Path, tmp_path: Path) -> None:
    rows = [pq.read_table(corpus / "shards/data/train-00001-of-00005.parquet").to_pylist()[0]]
    write_parquet(tmp_path / "odd.parquet", rows, ("name", "recording", "words", "tongue", "seconds"))
    path = str(tmp_path / "odd.parquet")
    with pytest.raises(UserError, match=r"data.train: .*odd.parquet has no column of audio.*audio_column"):
        make_stream(path)
    with pytest.raises(UserError, match=r"no column of text; it has .*'words'.*text_column"):
        make_stream({"path": path, "audio_column": "recording"})
    with pytest.raises(UserError, match=r"no column 'word'; it has .*'words'"):
        make_stream({"path": path, "audio_column": "recording", "text_column": "word"})
    columns = {"audio_column": "recording", "text_column": "words", "id_column": "name"}
    (batch,) = (b for b in read_epoch(make_stream({"path": path, **columns, "language": "de"})) if b.ids)
    assert (batch.ids, batch.texts, batch.languages) == (["clip09"], ["text 9"], ["de"])
    (batch,) = (b for b in read_epoch(make_stream({"path": path, **columns, "language_column": "tongue"})) if b.ids)
    assert batch.languages == ["fr"]


def test_audio_folder_with_metadata(corpus: Path, tmp_path: Path) -> None:
    for i in range(3):
        (tmp_path / "train").mkdir(exist_ok=True)
        (tmp_path / "train" / f"{i}.flac").write_bytes((corpus / f"clip{i:02d}.flac").read_bytes())
    (tmp_path / "train" / "metadata.csv").write_text(
        "file_name,transcription\n" + "".join(f"{i}.flac,words {i}\n" for i in range(3))
    )
    sources = parse_sources(str(tmp_path), "data.train", "train")
    assert open_source(sources[0], "data.train").clips == 3
    batches = read_epoch(make_stream(str(tmp_path), shuffle=False))
    assert sorted(t for b in batches for t in b.texts) == ["words 0", "words 1", "words 2"]
    lengths = {t: int(n) for b in batches if b.ids for t, n in zip(b.texts, b.audio_lengths_B, strict=True)}
    assert lengths == {f"words {i}": soundfile.info(corpus / f"clip{i:02d}.flac").frames for i in range(3)}
    (tmp_path / "train" / "metadata.csv").write_text(
        'file_name,transcription\n0.flac,"two\n\nlines, of text"\n\n1.flac,"a ""b"""\n'
    )
    assert open_source(sources[0], "data.train").clips == 2
    batches = read_epoch(make_stream(str(tmp_path), shuffle=False))
    assert [q for b in batches for q in b.quarantined] == []
    assert sorted(t for b in batches for t in b.texts) == ['a "b"', "two lines, of text"]
    (tmp_path / "train" / "metadata.csv").unlink()
    (tmp_path / "train" / "metadata.jsonl").write_text('{"file_name": "2.flac", "transcription": "c"}')
    assert open_source(sources[0], "data.train").clips == 1


def test_tar_shards(corpus: Path, tmp_path: Path) -> None:
    for shard in range(2):
        with tarfile.open(tmp_path / f"train-{shard}.tar", "w") as tar:
            for i in range(2 * shard, 2 * shard + 2):
                for name, data in (
                    (f"clip{i:02d}.flac", (corpus / f"clip{i:02d}.flac").read_bytes()),
                    (f"clip{i:02d}.json", json.dumps({"text": f"text {i}", "duration": 0.1}).encode()),
                    (f"clip{i:02d}.txt", f"text {i}".encode()),
                ):
                    member = tarfile.TarInfo(name)
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    value = str(tmp_path / "train-*.tar")
    stream = make_stream(value, shuffle=False)
    assert len(stream.sources.groups[0]) == 2
    batches = read_epoch(stream)
    assert [q["reason"] for b in batches for q in b.quarantined] == []
    assert ids(batches) == ["clip00", "clip01", "clip02", "clip03"]
    assert [t for b in batches for t in b.texts] == [f"text {i}" for i in range(4)]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"split": "train"}, ("`path`",)),
        ({"path": "a", "splitt": "train"}, ("splitt", "known are", "weight")),
        ([{"path": "a", "weight": 1}, "b"], ("every source", "weight")),
        ([{"path": "a", "weight": 0}], ("above 0",)),
        ([{"path": "a", "weight": "much"}], ("weight: expected float", "'much'")),
        ({"path": 3}, ("`path`", "3")),
        (3, ("a source is a path", "3")),
        (
            {"path": "it.jsonl", "split": "train[:80%]"},
            ("a split as a whole", "parakeet-finetune split --data it.jsonl"),
        ),
        ({"path": "it.jsonl", "split": "train"}, ("no effect on it.jsonl", "parakeet-finetune split --data it.jsonl")),
        ({"path": "shards/*.parquet", "split": "test"}, ("no effect", "Leave it out")),
        ({"path": "s3://bucket/a.parquet", "split": "test"}, ("no effect", "Leave it out")),
    ],
)
def test_sources_that_are_refused(value: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as caught:
        parse_sources(value, "data.guard", "train")
    assert str(caught.value).startswith("data.guard")
    assert all(word in str(caught.value) for word in words), caught.value


def test_manifest_rows_cut_out_of_a_recording(tmp_path: Path) -> None:
    ramp_S = np.linspace(-0.5, 0.5, 3 * RATE, dtype=np.float32)
    soundfile.write(tmp_path / "talk.wav", ramp_S, RATE, subtype="FLOAT")
    row = {"audio_filepath": "talk.wav", "text": "x"}
    parts = {
        "middle": ({"offset": 0.5, "duration": 1.25}, slice(RATE // 2, RATE * 7 // 4)),
        "start": ({"offset": 0, "duration": 1}, slice(0, RATE)),
        "rest": ({"offset": 2.0}, slice(2 * RATE, None)),
        "over": ({"offset": 2.5, "duration": 0.9}, slice(RATE * 5 // 2, None)),
        "no offset": ({"duration": 1.0}, slice(0, RATE)),
        "odd": ({"offset": None, "duration": float("nan")}, slice(None)),
    }
    rows = [{**row, **values, "id": name} for name, (values, _) in parts.items()]
    rows += [{**row, "offset": 3.5, "id": "behind"}, {**row, "offset": "1 s", "id": "words"}]
    batches = read_epoch(make_stream(str(write_manifest(tmp_path / "m.jsonl", rows)), batch_size=1))
    read = {b.ids[0]: as_float(b.audio_BS)[0].numpy() for b in batches if b.ids}
    assert set(read) == set(parts)
    for name, (_, part) in parts.items():
        assert np.array_equal(read[name], ramp_S[part]), name
    reasons = {q["id"]: q["reason"] for b in batches for q in b.quarantined}
    assert reasons == {
        "behind": "offset 3.5 s lies behind the end of the audio (3.0 s)",
        "words": "offset is a number of seconds, found '1 s'",
    }


@pytest.mark.parametrize("end", ["\n", "", "\n\n"])
@pytest.mark.parametrize("line_break", ["\n", "\r\n"])
def test_manifest_in_parts_of_any_size(tmp_path: Path, end: str, line_break: str) -> None:
    rows = [{"text": "é" * i, "n": i} for i in range(9)]
    path = tmp_path / "m.jsonl"
    path.write_bytes((line_break.join(json.dumps(row) for row in rows) + end).encode())
    for size in (1, 7, 20, 64, 10_000):
        shards, clips = manifest_shards(str(path), size)
        assert clips == len(rows)
        read = [(shard.first + n, row) for shard in shards for n, row in shard.read(0)]
        assert [row for _, row in read] == rows
        assert [n for n, _ in read] == list(range(1, len(rows) + 1))
        assert sum(shard.rows for shard in shards) == len(rows) + (end == "\n\n")
        for shard in shards:
            whole = list(shard.read(0))
            assert all(
                list(shard.read(first)) == [x for x in whole if x[0] >= first] for first in range(shard.rows + 1)
            )
    assert len(manifest_shards(str(path), 1)[0]) >= 9
    assert len(manifest_shards(str(path), 10_000)[0]) == 1
