"""What pydantic finds wrong, in the words of the run file."""

import re
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from finetune.config.schema import option_of, range_of
from finetune.config.suggestions import did_you_mean

MOST_LISTED = 8
"""Choices that are listed beside what was probably meant."""
BOUNDS = {
    "greater_than_equal": "{ge:g} or more",
    "greater_than": "above {gt:g}",
    "less_than_equal": "{le:g} or less",
    "less_than": "below {lt:g}",
}


def explain(error: ErrorDetails, field: FieldInfo | None = None, value: Any = None) -> str:
    """Return what is wrong with a value and what to write instead, as a sentence without a subject.

    Args:
        error: one of pydantic's.
        field: of the schema; None for a value inside of one, such as an option of the optimizer.
        value: of the whole field.
    """
    kind, found, context = error["type"], error["input"], error.get("ctx", {})
    if field is not None and (form := option_of(field).form) and kind != "value_error":
        return f"has to be {form}, found {value!r}."
    if kind == "value_error":
        return str(context["error"])
    if kind == "literal_error":
        choices = re.findall(r"'([^']+)'", context["expected"])
        near = did_you_mean(str(found), choices)
        listed = f"the {len(choices)} choices" if near and len(choices) > MOST_LISTED else ", ".join(choices)
        return f"{found!r} is not one of {listed}.{near}"
    if kind in BOUNDS:
        allowed = range_of(field) if field is not None else ""
        return f"has to be {allowed or BOUNDS[kind].format(**context)}, found {found}."
    if kind == "finite_number":
        return f"has to be a finite number, found {found}."
    if kind in ("too_short", "too_long"):
        return f"has to have {context.get('min_length', context.get('max_length'))} entries, found {found!r}."
    expected = kind.split("_")[0].replace("string", "str")
    return f"expected {expected}, found {found!r}."
