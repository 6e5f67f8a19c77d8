"""The picture of data.guard: WER on the new data against WER on the guard, a point for each model."""

import html
import io
from pathlib import Path
from typing import Any

from finetune.data.guard_halves import CHOICE
from finetune.durable_files import write_text
from finetune.security.safe_text import one_line
from finetune.tools.report.plots import Plot
from finetune.tools.report.read import Run, bound_of, number

HEIGHT = 420  # pixels
NAMED_POINTS = 30
"""Above so many, only the base model, the taken one and those with names of their own are named in the file."""
KINDS = {"step": "of a step", "other": "averaged or between", "base": "base model", "taken": "taken"}
MARKS = {
    "step": ("circle", "o", 8),
    "other": ("diamond", "D", 9),
    "base": ("square", "s", 10),
    "taken": ("star", "*", 15),
}
COLOURS = {"step": "@0", "other": "@2", "base": "@muted", "taken": "@1"}
FILE_COLOURS = {"step": "#4477aa", "other": "#228833", "base": "#777777", "taken": "#ee6677"}
TITLE = "Error rates on new data and on the guard"

Point = dict[str, Any]
"""`name`, `x` and `y` (WERs as fractions), `kind` (a key of KINDS)."""


def _guard_of(run: Run) -> str:
    """Return the split of data.guard that models are shown by: the half that chooses, where there is a limit."""
    return CHOICE if run.rows(CHOICE) else "guard"


def axes_of(run: Run) -> tuple[str, str]:
    """Return what the rates of `points_of` are of."""
    return "WER on validation, %", f"WER on {_guard_of(run)}, %"


def points_of(run: Run) -> list[Point]:
    """Return a point for each model of a run that was evaluated on both; the base model's first."""
    guard = _guard_of(run)
    found: dict[tuple[float, str], dict[str, float]] = {}
    for row in run.evaluations:
        wer = number(row.get("wer"))
        # At its last step a run without a limit evaluates the guard only with the best model.
        counts = row.get("model") != "best" or row["split"] == "guard"
        if row.get("language") is None and counts and wer is not None:
            wers = found.setdefault((row["step"], row.get("weights", "raw")), {})
            wers[row["split"]] = wer
            if row["split"] == guard:
                wers["bound"] = bound_of(row) or wer
    whole = {key: wers for key, wers in found.items() if guard in wers and "validation" in wers}
    taken = _taken(run, whole)
    return [
        {
            "name": _name(*key),
            "x": wers["validation"],
            "y": wers[guard],
            "kind": "taken" if key == taken else "base" if key[0] == 0 else _kind(key[1]),
        }
        for key, wers in whole.items()
    ]


def _taken(run: Run, models: dict[tuple[float, str], dict[str, float]]) -> tuple[float, str] | None:
    """Return which model is the best one; before the end, so far."""
    if run.finished:
        best = (run.summary.get("best_step"), run.summary.get("best_weights", "raw"))
        return next((key for key in models if key == best), None)
    limited = run.highest_guard_wer is not None
    kept = [key for key, wers in models.items() if not limited or run.keeps_limit(key[0], wers["bound"])]
    return min(kept, key=lambda key: models[key]["validation"], default=None)


def _kind(weights: str) -> str:
    return "step" if weights in ("raw", "ema") else "other"


def _name(step: float, weights: str) -> str:
    if step == 0:
        return "base model"
    if _kind(weights) == "other":
        return weights
    return f"step {int(step)}" + (f" ({weights})" if weights != "raw" else "")


def guard_plot(points: list[Point], highest: float | None, axes: tuple[str, str]) -> Plot | None:
    """Return the plot for a page; None without a point.

    Args:
        points: of all models.
        highest: WER on the guard that keeps the limit, drawn as a line; None: no limit.
        axes: what both rates are of.
    """
    if not points:
        return None
    traces = []
    for kind, name in KINDS.items():
        own = [p for p in points if p["kind"] == kind]
        mark, _, size = MARKS[kind]
        trace = {
            "type": "scatter",
            "name": name,
            "mode": "markers" if kind == "step" and len(own) > NAMED_POINTS else "markers+text",
            "x": [100 * p["x"] for p in own],
            "y": [100 * p["y"] for p in own],
            "text": [html.escape(one_line(p["name"])) for p in own],
            "textposition": "top center",
            "hovertemplate": "%{text}: %{x:.2f}, %{y:.2f}",
            "marker": {"color": COLOURS[kind], "symbol": mark, "size": size},
        }
        traces += [trace] * bool(own)
    layout: dict[str, Any] = {
        "xaxis": {"title": {"text": axes[0]}},
        "yaxis": {"title": {"text": axes[1]}},
        "hovermode": "closest",
        "height": HEIGHT,
    }
    note = "Down and left is better."
    if highest is not None:
        line = {"color": "@grid-strong", "width": 1.5, "dash": "dash"}
        at = {"xref": "paper", "x0": 0, "x1": 1, "y0": 100 * highest, "y1": 100 * highest}
        layout["shapes"] = [{"type": "line", **at, "line": line}]
        label = {"xref": "paper", "x": 1, "xanchor": "right", "y": 100 * highest, "yanchor": "bottom"}
        layout["annotations"] = [{**label, "text": f"limit, {100 * highest:.2f}", "showarrow": False}]
        note += f" A model above the dashed line, {100 * highest:.2f} %, does not keep the limit."
    rows = [[p["name"], 100 * p["x"], 100 * p["y"], KINDS[p["kind"]]] for p in points]
    return Plot("guard", TITLE, traces, layout, ["model", *axes, ""], rows, note)


def draw_guard_plot(
    points: list[Point], highest: float | None, path: Path, axes: tuple[str, str], title: str = TITLE
) -> None:
    """Write the plot as an SVG file; arguments as of `guard_plot`.

    Raises:
        OSError: it cannot be written.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    # Equal figures make equal files. Without pyplot: a training process may draw in other places as well.
    with mpl.rc_context({"svg.hashsalt": "guard", "svg.fonttype": "path"}):
        figure = Figure(figsize=(8, 5.5), layout="constrained")
        axis = figure.add_subplot()
        for kind, name in KINDS.items():
            own = [p for p in points if p["kind"] == kind]
            if not own:
                continue
            _, mark, size = MARKS[kind]
            x, y = [100 * p["x"] for p in own], [100 * p["y"] for p in own]
            axis.scatter(x, y, s=size**2, c=FILE_COLOURS[kind], marker=mark, label=name, zorder=3)
            for p in own if kind != "step" or len(own) <= NAMED_POINTS else []:
                at = (100 * p["x"], 100 * p["y"])
                name = one_line(p["name"]).replace("$", r"\$")  # matplotlib reads formulas in it
                axis.annotate(name, at, xytext=(6, 5), textcoords="offset points", fontsize=8)
        if highest is not None:
            axis.axhline(100 * highest, color="#555555", linestyle="--", label=f"limit, {100 * highest:.2f} %")
        axis.set_xlabel(axes[0])
        axis.set_ylabel(axes[1])
        axis.set_title(title)
        axis.grid(alpha=0.3)
        axis.margins(0.12)
        axis.legend()
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    write_text(path, file.getvalue())
