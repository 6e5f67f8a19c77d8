"""Normalisation of transcripts, for training targets and for WER."""

import re
import unicodedata
from collections.abc import Iterable
from typing import Literal, get_args

TextNormalization = Literal["none", "lower", "basic"]
ScoreNormalization = Literal["none", "lower", "basic", "open_asr"]
"""For scoring; `open_asr` (finetune.evaluation.open_asr) goes by language."""
NORMALIZATIONS: tuple[str, ...] = get_args(TextNormalization)
SCORE_NORMALIZATIONS: tuple[str, ...] = get_args(ScoreNormalization)
_LOOSE_APOSTROPHE = re.compile(r"(?<!\w)'|'(?!\w)")


class _Kept(dict[int, str]):
    """What `basic` makes of a character, by its code; filled as characters are met, since a lookup is quicker."""

    def __missing__(self, code: int) -> str:
        # Letters, digits and marks: a vowel sign of Hindi or Thai is a mark of its own, and no place to part a word.
        self[code] = chr(code) if unicodedata.category(chr(code))[0] in "LMN" else " "
        return self[code]


_KEPT = _Kept({ord(apostrophe): "'" for apostrophe in "'\u2019\u02bc"})


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
        text = text.translate(_KEPT)
        text = _LOOSE_APOSTROPHE.sub(" ", text) if "'" in text else text
    return " ".join(text.split())


def normalization_for(pieces: Iterable[str]) -> TextNormalization:
    """Return how texts are normalised for a vocabulary: `basic` for one without capitals, and so without punctuation
    to speak of, else `none`."""
    return "none" if any(c.isupper() for piece in pieces for c in piece) else "basic"
