"""Mappings inside the run file, such as a source or `data.filters`: pydantic models with messages in its words."""

from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from finetune.config.messages import explain
from finetune.errors import UserError


class Mapping(BaseModel):
    """A mapping of the run file whose keys are known; values are not converted."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


M = TypeVar("M", bound=Mapping)


def parse_mapping(kind: type[M], value: Any, key: str) -> M:
    """Return a mapping as what it stands for.

    Args:
        kind: what that is.
        value: as in the run file.
        key: its name, for messages.

    Raises:
        UserError: no mapping, unknown keys, or values that they cannot have; all problems together.
    """
    known = ", ".join(kind.model_fields)
    if not isinstance(value, dict):
        raise UserError(f"{key}: expected a mapping of {known}, found {value!r}.")
    try:
        return kind(**{str(name): inside for name, inside in value.items()})
    except ValidationError as error:
        problems = []
        for found in error.errors():
            name = ".".join(map(str, found["loc"]))
            is_unknown = found["type"] == "extra_forbidden"
            problems.append(
                f"{key}: unknown key {name}; known are {known}." if is_unknown else f"{key}.{name}: {explain(found)}"
            )
        raise UserError("\n".join(problems)) from None
