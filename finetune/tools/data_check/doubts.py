"""What makes a clip suspicious although training takes it: a file that is cut off, silence, too much text."""

import io
import os
import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from finetune.data.decode import audio_seconds

SILENT = -70.0  # dB of full scale, root mean square
HURRIED = 30.0  # characters a second; fast speech has 20
SLACK = 4096  # bytes: writers miscount their headers by less
ENDLESS = 0x7FFF0000  # bytes: what writes into a pipe does not know the length, and promises this much or more
OGG_PAGE = 27 + 255 + 255 * 255  # bytes of the longest
MP3_SLACK = 0.2  # seconds: a few frames, which encoders add and decoders leave out


def doubts_about(level: float, text: str, seconds: float) -> Iterator[tuple[str, str]]:
    """Yield what is suspicious in a clip that was decoded: its kind, and how much.

    Args:
        level: dB of full scale.
        text: normalised.
    """
    if level <= SILENT:
        yield "silent clips", f"{max(level, -120.0):.0f} dB of full scale"
    # Marks, such as vowel signs, are no characters of their own.
    characters = sum(not unicodedata.category(c).startswith("M") for c in unicodedata.normalize("NFC", text))
    if characters > HURRIED * seconds:
        yield (
            f"clips with more than {HURRIED:g} characters a second",
            f"{characters} characters in {seconds:.2f} s are {characters / max(seconds, 1e-3):.0f} a second",
        )


def doubt_about_file(audio: object, folder: str | None, seconds: float) -> Iterator[tuple[str, str]]:
    """Yield whether a file has less than it promises: by its header, or by the last page of Ogg. FLAC that is cut off
    cannot be decoded, and is bad.

    Args:
        audio, folder: as in `decode_audio`.
        seconds: as they were decoded.
    """
    data, path = (audio.get("bytes"), audio.get("path")) if isinstance(audio, dict) else (None, audio)
    if isinstance(data, bytes):
        opened: BinaryIO = io.BytesIO(data)
    elif isinstance(path, str) and path and "://" not in path and "://" not in (folder or ""):
        try:
            local = Path(folder or "", path)
            if not local.is_file():  # no pipe, which would be waited for; decoding says what is wrong
                return
            opened = local.open("rb")
        except (OSError, ValueError):
            return
    else:
        return
    with opened as file:
        if how := _what_is_missing(file, seconds):
            yield "files that are cut off", how


def _what_is_missing(file: BinaryIO, seconds: float) -> str:
    head = file.read(12)
    size = file.seek(0, os.SEEK_END)
    if head[:4] in (b"RIFF", b"FORM"):  # WAV, AIFF
        promised = int.from_bytes(head[4:8], "little" if head[0] == b"R"[0] else "big") + 8
        if promised < ENDLESS and size < promised - SLACK:
            return f"{size:,} of {promised:,} bytes are there"
    elif head.startswith(b"OggS"):
        file.seek(max(size - OGG_PAGE, 0))
        tail = file.read()
        page = tail[max(tail.rfind(b"OggS\0"), 0) :]
        lengths = page[27 : 27 + page[26]] if len(page) > 26 else b""
        if len(page) < 27 or len(page) < 27 + page[26] + sum(lengths):
            return "the last page of Ogg is not whole"
    else:
        tag = 10 + sum(byte << shift for byte, shift in zip(head[6:10], (21, 14, 7, 0), strict=False))
        file.seek(tag if head.startswith(b"ID3") else 0)
        if re.search(rb"^\xff[\xe0-\xff].{2,42}(Xing|Info)", file.read(64), re.DOTALL):  # the frames of an MP3
            file.seek(0)
            promised = audio_seconds({"bytes": file.read()})
            if seconds < promised - MP3_SLACK:
                return f"{seconds:.2f} of {promised:.2f} s are there"
    return ""
