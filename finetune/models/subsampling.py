"""The convolutional subsampling with half of its masks, and on a CPU with the channels of a frame side by side.

B batch, C channels, F mel bins, T mel frames, later the frames of each convolution.
"""

import types
from typing import Any

import torch
from torch import nn

from finetune.models.protocols import AsrModel


def mask_once(model: AsrModel) -> bool:
    """Let the subsampling of a NeMo encoder mask its padding once where NeMo does so up to three times, in place;
    return whether it has such a one.

    NeMo multiplies before each layer and at the end. A ReLU keeps zeros, and a pointwise convolution mixes no frames:
    one mask behind each of the other convolutions or pairs suffices, in place. Losses and gradients are equal, and the
    backward pass keeps one tensor of each size, not two. A CPU's depthwise convolutions take half of the time where
    the channels of a frame lie side by side; sums of another order differ there by rounding.
    """
    convolutions = getattr(model.encoder.pre_encode, "conv", None)
    if convolutions is None or type(convolutions).__name__ != "MaskedConvSequential":
        return False
    if any(type(layer) not in (nn.Conv2d, nn.ReLU) for layer in convolutions):
        return False
    convolutions.forward = types.MethodType(_forward, convolutions)
    return True


def _forward(self: Any, mel_BTF: torch.Tensor, lengths_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (B, C, T, F) and the (B,) frames of the clips, as NeMo's."""
    layers, lengths_B = list(self), lengths_B.long()
    x_BCTF = mel_BTF.unsqueeze(1)
    if x_BCTF.device.type == "cpu":
        x_BCTF = x_BCTF.contiguous(memory_format=torch.channels_last)
    mask_BTF = self._create_mask(x_BCTF, lengths_B)
    x_BCTF = x_BCTF * mask_BTF.unsqueeze(1)
    for layer, following in zip(layers, [*layers[1:], None], strict=True):
        x_BCTF = layer(x_BCTF)
        if isinstance(layer, nn.ReLU):
            continue
        if layer.stride != (1, 1):
            (padding, _), (kernel, _), (stride, _) = layer.padding, layer.kernel_size, layer.stride
            lengths_B = (lengths_B + 2 * padding - kernel) // stride + 1
            mask_BTF = self._create_mask(x_BCTF, lengths_B)
        if not (isinstance(following, nn.Conv2d) and following.kernel_size == (1, 1)):
            x_BCTF = x_BCTF.mul_(mask_BTF.unsqueeze(1))
    return x_BCTF, lengths_B
