"""How certain an error rate is, and whether two differ.

N utterances (or blocks of them), K kinds of utterances, R resamples, C columns.

Utterances are taken as independent of each other. Where one speaker or recording has many, their errors go together:
intervals and p-values come out too small unless such utterances are drawn as one block (`sum_blocks`).
"""

import re
import statistics
from typing import Any

import numpy as np

from finetune.errors import UserError

LEVEL = 0.95
RESAMPLES = 1000
SEED = 0
SMALLEST_P = 1e-12
"""Below this the Fourier sum of `permutation_p` is rounding error; no smaller p-value is given."""
POWER = 0.8
FEW = 20
"""Utterances or blocks below which a percentile interval is noticeably too short."""
DRAWN_AT_ONCE = 2**22
"""Numbers held while resampling: 32 MiB."""


def resampled_sums(values_NC: np.ndarray, resamples: int, seed: int = SEED) -> np.ndarray:
    """Column sums of N utterances drawn with replacement, R times: (R, C) int64.

    How often each kind of utterance (equal in all columns) is drawn is multinomial, so kinds are drawn instead of
    utterances: the same distribution for far fewer draws, because many utterances have equal counts of errors and
    words.

    Args:
        values_NC: integers.
        resamples: R.
    """
    kinds_KC, counts_K = np.unique(np.asarray(values_NC, dtype=np.int64), axis=0, return_counts=True)
    generator, utterances = np.random.default_rng(seed), int(counts_K.sum())
    step = max(1, DRAWN_AT_ONCE // len(kinds_KC))
    parts = []
    for first in range(0, resamples, step):
        drawn_RK = generator.multinomial(utterances, counts_K / utterances, size=min(step, resamples - first))
        parts.append(drawn_RK @ kinds_KC)
    return np.concatenate(parts)


def percentiles(values_R: np.ndarray) -> list[float] | None:
    """The central interval that holds LEVEL of the finite values; None without any."""
    values_R = values_R[np.isfinite(values_R)]
    if not len(values_R):
        return None
    return [float(v) for v in np.quantile(values_R, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])]


def rate_interval(errors_N: np.ndarray, words_N: np.ndarray, resamples: int = RESAMPLES) -> list[float] | None:
    """Percentile bootstrap interval of an error rate, errors over words, by drawing utterances with replacement
    (Bisani and Ney, "Bootstrap estimates for confidence intervals in ASR performance evaluation", ICASSP 2004).

    Args:
        errors_N, words_N: counts by utterance, or characters in place of words.

    Returns:
        [low, high] as fractions; None without a word, or without resamples.
    """
    if resamples < 1 or not np.sum(words_N):
        return None
    errors_R, words_R = resampled_sums(np.stack([errors_N, words_N], axis=1), resamples).T
    with np.errstate(divide="ignore", invalid="ignore"):
        return percentiles(errors_R / words_R)


def increase_bound(
    errors_a_N: np.ndarray, errors_b_N: np.ndarray, words_N: np.ndarray, confidence: float, *, relative: bool
) -> float:
    """Upper bound of how much worse model b is than a on the same utterances, by the paired percentile bootstrap.

    Args:
        errors_a_N, errors_b_N, words_N: counts by utterance.
        confidence: the share of resamples that lie at or below the bound.
        relative: whether the increase is a share of a's error rate, or of words. A resample in which a makes no error
            is taken as one with half an error.
    """
    a_R, b_R, words_R = resampled_sums(np.stack([errors_a_N, errors_b_N, words_N], axis=1), RESAMPLES).T
    of_R = np.maximum(a_R, 0.5) if relative else np.maximum(words_R, 1)
    return float(np.quantile((b_R - a_R) / of_R, confidence, method="higher"))


def permutation_p(differences_N: np.ndarray) -> float:
    """Two-sided p-value of the paired permutation test on the sum of differences.

    If the two models are alike, each utterance's two error counts could as well be exchanged, so each difference has
    either sign with probability 1/2. The p-value is the share of all 2^N choices of signs whose sum is as far from 0
    as the observed one. It is exact, not sampled: the characteristic function of the sum is the product of cos(d t),
    and its Fourier transform is the distribution (Pagano and Tritchler, "On obtaining permutation distributions in
    polynomial time", JASA 78, 1983). The test that samples the signs is known as approximate randomisation (Noreen
    1989).

    Args:
        differences_N: integers: errors of one model minus errors of the other, by utterance.
    """
    from scipy import fft  # takes half a second to import

    differences_N = np.asarray(differences_N, dtype=np.int64)
    observed = abs(int(differences_N.sum()))
    sizes_K, counts_K = np.unique(np.abs(differences_N[differences_N != 0]), return_counts=True)
    if not observed:
        return 1.0
    total = int((sizes_K * counts_K).sum())
    points = int(fft.next_fast_len(2 * total + 1, real=True))  # type: ignore[arg-type]  # untyped in scipy
    angles = 2 * np.pi / points * np.arange(points // 2 + 1)
    characteristic = np.ones_like(angles)
    for size, count in zip(sizes_K.tolist(), counts_K.tolist(), strict=True):
        characteristic *= np.cos(size * angles) ** count
    chances = np.asarray(fft.irfft(characteristic, points))
    return float(np.clip(2 * chances[observed : total + 1].sum(), SMALLEST_P, 1.0))


def holm(p_values: list[float]) -> list[float]:
    """Correct the p-values of several tests so that the chance of any false finding stays within the level (Holm
    1979)."""
    order = np.argsort(p_values)
    corrected = np.asarray(p_values)[order] * np.arange(len(order), 0, -1)
    # Each in its old place: argsort turns the order round.
    return np.maximum.accumulate(corrected).clip(max=1.0)[np.argsort(order)].tolist()


def sum_blocks(values_NC: np.ndarray, names_N: np.ndarray | list[str]) -> np.ndarray:
    """Sums over the utterances of each name, one row a name, sorted (Liu and Peng, "Statistical testing on ASR
    performance via blockwise bootstrap", Interspeech 2020)."""
    names, block_N = np.unique(np.asarray(names_N), return_inverse=True)
    sums = np.zeros((len(names), values_NC.shape[1]), dtype=np.int64)
    np.add.at(sums, block_N, values_NC)
    return sums


def block_names(ids_N: list[str], pattern: str) -> list[str]:
    """The part of each id that a pattern matches: its first group, or the whole match.

    Raises:
        UserError: the pattern is not a regular expression, or does not match an id.
    """
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise UserError(f"--bootstrap-by-id: {pattern!r} is no regular expression: {error}.") from error
    names = []
    for utterance_id in ids_N:
        found = compiled.search(utterance_id)
        if found is None:
            raise UserError(f"--bootstrap-by-id: {pattern!r} finds nothing in the id {utterance_id!r}.")
        names.append(found.group(1 if compiled.groups else 0) or "")
    return names


def compare_counts(
    errors_a_N: np.ndarray,
    errors_b_N: np.ndarray,
    words_N: np.ndarray,
    languages_N: np.ndarray | list[str],
    *,
    names_N: list[str] | None = None,
    resamples: int = RESAMPLES,
) -> dict[str, Any]:
    """Compare two models on the same utterances: WERs, their difference with its interval, and whether it is
    significant.

    Args:
        errors_a_N, errors_b_N: word errors by utterance.
        words_N: reference words by utterance.
        languages_N: language by utterance.
        names_N: utterances with the same name are drawn and exchanged together.
        resamples: of the bootstrap.

    Returns:
        wer_a, wer_b, their intervals, difference (b minus a) and its interval, p_value (`permutation_p`), significant,
        clips_needed, clips, blocks and words; and by_language the same with p_value_holm, which decides there.
    """
    values_NC = np.stack([np.asarray(c, dtype=np.int64) for c in (errors_a_N, errors_b_N, words_N)], axis=1)
    languages_N = np.asarray(languages_N, dtype=str)
    result = _compare(values_NC, names_N, resamples)
    found = {}
    for language in sorted(set(languages_N.tolist())):
        rows = np.flatnonzero(languages_N == language)
        names = None if names_N is None else [names_N[i] for i in rows]
        found[language] = _compare(values_NC[rows], names, resamples)
    for part, p_value in zip(found.values(), holm([part["p_value"] for part in found.values()]), strict=True):
        part["p_value_holm"], part["significant"] = p_value, p_value < 1 - LEVEL
    return {**result, "by_language": found}


def _compare(values_NC: np.ndarray, names_N: list[str] | None, resamples: int) -> dict[str, Any]:
    """Columns: errors of a, errors of b, words."""
    clips = len(values_NC)
    if names_N is not None:
        values_NC = sum_blocks(values_NC, names_N)
    errors_a, errors_b, words = (int(total) for total in values_NC.sum(axis=0))
    p_value = permutation_p(values_NC[:, 1] - values_NC[:, 0])
    result: dict[str, Any] = {
        "clips": clips,
        "blocks": len(values_NC),
        "words": words,
        "wer_a": errors_a / words if words else None,
        "wer_b": errors_b / words if words else None,
        "difference": (errors_b - errors_a) / words if words else None,
        **dict.fromkeys(("interval_a", "interval_b", "difference_interval", "clips_needed")),
        "p_value": p_value,
        "significant": p_value < 1 - LEVEL,
    }
    if words and resamples > 0:
        sums_RC = resampled_sums(values_NC, resamples)
        with np.errstate(divide="ignore", invalid="ignore"):
            a_R, b_R = (sums_RC[:, :2] / sums_RC[:, 2:]).T
        result["interval_a"], result["interval_b"] = percentiles(a_R), percentiles(b_R)
        result["difference_interval"] = percentiles(b_R - a_R)
        if errors_a != errors_b:
            result["clips_needed"] = clips_needed(result["difference"], float(np.nanstd(b_R - a_R)), clips)
    return result


def clips_needed(difference: float, spread: float, clips: int) -> int:
    """Utterances like these that it takes to find a difference of this size significant four times out of five.

    Args:
        difference: of two error rates on the same utterances.
        spread: its standard deviation with `clips` utterances.
    """
    normal = statistics.NormalDist()
    quantiles = normal.inv_cdf((1 + LEVEL) / 2) + normal.inv_cdf(POWER)
    least = int(np.ceil(1 - np.log2(1 - LEVEL)))  # with fewer no choice of signs is rare enough
    return max(least, int(np.ceil(clips * (quantiles * spread / difference) ** 2)))


def clips_to_bound(difference: float, upper: float, clips: int, limit: float) -> int:
    """Utterances like these that it takes for the upper end of the interval to come down to a limit, if the difference
    stays as it is: an interval's width goes with the root of their number.

    Args:
        difference: of two error rates on the same utterances, below `limit`.
        upper: the upper end of its interval with `clips` utterances, in the same unit.
    """
    return int(np.ceil(clips * ((upper - difference) / (limit - difference)) ** 2))


def p_value_text(result: dict[str, Any]) -> str:
    """The p-value of a comparison, or of one of its languages, with two digits: `p = 0.012`, or `p < 1e-12`."""
    p_value = result.get("p_value_holm", result["p_value"])
    return f"p = {p_value:.2g}" if result["p_value"] > SMALLEST_P else f"p < {p_value:.0e}"


def describe_difference(result: dict[str, Any], better: str, worse: str) -> str:
    """Put a comparison into one sentence.

    Args:
        result: from `compare_counts`, or one of its languages.
        better, worse: the words for a second model that is significantly better or worse than the first.
    """
    if result["difference"] is None:
        return "no reference has a word: nothing can be said"
    points, chance, by = 100 * result["difference"], p_value_text(result), result["significant"]
    if result["difference_interval"]:
        low, high = (100 * v for v in result["difference_interval"])
        if by and points < 0:  # "better by" has no sign
            low, high = -high, -low
        chance = f"95 % interval {low:{'' if by else '+'}.2f} to {high:{'' if by else '+'}.2f}, {chance}"
    if by:
        return f"{worse if points > 0 else better} by {abs(points):.2f} points ({chance})"
    text, needed = f"no significant difference: {points:+.2f} points ({chance})", result["clips_needed"]
    if needed and needed > result["clips"]:
        text += f"; a difference of this size takes about {needed:,} clips to show"
    return text
