"""Takes out of texts and configurations what nobody else should read: tokens, passwords, signatures, names of users and hosts."""

import contextlib
import getpass
import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

REMOVED = "<removed>"
SECRET_NAME = re.compile(
    r"token|secret|passw|pwd|passphrase|key|credential|auth|cookie|signature|bearer|dsn", re.IGNORECASE
)
# Names that hold one of these words and no secret.
HARMLESS = re.compile(
    r"(.*_)?tokenizers?(_\w+)?|(old)?pwd|(max|min|num|batch|total|target|padded)_tokens?|tokens?(_per_\w+)?|keys|key_?frame\w*|author\w*|(\w*_)?authors?|\w*tokens_than\w*",
    re.IGNORECASE,
)
# In running text only names that cannot be plain words.
ASSIGNED = re.compile(
    r"(?P<name>[\w.-]*(?:token|secret|passw|pwd|passphrase|api_?key|access_?key|account_?key|private_?key|credential|signature)[\w.-]*)"
    r"(?P<sign>[\"']?\s*(?:=|:)\s*)(?P<value>\"[^\"]*\"|'[^']*'|[^\s,;&}\]]+)",
    re.IGNORECASE,
)
TOKENS = re.compile(
    r"hf_[A-Za-z0-9]{6,}|api_org_[A-Za-z0-9]{6,}"  # Hugging Face
    r"|gh[opsur]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{10,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{12,}|AIza[\w-]{20,}|ya29\.[\w.-]+"  # Amazon, Google
    r"|sk-[\w-]{16,}|xox[abprs]-[\w-]{10,}|wandb_v\d_\w+"
    r"|eyJ[\w-]{8,}\.[\w-]+(?:\.[\w-]+)?"  # JSON web tokens
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
)
BEARER = re.compile(r"\b(Bearer|Basic)\s+[\w.~+/=-]{6,}", re.IGNORECASE)
# Up to the last @ before a slash: a password may hold one.
USER_INFO = re.compile(r"(?<=://)[^/\s\"'?#]*@")
QUERY = re.compile(r"(?<=[\w/%.}*-])\?((?:[\w.%~-]+=[^\s\"'#&]*&?)+)")
HOMES = re.compile(r"/(home|Users)/[^/\s:\"',]+")
SHORTEST = 6  # characters of a value that is replaced wherever it stands


def is_secret_name(name: str) -> bool:
    """Whether a key or variable of this name holds what nobody else should read."""
    last = name.rsplit(".", 1)[-1]
    return bool(SECRET_NAME.search(last)) and not HARMLESS.fullmatch(last)


def _personal() -> list[tuple[re.Pattern[str], str]]:
    """The home directory, the user's name and the host's name, with what stands in their place."""
    found = []
    homes = {str(Path.home()), os.path.realpath(Path.home())} - {"/"}
    for home in sorted(homes, key=len, reverse=True):
        found.append((re.compile(re.escape(home) + r"(?![\w-])"), "~"))
    names = {os.environ.get(key, "") for key in ("USER", "LOGNAME", "SUDO_USER")} | {Path.home().name}
    with contextlib.suppress(OSError, KeyError):  # a user without a name
        names.add(getpass.getuser())
    for name in names - {"", "root", "user", "home"}:
        found.append((re.compile(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])"), "<user>"))
    host = socket.gethostname()
    if len(host) > 2 and host != "localhost":
        found.append((re.compile(rf"(?<![\w.-]){re.escape(host)}(?![\w-])"), "<host>"))
    return found


def known_secrets(*structures: Any, environment: Mapping[str, str] | None = None) -> set[str]:
    """Values of secret names in these structures and in the environment, and the hub's token: they are replaced wherever they stand."""
    found = {
        value for name, value in (os.environ if environment is None else environment).items() if is_secret_name(name)
    }
    from huggingface_hub import get_token

    found.add(get_token() or "")

    def look(value: Any, secret: bool) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                look(inner, secret or is_secret_name(str(key)))
        elif isinstance(value, list | tuple):
            for inner in value:
                look(inner, secret)
        elif secret and isinstance(value, str):
            found.add(value)

    for structure in structures:
        look(structure, False)
    # A variable such as SSH_AUTH_SOCK holds a path; a number may stand for something else elsewhere.
    return {
        v for v in found if len(v) >= SHORTEST and not v.isdigit() and not (v.startswith("/") and os.path.exists(v))
    }


def clean_urls(text: str) -> str:
    """A text whose URLs have no passwords and no values behind their question marks, where signatures stand."""
    text = USER_INFO.sub(f"{REMOVED}@", text)
    return QUERY.sub(lambda found: "?" + re.sub(r"=[^&]*", f"={REMOVED}", found[1]), text)


def clean_text(text: str, secrets: set[str] | frozenset[str] = frozenset()) -> str:
    """A text without secrets, home directory, user and host.

    Args:
        secrets: values that are replaced wherever they stand, from `known_secrets`.
    """
    for value in sorted(secrets, key=len, reverse=True):
        text = text.replace(value, REMOVED)
    text = TOKENS.sub(REMOVED, text)
    text = BEARER.sub(rf"\1 {REMOVED}", text)
    text = clean_urls(text)
    text = ASSIGNED.sub(_without_value, text)
    for pattern, instead in _personal():
        text = pattern.sub(instead, text)
    return HOMES.sub(r"/\1/<user>", text)


def _without_value(found: re.Match[str]) -> str:
    if not is_secret_name(found["name"]) or found["value"].strip("\"'") in ("", "null", "None", REMOVED):
        return found[0]
    return f"{found['name']}{found['sign']}{REMOVED}"


def clean(value: Any, secrets: set[str] | frozenset[str] = frozenset()) -> Any:
    """A structure of JSON or YAML without secrets: all that stands under a secret name, and what `clean_text` finds in texts."""
    if isinstance(value, dict):
        return {
            clean_text(str(key), secrets): REMOVED
            if is_secret_name(str(key)) and _holds(inner)
            else clean(inner, secrets)
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [clean(inner, secrets) for inner in value]
    return clean_text(value, secrets) if isinstance(value, str) else value


def _holds(value: Any) -> bool:
    """Whether there is something to hide."""
    return value is not None and not isinstance(value, bool) and value not in ("", [], {})
