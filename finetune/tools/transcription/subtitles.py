"""Subtitle files: SubRip (.srt) and WebVTT (.vtt), from words with times.

Cues have at most two lines of 42 characters and seven seconds, the common limits of broadcasters; they never overlap.
"""

import itertools
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
    lines: list[str]


def cues_of(words: list[dict[str, Any]]) -> list[Cue]:
    """Group words into cues: sentences, or parts of one that is too long for a cue.

    Args:
        words: word, start and end in seconds, in order.

    Returns:
        Cues with increasing times, each shown for at least a second if the next one leaves room.
    """
    cues: list[Cue] = []
    group: list[dict[str, Any]] = []
    for word in itertools.chain.from_iterable(map(_parts, words)):
        if group and _begins_cue(group, word):
            cues.append(_cue(group))
            group = []
        group.append(word)
    if group:
        cues.append(_cue(group))
    for i, cue in enumerate(cues):
        if i:
            cue.start = max(cue.start, cues[i - 1].end)
        following = cues[i + 1].start if i + 1 < len(cues) else cue.start + round(1000 * SHORTEST_SECONDS)
        wanted = max(cue.end, cue.start + round(1000 * SHORTEST_SECONDS))
        cue.end = max(min(wanted, following), cue.start + 1)
    return cues


def _begins_cue(group: list[dict[str, Any]], word: dict[str, Any]) -> bool:
    return (
        ends_sentence(group[-1]["word"])
        or word["start"] - group[-1]["end"] >= PAUSE_SECONDS
        or word["end"] - group[0]["start"] > LONGEST_SECONDS
        or len(wrap([w["word"] for w in [*group, word]])) > LINES
    )


def _cue(group: list[dict[str, Any]]) -> Cue:
    lines = wrap([w["word"] for w in group])
    if len(lines) == 2:
        lines = balance([w["word"] for w in group])
    return Cue(round(1000 * group[0]["start"]), round(1000 * group[-1]["end"]), lines)


def _parts(word: dict[str, Any]) -> list[dict[str, Any]]:
    """Split a word that is longer than a line, such as a sentence of a script without blanks, into equal parts."""
    text = word["word"]
    n = -(-len(text) // LINE_CHARACTERS)
    if n <= 1:
        return [word]
    size, seconds = -(-len(text) // n), (word["end"] - word["start"]) / n
    return [
        {
            "word": text[i * size : (i + 1) * size],
            "start": word["start"] + i * seconds,
            "end": word["start"] + (i + 1) * seconds,
        }
        for i in range(n)
    ]


def wrap(words: list[str]) -> list[str]:
    """Fill lines of at most `LINE_CHARACTERS` characters."""
    lines: list[str] = []
    for word in words:
        if lines and len(lines[-1]) + 1 + len(word) <= LINE_CHARACTERS:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def balance(words: list[str]) -> list[str]:
    """Two lines, as equal in length as possible, of words that fit into two."""
    splits = [[" ".join(words[:i]), " ".join(words[i:])] for i in range(1, len(words))]
    fitting = [lines for lines in splits if max(map(len, lines)) <= LINE_CHARACTERS]
    return min(fitting, key=lambda lines: abs(len(lines[0]) - len(lines[1])))


def srt(cues: list[Cue]) -> str:
    """The text of a .srt file."""
    return "".join(
        # An arrow within the text would be read as a line of times.
        f"{i}\n{_clock(cue.start, ',')} --> {_clock(cue.end, ',')}\n{_joined(cue).replace('-->', '->')}\n\n"
        for i, cue in enumerate(cues, 1)
    )


def vtt(cues: list[Cue]) -> str:
    """The text of a .vtt file."""
    return "WEBVTT\n\n" + "".join(
        f"{_clock(cue.start, '.')} --> {_clock(cue.end, '.')}\n{_escaped(_joined(cue))}\n\n" for cue in cues
    )


def _joined(cue: Cue) -> str:
    return "\n".join(cue.lines)


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _clock(milliseconds: int, point: str) -> str:
    seconds, rest = divmod(milliseconds, 1000)
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}{point}{rest:03d}"
