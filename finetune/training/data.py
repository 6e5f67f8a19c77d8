"""From the run file's `data:` to streams."""

from typing import Any

from omegaconf import OmegaConf

from finetune.data.clips import text_encoder
from finetune.data.lanes import StreamOptions
from finetune.data.sources import OpenSource, open_source, parse_sources
from finetune.data.stream import ClipStream
from finetune.errors import UserError

EVALUATION_SPLITS = ("validation", "test", "guard")
DEFAULT_SPLIT = {"train": "train", "validation": "validation", "test": "test", "guard": "test"}


def open_sources(config: Any) -> dict[str, list[OpenSource]]:
    """Opens every source that the run file names; all problems are reported at once."""
    opened: dict[str, list[OpenSource]] = {}
    problems = []
    for key, split in DEFAULT_SPLIT.items():
        value = config.data[key]
        if OmegaConf.is_config(value):
            value = OmegaConf.to_container(value, resolve=True)
        if not value:
            continue
        try:
            opened[key] = [open_source(s, f"data.{key}") for s in parse_sources(value, f"data.{key}", split)]
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError("\n".join(problems))
    return opened


def make_stream(accelerator: Any, model: Any, config: Any, sources: list[OpenSource], training: bool) -> ClipStream:
    """The stream of this rank over the sources."""
    t, d = config.training, config.data
    options = StreamOptions(
        batch_size=t.per_device_train_batch_size if training else t.per_device_eval_batch_size,
        sample_rate=model.preprocessor._sample_rate,
        seed=t.seed,
        shuffle=d.shuffle and training,
        shuffle_buffer_size=d.shuffle_buffer_size,
        group_by_duration=d.group_by_duration and training,
        max_samples=d.max_samples if training else d.max_eval_samples,
        min_duration=d.min_duration if training else 0.0,
        max_duration=d.max_duration if training else float("inf"),
        text_normalization=d.text_normalization if training else "none",
        keep_empty_text=not training,
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


def no_tokens(text: str) -> list[int]:
    """Evaluation compares strings; a reference outside the tokenizer's alphabet is still a reference."""
    return []


def count_clips(sources: list[OpenSource], max_samples: int) -> int | None:
    """Clips of one epoch before filters, or None where a source does not say."""
    weights = [s.source.weight for s in sources]
    counts = [s.clips for s in sources]
    if weights[0] is not None:  # one pass over the first source, and the others in proportion
        counts = [None if sources[0].clips is None else round(sources[0].clips * sum(weights) / weights[0])]
    if any(c is None for c in counts):
        return max_samples if max_samples >= 0 else None
    return min(sum(counts), max_samples) if max_samples >= 0 else sum(counts)
