"""Checks of the Hugging Face hub: the token, offline switches, and whether it answers."""

from __future__ import annotations

import os
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.security.secrets import clean_text
from finetune.tools.doctor.findings import Finding, Wanted, ok, problem, reason_of

if TYPE_CHECKING:
    from collections.abc import Iterator

TIMEOUT = 4.0  # seconds
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
DATA_KEYS = ("train", "validation", "test", "guard")


def is_hub_name(name: str) -> bool:
    """Whether `model.name` is a hub name, by the rule of `finetune.models.nemo.load_model`."""
    path = Path(name)
    local = path.suffix in (".yaml", ".yml", ".nemo") or path.exists()
    return not local and name.count("/") == 1 and not name.startswith((".", "/"))


def cached_model(name: str) -> str | None:
    """The .nemo or safetensors file of a hub name in the local cache, if it is there."""
    from huggingface_hub import try_to_load_from_cache

    files = (name.split("/")[1] + ".nemo", "model.safetensors")
    found = (try_to_load_from_cache(name, file) for file in files)
    return next((path for path in found if isinstance(path, str)), None)


def is_hub_data(path: str) -> bool:
    """Whether a source's path is a hub name, by the rule of `finetune.data.sources`."""
    return not (os.path.exists(path) or "://" in path or any(c in path for c in "*?[{")) and not (
        path.endswith((".json", ".jsonl", ".ndjson")) or path.startswith((".", "/", "~")) or path.count("/") > 1
    )


def source_paths(value: Any) -> list[str]:
    """The paths that a key such as data.train names."""
    entries = value if isinstance(value, list) else [value]
    paths = [entry.get("path") if isinstance(entry, dict) else entry for entry in entries]
    return [path for path in paths if isinstance(path, str)]


def wanted_from_hub(wanted: Wanted) -> list[str]:
    """What the run file takes from the hub, without models that are in the cache."""
    if wanted.config_file is None:
        return []
    name = str(wanted.config.model.name)
    found = [name] if is_hub_name(name) and cached_model(name) is None else []
    for key in DATA_KEYS:
        paths = source_paths(getattr(wanted.config.data, key))
        found += [path for path in paths if is_hub_data(path) or path.startswith("hf://")]
    return list(dict.fromkeys(found))


def hub(wanted: Wanted) -> Iterator[Finding]:
    """Whether the hub answers, and whether there is a token; never which."""
    from huggingface_hub import constants, get_token

    needed = wanted_from_hub(wanted)
    what = f"the run file takes {', '.join(needed)} from it" if needed else "nothing of this run needs it"
    switched = [name for name in OFFLINE if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")]
    if switched and needed:
        remedy = f"unset {' '.join(switched)}, or give local paths."
        yield problem(True, "hub", f"switched off by {', '.join(switched)}; {what}", remedy)
    elif switched:
        yield ok("hub", f"switched off by {', '.join(switched)}; {what}")
    else:
        endpoint, error = clean_text(constants.ENDPOINT), _request_head(constants.ENDPOINT)
        if error is None:
            yield ok("hub", f"{endpoint} answers; {what}")
        else:
            remedy = "Check network and proxy (HTTPS_PROXY), or give local paths and export HF_HUB_OFFLINE=1."
            yield problem(bool(needed), "hub", f"{endpoint} does not answer ({clean_text(error)}); {what}", remedy)
    if get_token() is not None:
        yield ok("hub token", "one is set (its value is never shown)")
    else:
        yield ok("hub token", "none; only private and gated repositories need one")


def _request_head(url: str) -> str | None:
    """Request the head of a page; return the error, or None if any answer came within TIMEOUT."""
    result = [f"no answer within {TIMEOUT:.0f} s"]

    def request() -> None:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=TIMEOUT):
                result[0] = ""
        except urllib.error.HTTPError as error:
            result[0] = "" if error.code < 500 else reason_of(error)
        except Exception as error:
            result[0] = reason_of(error)

    # A thread, because looking up a host name has no timeout of its own.
    thread = threading.Thread(target=request, daemon=True)
    thread.start()
    thread.join(TIMEOUT + 0.5)
    return result[0] or None
