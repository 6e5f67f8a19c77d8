"""One row for the yardstick's runs, the table and the picture of scripts/bench/compare_strategies.py."""

import statistics
import sys
from pathlib import Path
from typing import Any


def spread(base: dict[str, Any]) -> str:
    """How far the times of the yardstick's runs lie apart."""
    times = base.get("seconds_per_step_of_runs", [])
    if len(times) < 2:
        return ""
    shares = " to ".join(f"{t / base['seconds_per_step']:.2f}" for t in (times[0], times[-1]))
    return f"{len(times)} runs of {base['name']}, between the others, took {shares} of their median time."


def together(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with the runs of the yardstick as one, the median of their times and all of them beside."""
    own = [row for row in rows if row["name"] == rows[0]["name"] and row["settings"] == rows[0]["settings"]]
    times = sorted(row["seconds_per_step"] for row in own if "reason" not in row)
    others = [row for row in rows if not any(row is mine for mine in own)]
    if not times:
        return [own[0], *others]
    for row in own:
        if "reason" in row:
            print(f"a run of {row['name']} failed: {row['reason']}", file=sys.stderr)
    base = next(row for row in own if "reason" not in row)
    return [{**base, "seconds_per_step": statistics.median(times), "seconds_per_step_of_runs": times}, *others]


def table(rows: list[dict[str, Any]], where: dict[str, Any], steps: int) -> str:
    """The comparison as a Markdown table; the first row is the yardstick."""
    base = rows[0]
    scale, unit = (2**30, "GiB") if base.get("peak_bytes", 0) > 2**31 else (2**20, "MiB")
    kind = "CUDA allocator" if where["gpu"] else "account of the process's tensors"
    lines = [
        f"Measured on {where['gpu'] or where['cpu']} ({where['threads']} threads), torch {where['torch']}, "
        f"{' and '.join(sorted({r['date'] for r in rows}))}; {steps} "
        f"steps on the same clips; peak memory: {kind}, of one process. {spread(base)}",
        "",
        f"| strategy | optimizer | processes | peak {unit} | of that parameters / gradients / optimizer / activations "
        f"| optimizer bytes a trained "
        f"parameter | time a step against {base['name']} | loss | against {base['name']} | WER |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        if "reason" in r:
            reason = " ".join(r["reason"].split()).replace("|", "/")
            lines.append(f"| {r['name']} | | | | cannot run here: {reason} | | | | | |")
            continue
        parts = " / ".join(
            f"{r['parts_bytes'][p] / scale:.1f}" for p in ("parameters", "gradients", "optimizer", "activations")
        )
        ratio = f"{r['seconds_per_step'] / base['seconds_per_step']:.2f}" if "seconds_per_step" in base else ""
        change = f"{100 * (r['loss'] / base['loss'] - 1):+.2f} %" if "loss" in base else ""
        wer = "" if r["wer"] is None else f"{r['wer']:.3f}"
        lines.append(
            f"| {r['name']} | {r['optimizer']} | {r['processes']} | {r['peak_bytes'] / scale:.1f} | {parts} | "
            f"{r['optimizer_bytes_per_parameter']:.2f} | "
            f"{ratio} | {r['loss']:.3f} | {change} | {wer} |"
        )
    return "\n".join(lines) + "\n"


def picture(rows: list[dict[str, Any]], where: dict[str, Any], path: Path) -> None:
    """Memory as stacked bars, time a step, and loss curves."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    measured = [r for r in rows if "reason" not in r]
    base = measured[0]
    fig, (memory, speed, curves) = plt.subplots(
        1, 3, figsize=(17, 1.8 + 0.3 * len(measured)), width_ratios=(5, 3, 5), layout="constrained"
    )
    names, left = [r["name"] for r in measured], [0.0] * len(measured)
    scale, unit = (2**30, "GiB") if base["peak_bytes"] > 2**31 else (2**20, "MiB")
    for part, colour in zip(
        ("parameters", "gradients", "optimizer", "activations"), ("#4477aa", "#66ccee", "#ee6677", "#ccbb44")
    ):
        sizes = [r["parts_bytes"][part] / scale for r in measured]
        memory.barh(names, sizes, left=left, label=part, color=colour)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    memory.set_xlabel(f"peak memory of one process, {unit}")
    memory.legend(fontsize=8)
    memory.invert_yaxis()
    memory.grid(axis="x", alpha=0.3)
    ratios = [r["seconds_per_step"] / base["seconds_per_step"] for r in measured]
    speed.barh(names, ratios, color="#888888")
    speed.axvline(1.0, color="black", linewidth=0.8)
    speed.set_xlabel(f"time a step against {base['name']}")
    speed.tick_params(labelleft=False)
    speed.invert_yaxis()
    speed.grid(axis="x", alpha=0.3)
    colours = plt.cm.turbo
    for i, r in enumerate(measured):
        curves.plot(
            range(1, len(r["losses"]) + 1),
            r["losses"],
            label=r["name"],
            linewidth=1,
            color=colours(i / max(len(measured) - 1, 1)),
        )
    curves.set_xlabel("step")
    curves.set_ylabel("loss, nats a clip")
    curves.set_yscale("log")
    curves.legend(fontsize=6, ncols=2)
    curves.grid(alpha=0.3)
    fig.suptitle(f"{where['gpu'] or where['cpu']}, torch {where['torch']}, {where['date']}", fontsize=9)
    fig.savefig(path, dpi=90)
    plt.close(fig)
