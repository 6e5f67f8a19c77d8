"""Settings of the GPU's memory allocator: the environment's, the run file's, or what large batches need."""

import os

from finetune.config.schema import TrainingConfig


def allocator_of_environment() -> str | None:
    """Return the settings that the environment brings, which count before the run file's."""
    return os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF")


def allocator_settings(t: TrainingConfig, gpu: bool) -> str | None:
    """Return the run's settings: batches that fill the card leave no room for memory lost in pieces."""
    if t.cuda_alloc_conf is None and t.auto_batch and gpu and allocator_of_environment() is None:
        return "expandable_segments:True"
    return t.cuda_alloc_conf
