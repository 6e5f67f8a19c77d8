"""Write pages that need nothing but themselves."""

import datetime
import json
import logging
import re
import time
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.durable_files import write_text
from finetune.errors import UserError
from finetune.security.safe_text import lines
from finetune.tools.report.formats import text_of
from finetune.tools.report.guard_plot import axes_of, draw_guard_plot, points_of
from finetune.tools.report.plots import Plot
from finetune.tools.report.read import read_run

if TYPE_CHECKING:
    import jinja2

log = logging.getLogger(__name__)

NUMBER = re.compile(r"[-+−]?\d[\d.,]*(e[-+]\d+)?( %)?")
SLOW_SECONDS = 2.0
LONGEST_SHARE = 0.01  # of the time of a run


def write_page(template: str, path: Path, title: str, plots: list[Plot | None], **values: object) -> Path:
    """Write a page.

    Args:
        template: its file under templates/.
        path: of the page.
        title: its heading.
        plots: those whose places are in the page; None is left out.
        values: for the template. Each is escaped where it is shown.

    Raises:
        UserError: it cannot be written.
    """
    from markupsafe import Markup

    drawn = [{"name": p.name, "traces": p.traces, "layout": p.layout} for p in plots if p is not None]
    data = json.dumps(drawn, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for sign in "<>&\u2028\u2029":  # nothing in it ends the script that holds it
        data = data.replace(sign, f"\\u{ord(sign):04x}")
    page = (
        environment()
        .get_template(template)
        .render(
            title=title,
            plotly=Markup(_plotly()) if drawn else "",
            drawn=Markup(data) if drawn else "",
            written=datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="seconds"),
            **values,
        )
    )
    try:
        write_text(path, page)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error}.") from error
    return path


@cache
def environment() -> "jinja2.Environment":
    """Return what renders the templates: values are made readable by `shown`, then escaped."""
    import jinja2

    made = jinja2.Environment(
        loader=jinja2.PackageLoader("finetune.tools.report"),
        autoescape=True,
        finalize=shown,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    made.filters["text_of"] = text_of
    made.globals.update(numeric_columns=numeric_columns, nbsp="\N{NO-BREAK SPACE}")
    return made


def shown(value: object) -> object:
    """Return a value as text: readable numbers; what would hide text or turn its direction is written out."""
    if hasattr(value, "__html__") or value == "":
        return value
    return lines(text_of(value))


def numeric_columns(rows: list[list[Any]]) -> list[bool]:
    """Return which columns of a table hold numbers only."""
    columns = [[value for value in column if value is not None] for column in zip(*rows, strict=True)]
    return [bool(column) and all(NUMBER.fullmatch(text_of(value)) for value in column) for column in columns]


@cache
def _plotly() -> str:
    """Return plotly.js, which the package plotly ships in one size only."""
    return files("plotly").joinpath("package_data", "plotly.min.js").read_text(encoding="utf-8")


def write_run_page(folder: Path, path: Path | None = None) -> Path:
    """Write the page of a run, finished or not; by default report.html in its folder, with data.guard guard.svg
    beside it.

    Raises:
        UserError: the folder is not that of a run, or the page cannot be written.
    """
    from finetune.tools.report.run_page import run_values

    run = read_run(folder)
    values, plots = run_values(run)
    if path is None and (points := points_of(run)):
        try:
            draw_guard_plot(points, run.highest_guard_wer, folder / "guard.svg", axes_of(run))
        except OSError as error:
            raise UserError(f"{folder / 'guard.svg'} cannot be written: {error}.") from error
    return write_page("run.html", path or folder / "report.html", f"Run {run.name}", plots, **values)


_written: dict[Path, tuple[float, float]] = {}
"""When the page of a run was last written, and how many seconds that took."""


def write_report(output_dir: Path, announce: bool = False) -> None:
    """Write a run's page while it runs. A failure is a warning: no training ends for the sake of its page.

    A page that takes seconds, for its many lines, is written less often: it costs a hundredth of the time at most.

    Args:
        output_dir: of the run.
        announce: the run is done: write the page in any case, and log where it is.
    """
    began = time.perf_counter()
    done, took = _written.get(output_dir, (0.0, 0.0))
    if not announce and took > SLOW_SECONDS and began - done < took / LONGEST_SHARE:
        return
    try:
        path = write_run_page(output_dir)
    except UserError as error:
        log.warning("%s", error)
        return
    except Exception as error:
        log.warning("%s cannot be written: %s: %s", output_dir / "report.html", type(error).__name__, error)
        return
    now = time.perf_counter()
    _written[output_dir] = now, now - began
    if announce:
        log.info("report: %s (%.1f MB, written in %.1f s)", path, path.stat().st_size / 1e6, now - began)
