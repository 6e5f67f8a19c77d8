"""The rows of the suspects once more: exchanged texts are tried, corrections made, and audio for the page kept.

S samples.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import numpy as np
import soundfile

from finetune.data.batch import collate
from finetune.data.batching import BatchLimits
from finetune.data.decode import audio_seconds
from finetune.data.filters import FilteredUtterance
from finetune.data.options import StreamOptions
from finetune.data.position import FINISHED
from finetune.data.quarantine import BadUtterance
from finetune.data.shards import Row
from finetune.data.sources import OpenSource
from finetune.data.utterances import DecodedUtterance, decode, examine, no_tokens, row_duration
from finetune.tools.cleaning.edits import split_words
from finetune.tools.cleaning.judging import SURE, Problem, possible_pairs
from finetune.tools.cleaning.listening import Listener
from finetune.tools.splits import all_rows

PAIRS_TRIED = 2000
LEFT_OVER = 0.25  # at most, of what both texts lack to what is heard, when they are exchanged
ROUNDED = 0.05  # seconds by which a row's duration may lie below its file's
PLAYED = (".wav", ".flac", ".mp3", ".ogg", ".opus", ".m4a")  # by browsers


def rows_at(sources: list[OpenSource], places: set[str], light: bool = False) -> Iterator[tuple[OpenSource, str, Row]]:
    """Yield source, place and content of the rows at some places; `light`: without their audio where it lies apart."""
    left = set(places)
    for source, shard, number, row in all_rows(sources, light, skip_damage=True):
        if not left:
            return
        place = shard.place(number)
        if place in left:
            left.discard(place)
            yield source, place, row


def read_clips(
    sources: list[OpenSource], places: set[str], sample_rate: int
) -> Iterator[tuple[str, DecodedUtterance]]:
    """Yield the decoded clips at some places; those that cannot be decoded are left out."""
    options = StreamOptions(BatchLimits(), sample_rate, keep_empty_text=True)
    for source, place, row in rows_at(sources, places):
        try:
            yield place, decode(examine(source, place, (0, 0, 0, 0), row, options, no_tokens), options, 0)
        except (BadUtterance, FilteredUtterance):
            continue


def name_exchanged(problems: list[Problem], sources: list[OpenSource], listener: Listener) -> None:
    """Make pairs of problems `exchanged` where each text fits the other's audio, in place: little remains of what both
    lack. A clip is in one pair at most, the likeliest."""
    texts = [p for p in problems if p.of_text and p.row["text"]]
    tried = possible_pairs(texts, PAIRS_TRIED)
    partners: dict[int, list[int]] = {}
    for a, b in tried:
        partners.setdefault(a, []).append(b)
        partners.setdefault(b, []).append(a)
    numbers = {texts[n].row["source"]: n for n in partners}
    left: dict[tuple[int, int], float] = {}
    """What the first clip still lacks with the text of the second, where that is less than half of what it lacks."""
    lacks = [p.row["loss"] - p.row["heard_loss"] for p in texts]
    for place, clip in read_clips(sources, set(numbers), listener.rate):
        n = numbers[place]
        row, others = texts[n].row, partners[n]
        losses = listener.losses(
            collate([clip], 0, FINISHED), [texts[m].row["text"] for m in others], [0] * len(others)
        )
        for m, loss in zip(others, losses, strict=True):
            if (rest := max(loss - row["heard_loss"], 0.0)) < 0.5 * lacks[n]:
                left[n, m] = rest
    gains = [
        (min(lacks[a] - left[a, b], lacks[b] - left[b, a]), a, b)
        for a, b in tried
        if (a, b) in left and (b, a) in left and left[a, b] + left[b, a] < LEFT_OVER * (lacks[a] + lacks[b])
    ]
    taken: set[int] = set()
    for gain, a, b in sorted(gains, reverse=True):
        if {a, b} & taken:
            continue
        taken |= {a, b}
        for problem, other in ((texts[a], texts[b]), (texts[b], texts[a])):
            # Two clips that fit each other's text by chance are rarer than one that fits none.
            problem.confidence = max(problem.confidence, other.confidence, 1 - float(np.exp(-gain)))
            problem.kind, problem.edit, problem.partner = "exchanged", None, other.row["source"]
            problem.difference = f"it has the text of {other.row['id']}, and the other way round"
            problem.score = gain


def correct(problems: list[Problem], sources: list[OpenSource]) -> dict[str, str]:
    """Return the text that each problem's clip should have, by its place, as far as there is one: the partner's, the
    given one with the edit, or what was heard; of an edited text all that stays is as the row has it."""
    places = {p.row["source"] for p in problems}
    written = {
        place: str(row.get(source.columns["text"]) or "")
        for source, place, row in rows_at(sources, places, light=True)
    }
    found = {}
    for problem in problems:
        place, given = problem.row["source"], split_words(problem.row["text"])
        if problem.partner is not None:
            text = written.get(problem.partner, "")
        elif problem.kind in ("silence", "repeated", "cut_off"):
            # Half a word remains in the audio where it is cut.
            text = ""
        elif problem.kind == "speech_without_words" and problem.edit is None:
            # Nothing was heard in a stretch of it: the text may have what the model lacks.
            text = ""
        elif problem.edit is not None:
            own = split_words(written.get(place, ""))
            text = problem.edit.applied_to(own if len(own) == len(given) else given)
        else:
            text = problem.row["heard"]
        if text.strip():
            found[place] = text
    return found


def audio_for_page(
    problems: list[Problem], sources: list[OpenSource], folder: Path, sample_rate: int
) -> dict[str, str]:
    """Return the address of each problem's audio, relative to `folder`: the file itself where a browser plays it, else
    a copy below audio/.

    Raises:
        OSError: it cannot be written.
    """
    found, inside = {}, set()
    for source, place, row in rows_at(sources, {p.row["source"] for p in problems}):
        audio = row.get(source.columns["audio"])
        path = audio.get("path") if isinstance(audio, dict) and audio.get("bytes") is None else audio
        if isinstance(path, str) and "://" not in path and "://" not in (source.folder or ""):
            file = Path(source.folder or "", path)
            playable = file.is_file() and file.suffix.lower() in PLAYED
            if playable and not (source.is_manifest and is_part(file, row)):
                found[place] = quote(os.path.relpath(file.absolute(), folder.absolute()))
                continue
        inside.add(place)
    (folder / "audio").mkdir(exist_ok=True)
    for n, (place, clip) in enumerate(read_clips(sources, inside, sample_rate)):
        samples_S = clip.audio_S if clip.audio_S.dtype == np.int16 else np.clip(clip.audio_S, -1, 1)
        file = folder / "audio" / f"{n:05d}.flac"
        try:
            soundfile.write(file, samples_S, sample_rate, subtype="PCM_16")
        except soundfile.LibsndfileError as error:
            raise OSError(f"{file}: {error}") from error
        found[place] = f"audio/{n:05d}.flac"
    return found


def is_part(file: Path, row: Row) -> bool:
    """Return whether a row of a manifest is a part of its file, which one without an offset is of its beginning."""
    if row.get("offset") is not None:
        return True
    seconds = row_duration(row)
    with contextlib.suppress(BadUtterance):
        return seconds is not None and audio_seconds(str(file)) > seconds + ROUNDED
    return False


def certain(problems: list[Problem]) -> list[Problem]:
    """Return the problems to list, the surest first."""
    sure = [problem for problem in problems if problem.confidence >= SURE]
    return sorted(sure, key=lambda p: (-p.confidence, -abs(p.score), p.row["source"]))
