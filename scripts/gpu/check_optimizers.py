#!/usr/bin/env python3
"""What only a GPU shows of the optimizers: step times, low-bit states on real shapes, offload, flashoptim.

    python scripts/gpu/check_optimizers.py [--json FILE]
    python scripts/gpu/check_optimizers.py --rehearsal      on a CPU: what it can run of it, in small

Ends with 0 when every check holds, with 1 when one does not or there is no GPU. The checks of states take the tensors
of at least 2^20 elements around and in one Conformer layer of the 0.6B layout, 97 % of its bytes: torchao compiles
each shape for seconds.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1] / "bench")]

import optimizer as bench_optimizer

from finetune.config.optimizers import gpu_lacks_fp8
from finetune.strategies.low_bit import BETAS, EPS
from finetune.strategies.offload import offloaded_adamw
from finetune.strategies.optimizers import build_optimizer, describe_optimizer

LARGE = 2**20
STEPS, RATE, TIMED = 12, 1e-3, 20
# Name -> bits of a state's element, elements that share a float32 scale, number of states.
LOW_BIT = {
    "adamw_8bit": (8, 256, 2),
    "paged_adamw_8bit": (8, 256, 2),
    "lion_8bit": (8, 256, 1),
    "adamw_8bit_ao": (8, 256, 2),
    "adamw_4bit_ao": (4, 128, 2),
    "adamw_fp8_ao": (8, 256, 2),
}


def real_groups(device: str) -> list[dict[str, Any]]:
    """The large tensors of one layer and of what lies around it, as parameter groups; weights as drawn at first."""
    groups = bench_optimizer.make_work(1, device).groups
    kept = [{**g, "lr": RATE, "params": [p for p in g["params"] if p.numel() >= LARGE]} for g in groups]
    return [g for g in kept if g["params"]]


def learn(optimizer: Any, parameters: list[torch.Tensor], device: str) -> dict[str, Any]:
    """Pulls the weights towards targets 0.02 away; mean squared distance before and after, and the time of a step."""
    g = torch.Generator(device).manual_seed(1)
    targets = [torch.randn(p.shape, generator=g, device=device).mul_(0.02).add_(p.detach()) for p in parameters]
    elements = sum(p.numel() for p in parameters)

    def distance() -> float:
        return sum(float((p.detach() - t).float().square().sum()) for p, t in zip(parameters, targets)) / elements

    before = distance()
    for _ in range(STEPS):
        for p, t in zip(parameters, targets):
            p.grad = p.detach() - t.to(p.dtype)
        optimizer.step()
    after = distance()
    seconds = [bench_optimizer.seconds_of(optimizer.step, device) for _ in range(TIMED)]
    return {"loss_before": before, "loss_after": after, "step_seconds": statistics.median(seconds)}


def expected_bytes(name: str, groups: list[dict[str, Any]]) -> int:
    """Return bytes of state; float32 remains for embeddings (bitsandbytes) and for partial blocks (torchao)."""
    bits, block, states = LOW_BIT[name]
    total = 0.0
    for group in groups:
        for p in group["params"]:
            wide = p.numel() % block != 0 if name.endswith("_ao") else group["embedding"]
            total += states * p.numel() * (4 if wide else bits / 8 + 4 / block)
    return math.ceil(total)


def check_states(name: str, device: str) -> dict[str, Any]:
    """One optimizer with small states: their bytes and types, and that it learns as well as float32 AdamW."""
    if name == "adamw_fp8_ao" and gpu_lacks_fp8():
        return {"skipped": "this GPU has no FP8"}
    groups = real_groups(device)
    parameters = [p for g in groups for p in g["params"]]
    weights = [p.detach().clone() for p in parameters]
    reference = learn(build_optimizer("adamw", [dict(g) for g in groups], {}), parameters, device)
    with torch.no_grad():
        for p, w in zip(parameters, weights):
            p.copy_(w)
    optimizer = build_optimizer(name, [dict(g) for g in groups], {})
    found = learn(optimizer, parameters, device)
    told, expected = describe_optimizer(optimizer), expected_bytes(name, groups)
    elements = sum(p.numel() for p in parameters)
    found |= {
        **told,
        "parameters": elements,
        "state_bytes_per_parameter": told["optimizer_state_bytes"] / elements,
        "expected_bytes_per_parameter": expected / elements,
        "float32_loss_after": reference["loss_after"],
        "float32_step_seconds": reference["step_seconds"],
        "times_faster_than_fused": reference["step_seconds"] / found["step_seconds"],
    }
    assert told["optimizer"] != "AdamW", f"{name} fell back to 32-bit AdamW"
    assert abs(told["optimizer_state_bytes"] / expected - 1) < 0.02, (told["optimizer_state_bytes"], expected)
    assert found["loss_after"] < 0.8 * found["loss_before"], found
    if name != "lion_8bit":
        assert abs(found["loss_after"] / reference["loss_after"] - 1) < 0.1, (found["loss_after"], reference)
    return found


def make_net(device: str) -> torch.nn.Module:
    """Two matrices that are offloaded and two biases below torchao's least size, which stay on the GPU."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.Tanh(), torch.nn.Linear(512, 128))
    return net.to(device)


def groups_of(net: torch.nn.Module) -> list[dict[str, Any]]:
    matrices, biases = [p for p in net.parameters() if p.ndim > 1], [p for p in net.parameters() if p.ndim == 1]
    return [
        {"params": matrices, "lr": 1e-2, "weight_decay": 0.1},
        {"params": biases, "lr": 2e-2, "weight_decay": 0.0},
    ]


def train(net: Any, optimizer: Any, steps: range, device: str) -> list[tuple[float, float]]:
    """Losses and gradient norms under clipping and a falling learning rate."""
    found = []
    for step in steps:
        g = torch.Generator().manual_seed(step)
        x, y = torch.randn(32, 256, generator=g).to(device), torch.randn(32, 128, generator=g).to(device)
        for group, rate in zip(optimizer.param_groups, (1e-2, 2e-2)):
            group["lr"] = rate / (1 + step)
        loss = (net(x) - y).square().mean()
        loss.backward()
        clip = getattr(optimizer, "clip_grad_norm_", None)
        norm = clip(0.01) if clip else torch.nn.utils.clip_grad_norm_(net.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), float(norm)))
    return found


def check_offload(offload_gradients: bool, device: str, make: Callable[..., Any] = offloaded_adamw) -> dict[str, Any]:
    """Compare step, clipping, place of the states and a checkpoint with torch's AdamW and an uninterrupted run."""
    options = {"betas": BETAS, "eps": EPS}
    plain, offloaded = make_net(device), make_net(device)
    expected = train(plain, torch.optim.AdamW(groups_of(plain), **options), range(10), device)
    optimizer = make(groups_of(offloaded), offload_gradients=offload_gradients, **options)
    actual = train(offloaded, optimizer, range(5), device)
    buffer = io.BytesIO()
    torch.save((offloaded.state_dict(), optimizer.state_dict()), buffer)
    actual += train(offloaded, optimizer, range(5, 10), device)
    assert min(norm for _, norm in expected) > 0.01, "clipping has to be at work"
    torch.testing.assert_close(torch.tensor(actual), torch.tensor(expected), rtol=1e-4, atol=1e-6)
    for a, e in zip(offloaded.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-3, atol=1e-5)
    matrices = [p for p in offloaded.parameters() if p.ndim > 1]
    places = {optimizer.state[p]["exp_avg"].device.type for p in matrices}
    assert places == {"cpu"}, f"states of the matrices lie on {places}"
    buffer.seek(0)
    weights, states = torch.load(buffer, weights_only=True)
    again = make_net(device)
    optimizer = make(groups_of(again), offload_gradients=offload_gradients, **options)
    again.load_state_dict(weights)
    optimizer.load_state_dict(states)
    resumed = train(again, optimizer, range(5, 10), device)
    torch.testing.assert_close(torch.tensor(resumed), torch.tensor(actual[5:]), rtol=1e-6, atol=0.0)
    for a, e in zip(again.parameters(), offloaded.parameters(), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-6, atol=1e-8)
    return {"losses": [loss for loss, _ in actual], "states_of_matrices_on": sorted(places)}


def check_flashoptim(dtype: torch.dtype, device: str) -> dict[str, Any]:
    """FlashAdamW: 8-bit states, and for bf16 weights a correction byte beside."""
    if importlib.util.find_spec("flashoptim") is None:
        return {"skipped": "flashoptim is not installed"}
    weights = [p.detach().to(dtype) for g in real_groups(device) for p in g["params"]]
    parameters, reference = [torch.nn.Parameter(w) for w in weights], [torch.nn.Parameter(w.float()) for w in weights]
    options = {"lr": RATE, "betas": BETAS, "eps": EPS, "weight_decay": 0.01}
    plain = learn(torch.optim.AdamW(reference, fused=True, **options), reference, device)
    narrow = dtype == torch.bfloat16
    before = torch.cuda.memory_allocated()
    optimizer = build_optimizer("flash_adamw", [{"params": parameters, "lr": RATE, "weight_decay": 0.01}], {})
    optimizer.zero_grad()
    for p in parameters:
        p.grad = torch.zeros_like(p)
    gradients = torch.cuda.memory_allocated() - before
    optimizer.step()
    torch.cuda.synchronize()
    elements = sum(p.numel() for p in parameters)
    per_parameter = (torch.cuda.memory_allocated() - before - gradients) / elements
    found = learn(optimizer, parameters, device)
    found |= {"state_bytes_per_parameter": per_parameter, "float32_loss_after": plain["loss_after"]}
    found["times_faster_than_fused"] = plain["step_seconds"] / found["step_seconds"]
    assert per_parameter < (3.5 if narrow else 2.5), per_parameter
    assert abs(found["loss_after"] / plain["loss_after"] - 1) < 0.2, (found, plain)
    return found


def check_gradient_release(device: str) -> dict[str, Any]:
    """Steps inside of the backward pass: the same weights as with steps after it, and no gradient is left."""
    if importlib.util.find_spec("flashoptim") is None:
        return {"skipped": "flashoptim is not installed"}
    found: dict[str, Any] = {}
    weights = []
    for name in ("flash_adamw", "flash_adamw_gradient_release"):
        net = make_net(device).to(torch.bfloat16)
        optimizer = build_optimizer(name, groups_of(net), {})
        norms = []
        for step in range(5):
            g = torch.Generator().manual_seed(step)
            x, y = (torch.randn(32, size, generator=g).to(device, torch.bfloat16) for size in (256, 128))
            (net(x) - y).square().mean().backward()
            if "release" in name:
                assert all(p.grad is None for p in net.parameters()), "gradients are left after the backward pass"
            norm = optimizer.clip_grad_norm_(math.inf) if "release" in name else total_norm(net)
            norms.append(float(norm))
            optimizer.step()
            optimizer.zero_grad()
        found[f"norms of {name}"] = norms
        weights.append([p.detach().float() for p in net.parameters()])
    for after, inside in zip(*weights, strict=True):
        torch.testing.assert_close(inside, after, rtol=0.0, atol=0.0)
    after, inside = (torch.tensor(norms) for norms in found.values())
    torch.testing.assert_close(inside, after, rtol=1e-3, atol=0.0)
    return found


def total_norm(net: torch.nn.Module) -> torch.Tensor:
    return torch.stack([p.grad.float().square().sum() for p in net.parameters()]).sum().sqrt()


def run_checks(device: str, only: tuple[str, ...] = ()) -> dict[str, Any]:
    """Every check's figures, or why it failed; one that fails does not keep the others from running.

    Args:
        only: names of checks; empty: all.
    """
    checks: dict[str, Callable[[], dict[str, Any]]] = {}
    for name in LOW_BIT:
        checks[f"states of {name}"] = lambda name=name: check_states(name, device)
    for gradients in (False, True):
        checks[f"offload, gradients {gradients}"] = lambda gradients=gradients: check_offload(gradients, device)
    for dtype in (torch.float32, torch.bfloat16):
        checks[f"flashoptim, {dtype}"] = lambda dtype=dtype: check_flashoptim(dtype, device)
    checks["flashoptim, gradient release"] = lambda: check_gradient_release(device)
    found = {}
    for name, check in checks.items():
        if only and name not in only:
            continue
        started = time.perf_counter()
        try:
            found[name] = check()
        except Exception as error:  # the report is the point
            found[name] = {"failed": f"{type(error).__name__}: {error}"}
        found[name]["wall_seconds"] = round(time.perf_counter() - started, 1)
        told = found[name].get("failed") or found[name].get("skipped") or "holds"
        size = found[name].get("state_bytes_per_parameter")
        print(
            f"{name}: {told}{f', {size:.2f} bytes a parameter' if size else ''}, {found[name]['wall_seconds']} s",
            flush=True,
        )
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rehearsal", action="store_true")
    arguments = parser.parse_args()
    device, only, layers, repeats = "cuda", (), 6, 20
    # torchao's optimizers are timed by their checks: here they would compile each of the shapes.
    sides = tuple(s for s in bench_optimizer.SIDES if not s.endswith("_ao"))
    if arguments.rehearsal:
        device, only, layers, repeats, sides = "cpu", ("states of adamw_8bit",), 0, 1, ("adamw_loop", "adamw")
    elif not torch.cuda.is_available():
        print("gpu_check_optimizers: torch sees no GPU here; nothing was checked", file=sys.stderr)
        raise SystemExit(1)
    about = bench_optimizer.machine()
    about["command"] = "python scripts/gpu/check_optimizers.py " + " ".join(sys.argv[1:])
    checks = run_checks(device, only)
    failed = [name for name, r in checks.items() if "failed" in r]
    report = {"machine": about, "checks": checks, "failed": failed}

    def write() -> None:
        if arguments.json:
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")

    write()
    # `rates` compiles a step a dozen times over, for minutes.
    sections = ("step", "clipping", "schedules")
    report["bench"] = timed = bench_optimizer.measure(sections, layers, sides, repeats, device)
    write()
    bench_optimizer.print_tables(timed)
    bench_optimizer.print_verdicts(timed["verdicts"])
    if failed:
        print(f"gpu_check_optimizers: {len(failed)} checks failed: {', '.join(failed)}", file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    main()
