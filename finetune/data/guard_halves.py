"""The halves of data.guard where it has a limit: `guard_choice`, by which models are chosen, and `guard`, which judges
the chosen one.

A clip's normalised text alone decides its half: the same on every rank and machine, after a resume, in any order, and
never one text in both.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from finetune.data.batching import BatchLimits
from finetune.data.leave_out import hash_of
from finetune.data.normalization import normalize_text
from finetune.data.options import StreamOptions
from finetune.data.reader import group_sources
from finetune.data.shards import NumberedRows, Row
from finetune.data.sources import OpenSource
from finetune.data.survey import spread_rows
from finetune.errors import UserError

CHOICE = "guard_choice"
GUARDS = ("guard", CHOICE)
"""Splits that are made of data.guard."""
FEW_WORDS = 200
"""Words of a half below which its WER says little."""
ROWS_AT_MOST = 100_000


def half_of(text: object) -> str:
    """Return the half of a clip with this text."""
    return GUARDS[hash_of(normalize_text(text, "basic") if isinstance(text, str) else "") & 1]


def halve(sources: list[OpenSource]) -> dict[str, list[OpenSource]]:
    """Return the sources of both halves, whose numbers of clips are not known."""
    return {half: [_half(source, half) for source in sources] for half in GUARDS}


def _half(source: OpenSource, half: str) -> OpenSource:
    column = source.columns["text"]

    def only(read: Callable[[int], NumberedRows]) -> Callable[[int], NumberedRows]:
        return partial(_rows_of_half, read, column, half)

    shards = [replace(s, read=only(s.read), light=None if s.light is None else only(s.light)) for s in source.shards]
    return replace(source, shards=shards, clips=None)


def _rows_of_half(read: Callable[[int], NumberedRows], column: str, half: str, first: int) -> NumberedRows:
    return ((number, row) for number, row in read(first) if half_of(row.get(column)) == half)


@dataclass
class Halves:
    """What there is to judge by."""

    clips: dict[str, list[int]]
    """By half, of each source."""
    hashes: dict[str, list[int]]
    """Sums of the texts' hashes, by half, of each source."""
    words: dict[str, int]
    texts: int
    """Different ones."""
    whole: bool
    """Whether all of data.guard was read."""

    def __str__(self) -> str:
        counts = (f"{half} {sum(self.clips[half])} clips, {words} words" for half, words in self.words.items())
        return f"data.guard in halves by text: {'; '.join(counts)}" + ("" if self.whole else " (of what was read)")


def measure_halves(sources: list[OpenSource], max_clips: int, seconds: float) -> Halves:
    """Count clips, words and texts of both halves.

    Args:
        sources: of data.guard, before they are halved.
        max_clips: data.max_eval_samples.
        seconds: bound on the time.

    Raises:
        UserError: a half has no words.
    """
    grouped = group_sources(sources, max_clips)
    order = {id(source): i for i, source in enumerate(sources)}
    clips, hashes = ({half: [0] * len(sources) for half in GUARDS} for _ in range(2))
    found = Halves(clips, hashes, dict.fromkeys(GUARDS, 0), 0, whole=True)
    unread: list[str] = []
    texts: set[int] = set()
    options = StreamOptions(BatchLimits(), 16_000, shuffle=False)
    rows = spread_rows(grouped, options, None, seconds, lengths=False, unread=unread)
    looked = 0
    for ref, row in itertools.islice(rows, ROWS_AT_MOST):
        source, _ = grouped.groups[ref[0]][ref[2]]
        text, looked = _text(source, row), looked + 1
        half = half_of(text)
        i, hashed = order[id(source)], hash_of(text)
        found.clips[half][i] += 1
        found.hashes[half][i] += hashed
        found.words[half] += len(text.split())
        texts.add(hashed)
    found.texts = len(texts - {hash_of("")})
    known = [source.clips for source in sources if source.clips is not None]
    expected = sum(known) if max_clips < 0 else min(sum(known), max_clips)
    found.whole = not unread and len(known) == len(sources) and looked == expected
    empty = next((half for half in GUARDS if not found.words[half]), None)
    if empty is not None and found.whole:
        why = {0: "holds no text", 1: "holds one text only"}.get(
            found.texts, f"holds {found.texts} different texts only, all in one half (a hash of the text decides)"
        )
        raise UserError(
            f"data.guard_limit: data.guard {why}, and is cut in two by texts: one half to choose by, the other to "
            "judge the chosen model. Add clips with other texts, or leave data.guard_limit out."
        )
    return found


def _text(source: OpenSource, row: Row) -> str:
    text = row.get(source.columns["text"])
    return normalize_text(text, "basic") if isinstance(text, str) else ""


def with_clips(halves: dict[str, list[OpenSource]], found: Halves) -> dict[str, list[OpenSource]]:
    """Return the sources with their numbers of clips and sums of hashes, where all were counted."""
    if not found.whole:
        return halves
    return {
        half: [
            replace(source, clips=clips, texts=texts)
            for source, clips, texts in zip(sources, found.clips[half], found.hashes[half], strict=True)
        ]
        for half, sources in halves.items()
    }


def few_words(found: Halves) -> list[str]:
    """Return a sentence for each half that is too small to say much."""
    return [
        f"data.guard_limit: {half} has {words} words only ({sum(found.clips[half])} clips): one more error is "
        f"{100 / max(words, 1):.2g} points of WER. Take a larger data.guard: {FEW_WORDS} words in each half at least"
        for half, words in found.words.items()
        if found.whole and words < FEW_WORDS
    ]
