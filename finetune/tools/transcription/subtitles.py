"""Subtitle files: SubRip (.srt) and WebVTT (.vtt), from words with times.

Cues have at most two lines of 42 characters and seven seconds, the common limits of broadcasters; they never overlap.
"""

import html
import itertools
import textwrap
from dataclasses import dataclass
from typing import Any

from finetune.tools.transcription.words import PAUSE_SECONDS, ends_sentence

LINE_CHARACTERS = 42
LINES = 2
LONGEST_SECONDS = 7.0
SHORTEST_SECONDS = 1.0


@dataclass
class Cue:
    """Text on the screen; start and end in milliseconds."""

    start: int
    end: int
    text: str


def cues_of(words: list[dict[str, Any]]) -> list[Cue]:
    """Group words into cues: sentences, or parts of one that is too long for a cue.

    Args:
        words: word, start and end in seconds, in order.

    Returns:
        Cues with increasing times, each shown for at least a second if the next one leaves room.
    """
    groups: list[list[dict[str, Any]]] = []
    for word in itertools.chain.from_iterable(map(_parts, words)):
        if groups and not _begins_cue(groups[-1], word):
            groups[-1].append(word)
        else:
            groups.append([word])
    cues = [
        Cue(round(1000 * group[0]["start"]), round(1000 * group[-1]["end"]), _text([w["word"] for w in group]))
        for group in groups
    ]
    shortest = round(1000 * SHORTEST_SECONDS)
    for cue, following in itertools.zip_longest(cues, cues[1:]):
        cue.end = max(cue.end, cue.start + shortest)
        if following:
            cue.end = max(min(cue.end, following.start), cue.start + 1)
            following.start = max(following.start, cue.end)
    return cues


def _begins_cue(group: list[dict[str, Any]], word: dict[str, Any]) -> bool:
    return (
        ends_sentence(group[-1]["word"])
        or word["start"] - group[-1]["end"] >= PAUSE_SECONDS
        or word["end"] - group[0]["start"] > LONGEST_SECONDS
        or len(wrap([w["word"] for w in [*group, word]])) > LINES
    )


def _text(words: list[str]) -> str:
    """Join words to one line, or to two that are as equal in length as possible."""
    if len(wrap(words)) == 1:
        return " ".join(words)
    splits = [[" ".join(words[:i]), " ".join(words[i:])] for i in range(1, len(words))]
    fitting = [lines for lines in splits if max(map(len, lines)) <= LINE_CHARACTERS]
    return "\n".join(min(fitting, key=lambda lines: abs(len(lines[0]) - len(lines[1]))))


def _parts(word: dict[str, Any]) -> list[dict[str, Any]]:
    """Split a word that is longer than a line, such as a sentence of a script without blanks, into equal parts."""
    text = word["word"]
    n = -(-len(text) // LINE_CHARACTERS)
    if n <= 1:
        return [word]
    size, seconds = -(-len(text) // n), (word["end"] - word["start"]) / n
    starts = [word["start"] + i * seconds for i in range(n)]
    pieces = [text[i * size : (i + 1) * size] for i in range(n)]
    return [{"word": w, "start": s, "end": s + seconds} for w, s in zip(pieces, starts, strict=True)]


def wrap(words: list[str]) -> list[str]:
    """Fill lines of at most `LINE_CHARACTERS` characters."""
    return textwrap.wrap(" ".join(words), LINE_CHARACTERS, break_long_words=False, break_on_hyphens=False)


def srt(cues: list[Cue]) -> str:
    """The text of a .srt file."""
    # An arrow within the text would be read as a line of times.
    blocks = (f"{i}\n{_times(cue, ',')}\n{cue.text.replace('-->', '->')}\n\n" for i, cue in enumerate(cues, 1))
    return "".join(blocks)


def vtt(cues: list[Cue]) -> str:
    """The text of a .vtt file."""
    blocks = (f"{_times(cue, '.')}\n{html.escape(cue.text, quote=False)}\n\n" for cue in cues)
    return "WEBVTT\n\n" + "".join(blocks)


def _times(cue: Cue, point: str) -> str:
    return f"{_clock(cue.start, point)} --> {_clock(cue.end, point)}"


def _clock(milliseconds: int, point: str) -> str:
    seconds, rest = divmod(milliseconds, 1000)
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}{point}{rest:03d}"
