"""The loss's operations on fake tensors, which have no values: what depends on values is taken at its most.

Every lattice cell is computed (a trained model's alignments pass through few), and all tokens of a text are distinct.
The loss works block by block, and one block stands for all.

N lattice cells, U target tokens, H joint width; of CTC: T frames, S states, two for each token and one more.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

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

    def lengths(enc_BTH: torch.Tensor, *_: object) -> tuple[list[int], list[int]]:
        return [enc_BTH.shape[1]] * clips, [tokens] * clips

    def first_block(start: int, end: int, step: int) -> Iterator[tuple[int, int]]:
        block_sizes.append(step)
        if end > start:
            yield start, min(start + step, end)

    def first_lattice(frames: list[int], tokens: list[int]) -> Iterator[tuple[int, int, int]]:
        yield 0, frames[0], tokens[0]

    def all_cells(mask_N: torch.Tensor) -> torch.Tensor:
        return torch.empty(mask_N.shape[0], dtype=torch.int64)

    def all_distinct(targets_U: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty_like(targets_U), torch.empty_like(targets_U)

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
        held = [blank_N.double(), label_N.double(), duration_ND.double()]
        if cuda:
            held.append(torch.empty(2, N, dtype=torch.float64))  # alpha and beta
        size = N if posteriors else 0
        losses_B = torch.empty(clips, dtype=torch.float64)
        label_N, blank_N = torch.empty(2, size, dtype=torch.float64)
        return LatticeResult(losses_B, label_N, blank_N, torch.empty(size, D, dtype=torch.float64))

    def ctc_loss(log_probs_TBV: torch.Tensor, targets_BU: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        T, B = log_probs_TBV.shape[:2]
        alpha_BTS = torch.empty(B, T, 2 * targets_BU.shape[1] + 1)  # held for backward
        return (log_probs_TBV.sum((0, 2))[:, None, None] * alpha_BTS).sum((1, 2))

    return Operations(
        check_values=lengths,
        draw_seed=lambda: 0,
        blocks=first_block,
        lattices=first_lattice,
        cells_where=all_cells,
        distinct_tokens=all_distinct,
        forward_backward=forward_backward,
        ctc_loss=ctc_loss,
        **(kernels if cuda else {"hidden": partial(hidden, mask=mask)}),
    )
