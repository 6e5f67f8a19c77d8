#!/usr/bin/env python3
"""Compare the fused loss on GPU and CPU: lattices, values, gradients, dropout, long clips. Exit code 0: all agree."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from finetune.losses import fused_tdt_loss, lattice, lattice_triton

DURATIONS = (((0, 1, 2, 3, 4), 5), ((1, 2), 2), ((0, 1), 1), ((0, 2, 4, 8), 4))


def compare_lattices() -> None:
    g = torch.Generator().manual_seed(0)
    for durations, label_durations in DURATIONS:
        for frames, tokens in (([70, 51, 1, 0], [30, 0, 2, 1]), ([400, 130], [90, 140]), ([4000], [1500])):
            N = sum(t * (u + 1) for t, u in zip(frames, tokens))
            blank_N, label_N = torch.randn(2, N, generator=g, dtype=torch.float64) * 3 - 2
            duration_ND = torch.log_softmax(torch.randn(N, len(durations), generator=g, dtype=torch.float64), 1)
            inputs = (blank_N, label_N, duration_ND)
            rest = (frames, tokens, durations, label_durations, True)
            expected = lattice._solve_numba(*inputs, *rest)
            actual = lattice_triton.solve(*(x.cuda() for x in inputs), *rest)
            for a, e in zip(actual, expected):
                torch.testing.assert_close(a.cpu(), e, rtol=1e-9, atol=1e-12, equal_nan=True)
            print(f"lattice {durations} T {frames} U {tokens}: equal")


def compare_losses() -> None:
    for dtype, autocast, tolerance in (
        (torch.float64, False, 1e-10),
        (torch.float32, False, 2e-4),
        (torch.float32, True, 3e-2),
    ):
        for V, threshold, dropout in ((60, 0.0, 0.0), (1024, 1e-8, 0.0), (1024, 0.0, 0.3)):
            g = torch.Generator().manual_seed(0)
            shapes = (3, 50, 64), (3, 21, 64), (V + 6, 64), (V + 6,)
            tensors = [0.5 * torch.randn(s, generator=g, dtype=torch.float64).to(dtype) for s in shapes]
            targets, frames, tokens = (
                torch.randint(0, V, (3, 20), generator=g),
                torch.tensor([50, 41, 20]),
                torch.tensor([20, 11, 0]),
            )
            found = []
            for device in ("cpu", "cuda"):
                leaves = [x.to(device).requires_grad_() for x in tensors]
                torch.manual_seed(5)  # of dropout's masks
                with torch.autocast("cuda", torch.bfloat16, enabled=autocast and device == "cuda"):
                    loss = fused_tdt_loss(
                        *leaves,
                        targets.to(device),
                        frames.to(device),
                        tokens.to(device),
                        occupancy_threshold=threshold,
                        dropout=dropout,
                    )
                found.append([x.cpu().float() for x in (loss, *torch.autograd.grad(loss, leaves))])
            for e, a in zip(*found):
                assert (a - e).abs().max() <= tolerance * e.abs().max(), (
                    (a - e).abs().max() / e.abs().max(),
                    dtype,
                    V,
                )
            print(
                f"loss and gradients, {dtype}, autocast {autocast}, V {V}, threshold {threshold}, dropout {dropout}: "
                "equal"
            )


def compare_options() -> None:
    """RNN-T, omega's draw, sigma, FastEmit, clamp, infeasible clips, half precision; flat and learnt lattices."""
    for learnt in (False, True):
        for half in (None, torch.bfloat16, torch.float16):
            for options in (
                {"sigma": 0.05, "fastemit_lambda": 0.1, "clamp": 0.02},
                {"durations": ()},
                {"rnnt_draw": True},
                {"durations": (2, 3), "reduction": "mean_volume"},
                {"occupancy_threshold": 1e-4, "joint_memory_budget": 2**20},
            ):
                D, V, H, T, U = len(options.get("durations", (0,) * 5)), 700, 64, 50, 20
                g = torch.Generator().manual_seed(0)
                tensors = [
                    0.2 * torch.randn(s, generator=g) for s in ((3, T, H), (3, U + 1, H), (V + 1 + D, H), (V + 1 + D,))
                ]
                targets, frames, tokens = torch.randint(0, V, (3, U), generator=g), [T, 41, 1], [U, 7, 0]
                if (
                    learnt
                ):  # unit h wakes where frame and token are due together; elsewhere a token that is no target wins
                    tensors[0].fill_(-4)[:, torch.arange(T), torch.arange(T) * H // T] += 3
                    tensors[1].zero_()[:, torch.arange(U + 1), torch.arange(U + 1) * H // (U + 1)] += 3
                    tensors[2].zero_()[[*range(V - 1), V]] += 4
                    tensors[3].zero_()[V - 1] += 6
                    targets.clamp_(max=V - 2)
                found = []
                for device in ("cpu", "cuda"):
                    leaves = [x.to(device).requires_grad_() for x in tensors]
                    with torch.autocast(device, half, enabled=half is not None):
                        loss = fused_tdt_loss(
                            *leaves,
                            targets.to(device),
                            torch.tensor(frames).to(device),
                            torch.tensor(tokens).to(device),
                            **options,
                        )
                    found.append([x.cpu().float() for x in (loss, *torch.autograd.grad(loss, leaves))])
                tolerance = {None: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}[half]
                for e, a in zip(*found):
                    assert (a - e).abs().max() <= tolerance * e.abs().max(), (
                        learnt,
                        half,
                        options,
                        (a - e).abs().max(),
                    )
                print(f"loss and gradients, learnt {learnt}, {half}, {options}: equal")


if __name__ == "__main__":
    assert lattice.triton_works(), "Triton does not work here"
    torch.backends.cuda.matmul.allow_tf32 = False
    compare_lattices()
    compare_losses()
    compare_options()
