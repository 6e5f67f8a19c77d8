"""What a GPU's kernels keep where they differ from the CPU's, for a step that is followed on fake CPU tensors.

Masks of dropout take a byte an element, CUDA's autocast leaves norms and softmax in float32, and an LSTM is one
kernel.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import _engine_run_backward
from torch.nn import functional
from torch.overrides import TorchFunctionMode

# Functions that CUDA's autocast computes in float32 and the CPU's in 16 bits.
WIDE_UNDER_CUDA_AUTOCAST = {
    functional.layer_norm,
    functional.softmax,
    functional.log_softmax,
    torch.softmax,
    torch.log_softmax,
    torch.Tensor.softmax,
    torch.Tensor.log_softmax,
}


class CudaKernels(TorchFunctionMode):
    """Compute torch's functions that differ as a GPU would, in `backward` below too."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.dropout:
            return _dropout(*args, **kwargs)
        if func is torch.lstm:
            return _lstm_at_once(*args, **kwargs)
        if func in WIDE_UNDER_CUDA_AUTOCAST and torch.is_autocast_enabled("cpu"):
            with torch.autocast("cpu", enabled=False):
                return func(*map(_float, args), **{name: _float(x) for name, x in kwargs.items()})
        return func(*args, **kwargs)


def backward(loss: torch.Tensor) -> None:
    """Start autograd's engine. Under `Tensor.backward`, itself one of torch's functions, a mode is off, and
    checkpointed layers are computed again in there.
    """
    gradient = torch.ones_like(loss)
    _engine_run_backward((loss,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    return torch.native_dropout(input, p, training)[0] if training and p > 0 else input


def _float(x: object) -> object:
    return x.float() if isinstance(x, torch.Tensor) else x


def _lstm_at_once(
    x_UBH: torch.Tensor,
    state: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    training: bool,
    *_: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All steps of an LSTM in one: as many bytes as cuDNN keeps, and not an operation for each token."""
    for i in range(num_layers):
        w_ih, w_hh, b_ih, b_hh = weights[4 * i : 4 * i + 4]
        before_UBH = x_UBH.new_zeros(*x_UBH.shape[:2], w_hh.shape[1])
        gates = functional.linear(x_UBH, w_ih, b_ih) + functional.linear(before_UBH, w_hh, b_hh)
        enter, forget, cell, out = gates.chunk(4, -1)
        cell = torch.sigmoid(forget) * before_UBH + torch.sigmoid(enter) * torch.tanh(cell)
        x_UBH = torch.sigmoid(out) * torch.tanh(cell)
        if i + 1 < num_layers:
            x_UBH = _dropout(x_UBH, dropout, training)
    return x_UBH, x_UBH[-1:], x_UBH[-1:]
