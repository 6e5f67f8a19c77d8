"""Texts of recordings: plain text, SubRip (.srt) and WebVTT (.vtt) in; words with their places in the text out."""

from __future__ import annotations

import functools
import html
import re
import unicodedata
from dataclasses import dataclass
from pathlib import Path

from finetune.data.normalization import normalize_text
from finetune.errors import UserError

LATE_SECONDS = 2.0
"""A subtitle may end so much behind the recording."""
APOSTROPHES = "'\u2019\u02bc"
NO_BLANKS = (
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x1000, 0x109F),  # Burmese
    (0x1780, 0x17FF),  # Khmer
    (0x3040, 0x30FF),  # Hiragana, Katakana
    (0x3400, 0x9FFF),  # Chinese characters
    (0xF900, 0xFAFF),
    (0x20000, 0x3FFFF),
)
"""Scripts without blanks between words: each of their letters counts as a word."""
_CLOCK = r"(?:(\d+):)?(\d{1,2}):(\d{2})[,.](\d{1,3})"
_TIMES = re.compile(rf"^\s*{_CLOCK}\s*-->\s*{_CLOCK}(?:\s.*)?$")
_MARKUP = re.compile(r"<[^>]*>|\{\\[^}]*\}|\[[^\]]*\]|[\u266a\u266b#]+(?=\s|$)")
_DASH = re.compile(r"^\s*[-\u2013\u2014]\s*")


@dataclass(frozen=True)
class Word:
    """A word of a text, with the punctuation around it."""

    surface: str
    normal: str
    """Lower case, without punctuation."""
    blank_after: bool
    line: int
    """Of the file, from 1."""
    seconds: float | None = None
    """When its subtitle is shown: the middle of the cue."""


@dataclass(frozen=True)
class Cue:
    """A subtitle: seconds, the line of its times in the file, and its lines of text with their numbers."""

    start: float
    end: float
    line: int
    lines: list[tuple[int, str]]


def read_words(path: Path, duration: float | None = None) -> list[Word]:
    """Read the words of a text, by the file's suffix: .srt, .vtt, or anything else as plain text.

    Args:
        duration: seconds of the recording, which subtitles have to keep to; None: unknown.

    Raises:
        UserError: no file, not text, no words, or subtitles whose times are out of order or behind the recording.
    """
    content = _content(path)
    rows: list[tuple[int, str, float | None]]
    if path.suffix.lower() in (".srt", ".vtt"):
        cues = read_cues(path, content)
        check_times(path, cues, duration)
        rows = [(number, _DASH.sub("", line), (c.start + c.end) / 2) for c in cues for number, line in c.lines]
    else:
        rows = [(number, line, None) for number, line in enumerate(content.splitlines(), 1)]
    words = [word for number, line, seconds in rows for word in words_of_line(line, number, seconds)]
    if not words:
        raise UserError(f"--text: {path} has no words.")
    return words


def _content(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"--text: {path} cannot be read: {error.strerror or error}.") from error
    encoding = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    try:
        content = data.decode(encoding)
    except UnicodeDecodeError as error:
        raise UserError(
            f"--text: {path} is no text in UTF-8 (byte {error.start:,}). Convert it, as by "
            f"iconv -f WINDOWS-1252 -t UTF-8 {path.name}."
        ) from error
    if "\0" in content:
        raise UserError(f"--text: {path} is no text: it holds zero bytes.")
    return unicodedata.normalize("NFC", content)


def read_cues(path: Path, content: str) -> list[Cue]:
    """Parse SubRip or WebVTT; blank lines within and missing ones between cues are put up with.

    Raises:
        UserError: a line with --> that holds no two times.
    """
    webvtt = path.suffix.lower() == ".vtt"
    cues: list[Cue] = []
    inside = skipped = False
    waiting: list[tuple[int, str]] = []  # behind the blank line of a cue: more of it, or the next one's number
    for number, line in enumerate(content.splitlines(), 1):
        if webvtt and not inside and re.match(r"(WEBVTT|NOTE|STYLE|REGION)\b", line):
            skipped = True
            continue
        times = _TIMES.match(line)
        if "-->" in line and not times and not skipped:
            raise UserError(f"--text: {path} line {number} has no two times: {line.strip()!r}.")
        if times:
            if inside and cues and cues[-1].lines and cues[-1].lines[-1][1].strip().isdigit():
                cues[-1].lines.pop()  # no blank line before the next cue's number
            if cues and not webvtt:
                named = bool(waiting) and waiting[-1][1].strip().isdigit()
                cues[-1].lines.extend(waiting[:-1] if named else waiting)
            waiting = []
            clocks = times.groups()
            cues.append(Cue(_seconds(*clocks[:4]), _seconds(*clocks[4:]), number, []))
            inside, skipped = True, False
        elif not line.strip():
            inside = skipped = False
        elif inside:
            cues[-1].lines.append((number, line))
        elif not skipped:
            waiting.append((number, line))
    if cues and not webvtt:
        cues[-1].lines.extend(waiting)
    for cue in cues:
        cue.lines[:] = [(number, html.unescape(_MARKUP.sub(" ", line))) for number, line in cue.lines]
    if not cues:
        raise UserError(f"--text: {path} holds no subtitle; plain text needs another suffix, such as .txt.")
    return cues


def check_times(path: Path, cues: list[Cue], duration: float | None) -> None:
    """Raise UserError for the first subtitle whose times run backwards or lie behind the recording."""
    before = None
    advice = "Mend the times, or name the file .txt without them: they are only a help."
    for cue in cues:
        shown = f"{path} line {cue.line}: the subtitle of {_clock(cue.start)} to {_clock(cue.end)}"
        if cue.end < cue.start:
            raise UserError(f"--text: {shown} ends before it begins. {advice}")
        if before is not None and cue.start < before.start:
            raise UserError(
                f"--text: {shown} begins before that of line {before.line}, {_clock(before.start)}. {advice}"
            )
        if duration is not None and cue.end > duration + LATE_SECONDS:
            raise UserError(f"--text: {shown} lies behind the end of the recording, {_clock(duration)}. {advice}")
        before = cue


def _seconds(hours: str | None, minutes: str, seconds: str, fraction: str) -> float:
    return int(hours or 0) * 3600 + int(minutes) * 60 + int(seconds) + int(fraction.ljust(3, "0")) / 1000


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 3600:02d}:{int(seconds) // 60 % 60:02d}:{seconds % 60:06.3f}"


def words_of_line(line: str, number: int = 0, seconds: float | None = None) -> list[Word]:
    """Cut a line into words at blanks, hyphens and the like; of scripts without blanks, into letters.

    A word's surface reaches to the next word, so that surfaces, joined as `blank_after` says, are the line again.
    """
    words: list[Word] = []
    loose = ""  # punctuation on its own, before the first word
    for token in line.split():
        starts = _starts(token)
        if not starts:
            if words:
                words[-1] = Word(f"{words[-1].surface} {token}", words[-1].normal, True, number, seconds)
            else:
                loose += token + " "
            continue
        for start, end in zip([0, *starts[1:]], [*starts[1:], len(token)], strict=True):
            surface = token[start:end]
            normal = normalize_text(surface, "basic").replace(" ", "")
            words.append(Word(loose + surface, normal, end == len(token), number, seconds))
            loose = ""
    return words


def _starts(token: str) -> list[int]:
    """Return where the words of a token begin."""
    starts, before = [], "other"
    for i, character in enumerate(token):
        kind = _kind(character)
        if kind == "mark":
            continue
        if kind == "apostrophe":
            kind = "word" if before == "word" else "other"
        if kind == "letter" or (kind == "word" and before != "word"):
            starts.append(i)
        before = kind
    return starts


@functools.cache
def _kind(character: str) -> str:
    if character in APOSTROPHES:
        return "apostrophe"
    category = unicodedata.category(character)
    if any(low <= ord(character) <= high for low, high in NO_BLANKS) and category[0] == "L":
        return "letter"
    if category[0] in "LN":
        return "word"
    return "mark" if category[0] == "M" else "other"


def joined(words: list[Word]) -> str:
    """Return the text that words are."""
    return "".join(word.surface + " " * word.blank_after for word in words).strip()
