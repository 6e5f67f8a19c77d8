"""From the results of a labelling job to what is kept: the manifest, and what is left out and why."""

from __future__ import annotations

import itertools
import os
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune.data.reader import rows_from
from finetune.data.retry import RETRIES, UnreadableShard
from finetune.durable_files import aside_of, put_in_place
from finetune.errors import UserError
from finetune.evaluation.scores import normalize_for_scores, score_pair
from finetune.security.safe_text import json_line
from finetune.tools.command_line import writing
from finetune.tools.pseudo_labels.calibration import Calibration, Labelled, text_number
from finetune.tools.pseudo_labels.labelling import SIGNALS, located
from finetune.tools.splits import manifest_row

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from finetune.data.shards import Row
    from finetune.data.sources import OpenSource
    from finetune.tools.jobs.job import Job, Totals

Result = dict[str, Any]
Span = tuple[str, float, float]
"""File, start and end in seconds."""


@dataclass
class Tally:
    """Clips and seconds in one language, or of all."""

    clips: int = 0
    seconds: float = 0.0
    words: int = 0
    """That the model heard."""
    confidence: float = 0.0
    """Summed over these words."""

    def add(self, result: Result, confidence: float | None) -> None:
        words = len(result["text"].split())
        self.clips += 1
        self.seconds += result["duration"]
        if confidence is not None:
            self.words += words
            self.confidence += words * confidence

    @property
    def mean_confidence(self) -> float | None:
        return self.confidence / self.words if self.words else None


@dataclass
class Selection:
    """What became of the audio."""

    heard: dict[str, Tally] = field(default_factory=dict)
    """By language: all clips."""
    kept: dict[str, Tally] = field(default_factory=dict)
    """Those that are kept, with words."""
    silent: Tally = field(default_factory=Tally)
    """Kept with an empty text."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Clips by reason."""


@dataclass
class Heard:
    """What the model made of the labelled clips, and where their audio is."""

    labelled: Labelled
    nothing: list[tuple[int, float]]
    """Those in which it heard nothing: words of the reference, and the probability of silence."""
    digests: set[str]
    spans: dict[str, list[tuple[float, float]]]
    """Start and end in seconds, by file."""

    def silent_with_words(self, precision: float) -> int:
        """Return how many labelled clips with words would be kept as silence."""
        return sum(words > 0 and silence >= precision for words, silence in self.nothing)

    def has(self, result: Result, span: Span | None) -> bool:
        """Return whether a clip is, or overlaps, a labelled one."""
        if result["digest"] in self.digests:
            return True
        file, start, end = span or ("", 0.0, 0.0)
        return any(start < theirs[1] and theirs[0] < end for theirs in self.spans.get(file, ()))


def read_labelled(job: Job, normalization: str) -> Heard:
    """Score the transcripts of the labelled clips.

    Raises:
        UserError: they have no texts, the model hears nothing in them, or the data have changed.
    """
    signals, counts, languages, texts, nothing = [], [], [], [], []
    digests, spans = set(), defaultdict(list)
    for source, row, result in _with_rows(job):
        digests.add(result["digest"])
        if (span := _span(source, row, result)) is not None:
            spans[span[0]].append(span[1:])
        reference, language = result["reference"], result["lang"]
        scores = score_pair(reference, result["text"], normalization, language)
        if not scores.clips:
            continue
        if "signals" not in result:
            nothing.append((scores.words, result.get("silence", 0.0)))
            continue
        signals.append(result["signals"])
        counts.append((scores.words, scores.word_errors))
        languages.append(language)
        texts.append(text_number(normalize_for_scores(reference, normalization, language)))
    if not counts:
        raise UserError("--calibrate: the model hears no word in any of its clips that have a text.")
    if not any(words for words, _ in counts):
        raise UserError("--calibrate: no clip in which the model hears words has a text. Name labelled clips.")
    signals_NF = np.asarray(signals, dtype=float).reshape(-1, len(SIGNALS))
    words_N, errors_N = np.asarray(counts, dtype=np.int64).T
    labelled = Labelled(signals_NF, words_N, errors_N, np.asarray(languages, dtype=str), np.asarray(texts))
    return Heard(labelled, nothing, digests, spans)


def select(
    job: Job, heard: Heard, calibration: Calibration, folder: Path, keep_silence: bool, totals: Totals
) -> Selection:
    """Write manifest.jsonl and left_out.jsonl, and audio that lies in shards below `folder`/audio.

    Args:
        heard: of the labelled clips, which are left out where they are among the others.
        keep_silence: keep clips in which nothing is said with an empty text.
        totals: of the job; its failures are left out.

    Raises:
        UserError: the data have changed, or a file cannot be written.
    """
    selection = Selection()
    names = ("manifest.jsonl", "left_out.jsonl")
    asides = {name: aside_of(folder / name) for name in names}
    with writing("--output", folder):
        with asides[names[0]].open("w", encoding="utf-8") as kept, asides[names[1]].open("w", encoding="utf-8") as out:
            for source, row, result in _with_rows(job):
                confidence = None
                if "signals" in result:
                    confidence = round(float(calibration.confidence([result["signals"]])[0]), 4)
                language = result["lang"]
                kind, reason = "calibration", "--calibrate has the same audio"
                if not heard.has(result, _span(source, row, result)):
                    kind, reason = verdict(result, confidence, calibration, keep_silence)
                    selection.heard.setdefault(language, Tally()).add(result, confidence)
                if kind:
                    selection.left_out[kind] += 1
                    shown = {k: v for k, v in result.items() if k not in ("signals", "silence", "digest")}
                    out.write(json_line({**shown, "kind": kind, "confidence": confidence, "reason": reason}) + "\n")
                    continue
                if result["text"]:
                    selection.kept.setdefault(language, Tally()).add(result, confidence)
                else:
                    selection.silent.add(result, None)
                kept.write(json_line(_row(source, row, result, confidence, folder)) + "\n")
            for failure in totals.failed:
                selection.left_out[failure["kind"]] += 1
                out.write(json_line(failure) + "\n")
            selection.left_out.update(totals.filtered)
        for name, aside in asides.items():
            put_in_place(aside, folder / name)
    return selection


def verdict(result: Result, confidence: float | None, calibration: Calibration, keep_silence: bool) -> tuple[str, str]:
    """Return kind and reason for leaving a clip out; empty ones for one that is kept."""
    if not result["text"]:
        silence = result.get("silence")
        if silence is None:
            return "no_speech", "no sound in it stands out from the noise"
        if not keep_silence:
            return "nothing_heard", "nothing was heard; --keep-silence keeps what is surely silent"
        if silence >= calibration.precision:
            return "", ""
        return "nothing_heard", f"nothing was heard, but silence has the probability {silence:.3f} only"
    if confidence is None:
        return "no_alignment", "the transcript has no alignment with the audio"
    language = result["lang"]
    if calibration.languages and language and language not in calibration.languages:
        return "language", f"--calibrate has no clip in {language}"
    point = calibration.choice(language).point
    if point is None:
        return "precision", f"the precision cannot be promised{f' in {language}' if language else ''}"
    # As the manifest has it, so that its rows are those at or above the threshold.
    if confidence < round(point.threshold, 4):
        return "confidence", f"confidence {confidence:.4f} is below {point.threshold:.4f}"
    return "", ""


def _with_rows(job: Job) -> Iterator[tuple[OpenSource, Row, Result]]:
    """Yield the results with the rows that they are of; both are in the order of the data."""
    groups = itertools.groupby(job.results(), key=lambda result: result["source"])
    wanted = next(groups, None)
    for source, shard in job.group:
        try:
            for number, row in rows_from(shard, 0, RETRIES if source.remote else 0):
                if wanted is None:
                    return
                place, results = wanted
                if shard.place(number) == place:
                    yield from ((source, row, result) for result in sorted(results, key=lambda r: r.get("offset", 0)))
                    wanted = next(groups, None)
        except UnreadableShard as error:
            if error.is_outage(source.remote):
                raise UserError(f"{error}. The same line goes on there.", exit_code=1) from error
            continue  # counted when it was labelled
    if wanted is not None:
        raise UserError(f"{wanted[0]} is not there any more; start again with another --output.", exit_code=1)


def _span(source: OpenSource, row: Row, result: Result) -> Span | None:
    """Return where the audio of a result lies; None for audio within a shard."""
    path = located(row[source.columns["audio"]], source.folder)
    if not isinstance(path, str):
        return None
    start = result.get("offset", (row.get("offset") if source.is_manifest else None) or 0.0)
    return os.path.realpath(path), start, start + result["duration"]


def _row(source: OpenSource, row: Row, result: Result, confidence: float | None, folder: Path) -> Row:
    """Return a row of the manifest."""
    new = manifest_row(source, {**row, source.columns["text"]: result["text"]}, folder)
    new["duration"] = result["duration"]
    if "offset" in result:
        new["offset"] = result["offset"]
        if new.get("id"):
            new["id"] = f"{new['id']}@{result['offset']:.2f}"
    if result["lang"] and not new.get("lang"):
        new["lang"] = result["lang"]
    return {**new, "confidence": confidence}
