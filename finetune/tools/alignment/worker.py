"""The worker of an alignment job: it holds a model and aligns the clips that it gets."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from finetune.data.options import StreamOptions
from finetune.evaluation.alignment import SHIFT, AlignedClip, Aligner
from finetune.evaluation.long_audio import LONGEST_AT_ONCE
from finetune.evaluation.recognise import evaluation_limits
from finetune.models.loading import load_option, move_to_device
from finetune.models.nemo import cast_parameters, set_head
from finetune.models.prompts import check_language, prompt_slots
from finetune.models.subsampling import mask_once

if TYPE_CHECKING:
    from collections.abc import Iterator

    from finetune.tools.jobs.clips import Clips

WAITING_BYTES = 2**27
"""Audio as it lies in the files that waits to be sorted by length."""


@dataclass(frozen=True)
class AlignmentSettings:
    """What the results of an alignment job depend on beside its data."""

    model: str
    tokenizer: str | None = None
    head: str | None = None
    language: str | None = None
    """For the prompt of a prompt model; None: each clip's own."""
    normalization: str | None = None
    shift: float = SHIFT
    dtype: str = "float32"
    batch_size: int = 16


@dataclass(frozen=True)
class MakeAlignmentWorker:
    settings: AlignmentSettings
    device: str | None

    def __call__(self) -> AlignmentWorker:
        return AlignmentWorker(self.settings, self.device)


class AlignmentWorker:
    """Aligns clips, the longest first.

    Raises:
        UserError: the model, its head, its language or the device cannot be used.
    """

    def __init__(self, settings: AlignmentSettings, device: str | None):
        s = settings
        model = load_option(s.model, s.tokenizer)
        cast_parameters(model, getattr(torch, s.dtype))
        move_to_device(model, device or ("cuda" if torch.cuda.is_available() else "cpu"))
        set_head(model, s.head, s.model)
        if s.language is not None:
            check_language(model, s.language)
        mask_once(model)
        self.aligner = Aligner(model, language=s.language, normalization=s.normalization, shift=s.shift)
        self.options = StreamOptions(
            limits=evaluation_limits(s.batch_size, LONGEST_AT_ONCE),
            sample_rate=model.preprocessor._sample_rate,
            shuffle=False,
            shuffle_buffer_bytes=WAITING_BYTES,
            prompts=prompt_slots(model) if s.language is None else {},
        )

    def process(self, clips: Clips) -> Iterator[dict[str, Any]]:
        """Yield a row for each clip that has an alignment."""
        for batch, entries in clips.batches(self.options, self.aligner.tokens_of):
            for clip, entry in zip(self.aligner.align(batch), entries, strict=True):
                if clip.aligned:
                    yield row_of(clip, entry.place)
                else:
                    tokens = len(entry.tokens)
                    clips.fail(
                        "no_alignment", entry.place, f"no way through {clip.frames} frames with {tokens} tokens"
                    )


def row_of(clip: AlignedClip, place: str) -> dict[str, Any]:
    """Return the row of a clip: times in seconds, losses in nats."""
    return {
        "id": clip.id,
        "source": place,
        "language": clip.language,
        "duration": round(clip.duration_seconds, 3),
        "text": clip.text,
        "loss": _rounded(clip.loss),
        "words": [
            {
                "word": word.text,
                "start": round(word.start_seconds, 3),
                "end": round(word.end_seconds, 3),
                "confidence": round(word.confidence, 3),
            }
            for word in clip.words
        ],
        "tokens": [
            {
                "token": token.piece,
                "start": round(token.start_seconds, 3),
                "end": round(token.end_seconds, 3),
                "confidence": round(token.confidence, 3),
                "log_probability": _rounded(token.log_probability),
                "blank_log_probability": _rounded(token.blank_log_probability),
            }
            for token in clip.tokens
        ],
        "last_blank_log_probability": _rounded(clip.last_blank_log_probability),
        "moved_frames": [round(x, 2) for x in clip.moved_frames],
    }


def _rounded(nats: float) -> float:
    """Four digits of a loss; JSON has no infinity."""
    return round(nats, 4) if math.isfinite(nats) else math.copysign(1e9, nats)
