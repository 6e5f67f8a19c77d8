"""The TDT and RNN-T losses, computed from the joint network's inputs block by block.

Shape suffixes: B batch, T encoder frames, U target tokens, V vocabulary, D durations, H hidden (the joint's width),
O joint outputs (V + 1 + D: tokens, blank, durations), N lattice cells (all of the batch, or those of one block).

The joint network says for each lattice cell n = (b, t, u)
    z_n = weight dropout(activation(enc[b, t] + pred[b, u])) + bias          log p_n = log_softmax of each head of z_n
and the lattice (lattice.py) needs of z_n only the log-probabilities of blank, of the next target token and of the D
durations. Blank, next token and durations are made for all cells, the log-sum-exp over all tokens only for the cells
that alignments can pass through (band.py): for a block of them at a time the logits are made, reduced and dropped.
Backward makes them again, for the cells that alignments do pass through: with the posterior probabilities label_n,
blank_n, duration_n that an alignment leaves cell n by such an arc and its occupancy gamma_n = label_n + blank_n, the
gradient row is
    d loss / d z_n[v] = gamma_n softmax(z_n)[v] - label_n [v = next token] - blank_n [v = blank]        tokens, blank
    d loss / d z_n[d] = gamma_n softmax(z_n)[d] - duration_n[d]                                         durations
whose absolute values sum to at most 4 gamma_n: softmax and arcs weigh gamma_n each, in either head.
TDT: arXiv 2304.06795. RNN-T: arXiv 1211.3711. FastEmit: arXiv 2010.11148.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import numpy as np
import torch

from finetune.losses.checks import check_options, check_shapes
from finetune.losses.distillation import Teacher, check_teacher
from finetune.losses.fused import FusedTransducer
from finetune.losses.joint import Plan, block_budget, compute_dtype_of
from finetune.losses.lattice import check_durations, feasible_lengths
from finetune.losses.operations import REAL, Operations
from finetune.losses.transfers import upload

Function = TypeVar("Function", bound=Callable[..., Any])


def _not_compiled(function: Function) -> Function:
    """Keep `function` out of compiled callers: they gain nothing in it and would compile anew for each shape."""
    return cast("Function", torch.compiler.disable(function))


@_not_compiled
def fused_tdt_loss(
    enc_BTH: torch.Tensor,
    pred_BUH: torch.Tensor,
    weight_OH: torch.Tensor,
    bias_O: torch.Tensor | None,
    targets_BU: torch.Tensor,
    enc_lengths_B: torch.Tensor,
    target_lengths_B: torch.Tensor,
    *,
    durations: Sequence[int] = (0, 1, 2, 3, 4),
    activation: str = "relu",
    dropout: float = 0.0,
    sigma: float = 0.0,
    omega: float = 0.0,
    rnnt_draw: bool | None = None,
    generator: torch.Generator | None = None,
    reduction: str = "mean_batch",
    occupancy_threshold: float = 0.0,
    fastemit_lambda: float = 0.0,
    clamp: float = 0.0,
    teacher: Teacher | None = None,
    joint_memory_budget: int | None = None,
    operations: Operations = REAL,
) -> torch.Tensor:
    """TDT loss (or RNN-T loss, with `durations=()`) without the (B, T, U + 1, O) tensor of joint outputs.

    Matrix products run in autocast's dtype where autocast is on, else in the inputs' own; log-sum-exp in float32 and
    the lattice in float64 (float64 inputs: all in float64). An empty or all-infeasible batch gives 0 with zero
    gradients (inf under "none").

    Args:
        enc_BTH, pred_BUH: (B, T, H) encoder outputs and (B, U + 1, H) prediction network outputs, for start of
            sequence and each target, both projected to the joint's width.
        weight_OH, bias_O: the joint's last linear layer, bias or None; O = V + 1 + len(durations), the blank is row V.
        targets_BU: (B, U) token ids in [0, V), padded with anything; int32 or int64.
        enc_lengths_B, target_lengths_B: (B,) frames and tokens of each clip. These and the targets may lie on the
            host: a call then waits for a GPU two times, else three.
        durations: what each duration output stands for, in encoder frames; () for plain RNN-T.
        activation: "relu", "tanh" or "sigmoid", between the sum of `enc` and `pred` and the linear layer.
        dropout: probability with which an activation is zeroed (the others are scaled up), before the linear layer.
            The masks come from a seed drawn from torch's global CPU generator, so torch.manual_seed reproduces them on
            any device and for any block size.
        sigma: logit under-normalisation: subtracted from the log-probability of each token and blank, not of
            durations. No effect on the RNN-T loss, as in NeMo.
        omega: probability with which the whole batch gets the RNN-T loss on the token outputs in place of the TDT
            loss. No effect with `durations=()` or when `rnnt_draw` is given.
        rnnt_draw: the outcome of that draw, where the caller makes it (several processes, or accumulated batches):
            True RNN-T, False TDT.
        generator: CPU generator for the draw; None draws from torch's global CPU generator.
        reduction: "none": (B,) losses; "sum"; "mean_batch": sum / clips; "mean": mean over clips of loss / tokens;
            "mean_volume": sum / tokens of all clips. As NeMo's, except that infeasible clips take no part in sums,
            counts and token counts, and that a number of tokens (of a clip in "mean", of the batch in "mean_volume")
            counts as at least 1, where NeMo divides by 0.
        occupancy_threshold: cells whose occupancy (posterior probability that an alignment passes through it) is below
            this are left out: of forward together, so that at most this share of a clip's alignments is lost
            (certified: band.py), and of backward one by one. The loss is at most -(1 + fastemit_lambda) log(1 -
            threshold) above the exact one. Every posterior is off by at most the threshold, and a cell left out of
            backward has an occupancy below 2 thresholds; so the gradient with respect to a cell's outputs, whose
            absolute values sum to at most 4 occupancies, is off by at most 8 (1 + fastemit_lambda) thresholds. All up
            to the rounding of the logits. 0 is exact: only what stays below the square of the dtype's eps (1e-14 in
            float32) is left out. 1e-8 is exact to float32's rounding; 1e-4 suits training.
        fastemit_lambda: FastEmit regularisation as in NeMo: label arcs weigh 1 + lambda in the gradient of the token
            outputs, and the loss is multiplied by 1 + lambda.
        clamp: above 0, each clip's gradient of the token outputs of a cell is clamped to [-clamp, clamp], as in NeMo.
        teacher: adds the distillation from another network to each clip's loss (finetune/losses/distillation.py). Left
            out with a cell is at most its occupancy times its divergence. FastEmit does not multiply it; the clamp
            holds for the sum of both gradients.
        joint_memory_budget: bytes for the tensors of a block of cells. None: 32 MiB on the CPU; on a GPU 512 MiB, or
            in long clips as much as the lattice takes itself.
        operations: stand-ins for what reads values, where tensors have none (fake tensors).

    Returns:
        A scalar, or (B,) under "none": losses in nats, float32 (float64 for float64 inputs). A clip without any
        alignment (`feasible_clips`) is inf under "none", with zero gradient, and left out otherwise.

    Raises:
        ValueError: an argument has the wrong shape, type or range; names the argument and what was expected.
    """
    durations = check_durations(durations)
    V = check_shapes(enc_BTH, pred_BUH, weight_OH, bias_O, targets_BU, enc_lengths_B, target_lengths_B, len(durations))
    if teacher is not None:
        check_teacher(teacher, enc_BTH, pred_BUH, weight_OH)
    check_options(
        activation, dropout, sigma, omega, reduction, occupancy_threshold, fastemit_lambda, clamp, joint_memory_budget
    )
    frames, tokens, targets = operations.check_values(enc_BTH, targets_BU, enc_lengths_B, target_lengths_B, V)

    if durations and rnnt_draw is None and omega > 0:
        rnnt_draw = bool(torch.rand((), generator=generator) < omega)
    if rnnt_draw:
        durations = ()
    feasible = feasible_lengths(frames, tokens, durations)
    device = enc_BTH.device
    inputs = [x for x in (enc_BTH, pred_BUH, weight_OH, bias_O) if x is not None]
    compute_dtype = compute_dtype_of(device, inputs)
    kernels = operations.has_kernels(device, compute_dtype)
    plan = Plan(
        frames=[t if ok else 0 for t, ok in zip(frames, feasible)],
        tokens=[u if ok else 0 for u, ok in zip(tokens, feasible)],
        targets=targets,
        V=V,
        durations=durations,
        activation=activation,
        dropout=float(dropout),
        seed=operations.draw_seed() if dropout > 0 else 0,
        sigma=float(sigma) if durations else 0.0,
        occupancy_threshold=float(occupancy_threshold),
        fastemit_lambda=float(fastemit_lambda),
        clamp=float(clamp),
        budget=joint_memory_budget or block_budget(device, kernels, frames, tokens, len(durations)),
        compute_dtype=compute_dtype,
        needs_gradient=torch.is_grad_enabled() and any(x.requires_grad for x in inputs),
        distils=teacher is not None,
        kernels=kernels,
        operations=operations,
    )
    losses_B = FusedTransducer.apply(enc_BTH, pred_BUH, weight_OH, bias_O, plan, teacher)
    return _reduce(losses_B, feasible, tokens, reduction)


def _reduce(losses_B: torch.Tensor, feasible: list[bool], tokens: list[int], reduction: str) -> torch.Tensor:
    if reduction == "none":
        return losses_B
    device = losses_B.device
    if not all(feasible):
        losses_B = torch.where(upload(device, np.array(feasible))[0] > 0, losses_B, 0.0)
    clips = max(sum(feasible), 1)
    if reduction == "sum":
        return losses_B.sum()
    if reduction == "mean_batch":
        return losses_B.sum() / clips
    if reduction == "mean":
        (tokens_B,) = upload(device, np.array(tokens, dtype=np.int64).clip(1))
        return (losses_B / tokens_B).sum() / clips
    return losses_B.sum() / max(sum(u for u, ok in zip(tokens, feasible) if ok), 1)
