"""The alignment lattice of a transducer: which clips have an alignment, and forward-backward over the lattice's cells.

Shape suffixes: B batch, T encoder frames, U target tokens, D durations, N lattice cells, K diagonals.

A clip with T frames and U tokens has the cells (t, u), 0 <= t < T, 0 <= u <= U; cell (t, u) stands for "u tokens
emitted, the next decision is made at frame t". With the durations d of TDT (arXiv 2304.06795) the arcs out of a cell
are
    label  (t, u) -> (t + d, u + 1)   for t + d < T,                 log-probability label(t, u) + duration_d(t, u)
    blank  (t, u) -> (t + d, u)       for d > 0 and t + d < T,       log-probability blank(t, u) + duration_d(t, u)
    end    (t, U) -> (T, U)           for d > 0 and t + d = T,       as a blank
so an alignment ends with a blank that lands exactly on T. RNN-T (arXiv 1211.3711) is the same lattice with labels of
duration 0 and blanks of duration 1. Cells are listed clip by clip, t before u: cell = first_cell + t * (U + 1) + u.
"""

import functools
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch

from finetune.losses.compiled import compiled

# Below this many cells starting threads costs more than it saves.
CELLS_WORTH_A_THREAD = 8_192


class LatticeResult(NamedTuple):
    """What forward-backward finds; the posteriors are empty where they were not asked for.

    Attributes:
        losses_B: (B,) float64, -log P(targets) in nats; inf without an alignment.
        label_N, blank_N: (N,) posterior probability that an alignment leaves the cell by a label, by a blank; float64,
            by Triton rounded to the scores' dtype.
        duration_ND: (N, D) likewise, that it leaves the cell with the d-th duration.
    """

    losses_B: torch.Tensor
    label_N: torch.Tensor
    blank_N: torch.Tensor
    duration_ND: torch.Tensor


def check_durations(durations: Sequence[int]) -> tuple[int, ...]:
    """`durations` as a tuple of ints, () for plain RNN-T; raises ValueError when no blank could advance."""
    try:
        checked = tuple(int(d) for d in durations)
    except (TypeError, ValueError):
        raise ValueError(f"durations: expected a sequence of whole numbers of frames, got {durations!r}") from None
    distinct = len(set(checked)) == len(checked) and checked == tuple(durations)
    if checked and not (distinct and min(checked) >= 0 and max(checked) > 0):
        raise ValueError(
            "durations: expected distinct whole numbers >= 0 with at least one above 0 (or () for RNN-T), got "
            f"{durations!r}"
        )
    return checked


def feasible_clips(
    enc_lengths_B: torch.Tensor, target_lengths_B: torch.Tensor, durations: Sequence[int] = (0, 1, 2, 3, 4)
) -> torch.Tensor:
    """Which clips have at least one alignment.

    A clip is feasible when its T frames are a sum of U durations (its labels, in any order) and of one or more
    durations above 0 (its blanks, the last of which ends the clip).

    Args:
        enc_lengths_B: (B,) encoder frames of each clip, whole numbers >= 0.
        target_lengths_B: (B,) target tokens of each clip, whole numbers >= 0.
        durations: the model's durations in frames; () for plain RNN-T.

    Returns:
        (B,) bool, on the device of `enc_lengths_B`.

    Raises:
        ValueError: the lengths do not fit each other or are no whole numbers >= 0, or the durations cannot be used.
    """
    durations = check_durations(durations)
    if enc_lengths_B.dim() != 1 or enc_lengths_B.shape != target_lengths_B.shape:
        raise ValueError(
            "enc_lengths_B and target_lengths_B: expected two tensors of the same shape (B,), got "
            f"{tuple(enc_lengths_B.shape)} and {tuple(target_lengths_B.shape)}"
        )
    feasible = feasible_lengths(enc_lengths_B.long().tolist(), target_lengths_B.long().tolist(), durations)
    return torch.tensor(feasible, dtype=torch.bool, device=enc_lengths_B.device)


def feasible_lengths(frames: list[int], tokens: list[int], durations: tuple[int, ...]) -> list[bool]:
    """`feasible_clips` of lengths on the host, with durations that have been checked."""
    if not durations or {0, 1} <= set(durations):
        return [t > 0 for t in frames]
    if min(frames + tokens, default=0) < 0:
        raise ValueError(f"enc_lengths_B and target_lengths_B: expected lengths >= 0, got {frames} and {tokens}")
    # Bit t of a Python int says that t frames can be reached; shifting by d adds an arc of duration d.
    within = (1 << (max(frames, default=0) + 1)) - 1

    def after_an_arc(reached: int, durations: tuple[int, ...]) -> int:
        after = 0
        for d in durations:
            after |= (reached << d) & within
        return after

    advances = tuple(d for d in durations if d > 0)
    blanks = last = after_an_arc(1, advances)  # one blank or more
    while last := after_an_arc(last, advances) & ~blanks:
        blanks |= last
    reachable_by_tokens = [blanks]
    for _ in range(max(tokens, default=0)):
        reachable_by_tokens.append(after_an_arc(reachable_by_tokens[-1], durations))
    return [bool(reachable_by_tokens[u] >> t & 1) for t, u in zip(frames, tokens)]


def forward_backward(
    blank_N: torch.Tensor,
    label_N: torch.Tensor,
    duration_ND: torch.Tensor,
    frames_B: Sequence[int],
    tokens_B: Sequence[int],
    durations: Sequence[int],
    label_durations: int,
    *,
    posteriors: bool,
) -> LatticeResult:
    """Losses and arc posteriors of a batch of lattices, in float64, by Triton on a GPU and by numba on the CPU.

    Args:
        blank_N, label_N: (N,) log-probability of blank and of the next target token; label_N is not read where u = U.
        duration_ND: (N, D) log-probability of each duration.
        frames_B, tokens_B: T and U of each clip, on the host. A clip with T = 0 has no cells.
        durations: the D durations in frames.
        label_durations: how many of them labels may take, the first ones (RNN-T: durations (0, 1), of which 1).
        posteriors: also compute the posteriors that the gradient needs.
    """
    scores = blank_N, label_N, duration_ND
    lattices = frames_B, tokens_B, durations, label_durations, posteriors
    if blank_N.is_cuda and triton_works():
        from finetune.losses.lattice_triton import solve

        return LatticeResult(*solve(*scores, *lattices))
    blank, label, duration = (x.double().cpu() for x in scores)
    return LatticeResult(*(x.to(blank_N.device) for x in _solve_numba(blank, label, duration, *lattices)))


@functools.cache
def triton_works() -> bool:
    """Whether Triton is there and can compile for the GPU (it needs a C compiler); warns once where it cannot."""
    try:
        from finetune.losses.lattice_triton import solve

        one = torch.zeros(1, dtype=torch.float64, device="cuda")
        solve(one, one, one[:, None], [1], [0], (1,), 1, False)
    except Exception as error:
        warnings.warn(
            "the fused loss runs without its GPU kernels, several times slower: Triton fails with "
            f"{type(error).__name__}: {error}",
            stacklevel=2,
        )
        return False
    return True


@compiled
def _solve_clips(
    first_clip,
    last_clip,
    first_cell_B,
    frames_B,
    tokens_B,
    durations_D,
    label_durations,
    posteriors,
    blank_N,
    label_N,
    duration_ND,
    losses_B,
    label_post_N,
    blank_post_N,
    duration_post_ND,
):
    """Forward-backward for a range of clips, writing into the last four arrays ."""
    minus_inf = -np.inf
    D = durations_D.shape[0]
    for b in range(first_clip, last_clip):
        T = frames_B[b]
        W = tokens_B[b] + 1
        first = first_cell_B[b]
        losses_B[b] = np.inf
        if T <= 0:
            continue
        alpha = np.full(T * W + 1, minus_inf)  # the last entry is the end, behind a blank that lands on T
        terms = np.empty(2 * D)
        alpha[0] = 0.0
        for i in range(T * W + 1):
            t, u = i // W, i % W
            if i == T * W:
                u = W - 1
            if i > 0:
                n = 0
                top = minus_inf
                for k in range(D):
                    d = durations_D[k]
                    if d > t:
                        continue
                    source = (t - d) * W + u
                    if d > 0:
                        x = alpha[source] + blank_N[first + source] + duration_ND[first + source, k]
                        terms[n] = x
                        n += 1
                        if x > top or x != x:
                            top = x
                    if u > 0 and i < T * W and k < label_durations:
                        source -= 1
                        x = alpha[source] + label_N[first + source] + duration_ND[first + source, k]
                        terms[n] = x
                        n += 1
                        if x > top or x != x:
                            top = x
                if top != minus_inf:
                    total = 0.0
                    for j in range(n):
                        total += np.exp(terms[j] - top)
                    alpha[i] = top + np.log(total)
        log_z = alpha[T * W]
        losses_B[b] = -log_z
        if not posteriors or log_z == minus_inf:
            continue
        beta = np.full(T * W, minus_inf)
        for i in range(T * W - 1, -1, -1):
            t, u = i // W, i % W
            n = 0
            top = minus_inf
            blank = blank_N[first + i]
            label = label_N[first + i]
            for k in range(D):
                d = durations_D[k]
                duration = duration_ND[first + i, k]
                blank_term = minus_inf
                if d > 0 and t + d < T:
                    blank_term = beta[i + d * W] + blank + duration
                elif d > 0 and t + d == T and u == W - 1:
                    blank_term = blank + duration
                label_term = minus_inf
                if u < W - 1 and t + d < T and k < label_durations:
                    label_term = beta[i + d * W + 1] + label + duration
                terms[n] = blank_term
                terms[n + 1] = label_term
                n += 2
                if blank_term > top or blank_term != blank_term:
                    top = blank_term
                if label_term > top or label_term != label_term:
                    top = label_term
            if top == minus_inf:
                continue
            total = 0.0
            for j in range(n):
                terms[j] = np.exp(terms[j] - top)
                total += terms[j]
            beta[i] = top + np.log(total)
            # The arcs out of the cell share its occupancy in proportion to their terms: no further exponentials.
            share = np.exp(alpha[i] + beta[i] - log_z) / total
            for k in range(D):
                by_blank, by_label = share * terms[2 * k], share * terms[2 * k + 1]
                blank_post_N[first + i] += by_blank
                label_post_N[first + i] += by_label
                duration_post_ND[first + i, k] += by_blank + by_label


def _solve_numba(
    blank_N, label_N, duration_ND, frames_B, tokens_B, durations, label_durations, posteriors
) -> LatticeResult:
    B, N, D = len(frames_B), blank_N.shape[0], len(durations)
    frames, tokens = np.asarray(frames_B, dtype=np.int64), np.asarray(tokens_B, dtype=np.int64)
    first_cell = np.cumsum(frames * (tokens + 1)) - frames * (tokens + 1)
    size = N if posteriors else 0
    # Made by torch, so that an account of its tensors sees them.
    losses = torch.empty(B, dtype=torch.float64)
    label_post, blank_post = torch.zeros(2, size, dtype=torch.float64)
    duration_post = torch.zeros(size, D, dtype=torch.float64)

    def solve(first_clip: int, last_clip: int) -> None:
        _solve_clips(
            first_clip, last_clip, first_cell, frames, tokens, np.asarray(durations, dtype=np.int64),
            label_durations, posteriors,
            blank_N.contiguous().numpy(), label_N.contiguous().numpy(), duration_ND.contiguous().numpy(),
            losses.numpy(), label_post.numpy(), blank_post.numpy(), duration_post.numpy(),
        )  # fmt: skip

    # Plain threads over released-GIL code, not numba's own: those abort when two Python threads enter them or after a
    # fork.
    threads = min(torch.get_num_threads(), B, N // CELLS_WORTH_A_THREAD)
    if threads > 1:
        solve(0, 0)  # compile or load once, before the threads race for it
        cuts = np.searchsorted(first_cell, np.linspace(0, N, threads + 1)[1:-1])
        ranges = zip([0, *cuts.tolist()], [*cuts.tolist(), B])
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda clips: solve(*clips), ranges))
    else:
        solve(0, B)
    return LatticeResult(losses, label_post, blank_post, duration_post)
