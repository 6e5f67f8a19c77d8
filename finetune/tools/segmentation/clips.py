"""From judged stretches to clips: what is kept, what is joined, and why the rest is left out."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from finetune.tools.segmentation.spans import choose, differing
from finetune.tools.segmentation.texts import joined

if TYPE_CHECKING:
    from finetune.tools.segmentation.hearing import Heard
    from finetune.tools.segmentation.spans import Candidate, Judged, Span
    from finetune.tools.segmentation.texts import Word

NATS_PER_DIFFERENCE = 12.0
NATS_PER_WORD = 8.0
"""A text that differs from what the model heard is right where it is less probable by no more than this."""
NO_WORDS, NO_TEXT, DIFFERS, UNSURE, UNWRITABLE, SHORT = (
    "sound without words",
    "speech that has no text",
    "text that was not said",
    "confidence below --min-confidence",
    "characters that the tokenizer lacks",
    "shorter than --min-seconds",
)
REASONS = (DIFFERS, UNSURE, NO_TEXT, SHORT, UNWRITABLE, NO_WORDS)
NOT_READ = "text that was not read"
SHOWN_CHARACTERS = 300


@dataclass
class Clip:
    """A clip to train on: samples of the recording, and words [first, end) of the text."""

    start: int
    behind: int
    first: int
    end: int
    confidences: list[tuple[int, float]]
    """Words and mean confidence of each stretch."""
    lowest: float

    @property
    def confidence(self) -> float:
        """Mean over its words."""
        return sum(n * c for n, c in self.confidences) / sum(n for n, _ in self.confidences)


@dataclass
class Limits:
    """What clips keep to; seconds."""

    min_seconds: float
    max_seconds: float
    longest_pause: float
    min_confidence: float = 0.0


@dataclass
class Result:
    """What a recording gave."""

    clips: list[Clip] = field(default_factory=list)
    left_out: list[dict[str, Any]] = field(default_factory=list)
    """In order: speech with its reason, then text."""
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Of the stretches that were left out, by reason."""
    words: Counter[str] = field(default_factory=Counter)
    """Of the text, by reason, where they are in no clip."""


def fits(span: Span, own: Judged, candidate: Candidate, text: list[Word]) -> bool:
    """Return whether a stretch says the words of a candidate: those that the model heard, or hardly less probable.

    Where what was heard has no alignment itself, its loss is inf, and says nothing of other words.
    """
    different = differing(span, text, candidate.first, candidate.end)
    nats, words = candidate.loss - own.heard_loss, candidate.end - candidate.first
    return not different or -math.inf < nats <= min(NATS_PER_DIFFERENCE * different, NATS_PER_WORD * words)


def make_clips(
    heard: list[Heard],
    spans: list[Span],
    judged: list[Judged | None],
    text: list[Word],
    unwritable: set[str],
    rate: int,
    limits: Limits,
) -> Result:
    """Keep the stretches whose text fits, and join neighbours in sound and text up to the longest clip."""
    result = Result()
    chosen = choose(spans, judged, len(text))
    used = [""] * len(text)
    clips: list[Clip] = []
    joinable = False
    for row, span, own, candidate in zip(heard, spans, judged, chosen, strict=True):
        reason = _reason(span, own, candidate, text, unwritable, limits)
        if reason:
            joinable = False
            first, end = (span.first, span.end) if candidate is None else (candidate.first, candidate.end)
            _mark(used, first, end, reason)
            nats = None if own is None or candidate is None else round(candidate.loss - own.heard_loss, 2)
            _leave_out(result, row.start, row.end, rate, reason, joined(text[first:end]), row.text, nats)
            continue
        assert candidate is not None
        words = candidate.end - candidate.first
        last = clips[-1] if joinable else None
        if (
            last is not None
            and last.end == candidate.first
            and row.end - last.start <= limits.max_seconds * rate
            and row.start - last.behind <= limits.longest_pause * rate
        ):
            last.behind, last.end = row.end, candidate.end
            last.confidences.append((words, candidate.confidence))
            last.lowest = min(last.lowest, candidate.lowest)
        else:
            own_part = [(words, candidate.confidence)]
            clips.append(Clip(row.start, row.end, candidate.first, candidate.end, own_part, candidate.lowest))
        joinable = True
    for clip in clips:
        if clip.behind - clip.start >= limits.min_seconds * rate:
            result.clips.append(clip)
            _mark(used, clip.first, clip.end, "clip")
        else:
            _mark(used, clip.first, clip.end, SHORT)
            _leave_out(result, clip.start, clip.behind, rate, SHORT, joined(text[clip.first : clip.end]), "", None)
    result.left_out.sort(key=lambda row: row["offset"])
    _add_unread(result, used, text)
    return result


def _reason(
    span: Span, own: Judged | None, candidate: Candidate | None, text: list[Word], unwritable: set[str], limits: Limits
) -> str:
    """Return why a stretch is left out; empty where it is not."""
    if candidate is None or own is None:
        if any(word.surface in unwritable for word in text[span.first : span.end]):
            return UNWRITABLE
        return DIFFERS if span.cored else NO_TEXT if span.heard else NO_WORDS
    if not fits(span, own, candidate, text):
        return DIFFERS
    return UNSURE if candidate.confidence < limits.min_confidence else ""


def _mark(used: list[str], first: int, end: int, reason: str) -> None:
    used[first:end] = [reason] * (end - first)


def _leave_out(
    result: Result, start: int, end: int, rate: int, reason: str, text: str, heard: str, nats: float | None
) -> None:
    row: dict[str, Any] = {
        "reason": reason,
        "offset": round(start / rate, 3),
        "duration": round((end - start) / rate, 3),
        "text": text,
        "heard": heard,
    }
    if nats is not None and math.isfinite(nats):
        row["nats"] = nats
    result.left_out.append(row)
    result.seconds[reason] += (end - start) / rate


def _add_unread(result: Result, used: list[str], text: list[Word]) -> None:
    """Count the words that are in no clip, and list the stretches of text that no speech has."""
    start = 0
    for number in range(1, len(used) + 1):
        if number < len(used) and used[number] == used[start]:
            continue
        reason = used[start] or NOT_READ
        if reason != "clip":
            result.words[reason] += number - start
        if reason == NOT_READ:
            shown = joined(text[start:number])
            shown = shown if len(shown) <= SHOWN_CHARACTERS else shown[:SHOWN_CHARACTERS] + " ..."
            result.left_out.append(
                {"reason": NOT_READ, "line": text[start].line, "words": number - start, "text": shown}
            )
        start = number
