"""A configuration that becomes a run file: read, resolved, and accounted for key by key."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException

from finetune.config.load import parse_overrides, read_yaml
from finetune.errors import UserError
from finetune.security.documents import check_references

NOT_SET = "???"
RESOLVER = re.compile(r"\$\{\s*(?!oc\.env:)[\w.]+:")


@dataclass
class Import:
    """A configuration on its way to a run file."""

    file: Path
    tree: dict[str, Any]
    """The source, with `${...}` resolved."""
    leaves: dict[str, Any] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    settings: dict[str, tuple[Any, str]] = field(default_factory=dict)
    """Key of the run file -> value and comment."""
    left: dict[str, str] = field(default_factory=dict)
    """Key of the source that has no counterpart -> the reason, or nothing."""
    to_fill: dict[str, str] = field(default_factory=dict)
    """Key of the run file that has to be set -> the key of the source that was not."""
    strategies: list[str] = field(default_factory=list)
    processes: int = 1
    """-1: one for each GPU."""
    nodes: int = 1
    notes: list[str] = field(default_factory=list)

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value of the source, which is then accounted for; default where it is absent, null or `???`."""
        value = _select(self.tree, key)
        self.used.update(k for k in self.leaves if k == key or k.startswith(key + "."))
        return default if value is None or _not_set(value) else value

    def section(self, key: str) -> dict[str, Any]:
        """Return a part of the source; empty where it is absent."""
        value = _select(self.tree, key)
        return value if isinstance(value, dict) else {}

    def is_blank(self, key: str) -> bool:
        """Return whether the source says `???`."""
        return _not_set(self.leaves.get(key))

    def set(self, key: str, value: Any, comment: str) -> None:
        self.settings[key] = (value, comment)

    def copy(self, source: str, key: str) -> None:
        """Take a value over as it is."""
        if (value := self.get(source)) is not None:
            self.set(key, value, source)

    def leave(self, key: str, why: str) -> None:
        """List a key that is set, and whose value is lost."""
        self.get(key)
        if self.leaves.get(key) is not None or isinstance(_select(self.tree, key), dict | list):
            self.left[key] = why


def _not_set(value: object) -> bool:
    return value == NOT_SET or (isinstance(value, list) and any(_not_set(v) for v in value))


def _select(tree: Any, key: str) -> Any:
    """Return the value of a dotted key; None where it is absent."""
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


def read_source(file: Path, overrides: list[str]) -> Import:
    """Read a configuration, lay `key=value` over it as Hydra does, and resolve its `${...}`.

    Raises:
        UserError: it is no YAML mapping, or a reference leads nowhere.
    """
    tree = read_yaml(file, "FILE")
    # Calls stay as they are, for a run file to refuse or to take; what is followed here has bounds.
    if problems := check_references(tree, lambda call: None):
        raise UserError(f"{file}: {problems[0]}.")
    given = parse_overrides([text.lstrip("+") for text in overrides])
    try:
        merged = OmegaConf.to_container(OmegaConf.merge(tree, given))
        resolved = _resolved(OmegaConf.create(_escaped(merged)))
    except (OmegaConfBaseException, ValueError, TypeError) as error:
        key, reason = getattr(error, "full_key", None), str(error).partition("\n")[0]
        if key:
            raise UserError(f"{file}: {key}: {reason}. Set what it refers to, as {key}=VALUE.") from error
        raise UserError(f"{file}: it is no configuration: {reason}.") from error
    return Import(file, resolved, leaves=dict(_leaves(resolved)))


def _escaped(value: Any) -> Any:
    """Escape calls, which only Hydra knows, and variables of the environment, which a run file reads as well."""
    if isinstance(value, dict):
        return {key: _escaped(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_escaped(inner) for inner in value]
    is_call = isinstance(value, str) and (RESOLVER.search(value) or "${oc.env:" in value)
    return value.replace("${", "\\${") if is_call else value


def _resolved(values: DictConfig | ListConfig) -> Any:
    """Follow the references; one that leads to `???` becomes `???`."""
    while True:
        try:
            return OmegaConf.to_container(values, resolve=True)
        except InterpolationToMissingValueError as error:
            OmegaConf.update(values, str(error.full_key), NOT_SET)


def _leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
