"""Normalisation after the Open ASR Leaderboard: Whisper's rules for English, symbols and case for the other
languages."""

import json
import re
import unicodedata
from functools import cache
from importlib.resources import files
from typing import Any

ENGLISH = ("en", "eng", "english")
NOT_SCORED = "ignore time segment in scoring"
"""A reference of TED-LIUM that the leaderboard leaves out."""


def normalize_open_asr(text: str, language: str) -> str:
    """Normalise a reference or a hypothesis.

    English, and utterances without a language: Whisper's English rules (Radford et al. 2022, appendix C), from
    transformers: lower case, contractions and titles written out, numbers as digits, American spelling, no fillers,
    nothing in brackets. Other languages: lower case, no symbols, nothing in brackets; accents and vowel signs stay.

    Args:
        text: any transcript.
        language: `en`, `en-GB`, `eng`, `fr`, or empty.

    Returns:
        words with single spaces; empty if the utterance is not to be scored.
    """
    if is_english(language):
        text = _english()(text).strip()
        return "" if text == NOT_SCORED else text
    text = re.sub(r"\([^)]+\)", "", re.sub(r"[<\[][^>\]]*[>\]]", "", text.lower()))
    text = unicodedata.normalize("NFKC", text).lower()
    # Marks (M) stay: without its vowel signs a Hindi or Thai word is another one. Zero-width and control characters
    # (C) go.
    kinds = [(c, unicodedata.category(c)[0]) for c in text]
    text = "".join(" " if kind in "SP" or c.isspace() else c for c, kind in kinds if kind != "C" or c.isspace())
    return " ".join(text.split())


def is_english(language: str) -> bool:
    """Whether English rules apply: English in any variety, or no language named."""
    return not language or re.split(r"[-_]", language.strip().lower())[0] in ENGLISH


@cache
def _english() -> Any:
    """transformers has the rules but not the list of spellings, which is in the package whisper_normalizer."""
    from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

    spellings = files("whisper_normalizer").joinpath("normalizers", "english.json").read_text(encoding="utf-8")
    return EnglishTextNormalizer(json.loads(spellings))
