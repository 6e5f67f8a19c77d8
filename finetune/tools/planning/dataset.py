"""What a plan knows of the data: from a data check, from the command line, else from the run file's bounds alone."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from finetune.errors import UserError

TOKENS_A_SECOND = 5.0


@dataclass(frozen=True)
class Data:
    """Lengths in seconds, and the size of the data set."""

    longest: float
    mean: float
    hours: float | None
    """Of the whole data set."""
    tokens_a_second: float = TOKENS_A_SECOND
    assumed: tuple[str, ...] = ()
    """Of `mean` and `tokens_a_second`, what nobody has measured or given."""


def data_of(
    longest: float, check: Path | None, hours: float | None, mean: float | None, tokens_a_second: float | None
) -> Data:
    """Put together what is known; arguments have priority over the check.

    Args:
        longest: `data.max_duration`.
        check: file or folder of finetune.check.
        hours, mean, tokens_a_second: from the command line.

    Raises:
        UserError: `check` is no result of finetune.check.
    """
    if check is not None:
        file = check / "check.json" if check.is_dir() else check
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            checked_mean = 3600 * found["hours"] / max(found["clips"], 1)
            last_second, _ = _last_and_mean(found["histograms"]["seconds"])
            _, tokens = _last_and_mean(found["histograms"]["tokens"])
            hours = found["hours"] if hours is None else hours
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"--check: {file} is no result of a data check ({error}). Make one: python -m finetune.check --data D "
                f"--output-dir {check}"
            ) from error
        longest = min(longest, last_second or longest)
        if tokens and checked_mean:
            tokens_a_second = tokens_a_second or tokens / checked_mean
        mean = mean or checked_mean
    given = {"mean": mean, "tokens_a_second": tokens_a_second}
    return Data(
        float(longest),
        float(min(mean or longest / 2, longest)),
        hours,
        float(tokens_a_second or TOKENS_A_SECOND),
        tuple(name for name, value in given.items() if not value),
    )


def _last_and_mean(histogram: dict[str, Any]) -> tuple[float, float]:
    """Return the upper bound of the last bin that holds any, and the mean by the bins' centres; zeros if none does."""
    counts = np.array(histogram["counts"], float)
    if not counts.any():
        return 0.0, 0.0
    edges = np.linspace(histogram["from"], histogram["to"], len(counts) + 1)
    last = float(edges[1:][counts > 0].max())
    return last, float(np.average((edges[1:] + edges[:-1]) / 2, weights=counts))
