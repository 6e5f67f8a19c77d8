"""The model that a run began from, its name on the hub and its licence."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from finetune.errors import UserError
from finetune.security.documents import parse_json, parse_yaml
from finetune.tools.publishing.private import BASE_OF_ADAPTER, last_part

CREATIVE_COMMONS = re.compile(r"cc-(by(?:-nc)?(?:-sa|-nd)?)-(\d\.\d)")


@dataclass(frozen=True)
class Base:
    """The base model, as far as it is known."""

    name: str | None
    """For readers: a hub name, or the name of a file."""
    hub: str | None = None
    """Its name on the hub; None where it lies on the user's machine only."""
    random: bool = False
    """Trained from random weights."""
    through: str | None = None
    """The run in between, where the training began from its model: the name of its folder."""
    went_on: str | None = None
    """The run whose adapter this one went on with (`model.adapter`): the name of its folder. The adapters of both are on the same base."""
    licence: str | None = None
    """As the hub names it, such as cc-by-4.0; None: not known."""
    licence_name: str | None = None
    licence_link: str | None = None
    licence_from: str = ""
    """Where that was read."""


def find_base(model_name: str | None, folders: list[Path]) -> Base:
    """The model that training began from. A run that continued another one, or its adapter, leads to that one's base.

    No request is made: the licence comes from a model card beside the file, or in the hub's cache.

    Args:
        model_name: `model.name` of a run; None where there is no run.
        folders: where relative paths may start.
    """
    if not model_name:
        return Base(None)
    path, through = _existing(model_name, folders), None
    for _ in range(20):  # runs that continue runs
        if path is not None and (path / BASE_OF_ADAPTER).is_file():  # an adapter
            through = through or run_of_adapter(path)
            model_name, folders = _base_of_adapter(path), [*folders, *run_folders(path.resolve().parent)]
            if not model_name:
                return Base(None, through=through)
            path = _existing(model_name, folders)
            continue
        run = path.parent if path is not None and path.name == "model.nemo" else path
        if run is None or not (run / "config.yaml").is_file():
            break
        through = through or last_part(str(run.resolve()))
        model_name, folders = _name_in(run / "config.yaml"), [*folders, *run_folders(run)]
        if not model_name:
            return Base(None, through=through)
        path = _existing(model_name, folders)
    return replace(_described(model_name, path), through=through)


def run_of_adapter(path: Path) -> str:
    """The name of the run that left an adapter; of the adapter's own folder where that is not at hand."""
    folder = path.resolve()
    return last_part(str(folder.parent if (folder.parent / "config.yaml").is_file() else folder))


def run_of_named_adapter(name: Any, folders: list[Path]) -> str | None:
    """The same for `model.adapter` of a run; None where it has none."""
    if not isinstance(name, str) or not name:
        return None
    path = _existing(name, folders)
    return run_of_adapter(path) if path is not None else last_part(re.sub(r"(?<=[^/])/+adapter/*$", "", name))


def _base_of_adapter(path: Path) -> str | None:
    """What base_model.json names; None where it cannot be read."""
    try:
        name = parse_json((path / BASE_OF_ADAPTER).read_text(encoding="utf-8"))["name"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return name if isinstance(name, str) else None


def _described(model_name: str, path: Path | None) -> Base:
    """The base model of a name.

    Args:
        model_name: as a configuration has it.
        path: where it lies on this machine; None: nowhere.
    """
    if model_name.endswith((".yaml", ".yml")):
        return Base(None, random=True)
    if path is not None:
        return _with_licence(Base(last_part(model_name)), path.parent if path.is_file() else path)
    if is_hub_form(model_name):
        return _with_licence(Base(model_name, hub=model_name), _cached_card(model_name))
    return Base(last_part(model_name))


def is_hub_form(name: str) -> bool:
    """Whether a name looks like OWNER/NAME on the hub."""
    return bool(re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name)) and not name.endswith((".nemo", ".yaml", ".yml"))


def run_folders(run: Path) -> list[Path]:
    """Folders in which the run may have been started: its relative paths begin there."""
    output = (read_sections(run / "config.yaml").get("training") or {}).get("output_dir")
    found = []
    if isinstance(output, str) and not Path(output).is_absolute():
        resolved, parts = run.resolve(), Path(output).parts
        if parts and resolved.parts[-len(parts) :] == parts:
            found.append(Path(*resolved.parts[: -len(parts)]))
    return [*found, Path.cwd()]


def with_answers(base: Base, hub: str | None, licence: str | None) -> Base:
    """The base model with what the user says of it, which counts before what was found.

    Raises:
        UserError: the name is none of the hub's.
    """
    if hub is not None:
        if not is_hub_form(hub):
            raise UserError(f"--base-model: {hub} is no name on the hub such as nvidia/parakeet-tdt-0.6b-v3.")
        if hub != base.hub:
            base = replace(
                _with_licence(Base(hub, hub=hub), _cached_card(hub)), through=base.through, went_on=base.went_on
            )
    if licence is not None:
        base = replace(
            base, licence=licence.lower(), licence_name=None, licence_link=None, licence_from="--base-licence"
        )
    return base


def licence_in(card: dict[str, Any], base: Base, where: str) -> Base:
    """The base model with the licence that the front matter of its card names."""
    licence = card.get("license")
    if not isinstance(licence, str) or not licence or licence == "unknown":
        return base
    texts = {key: card.get(key) for key in ("license_name", "license_link")}
    name, link = (value if isinstance(value, str) else None for value in texts.values())
    return replace(base, licence=licence, licence_name=name, licence_link=link, licence_from=where)


def terms(licence: str) -> str | None:
    """Address of a licence's text, where it is one of Creative Commons or Apache."""
    found = CREATIVE_COMMONS.fullmatch(licence)
    if found:
        return f"https://creativecommons.org/licenses/{found[1]}/{found[2]}/"
    return "https://www.apache.org/licenses/LICENSE-2.0" if licence == "apache-2.0" else None


def front_matter(readme: Path) -> dict[str, Any]:
    """The front matter of a card; empty where there is none, or where it cannot be read."""
    from huggingface_hub.repocard import metadata_load

    try:
        found = metadata_load(readme)
    except (OSError, ValueError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}


def _with_licence(base: Base, folder: Path | None) -> Base:
    card = folder / "README.md" if folder is not None else None
    if card is None or not card.is_file():
        return base
    return licence_in(
        front_matter(card),
        base,
        "the model card beside it" if base.hub is None else f"the card of {base.hub} in the cache",
    )


def _cached_card(name: str) -> Path | None:
    """The folder in the hub's cache that holds a model's card."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "README.md")
    return Path(found).parent if isinstance(found, str) else None


def _existing(name: str, folders: list[Path]) -> Path | None:
    return next((folder / name for folder in folders if (folder / name).exists()), None)


def _name_in(config: Path) -> str | None:
    name = (read_sections(config).get("model") or {}).get("name")
    return name if isinstance(name, str) else None


def read_sections(path: Path) -> dict[str, Any]:
    """A configuration as it was written; empty where it cannot be read."""
    try:
        value = parse_yaml(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
