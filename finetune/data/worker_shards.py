"""One lane's batches before decoding: rows are read into a buffer and drawn from it, from any position on."""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from finetune.data.batching import Buffer, Entry
from finetune.data.decode import BadClip, Unreachable
from finetune.data.filters import FilteredClip
from finetune.data.options import StreamOptions
from finetune.data.reader import Group, GroupReader, UnreadableShard, fetch
from finetune.data.utterances import examine, row_id

REPORT_AFTER_ROWS = 200
CHOICES_AT_ONCE = 1024
Position = dict[str, Any]
FINISHED: Position = {"finished": True}


@dataclass
class Report:
    """What was read and left out since the batch before."""

    rows_read: int = 0
    quarantined: list[dict[str, str]] = field(default_factory=list)
    filtered: dict[str, int] = field(default_factory=dict)
    error: str | None = None

    def filter(self, reason: str) -> None:
        self.filtered[reason] = self.filtered.get(reason, 0) + 1

    def quarantine(self, clip_id: str, place: str, reason: str) -> None:
        self.quarantined.append({"id": clip_id, "source": place, "reason": reason})


@dataclass
class Sources:
    """What is read: groups of shards, and the weights of a mixture.

    Attributes:
        groups: each is read as one.
        weights: chances of the groups; None for a single one.
        limits: rows of each group that take part; -1 for all.
    """

    groups: list[Group]
    weights: list[float] | None
    limits: list[int]

    def digest(self) -> str:
        """Tells these shards from others."""
        shards = [[shard.file, shard.first, shard.rows] for group in self.groups for _, shard in group]
        return hashlib.sha256(json.dumps([shards, self.weights]).encode()).hexdigest()


class Lane:
    """The batches of one lane of an epoch.

    Args:
        sources: what is read.
        options: how rows become batches.
        encode: text to token ids; raises BadClip.
        epoch: number of the epoch.
        lane, lanes: which one of how many.
        worker: number of the DataLoader worker, the same on all ranks; the draws follow from it.
        position: where to go on; None begins.
    """

    def __init__(
        self,
        sources: Sources,
        options: StreamOptions,
        encode: Callable[[str], list[int]],
        *,
        epoch: int,
        lane: int,
        lanes: int,
        worker: int,
        position: Position | None,
    ):
        self.sources, self.options, self.encode = sources, options, encode
        self.epoch, self.lane, self.worker = epoch, lane, worker
        self.readers = make_readers(sources, options, epoch, lane, lanes)
        self.buffer = Buffer(options.limits, options.shuffle, options.group_by_duration)
        self.report = Report()
        self.draws = self.drawn = 0
        self.exhausted = False
        self.waiting: Position | None = position
        self.choices: tuple[int, np.ndarray] | None = None

    def _restore(self, position: Position) -> None:
        """Goes to where a position was taken; clips that waited are read again."""
        for reader, start in zip(self.readers, position["readers"], strict=True):
            reader.set_position(start)
        self.draws, self.drawn, self.exhausted = position["draws"], position["drawn"], position["exhausted"]
        refs = [tuple(ref) for ref in np.asarray(position["buffer"]).reshape(-1, 4).tolist()]
        rows = {}
        for index, group in enumerate(self.sources.groups):
            wanted = {(shard, row) for g, _, shard, row in refs if g == index}
            found = fetch(group, wanted, self.options.read_retries)
            rows |= {(index, *place): row for place, row in found.items()}
        for ref in refs:
            self._take_in(ref, rows[ref[0], ref[2], ref[3]])

    def position(self) -> Position:
        """Behind the last batch."""
        if self.exhausted and not self.buffer.entries:
            return FINISHED
        return {
            "readers": [reader.position() for reader in self.readers],
            "draws": self.draws,
            "drawn": self.drawn,
            "exhausted": self.exhausted,
            "buffer": self.buffer.refs(),
        }

    def batches(self) -> Iterator[tuple[list[Entry], Report, Position]]:
        """Clips of each batch, what was left out before it, and the position behind it; no clips where there is only a report."""
        try:
            if self.waiting is not None:
                self._restore(self.waiting)
            while True:
                for _ in self._fill():
                    yield [], self._take_report(), self.position()
                if not self.buffer.entries:
                    break
                # Like lengths at the same step on all ranks; other draws need nothing in common.
                who = self.worker if self.buffer.group else self.lane
                entries = self.buffer.draw((self.options.seed, self.epoch, who, self.draws, 7), self.exhausted)
                self.draws += 1
                position = self.position()
                yield entries, self._take_report(), position
                if position == FINISHED:
                    return
        except (UnreadableShard, Unreachable) as error:
            self.report.error = str(error)
        yield [], self._take_report(), FINISHED

    def _take_report(self) -> Report:
        report, self.report = self.report, Report()
        return report

    def _fill(self) -> Iterator[None]:
        """Reads until the buffer is full; stops in between where nothing usable has come for long."""
        options, buffer = self.options, self.buffer
        size = max(options.shuffle_buffer_size, options.limits.clips)
        while not self.exhausted:
            full = len(buffer.entries) >= size or buffer.bytes >= options.shuffle_buffer_bytes
            if full if options.shuffle else buffer.holds_a_batch():
                return
            row = self._next_row()
            if row is None:
                self.exhausted = True
                return
            self._take_in(*row)
            if not buffer.entries and self.report.rows_read >= REPORT_AFTER_ROWS:
                yield

    def _take_in(self, ref: tuple[int, int, int, int], row: dict[str, Any]) -> None:
        source, shard = self.sources.groups[ref[0]][ref[2]]
        place = shard.place(ref[3])
        try:
            self.buffer.add(examine(source, place, ref, row, self.options, self.encode))
        except FilteredClip as reason:
            self.report.filter(str(reason))
        except BadClip as reason:
            self.report.quarantine(row_id(source, place, row), place, str(reason))

    def _next_row(self) -> tuple[tuple[int, int, int, int], dict[str, Any]] | None:
        """The next row with its reference, or None at the end of the epoch, which is where the first group ends."""
        while True:
            chosen = self._choose()
            reader = self.readers[chosen]
            found = reader.next_row()
            if found is None and chosen > 0:
                reader.restart()
                found = reader.next_row()
                if found is None:  # this lane has no rows of that source
                    continue
            if found is None:
                return None
            shard, row, content, first_time = found
            self.report.rows_read += first_time
            return (chosen, reader.passes, shard, row), content

    def _choose(self) -> int:
        """The group that the next row comes from."""
        if self.sources.weights is None:
            return 0
        block, place = divmod(self.drawn, CHOICES_AT_ONCE)
        if self.choices is None or self.choices[0] != block:
            random = np.random.default_rng((self.options.seed, self.epoch, self.lane, block, 2))
            self.choices = block, random.choice(len(self.readers), size=CHOICES_AT_ONCE, p=self.sources.weights)
        self.drawn += 1
        return int(self.choices[1][place])


def make_readers(sources: Sources, options: StreamOptions, epoch: int, lane: int, lanes: int) -> list[GroupReader]:
    """A reader for each group, at the beginning of the epoch."""
    return [
        GroupReader(
            group,
            limit=limit,
            skip=options.skip_samples,
            shuffle=options.shuffle,
            interleaved=options.interleave,
            seed=options.seed,
            epoch=epoch,
            lane=lane,
            lanes=lanes,
            retries=options.read_retries,
        )
        for group, limit in zip(sources.groups, sources.limits, strict=True)
    ]
