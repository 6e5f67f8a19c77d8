"""A look at some rows of a data set without decoding its audio: its texts, and the longest clips with the batches that they make."""

import contextlib
import heapq
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from finetune.data.audio_root import check_place
from finetune.data.batching import Buffer
from finetune.data.decode import BadClip, Unreachable, audio_seconds
from finetune.data.filters import FilteredClip
from finetune.data.options import StreamOptions
from finetune.data.order import chosen_pieces
from finetune.data.reader import UnreadableShard, fetch
from finetune.data.shards import NumberedRows, Row, Shard
from finetune.data.sources import OpenSource
from finetune.data.stream import Batch, ClipStream, collate, decode_all
from finetune.data.utterances import examine, row_duration
from finetune.data.worker_shards import FINISHED, Report, Sources

ROWS_AT_MOST, SECONDS_AT_MOST = 200_000, 30.0
ROWS_OF_A_PIECE = 16  # at least, of what has to be opened for them
CANDIDATES = 4096
# Batches that are bounded by duration hold more audio where clips are short and say little: bands below so much of the longest clip.
BANDS = (1.0, 0.75, 0.5, 0.25)
BATCHES_A_BAND = 3
FETCHED_AT_ONCE = 32

Ref = tuple[int, int, int, int]
"""Group, pass, shard and row, as in `finetune.data.batching.Entry`."""


def spread_rows(
    sources: Sources, options: StreamOptions, rows: int, seconds: float, lengths: bool = True
) -> Iterator[tuple[Ref, Row]]:
    """Rows from all parts of what an epoch reads, all of them where they are few; without the audio where the format allows that
    and lengths are told nevertheless.

    Args:
        sources: as the stream has them.
        options: of the stream; subset and seed count.
        rows: at most.
        seconds: no shard is begun, and none read on, after this time.
        lengths: whether rows that do not tell their length have to come with the audio that does.
    """
    until = time.monotonic() + seconds
    shares = [w / sum(sources.weights) for w in sources.weights] if sources.weights else [1.0]
    for g, (group, share, limit) in enumerate(zip(sources.groups, shares, sources.limits, strict=True)):
        known = [shard.rows for _, shard in group]
        pieces = chosen_pieces(known, limit, options.seed if options.shuffle else None, options.skip_samples)
        if limit < 0 or None not in known:  # else the subset is that of the first shards
            pieces = [pieces[i] for i in np.random.default_rng((options.seed, 17)).permutation(len(pieces))]
        left = round(rows * share) if limit < 0 else min(round(rows * share), limit)
        of_a_piece = max(left // max(len(pieces), 1), ROWS_OF_A_PIECE)
        for piece in pieces:
            shard = group[piece.shard][1]
            with contextlib.suppress(UnreadableShard, OSError):  # the stream says more of it
                for number, row in itertools.islice(_read(shard, piece.start, lengths), min(of_a_piece, left)):
                    if (piece.stop is not None and number >= piece.stop) or time.monotonic() > until:
                        break
                    left -= 1
                    yield (g, 0, piece.shard, number), row
            if left <= 0 or time.monotonic() > until:
                break


def _read(shard: Shard, start: int, lengths: bool) -> NumberedRows:
    """Rows, with their lengths or with the audio that tells them where these are wanted."""
    if shard.light is not None and not lengths:
        return shard.light(start)
    if shard.light is not None:
        rows = shard.light(start)
        first = next(rows, None)
        if first is None or row_duration(first[1]) is not None:
            return rows if first is None else itertools.chain([first], rows)
    return shard.read(start)


@dataclass
class Survey:
    """What was found among the rows that were looked at."""

    looked: int = 0
    """Rows."""
    rows: int | None = None
    """Rows that an epoch reads; None where only reading tells."""
    longest: float = 0.0
    """Seconds of the longest clip that the filters let pass."""
    by_seconds: list[Ref] = field(default_factory=list)
    """Longest clips first."""
    by_cells: list[Ref] = field(default_factory=list)
    """Largest products of length and text first."""
    bands: list[list[Ref]] = field(default_factory=list)
    """Where duration bounds the batches: clips of like length, those with the shortest texts first."""

    def __str__(self) -> str:
        of = "" if self.rows is None else f" of {self.rows}"
        return f"{self.looked}{of} rows looked at, the longest clip has {self.longest:.1f} s"


def survey_lengths(stream: ClipStream, rows: int = ROWS_AT_MOST, seconds: float = SECONDS_AT_MOST) -> Survey:
    """Looks for the clips that cost most. Lengths come from the column `duration`, or from the head of the audio.

    Args:
        stream: training clips.
        rows, seconds: bounds of the search.
    """
    sources, options = stream.sources, stream.options
    found = Survey(rows=count_rows(sources, options))
    seen: list[tuple[float, int, Ref]] = []
    for ref, row in spread_rows(sources, options, rows, seconds):
        source, _ = sources.groups[ref[0]][ref[2]]
        found.looked += 1
        with contextlib.suppress(BadClip, FilteredClip, Unreachable, OSError):
            text = row.get(source.columns["text"])
            if not isinstance(text, str) or not text:
                continue
            length = length_of(source, row)
            source.filters.check_duration(length)
            seen.append((length, len(text), ref))
    seen.sort(reverse=True)
    found.longest = seen[0][0] if seen else 0.0
    found.by_seconds = [ref for _, _, ref in seen[:CANDIDATES]]
    found.by_cells = [ref for _, _, ref in heapq.nlargest(CANDIDATES, seen, key=lambda clip: clip[0] * (clip[1] + 1))]
    for share in BANDS if options.limits.seconds or options.limits.bounds else ():
        shorter = [clip for clip in seen if clip[0] <= share * found.longest]
        size = options.limits.clips_of_length(shorter[0][0]) if shorter else 0
        band = shorter[: min(BATCHES_A_BAND * size, CANDIDATES)]
        found.bands += [[ref for _, _, ref in sorted(band, key=lambda clip: clip[1])]]
    return found


def length_of(source: OpenSource, row: Row) -> float:
    """Seconds of a row's clip, as the row says or by the head of its audio.

    Raises:
        BadClip: it cannot be read; Unreachable: storage does not answer.
    """
    seconds = row_duration(row)
    if seconds is not None:
        return seconds
    offset = row.get("offset") if source.is_manifest else None
    audio = row.get(source.columns["audio"])
    check_place(audio, source.folder, source.root)
    return audio_seconds(audio, source.folder, offset)


def count_rows(sources: Sources, options: StreamOptions) -> int | None:
    """Rows of all sources that an epoch may read."""
    counts = []
    for group, limit in zip(sources.groups, sources.limits, strict=True):
        known = [shard.rows for _, shard in group]
        if None in known:
            return None
        pieces = chosen_pieces(known, limit, None, options.skip_samples)
        counts.append(sum(piece.rows() or 0 for piece in pieces))
    return sum(counts)


def batch_of(stream: ClipStream, refs: list[Ref]) -> Batch | None:
    """The batch that the first usable clips make by the stream's own bounds; None where none of them can be used.

    Args:
        stream: training clips.
        refs: candidates, the first ones first.
    """
    options, clips = stream.options, {}
    buffer = Buffer(options.limits, shuffle=False, group=False)
    for start in range(0, len(refs), FETCHED_AT_ONCE):
        some = refs[start : start + FETCHED_AT_ONCE]
        rows: dict[Ref, Row] = {}
        for g, group in enumerate(stream.sources.groups):
            wanted = [(shard, row) for own, _, shard, row in some if own == g]
            with contextlib.suppress(UnreadableShard):
                rows |= {(g, 0, *at): row for at, row in fetch(group, wanted, options.read_retries).items()}
        for ref in some:
            if ref not in rows:
                continue
            source, shard = stream.sources.groups[ref[0]][ref[2]]
            with contextlib.suppress(BadClip, FilteredClip, Unreachable):
                entry = examine(source, shard.place(ref[3]), ref, rows[ref], options, stream.encode)
                for clip in decode_all([entry], options, stream.epoch, Report()):
                    clips[ref] = clip
                    buffer.add(entry)
            if buffer.entries and buffer.holds_a_batch():
                return collate([clips[entry.ref] for entry in buffer.draw((), last=True)], 0, FINISHED)
    if not buffer.entries:
        return None
    return collate([clips[entry.ref] for entry in buffer.draw((), last=True)], 0, FINISHED)
