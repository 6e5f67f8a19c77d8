"""A page that lays runs side by side."""

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from finetune.evaluation.significance import p_value_text
from finetune.tools.report import plots
from finetune.tools.report.formats import change, duration, gib, hours, millions, percent, speed, text_of
from finetune.tools.report.page import write_page
from finetune.tools.report.plots import Plot, curve, curves_plot
from finetune.tools.report.read import Rates, Run, read_run
from finetune.tools.report.run_page import source_text, status

log = logging.getLogger(__name__)

NO_DIFFERENCE = {("training", key) for key in ("output_dir", "resume_from_checkpoint", "overwrite_output_dir")}
NAVIGATION = [("results", "Results"), ("languages", "Languages"), ("curves", "Curves"), ("settings", "Settings")]


def write_comparison(folders: list[Path], path: Path) -> Path:
    """Write the page of the runs in some folders.

    Raises:
        UserError: a folder is not that of a run, or the page cannot be written.
    """
    runs, names = [read_run(folder) for folder in folders], short_names(folders)
    curves = [
        over_steps("loss", "Training loss", "loss", runs, names, "loss"),
        wer_curves(runs, names),
        over_steps("rates", "Learning rate", "largest rate", runs, names, "learning_rate", exponentformat="power"),
        over_steps("throughput", "Throughput", "audio s / s", runs, names, "audio_seconds_per_second"),
        over_steps("memory", "Peak memory", "GiB", runs, names, "peak_memory_gib"),
    ]
    warnings = warnings_of(runs, names)
    for text in warnings:
        log.warning("%s", text)
    values = {
        "navigation": NAVIGATION,
        "intro": ", ".join(names),
        "names": names,
        "warnings": warnings,
        "results": results(runs),
        "unfinished": [(name, status(run)) for name, run in zip(names, runs, strict=True) if not run.finished],
        "language_heads": ["language", *(f"{name}, %" for name in names)],
        "languages": languages(runs),
        "settings": settings_that_differ(runs),
        "curve_plots": curves,
    }
    return write_page("comparison.html", path, f"{len(runs)} runs side by side", curves, **values)


def short_names(folders: list[Path]) -> list[str]:
    """Return the folders without what they have in common in front; numbered where that leaves two alike."""
    paths = [str(folder.resolve()) for folder in folders]
    common = os.path.commonpath(paths) if len(set(paths)) > 1 else str(Path(paths[0]).parent)
    names = [os.path.relpath(path, common) for path in paths]
    names = [Path(path).name if name == "." else name for name, path in zip(names, paths, strict=True)]
    return [name if names.count(name) == 1 else f"{name} ({i})" for i, name in enumerate(names, 1)]


def over_steps(
    name: str, title: str, unit: str, runs: list[Run], names: list[str], key: str, **axis: Any
) -> Plot | None:
    """Return a plot with one line for each run; noisy figures are smoothed."""
    curves = [curve(label, run.metrics, key) for run, label in zip(runs, names, strict=True)]
    noisy = key in ("loss", "audio_seconds_per_second")
    if noisy:
        curves = list(map(plots.only_smoothed, curves))
    return curves_plot(name, title, unit, curves, plots.SMOOTHED if noisy else "", **axis)


def wer_curves(runs: list[Run], names: list[str]) -> Plot | None:
    """Return the plot of WER on validation, all languages."""
    rows = [[row for row in run.rows("validation") if row.get("language") is None] for run in runs]
    curves = [curve(name, found, "wer", 100) for name, found in zip(names, rows, strict=True)]
    title, note = "Word error rate on validation", "Step 0 is the base model."
    return curves_plot("wer", title, "WER, %", curves, note, rangemode="tozero")


def warnings_of(runs: list[Run], names: list[str]) -> list[str]:
    """Return a warning where headline or guard error rates are of different data, splits or normalisations."""
    headline = data_of_rates(runs, names, [run.judged_on for run in runs])
    guard = data_of_rates(runs, names, ["guard"] * len(runs))
    warnings = []
    if headline:
        warnings.append(f"These runs were judged on different data: {headline}. Their error rates do not compare.")
    if guard:
        warnings.append(f"The guard sets differ: {guard}. Error rates on them do not compare.")
    return warnings


def data_of_rates(runs: list[Run], names: list[str], splits: list[str]) -> str | None:
    """Return what each run was measured on; None where all of them were measured on the same data."""
    measured = {}
    for run, name, split in zip(runs, names, splits, strict=True):
        rates = run.rates(split)[None]
        if rates.wer_after is not None:
            source = source_text(run.setting("data", split))
            on = f"{split} ({source}, {text_of(rates.clips)} clips, normalisation {run.normalization(split)})"
            measured[name] = on, rates.words
    if len(set(measured.values())) < 2:
        return None
    return "; ".join(f"{name} on {on}" for name, (on, _) in measured.items())


def results(runs: list[Run]) -> list[list[str]]:
    """Return a row for each figure, a column for each run."""

    def rate(which: str) -> Callable[[Run], str | None]:
        def get(run: Run) -> str | None:
            rates = run.rates(run.judged_on)[None]
            value = percent(getattr(rates, which))
            return value and f"{value} %{verdict(rates) if which == 'wer_after' else ''}"

        return get

    def guard(run: Run) -> str | None:
        rates = run.rates("guard")[None]
        if rates.wer_after is None:
            return None
        changed = change(rates.wer_after, rates.wer_before)
        return f"{percent(rates.wer_after)} %" + (f" ({changed})" if changed else "") + verdict(rates)

    figures: list[tuple[str, Callable[[Run], Any]]] = [
        ("State", lambda run: "done" if run.finished else "not done"),
        ("Steps", lambda run: run.step),
        ("Judged on", lambda run: f"{run.judged_on}: {source_text(run.setting('data', run.judged_on))}"),
        ("WER, base model", rate("wer_before")),
        ("WER", rate("wer_after")),
        ("CER, base model", rate("cer_before")),
        ("CER", rate("cer_after")),
        ("Guard set", lambda run: source_text(run.setting("data", "guard"))),
        ("WER on guard (change)", guard),
        ("Best step", lambda run: run.best_step),
        ("Last loss", lambda run: next(iter(run.logged("loss")[-1:]), None)),
        ("Audio s / s", lambda run: speed(run.throughput)),
        ("Training time", lambda run: duration(run.training_seconds)),
        ("Audio", lambda run: hours(run.metrics[-1].get("audio_hours") if run.metrics else None)),
        ("Peak memory", lambda run: gib(run.peak_memory)),
        ("that is", lambda run: run.peak_memory_is),
        ("Trained parameters", lambda run: millions(run.summary.get("trainable_parameters"))),
        ("Strategy", lambda run: run.strategy),
        ("In quarantine", lambda run: run.quarantined),
    ]
    return [[name, *(text_of(get(run)) for run in runs)] for name, get in figures]


def verdict(rates: Rates) -> str:
    """Return in words whether a WER differs from the base model's, where that was tested."""
    if not rates.test or rates.wer_after is None or rates.wer_before is None:
        return ""
    if not rates.test["significant"]:
        return ", no significant change"
    return f", {'better' if rates.wer_after < rates.wer_before else 'worse'} ({p_value_text(rates.test)})"


def languages(runs: list[Run]) -> list[list[Any]]:
    """Return the WER of each language in each run."""
    best = [run.best(run.judged_on) for run in runs]
    names = sorted({name for found in best for name in found if name is not None})
    return [[name, *(percent(found.get(name, {}).get("wer")) for found in best)] for name in names]


def settings_that_differ(runs: list[Run]) -> list[list[str]]:
    """Return a row for each setting that is not the same in all runs."""
    keys = {(part, key) for run in runs for part, values in run.config.items() for key in values} - NO_DIFFERENCE
    rows = []
    for part, key in sorted(keys):
        values = [json.dumps((run.config.get(part) or {}).get(key), ensure_ascii=False, default=str) for run in runs]
        if len(set(values)) > 1:
            rows.append([f"{part}.{key}", *values])
    return rows
