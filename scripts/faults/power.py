"""What a power cut leaves of a directory: what was synced, and the rest as file systems are known to leave it."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

LOSSES = ("unsynced names and contents", "unsynced contents, empty files", "unsynced contents, zeros")
"""What is lost beside the contents: also names (new files, renames); or names reach the disk before contents, which
are then empty (ext4's delayed allocation) or zeros (XFS)."""


class SyncedState:
    """Keeps, from inside the writing process, what it has pushed to the disk.

    Args:
        root: the directory; all that it holds now counts as synced.
        store: an empty directory beside it.
    """

    def __init__(self, root: Path, store: Path):
        self.root, self.store = root, store
        store.mkdir(parents=True)
        self.pid, self.copies, self.held = os.getpid(), 0, {}
        self.journal = (store / "journal.jsonl").open("w", encoding="utf-8")
        for folder, _, files in os.walk(root):
            self._keep(folder)
            for name in files:
                self._keep(os.path.join(folder, name))

    def _keep(self, path: str) -> None:
        handle = os.open(path, os.O_RDONLY)
        try:
            self.synced(handle)
        finally:
            os.close(handle)

    def synced(self, handle: int) -> None:
        """To be called before a file or directory of this process is synced."""
        if os.getpid() != self.pid:
            return
        status = os.fstat(handle)
        path = os.readlink(f"/proc/self/fd/{handle}")
        if not (path + os.sep).startswith(str(self.root) + os.sep):
            return
        row: dict[str, Any] = {"inode": status.st_ino}
        if os.path.isdir(path):
            row["entries"] = {entry.name: [entry.inode(), entry.is_dir()] for entry in os.scandir(path)}
        else:
            self.copies += 1
            row["copy"] = f"{self.copies}"
            shutil.copyfile(path, self.store / row["copy"])
        if status.st_ino not in self.held:
            self.held[status.st_ino] = os.dup(handle)  # while it is open its number goes to no other file
        self.journal.write(json.dumps(row) + "\n")
        self.journal.flush()

    def watch(self) -> None:
        """Takes note of each os.fsync and os.fdatasync from here on."""
        for name in ("fsync", "fdatasync"):
            setattr(os, name, self._noting(getattr(os, name)))

    def _noting(self, sync: Any) -> Any:
        def noted(file: Any) -> None:
            self.synced(file if isinstance(file, int) else file.fileno())
            sync(file)

        return noted


def cut_power(root: Path, store: Path, loss: str) -> list[str]:
    """Put a directory into the state that the disk has after a power cut; return the names lost or changed.

    Args:
        root: as the processes left it.
        store: of its `SyncedState`.
        loss: of LOSSES.
    """
    contents: dict[int, Path] = {}
    entries: dict[int, dict[str, list[Any]]] = {}
    for line in (store / "journal.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if "copy" in row:
            contents[row["inode"]] = store / row["copy"]
        else:
            entries[row["inode"]] = row["entries"]
    after = root.with_name(f"{root.name}.after")
    shutil.rmtree(after, ignore_errors=True)
    if loss == LOSSES[0]:
        _names_as_synced(root.stat().st_ino, after, contents, entries)
    else:
        _names_as_written(root, after, contents, fill=loss == LOSSES[2])
    changed = _differing(root, after)
    shutil.rmtree(root)
    os.rename(after, root)
    return changed


def _names_as_synced(
    inode: int, target: Path, contents: dict[int, Path], entries: dict[int, dict[str, list[Any]]]
) -> None:
    target.mkdir()
    for name, (number, folder) in entries.get(inode, {}).items():
        if folder:
            _names_as_synced(number, target / name, contents, entries)
        elif number in contents:
            shutil.copyfile(contents[number], target / name)
        else:  # the name was pushed to the disk, the content never
            (target / name).touch()


def _names_as_written(root: Path, target: Path, contents: dict[int, Path], fill: bool) -> None:
    target.mkdir()
    for entry in os.scandir(root):
        if entry.is_dir():
            _names_as_written(Path(entry.path), target / entry.name, contents, fill)
            continue
        status = entry.stat()
        kept = contents[status.st_ino].read_bytes() if status.st_ino in contents else b""
        if fill:
            kept += bytes(max(0, status.st_size - len(kept)))
        (target / entry.name).write_bytes(kept)


def _differing(before: Path, after: Path) -> list[str]:
    """Names of files that are only on one side or have other contents."""
    sides = [{str(p.relative_to(side)): p for p in side.rglob("*") if p.is_file()} for side in (before, after)]
    return sorted(
        name
        for name in sides[0].keys() | sides[1].keys()
        if name not in sides[0] or name not in sides[1] or sides[0][name].read_bytes() != sides[1][name].read_bytes()
    )
