"""Rows of joint outputs to log-sum-exps, and to the rows of their gradient.

Shape suffixes: V vocabulary, D durations, O joint outputs (V + 1 + D: tokens, blank, durations), N lattice cells.
"""

import torch

from finetune.losses.lattice import triton_works


def on_gpu(logits: torch.Tensor) -> bool:
    """Whether the Triton kernels take these rows."""
    return logits.is_cuda and logits.dtype != torch.float64 and triton_works()


def log_sum_exp(logits_NV: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(N,) log-sum-exp of each row in `dtype`; the rows are used up."""
    if on_gpu(logits_NV):
        from finetune.losses import rows_triton

        return rows_triton.log_sum_exp(logits_NV)
    logits_NV = logits_NV.to(dtype)
    top_N1 = logits_NV.amax(1, keepdim=True)
    return logits_NV.sub_(top_N1).exp_().sum(1).log_().add_(top_N1[:, 0])


def gradient_rows(
    logits_NO: torch.Tensor,
    lse_N: torch.Tensor,
    arcs_N: torch.Tensor,
    rest_N: torch.Tensor,
    used_N: torch.Tensor,
    label_N: torch.Tensor,
    blank_N: torch.Tensor,
    duration_ND: torch.Tensor,
    next_token_N: torch.Tensor,
    scale_N: torch.Tensor,
    *,
    V: int,
    D: int,
    clamp: float,
) -> torch.Tensor:
    """(N, O) gradient of the loss with respect to the outputs; these are used up.

    A row is the softmax of each head times a factor, less what the cell's arcs weigh (`finetune.losses.distillation`).

    Args:
        logits_NO: (N, O) joint outputs; columns of zeros behind them stay zeros.
        lse_N: (N,) log-sum-exp over tokens and blank.
        arcs_N, rest_N, used_N: (N,) factors of the softmax: at next token and blank, at all other tokens, and at the
            durations.
        label_N, blank_N, duration_ND: what is subtracted at next token, blank and durations.
        next_token_N: (N,) the token of the label arc; V behind the last one, where `label_N` is 0.
        scale_N: (N,) factor of the whole row.
        V, D: tokens and durations.
        clamp: as in `finetune.losses.fused_tdt_loss`.
    """
    if on_gpu(logits_NO):
        from finetune.losses import rows_triton

        return rows_triton.gradient_(
            logits_NO, lse_N, arcs_N, rest_N, used_N, label_N, blank_N, duration_ND, next_token_N, scale_N,
            V=V, D=D, clamp=clamp,
        )  # fmt: skip
    grad_NO = logits_NO.to(lse_N.dtype)
    tokens_NV, next_token_N1 = grad_NO[:, : V + 1], next_token_N[:, None]
    tokens_NV.sub_(lse_N[:, None]).exp_()
    label_grad_N1 = tokens_NV.gather(1, next_token_N1).mul_(arcs_N[:, None]).sub_(label_N[:, None])
    blank_grad_N = tokens_NV[:, V] * arcs_N - blank_N
    tokens_NV.mul_(rest_N[:, None]).scatter_(1, next_token_N1, label_grad_N1)
    tokens_NV[:, V] = blank_grad_N  # last: behind the last token the next one is blank
    if clamp > 0:
        tokens_NV.clamp_(-clamp, clamp)
    if D:
        grad_NO[:, V + 1 : V + 1 + D] = (
            torch.softmax(grad_NO[:, V + 1 : V + 1 + D], 1).mul_(used_N[:, None]).sub_(duration_ND)
        )
    return grad_NO.mul_(scale_N[:, None]).to(logits_NO.dtype)
