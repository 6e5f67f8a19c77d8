"""Where the audio of a row may lie: what a manifest from elsewhere can make this machine read."""

import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from finetune.data.quarantine import BadUtterance
from finetune.errors import UserError
from finetune.security.secrets import clean_urls

STORAGE = [
    "s3",
    "s3a",
    "gs",
    "gcs",
    "az",
    "abfs",
    "abfss",
    "adl",
    "hf",
    "http",
    "https",
    "hdfs",
    "webhdfs",
    "oss",
    "r2",
    "ocs",
    "tos",
    "memory",
]  # what a row may name; a chain such as reference::https can run what it finds there

MOST_ENCODINGS = 8


def check_root(root: Any, key: str = "data.root") -> str | None:
    """`data.root` of a run file, links resolved; None where there is none.

    Raises:
        UserError: it is no directory and no URL.
    """
    if root is None or root == "":
        return None
    if "://" in str(root):
        return str(root).rstrip("/")
    if not Path(root).is_dir():
        raise UserError(f"{key}: there is no directory {root} (looked in {Path.cwd()}).")
    return os.path.realpath(root)


def check_place(audio: Any, folder: str | Path | None, root: str | None) -> None:
    """Refuses a row whose audio lies where it should not be read from. Audio within the row itself is never refused.

    Args:
        audio: a path, or a mapping with "path" and "bytes".
        folder: directory or URL where relative paths start.
        root: from `check_root`; None lets every local path pass.

    Raises:
        BadUtterance: it names a storage of an odd kind, or lies outside of `root`.
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
            f"{clean_urls(audio)}: a row may name a path, or an address of {', '.join(STORAGE[:9])}; a file here is written as its path"
        )
    if root is None:
        return
    remote = "://" in audio or (folder is not None and "://" in str(folder))
    place = audio if "://" in audio or folder is None else _joined(str(folder), audio, remote)
    if remote:
        inside = place.startswith(root + "/") and ".." not in _as_servers_read(place).split("/")
    else:
        inside = "://" not in root and Path(os.path.realpath(place)).is_relative_to(root)
    if not inside:
        raise BadUtterance(f"the audio lies outside of data.root: {clean_urls(audio)}")


def _as_servers_read(address: str) -> str:
    """An address with what is written as %2e or %2F (or %252e) written out, and without what readers of addresses leave out."""
    for _ in range(MOST_ENCODINGS):
        plain = unquote(address)
        if plain == address:
            break
        address = plain
    return re.sub(r"[\t\r\n]", "", address).replace("\\", "/")


def _joined(folder: str, path: str, remote: bool) -> str:
    return f"{folder.rstrip('/')}/{path}" if remote else os.path.join(folder, path)
