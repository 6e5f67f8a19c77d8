"""The loss's operations on fake tensors, which have no values: what depends on values is taken at its most.

Every lattice cell is computed (a trained model's alignments pass through few), and all tokens of a text are distinct.
The loss works block by block, and one block stands for all.

N lattice cells, U target tokens, H joint width; of CTC: T frames, S states, two for each token and one more.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from finetune.losses.hidden import Hidden, hidden
from finetune.losses.lattice import LatticeResult
from finetune.losses.operations import Operations


def worst_case(clips: int, tokens: int, cuda: bool, block_sizes: list[int]) -> Operations:
    """Return the operations for a batch of `clips` texts of `tokens` tokens.

    Args:
        cuda: make the temporary tensors of the GPU's kernels, else those of the CPU's.
        block_sizes: gets the cells of a full block, each time that blocks are asked for.
    """

    def lengths(enc_BTH: torch.Tensor, *more: Any) -> tuple[list[int], list[int], np.ndarray]:
        distinct = np.arange(tokens) % more[-1]
        return [enc_BTH.shape[1]] * clips, [tokens] * clips, np.tile(distinct, (clips, 1))

    def first_block(bounds: Sequence[int], step: int) -> Iterator[tuple[int, int]]:
        block_sizes.append(step)
        yield from ((0, min(step, end)) for end in bounds[1:2] if end)

    def mask(cell_N: torch.Tensor, H: int, *_: object) -> torch.Tensor:
        return torch.empty(cell_N.shape[0], H, dtype=torch.bool)

    def kernel_hidden(enc: torch.Tensor, pred: torch.Tensor, number_N: torch.Tensor, *rest: Any) -> Hidden:
        return Hidden(torch.empty(number_N.shape[0], enc.shape[1], dtype=rest[-1].dtype))

    kernels: dict[str, Callable[..., Any]] = {
        "hidden": kernel_hidden,
        "add_hidden_gradient": lambda *_: None,
        "log_sum_exp": lambda logits_NV, dtype: torch.empty(logits_NV.shape[0], dtype=dtype),
        "gradient_rows": lambda logits_NO, *_, **__: logits_NO,
    }

    def forward_backward(
        blank_N: torch.Tensor, label_N: torch.Tensor, duration_ND: torch.Tensor, *_: object, posteriors: bool
    ) -> LatticeResult:
        N, D = duration_ND.shape
        held, wide, size = [blank_N], torch.float64, N if posteriors else 0
        if cuda:
            held += [torch.empty(5 + D, N, dtype=of) for of in (torch.float64, torch.int32)]  # in lattice_triton.py
            wide = blank_N.dtype
        else:
            held += [blank_N.double(), label_N.double(), duration_ND.double()]
        losses_B = torch.empty(clips, dtype=torch.float64)
        label_N, blank_N = torch.empty(2, size, dtype=wide)
        return LatticeResult(losses_B, label_N, blank_N, torch.empty(size, D, dtype=wide))

    def ctc_loss(log_probs_TBV: torch.Tensor, targets_BU: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        T, B = log_probs_TBV.shape[:2]
        alpha_BTS = torch.empty(B, T, 2 * targets_BU.shape[1] + 1)  # held for backward
        return (log_probs_TBV.sum((0, 2))[:, None, None] * alpha_BTS).sum((1, 2))

    return Operations(
        check_values=lengths,
        draw_seed=lambda: 0,
        has_kernels=lambda *_: cuda,
        blocks=first_block,
        counts=lambda *masks: [mask.shape[0] for mask in masks],
        forward_backward=forward_backward,
        ctc_loss=ctc_loss,
        **(kernels if cuda else {"hidden": partial(hidden, mask=mask)}),
    )
