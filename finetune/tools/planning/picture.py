"""The plan as stacked bars against the card's memory."""

from pathlib import Path

from finetune.tools.planning.gpus import GIB, Card
from finetune.tools.planning.prediction import PARTS, Row

COLOURS = ("#4477aa", "#66ccee", "#ee6677", "#ccbb44", "#228833", "#bbbbbb")
LABELS = ("weights", "gradients", "optimizer states", "encoder activations", "joint and loss", "temporary")


def draw(rows: list[Row], card: Card, path: Path) -> None:
    """Writes the picture; its ending says the format."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    shown = sorted((row for row in rows if row.fits is not None), key=lambda row: row.peak_memory_gib)
    scale, unit = (1.0, "GiB") if max((r.peak_memory_gib for r in shown), default=0.0) >= 1 else (1024.0, "MiB")
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
