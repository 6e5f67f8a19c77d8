"""A sample of a data set's rows, not decoded: its texts, its longest utterances, and the batches that these make."""

import contextlib
import heapq
import itertools
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from finetune.data.audio_root import check_place
from finetune.data.batch import Batch, collate
from finetune.data.batching import Buffer, Entry, Ref
from finetune.data.decode import audio_seconds
from finetune.data.filters import FilteredUtterance
from finetune.data.options import StreamOptions
from finetune.data.order import chosen_pieces
from finetune.data.position import FINISHED
from finetune.data.quarantine import BadUtterance, Report
from finetune.data.reader import Sources, fetch
from finetune.data.retry import RETRIES, Unreachable, UnreadableShard
from finetune.data.shards import NumberedRows, Row, Shard
from finetune.data.sources import OpenSource
from finetune.data.stream import UtteranceStream
from finetune.data.utterances import DecodedUtterance, decode_all, examine, row_duration, row_language

ROWS_AT_MOST, SECONDS_AT_MOST = 200_000, 30.0
ROWS_OF_A_PIECE = 16  # at least, of what has to be opened for them
CANDIDATES = 4096
# Batches bounded by duration hold more audio of short utterances with little text.
BANDS = (1.0, 0.75, 0.5, 0.25)  # below these shares of the longest
BATCHES_A_BAND = 3
FETCHED_AT_ONCE = 32


def spread_rows(
    sources: Sources,
    options: StreamOptions,
    rows: int | None,
    seconds: float,
    lengths: bool = True,
    unread: list[str] | None = None,
) -> Iterator[tuple[Ref, Row]]:
    """Yield rows from all parts of what an epoch reads, or all of them where they are few.

    They come without the audio where the format allows that and lengths are known without it.

    Args:
        sources, options: of the stream; subset and seed count.
        rows: at most; all where there are no more and their number is known. None: all.
        seconds: after this time no shard is begun or read on.
        lengths: whether rows that do not state their length have to come with the audio that tells it.
        unread: gets the files of shards that cannot be read to their end.
    """
    until = time.monotonic() + seconds
    shares = [w / sum(sources.weights) for w in sources.weights] if sources.weights else [1.0]
    for g, (group, share, limit) in enumerate(zip(sources.groups, shares, sources.limits, strict=True)):
        known = [shard.rows for _, shard in group]
        pieces = chosen_pieces(known, limit, options.seed if options.shuffle else None, sources.skip(g, options))
        if limit < 0 or None not in known:  # else the subset is that of the first shards
            pieces = [pieces[i] for i in np.random.default_rng((options.seed, 17)).permutation(len(pieces))]
        bound = sys.maxsize if rows is None else round(rows * share)
        left = bound if limit < 0 else min(bound, limit)
        sizes = [piece.rows() for piece in pieces]
        few = rows is None or (None not in sizes and sum(size or 0 for size in sizes) <= left)
        of_a_piece = left if few else max(left // max(len(pieces), 1), ROWS_OF_A_PIECE)
        for piece in pieces:
            shard = group[piece.shard][1]
            try:
                for number, row in itertools.islice(read_light(shard, piece.start, lengths), min(of_a_piece, left)):
                    if (piece.stop is not None and number >= piece.stop) or time.monotonic() > until:
                        break
                    left -= 1
                    yield (g, 0, piece.shard, number), row
            except Exception:  # whatever a format raises; the stream reports it
                if unread is not None:
                    unread.append(shard.file)
            if left <= 0 or time.monotonic() > until:
                break


def read_light(shard: Shard, start: int, lengths: bool) -> NumberedRows:
    """Read a shard's rows from one on without their audio, where that is possible and `lengths` do not need it."""
    if shard.light is None:
        return shard.read(start)
    rows = shard.light(start)
    if lengths and (first := next(rows, None)) is not None:
        return shard.read(start) if row_duration(first[1]) is None else itertools.chain([first], rows)
    return rows


@dataclass
class Survey:
    """The costliest of the rows that were looked at."""

    looked: int = 0
    """Rows."""
    rows: int | None = None
    """Rows that an epoch reads; None where only reading tells."""
    longest: float = 0.0
    """Seconds of the longest utterance that the filters let pass."""
    by_seconds: list[Ref] = field(default_factory=list)
    """Longest first."""
    by_cells: list[Ref] = field(default_factory=list)
    """Largest product of length and text first."""
    bands: list[list[Ref]] = field(default_factory=list)
    """Where duration bounds the batches: utterances of similar length, those with the shortest texts first."""

    def __str__(self) -> str:
        of = "" if self.rows is None else f" of {self.rows:,}"
        return f"the longest of the {self.looked:,}{of} clips that were examined has {self.longest:.1f} s"


def survey_lengths(stream: UtteranceStream, rows: int = ROWS_AT_MOST, seconds: float = SECONDS_AT_MOST) -> Survey:
    """Find the utterances that cost most, by the column `duration` or the head of the audio, within bounds."""
    sources, options = stream.sources, stream.options
    found = Survey(rows=count_rows(sources, options))
    seen: list[tuple[float, int, Ref]] = []
    for ref, row in spread_rows(sources, options, rows, seconds):
        source, _ = sources.groups[ref[0]][ref[2]]
        found.looked += 1
        with contextlib.suppress(BadUtterance, FilteredUtterance, Unreachable, OSError):
            text = row.get(source.columns["text"])
            if not isinstance(text, str) or not text:
                continue
            length = length_of(source, row, options.read_retries)
            source.filters.check_duration(length)
            seen.append((length, len(text), ref))
    seen.sort(reverse=True)
    found.longest = seen[0][0] if seen else 0.0
    found.by_seconds = [ref for _, _, ref in seen[:CANDIDATES]]
    found.by_cells = [ref for _, _, ref in heapq.nlargest(CANDIDATES, seen, key=lambda u: u[0] * (u[1] + 1))]
    for share in BANDS if options.limits.seconds or options.limits.bounds else ():
        shorter = [u for u in seen if u[0] <= share * found.longest]
        size = options.limits.clips_of_length(shorter[0][0]) if shorter else 0
        band = shorter[: min(BATCHES_A_BAND * size, CANDIDATES)]
        found.bands += [[ref for _, _, ref in sorted(band, key=lambda u: u[1])]]
    return found


def count_languages(stream: UtteranceStream, rows: int, seconds: float) -> Counter[str]:
    """Count the languages that rows from all over a stream's sources name, within bounds; '' is none."""
    sources = stream.sources
    found = spread_rows(sources, stream.options, rows, seconds, lengths=False)
    return Counter(row_language(sources.groups[ref[0]][ref[2]][0], row) for ref, row in found)


def length_of(source: OpenSource, row: Row, retries: int = RETRIES) -> float:
    """Return the seconds of a row's audio, as the row says or by the head of the file.

    Raises:
        BadUtterance: it cannot be read; Unreachable: storage does not answer.
    """
    seconds = row_duration(row)
    if seconds is not None:
        return seconds
    offset = row.get("offset") if source.is_manifest else None
    audio = row.get(source.columns["audio"])
    check_place(audio, source.folder, source.root)
    return audio_seconds(audio, source.folder, offset, retries)


def count_rows(sources: Sources, options: StreamOptions) -> int | None:
    """Return the rows of all sources that an epoch may read; None where a source does not tell."""
    count = 0
    for g, (group, limit) in enumerate(zip(sources.groups, sources.limits, strict=True)):
        known = [shard.rows for _, shard in group]
        if None in known:
            return None
        count += sum(piece.rows() or 0 for piece in chosen_pieces(known, limit, None, sources.skip(g, options)))
    return count


def batch_of(stream: UtteranceStream, refs: list[Ref]) -> Batch | None:
    """Make the batch that the first usable rows fill by the stream's own bounds; None where none can be used."""
    buffer, utterances = Buffer(stream.options.limits, shuffle=False, group=False), {}
    for entry, utterance in _usable(stream, refs):
        utterances[entry.ref] = utterance
        buffer.add(entry)
        if buffer.holds_a_batch():
            break
    if not buffer.entries:
        return None
    return collate([utterances[entry.ref] for entry in buffer.draw((), last=True)], 0, FINISHED)


def _usable(stream: UtteranceStream, refs: list[Ref]) -> Iterator[tuple[Entry, DecodedUtterance]]:
    """Yield the rows that can be trained on, decoded, in the order of `refs`."""
    options = stream.options
    for start in range(0, len(refs), FETCHED_AT_ONCE):
        some = refs[start : start + FETCHED_AT_ONCE]
        rows: dict[Ref, Row] = {}
        for g, group in enumerate(stream.sources.groups):
            wanted = [(shard, row) for own, _, shard, row in some if own == g]
            with contextlib.suppress(UnreadableShard):
                rows |= {(g, 0, *at): row for at, row in fetch(group, wanted, options.read_retries).items()}
        for ref in (ref for ref in some if ref in rows):
            source, shard = stream.sources.groups[ref[0]][ref[2]]
            with contextlib.suppress(BadUtterance, FilteredUtterance, Unreachable):
                entry = examine(source, shard.place(ref[3]), ref, rows[ref], options, stream.encode)
                for utterance in decode_all([entry], options, stream.epoch, Report()):
                    yield entry, utterance
