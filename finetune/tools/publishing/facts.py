"""What is known of a model that is to be shared: read from the run that made it, never made up."""

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from finetune.errors import UserError
from finetune.evaluation.significance import p_value_text
from finetune.security.secrets import REMOVED, known_secrets
from finetune.tools.publishing.base import (
    Base,
    find_base,
    front_matter,
    is_hub_form,
    read_sections,
    run_folders,
    run_of_named_adapter,
)
from finetune.tools.publishing.private import last_part, publishable
from finetune.tools.report.read import Run, is_run, number, read_run, stage_folders

LANGUAGE = re.compile(r"[a-z]{2,3}(?:-[A-Za-z0-9]{2,8})*")
HUB_URL = re.compile(r"hf://datasets/([\w.-]+/[\w.-]+?)(?:@[^/]*)?(?:/.*)?")


@dataclass
class Data:
    """One source of a split, as readers see it."""

    name: str
    hub: str | None = None
    """Its name on the hub."""
    config: str | None = None
    split: str | None = None
    language: str | None = None
    weight: float | None = None
    licence: str | None = None
    """As the data's own README beside it says."""


@dataclass
class Row:
    """Word and character error rates of one language before and after, as fractions; None: not measured."""

    language: str | None
    """None is all of them together."""
    clips: int | None = None
    words: int | None = None
    wer_before: float | None = None
    wer_after: float | None = None
    cer_before: float | None = None
    cer_after: float | None = None
    interval_before: tuple[float, float] | None = None
    interval_after: tuple[float, float] | None = None
    """95 % confidence interval of the WER."""
    change: str | None = None
    """Whether the change is more than chance, where that was tested."""


@dataclass
class Facts:
    """All that the card is made from. What is empty or None is not known."""

    base: Base
    config: dict[str, Any] = field(default_factory=dict)
    """The run's configuration, without private parts."""
    summary: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    data: dict[str, list[Data]] = field(default_factory=dict)
    """Sources of train, validation, test and guard."""
    judged_on: str | None = None
    rows: list[Row] = field(default_factory=list)
    guard: list[Row] = field(default_factory=list)
    languages: list[str] = field(default_factory=list)
    secrets: set[str] = field(default_factory=set)
    """Values that must not be in anything that is uploaded."""
    unsure: list[str] = field(default_factory=list)
    """What was taken for granted and should be looked at before the upload."""

    @property
    def finished(self) -> bool:
        return bool(self.summary)

    def setting(self, section: str, key: str) -> Any:
        """A value of the configuration."""
        return (self.config.get(section) or {}).get(key)


def run_of(model: Path) -> Path | None:
    """The run's folder that a name means: the folder itself, or the one that its model.nemo lies in.

    Raises:
        UserError: the folder holds a plan of stages.
    """
    folder = model.parent if model.name == "model.nemo" and model.is_file() else model
    if not folder.is_dir():
        return None
    if (
        not (folder / "model.nemo").is_file()
        and not (folder / "adapter").is_dir()
        and (stages := stage_folders(folder))
    ):
        raise UserError(f"--model: {model} holds a plan of stages. Name one of them, such as {stages[-1]}.")
    return folder if is_run(folder) else None


def facts_without_run() -> Facts:
    """Of a model without its run nothing is known."""
    return Facts(base=Base(None), secrets=known_secrets() - {REMOVED})


def facts_of_run(folder: Path) -> Facts:
    """What a run left, without what is private.

    Raises:
        UserError: the folder is not that of a run.
    """
    run = read_run(folder)
    folders = run_folders(folder)
    # What read_run gives has lost its secrets; they are searched for in everything else.
    raw = read_sections(folder / "config.yaml"), run.summary.get("effective_settings")
    secrets = known_secrets(*raw) - {REMOVED}
    unsure: list[str] = []
    data = {
        split: _sources(run.setting("data", split), folders, secrets, unsure)
        for split in ("train", "validation", "test", "guard")
    }
    base = replace(
        find_base(run.setting("model", "name"), folders),
        went_on=run_of_named_adapter(run.setting("model", "adapter"), folders),
    )
    keep = {source.hub for sources in data.values() for source in sources if source.hub} | ({base.hub} - {None})
    if base.hub:
        unsure.append(
            f"the base model {base.hub} is taken for a name on the hub; if it is a local file, give --base-model OWNER/NAME"
        )
    found = Facts(
        base=base,
        config=publishable(run.config, keep, secrets),
        summary=publishable({k: v for k, v in run.summary.items() if k != "effective_settings"}, keep, secrets),
        environment=publishable(_hardware(run.environment), keep, secrets),
        data=data,
        judged_on=run.judged_on if run.best(run.judged_on) else None,
        secrets=secrets,
        unsure=unsure,
    )
    found.rows = _rows(run, run.judged_on)
    found.guard = _rows(run, "guard")
    measured = [row.language for row in found.rows if row.language]
    trained = [source.language for source in data["train"] if source.language]
    found.languages = [name for name in dict.fromkeys([*measured, *trained]) if LANGUAGE.fullmatch(name)]
    return found


def _hardware(environment: dict[str, Any]) -> dict[str, Any]:
    """What may be told of the machine: neither its command line nor its kernel."""
    kept = (
        "python",
        "processor",
        "cpus",
        "gpus",
        "versions",
        "git_revision",
        "seed",
        "strategy",
        "processes",
        "total_steps",
    )
    found = {key: environment[key] for key in kept if key in environment}
    if isinstance(environment.get("system"), str):
        found["system"] = environment["system"].partition("-")[0]
    return found


def _sources(value: Any, folders: list[Path], secrets: set[str], unsure: list[str]) -> list[Data]:
    """The sources that a key of the configuration names."""
    entries = value if isinstance(value, list) else [] if value is None else [value]
    found = []
    for entry in entries:
        entry = entry if isinstance(entry, dict) else {"path": entry}
        path = entry.get("path")
        if not isinstance(path, str):
            continue
        local = next((folder / path for folder in folders if (folder / path).exists()), None)
        url = HUB_URL.fullmatch(path)
        hub = url[1] if url else path if local is None and is_hub_data_form(path) else None
        if hub and not url:
            unsure.append(f"{hub} is taken for a data set on the hub; if it is a local folder, give --data-name")
        licence = front_matter(local / "README.md").get("license") if local is not None and local.is_dir() else None
        found.append(
            Data(
                name=hub or publishable(last_part(path), secrets=secrets),
                hub=hub,
                config=entry.get("name"),
                split=entry.get("split"),
                language=entry.get("language"),
                weight=number(entry.get("weight")),
                licence=licence if isinstance(licence, str) else None,
            )
        )
    return found


def is_hub_data_form(path: str) -> bool:
    """Whether a source's path looks like OWNER/NAME of a data set on the hub."""
    return is_hub_form(path) and not path.endswith((".json", ".jsonl", ".ndjson", ".parquet", ".tar", ".arrow"))


def _rows(run: Run, split: str) -> list[Row]:
    """Error rates by language, all of them together first; those of summary.json where evaluations.jsonl does not have them."""
    summary = run.summary if split == run.judged_on else {}
    base, best = run.base(split), run.best(split)
    by_language = _mapping(summary.get("wer_by_language"))
    tested = _mapping(_mapping(run.summary.get("significance")).get(split))
    languages: list[str | None] = [None, *sorted({*base, *best, *by_language} - {None})]
    rows = []
    for name in languages:
        before, after = base.get(name, {}), best.get(name, {})
        known = _mapping(by_language.get(name)) if name else {k: summary.get(f"wer_{k}") for k in ("before", "after")}
        test = _mapping(_mapping(tested.get("by_language")).get(name)) if name else tested
        intervals = [
            _interval(row.get("wer_interval"))
            or _interval(known.get(f"{when}_interval") if name else summary.get(f"wer_{when}_interval"))
            or _interval(test.get(side))
            for when, side, row in (("before", "interval_a", before), ("after", "interval_b", after))
        ]
        rows.append(
            Row(
                language=name,
                clips=after.get("clips", before.get("clips")),
                words=after.get("words", before.get("words")),
                wer_before=number(before.get("wer", known.get("before"))),
                wer_after=number(after.get("wer", known.get("after"))),
                cer_before=number(before.get("cer", None if name else summary.get("cer_before"))),
                cer_after=number(after.get("cer", None if name else summary.get("cer_after"))),
                interval_before=intervals[0],
                interval_after=intervals[1],
                change=_change(test),
            )
        )
    if split == "guard" and len(rows) == 1 and rows[0].wer_after is None:
        keys = ("guard_wer_before", "guard_wer_after")
        rows[0].wer_before, rows[0].wer_after = (number(run.summary.get(key)) for key in keys)
    return [row for row in rows if row.wer_before is not None or row.wer_after is not None]


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _change(test: dict[str, Any]) -> str | None:
    """Whether a change is more than chance, from a significance test of the run."""
    p_value = number(test.get("p_value_holm", test.get("p_value")))
    if p_value is None or not isinstance(test.get("significant"), bool):
        return None
    return f"{'significant' if test['significant'] else 'not significant'} ({p_value_text({'p_value': p_value})})"


def _interval(value: Any) -> tuple[float, float] | None:
    """Two numbers."""
    if isinstance(value, list | tuple) and len(value) == 2 and all(number(v) is not None for v in value):
        return float(value[0]), float(value[1])
    return None
