"""What Accelerate's trackers are told: numbers under the names of metrics.jsonl and evaluations.jsonl, and samples to read and hear."""

import importlib
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from finetune.data.decode import as_float
from finetune.data.stream import Batch
from finetune.evaluation.scores import Scoreboard

SAMPLES_TO_HEAR = 3
COLUMNS = ["id", "language", "reference", "hypothesis"]


@dataclass(frozen=True)
class HeardClip:
    """A clip of an evaluation to listen to; `audio_S` is float32 in [-1, 1]."""

    id: str
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
        clips.append(HeardClip(batch.ids[b], batch.texts[b], hypotheses[b], audio_S))
    return clips


def log_row(accelerator: Any, row: dict[str, Any]) -> None:
    """A line of metrics.jsonl as train/NAME; what is a mapping becomes train/NAME/KEY."""
    values = {}
    for name, value in row.items():
        for key, number in value.items() if isinstance(value, dict) else [("", value)]:
            if isinstance(number, float | int) and name != "step":
                values[f"train/{name}/{key}" if key else f"train/{name}"] = number
    accelerator.log(values, step=row["step"])


def log_evaluation(
    accelerator: Any,
    step: int,
    split: str,
    board: Scoreboard,
    heard: list[HeardClip],
    sample_rate: int,
    with_audio: bool,
) -> None:
    """An evaluation: SPLIT/wer and SPLIT/cer, the same by language, sample transcripts as text, and clips to listen to.

    Args:
        sample_rate: of the clips, Hz.
        with_audio: send the audio to trackers that would keep it again each time.
    """
    rates = {f"{split}/{name}": board.total.rates()[name] for name in ("wer", "cer")}
    for language, counts in sorted(board.by_language.items()):
        rates |= {f"{split}/{name}/{language}": counts.rates()[name] for name in ("wer", "cer")}
    accelerator.log({name: rate for name, rate in rates.items() if rate is not None}, step=step)
    pairs = [[pair[column] for column in COLUMNS] for pair in board.pairs]
    for tracker in accelerator.trackers:
        send = {"tensorboard": _to_tensorboard, "wandb": _to_wandb, "trackio": _to_trackio}.get(tracker.name)
        if send is not None and pairs:
            send(tracker, step, split, pairs, heard, sample_rate, with_audio)


def _to_tensorboard(
    tracker: Any, step: int, split: str, pairs: list[list[str]], heard: list[HeardClip], rate: int, with_audio: bool
) -> None:
    writer = tracker.tracker
    rows = [COLUMNS, ["---"] * len(COLUMNS), *([_cell(text) for text in pair] for pair in pairs)]
    writer.add_text(f"{split}/samples", "\n".join(f"| {' | '.join(row)} |" for row in rows), step)
    for clip in heard:
        writer.add_text(
            f"{split}/heard/{clip.id}", f"reference: {clip.reference}\n\nhypothesis: {clip.hypothesis}", step
        )
        if with_audio:
            writer.add_audio(f"{split}/heard/{clip.id}", clip.audio_S[None], step, sample_rate=rate)
    writer.flush()


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _to_wandb(
    tracker: Any, step: int, split: str, pairs: list[list[str]], heard: list[HeardClip], rate: int, with_audio: bool
) -> None:
    wandb = importlib.import_module("wandb")
    # wandb names media by their content, so that the same audio is kept once.
    clips = [[c.id, wandb.Audio(c.audio_S, sample_rate=rate), c.reference, c.hypothesis] for c in heard]
    tables = {f"{split}/samples": wandb.Table(columns=COLUMNS, data=pairs)}
    if clips:
        tables[f"{split}/heard"] = wandb.Table(columns=["id", "audio", "reference", "hypothesis"], data=clips)
    tracker.log(tables, step=step)


def _to_trackio(
    tracker: Any, step: int, split: str, pairs: list[list[str]], heard: list[HeardClip], rate: int, with_audio: bool
) -> None:
    import pandas

    trackio = importlib.import_module("trackio")
    values: dict[str, Any] = {f"{split}/samples": trackio.Table(dataframe=pandas.DataFrame(pairs, columns=COLUMNS))}
    if with_audio:
        for clip in heard:
            audio_S = np.round(32767 * np.clip(clip.audio_S, -1, 1)).astype(
                np.int16
            )  # floats would be made as loud as can be
            caption = f"{clip.reference} | {clip.hypothesis}"
            values[f"{split}/heard/{clip.id}"] = trackio.Audio(
                audio_S, caption=caption, sample_rate=rate, format="wav"
            )
    tracker.log(values, step=step)
