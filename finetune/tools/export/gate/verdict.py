"""Whether an export is as good as its original on the same clips: equal texts, or a loss whose upper end is within a
limit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from finetune.errors import UserError
from finetune.evaluation.comparison import compare_utterances
from finetune.evaluation.significance import FEW, LEVEL, clips_to_bound

if TYPE_CHECKING:
    from finetune.evaluation.scores import Utterance

NORMALIZATION = "basic"
UNKNOWN_PIECES = ("<unk>", "\u2047")
"""The unknown piece as token tables have it, and as SentencePiece writes it."""


@dataclass
class Verdict:
    """What the texts say of an export."""

    passed: bool
    reason: str
    """One sentence."""
    clips: int
    differing: list[dict[str, str]] = field(default_factory=list)
    """Clips with another text: id, reference, original, exported."""
    comparison: dict[str, Any] | None = None
    """Of `compare_utterances`, the original first; None where no reference has a word."""
    clips_needed: int | None = None
    """Clips like these with which the same difference would be within the limit; None where their number is not what
    lacks."""

    @property
    def share_bound(self) -> float | None:
        """Where no text differs: the share of such clips that get another text, at most, with 95 % confidence."""
        return None if self.differing else 1 - (1 - LEVEL) ** (1 / self.clips)


def plain(text: str) -> str:
    """Return a text as texts of different runtimes are compared: white space, and the mark of the unknown piece, are
    no difference."""
    for mark in UNKNOWN_PIECES:
        text = text.replace(mark, " ")
    return " ".join(text.split())


def judge(original: list[Utterance], exported: list[Utterance], *, exact: bool, max_loss: float) -> Verdict:
    """Compare the texts of an export with those of its original.

    Args:
        original, exported: the same utterances in the same order.
        exact: every text has to be equal, as of fp32.
        max_loss: points of WER that the upper end of the difference's 95 % interval may reach.

    Raises:
        UserError: texts differ and no reference has a word, so that nothing says by how much.
    """
    differing = [
        {"id": a.id, "reference": a.reference, "original": a.hypothesis, "exported": b.hypothesis}
        for a, b in zip(original, exported, strict=True)
        if plain(a.hypothesis) != plain(b.hypothesis)
    ]
    clips, worded = len(original), any(u.reference.split() for u in original)
    comparison = compare_utterances(original, exported, NORMALIZATION) if worded else None
    verdict = Verdict(not differing, f"texts equal on all {clips} clips", clips, differing, comparison)
    differ = f"texts differ on {len(differing)} of {clips} clips"
    if exact and differing:
        verdict.reason = f"{differ}; fp32 has to give equal ones"
        return verdict
    if clips < FEW:
        verdict.passed, verdict.clips_needed = False, FEW
        verdict.reason = f"{clips} clips are too few to judge an export; {FEW} are needed at least"
        return verdict
    if not any(plain(u.hypothesis) for u in [*original, *exported]):
        verdict.passed = False
        verdict.reason = f"no text has a word on any of {clips} clips, NeMo's or the export's: nothing is compared"
        return verdict
    if not differing:
        return verdict
    if comparison is None or comparison["difference_interval"] is None:
        raise UserError(f"--data: {differ}, and no clip has a reference with words. Give clips with their texts.", 1)
    points, (low, high) = 100 * comparison["difference"], (100 * end for end in comparison["difference_interval"])
    measured = f"{differ}; WER {points:+.2f} points (95 % interval {low:+.2f} to {high:+.2f})"
    verdict.passed = high <= max_loss
    if verdict.passed:
        verdict.reason = f"{measured}, within --max-loss {max_loss:g}"
    elif points < max_loss:
        verdict.clips_needed = max(clips_to_bound(points, high, clips, max_loss), clips + 1)
        verdict.reason = (
            f"{measured}: {clips} clips are too few to say that the loss is within --max-loss {max_loss:g}; with the "
            f"same difference about {verdict.clips_needed:,} would"
        )
    else:
        verdict.reason = f"{measured}, above --max-loss {max_loss:g}; more clips would not change that"
    return verdict
