"""An evaluation in shards: workers recognise, and the errors are counted when all texts are there."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from finetune.data.options import StreamOptions
from finetune.data.utterances import no_tokens
from finetune.evaluation.dataset import (
    EvaluationSettings,
    describe,
    load_evaluated,
    open_sources,
    utterances_to,
)
from finetune.evaluation.recognise import evaluation_limits, evaluation_mode, recognise_texts
from finetune.evaluation.scores import Utterance, WerAccumulator
from finetune.models.nemo import chosen_head
from finetune.models.prompts import check_language, prompt_slots
from finetune.tools.jobs.job import Job
from finetune.tools.jobs.running import run_job

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from finetune.tools.jobs.clips import Clips
    from finetune.tools.jobs.engines import EngineSettings
    from finetune.tools.jobs.work import Result

IDENTITY = ("split", "chunk", "dtype", "head", "language", "tokenizer")


@dataclass
class MakeRecogniser:
    """Load the model in a worker's process. Without a device it is the GPU, where the worker has one."""

    model: str
    settings: EvaluationSettings
    device: str | None

    def __call__(self) -> Recogniser:
        device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        return Recogniser(self.model, replace(self.settings, device=device))


class Recogniser:
    """Recognises the clips of a shard."""

    def __init__(self, name: str, settings: EvaluationSettings):
        self.settings, self.model = settings, load_evaluated(name, settings)
        if settings.language is not None:
            check_language(self.model, settings.language)
        self.rate = self.model.preprocessor._sample_rate
        self.options = StreamOptions(
            evaluation_limits(settings.batch_size, settings.chunk),
            self.rate,
            shuffle=False,
            keep_empty_text=True,
            prompts=prompt_slots(self.model) if settings.language is None else {},
        )

    def process(self, clips: Clips) -> Iterator[Result]:
        language, head = self.settings.language, chosen_head(self.model)
        with evaluation_mode(self.model):
            for batch, entries in clips.batches(self.options, no_tokens):
                started = time.perf_counter()
                languages = batch.languages if language is None else [language] * len(batch.ids)
                lengths_B = batch.audio_lengths_B
                texts = recognise_texts(self.model, batch.audio_BS, lengths_B, self.settings.chunk, languages)
                seconds = (time.perf_counter() - started) / len(texts)
                for i, (entry, text) in enumerate(zip(entries, texts, strict=True)):
                    yield {
                        "id": batch.ids[i],
                        "source": entry.place,
                        "language": batch.languages[i],
                        "reference": batch.texts[i],
                        "hypothesis": text,
                        "duration": float(lengths_B[i]) / self.rate,
                        "decoding_seconds": seconds,
                        "head": head,
                    }


def evaluate_in_shards(
    name: str,
    s: EvaluationSettings,
    directory: Path,
    engine: EngineSettings,
    *,
    device: str | None,
    max_failed: float,
    file: Path | None = None,
    keep: list[Utterance] | None = None,
) -> dict[str, Any] | None:
    """Evaluate one model as a job in a directory, as `evaluate_model` does in one process.

    Args:
        device: of the workers; None: the GPU where there is one.
        max_failed: share of the clips that may fail.

    Returns:
        As `evaluate_model`; None where other processes have not done their shards yet (`engine.part`).

    Raises:
        UserError: as `evaluate_model` and `run_job`.
    """
    settings = {"model": name, **{key: getattr(s, key) for key in IDENTITY}}
    job = Job(
        "evaluate",
        directory,
        settings,
        open_sources(s.data, s.split),
        MakeRecogniser(name, s, device),
        max_samples=s.max_samples,
        max_failed=max_failed,
    )
    started = time.perf_counter()
    totals = run_job(job, engine)
    seconds = time.perf_counter() - started
    if not totals.is_whole:
        return None
    wer, blocks, head = WerAccumulator(s.normalization), [], ""
    with utterances_to(file, s, blocks, keep) as on_utterance:
        for result in job.results():
            utterance = Utterance(result["id"], result["language"], result["reference"], result["hypothesis"])
            on_utterance(utterance, wer.add(*vars(utterance).values()))
            wer.decoding_seconds += result["decoding_seconds"]
            head = result["head"]
    wer.audio_seconds, wer.filtered, wer.quarantined = totals.seconds, totals.filtered, totals.failed
    return describe(name, head, s, wer, blocks, totals.seconds_now / seconds) | {"seconds": seconds}
