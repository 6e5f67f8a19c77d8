"""The model that a run began from, its name on the Hub and its licence."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from finetune.errors import UserError
from finetune.tools.publishing.private import BASE_OF_ADAPTER, last_part
from finetune.tools.report.read import read_mapping

CREATIVE_COMMONS = re.compile(r"cc-(by(?:-nc)?(?:-sa|-nd)?)-(\d\.\d)")
DATA_FILES = (".json", ".jsonl", ".ndjson", ".parquet", ".tar", ".arrow")
LONGEST_CHAIN = 20  # of runs that continue runs


@dataclass(frozen=True)
class Base:
    """The base model, as far as it is known."""

    name: str | None
    """For readers: a name on the Hub, or of a file."""
    hub: str | None = None
    """Its name on the Hub; None where it lies on the user's machine only."""
    random: bool = False
    """Trained from random weights."""
    through: str | None = None
    """Folder name of the run in between, where the training began from that run's model."""
    went_on: str | None = None
    """Folder name of the run whose adapter this one continued (`model.adapter`), on the same base."""
    licence: str | None = None
    """As the Hub names it, such as cc-by-4.0; None: not known."""
    licence_name: str | None = None
    licence_link: str | None = None
    licence_from: str = ""
    """Where that was read."""


def find_base(model_name: str, folders: list[Path]) -> Base:
    """Return the model that training began from; a run that continued another one or its adapter has that one's base.

    No request is made: the licence comes from a model card beside the file, or in the Hub's cache.

    Args:
        model_name: `model.name` of a run.
        folders: where relative paths may start.
    """
    through: str | None = None
    for _ in range(LONGEST_CHAIN):
        path = _existing(model_name, folders)
        if path is None:
            break
        if (path / BASE_OF_ADAPTER).is_file():
            run, further = path.resolve().parent, read_mapping(path / BASE_OF_ADAPTER).get("name")
            name = run_of_adapter(path)
        else:
            run = path.parent if path.name == "model.nemo" else path
            if not (run / "config.yaml").is_file():
                break
            further, name = _section(run, "model").get("name"), last_part(str(run.resolve()))
        through = through or name
        model_name = further or ""
        folders = [*folders, *run_folders(run)]
    return replace(_described(model_name, folders), through=through)


def _described(model_name: str, folders: list[Path]) -> Base:
    if not model_name:
        return Base(None)
    if model_name.endswith((".yaml", ".yml")):
        return Base(None, random=True)
    path = _existing(model_name, folders)
    if path is not None:
        return _with_licence(Base(last_part(model_name)), path.parent if path.is_file() else path)
    if is_hub_form(model_name):
        return _with_licence(Base(model_name, hub=model_name), _cached_card(model_name))
    return Base(last_part(model_name))


def run_of_adapter(path: Path) -> str:
    """Return the name of the run that left an adapter; of the adapter's own folder where that run is not at hand."""
    folder = path.resolve()
    return last_part(str(folder.parent if (folder.parent / "config.yaml").is_file() else folder))


def run_of_named_adapter(name: str | None, folders: list[Path]) -> str | None:
    """Return the same for `model.adapter` of a run; None where it has none."""
    if not name:
        return None
    path = _existing(name, folders)
    return run_of_adapter(path) if path is not None else last_part(re.sub(r"(?<=[^/])/+adapter/*$", "", name))


def is_hub_form(name: str) -> bool:
    """Return whether a name looks like OWNER/NAME of a model on the Hub."""
    return bool(re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name)) and not name.endswith((".nemo", ".yaml", ".yml"))


def is_hub_data_form(path: str) -> bool:
    """Return whether a source's path looks like OWNER/NAME of a data set on the Hub."""
    return is_hub_form(path) and not path.endswith(DATA_FILES)


def run_folders(run: Path) -> list[Path]:
    """Return the folders in which the run may have been started: its relative paths begin there."""
    here, parts = run.resolve().parts, Path(_section(run, "training").get("output_dir", "/")).parts
    is_below = parts[:1] != ("/",) and here[-len(parts) :] == parts
    return [Path(*here[: -len(parts)]), Path.cwd()] if is_below else [Path.cwd()]


def with_answers(base: Base, hub: str | None, licence: str | None) -> Base:
    """Return the base model with what the user says of it, which counts before what was found.

    Raises:
        UserError: the name is none of the Hub's.
    """
    if hub is not None:
        if not is_hub_form(hub):
            raise UserError(f"--base-model: {hub} is no name on the hub such as nvidia/parakeet-tdt-0.6b-v3.")
        if hub != base.hub:
            found = Base(hub, hub=hub, through=base.through, went_on=base.went_on)
            base = _with_licence(found, _cached_card(hub))
    if licence is not None:
        found = {"licence": licence.lower(), "licence_name": None, "licence_link": None}
        base = replace(base, **found, licence_from="--base-licence")
    return base


def licence_in(card: dict[str, Any], base: Base, where: str) -> Base:
    """Return the base model with the licence that the front matter of its card names."""
    licence = card.get("license")
    if not isinstance(licence, str) or not licence or licence == "unknown":
        return base
    found = {"licence_name": card.get("license_name"), "licence_link": card.get("license_link")}
    return replace(base, licence=licence, **found, licence_from=where)


def terms(licence: str) -> str | None:
    """Return the address of a licence's text, for Creative Commons and Apache."""
    if found := CREATIVE_COMMONS.fullmatch(licence):
        return f"https://creativecommons.org/licenses/{found[1]}/{found[2]}/"
    return "https://www.apache.org/licenses/LICENSE-2.0" if licence == "apache-2.0" else None


def front_matter(readme: Path) -> dict[str, Any]:
    """Return the front matter of a card; empty where there is none or it cannot be read."""
    from huggingface_hub.repocard import metadata_load

    try:
        found = metadata_load(readme)
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}


def _with_licence(base: Base, folder: Path | None) -> Base:
    if folder is None:
        return base
    where = "the model card beside it" if base.hub is None else f"the card of {base.hub} in the cache"
    return licence_in(front_matter(folder / "README.md"), base, where)


def _cached_card(name: str) -> Path | None:
    """Return the folder in the Hub's cache that holds a model's card."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "README.md")
    return Path(found).parent if isinstance(found, str) else None


def _existing(name: str, folders: list[Path]) -> Path | None:
    if not name:
        return None
    return next((folder / name for folder in folders if (folder / name).exists()), None)


def _section(run: Path, name: str) -> dict[str, Any]:
    """Return a section of a run's configuration."""
    section = read_mapping(run / "config.yaml").get(name)
    return section if isinstance(section, dict) else {}
