"""The picture of a sweep: WER on validation against WER on the guard."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

SIZE = 6.4, 4.8  # inches


def write_plot(path: Path, rows: list[dict[str, Any]], limit: float | None, taken: dict[str, Any] | None) -> None:
    """Draw points as an SVG file.

    Args:
        rows: name, validation_wer, guard_wer, in the order in which a line joins them.
        limit: WER on the guard, drawn as a line.
        taken: one of the rows.
    """
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE, layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    x, y = ([100 * row[key] for row in rows] for key in ("validation_wer", "guard_wer"))
    axes.plot(x, y, "-o", markersize=4)
    for row, right, up in zip(rows, x, y, strict=True):
        axes.annotate(row["name"], (right, up), xytext=(5, 4), textcoords="offset points", fontsize=8)
    if limit is not None:
        axes.axhline(100 * limit, linestyle="--", color="tab:red", label="limit")
    if taken is not None:
        axes.plot(
            100 * taken["validation_wer"],
            100 * taken["guard_wer"],
            "o",
            markersize=11,
            fillstyle="none",
            label="taken",
        )
    axes.set(xlabel="WER on validation, %", ylabel="WER on guard, %")
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="svg", metadata={"Date": None})
