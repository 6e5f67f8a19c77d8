"""Forward-backward over a batch of lattices on a GPU: two launches, whatever the number of clips.

The first gives two programs to each clip, one that walks the diagonals k = t + u upwards (alpha) and one that walks
them downwards (beta); the cells of a diagonal do not depend on each other and fill the program's lanes. The second
launch takes the posteriors of all cells at once. Lattice and names are those of lattice.py. With TRITON_INTERPRET=1 in
the environment everything runs on the CPU.

Shape suffixes: B batch, N lattice cells, D durations.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

CELLS_A_PROGRAM = 256


@triton.jit
def _add(top, total, x, ok):
    """Takes exp(x) into the running sum exp(top) * total where ok."""
    x = tl.where(ok, x, float("-inf"))
    # A comparison that is false for what is no number keeps it: it reaches the sum as a term.
    higher = tl.where(x > top, x, top)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    return higher, total * tl.exp(top - base) + tl.exp(x - base)


@triton.jit
def _log_sum(top, total):
    return tl.where(total == 0.0, float("-inf"), top + tl.log(tl.where(total == 0.0, 1.0, total)))


@triton.jit
def _walk(
    blank_N,
    label_N,
    duration_ND,
    alpha_N,
    beta_N,
    log_z_B,
    first_B,
    frames_B,
    tokens_B,
    durations_D,
    D: tl.constexpr,
    LABEL_D: tl.constexpr,
    LANES: tl.constexpr,
):
    b = tl.program_id(0)
    T = tl.load(frames_B + b)
    U = tl.load(tokens_B + b)
    first = tl.load(first_B + b)
    W = U + 1
    u = tl.arange(0, LANES).to(tl.int64)
    zero = tl.zeros([LANES], dtype=tl.float64)
    if tl.program_id(1) == 0:
        k = T * 0
        while k < T + U:  # not range: the interpreter cannot take its end from a tensor under numpy 2
            t = k - u
            inside = (t >= 0) & (t < T) & (u <= U)
            cell = first + t * W + u
            top, total = zero + float("-inf"), zero
            for j in tl.static_range(D):
                d = tl.load(durations_D + j)
                source = cell - d * W
                ok = inside & (t >= d) & (d > 0)
                x = tl.load(alpha_N + source, mask=ok, other=0.0) + tl.load(blank_N + source, mask=ok, other=0.0)
                x += tl.load(duration_ND + source * D + j, mask=ok, other=0.0)
                top, total = _add(top, total, x, ok)
                if j < LABEL_D:
                    source -= 1
                    ok = inside & (t >= d) & (u > 0)
                    x = tl.load(alpha_N + source, mask=ok, other=0.0) + tl.load(label_N + source, mask=ok, other=0.0)
                    x += tl.load(duration_ND + source * D + j, mask=ok, other=0.0)
                    top, total = _add(top, total, x, ok)
            alpha = tl.where(cell == first, 0.0, _log_sum(top, total))
            tl.store(alpha_N + cell, alpha, mask=inside)
            tl.debug_barrier()  # the next diagonal reads what other threads have written
            k += 1
        # The end lies one frame behind the last, reached by blanks that land on it; one lane a duration.
        j = tl.arange(0, LANES)
        d = tl.load(durations_D + j, mask=j < D, other=0)
        ok = (j < D) & (d > 0) & (d <= T)
        source = first + (T - d) * W + U
        x = tl.load(alpha_N + source, mask=ok, other=0.0) + tl.load(blank_N + source, mask=ok, other=0.0)
        x += tl.load(duration_ND + source * D + j, mask=ok, other=0.0)
        x = tl.where(ok, x, float("-inf"))
        top = tl.max(x, 0)
        total = tl.sum(tl.exp(x - tl.where(top == float("-inf"), 0.0, top)), 0)
        tl.store(log_z_B + b, _log_sum(top, total))
    else:
        k = T + U - 1
        while k >= 0:
            t = k - u
            inside = (t >= 0) & (t < T) & (u <= U)
            cell = first + t * W + u
            blank = tl.load(blank_N + cell, mask=inside, other=0.0)
            label = tl.load(label_N + cell, mask=inside & (u < U), other=0.0)
            top, total = zero + float("-inf"), zero
            for j in tl.static_range(D):
                d = tl.load(durations_D + j)
                target = cell + d * W
                duration = tl.load(duration_ND + cell * D + j, mask=inside, other=0.0)
                goes_on = inside & (d > 0) & (t + d < T)
                ends = inside & (d > 0) & (t + d == T) & (u == U)
                x = tl.load(beta_N + target, mask=goes_on, other=0.0) + blank + duration
                top, total = _add(top, total, x, goes_on | ends)
                if j < LABEL_D:
                    ok = inside & (t + d < T) & (u < U)
                    x = tl.load(beta_N + target + 1, mask=ok, other=0.0) + label + duration
                    top, total = _add(top, total, x, ok)
            tl.store(beta_N + cell, _log_sum(top, total), mask=inside)
            tl.debug_barrier()
            k -= 1


@triton.jit
def _posteriors(
    blank_N,
    label_N,
    duration_ND,
    alpha_N,
    beta_N,
    log_z_B,
    clip_N,
    first_B,
    frames_B,
    tokens_B,
    durations_D,
    label_post_N,
    blank_post_N,
    duration_post_ND,
    N,
    D: tl.constexpr,
    LABEL_D: tl.constexpr,
    LANES: tl.constexpr,
):
    cell = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    inside = cell < N
    b = tl.load(clip_N + cell, mask=inside, other=0)
    T = tl.load(frames_B + b, mask=inside, other=1)
    U = tl.load(tokens_B + b, mask=inside, other=0)
    within = cell - tl.load(first_B + b, mask=inside, other=0)
    W = U + 1
    t = within // W
    u = within - t * W
    log_z = tl.load(log_z_B + b, mask=inside, other=0.0)
    possible = inside & (log_z != float("-inf"))
    blank = tl.load(blank_N + cell, mask=inside, other=0.0)
    label = tl.load(label_N + cell, mask=inside & (u < U), other=0.0)
    before = tl.load(alpha_N + cell, mask=inside, other=0.0) - tl.where(possible, log_z, 0.0)
    by_blanks = tl.zeros([LANES], dtype=tl.float64)
    by_labels = tl.zeros([LANES], dtype=tl.float64)
    for j in tl.static_range(D):
        d = tl.load(durations_D + j)
        duration = tl.load(duration_ND + cell * D + j, mask=inside, other=0.0)
        goes_on = possible & (d > 0) & (t + d < T)
        ends = possible & (d > 0) & (t + d == T) & (u == U)
        after = tl.load(beta_N + cell + d * W, mask=goes_on, other=0.0)
        by_blank = tl.where(goes_on | ends, tl.exp(before + blank + duration + after), 0.0)
        by_blanks += by_blank
        by_duration = by_blank
        if j < LABEL_D:
            ok = possible & (t + d < T) & (u < U)
            after = tl.load(beta_N + cell + d * W + 1, mask=ok, other=0.0)
            by_label = tl.where(ok, tl.exp(before + label + duration + after), 0.0)
            by_labels += by_label
            by_duration += by_label
        tl.store(duration_post_ND + cell * D + j, by_duration, mask=inside)
    tl.store(label_post_N + cell, by_labels, mask=inside)
    tl.store(blank_post_N + cell, by_blanks, mask=inside)


def warps_for(lanes: int) -> int:
    """Warps of `_walk`, which has four float64 numbers and five addresses a lane to hold in registers."""
    return min(16 if lanes >= 2048 else 8, max(1, lanes // 64))


def solve(
    blank_N: torch.Tensor,
    label_N: torch.Tensor,
    duration_ND: torch.Tensor,
    frames_B: Sequence[int],
    tokens_B: Sequence[int],
    durations: Sequence[int],
    label_durations: int,
    posteriors: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(B,) losses and (N,) label, (N,) blank and (N, D) duration posteriors (empty where not asked for), all float64.

    The arguments are those of `finetune.losses.lattice.forward_backward`, with float64 log-probabilities.
    """
    device, B, N, D = blank_N.device, len(frames_B), blank_N.shape[0], len(durations)
    blank_N, label_N, duration_ND = blank_N.contiguous(), label_N.contiguous(), duration_ND.contiguous()
    frames = torch.tensor(list(frames_B), dtype=torch.int64)
    tokens = torch.tensor(list(tokens_B), dtype=torch.int64)
    cells = frames * (tokens + 1)
    lengths = torch.stack([frames, tokens, cells.cumsum(0) - cells]).to(device, non_blocking=True)
    durations_D = torch.tensor(list(durations), dtype=torch.int64).to(device, non_blocking=True)
    alpha_N, beta_N = torch.empty(2, N, dtype=torch.float64, device=device)
    log_z_B = torch.full((B,), float("-inf"), dtype=torch.float64, device=device)
    size = N if posteriors else 0
    label_post_N, blank_post_N = torch.empty(2, size, dtype=torch.float64, device=device)
    duration_post_ND = torch.empty(size, D, dtype=torch.float64, device=device)
    if N == 0:
        return -log_z_B, label_post_N, blank_post_N, duration_post_ND
    lanes = max(int(triton.next_power_of_2(max(max(tokens_B) + 1, D))), 32)
    with torch.cuda.device_of(blank_N):  # Triton launches on the current device
        _walk[(B, 2 if posteriors else 1)](
            blank_N, label_N, duration_ND, alpha_N, beta_N, log_z_B, lengths[2], lengths[0], lengths[1], durations_D,
            D=D, LABEL_D=label_durations, LANES=lanes,
            num_warps=warps_for(lanes),  # pyright: ignore[reportCallIssue]  # an option of the launch
        )  # fmt: skip
        if posteriors:
            clip_N = torch.repeat_interleave(torch.arange(B, device=device), cells.to(device), output_size=N)
            _posteriors[(triton.cdiv(N, CELLS_A_PROGRAM),)](
                blank_N, label_N, duration_ND, alpha_N, beta_N, log_z_B, clip_N,
                lengths[2], lengths[0], lengths[1], durations_D, label_post_N, blank_post_N, duration_post_ND, N,
                D=D, LABEL_D=label_durations, LANES=CELLS_A_PROGRAM,
                num_warps=4,  # pyright: ignore[reportCallIssue]  # an option of the launch
            )  # fmt: skip
    return -log_z_B, label_post_N, blank_post_N, duration_post_ND
