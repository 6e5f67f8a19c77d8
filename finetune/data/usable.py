"""How much of the training data is left: what filters, quarantine and alignments take, judged without decoding."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from finetune.data.batching import Entry
from finetune.data.decode import local_file
from finetune.data.filters import FilteredUtterance, in_words
from finetune.data.order import chosen_pieces
from finetune.data.quarantine import BadUtterance, Reasons, kind_of
from finetune.data.retry import Unreachable
from finetune.data.shards import Row, Shard
from finetune.data.sources import OpenSource
from finetune.data.stream import UtteranceStream
from finetune.data.survey import length_of, spread_rows
from finetune.data.utterances import contained, examine, row_duration, row_id
from finetune.errors import UserError

ROWS_AT_MOST, SECONDS_AT_MOST = 20_000, 10.0
WARNED_ABOVE, REFUSED_ABOVE = 0.2, 0.5  # shares that are left out
JUDGED_TOGETHER = 512  # utterances whose alignments are looked for at once
SOURCES_NAMED = 4  # of a mixture, with how often they are passed over; of more, those with most and least


@dataclass
class Tally:
    """What became of the rows of one source of a mixture, or of all sources that are read as one."""

    looked: int = 0
    seconds: float = 0.0
    """Of all rows whose length could be told."""
    kept: list[tuple[float, list[int]]] = field(default_factory=list)
    """Seconds and tokens of what can be trained on."""
    filtered: Counter[str] = field(default_factory=Counter)
    bad: Reasons = field(default_factory=Reasons)


@dataclass
class Usable:
    """What of the data is trained on; of rows that were not looked at, the same share as of the others."""

    looked: int
    rows: int | None
    """None where only reading tells: all figures are then those of the rows that were looked at."""
    is_estimate: bool
    clips: int
    seconds: float
    all_seconds: float
    left_out: Counter[str]
    """Clips by the reason in words, those for quarantine too."""
    bad: int
    """Those for quarantine."""
    epoch_clips: float = 0.0
    """Of an epoch; 0 where only reading tells."""
    epoch_seconds: float = 0.0
    passes_of_epoch: dict[str, float] = field(default_factory=dict)
    """Over the sources of a mixture, whose epoch is one pass over the first and as many over the others as their
    weights say."""

    @property
    def share_left_out(self) -> float:
        """Of the clips."""
        lost = self.left_out.total()
        return lost / max(self.clips + lost, 1)

    def __str__(self) -> str:
        if not self.looked and self.rows != 0:
            return "no row could be read, so the amount of usable data is unknown"
        unit, size = ("min", 60) if self.all_seconds < 7200 else ("h", 3600)
        every = self.clips + self.left_out.total()
        of_audio = f"{self.seconds / size:,.1f} of {self.all_seconds / size:,.1f}"
        line = f"training on {self.clips:,} of {every:,} clips ({of_audio} {unit})"
        if self.rows is None:
            line += ", so far read; the total is unknown"
        elif self.is_estimate:
            line += f", estimated from {self.looked:,} rows"
        reasons = ", ".join(f"{n:,} {reason}" for reason, n in self.left_out.most_common())
        return f"{line}: {reasons}" if reasons else line

    def passes(self, steps: int, clips_per_step: float, seconds_per_step: float) -> str:
        """Say how often steps pass over the data; empty where that is not known.

        Args:
            clips_per_step, seconds_per_step: over all ranks; the one that is 0 does not bound the batches.
        """
        there = self.epoch_clips if clips_per_step else self.epoch_seconds
        return self.epochs(f"{steps:,} steps", steps * (clips_per_step or seconds_per_step) / there) if there else ""

    def epochs(self, what: str, epochs: float) -> str:
        """Say how often so many epochs pass over the data; `what` they are called."""
        if not self.passes_of_epoch:
            often = f"pass over them {epochs:,.1f} times" if epochs >= 1 else f"see {100 * epochs:.2g} % of them"
            return f"; {what} {often}"
        passes = sorted(((epochs * n, name) for name, n in self.passes_of_epoch.items()), reverse=True)
        if len(passes) > SOURCES_NAMED:
            (most, first), (least, last) = passes[0], passes[-1]
            passes = [(most, f"{first} (the most of {len(passes)} sources)"), (least, f"{last} (the least)")]
        times = [f"{n:,.1f} times over {name}" for n, name in passes if n >= 1]
        seen = [f"{100 * n:.2g} % of {name}" for n, name in passes if n < 1]
        parts = [f"{verb} {', '.join(own)}" for verb, own in (("pass", times), ("see", seen)) if own]
        return f"; {what} {' and '.join(parts)}"


def look_at_usable(stream: UtteranceStream, rows: int = ROWS_AT_MOST, seconds: float = SECONDS_AT_MOST) -> Usable:
    """Judge rows from all over the training data as training does before it decodes them; all, where they are few.

    Args:
        stream: of the training.
        rows, seconds: bounds of the search.
    """
    sources = stream.sources
    groups = [Tally() for _ in sources.groups]
    for ref, row in spread_rows(sources, stream.options, rows, seconds):
        source, shard = sources.groups[ref[0]][ref[2]]
        _look_at_row(groups[ref[0]], source, shard, ref[3], row, stream)
    there = [_rows_of(stream, g) for g in range(len(groups))]
    rows_of_epoch: list[float | None] = list(there)
    if sources.weights and there[0] is not None:
        rows_of_epoch = [there[0] * weight / sources.weights[0] for weight in sources.weights]
    known = None not in there
    found = Usable(0, sum(n or 0 for n in there) if known else None, not known, 0, 0.0, 0.0, Counter(), 0)
    clips = bad = 0.0
    for group, own, in_epoch, opened in zip(groups, there, rows_of_epoch, sources.groups, strict=True):
        kept = list(_with_alignment(group, stream))
        scale = (own or 0) / group.looked if known and group.looked else 1.0
        counts = {in_words(name, [s.filters for s, _ in opened]): n for name, n in group.filtered.items() if n}
        counts |= {f"bad: {kind} (such as {group.bad.first[kind]})": n for kind, n in group.bad.counts.items()}
        found.left_out.update({reason: round(n * scale) for reason, n in counts.items()})
        clips, bad = clips + len(kept) * scale, bad + group.bad.counts.total() * scale
        found.seconds += sum(kept) * scale
        found.all_seconds += group.seconds * scale
        found.looked += group.looked
        found.is_estimate |= own is None or group.looked < own
        if None not in rows_of_epoch and group.looked:
            found.epoch_clips += len(kept) * (in_epoch or 0) / group.looked
            found.epoch_seconds += sum(kept) * (in_epoch or 0) / group.looked
        if sources.weights and own and in_epoch is not None:
            name = opened[0][0].source.path
            found.passes_of_epoch[name] = found.passes_of_epoch.get(name, 0.0) + in_epoch / own
    found.clips, found.bad, found.left_out = round(clips), round(bad), +found.left_out
    return found


def _look_at_row(
    group: Tally, source: OpenSource, shard: Shard, number: int, row: Row, stream: UtteranceStream
) -> None:
    """Count a row by what training would do with it."""
    place, column = shard.place(number), source.columns["audio"]
    if shard.light is not None and column not in row:  # the audio is there, and was not read
        if row_duration(row) is None:
            return
        row = {**row, column: {"bytes": b""}}
    try:
        entry = _examine(group, source, place, number, row, stream)
        group.kept.append((entry.seconds, entry.tokens))
    except FilteredUtterance as reason:
        group.filtered[str(reason)] += 1
    except BadUtterance as reason:
        group.bad.add(kind_of(str(reason)), row_id(source, place, row))
    except Unreachable:
        return
    group.looked += 1


@contained
def _examine(group: Tally, source: OpenSource, place: str, number: int, row: Row, stream: UtteranceStream) -> Entry:
    """Examine a row whose length is found first, so that it counts whatever becomes of the row."""
    audio, seconds = row.get(source.columns["audio"]), row_duration(row)
    if seconds is None and audio is not None:
        seconds = length_of(source, row, stream.options.read_retries)
        row = {**row, "duration": seconds}
        group.seconds += seconds
    else:
        group.seconds += seconds or 0.0
        if isinstance(audio, str) and "://" not in f"{source.folder}{audio}":
            local_file(audio, source.folder)
    return examine(source, place, (0, 0, 0, number), row, stream.options, stream.encode)


def _with_alignment(group: Tally, stream: UtteranceStream) -> Iterator[float]:
    """Yield the seconds of the clips that have an alignment, and count the others."""
    fits, rate = stream.options.fits, stream.options.sample_rate
    for start in range(0, len(group.kept), JUDGED_TOGETHER):
        some = group.kept[start : start + JUDGED_TOGETHER]
        fitting = [True] * len(some)
        if fits is not None:
            fitting = fits([round(seconds * rate) for seconds, _ in some], [tokens for _, tokens in some])
        group.filtered["more_tokens_than_frames"] += fitting.count(False)
        yield from (seconds for (seconds, _), ok in zip(some, fitting, strict=True) if ok)


def _rows_of(stream: UtteranceStream, number: int) -> int | None:
    """Return the rows of a group that take part; None where only reading tells."""
    group, limit = stream.sources.groups[number], stream.sources.limits[number]
    skip = stream.sources.skip(number, stream.options)
    clips = {id(source): source.clips for source, _ in group}.values()
    if limit < 0 and not skip and None not in clips:  # blank lines of a manifest are rows, and no clips
        return sum(n or 0 for n in clips)
    known = [shard.rows for _, shard in group]
    if None in known:
        return None
    return sum(piece.rows() or 0 for piece in chosen_pieces(known, limit, None, skip))


def judge(found: Usable, max_bad_fraction: float, key: str = "data.train") -> tuple[str | None, list[str]]:
    """Return why a run should not begin with so little, or None, and warnings.

    Args:
        found: of the sources of a key of the run file.
        max_bad_fraction: data.max_bad_fraction.
        key: for messages.

    Raises:
        UserError: no clip is left at all.
    """
    if not found.clips and not found.is_estimate:
        reasons = ", ".join(f"{n:,} {reason}" for reason, n in found.left_out.most_common())
        raise UserError(
            f"{key}: no clip is left to train on of {found.left_out.total():,}: {reasons or 'there are none'}.",
            exit_code=1,
        )
    warnings = []
    share = found.share_left_out
    if found.bad > max_bad_fraction * (found.clips + found.left_out.total()):
        warnings.append(
            f"{key}: {found.bad:,} clips would go to quarantine, which ends a run above "
            f"data.max_bad_fraction={max_bad_fraction:g}. Fix them, or raise it"
        )
    audio = 1 - found.seconds / found.all_seconds if found.all_seconds else 0.0
    lost = f"{key}: {100 * max(share, audio):.0f} % of the {'clips are' if share >= audio else 'audio is'} left out"
    if max(share, audio) > REFUSED_ABOVE:
        advice = "Fix the data or the settings above, or set data.allow_large_losses=true to train on the rest"
        return f"{lost}. {advice}", warnings
    if max(share, audio) > WARNED_ABOVE:
        warnings.append(lost)
    return None, warnings
