"""Hidden values of the joint on a GPU: gather, add, activation, dropout and cast in one pass; in another the gradient.

Both compute in float32 and draw the masks of dropout.py, bit for bit. With TRITON_INTERPRET=1 in the environment
everything runs on the CPU.

Shape suffixes: H hidden (the joint's width), N lattice cells.
"""

import torch
import triton
import triton.language as tl

from finetune.losses.dropout import threshold_of
from finetune.losses.form import Form

# Of one program. 128 columns divide the usual widths (512, 640, 1024).
CELLS, COLUMNS = 16, 128
# What differs from block to block; a compilation for each would gain nothing.
NUMBERS, CELL_INDICES = ["N", "seed", "threshold"], ["number_N", "frame_N", "position_N"]


@triton.jit
def _mix(x):
    """lowbias32 on uint32."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _kept(number, h, seed, threshold):
    seed = seed.to(tl.uint32)
    row = _mix(((number ^ (number >> 32)) & 0xFFFFFFFF).to(tl.uint32) ^ seed)
    column = _mix(h.to(tl.uint32) ^ 0x9E3779B9 ^ seed)
    return _mix(row[:, None] ^ column[None, :]) >= threshold.to(tl.uint32)


@triton.jit
def _tanh(x):
    square = x * x
    small = x * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    e = tl.exp(-2.0 * tl.abs(x))
    large = (1.0 - e) / (1.0 + e)  # cancels near 0
    return tl.where(square < 0.04, small, tl.where(x < 0.0, -large, large))


@triton.jit
def _active(enc, pred, frame, position, h, inside, H, ACTIVATION: tl.constexpr):
    """activation(enc + pred), 64-bit rows."""
    x = tl.load(enc + frame[:, None] * H + h[None, :], mask=inside, other=0.0).to(tl.float32)
    x += tl.load(pred + position[:, None] * H + h[None, :], mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "relu":
        return tl.where(x < 0.0, 0.0, x)  # keeps what is no number
    if ACTIVATION == "tanh":
        return _tanh(x)
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=CELL_INDICES)
def _dropped(
    enc,
    pred,
    number_N,
    frame_N,
    position_N,
    dropped_NH,
    N,
    H,
    seed,
    threshold,
    scale,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
    CELLS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64) * CELLS + tl.arange(0, CELLS)
    h = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (n < N)[:, None] & (h < H)[None, :]
    frame = tl.load(frame_N + n, mask=n < N, other=0)
    position = tl.load(position_N + n, mask=n < N, other=0)
    y = _active(enc, pred, frame, position, h, inside, H, ACTIVATION)
    if DROPOUT:
        kept = _kept(tl.load(number_N + n, mask=n < N, other=0), h, seed, threshold)
        y = tl.where(kept, y * scale, y * 0.0)  # what is no number stays so
    tl.store(dropped_NH + n[:, None] * H + h[None, :], y.to(dropped_NH.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=CELL_INDICES)
def _add_gradient(
    grad_NH,
    enc,
    pred,
    number_N,
    frame_N,
    position_N,
    grad_enc,
    grad_pred,
    N,
    H,
    seed,
    threshold,
    scale,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
    CELLS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64) * CELLS + tl.arange(0, CELLS)
    h = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (n < N)[:, None] & (h < H)[None, :]
    frame = tl.load(frame_N + n, mask=n < N, other=0)
    position = tl.load(position_N + n, mask=n < N, other=0)
    y = _active(enc, pred, frame, position, h, inside, H, ACTIVATION)
    grad = tl.load(grad_NH + n[:, None] * H + h[None, :], mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "relu":
        grad *= (y > 0.0).to(tl.float32)
    elif ACTIVATION == "tanh":
        grad *= 1.0 - y * y
    else:
        grad *= y * (1.0 - y)
    if DROPOUT:
        kept = _kept(tl.load(number_N + n, mask=n < N, other=0), h, seed, threshold)
        grad *= tl.where(kept, scale, 0.0)
    if grad_pred is not None:
        tl.atomic_add(grad_pred + position[:, None] * H + h[None, :], grad, mask=inside, sem="relaxed")
    if grad_enc is not None:
        # Cells lie frame by frame: those of the first one's frame, mostly all, make one addition.
        first = tl.load(frame_N + tl.program_id(0).to(tl.int64) * CELLS)
        same = (frame == first)[:, None]
        together = tl.sum(tl.where(same & inside, grad, 0.0), 0)
        tl.atomic_add(grad_enc + first * H + h, together, mask=h < H, sem="relaxed")
        tl.atomic_add(grad_enc + frame[:, None] * H + h[None, :], grad, mask=inside & (same == 0), sem="relaxed")


def _launch(kernel, like_NH: torch.Tensor, tensors: tuple[torch.Tensor | None, ...], form: Form) -> None:
    N, H = like_NH.shape
    if N == 0:
        return
    with torch.cuda.device_of(like_NH):  # Triton launches on the current device
        kernel[(triton.cdiv(N, CELLS), triton.cdiv(H, COLUMNS))](
            *tensors, N, H, form.seed, threshold_of(form.dropout), 1 / (1 - form.dropout),
            ACTIVATION=form.activation, DROPOUT=form.dropout > 0, CELLS=CELLS, COLUMNS=COLUMNS, num_warps=4,
        )  # fmt: skip


def dropped(
    enc: torch.Tensor,
    pred: torch.Tensor,
    number_N: torch.Tensor,
    frame_N: torch.Tensor,
    position_N: torch.Tensor,
    form: Form,
) -> torch.Tensor:
    """(N, H) input of the linear layer; arguments as in `finetune.losses.hidden.hidden`, enc and pred contiguous."""
    dropped_NH = torch.empty(len(number_N), enc.shape[1], dtype=form.dtype, device=enc.device)
    _launch(_dropped, dropped_NH, (enc, pred, number_N, frame_N, position_N, dropped_NH), form)
    return dropped_NH


def add_gradient(
    grad_NH: torch.Tensor,
    enc: torch.Tensor,
    pred: torch.Tensor,
    number_N: torch.Tensor,
    frame_N: torch.Tensor,
    position_N: torch.Tensor,
    form: Form,
    grad_enc: torch.Tensor | None,
    grad_pred: torch.Tensor | None,
) -> None:
    """As `finetune.losses.hidden.add_hidden_gradient`, by atomic additions, whose order differs between runs."""
    tensors = (grad_NH.contiguous(), enc, pred, number_N, frame_N, position_N, grad_enc, grad_pred)
    _launch(_add_gradient, grad_NH, tensors, form)
