"""The stream of batches: every clip once, the same order again, exactly the next batch after a resume."""

import functools
import io
import itertools
import json
import os
import tarfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile
import torch
from conftest import write_manifest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.data.lanes import StreamOptions, order_window
from finetune.data.sources import (
    OpenSource,
    manifest_chunks,
    open_source,
    parse_sources,
    plain_row,
    read_manifest_chunk,
)
from finetune.data.stream import Batch, ClipStream
from finetune.errors import UserError

RATE = 16_000
ROWS = 47
SHARDS = 5
HELD_OUT = 6


def encode(text: str) -> list[int]:
    return [ord(c) for c in text]


def flac(samples_S: np.ndarray) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples_S, RATE, format="FLAC")
    return file.getvalue()


def write_parquet(path: Path, rows: list[dict[str, Any]], columns: tuple[str, ...] = ()) -> None:
    """Rows (id, audio, text, language, duration) as one parquet file, on demand under other column names."""
    table = pa.Table.from_pylist(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table.rename_columns(list(columns)) if columns else table, path, row_group_size=5)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same 47 clips of noise, 0.05 s to 0.5 s, as parquet shards with splits, as a manifest, and as a spoiled manifest."""
    folder = tmp_path_factory.mktemp("corpus")
    random = np.random.default_rng(0)
    rows = []
    for i in range(ROWS + HELD_OUT):
        samples_S = 0.1 * random.standard_normal(int(RATE * random.uniform(0.05, 0.5)))
        name = f"clip{i:02d}"
        (folder / f"{name}.flac").write_bytes(flac(samples_S))
        rows.append(
            {
                "id": name,
                "audio": {"bytes": flac(samples_S), "path": None},
                "text": f"text {i}",
                "language": "en" if i % 3 else "fr",
                "duration": len(samples_S) / RATE,
            }
        )
    train, held_out = rows[:ROWS], rows[ROWS:]
    bounds = [0, 9, 10, 25, 40, ROWS]
    for i in range(SHARDS):
        path = folder / "shards" / "data" / f"train-{i:05d}-of-{SHARDS:05d}.parquet"
        write_parquet(path, train[bounds[i] : bounds[i + 1]])
    write_parquet(folder / "shards" / "data" / "validation-00000-of-00001.parquet", held_out)
    lines: list[Any] = [
        {
            "audio_filepath": f"{r['id']}.flac",
            "id": r["id"],
            "text": r["text"],
            "lang": r["language"],
            "duration": r["duration"],
        }
        for r in train
    ]
    write_manifest(folder / "manifest.jsonl", lines)
    for i, line in (
        (3, "not json"),
        (20, {**lines[20], "audio_filepath": "gone.flac"}),
        (46, {**lines[46], "text": 5}),
    ):
        lines[i] = line
    for i in (8, 30):
        lines[i] = {**lines[i], "duration": 99.0}
    write_manifest(folder / "spoiled.jsonl", lines)
    return folder


@functools.cache
def opened(value: str, folder: str) -> list[OpenSource]:
    """Opened once for all streams of a place, as in a run."""
    return [open_source(source, "data.train") for source in parse_sources(json.loads(value), "data.train", "train")]


def make_stream(value: Any, *, rank: int = 0, ranks: int = 1, workers: int = 0, **options: Any) -> ClipStream:
    """A stream over what a run file would name, in small windows so that there are several."""
    sources = opened(json.dumps(value), os.getcwd())
    defaults = {"batch_size": 4, "sample_rate": RATE, "seed": 1, "shuffle_buffer_size": 9}
    return ClipStream(
        sources, StreamOptions(**{**defaults, **options}), encode, rank=rank, ranks=ranks, workers=workers
    )


def read_epoch(stream: ClipStream) -> list[Batch]:
    batches = list(stream.batches())
    stream.next_epoch()
    return batches


def ids(batches: list[Batch]) -> list[str]:
    return [clip_id for batch in batches for clip_id in batch.ids]


def all_ids(rows: int = ROWS) -> list[str]:
    return [f"clip{i:02d}" for i in range(rows)]


def same_batches(first: list[Batch], second: list[Batch]) -> bool:
    """Whether two lists of batches hold the same clips, padding and reports, in the same order."""
    if len(first) != len(second):
        return False
    for a, b in zip(first, second, strict=True):
        if (a.ids, a.texts, a.languages, a.lane, a.position) != (b.ids, b.texts, b.languages, b.lane, b.position):
            return False
        if (a.rows_read, a.quarantined, a.filtered, a.error) != (b.rows_read, b.quarantined, b.filtered, b.error):
            return False
        for name in ("audio_BS", "audio_lengths_B", "tokens_BU", "token_lengths_B"):
            x, y = getattr(a, name), getattr(b, name)
            if (x is None) != (y is None) or (x is not None and not torch.equal(x, y)):
                return False
    return True


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
            assert np.array_equal(batch.audio_BS[i, :length].numpy(), samples_S)
            assert not batch.audio_BS[i, length:].any()
            assert batch.tokens_BU[i, : batch.token_lengths_B[i]].tolist() == encode(batch.texts[i])


def test_splits_of_a_folder(corpus: Path) -> None:
    (source,) = parse_sources(str(corpus / "shards"), "data.validation", "validation")
    opened = open_source(source, "data.validation")
    assert (opened.clips, len(opened.shards)) == (HELD_OUT, 1)
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
    batches = read_epoch(make_stream(str(tmp_path), shuffle=False))
    assert sorted(t for b in batches for t in b.texts) == ["words 0", "words 1", "words 2"]
    lengths = {t: int(n) for b in batches if b.ids for t, n in zip(b.texts, b.audio_lengths_B, strict=True)}
    assert lengths == {f"words {i}": soundfile.info(corpus / f"clip{i:02d}.flac").frames for i in range(3)}


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
    assert sum(len(s.shards) for s, _ in stream.groups[0][:1]) == 2
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
        ([{"path": "a", "weight": "much"}], ("above 0", "'much'")),
        ({"path": 3}, ("`path`", "3")),
        (3, ("a source is a path", "3")),
    ],
)
def test_sources_that_are_refused(value: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as caught:
        parse_sources(value, "data.guard", "train")
    assert str(caught.value).startswith("data.guard: ")
    assert all(word in str(caught.value) for word in words), caught.value


def test_manifest_rows_cut_out_of_a_recording(tmp_path: Path) -> None:
    ramp_S = np.linspace(-0.5, 0.5, 3 * RATE, dtype=np.float32)
    soundfile.write(tmp_path / "talk.wav", ramp_S, RATE, subtype="FLOAT")
    row = {"audio_filepath": "talk.wav", "text": "x"}
    parts = {
        "middle": ({"offset": 0.5, "duration": 1.25}, slice(RATE // 2, RATE * 7 // 4)),
        "start": ({"offset": 0, "duration": 1}, slice(0, RATE)),
        "rest": ({"offset": 2.0}, slice(2 * RATE, None)),
        "over": ({"offset": 2.5, "duration": 9.0}, slice(RATE * 5 // 2, None)),
        "no offset": ({"duration": 1.0}, slice(0, RATE)),
        "odd": ({"offset": None, "duration": float("nan")}, slice(None)),
    }
    rows = [{**row, **values, "id": name} for name, (values, _) in parts.items()]
    rows += [{**row, "offset": 3.5, "id": "behind"}, {**row, "offset": "1 s", "id": "words"}]
    batches = read_epoch(make_stream(str(write_manifest(tmp_path / "m.jsonl", rows)), batch_size=1))
    read = {b.ids[0]: b.audio_BS[0].numpy() for b in batches if b.ids}
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
        bounds = manifest_chunks(path, size)
        assert [b for b, _ in bounds][1:] == [e for _, e in bounds][:-1]
        read = [row for a, b in bounds for row in read_manifest_chunk(str(path), a, b)]
        assert [plain_row(row) for row in read] == rows
    assert len(manifest_chunks(path, 1)) >= 9
    assert len(manifest_chunks(path, 10_000)) == 1


# ---- every clip once -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_each_clip_once_an_epoch(corpus: Path, ranks: int, workers: int) -> None:
    # Five shards: 1 and 5 lanes read them shard by shard, other numbers share them row by row.
    streams = [
        make_stream(str(corpus / "shards"), rank=rank, ranks=ranks, workers=workers, group_by_duration=workers == 2)
        for rank in range(ranks)
    ]
    orders = []
    for _ in range(2):
        parts = [read_epoch(stream) for stream in streams]
        order = [ids(part) for part in parts]
        assert Counter(clip for part in order for clip in part) == Counter(all_ids())
        assert sum(batch.rows_read for part in parts for batch in part) == ROWS
        assert all(len(batch.ids) <= 4 for part in parts for batch in part)
        orders.append(order)
    assert orders[0] != orders[1]


@pytest.mark.parametrize("lanes", [2, 3, 6, 50])
@pytest.mark.parametrize("path", ["shards", "manifest.jsonl"])
def test_few_shards_keep_every_lane_busy(corpus: Path, lanes: int, path: str) -> None:
    parts = [ids(read_epoch(make_stream(str(corpus / path), rank=rank, ranks=lanes))) for rank in range(lanes)]
    assert Counter(clip for part in parts for clip in part) == Counter(all_ids())
    sizes = [len(part) for part in parts]
    # Whole shards differ by a row; with two lanes two each, and the fifth is shared.
    assert max(sizes) - min(sizes) <= (1 if path == "manifest.jsonl" or lanes > SHARDS else 3)


def test_shards_are_shared_where_they_do_not_divide_and_no_more() -> None:
    from finetune.data.lanes import lane_shards

    for shards, lanes, whole in ((200, 64, 3), (1000, 64, None), (64, 64, 1), (5, 2, 2), (3, 8, 0), (41, 8, None)):
        group = [("source", i) for i in range(shards)]
        parts = [lane_shards(group, StreamOptions(1, RATE), 0, lane, lanes) for lane in range(lanes)]
        own = [[i for _, i, shared in part if not shared] for part in parts]
        shared = [[i for _, i, shared in part if shared] for part in parts]
        assert all(s == shared[0] for s in shared)
        assert sorted([i for part in own for i in part] + shared[0]) == list(range(shards))
        assert len(shared[0]) == (0 if whole is None else shards - whole * lanes)
        assert max(len(part) for part in own) - min(len(part) for part in own) <= (whole is None)


def test_one_worker_reads_like_none(corpus: Path) -> None:
    alone, worker = (make_stream(str(corpus / "spoiled.jsonl"), workers=n, max_duration=40.0) for n in (0, 1))
    assert same_batches(read_epoch(alone), read_epoch(worker))


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(("ranks", "workers"), [(4, 0), (2, 2)])
def test_ranks_and_workers_make_the_same_lanes(corpus: Path, ranks: int, workers: int) -> None:
    options = {"group_by_duration": True, "batch_size": 2}
    one = read_epoch(make_stream(str(corpus / "shards"), workers=4, **options))
    several = [
        read_epoch(make_stream(str(corpus / "shards"), rank=rank, ranks=ranks, workers=workers, **options))
        for rank in range(ranks)
    ]
    for lane in range(4):
        part = [batch for batch in several[lane % ranks] if batch.lane == lane]
        assert same_batches(part, [batch for batch in one if batch.lane == lane])
        assert len(part) > 1
    # While no lane has ended, one step of all ranks is the same stretch of the one rank's stream.
    steps = min(sum(batch.lane == lane for batch in one) for lane in range(4)) * 4 // ranks
    merged = [several[rank][step] for step in range(steps) for rank in range(ranks)]
    assert same_batches(merged, one[: len(merged)])


def test_max_samples(corpus: Path) -> None:
    for path in ("shards", "manifest.jsonl"):
        for ranks in (1, 2, 3):
            streams = [make_stream(str(corpus / path), rank=r, ranks=ranks, max_samples=13) for r in range(ranks)]
            orders = [[ids(read_epoch(stream)) for stream in streams] for _ in range(2)]
            for parts in orders:
                assert Counter(clip for part in parts for clip in part) == Counter(all_ids(13))
            assert orders[0] != orders[1]
        assert sorted(ids(read_epoch(make_stream(str(corpus / path), max_samples=1000)))) == all_ids()
        assert ids(read_epoch(make_stream(str(corpus / path), max_samples=13, shuffle=False))) == all_ids(13)


# ---- order ---------------------------------------------------------------------------------------------------------


def test_order(corpus: Path) -> None:
    def orders(**options: Any) -> list[list[str]]:
        stream = make_stream(str(corpus / "shards"), **options)
        return [ids(read_epoch(stream)) for _ in range(3)]

    first = orders()
    assert first == orders()
    assert len({tuple(order) for order in first}) == 3
    assert all(order != all_ids() for order in first)
    assert orders(seed=2)[0] != first[0]
    assert orders(shuffle=False) == [all_ids()] * 3
    # Windows mix clips of neighbouring places, and shards are shuffled: the first window is not always from one shard.
    assert len({order[0] for order in first}) > 1


def test_reading_leaves_the_global_random_state(corpus: Path) -> None:
    for workers in (0, 1):
        torch.manual_seed(3)
        np.random.seed(3)
        before = torch.get_rng_state(), np.random.get_state()[1].copy()
        read_epoch(make_stream(str(corpus / "manifest.jsonl"), workers=workers, max_samples=8))
        assert torch.equal(torch.get_rng_state(), before[0])
        assert np.array_equal(np.random.get_state()[1], before[1])


def test_group_by_duration_saves_padding(corpus: Path) -> None:
    def padding(**options: Any) -> float:
        batches = read_epoch(make_stream(str(corpus / "shards"), shuffle_buffer_size=ROWS, **options))
        assert Counter(ids(batches)) == Counter(all_ids())
        full = [batch for batch in batches if batch.ids]
        assert all(len(batch.ids) <= 4 for batch in full)
        assert sum(len(batch.ids) == 4 for batch in full) >= ROWS // 4 - 1
        return 1 - sum(int(b.audio_lengths_B.sum()) for b in full) / sum(b.audio_BS.numel() for b in full)

    random, grouped = padding(group_by_duration=False), padding(group_by_duration=True)
    assert grouped < 0.3 * random, (grouped, random)


def test_grouped_batches_come_in_random_order(corpus: Path) -> None:
    stream = make_stream(str(corpus / "shards"), shuffle_buffer_size=ROWS, group_by_duration=True)
    orders = []
    for _ in range(2):
        lengths = [int(batch.audio_lengths_B.max()) for batch in read_epoch(stream) if batch.ids]
        assert lengths != sorted(lengths)
        orders.append(lengths)
    assert orders[0] != orders[1]


durations = st.one_of(st.none(), st.floats(0.0, 60.0))


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    lengths=st.lists(durations, max_size=40),
    batch_size=st.integers(1, 9),
    shuffle=st.booleans(),
    grouped=st.booleans(),
    as_json=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_order_window(
    lengths: list[float | None], batch_size: int, shuffle: bool, grouped: bool, as_json: bool, seed: int
) -> None:
    plain = [{} if d is None else {"duration": d} for d in lengths]
    rows = [plain_row({"line": json.dumps(row).encode()}) for row in plain] if as_json else plain
    options = StreamOptions(batch_size, RATE, shuffle=shuffle, group_by_duration=grouped)
    order, ends = order_window(rows, options, np.random.default_rng(seed))
    assert sorted(order.tolist()) == list(range(len(rows)))
    again, ends_again = order_window(rows, options, np.random.default_rng(seed))
    assert (order.tolist(), ends) == (again.tolist(), ends_again)
    if not grouped:
        assert ends == set()
        assert shuffle or order.tolist() == list(range(len(rows)))
        return
    bounds = [0, *sorted(ends)]
    assert bounds[-1] == len(rows)
    batches = [order[a:b] for a, b in itertools.pairwise(bounds)]
    assert sorted(len(batch) for batch in batches)[1:] == [batch_size] * (len(batches) - 1)
    known = [lengths[i] or 0.0 for i in range(len(rows))]
    by_length = sorted((sorted(known[i] for i in batch) for batch in batches), key=lambda b: (b[0], b[-1]))
    assert [d for batch in by_length for d in batch] == sorted(known)


# ---- mixtures ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def long_manifest(corpus: Path) -> Path:
    """300 rows over 5 short files."""
    rows = [
        {"audio_filepath": f"clip{i % 5:02d}.flac", "id": f"long{i:03d}", "text": "x", "lang": "long"}
        for i in range(300)
    ]
    return write_manifest(corpus / "long.jsonl", rows)


@pytest.mark.parametrize("ranks", [1, 2])
def test_mixture(corpus: Path, long_manifest: Path, ranks: int) -> None:
    value = [
        {"path": str(long_manifest), "weight": 3},
        {"path": str(corpus / "shards"), "weight": 1, "split": "validation"},
    ]
    streams = [make_stream(value, rank=rank, ranks=ranks, batch_size=8) for rank in range(ranks)]
    for _ in range(2):
        parts = [Counter(ids(read_epoch(stream))) for stream in streams]
        drawn = sum(parts, Counter())
        first = {clip: n for clip, n in drawn.items() if clip.startswith("long")}
        second = {clip: n for clip, n in drawn.items() if not clip.startswith("long")}
        # An epoch is one pass over the first source; the second starts again as often as needed.
        assert first == {f"long{i:03d}": 1 for i in range(300)}
        assert set(second) == {f"clip{i}" for i in range(ROWS, ROWS + HELD_OUT)}
        for part in parts:
            again = [n for clip, n in part.items() if clip in second]
            assert len(again) == HELD_OUT // ranks
            assert max(again) - min(again) <= 1 < min(again)
        assert 0.2 < sum(second.values()) / sum(drawn.values()) < 0.3
    swapped = ids(read_epoch(make_stream(value[::-1], batch_size=8)))
    assert Counter(c for c in swapped if not c.startswith("long")) == Counter(
        {f"clip{i}": 1 for i in range(ROWS, ROWS + HELD_OUT)}
    )


def test_a_source_of_a_mixture_is_shuffled_anew_in_each_pass(corpus: Path, long_manifest: Path) -> None:
    value = [{"path": str(long_manifest), "weight": 1}, {"path": str(corpus / "shards"), "weight": 1}]
    # Windows of one row, so that nothing but the order of the shards differs.
    drawn = [c for c in ids(read_epoch(make_stream(value, shuffle_buffer_size=1))) if not c.startswith("long")]
    passes = [drawn[i : i + ROWS] for i in range(0, len(drawn) - ROWS + 1, ROWS)]
    assert len(passes) > 3
    assert all(sorted(order) == all_ids() for order in passes)
    assert len({tuple(order) for order in passes}) > 1


@pytest.mark.timeout(60)
def test_mixture_with_a_source_that_a_lane_has_no_rows_of(corpus: Path, long_manifest: Path, tmp_path: Path) -> None:
    row = {"audio_filepath": str(corpus / "clip00.flac"), "id": "single", "text": "x"}
    single = write_manifest(tmp_path / "single.jsonl", [row])
    value = [{"path": str(long_manifest), "weight": 9}, {"path": str(single), "weight": 1}]
    parts = [ids(read_epoch(make_stream(value, rank=rank, ranks=2))) for rank in range(2)]
    drawn = Counter(clip for part in parts for clip in part)
    assert sum(n for clip, n in drawn.items() if clip != "single") == 300
    assert drawn["single"] > 3
    assert "single" not in parts[1]


# ---- resume --------------------------------------------------------------------------------------------------------

MIXTURE = [{"path": "spoiled.jsonl", "weight": 2}, {"path": "shards", "weight": 1, "split": "validation"}]


def check_resume(make: Callable[[], ClipStream], epoch: int, cuts: list[int] | None) -> None:
    """A stream that is stopped after some batches of an epoch and made anew goes on as if it had not been.

    Args:
        make: makes the stream anew.
        epoch: in which epoch it is stopped.
        cuts: after how many batches, negative ones from the end; None for each number of batches.
    """
    unbroken = make()
    for _ in range(epoch):
        unbroken.next_epoch()
    whole, following = read_epoch(unbroken), read_epoch(unbroken)
    assert len(whole) > 8
    for cut in range(len(whole) + 1) if cuts is None else [c % (len(whole) + 1) for c in cuts]:
        stopped = make()
        for _ in range(epoch):
            stopped.next_epoch()
        iterator = stopped.batches()
        head = [next(iterator) for _ in range(cut)]
        state = json.loads(json.dumps(stopped.state_dict()))
        del iterator
        resumed = make()
        resumed.load_state_dict(state)
        assert same_batches(head + list(resumed.batches()), whole), f"cut after {cut} batches"
        if cut == len(whole) // 2 or (cuts and cut == cuts[0]):
            resumed.next_epoch()
            assert same_batches(list(resumed.batches()), following), f"the epoch after the cut at {cut}"


@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("group_by_duration", [False, True])
@pytest.mark.parametrize("value", ["spoiled.jsonl", "shards", MIXTURE], ids=["manifest", "shards", "mixture"])
def test_resume(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, value: Any, group_by_duration: bool, epoch: int
) -> None:
    monkeypatch.chdir(corpus)

    def make() -> ClipStream:
        return make_stream(value, group_by_duration=group_by_duration, max_duration=40.0)

    check_resume(make, epoch, None if (value, epoch) == ("spoiled.jsonl", 1) else [5, -2, -1])


def test_resume_without_shuffling(corpus: Path) -> None:
    check_resume(lambda: make_stream(str(corpus / "shards"), shuffle=False, max_samples=37), 1, [1, -3])


@pytest.mark.parametrize(
    ("path", "rank", "ranks", "group_by_duration", "epoch"),
    [("shards", 0, 1, False, 0), ("spoiled.jsonl", 1, 2, True, 1)],
    ids=["shards", "manifest"],
)
def test_resume_with_two_workers(
    corpus: Path, path: str, rank: int, ranks: int, group_by_duration: bool, epoch: int
) -> None:
    def make() -> ClipStream:
        return make_stream(
            str(corpus / path),
            rank=rank,
            ranks=ranks,
            workers=2,
            batch_size=2,
            group_by_duration=group_by_duration,
            max_duration=40.0,
        )

    batches = read_epoch(make())
    one_has_ended = next(i for i, batch in enumerate(batches, 1) if batch.position == {"finished": True})
    assert one_has_ended < len(batches)
    check_resume(make, epoch, [3, -3, -2, -1, *([one_has_ended] if epoch == 0 else [])])


def test_resume_in_other_lanes_is_refused(corpus: Path) -> None:
    state = make_stream(str(corpus / "shards"), workers=2, ranks=2).state_dict()
    with pytest.raises(ValueError, match=r"saved with 2 workers and now has 0"):
        make_stream(str(corpus / "shards"), ranks=2).load_state_dict(state)
    with pytest.raises(ValueError, match=r"saved with 2 ranks and now has 1"):
        make_stream(str(corpus / "shards"), workers=2).load_state_dict(state)


# ---- reports -------------------------------------------------------------------------------------------------------


def test_what_is_left_out_is_reported_once(corpus: Path) -> None:
    batches = read_epoch(make_stream(str(corpus / "spoiled.jsonl"), max_duration=40.0))
    left_out = [q for batch in batches for q in batch.quarantined]
    assert len(left_out) == 3
    reasons = {q["id"]: q["reason"] for q in left_out}
    assert reasons["clip20"] == f"there is no file {corpus / 'gone.flac'}"
    assert reasons["clip46"] == "no text in column 'text'"
    (line,) = (q for q in left_out if "JSON" in q["reason"])
    assert "spoiled.jsonl" in line["source"]
    assert line["source"].endswith("row 3")
    assert sum((Counter(batch.filtered) for batch in batches), Counter()) == {"longer_than_max_duration": 2}
    assert sum(batch.rows_read for batch in batches) == ROWS
    assert len(ids(batches)) == ROWS - 5


def test_a_broken_shard_is_named(corpus: Path, tmp_path: Path) -> None:
    source = (corpus / "shards/data/train-00003-of-00005.parquet").read_bytes()
    path = tmp_path / "broken.parquet"
    path.write_bytes(source[:200] + bytes(len(source) // 2) + source[200 + len(source) // 2 :])
    batches = list(make_stream(str(path)).batches())
    assert batches[-1].error is not None
    assert str(path) in batches[-1].error
    assert "cannot be read from row" in batches[-1].error
