"""What a GPU's kernels keep where they differ from the CPU's, for a step that is followed on fake CPU tensors.

Masks of dropout take a byte an element, CUDA's autocast leaves norms and softmax in float32, and an LSTM is one
kernel.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional

# Functions that CUDA's autocast computes in float32 and the CPU's in 16 bits.
WIDE_UNDER_CUDA_AUTOCAST = (
    (functional, "layer_norm"),
    (functional, "softmax"),
    (functional, "log_softmax"),
    (torch, "softmax"),
    (torch, "log_softmax"),
    (torch.Tensor, "softmax"),
    (torch.Tensor, "log_softmax"),
)


@contextlib.contextmanager
def cuda_kernels() -> Iterator[None]:
    """Compute torch's functions that differ as a GPU would.

    They are replaced meanwhile: a TorchFunctionMode is off in the workers' backward pass, where checkpointed layers
    are computed again.
    """
    replaced: list[tuple[Any, str, Any]] = [
        (torch.nn.LSTM, "forward", _lstm_at_once),
        (functional, "dropout", _dropout),
        *((where, name, _widened(getattr(where, name))) for where, name in WIDE_UNDER_CUDA_AUTOCAST),
    ]
    with contextlib.ExitStack() as stack:
        for where, name, by in replaced:
            stack.callback(setattr, where, name, getattr(where, name))
            setattr(where, name, by)
        yield


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    return torch.native_dropout(input, p, training)[0] if training and p > 0 else input


def _widened(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def wide(*args: Any, **kwargs: Any) -> torch.Tensor:
        if not torch.is_autocast_enabled("cpu"):
            return function(*args, **kwargs)
        with torch.autocast("cpu", enabled=False):
            return function(*map(_float, args), **{name: _float(x) for name, x in kwargs.items()})

    return wide


def _float(x: object) -> object:
    return x.float() if isinstance(x, torch.Tensor) else x


def _lstm_at_once(
    lstm: torch.nn.LSTM, x_UBH: torch.Tensor, state: object = None
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """All steps of an LSTM in one: as many bytes as cuDNN keeps, and not an operation for each token."""
    for i in range(lstm.num_layers):
        w_ih, w_hh, b_ih, b_hh = lstm.all_weights[i]
        before_UBH = x_UBH.new_zeros(*x_UBH.shape[:2], lstm.hidden_size)
        gates = functional.linear(x_UBH, w_ih, b_ih) + functional.linear(before_UBH, w_hh, b_hh)
        enter, forget, cell, out = gates.chunk(4, -1)
        cell = torch.sigmoid(forget) * before_UBH + torch.sigmoid(enter) * torch.tanh(cell)
        x_UBH = torch.sigmoid(out) * torch.tanh(cell)
        if i + 1 < lstm.num_layers:
            x_UBH = functional.dropout(x_UBH, lstm.dropout, lstm.training)
    return x_UBH, (x_UBH[-1:], x_UBH[-1:])
