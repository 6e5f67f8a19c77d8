"""The stream of batches: every clip once, the same order again, exactly the next batch after a resume."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import write_manifest
from hypothesis import given, settings
from hypothesis import strategies as st
from stream_cases import HELD_OUT, ROWS, all_ids, ids, make_stream, read_epoch, same_batches

from finetune.data.batching import BatchLimits, Buffer, Entry
from finetune.data.order import Piece, chosen_pieces, deal, interleave

# ---- every clip once -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_each_clip_once_an_epoch(corpus: Path, ranks: int, workers: int) -> None:
    # Five shards: some worker shards read whole ones, and all share the rows of others.
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


@pytest.mark.parametrize("worker_shards", [2, 3, 6, 50])
@pytest.mark.parametrize("path", ["shards", "manifest.jsonl"])
def test_few_shards_keep_every_worker_shard_busy(corpus: Path, worker_shards: int, path: str) -> None:
    parts = [
        ids(read_epoch(make_stream(str(corpus / path), rank=rank, ranks=worker_shards)))
        for rank in range(worker_shards)
    ]
    assert Counter(clip for part in parts for clip in part) == Counter(all_ids())
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


shards = st.lists(st.integers(0, 30), min_size=1, max_size=12)


def rows_of(pieces: list[Piece], sizes: list[int]) -> list[tuple[int, int]]:
    return [
        (p.shard, row)
        for p in pieces
        for row in range(p.start, sizes[p.shard] if p.stop is None else p.stop, p.stride)
    ]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    sizes=shards,
    worker_shards=st.integers(1, 9),
    again=st.integers(1, 5),
    known=st.booleans(),
    how=st.sampled_from([deal, interleave]),
)
def test_every_row_in_one_worker_shard(
    sizes: list[int], worker_shards: int, again: int, known: bool, how: Any
) -> None:
    whole = chosen_pieces(sizes if known else [None] * len(sizes), -1, None)
    parts = [how(whole, worker_shard, worker_shards) for worker_shard in range(worker_shards)]
    rows = [rows_of(part, sizes) for part in parts]
    everything = [(shard, row) for shard, size in enumerate(sizes) for row in range(size)]
    assert sorted(row for part in rows for row in part) == everything
    if known:
        assert max(map(len, rows)) - min(map(len, rows)) <= 1
        assert [sum(p.rows() for p in part) for part in parts] == [len(part) for part in rows]
        if how is interleave:
            turns = [rows[i % worker_shards][i // worker_shards] for i in range(len(everything))]
            assert turns == everything
    # Dealt out a second time, as after a change of the number of ranks.
    rest = [piece for part in parts for piece in part]
    dealt = [row for worker_shard in range(again) for row in rows_of(deal(rest, worker_shard, again), sizes)]
    assert sorted(dealt) == everything


@settings(max_examples=100, deadline=None, derandomize=True)
@given(sizes=shards, limits=st.lists(st.integers(0, 200), min_size=2, max_size=2), seed=st.none() | st.integers(0, 99))
def test_a_smaller_subset_lies_within_a_larger_one(sizes: list[int], limits: list[int], seed: int | None) -> None:
    small, large = (set(rows_of(chosen_pieces(sizes, n, seed), sizes)) for n in sorted(limits))
    assert small <= large
    assert (len(small), len(large)) == tuple(min(n, sum(sizes)) for n in sorted(limits))


def test_many_shards_of_unknown_length_are_not_shared() -> None:
    for count, worker_shards, whole in (
        (200, 64, 3),
        (1000, 64, None),
        (64, 64, 1),
        (5, 2, 2),
        (3, 8, 0),
        (41, 8, None),
    ):
        parts = [
            deal(chosen_pieces([None] * count, -1, None), worker_shard, worker_shards)
            for worker_shard in range(worker_shards)
        ]
        shared = [[p.shard for p in part if p.stride > 1] for part in parts]
        own = [len(part) - len(s) for part, s in zip(parts, shared, strict=True)]
        assert all(s == shared[0] for s in shared)
        assert len(shared[0]) == (0 if whole is None else count - whole * worker_shards)
        assert max(own) - min(own) <= (whole is None)


def test_one_worker_reads_like_none(corpus: Path) -> None:
    alone, worker = (make_stream(str(corpus / "spoiled.jsonl"), workers=n, max_duration=40.0) for n in (0, 1))
    assert same_batches(read_epoch(alone), read_epoch(worker))


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(("ranks", "workers"), [(4, 0), (2, 2)])
def test_ranks_and_workers_make_the_same_worker_shards(corpus: Path, ranks: int, workers: int) -> None:
    options = {"batch_size": 2}
    one = read_epoch(make_stream(str(corpus / "shards"), workers=4, **options))
    several = [
        read_epoch(make_stream(str(corpus / "shards"), rank=rank, ranks=ranks, workers=workers, **options))
        for rank in range(ranks)
    ]
    for worker_shard in range(4):
        part = [batch for batch in several[worker_shard % ranks] if batch.worker_shard == worker_shard]
        assert same_batches(part, [batch for batch in one if batch.worker_shard == worker_shard])
        assert len(part) > 1
    # While no worker shard has ended, one step of all ranks is the same stretch of the one rank's stream.
    steps = min(sum(batch.worker_shard == worker_shard for batch in one) for worker_shard in range(4)) * 4 // ranks
    merged = [several[rank][step] for step in range(steps) for rank in range(ranks)]
    assert same_batches(merged, one[: len(merged)])


def test_without_shuffling_a_step_holds_the_same_clips_on_any_number_of_ranks(corpus: Path) -> None:
    for path in ("shards", "manifest.jsonl"):
        for ranks, batch_size in ((1, 12), (2, 6), (3, 4)):
            parts = [
                read_epoch(
                    make_stream(
                        str(corpus / path), rank=r, ranks=ranks, batch_size=batch_size, shuffle=False, interleave=True
                    )
                )
                for r in range(ranks)
            ]
            steps = [sorted(ids([part[step] for part in parts])) for step in range(3)]
            assert steps == [all_ids()[12 * step : 12 * step + 12] for step in range(3)]


def test_max_samples(corpus: Path) -> None:
    """A fixed subset on any number of ranks, within every larger one, in another order in each epoch."""
    for path in ("shards", "manifest.jsonl"):
        subsets: dict[int, set[str]] = {}
        for limit in (5, 13, 30):
            for ranks in (1, 2, 3):
                streams = [
                    make_stream(str(corpus / path), rank=r, ranks=ranks, max_samples=limit) for r in range(ranks)
                ]
                orders = [[ids(read_epoch(stream)) for stream in streams] for _ in range(2)]
                for parts in orders:
                    clips = [clip for part in parts for clip in part]
                    assert len(clips) == len(set(clips)) == limit
                    assert subsets.setdefault(limit, set(clips)) == set(clips)
                assert orders[0] != orders[1]
        assert subsets[5] < subsets[13] < subsets[30]
        assert subsets[13] != set(all_ids(13)) or path == "manifest.jsonl"
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


def entry(number: int, seconds: float, tokens: int) -> Entry:
    return Entry(
        (0, 0, 0, number),
        seconds,
        [1] * tokens,
        int(seconds * 12) * (tokens + 1),
        "",
        "",
        "",
        "",
        None,
        None,
        None,
        False,
        None,
        0,
    )


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    clips=st.lists(st.tuples(st.floats(0.0, 30.0), st.integers(0, 50)), min_size=1, max_size=60),
    clips_a_batch=st.integers(0, 7),
    seconds=st.sampled_from([0.0, 30.0, 90.0]),
    cells=st.sampled_from([0, 4000]),
    shuffle=st.booleans(),
    group=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_batches_keep_their_limits(
    clips: list[tuple[float, int]],
    clips_a_batch: int,
    seconds: float,
    cells: int,
    shuffle: bool,
    group: bool,
    seed: int,
) -> None:
    """Each clip once; no batch above a limit but of a single clip; the same draws in whatever order clips came."""
    limits = BatchLimits(clips_a_batch, seconds, cells)
    orders = []
    for backwards in (False, True):
        buffer = Buffer(limits, shuffle, group)
        entries = [entry(i, *clip) for i, clip in enumerate(clips)]
        for e in reversed(entries) if backwards and shuffle else entries:
            buffer.add(e)
        batches = []
        while buffer.entries:
            batches.append(buffer.draw((seed, len(batches)), last=len(buffer.entries) < 20))
        orders.append([[e.ref[3] for e in batch] for batch in batches])
        for batch in batches:
            if len(batch) > 1:
                assert not clips_a_batch or len(batch) <= clips_a_batch
                assert not seconds or len(batch) * max(e.seconds for e in batch) <= seconds * (1 + 1e-9)
                assert not cells or sum(e.cells for e in batch) <= cells
    assert orders[0] == orders[1]
    assert sorted(i for batch in orders[0] for i in batch) == list(range(len(clips)))
    if not shuffle:
        assert [i for batch in orders[0] for i in batch] == list(range(len(clips)))


def test_ranks_draw_the_same_part_of_their_lengths(corpus: Path) -> None:
    """Two buffers of different clips of one distribution: at each draw their batches are of about the same length."""
    random = np.random.default_rng(0)
    buffers = [Buffer(BatchLimits(seconds=120.0), shuffle=True, group=True) for _ in range(2)]
    for number, buffer in enumerate(buffers):
        for i in range(1500):
            buffer.add(entry(i, float(random.lognormal(1.8, 0.6).__round__(2)), 10 + number))
    pairs = []
    for draw in range(40):
        batches = [buffer.draw((1, draw), last=False) for buffer in buffers]
        pairs.append([max(e.seconds for e in batch) for batch in batches])
    ratios = [max(pair) / min(pair) for pair in pairs]
    assert max(pair[0] for pair in pairs) > 4 * min(pair[0] for pair in pairs)
    assert sorted(ratios)[len(ratios) * 9 // 10] < 1.25, ratios


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
    drawn = [
        c for c in ids(read_epoch(make_stream(value, shuffle_buffer_size=1, batch_size=1))) if not c.startswith("long")
    ]
    passes = [drawn[i : i + ROWS] for i in range(0, len(drawn) - ROWS + 1, ROWS)]
    assert len(passes) > 3
    assert all(sorted(order) == all_ids() for order in passes)
    assert len({tuple(order) for order in passes}) > 1


@pytest.mark.timeout(900)
def test_mixture_with_a_source_that_a_worker_shard_has_no_rows_of(
    corpus: Path, long_manifest: Path, tmp_path: Path
) -> None:
    row = {"audio_filepath": str(corpus / "clip00.flac"), "id": "single", "text": "x"}
    single = write_manifest(tmp_path / "single.jsonl", [row])
    value = [{"path": str(long_manifest), "weight": 9}, {"path": str(single), "weight": 1}]
    parts = [ids(read_epoch(make_stream(value, rank=rank, ranks=2))) for rank in range(2)]
    drawn = Counter(clip for part in parts for clip in part)
    assert sum(n for clip, n in drawn.items() if clip != "single") == 300
    assert drawn["single"] > 3
    assert sum("single" in part for part in parts) == 1


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
    assert line["source"].endswith("spoiled.jsonl line 4")
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
