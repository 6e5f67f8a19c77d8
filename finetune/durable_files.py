"""Files that outlive crashes and power cuts."""

import contextlib
import hashlib
import json
import os
import socket
from pathlib import Path
from typing import Any

BLOCK = 2**22


def sync_file(path: Path) -> None:
    """Pushes a file's content to the disk, so that it outlives a power cut."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Pushes the names in a directory to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def put_in_place(aside: Path, path: Path) -> None:
    """Gives a finished file its name: after a crash or a power cut there is the new one, whole, or the one before."""
    sync_file(aside)
    os.replace(aside, path)
    sync_directory(path.parent)


def aside_of(path: Path) -> Path:
    """The name under which this process writes a file before `put_in_place`: others may write the same one."""
    return path.with_name(f".{path.name.lstrip('.')}.{socket.gethostname()}.{os.getpid()}.tmp")


def write_text(path: Path, text: str) -> None:
    """Writes a file aside and renames it, so that it is whole or as before."""
    aside = aside_of(path)
    try:
        aside.write_text(text, encoding="utf-8", errors="backslashreplace")
        put_in_place(aside, path)
    except OSError as error:
        error.filename = error.filename or str(path)  # where a write finds the disk full, the error has no name
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise


def sha256_of(path: Path) -> str:
    """Of a file's content, as hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def write_json(path: Path, value: Any) -> None:
    """Writes JSON aside and renames it, so that the file is whole or as before."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n")
