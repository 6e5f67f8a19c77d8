"""A page that lays runs side by side."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from finetune.tools.report import plots
from finetune.tools.report.markup import duration, escape, figure, section, table, text_of
from finetune.tools.report.page import write_page
from finetune.tools.report.plots import Plot, curve, curves_plot
from finetune.tools.report.read import Run, number, read_run
from finetune.tools.report.sections import (
    gib,
    hours,
    measured_memory,
    memory_kind,
    millions,
    percent,
    status,
    throughput,
    training_seconds,
)

NO_DIFFERENCE = {
    ("training", "output_dir"),
    ("training", "resume_from_checkpoint"),
    ("training", "overwrite_output_dir"),
}


def write_comparison(folders: list[Path], path: Path) -> Path:
    """Writes the page.

    Args:
        folders: of the runs.
        path: of the page.

    Raises:
        UserError: a folder is not that of a run, or the page cannot be written.
    """
    runs = [read_run(folder) for folder in folders]
    names = short_names(folders)
    curves = [
        over_steps("loss", "Training loss", "loss", runs, names, "loss"),
        wer_curves(runs, names),
        over_steps("rates", "Learning rate", "largest rate", runs, names, "learning_rate", exponentformat="power"),
        over_steps("throughput", "Throughput", "audio s / s", runs, names, "audio_seconds_per_second"),
        over_steps("memory", "Peak memory", "GiB", runs, names, "peak_memory_gib"),
    ]
    drawn = "".join(map(figure, curves)) or "<p>No step has been logged yet.</p>"
    sections = [
        ("results", "Results", results_section(runs, names)),
        ("languages", "Languages", languages_section(runs, names)),
        ("curves", "Curves", section("curves", "Curves", f"<div class='plots'>{drawn}</div>")),
        ("settings", "Settings", settings_section(runs, names)),
    ]
    intro = f"<p>{escape(', '.join(names))}</p>"
    return write_page(path, f"{len(runs)} runs side by side", intro, sections, curves)


def short_names(folders: list[Path]) -> list[str]:
    """The folders without what all of them have in front; numbered where that leaves two alike."""
    paths = [str(folder.resolve()) for folder in folders]
    common = os.path.commonpath(paths) if len(set(paths)) > 1 else str(Path(paths[0]).parent)
    names = [os.path.relpath(path, common) for path in paths]
    names = [Path(path).name if name == "." else name for name, path in zip(names, paths, strict=True)]
    return [name if names.count(name) == 1 else f"{name} ({i})" for i, name in enumerate(names, 1)]


def over_steps(
    name: str, title: str, unit: str, runs: list[Run], names: list[str], key: str, **axis: Any
) -> Plot | None:
    """One line a run; noisy figures are smoothed."""
    curves = [curve(label, run.metrics, key) for run, label in zip(runs, names, strict=True)]
    noisy = key in ("loss", "audio_seconds_per_second")
    if noisy:
        curves = list(map(plots.only_smoothed, curves))
    return curves_plot(name, title, unit, curves, plots.SMOOTHED if noisy else "", **axis)


def wer_curves(runs: list[Run], names: list[str]) -> Plot | None:
    """WER on validation, all languages."""
    curves = [
        curve(
            label,
            [row for row in run.rows("validation") if row.get("language") is None],
            plots.percent_of("wer"),
        )
        for run, label in zip(runs, names, strict=True)
    ]
    return curves_plot(
        "wer", "Word error rate on validation", "WER, %", curves, "Step 0 is the base model.", rangemode="tozero"
    )


def results_section(runs: list[Run], names: list[str]) -> str:
    """A row a figure, a column a run."""

    def rate(which: str, key: str) -> Callable[[Run], str]:
        def get(run: Run) -> str:
            value = percent(getattr(run, which)(run.judged_on).get(None, {}).get(key))
            return "–" if value is None else f"{value} %"

        return get

    figures: list[tuple[str, Callable[[Run], Any]]] = [
        ("State", lambda run: "done" if run.finished else "not done"),
        ("Steps", lambda run: run.step),
        ("Judged on", lambda run: run.judged_on),
        ("WER, base model", rate("base", "wer")),
        ("WER", rate("best", "wer")),
        ("CER, base model", rate("base", "cer")),
        ("CER", rate("best", "cer")),
        ("Best step", lambda run: run.summary.get("best_step", run.best(run.judged_on).get(None, {}).get("step"))),
        (
            "Last loss",
            lambda run: next((v for row in reversed(run.metrics) if (v := number(row.get("loss"))) is not None), None),
        ),
        ("Audio s / s", lambda run: throughput(run)[0]),
        ("Training time", lambda run: duration(training_seconds(run))),
        ("Audio", lambda run: hours(run.metrics[-1].get("audio_hours") if run.metrics else None)),
        ("Peak memory", lambda run: gib(measured_memory(run))),
        ("that is", memory_kind),
        ("Trained parameters", lambda run: millions(run.summary.get("trainable_parameters"))),
        (
            "Strategy",
            lambda run: " + ".join(run.summary.get("strategy") or run.environment.get("strategy") or []) or "none",
        ),
        ("In quarantine", lambda run: sum(reason.clips for reason in run.quarantine)),
    ]
    rows = [[name, *(text_of(get(run)) for run in runs)] for name, get in figures]
    states = "".join(
        f"<li>{escape(name)}: {escape(status(run))}</li>"
        for run, name in zip(runs, names, strict=True)
        if not run.finished
    )
    return section(
        "results", "Results", table(["", *names], rows, label="results"), f"<ul>{states}</ul>" if states else ""
    )


def languages_section(runs: list[Run], names: list[str]) -> str:
    """WER of each language in each run."""
    best = [run.best(run.judged_on) for run in runs]
    languages = sorted({name for found in best for name in found if name is not None})
    rows = [[name, *(percent(found.get(name, {}).get("wer")) for found in best)] for name in languages]
    splits = {run.judged_on for run in runs}
    note = "" if len(splits) == 1 else "<p>These runs were judged on different splits; their rates do not compare.</p>"
    return section(
        "languages",
        "WER by language",
        note,
        table(["language", *(f"{name}, %" for name in names)], rows, label="WER by language"),
    )


def settings_section(runs: list[Run], names: list[str]) -> str:
    """The settings in which the runs differ."""
    keys = sorted(
        {(part, key) for run in runs for part, values in run.config.items() for key in values} - NO_DIFFERENCE
    )
    rows = []
    for part, key in keys:
        values = [json.dumps((run.config.get(part) or {}).get(key), ensure_ascii=False, default=str) for run in runs]
        if len(set(values)) > 1:
            rows.append([f"{part}.{key}", *values])
    body = table(["setting", *names], rows, label="settings") if rows else "<p>All settings are the same.</p>"
    return section("settings", "Settings that differ", body)
