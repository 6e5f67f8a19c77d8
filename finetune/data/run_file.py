"""What `data:` of the run file describes: sources, filters, batch limits, and how many utterances there are."""

import contextlib
import itertools
import statistics
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from finetune.config.schema import DataConfig, RunConfig
from finetune.data.audio_root import check_root
from finetune.data.augment import parse_augmentation
from finetune.data.batching import BatchLimits
from finetune.data.filters import FilteredUtterance, Filters, parse_filters
from finetune.data.leave_out import LeaveOut
from finetune.data.options import StreamOptions
from finetune.data.quarantine import BadUtterance
from finetune.data.reader import rows_from
from finetune.data.retry import Unreachable, UnreadableShard
from finetune.data.sources import OpenSource, open_source, parse_sources
from finetune.data.utterances import examine, no_tokens
from finetune.errors import UserError

SHARDS_TO_SAMPLE, ROWS_TO_SAMPLE = 16, 32
DEFAULT_SPLIT = {"train": "train", "validation": "validation", "test": "test", "guard": "test"}


def open_sources(config: RunConfig) -> dict[str, list[OpenSource]]:
    """Open every source that the run file names; all problems are reported at once.

    Returns:
        Sources by key. Those of `data.rehearsal` are behind those of `data.train`, under `train`.
    """
    d = config.data
    opened: dict[str, list[OpenSource]] = {}
    problems, root = [], None

    @contextlib.contextmanager
    def collecting() -> Iterator[None]:
        try:
            yield
        except UserError as error:
            problems.append(str(error))

    with collecting():
        root = check_root(d.root)
    with collecting():
        parse_filters(d.filters, "data.filters")
    with collecting():
        parse_augmentation(d.augment, "data.augment")
    rehearsal: list[OpenSource] = []
    with collecting():
        rehearsal = [replace(s, root=root) for s in open_rehearsal(d)]
    for key, split in DEFAULT_SPLIT.items():
        value = getattr(d, key)
        with collecting():
            if value:
                sources = [open_source(s, f"data.{key}") for s in parse_sources(value, f"data.{key}", split)]
                opened[key] = [replace(s, root=root) for s in sources]
    train = opened.get("train", [])
    with collecting():
        if d.temperature is not None and train:
            weigh_languages(train, d.temperature)
    with collecting():
        if d.leave_out:
            read = {shard.file for source in (*train, *rehearsal) for shard in source.shards}
            LeaveOut(d.leave_out, "data.leave_out").check_files(read, training_keys(rehearsal))
    unknown = [s for s in train if any(shard.rows is None for shard in s.shards)]
    if d.skip_samples and (unknown or any(s.source.weight is not None for s in train)):
        problems.append(
            "data.skip_samples: a mixture, or a source that does not tell its number of clips, has no subset to skip."
        )
    if problems:
        raise UserError("\n".join(problems))
    if train:
        # What the base knows nothing of is not to be held to it, unless one says so.
        factors = [0.0 if rehearsal else 1.0] * len(train) + [1.0] * len(rehearsal)
        opened["train"] = [
            replace(s, distillation=own if s.source.distillation is None else s.source.distillation)
            for s, own in zip(train + rehearsal, factors, strict=True)
        ]
    return opened


def open_rehearsal(data: DataConfig) -> list[OpenSource]:
    """Open the sources of `data.rehearsal`; none where it is not set.

    Raises:
        UserError: as `open_source`.
    """
    if not data.rehearsal:
        return []
    sources = parse_sources(data.rehearsal, "data.rehearsal", "train")
    return [replace(open_source(s, "data.rehearsal"), rehearsal_share=data.rehearsal_share) for s in sources]


def training_keys(sources: list[OpenSource]) -> str:
    """Return the keys that training sources stand under, for messages."""
    return "data.train and data.rehearsal" if any(s.is_rehearsal for s in sources) else "data.train"


def new_sources(sources: list[OpenSource]) -> list[OpenSource]:
    """Return the training sources that are of `data.train`."""
    return [source for source in sources if not source.is_rehearsal]


def weigh_languages(sources: list[OpenSource], temperature: float) -> None:
    """Weight each source, in place: its language's utterances to the power of 1 / temperature, shared by its own."""
    counts: dict[str, int] = {}
    for source in sources:
        language, path = source.source.language, source.source.path
        lacks = "language" if not language else "number of clips" if source.clips is None else None
        if source.source.weight is not None or lacks:
            why = f"{path} does not tell its {lacks}" if lacks else f"{path} has a weight"
            raise UserError(
                f"data.temperature: {why}. Set `language` for every source of data.train, and no `weight`."
            )
        counts[str(language)] = counts.get(str(language), 0) + (source.clips or 0)
    for source in sources:
        of_language = counts[str(source.source.language)]
        weight = of_language ** (1 / temperature) * (source.clips or 0) / of_language
        source.source = source.source.model_copy(update={"weight": weight})


def with_filters(sources: list[OpenSource], data: DataConfig) -> list[OpenSource]:
    """Return the sources with their filters: their own, then `data.filters` and the bounds of duration."""
    common = parse_filters(
        data.filters, "data.filters", Filters(min_duration=data.min_duration, max_duration=data.max_duration)
    )
    return [
        replace(s, filters=parse_filters(s.source.filters, f"filters of {s.source.path}", common)) for s in sources
    ]


def train_limits(config: RunConfig) -> BatchLimits:
    """Return what a training batch of one process may hold."""
    d = config.data
    bounds = tuple((float(seconds), int(clips)) for seconds, clips in d.batch_bounds)
    clips = 0 if d.batch_duration or bounds else config.training.per_device_train_batch_size
    return BatchLimits(clips=clips, seconds=d.batch_duration, cells=d.batch_cells, bounds=bounds)


def mean_seconds(sources: list[OpenSource], data: DataConfig) -> float:
    """Return the mean length of the utterances to train on, from some of each source; 10 where none is usable."""
    new, old = new_sources(sources), [source for source in sources if source.is_rehearsal]
    if not old:
        return _mean_seconds(new, data)
    share = data.rehearsal_share
    return (1 - share) * _mean_seconds(new, data) + share * _mean_seconds(old, data)


def _mean_seconds(sources: list[OpenSource], data: DataConfig) -> float:
    limits = BatchLimits(seconds=1.0)
    options = StreamOptions(limits, 16_000, text_normalization=data.text_normalization, read_retries=data.read_retries)
    found = []
    for source in with_filters(sources, data):
        for index in np.unique(np.linspace(0, len(source.shards) - 1, SHARDS_TO_SAMPLE).astype(int)):
            rows = rows_from(source.shards[index], 0, data.read_retries if source.remote else 0)
            with contextlib.suppress(UnreadableShard, Unreachable):
                for number, row in itertools.islice(rows, ROWS_TO_SAMPLE):
                    with contextlib.suppress(BadUtterance, FilteredUtterance):
                        found.append(examine(source, "", (0, 0, 0, number), row, options, no_tokens).seconds)
    return statistics.fmean(found) if found else 10.0


def count_clips(sources: list[OpenSource], max_samples: int, skip_samples: int = 0) -> int | None:
    """Return the utterances of one epoch before filters, or None where a source does not tell.

    With rehearsal an epoch is still one pass over `data.train`, whose clips are the other share of them.
    """
    share = max(source.rehearsal_share for source in sources)
    clips = _count_new_clips(new_sources(sources), max_samples, skip_samples)
    return clips if clips is None or not share else round(clips / (1 - share))


def _count_new_clips(sources: list[OpenSource], max_samples: int, skip_samples: int) -> int | None:
    limit = max_samples if max_samples >= 0 else None
    first = sources[0]
    if first.source.weight is not None:  # one pass over the first source, and the others in proportion
        weights = [s.source.weight or 0.0 for s in sources]
        total = None if first.clips is None else round(first.clips * sum(weights) / first.source.weight)
    else:
        counts = [s.clips for s in sources if s.clips is not None]
        total = sum(counts) if len(counts) == len(sources) else None
    if total is None:
        return limit
    return max((total if limit is None else min(total, limit)) - skip_samples, 0)
