"""From the texts of data sets to the directory of a language model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from finetune.data.normalization import normalization_for
from finetune.data.text_corpus import read_texts
from finetune.errors import UserError
from finetune.models.language_model import write_language_model
from finetune.models.loading import read_tokenizer
from finetune.models.nemo import import_nemo
from finetune.models.sentencepiece_model import processor
from finetune.tools.language_model.arpa import MOST_TOKENS, arpa_lines
from finetune.tools.language_model.kneser_ney import estimate

if TYPE_CHECKING:
    from pathlib import Path

ROWS, SECONDS = 20_000_000, 6 * 3600.0
"""Bounds of the search for texts."""
TEXTS_AT_ONCE = 4096


def make_language_model(
    data: list[str],
    split: str,
    model: str,
    output: Path,
    *,
    order: int,
    least: int = 1,
    normalization: str | None = None,
) -> dict[str, Any]:
    """Make a language model of the texts of data sets.

    Args:
        data: as `finetune.data.text_corpus.read_texts` takes it.
        model: whose tokens it has; as `finetune.models.loading.read_tokenizer` takes it.
        output: its directory.
        order, least: as of `finetune.tools.language_model.kneser_ney.estimate`.
        normalization: of the texts; None: by the vocabulary.

    Returns:
        What lm.json has: order, ngrams by order, texts, text_tokens, left_out and more.

    Raises:
        UserError: tokenizer or texts cannot be read, or no text can be written in the tokens.
    """
    tokenizer = read_tokenizer(model, "--model")
    vocabulary = len(tokenizer.pieces)
    if vocabulary > MOST_TOKENS:
        raise UserError(f"--model: {vocabulary:,} tokens; NeMo's ARPA files have room for {MOST_TOKENS:,}.")
    mode = normalization or normalization_for(p.piece for p in tokenizer.pieces)
    found = [text.text for text in read_texts(data, "--data", mode, split, ROWS, SECONDS)]
    encoder = processor(tokenizer)
    unknown, tokens, left_out = encoder.unk_id(), [], 0
    for first in range(0, len(found), TEXTS_AT_ONCE):
        for own in encoder.encode(found[first : first + TEXTS_AT_ONCE]):
            if unknown in own:
                left_out += 1
            else:
                tokens.append(np.asarray(own, dtype=np.int32))
    if not tokens:
        raise UserError(f"--data: every text has characters without a token of {model} (normalised: {mode}).")
    counted = estimate(tokens, vocabulary, order, least)
    about = {
        "order": len(counted),
        "least": least,
        "normalization": mode,
        "data": data,
        "split": split,
        "model": model,
        "texts": len(tokens),
        "text_tokens": sum(len(own) for own in tokens),
        "left_out": left_out,
        "ngrams": [int(ngrams.kept_G.sum()) for ngrams in counted],
    }
    import_nemo()  # quietly, before its language model is made
    write_language_model(output, arpa_lines(counted, vocabulary), tokenizer, about)
    return about
