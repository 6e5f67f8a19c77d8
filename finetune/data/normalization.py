"""Normalisation of transcripts, for training targets and for WER."""

import re
import unicodedata
from typing import Literal, get_args

TextNormalization = Literal["none", "lower", "basic"]
NORMALIZATIONS: tuple[str, ...] = get_args(TextNormalization)
SCORE_NORMALIZATIONS = (*NORMALIZATIONS, "open_asr")
"""Normalisations for scoring; `open_asr` (finetune.evaluation.open_asr) goes by language."""
_LOOSE_APOSTROPHE = re.compile(r"(?<!\w)'|'(?!\w)")


def normalize_text(text: str, mode: str) -> str:
    """Normalise a transcript.

    Args:
        text: any transcript.
        mode: "none" (only outer and repeated white space goes), "lower" (lower case too), or "basic" (lower case, no
            punctuation but apostrophes inside words; letters with accents and digits stay).
    """
    text = unicodedata.normalize("NFC", text)
    if mode in ("lower", "basic"):
        text = text.lower()
    if mode == "basic":
        text = text.replace("\u2019", "'").replace("\u02bc", "'")
        # Letters, digits and marks: a vowel sign of Hindi or Thai is a mark of its own, and no place to part a word.
        text = "".join(c if c == "'" or unicodedata.category(c)[0] in "LMN" else " " for c in text)
        text = _LOOSE_APOSTROPHE.sub(" ", text)
    return " ".join(text.split())
