"""Texts from data on their way to a terminal, a log or a page: characters that would act on it are escaped."""

import html
import json
import re
from collections.abc import Callable
from typing import Any

# C0 and C1 controls; line and paragraph separators; marks, overrides and isolates of the writing direction; the byte
# order mark and other characters without a width that hide text; halves of characters. What joins letters (U+200C,
# U+200D) belongs to languages.
ACTS = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)
NAMED = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\x1b": "\\x1b"}


def one_line(value: object) -> str:
    """A text that a terminal or a log shows as it is: control characters, line breaks and changes of direction are
    written as `\\x1b`, `\\n`, `\\u202e`.
    """
    return ACTS.sub(_written, str(value))


def lines(value: object) -> str:
    """Escape the same in a text of several lines; line breaks and tabs stay."""
    return ACTS.sub(lambda found: found[0] if found[0] in "\n\t" else _written(found), str(value))


def json_line(row: object, default: Callable[[Any], Any] | None = None) -> str:
    """A value as one line of JSON, with what acts on a terminal, or is a line break to some readers, as JSON's own
    escapes.

    Args:
        default: as of `json.dumps`.
    """
    text = json.dumps(row, ensure_ascii=False, default=default)
    return ACTS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


MARKDOWN = re.compile(r"([\\`*_{}\[\]()#+!|~$])")
ADDRESS = re.compile(r"(?i)(https?|ftp)://|\bwww\.")


def escape_markdown(text: str) -> str:
    """Escape one line of text so that Markdown shows it as it is: no markup, no image, no link that a renderer would
    make of an address.
    """
    escaped = MARKDOWN.sub(r"\\\1", html.escape(text, quote=False))
    return ADDRESS.sub(lambda found: found[0][:-1] + "&#8203;" + found[0][-1], escaped)


class Block(str):
    """Lines made by this project, such as a table, that stay lines in the log."""


def _written(found: re.Match[str]) -> str:
    sign = found[0]
    return NAMED.get(sign) or (f"\\x{ord(sign):02x}" if ord(sign) < 0x100 else f"\\u{ord(sign):04x}")
