"""The page that `python -m finetune.check` leaves: tables, and histograms as pictures inside of it."""

import base64
import html
import io
from pathlib import Path
from typing import Any

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: 0.5rem 0 1.5rem; }
th, td { border-bottom: 1px solid #ddd; padding: 0.25rem 0.9rem 0.25rem 0; text-align: left; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
img { max-width: 100%; }
"""


def write_report(found: dict[str, Any], path: Path) -> None:
    """Writes the page.

    Args:
        found: the figures of `finetune.tools.data_check.check.check`.
        path: of the page, which needs nothing else.
    """
    languages = [
        (name, found["clips_by_language"][name], f"{seconds / 3600:.2f}")
        for name, seconds in sorted(found["seconds_by_language"].items(), key=lambda item: -item[1])
    ]
    left_out = [
        (name.replace("_", " "), n) for name, n in sorted(found["filtered"].items(), key=lambda item: -item[1])
    ]
    padding = [(name, f"{100 * share:.1f} %") for name, share in found["padding"].items()]
    parts = [
        "<h1>Check of a data set</h1>",
        f"<p>{found['rows']} rows; {found['clips']} clips to train on, {found['hours']:.2f} hours. {found['bad']} bad clips "
        f"({100 * found['bad_fraction']:.2f} %; at most {100 * found['max_bad_fraction']:g} % are borne), "
        f"{sum(found['filtered'].values())} left out by filters, {found['duplicate_ids']} ids that had come before.</p>",
        *[f"<p><b>{html.escape(error)}</b></p>" for error in found["errors"]],
        "<h2>Hours by language</h2>" + _table(("language", "clips", "hours"), languages),
        "<h2>What would be left out</h2>" + _table(("filter", "clips"), left_out),
        "<h2>What cannot be used</h2>" + _table(("reason", "clips"), list(found["problems"].items())),
        "<p>Each clip stands in problems.jsonl, which `data.leave_out` takes.</p>",
        "<h2>Files</h2>"
        + _table(("sample rate, Hz", "clips"), list(found["sample_rates"].items()))
        + _table(("channels", "clips"), list(found["channels"].items())),
        "<h2>Padding of training batches, estimated</h2>" + _table(("batches", "share of the audio"), padding),
        "<h2>Lengths and levels</h2>",
        f'<img alt="histograms" src="data:image/png;base64,{_histograms(found["histograms"])}">',
    ]
    page = f"<!doctype html><html lang='en'><meta charset='utf-8'><title>Check</title><style>{STYLE}</style>{''.join(parts)}</html>"
    path.write_text(page, encoding="utf-8")


def _table(heads: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    if not rows:
        return "<p>none</p>"
    head = "".join(f"<th>{html.escape(h)}</th>" for h in heads)
    lines = [
        "<tr>"
        + "".join(f"<td{' class=number' if i else ''}>{html.escape(str(v))}</td>" for i, v in enumerate(row))
        + "</tr>"
        for row in rows
    ]
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>"


def _histograms(histograms: dict[str, dict[str, Any]]) -> str:
    """PNG of all histograms, as base64."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    fig, axes = plt.subplots(2, 2, figsize=(11, 6), layout="constrained")
    for axis, (name, histogram) in zip(axes.flat, histograms.items(), strict=True):
        edges = np.linspace(histogram["from"], histogram["to"], len(histogram["counts"]) + 1)
        axis.stairs(histogram["counts"], edges, fill=True, color="#4477aa")
        axis.set_xlabel(name)
        axis.set_ylabel("clips")
        axis.grid(alpha=0.3)
    file = io.BytesIO()
    fig.savefig(file, dpi=90)
    plt.close(fig)
    return base64.b64encode(file.getvalue()).decode()
