"""The plan as a table and as stacked bars."""

from pathlib import Path

from finetune.tools.planning.dataset import Data
from finetune.tools.planning.prediction import SHOWN, Plan, Row

COLOURS = ("#4477aa", "#66ccee", "#ee6677", "#ccbb44", "#228833", "#bbbbbb", "#aa3377")
LABELS = ("weights", "gradients", "optimizer states", "encoder activations", "joint and loss", "temporary", "base")
LEGEND = """\
clips: of one forward pass of one GPU, as the run file says, of the longest length unless another is given; most
clips: as many as fit; most s: audio of a batch that fits whatever the length of its clips (data.batch_duration)"""


def table(plan: Plan) -> str:
    """Return the plan as text, the recommended strategy first, then from the least memory to the most."""
    data = plan.data
    possible = sorted(_possible(plan), key=lambda row: row.strategy != plan.recommended)
    lines = [
        f"{plan.gpus} x {plan.gpu}, {plan.usable_gib:.1f} of {plan.memory_gib:.1f} GiB can be used",
        f"clips up to {data.longest:g} s, {data.mean:.1f} s on average{_guess(data, 'mean')}, "
        f"{data.tokens_a_second:.3g} tokens a second{_guess(data, 'tokens_a_second')}"
        + (f", {_two_digits(data.hours)} h" if data.hours is not None else "")
        + (f" ({data.source})" if data.source else ""),
        "",
        *_columns(plan, possible),
    ]
    impossible = [f"  {row.strategy}: {row.reason}" for row in plan.strategies if row.fits is None]
    if impossible:
        lines += ["", "not for this card or run:", *impossible]
    lines += ["", LEGEND]
    if not all(row.followed for row in possible):
        lines.append("*: followed on one GPU, then split up or moved away by the engine's rules")
    if any(row.seconds_per_step is not None for row in possible):
        hours = "; hours: one pass over the data" if data.hours is not None else ""
        lines.append(f"times are estimates from the card's published rates, not measured{hours}")
    else:
        lines.append("no times: nothing is known of this processor's or card's speed")
    if plan.recommended is None:
        return "\n".join([*lines, "", f"no recommendation: {plan.why}"])
    row = possible[0]
    smaller = "" if row.fits else f" training.per_device_train_batch_size={row.max_batch}"
    bounds = ", ".join(f"{n} of {s} s" for s, n in row.max_batch_by_seconds.items())
    lines += [
        "",
        f"take {row.strategy}: {plan.why}",
        f"  {row.command}{smaller}",
        f"  clips that fit by length: {bounds} (training.auto_batch: true makes such batches by itself)",
        "  to try a part of the data first: training.stages (docs/full_dataset.md)",
    ]
    return "\n".join(lines)


def _columns(plan: Plan, rows: list[Row]) -> list[str]:
    scale, unit = _unit(rows)
    heads = ["strategy", "fits", f"peak {unit}", "weights", "grads", "states", "encoder", "loss", "temp", "base"]
    cells = [[*heads, "clips", "most clips", "most s", "s/step", "hours"]]
    for row in rows:
        length = "" if row.batch_seconds == plan.data.longest else f" x {row.batch_seconds:g} s"
        cells.append(
            [
                ("> " if row.strategy == plan.recommended else "  ") + row.strategy + ("" if row.followed else " *"),
                "yes" if row.fits else "no",
                f"{_peak(row) * scale:.1f}",
                *("" if _is_absent(row, part) else f"{row.parts_gib[part] * scale:.1f}" for part in SHOWN),
                f"{row.batch}{length}",
                str(row.max_batch),
                f"{row.max_batch_duration:.0f}",
                _two_digits(row.seconds_per_step),
                "<0.01" if row.hours is not None and row.hours < 0.01 else _two_digits(row.hours),
            ]
        )
    columns = [column for column in zip(*cells) if any(column[1:])]  # times are not always known
    widths = [max(map(len, column)) for column in columns]
    lines = []
    for first, *others in zip(*columns):
        lines.append("  ".join([first.ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(others, widths[1:]))]))
    return [line.rstrip() for line in lines]


def _guess(data: Data, name: str) -> str:
    return " (a guess)" if name in data.assumed else ""


def draw(plan: Plan, path: Path) -> None:
    """Write stacked bars against the card's memory; the ending of `path` says the format."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    shown = _possible(plan)
    scale, unit = _unit(shown)
    fig, axis = plt.subplots(figsize=(10, 1.4 + 0.28 * len(shown)), layout="constrained")
    left = [0.0] * len(shown)
    for part, colour, label in zip(SHOWN, COLOURS, LABELS, strict=True):
        if all(_is_absent(row, part) for row in shown):
            continue
        sizes = [row.parts_gib[part] * scale for row in shown]
        axis.barh([row.strategy for row in shown], sizes, left=left, color=colour, label=label)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    limit = plan.usable_gib * scale
    if limit < 3 * max(left, default=0.0):
        axis.axvline(limit, color="black", linewidth=1.2, linestyle="--", label=f"{limit:.1f} {unit} can be used")
    axis.set_xlabel(f"predicted peak memory of one GPU, {unit} ({plan.gpu})")
    axis.invert_yaxis()
    axis.margins(y=0.01)
    axis.grid(axis="x", alpha=0.3)
    fig.legend(fontsize=8, loc="outside upper center", ncols=7)
    fig.savefig(path, dpi=100)
    plt.close(fig)


def _possible(plan: Plan) -> list[Row]:
    """Return the rows with figures, from the least memory to the most."""
    return sorted((row for row in plan.strategies if row.fits is not None), key=_peak)


def _is_absent(row: Row, part: str) -> bool:
    """Return whether it is the frozen base of a run that has none."""
    return part == "base" and not row.parts_gib[part]


def _peak(row: Row) -> float:
    return row.peak_memory_gib or 0.0


def _unit(rows: list[Row]) -> tuple[float, str]:
    """Factor for figures in GiB, and the unit that they are shown in."""
    return (1.0, "GiB") if max(map(_peak, rows), default=0.0) >= 1 else (1024.0, "MiB")


def _two_digits(value: float | None) -> str:
    """Two significant digits; estimates have no more."""
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 10 else f"{float(f'{value:.2g}'):g}"
