"""Checks of the loss's arguments: one ValueError that names the argument, what was expected and what came.

Shape suffixes: B batch, T encoder frames, U target tokens, V vocabulary, D durations, H hidden, O joint outputs.
"""

import math

import torch

REDUCTIONS = ("none", "mean_batch", "mean_volume", "mean", "sum")
ACTIVATION_NAMES = ("relu", "tanh", "sigmoid")


def check_shapes(enc_BTH, pred_BUH, weight_OH, bias_O, targets_BU, enc_lengths_B, target_lengths_B, D: int) -> int:
    """V, or a ValueError that names the argument of the wrong shape or type."""

    def expect(ok: bool, name: str, expected: str, tensor: object) -> None:
        if not ok:
            got = (
                f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
                if isinstance(tensor, torch.Tensor)
                else repr(tensor)
            )
            raise ValueError(f"{name}: expected {expected}, got {got}")

    for name, x, dims, kind in (
        ("enc_BTH", enc_BTH, 3, "floating-point encoder outputs (B, T, H)"),
        ("pred_BUH", pred_BUH, 3, "floating-point prediction network outputs (B, U + 1, H)"),
        ("weight_OH", weight_OH, 2, "a floating-point weight (O, H)"),
        ("targets_BU", targets_BU, 2, "int32 or int64 token ids (B, U)"),
        ("enc_lengths_B", enc_lengths_B, 1, "int32 or int64 frame counts (B,)"),
        ("target_lengths_B", target_lengths_B, 1, "int32 or int64 token counts (B,)"),
    ):
        whole = (torch.int32, torch.int64)
        right = isinstance(x, torch.Tensor) and (
            x.is_floating_point() if dims > 1 and x is not targets_BU else x.dtype in whole
        )
        expect(right and x.dim() == dims, name, kind, x)
    B, T, H = enc_BTH.shape
    U1 = pred_BUH.shape[1]
    device = enc_BTH.device
    expect(
        pred_BUH.shape == (B, U1, H) and U1 > 0,
        "pred_BUH",
        f"shape ({B}, U + 1, {H}), to fit enc_BTH {(B, T, H)}",
        pred_BUH,
    )
    outputs = f"(V + 1{f' + {D} durations' if D else ''}, {H})"
    expect(
        weight_OH.shape[1] == H and weight_OH.shape[0] >= D + 1,
        "weight_OH",
        f"shape {outputs}, to fit enc_BTH {(B, T, H)}",
        weight_OH,
    )
    if bias_O is not None:
        expect(
            isinstance(bias_O, torch.Tensor) and bias_O.is_floating_point() and bias_O.shape == weight_OH.shape[:1],
            "bias_O",
            f"None or a floating-point bias of shape {tuple(weight_OH.shape[:1])}, to fit weight_OH",
            bias_O,
        )
    expect(
        targets_BU.shape == (B, U1 - 1),
        "targets_BU",
        f"shape {(B, U1 - 1)}, one position fewer than pred_BUH",
        targets_BU,
    )
    expect(enc_lengths_B.shape == (B,), "enc_lengths_B", f"shape {(B,)}", enc_lengths_B)
    expect(target_lengths_B.shape == (B,), "target_lengths_B", f"shape {(B,)}", target_lengths_B)
    for name, x in (("pred_BUH", pred_BUH), ("weight_OH", weight_OH), ("bias_O", bias_O), ("targets_BU", targets_BU)):
        expect(x is None or x.device == device, name, f"device {device}, as enc_BTH", x)
    return weight_OH.shape[0] - D - 1


def check_values(enc_BTH, targets_BU, enc_lengths_B, target_lengths_B, V: int) -> tuple[list[int], list[int]]:
    """The lengths on the host, with the values of all tensors checked at the price of one transfer."""
    device, T, U = enc_BTH.device, enc_BTH.shape[1], targets_BU.shape[1]
    inside_BU = torch.arange(U, device=device) < target_lengths_B.to(device)[:, None]
    wrong_B = (((targets_BU < 0) | (targets_BU >= V)) & inside_BU).any(1)
    frames, tokens, wrong = torch.stack(
        [enc_lengths_B.to(device).long(), target_lengths_B.to(device).long(), wrong_B.long()]
    ).tolist()
    for name, lengths, most in (("enc_lengths_B", frames, T), ("target_lengths_B", tokens, U)):
        if lengths and not (min(lengths) >= 0 and max(lengths) <= most):
            raise ValueError(f"{name}: expected lengths from 0 to {most}, got {lengths}")
    if any(wrong):
        clip = wrong.index(1)
        raise ValueError(
            f"targets_BU: expected token ids from 0 to V - 1 = {V - 1}, got "
            f"{targets_BU[clip, : tokens[clip]].tolist()} in row {clip}"
        )
    return frames, tokens


def check_options(
    activation, dropout, sigma, omega, reduction, occupancy_threshold, fastemit_lambda, clamp, joint_memory_budget
) -> None:
    numbers = {
        "dropout": dropout,
        "sigma": sigma,
        "omega": omega,
        "occupancy_threshold": occupancy_threshold,
        "fastemit_lambda": fastemit_lambda,
        "clamp": clamp,
    }
    for name, value in numbers.items():
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{name}: expected a finite number, got {value!r}")
    problems = (
        (
            activation in ACTIVATION_NAMES,
            f"activation: expected one of {', '.join(ACTIVATION_NAMES)}, got {activation!r}",
        ),
        (0 <= dropout < 1, f"dropout: expected a probability 0 <= p < 1, got {dropout!r}"),
        (sigma >= 0, f"sigma: expected a number >= 0, got {sigma!r}"),
        (0 <= omega <= 1, f"omega: expected a probability from 0 to 1, got {omega!r}"),
        (reduction in REDUCTIONS, f"reduction: expected one of {', '.join(REDUCTIONS)}, got {reduction!r}"),
        (
            0 <= occupancy_threshold < 1,
            f"occupancy_threshold: expected a probability 0 <= p < 1, got {occupancy_threshold!r}",
        ),
        (fastemit_lambda >= 0, f"fastemit_lambda: expected a number >= 0, got {fastemit_lambda!r}"),
        (
            joint_memory_budget is None or joint_memory_budget > 0,
            f"joint_memory_budget: expected a number of bytes > 0 or None, got {joint_memory_budget!r}",
        ),
    )
    for ok, message in problems:
        if not ok:
            raise ValueError(message)
