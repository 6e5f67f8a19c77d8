"""Distillation from a frozen teacher on the posteriors of the lattice's cells, without the joint's output tensor.

Collapsed distillation (Panchapagesan et al., "Efficient knowledge distillation for RNN-T models", ICASSP 2021, arXiv
2011.06110), with the durations of TDT beside it: of a cell n, student p and teacher q over next token, blank and the
rest of the tokens together, and over the durations, add
    gamma_n (KL(q_n || p_n) + KL(q_n || p_n of the durations))
to the loss, where gamma_n is the cell's occupancy under the student's alignments, a constant. Behind the last token
there is no next one, and that one belongs to the rest. sigma has no part in p and q, which are the networks' own.

With w the clip's weight, the gradient of this with respect to the student's outputs z_n is
    w gamma_n (p_n[v] - q_n[v])                             next token, blank, durations
    w gamma_n p_n[v] (1 - q_n[rest] / p_n[rest])            every other token
so it is a softmax times a factor less a target, like the loss's own gradient, and the sum of both is a row of
`finetune.losses.rows.gradient_rows` with other numbers: no cell is visited twice. The probability of the rest is a sum
of its own (`finetune.losses.band.sums_apart`), which has the precision that 1 - p[next] - p[blank] lacks where a model
is sure, and its ratio is bounded by exp(80): p_n[v] times it stays a number, and where the bound counts (the student
gives the others 1e-35 of what the teacher does) the gradient is only weaker.

Shape suffixes: B batch, T encoder frames, U target tokens, D durations, H hidden, O joint outputs, N lattice cells.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from finetune.losses.band import Kept, arc_scores
from finetune.losses.joint import Joint, Plan

MOST_LOG_RATIO = 80.0


@dataclass(frozen=True)
class Teacher:
    """What the teacher's network says of the same clips; nothing here gets a gradient.

    Attributes:
        enc_BTH, pred_BUH: as the student's in `finetune.losses.fused_tdt_loss`; the width may be another.
        weight_OH, bias_O: of its joint's last layer, with as many outputs as the student's.
        weight: of the distillation in the loss, for all clips or (B,) by clip; >= 0.
        part_B: a tensor (B,) that is filled with each clip's distillation, times its weight; None: it is not wanted.
    """

    enc_BTH: torch.Tensor
    pred_BUH: torch.Tensor
    weight_OH: torch.Tensor
    bias_O: torch.Tensor | None
    weight: float | torch.Tensor = 1.0
    part_B: torch.Tensor | None = None


def check_teacher(teacher: Teacher, enc_BTH: torch.Tensor, pred_BUH: torch.Tensor, weight_OH: torch.Tensor) -> None:
    """Raise a ValueError that names the field of the teacher that does not fit the student's arguments."""
    (B, T, _), U1, outputs = enc_BTH.shape, pred_BUH.shape[1], weight_OH.shape[0]
    H = teacher.enc_BTH.shape[-1]
    for name, x, shape in (
        ("enc_BTH", teacher.enc_BTH, (B, T, H)),
        ("pred_BUH", teacher.pred_BUH, (B, U1, H)),
        ("weight_OH", teacher.weight_OH, (outputs, H)),
        ("bias_O", teacher.bias_O, (outputs,)),
        ("weight", teacher.weight, (B,)),
        ("part_B", teacher.part_B, (B,)),
    ):
        if isinstance(x, torch.Tensor) and (x.shape != shape or not x.is_floating_point()):
            got = f"{tuple(x.shape)} {x.dtype}"
            raise ValueError(f"teacher.{name}: expected floating-point numbers of shape {shape}, got {got}")
    weight = teacher.weight
    if not isinstance(weight, torch.Tensor) and not (math.isfinite(weight) and weight >= 0):
        raise ValueError(f"teacher.weight: expected a finite number >= 0 or a tensor, got {weight!r}")


class RowNumbers(NamedTuple):
    """What `finetune.losses.rows.gradient_rows` takes of each cell."""

    lse_N: torch.Tensor
    arcs_N: torch.Tensor
    rest_N: torch.Tensor
    used_N: torch.Tensor
    label_N: torch.Tensor
    blank_N: torch.Tensor
    duration_ND: torch.Tensor


def numbers_of_rows(plan: Plan, kept: Kept) -> RowNumbers:
    """The loss's own numbers: gamma as the factor of every softmax, and the posteriors of the arcs."""
    used_N = kept.label_N + kept.blank_N
    label_N, arcs_N = kept.label_N, used_N
    if plan.fastemit_lambda:
        label_N = kept.label_N * (1 + plan.fastemit_lambda)
        arcs_N = label_N + kept.blank_N
    return RowNumbers(kept.lse_N, arcs_N, arcs_N, used_N, label_N, kept.blank_N, kept.duration_ND)


def distil(joint: Joint, teacher: Teacher, kept: Kept, own: RowNumbers) -> tuple[torch.Tensor, RowNumbers]:
    """(B,) weighted distillation of each clip in the sums' type, and the numbers of rows with its gradient added.

    The scores and numbers that come in are used up: of many cells each tensor less counts.
    """
    assert kept.scores is not None
    B, cells = len(joint.plan.frames), joint.cells(kept.number_N)
    of_teacher = joint.of_teacher(teacher.enc_BTH, teacher.pred_BUH, teacher.weight_OH, teacher.bias_O)
    q, p = arc_scores(of_teacher, True, cells), kept.scores
    weight_B = torch.as_tensor(teacher.weight, dtype=q.lse_N.dtype, device=q.lse_N.device).detach().expand(B)
    weighted_N = joint.of_clip(weight_B, cells).mul_(own.used_N)
    term_N = torch.zeros_like(weighted_N)

    assert q.rest_N is not None
    assert p.rest_N is not None
    log_q_N, log_p_N = q.rest_N.sub_(q.lse_N), p.rest_N.sub_(p.lse_N)
    _add_part(term_N, log_q_N.exp(), log_q_N, log_p_N)
    ratio_N = log_q_N.sub_(log_p_N).clamp_(max=MOST_LOG_RATIO).exp_()
    rest_N = own.rest_N + ratio_N.neg_().add_(1).mul_(weighted_N)

    log_q_N, log_p_N = q.blank_N.sub_(q.lse_N), p.blank_N.sub_(p.lse_N)
    _add_part(term_N, log_q_N.exp(), log_q_N, log_p_N)
    blank_N = own.blank_N.addcmul_(weighted_N, log_q_N.exp_())

    log_q_N, log_p_N = q.label_N.sub_(q.lse_N), p.label_N.sub_(p.lse_N)
    last_N = joint.next_token.index_select(0, cells.position) == joint.plan.V
    q_label_N = log_q_N.exp().masked_fill_(last_N, 0.0)
    _add_part(term_N, q_label_N, log_q_N, log_p_N)
    label_N = own.label_N.addcmul_(weighted_N, q_label_N)

    for log_q_N, log_p_N, duration_N in zip(*(x.unbind(1) for x in (q.duration_ND, p.duration_ND, own.duration_ND))):
        if joint.plan.durations:
            _add_part(term_N, log_q_N.exp(), log_q_N, log_p_N)
            duration_N.addcmul_(weighted_N, log_q_N.exp_())

    arcs_N, used_N = own.arcs_N + weighted_N, own.used_N + weighted_N
    clip_N = torch.div(cells.frame, joint.T, rounding_mode="floor")
    sums_B = torch.zeros(B, dtype=torch.float64, device=term_N.device)
    sums_B.index_add_(0, clip_N, term_N.mul_(weighted_N).double())
    numbers = RowNumbers(own.lse_N, arcs_N, rest_N, used_N, label_N, blank_N, own.duration_ND)
    return sums_B.to(term_N.dtype), numbers


def _add_part(term_N: torch.Tensor, q_N: torch.Tensor, log_q_N: torch.Tensor, log_p_N: torch.Tensor) -> None:
    """Add q log(q / p), 0 where q is: a difference of logarithms need not be a number there."""
    term_N += torch.where(q_N == 0, 0.0, (log_q_N - log_p_N).mul_(q_N))
