"""One recording from its sound and text to clips in a directory of its own."""

from __future__ import annotations

import contextlib
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from finetune.data.decode import audio_seconds
from finetune.data.quarantine import BadUtterance
from finetune.durable_files import sha256_of, write_json
from finetune.errors import UserError
from finetune.evaluation.alignment import Aligner
from finetune.evaluation.recognise import evaluation_mode
from finetune.models.loading import load_option, move_to_device
from finetune.models.nemo import set_head, warn_about_search
from finetune.models.prompts import check_language
from finetune.paths import near_path
from finetune.tools.jobs.job import alone_in, stamp_of_model
from finetune.tools.segmentation.clips import Limits, make_clips
from finetune.tools.segmentation.hearing import Pauses, Progress, SameRecording, hear, stretches_of
from finetune.tools.segmentation.judging import Writing, judge
from finetune.tools.segmentation.output import (
    keys_differing,
    open_job,
    remove_results,
    rows_of,
    settings_in,
    summary_of,
    write_lines,
    write_shards,
)
from finetune.tools.segmentation.spans import spans_of
from finetune.tools.segmentation.texts import read_words

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from finetune.models.protocols import AsrModel
    from finetune.tools.segmentation.texts import Word

FIXED = ("model", "tokenizer", "head", "language", "max_seconds", "min_pause")
"""Settings that the work of an earlier start depends on; the others may change, and then take seconds."""


@dataclass(frozen=True)
class SegmentSettings:
    """How recordings are cut, as the options of the command."""

    model: str
    tokenizer: str | None = None
    head: str | None = None
    language: str | None = None
    min_seconds: float = 0.5
    max_seconds: float = 20.0
    min_pause: float = 0.3
    longest_pause: float = 1.0
    min_confidence: float = 0.0
    patience: float = 10.0
    """Minutes of speech without a trace of the text."""
    shards: str | None = None
    """tar or parquet; None: no audio is written."""
    batch_size: int = 8

    def fixed(self) -> dict[str, Any]:
        """Return what the work of an earlier start depends on beside recording and text."""
        return {**{key: getattr(self, key) for key in FIXED}, "model_files": stamp_of_model(self.model)}


@dataclass(frozen=True)
class Recording:
    """A recording and its text, checked."""

    audio: Path
    text: Path
    words: list[Word]
    seconds: float
    name: str
    """Its clips' ids begin so."""


def open_recording(audio: Path, text: Path, name: str = "") -> Recording:
    """Check a recording and read its text; it is called as its file unless it has a name.

    Raises:
        UserError: either cannot be read, is empty, or the text's times do not fit the recording.
    """
    audio = audio.resolve()
    try:
        if not (seconds := audio_seconds(str(audio))):
            raise BadUtterance("the audio is empty")
    except BadUtterance as reason:
        raise UserError(f"--audio: {str(reason).rstrip('.')}.{near_path(str(audio))}") from reason
    return Recording(audio, text, read_words(text, seconds), seconds, name or audio.stem)


def load_segmenter(s: SegmentSettings, device: str) -> AsrModel:
    """Load the model onto a device.

    Raises:
        UserError: it cannot be loaded, or lacks the head or the language.
    """
    model = move_to_device(load_option(s.model, s.tokenizer), device)
    set_head(model, s.head, s.model)
    warn_about_search(model)
    check_language(model, s.language)
    return model


@contextlib.contextmanager
def opened(folder: Path, recording: Recording, s: SegmentSettings, *, renew: bool = False) -> Iterator[None]:
    """Make the directory of a recording, or take it up from an earlier start, for this process alone. Where another
    text led to no clips yet, this one takes over what was heard.

    Args:
        renew: whether it takes over from other texts in any case, and the work on another sound is deleted.

    Raises:
        UserError: it holds another job, or another process works on it.
    """
    sound = recording.audio.stat()
    settings = {
        "command": "segment",
        "audio": str(recording.audio),
        "audio_bytes": sound.st_size,
        "audio_time": sound.st_mtime_ns,
        "text_sha256": sha256_of(recording.text),
        **s.fixed(),
    }
    before = settings_in(folder)
    if before and (differing := keys_differing(before, settings)):
        if differing == ["text_sha256"] and (renew or not (folder / "manifest.jsonl").exists()):
            with alone_in(folder):
                remove_results(folder)
                write_json(folder / "job.json", settings)
        elif renew:
            shutil.rmtree(folder)
    open_job(folder, settings)
    with alone_in(folder):
        yield


def segment_recording(
    model: AsrModel, folder: Path, recording: Recording, s: SegmentSettings, *, show: bool = False
) -> dict[str, Any]:
    """Write the clips of a recording, and what is left out, into its directory; return the summary.

    Args:
        show: whether bars tell how far it is.

    Raises:
        UserError: the text is of another recording or alphabet, or the recording breaks off.
    """
    started = time.monotonic()
    text, rate, audio = recording.words, model.preprocessor._sample_rate, str(recording.audio)
    pauses = Pauses(s.max_seconds, s.min_pause)
    writing = Writing(model, text, recording.text.name)
    same = SameRecording(text, recording.text.name, rate, s.patience)
    try:
        with evaluation_mode(model):
            with _bar("listening", recording, show) as moved:
                heard = hear(
                    model,
                    stretches_of(audio, rate, pauses),
                    Progress(folder / "heard.jsonl"),
                    batch_size=s.batch_size,
                    language=s.language,
                    check=same,
                    on_stretch=lambda row: moved(row.end / rate),
                )
            spans = spans_of(heard, text, rate)
            with _bar("aligning", recording, show) as moved:
                judged = judge(
                    Aligner(model, language=s.language, normalization=writing.mode),
                    stretches_of(audio, rate, pauses),
                    spans,
                    text,
                    writing,
                    Progress(folder / "judged.jsonl"),
                    batch_size=s.batch_size,
                    on_stretch=lambda i: moved(heard[i].end / rate),
                )
    except BadUtterance as reason:
        raise UserError(f"--audio: {str(reason).rstrip('.')}.", exit_code=1) from reason
    limits = Limits(s.min_seconds, s.max_seconds, s.longest_pause, s.min_confidence)
    result = make_clips(heard, spans, judged, text, writing.unwritable, rate, limits)
    rows = rows_of(result.clips, recording.name, text, recording.audio, rate, s.language)
    write_shards(folder, s.shards, audio, rate, result.clips, rows)
    write_lines(folder / "left_out.jsonl", result.left_out)
    write_lines(folder / "manifest.jsonl", rows)
    summary = {**summary_of(result, text, recording.seconds, rate), "seconds": time.monotonic() - started}
    write_json(folder / "summary.json", summary)
    return summary


@contextlib.contextmanager
def _bar(name: str, recording: Recording, show: bool) -> Iterator[Callable[[float], object]]:
    """Show a bar of a recording's minutes; yield what moves it to a second."""
    minutes = round(recording.seconds / 60, 1)
    # None: at a terminal only.
    disable = None if show else True
    with tqdm(total=minutes, desc=name, unit="min", disable=disable, delay=2, leave=False) as bar:
        yield lambda second: bar.update(round(second / 60 - bar.n, 1))
