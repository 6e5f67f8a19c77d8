"""The batches of one worker shard: rows are read into a buffer, drawn from it and decoded."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from finetune.data.batch import Batch, collate
from finetune.data.batching import Buffer, Entry, Ref
from finetune.data.filters import FilteredUtterance
from finetune.data.options import StreamOptions
from finetune.data.position import FINISHED, Position
from finetune.data.quarantine import REPORT_AFTER_ROWS, BadUtterance, Report
from finetune.data.reader import Sources, fetch, make_readers
from finetune.data.retry import Unreachable, UnreadableShard
from finetune.data.shards import Row
from finetune.data.utterances import decode_all, examine, row_id

CHOICES_AT_ONCE = 1024


@dataclass
class WorkerShard:
    """The part of an epoch that one DataLoader worker of one rank reads."""

    sources: Sources
    options: StreamOptions
    encode: Callable[[str], list[int]]
    epoch: int
    number: int
    """Which worker shard of `count`."""
    count: int
    worker: int
    """Number of the DataLoader worker, the same on all ranks; the draws follow from it."""
    start: Position | None
    """Where to go on; None begins."""

    def __post_init__(self) -> None:
        options = self.options
        self.readers = make_readers(self.sources, options, self.epoch, self.number, self.count)
        self.buffer = Buffer(options.limits, options.shuffle, options.group_by_duration)
        self.report = Report()
        self.draws = self.drawn = 0
        self.exhausted = False
        self.choices: tuple[int, np.ndarray] | None = None

    def _restore(self, position: Position) -> None:
        """Go to where a position was taken, and read the rows again that waited in the buffer."""
        for reader, start in zip(self.readers, position["readers"], strict=True):
            reader.set_position(start)
        self.draws, self.drawn, self.exhausted = position["draws"], position["drawn"], position["exhausted"]
        refs: list[Ref] = [tuple(ref) for ref in np.asarray(position["buffer"]).reshape(-1, 4).tolist()]
        rows: dict[tuple[int, int, int], Row] = {}
        for index, group in enumerate(self.sources.groups):
            wanted = {(shard, row) for g, _, shard, row in refs if g == index}
            found = fetch(group, wanted, self.options.read_retries)
            rows |= {(index, *place): row for place, row in found.items()}
        for ref in refs:
            self._examine(ref, rows[ref[0], ref[2], ref[3]])

    def position(self) -> Position:
        """Return the position behind the last batch."""
        if self.exhausted and not self.buffer.entries:
            return FINISHED
        return {
            "readers": [reader.position() for reader in self.readers],
            "draws": self.draws,
            "drawn": self.drawn,
            "exhausted": self.exhausted,
            "buffer": self.buffer.refs(),
        }

    def batches(self) -> Iterator[Batch]:
        """Yield the batches, with what was left out before and the position behind; some only report."""
        try:
            if self.start is not None:
                self._restore(self.start)
            while True:
                for _ in self._fill():
                    yield self._batch([])
                if not self.buffer.entries:
                    break
                # Similar lengths at the same step on all ranks; other draws need nothing in common.
                who = self.worker if self.buffer.group else self.number
                entries = self.buffer.draw((self.options.seed, self.epoch, who, self.draws, 7), self.exhausted)
                self.draws += 1
                batch = self._batch(entries)
                yield batch
                if batch.position == FINISHED:
                    return
        except (UnreadableShard, Unreachable) as error:
            self.report.error = str(error)
        yield self._batch([])

    def _batch(self, entries: list[Entry]) -> Batch:
        """Decode a batch, and report what was left out since the last one."""
        utterances = decode_all(entries, self.options, self.epoch, self.report)
        report, self.report = self.report, Report()
        batch = collate(utterances, self.number, self.position(), report)
        if utterances and self.options.features is not None:
            # Dither follows from the batch's place, so that it is the same after a resume.
            seed = (self.options.seed, self.epoch, self.number, self.draws, 23)
            batch.mel_BFM, batch.mel_lengths_B = self.options.features(batch.audio_BS, batch.audio_lengths_B, seed)
        return batch

    def _fill(self) -> Iterator[None]:
        """Read until the buffer is full; yields in between where nothing usable has come for long."""
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
            self._examine(*row)
            if not buffer.entries and self.report.rows_read >= REPORT_AFTER_ROWS:
                yield

    def _examine(self, ref: Ref, row: Row) -> None:
        """Add a row to the buffer, or to the report."""
        source, shard = self.sources.groups[ref[0]][ref[2]]
        place = shard.place(ref[3])
        try:
            self.buffer.add(examine(source, place, ref, row, self.options, self.encode))
        except FilteredUtterance as reason:
            self.report.count_filtered(str(reason))
        except BadUtterance as reason:
            self.report.quarantine(row_id(source, place, row), place, str(reason))

    def _next_row(self) -> tuple[Ref, Row] | None:
        """Return the next row and its ref, or None at the end of the epoch, which is where the first group ends."""
        while True:
            chosen = self._choose()
            reader = self.readers[chosen]
            found = reader.next_row()
            if found is None and chosen > 0:
                reader.restart()
                found = reader.next_row()
                if found is None:  # this worker shard has no rows of that source
                    continue
            if found is None:
                return None
            shard, row, content, first_time = found
            self.report.rows_read += first_time
            return (chosen, reader.passes, shard, row), content

    def _choose(self) -> int:
        """Draw the group that the next row comes from."""
        if self.sources.weights is None:
            return 0
        block, place = divmod(self.drawn, CHOICES_AT_ONCE)
        if self.choices is None or self.choices[0] != block:
            self.choices = block, self._draw_groups(block, self.sources.weights)
        self.drawn += 1
        return int(self.choices[1][place])

    def _draw_groups(self, block: int, weights: list[float]) -> np.ndarray:
        """Draw the groups of some rows. Those of rehearsal come at even distances, which keeps their share in a small
        epoch too; which one of them it is, or of the others, is drawn by weight."""
        random = np.random.default_rng((self.options.seed, self.epoch, self.number, block, 2))
        new = self.sources.new_groups
        if new >= len(weights):
            return random.choice(len(weights), size=CHOICES_AT_ONCE, p=weights)
        share = sum(weights[new:])
        first = np.random.default_rng((self.options.seed, self.epoch, self.number, 31)).random()
        rows = np.arange(CHOICES_AT_ONCE + 1) + block * CHOICES_AT_ONCE
        is_old = np.diff(np.floor(rows * share + first)) > 0
        among_new = random.choice(new, size=CHOICES_AT_ONCE, p=np.array(weights[:new]) / (1 - share))
        among_old = random.choice(len(weights) - new, size=CHOICES_AT_ONCE, p=np.array(weights[new:]) / share)
        return np.where(is_old, new + among_old, among_new)
