"""The joint network on chosen cells of the lattice, a block at a time.

Shape suffixes: B batch, T encoder frames, U target tokens, V vocabulary, D durations, H hidden (the joint's width),
O joint outputs (V + 1 + D: tokens, blank, durations), N lattice cells (all of the batch, or those of one block).
"""

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from finetune.losses.form import Form
from finetune.losses.hidden import Hidden
from finetune.losses.operations import Operations
from finetune.losses.transfers import upload

# Measured: 16 to 128 MiB are equally fast, for 1,024 and 8,192 tokens.
CPU_BLOCK_BYTES = 32 * 2**20
GPU_BLOCK_BYTES = 512 * 2**20
# A GPU's matrix products in half precision are quick when rows begin at such multiples of elements, and its kernels
# load 16 bytes at a time; outputs of zeros fill the gap.
ALIGNED = 8
# Kernels count with 32-bit numbers in places.
MOST_ELEMENTS = 2**31 - 1


def block_budget(device: torch.device, kernels: bool, frames: list[int], tokens: list[int], D: int) -> int:
    """Return the bytes of a block where the caller names none."""
    if not kernels and device.type == "cpu":
        return CPU_BLOCK_BYTES
    # Blocks may take what the lattice needs at other times (lattice_triton.py): few, whatever the clips' length.
    cells = sum(t * (u + 1) for t, u in zip(frames, tokens))
    return max(GPU_BLOCK_BYTES, cells * 12 * (5 + (D or 2)))


@dataclass(frozen=True)
class Plan:
    """What one call computes, decided before any cell is touched; durations () means RNN-T."""

    frames: list[int]  # of each clip, 0 where it is infeasible: it then has no cells
    tokens: list[int]
    targets: np.ndarray  # (B, U) on the host, padded with anything
    V: int
    durations: tuple[int, ...]
    activation: str
    dropout: float
    seed: int
    sigma: float
    occupancy_threshold: float
    fastemit_lambda: float
    clamp: float
    budget: int
    compute_dtype: torch.dtype
    needs_gradient: bool
    distils: bool  # from a teacher
    kernels: bool  # a GPU's, which reduce outputs where they lie
    operations: Operations
    aligns: bool = False  # the caller wants posteriors and scores, not the gradient

    @property
    def outputs(self) -> int:
        """The joint outputs in use: RNN-T on a TDT joint leaves the duration outputs out."""
        return self.V + 1 + len(self.durations)

    @property
    def keeps_posteriors(self) -> bool:
        """The gradient needs the posteriors of the lattice, and so do distillation and alignment."""
        return self.needs_gradient or self.keeps_scores

    @property
    def keeps_scores(self) -> bool:
        return self.distils or self.aligns

    @property
    def form(self) -> Form:
        return Form(self.activation, self.dropout, self.seed, self.compute_dtype)

    @property
    def sum_dtype(self) -> torch.dtype:
        return torch.float64 if self.compute_dtype == torch.float64 else torch.float32

    def aligned(self, outputs: int) -> int:
        """So many outputs that rows of them are aligned, where that counts."""
        matters = self.kernels or self.compute_dtype.itemsize == 2
        return -(-outputs // ALIGNED) * ALIGNED if matters else outputs

    @property
    def ends(self) -> list[int]:
        """Behind each clip's cells."""
        return list(itertools.accumulate(t * (u + 1) for t, u in zip(self.frames, self.tokens)))

    @property
    def cells(self) -> int:
        return sum(t * (u + 1) for t, u in zip(self.frames, self.tokens))

    def block_cells(self, H: int, outputs: int | None = None) -> int:
        """Cells in a block such that its tensors stay within the budget, with all outputs in use or some of them."""
        outputs = outputs or self.aligned(self.outputs)
        wide = self.sum_dtype.itemsize
        narrow = self.compute_dtype.itemsize if self.compute_dtype != self.sum_dtype else 0
        if self.kernels:
            # Logits, which become their gradient in place; the linear layer's input and its gradient.
            a_cell = (outputs + 2 * H) * self.compute_dtype.itemsize
        else:
            # Logits and their copy in the other precision; enc, pred, activation, its gradient and a temporary.
            a_cell = outputs * (wide + narrow) + H * (5 * wide + narrow)
            if self.dropout:
                a_cell += H * (wide + 24)  # the mask is hashed in 64-bit numbers on a GPU
        a_cell += 8 * (8 + len(self.durations))  # cell indices and D + 4 numbers
        return max(1, min(self.budget // a_cell, MOST_ELEMENTS // max(outputs, H)))


@dataclass(frozen=True)
class Cells:
    """Cells by their numbers in the batch, with their rows of enc (b, t) and pred (b, u)."""

    number: torch.Tensor
    frame: torch.Tensor
    position: torch.Tensor

    def __len__(self) -> int:
        return self.number.shape[0]

    def __getitem__(self, which: slice) -> "Cells":
        return Cells(self.number[which], self.frame[which], self.position[which])


class Joint:
    """The joint network on chosen cells, with its tensors cast and laid out once."""

    def __init__(
        self,
        plan: Plan,
        enc_BTH: torch.Tensor,
        pred_BUH: torch.Tensor,
        weight_OH: torch.Tensor,
        bias_O: torch.Tensor | None,
    ):
        self.T, self.U1 = enc_BTH.shape[1], pred_BUH.shape[1]
        self._lay_out(plan, enc_BTH, pred_BUH, weight_OH, bias_O)
        # The token after position u; the blank behind the last one, and in padding, which may hold anything.
        next_token = np.full((len(plan.tokens), self.U1), plan.V, dtype=np.int64)
        inside = np.arange(self.U1 - 1) < np.array(plan.tokens, dtype=np.int64)[:, None]
        next_token[:, :-1] = np.where(inside, plan.targets, plan.V)
        width, end = np.array(plan.tokens, dtype=np.int64) + 1, np.array(plan.ends, dtype=np.int64)
        frames = np.array(plan.frames, dtype=np.int64)
        width_B, end_B, first_B, self.cells_B, next_token_BU = upload(
            enc_BTH.device, width, end, end - frames * width, frames * width, next_token
        )
        self.next_token = next_token_BU.view(-1)
        number_N = torch.arange(plan.cells, device=enc_BTH.device)
        clip_N = torch.searchsorted(end_B, number_N, right=True)
        within_N, width_N = number_N - first_B.index_select(0, clip_N), width_B.index_select(0, clip_N)
        t_N = torch.div(within_N, width_N, rounding_mode="floor")
        within_N -= width_N.mul_(t_N)
        self.all = Cells(number_N, t_N.add_(clip_N, alpha=self.T), within_N.add_(clip_N, alpha=self.U1))

    def _lay_out(
        self,
        plan: Plan,
        enc_BTH: torch.Tensor,
        pred_BUH: torch.Tensor,
        weight_OH: torch.Tensor,
        bias_O: torch.Tensor | None,
    ) -> None:
        self.plan = plan
        self.enc = enc_BTH.reshape(-1, enc_BTH.shape[2]).contiguous()
        self.pred = pred_BUH.reshape(-1, pred_BUH.shape[2]).contiguous()
        self.weight = weight_OH[: plan.outputs].to(plan.compute_dtype)
        self.bias = None if bias_O is None else bias_O[: plan.outputs].to(plan.compute_dtype)
        spare = plan.aligned(plan.outputs) - plan.outputs
        if spare:
            self.weight = nn.functional.pad(self.weight, (0, 0, 0, spare))
            self.bias = None if self.bias is None else nn.functional.pad(self.bias, (0, spare))

    def of_teacher(
        self,
        enc_BTH: torch.Tensor,
        pred_BUH: torch.Tensor,
        weight_OH: torch.Tensor,
        bias_O: torch.Tensor | None,
    ) -> "Joint":
        """The joint of another network, without dropout, on the same cells."""
        teacher = copy.copy(self)
        teacher._lay_out(replace(self.plan, dropout=0.0), enc_BTH, pred_BUH, weight_OH, bias_O)
        return teacher

    def cells(self, number_N: torch.Tensor) -> Cells:
        of_all = self.all
        return Cells(number_N, of_all.frame.index_select(0, number_N), of_all.position.index_select(0, number_N))

    def of_clip(self, value_B: torch.Tensor, cells: Cells) -> torch.Tensor:
        """(N,) the value of each cell's clip."""
        return value_B[:, None].expand(-1, self.U1).reshape(-1).index_select(0, cells.position)

    def hidden(self, cells: Cells) -> Hidden:
        return self.plan.operations.hidden(
            self.enc, self.pred, cells.number, cells.frame, cells.position, self.plan.form
        )

    def add_hidden_gradient(
        self,
        grad_NH: torch.Tensor,
        values: Hidden,
        cells: Cells,
        grad_enc: torch.Tensor | None,
        grad_pred: torch.Tensor | None,
    ) -> None:
        """Adds to the gradients of enc and pred what reaches them through the cells; `grad_NH` is used up."""
        self.plan.operations.add_hidden_gradient(
            grad_NH, values, self.enc, self.pred, cells.number, cells.frame, cells.position, self.plan.form,
            grad_enc, grad_pred,
        )  # fmt: skip

    def logits(self, dropped_NH: torch.Tensor) -> torch.Tensor:
        """(N, O) outputs in the compute dtype, and zeros up to an aligned width."""
        return nn.functional.linear(dropped_NH, self.weight, self.bias)

    def token_logits(self, dropped_NH: torch.Tensor) -> torch.Tensor:
        """(N, V + 1) outputs for tokens and blank, in the compute dtype; rows lie an aligned width apart."""
        width = self.plan.aligned(self.plan.V + 1)
        bias = None if self.bias is None else self.bias[:width]
        return nn.functional.linear(dropped_NH, self.weight[:width], bias)[:, : self.plan.V + 1]


def compute_dtype_of(device: torch.device, inputs: Sequence[torch.Tensor]) -> torch.dtype:
    """The dtype of the matrix products: autocast's where it is on (but for float64), else that of all inputs."""
    dtype = inputs[0].dtype
    for x in inputs[1:]:
        dtype = torch.promote_types(dtype, x.dtype)
    if torch.is_autocast_enabled(device.type) and dtype != torch.float64:
        return torch.get_autocast_dtype(device.type)
    return dtype
