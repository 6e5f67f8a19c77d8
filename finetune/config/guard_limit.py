"""`data.guard_limit`: how much worse than the base model a chosen model may be on data.guard."""

import math
import re
from dataclasses import dataclass

FORMS = '"+5 %" (of the base model\'s WER) or "+0.01" (of WER, a fraction: one point)'
LARGEST_PERCENT = 1000.0
ROUNDING = 1e-9
"""WERs are quotients of counts: a limit that is met exactly is kept."""
_FORM = re.compile(r"\+?\s*(\d+\.?\d*(?:e-?\d+)?|\.\d+)\s*(%?)", re.IGNORECASE)


@dataclass(frozen=True)
class GuardLimit:
    """A limit on the WER on data.guard."""

    amount: float
    """0.05 is 5 % of the base model's WER, or 0.05 of WER."""
    relative: bool

    def highest(self, base_wer: float) -> float:
        """Return the highest WER that keeps the limit."""
        return base_wer * (1 + self.amount) if self.relative else base_wer + self.amount

    def keeps(self, wer: float, base_wer: float) -> bool:
        """Return whether a WER keeps the limit."""
        return wer <= self.highest(base_wer) + ROUNDING

    def __str__(self) -> str:
        return f"+{100 * self.amount:g} %" if self.relative else f"+{self.amount:g}"


def parse_guard_limit(text: str) -> GuardLimit:
    """Parse a limit.

    Raises:
        ValueError: it has neither form, or is no limit.
    """
    found = _FORM.fullmatch(text.strip())
    if found is None:
        below = " A limit is not below 0." if text.strip().startswith("-") else ""
        raise ValueError(f"has to be {FORMS}, found {text!r}.{below}")
    amount, relative = float(found[1]), bool(found[2])
    if relative and amount <= LARGEST_PERCENT:
        return GuardLimit(amount / 100, relative=True)
    if relative or not math.isfinite(amount) or amount >= 1:
        instead = f' Write "+{amount:g} %" for a share of the base model\'s WER.' if not relative else ""
        raise ValueError(f"has to be {FORMS}; {text!r} allows any loss.{instead}")
    return GuardLimit(amount, relative=False)


def check_guard_limit(text: str | None) -> str | None:
    """Return a limit as it is written.

    Raises:
        ValueError: as `parse_guard_limit`.
    """
    if text is not None:
        parse_guard_limit(text)
    return text
