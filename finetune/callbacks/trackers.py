"""What Accelerate's trackers are told: numbers under the names of metrics.jsonl and evaluations.jsonl, and samples to read and hear."""

import importlib
import logging
import weakref
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from finetune.data.batch import Batch
from finetune.data.decode import as_float
from finetune.evaluation.scores import WerAccumulator
from finetune.security.safe_text import escape_markdown, one_line

log = logging.getLogger(__name__)

SAMPLES_TO_HEAR = 3
LONGEST_TAG = 120
COLUMNS = ["id", "language", "reference", "hypothesis"]


# What each tracker has failed to take, by kind.
_refused: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


def _attempt(tracker: Any, kind: str, call: Callable[..., None], *values: Any, **options: Any) -> None:
    """Calls a tracker. An error ends no run: it is said once, and this tracker gets no more of that kind."""
    refused = _refused.setdefault(tracker, set())
    if kind in refused:
        return
    try:
        call(*values, **options)
    except Exception as error:  # whatever a tracker's library, disk or server comes up with
        refused.add(kind)
        reason = " ".join(str(error).split()) or "no message"
        log.warning(
            "%s took no %s and gets no more of them in this run; the output directory has all: %s: %s",
            tracker.name,
            kind,
            type(error).__name__,
            reason[:500],
        )


@dataclass(frozen=True)
class HeardClip:
    """A clip of an evaluation to listen to; `audio_S` is float32 in [-1, 1]."""

    id: str
    language: str
    reference: str
    hypothesis: str
    audio_S: np.ndarray


def keep_clips(kept: list[HeardClip], batch: Batch, hypotheses: list[str], number: int) -> list[HeardClip]:
    """The clips whose ids have the smallest checksums, of those kept so far and a batch: the same ones each time."""
    ids = [clip.id for clip in kept] + batch.ids
    chosen = sorted(range(len(ids)), key=lambda i: zlib.crc32(ids[i].encode()))[:number]
    clips = []
    for i in chosen:
        if i < len(kept):
            clips.append(kept[i])
            continue
        b = i - len(kept)
        samples = int(batch.audio_lengths_B[b])
        audio_S = as_float(batch.audio_BS[b, :samples]).cpu().numpy().copy()
        clips.append(HeardClip(batch.ids[b], batch.languages[b], batch.texts[b], hypotheses[b], audio_S))
    return clips


def log_row(accelerator: Any, row: dict[str, Any]) -> None:
    """A line of metrics.jsonl as train/NAME; what is a mapping becomes train/NAME/KEY."""
    values = {}
    for name, value in row.items():
        for key, number in value.items() if isinstance(value, dict) else [("", value)]:
            if isinstance(number, float | int) and name != "step":
                values[f"train/{name}/{key}" if key else f"train/{name}"] = number
    _log_numbers(accelerator, values, row["step"])


def _log_numbers(accelerator: Any, values: dict[str, float], step: int) -> None:
    for tracker in accelerator.trackers:
        _attempt(tracker, "numbers", tracker.log, values, step=step)


def finish(accelerator: Any) -> None:
    """Lets the trackers write what they still have and lets go of them."""
    for tracker in accelerator.trackers:
        _attempt(tracker, "last lines", tracker.finish)
    accelerator.trackers = []


def log_evaluation(
    accelerator: Any,
    step: int,
    split: str,
    board: WerAccumulator,
    heard: list[HeardClip],
    sample_rate: int,
    with_audio: bool,
) -> None:
    """An evaluation: SPLIT/wer and SPLIT/cer, the same by language, sample transcripts as text, and clips to listen to.

    Args:
        sample_rate: of the clips, Hz.
        with_audio: send the audio too; it is the same each time.
    """
    rates = {f"{split}/{name}": board.total.rates()[name] for name in ("wer", "cer")}
    for language, counts in sorted(board.by_language.items()):
        rates |= {f"{split}/{name}/{_tag(language)}": counts.rates()[name] for name in ("wer", "cer")}
    _log_numbers(accelerator, {name: rate for name, rate in rates.items() if rate is not None}, step)
    rows = [[pair[column] for column in COLUMNS] for pair in board.pairs]
    rows += [[c.id, c.language, c.reference, c.hypothesis] for c in heard if c.id not in {row[0] for row in rows}]
    clips = heard if with_audio else []
    for tracker in accelerator.trackers:
        send = {"tensorboard": _to_tensorboard, "wandb": _to_wandb, "trackio": _to_trackio}.get(tracker.name)
        if send is not None and rows:
            _attempt(tracker, "sample texts", send, tracker, step, split, rows, [], sample_rate)
        if send is not None and clips:
            _attempt(tracker, "sample audio", send, tracker, step, split, [], clips, sample_rate)


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
