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
from finetune.tools.report.formats import duration, percent
from finetune.tools.report.page import write_page
from finetune.tools.report.plots import Plot
from finetune.tools.report.read import read_mapping
from finetune.tools.search.results import HEADS, Result, row_of, study_of, table_rows
from finetune.tools.search.running import describe
from finetune.tools.search.space import Settings, for_run_of
from finetune.tools.search.study import Search
from finetune.tools.search.trials import setting_words

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
        "base_wer": result.study.user_attrs.get("base_wer"),
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
    values = read_yaml(search.run_file, "--config")
    _lay_over(values, parse_overrides(search.overrides))
    tried: Settings = best.user_attrs["settings"]
    settings, scaled = _for_the_whole_run(search, tried)
    for key, value in settings.items():
        section, name = key.split(".", 1)
        values.setdefault(section, {})[name] = value
    values["training"]["output_dir"] = f"{search.config.training.output_dir.rstrip('/')}-searched"
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
    if search.steps is None:
        return tried, []
    steps = search.config.training.max_steps
    if steps < 1:
        what = {"training.warmup_steps": "grows with", "training.l2_sp": "falls with"}
        of_length = (
            f"is that of {search.steps} steps and {{}} the steps of the run: adapt it, or set training.max_steps."
        )
        return tried, [f"{key} {of_length.format(how)}" for key, how in what.items() if tried.get(key)]
    settings = tried | for_run_of(steps, search.steps, tried)
    changed = [key for key in settings if settings[key] != tried[key]]
    return settings, [
        f"{key}={tried[key]} was tried in {search.steps} steps; in {steps} that is {settings[key]}." for key in changed
    ]


def _words_over_overlays(search: Search, settings: Settings) -> list[str]:
    """Return `key=value` words of what the strategies' overlays set, which are laid over a run file."""
    layers = Layers()
    for name in search.strategies:
        if overlay_path(name).is_file():
            layers.apply(read_yaml(overlay_path(name), f"--strategy {name}"), name)
    return setting_words({key: settings.get(key, search.config.get(key)) for key in layers.values})


def _lay_over(values: dict[str, Any], over: dict[str, Any]) -> None:
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(values.get(key), dict):
            _lay_over(values[key], value)
        else:
            values[key] = value


def print_table(result: Result) -> None:
    """Print the trials as a table, and the advice."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    rows = table_rows(result)
    shown = [i for i, head in enumerate(HEADS) if head != "guard WER, %" or any(row[i] for row in rows)]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i in shown:
        number = HEADS[i] in ("trial", "WER, %", "guard WER, %", "time")
        table.add_column(HEADS[i], justify="right" if number else "left", no_wrap=number, overflow="fold")
    for row in rows:
        words = [*row[:-1], row[-1] if "=" not in row[-1] else re.sub(r"(?:^| )\w+\.", "\n", row[-1]).strip()]
        table.add_row(*(Text("–" if words[i] is None else str(words[i])) for i in shown))
    console = Console()
    console.print(table)
    for sentence in result.advice:
        console.print(Text(sentence), soft_wrap=True)


# ---- the page ---------------------------------------------------------------------------------------------------


def _write_page(result: Result) -> None:
    search, rows = result.search, table_rows(result)
    plots = _plots(result, rows)
    states = Counter(row_of(t)["state"] for t in result.finished)
    base = result.study.user_attrs.get("base_wer")
    facts = [
        ("Run file", str(search.run_file)),
        ("Strategies", " + ".join(search.strategies) or "none"),
        ("Steps of a trial", search.steps or "as in the run file"),
        ("Trials", ", ".join(f"{n} {name}" for name, n in states.most_common())),
        ("WER of the base model, %", percent(base)),
        ("data.guard_limit", search.config.data.guard_limit),
        ("Study", search.name),
        ("Time of all trials", duration(sum(t.user_attrs.get("seconds", 0.0) for t in result.finished))),
    ]
    values = {
        "navigation": [("result", "Result"), ("trials", "Trials"), ("plots-section", "Plots"), ("space", "Space")],
        "intro": f"{len(result.finished)} trials of {search.run_file}",
        "advice": result.advice or [f"All trials are bad: {result.commonest_reason}"],
        "facts_of_search": facts,
        "heads": HEADS,
        "rows": rows,
        "search_plots": plots,
        "space": [[p.name, str(p.own), _searched(p.describe())] for p in search.parameters],
    }
    write_page("search.html", search.folder / "search.html", "Search", plots, **values)


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
    study, parameters = study_of(good), [p.name for p in result.search.parameters]
    note = "Trials with a WER; bad ones and those that were stopped early are in the table above."
    found: list[Plot | None] = [
        _plot(
            "history", "WER by trial", visualization.plot_optimization_history(study, target_name="WER"), rows, note
        ),
        _plot("slices", "WER by setting", visualization.plot_slice(study, parameters, target_name="WER"), rows, note),
        _parallel(result, rows),
    ]
    shown = [t for t in result.finished if t.intermediate_values]
    if shown:
        figure = visualization.plot_intermediate_values(study_of(shown))
        found.append(_plot("evaluations", "Evaluations of each trial", figure, rows, "Best so far, as a fraction."))
    if result.importances:
        figure = visualization.plot_param_importances(study, target_name="WER")
        table = [[name, value] for name, value in result.importances.items()]
        found.append(_plot("importances", "Importance", figure, table, "PED-ANOVA.", ["setting", "share"]))
    return found


def _plot(
    name: str, title: str, figure: Any, rows: list[list[Any]], note: str, heads: list[str] | None = None
) -> Plot:
    drawn = json.loads(figure.to_json())
    layout = {key: value for key, value in drawn["layout"].items() if key not in ("template", "title")}
    layout |= {"height": 420, "hovermode": "closest"}
    return Plot(name, title, drawn["data"], layout, heads or HEADS, rows, note)


def _parallel(result: Result, rows: list[list[Any]]) -> Plot:
    """Return the good trials as lines over their settings. Optuna's own such plot needs a script that makes code,
    which the page's policy forbids."""
    drawn = []
    best, default = result.best, result.default
    for t in sorted(result.good, key=lambda t: t.user_attrs["wer"], reverse=True):  # the best lie on top
        is_best = best is not None and t.number == best.number
        is_default = default is not None and t.number == default.number
        name = f"trial {t.number}, the best" if is_best else "the run file" if is_default else f"trial {t.number}"
        shown = [f"{p.name}={t.params[p.name]}" for p in result.search.parameters]
        drawn.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": name,
                "x": [p.name for p in result.search.parameters] + ["WER"],
                "y": [p.share_of(t.params[p.name]) for p in result.search.parameters] + [_share_of_wer(result, t)],
                "text": [*shown, f"WER {t.user_attrs['wer']:.4f}"],
                "hovertemplate": "%{text}",
                "line": {"color": "@1" if is_best else "@0" if is_default else "@muted", "width": 1 + 2 * is_best},
                "opacity": 1.0 if is_best or is_default else 0.4,
                "showlegend": is_best or is_default,
            }
        )
    yaxis = {"tickvals": [0, 1], "ticktext": ["low", "high"], "range": [-0.05, 1.05]}
    layout = {"height": 420, "hovermode": "closest", "xaxis": {"type": "category"}, "yaxis": yaxis}
    note = "Each line is a trial with a WER; a range goes from its low to its high end, choices in their order."
    return Plot("parallel", "All settings side by side", drawn, layout, HEADS, rows, note)


def _share_of_wer(result: Result, trial: FrozenTrial) -> float:
    found = [t.user_attrs["wer"] for t in result.good]
    width = max(found) - min(found)
    return (trial.user_attrs["wer"] - min(found)) / width if width else 0.5
