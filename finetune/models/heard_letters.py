"""Which old letter stands for a new one: the letters that a model writes where texts in a new script have theirs.

A model that lacks a script still hears its sounds, and writes them with the letters that it has. Texts and what is
heard are aligned by a stochastic edit distance, whose letter probabilities expectation maximisation finds (Ristad and
Yianilos, "Learning string-edit distance", IEEE Transactions on Pattern Analysis and Machine Intelligence 20, 1998).

B pairs, X characters of a text, Y characters that are heard, N different characters of texts, M that are heard.
"""

import unicodedata
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Pair = tuple[str, str]
"""A text, and what a model writes for its audio."""


@dataclass(frozen=True)
class Heard:
    """What became of new letters when a model listened to them."""

    letters: dict[str, str]
    """Old letters by new ones, small letters."""
    unheard: str
    """New letters that no old one was matched with."""
    texts: list[str]
    """Of all clips that were looked at, normalised."""
    clips: int
    """Those with new letters."""

    def as_json(self) -> dict[str, Any]:
        return {
            "clips": len(self.texts),
            "with_new_letters": self.clips,
            "heard": self.letters,
            "not_heard": self.unheard,
        }


WRITTEN, SILENT, ADDED = 0.8, 0.1, 0.1
"""Probabilities that a character of the text is heard as one, that it is not heard, and that one is heard besides."""
ROUNDS = 10
SMOOTHING = 0.5
"""Characters' worth of what is heard on average, for each character of the texts."""
SAME = 10.0
"""How much likelier than by its frequency a character is heard as itself, before the first round."""
LONGEST = 400
"""Characters of a text or of what is heard; longer ones are left out."""
PAIRS_AT_ONCE = 16


def match_letters(pairs: Collection[Pair], letters: Collection[str]) -> dict[str, str]:
    """Return for each letter the one that is most often heard in its place; none where none is.

    Args:
        pairs: texts, and what is heard. Capitals of a text count as small letters.
        letters: small ones, of the texts.
    """
    pairs = [(x.lower(), y) for x, y in pairs if x and y and max(len(x), len(y)) <= LONGEST]
    written = sorted({c for x, _ in pairs for c in x})
    frequencies = Counter(c for _, y in pairs for c in y)
    heard = sorted(frequencies)
    if not pairs:
        return {}
    frequency_M = torch.tensor([frequencies[c] for c in heard], dtype=torch.float64)
    frequency_M /= frequency_M.sum()
    same_NM = torch.tensor([[SAME if a == b else 1.0 for b in heard] for a in written], dtype=torch.float64)
    probability_NM = torch.nn.functional.normalize(same_NM * frequency_M, p=1, dim=1)
    at_x, at_y = ({c: i for i, c in enumerate(characters)} for characters in (written, heard))
    ids = sorted((([at_x[c] for c in x], [at_y[c] for c in y]) for x, y in pairs), key=lambda p: len(p[0]))
    counts_NM = torch.zeros_like(probability_NM)
    for _ in range(ROUNDS):
        counts_NM = _expected_counts(ids, probability_NM, frequency_M)
        probability_NM = torch.nn.functional.normalize(counts_NM + SMOOTHING * frequency_M, p=1, dim=1)
    is_letter_M = torch.tensor([unicodedata.category(c)[0] == "L" for c in heard])
    most_N = counts_NM.where(is_letter_M, 0).max(1)
    found = {a: (heard[int(i)], float(n)) for a, n, i in zip(written, *most_N, strict=True)}
    return {a: found[a][0] for a in letters if a in found and found[a][1] >= SMOOTHING}


def _expected_counts(
    ids: list[tuple[list[int], list[int]]], probability_NM: torch.Tensor, frequency_M: torch.Tensor
) -> torch.Tensor:
    """Return how often each character of the texts is expected to be heard as each other, (N, M).

    It is the gradient of the log-likelihoods with respect to the log-probabilities.
    """
    log_probability_NM = probability_NM.log().requires_grad_()
    for i in range(0, len(ids), PAIRS_AT_ONCE):
        _log_likelihoods(ids[i : i + PAIRS_AT_ONCE], log_probability_NM, frequency_M.log()).sum().backward()
    counts_NM = log_probability_NM.grad
    assert counts_NM is not None
    return counts_NM


def _log_likelihoods(
    pairs: Sequence[tuple[list[int], list[int]]], log_probability_NM: torch.Tensor, log_frequency_M: torch.Tensor
) -> torch.Tensor:
    """Return the log-probability of what is heard given the text, over all alignments, (B,).

    Row by row: with forward[i, j] the sum over alignments of i characters of the text with j that are heard,

        forward[i, j] = WRITTEN P(y_j | x_i) forward[i-1, j-1] + SILENT forward[i-1, j] + ADDED Q(y_j) forward[i, j-1]

    whose last term makes a row a cumulative sum, each cell divided by the product of ADDED Q up to it.
    """
    pad = torch.nn.utils.rnn.pad_sequence
    x_BX, y_BY = (pad([torch.tensor(p[side]) for p in pairs], batch_first=True) for side in (0, 1))
    x_lengths_B, y_lengths_B = (torch.tensor([len(p[side]) for p in pairs]) for side in (0, 1))
    match_BXY = log_probability_NM[x_BX.unsqueeze(2), y_BY.unsqueeze(1)] + torch.tensor(WRITTEN).log()
    added_BY = (log_frequency_M[y_BY] + torch.tensor(ADDED).log()).cumsum(1)
    added_BY = torch.nn.functional.pad(added_BY, (1, 0))  # from here on Y counts from no character
    row_BY = added_BY
    rows = [row_BY]
    for i in range(x_BX.size(1)):
        matched_BY = torch.nn.functional.pad(row_BY[:, :-1] + match_BXY[:, i], (1, 0), value=-torch.inf)
        entered_BY = torch.logaddexp(matched_BY, row_BY + torch.tensor(SILENT).log())
        row_BY = (entered_BY - added_BY).logcumsumexp(1) + added_BY
        rows.append(row_BY)
    return torch.stack(rows, 1)[torch.arange(len(pairs)), x_lengths_B, y_lengths_B]
