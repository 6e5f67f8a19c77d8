"""Pieces of HTML. Everything that comes from a run is escaped here."""

import html
import re
from collections.abc import Iterable, Sequence
from typing import Any

from finetune.security.safe_text import lines
from finetune.tools.report.plots import Plot

NUMBER = re.compile(r"[-+−]?\d[\d.,]*(e[-+]\d+)?( %)?")


def escape(value: Any) -> str:
    """Text for HTML, also within attributes; what would turn the writing direction or hide text is written out."""
    return html.escape(lines(value), quote=True)


def text_of(value: Any) -> str:
    """A value for readers: numbers with four digits that count, nothing as a dash."""
    if value is None or value == "":
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        if value != 0 and (abs(value) < 1e-3 or abs(value) >= 1e7):
            return f"{value:.3g}"
        if abs(value) >= 1000:
            return f"{value:,.0f}"
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def table(
    heads: Sequence[str], rows: Iterable[Sequence[Any]], caption: str = "", row_heads: bool = True, label: str = ""
) -> str:
    """A table that scrolls by itself where it is too wide; numbers stand to the right."""
    rows = [list(row) for row in rows]
    if not rows:
        return "<p class='muted'>none</p>"
    numbers = [
        all(row[i] is None or NUMBER.fullmatch(text_of(row[i])) for row in rows)
        and any(row[i] is not None for row in rows)
        for i in range(len(heads))
    ]

    def cell(i: int, value: Any) -> str:
        kind = " class='number'" if numbers[i] else ""
        if i == 0 and row_heads:
            return f"<th scope='row'{kind}>{escape(text_of(value))}</th>"
        return f"<td{kind}>{escape(text_of(value))}</td>"

    head = "".join(
        f"<th scope='col'{' class=number' if n else ''}>{escape(h)}</th>" for h, n in zip(heads, numbers, strict=True)
    )
    lines = "".join("<tr>" + "".join(cell(i, v) for i, v in enumerate(row)) + "</tr>" for row in rows)
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    return (
        f"<div class='scroll' tabindex='0' role='region' aria-label='{escape(caption or label or 'table')}'>"
        f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>"
    )


def facts(rows: Iterable[tuple[str, Any]]) -> str:
    """A table of names and values; nothing is left out, an empty value is a dash."""
    lines = "".join(
        f"<tr><th scope='row'>{escape(name)}</th><td>{escape(text_of(value))}</td></tr>" for name, value in rows
    )
    return f"<table class='facts'><tbody>{lines}</tbody></table>"


def tile(name: str, value: str, below: str = "", kind: str = "") -> str:
    """One headline number. `kind`: good or bad, for what stands below it."""
    small = f"<small class='{kind}'>{escape(below)}</small>" if below else ""
    return f"<div class='tile'><dt>{escape(name)}</dt><dd>{escape(value)}{small}</dd></div>"


def section(name: str, title: str, *parts: str) -> str:
    """A section with its heading, which the page's navigation leads to."""
    return f"<section id='{name}' aria-labelledby='{name}-title'><h2 id='{name}-title'>{escape(title)}</h2>{''.join(parts)}</section>"


def more(title: str, inside: str) -> str:
    """Something to be opened."""
    return f"<details><summary>{escape(title)}</summary>{inside}</details>"


def code(text: str) -> str:
    """Lines to be copied."""
    return f"<pre tabindex='0'><code>{escape(text)}</code></pre>"


def figure(plot: Plot | None) -> str:
    """The place of a plot, with its figures as a table for those who do not see it; nothing where there is no plot."""
    if plot is None:
        return ""
    note = f"<figcaption>{escape(plot.note)}</figcaption>" if plot.note else ""
    height = f" style='height:{int(plot.layout['height'])}px'" if "height" in plot.layout else ""
    return (
        f"<figure><h3>{escape(plot.title)}</h3>{note}"
        f"<div class='plot' id='{plot.name}' role='img' aria-label='Plot: {escape(plot.title)}. Its figures stand in the table below.'"
        f"{height}></div>{more(f'{plot.title} as a table', table(plot.heads, plot.rows, label=plot.title))}</figure>"
    )


def duration(seconds: float | None) -> str:
    """Hours, minutes and seconds in words."""
    if seconds is None:
        return "–"
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
