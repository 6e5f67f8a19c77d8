"""What a search leaves: search.json, best.yaml, the page search.html, and the table on the terminal."""

import json
import re
import shlex
from collections import Counter
from importlib import metadata
from typing import Any

import yaml
from optuna.trial import FrozenTrial, TrialState

from finetune.config.load import Layers, overlay_path, parse_overrides, read_yaml
from finetune.config.redaction import HEAD
from finetune.durable_files import write_json, write_text
from finetune.security.secrets import clean, clean_urls, known_secrets
from finetune.tools.report.formats import duration, percent, text_of
from finetune.tools.report.page import write_page
from finetune.tools.report.plots import Plot
from finetune.tools.report.read import read_mapping
from finetune.tools.search.results import HEADS, Result, row_of, study_of, table_rows
from finetune.tools.search.running import describe
from finetune.tools.search.space import BY_LENGTH, Parameter, Settings, for_run_of
from finetune.tools.search.study import Search, rank_of
from finetune.tools.search.trials import setting_words

LAYOUT = {"height": 420, "hovermode": "closest"}
VERSIONS = ("optuna", "SQLAlchemy", "torch", "nemo_toolkit")


def write_files(result: Result) -> None:
    """Write search.json and search.html, and best.yaml where a trial is good."""
    folder = result.search.folder
    write_json(folder / "search.json", as_dict(result))
    if result.best is not None:
        _write_best(result, result.best)
    else:
        (folder / "best.yaml").unlink(missing_ok=True)
    _write_page(result)


def as_dict(result: Result) -> dict[str, Any]:
    """Return the search as one object."""
    search, default = result.search, result.default
    environment = read_mapping(search.folder_of(default.number) / "environment.json") if default is not None else {}
    environment.pop("command", None)
    versions = {name: metadata.version(name) for name in VERSIONS}
    return {
        "study": search.name,
        "run_file": str(search.run_file),
        "strategies": search.strategies,
        "overrides": clean(search.overrides, known_secrets(search.overrides), personal=False),
        "storage": clean_urls(search.storage) if search.storage else "study.db",
        "steps": search.steps,
        "guard_limit": search.config.data.guard_limit,
        "base_wer": result.base_wer,
        "base_guard_wer": result.study.user_attrs.get("base_guard"),
        "default": default.number if default is not None else None,
        "best": result.best.number if result.best is not None else None,
        "keeps_limit": result.keeps_limit,
        "comparison": result.comparison,
        "importances": result.importances,
        "advice": result.advice,
        "space": {p.name: {"own": p.own, "searched": p.describe()} for p in search.parameters},
        "trials": [row_of(t) for t in result.study.get_trials(deepcopy=False) if t.state != TrialState.WAITING],
        "environment": clean(environment, personal=False),
        "versions": versions,
    }


def _write_best(result: Result, best: FrozenTrial) -> None:
    """Write a run file of the best settings, as long as the run file's own, into a folder of its own."""
    search = result.search
    layers, values = Layers(), {}
    for layer in (read_yaml(search.run_file, "--config"), parse_overrides(search.overrides)):
        layers.apply(layer, "")
    tried: Settings = best.user_attrs["settings"]
    settings, scaled = _for_the_whole_run(search, tried)
    output = {"training.output_dir": f"{search.config.training.output_dir.rstrip('/')}-searched"}
    for key, value in (layers.values | settings | output).items():
        section, name = key.split(".", 1)
        values.setdefault(section, {})[name] = value
    cleaned = clean(values, known_secrets(values), personal=False)
    strategies = "".join(f" --strategy {name}" for name in search.strategies)
    strategies += "".join(f" {shlex.quote(word)}" for word in _words_over_overlays(search, settings))
    head = [
        f"Settings of trial {best.number} of {len(result.finished)}, from {search.run_file}: {describe(tried)}",
        *scaled,
        *result.advice,
        f"python finetune/train.py --config {search.folder / 'best.yaml'}{strategies}",
    ]
    if cleaned != values:
        head.append(HEAD.format(keys="some keys").splitlines()[0].removeprefix("# "))
    text = "".join(f"# {line}\n" for line in head)
    write_text(search.folder / "best.yaml", text + yaml.safe_dump(cleaned, sort_keys=False, allow_unicode=True))


def _for_the_whole_run(search: Search, tried: Settings) -> tuple[Settings, list[str]]:
    """Return a trial's settings for a run as long as the run file's own, and a sentence for each that differs."""
    steps, short = search.config.training.max_steps, search.steps
    if short is None:
        return tried, []
    if steps < 1:
        told = f"is that of {short} steps and {{}} with the steps of the run: adapt it, or set training.max_steps."
        ways = zip(BY_LENGTH, ("grows", "falls"), strict=True)
        return tried, [f"{key} {told.format(how)}" for key, how in ways if tried.get(key)]
    scaled = {key: value for key, value in for_run_of(steps, short, tried).items() if value != tried[key]}
    told = f"was tried in {short} steps; in {steps} that is"
    return tried | scaled, [f"{key}={tried[key]} {told} {value}." for key, value in scaled.items()]


def _words_over_overlays(search: Search, settings: Settings) -> list[str]:
    """Return `key=value` words of what the strategies' overlays set, which are laid over a run file."""
    layers = Layers()
    for name in search.strategies:
        if overlay_path(name).is_file():
            layers.apply(read_yaml(overlay_path(name), f"--strategy {name}"), name)
    return setting_words({key: settings.get(key, search.config.get(key)) for key in layers.values})


def print_table(result: Result) -> None:
    """Print the trials as a table, and the advice."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    rows = table_rows(result)
    table, columns = Table(box=box.SIMPLE_HEAD, pad_edge=False), []
    for head, column in zip(HEADS, zip(*rows, strict=True), strict=True):
        if head != "guard WER, %" or any(column):
            number = head not in ("outcome", "settings")
            table.add_column(head, justify="right" if number else "left", no_wrap=number, overflow="fold")
            section = r"(?:^| )\w+\.(?=\w+=)" if head == "settings" else "$^"
            columns.append([Text(re.sub(section, "\n", text_of(value)).strip()) for value in column])
    for row in zip(*columns, strict=True):
        table.add_row(*row)
    console = Console()
    console.print(table)
    for sentence in result.advice:
        console.print(Text(sentence), soft_wrap=True)


# ---- the page ---------------------------------------------------------------------------------------------------


def _write_page(result: Result) -> None:
    search, rows = result.search, table_rows(result)
    plots = _plots(result, rows)
    states = Counter(row_of(t)["state"] for t in result.finished)
    facts = [
        ("Run file", str(search.run_file)),
        ("Strategies", " + ".join(search.strategies) or "none"),
        ("Steps of a trial", search.steps or "as in the run file"),
        ("Trials", ", ".join(f"{n} {name}" for name, n in states.most_common())),
        ("WER of the base model, %", percent(result.base_wer)),
        ("data.guard_limit", search.config.data.guard_limit),
        ("Study", search.name),
        ("Time of all trials", duration(sum(t.user_attrs.get("seconds", 0.0) for t in result.finished))),
    ]
    write_page(
        "search.html",
        search.folder / "search.html",
        "Search",
        plots,
        navigation=[("result", "Result"), ("trials", "Trials"), ("plots-section", "Plots"), ("space", "Space")],
        intro=f"{len(result.finished)} trials of {search.run_file}",
        advice=result.advice or [f"All trials are bad: {result.commonest_reason}"],
        facts_of_search=facts,
        heads=HEADS,
        rows=rows,
        search_plots=plots,
        space=[[p.name, str(p.own), _searched(p.describe())] for p in search.parameters],
    )


def _searched(found: Any) -> str:
    if isinstance(found, list):
        return ", ".join(str(value) for value, _ in found)
    text = f"{found['low']:g} to {found['high']:g}" + (", by orders of magnitude" if found["log"] else "")
    return text + (f", times {found['times']}" if found["times"] else "")


def _plots(result: Result, rows: list[list[Any]]) -> list[Plot | None]:
    """Return Optuna's plots of the trials that have a WER; none of fewer than two."""
    from optuna import visualization

    good = result.good
    if len(good) < 2:
        return []
    study = study_of(good)
    note = "Trials with a WER; bad ones and those that were stopped early are in the table above."
    history = _plot(
        "history", "WER by trial", visualization.plot_optimization_history(study, target_name="WER"), HEADS, rows, note
    )
    for trace in history.traces:  # a study numbers its trials anew
        trace["x"] = [good[i].number for i in trace["x"]]
    slices = visualization.plot_slice(study, target_name="WER")
    found: list[Plot | None] = [
        history,
        _plot("slices", "WER by setting", slices, HEADS, rows, note),
        _parallel(result, rows),
    ]
    shown = [t for t in result.finished if t.intermediate_values]
    if shown:
        figure, note = visualization.plot_intermediate_values(study_of(shown)), "Best so far, as a fraction."
        plot = _plot("evaluations", "Evaluations of each trial", figure, HEADS, rows, note)
        for trace, t in zip(plot.traces, shown, strict=True):
            trace["name"] = f"trial {t.number}"
        found.append(plot)
    if result.importances:
        figure = visualization.plot_param_importances(study, target_name="WER")
        table = [list(share) for share in result.importances.items()]
        found.append(_plot("importances", "Importance", figure, ["setting", "share"], table, "PED-ANOVA."))
    return found


def _plot(name: str, title: str, figure: Any, heads: list[str], rows: list[list[Any]], note: str) -> Plot:
    drawn = json.loads(figure.to_json())
    layout = {key: value for key, value in drawn["layout"].items() if key not in ("template", "title")}
    return Plot(name, title, drawn["data"], layout | LAYOUT, heads, rows, note)


def _parallel(result: Result, rows: list[list[Any]]) -> Plot:
    """Return the good trials as lines over their settings. Optuna's own such plot needs a script that makes code,
    which the page's policy forbids."""
    wers = [t.user_attrs["wer"] for t in result.good]
    axes = [*result.search.parameters, Parameter("WER", None, min(wers), max(wers))]
    drawn = []
    for t in sorted(result.good, key=rank_of, reverse=True):  # the best lie on top
        values = {**t.params, "WER": t.user_attrs["wer"]}
        color = "@1" if t == result.best else "@0" if t == result.default else "@muted"
        drawn.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": {"@1": f"trial {t.number}, the best", "@0": "the run file"}.get(color, f"trial {t.number}"),
                "x": [axis.name for axis in axes],
                "y": [axis.share_of(values[axis.name]) for axis in axes],
                "text": [f"{axis.name}={text_of(values[axis.name])}" for axis in axes],
                "hovertemplate": "%{text}",
                "line": {"color": color, "width": 3 if color == "@1" else 1},
                "opacity": 0.4 if color == "@muted" else 1.0,
                "showlegend": color != "@muted",
            }
        )
    yaxis = {"tickvals": [0, 1], "ticktext": ["low", "high"], "range": [-0.05, 1.05]}
    layout = LAYOUT | {"xaxis": {"type": "category"}, "yaxis": yaxis}
    note = "Each line is a trial with a WER; a range goes from its low to its high end, choices in their order."
    return Plot("parallel", "All settings side by side", drawn, layout, HEADS, rows, note)
