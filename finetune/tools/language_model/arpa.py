"""A language model as an ARPA file whose words are tokens, as NeMo reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from finetune.tools.language_model.kneser_ney import Ngrams

OFFSET = 100
"""A token's number and this is the code of the character that stands for it (NeMo's DEFAULT_TOKEN_OFFSET)."""
MOST_TOKENS = 0xD800 - OFFSET
"""From there on come halves of characters, which no file in UTF-8 has."""
NEVER = -99.0
"""Logarithm of the probability of what no text has."""


def arpa_lines(counted: list[Ngrams], vocabulary: int) -> Iterator[str]:
    """Yield the lines of an ARPA file, without their ends.

    Args:
        counted: of `finetune.tools.language_model.kneser_ney.estimate`.
        vocabulary: tokens.
    """
    names = [chr(token + OFFSET) for token in range(vocabulary)] + ["</s>", "<s>"]
    yield "\\data\\"
    for n, ngrams in enumerate(counted, 1):
        yield f"ngram {n}={int(ngrams.kept_G.sum()) + (n == 1)}"
    for n, ngrams in enumerate(counted, 1):
        yield ""
        yield f"\\{n}-grams:"
        if n == 1:
            yield f"{NEVER:g}\t<unk>"
        with np.errstate(divide="ignore"):
            log_p = np.maximum(np.log10(ngrams.probability_G), NEVER)
            backoff = np.maximum(np.log10(ngrams.backoff_G), NEVER)
        highest = n == len(counted)
        for i in np.flatnonzero(ngrams.kept_G).tolist():
            words = " ".join(names[w] for w in _words(counted, n, i))
            # What ends a text has nothing behind it.
            weight = "" if highest or ngrams.words_G[i] == vocabulary else f"\t{backoff[i]:.7g}"
            yield f"{log_p[i]:.7g}\t{words}{weight}"
    yield ""
    yield "\\end\\"


def _words(counted: list[Ngrams], n: int, i: int) -> list[int]:
    """Return the words of n-gram `i` of order `n`."""
    words = []
    while n > 1:
        words.append(int(counted[n - 1].words_G[i]))
        i, n = int(counted[n - 1].prefix_G[i]), n - 1
    return [*reversed([*words, i])]
