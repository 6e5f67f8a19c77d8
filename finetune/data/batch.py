"""A batch of utterances: padding, its way from a worker process to the trainer, cutting it smaller, and its size.

B batch, S samples, F mel bins, M mel frames, T encoder frames, U target tokens.
"""

import functools
import logging
import math
import mmap
import os
from dataclasses import dataclass, field, replace
from multiprocessing import reduction
from typing import Any

import numpy as np
import torch

from finetune.data.decode import as_float
from finetune.data.position import Position
from finetune.data.quarantine import Record, Report
from finetune.data.utterances import DecodedUtterance

log = logging.getLogger(__name__)

LARGE = ("audio_BS", "mel_BFM")


@dataclass
class Batch:
    """One batch of a worker shard; without utterances (`ids` is empty) it only reports what was left out."""

    ids: list[str]
    texts: list[str]
    languages: list[str]
    audio_BS: torch.Tensor
    """float32 in [-1, 1]; int16 in 1/32768 where all files of the batch are 16-bit and unchanged (see `as_float`)."""
    audio_lengths_B: torch.Tensor
    tokens_BU: torch.Tensor
    token_lengths_B: torch.Tensor
    worker_shard: int
    position: Position
    """Behind this batch."""
    quarantined: list[Record] = field(default_factory=list)
    filtered: dict[str, int] = field(default_factory=dict)
    rows_read: int = 0
    error: str | None = None
    mel_BFM: torch.Tensor | None = None
    """float32 features, with `mel_lengths_B` frames; None where the model computes them from the audio."""
    mel_lengths_B: torch.Tensor | None = None
    slots: list[int] = field(default_factory=list)
    """Of the utterances' prompts, as drawn; empty where the stream has no prompts."""
    distillation: list[float] = field(default_factory=list)
    """Factor of each utterance's distillation, of its source; empty: 1."""
    from_rehearsal: list[bool] = field(default_factory=list)
    """Whether each utterance is of `data.rehearsal`."""
    frames_B: torch.Tensor | None = None
    """Encoder frames of each utterance."""
    feasible_B: torch.Tensor | None = None
    """Whether an alignment exists for each utterance; both are set by the training loop."""

    def __getstate__(self) -> dict[str, Any]:
        """Return what a DataLoader worker sends: audio and features in shared memory, small tensors in the message."""
        state = {k: v.numpy() if isinstance(v, torch.Tensor) else v for k, v in self.__dict__.items()}
        if torch.utils.data.get_worker_info() is not None and self.ids:
            try:
                state |= {name: _share(state[name]) for name in LARGE if state[name] is not None}
            except OSError as error:  # too many open files, a long TMPDIR; raising here would lose the batch unseen
                _warn_of_pipe(str(error))
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        state |= {name: _map_shared(*state[name]) for name in LARGE if isinstance(state[name], tuple)}
        self.__dict__.update({k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in state.items()})

    def pin_memory(self) -> "Batch":
        inputs = ("audio_BS", "audio_lengths_B") if self.mel_BFM is None else ("mel_BFM", "mel_lengths_B")
        for name in (*inputs, "tokens_BU", "token_lengths_B"):
            setattr(self, name, getattr(self, name).pin_memory())
        return self


@functools.cache
def _warn_of_pipe(error: str) -> None:
    log.warning("a worker sends its audio through a pipe, which is slower: memory cannot be shared (%s)", error)


def _share(array: np.ndarray) -> tuple[Any, tuple[int, ...], str]:
    """Copy an array into anonymous shared memory with one write.

    Touching shared pages one by one, as torch's tensors do, costs a page fault every 4 KiB.
    """
    file = os.fdopen(os.memfd_create("batch"), "wb", buffering=0)
    with file:
        rest = array.data.cast("B")
        while rest:
            rest = rest[file.write(rest) :]
        return reduction.DupFd(file.fileno()), array.shape, array.dtype.str


def _map_shared(handle: Any, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    descriptor = handle.detach()
    try:
        size = math.prod(shape) * np.dtype(dtype).itemsize
        memory = mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)
    return np.frombuffer(memory, dtype=dtype).reshape(shape)


def collate(
    utterances: list[DecodedUtterance], worker_shard: int, position: Position, report: Report | None = None
) -> Batch:
    """Pad utterances to the longest of the batch; without utterances all tensors are empty."""
    audio_lengths_B = np.array([len(u.audio_S) for u in utterances], dtype=np.int64)
    token_lengths_B = np.array([len(u.tokens) for u in utterances], dtype=np.int64)
    compact = all(u.audio_S.dtype == np.int16 for u in utterances)
    audio_BS = np.empty((len(utterances), audio_lengths_B.max(initial=0)), dtype=np.int16 if compact else np.float32)
    tokens_BU = np.zeros((len(utterances), token_lengths_B.max(initial=0)), dtype=np.int64)
    for i, utterance in enumerate(utterances):
        audio_S = utterance.audio_S if compact else as_float(torch.from_numpy(utterance.audio_S)).numpy()
        audio_BS[i, : len(audio_S)], audio_BS[i, len(audio_S) :] = audio_S, 0
        tokens_BU[i, : len(utterance.tokens)] = utterance.tokens
    return Batch(
        [u.id for u in utterances],
        [u.text for u in utterances],
        [u.language for u in utterances],
        torch.from_numpy(audio_BS),
        torch.from_numpy(audio_lengths_B),
        torch.from_numpy(tokens_BU),
        torch.from_numpy(token_lengths_B),
        worker_shard,
        position,
        slots=[u.slot for u in utterances if u.slot is not None],
        distillation=[u.distillation for u in utterances],
        from_rehearsal=[u.from_rehearsal for u in utterances],
        **vars(report or Report()),
    )


def part_of(batch: Batch, start: int, end: int) -> Batch:
    """Return some utterances of a batch, without padding that only the others need and without reports."""
    rows = slice(start, end)
    audio_lengths_B, token_lengths_B = batch.audio_lengths_B[rows], batch.token_lengths_B[rows]
    mel_BFM, mel_lengths_B = batch.mel_BFM, batch.mel_lengths_B
    if mel_BFM is not None and mel_lengths_B is not None:
        mel_lengths_B = mel_lengths_B[rows]
        mel_BFM = mel_BFM[rows, :, : int(mel_lengths_B.max())]
    return replace(
        batch,
        ids=batch.ids[rows],
        texts=batch.texts[rows],
        languages=batch.languages[rows],
        audio_BS=batch.audio_BS[rows, : int(audio_lengths_B.max())],
        audio_lengths_B=audio_lengths_B,
        tokens_BU=batch.tokens_BU[rows, : max(int(token_lengths_B.max()), 1)],
        token_lengths_B=token_lengths_B,
        mel_BFM=mel_BFM,
        mel_lengths_B=mel_lengths_B,
        slots=batch.slots[rows],
        distillation=batch.distillation[rows],
        from_rehearsal=batch.from_rehearsal[rows],
        frames_B=None if batch.frames_B is None else batch.frames_B[rows],
        feasible_B=None if batch.feasible_B is None else batch.feasible_B[rows],
        quarantined=[],
        filtered={},
        rows_read=0,
    )


def cut(batch: Batch, size: int) -> list[Batch]:
    """Cut a batch into the fewest parts of at most `size` utterances, as even as they go."""
    if len(batch.ids) <= size:
        return [batch]
    parts = -(-len(batch.ids) // size)
    per_part = -(-len(batch.ids) // parts)
    return [part_of(batch, i, i + per_part) for i in range(0, len(batch.ids), per_part)]


def describe_batch(batch: Batch, frames_B: torch.Tensor, sample_rate: int) -> dict[str, Any]:
    """Return clips, longest_seconds, padded_seconds (of all together), tokens and cells (T x (U + 1), summed).

    `frames_B` are the encoder frames of each utterance.
    """
    return {
        "clips": len(batch.ids),
        "longest_seconds": float(batch.audio_lengths_B.max()) / sample_rate,
        "padded_seconds": batch.audio_BS.numel() / sample_rate,
        "tokens": int(batch.token_lengths_B.sum()),
        "cells": int((frames_B * (batch.token_lengths_B + 1)).sum()),
    }
