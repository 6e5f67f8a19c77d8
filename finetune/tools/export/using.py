"""Transcribe and evaluate with an exported model, in the runtime that it is for."""

from __future__ import annotations

import argparse
import itertools
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from finetune.data.audio_blocks import read_blocks
from finetune.data.decode import as_float
from finetune.data.quarantine import BadUtterance
from finetune.errors import UserError
from finetune.evaluation.dataset import clips_in, describe, open_sources, stream_in_order, utterances_to
from finetune.evaluation.long_audio import Cutting, chunks_of
from finetune.evaluation.recognise import SHORTEST_SECONDS, count_stream, evaluation_limits
from finetune.security.documents import first_line
from finetune.tools.export.gate import REPORT
from finetune.tools.export.gate.report import changes, read_report
from finetune.tools.export.runtimes import SherpaOnnxOnline, is_exported, load_exported

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from finetune.data.batch import Batch
    from finetune.evaluation.dataset import EvaluationSettings
    from finetune.evaluation.scores import Utterance
    from finetune.tools.export.runtimes import Exported

GRID_SECONDS = 0.08
"""Cuts are at multiples of it."""


def is_export(name: str) -> bool:
    """Return whether a model's name is that of a directory that onnx-asr or sherpa-onnx runs.

    Raises:
        UserError: the directory holds the report of an export that was not kept, or models of several precisions.
    """
    directory = Path(name)
    if is_exported(directory):
        return True
    if (directory / REPORT).is_file():
        report = read_report(directory, "--model")
        raise UserError(f"--model: {name} holds only the report of an export that was not kept: {report['reason']}.")
    return False


def open_unchanged(directory: Path, threads: int) -> Exported:
    """Load an export whose files are those that were written and checked; one of others, without a report, as it is.

    Raises:
        UserError: files were changed since, or the runtime cannot load it.
    """
    if (directory / REPORT).is_file() and (wrong := changes(directory)):
        raise UserError(
            f"--model: {directory} is not the export that was checked: {', '.join(wrong)}. Export the model again, or "
            f"check what is there with `python -m finetune.export --model M --check {directory}`."
        )
    try:
        return load_exported(directory, threads)
    except UserError:
        raise
    except Exception as error:  # each runtime has its own
        said = first_line(error)
        raise UserError(
            f"--model: {directory} cannot be loaded: {type(error).__name__}: {said}. Export the model again.",
            exit_code=1,
        ) from error


def refuse_options(arguments: argparse.Namespace, defaults: argparse.Namespace, reasons: Mapping[str, str]) -> None:
    """Refuse options that an exported model cannot follow.

    Args:
        defaults: the same command line without options.
        reasons: for each option's name, why.

    Raises:
        UserError: one is other than its default.
    """
    for name, reason in reasons.items():
        value = getattr(arguments, name)
        if value != getattr(defaults, name) and value not in (0, "cpu"):
            option = f"--{name.replace('_', '-')}"
            raise UserError(f"{option}: {arguments.model} is an export: {reason}. Leave it out, or give the .nemo.")


def cut_at_silence(rate: int, chunk: float | None) -> Cutting:
    """Return how recordings become chunks for a runtime that gives texts: at quiet places, without an overlap, in
    which only tokens with times could be told apart; None: each is one chunk."""
    return Cutting.of_seconds(rate, GRID_SECONDS, chunk, 0.0)


def texts_of_chunks(exported: Exported, chunks: Iterable[np.ndarray], batch_size: int) -> list[str]:
    """Recognise chunks of samples, `batch_size` at once; less than 0.1 s has no text.

    int8 hears one at a time, as its gate does, and no slower: what enters a product is quantised over the whole batch,
    so that a text would depend on the recordings beside it.
    """
    if exported.precision == "int8":
        batch_size = 1
    texts: list[str] = []
    waiting = iter(chunks)
    while batch := list(itertools.islice(waiting, batch_size)):
        heard = [audio_S for audio_S in batch if len(audio_S) >= SHORTEST_SECONDS * exported.sample_rate]
        found = iter(exported.texts(heard, batch_size=len(heard)) if heard else [])
        texts += [next(found) if len(audio_S) >= SHORTEST_SECONDS * exported.sample_rate else "" for audio_S in batch]
    return texts


def transcribe_files(exported: Exported, files: list[str], chunk: float, batch_size: int) -> Iterator[dict[str, Any]]:
    """Transcribe files of any length; an online recogniser hears each from its beginning to its end.

    Args:
        chunk: seconds that another recognises at once.
        batch_size: chunks decoded together.

    Yields:
        One row a file, in their order: file, duration in seconds and text; for a file that cannot be read, file and
            error, and what was recognised before it.
    """
    cutting = cut_at_silence(exported.sample_rate, chunk)
    for file in files:
        row: dict[str, Any] = {"file": file}
        samples, texts = 0, []

        def blocks() -> Iterator[np.ndarray]:
            nonlocal samples
            try:
                for block_S in read_blocks(file, exported.sample_rate):  # noqa: B023  # used up within this turn
                    samples += len(block_S)
                    yield block_S
            except BadUtterance as reason:
                row["error"] = str(reason)  # noqa: B023

        if isinstance(exported, SherpaOnnxOnline):
            texts.append(exported.text_of_blocks(blocks()).strip())
        else:
            waiting = (piece.audio_S for piece in chunks_of(blocks(), cutting))
            while batch := list(itertools.islice(waiting, batch_size)):
                texts += texts_of_chunks(exported, batch, batch_size)
        if "error" not in row or any(texts):
            row |= {"duration": round(samples / exported.sample_rate, 3), "text": " ".join(filter(None, texts))}
        yield row


def evaluate_exported(
    name: str, s: EvaluationSettings, file: Path | None = None, keep: list[Utterance] | None = None
) -> dict[str, Any]:
    """Evaluate an exported model as `finetune.evaluation.dataset.evaluate_model` does others; its arguments and what
    it returns are the same.

    Raises:
        UserError: the export or the data cannot be used, or `file` cannot be written.
    """
    sources = open_sources(s.data, s.split)
    exported = open_unchanged(Path(name), torch.get_num_threads())
    cutting, limit = cut_at_silence(exported.sample_rate, s.chunk), s.chunk * exported.sample_rate
    if isinstance(exported, SherpaOnnxOnline):
        limit = math.inf  # it goes on where it stopped

    def recognise(batch: Batch) -> list[str]:
        lengths = batch.audio_lengths_B.tolist()
        audio = [as_float(batch.audio_BS[i, :length]).numpy() for i, length in enumerate(lengths)]
        short = [i for i, length in enumerate(lengths) if length <= limit]
        texts = dict(zip(short, texts_of_chunks(exported, (audio[i] for i in short), max(1, len(short)))))
        for i in set(range(len(audio))) - set(short):
            pieces = (piece.audio_S for piece in chunks_of(iter([audio[i]]), cutting))
            texts[i] = " ".join(filter(None, texts_of_chunks(exported, pieces, 1)))
        return [texts[i] for i in range(len(audio))]

    limits = evaluation_limits(s.batch_size, s.chunk)
    stream = stream_in_order(sources, exported.sample_rate, limits, max_samples=s.max_samples, workers=s.workers)
    blocks: list[str] = []
    with utterances_to(file, s, blocks, keep) as on_utterance:
        started = time.perf_counter()
        wer = count_stream(
            stream,
            exported.sample_rate,
            recognise,
            normalization=s.normalization,
            description="evaluate",
            total=clips_in(sources, s.max_samples),
            on_utterance=on_utterance,
        )
        seconds = time.perf_counter() - started
    result = describe(
        name, "ctc" if exported.kind == "ctc" else "transducer", s, wer, blocks, wer.audio_seconds / seconds
    )
    return result | {
        "runtime": f"{exported.runtime} {exported.version}",
        "dtype": exported.precision,
        "seconds": seconds,
    }
