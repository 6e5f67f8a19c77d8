#!/usr/bin/env python3
"""Time everything around an optimizer step on the shapes of Parakeet-TDT-0.6B-v3, side by side in one process.

    python scripts/bench/optimizer.py [--layers 2 | --full] [--only SECTION ...] [--sides NAME ...] [--json FILE]

Sections: `step` (optimizers, and one flat tensor a group), `clipping`, `schedules`, `rates` (learning rates as floats
or tensors in a compiled step). The shapes are those of NeMo's own modules with --layers Conformer layers (of 24);
ratios hardly depend on it, since tensors and bytes grow together. All sides step the same weights with the same
gradients, in turns; figures are medians. Each float32 side works on the same two states, which saves memory. The floor
of a step is what it has to read and write (weights, gradients, states), at the rate at which this machine copied or
scaled a large tensor in the same turns, whichever is more. The first step is separate: it compiles, from an empty
cache.

Verdicts follow from the figures:
  step       keep: at least 5 % less time or at least 5 % fewer bytes of state than adamw (fused, the default), and no
             side with the same bytes (within 10 %; fewer bits are another mathematics) takes 5 % less time. adamw
             itself: the latter alone.
  clipping   keep: within 5 % of the fastest.
  schedules  keep: at most 1 % of a fused step. Rates by hand, keep: they save more than 1 % of a fused step over the
             dearest schedule.
  rates      keep: no more compilations than the other; where as many, a later step takes at most 5 % longer.
A claim is reached when a gain is at least the claimed range's lower end, or a cost at most its upper end.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from optimizer_verdicts import print_verdicts, verdicts
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

LAYOUT = ROOT / "finetune" / "configs" / "models" / "parakeet_tdt_0.6b_v3.yaml"
VOCABULARY, LAYERS = 8192, 24  # of the published model; the layout file leaves the vocabulary to its tokenizer
SECTIONS = ("step", "clipping", "schedules", "rates")
FLOAT32 = ("adamw_loop", "adamw_foreach", "adamw", "adamw_compiled", "flat")
SIDES = (*FLOAT32, "adamw_8bit", "adamw_8bit_ao", "adamw_4bit_ao")
COPY, SCALE = "copy of a large tensor", "scaling in place"
HAND = "by hand"
SCHEDULE_STEPS = 200  # timed together
RATE_STEPS, RATE_LAYERS = 12, 0  # what lies around the Conformer layers is enough, and compiles in a minute
BAR_SECONDS = 0.5 if sys.stderr.isatty() else 20
ALIGNMENT = 64  # elements; an allocator gives tensors of their own no less


def real_layout(layers: int) -> torch.nn.Module:
    """Encoder, prediction network and joint as NeMo builds them, on the meta device: shapes without memory."""
    from omegaconf import OmegaConf

    from finetune.models.nemo import import_nemo

    import_nemo()
    from nemo.core.classes import Serialization

    config = OmegaConf.load(LAYOUT).model
    config.encoder.n_layers = 1
    config.decoder.vocab_size = config.joint.num_classes = VOCABULARY
    config.joint.jointnet.encoder_hidden = config.model_defaults.enc_hidden
    config.joint.jointnet.pred_hidden = config.model_defaults.pred_hidden
    model = torch.nn.Module()
    for part in ("encoder", "decoder", "joint"):
        settings = OmegaConf.create(OmegaConf.to_container(config[part], resolve=True))
        setattr(model, part, Serialization.from_config_dict(settings).to("meta"))
    layer = model.encoder.layers[0]
    model.encoder.layers = torch.nn.ModuleList(copy.deepcopy(layer) for _ in range(layers))
    return model


def own_storage(view: torch.Tensor) -> torch.Tensor:
    """Return the same memory as a storage of its own; compiled code checks tensors of one storage for overlaps."""
    return torch.from_dlpack(view)


def make_work(layers: int, device: str) -> SimpleNamespace:
    """Make weights, gradients and two states as one flat tensor a group, and as real shapes in the same memory.

    Returns:
        groups: parameter groups of the real shapes; flat_groups: the same with one flat parameter each; states:
        parameter -> its (exp_avg, exp_avg_sq), for both; parameters, flat_parameters; elements: of the real shapes.
    """
    from finetune.strategies.optimizers import parameter_groups

    g = torch.Generator(device).manual_seed(0)
    groups, flat_groups, states, sizes = [], [], {}, []
    for group in parameter_groups(real_layout(layers), {}, 1e-4, 0.01):
        starts, end = [], 0
        for p in group["params"]:
            starts.append(end)
            end += -(-p.numel() // ALIGNMENT) * ALIGNMENT
        flat = torch.nn.Parameter(torch.zeros(end, device=device))
        flat.grad = torch.zeros_like(flat)
        states[flat] = (torch.zeros_like(flat.data), torch.zeros_like(flat.data))
        views = []
        for start, p in zip(starts, group["params"], strict=True):
            parts = (flat.data, flat.grad, *states[flat])
            weight, grad, *moments = (own_storage(x[start : start + p.numel()].view(p.shape)) for x in parts)
            weight.normal_(std=0.02, generator=g)
            grad.normal_(std=1e-3, generator=g)
            view = torch.nn.Parameter(weight)
            view.grad = grad
            states[view] = tuple(moments)
            views.append(view)
        sizes += [p.numel() for p in views]
        groups.append({**group, "params": views})
        flat_groups.append({**group, "params": [flat]})
    return SimpleNamespace(
        device=device,
        layers=layers,
        groups=groups,
        flat_groups=flat_groups,
        states=states,
        parameters=[p for group in groups for p in group["params"]],
        flat_parameters=[p for group in flat_groups for p in group["params"]],
        elements=sum(sizes),
    )


def make_optimizer(name: str, work: SimpleNamespace) -> torch.optim.Optimizer:
    """An optimizer of the project, or `flat`; float32 ones get the shared states."""
    from finetune.strategies.low_bit import BETAS, EPS
    from finetune.strategies.optimizers import build_optimizer

    if name == "flat":
        optimizer = torch.optim.AdamW([dict(group) for group in work.flat_groups], fused=True, betas=BETAS, eps=EPS)
    else:
        optimizer = build_optimizer(name, [dict(group) for group in work.groups], {})
    if name in FLOAT32:
        share_states(optimizer, work.states)
    return optimizer


def share_states(optimizer: torch.optim.Optimizer, states: dict[torch.Tensor, tuple[torch.Tensor, ...]]) -> None:
    """Gives AdamW its states beforehand. Its step counter lies on the device where AdamW would put it."""
    for group in optimizer.param_groups:
        on_device = group["fused"] or group["capturable"]
        for p in group["params"]:
            counter = torch.zeros((), device=p.device if on_device else "cpu")
            optimizer.state[p] = {"step": counter, "exp_avg": states[p][0], "exp_avg_sq": states[p][1]}


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all states; bitsandbytes' tables, which parameters share, count once."""
    from finetune.strategies.optimizers import stored_tensors

    values = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    return sum({t.data_ptr(): t.numel() * t.element_size() for v in values for t in stored_tensors(v)}.values())


def seconds_of(call: Callable[[], Any], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def in_turns(
    title: str, calls: dict[str, Callable[[], Any]], repeats: int, device: str
) -> dict[str, dict[str, float | list[float]]]:
    """Times all calls in turns, after two that do not count: the first (`first_seconds`) and one to warm up."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    with tqdm(total=len(calls) * (repeats + 2), desc=title, unit="call", mininterval=BAR_SECONDS) as bar:
        for rounds in (range(2), range(repeats)):
            for _ in rounds:
                for name, call in calls.items():
                    bar.set_postfix_str(name, refresh=sys.stderr.isatty())
                    found[name].append(seconds_of(call, device))
                    bar.update()
    return {
        name: {
            "seconds": statistics.median(s[2:]),
            "fastest": min(s[2:]),
            "slowest": max(s[2:]),
            "first_seconds": s[0],
        }
        for name, s in found.items()
    }


def bench_step(work: SimpleNamespace, sides: tuple[str, ...], repeats: int) -> dict[str, Any]:
    """Optimizer steps against the time that memory takes."""
    optimizers = {name: make_optimizer(name, work) for name in sides}
    source = torch.ones(128 * 2**20, device=work.device)
    target = torch.zeros_like(source)
    calls: dict[str, Callable[[], Any]] = {COPY: lambda: target.copy_(source), SCALE: lambda: source.mul_(1.0)}
    times = in_turns("step", {**calls, **{k: o.step for k, o in optimizers.items()}}, repeats, work.device)
    rates = {k: 2 * source.nbytes / times[k]["seconds"] for k in calls}
    found: dict[str, Any] = {"bytes_per_second": rates, "sides": {}}
    for name, optimizer in optimizers.items():
        held = state_bytes(optimizer)
        moved = 3 * 4 * work.elements + 2 * held
        tensors = sum(len(group["params"]) for group in optimizer.param_groups)
        found["sides"][name] = {
            **times[name],
            "class": type(optimizer).__name__,
            "tensors": tensors,
            "state_bytes": held,
            "bytes_moved": moved,
            "floor_seconds": moved / max(rates.values()),
        }
        if work.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            optimizer.step()
            torch.cuda.synchronize()
            found["sides"][name]["temporary_bytes"] = torch.cuda.max_memory_allocated() - before
    return found


def naive_clip(parameters: list[torch.Tensor], max_norm: float) -> float:
    """One norm brought to the host for each tensor, as one writes it first."""
    norm = sum(p.grad.norm().item() ** 2 for p in parameters) ** 0.5
    if norm > max_norm:
        for p in parameters:
            p.grad.mul_(max_norm / (norm + 1e-6))
    return norm


def bench_clipping(work: SimpleNamespace, repeats: int) -> dict[str, Any]:
    """Each call scales the gradients by 0.999, so that there always is something to clip."""
    now = {"norm": naive_clip(work.parameters, float("inf"))}
    clip = torch.nn.utils.clip_grad_norm_
    ways: dict[str, Callable[[float], Any]] = {
        "foreach": lambda limit: clip(work.parameters, limit, foreach=True),
        "loop": lambda limit: clip(work.parameters, limit, foreach=False),
        "naive": lambda limit: naive_clip(work.parameters, limit),
        "flat": lambda limit: clip(work.flat_parameters, limit, foreach=True),
    }
    for name, way in ways.items():
        norm = float(way(0.999 * now["norm"]))
        if abs(norm / now["norm"] - 1) > 1e-2:  # the sum of 600 million squares in float32
            raise RuntimeError(f"{name} measured a gradient norm of {norm}, expected {now['norm']}")
        now["norm"] *= 0.999

    def call(way: Callable[[float], Any]) -> Callable[[], None]:
        def clip_once() -> None:
            way(0.999 * now["norm"])
            now["norm"] *= 0.999

        return clip_once

    times = in_turns("clipping", {k: call(w) for k, w in ways.items()}, repeats, work.device)
    return {"bytes_moved": 3 * 4 * work.elements, "sides": times}


def bench_schedules(work: SimpleNamespace, repeats: int, fused_seconds: float | None) -> dict[str, Any]:
    """What comes between two optimizer steps: the schedule's own step, and its rates written into the optimizer."""
    from finetune.config.schema import SCHEDULES
    from finetune.training.schedule import Schedule

    fused = make_optimizer("adamw", work)
    if fused_seconds is None:
        fused_seconds = float(in_turns("fused step", {"adamw": fused.step}, repeats, work.device)["adamw"]["seconds"])
    total, peaks, done = 10**6, [group["lr"] for group in fused.param_groups], {"steps": 0}

    def by_hand() -> None:
        for _ in range(SCHEDULE_STEPS):
            done["steps"] += 1
            for group, peak in zip(fused.param_groups, peaks):
                group["lr"] = peak * (1 - done["steps"] / total)

    def by_schedule(name: str, optimizer: Any) -> Callable[[], None]:
        schedule = Schedule(name, optimizer.param_groups, 1000, total)

        def steps() -> None:
            for _ in range(SCHEDULE_STEPS):
                schedule.step()
                schedule.apply(optimizer)

        return steps

    calls = {HAND: by_hand, **{name: by_schedule(name, fused) for name in SCHEDULES}}
    rates = [{"lr": torch.tensor(peak, device=work.device)} for peak in peaks]
    calls["cosine, tensor rates"] = by_schedule("cosine", SimpleNamespace(param_groups=rates))
    times = in_turns("schedules", calls, repeats, work.device)
    sides = {}
    for name, t in times.items():
        microseconds = 1e6 * float(t["seconds"]) / SCHEDULE_STEPS
        sides[name] = {
            "microseconds": microseconds,
            "share_of_fused_step": 1e-6 * microseconds / fused_seconds,
        }
    return {"fused_seconds": fused_seconds, "groups": len(peaks), "sides": sides}


def bench_rates(device: str, repeats: int) -> dict[str, Any]:
    """A compiled step whose learning rate changes each time, held as floats and as tensors.

    Compilations are counted one side after the other, from a fresh start: what one side showed the compiler would
    spare the other some. The seconds of a step are then taken in turns.
    """
    from torch._dynamo.utils import counters

    from finetune.strategies.low_bit import BETAS, EPS

    torch._dynamo.reset()
    work = make_work(RATE_LAYERS, device)
    tensors = make_optimizer("adamw_compiled", work)
    alike = {k: tensors.defaults[k] for k in ("foreach", "capturable")}
    floats = torch.optim.AdamW([dict(g) for g in work.groups], betas=BETAS, eps=EPS, **alike)
    share_states(floats, work.states)
    done = {"steps": 0}

    def stepping(optimizer: torch.optim.Optimizer, step: Callable[[], Any]) -> Callable[[], None]:
        def step_at_another_rate() -> None:
            done["steps"] += 1
            for group in optimizer.param_groups:
                rate = 1e-4 / done["steps"]
                group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], torch.Tensor) else rate
            step()

        return step_at_another_rate

    calls = {
        "float": stepping(floats, torch.compile(floats.step, fullgraph=False)),
        "tensor": stepping(tensors, tensors.step),
    }
    found: dict[str, Any] = {}
    with tqdm(total=len(calls) * RATE_STEPS, desc="rates", unit="step", mininterval=BAR_SECONDS) as bar:
        for name, call in calls.items():
            seconds, graphs = [], []
            for _ in range(RATE_STEPS):
                before = counters["stats"]["unique_graphs"]
                seconds.append(seconds_of(call, device))
                graphs.append(counters["stats"]["unique_graphs"] - before)
                bar.update()
            found[name] = {
                "compilations": sum(graphs),
                "compilations_by_step": graphs,
                "seconds_by_step": seconds,
                "first_seconds": seconds[0],
                "total_seconds": sum(seconds),
            }
    before = counters["stats"]["unique_graphs"]
    for name, times in in_turns("rates in turns", calls, repeats, device).items():
        found[name]["later_seconds_median"] = times["seconds"]
    again = counters["stats"]["unique_graphs"] - before
    return {"tensors": len(work.parameters), "steps": RATE_STEPS, "compilations_in_turns": again, "sides": found}


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    cpu = next((x.split(":")[1].strip() for x in lines if "model name" in x), platform.processor())
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_before": os.getloadavg()[0],
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "bitsandbytes", "torchao", "nemo_toolkit")},
        "date": date.today().isoformat(),
        "command": "python scripts/bench/optimizer.py " + " ".join(sys.argv[1:]),
    }


def print_tables(found: dict[str, Any]) -> None:
    """The sections that were measured."""
    if "step" in found:
        rates = ", ".join(f"{k} {v / 1e9:.1f} GB/s" for k, v in found["step"]["bytes_per_second"].items())
        sides = found["step"]["sides"]
        slowest, default = sides.get("adamw_loop"), sides.get("adamw")
        print(f"\nstep ({rates})")
        print(
            f"{'side':16} {'tensors':>7} {'ms':>9} {'x loop':>7} {'x fused':>7} {'MB moved':>9} {'floor ms':>9} "
            f"{'x floor':>8} {'state MB':>9} {'first s':>8}"
        )
        for name, r in sides.items():
            over = [f"{side['seconds'] / r['seconds']:.2f}" if side else "-" for side in (slowest, default)]
            print(
                f"{name:16} {r['tensors']:7d} {1e3 * r['seconds']:9.2f} {over[0]:>7} {over[1]:>7} "
                f"{r['bytes_moved'] / 1e6:9.0f} "
                f"{1e3 * r['floor_seconds']:9.2f} {r['seconds'] / r['floor_seconds']:8.2f} "
                f"{r['state_bytes'] / 1e6:9.1f} {r['first_seconds']:8.1f}"
            )
    if "clipping" in found:
        sides = found["clipping"]["sides"]
        print(f"\n{'clipping':16} {'ms':>9} {'x loop':>7}")
        for name, r in sides.items():
            print(f"{name:16} {1e3 * r['seconds']:9.2f} {sides['loop']['seconds'] / r['seconds']:7.2f}")
    if "schedules" in found:
        print(
            f"\nschedules, {found['schedules']['groups']} groups; fused step "
            f"{1e3 * found['schedules']['fused_seconds']:.2f} ms"
        )
        print(f"{'schedule':24} {'us/step':>9} {'of a fused step':>16}")
        for name, r in found["schedules"]["sides"].items():
            print(f"{name:24} {r['microseconds']:9.2f} {r['share_of_fused_step']:16.4%}")
    if "rates" in found:
        print(
            f"\nlearning rate in a compiled step, {found['rates']['steps']} steps, {found['rates']['tensors']} tensors"
        )
        print(f"{'held as':16} {'compiled':>8} {'first s':>8} {'later s':>8} {'all s':>8}")
        for name, r in found["rates"]["sides"].items():
            print(
                f"{name:16} {r['compilations']:8d} {r['first_seconds']:8.2f} {r['later_seconds_median']:8.3f} "
                f"{r['total_seconds']:8.2f}"
            )


def measure(
    sections: tuple[str, ...], layers: int, sides: tuple[str, ...] = SIDES, repeats: int = 7, device: str = "cpu"
) -> dict[str, Any]:
    """All figures of the named sections, and the verdicts on them."""
    work = make_work(layers, device)
    found: dict[str, Any] = {
        "layout": {
            "layers": layers,
            "tensors": len(work.parameters),
            "parameters": work.elements,
            "groups": len(work.groups),
        }
    }
    if "step" in sections:
        found["step"] = bench_step(work, sides, repeats)
    if "clipping" in sections:
        found["clipping"] = bench_clipping(work, repeats)
    if "schedules" in sections:
        known = found.get("step", {}).get("sides", {}).get("adamw", {}).get("seconds")
        found["schedules"] = bench_schedules(work, repeats, known)
    del work
    if "rates" in sections:
        found["rates"] = bench_rates(device, repeats)
    return {**found, "verdicts": verdicts(found)}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, help="Conformer layers (default: 2 on a CPU, 24 on a GPU)")
    parser.add_argument("--full", action="store_true", help="all 24 layers")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES, help="optimizers of the section `step`")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layers = LAYERS if arguments.full or device == "cuda" else 2
    if arguments.layers is not None:
        layers = arguments.layers
    about = machine()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        started = time.perf_counter()
        found = measure(tuple(arguments.only), layers, tuple(arguments.sides), arguments.repeats, device)
    about["wall_seconds"] = round(time.perf_counter() - started, 1)
    layout = found["layout"]
    print(
        f"\n{about['gpu'] if device == 'cuda' else about['cpu']}, {about['threads']} threads, torch {about['torch']}: "
        f"{layout['layers']} of {LAYERS} layers, {layout['tensors']} tensors, "
        f"{layout['parameters'] / 1e6:.1f} M parameters; {about['wall_seconds']:.0f} s"
    )
    print_tables(found)
    print_verdicts(found["verdicts"])
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps({"machine": about, **found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
