"""Batching by duration: which of the utterances in a worker shard's buffer make the next batch.

With `group_by_duration` the buffer is ordered by length and cut into bands of a few batches each; a band is drawn at
random, its utterances are ordered by their number of tokens and cut into batches, and one of these is drawn. So a
batch holds utterances of similar length and similar number of tokens, no bucket bounds have to be found beforehand,
and every band is as likely as its share of the audio. The draws follow from (seed, epoch, worker, number of the draw)
and not from the rank: at the same step all ranks draw the same part of their distributions of lengths, so that none
waits long for another.
"""

import bisect
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from finetune.data.sources import OpenSource

Ref = tuple[int, int, int, int]
"""Group of sources, pass over it, shard of the group, row of the shard."""
REF = struct.Struct("4q")
BATCHES_A_BAND = 3
BANDS = 16  # at least, before a band holds more than one batch: wider ones would pad more audio than they save tokens
TOLERANCE = 1e-3  # seconds, of the lengths in bounds


@dataclass(slots=True)
class Entry:
    """An utterance that was examined and waits for its batch, not decoded yet."""

    ref: Ref
    seconds: float
    tokens: list[int]
    cells: int
    """Cells of its alignment lattice, T x (U + 1)."""
    id: str
    place: str
    text: str
    language: str
    audio: object
    """As `finetune.data.decode.decode_audio` takes it."""
    source: "OpenSource"
    offset: float | None
    has_offset: bool
    """Whether the row names an offset, which makes it a part of a file."""
    duration: float | None
    held_bytes: int
    """Memory that it takes while it waits."""
    packed_ref: bytes = b""

    def __post_init__(self) -> None:
        self.packed_ref = REF.pack(*self.ref)


def bound_at(bounds: Iterable[Sequence[float]], seconds: float) -> int:
    """Return the utterances that a batch may hold whose longest has so many seconds.

    `bounds` are pairs (seconds, utterances) by seconds; the last one also holds for longer utterances.
    """
    most = 0
    for upto, utterances in bounds:
        most = int(utterances)
        if seconds <= upto + TOLERANCE:
            break
    return most


def lower_bounds(bounds: list[list[float]], seconds: float, utterances: int) -> None:
    """Let batches whose longest has at least so many seconds hold at most so many utterances, in place."""
    for pair in bounds:
        if seconds <= pair[0] + TOLERANCE or pair is bounds[-1]:
            pair[1] = min(pair[1], utterances)


@dataclass(frozen=True)
class BatchLimits:
    """What a batch may hold. The first limit that is met ends it; one utterance is always a batch."""

    clips: int = 0
    """Utterances. 0: no limit."""
    seconds: float = 0.0
    """Audio with padding: number of utterances times the longest. 0: no limit."""
    cells: int = 0
    """Lattice cells of all utterances, which the loss computes with. 0: no limit."""
    bounds: tuple[tuple[float, int], ...] = ()
    """As in `bound_at`."""

    def clips_of_length(self, seconds: float) -> int:
        """Return how many utterances of a length make a batch."""
        by_seconds = int(self.seconds / max(seconds, 1e-3)) if self.seconds else 2**31
        if self.bounds:
            by_seconds = min(by_seconds, bound_at(self.bounds, seconds))
        return max(1, min(self.clips or 2**31, by_seconds))


class Buffer:
    """Utterances that wait for a batch.

    With `shuffle` batches are drawn at random, and `group` puts similar lengths together; else they come in order.
    """

    def __init__(self, limits: BatchLimits, shuffle: bool, group: bool):
        self.limits, self.shuffle, self.group = limits, shuffle, group and shuffle
        self.entries: list[Entry] = []
        self.bytes = 0

    def _key(self, entry: Entry) -> Any:
        return (-entry.seconds, len(entry.tokens), entry.ref) if self.group else entry.ref

    def add(self, entry: Entry) -> None:
        """Insert an utterance at a place that does not depend on when it came, the same after a resume."""
        if self.shuffle:
            bisect.insort(self.entries, entry, key=self._key)
        else:
            self.entries.append(entry)
        self.bytes += entry.held_bytes

    def refs(self) -> np.ndarray:
        """Return the (n, 4) refs of the waiting utterances, in their order."""
        return np.frombuffer(b"".join([entry.packed_ref for entry in self.entries]), dtype=np.int64).reshape(-1, 4)

    def holds_a_batch(self) -> bool:
        """Return whether reading on would not change the next batch; never where batches are drawn at random."""
        if self.shuffle:
            return False
        taken = self._head(range(len(self.entries)))
        return len(taken) < len(self.entries) or 0 < self.limits.clips == len(taken)

    def draw(self, seed: tuple[int, ...], last: bool) -> list[Entry]:
        """Take the next batch out of the buffer, which is not empty.

        `last`: nothing comes after what is in the buffer, so that smaller batches are taken too.
        """
        places: Sequence[int] = range(len(self.entries))
        if self.shuffle:
            random = np.random.default_rng(seed)
            places = self._alike(random, last) if self.group else random.permutation(len(self.entries)).tolist()
        places = places if self.group else self._head(places)
        batch = [self.entries[place] for place in places]
        for place in sorted(places, reverse=True):
            del self.entries[place]
        self.bytes -= sum(entry.held_bytes for entry in batch)
        return batch

    def _head(self, places: Sequence[int]) -> Sequence[int]:
        """Return the first places, as many as make a batch."""
        longest, cells = 0.0, 0
        for n, place in enumerate(places):
            entry = self.entries[place]
            longest, cells = max(longest, entry.seconds), cells + entry.cells
            if n and (n >= self.limits.clips_of_length(longest) or (self.limits.cells and cells > self.limits.cells)):
                return places[:n]
        return places[: self.limits.clips or None]

    def _alike(self, random: np.random.Generator, last: bool) -> list[int]:
        """Draw a batch of similar utterances."""
        bands = self._bands(last)
        start, stop = bands[int(random.random() * len(bands))]
        size = self.limits.clips_of_length(self.entries[start].seconds)
        # From either end, so that what does not fill a batch is not always of the same kind.
        sign = 1 if random.random() < 0.5 else -1
        entries = self.entries
        band = sorted(range(start, stop), key=lambda place: (sign * len(entries[place].tokens), entries[place].ref))
        batches = []
        while band:
            cells = np.cumsum([entries[place].cells for place in band[:size]])
            count = int(np.searchsorted(cells, self.limits.cells, side="right")) if self.limits.cells else size
            batches.append(band[: max(count, 1)])
            band = band[max(count, 1) :]
        if not last and len(batches) > 1 and len(batches[-1]) < size:
            batches.pop()  # the rest of the band waits for more of its kind
        return batches[int(random.random() * len(batches))]

    def _bands(self, last: bool) -> list[tuple[int, int]]:
        """Cut the ordered utterances into bands of up to BATCHES_A_BAND batches; the last may hold fewer."""
        bands, start, n, size = [], 0, len(self.entries), 0
        while start < n:
            before, size = size, self.limits.clips_of_length(self.entries[start].seconds)
            stop = min(start + size * min(max(n // (BANDS * size), 1), BATCHES_A_BAND), n)
            if bands and stop - start < size and not last:
                # Less than a batch: where batches of that length are larger it waits for more of its kind.
                if size == before:
                    bands[-1] = (bands[-1][0], stop)
                break
            bands.append((start, stop))
            start = stop
        return bands
