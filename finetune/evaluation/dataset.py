"""Evaluate a model on data sets that are named as on a command line."""

from __future__ import annotations

import contextlib
import statistics
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from finetune.data.options import StreamOptions
from finetune.data.sources import OpenSource, open_source, parse_sources
from finetune.data.stream import UtteranceStream
from finetune.data.utterances import no_tokens
from finetune.errors import UserError
from finetune.evaluation.long_audio import LONGEST_AT_ONCE
from finetune.evaluation.recognise import evaluation_limits, frame_seconds, score_stream
from finetune.evaluation.significance import RESAMPLES, block_names
from finetune.evaluation.streaming import check_streams, normalizes_chunks, stream_texts
from finetune.models.loading import load_option, move_to_device
from finetune.models.look_ahead import Context, choose_contexts, latency_of
from finetune.models.nemo import cast_parameters, chosen_head, set_head, warn_about_search
from finetune.models.prompts import check_language, prompt_slots
from finetune.security.safe_text import json_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from finetune.data.batch import Batch
    from finetune.data.batching import BatchLimits
    from finetune.evaluation.scores import Counts, Utterance, WerAccumulator
    from finetune.models.protocols import AsrModel


def open_sources(data: Any, split: str, key: str = "--data") -> list[OpenSource]:
    """Open data sets, as named in a run file; `split` is for folders and hub data sets, `key` for messages.

    Raises:
        UserError: a data set cannot be opened.
    """
    return [open_source(source, key) for source in parse_sources(data, key, split)]


def stream_in_order(
    sources: list[OpenSource],
    sample_rate: int,
    limits: BatchLimits,
    *,
    max_samples: int = -1,
    workers: int = 1,
    prompts: Mapping[str, int] | None = None,
) -> UtteranceStream:
    """One pass over sources in their order; utterances without a text stay.

    `prompts` are those of a prompt model that goes by each utterance's language.
    """
    options = StreamOptions(
        limits=limits,
        sample_rate=sample_rate,
        shuffle=False,
        max_samples=max_samples,
        keep_empty_text=True,
        prompts=prompts or {},
    )
    return UtteranceStream(sources, options, no_tokens, workers=workers)


def clips_in(sources: list[OpenSource], most: int = -1) -> int | None:
    """Return how many clips sources have, or `most`; None where one does not say."""
    if not all(source.clips for source in sources):
        return None
    total = sum(source.clips or 0 for source in sources)
    return total if most < 0 else min(total, most)


@dataclass
class EvaluationSettings:
    """What `evaluate_model` evaluates on, and how."""

    data: list[str]
    split: str = "test"
    batch_size: int = 16
    chunk: float = LONGEST_AT_ONCE
    """Seconds; longer utterances are decoded in chunks."""
    normalization: str = "basic"
    max_samples: int = -1
    workers: int = 1
    device: str = "cpu"
    dtype: str = "float32"
    """Of weights and activations; features, BatchNorm and a CTC head's probabilities stay in float32."""
    head: str | None = None
    """transducer or ctc; None: the model's own."""
    language: str | None = None
    """For the prompt of a prompt model, of all utterances; None: each one's own."""
    tokenizer: str | None = None
    """Tokenizer directory, for a NeMo model YAML."""
    resamples: int = RESAMPLES
    """Of the bootstrap; 0: no intervals."""
    block_pattern: str | None = None
    """Regular expression; utterances in whose ids it matches the same are drawn as one block."""
    look_ahead: str | None = None
    """Also by streaming, with the contexts of `finetune.models.look_ahead.choose_contexts`."""


def count_errors(
    model: AsrModel,
    sources: list[OpenSource],
    settings: EvaluationSettings,
    on_utterance: Callable[[Utterance, Counts], None] | None = None,
    recognise: Callable[[Batch], list[str]] | None = None,
) -> WerAccumulator:
    """Decode the sources and count errors; `recognise` as in `score_stream`.

    Raises:
        UserError: a source cannot be read, or the model has no prompt for `settings.language`.
    """
    s = settings
    rate, limits = model.preprocessor._sample_rate, evaluation_limits(s.batch_size, s.chunk)
    if s.language is not None:
        check_language(model, s.language)
    prompts = prompt_slots(model) if s.language is None else None
    stream = stream_in_order(sources, rate, limits, max_samples=s.max_samples, workers=s.workers, prompts=prompts)
    return score_stream(
        model,
        stream,
        normalization=s.normalization,
        description="evaluate",
        longest=s.chunk,
        total=clips_in(sources, s.max_samples),
        on_utterance=on_utterance,
        language=s.language,
        recognise=recognise,
    )


def count_streaming_errors(
    model: AsrModel,
    sources: list[OpenSource],
    settings: EvaluationSettings,
    name: str,
    context: Context,
    blocks: list[str] | None,
) -> dict[str, Any]:
    """Decode the sources chunk by chunk with one context and count errors.

    Args:
        name: of the context.
        blocks: of the utterances, for the intervals.

    Returns:
        look_ahead (its name), att_context_size, wer, cer and their intervals, counts, by_language, and the latency:
            what the context costs, and chunk_compute_ms, the median computing time of a chunk of a whole batch.

    Raises:
        UserError: a source cannot be read, or the model cannot stream.
    """
    seconds: list[float] = []

    def recognise(batch: Batch) -> list[str]:
        languages = batch.languages if settings.language is None else [settings.language] * len(batch.ids)
        return stream_texts(model, batch.audio_BS, batch.audio_lengths_B, context, languages, seconds)

    wer = count_errors(model, sources, settings, recognise=recognise)
    latency: dict[str, float] = asdict(latency_of(context, frame_seconds(model)))
    if seconds:
        latency["chunk_compute_ms"] = 1000 * statistics.median(seconds)
    result = {"look_ahead": name, "att_context_size": list(context), **latency, **wer.result()}
    if settings.resamples:
        intervals = wer.utterance_counts.intervals(settings.resamples, blocks)
        result |= {key: intervals[key] for key in ("wer_interval", "cer_interval")}
    return result


def evaluate_model(
    name: str, settings: EvaluationSettings, file: Path | None = None, keep: list[Utterance] | None = None
) -> dict[str, Any]:
    """Evaluate one model.

    Args:
        name: as `model.name`.
        file: gets one JSON line an utterance.
        keep: gets every utterance.

    Returns:
        wer, cer and their intervals, clips, counts, by_language, rtfx, quarantined and more, for `evaluate --json`.

    Raises:
        UserError: model, head or data cannot be used, no utterance can be scored, or `file` cannot be written.
    """
    s = settings
    sources = open_sources(s.data, s.split)
    model = load_evaluated(name, s)
    contexts = choose_contexts(model, s.look_ahead) if s.look_ahead is not None else {}
    if contexts:
        check_streams(model)
    blocks: list[str] = []
    with utterances_to(file, s, blocks, keep) as on_utterance:
        started = time.perf_counter()
        wer = count_errors(model, sources, s, on_utterance)
        seconds = time.perf_counter() - started
    result = describe(name, chosen_head(model), s, wer, blocks, wer.audio_seconds / seconds) | {"seconds": seconds}
    if contexts:
        drawn = None if s.block_pattern is None else blocks
        result["att_context_size"] = list(model.encoder.att_context_size)
        result["online_normalization"] = normalizes_chunks(model)
        result["streaming"] = [count_streaming_errors(model, sources, s, *one, drawn) for one in contexts.items()]
    return result


def load_evaluated(name: str, s: EvaluationSettings) -> AsrModel:
    """Load a model as `s` says: device, dtype and head.

    Raises:
        UserError: it cannot be loaded, or lacks the head.
    """
    model = load_option(name, s.tokenizer)
    cast_parameters(model, getattr(torch, s.dtype))
    move_to_device(model, s.device)
    set_head(model, s.head, name)
    warn_about_search(model)
    return model


@contextlib.contextmanager
def utterances_to(
    file: Path | None, s: EvaluationSettings, blocks: list[str], keep: list[Utterance] | None = None
) -> Iterator[Callable[[Utterance, Counts], None]]:
    """Give a function that takes each utterance with its counts: it writes a JSON line to `file`, and adds the
    utterance to `keep` and its block to `blocks`.

    Raises:
        UserError: `file` cannot be written, or `s.block_pattern` matches nothing in an id.
    """
    with _naming(file):
        lines = file.open("w", encoding="utf-8", errors="backslashreplace") if file else None

    def on_utterance(utterance: Utterance, counts: Counts) -> None:
        if keep is not None:
            keep.append(utterance)
        if s.block_pattern is not None and counts.clips:  # a pattern that does not match fails now, not at the end
            blocks.extend(block_names([utterance.id], s.block_pattern))
        if lines is not None:
            numbers = {"words": counts.words, "word_errors": counts.word_errors, "normalization": s.normalization}
            with _naming(file):
                lines.write(json_line({**vars(utterance), **numbers}) + "\n")

    yield on_utterance
    if lines is not None:
        with _naming(file):
            lines.close()


def describe(
    name: str, head: str, s: EvaluationSettings, wer: WerAccumulator, blocks: list[str], rtfx_whole: float
) -> dict[str, Any]:
    """Return what was counted as `evaluate --json` has it.

    Raises:
        UserError: no utterance could be scored.
    """
    if wer.total.clips == 0:
        why = f", such as {wer.quarantined[0]['reason']}" if wer.quarantined else ""
        raise UserError(
            f"--data: {' '.join(s.data)} holds no clip that can be used ({len(wer.quarantined)} in quarantine, "
            f"{wer.left_out} without a reference){why}.",
            1,
        )
    result = {
        "model": name,
        "head": head,
        "dtype": s.dtype,
        "data": s.data,
        "normalization": s.normalization,
        **wer.result(),
        "left_out": wer.left_out,
        "audio_seconds": wer.audio_seconds,
        "decoding_seconds": wer.decoding_seconds,
        "rtfx": wer.audio_seconds / wer.decoding_seconds,
        "rtfx_whole": rtfx_whole,
        "quarantined": wer.quarantined,
        "filtered": wer.filtered,
    }
    drawn = None if s.block_pattern is None else blocks
    if s.resamples:
        if drawn is not None:
            result["blocks"] = len(set(drawn))
        intervals = wer.utterance_counts.intervals(s.resamples, drawn)
        for language, found in intervals.pop("by_language").items():
            result["by_language"][language].update(found)
        result.update(intervals)
    return result


@contextlib.contextmanager
def _naming(file: Path | None) -> Iterator[None]:
    """Turn an OSError into a UserError that names the file."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error}. Make room, or name another file.", 1) from error
