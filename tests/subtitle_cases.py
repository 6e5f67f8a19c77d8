"""Reading subtitles as a player would."""

import re

CLOCK = r"(\d\d+):([0-5]\d):([0-5]\d)%s(\d{3})"


def read_cues(text: str, point: str) -> list[tuple[int, int, list[str]]]:
    """Times in milliseconds and lines of the blocks of a subtitle file."""
    cues = []
    for block in text.removesuffix("\n\n").split("\n\n") if text.strip() else []:
        times, *lines = block.split("\n")
        match = re.fullmatch(f"{CLOCK % point} --> {CLOCK % point}", times)
        assert match, times
        values = [int(v) for v in match.groups()]
        moments = [((h * 60 + m) * 60 + s) * 1000 + ms for h, m, s, ms in (values[:4], values[4:])]
        cues.append((*moments, lines))
    return cues
