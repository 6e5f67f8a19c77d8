"""Data as bad as it comes: each ends in quarantine or in a clear refusal, nothing hangs, nothing is lost unsaid."""

import json
import os
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import soundfile
from conftest import read_lines, write_manifest
from stream_cases import RATE, all_ids, ids, make_stream, read_epoch

from finetune.check import main as check
from finetune.data import reader, retry
from finetune.data.decode import as_float
from finetune.data.reader import fetch, rows_from
from finetune.data.retry import UnreadableShard
from finetune.data.shards import Shard
from finetune.data.sources import split_to_read
from finetune.errors import UserError
from finetune.training.outputs import LineFile


def tone(seconds: float, rate: int = RATE) -> np.ndarray:
    return (0.3 * np.sin(2 * np.pi * 300 * np.arange(int(seconds * rate)) / rate)).astype(np.float32)


def truncated(path: Path, **options: Any) -> None:
    soundfile.write(path, tone(4.0), RATE, **options)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 3])


BAD_AUDIO: dict[str, tuple[Any, str]] = {
    "truncated.wav": (truncated, "the row says 4.00 s, the audio has"),
    "truncated.flac": (truncated, "flac decoder lost sync"),
    "truncated.ogg": (lambda path: truncated(path, subtype="OPUS"), "the row says 4.00 s, the audio has 0.97 s"),
    "zero.wav": (lambda path: path.write_bytes(b""), "the audio is empty (0 bytes)"),
    "text.wav": (lambda path: path.write_text("this is a text file\n" * 200), "the audio cannot be decoded"),
    "nan.wav": (lambda path: soundfile.write(path, np.full(4 * RATE, np.nan), RATE, subtype="FLOAT"), "not finite"),
    "missing.wav": (lambda path: None, "there is no file"),
    "hours.flac": (
        lambda path: soundfile.write(path, np.zeros(400 * RATE, dtype=np.int16), RATE),
        "the row says 4.00 s, the audio has 400.00 s",
    ),
    "short.wav": (lambda path: soundfile.write(path, tone(0.5), RATE), "the row says 4.00 s, the audio has 0.50 s"),
}


def test_bad_audio_among_good(corpus: Path, tmp_path: Path) -> None:
    rows = []
    for name, (make, _) in BAD_AUDIO.items():
        make(tmp_path / name)
        rows.append({"audio_filepath": name, "text": "words", "duration": 4.0, "id": name})
    good = [{**r, "audio_filepath": str(corpus / r["audio_filepath"])} for r in read_lines(corpus / "manifest.jsonl")]
    manifest = write_manifest(
        tmp_path / "m.jsonl", [row for pair in zip(rows, good, strict=False) for row in pair] + good[len(rows) :]
    )
    for workers in (0, 2):
        batches = read_epoch(make_stream(str(manifest), workers=workers, check_durations=True, group_by_duration=True))
        assert sorted(ids(batches)) == all_ids()
        reasons = {q["id"]: q["reason"] for b in batches for q in b.quarantined}
        assert set(reasons) == set(BAD_AUDIO)
        for name, (_, words) in BAD_AUDIO.items():
            assert words in reasons[name], reasons[name]
        assert sum(b.rows_read for b in batches) == len(good) + len(rows)


@pytest.mark.parametrize(
    ("rate", "channels", "subtype"),
    [(192_000, 1, "PCM_24"), (8_000, 1, "PCM_U8"), (48_000, 6, "PCM_16"), (16_000, 1, "PCM_U8"), (22_050, 2, "FLOAT")],
)
def test_unusual_audio_is_used(tmp_path: Path, rate: int, channels: int, subtype: str) -> None:
    samples_S = tone(1.0, rate)
    soundfile.write(tmp_path / "a.wav", np.stack([samples_S] * channels, axis=1), rate, subtype=subtype)
    manifest = write_manifest(tmp_path / "m.jsonl", [{"audio_filepath": "a.wav", "text": "words", "id": "a"}])
    (batch,) = (b for b in read_epoch(make_stream(str(manifest), group_by_duration=True)) if b.ids)
    assert abs(int(batch.audio_lengths_B[0]) - RATE) <= 1
    heard_S = as_float(batch.audio_BS)[0].numpy()
    assert np.argmax(np.abs(np.fft.rfft(heard_S))) * RATE / len(heard_S) == pytest.approx(300, abs=1)
    assert np.abs(heard_S[RATE // 4 : -RATE // 4]).max() == pytest.approx(0.3, abs=0.02)


def test_odd_lines(corpus: Path, tmp_path: Path) -> None:
    """Broken UTF-8, a line of 2 MB, numbers beyond all measure, values of other types, nested and empty lines."""
    audio = str(corpus / "clip00.flac")

    def row(name: str, **values: Any) -> bytes:
        return json.dumps({"audio_filepath": audio, "text": "words", "id": name, **values}).encode()

    bad = {
        "utf-8": b'{"audio_filepath": "a.flac", "text": "\xff\xfe"}',
        "deep": b"[" * 100_000,
        "number": b"17",
        "half": b'{"audio_filepath": "a.fl',
        "offset": row("offset", offset=1e300),
        "infinite": row("infinite", offset=float("inf")),
        "text": row("text", text={"a": 1}),
        "path": row("path", audio_filepath=["a"]),
        "nul": row("nul", audio_filepath="a\0b.flac"),
        "half a character": row("half", text="cut \ud83d"),
        "half a name": row("cut \ud83d", audio_filepath="gone \ud83d.flac"),
        "array": row("array", audio_filepath={"array": ["x"], "sampling_rate": 16000}),
        "rate": row("rate", audio_filepath={"array": [0.0], "sampling_rate": "x"}),
    }
    fine = {
        "long": row("long", note="x" * 2_000_000),
        "huge": row("huge", duration=1e308),
        "negative": row("negative", duration=-3),
        "endless": row("endless", duration=0).replace(b'"duration": 0', b'"duration": 1' + b"0" * 400),
        "nan": row("nan", duration=float("nan")),
        "true": row("true", duration=True),
        "word": row("word", duration="long"),
        "language": row("language", lang=7),
    }
    lines = [line for pair in zip(bad.values(), [b""] * len(bad), strict=True) for line in pair] + list(fine.values())
    (tmp_path / "m.jsonl").write_bytes(b"\n".join(lines))
    batches = read_epoch(make_stream(str(tmp_path / "m.jsonl"), group_by_duration=True, max_duration=60.0))
    assert sorted(ids(batches)) == sorted(fine)
    assert sum((Counter(b.filtered) for b in batches), Counter()) == {}
    assert sum(len(b.quarantined) for b in batches) == len(bad)
    places = sorted(int(q["source"].rsplit(" line ", 1)[1]) for b in batches for q in b.quarantined)
    assert places == [1 + 2 * i for i in range(len(bad))]
    file = LineFile(tmp_path / "quarantine.jsonl")
    file.append(*(q for b in batches for q in b.quarantined))
    assert len(read_lines(tmp_path / "quarantine.jsonl")) == len(bad)


def test_hours_of_audio_are_not_read_where_no_duration_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three hours, 8 bit at 8 kHz, with and without a duration in the row."""
    with soundfile.SoundFile(tmp_path / "long.flac", "w", 8000, 1, "PCM_S8") as file:
        for _ in range(180):
            file.write(np.zeros(60 * 8000, dtype=np.int16))
    rows = [{"audio_filepath": "long.flac", "text": "a", "id": "a"}]
    rows += [{**rows[0], "duration": 5.0, "id": "b"}, {**rows[0], "duration": 10_800.0, "id": "c"}]

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("hours are read")

    monkeypatch.setattr(soundfile.SoundFile, "read", never)
    manifest = str(write_manifest(tmp_path / "m.jsonl", rows))
    for group in (False, True):
        batches = read_epoch(make_stream(manifest, max_duration=40.0, check_durations=True, group_by_duration=group))
        assert ids(batches) == []
        assert sum((Counter(b.filtered) for b in batches), Counter()) == {"longer_than_max_duration": 2}
        assert [q["reason"] for b in batches for q in b.quarantined] == [
            "the row says 5.00 s, the audio has 10800.00 s"
        ]


# ---- shards that fail -----------------------------------------------------------------------------------------------


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    waited: list[int] = []
    monkeypatch.setattr(reader, "wait_before", waited.append)
    return waited


def failing_shard(rows: int, failures: dict[int, int], error: Exception) -> Shard:
    """Rows 0 to `rows`; reading row i fails failures[i] times."""

    def read(first: int) -> Any:
        for number in range(first, rows):
            if failures.get(number, 0) > 0:
                failures[number] -= 1
                raise error
            yield number, {"text": str(number)}

    return Shard("far.tar", "row", 0, rows, read)


def test_a_source_that_dies_mid_stream_goes_on_from_its_row(no_waiting: list[int]) -> None:
    shard = failing_shard(20, {3: 2, 4: 1, 15: 5}, ConnectionResetError("gone"))
    assert [number for number, _ in rows_from(shard, 1, retries=5)] == list(range(1, 20))
    assert no_waiting == [2, 3, 2, 2, 3, 4, 5, 6]
    with pytest.raises(UnreadableShard, match=r"far.tar cannot be read from row 7 on: ConnectionResetError: gone"):
        list(rows_from(failing_shard(20, {7: 6}, ConnectionResetError("gone")), 0, retries=5))
    with pytest.raises(UnreadableShard, match="FileNotFoundError"):
        list(rows_from(failing_shard(20, {7: 1}, FileNotFoundError("no such key")), 0, retries=5))


def test_delays_grow_and_are_jittered() -> None:
    delays = [[retry.delay_before(attempt) for _ in range(50)] for attempt in range(2, 12)]
    for attempt, drawn in enumerate(delays):
        middle = min(2**attempt, retry.LONGEST_DELAY)
        assert 0.5 * middle <= min(drawn) < max(drawn) <= 1.5 * middle
        assert len(set(drawn)) > 40


def test_rows_that_waited_are_read_again(no_waiting: list[int]) -> None:
    source = SimpleNamespace(remote=True)
    group = [(source, failing_shard(20, {5: 1}, TimeoutError())), (source, failing_shard(9, {}, TimeoutError()))]
    found = fetch(group, {(0, 5), (0, 17), (1, 0), (0, 2)}, retries=2)
    assert {place: row["text"] for place, row in found.items()} == {
        (0, 2): "2",
        (0, 5): "5",
        (0, 17): "17",
        (1, 0): "0",
    }
    with pytest.raises(UnreadableShard, match=r"far.tar row 30 is not there any more"):
        fetch(group, {(0, 30)}, retries=2)


def test_a_broken_shard_is_put_last_and_then_named(corpus: Path, tmp_path: Path, messages: list[str]) -> None:
    """All other shards are read before the run hears of it."""
    whole = [pq.read_table(p) for p in sorted((corpus / "shards/data").glob("train-*"))]
    for i, file in enumerate(sorted((corpus / "shards/data").glob("train-*"))):
        (tmp_path / f"train-{i}.parquet").write_bytes(file.read_bytes())
    broken = tmp_path / "train-3.parquet"
    content = broken.read_bytes()
    broken.write_bytes(content[:200] + bytes(len(content) // 2) + content[200 + len(content) // 2 :])
    lost = set(whole[3].column("id").to_pylist())
    for shuffle in (False, True):
        batches = list(
            make_stream(
                str(tmp_path / "train-*.parquet"), shuffle=shuffle, shuffle_buffer_size=1, batch_size=1
            ).batches()
        )
        assert f"{broken} cannot be read from row" in batches[-1].error
        assert any("it is tried again when the rest is read" in said for said in messages)
        messages.clear()
        read = set(ids(batches))
        assert len(set(all_ids()) - lost - read) <= 1  # what waited in the buffer when the end was met
        assert read - set(all_ids()) == set()


def test_other_bad_sources(tmp_path: Path) -> None:
    (tmp_path / "broken.tar").write_bytes(os.urandom(20_000))
    (tmp_path / "broken.parquet").write_bytes(b"PAR1" + os.urandom(5000))
    for name in ("broken.tar", "broken.parquet"):
        with pytest.raises(UserError, match=rf"data.train: .*{name}"):
            make_stream(str(tmp_path / name))


def test_a_disk_that_fills_while_the_check_writes(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    arguments = ["--data", str(corpus / "manifest.jsonl"), "--output-dir", str(tmp_path / "check"), "--workers", "1"]
    arguments += ["data.min_duration=0"]
    monkeypatch.setattr(np, "save", full)
    assert check(arguments) == 1
    said = capsys.readouterr().err
    assert "error: --output-dir:" in said
    assert "No space left on device" in said
    monkeypatch.undo()
    assert check(arguments) == 0


def test_arrow_on_the_disk(corpus: Path, tmp_path: Path) -> None:
    import datasets

    rows = pq.read_table(corpus / "shards/data/train-00002-of-00005.parquet").to_pylist()
    dataset = datasets.Dataset.from_list(rows)
    dataset.save_to_disk(tmp_path / "plain")
    datasets.DatasetDict({"train": dataset, "other": dataset.select(range(2))}).save_to_disk(tmp_path / "splits")
    expected = [row["id"] for row in rows]
    assert ids(read_epoch(make_stream(str(tmp_path / "plain"), shuffle=False))) == expected
    for split, clips in (("train", expected), ("other", expected[:2])):
        assert ids(read_epoch(make_stream({"path": str(tmp_path / "splits"), "split": split}, shuffle=False))) == clips
    with pytest.raises(UserError, match="`split` has no effect on "):
        make_stream({"path": str(tmp_path / "plain"), "split": "train"})
    with pytest.raises(UserError, match="--split: `split` has no effect on "):
        split_to_read([str(tmp_path / "plain"), "a.jsonl"], "train", "test")
    both = [str(tmp_path / "plain"), str(tmp_path / "splits")]
    assert split_to_read(both, "other", "test") == "other", "one of them has splits"
    assert split_to_read(["a.jsonl"], None, "test") == "test"
    with pytest.raises(UserError, match=r"no split 'test'; it has \['other', 'train'\]"):
        make_stream({"path": str(tmp_path / "splits"), "split": "test"})
