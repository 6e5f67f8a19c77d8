"""From a model's signals to a confidence, and to the threshold above which transcripts are as right as promised.

The confidence of a clip is the share of its words that is right, as a logistic regression on labelled clips predicts
it from the signals. It orders the clips; what is promised does not lean on it. The promise is about clips that the
regression has not seen: each labelled clip gets its confidence from a fit without it and without all clips of the same
text, and the threshold is the lowest above which these clips keep the promise.

N clips, F signals.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune.errors import UserError
from finetune.evaluation.significance import RESAMPLES, rate_interval, resampled_sums

if TYPE_CHECKING:
    from collections.abc import Sequence

FOLDS = 10
PENALTY = 1.0
"""Of the squared weights of standardised signals."""
STEPS = 40
"""Thresholds that are tried."""
FEWEST_KEPT = 10
FEWEST_TO_FIT = 20


@dataclass
class Labelled:
    """What the model made of labelled clips."""

    signals_NF: np.ndarray
    words_N: np.ndarray
    """Of the reference."""
    errors_N: np.ndarray
    languages_N: np.ndarray
    texts_N: np.ndarray
    """Clips with the same number have the same reference."""

    def __len__(self) -> int:
        return len(self.words_N)

    def part(self, rows_N: np.ndarray) -> Labelled:
        return Labelled(*(getattr(self, name)[rows_N] for name in vars(self)))


def text_number(text: str) -> int:
    """Return the number of a normalised reference, for `Labelled.texts_N`."""
    return zlib.crc32(text.encode())


@dataclass
class Regression:
    """Signals -> the share of words that is right."""

    mean_F: np.ndarray
    scale_F: np.ndarray
    weight_F: np.ndarray
    bias: float

    def confidence(self, signals_NF: np.ndarray) -> np.ndarray:
        """(N,) in [0, 1]."""
        return 1 / (1 + np.exp(-((signals_NF - self.mean_F) / self.scale_F @ self.weight_F + self.bias)))


def fit(labelled: Labelled) -> Regression:
    """Fit by words: a clip counts as so many right and so many wrong ones."""
    from sklearn.linear_model import LogisticRegression  # takes a second to import

    signals_NF, words_N = labelled.signals_NF, np.maximum(labelled.words_N, 1)
    wrong_N = np.minimum(labelled.errors_N, words_N)
    mean_F, scale_F = signals_NF.mean(0), signals_NF.std(0)
    scale_F = np.where(scale_F > 1e-9, scale_F, 1.0)
    x_NF = (signals_NF - mean_F) / scale_F
    # One word more on either side, spread over all clips, so that there are both.
    even = 1 / len(labelled)
    weights = np.concatenate([words_N - wrong_N + even, wrong_N + even])
    is_right = np.repeat([1, 0], len(labelled))
    found = LogisticRegression(C=1 / PENALTY, max_iter=1000).fit(np.tile(x_NF, (2, 1)), is_right, weights)
    return Regression(mean_F, scale_F, found.coef_[0], float(found.intercept_[0]))


def confidence_of_others(labelled: Labelled) -> np.ndarray:
    """Return the confidence (N,) of each clip by a fit without it and without the clips of the same text."""
    numbers = np.unique(labelled.texts_N)
    order = np.random.default_rng(0).permutation(len(numbers))
    fold_N = order[np.searchsorted(numbers, labelled.texts_N)] % min(FOLDS, len(numbers))
    found_N = np.zeros(len(labelled))
    for fold in np.unique(fold_N):
        found_N[fold_N == fold] = fit(labelled.part(fold_N != fold)).confidence(labelled.signals_NF[fold_N == fold])
    return found_N


@dataclass
class Point:
    """What keeping the clips from a threshold on means for labelled ones."""

    threshold: float
    clips: int
    share: float
    """Of the words that is kept."""
    recall: float
    """Of the wholly right clips, the share that is kept."""
    precision: float
    """1 - WER of what is kept."""
    bound: float
    """The precision, lowered so that it holds with the certainty that was asked for."""
    wholly_right: float
    """Share of the kept clips without an error."""
    wer_interval: list[float] | None = None


@dataclass
class Choice:
    """The threshold of a language, or of all together."""

    clips: int
    """Labelled ones."""
    curve: list[Point]
    """From the highest threshold to the lowest."""
    point: Point | None = None
    """None: the precision cannot be promised."""

    def best(self) -> Point | None:
        """The point with the highest bound."""
        return max(self.curve, key=lambda point: point.bound, default=None)

    def as_json(self) -> dict[str, Any]:
        return {
            "clips": self.clips,
            "threshold": None if self.point is None else self.point.threshold,
            "kept": None if self.point is None else vars(self.point),
            "curve": [{k: v for k, v in vars(p).items() if k != "wer_interval"} for p in self.curve],
        }


def clips_for(precision: float) -> int:
    """Return how many clips without an error it takes at least to promise a precision."""
    return math.ceil(1 / (1 - precision) - 1e-9) - 1


def upper_rate(errors_N: np.ndarray, words_N: np.ndarray, certainty: float) -> float:
    """Return the WER below which these clips' population lies with some certainty.

    The quantile of the bootstrap over clips, with one clip of mean length added that is wholly wrong, as in conformal
    risk control (Angelopoulos et al., arXiv 2208.02814, equation 4): without it, few clips without an error would
    promise everything.
    """
    sums_R2 = resampled_sums(np.stack([errors_N, words_N], axis=1), RESAMPLES).astype(float)
    mean = max(float(words_N.mean()), 1e-9)
    return float(np.quantile((sums_R2[:, 0] + mean) / (sums_R2[:, 1] + mean), certainty))


def choose(labelled: Labelled, confidence_N: np.ndarray, precision: float, certainty: float) -> Choice:
    """Find the lowest threshold above which the WER is at most 1 - precision with some certainty."""
    order = np.argsort(-confidence_N, kind="stable")
    errors_N, words_N, confidence_N = labelled.errors_N[order], labelled.words_N[order], confidence_N[order]
    n, all_words, all_right = len(order), max(int(words_N.sum()), 1), max(int((errors_N == 0).sum()), 1)
    first = min(FEWEST_KEPT, n)
    choice = Choice(n, [])
    for k in np.unique(np.linspace(first, n, STEPS).round().astype(int)).tolist() if n else []:
        errors, words, right = int(errors_N[:k].sum()), int(words_N[:k].sum()), int((errors_N[:k] == 0).sum())
        point = Point(
            threshold=float(confidence_N[k - 1]),
            clips=k,
            share=words / all_words,
            recall=right / all_right,
            precision=1 - errors / max(words, 1),
            bound=1 - upper_rate(errors_N[:k], words_N[:k], certainty),
            wholly_right=right / k,
        )
        choice.curve.append(point)
        if point.bound >= precision:
            choice.point = point
    if choice.point is not None:
        k = choice.point.clips
        choice.point.wer_interval = rate_interval(errors_N[:k], words_N[:k])
    return choice


@dataclass
class Calibration:
    """A regression, and the thresholds of the languages."""

    precision: float
    certainty: float
    regression: Regression
    together: Choice
    languages: list[str]
    """Of the labelled clips that name one."""
    by_language: dict[str, Choice] = field(default_factory=dict)
    """Of those that have enough labelled clips."""
    too_few: dict[str, int] = field(default_factory=dict)
    """Labelled clips of the other languages."""

    def choice(self, language: str) -> Choice:
        """Return the choice for clips in a language: its own, else that of all together."""
        return self.by_language.get(language, self.together)

    def confidence(self, signals: Sequence[Sequence[float]]) -> np.ndarray:
        return self.regression.confidence(np.asarray(signals, dtype=float))


def calibrate(labelled: Labelled, precision: float, certainty: float) -> Calibration:
    """Fit the confidence, and choose the thresholds.

    Raises:
        UserError: too few clips or texts, or a precision that they cannot promise; it says which one they can.
    """
    least = max(clips_for(precision), FEWEST_KEPT)
    if len(labelled) < max(least, FEWEST_TO_FIT):
        raise UserError(
            f"--calibrate: {len(labelled)} clips in which the model hears words are too few for --precision "
            f"{precision:g}: it takes {least} that are kept and have no error, and as many more as the model makes "
            f"errors. Some {10 * max(least, FEWEST_TO_FIT)} clips are a good start."
        )
    if len(np.unique(labelled.texts_N)) < 2:
        raise UserError(
            "--calibrate: all of its clips have the same text. The confidence of a clip is learned from clips with "
            "other texts: name clips of several."
        )
    confidence_N = confidence_of_others(labelled)
    languages = sorted(set(labelled.languages_N.tolist()) - {""})
    together = choose(labelled, confidence_N, precision, certainty)
    found = Calibration(precision, certainty, fit(labelled), together, languages)
    for language in languages if len(languages) > 1 else []:
        rows_N = labelled.languages_N == language
        clips = int(rows_N.sum())
        if clips < max(least, FEWEST_TO_FIT):
            found.too_few[language] = clips
        else:
            own = choose(labelled.part(rows_N), confidence_N[rows_N], precision, certainty)
            found.by_language[language] = own
    choices = list(found.by_language.values()) or [found.together]
    if all(choice.point is None for choice in choices):
        raise UserError(_out_of_reach(found, choices))
    return found


def _out_of_reach(found: Calibration, choices: list[Choice]) -> str:
    """Say which precision can be promised, and what it would take for more."""
    named = dict(zip(found.by_language or [""], choices, strict=True))
    texts = []
    if all((best := choice.best()) is None or best.bound <= 0 for choice in choices):
        return (
            "--calibrate: the model hears so little of these clips right that no precision can be promised. Are text "
            "and language theirs? Else it takes a better model."
        )
    for language, choice in named.items():
        best = choice.best()
        assert best is not None
        text = f"{language + ': ' if language else ''}{best.bound:.3f}, for {best.share:.0%} of the words"
        right = [p for p in choice.curve if p.precision > found.precision]
        if right:  # seen, but on too few clips
            seen = max(right, key=lambda p: p.clips)
            gap = (seen.precision - seen.bound) / (seen.precision - found.precision)
            needed = math.ceil(choice.clips * (gap**2 - 1))
            text += f" ({seen.precision:.3f} on {seen.clips} clips; about {needed:,} more promise it)"
        texts.append(text)
    return (
        f"--precision {found.precision:g} cannot be promised with certainty {found.certainty:g}. The highest that "
        f"can: {'; '.join(texts)}. Give a lower --precision, more clips to --calibrate, or a better model."
    )
