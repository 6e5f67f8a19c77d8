"""Phrases and a language model that a model decodes with, as `--boost` and `--lm` name them."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from finetune.models.fusion import Fusion, boosting_tree, fuse, tokenise
from finetune.models.language_model import read_language_model
from finetune.security.safe_text import one_line

if TYPE_CHECKING:
    from pathlib import Path

    from finetune.data.phrases import Phrase
    from finetune.models.protocols import AsrModel

log = logging.getLogger(__name__)

NAMED = 5
"""Phrases without tokens that a warning names."""


@dataclass
class Boosting:
    """What is asked for."""

    file: Path | None = None
    """Where the phrases stand."""
    phrases: list[Phrase] = field(default_factory=list)
    weight: float = 0.0
    lm: Path | None = None
    lm_weight: float = 0.0
    beam: int = 1
    """Hypotheses that are kept; 1: greedy."""

    def weights(self, boost: float | None = None, lm: float | None = None) -> list[float]:
        """Return the weights in the order of the fusion's models; None: the one that is asked for."""
        found = [self.weight if boost is None else boost] if self.phrases else []
        return found + ([self.lm_weight if lm is None else lm] if self.lm else [])

    def __str__(self) -> str:
        parts = [f"--boost {self.file} --boost-weight {self.weight:g}"] if self.phrases else []
        parts += [f"--lm {self.lm} --lm-weight {self.lm_weight:g}"] if self.lm else []
        return " ".join(parts + ([f"--beam {self.beam}"] if self.beam > 1 else []))


def boost(model: AsrModel, boosting: Boosting) -> Fusion:
    """Decode with phrases and a language model from here on, by the head that is chosen; in place.

    Returns:
        The fusion, whose weights may be changed.

    Raises:
        UserError: the model can write none of the phrases, its decoding takes no fusion, or the language model is of
            other tokens.
    """
    models, vocabulary = [], model.tokenizer.vocab_size
    if boosting.phrases:
        found = tokenise(model, boosting.phrases)
        for phrase, reason in list(found.left_out.items())[:NAMED]:
            log.warning("--boost: %s is left out: %s", one_line(repr(phrase)), reason)
        if len(found.left_out) > NAMED:
            log.warning("--boost: %d phrases in all are left out", len(found.left_out))
        models.append(boosting_tree(found.tokens, found.weights, vocabulary))
    if boosting.lm is not None:
        models.append(read_language_model(boosting.lm, model))
    fusion = Fusion(models, boosting.weights())
    fuse(model, fusion, boosting.beam)
    return fusion
