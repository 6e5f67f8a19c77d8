"""Merging run file, strategies and `key=value` into one typed configuration, with all problems reported at once."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from finetune.config.compatibility import find_conflicts, find_contradictions
from finetune.config.messages import explain
from finetune.config.schema import RENAMED, SECTIONS, RunConfig, meaning_of, option_of, schema_fields
from finetune.config.suggestions import did_you_mean
from finetune.errors import UserError
from finetune.paths import OVERLAYS, near_path
from finetune.security.documents import check_references, first_line, leaves, parse_yaml, read_text
from finetune.security.safe_text import lines
from finetune.security.secrets import REMOVED, is_secret_name

log = logging.getLogger(__name__)

FIELDS = schema_fields()
DEFAULTS = {
    key: field.get_default(call_default_factory=True) for key, field in FIELDS.items() if not field.is_required()
}
REQUIRED = tuple(key for key, field in FIELDS.items() if field.is_required())
PLACEHOLDERS = DEFAULTS | dict.fromkeys(REQUIRED, "")
TOKENIZER, NOT_SET = "model.tokenizer", "???"


def load_config(
    config_file: Path,
    strategies: list[str],
    overrides: list[str],
    stage: tuple[dict[str, Any], str] | None = None,
) -> tuple[RunConfig, dict[str, str]]:
    """Merge the run file, strategies, `key=value` and a stage of a plan, in this order.

    Args:
        config_file: the run file.
        strategies: names.
        overrides: `key=value` arguments.
        stage: nested settings, and their name for messages.

    Returns:
        The configuration, and for each key that was set the name of the layer that set it.

    Raises:
        UserError: lists every problem of every layer.
    """
    layers = Layers()
    values = read_yaml(config_file, "--config")
    if "stages" in values and isinstance(values.get("training"), dict):
        values["training"]["stages"] = values.pop("stages")
    layers.apply(values, str(config_file))
    for strategy in strategies:
        path = overlay_path(strategy)
        if path.is_file():
            layers.apply(read_yaml(path, f"--strategy {strategy}"), f"strategy {strategy}")
    layers.apply(parse_overrides(overrides), "command line")
    if stage is not None:
        layers.apply(*stage)
    return layers.finish(), layers.origin


def _listed(problems: list[str]) -> str:
    if len(problems) == 1:
        return problems[0]
    listed = "\n".join(f"  {i}. {problem}" for i, problem in enumerate(problems, 1))
    return f"{len(problems)} problems in the configuration:\n{listed}"


class Layers:
    """The values of layers laid over each other.

    Attributes:
        values: dotted key -> value as written in the last layer that sets it.
        origin: dotted key -> the name of that layer.
        problems: one sentence each.
        refused: keys whose value has a problem; their default takes its place, so that the rest is checked as well.
    """

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.origin: dict[str, str] = {}
        self.problems: list[str] = []
        self.refused: set[str] = set()

    def apply(self, values: Any, origin: str) -> None:
        """Lay nested values over those of the earlier layers. A value that replaces an explicit one is logged."""
        for key, value in self._flattened(values, origin):
            before = merged = self.values.get(key)
            if key == TOKENIZER and isinstance(before, str) and before != NOT_SET:
                merged = {"dir": before}
            # Sections with keys of their own choice (optimizer_args) are merged; a source is replaced as a whole.
            is_section = key == TOKENIZER or isinstance(DEFAULTS.get(key), dict)
            merged = _merged(merged, value) if is_section and isinstance(value, dict) else value
            if self.origin.get(key, origin) != origin and before != merged:
                written = _written(value), _written(before)
                log.info("%s: %s=%s in place of %s (%s)", origin, key, *written, self.origin[key])
            self.values[key], self.origin[key] = merged, origin

    def _flattened(self, values: Any, origin: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
        """Yield dotted keys of the schema and their values."""
        if not isinstance(values, dict):
            self.problems.append(f"{origin}: {prefix.rstrip('.') or 'the file'} has to be a mapping, found {values!r}")
            return
        for name, value in values.items():
            key = f"{prefix}{name}"
            if key in RENAMED:
                new = RENAMED[key]
                if new.rpartition(".")[2] in values:
                    self.problems.append(f"{origin}: {key} is the old name of {new}, which is set too. Remove {key}.")
                    continue
                log.warning("%s: %s is called %s now", origin, key, new)
                key = new
            if key in FIELDS:
                yield key, value
            elif key in SECTIONS:
                yield from self._flattened({} if value is None else value, origin, key + ".")
            else:
                inside = [f"{key}.{inner}" for inner in value] if isinstance(value, dict) else []
                for unknown in inside or [key]:
                    hint = did_you_mean(unknown, FIELDS, most=2) or " docs/configuration.md lists all keys."
                    self.problems.append(f"{origin}: unknown key {unknown}.{hint}")

    def build(self) -> RunConfig:
        """Resolve references and check all values; afterwards `problems` has what is wrong."""
        self._refuse_references()
        self._resolve_references()
        for key, field in FIELDS.items():
            value = self.values.get(key)
            if key not in self.refused and (value == NOT_SET or (key in REQUIRED and not value)):
                self._refuse(key, f"{key} is not set. {meaning_of(field)}")
        try:
            config = RunConfig.model_validate(_nested(PLACEHOLDERS | self.values))
        except ValidationError as error:
            self._refuse_values(error)
            config = RunConfig.model_validate(_nested(PLACEHOLDERS | self.values))
        optimizer_unknown = "training.optimizer" in self.refused
        for key, why in find_contradictions(config):
            if not (optimizer_unknown and key == "training.optimizer_args"):
                self.problems.append(f"{self._origin(key)}: {key}: {why}")
        self.problems += find_conflicts(config)
        return config

    def finish(self) -> RunConfig:
        """Return what `build` returns; raise UserError with all problems where there are any."""
        config = self.build()
        if self.problems:
            raise UserError(_listed(self.problems))
        return config

    def _refuse_references(self) -> None:
        """Check what `${...}` may do, before any is followed."""
        for key in list(self.values):
            section, name = key.split(".")
            problems = check_references(_nested(DEFAULTS | self.values), environment_refused, at=(section, name))
            problems += [
                f"{inside}: a secret stood here and was taken out. Write it again"
                for inside, value in leaves(self.values[key], key)
                if isinstance(value, str) and REMOVED in value
            ]
            if problems:
                self._refuse(key, *(f"{self._origin(key)}: {problem}." for problem in problems))

    def _resolve_references(self) -> None:
        """Replace each `${...}` by what it stands for in the values as written: what comes of one is not followed."""
        written = _nested(DEFAULTS | self.values)
        for key in list(self.values):
            if any(isinstance(value, str) and "${" in value for _, value in leaves(self.values[key])):
                try:
                    value = OmegaConf.select(OmegaConf.create(written), key)
                    is_node = OmegaConf.is_config(value)
                    self.values[key] = OmegaConf.to_container(value, resolve=True) if is_node else value
                except (OmegaConfBaseException, ValueError) as error:
                    self._refuse(key, f"{self._origin(key)}: {key}: {str(error).splitlines()[0]}.")

    def _refuse_values(self, error: ValidationError) -> None:
        """Take out the values that pydantic refuses; a problem for each, or for each part of one."""
        values = dict(self.values)
        for found in error.errors():
            section, name, *inside = found["loc"]
            key = f"{section}.{name}"
            field = FIELDS[key]
            if inside and not option_of(field).form:
                problem = f"{'.'.join(map(str, found['loc']))}: {explain(found)}"
            else:
                problem = f"{key}: {explain(found, field, values[key])}"
            if f"{self._origin(key)}: {problem}" not in self.problems:
                self._refuse(key, f"{self._origin(key)}: {problem}")

    def _refuse(self, key: str, *problems: str) -> None:
        self.problems += problems
        self.refused.add(key)
        self.values.pop(key, None)

    def _origin(self, key: str) -> str:
        return self.origin.get(".".join(key.split(".")[:2]), "default")


def _written(value: Any) -> str:
    """Return a value as a run file has it."""
    flow = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10_000, sort_keys=False)
    return flow.removesuffix("...\n").strip().replace("\n", " ")


def _nested(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return dotted keys as nested mappings."""
    nested: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for key, value in values.items():
        section, name = key.split(".")
        nested[section][name] = value
    return nested


def _merged(before: Any, value: dict[str, Any]) -> dict[str, Any]:
    """Return a mapping laid over another, key by key."""
    if not isinstance(before, dict):
        return value
    inner = {name: _merged(before.get(name), v) if isinstance(v, dict) else v for name, v in value.items()}
    return before | inner


def environment_refused(call: str) -> str | None:
    """Return why a call in `${...}`, such as "oc.env:HOME", is refused; None for a variable that holds no secret."""
    function, _, rest = call.partition(":")
    name = rest.partition(",")[0].strip().strip("'\"")
    if function.strip() != "oc.env":
        return "a run file refers to its own keys, as ${training.seed}, and to the environment, as ${oc.env:NAME}"
    if is_secret_name(name):
        return (
            f"the name {name} is that of a secret, which would end up in paths, addresses and logs. Storage and "
            "trackers take their credentials from the environment themselves"
        )
    return None


def read_yaml(path: Path, what: str) -> dict[str, Any]:
    """Return a YAML mapping; `what` names it in messages.

    Raises:
        UserError: with the place of a syntax error.
    """
    try:
        values = parse_yaml(read_text(path))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        there = f"{what}: there is no file {path} (looked in {Path.cwd()}).{near_path(str(path))}"
        raise UserError(there) from error
    except OSError as error:
        raise UserError(f"{what}: {path} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise UserError(f"{what}: {path} is not valid YAML: {lines(error)}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UserError(f"{what}: {path} has to be a mapping, found {type(values).__name__}.")
    return values


def parse_overrides(overrides: list[str]) -> dict[str, Any]:
    """Return `key=value` arguments as nested values; the value is read as YAML."""
    nested: dict[str, Any] = {}
    for text in overrides:
        key, sign, value = text.partition("=")
        if not sign or not key or key.startswith("-"):
            raise UserError(
                f"unknown argument {text!r}. Settings are given as key=value, such as training.max_steps=100."
            )
        section = nested
        *parents, last = key.split(".")
        for part in parents:
            section = section.setdefault(part, {})
            if not isinstance(section, dict):
                raise UserError(f"{text}: {part} was given a value of its own by another argument.")
        try:
            section[last] = parse_yaml(value) if value else None
        except ValueError as error:
            raise UserError(f"{text}: the value is not valid YAML ({first_line(error)}).") from error
    return nested


def overlay_path(strategy: str) -> Path:
    """Return the strategy's overlay of the run file; it exists only if the strategy concerns model or optimizer."""
    return OVERLAYS / f"{strategy}.yaml"
