"""Files here and on remote storage, through fsspec."""

import glob
from contextlib import AbstractContextManager
from typing import BinaryIO, cast

import fsspec


def open_binary(path: str) -> AbstractContextManager[BinaryIO]:
    """Open a local file or a URL for reading."""
    return cast(AbstractContextManager[BinaryIO], fsspec.open(path, "rb"))  # untyped in fsspec


def expand(path: str) -> list[str]:
    """Return the files that a path or URL with wildcards names, sorted."""
    if "://" not in path:
        return sorted(glob.glob(path, recursive=True))
    system, inner = fsspec.core.url_to_fs(path)
    return sorted(system.unstrip_protocol(name) for name in system.glob(inner))
