"""Thresholds from the data: a mixture of good and bad labels over one score. N scores."""

from dataclasses import dataclass

import numpy as np

ITERATIONS = 200
FEWEST = 10  # scores, for a mixture to be fitted
FEWEST_BAD = 2.0  # of them that are of the bad ones, by the posterior
LEAST_DEVIATION = 0.1
NARROWEST = 0.5  # deviation of the bad ones against that of the good ones, so that no few scores make a group
LEAST = 0.03  # scores below it are of good labels


@dataclass(frozen=True)
class Mixture:
    """Scores of bad labels are normal; those of good ones normal about `origin` below 0, or without it exponential."""

    origin: float | None
    scale: float
    """Of the good ones: standard deviation, or mean of the exponential distribution."""
    mean: float
    deviation: float
    share: float
    """Of the bad ones."""

    def log_odds(self, score_N: np.ndarray) -> np.ndarray:
        """Return log P(bad) - log P(good), which is -inf for scores about 0 and below. A score beyond the mean of the
        bad ones is no better sign of a good label."""
        bad_N = _log_normal(np.minimum(score_N, self.mean), self.mean, self.deviation) + np.log(self.share)
        if self.origin is None:
            good_N = -score_N / self.scale - np.log(self.scale)
        else:
            good_N = _log_normal(score_N, self.origin, self.scale)
        return np.where(score_N > LEAST, bad_N - good_N - np.log(1 - self.share), -np.inf)

    @property
    def threshold(self) -> float | None:
        """The score at which a label is as likely bad as good, if one is."""
        grid = np.linspace(LEAST, self.mean + 3 * self.deviation, 2000)
        bad = grid[self.log_odds(grid) >= 0]
        return float(bad[0]) if len(bad) else None


def _log_normal(x_N: np.ndarray, mean: float, deviation: float) -> np.ndarray:
    return -0.5 * (((x_N - mean) / deviation) ** 2 + np.log(2 * np.pi)) - np.log(deviation)


def probability(log_odds: np.ndarray | float) -> np.ndarray:
    """Return the probability that belongs to log-odds."""
    return 1 / (1 + np.exp(-np.clip(log_odds, -50, 50)))


def fit_mixture(score_N: np.ndarray, bad_N: np.ndarray | None = None) -> Mixture | None:
    """Fit a mixture by expectation-maximisation (Dempster, Laird and Rubin, "Maximum likelihood from incomplete data
    via the EM algorithm", 1977).

    Args:
        score_N: the more, the likelier a label is bad; of good labels they lie below 0, or die out from 0 on. NaN: no
            score.
        bad_N: scores of labels that are bad on purpose, where the bad component begins; None: begin at the upper half
            of the scores above 0.

    Returns:
        None where there are too few scores, or no second group.
    """
    score_N = score_N[~np.isnan(score_N)]
    below_N, above_N = score_N[score_N <= LEAST], score_N[score_N > LEAST]
    is_normal = (below_N < -LEAST).sum() >= FEWEST
    x_N = score_N if is_normal else above_N
    if len(x_N) < FEWEST or len(above_N) < FEWEST_BAD:
        return None
    if bad_N is None or len(bad_N) < FEWEST:
        bad_N = above_N[above_N >= np.median(above_N)]
    origin = float(below_N.mean()) if is_normal else None
    scale = max(float(below_N.std()), LEAST_DEVIATION) if is_normal else float(np.median(x_N)) / np.log(2)
    mixture = Mixture(origin, scale, float(bad_N.mean()), max(float(bad_N.std()), LEAST_DEVIATION), 0.3)
    for _ in range(ITERATIONS):
        weight_N = probability(mixture.log_odds(x_N))
        bad = float(weight_N.sum())
        if not FEWEST_BAD <= bad <= len(x_N) - FEWEST_BAD:
            return None
        mean, deviation = _moments(x_N, weight_N)
        if is_normal:
            origin, scale = _moments(x_N, 1 - weight_N)
            deviation = max(deviation, NARROWEST * scale)
        else:
            scale = float(((1 - weight_N) * x_N).sum() / (len(x_N) - bad))
        mixture = Mixture(origin, scale, mean, deviation, bad / len(x_N))
    return mixture if mixture.mean > (mixture.scale if origin is None else origin + scale) else None


def _moments(x_N: np.ndarray, weight_N: np.ndarray) -> tuple[float, float]:
    mean = float(np.average(x_N, weights=weight_N))
    return mean, max(float(np.average((x_N - mean) ** 2, weights=weight_N)) ** 0.5, LEAST_DEVIATION)
