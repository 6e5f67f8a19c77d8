"""Interpolated modified Kneser-Ney smoothing (Chen and Goodman, "An empirical study of smoothing techniques for
language modeling", 1998, section 3), as KenLM's lmplz estimates it (Heafield et al., ACL 2013).

No package that is kept well makes such models from Python: KenLM's has its queries alone.

W words of all texts, G n-grams of an order.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

log = logging.getLogger(__name__)

FALLBACK = (0.5, 1.0, 1.5)
"""Discounts where the counts of counts give none, as of few texts: lmplz --discount_fallback."""


@dataclass
class Ngrams:
    """The n-grams of one order. A word is a token, V the end of a text, V + 1 its beginning.

    Those of order 1 are the words themselves: n-gram i is the word i.
    """

    words_G: np.ndarray
    """The last word of each."""
    prefix_G: np.ndarray
    """The n-gram one order below without the last word."""
    suffix_G: np.ndarray
    """The n-gram one order below without the first word."""
    seen_G: np.ndarray
    """Times in the texts."""
    from_start_G: np.ndarray
    """Whether it begins with the beginning of a text."""
    probability_G: np.ndarray
    """Of the last word after the others."""
    backoff_G: np.ndarray
    """Factor of the lower order's probabilities for what does not follow it."""
    kept_G: np.ndarray
    """Whether it stays in the model."""


def estimate(texts: Sequence[Sequence[int]], vocabulary: int, order: int, least: int = 1) -> list[Ngrams]:
    """Estimate a model of sequences of tokens; every token has a probability, seen or not.

    Args:
        texts: tokens of each, from 0 to `vocabulary` - 1.
        vocabulary: V, tokens.
        order: 2 or more.
        least: n-grams of order 3 and above that come less often are left out, and their share goes to lower orders.

    Returns:
        By order, up to the highest that has n-grams.
    """
    counted = count(texts, vocabulary, order)
    for n, ngrams in enumerate(counted):
        if n >= 2:
            ngrams.kept_G = ngrams.seen_G >= least
    while not counted[-1].kept_G.any():
        counted.pop()
    _smooth(counted, vocabulary)
    return counted


def count(texts: Sequence[Sequence[int]], vocabulary: int, order: int) -> list[Ngrams]:
    """Count the n-grams of each order up to `order`; none of them reaches beyond a text and its two ends."""
    end, start = vocabulary, vocabulary + 1
    lengths = np.asarray([len(text) + 2 for text in texts], dtype=np.int64)
    words_W = np.full(int(lengths.sum()), end, dtype=np.int64)
    last = np.cumsum(lengths) - 1
    words_W[last - lengths + 1] = start
    inside = np.ones(len(words_W), dtype=bool)
    inside[last] = inside[last - lengths + 1] = False
    words_W[inside] = np.concatenate([np.asarray(text, dtype=np.int64) for text in texts])
    left_W = np.repeat(last, lengths) - np.arange(len(words_W))  # words behind each, in its text
    singles = np.arange(vocabulary + 2)
    counted = [
        _unestimated(singles, singles, singles, np.bincount(words_W, minlength=len(singles)), singles == start),
    ]
    number_W = words_W  # of the n-gram that begins at each word
    for n in range(2, order + 1):
        places = np.flatnonzero(left_W >= n - 1)
        keys = number_W[places] * (vocabulary + 2) + words_W[places + n - 1]
        kinds, first, found, seen = np.unique(keys, return_index=True, return_inverse=True, return_counts=True)
        begins = places[first]
        counted.append(
            _unestimated(
                words_W[begins + n - 1],
                kinds // (vocabulary + 2),
                number_W[begins + 1],
                seen,
                words_W[begins] == start,
            )
        )
        number_W = np.full_like(words_W, -1)
        number_W[places] = found
    return counted


def _unestimated(
    words_G: np.ndarray, prefix_G: np.ndarray, suffix_G: np.ndarray, seen_G: np.ndarray, from_start_G: np.ndarray
) -> Ngrams:
    nothing_G = np.zeros(len(words_G))
    kept_G = np.ones(len(words_G), dtype=bool)
    return Ngrams(words_G, prefix_G, suffix_G, seen_G, from_start_G, nothing_G, np.ones_like(nothing_G), kept_G)


def _smooth(counted: list[Ngrams], vocabulary: int) -> None:
    """Fill in probabilities and backoffs, from the lowest order on."""
    for n, ngrams in enumerate(counted):
        adjusted_G = ngrams.seen_G
        if n + 1 < len(counted):  # by how many words it is preceded, but for what begins a text
            preceded_G = np.bincount(counted[n + 1].suffix_G, minlength=len(ngrams.words_G))
            adjusted_G = np.where(ngrams.from_start_G, ngrams.seen_G, preceded_G)
        if n == 0:
            adjusted_G = np.where(ngrams.from_start_G, 0, adjusted_G)  # a text's beginning is given
        discounts = _discounts(adjusted_G, n + 1)
        kept_count_G = np.where(ngrams.kept_G, adjusted_G - discounts[np.minimum(adjusted_G, 3)], 0.0)
        if n == 0:
            total = adjusted_G.sum()
            left = 1 - kept_count_G.sum() / total
            ngrams.probability_G = np.where(ngrams.from_start_G, 0.0, kept_count_G / total + left / (vocabulary + 1))
            continue
        lower = counted[n - 1]
        total_H = np.bincount(ngrams.prefix_G, weights=adjusted_G, minlength=len(lower.words_G))
        kept_H = np.bincount(ngrams.prefix_G, weights=kept_count_G, minlength=len(lower.words_G))
        with np.errstate(divide="ignore", invalid="ignore"):
            lower.backoff_G = np.where(total_H > 0, np.maximum(1 - kept_H / total_H, 0), 1.0)
        own_G = kept_count_G / total_H[ngrams.prefix_G]
        ngrams.probability_G = own_G + lower.backoff_G[ngrams.prefix_G] * lower.probability_G[ngrams.suffix_G]


def _discounts(adjusted_G: np.ndarray, order: int) -> np.ndarray:
    """Return what is taken from counts of 0, 1, 2, and 3 and more (Chen and Goodman, equation 17)."""
    ones, twos, threes, fours = (int((adjusted_G == c).sum()) for c in (1, 2, 3, 4))
    if min(ones, twos, threes, fours):
        share = ones / (ones + 2 * twos)
        found = (1 - 2 * share * twos / ones, 2 - 3 * share * threes / twos, 3 - 4 * share * fours / threes)
        if all(0 <= discount <= c for c, discount in enumerate(found, 1)):
            return np.array([0.0, *found])
    log.info("order %d: too few texts to estimate discounts; %g, %g and %g are taken", order, *FALLBACK)
    return np.array([0.0, *FALLBACK])
