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
    is_hub_data_form,
    run_folders,
    run_of_named_adapter,
)
from finetune.tools.publishing.private import last_part, publishable
from finetune.tools.report.read import Run, is_run, number, read_mapping, read_run, stage_folders

SPLITS = ("train", "validation", "test", "guard")
HARDWARE = (
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
"""What is told of the machine: neither its command line nor its kernel."""
LANGUAGE = re.compile(r"[a-z]{2,3}(?:-[A-Za-z0-9]{2,8})*")
HUB_URL = re.compile(r"hf://datasets/([\w.-]+/[\w.-]+?)(?:@[^/]*)?(?:/.*)?")


@dataclass
class Data:
    """A source of a split, as readers see it."""

    name: str
    hub: str | None = None
    """Its name on the Hub."""
    config: str | None = None
    split: str | None = None
    language: str | None = None
    weight: float | None = None
    licence: str | None = None
    """As the data's own README beside it says."""


@dataclass
class Row:
    """Error rates of one language before and after, as fractions; None: not measured."""

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
    p_value: float | None = None
    """Of the change, where it was tested."""
    significant: bool | None = None

    @property
    def change(self) -> str | None:
        """The change of WER in words, where it was tested."""
        if self.p_value is None or self.significant is None or self.wer_before is None or self.wer_after is None:
            return None
        chance = p_value_text({"p_value": self.p_value})
        if not self.significant:
            return f"not significantly different from before ({chance})"
        return f"significantly {'better' if self.wer_after < self.wer_before else 'worse'} than before ({chance})"


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
    """Return the run's folder that a name means: the folder itself, or the one that its model.nemo lies in.

    Raises:
        UserError: the folder holds a plan of stages.
    """
    folder = model.parent if model.name == "model.nemo" and model.is_file() else model
    if not folder.is_dir():
        return None
    is_model = (folder / "model.nemo").is_file() or (folder / "adapter").is_dir()
    if not is_model and (stages := stage_folders(folder)):
        raise UserError(f"--model: {model} holds a plan of stages. Name one of them, such as {stages[-1]}.")
    return folder if is_run(folder) else None


def facts_without_run() -> Facts:
    """Of a model without its run nothing is known."""
    return Facts(base=Base(None), secrets=known_secrets() - {REMOVED})


def facts_of_run(folder: Path) -> Facts:
    """Return what a run left, without what is private.

    Raises:
        UserError: the folder is not that of a run.
    """
    run, folders = read_run(folder), run_folders(folder)
    # What read_run gives has lost its secrets; they are searched for in everything else.
    secrets = known_secrets(read_mapping(folder / "config.yaml"), run.summary.get("effective_settings")) - {REMOVED}
    unsure: list[str] = []
    data = {split: _sources(run.setting("data", split), folders, secrets, unsure) for split in SPLITS}
    base = replace(
        find_base(run.setting("model", "name"), folders),
        went_on=run_of_named_adapter(run.setting("model", "adapter"), folders),
    )
    keep = {source.hub for sources in data.values() for source in sources if source.hub}
    if base.hub:
        keep.add(base.hub)
        unsure.append(
            f"the base model {base.hub} is taken for a name on the hub; if it is a local file, "
            "give --base-model OWNER/NAME"
        )
    environment = {key: run.environment[key] for key in HARDWARE if key in run.environment}
    if isinstance(system := run.environment.get("system"), str):
        environment["system"] = system.partition("-")[0]
    rows = _rows(run, run.judged_on)
    measured = [row.language for row in rows if row.language]
    trained = [source.language for source in data["train"] if source.language]
    return Facts(
        base=base,
        config=publishable(run.config, keep, secrets),
        summary=publishable({k: v for k, v in run.summary.items() if k != "effective_settings"}, keep, secrets),
        environment=publishable(environment, keep, secrets),
        data=data,
        judged_on=run.judged_on if run.best(run.judged_on) else None,
        rows=rows,
        guard=_rows(run, "guard"),
        languages=[name for name in dict.fromkeys([*measured, *trained]) if LANGUAGE.fullmatch(name)],
        secrets=secrets,
        unsure=unsure,
    )


def _sources(value: Any, folders: list[Path], secrets: set[str], unsure: list[str]) -> list[Data]:
    """Return the sources that a key of the configuration names; what was taken for granted goes to `unsure`."""
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
        licence = front_matter(local / "README.md").get("license") if local is not None else None
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


def _rows(run: Run, split: str) -> list[Row]:
    """Return error rates by language, all of them first.

    Those of summary.json count where evaluations.jsonl does not have them.
    """
    base, best = run.base(split), run.best(split)
    summary = run.summary if split == run.judged_on else {}
    if split == "guard" and split != run.judged_on:
        summary = {f"wer_{when}": run.summary.get(f"guard_wer_{when}") for when in ("before", "after")}
    by_language = _mapping(summary.get("wer_by_language"))
    tested = _mapping(_mapping(run.summary.get("significance")).get(split))
    tested_languages = _mapping(tested.get("by_language"))
    rows = []
    for name in [None, *sorted(name for name in {*base, *best, *by_language} if name is not None)]:
        before, after = base.get(name, {}), best.get(name, {})
        if name is None:
            known, test = {key.removeprefix("wer_"): value for key, value in summary.items()}, tested
        else:
            known, test = _mapping(by_language.get(name)), _mapping(tested_languages.get(name))
        row = Row(
            language=name,
            clips=after.get("clips", before.get("clips")),
            words=after.get("words", before.get("words")),
            wer_before=number(before.get("wer", known.get("before"))),
            wer_after=number(after.get("wer", known.get("after"))),
            cer_before=number(before.get("cer", known.get("cer_before"))),
            cer_after=number(after.get("cer", known.get("cer_after"))),
            interval_before=_interval(
                before.get("wer_interval"), known.get("before_interval"), test.get("interval_a")
            ),
            interval_after=_interval(after.get("wer_interval"), known.get("after_interval"), test.get("interval_b")),
            p_value=number(test.get("p_value_holm", test.get("p_value"))),
            significant=test["significant"] if isinstance(test.get("significant"), bool) else None,
        )
        if row.wer_before is not None or row.wer_after is not None:
            rows.append(row)
    return rows


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _interval(*values: object) -> tuple[float, float] | None:
    """Return the first of some values that is an interval."""
    for value in values:
        if isinstance(value, list | tuple) and len(value) == 2 and all(number(v) is not None for v in value):
            return float(value[0]), float(value[1])
    return None
