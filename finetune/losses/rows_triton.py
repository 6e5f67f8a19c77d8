"""Rows of joint outputs to log-sum-exps and to gradient rows on a GPU; each reads the outputs once, in their dtype.

With TRITON_INTERPRET=1 in the environment everything runs on the CPU.

Shape suffixes: V vocabulary, D durations, O joint outputs, N lattice cells.
"""

import torch
import triton
import triton.language as tl

COLUMNS = 2048  # at once


@triton.jit
def _log_sum_exp(logits_NO, lse_N, stride, V1, COLUMNS: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    top = tl.full([COLUMNS], float("-inf"), tl.float32)
    total = tl.zeros([COLUMNS], tl.float32)
    first = V1 * 0
    while first < V1:
        ok = first + column < V1
        x = tl.load(logits_NO + n * stride + first + column, mask=ok, other=float("-inf")).to(tl.float32)
        higher = tl.where(x > top, x, top)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(top - base) + tl.exp(x - base)
        top = higher
        first += COLUMNS
    row_top = tl.max(top, 0)
    row_base = tl.where(row_top == float("-inf"), 0.0, row_top)
    tl.store(lse_N + n, row_base + tl.log(tl.sum(total * tl.exp(top - row_base), 0)))


@triton.jit
def _gradient(
    logits_NO,
    lse_N,
    label_N,
    blank_N,
    duration_ND,
    next_token_N,
    scale_N,
    stride,
    V,
    fastemit,
    clamp,
    D: tl.constexpr,
    LANES_D: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    row = logits_NO + n * stride
    lse = tl.load(lse_N + n)
    label = tl.load(label_N + n)
    blank = tl.load(blank_N + n)
    scale = tl.load(scale_N + n)
    next_token = tl.load(next_token_N + n)
    weighted = label * (1.0 + fastemit)
    column = tl.arange(0, COLUMNS)
    first = V * 0
    while first < V + 1:
        v = first + column
        ok = v < V + 1
        x = tl.load(row + v, mask=ok, other=float("-inf")).to(tl.float32)
        grad = tl.exp(x - lse) * (weighted + blank)
        grad -= tl.where(v == next_token, weighted, 0.0)
        grad -= tl.where(v == V, blank, 0.0)
        if clamp > 0.0:
            grad = tl.where(grad > clamp, clamp, tl.where(grad < -clamp, -clamp, grad))
        tl.store(row + v, (grad * scale).to(logits_NO.dtype.element_ty), mask=ok)
        first += COLUMNS
    if D > 0:
        d = tl.arange(0, LANES_D)
        x = tl.load(row + V + 1 + d, mask=d < D, other=float("-inf")).to(tl.float32)
        share = tl.exp(x - tl.max(x, 0))
        share = share / tl.sum(share, 0)
        grad = share * (label + blank) - tl.load(duration_ND + n * D + d, mask=d < D, other=0.0)
        tl.store(row + V + 1 + d, (grad * scale).to(logits_NO.dtype.element_ty), mask=d < D)


def log_sum_exp(logits_NV: torch.Tensor) -> torch.Tensor:
    """(N,) float32 log-sum-exp of rows in any dtype below float64."""
    N, V1 = logits_NV.shape
    lse_N = torch.empty(N, dtype=torch.float32, device=logits_NV.device)
    if N:
        columns = min(COLUMNS, triton.next_power_of_2(V1))
        with torch.cuda.device_of(logits_NV):  # Triton launches on the current device
            _log_sum_exp[(N,)](
                logits_NV, lse_N, logits_NV.stride(0), V1, COLUMNS=columns,
                num_warps=4,  # pyright: ignore[reportCallIssue]  # an option of the launch
            )  # fmt: skip
    return lse_N


def gradient_(
    logits_NO: torch.Tensor, *of_cell: torch.Tensor, V: int, D: int, fastemit_lambda: float, clamp: float
) -> torch.Tensor:
    """Puts the gradient rows in place of the outputs; arguments as in `finetune.losses.rows.gradient_rows`."""
    if len(logits_NO):
        columns = min(COLUMNS, triton.next_power_of_2(V + 1))
        lse_N, label_N, blank_N, duration_ND, next_token_N, scale_N = (x.contiguous() for x in of_cell)
        with torch.cuda.device_of(logits_NO):
            _gradient[(len(logits_NO),)](
                logits_NO, lse_N, label_N, blank_N, duration_ND, next_token_N, scale_N, logits_NO.stride(0), V,
                fastemit_lambda, clamp, D=D, LANES_D=triton.next_power_of_2(max(D, 1)), COLUMNS=columns,
                num_warps=4,  # pyright: ignore[reportCallIssue]  # an option of the launch
            )  # fmt: skip
    return logits_NO
