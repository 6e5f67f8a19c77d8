"""Forward-backward over a batch of lattices on a GPU: three launches, whatever the number of clips.

A probability is held as m 2^e, m in float64 and e a 32-bit integer, so that none underflows. The first launch takes
the exponential of each of a cell's log-probabilities, once. The second gives two programs to each clip, one that walks
the diagonals k = t + u upwards (alpha) and one that walks them downwards (beta); the cells of a diagonal do not depend
on each other and fill the program's lanes. It only multiplies and adds, two float64 operations an arc, which even a
card with a 64th of its float32 rate in float64 does while it waits for memory. The third takes the posteriors of all
cells at once. Lattice and names are those of lattice.py.

Inside, cell (t, u) of a clip lies at ((t + u) mod T) (U + 1) + u: neighbours on a diagonal are neighbours in memory,
and no place is empty. With TRITON_INTERPRET=1 in the environment everything runs on the CPU.

Shape suffixes: B batch, N lattice cells, D durations, P planes: 0 blank, 1 label, 2 alpha blank, 3 alpha label, 4
beta, 5 and on the durations.
"""

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from finetune.losses.transfers import send

CELLS_A_PROGRAM = 256
PLANES = 5  # beside the durations
SLICES = ["tokens_B", "label_N", "blank_N"]  # which begin anywhere
NONE: tl.constexpr = tl.constexpr(-(2**28))  # exponent of 0: the sum of any three stays below each real one
DURATION_PLANES: tl.constexpr = tl.constexpr(5)


@triton.jit
def _power(e):
    """2^e in float64 for -1023 < e < 1024, 0 below."""
    return ((tl.maximum(e, -1023) + 1023).to(tl.int64) << 52).to(tl.float64, bitcast=True)


@triton.jit
def _split(x):
    """exp(x) as 1 <= m <= 2 and e; what is neither finite nor -inf becomes a mantissa that is no number."""
    x = x.to(tl.float64)
    finite = x < 1e7  # beyond, e would overflow
    y = tl.where(finite, tl.maximum(x, -1e7), 0.0) * 1.4426950408889634
    e = tl.floor(y)
    m = tl.exp2(y - e)
    zero = x == float("-inf")
    return tl.where(zero, 0.0, tl.where(finite, m, float("nan"))), tl.where(zero, NONE, e.to(tl.int32))


@triton.jit
def _normal(m, e):
    """m 2^e of a sum with 1 <= mantissa < 2; 0 has the exponent NONE."""
    bits = m.to(tl.int64, bitcast=True)
    usual = m > 0.0
    fraction = ((bits & 0xFFFFFFFFFFFFF) | 0x3FF0000000000000).to(tl.float64, bitcast=True)
    e = tl.where(usual, e + ((bits >> 52) - 1023).to(tl.int32), tl.where(m == 0.0, NONE, 0))
    return tl.where(usual, fraction, m), e


@triton.jit
def _add(total, top, m, e):
    """total 2^top + m 2^e, with the higher of the exponents."""
    rises = e > top
    low = _power(-tl.abs(e - top))
    return tl.where(rises, m, total) + tl.where(rises, total, m) * low, tl.maximum(top, e)


@triton.jit
def _load(m_PN, e_PN, place, ok):
    return tl.load(m_PN + place, mask=ok, other=0.0), tl.load(e_PN + place, mask=ok, other=NONE)


@triton.jit
def _place(i, T, W):
    """t and u of a clip's i-th place."""
    row = i // W
    u = i - row * W
    t = (row - u) % T
    return tl.where(t < 0, t + T, t), u


@triton.jit(do_not_specialize=["N"], do_not_specialize_on_alignment=SLICES)
def _arcs(
    blank_N, label_N, duration_ND, m_PN, e_PN, first_B, frames_B, tokens_B, N, D: tl.constexpr, LANES: tl.constexpr
):
    b = tl.program_id(1)
    N = N.to(tl.int64)
    T = tl.load(frames_B + b)
    W = tl.load(tokens_B + b) + 1
    first = tl.load(first_B + b)
    i = tl.program_id(0) * LANES + tl.arange(0, LANES)
    inside = i < T * W
    t, u = _place(i, tl.maximum(T, 1), W)  # pyright: ignore[reportGeneralTypeIssues]
    cell = first + t * W + u
    m, e = _split(tl.load(blank_N + cell, mask=inside, other=0.0))
    tl.store(m_PN + first + i, m, mask=inside)
    tl.store(e_PN + first + i, e, mask=inside)
    m, e = _split(tl.load(label_N + cell, mask=inside & (u < W - 1), other=float("-inf")))
    tl.store(m_PN + N + first + i, m, mask=inside)
    tl.store(e_PN + N + first + i, e, mask=inside)
    for j in tl.static_range(D):
        m, e = _split(tl.load(duration_ND + cell * D + j, mask=inside, other=0.0))
        tl.store(m_PN + (DURATION_PLANES + j) * N + first + i, m, mask=inside)
        tl.store(e_PN + (DURATION_PLANES + j) * N + first + i, e, mask=inside)


@triton.jit(do_not_specialize=["N"], do_not_specialize_on_alignment=SLICES)
def _walk(
    m_PN,
    e_PN,
    z_m_B,
    z_e_B,
    losses_B,
    first_B,
    frames_B,
    tokens_B,
    N,
    DURATIONS: tl.constexpr,
    D: tl.constexpr,
    LABEL_D: tl.constexpr,
    LANES: tl.constexpr,
):
    b = tl.program_id(0)
    N = N.to(tl.int64)
    T = tl.load(frames_B + b)
    U = tl.load(tokens_B + b)
    first = tl.load(first_B + b)
    m_PN += first
    e_PN += first
    W = U + 1
    u = tl.arange(0, LANES)
    zero = tl.zeros([LANES], tl.float64)
    none = tl.full([LANES], NONE, tl.int32)
    if tl.program_id(1) == 0:
        k = T * 0
        row = T * 0  # k mod T
        while k < T + U:  # not range: the interpreter cannot take its end from a tensor under numpy 2
            t = k - u
            inside = (t >= 0) & (t < T) & (u <= U)
            total, top = zero, none
            for j in tl.static_range(D):
                d = DURATIONS[j]
                if d > 0:
                    source = tl.where(row < d, row - d + T, row - d) * W + u
                    ok = inside & (t >= d)
                    m, e = _load(m_PN + 2 * N, e_PN + 2 * N, source, ok)
                    m_d, e_d = _load(m_PN + (DURATION_PLANES + j) * N, e_PN + (DURATION_PLANES + j) * N, source, ok)
                    total, top = _add(total, top, m * m_d, e + e_d)
                if j < LABEL_D:
                    source = tl.where(row < d + 1, row - d - 1 + T, row - d - 1) * W + u - 1
                    ok = inside & (t >= d) & (u > 0)
                    m, e = _load(m_PN + 3 * N, e_PN + 3 * N, source, ok)
                    m_d, e_d = _load(m_PN + (DURATION_PLANES + j) * N, e_PN + (DURATION_PLANES + j) * N, source, ok)
                    total, top = _add(total, top, m * m_d, e + e_d)
            alpha, e_alpha = _normal(total, top)
            alpha = tl.where(k + u == 0, 1.0, alpha)
            e_alpha = tl.where(k + u == 0, 0, e_alpha)
            place = row * W + u
            m, e = _load(m_PN, e_PN, place, inside)
            tl.store(m_PN + 2 * N + place, alpha * m, mask=inside)
            tl.store(e_PN + 2 * N + place, e_alpha + e, mask=inside)
            m, e = _load(m_PN + N, e_PN + N, place, inside)
            tl.store(m_PN + 3 * N + place, alpha * m, mask=inside)
            tl.store(e_PN + 3 * N + place, e_alpha + e, mask=inside)
            tl.debug_barrier()  # the next diagonal reads what other threads have written
            k += 1
            row = tl.where(row + 1 == T, 0, row + 1)
        # The end lies one frame behind the last, reached by blanks that land on it.
        z, z_e = tl.full([], 0.0, tl.float64), tl.full([], NONE, tl.int32)
        for j in tl.static_range(D):
            d = DURATIONS[j]
            if d > 0:
                source = (T - d + U) % tl.maximum(T, 1) * W + U
                m, e = _load(m_PN + 2 * N, e_PN + 2 * N, source, d <= T)
                m_d, e_d = _load(m_PN + (DURATION_PLANES + j) * N, e_PN + (DURATION_PLANES + j) * N, source, d <= T)
                z, z_e = _add(z, z_e, m * m_d, e + e_d)
        z, z_e = _normal(z, z_e)
        tl.store(z_m_B + b, z)
        tl.store(z_e_B + b, z_e)
        log_z = tl.log(tl.where(z == 0.0, 1.0, z)) + z_e.to(tl.float64) * 0.6931471805599453
        tl.store(losses_B + b, tl.where(z == 0.0, float("inf"), -log_z))
    else:
        k = T + U - 1
        row = k % tl.maximum(T, 1)
        while k >= 0:
            t = k - u
            inside = (t >= 0) & (t < T) & (u <= U)
            place = row * W + u
            blank, blank_e, label, label_e = zero, none, zero, none
            for j in tl.static_range(D):
                d = DURATIONS[j]
                m_d, e_d = _load(m_PN + (DURATION_PLANES + j) * N, e_PN + (DURATION_PLANES + j) * N, place, inside)
                if d > 0:
                    target = tl.where(row + d >= T, row + d - T, row + d) * W + u
                    m, e = _load(m_PN + 4 * N, e_PN + 4 * N, target, inside & (t + d < T))
                    ends = inside & (t + d == T) & (u == U)
                    m = tl.where(ends, 1.0, m)
                    e = tl.where(ends, 0, e)
                    blank, blank_e = _add(blank, blank_e, m * m_d, e + e_d)
                if j < LABEL_D:
                    target = tl.where(row + d + 1 >= T, row + d + 1 - T, row + d + 1) * W + u + 1
                    m, e = _load(m_PN + 4 * N, e_PN + 4 * N, target, inside & (t + d < T) & (u < U))
                    label, label_e = _add(label, label_e, m * m_d, e + e_d)
            m, e = _load(m_PN, e_PN, place, inside)
            m_l, e_l = _load(m_PN + N, e_PN + N, place, inside)
            total, top = _add(blank * m, blank_e + e, label * m_l, label_e + e_l)
            beta, e_beta = _normal(total, top)
            tl.store(m_PN + 4 * N + place, beta, mask=inside)
            tl.store(e_PN + 4 * N + place, e_beta, mask=inside)
            tl.debug_barrier()
            k -= 1
            row = tl.where(row == 0, T - 1, row - 1)


@triton.jit(do_not_specialize=["N"], do_not_specialize_on_alignment=SLICES)
def _posteriors(
    m_PN,
    e_PN,
    z_m_B,
    z_e_B,
    first_B,
    frames_B,
    tokens_B,
    label_N,
    blank_N,
    duration_ND,
    N,
    DURATIONS: tl.constexpr,
    D: tl.constexpr,
    LABEL_D: tl.constexpr,
    LANES: tl.constexpr,
):
    b = tl.program_id(1)
    N = N.to(tl.int64)
    T = tl.load(frames_B + b)
    U = tl.load(tokens_B + b)
    first = tl.load(first_B + b)
    m_PN += first
    e_PN += first
    W = U + 1
    i = tl.program_id(0) * LANES + tl.arange(0, LANES)
    inside = i < T * W
    t, u = _place(i, tl.maximum(T, 1), W)  # pyright: ignore[reportGeneralTypeIssues]
    row = i // W
    z = tl.load(z_m_B + b)
    z_e = tl.load(z_e_B + b)
    possible = tl.where(z == 0.0, i < 0, inside)
    scale = 1.0 / tl.where(z == 0.0, 1.0, z)
    blank, blank_e = _load(m_PN + 2 * N, e_PN + 2 * N, i, possible)
    label, label_e = _load(m_PN + 3 * N, e_PN + 3 * N, i, possible)
    blank, label = blank * scale, label * scale
    by_blanks = tl.zeros([LANES], tl.float64)
    by_labels = tl.zeros([LANES], tl.float64)
    cell = first + t * W + u
    dtype = label_N.dtype.element_ty
    for j in tl.static_range(D):
        d = DURATIONS[j]
        m_d, e_d = _load(m_PN + (DURATION_PLANES + j) * N, e_PN + (DURATION_PLANES + j) * N, i, possible)
        e_d -= z_e
        by_duration = tl.zeros([LANES], tl.float64)
        if d > 0:
            target = tl.where(row + d >= T, row + d - T, row + d) * W + u
            m, e = _load(m_PN + 4 * N, e_PN + 4 * N, target, possible & (t + d < T))
            ends = possible & (t + d == T) & (u == U)
            m = tl.where(ends, 1.0, m)
            e = tl.where(ends, 0, e)
            by_duration = blank * m_d * m * _power(tl.minimum(blank_e + e_d + e, 1023))
            by_blanks += by_duration
        if j < LABEL_D:
            target = tl.where(row + d + 1 >= T, row + d + 1 - T, row + d + 1) * W + u + 1
            m, e = _load(m_PN + 4 * N, e_PN + 4 * N, target, possible & (t + d < T) & (u < U))
            by_label = label * m_d * m * _power(tl.minimum(label_e + e_d + e, 1023))
            by_labels += by_label
            by_duration += by_label
        tl.store(duration_ND + cell * D + j, by_duration.to(dtype), mask=inside)
    tl.store(label_N + cell, by_labels.to(dtype), mask=inside)
    tl.store(blank_N + cell, by_blanks.to(dtype), mask=inside)


def warps_for(lanes: int) -> int:
    """Warps of `_walk`: a lane a thread, as far as that goes."""
    return max(1, min(16, lanes // 32))


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
    """(B,) losses in float64, and (N,) label, (N,) blank and (N, D) duration posteriors (empty where not asked for) in
    the dtype of `blank_N`.

    The arguments are those of `finetune.losses.lattice.forward_backward`.
    """
    device, B, (N, D) = blank_N.device, len(frames_B), duration_ND.shape
    blank_N, label_N, duration_ND = blank_N.contiguous(), label_N.contiguous(), duration_ND.contiguous()
    size = N if posteriors else 0
    label_post_N, blank_post_N = torch.empty(2, size, dtype=blank_N.dtype, device=device)
    duration_post_ND = torch.empty(size, D, dtype=blank_N.dtype, device=device)
    losses_B = torch.full((B,), float("inf"), dtype=torch.float64, device=device)
    if N == 0:
        return losses_B, label_post_N, blank_post_N, duration_post_ND
    both = np.array([frames_B, tokens_B], dtype=np.int32)
    cells = both[0].astype(np.int64) * (both[1] + 1)
    first_cell_B = send(device, torch.from_numpy(cells.cumsum() - cells))
    both_on_device = send(device, torch.from_numpy(both))
    lengths = first_cell_B, both_on_device[0], both_on_device[1]
    m_PN = torch.empty(PLANES + D, N, dtype=torch.float64, device=device)
    e_PN = torch.empty(PLANES + D, N, dtype=torch.int32, device=device)
    z = torch.empty(B, dtype=torch.float64, device=device), torch.empty(B, dtype=torch.int32, device=device)
    grid = triton.cdiv(int(cells.max()), CELLS_A_PROGRAM), B
    lanes = max(int(triton.next_power_of_2(max(tokens_B) + 1)), 32)
    arcs = {"DURATIONS": tuple(durations), "D": D, "LABEL_D": label_durations}
    with torch.cuda.device_of(blank_N):  # Triton launches on the current device
        _arcs[grid](
            blank_N, label_N, duration_ND, m_PN, e_PN, *lengths, N, D=D, LANES=CELLS_A_PROGRAM,
            num_warps=4,  # pyright: ignore[reportCallIssue]  # an option of the launch
        )  # fmt: skip
        _walk[(B, 2 if posteriors else 1)](
            m_PN, e_PN, *z, losses_B, *lengths, N, **arcs, LANES=lanes,
            num_warps=warps_for(lanes),  # pyright: ignore[reportCallIssue]  # an option of the launch
        )  # fmt: skip
        if posteriors:
            _posteriors[grid](
                m_PN, e_PN, *z, *lengths, label_post_N, blank_post_N, duration_post_ND, N,
                **arcs, LANES=CELLS_A_PROGRAM,
                num_warps=4,  # pyright: ignore[reportCallIssue]  # an option of the launch
            )  # fmt: skip
    return losses_B, label_post_N, blank_post_N, duration_post_ND
