"""Thresholds from the data: a mixture of good and bad labels over one score. N scores."""

from dataclasses import dataclass

import numpy as np

ITERATIONS = 200
FEWEST = 10  # scores above 0, for a mixture to be fitted
FEWEST_BAD = 2.0  # of them that are of the bad ones, by the posterior
LEAST_DEVIATION = 0.1
LEAST = 0.03  # scores below it are 0


@dataclass(frozen=True)
class Mixture:
    """Scores above 0: of good labels exponential, they die out; of bad ones normal."""

    scale: float
    """Mean of the exponential distribution."""
    mean: float
    deviation: float
    share: float
    """Of the bad ones, among the scores above 0."""

    def posterior(self, score_N: np.ndarray) -> np.ndarray:
        """Return the probability that the label is bad; it never falls with the score, and is 0 for scores of 0."""
        x_N = np.minimum(score_N, self.mean)  # a score beyond the mean is no better sign of a good label
        bad_N = np.log(self.share / self.deviation) - 0.5 * (
            ((x_N - self.mean) / self.deviation) ** 2 + np.log(2 * np.pi)
        )
        good_N = np.log((1 - self.share) / self.scale) - score_N / self.scale
        found_N = 1 / (1 + np.exp(np.clip(good_N - bad_N, -50, 50)))
        return np.where(score_N > LEAST, found_N, 0.0)

    @property
    def threshold(self) -> float:
        """The score at which a label is as likely bad as good; inf where none is."""
        grid = np.linspace(LEAST, self.mean + 3 * self.deviation, 2000)
        bad = grid[self.posterior(grid) >= 0.5]
        return float(bad[0]) if len(bad) else float("inf")


def fit_mixture(score_N: np.ndarray, bad_N: np.ndarray | None = None) -> Mixture | None:
    """Fit a mixture by expectation-maximisation (Dempster, Laird and Rubin, "Maximum likelihood from incomplete data
    via the EM algorithm", 1977).

    Args:
        score_N: from 0 on; scores of 0 are of good labels.
        bad_N: scores of labels that are bad on purpose, where the bad component begins; None: begin at the data's
            upper fifth.

    Returns:
        None where there are too few scores, or no second group.
    """
    x_N = score_N[score_N > LEAST]
    if len(x_N) < FEWEST:
        return None
    scale = float(np.median(x_N)) / np.log(2)
    if bad_N is None or len(bad_N) < FEWEST:
        mean, deviation = float(np.quantile(x_N, 0.8)), float(x_N.std())
    else:
        mean, deviation = float(bad_N.mean()), float(bad_N.std())
    mixture = Mixture(scale, mean, max(deviation, LEAST_DEVIATION), 0.3)
    for _ in range(ITERATIONS):
        weight_N = mixture.posterior(x_N)
        bad = float(weight_N.sum())
        if not FEWEST_BAD <= bad <= len(x_N) - FEWEST_BAD:
            return None
        mean = float((weight_N * x_N).sum() / bad)
        deviation = float(((weight_N * (x_N - mean) ** 2).sum() / bad) ** 0.5)
        scale = float(((1 - weight_N) * x_N).sum() / (len(x_N) - bad))
        mixture = Mixture(scale, mean, max(deviation, LEAST_DEVIATION), bad / len(x_N))
    return mixture if mixture.mean > mixture.scale else None
