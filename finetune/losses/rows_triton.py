"""Rows of joint outputs to log-sum-exps and to gradient rows on a GPU; each reads the outputs once, in their dtype.

A row is read in blocks of COLUMNS, a power of 2, and a tail of its own width, so that no block is nearly empty. Rows
that begin at multiples of 16 bytes are read and written 16 bytes at a time: the kernels get stride and width as counts
of UNIT elements, from which the compiler knows. With TRITON_INTERPRET=1 in the environment everything runs on the CPU.

Shape suffixes: V vocabulary, D durations, O joint outputs, N lattice cells.
"""

import torch
import triton
import triton.language as tl

COLUMNS = 2048  # at most, at once
# Rows of at most so many are read at once: a clip's own tokens are of any number, and each width would be compiled.
NARROW = 512
UNIT = 8
LAYOUT = ["stride", "width", "V1", "V"]
OF_CELL = [
    *("lse_N", "arcs_N", "rest_N", "used_N", "label_N", "blank_N"),
    *("duration_ND", "next_token_N", "scale_N"),
]


@triton.jit
def _base(top):
    """What to subtract before an exponential: -inf would give no number."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit(do_not_specialize=LAYOUT)
def _log_sum_exp(logits_NO, lse_N, stride, width, V1, UNIT: tl.constexpr, COLUMNS: tl.constexpr, TAIL: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    row = logits_NO + n * (stride * UNIT)
    column = tl.arange(0, COLUMNS)
    blocks = V1 // COLUMNS
    top = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([COLUMNS], tl.float32)
    i = blocks * 0
    while i < blocks:  # not range: the interpreter cannot take its end from a tensor under numpy 2
        x = tl.load(row + i * COLUMNS + column).to(tl.float32)
        higher = tl.maximum(top, tl.max(x, 0))  # not what is no number: that stays in the total
        total = total * tl.exp(top - _base(higher)) + tl.exp(x - _base(higher))
        top = higher
        i += 1
    row_total = tl.sum(total, 0)
    if TAIL > 0:
        v = blocks * COLUMNS + tl.arange(0, TAIL)
        x = tl.load(row + v, mask=v < width * UNIT, other=0.0).to(tl.float32)
        x = tl.where(v < V1, x, float("-inf"))
        higher = tl.maximum(top, tl.max(x, 0))
        row_total = row_total * tl.exp(top - _base(higher)) + tl.sum(tl.exp(x - _base(higher)), 0)
        top = higher
    tl.store(lse_N + n, _base(top) + tl.log(row_total))


@triton.jit
def _token_gradient(probability, v, arcs, rest, label, blank, next_token, V, clamp):
    grad = probability * tl.where((v == next_token) | (v == V), arcs, rest)
    grad -= tl.where(v == next_token, label, 0.0)
    grad -= tl.where(v == V, blank, 0.0)
    if clamp > 0.0:
        grad = tl.where(grad > clamp, clamp, tl.where(grad < -clamp, -clamp, grad))
    return grad


@triton.jit(do_not_specialize=LAYOUT, do_not_specialize_on_alignment=OF_CELL)
def _gradient(
    logits_NO,
    lse_N,
    arcs_N,
    rest_N,
    used_N,
    label_N,
    blank_N,
    duration_ND,
    next_token_N,
    scale_N,
    stride,
    width,
    V,
    clamp,
    D: tl.constexpr,
    LANES_D: tl.constexpr,
    UNIT: tl.constexpr,
    COLUMNS: tl.constexpr,
    TAIL: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    row = logits_NO + n * (stride * UNIT)
    lse = tl.load(lse_N + n)
    arcs = tl.load(arcs_N + n)
    rest = tl.load(rest_N + n)
    used = tl.load(used_N + n)
    label = tl.load(label_N + n)
    blank = tl.load(blank_N + n)
    scale = tl.load(scale_N + n)
    next_token = tl.load(next_token_N + n).to(tl.int32)
    duration_top = lse
    if D > 0:
        d = tl.arange(0, LANES_D)
        z = tl.load(row + V + 1 + d, mask=d < D, other=float("-inf")).to(tl.float32)
        duration_top = tl.max(z, 0)
        duration_total = tl.sum(tl.exp(z - duration_top), 0)
        tl.debug_barrier()  # before any thread writes them over
    column = tl.arange(0, COLUMNS)
    blocks = (V + 1) // COLUMNS
    i = blocks * 0
    while i < blocks:
        v = i * COLUMNS + column
        x = tl.load(row + v).to(tl.float32)
        grad = _token_gradient(tl.exp(x - lse), v, arcs, rest, label, blank, next_token, V, clamp) * scale
        tl.store(row + v, grad.to(logits_NO.dtype.element_ty))
        i += 1
    if TAIL > 0:
        v = blocks * COLUMNS + tl.arange(0, TAIL)
        ok = v < width * UNIT
        x = tl.load(row + v, mask=ok, other=0.0).to(tl.float32)
        probability = tl.exp(x - tl.where(v <= V, lse, duration_top))
        grad = _token_gradient(probability, v, arcs, rest, label, blank, next_token, V, clamp)
        if D > 0:
            of_duration = (v > V) & (v <= V + D)
            posterior = tl.load(duration_ND + n * D + (v - V - 1), mask=of_duration, other=0.0)
            grad = tl.where(of_duration, probability / duration_total * used - posterior, grad)
        grad = tl.where(v <= V + D, grad * scale, 0.0)
        tl.store(row + v, grad.to(logits_NO.dtype.element_ty), mask=ok)


def _layout(logits_NO: torch.Tensor, V1: int, width: int) -> tuple[dict[str, int], tuple[int, int], int]:
    """Constants of the kernels, (stride, width) in units, and warps, for rows of `width` of which V1 are tokens."""
    stride = logits_NO.stride(0)
    unit = UNIT if stride % UNIT == 0 else 1
    units = -(-width // unit)
    narrow = units * unit <= NARROW
    columns = NARROW if narrow else min(COLUMNS, 1 << (V1.bit_length() - 1))
    rest = units * unit - V1 // columns * columns
    tail = NARROW if narrow and rest else int(triton.next_power_of_2(rest)) if rest else 0
    constants = {"UNIT": unit, "COLUMNS": columns, "TAIL": tail}
    return constants, (stride // unit, units), max(1, min(4, columns // 256))


def log_sum_exp(logits_NV: torch.Tensor) -> torch.Tensor:
    """(N,) float32 log-sum-exp of rows in any dtype below float64; what lies between the rows is read and left out."""
    N, V1 = logits_NV.shape
    lse_N = torch.empty(N, dtype=torch.float32, device=logits_NV.device)
    if N:
        constants, units, warps = _layout(logits_NV, V1, V1)
        with torch.cuda.device_of(logits_NV):  # Triton launches on the current device
            _log_sum_exp[(N,)](
                logits_NV, lse_N, *units, V1, **constants,
                num_warps=warps,  # pyright: ignore[reportCallIssue]  # an option of the launch
            )  # fmt: skip
    return lse_N


def gradient_(logits_NO: torch.Tensor, *of_cell: torch.Tensor, V: int, D: int, clamp: float) -> torch.Tensor:
    """Puts the gradient rows in place of the outputs; arguments as in `finetune.losses.rows.gradient_rows`."""
    if len(logits_NO):
        constants, units, warps = _layout(logits_NO, V + 1, logits_NO.shape[1])
        lse_N, arcs_N, rest_N, used_N, label_N, blank_N, duration_ND, next_token_N, scale_N = (
            x.contiguous() for x in of_cell
        )
        with torch.cuda.device_of(logits_NO):
            _gradient[(len(logits_NO),)](
                logits_NO, lse_N, arcs_N, rest_N, used_N, label_N, blank_N, duration_ND, next_token_N,
                scale_N, *units, V, clamp, D=D, LANES_D=triton.next_power_of_2(max(D, 1)), **constants,
                num_warps=warps,  # pyright: ignore[reportCallIssue]  # an option of the launch
            )  # fmt: skip
    return logits_NO
