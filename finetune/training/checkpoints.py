"""Checkpoints on the disk: whole or absent, with checksums, the newest whole one found again, old ones removed."""

import contextlib
import json
import logging
import os
import shutil
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from finetune.durable_files import sha256_of, sync_directory, sync_file, write_json
from finetune.errors import UserError
from finetune.security.documents import read_json_object
from finetune.security.pickles import check_checkpoint

log = logging.getLogger(__name__)

STATE_FILE = "trainer_state.json"
CHECKSUMS_FILE = "checksums.json"

CANNOT_WRITE = (OSError, SafetensorError, CheckpointException, RuntimeError)
"""What writing raises where the disk is full or gone; torch.save has a RuntimeError of its own for it."""
MOST_RANKS = 100_000


def checkpoint_path(output_dir: Path, step: int) -> Path:
    return output_dir / "checkpoints" / f"step-{step:08d}"


def checkpoints_of(output_dir: Path) -> list[Path]:
    """Return finished checkpoints, oldest first. One that was being written when the run died has another name."""
    return sorted(p for p in (output_dir / "checkpoints").glob("step-*") if p.is_dir())


# ---- writing --------------------------------------------------------------------------------------------------------


def aside_of(output_dir: Path, step: int) -> Path:
    """Return the folder into which a checkpoint is written, which does not count until `seal`."""
    final = checkpoint_path(output_dir, step)
    return final.with_name(f".{final.name}.tmp")


def begin_checkpoint(output_dir: Path, step: int) -> None:
    """Make `aside_of` an empty folder."""
    aside = aside_of(output_dir, step)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    sync_directory(output_dir)  # which `checkpoints` may be new in


def sync_folder(folder: Path) -> None:
    """Push a folder's files to the disk."""
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # another rank's, which has its name now
            if path.is_file():
                sync_file(path)
            elif path.is_dir():
                sync_directory(path)
    sync_directory(folder)


def seal(output_dir: Path, step: int) -> None:
    """Make what lies in `aside_of` a checkpoint: checksums, everything pushed to the disk, and its name at last."""
    aside, final = aside_of(output_dir, step), checkpoint_path(output_dir, step)
    files = {
        str(path.relative_to(aside)): {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
        for path in sorted(aside.rglob("*"))
        if path.is_file()
    }
    write_json(aside / CHECKSUMS_FILE, {"algorithm": "sha256", "files": files})
    sync_folder(aside)
    before = final.with_name(f".{final.name}.old.tmp")
    if final.exists():  # what `find_checkpoint` puts back if the process dies between the two names
        shutil.rmtree(before, ignore_errors=True)
        os.replace(final, before)
    os.replace(aside, final)
    sync_directory(final.parent)
    shutil.rmtree(before, ignore_errors=True)


# ---- removing -------------------------------------------------------------------------------------------------------


def _remove(checkpoint: Path) -> None:
    """Take its name away first: killed half-way through, a removal must not leave what looks whole."""
    condemned = checkpoint.with_name(f".{checkpoint.name}.gone.tmp")
    shutil.rmtree(condemned, ignore_errors=True)
    os.replace(checkpoint, condemned)
    shutil.rmtree(condemned, ignore_errors=True)


def remove_old_checkpoints(output_dir: Path, keep: int, best_step: int | None = None) -> None:
    """Remove all but the newest `keep` checkpoints (0: all stay) and that of the best step, and unfinished ones."""
    for leftover in (output_dir / "checkpoints").glob(".step-*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)
    if keep:
        for old in checkpoints_of(output_dir)[:-keep]:
            if best_step is None or old != checkpoint_path(output_dir, best_step):
                _remove(old)


def remove_later_checkpoints(output_dir: Path, step: int) -> None:
    """Remove the checkpoints behind the step that a run is resumed from: they belong to a course that is given up."""
    for path in checkpoints_of(output_dir):
        if path > checkpoint_path(output_dir, step):
            _remove(path)


# ---- finding --------------------------------------------------------------------------------------------------------


def damage_of(checkpoint: Path) -> str | None:
    """Return what is wrong with a checkpoint's files, or None where all are as they were written.

    One of an earlier version of this program, which wrote no checksums, is taken as it is.
    """
    try:
        state = json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))
        if not state.get("checksums") and not (checkpoint / CHECKSUMS_FILE).is_file():
            log.warning("%s has no checksums: whether its files are as they were written is not known", checkpoint)
            return None
        files = json.loads((checkpoint / CHECKSUMS_FILE).read_text(encoding="utf-8"))["files"]
        for name, written in files.items():
            path = checkpoint / name
            size = path.stat().st_size
            if size != written["bytes"]:
                return f"{name} has {size} bytes instead of {written['bytes']}"
            if sha256_of(path) != written["sha256"]:
                return f"{name} is not as it was written (its checksum differs)"
        return None if STATE_FILE in files else f"{CHECKSUMS_FILE} does not name {STATE_FILE}"
    except FileNotFoundError as error:
        return f"{Path(error.filename).relative_to(checkpoint)} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its lists cannot be read ({type(error).__name__}: {' '.join(str(error).split())[:200]})"


def find_checkpoint(resume: bool | str, output_dir: Path) -> Path | None:
    """Return the checkpoint to continue from, or None to start at step 0. A damaged one is reported, and the one
    before it taken.

    Args:
        resume: `training.resume_from_checkpoint`: true, false or a path.

    Raises:
        UserError: the checkpoint that was named is damaged, or all of them are.
    """
    if not resume:
        return None
    if resume is not True:
        path = Path(str(resume))
        if not (path / STATE_FILE).is_file():
            raise UserError(
                f"training.resume_from_checkpoint: {path} is no whole checkpoint (it has no {STATE_FILE})."
            )
        damage = damage_of(path)
        if damage:
            raise UserError(
                f"training.resume_from_checkpoint: {path} is damaged: {damage}. Name another checkpoint, or write "
                "true for the newest whole one.",
                exit_code=1,
            )
        return path
    for before in (output_dir / "checkpoints").glob(".step-*.old.tmp"):  # the process died while it was replaced
        final = before.with_name(before.name.removeprefix(".").removesuffix(".old.tmp"))
        if not final.exists():
            os.replace(before, final)
    found = checkpoints_of(output_dir)
    damages = []
    for path in reversed(found):
        damage = damage_of(path)
        if damage is None:
            return path
        damages.append(f"{path.name}: {damage}")
        log.warning("%s is damaged and not used: %s. The checkpoint before it is looked at", path, damage)
    if not found:
        log.info("resume_from_checkpoint: there is no whole checkpoint in %s; the run starts at step 0", output_dir)
        return None
    raise UserError(
        f"training.resume_from_checkpoint: every checkpoint in {output_dir / 'checkpoints'} is damaged "
        f"({'; '.join(damages)}). To begin the run anew, set training.overwrite_output_dir=true and "
        "training.resume_from_checkpoint=false.",
        exit_code=1,
    )


# ---- reading --------------------------------------------------------------------------------------------------------


def read_checkpoint_state(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the common state that a checkpoint was written with, and those of all ranks.

    Raises:
        UserError: it cannot be read, or the state of a rank is missing.
    """
    state = read_json_object(path / STATE_FILE, "training.resume_from_checkpoint")
    ranks = state.get("world_size")
    if not isinstance(ranks, int) or isinstance(ranks, bool) or not 1 <= ranks <= MOST_RANKS:
        raise UserError(
            f"training.resume_from_checkpoint: {path / STATE_FILE} is none of this program: world_size is "
            f"{str(ranks)[:50]}."
        )
    rank_files = [path / f"stream-{rank}.json" for rank in range(ranks)]
    missing = [file.name for file in rank_files if not file.is_file()]
    if missing:
        raise UserError(
            f"{path} lacks {', '.join(missing)}: each of the {ranks} processes that wrote it left one. "
            "On a cluster training.output_dir has to be a directory that all nodes share."
        )
    return state, [read_json_object(file, "training.resume_from_checkpoint") for file in rank_files]


def load_checkpoint(accelerator: Accelerator, path: Path) -> None:
    """Load model, optimizer, scaler and random states of this rank.

    Raises:
        UserError: the checkpoint belongs to another model, or a pickle in it would run something.
    """
    check_checkpoint(path)
    try:
        accelerator.load_state(str(path))
    except torch.OutOfMemoryError:
        raise
    except (KeyError, ValueError, UnpicklingError, *CANNOT_WRITE) as error:
        raise UserError(does_not_fit(path, error)) from error


def does_not_fit(path: Path, error: BaseException) -> str:
    """Return the message for a checkpoint that cannot be loaded."""
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return (
        f"{path} does not fit this model or optimizer, or is damaged: {reason} Resume with the run file that wrote "
        "it, or start afresh with another training.output_dir."
    )
