"""Phrases as sherpa-onnx takes them: hotwords of a NeMo transducer, for its modified beam search."""

from __future__ import annotations

from typing import TYPE_CHECKING

from finetune.data.normalization import normalization_for
from finetune.durable_files import write_text
from finetune.errors import UserError
from finetune.models.fusion import forms_of
from finetune.models.loading import read_tokenizer
from finetune.models.sentencepiece_model import processor

if TYPE_CHECKING:
    from pathlib import Path

    from finetune.data.phrases import Phrase

HOTWORDS, VOCABULARY = "hotwords.txt", "bpe.vocab"
SCORE = 0.5
"""hotwords_score where none is given; docs/boosting.md says how it was found."""


def write_hotwords(model: str, phrases: list[Phrase], directory: Path, score: float = SCORE) -> dict[str, str]:
    """Write hotwords.txt, a phrase a line as the vocabulary writes it, and bpe.vocab, by which sherpa-onnx divides
    them into tokens.

    A phrase of a weight other than 1 gets a score of its own, the weight times `score`; the others have the
    hotwords_score that sherpa-onnx is started with, which has to be `score`.

    Args:
        model: whose tokens they are, as `finetune.models.loading.read_tokenizer` takes it.

    Returns:
        Phrases that are left out, with the reason.

    Raises:
        UserError: there is no tokenizer, no phrase can be written in its tokens, or the files cannot be written.
    """
    tokenizer = read_tokenizer(model, "--model")
    mode, encoder = normalization_for(p.piece for p in tokenizer.pieces), processor(tokenizer)
    lines: dict[str, float] = {}
    left_out: dict[str, str] = {}
    for phrase in phrases:
        for form in forms_of(phrase.text, mode):
            if encoder.unk_id() not in encoder.encode(form):
                lines[form] = max(phrase.weight, lines.get(form, 0.0))
        if not any(form in lines for form in forms_of(phrase.text, mode)):
            left_out[phrase.text] = "the tokenizer cannot write it"
    if not lines:
        raise UserError(f"--boost: the tokenizer of {model} can write none of the phrases.")
    scored = (f"{text} :{weight * score:g}" if weight != 1 else text for text, weight in lines.items())
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_text(directory / HOTWORDS, "".join(f"{line}\n" for line in scored))
        write_text(directory / VOCABULARY, "".join(f"{p.piece}\t{p.score:.6g}\n" for p in tokenizer.pieces))
    except OSError as error:
        raise UserError(f"--output: {directory} cannot be written: {error}.", exit_code=1) from error
    return left_out


def how_to_use(directory: Path, score: float = SCORE) -> str:
    """Return the arguments for sherpa-onnx."""
    return (
        'decoding_method="modified_beam_search", modeling_unit="bpe", '
        f'bpe_vocab="{directory / VOCABULARY}", hotwords_file="{directory / HOTWORDS}", hotwords_score={score:g}'
    )
