"""YAML and JSON that others may have written: read with bounds, and refused with one message.

No tag makes an object, references to one part many times cannot fill the memory, and neither depth nor digits end the
process.
"""

import functools
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import ConstructorError

from finetune.errors import UserError
from finetune.security.safe_text import one_line

DEEPEST = 64
MOST_VALUES = 2_000_000
"""Values of a document with all references written out; a NeMo configuration with 8,192 tokens has 20,000."""
MOST_CHARACTERS = 32 * 2**20
MOST_DIGITS = 30
REFERENCE = re.compile(r"(?<!\\)\$\{([^${}]+)\}")
INTEGER, TEXT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:str"
CORE_TAGS = {
    f"tag:yaml.org,2002:{name}" for name in ("map", "seq", "str", "int", "float", "bool", "null", "merge", "value")
}


@functools.cache
def _loader() -> type[yaml.CSafeLoader]:
    """Return libyaml's loader with OmegaConf's rules of what is a number: 1e-4 is one, a date none."""
    from omegaconf._utils import get_yaml_loader

    rules = get_yaml_loader()

    class Loader(yaml.CSafeLoader):
        yaml_implicit_resolvers = rules.yaml_implicit_resolvers
        yaml_constructors = rules.yaml_constructors

    return Loader


def _check_depth(text: str) -> None:
    """Raise ValueError where a text is nested too deeply: what makes nodes of it calls itself for each level."""
    depth = 0
    for event in yaml.parse(text, Loader=_loader()):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise ValueError(f"it is nested more than {DEEPEST} levels deep")


def _count(node: yaml.Node, known: dict[int, int], inside: set[int]) -> int:
    """Return the values below a node with references written out, or raise ConstructorError where it passes a bound.

    Args:
        known: values below nodes that were counted, by their id.
        inside: ids of the nodes that this one is a part of.
    """

    def refused(reason: str) -> ConstructorError:
        return ConstructorError(None, None, reason, node.start_mark)

    if id(node) in inside:
        raise refused("a part of it refers to itself")
    if id(node) in known:
        return known[id(node)]
    if len(inside) >= DEEPEST:
        raise refused(f"it is nested more than {DEEPEST} levels deep")
    if node.tag not in CORE_TAGS:
        raise refused(f"the tag {node.tag} is refused: a file of settings makes no objects")
    if node.tag == INTEGER and len(node.value) > MOST_DIGITS:
        raise refused(f"a number of more than {MOST_DIGITS} digits")
    parts = [] if isinstance(node, yaml.ScalarNode) else node.value
    if isinstance(node, yaml.MappingNode):
        keys = [key.value for key, _ in parts if key.tag == TEXT]
        if len(set(keys)) < len(keys):
            raise refused(f"found duplicate key {Counter(keys).most_common(1)[0][0]}")
        parts = [part for pair in parts for part in pair]
    inside.add(id(node))
    known[id(node)] = 1 + sum(_count(part, known, inside) for part in parts)
    inside.discard(id(node))
    if known[id(node)] > MOST_VALUES:
        raise refused(f"with its references written out it has more than {MOST_VALUES:,} values")
    return known[id(node)]


def parse_yaml(text: str) -> Any:
    """Parse a YAML text; raise ValueError where it is none, or passes a bound."""
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"it is longer than {MOST_CHARACTERS:,} characters")
    try:
        _check_depth(text)
        loader = _loader()(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _count(node, {}, set())
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    except (TypeError, OverflowError, AttributeError, LookupError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def parse_json(text: str | bytes) -> Any:
    """Parse a JSON text; raises ValueError where it is none, or nested too deeply."""
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"it is longer than {MOST_CHARACTERS:,} characters")
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def first_line(error: object) -> str:
    """Return what an error says, on one line."""
    return one_line(" ".join(str(error).split()) or type(error).__name__)


def read_text(path: Path) -> str:
    """Read a file of settings; raises ValueError where it is too long, or no UTF-8."""
    with path.open("rb") as file:
        content = file.read(MOST_CHARACTERS + 1)
    if len(content) > MOST_CHARACTERS:
        raise ValueError(f"it is longer than {MOST_CHARACTERS:,} bytes")
    return content.decode("utf-8")


def read_json_object(path: Path, what: str) -> dict[str, Any]:
    """Read a JSON file that is one object; raises UserError where it is not.

    Args:
        what: names it at the beginning of a message, such as "model.name".
    """
    try:
        value = parse_json(read_text(path))
    except (OSError, ValueError) as error:
        raise UserError(f"{what}: {path} cannot be read: {first_line(error)}") from error
    if not isinstance(value, dict):
        raise UserError(f"{what}: {path} has to be a JSON object, found {type(value).__name__}.")
    return value


def read_settings(path: Path, what: str) -> dict[str, Any]:
    """Read a file that is a YAML mapping, with its `${...}` as they stand; raises UserError where it is not.

    Args:
        what: names it at the beginning of a message.
    """
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{what}: {path} cannot be read: {first_line(error)}") from error
    return parse_settings(text, f"{what}: {path}")


def parse_settings(text: str, name: str) -> dict[str, Any]:
    """Parse a YAML mapping; see `read_settings`."""
    try:
        values = parse_yaml(text)
    except ValueError as error:
        raise UserError(f"{name} is not valid YAML: {first_line(error)}") from error
    if not isinstance(values, dict):
        raise UserError(f"{name} has to be a mapping, found {type(values).__name__}.")
    return values


def resolved(values: dict[str, Any], name: str) -> dict[str, Any]:
    """Replace each `${key}` of a plain mapping by what stands under this key of the same mapping.

    OmegaConf's own resolution has no bounds, and calls functions: `${oc.env:HF_TOKEN}` reads what the file has no
    business with.

    Raises:
        UserError: a reference leads nowhere, in a circle or out of the file, or too much comes of them.
    """
    try:
        return _References(values).walk(values, (), ())
    except ValueError as error:
        raise UserError(f"{name}: {error}") from error
    except RecursionError:
        raise UserError(f"{name}: its references are nested too deeply.") from None


def check_references(
    values: dict[str, Any], allowed: Callable[[str], str | None], at: tuple[str, ...] = ()
) -> list[str]:
    """Return what is wrong with the `${...}` of a user's own settings, which OmegaConf resolves afterwards.

    Args:
        allowed: why a call such as `oc.env:NAME` is refused, or None.
        at: the part that is looked at; the whole by default.

    Returns:
        Messages that begin with the key; nothing about references that lead nowhere, which OmegaConf tells.
    """
    part: Any = values
    for name in at:
        part = part[name]
    try:
        _References(values, allowed).walk(part, at, ())
    except ValueError as error:
        return [str(error)]
    except RecursionError:
        return ["references are nested too deeply"]
    return []


class _References:
    """Resolve `${...}` within bounds.

    Args:
        values: the whole.
        allowed: as in `check_references`; None refuses every call, and every reference that leads nowhere.
    """

    def __init__(self, values: dict[str, Any], allowed: Callable[[str], str | None] | None = None):
        self.values, self.allowed, self.left = values, allowed, MOST_VALUES

    def spend(self, amount: int, key: str) -> None:
        self.left -= amount
        if self.left < 0:
            raise ValueError(f"{key}: its references come to more than {MOST_VALUES:,} values or characters")

    def walk(self, value: Any, at: tuple[Any, ...], through: tuple[tuple[Any, ...], ...]) -> Any:
        """Return a value without references.

        Args:
            at: where it stands.
            through: where the references stood that led here.
        """
        key = ".".join(map(str, at))
        if len(through) > DEEPEST or len(at) > 2 * DEEPEST:
            raise ValueError(f"{key}: its references are nested too deeply")
        self.spend(1, key)
        if isinstance(value, dict):
            return {name: self.walk(inner, (*at, name), through) for name, inner in value.items()}
        if isinstance(value, list):
            return [self.walk(inner, (*at, i), through) for i, inner in enumerate(value)]
        if not isinstance(value, str) or "${" not in value:
            return value
        if whole := REFERENCE.fullmatch(value):
            return self.follow(whole[1], at, through)
        text = REFERENCE.sub(lambda found: str(self.follow(found[1], at, through)), value)
        self.spend(len(text), key)
        # A `$` and a `{...}` from two places would make a reference that OmegaConf follows.
        if "${" in REFERENCE.sub("", value) or "${" in text:
            raise ValueError(
                f"{key}: {value[:200]!r} is refused: a reference is ${{key}}, with nothing computed in it"
            )
        return text

    def follow(self, reference: str, at: tuple[Any, ...], through: tuple[tuple[Any, ...], ...]) -> Any:
        """Return what one `${reference}` stands for."""
        key = ".".join(map(str, at))
        if ":" in reference:
            why = "it may refer to its own keys only, as ${key}. Write the value in its place"
            if self.allowed is not None:
                why = self.allowed(reference.strip())
            if why:
                raise ValueError(f"{key}: ${{{reference}}} is refused: {why}")
            return "$"  # the worst that a variable of the environment can end with
        bare = reference.strip().lstrip(".")
        up = len(reference.strip()) - len(bare)
        path = [*at[: max(len(at) - up, 0)]] if up else []
        path += [part for part in re.split(r"[.\[\]]+", bare) if part]
        found: Any = self.values
        for i, part in enumerate(path):
            path[i] = int(part) if isinstance(found, list) and str(part).isdecimal() else part
            try:
                found = found[path[i]]
            except (KeyError, IndexError, TypeError):
                if self.allowed is not None:
                    return ""
                raise ValueError(f"{key}: ${{{reference}}} names no key of the file") from None
        place = tuple(path)
        if place in through or at[: len(place)] == place:
            raise ValueError(f"{key}: ${{{reference}}} leads back to itself")
        return self.walk(found, place, (*through, place))


def leaves(value: Any, key: str = "") -> list[tuple[str, Any]]:
    """Return the dotted keys and plain values of a structure."""
    if isinstance(value, dict):
        return [leaf for name, inner in value.items() for leaf in leaves(inner, f"{key}.{name}" if key else str(name))]
    if isinstance(value, list):
        return [leaf for i, inner in enumerate(value) for leaf in leaves(inner, f"{key}[{i}]")]
    return [(key, value)]
