"""What a stream does with the rows of its sources."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from finetune.data.augment import Augmentation
from finetune.data.batching import BatchLimits
from finetune.data.leave_out import LeaveOut
from finetune.data.retry import RETRIES

Features = Callable[[torch.Tensor, torch.Tensor, tuple[int, ...]], tuple[torch.Tensor, torch.Tensor]]
"""(B, S) audio, (B,) samples and a seed of dither -> (B, F, M) features and (B,) mel frames."""


@dataclass
class StreamOptions:
    """How rows become batches."""

    limits: BatchLimits
    sample_rate: int
    seed: int = 0
    shuffle: bool = True
    interleave: bool = False
    """Give neighbouring rows to different worker shards: unshuffled, a step is the same on any number of ranks."""
    shuffle_buffer_size: int = 2048
    """Utterances that wait in the buffer of a worker shard."""
    shuffle_buffer_bytes: int = 2**28
    """Audio that waits there, as it lies in the files."""
    group_by_duration: bool = False
    max_samples: int = -1
    skip_samples: int = 0
    text_normalization: str = "none"
    keep_empty_text: bool = False
    unlabelled: bool = False
    """Take every text for empty, also that of a row without one."""
    check_durations: bool = False
    """Put utterances in quarantine whose audio is not as long as their row says."""
    frame_rate: float = 12.5
    """Encoder frames a second, for the cells of the alignment lattice."""
    augmentation: Augmentation = Augmentation()
    leave_out: LeaveOut | None = None
    fits: Callable[[list[int], list[list[int]]], list[bool]] | None = None
    """(samples, token ids) of several utterances -> whether an alignment of each exists; the others are left out."""
    features: Features | None = None
    """Compute the features of each batch where it is made; None leaves that to the model."""
    prompts: Mapping[str, int] = field(default_factory=dict)
    """Slots of a prompt model's prompts by name (finetune.data.language_prompts). With prompts, utterances in a
    language that has none go into quarantine."""
    auto_ratio: float = 0.0
    """Share of the utterances that get the prompt `auto`, drawn anew in each epoch."""
    read_retries: int = RETRIES
    """Attempts after a failed read of what is not local."""
