"""Checks of the Hugging Face hub: the token, offline switches, and whether it answers."""

import os
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from finetune.security.secrets import clean_text
from finetune.tools.doctor.findings import Line, Wanted, fault, ok, reason_of

PATIENCE = 4.0  # seconds
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")


def is_hub_name(name: str) -> bool:
    """Whether `model.name` means the hub, by the rule of `finetune.models.nemo.load_model`."""
    path = Path(name)
    local = path.is_dir() or path.suffix in (".yaml", ".yml", ".nemo") or path.exists()
    return not local and name.count("/") == 1 and not name.startswith((".", "/"))


def cached_model(name: str) -> str | None:
    """The .nemo or safetensors file of a hub name in the local cache; None where it has to be downloaded."""
    from huggingface_hub import try_to_load_from_cache

    files = (name.split("/")[1] + ".nemo", "model.safetensors")
    found = (try_to_load_from_cache(name, file) for file in files)
    return next((path for path in found if isinstance(path, str)), None)


def is_hub_data(path: str) -> bool:
    """Whether a source's path is a name on the hub, by the rule of `finetune.data.sources`."""
    return not (os.path.exists(path) or "://" in path or any(c in path for c in "*?[{")) and not (
        path.endswith((".json", ".jsonl", ".ndjson")) or path.startswith((".", "/", "~")) or path.count("/") > 1
    )


def source_paths(value: Any) -> list[str]:
    """The paths that a key such as data.train names."""
    entries = value if isinstance(value, list) else [value]
    paths = [entry.get("path") if isinstance(entry, dict) else entry for entry in entries]
    return [path for path in paths if isinstance(path, str)]


def wanted_from_hub(wanted: Wanted) -> list[str]:
    """What the run file takes from the hub and is not in the cache of models."""
    if wanted.config_file is None:
        return []
    name = str(wanted.config.model.name)
    found = [name] if is_hub_name(name) and cached_model(name) is None else []
    for key in ("train", "validation", "test", "guard"):
        found += [
            path
            for path in source_paths(getattr(wanted.config.data, key))
            if is_hub_data(path) or path.startswith("hf://")
        ]
    return list(dict.fromkeys(found))


def hub(wanted: Wanted) -> list[Line]:
    """Whether the hub answers, and whether there is a token; never which."""
    from huggingface_hub import constants, get_token

    needed = wanted_from_hub(wanted)
    what = f"the run file takes {', '.join(needed)} from it" if needed else "nothing of this run needs it"
    has_token = get_token() is not None
    lines = [
        ok(
            "hub token",
            "one is set (its value is never shown)"
            if has_token
            else "none; only private and gated repositories need one",
        )
    ]
    switched = [name for name in OFFLINE if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")]
    if switched:
        found = f"switched off by {', '.join(switched)}; {what}"
        if not needed:
            return [ok("hub", found), *lines]
        return [fault(True, "hub", found, f"unset {' '.join(switched)}, or give local paths."), *lines]
    answer = _ask(constants.ENDPOINT)
    endpoint = clean_text(constants.ENDPOINT)
    if answer is None:
        return [ok("hub", f"{endpoint} answers; {what}"), *lines]
    remedy = "Check network and proxy (HTTPS_PROXY); without a network give local paths and export HF_HUB_OFFLINE=1."
    return [fault(bool(needed), "hub", f"{endpoint} does not answer ({clean_text(answer)}); {what}", remedy), *lines]


def _ask(url: str) -> str | None:
    """What went wrong in asking for the head of a page within PATIENCE; None where any answer came."""
    result = [f"no answer within {PATIENCE:.0f} s"]

    def ask() -> None:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=PATIENCE):
                result[0] = ""
        except urllib.error.HTTPError as error:
            result[0] = "" if error.code < 500 else reason_of(error)
        except Exception as error:
            result[0] = reason_of(error)

    # Looking a name up has no time-out of its own.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(PATIENCE + 0.5)
    return result[0] or None
