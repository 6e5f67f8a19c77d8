"""What makes a clip suspicious although training takes it: a file that is cut off, silence, too much text."""

import os
from collections.abc import Iterator

SILENT = -70.0  # dB of full scale, root mean square
HURRIED = 30.0  # characters a second; fast speech has 20
WHOLE = 0.9  # of what the header promises: writers are off by a few bytes
ENDLESS = 0x7FFFFF00  # bytes: what writes into a pipe does not know the length, and names about so much or more


def doubts_about(level: float, characters: int, seconds: float) -> Iterator[tuple[str, str]]:
    """Yield what is suspicious in a clip that was decoded: its kind, and how much.

    Args:
        level: dB of full scale.
        characters: of the normalised text.
    """
    if level <= SILENT:
        yield "silent clips", f"silent: {max(level, -120.0):.0f} dB of full scale"
    if characters > HURRIED * seconds:
        yield (
            f"clips with more than {HURRIED:g} characters a second",
            f"{characters} characters in {seconds:.2f} s are {characters / max(seconds, 1e-3):.0f} a second",
        )


def doubt_about_file(audio: object, folder: str | None) -> Iterator[tuple[str, str]]:
    """Yield whether a WAV file has less than its header promises; `audio` and `folder` as in `decode_audio`."""
    data, path = (audio.get("bytes"), audio.get("path")) if isinstance(audio, dict) else (None, audio)
    try:
        if isinstance(data, bytes):
            head, size = data[:8], len(data)
        elif isinstance(path, str) and path and "://" not in path and "://" not in (folder or ""):
            with open(os.path.join(folder or "", path), "rb") as file:
                head, size = file.read(8), os.fstat(file.fileno()).st_size
        else:
            return
    except (OSError, ValueError):  # decoding says it
        return
    promised = int.from_bytes(head[4:], "little") + 8
    if head.startswith(b"RIFF") and promised < ENDLESS and size < WHOLE * promised:
        yield "files that are cut off", f"cut off: {size:,} of {promised:,} bytes are there"
