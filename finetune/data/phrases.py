"""A file of phrases that a recogniser is to listen for: one a line, with a weight where it differs from 1.

# comment
Kempinski
reverse osmosis
Mbappé :2
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from finetune.errors import UserError
from finetune.paths import near_path
from finetune.security.safe_text import one_line

if TYPE_CHECKING:
    from pathlib import Path

LONGEST_PHRASE = 200
"""Characters: a phrase is a word or a few, no transcript."""
LARGEST_FILE = 2**24
"""Bytes."""
_WEIGHTED = re.compile(r"(.*\S)\s+:(\S+)", re.DOTALL)


@dataclass(frozen=True)
class Phrase:
    """A phrase as its file has it."""

    text: str
    weight: float = 1.0
    """Its share of the boost; 2 is twice as much as others get."""
    line: int = 0
    """Of the file, from 1 on."""


def read_phrases(path: Path, key: str = "--boost") -> list[Phrase]:
    """Read a file of phrases.

    Args:
        path: UTF-8; empty lines and lines that begin with # say nothing.
        key: the option that names it, for messages.

    Returns:
        The phrases in their order, each once.

    Raises:
        UserError: there is no phrase in it, it is no text, or a line is wrong: too long, with a weight that is no
            number above 0, or a phrase once more with another weight. All such lines are told at once.
    """
    found: dict[str, Phrase] = {}
    problems: list[str] = []
    for number, line in enumerate(_text_of(path, key).splitlines(), 1):
        line = " ".join(line.split())
        if not line or line.startswith("#"):
            continue
        try:
            phrase = _phrase(line, number)
        except ValueError as error:
            problems.append(f"line {number}: {error}")
            continue
        first = found.setdefault(phrase.text, phrase)
        if first.weight != phrase.weight:
            problems.append(
                f"line {number}: {one_line(phrase.text)!r} has the weight {phrase.weight:g}, and {first.weight:g} in "
                f"line {first.line}"
            )
    if problems:
        more = f"; and {len(problems) - 5} more lines" if len(problems) > 5 else ""
        raise UserError(f"{key}: {path}: {'; '.join(problems[:5])}{more}.")
    if not found:
        raise UserError(
            f"{key}: there is no phrase in {path}. Write one a line; lines that begin with # are comments."
        )
    return list(found.values())


def _phrase(line: str, number: int) -> Phrase:
    """Raises ValueError, which says what is wrong with the line."""
    weighted = _WEIGHTED.fullmatch(line)
    text, weight = weighted.groups() if weighted else (line, "1")
    if len(text) > LONGEST_PHRASE:
        raise ValueError(
            f"{len(text):,} characters, and a phrase has at most {LONGEST_PHRASE}: write the words that matter alone"
        )
    try:
        value = float(weight)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(
            f"the weight :{one_line(weight)[:40]} is no number above 0; write such as :2, or leave the line out"
        )
    return Phrase(text, value, number)


def _text_of(path: Path, key: str) -> str:
    if not path.is_file():
        raise UserError(f"{key}: there is no file {path}.{near_path(str(path))}")
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST_FILE + 1)
    except OSError as error:
        raise UserError(f"{key}: {path} cannot be read: {error}.") from error
    wanted = "A text file in UTF-8 with one phrase a line is expected."
    if len(content) > LARGEST_FILE:
        raise UserError(f"{key}: {path} has more than {LARGEST_FILE >> 20} MiB, which are no phrases. {wanted}")
    if b"\0" in content:
        raise UserError(f"{key}: {path} is no text. {wanted}")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{key}: {path} is no text in UTF-8: {error}. {wanted}") from error
