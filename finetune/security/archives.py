"""Tar archives that others made: looked through from the first header to the last before anything is taken out.

Python's tarfile reads headers whose sizes nobody checked: a negative one keeps it going in circles, one of gigabytes
fills the memory.
"""

import errno
import gzip
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Any

from finetune.errors import UserError
from finetune.security.documents import first_line
from finetune.security.safe_text import one_line

MOST_MEMBERS = 2_000
MOST_HEADER_BYTES = 2**22
"""Of long names and extended headers of an archive."""
LARGEST_RATIO = 50
"""How many times its size a compressed archive may unpack to. Weights shrink by a tenth."""
FREE_BYTES = 2**26
"""What every archive may unpack to, whatever its ratio."""
GZIP = b"\x1f\x8b"
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
KINDS = {
    tarfile.SYMTYPE: "a symbolic link",
    tarfile.LNKTYPE: "a hard link",
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.FIFOTYPE: "a pipe",
    tarfile.CONTTYPE: "a file of an old kind",
    tarfile.GNUTYPE_SPARSE: "a file with holes",
}


class Refused(ValueError):
    """An archive that is not unpacked; the text is the reason, and names the member."""


class CheckedHeader(tarfile.TarInfo):
    """A member's header, whose sizes are numbers that a file can have."""

    def _block(self, count: int) -> int:
        if count < 0:
            raise Refused(f"{one_line(self.name)!r} says that it has {count} bytes")
        return super()._block(count)  # type: ignore[misc]

    def _of_bounded_length(self, archive: tarfile.TarFile) -> None:
        # All of an archive together: a compressed one may hold thousands of them in a few bytes.
        archive.header_bytes = getattr(archive, "header_bytes", 0) + max(self.size, 0)  # type: ignore[attr-defined]
        if self.size < 0 or archive.header_bytes > MOST_HEADER_BYTES:  # type: ignore[attr-defined]
            raise Refused(f"its headers have more than {MOST_HEADER_BYTES:,} bytes")

    def _proc_gnulong(self, archive: tarfile.TarFile) -> Any:
        self._of_bounded_length(archive)
        return super()._proc_gnulong(archive)  # type: ignore[misc]

    def _proc_pax(self, archive: tarfile.TarFile) -> Any:
        self._of_bounded_length(archive)
        return super()._proc_pax(archive)  # type: ignore[misc]

    def _has_holes(self, *_: object) -> Any:
        raise Refused(f"{one_line(self.name)[:200]!r} is a file with holes")

    _proc_sparse = _proc_gnusparse_00 = _proc_gnusparse_01 = _proc_gnusparse_10 = _has_holes


def bound_headers() -> None:
    """Check headers wherever this process opens a tar archive, also in libraries that read shards themselves."""
    tarfile.TarFile.tarinfo = CheckedHeader


class _Bounded(gzip.GzipFile):
    """A compressed archive, unpacked up to a number of bytes."""

    def __init__(self, file: IO[bytes], most: int):
        super().__init__(fileobj=file)
        self.most = most

    def seek(self, offset: int, whence: int = 0) -> int:
        if offset > self.most:
            raise self._too_much()
        return super().seek(offset, whence)

    def read(self, size: int | None = -1) -> bytes:
        left = self.most - self.tell() + 1
        content = super().read(left if size is None or size < 0 else min(size, left))
        if self.tell() > self.most:
            raise self._too_much()
        return content

    def _too_much(self) -> Refused:
        return Refused(f"it unpacks to more than {self.most:,} bytes, {LARGEST_RATIO} times its size")


@contextmanager
def _open(path: Path) -> Iterator[tarfile.TarFile]:
    """Open a tar archive, plain or gzipped, as NeMo reads them, with headers checked as they are read."""
    with path.open("rb") as file:
        packed = file.read(2) == GZIP
        file.seek(0)
        plain = _Bounded(file, max(LARGEST_RATIO * path.stat().st_size, FREE_BYTES)) if packed else file
        with tarfile.open(fileobj=plain, mode="r:", tarinfo=CheckedHeader) as archive:
            yield archive


def _check_members(archive: tarfile.TarFile, size: int | None) -> list[tarfile.TarInfo]:
    """Return all members, or raise Refused with the name of the one that would do harm.

    Args:
        size: bytes of the archive; None where it is compressed: reading to its end tells.
    """
    seen: set[PurePosixPath] = set()
    members = []
    for member in archive:
        members.append(member)
        if len(members) > MOST_MEMBERS:
            raise Refused(f"it has more than {MOST_MEMBERS:,} members")
        path, shown = PurePosixPath(member.name), one_line(member.name)[:200]
        if path.is_absolute() or ".." in path.parts or "\\" in member.name or not member.name:
            raise Refused(f"{shown!r} would be written outside of the folder that it is unpacked to")
        if one_line(member.name) != member.name or len(member.name.encode(errors="surrogateescape")) > 1024:
            raise Refused(f"{shown!r} is no name of a file")
        if (not member.isdir() and not member.isreg()) or member.type in KINDS or member.issparse():
            kind = KINDS.get(member.type, "no ordinary file")
            raise Refused(f"{shown!r} is {kind}; files and folders are expected")
        if member.size < 0 or (member.isdir() and member.size):
            raise Refused(f"{shown!r} says that it has {member.size} bytes")
        if size is not None and member.offset_data + member.size > size:
            raise tarfile.ReadError(
                f"{shown!r} says that it has {member.size:,} bytes, and the archive ends before them"
            )
        if path in seen and not member.isdir():
            raise Refused(f"{shown!r} is in it twice")
        seen.add(path)
    if archive.fileobj is not None and size is None:
        while archive.fileobj.read(2**20):
            pass
    return members


@contextmanager
def reading(path: Path, key: str) -> Iterator[tuple[tarfile.TarFile, list[tarfile.TarInfo]]]:
    """Open a .nemo with all its members checked. Errors within are reported as the archive's fault.

    Args:
        key: names it at the beginning of a message.

    Raises:
        UserError: it is no archive, or holds what a model has no business with. Nothing was written anywhere.
    """
    try:
        with _open(path) as archive:
            packed = isinstance(archive.fileobj, _Bounded)
            yield archive, _check_members(archive, None if packed else path.stat().st_size)
    except Refused as error:
        raise UserError(f"{key}: {path} is refused: {error}. Nothing of it was unpacked.") from error
    except (tarfile.TarError, OSError, EOFError, zlib.error, ValueError, RecursionError, LookupError) as error:
        if isinstance(error, OSError) and error.errno in NO_ROOM:  # of what is written while it is read
            raise
        raise UserError(
            f"{key}: {path} cannot be read as a NeMo model: {type(error).__name__}: {first_line(error)}. The file is "
            "damaged, or it is none: copy or download it again."
        ) from error


def content_of(archive: tarfile.TarFile, member: tarfile.TarInfo, most: int = 2**26) -> bytes:
    """Return a small file of an archive; raises Refused where it has more than `most` bytes."""
    if member.size > most:
        raise Refused(f"{one_line(member.name)!r} has {member.size:,} bytes; {most:,} at most are expected")
    file = archive.extractfile(member)
    return file.read() if file is not None else b""


def named(members: list[tarfile.TarInfo], name: str) -> tarfile.TarInfo | None:
    """Return the file of this name, in whatever folder of the archive; None where there is none."""
    return next((m for m in members if m.isreg() and PurePosixPath(m.name).name == name), None)


def unpack(path: Path, folder: Path, key: str, wanted: set[str] | None = None) -> None:
    """Check an archive as `reading` does, and unpack it into an empty folder.

    Args:
        wanted: names of the members; None takes all.
    """
    with reading(path, key) as (archive, members):
        for member in members:
            if wanted is None or member.name in wanted:
                archive.extract(member, folder, set_attrs=False, filter="data")
