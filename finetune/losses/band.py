"""Which cells a clip's alignments pass through, found without the log-sum-exp of every cell and certified.

A model that has learnt puts nearly all of a clip's alignments into a narrow band of its lattice, but the band is known
only after the joint's V + 1 token outputs have been summed for every cell. They need not be: the arcs out of a cell
need the outputs of blank and next token (two rows of V + 1) and their log-sum-exp, and a sum over some of the outputs
is a lower bound of the sum over all. Taken over the clip's own tokens and blank, at U + 2 rows instead of V + 1, it
makes every arc at least as probable as it is, so forward-backward over such arcs bounds from above what passes through
each cell. The cells where that is not negligible get their true log-sum-exp; then the bounds are taken anew from true
numbers inside the band and upper ones outside, and the band grows until what may pass outside is below the tolerance.
With Z the sum over all alignments, Z_band that over those inside the band, and Z_mixed >= Z the sum with the upper
arcs outside,
    Z - Z_band <= Z_mixed - Z_band
               <= sum over the cells outside of what passes through them in the mixed lattice
               <= tolerance Z_mixed
so the loss is at most -log(1 - tolerance) too large. The alignments inside, weighed anew, differ from all of them by
at most the tolerance in total variation, so every posterior does, and each cell outside has an occupancy of at most
the tolerance.

Shape suffixes: B batch, T encoder frames, U target tokens, V vocabulary, D durations, H hidden, S rows of the partial
sum, N cells.
"""

from bisect import bisect_left, bisect_right
from typing import NamedTuple

import numpy as np
import torch

from finetune.losses.joint import Cells, Joint, Plan
from finetune.losses.lattice import LatticeResult
from finetune.losses.transfers import upload

# With more of the cells in the band, computing all of them is as quick and needs no further lattices.
WIDEST_BAND = 0.6
ROUNDS = 6
# The first round takes cells down to this part of their share: hardly any are left for a second, which would cost a
# lattice (measured on the sample base: 0.8 % more of the cells, one round fewer at every tolerance).
FIRST = 0.01
# Estimates, not measured: what a GPU multiplies in a second, and its time for a diagonal of the lattice.
GPU_FLOPS, GPU_SECONDS_A_DIAGONAL = 2e14, 4e-6


class ArcScores(NamedTuple):
    """Of all N cells: outputs of blank and next token, log-probabilities of durations, (partial) log-sum-exp."""

    blank_N: torch.Tensor
    label_N: torch.Tensor
    duration_ND: torch.Tensor
    lse_N: torch.Tensor
    rest_N: torch.Tensor | None = None
    """Log-sum-exp of the tokens that are neither blank nor the next one; only for distillation, and not partial."""

    def put_sums(self, number_N: torch.Tensor, lse_N: torch.Tensor, rest_N: torch.Tensor | None) -> None:
        """Put in the log-sum-exps of the cells of these numbers."""
        self.lse_N.index_copy_(0, number_N, lse_N)
        if self.rest_N is not None and rest_N is not None:
            self.rest_N.index_copy_(0, number_N, rest_N)


class Kept(NamedTuple):
    """Of the K cells that matter to backward, number, log-sum-exp, and posteriors of label, blank and durations."""

    number_N: torch.Tensor
    lse_N: torch.Tensor
    label_N: torch.Tensor
    blank_N: torch.Tensor
    duration_ND: torch.Tensor
    scores: ArcScores | None
    """Only for distillation and alignment."""


class Band(NamedTuple):
    """Losses of the clips, and the cells that matter to backward; None where nothing asks for posteriors."""

    losses_B: torch.Tensor
    kept: Kept | None


def takes_all(joint: Joint) -> bool:
    """Whether a GPU computes all log-sum-exps in less time than the two lattices that the band costs."""
    plan, (_, H) = joint.plan, joint.weight.shape
    diagonals = max((t + u for t, u in zip(plan.frames, plan.tokens)), default=0)
    product = 2 * plan.cells * plan.V * H / GPU_FLOPS
    return plan.kernels and product < 2 * diagonals * GPU_SECONDS_A_DIAGONAL


def arc_scores(joint: Joint, whole: bool, cells: Cells | None = None) -> ArcScores:
    """All outputs of the joint (`whole`) or those of each clip's own tokens, blank and durations, block by block; of
    all cells, or of some of them (`whole` only)."""
    plan, chosen = joint.plan, joint.all if cells is None else cells
    operations, device, D, dtype = plan.operations, joint.enc.device, len(plan.durations), plan.sum_dtype
    blank_N, label_N, lse_N = torch.empty(3, len(chosen), dtype=dtype, device=device)
    duration_ND = torch.zeros(len(chosen), D or 2, dtype=dtype, device=device)
    rest_N = torch.empty_like(lse_N) if plan.distils else None
    # A block of a GPU's reaches over clips; a CPU's has one clip's tokens and no others.
    bounds = [0, len(chosen)] if plan.kernels or whole else [0, *plan.ends]
    own = None if whole else OwnTokens(joint)
    step = plan.block_cells(joint.enc.shape[1], None if own is None else plan.aligned(own.most + 1 + D))
    column_P = joint.next_token if own is None else own.column_P
    for start, end in operations.blocks(bounds, step):
        cells, block = chosen[start:end], slice(start, end)
        dropped_NH = joint.hidden(cells).dropped_NH
        logits_NO, S = (joint.logits(dropped_NH), plan.V) if own is None else own.logits(dropped_NH, start, end)
        blank_N[block] = logits_NO[:, S]
        label_N[block] = logits_NO.gather(1, column_P.index_select(0, cells.position)[:, None])[:, 0]
        if D:
            duration_ND[block] = torch.log_softmax(logits_NO[:, S + 1 : S + 1 + D].to(dtype), 1)
        if whole and rest_N is not None:
            lse_N[block], rest_N[block] = sums_apart(joint, logits_NO[:, : S + 1], cells)
        else:
            lse_N[block] = operations.log_sum_exp(logits_NO[:, : S + 1], dtype)  # uses them up
        del cells, dropped_NH, logits_NO  # before the next block's are made
    return ArcScores(blank_N, label_N, duration_ND, lse_N, rest_N)


def sums_apart(joint: Joint, logits_NV: torch.Tensor, cells: Cells) -> tuple[torch.Tensor, torch.Tensor]:
    """(n,) log-sum-exps over tokens and blank, and over the tokens that are neither next nor blank; uses the rows up.

    The second is summed and not what is left of the first, which would be all rounding where a model is sure.
    """
    plan = joint.plan
    next_N = joint.next_token.index_select(0, cells.position)
    column_N2 = torch.stack([next_N, torch.full_like(next_N, plan.V)], 1)
    label_N, blank_N = logits_NV.gather(1, column_N2).to(plan.sum_dtype).unbind(1)
    logits_NV.scatter_(1, column_N2, torch.finfo(logits_NV.dtype).min)  # finite: there may be no other token
    rest_N = plan.operations.log_sum_exp(logits_NV, plan.sum_dtype)
    label_N = label_N.masked_fill(next_N == plan.V, float("-inf"))  # behind the last token, where the rest is all
    return torch.logaddexp(torch.logaddexp(rest_N, blank_N), label_N), rest_N


class OwnTokens:
    """The joint's outputs for each clip's own tokens, blank and durations.

    Each token counts once: a row summed twice would make the bound from below a bound of nothing. Clips of a block
    have as many columns; those that a clip has no token for are -inf.
    """

    def __init__(self, joint: Joint):
        plan, D = joint.plan, len(joint.plan.durations)
        self.joint, self.ends = joint, [0, *plan.ends]
        distinct = [np.unique(y[:u], return_inverse=True) for y, u in zip(plan.targets, plan.tokens)]
        self.sizes = [len(tokens) for tokens, _ in distinct]
        self.most = max(self.sizes, default=0)
        no_token = joint.weight.shape[0]
        columns = np.zeros((len(distinct), joint.U1), dtype=np.int64)
        rows = np.full((len(distinct), self._columns(self.most)), no_token)
        for b, (tokens, column_of_target) in enumerate(distinct):
            rows[b, : len(tokens)], columns[b, : len(column_of_target)] = tokens, column_of_target
        last = np.arange(plan.V, plan.V + 1 + D)
        columns_BU, self.rows_BS, self.last = upload(joint.enc.device, columns, rows, last)
        self.column_P = columns_BU.view(-1)
        bias_O = joint.weight.new_zeros(no_token) if joint.bias is None else joint.bias
        self.bias = torch.cat([bias_O, bias_O.new_full((1,), float("-inf"))])

    def _columns(self, S: int) -> int:
        """So many columns of tokens that with blank and durations rows are aligned."""
        rest = 1 + len(self.joint.plan.durations)
        return self.joint.plan.aligned(S + rest) - rest

    def logits(self, dropped_NH: torch.Tensor, start: int, end: int) -> tuple[torch.Tensor, int]:
        """(N, S + 1 + D) outputs of the cells from start to end: one product a clip; and S."""
        first, last = bisect_right(self.ends, start) - 1, bisect_left(self.ends, end)
        S = self._columns(max(self.sizes[first:last]))
        rows_CS = torch.cat([self.rows_BS[first:last, :S], self.last.expand(last - first, -1)], 1)
        bias_CS = self.bias.index_select(0, rows_CS.view(-1)).view(rows_CS.shape)
        rows = rows_CS.view(-1).clamp(max=self.joint.weight.shape[0] - 1)
        weight_CSH = self.joint.weight.index_select(0, rows).view(*rows_CS.shape, -1)
        logits_NS = dropped_NH.new_empty(len(dropped_NH), rows_CS.shape[1])
        for clip in range(first, last):
            cells = slice(max(self.ends[clip], start) - start, min(self.ends[clip + 1], end) - start)
            weight_HS = weight_CSH[clip - first].t()
            if cells.start < cells.stop:
                torch.addmm(bias_CS[clip - first], dropped_NH[cells], weight_HS, out=logits_NS[cells])
        return logits_NS, S


def band_lattice(joint: Joint, tolerance: float) -> Band:
    """The lattice over enough cells that no more than `tolerance` of a clip's alignments pass outside of them.

    The device is waited for once to learn the size of the band, and once for the certificate together with the
    number of cells that backward keeps.

    Args:
        joint: of the batch.
        tolerance: share of a clip's alignments, by probability; above 0. Cells of a smaller occupancy are not kept.
    """
    plan = joint.plan
    counts, cells_where = plan.operations.counts, plan.operations.cells_where
    whole = takes_all(joint)
    scores = arc_scores(joint, whole)

    def lattice(inside_N: torch.Tensor | None) -> tuple[LatticeResult, list[torch.Tensor]]:
        """The answer where all that counts is inside (None: all cells), and which cells backward keeps."""
        found = _lattice(plan, scores, inside_N, plan.keeps_posteriors)
        # "not below" keeps what is no number, so that a broken forward shows in the gradient.
        return found, [~(found.label_N + found.blank_N < tolerance)] if plan.keeps_posteriors else []

    def answer(found: LatticeResult, mask: list[torch.Tensor], kept: list[int]) -> Band:
        if not mask:
            return Band(found.losses_B, None)
        tensors = [scores.lse_N, found.label_N, found.blank_N, found.duration_ND]
        if plan.keeps_scores:
            tensors += [scores.blank_N, scores.label_N, scores.duration_ND]
            tensors += [] if scores.rest_N is None else [scores.rest_N]
        if kept[0] == plan.cells:
            number_N = joint.all.number
        else:
            number_N = cells_where(mask[0], kept[0])
            tensors = [x.index_select(0, number_N) for x in tensors]
        lse_N, label_N, blank_N, duration_ND, *more = (x.to(plan.sum_dtype) for x in tensors)
        own = ArcScores(more[0], more[1], more[2], lse_N, more[3] if more[3:] else None) if more else None
        return Band(found.losses_B, Kept(number_N, lse_N, label_N, blank_N, duration_ND, own))

    # Every cell outside stays below its share, so that all of them together stay below the tolerance.
    share_N = joint.of_clip(tolerance / joint.cells_B.clamp(min=1).double(), joint.all)
    inside_N, inside = None, 0
    for _ in range(0 if whole else ROUNDS):
        mixed = _lattice(plan, scores, None, posteriors=True)
        occupancy_N = mixed.label_N + mixed.blank_N
        if inside_N is None:
            more_N = ~(occupancy_N < FIRST * share_N)  # "not below" includes NaN
            (fresh,) = counts(more_N)
        else:
            more_N = ~(inside_N | (occupancy_N < share_N))
            found, mask = lattice(inside_N)
            fresh, *kept = counts(more_N, *mask)
            if fresh == 0:
                return answer(found, mask, kept)
        del mixed, occupancy_N
        if inside + fresh > WIDEST_BAND * plan.cells:
            break
        number_N = cells_where(more_N, fresh)
        scores.put_sums(number_N, *log_sum_exp(joint, joint.cells(number_N)))
        inside_N, inside = more_N if inside_N is None else inside_N | more_N, inside + fresh
    if not whole:
        number_N = joint.all.number if inside_N is None else cells_where(~inside_N, plan.cells - inside)
        cells = joint.all if inside_N is None else joint.cells(number_N)
        scores.put_sums(number_N, *log_sum_exp(joint, cells))
    found, mask = lattice(None)
    return answer(found, mask, counts(*mask) if mask else [])


def log_sum_exp(joint: Joint, cells: Cells) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(n,) log-sum-exps over all tokens and blank of these cells, and for distillation over those that are no arcs'
    (`sums_apart`), block by block."""
    plan = joint.plan
    lse_N = torch.empty(len(cells), dtype=plan.sum_dtype, device=joint.enc.device)
    rest_N = torch.empty_like(lse_N) if plan.distils else None
    for start, end in plan.operations.blocks([0, len(cells)], plan.block_cells(joint.enc.shape[1])):
        block = cells[start:end]
        logits_NV = joint.token_logits(joint.hidden(block).dropped_NH)
        if rest_N is None:
            lse_N[start:end] = plan.operations.log_sum_exp(logits_NV, plan.sum_dtype)
        else:
            lse_N[start:end], rest_N[start:end] = sums_apart(joint, logits_NV, block)
        del logits_NV  # before the next block's are made
    return lse_N, rest_N


def _lattice(plan: Plan, scores: ArcScores, inside_N: torch.Tensor | None, posteriors: bool) -> LatticeResult:
    """Forward-backward with these scores, over the cells inside the band alone where one is given."""
    norm_N = scores.lse_N + plan.sigma
    blank_N, label_N = scores.blank_N - norm_N, scores.label_N - norm_N
    if inside_N is not None:
        blank_N, label_N = (x.masked_fill(~inside_N, float("-inf")) for x in (blank_N, label_N))
    return plan.operations.forward_backward(
        blank_N,
        label_N,
        scores.duration_ND,
        plan.frames,
        plan.tokens,
        plan.durations or (0, 1),
        len(plan.durations) or 1,
        posteriors=posteriors,
    )
