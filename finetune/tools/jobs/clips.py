"""The clips of a job: cut into shards, alike each time, and read by a worker."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from finetune.data.batch import Batch, collate
from finetune.data.batching import Buffer, Entry
from finetune.data.filters import FilteredUtterance
from finetune.data.options import StreamOptions
from finetune.data.order import Piece, deal
from finetune.data.position import FINISHED
from finetune.data.quarantine import BadUtterance, Record
from finetune.data.reader import Group, rows_from
from finetune.data.retry import RETRIES, Unreachable, UnreadableShard
from finetune.data.shards import Row, Shard
from finetune.data.sources import OpenSource
from finetune.data.utterances import decode, examine, row_id

Pieces = list[Piece]
"""Rows of a job's data: stretches of the shards of its sources."""


def cut_into_shards(group: Group, clips: int, max_samples: int = -1) -> list[Pieces]:
    """Cut data into shards of a job, in their order, of so many rows each.

    What does not tell its number of rows (several tar files) is a shard by itself.

    Args:
        max_samples: only the first so many rows; -1: all.
    """
    shards: list[Pieces] = [[]]
    room, left = clips, max_samples
    for index, (source, shard) in enumerate(group):
        rows = known_rows(source, shard)
        if rows is None and left >= 0:
            rows = count_rows(source, shard)
        if rows is None:
            shards += [[Piece(index, 0, None)], []]
            room = clips
            continue
        rows, start = rows if left < 0 else min(rows, left), 0
        left = left if left < 0 else left - rows
        while start < rows:
            stop = min(start + room, rows)
            shards[-1].append(Piece(index, start, stop))
            room, start = room - (stop - start), stop
            if not room:
                shards.append([])
                room = clips
        if left == 0:
            break
    return [pieces for pieces in shards if pieces]


def known_rows(source: OpenSource, shard: Shard) -> int | None:
    """Return the rows of a shard; None where only reading tells. An audio folder's are known by its metadata."""
    is_whole = len(source.shards) == 1 and not source.remote
    return source.clips if shard.rows is None and is_whole else shard.rows


def count_rows(source: OpenSource, shard: Shard) -> int:
    """Return the rows of a shard by reading it; where it cannot be read on, that row is the last.

    Raises:
        Unreachable: storage does not answer.
    """
    light = shard if shard.light is None else replace(shard, read=shard.light)
    rows = 0
    try:
        for number, _ in rows_from(light, 0, RETRIES if source.remote else 0):
            rows = number + 1
    except UnreadableShard as error:
        if error.is_outage(source.remote):
            raise Unreachable(str(error)) from error
        rows += 1
    return rows


def with_counts(group: Group, pieces: Pieces) -> Pieces:
    """Return pieces that all tell their rows, which may need reading them."""
    return [p if p.stop is not None else p._replace(stop=count_rows(*group[p.shard])) for p in pieces]


def halves(pieces: Pieces) -> list[Pieces]:
    """Return both halves of pieces that tell their rows; none where there is but one row."""
    if sum(piece.rows() or 0 for piece in pieces) < 2:
        return []
    return [deal(pieces, part, 2) for part in (0, 1)]


@dataclass
class Clips:
    """The clips of a shard of a job, or of a part of it, as a worker gets them. They are read once."""

    group: Group
    pieces: Pieces
    read: int = 0
    """Rows so far."""
    ids: dict[str, str] = field(default_factory=dict)
    """Of the rows read so far, in the order of the data, by place (file and line or row)."""
    failed: list[Record] = field(default_factory=list)
    """What could not be used: kind, id, source (its place) and reason."""
    filtered: Counter[str] = field(default_factory=Counter)

    def rows(self) -> Iterator[tuple[OpenSource, str, tuple[int, int], Row]]:
        """Yield source, place, (shard, row) and content of each row. Where a shard is damaged, that row and those
        behind it are noted as unreadable.

        Raises:
            Unreachable: storage does not answer.
        """
        for piece in self.pieces:
            source, shard = self.group[piece.shard]
            following = piece.start
            try:
                for number, row in rows_from(shard, piece.start, RETRIES if source.remote else 0):
                    if piece.stop is not None and number >= piece.stop:
                        break
                    place, following = shard.place(number), number + 1
                    self.read += 1
                    self.ids[place] = row_id(source, place, row)
                    yield source, place, (piece.shard, number), row
            except UnreadableShard as error:
                if error.is_outage(source.remote):
                    raise Unreachable(str(error)) from error
                for number in range(following, following + 1 if piece.stop is None else piece.stop):
                    self.read += 1
                    self.fail("unreadable", shard.place(number), str(error))

    def fail(self, kind: str, place: str, reason: str) -> None:
        """Note a clip that cannot be used."""
        self.failed.append({"kind": kind, "id": self.ids.get(place, place), "source": place, "reason": reason})

    def batches(
        self, options: StreamOptions, encode: Callable[[str], list[int]]
    ) -> Iterator[tuple[Batch, list[Entry]]]:
        """Yield decoded batches of like length, the longest first, each with the entry of each clip in it (id, place,
        text, seconds). What is bad or filtered is noted here and is in no batch.

        `options.limits` bound a batch, `options.shuffle_buffer_bytes` the audio that waits to be sorted.
        """
        options = replace(options, group_by_duration=True)  # lengths are read where rows do not state them
        entries, held = [], 0
        for source, place, (shard, number), row in self.rows():
            try:
                entries.append(examine(source, place, (0, 0, shard, number), row, options, encode))
                held += entries[-1].held_bytes
            except FilteredUtterance as reason:
                self.filtered[str(reason)] += 1
            except BadUtterance as reason:
                self.fail("bad", place, str(reason))
            if held >= options.shuffle_buffer_bytes:
                yield from self._by_length(entries, options)
                entries, held = [], 0
        yield from self._by_length(entries, options)

    def _by_length(self, entries: list[Entry], options: StreamOptions) -> Iterator[tuple[Batch, list[Entry]]]:
        buffer = Buffer(options.limits, shuffle=False, group=False)
        for entry in sorted(entries, key=lambda entry: (-entry.seconds, entry.ref)):
            buffer.add(entry)
        while buffer.entries:
            decoded = []
            for entry in buffer.draw((), last=True):
                try:
                    decoded.append((decode(entry, options, 0), entry))
                except FilteredUtterance as reason:
                    self.filtered[str(reason)] += 1
                except BadUtterance as reason:
                    self.fail("bad", entry.place, str(reason))
            if decoded:
                yield collate([clip for clip, _ in decoded], 0, FINISHED), [entry for _, entry in decoded]
