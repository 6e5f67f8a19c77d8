"""TextGrid files, as Praat and ELAN read them, and the names of files by the ids of clips."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from finetune.tools.transcription.subtitles import cues_of, srt

if TYPE_CHECKING:
    from collections.abc import Sequence

LEAST_SECONDS = 0.001
"""Of an interval; Praat refuses empty ones."""
UNFIT = re.compile(r"[^\w.-]+")
LONGEST_NAME = 150  # characters

Interval = tuple[float, float, str]
"""Start and end in seconds, and text."""


def text_grid(row: dict[str, Any]) -> str:
    """Return the TextGrid of a row: a tier of words and one of tokens, with empty intervals between."""
    tiers = [
        (kind + "s", intervals([(x["start"], x["end"], x[kind]) for x in row[f"{kind}s"]], row["duration"]))
        for kind in ("word", "token")
    ]
    end = max(tier[-1][1] for _, tier in tiers)
    lines = ['File type = "ooTextFile"', 'Object class = "TextGrid"', "", "xmin = 0", f"xmax = {end:.3f}"]
    lines += ["tiers? <exists>", f"size = {len(tiers)}", "item []:"]
    for number, (name, tier) in enumerate(tiers, 1):
        tier[-1] = (tier[-1][0], end, tier[-1][2])
        lines += [f"    item [{number}]:", '        class = "IntervalTier"', f'        name = "{name}"']
        lines += ["        xmin = 0", f"        xmax = {end:.3f}", f"        intervals: size = {len(tier)}"]
        for i, (start, stop, text) in enumerate(tier, 1):
            quoted = " ".join(text.split()).replace('"', '""')
            lines += [f"        intervals [{i}]:", f"            xmin = {start:.3f}", f"            xmax = {stop:.3f}"]
            lines.append(f'            text = "{quoted}"')
    return "\n".join(lines) + "\n"


def intervals(given: Sequence[Interval], duration: float) -> list[Interval]:
    """Return intervals that cover everything from 0 to the duration, none of them empty."""
    found: list[Interval] = []
    clock = 0.0
    for start, end, text in given:
        if start >= clock + LEAST_SECONDS:
            found.append((clock, start, ""))
            clock = start
        end = max(end, clock + LEAST_SECONDS)
        found.append((clock, end, text))
        clock = end
    if duration >= clock + LEAST_SECONDS or not found:
        found.append((clock, max(duration, clock + LEAST_SECONDS), ""))
    return found


def subtitles(row: dict[str, Any]) -> str:
    """Return the .srt file of a row."""
    return srt(cues_of(row["words"]))


def file_name(id_: str, taken: dict[str, int]) -> str:
    """Return a name without a suffix for a clip's files, which no other clip has, and note it in `taken`: of each name
    how many clips would have it."""
    plain = UNFIT.sub("_", re.sub(r"\.\w{1,4}$", "", id_)).strip("._")[-LONGEST_NAME:] or "clip"
    number = taken.get(plain.casefold(), 0) + 1
    name = plain if number == 1 else f"{plain}-{number}"
    while name.casefold() in taken:
        number += 1
        name = f"{plain}-{number}"
    taken[plain.casefold()] = number
    taken.setdefault(name.casefold(), 1)
    return name
