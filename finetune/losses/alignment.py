"""Where in the audio the tokens of a given text are: best path and posteriors of a transducer's lattice, and of CTC's.

The arcs' log-probabilities are made as for the loss, block by block over the cells that alignments pass through
(band.py), and what forward-backward finds is summed by token: with the posterior label(t, u) that an alignment emits
token u at frame t, whose sum over t is 1,
    mean_u = sum_t t label(t, u)                      log_p_u = sum_t label(t, u) log p(token u | t, u)
The means of later tokens are never earlier, since no alignment goes back. The best path is Viterbi's over the cells
that hold all but a part in 1e14 of a clip's alignments.

Shape suffixes: B batch, T encoder frames, U target tokens, V vocabulary, D durations, K kept cells of a clip, S states
of CTC (2 U + 1: a blank before, between and behind the tokens).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from finetune.losses.band import band_lattice
from finetune.losses.checks import check_shapes
from finetune.losses.compiled import compiled
from finetune.losses.ctc import feasible_ctc_clips
from finetune.losses.joint import Joint, Plan, block_budget, compute_dtype_of
from finetune.losses.lattice import check_durations, feasible_lengths
from finetune.losses.operations import REAL, Operations
from finetune.losses.transfers import on_host


class Alignment(NamedTuple):
    """Of one clip; U tokens, float64 or int64, times in encoder frames."""

    loss: float
    """-log P(text) over all alignments, in nats."""
    best_loss: float
    """-log P(best path); not below `loss`."""
    frame_U: np.ndarray
    """At which the best path emits each token, counted from 0; with CTC the first of the token's frames."""
    duration_U: np.ndarray
    """Frames that the best path goes on by with the token: its duration of TDT, 0 of RNN-T, its frames of CTC."""
    mean_U: np.ndarray
    """Posterior mean of the frame."""
    spread_U: np.ndarray
    """Posterior standard deviation of the frame."""
    near_U: np.ndarray
    """Posterior probability that the frame is at most one from `frame_U`."""
    log_p_U: np.ndarray
    """Posterior mean of the token's log-probability, without its duration's; with CTC of its surest frame."""
    blank_log_p_P: np.ndarray
    """Posterior mean of the summed log-probabilities of the blanks before each token and behind the last, (U + 1,)."""


def align_transducer(
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
    joint_memory_budget: int | None = None,
    operations: Operations = REAL,
) -> list[Alignment | None]:
    """Align the targets of each clip with its frames; arguments as those of `finetune.losses.fused_tdt_loss`, whose
    memory it takes.

    Returns:
        One a clip; None where no alignment exists, or none has a probability.

    Raises:
        ValueError: an argument has the wrong shape, type or range.
    """
    durations = check_durations(durations)
    V = check_shapes(enc_BTH, pred_BUH, weight_OH, bias_O, targets_BU, enc_lengths_B, target_lengths_B, len(durations))
    frames, tokens, targets = operations.check_values(enc_BTH, targets_BU, enc_lengths_B, target_lengths_B, V)
    feasible = feasible_lengths(frames, tokens, durations)
    frames = [t if ok else 0 for t, ok in zip(frames, feasible)]
    tokens = [u if ok else 0 for u, ok in zip(tokens, feasible)]
    compute_dtype = compute_dtype_of(
        enc_BTH.device, [x for x in (enc_BTH, pred_BUH, weight_OH, bias_O) if x is not None]
    )
    kernels = operations.has_kernels(enc_BTH.device, compute_dtype)
    plan = Plan(
        frames=frames,
        tokens=tokens,
        targets=targets,
        V=V,
        durations=durations,
        activation=activation,
        dropout=0.0,
        seed=0,
        sigma=0.0,
        occupancy_threshold=0.0,
        fastemit_lambda=0.0,
        clamp=0.0,
        budget=joint_memory_budget or block_budget(enc_BTH.device, kernels, frames, tokens, len(durations)),
        compute_dtype=compute_dtype,
        needs_gradient=False,
        distils=False,
        aligns=True,
        kernels=kernels,
        operations=operations,
    )
    with torch.no_grad(), torch.autocast(enc_BTH.device.type, enabled=False):
        joint = Joint(plan, enc_BTH, pred_BUH, weight_OH, bias_O)
        losses_B, kept = band_lattice(joint, torch.finfo(plan.sum_dtype).eps ** 2)
        assert kept is not None
        assert kept.scores is not None
        log_p_KD = torch.column_stack(
            [
                kept.scores.blank_N - kept.lse_N,
                kept.scores.label_N - kept.lse_N,
                kept.blank_N,
                kept.label_N,
                kept.scores.duration_ND,
            ]
        )
    numbers = kept.number_N.cpu().numpy()
    log_p, losses = log_p_KD.cpu().double().numpy(), losses_B.cpu().tolist()
    ends = np.searchsorted(numbers, plan.ends)
    found: list[Alignment | None] = []
    for b, (T, U, loss) in enumerate(zip(frames, tokens, losses)):
        own = slice(ends[b - 1] if b else 0, ends[b])
        if not np.isfinite(loss):
            found.append(None)
            continue
        first_cell = plan.ends[b] - T * (U + 1)
        path_2U, sums_4U, blank_P = np.zeros((2, U), dtype=np.int64), np.zeros((4, U)), np.zeros(U + 1)
        best = _follow_cells(
            numbers[own] - first_cell, log_p[own], T, U + 1, np.array(durations or (0, 1)), len(durations) or 1,
            path_2U, sums_4U, blank_P,
        )  # fmt: skip
        found.append(_alignment(loss, best, path_2U, sums_4U, blank_P))
    return found


def align_ctc(
    log_probs_BTV: torch.Tensor,
    targets_BU: torch.Tensor,
    enc_lengths_B: torch.Tensor,
    target_lengths_B: torch.Tensor,
) -> list[Alignment | None]:
    """Align the targets of each clip with its frames by CTC; arguments as those of `finetune.losses.ctc_losses`.

    Returns:
        One a clip; None where no alignment exists, or none has a probability.
    """
    feasible = feasible_ctc_clips(*(x.cpu() for x in (enc_lengths_B, targets_BU, target_lengths_B))).tolist()
    targets, frames, tokens = on_host(targets_BU, enc_lengths_B, target_lengths_B)
    found: list[Alignment | None] = []
    for b, (T, U, ok) in enumerate(zip(frames.tolist(), tokens.tolist(), feasible)):
        if not ok:
            found.append(None)
            continue
        states = np.full(2 * U + 1, log_probs_BTV.size(-1) - 1)
        states[1::2] = targets[b, :U]
        index_S = torch.from_numpy(states).to(log_probs_BTV.device)
        log_p_TS = log_probs_BTV[b, :T].index_select(1, index_S).double().cpu().numpy()
        path_2U, sums_4U, blank_P = np.zeros((2, U), dtype=np.int64), np.zeros((4, U)), np.zeros(U + 1)
        loss, best = _follow_states(log_p_TS, states, path_2U, sums_4U, blank_P)
        found.append(_alignment(loss, best, path_2U, sums_4U, blank_P) if np.isfinite(loss) else None)
    return found


def _alignment(loss: float, best: float, path_2U: np.ndarray, sums_4U: np.ndarray, blank_P: np.ndarray) -> Alignment:
    mean_U, square_U, near_U, log_p_U = sums_4U
    spread_U = np.sqrt(np.maximum(square_U, 0.0))
    return Alignment(loss, -best, path_2U[0], path_2U[1], mean_U, spread_U, near_U.clip(0, 1), log_p_U, blank_P)


@compiled
def _follow_cells(number_K, scores_KC, T, W, durations_D, label_durations, path_2U, sums_4U, blank_P):
    """Viterbi over a clip's kept cells, in their order, then the sums over posteriors; returns the best score.

    `scores_KC` has the log-probabilities of blank and label, the posteriors of blank and label, and the D
    log-probabilities of durations. `path_2U` gets frames and durations, `sums_4U` means, variances, probabilities near
    the path and log-probabilities.
    """
    K = number_K.shape[0]
    D = durations_D.shape[0]
    place = np.full(T * W, -1)
    for k in range(K):
        place[number_K[k]] = k
    best = np.full(K, -np.inf)
    source = np.full(K, -1)
    advance = np.zeros(K, dtype=np.int64)
    end, last = -np.inf, -1
    best[0] = 0.0
    for k in range(K):
        t, u = number_K[k] // W, number_K[k] % W
        if best[k] == -np.inf:
            continue
        for i in range(D):
            d = durations_D[i]
            if t + d < T:
                if d > 0:
                    to = place[number_K[k] + d * W]
                    x = best[k] + scores_KC[k, 0] + scores_KC[k, 4 + i]
                    if to >= 0 and x > best[to]:
                        best[to], source[to], advance[to] = x, k, d
                if u < W - 1 and i < label_durations:
                    to = place[number_K[k] + d * W + 1]
                    x = best[k] + scores_KC[k, 1] + scores_KC[k, 4 + i]
                    if to >= 0 and x > best[to]:
                        best[to], source[to], advance[to] = x, k, d
            elif t + d == T and u == W - 1:
                x = best[k] + scores_KC[k, 0] + scores_KC[k, 4 + i]
                if x > end:
                    end, last = x, k
    k = last
    while k >= 0 and source[k] >= 0:
        before = source[k]
        u = number_K[before] % W
        if number_K[k] % W != u:
            path_2U[0, u] = number_K[before] // W
            path_2U[1, u] = advance[k]
        k = before
    total = np.zeros(W)
    for k in range(K):
        t, u = number_K[k] // W, number_K[k] % W
        blank_p, label_p = scores_KC[k, 2], scores_KC[k, 3]
        if blank_p > 0:
            blank_P[u] += blank_p * scores_KC[k, 0]
        if u < W - 1 and label_p > 0:
            total[u] += label_p
            sums_4U[0, u] += label_p * t
            sums_4U[3, u] += label_p * scores_KC[k, 1]
            if abs(t - path_2U[0, u]) <= 1:
                sums_4U[2, u] += label_p
    for u in range(W - 1):
        sums_4U[0, u] /= total[u]
        sums_4U[2, u] /= total[u]
        sums_4U[3, u] /= total[u]
    for k in range(K):
        t, u = number_K[k] // W, number_K[k] % W
        if u < W - 1:
            sums_4U[1, u] += scores_KC[k, 3] / total[u] * (t - sums_4U[0, u]) ** 2
    return end


@compiled
def _add(a, b):
    """log(exp(a) + exp(b))."""
    top = max(a, b)
    return top if top == -np.inf else top + np.log(np.exp(a - top) + np.exp(b - top))


@compiled
def _follow_states(log_p_TS, token_S, path_2U, sums_4U, blank_P):
    """Forward-backward and Viterbi over the states of CTC; returns -log P and the best score. Outputs as above."""
    T, S = log_p_TS.shape
    minus_inf = -np.inf
    alpha = np.full((T, S), minus_inf)
    beta = np.full((T, S), minus_inf)
    best = np.full((T, S), minus_inf)
    step = np.zeros((T, S), dtype=np.int8)
    for s in range(min(2, S)):
        alpha[0, s] = best[0, s] = log_p_TS[0, s]
    for t in range(1, T):
        for s in range(S):
            total = top = minus_inf
            for back in range(min(2, s) + 1):
                if back == 2 and (s % 2 == 0 or token_S[s] == token_S[s - 2]):
                    continue
                total = _add(total, alpha[t - 1, s - back])
                if best[t - 1, s - back] > top:
                    top = best[t - 1, s - back]
                    step[t, s] = back
            alpha[t, s] = total + log_p_TS[t, s]
            best[t, s] = top + log_p_TS[t, s]
    for s in range(max(S - 2, 0), S):
        beta[T - 1, s] = 0.0
    for t in range(T - 2, -1, -1):
        for s in range(S):
            total = minus_inf
            for on in range(min(2, S - 1 - s) + 1):
                if on == 2 and (s % 2 == 0 or token_S[s] == token_S[s + 2]):
                    continue
                total = _add(total, beta[t + 1, s + on] + log_p_TS[t + 1, s + on])
            beta[t, s] = total
    log_z = alpha[T - 1, S - 1]
    s = S - 1
    if S > 1:
        log_z = _add(log_z, alpha[T - 1, S - 2])
        if best[T - 1, S - 2] > best[T - 1, S - 1]:
            s = S - 2
    end = best[T - 1, s]
    if log_z == minus_inf:
        return np.inf, end
    for u in range(S // 2):
        sums_4U[3, u] = minus_inf
    for t in range(T - 1, -1, -1):
        if s % 2:
            u = s // 2
            path_2U[0, u] = t
            path_2U[1, u] += 1
            sums_4U[3, u] = max(sums_4U[3, u], log_p_TS[t, s])
        s -= step[t, s]
    total = np.zeros(S // 2)
    for turn in range(2):
        for t in range(T):
            for s in range(S):
                p = np.exp(alpha[t, s] + beta[t, s] - log_z)
                if p == 0:
                    continue
                u = s // 2
                if s % 2 == 0:
                    if turn == 0:
                        blank_P[u] += p * log_p_TS[t, s]
                    continue
                if t > 0:  # entered here, not stayed in
                    p -= np.exp(alpha[t - 1, s] + log_p_TS[t, s] + beta[t, s] - log_z)
                if turn == 1:
                    sums_4U[1, u] += p / total[u] * (t - sums_4U[0, u]) ** 2
                    continue
                total[u] += p
                sums_4U[0, u] += p * t
                if abs(t - path_2U[0, u]) <= 1:
                    sums_4U[2, u] += p
        if turn == 0:
            for u in range(S // 2):
                sums_4U[0, u] /= total[u]
                sums_4U[2, u] /= total[u]
    return -log_z, end
