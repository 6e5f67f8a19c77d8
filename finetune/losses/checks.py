"""Checks of the loss's arguments: one ValueError that names the argument, what was expected and what came.

Shape suffixes: B batch, T encoder frames, U target tokens, V vocabulary, D durations, H hidden, O joint outputs.
"""

import math

import numpy as np
import torch

from finetune.losses.transfers import on_host

REDUCTIONS = ("none", "mean_batch", "mean_volume", "mean", "sum")
ACTIVATION_NAMES = ("relu", "tanh", "sigmoid")


def check_shapes(enc_BTH, pred_BUH, weight_OH, bias_O, targets_BU, enc_lengths_B, target_lengths_B, D: int) -> int:
    """V, or a ValueError that names the argument of the wrong shape or type."""

    def expect(ok: bool, name: str, expected: str, x: object) -> None:
        if not ok:
            got = f"{tuple(x.shape)} {x.dtype} on {x.device}" if isinstance(x, torch.Tensor) else repr(x)
            raise ValueError(f"{name}: expected {expected}, got {got}")

    for name, x, dims, expected in (
        ("enc_BTH", enc_BTH, 3, "floating-point encoder outputs (B, T, H)"),
        ("pred_BUH", pred_BUH, 3, "floating-point prediction network outputs (B, U + 1, H)"),
        ("weight_OH", weight_OH, 2, "a floating-point weight (O, H)"),
    ):
        expect(isinstance(x, torch.Tensor) and x.is_floating_point() and x.dim() == dims, name, expected, x)
    for name, x, dims, expected in (
        ("targets_BU", targets_BU, 2, "int32 or int64 token ids (B, U)"),
        ("enc_lengths_B", enc_lengths_B, 1, "int32 or int64 frame counts (B,)"),
        ("target_lengths_B", target_lengths_B, 1, "int32 or int64 token counts (B,)"),
    ):
        whole = isinstance(x, torch.Tensor) and x.dtype in (torch.int32, torch.int64)
        expect(whole and x.dim() == dims, name, expected, x)
    (B, T, H), U1, (outputs, weight_H) = enc_BTH.shape, pred_BUH.shape[1], weight_OH.shape
    to_fit = f", to fit enc_BTH {(B, T, H)}"
    right = pred_BUH.shape == (B, U1, H) and U1 > 0
    expect(right, "pred_BUH", f"shape ({B}, U + 1, {H}){to_fit}", pred_BUH)
    rows = f"V + 1 + {D} durations" if D else "V + 1"
    expect(weight_H == H and outputs > D, "weight_OH", f"shape ({rows}, {H}){to_fit}", weight_OH)
    if bias_O is not None:
        right = isinstance(bias_O, torch.Tensor) and bias_O.is_floating_point() and bias_O.shape == (outputs,)
        expect(right, "bias_O", f"None or a floating-point bias of shape {(outputs,)}, to fit weight_OH", bias_O)
    one_fewer = f"shape {(B, U1 - 1)}, one position fewer than pred_BUH"
    expect(targets_BU.shape == (B, U1 - 1), "targets_BU", one_fewer, targets_BU)
    for name, x in (("enc_lengths_B", enc_lengths_B), ("target_lengths_B", target_lengths_B)):
        expect(x.shape == (B,), name, f"shape {(B,)}", x)
    for name, x in (("pred_BUH", pred_BUH), ("weight_OH", weight_OH), ("bias_O", bias_O)):
        expect(x is None or x.device == enc_BTH.device, name, f"device {enc_BTH.device}, as enc_BTH", x)
    return outputs - D - 1


def check_values(
    enc_BTH, targets_BU, enc_lengths_B, target_lengths_B, V: int
) -> tuple[list[int], list[int], np.ndarray]:
    """Lengths and (B, U) targets on the host, checked; nothing waits for the device where they were on the host."""
    targets, frames_B, tokens_B = on_host(targets_BU, enc_lengths_B, target_lengths_B)
    for name, lengths_B, most in (
        ("enc_lengths_B", frames_B, enc_BTH.shape[1]),
        ("target_lengths_B", tokens_B, targets.shape[1]),
    ):
        if ((lengths_B < 0) | (lengths_B > most)).any():
            raise ValueError(f"{name}: expected lengths from 0 to {most}, got {lengths_B.tolist()}")
    inside = np.arange(targets.shape[1]) < tokens_B[:, None]
    wrong_B = (((targets < 0) | (targets >= V)) & inside).any(1)
    if wrong_B.any():
        clip = int(wrong_B.argmax())
        got = targets[clip, : tokens_B[clip]].tolist()
        raise ValueError(f"targets_BU: expected token ids from 0 to V - 1 = {V - 1}, got {got} in row {clip}")
    return frames_B.tolist(), tokens_B.tolist(), targets


def check_options(
    activation, dropout, sigma, omega, reduction, occupancy_threshold, fastemit_lambda, clamp, joint_memory_budget
) -> None:
    for name, value, fits, expected in (
        ("dropout", dropout, lambda p: 0 <= p < 1, "a probability 0 <= p < 1"),
        ("sigma", sigma, lambda x: x >= 0, "a finite number >= 0"),
        ("omega", omega, lambda p: 0 <= p <= 1, "a probability from 0 to 1"),
        ("occupancy_threshold", occupancy_threshold, lambda p: 0 <= p < 1, "a probability 0 <= p < 1"),
        ("fastemit_lambda", fastemit_lambda, lambda x: x >= 0, "a finite number >= 0"),
        ("clamp", clamp, lambda _: True, "a finite number"),
    ):
        if not isinstance(value, int | float) or not math.isfinite(value) or not fits(value):
            raise ValueError(f"{name}: expected {expected}, got {value!r}")
    for name, value, known in (("activation", activation, ACTIVATION_NAMES), ("reduction", reduction, REDUCTIONS)):
        if value not in known:
            raise ValueError(f"{name}: expected one of {', '.join(known)}, got {value!r}")
    if joint_memory_budget is not None and joint_memory_budget <= 0:
        raise ValueError(f"joint_memory_budget: expected a number of bytes > 0 or None, got {joint_memory_budget!r}")
