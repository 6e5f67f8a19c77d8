"""What makes a clip suspicious although training takes it: a file that is cut off, silence, too much text."""

import os
import unicodedata
from collections.abc import Iterator
from pathlib import Path

SILENT = -70.0  # dB of full scale, root mean square
HURRIED = 30.0  # characters a second; fast speech has 20
SLACK = 4096  # bytes: writers miscount their headers by less
ENDLESS = 0x7FFF0000  # bytes: what writes into a pipe does not know the length, and promises this much or more


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


def doubt_about_file(audio: object, folder: str | None) -> Iterator[tuple[str, str]]:
    """Yield whether a WAV file has less than its header promises; `audio` and `folder` as in `decode_audio`."""
    data, path = (audio.get("bytes"), audio.get("path")) if isinstance(audio, dict) else (None, audio)
    if isinstance(data, bytes):
        head, size = data[:8], len(data)
    elif isinstance(path, str) and path and "://" not in path and "://" not in (folder or ""):
        try:
            local = Path(folder or "", path)
            if not local.is_file():  # no pipe, which would be waited for; decoding says what is wrong
                return
            with local.open("rb") as file:
                head, size = file.read(8), os.fstat(file.fileno()).st_size
        except (OSError, ValueError):
            return
    else:
        return
    promised = int.from_bytes(head[4:], "little") + 8
    if head.startswith(b"RIFF") and promised < ENDLESS and size < promised - SLACK:
        yield "WAV files that are cut off", f"{size:,} of {promised:,} bytes are there"
