"""From the run file's `data:` to streams."""

import contextlib
import itertools
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf

from finetune.data.audio_root import check_root
from finetune.data.augment import parse_augmentation
from finetune.data.batching import BatchLimits
from finetune.data.decode import BadClip, Unreachable
from finetune.data.filters import FilteredClip, Filters, parse_filters
from finetune.data.leave_out import LeaveOut
from finetune.data.options import StreamOptions
from finetune.data.reader import UnreadableShard, rows_from
from finetune.data.sources import OpenSource, open_source, parse_sources
from finetune.data.stream import ClipStream
from finetune.data.utterances import examine, text_encoder
from finetune.errors import UserError
from finetune.evaluation.recognise import LONGEST_AT_ONCE, evaluation_limits, no_tokens
from finetune.losses import feasible_clips
from finetune.models.nemo import encoder_lengths, tdt_durations

EVALUATION_SPLITS = ("validation", "test", "guard")
SHARDS_TO_SAMPLE, ROWS_TO_SAMPLE = 16, 32
DEFAULT_SPLIT = {"train": "train", "validation": "validation", "test": "test", "guard": "test"}


def open_sources(config: Any) -> dict[str, list[OpenSource]]:
    """Opens every source that the run file names; all problems are reported at once."""
    opened: dict[str, list[OpenSource]] = {}
    problems, root = [], None
    try:
        root = check_root(config.data.root)
    except UserError as error:
        problems.append(str(error))
    for parse, key in ((parse_filters, "filters"), (parse_augmentation, "augment")):
        try:
            parse(plain(config.data[key]), f"data.{key}")
        except UserError as error:
            problems.append(str(error))
    for key, split in DEFAULT_SPLIT.items():
        value = config.data[key]
        value = plain(value)
        if not value:
            continue
        try:
            sources = [open_source(s, f"data.{key}") for s in parse_sources(value, f"data.{key}", split)]
            opened[key] = [replace(s, root=root) for s in sources]
        except UserError as error:
            problems.append(str(error))
    train = opened.get("train", [])
    if config.data.temperature is not None and train:
        try:
            weigh_languages(train, config.data.temperature)
        except UserError as error:
            problems.append(str(error))
    if config.data.leave_out:
        try:
            _check_files(LeaveOut(config.data.leave_out, "data.leave_out"), train)
        except UserError as error:
            problems.append(str(error))
    unknown = [s for s in train if any(shard.rows is None for shard in s.shards)]
    if config.data.skip_samples and (unknown or any(s.source.weight is not None for s in train)):
        problems.append(
            "data.skip_samples: a mixture, or a source that does not tell its number of clips, has no subset that could be skipped."
        )
    if problems:
        raise UserError("\n".join(problems))
    return opened


def _check_files(leave_out: LeaveOut, sources: list[OpenSource]) -> None:
    """Raises UserError where a list is of other data: files named in another way would be left out by nobody."""
    files = {shard.file for source in sources for shard in source.shards}
    if leave_out.files and sources and not leave_out.files & files:
        raise UserError(
            f"data.leave_out names rows of {min(leave_out.files)}, but data.train reads {min(files)}; "
            "run the check with the paths of the run file (--config)."
        )


def weigh_languages(sources: list[OpenSource], temperature: float) -> None:
    """Gives each source a weight, in place: its language's clips to the power of 1 / temperature, shared by its clips.

    Raises:
        UserError: a source has weights already, or does not tell its language or its number of clips.
    """
    for source in sources:
        lacks = "language" if not source.source.language else "number of clips" if source.clips is None else None
        if source.source.weight is not None or lacks:
            why = f"{source.source.path} does not tell its {lacks}" if lacks else f"{source.source.path} has a weight"
            raise UserError(
                f"data.temperature: {why}. Set `language` for every source of data.train, and no `weight`."
            )
    clips: dict[str, int] = {}
    for source in sources:
        clips[source.source.language] = clips.get(source.source.language, 0) + source.clips
    for source in sources:
        of_language = clips[source.source.language]
        source.source.weight = of_language ** (1 / temperature) * source.clips / of_language


def make_stream(
    accelerator: Any, model: Any, config: Any, sources: list[OpenSource], training: bool, max_clips: int | None = None
) -> ClipStream:
    """The stream of this rank over the sources; `max_clips` replaces data.max_eval_samples."""
    t, d = config.training, config.data
    if max_clips is None:
        max_clips = d.max_samples if training else d.max_eval_samples
    options = StreamOptions(
        limits=train_limits(config) if training else evaluation_limits(t.per_device_eval_batch_size, LONGEST_AT_ONCE),
        sample_rate=model.preprocessor._sample_rate,
        seed=t.seed,
        shuffle=d.shuffle and training,
        interleave=training and not d.shuffle,
        shuffle_buffer_size=d.shuffle_buffer_size,
        shuffle_buffer_bytes=d.shuffle_buffer_mib * 2**20,
        group_by_duration=d.group_by_duration and training,
        max_samples=max_clips,
        skip_samples=d.skip_samples if training else 0,
        text_normalization=d.text_normalization if training else "none",
        keep_empty_text=not training,
        check_durations=training,
        frame_rate=1 / (model.cfg.preprocessor.window_stride * model.encoder.subsampling_factor),
        read_retries=d.read_retries,
    )
    if training:
        sources = with_filters(sources, config)
        leave_out = LeaveOut(d.leave_out, "data.leave_out") if d.leave_out else None
        options = replace(
            options, leave_out=leave_out, augmentation=parse_augmentation(plain(d.augment)), fits=fits_of(model)
        )
    encode = text_encoder(model.tokenizer) if training else no_tokens
    return ClipStream(
        sources,
        options,
        encode,
        rank=accelerator.process_index,
        ranks=accelerator.num_processes,
        workers=t.dataloader_num_workers if training else min(1, t.dataloader_num_workers),
        prefetch_factor=t.dataloader_prefetch_factor,
        pin_memory=t.dataloader_pin_memory and accelerator.device.type == "cuda",
    )


def with_filters(sources: list[OpenSource], config: Any) -> list[OpenSource]:
    """The sources with what leaves clips out of the training: `data.filters`, and their own before."""
    d = config.data
    common = parse_filters(plain(d.filters), "data.filters", Filters(d.min_duration, d.max_duration))
    return [
        replace(s, filters=parse_filters(s.source.filters, f"filters of {s.source.path}", common)) for s in sources
    ]


def fits_of(model: Any) -> Callable[[list[int], list[int]], list[bool]]:
    """Whether clips of so many samples have an alignment with so many tokens, as the loss sees it."""
    durations = tdt_durations(model)

    def fits(samples: list[int], tokens: list[int]) -> list[bool]:
        return feasible_clips(encoder_lengths(model, torch.tensor(samples)), torch.tensor(tokens), durations).tolist()

    return fits


def plain(value: Any) -> Any:
    """OmegaConf's mapping as a dict."""
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def train_limits(config: Any) -> BatchLimits:
    """What a training batch of one process may hold."""
    d = config.data
    bounds = tuple((float(seconds), int(clips)) for seconds, clips in d.batch_bounds)
    clips = 0 if d.batch_duration or bounds else config.training.per_device_train_batch_size
    return BatchLimits(clips=clips, seconds=d.batch_duration, cells=d.batch_cells, bounds=bounds)


def mean_seconds(sources: list[OpenSource], config: Any) -> float:
    """Mean length of the clips that are trained on, from some of each source; 10 where none of them can be used."""
    d = config.data
    options = StreamOptions(
        limits=BatchLimits(seconds=1.0), sample_rate=16_000, text_normalization=d.text_normalization
    )
    found = []
    for source in with_filters(sources, config):
        for index in np.unique(np.linspace(0, len(source.shards) - 1, SHARDS_TO_SAMPLE).astype(int)):
            rows = rows_from(source.shards[index], 0, d.read_retries if source.remote else 0)
            with contextlib.suppress(UnreadableShard, Unreachable):
                for number, row in itertools.islice(rows, ROWS_TO_SAMPLE):
                    with contextlib.suppress(BadClip, FilteredClip):
                        found.append(examine(source, "", (0, 0, 0, number), row, options, no_tokens).seconds)
    return statistics.fmean(found) if found else 10.0


def count_clips(sources: list[OpenSource], max_samples: int, skip_samples: int = 0) -> int | None:
    """Clips of one epoch before filters, or None where a source does not say."""
    weights = [s.source.weight for s in sources]
    counts = [s.clips for s in sources]
    if weights[0] is not None:  # one pass over the first source, and the others in proportion
        counts = [None if sources[0].clips is None else round(sources[0].clips * sum(weights) / weights[0])]
    if any(c is None for c in counts):
        return max_samples if max_samples >= 0 else None
    return max((min(sum(counts), max_samples) if max_samples >= 0 else sum(counts)) - skip_samples, 0)
