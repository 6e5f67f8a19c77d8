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

from typing import NamedTuple

import torch
from torch import nn

from finetune.losses.joint import Joint, Plan
from finetune.losses.lattice import LatticeResult

# With more of the cells in the band, computing all of them is as quick and needs no further lattices.
WIDEST_BAND = 0.6
ROUNDS = 6


class ArcScores(NamedTuple):
    """The cheap outputs of all N cells: blank and next token, log-probabilities of durations, partial log-sum-exp."""

    blank_N: torch.Tensor
    label_N: torch.Tensor
    duration_ND: torch.Tensor
    partial_N: torch.Tensor


def arc_scores(joint: Joint) -> ArcScores:
    """One matrix product of U + 2 + D rows over all cells, clip by clip and block by block."""
    plan = joint.plan
    operations, device, D, dtype = plan.operations, joint.enc.device, len(plan.durations), plan.sum_dtype
    blank_N, label_N, partial_N = torch.empty(3, plan.cells, dtype=dtype, device=device)
    duration_ND = torch.zeros(plan.cells, D or 2, dtype=dtype, device=device)
    targets_BU = joint.next_token.view(-1, joint.U1).cpu()
    last_rows = torch.arange(plan.V, plan.outputs)
    end = 0
    for clip, T, U in operations.lattices(plan.frames, plan.tokens):
        start, end = end, end + T * (U + 1)
        tokens_S, column_U = operations.distinct_tokens(targets_BU[clip, :U])
        rows_S = torch.cat([tokens_S, last_rows]).to(device, non_blocking=True)
        column_U = nn.functional.pad(column_U, (0, 1), value=0).to(device, non_blocking=True)
        weight_SH, bias_S = joint.weight[rows_S], None if joint.bias is None else joint.bias[rows_S]
        S = len(tokens_S)
        step = plan.block_cells(joint.enc.shape[1], outputs=S + 1 + D)
        for block in (slice(*bounds) for bounds in operations.blocks(start, end, step)):
            cells = joint.cells(torch.arange(block.start, block.stop, device=device))
            hidden_NH = joint.hidden(cells).dropped_NH
            scores_NS = nn.functional.linear(hidden_NH, weight_SH, bias_S).to(dtype)
            if D:
                duration_ND[block] = torch.log_softmax(scores_NS[:, S + 1 :], 1)
            blank_N[block] = scores_NS[:, S]
            position_N = cells.position - clip * joint.U1
            label_N[block] = scores_NS.gather(1, column_U[position_N][:, None])[:, 0]
            partial_N[block] = torch.logsumexp(scores_NS[:, : S + 1], 1)
            del cells, hidden_NH, scores_NS, position_N  # before the next block's are made
    return ArcScores(blank_N, label_N, duration_ND, partial_N)


def band_lattice(joint: Joint, tolerance: float) -> tuple[torch.Tensor, LatticeResult]:
    """The lattice over enough cells that no more than `tolerance` of a clip's alignments pass outside of them.

    Args:
        joint: of the batch.
        tolerance: share of a clip's alignments, by probability; above 0.

    Returns:
        (N,) log-sum-exp over tokens and blank, true where the posteriors are above 0, and the lattice.
    """
    plan = joint.plan
    scores = arc_scores(joint)
    cells_B = torch.tensor([t * (u + 1) for t, u in zip(plan.frames, plan.tokens)], dtype=torch.int64)
    # Every cell outside stays below its share, so that all of them together stay below the tolerance.
    share_B = tolerance / cells_B.clamp(min=1).double()
    share_N = torch.repeat_interleave(share_B, cells_B, output_size=plan.cells).to(joint.enc.device)
    lse_N = scores.partial_N.clone()
    inside_N = torch.zeros(plan.cells, dtype=torch.bool, device=joint.enc.device)
    inside = 0
    for _ in range(ROUNDS):
        _, label_N, blank_N, _ = _lattice(plan, scores, lse_N, None, posteriors=True)
        more_N = ~inside_N & ~(label_N + blank_N < share_N)  # "not below" includes NaN
        fresh = plan.operations.cells_where(more_N)
        if len(fresh) == 0:
            return lse_N, _lattice(plan, scores, lse_N, inside_N, plan.needs_gradient)
        if inside + len(fresh) > WIDEST_BAND * plan.cells:
            break
        inside += len(fresh)
        lse_N[fresh] = log_sum_exp(joint, fresh)
        inside_N |= more_N
    fresh = plan.operations.cells_where(~inside_N)
    lse_N[fresh] = log_sum_exp(joint, fresh)
    return lse_N, _lattice(plan, scores, lse_N, None, plan.needs_gradient)


def log_sum_exp(joint: Joint, number_N: torch.Tensor) -> torch.Tensor:
    """(n,) log-sum-exp over all tokens and blank of these cells, block by block."""
    plan = joint.plan
    lse_N = torch.empty(len(number_N), dtype=plan.sum_dtype, device=number_N.device)
    for start, end in plan.operations.blocks(0, len(number_N), plan.block_cells(joint.enc.shape[1])):
        cells = joint.cells(number_N[start:end])
        dropped_NH = joint.hidden(cells).dropped_NH
        lse_N[start:end] = plan.operations.log_sum_exp(joint.token_logits(dropped_NH), plan.sum_dtype)
        del cells, dropped_NH  # before the next block's are made
    return lse_N


def _lattice(
    plan: Plan, scores: ArcScores, lse_N: torch.Tensor, inside_N: torch.Tensor | None, posteriors: bool
) -> LatticeResult:
    """Forward-backward with these log-sum-exps, over the cells inside the band alone where one is given."""
    norm_N = lse_N + plan.sigma
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
