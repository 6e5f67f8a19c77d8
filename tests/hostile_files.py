"""Archives and pickles that were made to do harm, for the tests."""

import gzip
import io
import os
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def members_of(path: Path) -> dict[str, bytes]:
    """The files of an archive."""
    with tarfile.open(path) as archive:
        return {m.name: archive.extractfile(m).read() for m in archive if m.isfile()}


def write_archive(path: Path, files: dict[str, bytes], *extra: tarfile.TarInfo, mode: str = "w:") -> Path:
    """An archive of these files, and of members that are written as they are."""
    with tarfile.open(path, mode) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        for member in extra:
            archive.addfile(member)
    return path


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", size: int = 0) -> tarfile.TarInfo:
    """A header alone."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, size
    return info


class Touch:
    """A pickle of it makes a file where it is read."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.mark),)


def torch_file(content: bytes, compression: int = zipfile.ZIP_STORED, extra: dict[str, bytes] | None = None) -> bytes:
    """A torch file whose pickled part is this."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as archive:
        for name, data in {"data.pkl": content, "byteorder": b"little", "version": b"3\n", **(extra or {})}.items():
            archive.writestr(f"archive/{name}", data)
    return out.getvalue()


def evil_torch_file(mark: Path) -> bytes:
    """A torch file that makes a folder where the full unpickler reads it."""
    return torch_file(pickle.dumps({"encoder.weight": Touch(mark)}, 2))


def bomb(path: Path, mebibytes: int) -> Path:
    """A small archive that unpacks to a thousand times its size."""
    head = member("model_weights.ckpt", size=mebibytes * 2**20).tobuf(tarfile.GNU_FORMAT)
    with gzip.open(path, "wb", compresslevel=9) as file:
        file.write(head)
        for _ in range(mebibytes):
            file.write(bytes(2**20))
    return path
