"""What makes the hidden values of the joint: read by their plain operations and by their kernels."""

from typing import NamedTuple

import torch


class Form(NamedTuple):
    """What makes hidden values of enc + pred."""

    activation: str
    dropout: float  # probability
    seed: int  # of the masks
    dtype: torch.dtype  # of the linear layer's input
