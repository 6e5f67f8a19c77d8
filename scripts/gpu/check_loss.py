#!/usr/bin/env python3
"""Compare the fused loss on GPU and CPU: lattices, values, gradients, dropout, long clips. Exit code 0: all agree.

    python scripts/gpu/check_loss.py [--json FILE] [--rehearsal]

Needs torch, Triton and numba alone. --rehearsal: small sizes on the CPU, where Triton's interpreter runs the lattice's
kernels (tests/losses/interpreted.py runs all of them).
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REHEARSAL = "--rehearsal" in sys.argv
if REHEARSAL:
    os.environ["TRITON_INTERPRET"] = "1"  # is read when Triton is imported

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from finetune.losses import fused_tdt_loss, lattice, lattice_triton

DEVICE = "cpu" if REHEARSAL else "cuda"
DURATIONS = (((0, 1, 2, 3, 4), 5), ((1, 2), 2), ((0, 1), 1), ((0, 2, 4, 8), 4))
SHORT = ([70, 51, 1, 0], [30, 0, 2, 1])
LATTICES = (([7, 5, 1, 0], [3, 0, 2, 1]),) if REHEARSAL else (SHORT, ([400, 130], [90, 140]), ([4000], [1500]))
VOCABULARIES = (60, 90) if REHEARSAL else (60, 1024)
Agreement = tuple[str, float, float]
"""What was compared, how far it is off (a share of the largest value), and how far it may be."""


def off(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference as a share of the largest value; infinite and missing values have to be the same ones."""
    if not expected.numel():
        return 0.0
    if not torch.equal(actual.isfinite(), expected.isfinite()):
        return float("inf")
    actual, expected = (x.detach().double().where(expected.isfinite(), 0) for x in (actual, expected))
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


def compare_lattices() -> Iterator[Agreement]:
    g = torch.Generator().manual_seed(0)
    for durations, label_durations in DURATIONS:
        for frames, tokens in LATTICES:
            N = sum(t * (u + 1) for t, u in zip(frames, tokens))
            blank_N, label_N = torch.randn(2, N, generator=g, dtype=torch.float64) * 3 - 2
            duration_ND = torch.log_softmax(torch.randn(N, len(durations), generator=g, dtype=torch.float64), 1)
            inputs = (blank_N, label_N, duration_ND)
            rest = (frames, tokens, durations, label_durations, True)
            expected = lattice._solve_numba(*inputs, *rest)
            actual = lattice_triton.solve(*(x.to(DEVICE) for x in inputs), *rest)
            worst = max(off(a.cpu(), e) for a, e in zip(actual, expected))
            yield f"lattice {durations} T {frames} U {tokens}", worst, 1e-9


def compare_losses() -> Iterator[Agreement]:
    wide = VOCABULARIES[1]
    for dtype, autocast, tolerance in (
        (torch.float64, False, 1e-10),
        (torch.float32, False, 2e-4),
        (torch.float32, True, 3e-2),
    ):
        for V, threshold, dropout in ((60, 0.0, 0.0), (wide, 1e-8, 0.0), (wide, 0.0, 0.3)):
            g = torch.Generator().manual_seed(0)
            shapes = (3, 50, 64), (3, 21, 64), (V + 6, 64), (V + 6,)
            tensors = [0.5 * torch.randn(s, generator=g, dtype=torch.float64).to(dtype) for s in shapes]
            targets, frames, tokens = (
                torch.randint(0, V, (3, 20), generator=g),
                torch.tensor([50, 41, 20]),
                torch.tensor([20, 11, 0]),
            )
            found = []
            for device in ("cpu", DEVICE):
                leaves = [x.to(device, copy=True).requires_grad_() for x in tensors]
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
                found.append([x.cpu() for x in (loss, *torch.autograd.grad(loss, leaves))])
            what = f"loss and gradients, {dtype}, autocast {autocast}, V {V}, threshold {threshold}, dropout {dropout}"
            yield what, max(off(a, e) for e, a in zip(*found)), tolerance


def compare_options() -> Iterator[Agreement]:
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
                D, V, H, T, U = len(options.get("durations", (0,) * 5)), 60 if REHEARSAL else 700, 64, 50, 20
                g = torch.Generator().manual_seed(0)
                tensors = [
                    0.2 * torch.randn(s, generator=g) for s in ((3, T, H), (3, U + 1, H), (V + 1 + D, H), (V + 1 + D,))
                ]
                targets, frames, tokens = torch.randint(0, V, (3, U), generator=g), [T, 41, 1], [U, 7, 0]
                if learnt:
                    # unit h wakes where frame and token are due together; elsewhere a token that is no target wins
                    tensors[0].fill_(-4)[:, torch.arange(T), torch.arange(T) * H // T] += 3
                    tensors[1].zero_()[:, torch.arange(U + 1), torch.arange(U + 1) * H // (U + 1)] += 3
                    tensors[2].zero_()[[*range(V - 1), V]] += 4
                    tensors[3].zero_()[V - 1] += 6
                    targets.clamp_(max=V - 2)
                found = []
                for device in ("cpu", DEVICE):
                    leaves = [x.to(device, copy=True).requires_grad_() for x in tensors]
                    with torch.autocast(device, half, enabled=half is not None):
                        loss = fused_tdt_loss(
                            *leaves,
                            targets.to(device),
                            torch.tensor(frames).to(device),
                            torch.tensor(tokens).to(device),
                            **options,
                        )
                    found.append([x.cpu() for x in (loss, *torch.autograd.grad(loss, leaves))])
                tolerance = {None: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}[half]
                what = f"loss and gradients, learnt {learnt}, {half}, {options}"
                yield what, max(off(a, e) for e, a in zip(*found)), tolerance


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rehearsal", action="store_true")
    arguments = parser.parse_args()
    assert REHEARSAL or lattice.triton_works(), "Triton does not work here"
    torch.backends.cuda.matmul.allow_tf32 = False
    checks: list[dict[str, Any]] = []
    failed, started = [], time.perf_counter()
    for compare in (compare_lattices, compare_losses, compare_options):
        problem = None
        try:
            for what, worst, tolerance in compare():
                checks.append({"check": what, "off": worst, "tolerance": tolerance, "agrees": worst <= tolerance})
                print(f"{what}: {'equal' if worst <= tolerance else f'OFF BY {worst:.2g}, {tolerance:g} allowed'}")
        except Exception as error:  # what the others show is worth having
            problem = f"{compare.__name__}: {type(error).__name__}: {error}"
            print(problem, file=sys.stderr)
        failed += [c["check"] for c in checks if not c["agrees"] and c["check"] not in failed] + [
            *filter(None, [problem])
        ]
        if arguments.json:
            name = torch.cuda.get_device_name() if DEVICE == "cuda" else None
            seconds = round(time.perf_counter() - started, 1)
            found = {"machine": {"gpu": name, "torch": torch.__version__}, "seconds": seconds}
            found |= {"failed": failed, "checks": checks}
            arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"{len(checks)} comparisons, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
