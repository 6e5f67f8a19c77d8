"""Writes pages that need nothing but themselves."""

import contextlib
import datetime
import json
import logging
import os
import time
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from pathlib import Path

from finetune.errors import UserError
from finetune.tools.report.markup import escape
from finetune.tools.report.plots import Plot
from finetune.tools.report.read import read_run

log = logging.getLogger(__name__)

# Nothing is fetched from anywhere.
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:; media-src data:"
)


@cache
def _plotly() -> str:
    """plotly.js, which the package plotly ships in one size only."""
    return files("plotly").joinpath("package_data", "plotly.min.js").read_text(encoding="utf-8")


def write_page(
    path: Path, title: str, intro: str, sections: Iterable[tuple[str, str, str]], plots: list[Plot | None]
) -> Path:
    """Writes a page aside and renames it, so that a reader never finds half of it.

    Args:
        path: of the page.
        title: its heading.
        intro: HTML below the heading.
        sections: id, name in the navigation, and HTML of each.
        plots: those whose places are in the sections; None is left out.

    Raises:
        UserError: it cannot be written.
    """
    sections = list(sections)
    here = files("finetune.tools.report")
    style, script = ((here / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    drawn = [{"name": p.name, "traces": p.traces, "layout": p.layout} for p in plots if p is not None]
    data = json.dumps(drawn, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for sign in "<>&\u2028\u2029":  # nothing in it ends the script that holds it
        data = data.replace(sign, f"\\u{ord(sign):04x}")
    links = "".join(f"<li><a href='#{name}'>{escape(label)}</a></li>" for name, label, _ in sections)
    written = datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    scripts = f"<script>{_plotly()}</script><script type='application/json' id='plots'>{data}</script><script>{script}</script>"
    page = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{escape(title)}</title><link rel="icon" href="data:,"><style>{style}</style>
<noscript><style>.plot {{ display: none; }}</style></noscript></head><body>
<a class="skip" href="#main">Skip to the content</a>
<header><h1>{escape(title)}</h1>{intro}
<noscript><p>Plots need JavaScript; their figures are in the tables in their places.</p></noscript></header>
<nav aria-label="Sections"><ul>{links}</ul></nav>
<main id="main">{"".join(body for _, _, body in sections)}</main>
<footer><p>Written on {escape(written)}. This file needs no network and holds everything that it shows.</p></footer>
{scripts if drawn else ""}
</body></html>
"""
    aside = path.with_name(f".{path.name}.tmp")
    try:
        aside.write_text(page, encoding="utf-8", errors="replace")
        os.replace(aside, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise UserError(f"{path} cannot be written: {error}.") from error
    return path


def write_report(folder: Path, path: Path | None = None) -> Path:
    """Writes the page of a run, also of one that is not done; by default report.html in its folder.

    Raises:
        UserError: the folder is not that of a run, or the page cannot be written.
    """
    from finetune.tools.report.sections import run_sections

    run = read_run(folder)
    intro, sections, plots = run_sections(run)
    return write_page(path or folder / "report.html", f"Run {run.name}", intro, sections, plots)


SLOW_SECONDS = 2.0
LONGEST_SHARE = 0.01
_written: dict[Path, tuple[float, float]] = {}
"""When the page of a run was done, and how long it took."""


def keep_report(folder: Path, say: bool = False) -> None:
    """Writes a run's page while it runs. Whatever hinders that is a warning: no training ends for the sake of its page.

    Once there are so many lines that it takes seconds, it is written less often, so that it costs a hundredth of the time at most.

    Args:
        folder: the run's.
        say: the run is done: write it in any case, and log where it is.
    """
    began = time.perf_counter()
    done, took = _written.get(folder, (0.0, 0.0))
    if not say and took > SLOW_SECONDS and began - done < took / LONGEST_SHARE:
        return
    try:
        path = write_report(folder)
    except UserError as error:
        log.warning("%s", error)
        return
    except Exception as error:
        log.warning("%s cannot be written: %s: %s", folder / "report.html", type(error).__name__, error)
        return
    now = time.perf_counter()
    _written[folder] = now, now - began
    if say:
        log.info("report: %s (%.1f MB, written in %.1f s)", path, path.stat().st_size / 1e6, now - began)
