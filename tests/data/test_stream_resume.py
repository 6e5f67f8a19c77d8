"""A stopped stream goes on: exactly with the same ranks and workers, nothing lost or repeated with others."""

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
from conftest import write_manifest
from stream_cases import all_ids, check_resume, ids, make_stream, read_epoch, same_batches

from finetune.data.stream import UtteranceStream


@pytest.fixture(scope="module")
def long_manifest(corpus: Path) -> Path:
    """300 rows over 5 short files."""
    rows = [
        {"audio_filepath": f"clip{i % 5:02d}.flac", "id": f"long{i:03d}", "text": "x", "lang": "long"}
        for i in range(300)
    ]
    return write_manifest(corpus / "long.jsonl", rows)


MIXTURE = [{"path": "spoiled.jsonl", "weight": 2}, {"path": "shards", "weight": 1, "split": "validation"}]


@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("group_by_duration", [False, True])
@pytest.mark.parametrize("value", ["spoiled.jsonl", "shards", MIXTURE], ids=["manifest", "shards", "mixture"])
def test_resume(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, value: Any, group_by_duration: bool, epoch: int
) -> None:
    monkeypatch.chdir(corpus)

    def make() -> UtteranceStream:
        return make_stream(value, group_by_duration=group_by_duration, max_duration=40.0)

    check_resume(make, epoch, None if (value, epoch) == ("spoiled.jsonl", 1) else [5, -2, -1])


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("limits", [{"seconds": 3.0}, {"cells": 400}, {"seconds": 3.0, "cells": 200}])
def test_batches_by_length_alone_hold_all_clips_and_resume(
    corpus: Path, shuffle: bool, limits: dict[str, Any]
) -> None:
    def stream() -> UtteranceStream:
        return make_stream(
            str(corpus / "manifest.jsonl"), shuffle=shuffle, group_by_duration=True, batch_size=0, **limits
        )

    whole = read_epoch(stream())
    assert sorted(ids(whole)) == all_ids()
    assert len({len(b.ids) for b in whole}) > 1
    first = stream()
    for _ in zip(range(3), first.batches()):
        pass
    second = stream()
    second.load_state_dict([first.state_dict()])
    assert same_batches(list(second.batches()), whole[3:])


def test_what_waits_of_every_source_of_a_mixture_comes_with_other_ranks(corpus: Path, long_manifest: Path) -> None:
    value = [{"path": str(corpus / "shards"), "weight": 1.0}, {"path": str(long_manifest), "weight": 1.0}]
    streams = [make_stream(value, rank=rank, ranks=2, shuffle_buffer_size=20) for rank in range(2)]
    given, states = [], []
    for stream in streams:
        for _, batch in zip(range(2), stream.batches()):
            given += batch.ids
        states.append(stream.state_dict())
    waited = sum(group == 1 for s in states for p in s["positions"].values() for group, *_ in p["buffer"])
    assert waited > 5
    alone = make_stream(value, shuffle_buffer_size=20)
    alone.load_state_dict(states)
    pieces = [piece for r in next(iter(alone.positions.values()))["readers"][1:] for piece in r["pieces"]]
    first_rows = sum(len(range(start, stop, stride)) for _, start, stop, stride, *_ in pieces)
    total = len(long_manifest.read_text().splitlines())
    of_long = sum(not clip.startswith("clip") for clip in given)
    assert first_rows == total - of_long


def test_audio_comes_where_memory_cannot_be_shared(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error while a batch is sent would be a batch that never comes."""
    path = str(corpus / "shards")
    as_ever = read_epoch(make_stream(path, workers=1))

    def refuse(name: str) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert same_batches(read_epoch(make_stream(path, workers=1)), as_ever)


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
    def make() -> UtteranceStream:
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


@pytest.mark.parametrize("group_by_duration", [False, True])
@pytest.mark.parametrize("path", ["shards", "manifest.jsonl"])
@pytest.mark.parametrize(("before", "after"), [((2, 2), (1, 0)), ((1, 0), (3, 0)), ((3, 0), (2, 2)), ((2, 0), (2, 2))])
def test_other_ranks_or_workers_go_on_with_what_is_left(
    corpus: Path, path: str, group_by_duration: bool, before: tuple[int, int], after: tuple[int, int]
) -> None:
    """Nothing is lost or comes twice in the epoch, also where the numbers change again; the next one is whole."""
    options = {"batch_size": 2, "group_by_duration": group_by_duration, "max_samples": 40}
    whole = sorted(ids(read_epoch(make_stream(str(corpus / path), **options))))
    seen: list[str] = []
    rows = 0
    states: list[dict[str, Any]] = []
    runs = [before, after, (2, 0), (1, 1)]
    for number, (ranks, workers) in enumerate(runs):
        streams = [
            make_stream(str(corpus / path), rank=r, ranks=ranks, workers=workers, **options) for r in range(ranks)
        ]
        for rank, stream in enumerate(streams):
            if states:
                changes = stream.load_state_dict(states)
                assert bool(changes) == (
                    (ranks, max(workers, 1)) != (runs[number - 1][0], max(runs[number - 1][1], 1))
                )
            iterator = stream.batches()
            taken = list(iterator) if number == len(runs) - 1 else list(itertools.islice(iterator, 2 + rank))
            del iterator
            seen += ids(taken)
            rows += sum(batch.rows_read for batch in taken)
        states = json.loads(json.dumps([stream.state_dict() for stream in streams]))
    assert sorted(seen) == whole
    assert rows == len(whole)
    streams[0].next_epoch()
    assert sorted(ids(list(streams[0].batches()))) == whole


def test_another_seed_goes_on_with_what_is_left(corpus: Path) -> None:
    stream = make_stream(str(corpus / "shards"))
    iterator = stream.batches()
    seen = [next(iterator) for _ in range(4)]
    other = make_stream(str(corpus / "shards"), seed=5, batch_size=3)
    assert len(other.load_state_dict([stream.state_dict()])) == 2
    assert sorted(ids(seen + list(other.batches()))) == all_ids()
    sources = make_stream(str(corpus / "manifest.jsonl"))
    (change,) = sources.load_state_dict([stream.state_dict()])
    assert "the stream begins epoch 1" in change
    assert sources.epoch == 1
