"""What speaks for cut-off audio beside the model: loud edges, and more text than the time has room for. N clips."""

from dataclasses import dataclass

import numpy as np

BINS = 12
KEPT = (0.3, 0.9)  # of a clip that is cut off


@dataclass(frozen=True)
class LikelihoodRatio:
    """log P(value | bad) - log P(value | good) by two histograms over the same bins."""

    bounds: np.ndarray
    log_ratio: np.ndarray

    @classmethod
    def of(cls, good_N: np.ndarray, bad_N: np.ndarray) -> "LikelihoodRatio":
        """Count values of good and of bad clips; every bin has as many of both together, and one of each more."""
        bounds = np.unique(np.quantile(np.concatenate([good_N, bad_N]), np.linspace(0, 1, BINS + 1)[1:-1]))
        logs = []
        for value_N in (bad_N, good_N):
            counts = np.bincount(np.searchsorted(bounds, value_N), minlength=len(bounds) + 1) + 1
            logs.append(np.log(counts / counts.sum()))
        return cls(bounds, logs[0] - logs[1])

    def at(self, value: float) -> float:
        return float(self.log_ratio[np.searchsorted(self.bounds, value)])


@dataclass(frozen=True)
class CutEvidence:
    """Ratios of the two edges and of the rate of tokens. What clips look like that are cut off follows from the data:
    their edges are as loud as the middle of a clip, and a part of their seconds has to hold all their text."""

    head: LikelihoodRatio
    tail: LikelihoodRatio
    rate: LikelihoodRatio

    @classmethod
    def of(cls, head_N: np.ndarray, middle_N: np.ndarray, tail_N: np.ndarray, rate_N: np.ndarray) -> "CutEvidence":
        kept_N = np.linspace(*KEPT, len(rate_N))[np.random.default_rng(0).permutation(len(rate_N))]
        return cls(
            LikelihoodRatio.of(head_N, middle_N),
            LikelihoodRatio.of(tail_N, middle_N),
            LikelihoodRatio.of(rate_N, rate_N / kept_N),
        )

    def at_start(self, head: float, rate: float) -> float:
        return self.head.at(head) + self.rate.at(rate)

    def at_end(self, tail: float, rate: float) -> float:
        return self.tail.at(tail) + self.rate.at(rate)
