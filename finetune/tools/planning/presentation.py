"""The plan as a table and as stacked bars."""

from pathlib import Path

from finetune.tools.planning.dataset import Data
from finetune.tools.planning.gpus import GIB, Card
from finetune.tools.planning.prediction import PARTS, Row

COLOURS = ("#4477aa", "#66ccee", "#ee6677", "#ccbb44", "#228833", "#bbbbbb")
LABELS = ("weights", "gradients", "optimizer states", "encoder activations", "joint and loss", "temporary")
LEGEND = """\
clips: of one forward pass of one GPU, as the run file says, of the longest length unless another is given; most
clips: as many as fit; most s: audio of a batch that fits whatever the length of its clips (data.batch_duration)"""


def table(rows: list[Row], card: Card, gpus: int, data: Data, recommended: str | None, why: str) -> str:
    """The plan as text, the recommended strategy first, then from the least memory to the most."""
    possible = sorted(
        (row for row in rows if row.fits is not None), key=lambda r: (r.strategy != recommended, _peak(r))
    )
    scale, unit = _unit(rows)
    timed = any(row.seconds_per_step is not None for row in rows)
    counted = any(row.hours is not None for row in rows)
    heads = ["strategy", "fits", f"peak {unit}", "weights", "grads", "states", "encoder", "loss", "temp"]
    heads += ["clips", "most clips", "most s"] + ["s/step"] * timed + ["hours"] * counted
    lines = [heads]
    for row in possible:
        line = [
            ("> " if row.strategy == recommended else "  ") + row.strategy + ("" if row.followed else " *"),
            "yes" if row.fits else "no",
            f"{_peak(row) * scale:.1f}",
            *(f"{row.parts_gib[part] * scale:.1f}" for part in PARTS),
            str(row.batch) + ("" if row.batch_seconds == data.longest else f" x {row.batch_seconds:g} s"),
            str(row.max_batch),
            "" if row.max_batch_duration is None else f"{row.max_batch_duration:.0f}",
        ]
        lines.append(line + [_two_digits(row.seconds_per_step)] * timed + [_two_digits(row.hours)] * counted)
    widths = [max(map(len, column)) for column in zip(*lines)]

    def known(name: str, text: str) -> str:
        return text + (" (assumed)" if name in data.assumed else "")

    out = [
        f"{gpus} x {card.name}, {card.usable / GIB:.1f} of {card.memory / GIB:.1f} GiB can be used; "
        f"clips up to {data.longest:g} s, {known('mean', f'{data.mean:.1f} s on average')}, "
        f"{known('tokens_a_second', f'{data.tokens_a_second:g} tokens a second')}",
        "",
    ]
    for first, *others in lines:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:]))]
        out.append("  ".join(cells).rstrip())
    impossible = [row for row in rows if row.fits is None]
    if impossible:
        out += ["", "not for this card or run:", *(f"  {row.strategy}: {row.reason}" for row in impossible)]
    out += ["", LEGEND]
    if not all(row.followed for row in possible):
        out.append("*: followed on one GPU, then split up or moved away by the engine's rules")
    if timed:
        hours = "; hours: one pass over the data" if counted else ""
        out.append(f"times are estimates from the card's published rates, not measured{hours}")
    row = next((row for row in rows if row.strategy == recommended), None)
    if row is None:
        return "\n".join([*out, "", f"no recommendation: {why}"])
    smaller = "" if row.fits else f" training.per_device_train_batch_size={row.max_batch}"
    bounds = ", ".join(f"{n} of {s} s" for s, n in row.max_batch_by_seconds.items())
    out += [
        "",
        f"take {recommended}: {why}",
        f"  {row.command}{smaller}",
        f"  clips that fit by length: {bounds} (training.auto_batch: true makes such batches by itself)",
        "  gradual validation: training.stages begins with a part of the data (docs/full_dataset.md)",
    ]
    return "\n".join(out)


def draw(rows: list[Row], card: Card, path: Path) -> None:
    """Write stacked bars against the card's memory; the ending of `path` says the format."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    shown = sorted((row for row in rows if row.fits is not None), key=_peak)
    scale, unit = _unit(shown)
    fig, axis = plt.subplots(figsize=(10, 1.4 + 0.28 * len(shown)), layout="constrained")
    left = [0.0] * len(shown)
    for part, colour, label in zip(PARTS, COLOURS, LABELS, strict=True):
        sizes = [row.parts_gib[part] * scale for row in shown]
        axis.barh([row.strategy for row in shown], sizes, left=left, color=colour, label=label)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    limit = card.usable / GIB * scale
    if limit < 3 * max(left, default=0.0):
        axis.axvline(limit, color="black", linewidth=1.2, linestyle="--", label=f"{limit:.1f} {unit} can be used")
    axis.set_xlabel(f"predicted peak memory of one GPU, {unit} ({card.name})")
    axis.invert_yaxis()
    axis.margins(y=0.01)
    axis.grid(axis="x", alpha=0.3)
    fig.legend(fontsize=8, loc="outside upper center", ncols=7)
    fig.savefig(path, dpi=100)
    plt.close(fig)


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
