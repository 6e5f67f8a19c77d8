"""Disks that are small, full or read-only, and files that are damaged.

Mounts are made in a mount namespace of this process and end with it.
"""

import contextlib
import ctypes
import os
import random
from collections.abc import Iterator
from pathlib import Path

CLONE_NEWNS = 0x20000
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18
MNT_DETACH = 2

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _mount(source: str, target: Path, kind: str, flags: int, options: str = "") -> None:
    result = _libc.mount(source.encode(), os.fsencode(target), kind.encode(), ctypes.c_ulong(flags), options.encode())
    _check(result, f"mount {target}")


def own_mounts() -> str | None:
    """Gives this process mounts of its own; returns why not, where the system does not let it."""
    try:
        _check(_libc.unshare(CLONE_NEWNS), "unshare")
        _mount("none", Path("/"), "", MS_REC | MS_PRIVATE)
    except OSError as error:
        return f"{error}; mounts need root, as `unshare --user --map-root-user --mount` gives it"
    return None


@contextlib.contextmanager
def small_disk(folder: Path, mebibytes: int) -> Iterator[Path]:
    """An empty file system of a size in memory, in place of a folder that is made."""
    folder.mkdir()
    _mount("tmpfs", folder, "tmpfs", 0, f"size={mebibytes}m")
    try:
        yield folder
    finally:
        unmount(folder)
        folder.rmdir()


def make_read_only(folder: Path) -> None:
    """Make the folder read-only for files opened from now on; open ones stay writable, as after a disk error."""
    _mount(str(folder), folder, "", MS_BIND)
    _mount("none", folder, "", MS_REMOUNT | MS_BIND | MS_RDONLY)


def unmount(folder: Path) -> None:
    """Takes a mount off again."""
    _check(_libc.umount2(os.fsencode(folder), MNT_DETACH), f"unmount {folder}")


def free_bytes(folder: Path) -> int:
    """Room that is left."""
    room = os.statvfs(folder)
    return room.f_bavail * room.f_frsize


def fill(filler: Path, leave: int = 0) -> None:
    """Takes the free room of a file system but for `leave` bytes, as another program would."""
    size = free_bytes(filler.parent) - leave
    with filler.open("ab") as file:
        if size > 0:
            os.posix_fallocate(file.fileno(), file.tell(), size)


DAMAGES = ("one bit flipped", "cut to half", "missing")


def damage(file: Path, kind: str, seed: int) -> None:
    """Damages a file.

    Args:
        kind: of DAMAGES.
        seed: decides which bit.
    """
    if kind == "missing":
        file.unlink()
    elif kind == "cut to half":
        os.truncate(file, file.stat().st_size // 2)
    else:
        draw = random.Random(seed)
        with file.open("r+b") as content:
            place = draw.randrange(file.stat().st_size)
            content.seek(place)
            byte = content.read(1)[0]
            content.seek(place)
            content.write(bytes([byte ^ 1 << draw.randrange(8)]))
