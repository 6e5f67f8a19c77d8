"""A limit on what a model may lose on data.guard: `+5 %` of the base model's WER, or `+0.01` of WER."""

import re
from dataclasses import dataclass

from finetune.errors import UserError

_FORM = re.compile(r"\+?\s*(\d+(?:\.\d*)?|\.\d+)\s*(%?)")


@dataclass(frozen=True)
class WerLimit:
    """How far above the base model's a WER may lie."""

    text: str
    amount: float
    """Fraction of the base model's WER, or of the words."""
    relative: bool

    def bound(self, base_wer: float) -> float:
        """Return the highest WER that keeps the limit."""
        return base_wer * (1 + self.amount) if self.relative else base_wer + self.amount

    def keeps(self, wer: float | None, base_wer: float | None) -> bool:
        """Return whether a WER keeps the limit; one that is not known does not."""
        return wer is not None and base_wer is not None and wer <= self.bound(base_wer) + 1e-12

    def __str__(self) -> str:
        return self.text


def parse_limit(text: str, key: str) -> WerLimit:
    """Read a limit; `key` names it in messages.

    Raises:
        UserError: it has neither of the two forms.
    """
    found = _FORM.fullmatch(text.strip())
    if found is None:
        raise UserError(
            f"{key}: {text!r} is no limit. Write `+5 %`, relative to the base model's WER on the guard, or `+0.01`, "
            "an absolute WER (1 point)."
        )
    relative = found[2] == "%"
    return WerLimit(text.strip(), float(found[1]) / (100 if relative else 1), relative)
