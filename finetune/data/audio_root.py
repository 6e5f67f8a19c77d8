"""Where the audio of a row may be: what a manifest from elsewhere can make this machine read."""

import os
import re
from pathlib import Path
from urllib.parse import unquote

from finetune.data.quarantine import BadUtterance
from finetune.errors import UserError
from finetune.security.secrets import clean_urls

# What a row may name; a chain such as reference::https can run what it finds there.
STORAGE = [
    "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "hf",
    "http", "https", "hdfs", "webhdfs", "oss", "r2", "ocs", "tos", "memory",
]  # fmt: skip
MOST_ENCODINGS = 8


def check_root(root: str | None, key: str = "data.root") -> str | None:
    """Return `data.root` with links resolved, or None; raise UserError where it is no directory and no URL."""
    if root is None or root == "":
        return None
    if "://" in str(root):
        return str(root).rstrip("/")
    if not Path(root).is_dir():
        raise UserError(f"{key}: there is no directory {root} (looked in {Path.cwd()}).")
    return os.path.realpath(root)


def check_place(audio: object, folder: str | Path | None, root: str | None) -> None:
    """Raise BadUtterance for audio on an odd kind of storage or outside of `root`; audio within the row itself passes.

    Relative paths start at `folder`, a directory or URL; without a root every local path passes.
    """
    if isinstance(audio, dict):
        if audio.get("bytes") is not None or audio.get("array") is not None:
            return
        audio = audio.get("path")
    if not isinstance(audio, str) or not audio:
        return
    if "\0" in audio:
        raise BadUtterance("the path of the audio holds a zero")
    if "::" in audio and "://" in audio:
        raise BadUtterance(f"{clean_urls(audio)} is a chain of storages; a plain address is expected")
    if "://" in audio and audio.split("://")[0].lower() not in STORAGE:
        raise BadUtterance(
            f"{clean_urls(audio)}: a row may name a path, or an address of {', '.join(STORAGE[:9])}; a file here is "
            "written as its path"
        )
    if root is None:
        return
    remote = "://" in audio or (folder is not None and "://" in str(folder))
    if remote:
        place = audio if "://" in audio else f"{str(folder).rstrip('/')}/{audio}"
        inside = place.startswith(root + "/") and ".." not in _as_servers_read(place).split("/")
    else:
        place = os.path.join(folder or "", audio)
        inside = "://" not in root and Path(os.path.realpath(place)).is_relative_to(root)
    if not inside:
        raise BadUtterance(f"the audio lies outside of data.root: {clean_urls(audio)}")


def _as_servers_read(address: str) -> str:
    """Write out what an address encodes, such as %2e, %2F or %252e, and drop the characters that readers drop."""
    for _ in range(MOST_ENCODINGS):
        plain = unquote(address)
        if plain == address:
            break
        address = plain
    return re.sub(r"[\t\r\n]", "", address).replace("\\", "/")
