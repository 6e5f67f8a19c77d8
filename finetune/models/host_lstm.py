"""LSTMs in half precision on a CPU whose instructions oneDNN has no such LSTM for (AVX2 and older)."""

import types

import torch
from torch import nn

from finetune.models.protocols import AsrModel

HALF = (torch.bfloat16, torch.float16)


def use_native_lstm(model: AsrModel) -> bool:
    """Let the LSTMs of a model compute by torch's own operations where they would ask oneDNN for half precision, in
    place; return whether this machine needs that.

    torch takes oneDNN's LSTM on every CPU, which ends in "could not create a primitive descriptor" without AVX-512.
    """
    if torch.ops.mkldnn._is_mkldnn_bf16_supported() and torch.ops.mkldnn._is_mkldnn_fp16_supported():
        return False
    for module in model.modules():
        if type(module) is nn.LSTM:
            module.forward = types.MethodType(_forward, module)
    return True


def _forward(
    self: nn.LSTM, input: torch.Tensor, hx: tuple[torch.Tensor, torch.Tensor] | None = None
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    dtype = input.dtype
    if input.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
    if input.device.type != "cpu" or dtype not in HALF:
        return nn.LSTM.forward(self, input, hx)
    with torch.backends.mkldnn.flags(enabled=False):
        return nn.LSTM.forward(self, input, hx)
