"""Which row comes when: the order of the rows of one lane, from any position on.

Clips are spread over *lanes*, one for each DataLoader worker of each rank. A lane reads its shards row by row and orders
them in windows. The order within a lane follows from (seed, epoch, lane, position) alone, so a position is a few numbers,
and going on from one reads no more than a window again.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from finetune.data.sources import OpenSource, plain_row


SHARDS_A_LANE = 5  # with as many, a lane with one shard more than another works at most a fifth longer


@dataclass
class StreamOptions:
    """How rows become batches."""

    batch_size: int
    sample_rate: int
    seed: int = 0
    shuffle: bool = True
    shuffle_buffer_size: int = 512
    group_by_duration: bool = False
    max_samples: int = -1
    min_duration: float = 0.0
    max_duration: float = float("inf")
    text_normalization: str = "none"
    keep_empty_text: bool = False


class UnreadableShard(Exception):
    """A shard that cannot be read on; the text names it and the row."""


def lane_shards(
    group: list[tuple[OpenSource, int]], options: StreamOptions, epoch: int, lane: int, lanes: int
) -> list[tuple[OpenSource, int, bool]]:
    """The shards that a lane reads in an epoch as (source, number, shared); of shared ones it takes each `lanes`-th row.

    Lanes get the same number of whole shards; what is left over they share row by row, so that none is idle while
    others read on. Sharing makes every lane read these shards, so with many shards a lane it is cheaper to be uneven. With a limit
    on the samples all shards are shared.
    """
    order = list(range(len(group)))
    if options.max_samples >= 0:
        return [(*group[i], lanes > 1) for i in order]
    if options.shuffle:
        order = list(np.random.default_rng((options.seed, epoch, 1)).permutation(len(group)))
    whole = len(group) if len(group) >= SHARDS_A_LANE * lanes else len(group) // lanes * lanes
    return [(*group[i], False) for i in order[:whole][lane::lanes]] + [(*group[i], True) for i in order[whole:]]


def iterate_rows(dataset: Any) -> Iterator[dict[str, Any]]:
    """Rows of a one-shard IterableDataset.

    Its `__iter__` would give them to the first DataLoader worker only; `iter` leaves the sharding to the lanes.
    """
    for columns in dataset.iter(batch_size=16):
        for values in zip(*columns.values(), strict=True):
            yield dict(zip(columns, values, strict=True))


class GroupReader:
    """Reads the rows of one group of sources in order, from any position on, and starts again when told to."""

    def __init__(self, group: list[tuple[OpenSource, int]], options: StreamOptions, epoch: int, lane: int, lanes: int):
        self.group, self.options, self.epoch, self.lane, self.lanes = group, options, epoch, lane, lanes
        self.set_position({"passes": 0, "shard": 0, "row": 0, "seen": 0})

    def set_position(self, position: dict[str, int]) -> None:
        self.passes, self.shard, self.row, self.seen = (position[k] for k in ("passes", "shard", "row", "seen"))
        # A pass is as good as an epoch for the order of the shards; the factor keeps the two apart.
        self.shards = lane_shards(
            self.group, self.options, self.epoch + 1_000_003 * self.passes, self.lane, self.lanes
        )
        self.rows: Iterator[dict[str, Any]] | None = None

    def position(self) -> dict[str, int]:
        return {"passes": self.passes, "shard": self.shard, "row": self.row, "seen": self.seen}

    def restart(self) -> None:
        self.set_position({"passes": self.passes + 1, "shard": 0, "row": 0, "seen": 0})

    def next_row(self) -> tuple[OpenSource, str, dict[str, Any]] | None:
        """The next row of this lane as (source, place, row), or None at the end of the pass."""
        limit = self.options.max_samples
        while self.shard < len(self.shards):
            source, index, shared = self.shards[self.shard]
            if limit >= 0 and self.seen >= limit:
                return None
            if self.rows is None:
                dataset = source.shards[index]
                self.rows = iterate_rows(dataset.skip(self.row) if self.row else dataset)
            try:
                row = next(self.rows)
            except StopIteration:
                self.shard, self.row, self.rows = self.shard + 1, 0, None
                continue
            except Exception as error:
                raise UnreadableShard(
                    f"{source.shard_names[index]} cannot be read from row {self.row} on: {type(error).__name__}: {error}"
                ) from error
            place = f"{source.shard_names[index]} row {self.row}"
            self.row += 1
            self.seen += shared or limit >= 0
            if not shared or (self.seen - 1) % self.lanes == self.lane:
                return source, place, plain_row(row) if source.is_manifest else row
        return None


def read_lane(
    groups: list[list[tuple[OpenSource, int]]],
    weights: list[float] | None,
    options: StreamOptions,
    epoch: int,
    lane: int,
    lanes: int,
    position: dict[str, Any] | None,
) -> Iterator[tuple[OpenSource, str, dict[str, Any], dict[str, Any], bool]]:
    """Rows of one lane in training order, each with the position behind it and whether a batch has to end there."""
    readers = [GroupReader(group, options, epoch, lane, lanes) for group in groups]
    window, skip = 0, 0
    if position is not None:
        window, skip = position["window"], position["taken"]
        for reader, start in zip(readers, position["readers"], strict=True):
            reader.set_position(start)
    size = max(1, options.shuffle_buffer_size) if options.shuffle else 64
    while True:
        start = [reader.position() for reader in readers]
        random = np.random.default_rng((options.seed, epoch, lane, window, 2))
        rows, finished = _draw(readers, weights, random, size)
        order, batch_ends = order_window([row for _, _, row in rows], options, random)
        for taken in range(skip, len(rows)):
            position = {"readers": start, "window": window, "taken": taken + 1}
            yield *rows[order[taken]], position, taken + 1 in batch_ends
        if finished:
            return
        window, skip = window + 1, 0


def order_window(
    rows: list[dict[str, Any]], options: StreamOptions, random: np.random.Generator
) -> tuple[np.ndarray, set[int]]:
    """The order of a window's rows, and after how many of them a batch has to end.

    Grouped by duration, neighbours in length share a batch and the batches are shuffled; without it rows are shuffled.
    """
    order = random.permutation(len(rows)) if options.shuffle else np.arange(len(rows))
    if not options.group_by_duration:
        return order, set()
    durations = np.array([row_duration(row) or 0.0 for row in rows])
    order = order[np.argsort(durations[order], kind="stable")]
    batches = [order[i : i + options.batch_size] for i in range(0, len(order), options.batch_size)]
    if options.shuffle:
        batches = [batches[i] for i in random.permutation(len(batches))]
    ends = np.cumsum([len(batch) for batch in batches])
    return np.concatenate(batches) if batches else order, {int(end) for end in ends}


def row_duration(row: dict[str, Any]) -> float | None:
    """Seconds as the row states them, or None where it does not, or states no number."""
    duration = row.get("duration")
    is_number = isinstance(duration, int | float) and not isinstance(duration, bool) and math.isfinite(duration)
    return float(duration) if is_number else None


def _draw(
    readers: list[GroupReader], weights: list[float] | None, random: np.random.Generator, size: int
) -> tuple[list[tuple[OpenSource, str, dict[str, Any]]], bool]:
    """Up to `size` rows, and whether the epoch ends with them. The first group decides where it ends."""
    rows: list[tuple[OpenSource, str, dict[str, Any]]] = []
    while len(rows) < size:
        chosen = 0 if weights is None else int(random.choice(len(readers), p=weights))
        row = readers[chosen].next_row()
        if row is None and chosen == 0:
            return rows, True
        if row is None:
            readers[chosen].restart()
            row = readers[chosen].next_row()
            if row is None:  # this lane has no rows of that source
                continue
        rows.append(row)
    return rows, False
