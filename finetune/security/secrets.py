"""Remove from texts and configurations what nobody else should read: tokens, passwords, signatures, names of users
and hosts.
"""

import contextlib
import functools
import getpass
import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

REMOVED = "<removed>"
SECRET_NAME = re.compile(
    r"token|secret|passw|pwd|passphrase|key|credential|auth|cookie|signature|bearer|dsn|(?:^|_)(?:pass|pw|sig)(?:_|$)",
    re.IGNORECASE,
)
# Names that hold one of these words and no secret.
HARMLESS = re.compile(
    r"(.*_)?tokenizers?(_\w+)?|(old)?pwd|(max|min|num|batch|total|target|padded)_tokens?|keys|key_?frame\w*|key(board|word|note)\w*|(mon|tur|don|hoc)keys?|author\w*|(\w*_)?authors?|\w*tokens_than\w*",
    re.IGNORECASE,
)
_VALUE = r"(?P<value>\"[^\"]*\"|'[^']*'|[^\s,;&}\]]+)"
ASSIGNED = re.compile(
    r"(?P<name>[\w.-]{0,64}(?:token|secret|pass|pwd|key|credential|auth|cookie|signature|bearer|dsn|pw|sig)[\w.-]{0,64})"
    rf"(?P<sign>[\"']?\s*(?:=|:)\s*){_VALUE}",
    re.IGNORECASE,
)
# In running text plain words, such as key, count only where a setting can stand.
NO_PLAIN_WORD = re.compile(r"[\w.-]token|secret|passw|pwd|passphrase|credential|signature|[\w]+[._-]\w", re.IGNORECASE)
LINE_START = re.compile(r"\s*(?:-\s+)*[\"']?")
OPTION = re.compile(rf"(?P<name>(?<![\w-])--[A-Za-z][\w-]*)(?P<sign>[ \t]+)(?!-){_VALUE}")
TOKENS = re.compile(
    r"hf_[A-Za-z0-9]{28,}|api_org_[A-Za-z0-9]{28,}"  # Hugging Face
    r"|gh[opsur]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{10,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{12,}|AIza[\w-]{20,}|ya29\.[\w.-]+"  # Amazon, Google
    # A piece that no name of a model or folder has: 16 letters and digits, or 32 letters, or an identifier.
    r"|(?<![A-Za-z0-9])sk-(?=(?:[\w-]{0,64}[_-])?(?:(?=[A-Za-z]*\d)[A-Za-z0-9]{16}|[A-Za-z0-9]{32}|[\da-f]{8}(?:-[\da-f]{4}){3}-))[\w-]+"
    r"|xox[abprs]-[\w-]{10,}|wandb_v\d_\w+"
    r"|eyJ[\w-]{8,}\.[\w-]+(?:\.[\w-]+)?"  # JSON web tokens
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
)
BEARER = re.compile(r"\b(Bearer|Basic)\s+[\w.~+/=-]{6,}", re.IGNORECASE)
# Up to the last @ before a slash, or, behind a colon that begins a password and no port, up to the last one: a
# password may hold both.
USER_INFO = re.compile(
    r"(?<=://)(?:(?!(?:localhost|[\w-]+\.[\w.-]+|\[[\da-f:]+\]):\d{2,5}(?:/|$))[^/\s\"'?#:@]*:(?:(?!://)[^\s\"'])*@|[^/\s\"'?#]*@)"
)
QUERY = re.compile(r"(?<=[\w/%.}*-])\?((?:[\w.%~-]+=[^\s\"'#&]*&?)+)")
HOMES = re.compile(r"/(home|Users)/[^/\s:\"',]+")
TEXTS = {"pairs", "reference", "hypothesis", "text", "samples_shown", "transcript"}
"""Keys of a run's records that hold what was said in clips."""
SHORTEST = 6  # characters of a value that is replaced wherever it stands


def is_secret_name(name: str) -> bool:
    """Return whether a key or variable of this name holds what nobody else should read."""
    last = name.rsplit(".", 1)[-1].replace("-", "_").lstrip("_")
    return bool(SECRET_NAME.search(last)) and not HARMLESS.fullmatch(last)


def _personal() -> list[tuple[re.Pattern[str], str]]:
    """Return patterns of the home directory, user and host, each with its replacement."""
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


def known_secrets(*structures: object, environment: Mapping[str, str] | None = None) -> set[str]:
    """Values of secret names in these structures and in the environment, and the hub's token: they are replaced
    wherever they stand.
    """
    found = {
        value for name, value in (os.environ if environment is None else environment).items() if is_secret_name(name)
    }
    from huggingface_hub import get_token

    found.add(get_token() or "")

    def look(value: object, secret: bool) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                look(inner, secret or is_secret_name(str(key)))
        elif isinstance(value, list | tuple):
            look(_settings_in(value), secret)
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


def _settings_in(words: list[Any] | tuple[Any, ...]) -> dict[str, Any]:
    """Return what a command line of these words sets: `key=value`, `--key=value`, `--key value`."""
    found = {}
    for word, following in zip(words, [*words[1:], None]):
        if not isinstance(word, str):
            continue
        name, sign, value = word.partition("=")
        if not re.fullmatch(r"[\w.+~-]+", name):
            continue
        if sign:
            try:
                found[name] = yaml.safe_load(value)
            except yaml.YAMLError:
                found[name] = value
        elif _is_option(name) and isinstance(following, str):
            found[name] = following
    return found


def _is_option(word: str) -> bool:
    return re.fullmatch(r"--[A-Za-z][\w-]*", word) is not None


def clean_urls(text: str) -> str:
    """Remove passwords from the URLs of a text, and query values, which hold signatures."""
    text = USER_INFO.sub(f"{REMOVED}@", text)
    return QUERY.sub(lambda found: "?" + re.sub(r"=[^&]*", f"={REMOVED}", found[1]), text)


def clean_text(text: str, secrets: set[str] | frozenset[str] = frozenset(), personal: bool = True) -> str:
    """Remove secrets, home directory, user and host from a text.

    Args:
        secrets: values that are replaced wherever they stand, from `known_secrets`.
        personal: take out home directory, user and host too.
    """
    for value in sorted(secrets, key=len, reverse=True):
        text = text.replace(value, REMOVED)
    text = TOKENS.sub(REMOVED, text)
    text = BEARER.sub(rf"\1 {REMOVED}", text)
    text = clean_urls(text)
    text = OPTION.sub(_without_value, text)
    text = ASSIGNED.sub(_without_value, text)
    if not personal:
        return text
    for pattern, instead in _personal():
        text = pattern.sub(instead, text)
    return HOMES.sub(r"/\1/<user>", text)


def _without_value(found: re.Match[str]) -> str:
    name, value = found["name"], found["value"].strip("\"'")
    if not is_secret_name(name) or value in ("", "null", "None", "Bearer", "Basic", REMOVED) or _counts(name, value):
        return found[0]
    if not NO_PLAIN_WORD.search(name) and not _can_be_a_setting(found.string, found.start(), value):
        return found[0]
    return f"{name}{found['sign']}{REMOVED}"


def _can_be_a_setting(text: str, at: int, value: str) -> bool:
    """Return whether an entry of a mapping can stand at this place, rather than words of a sentence."""
    before = text[:at].rstrip(" \"'")
    if text.startswith("--", at) or before.endswith(("{", "&", "?")):
        return True
    inside = before.count("{") > before.count("}")
    return inside or (LINE_START.fullmatch(text[:at].rsplit("\n", 1)[-1]) is not None and value != "value")


def _counts(name: str, value: object) -> bool:
    """Return whether this is a number of tokens."""
    if isinstance(value, dict | list | tuple):
        return all(_counts(name, inner) for inner in (value.values() if isinstance(value, dict) else value))
    return "tokens" in name.lower() and re.fullmatch(r"[+-]?[\d_]+(\.\d*)?(e[+-]?\d+)?", str(value)) is not None


def clean(value: Any, secrets: set[str] | frozenset[str] = frozenset(), personal: bool = True) -> Any:
    """A structure of JSON or YAML without secrets: all that stands under a secret name, and what `clean_text` finds in
    texts.
    """
    if isinstance(value, dict):
        return {
            clean_text(str(key), secrets, personal): REMOVED
            if is_secret_name(str(key)) and _holds(inner) and not _counts(str(key), inner)
            else clean(inner, secrets, personal)
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        cleaned = [clean(inner, secrets, personal) for inner in value]
        for i, word in enumerate(value[:-1]):  # a command line's words
            follows = value[i + 1]
            if isinstance(word, str) and _is_option(word) and is_secret_name(word) and not _counts(word, follows):
                cleaned[i + 1] = REMOVED
        return cleaned
    return clean_text(value, secrets, personal) if isinstance(value, str) else value


def without_texts(value: Any) -> Any:
    """Return a structure of JSON or YAML without what was said in clips."""
    if isinstance(value, dict):
        return {key: without_texts(inner) for key, inner in value.items() if key not in TEXTS}
    return [without_texts(inner) for inner in value] if isinstance(value, list) else value


def _holds(value: object) -> bool:
    """Return whether there is something to hide."""
    return value is not None and not isinstance(value, bool) and value not in ("", [], {})


@functools.cache
def secrets_of_the_environment() -> frozenset[str]:
    """What `known_secrets` finds in the environment, looked up once: a log line asks for it each time."""
    return frozenset(known_secrets())
