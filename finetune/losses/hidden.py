"""Hidden values of the joint at chosen cells, dropout(activation(enc + pred)), and their gradient.

On a GPU one kernel does each (hidden_triton.py); the gradient's reads enc and pred again, so nothing but the linear
layer's input is held.

Shape suffixes: H hidden (the joint's width), N lattice cells. `enc` has a row for each frame of the batch, `pred` one
for each position.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from finetune.losses import rows
from finetune.losses.dropout import dropout_mask
from finetune.losses.form import Form

# activation(x) in place, and the gradient in place given activation(x)
ACTIVATIONS: dict[str, tuple[Callable, Callable]] = {
    "relu": (torch.relu_, lambda grad, y: grad.mul_(y > 0)),
    "tanh": (torch.tanh_, lambda grad, y: grad.mul_(1 - y.to(grad.dtype) ** 2)),
    "sigmoid": (torch.sigmoid_, lambda grad, y: grad.mul_(y.to(grad.dtype) * (1 - y.to(grad.dtype)))),
}


class Hidden(NamedTuple):
    """Hidden values of a block of cells, and what their gradient takes on a CPU."""

    dropped_NH: torch.Tensor
    """Input of the linear layer."""
    active_NH: torch.Tensor | None = None
    """activation(enc + pred)."""
    kept_NH: torch.Tensor | None = None
    """False where dropout zeroes; None without dropout."""


def hidden(
    enc: torch.Tensor,
    pred: torch.Tensor,
    number_N: torch.Tensor,
    frame_N: torch.Tensor,
    position_N: torch.Tensor,
    form: Form,
    mask: Callable[[torch.Tensor, int, float, int], torch.Tensor] = dropout_mask,
) -> Hidden:
    """Hidden values of the cells.

    Args:
        enc, pred: (frames, H) and (positions, H).
        number_N: numbers of the cells, for the masks.
        frame_N, position_N: their rows of enc and pred.
        mask: as `finetune.losses.dropout.dropout_mask`.
    """
    # The kernel of the gradient adds in any order.
    if rows.on_gpu(enc) and form.dtype != torch.float64 and not torch.are_deterministic_algorithms_enabled():
        from finetune.losses import hidden_triton

        return Hidden(hidden_triton.dropped(enc, pred, number_N, frame_N, position_N, form))
    activate, _ = ACTIVATIONS[form.activation]
    active_NH = activate(enc.index_select(0, frame_N) + pred.index_select(0, position_N)).to(form.dtype)
    if not form.dropout:
        return Hidden(active_NH, active_NH)
    kept_NH = mask(number_N, enc.shape[1], form.dropout, form.seed)
    return Hidden((active_NH * kept_NH).mul_(1 / (1 - form.dropout)), active_NH, kept_NH)


def add_hidden_gradient(
    grad_NH: torch.Tensor,
    values: Hidden,
    enc: torch.Tensor,
    pred: torch.Tensor,
    number_N: torch.Tensor,
    frame_N: torch.Tensor,
    position_N: torch.Tensor,
    form: Form,
    grad_enc: torch.Tensor | None,
    grad_pred: torch.Tensor | None,
) -> None:
    """Adds to the gradients of enc and pred, where these are wanted, what reaches them through the cells.

    Args:
        grad_NH: gradient of the linear layer's input; used up.
        values: of the same cells, by `hidden`.
    """
    if values.active_NH is None:
        from finetune.losses import hidden_triton

        hidden_triton.add_gradient(
            grad_NH, enc, pred, number_N, frame_N, position_N, form, grad_enc, grad_pred
        )  # fmt: skip
        return
    like = grad_enc if grad_enc is not None else grad_pred
    if like is None:
        return
    grad_NH = grad_NH.to(like.dtype)
    if values.kept_NH is not None:
        grad_NH.mul_(values.kept_NH).mul_(1 / (1 - form.dropout))
    _, activation_gradient = ACTIVATIONS[form.activation]
    grad_NH = activation_gradient(grad_NH, values.active_NH)
    for grad, row_N in ((grad_enc, frame_N), (grad_pred, position_N)):
        if grad is not None:
            grad.index_add_(0, row_N, grad_NH)
