"""The operations of the loss that need the values of tensors, whose results have shapes that depend on them, or that
are kernels of our own on a GPU.

`fused_tdt_loss` takes them as an argument. The memory plan follows a step on fake tensors, which have shapes and no
values, and passes operations of its own (finetune/tools/planning/follow.py).
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from finetune.losses.checks import check_values
from finetune.losses.dropout import draw_seed
from finetune.losses.hidden import Hidden, add_hidden_gradient, hidden
from finetune.losses.lattice import LatticeResult, forward_backward, triton_works
from finetune.losses.rows import gradient_rows, log_sum_exp
from finetune.losses.transfers import counts


def blocks(bounds: Sequence[int], step: int) -> Iterator[tuple[int, int]]:
    """Yield the bounds of blocks of at most `step` cells, none of which crosses one of the `bounds`."""
    for start, end in itertools.pairwise(bounds):
        for first in range(start, end, step):
            yield first, min(first + step, end)


def cells_where(mask_N: torch.Tensor, count: int) -> torch.Tensor:
    """Return the (count,) numbers of the cells where the mask is set; `count` is how many there are."""
    return torch.nonzero_static(mask_N, size=count)[:, 0]


def has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether Triton's kernels take products in this dtype; the one of the gradient adds in any order."""
    eligible = device.type == "cuda" and dtype != torch.float64 and not torch.are_deterministic_algorithms_enabled()
    return eligible and triton_works()


@dataclass(frozen=True)
class Operations:
    """One field an operation; the defaults are the real ones."""

    check_values: Callable[..., tuple[list[int], list[int], np.ndarray]] = check_values
    draw_seed: Callable[[], int] = draw_seed
    has_kernels: Callable[[torch.device, torch.dtype], bool] = has_kernels
    blocks: Callable[[Sequence[int], int], Iterator[tuple[int, int]]] = blocks
    counts: Callable[..., list[int]] = counts
    cells_where: Callable[[torch.Tensor, int], torch.Tensor] = cells_where
    hidden: Callable[..., Hidden] = hidden
    add_hidden_gradient: Callable[..., None] = add_hidden_gradient
    log_sum_exp: Callable[[torch.Tensor, torch.dtype], torch.Tensor] = log_sum_exp
    gradient_rows: Callable[..., torch.Tensor] = gradient_rows
    forward_backward: Callable[..., LatticeResult] = forward_backward
    ctc_loss: Callable[..., torch.Tensor] = torch.nn.functional.ctc_loss
    """Of models with a CTC head; arguments as torch's."""


REAL = Operations()
