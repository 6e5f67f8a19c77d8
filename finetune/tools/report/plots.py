"""The plots of a page, as plotly.js takes them. Colours are "@0" to "@7": the page chooses them for dark and light."""

import html
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from finetune.data.guard_halves import CHOICE
from finetune.security.safe_text import one_line
from finetune.tools.report.read import Run, number

HEIGHT = 310  # pixels
POINTS = 2000
TABLE_ROWS = 25
DASHES = ("solid", "dash", "dot", "dashdot")  # after eight colours
SMOOTHED = "Smoothed where there are many points."
SMOOTHED_ABOVE = 60  # points of a curve that gets a smoothed one beside it


@dataclass
class Plot:
    """One plot, with what it shows as a table."""

    name: str
    """Id in the page."""
    title: str
    traces: list[dict[str, Any]]
    layout: dict[str, Any]
    heads: list[str]
    rows: list[list[Any]]
    note: str = ""


@dataclass
class Curve:
    """A line over the steps."""

    name: str
    steps: list[float]
    values: list[float | None]
    style: dict[str, Any] = field(default_factory=dict)


def thin(
    steps: list[float], values: list[float | None], limit: int = POINTS
) -> tuple[list[float], list[float | None]]:
    """Return at most `limit` points: of each stretch the lowest, the highest and the first gap; and the last."""
    if len(steps) <= limit:
        return steps, values
    kept = {len(values) - 1}
    for places in np.array_split(np.arange(len(values)), max((limit - 1) // 3, 1)):
        there = [(value, i) for i in places if (value := values[i]) is not None]
        if there:
            kept |= {min(there)[1], max(there)[1]}
        kept |= set([i for i in places if values[i] is None][:1])
    order = sorted(kept)
    return [steps[i] for i in order], [values[i] for i in order]


def smooth(values: list[float | None]) -> list[float | None]:
    """Return means over a window of a fiftieth of the curve."""
    window = np.ones(2 * max(len(values) // 100, 2) + 1)
    values_N = np.array(values, dtype=float)  # NaN where there is none
    known_N = np.isfinite(values_N)
    sums_N = np.convolve(np.where(known_N, values_N, 0), window, "same")
    counts_N = np.convolve(known_N, window, "same")
    return [total / count if count else None for total, count in zip(sums_N.tolist(), counts_N.tolist(), strict=True)]


def curve(name: str, rows: list[dict[str, Any]], key: str, scale: float = 1, **style: Any) -> Curve:
    """Return a curve over rows with a step."""
    values = [None if (value := number(row.get(key))) is None else scale * value for row in rows]
    return Curve(name, [row["step"] for row in rows], values, style)


def curves_plot(name: str, title: str, unit: str, curves: list[Curve], note: str = "", **axis: Any) -> Plot | None:
    """Return lines over the steps; None where there is not one value."""
    curves = [c for c in curves if any(value is not None for value in c.values)]
    if not curves:
        return None
    traces = []
    for index, c in enumerate(curves):
        steps, values = thin(c.steps, c.values)
        line = {"color": f"@{index % 8}", "width": 2, "dash": DASHES[index // 8 % 4], **c.style.get("line", {})}
        few = sum(value is not None for value in values) <= 40
        traces.append(
            {
                "type": "scatter",
                "name": html.escape(one_line(c.name)),  # plotly reads tags in it
                "x": steps,
                "y": values,
                "mode": "lines+markers" if few else "lines",
                "line": line,
                **{k: v for k, v in c.style.items() if k != "line"},
            }
        )
    layout = {
        "xaxis": {"title": {"text": "step"}},
        "yaxis": {"title": {"text": unit}, **axis},
        "showlegend": len(curves) > 1,
        "height": HEIGHT + 12 * max(len(curves) - 4, 0),  # room for the legend
    }
    return Plot(name, title, traces, layout, ["step", *(c.name for c in curves)], _table(curves), note)


def _table(curves: list[Curve]) -> list[list[Any]]:
    """Return some of the steps, evenly spaced, the last one included."""
    by_step = [dict(zip(c.steps, c.values, strict=True)) for c in curves]
    steps = sorted(set().union(*by_step))
    if len(steps) > TABLE_ROWS:
        steps = [steps[round(i)] for i in np.linspace(0, len(steps) - 1, TABLE_ROWS)]
    return [[int(step), *(values.get(step) for values in by_step)] for step in steps]


def with_smoothed(raw: Curve) -> list[Curve]:
    """Return a curve; where it has many points it is faint, with a smoothed one in front of it."""
    if len(raw.values) <= SMOOTHED_ABOVE:
        return [raw]
    raw.style.update(opacity=0.4, line={"width": 1})
    return [raw, Curve("smoothed", raw.steps, smooth(raw.values), {"line": {"color": "@1", "width": 2.5}})]


def only_smoothed(raw: Curve) -> Curve:
    """Return a curve that shares its plot: smoothed where it has many points, as raw ones hide each other."""
    return Curve(raw.name, raw.steps, smooth(raw.values), raw.style) if len(raw.values) > SMOOTHED_ABOVE else raw


def wer_plot(run: Run, split: str) -> Plot | None:
    """Return the plot of WER by evaluation, over all languages and for each."""
    rows = run.rows(split) if split == "validation" else run.curve_rows(split)
    languages = sorted({row["language"] for row in rows if row.get("language") is not None})
    curves = []
    for name in [None, *(languages if len(languages) > 1 else [])]:
        of_language = [row for row in rows if row.get("language") == name]
        curves.append(curve(name or "all", of_language, "wer", 100, line={"width": 3.5 if name is None else 1.5}))
    place = "wer" if split == "validation" else f"wer-{split}"
    title, note = f"Word error rate on {split}", "Step 0 is the base model."
    plot = curves_plot(place, title, "WER, %", curves, note, rangemode="tozero")
    if plot is not None and (step := number(run.best_step)) is not None:
        at = {"x0": step, "x1": step, "yref": "paper", "y0": 0, "y1": 1}
        line = {"color": "@grid-strong", "width": 1.5, "dash": "dash"}
        plot.layout["shapes"] = [{"type": "line", **at, "line": line}]
        above = {"x": step, "yref": "paper", "y": 1.0, "yanchor": "bottom"}
        plot.layout["annotations"] = [{**above, "text": "best", "showarrow": False}]
    return plot


def has_guard_curve(run: Run, split: str) -> bool:
    """Return whether data.guard or its half was evaluated after step 0."""
    return any(row["step"] for row in run.curve_rows(split))


def run_curves(run: Run) -> list[Plot | None]:
    """Return the plots of a run over its steps."""
    rows = run.metrics

    def single(name: str, key: str) -> list[Curve]:
        return with_smoothed(curve(name, rows, key))

    rates = [{**(row.get("learning_rates") or {}), "step": row["step"]} for row in rows]
    parts = sorted({part for row in rates for part in row if part != "step"})
    if all(len({row[part] for part in parts if part in row}) < 2 for row in rates):
        rates, parts = rows, ["learning_rate"]
    memory = {"GPU, peak so far": "peak_memory_gib"} if run.has_gpu else {}
    memory["resident in host memory"] = "rss_gib"
    if not run.has_gpu:
        memory["resident, peak so far"] = "peak_rss_gib"
    fractions = {"time waiting for data": "data_wait_fraction", "padding in the batches": "padding_fraction"}
    return [
        curves_plot(
            "loss", "Training loss", "loss", single("loss", "loss"), "Mean over the steps between two points."
        ),
        wer_plot(run, "validation"),
        wer_plot(run, "guard") if has_guard_curve(run, "guard") and not run.rows(CHOICE) else None,
        wer_plot(run, CHOICE) if has_guard_curve(run, CHOICE) else None,
        curves_plot(
            "rates",
            "Learning rates",
            "learning rate",
            [curve(part.replace("_", " ") or "others", rates, part) for part in parts],
            exponentformat="power",
            rangemode="tozero",
        ),
        curves_plot(
            "throughput",
            "Throughput",
            "audio s / s",
            single("throughput", "audio_seconds_per_second"),
            "Seconds of audio trained on in a second of the clock, over all processes; evaluations do not count.",
            rangemode="tozero",
        ),
        curves_plot(
            "memory",
            "Memory of the first process",
            "GiB",
            [curve(name, rows, key) for name, key in memory.items()],
            rangemode="tozero",
        ),
        curves_plot(
            "gradient",
            "Gradient norm",
            "norm",
            single("gradient norm", "grad_norm"),
            clipping_note(run),
        ),
        curves_plot(
            "waiting",
            "Waiting and padding",
            "%",
            [only_smoothed(curve(name, rows, key, 100)) for name, key in fractions.items()],
            SMOOTHED,
            rangemode="tozero",
        ),
    ]


def clipping_note(run: Run) -> str:
    """Return the limit of the gradient norm, and how many steps it was exceeded in."""
    limit, clipped = run.setting("training", "max_grad_norm", 0), run.summary.get("clipped_steps")
    if not limit:
        return "Not clipped."
    share = "" if clipped is None else f", which clipped {clipped:,} of {run.step:,} steps"
    return f"Before clipping at training.max_grad_norm={limit:g}{share}."


def memory_bar(parts: dict[str, float], measured: float | None) -> Plot:
    """Return the predicted memory by parts above the measured peak, all in GiB."""
    rows = [["predicted", name, value] for name, value in parts.items() if value > 0]
    if measured is not None:
        rows.append(["measured", "measured peak", measured])
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "y": [which],
            "x": [value],
            "marker": {"color": f"@{index % 8}" if which == "predicted" else "@muted"},
            "hovertemplate": "%{x:.3g} GiB",
        }
        for index, (which, name, value) in enumerate(rows)
    ]
    layout = {
        "barmode": "stack",
        "hovermode": "closest",
        "xaxis": {"title": {"text": "GiB"}},
        "yaxis": {"categoryorder": "array", "categoryarray": ["measured", "predicted"]},
        "height": 260,
    }
    if len(parts) > 1:
        rows.append(["predicted", "all parts", sum(parts.values())])
    return Plot("memory-bar", "Peak memory, predicted and measured", traces, layout, ["", "part", "GiB"], rows)


def batch_sums(run: Run) -> dict[int, list[float]]:
    """Return the sums over the first process's batches by the whole seconds of their longest clip.

    Returns:
        Seconds -> batches, clips, audio seconds, padded seconds.
    """
    sums: dict[int, list[float]] = {}
    for row in run.metrics:
        for seconds, values in (row.get("batch_lengths") or {}).items():
            there = sums.get(int(seconds), [0.0] * 4)
            sums[int(seconds)] = [total + value for total, value in zip(there, values, strict=True)]
    return dict(sorted(sums.items()))


def lengths_plot(run: Run) -> Plot | None:
    """Audio and padding by the length of the batches."""
    sums = batch_sums(run)
    if not sums:
        return None
    labels, audio, padding, rows = [], [], [], []
    for longest, (batches, clips, seconds, padded) in sums.items():
        labels.append(f"{max(longest - 1, 0)}–{longest}")
        audio.append(seconds / 60)
        padding.append(max(padded - seconds, 0.0) / 60)
        share = 100 * (1 - seconds / padded) if padded else 0.0
        rows.append([labels[-1], int(batches), int(clips), clips / max(batches, 1), seconds / 60, share])
    shape = {"type": "bar", "x": labels, "hovertemplate": "%{y:.1f} min"}
    traces = [
        {**shape, "name": "audio", "y": audio, "marker": {"color": "@0"}},
        {**shape, "name": "padding", "y": padding, "marker": {"color": "@1"}},
    ]
    layout = {
        "barmode": "stack",
        "xaxis": {"title": {"text": "longest clip of the batch, s"}, "type": "category"},
        "yaxis": {"title": {"text": "minutes"}},
        "height": HEIGHT,
    }
    heads = ["longest clip, s", "batches", "clips", "clips a batch", "audio, min", "padding, %"]
    note = "Batches of the first process, by their longest clip."
    return Plot("lengths", "Audio and padding by length of the batch", traces, layout, heads, rows, note)
