"""Points on the way from a base model to a tuned one: their WER on validation and guard data, and the one to take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from finetune.errors import UserError
from finetune.models.interpolation import State, on_the_way
from finetune.tools.averaging import Judge, Merger, Recipe
from finetune.tools.export.nemo import output_file, write_checked
from finetune.tools.report.guard_plot import Point, draw_guard_plot

if TYPE_CHECKING:
    from pathlib import Path

    from finetune.config.guard_limit import GuardLimit

TENTHS = [i / 10 for i in range(11)]
PLOT = "sweep.svg"
AXES = "WER on --data, %", "WER on --guard, %"


@dataclass
class Sweep:
    """What was found on the way."""

    rows: list[dict[str, Any]]
    """name, way, validation_wer, validation_cer, clips; with a guard guard_wer, guard_cer, guard_clips, and with a
    limit kept."""
    new_pieces: list[str]
    """Of a grown vocabulary: the base model has no rows of them."""
    bound: float | None
    """Highest WER on the guard that keeps the limit."""
    taken: dict[str, Any]
    """A row."""
    path: Path

    def table(self) -> str:
        """Return the points as lines of text."""
        guard = "guard_wer" in self.rows[0]
        lines = ["  way   WER, validation" + ("   WER, guard" if guard else "")]
        for row in self.rows:
            line = f"{row['way']:5.3g} {100 * row['validation_wer']:17.2f} %"
            line += f" {100 * row['guard_wer']:10.2f} %" if guard else ""
            line += "  above the limit" if row.get("kept") is False else ""
            lines.append(line + ("  <- taken" if row is self.taken else ""))
        return "\n".join(lines)


@torch.no_grad()
def sweep(recipe: Recipe, output: Path, judge: Judge, points: list[float], limit: GuardLimit | None) -> Sweep:
    """Evaluate the points, draw them as `output`/sweep.svg, and write the best on validation of those that keep the
    limit as `output`/model.nemo.

    Args:
        recipe: with a base; of several models the way leads to what it makes of them.
        points: 0 is the base, 1 the tuned model. 0 is added where there is a limit, which is relative to it.

    Raises:
        UserError: the models have different layouts, or the file would replace one of them.
    """
    path = output_file(output, recipe.sources)
    merger = Merger(recipe, judge)
    base, rows = merger.base, []
    assert base is not None
    tuned = merger.merged(rate=False)
    trained = recipe.method == "mean" and len(recipe.models) == 1  # and has statistics of its own, as the base has
    points = sorted({*points, *([0.0] if limit is not None else [])})
    best: State | None = None
    taken, bound = None, None
    for way in points:
        state = {name: on_the_way(base[name], tensor, way) for name, tensor in tuned.items()}
        merger.put(state, recipe.batchnorm == "estimate" and way != 0 and not (way == 1 and trained))
        rates = judge.rates(merger.model)
        row = {"name": _name(way), "way": way}
        row |= {f"validation_{name}": rates.pop(name) for name in ("wer", "cer", "clips")} | rates
        rows.append(row)
        if limit is not None:
            base_wer = rows[0]["guard_wer"]
            bound = limit.highest(base_wer)
            row["kept"] = way == 0 or limit.keeps(row["guard_wer"], base_wer)
        if row.get("kept") is not False and (taken is None or row["validation_wer"] < taken["validation_wer"]):
            taken, best = row, {name: tensor.clone() for name, tensor in merger.model.state_dict().items()}
    assert best is not None  # the base keeps every limit
    assert taken is not None
    merger.put(best, estimate=False)
    write_checked(merger.model, path)
    if "guard_wer" in rows[0]:
        draw_guard_plot([_point(row, taken) for row in rows], bound, output / PLOT, AXES)
    return Sweep(rows, merger.new_pieces, bound, taken, path)


def _point(row: dict[str, Any], taken: dict[str, Any]) -> Point:
    kind = "taken" if row is taken else "base" if row["way"] == 0 else "other"
    return {"name": row["name"], "x": row["validation_wer"], "y": row["guard_wer"], "kind": kind}


def _name(way: float) -> str:
    return {0.0: "base", 1.0: "tuned"}.get(way, f"way {way:g}")


def parse_points(text: str) -> list[float]:
    """Read points on the way, from 0 to 1, separated by commas.

    Raises:
        UserError: these are none.
    """
    try:
        points = [float(part) for part in text.split(",")]
    except ValueError:
        points = [-1.0]
    if not all(0 <= point <= 1 for point in points):
        raise UserError(
            f"--sweep: {text!r} is no list of numbers from 0 to 1, such as 0,0.5,0.8,1. Models stand first."
        )
    return points
