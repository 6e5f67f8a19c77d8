#!/usr/bin/env python3
"""Put the parts of scripts/gpu_check.sh into one JSON file and one table: every goal with its figure and verdict.

    python scripts/gpu/report.py FOLDER_OF_PARTS REPORT.json TABLE.md
    python scripts/gpu/report.py runs/gpu_check docs/benchmarks/gpu.json docs/benchmarks/gpu.md       # to publish

A part is NAME.exit (its exit code, and its seconds) with NAME.json (its figures) where it wrote some. The verdict of a
goal is "reached", "missed", "not measured: the command that measures it", and after a rehearsal "rehearsed". Ends with
0 when every part that ran ended well and no goal is missed, else with 1.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

Parts = dict[str, Any]
STEP = ("adamw", "recommended", "recommended_small")
SPEECH = "0.6 B, clips of 1 to 20 s, batches by length"


@dataclass(frozen=True)
class Goal:
    """What is judged: `figure` of the parts, against `limit`."""

    case: str
    part: str
    what: str
    limit: float | None
    """None: there is no goal, the figure is worth having."""
    figure: Callable[[Parts], float]
    """Raises LookupError, ValueError, TypeError or ZeroDivisionError where the part has not found it."""
    at_least: bool = False


def _loss(parts: Parts, case: str, side: str, key: str = "seconds") -> float:
    return parts["loss_learnt" if "learnt" in case else "loss_time"]["cases"][case][side][key]


def _best_of_nemo(sides: dict[str, dict[str, float]], key: str, best: Callable[..., float] = min) -> float:
    return best(side[key] for name, side in sides.items() if name.startswith("nemo") and key in side)


def _nemo_loss(parts: Parts, key: str) -> float:
    return _best_of_nemo(parts["loss_time"]["cases"]["gpu_v8192"], key)


def _rows(parts: Parts) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in parts["step"]["rows"]}


def _switched(parts: Parts, switches: str, key: str) -> float:
    """Return a figure of adamw with other switches of the encoder, over that with the plain encoder."""
    rows = {row["name"]: row for row in parts["encoder"]["rows"]}
    return rows[f"adamw [{switches}]"][key] / rows["adamw"][key]


def _rate(parts: Parts, side: str) -> float:
    return parts["throughput"]["sides"][side]["audio_hours_an_hour"]


def _off(parts: Parts) -> float:
    return max(abs(_rows(parts)[name]["predicted_over_measured"] - 1) for name in STEP)


def _batches(parts: Parts) -> float:
    sides = parts["largest_batch"]["cases"]["gpu_24gb"]
    return sides["fused"]["largest_batch"] / _best_of_nemo(sides, "largest_batch", max)


def _missing(parts: Parts) -> float:
    """Count strategies that one GPU can run and that failed; of the last part, which knows most."""
    last = max(name for name in parts if name.startswith("strategies"))
    reasons = [row["reason"] for row in parts[last]["rows"] if "reason" in row]
    if any(reason.startswith("not measured yet") for reason in reasons):
        raise LookupError("there are rows left")
    return sum(not reason.startswith("needs ") for reason in reasons)


LOSS = "loss B16 T250 U100 V8192, bf16, dropout 0.2"
SWITCHES = {
    "eager, SDPA": "SDPA",
    "compiled, NeMo's attention": "compiled layers",
    "compiled, SDPA": "compiled layers and SDPA",
}
V8192, LEARNT = "gpu_v8192", "gpu_v8192_learnt"
GOALS = (
    Goal(LOSS, "loss_time", "time / floor of four products", 1.7,
         lambda p: _loss(p, V8192, "fused") / _loss(p, V8192, "floor")),
    Goal(LOSS, "loss_time", "times faster than NeMo's best", 3.0,
         lambda p: _nemo_loss(p, "seconds") / _loss(p, V8192, "fused"), True),
    Goal(LOSS, "loss_time", "NeMo's least memory / ours", 15.0,
         lambda p: _nemo_loss(p, "memory_bytes") / _loss(p, V8192, "fused", "memory_bytes"), True),
    Goal(LOSS, "loss_time", "times faster than transformers'", None,
         lambda p: _loss(p, V8192, "transformers") / _loss(p, V8192, "fused"), True),
    Goal(LOSS, "loss_time", "transformers' memory / ours", None,
         lambda p: _loss(p, V8192, "transformers", "memory_bytes") / _loss(p, V8192, "fused", "memory_bytes"), True),
    Goal("the same, a learnt model's logits, occupancy 1e-4", "loss_learnt", "time / floor of all cells", 0.8,
         lambda p: _loss(p, LEARNT, "fused 1e-4") / _loss(p, LEARNT, "floor")),
    *(Goal("step of the 0.6 B layout, 16 x 20 s, bf16", "step", f"peak of `{name}`, GB", limit,
           lambda p, name=name: _rows(p)[name]["peak_bytes"] / 1e9)
      for name, limit in zip(STEP, (22.0, 11.0, 7.5), strict=True)),
    Goal("step of the 0.6 B layout, 16 x 20 s, bf16", "step", "time of `recommended` / `adamw`", 1.25,
         lambda p: _rows(p)["recommended"]["seconds_per_step"] / _rows(p)["adamw"]["seconds_per_step"]),
    Goal("step of the 0.6 B layout, 16 x 20 s, bf16", "step", "plan off the allocator's peak, share", 0.05, _off),
    Goal("largest batch of 20 s clips with the joint, 24 GB", "largest_batch", "times NeMo's", 8.0, _batches, True),
    Goal(SPEECH, "throughput", "audio hours an hour", 2300.0, lambda p: _rate(p, "ours"), True),
    Goal(SPEECH, "throughput", "model FLOPs / published peak", 0.25,
         lambda p: p["throughput"]["sides"]["ours"]["share_of_published_peak"], True),
    Goal(SPEECH, "throughput", "times NeMo's own training", 3.0,
         lambda p: _rate(p, "ours") / _rate(p, "nemo"), True),
    Goal(SPEECH, "throughput", "times transformers' Trainer", 3.0,
         lambda p: _rate(p, "ours") / _rate(p, "transformers"), True),
    Goal("evaluation, bf16, batches by length", "evaluation", "RTFx, decoding", 1500.0,
         lambda p: p["evaluation"]["bfloat16"]["rtfx"], True),
    Goal("evaluation, bf16, batches by length", "evaluation", "texts of a trained model that differ from float32's",
         0.0, lambda p: p["evaluation"]["texts"]["differing"]),
    *(Goal("step of the 0.6 B layout, `adamw`", "encoder", f"{what}: {figure} / eager layers, NeMo's attention", None,
           lambda p, switches=switches, key=key: _switched(p, switches, key))
      for switches, what in SWITCHES.items()
      for figure, key in (("time", "seconds_per_step"), ("peak", "peak_bytes"))),
    Goal("all strategies that one GPU can run", "strategies_1 strategies_2 strategies_3", "rows without a figure",
         0.0, _missing),
    *(Goal("checks", part, what, 0.0, lambda p, part=part: p[part]["exit_code"]) for part, what in (
        ("loss", "exit code: the loss against the CPU's"), ("optimizers", "exit code: optimizers, offload, states"),
        ("activation_offload", "exit code: activation offload frees memory"))),
)  # fmt: skip


def judge(parts: Parts, rehearsed: bool = False) -> list[dict[str, Any]]:
    """Return each goal with its figure and verdict.

    Args:
        parts: figures by name of the part, as `gather` returns them.
        rehearsed: whether they come from small sizes on a CPU, which reach and miss nothing.
    """
    found = []
    for goal in GOALS:
        try:
            figure = float(goal.figure(parts))
        except (LookupError, ValueError, TypeError, ZeroDivisionError):
            figure = None
        if figure is None:
            verdict = f'not measured: PARTS="{goal.part}" bash scripts/gpu_check.sh'
        elif rehearsed:
            verdict = "rehearsed"
        elif goal.limit is None:
            verdict = "measured"
        else:
            verdict = "reached" if (figure >= goal.limit if goal.at_least else figure <= goal.limit) else "missed"
        row = {key: value for key, value in asdict(goal).items() if key not in ("figure", "at_least")}
        found.append(
            {**row, "wanted": "at least" if goal.at_least else "at most", "figure": figure, "verdict": verdict}
        )
    return found


def gather(folder: Path) -> Parts:
    """Return the figures, exit code and seconds of each part in the folder."""
    parts: Parts = {}
    for ended in sorted(folder.glob("*.exit")):
        code, seconds = ended.read_text().split()
        figures = ended.with_suffix(".json")
        try:
            found = json.loads(figures.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            found = {}
        parts[ended.stem] = {**found, "exit_code": int(code), "seconds": int(seconds)}
    return parts


def markdown(report: dict[str, Any]) -> str:
    """Return the table of all goals, and of all strategies where they were measured."""
    parts, machine = report["parts"], report["machine"]
    lines = ["# On a GPU: every goal, its figure and the verdict", "", "<!-- written by scripts/gpu/report.py -->"]
    if report["rehearsed"]:
        lines.append("A rehearsal: small sizes on the CPU. These figures say nothing about a GPU.")
    elif not parts:
        lines.append(
            "Nothing has been measured on a GPU yet. `bash scripts/gpu_check.sh` measures everything, in parts of at "
            "most 8 minutes,\nand `python scripts/gpu/report.py runs/gpu_check docs/benchmarks/gpu.json "
            "docs/benchmarks/gpu.md` writes this page."
        )
    else:
        about = ", ".join(f"{key} {value}" for key, value in machine.items() if value and key != "command")
        lines.append(f"Measured on {about}: `bash scripts/gpu_check.sh`.")
    lines += ["", "| case | figure of | goal | figure | verdict |", "|---|---|---|---|---|"]
    for g in report["goals"]:
        goal = "" if g["limit"] is None else f"{g['wanted']} {g['limit']:g}"
        figure = "" if g["figure"] is None else f"{g['figure']:.4g}"
        command = g["verdict"].partition(": ")
        verdict = f"{command[0]}: `{command[2]}`" if command[1] else g["verdict"]
        lines.append(f"| {g['case']} | {g['what']} | {goal} | {figure} | {verdict} |")
    rows = parts.get(max((name for name in parts if name.startswith("strategies")), default=""), {}).get("rows", [])
    if rows:
        lines += ["", "## All strategies", "", "| strategy | peak GB | time a step / `adamw` |", "|---|---|---|"]
    for row in rows:
        if "reason" in row:
            reason = " ".join(row["reason"].split()).replace("|", "/")
            lines.append(f"| `{row['name']}` | {reason} | |")
        else:
            ratio = row["seconds_per_step"] / rows[0]["seconds_per_step"] if "seconds_per_step" in rows[0] else 0
            lines.append(f"| `{row['name']}` | {row['peak_bytes'] / 1e9:.2f} | {ratio:.2f} |")
    if parts:
        ran = [f"{name} {part['seconds']} s (exit code {part['exit_code']})" for name, part in parts.items()]
        lines += ["", f"Parts: {', '.join(ran)}."]
    return "\n".join(lines) + "\n"


def report_of(parts: Parts, rehearsed: bool = False) -> dict[str, Any]:
    """Return the parts with the goals judged."""
    machine = next((part["machine"] for part in parts.values() if part.get("machine", {}).get("cpu")), {})
    return {"rehearsed": rehearsed, "machine": machine, "goals": judge(parts, rehearsed), "parts": parts}


def main() -> int:
    """Command line."""
    folder, file, table = (Path(argument) for argument in sys.argv[1:4])
    report = report_of(gather(folder), (folder / "rehearsal").exists())
    file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    table.write_text(markdown(report), encoding="utf-8")
    print(markdown(report))
    failed = [name for name, part in report["parts"].items() if part["exit_code"]]
    missed = [f"{g['case']}, {g['what']}" for g in report["goals"] if g["verdict"] == "missed"]
    print(f"{file} holds all figures. " + (f"FAILED: {', '.join(failed)}. " if failed else "Every part ended well. "))
    print(f"MISSED: {'; '.join(missed)}" if missed else "No goal that was measured is missed.")
    return bool(failed or missed)


if __name__ == "__main__":
    sys.exit(main())
