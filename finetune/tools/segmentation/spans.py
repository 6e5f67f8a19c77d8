"""Which words of the text each stretch of speech may hold, and which of these it does hold by its losses."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from rapidfuzz.distance import Levenshtein

from finetune.tools.segmentation.matching import match, ratio

if TYPE_CHECKING:
    from finetune.tools.segmentation.hearing import Heard
    from finetune.tools.segmentation.texts import Word

MOST_LOST = 6
"""Words beside a core that the model may have missed or heard as others."""
MOST_FREE = 10
"""Words between two cores that are tried on the stretches between them."""
LIKE = 0.5
"""Two words with more of their characters in common are the same one, misheard."""
WORDS_PER_SECOND = 6.0
SKIPPED_NATS = 6.0
"""What it costs a choice to leave a word of the text to nobody: most of a text is read."""
NOTHING_NATS = 6.0
"""What it costs a choice to give a stretch no text, for each word that was heard in it."""


@dataclass
class Span:
    """Words of the text for a stretch: the core [first, end), and how many more there may be on either side.

    Without a core, `first` is `end`, and any of the `after` words from there on may be its text.
    """

    heard: list[Word]
    matched: list[int]
    """For each heard word the number of the text's, or -1."""
    first: int = 0
    end: int = 0
    before: int = 0
    after: int = 0

    @property
    def cored(self) -> bool:
        return self.end > self.first

    def ranges(self, seconds: float) -> list[tuple[int, int]]:
        """Return the ranges of words that a stretch of so many seconds may hold; the core first."""
        if not self.cored:
            places = range(self.first, self.end + self.after + 1)
            most = 1 + WORDS_PER_SECOND * seconds
            return [(a, b) for a in places for b in places if 0 < b - a <= most]
        left = [(self.first - n, self.end) for n in range(1, self.before + 1)]
        right = [(self.first, self.end + n) for n in range(1, self.after + 1)]
        return [(self.first, self.end), *left, *right]


@dataclass
class Candidate:
    """Words [first, end) of the text for a stretch, as the model judges them."""

    first: int
    end: int
    loss: float
    """-log P(text | audio), nats."""
    confidence: float
    """Mean of its words' confidences."""
    lowest: float
    """Least of its words' confidences."""


@dataclass
class Judged:
    """What the model says about a stretch."""

    heard_loss: float
    """Of what it heard itself."""
    candidates: list[Candidate] = field(default_factory=list)

    def of(self, first: int, end: int) -> Candidate | None:
        return next((c for c in self.candidates if (c.first, c.end) == (first, end)), None)

    def loss(self, first: int, end: int) -> float:
        found = self.of(first, end)
        return math.inf if found is None else found.loss


def spans_of(heard: list[Heard], text: list[Word], rate: int) -> list[Span]:
    """Match what was heard with the text; the middle of each stretch and subtitle count where there are any."""
    words = [row.words() for row in heard]
    flat = [word.normal for own in words for word in own]
    middles = [(row.start + row.end) / 2 / rate for row, own in zip(heard, words, strict=True) for _ in own]
    times_T = np.array([np.nan if word.seconds is None else word.seconds for word in text])
    normal = [word.normal for word in text]
    if np.isnan(times_T).all():
        found_H = match(flat, normal)
    else:
        found_H = match(flat, normal, np.array(middles), times_T)
    like_H = np.array([f >= 0 and ratio(flat[h], normal[f]) >= LIKE for h, f in enumerate(found_H)], dtype=bool)
    spans, number = [], 0
    for own in words:
        behind = number + len(own)
        matched = np.where(like_H, found_H, -1)[number:behind].tolist()
        number = behind
        places = [t for t in matched if t >= 0]
        spans.append(Span(own, matched, *((places[0], places[-1] + 1) if places else (0, 0))))
    for left, right, start, stop in _runs(spans, len(text)):
        if left >= 0:
            spans[left].after = min(stop - start, MOST_LOST)
        if right < len(spans):
            spans[right].before = min(stop - start, MOST_LOST)
        for i in range(left + 1, right):
            spans[i].first = spans[i].end = start
            spans[i].after = stop - start if stop - start <= MOST_FREE else 0
    return spans


def _runs(spans: list[Span], words: int) -> list[tuple[int, int, int, int]]:
    """Return the numbers of each two neighbouring spans with a core, and the words [start, stop) between these; -1 and
    the number of spans stand for the ends."""
    cored = [i for i, span in enumerate(spans) if span.cored]
    return [
        (left, right, spans[left].end if left >= 0 else 0, spans[right].first if right < len(spans) else words)
        for left, right in itertools.pairwise([-1, *cored, len(spans)])
    ]


def mixture(span: Span, text: list[Word], first: int, end: int) -> list[Word]:
    """Return words [first, end) of the text, written as the model heard them where it heard the same, so that another
    case or punctuation makes no other text."""
    own = {t: word for t, word in zip(span.matched, span.heard, strict=True) if t >= 0}
    written = []
    for t in range(first, end):
        heard = own.get(t)
        written.append(heard if heard is not None and heard.normal == text[t].normal else text[t])
    return written


def differing(span: Span, text: list[Word], first: int, end: int) -> int:
    """Return how many words differ between the text and what was heard; 0 where only blanks do."""
    heard, own = [w.normal for w in span.heard], [w.normal for w in text[first:end]]
    return 0 if "".join(heard) == "".join(own) else int(Levenshtein.distance(heard, own))


def choose(spans: list[Span], judged: list[Judged | None], words: int) -> list[Candidate | None]:
    """Choose the text of each stretch so that the sum of losses is least and no word of the text is in two of them."""
    chosen: list[Candidate | None] = [None] * len(spans)
    left_of: dict[int, int] = {}
    right_of: dict[int, int] = {}
    for left, right, start, stop in _runs(spans, words):
        first, behind, between = _share(spans, judged, left, right, start, stop)
        right_of[left], left_of[right] = first, behind
        for i, own in between.items():
            chosen[i] = own
    for i, span in enumerate(spans):
        own = judged[i]
        if span.cored and own is not None:
            chosen[i] = own.of(left_of[i], right_of[i])
    return chosen


def _share(
    spans: list[Span], judged: list[Judged | None], left: int, right: int, start: int, stop: int
) -> tuple[int, int, dict[int, Candidate]]:
    """Share the words [start, stop) between two cores among the stretches from one to the other.

    Returns:
        The end of the left one's text, the beginning of the right one's, and the texts of those between them.
    """

    def extra(i: int, first: int, end: int) -> float:
        own = judged[i] if 0 <= i < len(spans) else None
        if own is None:
            return 0.0 if first == end else math.inf
        core = own.loss(spans[i].first, spans[i].end)
        return own.loss(min(first, spans[i].first), max(end, spans[i].end)) - core if core < math.inf else 0.0

    # By the words that are given away: cost, and the way there. Of the words far from both cores nobody has any.
    near = sorted({*range(start, min(stop, start + MOST_LOST) + 1), *range(max(start, stop - MOST_LOST), stop + 1)})
    ways: dict[int, tuple[float, dict[int, Candidate], int]] = {
        place: (extra(left, start, place), {}, place) for place in near if place == start or left >= 0
    }
    for i in range(left + 1, right):
        own = judged[i]
        if own is None:
            continue
        nothing = own.heard_loss + NOTHING_NATS * max(1, len(spans[i].heard))
        after = {place: (cost + nothing, texts, first) for place, (cost, texts, first) in ways.items()}
        for candidate in own.candidates:
            for place, (cost, texts, first) in ways.items():
                if place > candidate.first:
                    continue
                total = cost + candidate.loss + SKIPPED_NATS * (candidate.first - place)
                if total < after.get(candidate.end, (math.inf,))[0]:
                    after[candidate.end] = total, {**texts, i: candidate}, first
        ways = after
    best = math.inf, start, stop, {}
    for place, (cost, texts, first) in ways.items():
        for behind in near:
            if behind < place or (behind < stop and right >= len(spans)):
                continue
            skipped = SKIPPED_NATS * min(behind - place, MOST_LOST)
            total = cost + skipped + extra(right, behind, stop)
            if total < best[0]:
                best = total, first, behind, texts
    return best[1:]
