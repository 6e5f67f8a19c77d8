"""The operations of the loss that need the values of tensors, whose results have shapes that depend on them, or that
are kernels of our own on a GPU.

`fused_tdt_loss` takes them as an argument. The memory plan follows a step on fake tensors, which have shapes and no
values, and passes operations of its own (finetune/tools/planning/follow.py).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from finetune.losses.checks import check_values
from finetune.losses.dropout import draw_seed
from finetune.losses.hidden import Hidden, add_hidden_gradient, hidden
from finetune.losses.lattice import LatticeResult, forward_backward
from finetune.losses.rows import gradient_rows, log_sum_exp


def blocks(start: int, end: int, step: int) -> Iterator[tuple[int, int]]:
    """Bounds of the blocks that cells are computed in."""
    for first in range(start, end, step):
        yield first, min(first + step, end)


def lattices(frames: list[int], tokens: list[int]) -> Iterator[tuple[int, int, int]]:
    """(number, frames, tokens) of each clip's lattice."""
    for clip, (T, U) in enumerate(zip(frames, tokens)):
        yield clip, T, U


def cells_where(mask_N: torch.Tensor) -> torch.Tensor:
    """(n,) numbers of the cells where the mask is set."""
    return torch.nonzero(mask_N)[:, 0]


def distinct_tokens(targets_U: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(S,) each token once (a row counted twice would bound nothing) and (U,) the place of each target's."""
    return torch.unique(targets_U, return_inverse=True)


@dataclass(frozen=True)
class Operations:
    """One field an operation; the defaults are the real ones."""

    check_values: Callable[..., tuple[list[int], list[int]]] = check_values
    draw_seed: Callable[[], int] = draw_seed
    blocks: Callable[[int, int, int], Iterator[tuple[int, int]]] = blocks
    lattices: Callable[[list[int], list[int]], Iterator[tuple[int, int, int]]] = lattices
    cells_where: Callable[[torch.Tensor], torch.Tensor] = cells_where
    distinct_tokens: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] = distinct_tokens
    hidden: Callable[..., Hidden] = hidden
    add_hidden_gradient: Callable[..., None] = add_hidden_gradient
    log_sum_exp: Callable[[torch.Tensor, torch.dtype], torch.Tensor] = log_sum_exp
    gradient_rows: Callable[..., torch.Tensor] = gradient_rows
    forward_backward: Callable[..., LatticeResult] = forward_backward
    ctc_loss: Callable[..., torch.Tensor] = torch.nn.functional.ctc_loss
    """Of models with a CTC head; arguments as torch's."""


REAL = Operations()
