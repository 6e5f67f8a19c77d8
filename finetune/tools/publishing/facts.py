"""What is known of a model that is to be shared: read from the run that made it, never made up."""

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from finetune.errors import UserError
from finetune.security.secrets import REMOVED, known_secrets
from finetune.tools.publishing.base import (
    Base,
    find_base,
    front_matter,
    is_hub_data_form,
    run_folders,
    run_of_named_adapter,
)
from finetune.tools.publishing.exports import Export
from finetune.tools.publishing.private import last_part, publishable
from finetune.tools.report.read import SPLITS, Rates, Run, is_run, number, read_mapping, read_run, stage_folders

MACHINE = {"python", "system", "processor", "cpus", "gpus", "versions"}
SET_UP = {"git_revision", "seed", "strategy", "processes", "total_steps"}
"""What is told of a run's environment: neither its command line nor the machine's kernel."""
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
class Facts:
    """All that the card is made from. What is empty or None is not known."""

    base: Base
    run: Run
    """Without private parts; empty where there is none."""
    data: dict[str, list[Data]] = field(default_factory=dict)
    """Sources of train, validation, test and guard."""
    rows: list[Rates] = field(default_factory=list)
    """Error rates on the split that the run is judged on, all languages together first; and on the guard set."""
    guard: list[Rates] = field(default_factory=list)
    languages: list[str] = field(default_factory=list)
    exports: list[Export] = field(default_factory=list)
    """For other runtimes."""
    secrets: set[str] = field(default_factory=set)
    """Values that must not be in anything that is uploaded."""
    unsure: list[str] = field(default_factory=list)
    """What was taken for granted and should be looked at before the upload."""


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


def facts_of(model: Path) -> Facts:
    """Return what the run that made a model left, without what is private; nothing where there is no run.

    Raises:
        UserError: the folder holds a plan of stages.
    """
    folder = run_of(model)
    if folder is None:
        return Facts(Base(None), Run(model), secrets=known_secrets() - {REMOVED})
    run, folders = read_run(folder), run_folders(folder)
    # What read_run gives has lost its secrets; they are searched for in everything else.
    secrets = known_secrets(read_mapping(folder / "config.yaml"), run.summary.get("effective_settings")) - {REMOVED}
    unsure: list[str] = []
    data = {split: _sources(run.setting("data", split), folders, secrets, unsure) for split in SPLITS}
    base = replace(
        find_base(run.setting("model", "name", ""), folders),
        went_on=run_of_named_adapter(run.setting("model", "adapter"), folders),
    )
    keep = {source.hub for sources in data.values() for source in sources if source.hub}
    if base.hub:
        keep.add(base.hub)
        unsure.append(
            f"the base model {base.hub} is taken for a name on the hub; if it is a local file, "
            "give --base-model OWNER/NAME"
        )
    environment = {key: value for key, value in run.environment.items() if key in MACHINE | SET_UP}
    if "system" in environment:
        environment["system"] = environment["system"].partition("-")[0]
    summary = {key: value for key, value in run.summary.items() if key != "effective_settings"}
    rows, guard = ([r for r in run.rates(s).values() if r.is_measured] for s in (run.judged_on, "guard"))
    named = [*(row.language for row in rows), *(source.language for source in data["train"])]
    return Facts(
        base=base,
        run=replace(
            run,
            config=publishable(run.config, keep, secrets),
            summary=publishable(summary, keep, secrets),
            environment=publishable(environment, keep, secrets),
        ),
        data=data,
        rows=rows,
        guard=guard,
        languages=[name for name in dict.fromkeys(named) if name and LANGUAGE.fullmatch(name)],
        secrets=secrets,
        unsure=unsure,
    )


def _sources(value: Any, folders: list[Path], secrets: set[str], unsure: list[str]) -> list[Data]:
    """Return the sources that a key of the configuration names; what was taken for granted goes to `unsure`."""
    found = []
    for entry in value if isinstance(value, list) else [] if value is None else [value]:
        entry = entry if isinstance(entry, dict) else {"path": entry}
        path = str(entry.get("path"))
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
