"""Logging to Accelerate's trackers: numbers under the names of metrics.jsonl and evaluations.jsonl, and samples to
read and hear."""

import importlib
import logging
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker

from finetune.data.batch import Batch
from finetune.data.decode import as_float
from finetune.evaluation.scores import WerAccumulator
from finetune.security.safe_text import escape_markdown, one_line
from finetune.training.callbacks import Callback, EvaluationResult

log = logging.getLogger(__name__)

SAMPLES_TO_HEAR = 3
LONGEST_TAG = 120
COLUMNS = ["id", "language", "reference", "hypothesis"]


@dataclass(frozen=True)
class HeardClip:
    """A clip of an evaluation to listen to; `audio_S` is float32 in [-1, 1]."""

    id: str
    language: str
    reference: str
    hypothesis: str
    audio_S: np.ndarray


class TrackerLogger(Callback):
    """Sends a run's numbers and samples to Accelerate's trackers. On the main process; the others have no trackers.

    Args:
        sample_rate: of the audio, Hz.
        samples: utterances of each evaluation to listen to, at most.
    """

    def __init__(self, accelerator: Accelerator, sample_rate: int, samples: int):
        self.accelerator, self.sample_rate, self.samples = accelerator, sample_rate, min(samples, SAMPLES_TO_HEAR)
        self.heard: list[HeardClip] = []
        """Of the present evaluation."""
        self.sent_audio: set[str] = set()
        """Splits whose audio was sent; it is the same each time."""
        self.refused: set[tuple[str, str]] = set()
        """(tracker, kind) that failed once."""

    @property
    def trackers(self) -> list[GeneralTracker]:
        return self.accelerator.trackers if self.accelerator.is_main_process else []

    def on_log(self, row: dict[str, Any], own_wait_seconds: float) -> None:
        """Send a line of metrics.jsonl as train/NAME; a mapping becomes train/NAME/KEY."""
        values = {}
        for name, value in row.items():
            for key, number in value.items() if isinstance(value, dict) else [("", value)]:
                if isinstance(number, float | int) and name != "step":
                    values[f"train/{name}/{key}" if key else f"train/{name}"] = number
        self._log_numbers(values, row["step"])

    def on_evaluation_begin(self, split: str, clips: int | None) -> None:
        self.heard = []

    def on_evaluation_batch(self, split: str, batch: Batch, hypotheses: list[str], wer: WerAccumulator) -> None:
        """Keep the clips whose ids have the smallest checksums: the same ones each time."""
        if not (self.trackers and self.samples):
            return
        ids = [clip.id for clip in self.heard] + batch.ids
        chosen = sorted(range(len(ids)), key=lambda i: zlib.crc32(ids[i].encode()))[: self.samples]
        clips = [self.heard[i] for i in chosen if i < len(self.heard)]
        for b in (i - len(self.heard) for i in chosen if i >= len(self.heard)):
            audio_S = as_float(batch.audio_BS[b, : int(batch.audio_lengths_B[b])]).cpu().numpy().copy()
            clips.append(HeardClip(batch.ids[b], batch.languages[b], batch.texts[b], hypotheses[b], audio_S))
        self.heard = sorted(clips, key=lambda clip: zlib.crc32(clip.id.encode()))

    def on_evaluation_end(self, result: EvaluationResult) -> None:
        """Send SPLIT/wer and SPLIT/cer, overall and by language, sample transcripts and utterances to listen to."""
        wer = result.wer
        whose = "best" if result.is_best else "" if result.weights == "raw" else result.weights
        split = f"{whose}/{result.split}" if whose else result.split
        rates = {f"{split}/{name}": wer.total.rates()[name] for name in ("wer", "cer")}
        for language, counts in sorted(wer.by_language.items()):
            rates |= {f"{split}/{name}/{_tag(language)}": counts.rates()[name] for name in ("wer", "cer")}
        self._log_numbers({name: rate for name, rate in rates.items() if rate is not None}, result.step)
        rows = [[pair[column] for column in COLUMNS] for pair in wer.pairs]
        rows += [
            [c.id, c.language, c.reference, c.hypothesis] for c in self.heard if c.id not in {row[0] for row in rows}
        ]
        clips = [] if result.split in self.sent_audio else self.heard
        self.sent_audio.add(result.split)
        senders = {"tensorboard": _to_tensorboard, "wandb": _to_wandb, "trackio": _to_trackio}
        for tracker in (tracker for tracker in self.trackers if _name(tracker) in senders):
            send, where = senders[_name(tracker)], (tracker, result.step, split)
            if rows:
                self._attempt(tracker, "sample texts", send, *where, rows, [], self.sample_rate)
            if clips:
                self._attempt(tracker, "sample audio", send, *where, [], clips, self.sample_rate)

    def on_train_end(self) -> None:
        """Let the trackers write what they still have, and let go of them."""
        for tracker in self.accelerator.trackers:
            self._attempt(tracker, "last lines", tracker.finish)
        self.accelerator.trackers = []

    def _log_numbers(self, values: dict[str, float], step: int) -> None:
        for tracker in self.trackers:
            self._attempt(tracker, "numbers", tracker.log, values, step=step)

    def _attempt(
        self, tracker: GeneralTracker, kind: str, call: Callable[..., None], *values: object, **options: object
    ) -> None:
        """Call a tracker. An error ends no run: it is logged once, and this tracker gets no more of that kind."""
        if (_name(tracker), kind) in self.refused:
            return
        try:
            call(*values, **options)
        except Exception as error:  # whatever a tracker's library, disk or server comes up with
            self.refused.add((_name(tracker), kind))
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:500] or 'no message'}"
            text = "%s took no %s and gets no more of them in this run; the output directory has all: %s"
            log.warning(text, _name(tracker), kind, reason)


def _name(tracker: GeneralTracker) -> str:
    return str(getattr(tracker, "name", type(tracker).__name__))  # subclasses set it


def _caption(clip: HeardClip) -> str:
    return one_line(f"{clip.id}: {clip.reference}")


def _tag(name: str) -> str:
    """A name from data as part of a tag."""
    return one_line(name)[:LONGEST_TAG]


def _to_tensorboard(
    tracker: Any, step: int, split: str, rows: list[list[str]], clips: list[HeardClip], rate: int
) -> None:
    writer = tracker.tracker
    if rows:
        table = [COLUMNS, ["---"] * len(COLUMNS), *([_cell(text) for text in row] for row in rows)]
        writer.add_text(f"{split}/samples", "\n".join(f"| {' | '.join(row)} |" for row in table), step)
    for clip in clips:
        writer.add_audio(f"{split}/audio/{_tag(clip.id)}", clip.audio_S[None], step, sample_rate=rate)
    writer.flush()


def _cell(text: str) -> str:
    """A text in a table of Markdown, where it does nothing: no image is fetched for it."""
    return escape_markdown(one_line(text))


def _to_wandb(tracker: Any, step: int, split: str, rows: list[list[str]], clips: list[HeardClip], rate: int) -> None:
    wandb = importlib.import_module("wandb")
    values: dict[str, Any] = {}
    if rows:
        values[f"{split}/samples"] = wandb.Table(columns=COLUMNS, data=rows)
    if clips:
        values[f"{split}/audio"] = [wandb.Audio(c.audio_S, sample_rate=rate, caption=_caption(c)) for c in clips]
    tracker.log(values, step=step)


def _to_trackio(tracker: Any, step: int, split: str, rows: list[list[str]], clips: list[HeardClip], rate: int) -> None:
    import pandas

    trackio = importlib.import_module("trackio")
    values: dict[str, Any] = {}
    if rows:
        values[f"{split}/samples"] = trackio.Table(dataframe=pandas.DataFrame(rows, columns=COLUMNS))
    for clip in clips:
        audio_S = np.round(32767 * np.clip(clip.audio_S, -1, 1)).astype(np.int16)  # floats would be made louder
        audio = trackio.Audio(audio_S, caption=_caption(clip), sample_rate=rate, format="wav")
        values[f"{split}/audio/{_tag(clip.id)}"] = audio
    tracker.log(values, step=step)
