"""Checkpoints on the disk: whole or absent, with checksums, the newest whole one found again, old ones removed."""

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Iterator
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


def begin_checkpoint(output_dir: Path, step: int) -> Path:
    """Return an empty folder to write a checkpoint into, which does not count until `seal`."""
    aside = aside_of(output_dir, step)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    sync_directory(output_dir)  # which `checkpoints` may be new in
    return aside


def aside_of(output_dir: Path, step: int) -> Path:
    """Return the folder of `begin_checkpoint`."""
    final = checkpoint_path(output_dir, step)
    return final.with_name(f".{final.name}.tmp")


def sync_folder(folder: Path) -> None:
    """Push a folder's files to the disk."""
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # another rank's, which has its name now
            if path.is_file():
                sync_file(path)
            elif path.is_dir():
                sync_directory(path)
    sync_directory(folder)


def seal(output_dir: Path, step: int) -> Path:
    """Make what lies in the folder of `begin_checkpoint` a checkpoint: checksums, everything pushed to the disk, and
    its name at last."""
    aside, final = aside_of(output_dir, step), checkpoint_path(output_dir, step)
    files = {str(p.relative_to(aside)): _described(p) for p in sorted(aside.rglob("*")) if p.is_file()}
    write_json(aside / CHECKSUMS_FILE, {"algorithm": "sha256", "files": files})
    sync_folder(aside)
    before = _condemned(final)
    if final.exists():  # what `put_back` finds if the process dies between the two names
        shutil.rmtree(before, ignore_errors=True)
        os.replace(final, before)
    os.replace(aside, final)
    sync_directory(final.parent)
    shutil.rmtree(before, ignore_errors=True)
    return final


def give_up(output_dir: Path, step: int) -> None:
    """Remove what was written of a checkpoint."""
    shutil.rmtree(aside_of(output_dir, step), ignore_errors=True)


def _described(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path)}


# ---- removing -------------------------------------------------------------------------------------------------------


def _condemned(checkpoint: Path) -> Path:
    return checkpoint.with_name(f".{checkpoint.name}.old.tmp")


def _remove(checkpoint: Path) -> None:
    """Take its name away first: killed half-way through, a removal must not leave what looks whole."""
    condemned = checkpoint.with_name(f".{checkpoint.name}.gone.tmp")
    shutil.rmtree(condemned, ignore_errors=True)
    os.replace(checkpoint, condemned)
    shutil.rmtree(condemned, ignore_errors=True)


def remove_old_checkpoints(output_dir: Path, keep: int, best_step: int | None = None) -> None:
    """Keep the newest `keep` checkpoints, and that of the best evaluation; 0 keeps all.

    Also removes remains of unfinished ones.
    """
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


def put_back(output_dir: Path) -> None:
    """Give a checkpoint its name back that was to be replaced when the process died."""
    for before in (output_dir / "checkpoints").glob(".step-*.old.tmp"):
        final = before.with_name(before.name.removeprefix(".").removesuffix(".old.tmp"))
        if not final.exists():
            os.replace(before, final)


def damage_of(checkpoint: Path) -> str | None:
    """Return what is wrong with a checkpoint's files, or None where all are as they were written.

    One of an earlier version of this program, which wrote no checksums, is taken as it is.
    """
    try:
        state = json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))
        if not (checkpoint / CHECKSUMS_FILE).is_file():
            if not state.get("checksums"):
                log.warning("%s has no checksums: whether its files are as they were written is not known", checkpoint)
                return None
            return f"{CHECKSUMS_FILE} is missing"
        files = json.loads((checkpoint / CHECKSUMS_FILE).read_text(encoding="utf-8"))["files"]
        return next(_damages(checkpoint, files), None)
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its lists cannot be read ({type(error).__name__}: {' '.join(str(error).split())[:200]})"


def _damages(checkpoint: Path, files: dict[str, dict[str, Any]]) -> Iterator[str]:
    for name, written in files.items():
        path = checkpoint / name
        if not path.is_file():
            yield f"{name} is missing"
        elif path.stat().st_size != written["bytes"]:
            yield f"{name} has {path.stat().st_size} bytes instead of {written['bytes']}"
        elif sha256_of(path) != written["sha256"]:
            yield f"{name} is not as it was written (its checksum differs)"
    if STATE_FILE not in files:
        yield f"{CHECKSUMS_FILE} does not name {STATE_FILE}"


def find_checkpoint(resume: bool | str, output_dir: Path) -> Path | None:
    """Return the checkpoint to continue from, or None to start at step 0.

    A damaged one is reported, and the one before it taken.

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
                f"training.resume_from_checkpoint: {path} is no whole checkpoint (it has no trainer_state.json)."
            )
        damage = damage_of(path)
        if damage:
            raise UserError(
                f"training.resume_from_checkpoint: {path} is damaged: {damage}. Name another checkpoint, or write "
                "true for the newest whole one.",
                exit_code=1,
            )
        return path
    put_back(output_dir)
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
    rank_files = [path / f"stream-{rank}.json" for rank in range(state["world_size"])]
    missing = [file.name for file in rank_files if not file.is_file()]
    if missing:
        raise UserError(
            f"{path} lacks {', '.join(missing)}: each of the {state['world_size']} processes that wrote it left one. "
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
    except (
        RuntimeError,
        KeyError,
        ValueError,
        OSError,
        SafetensorError,
        UnpicklingError,
        CheckpointException,
    ) as error:
        raise UserError(does_not_fit(path, error)) from error


def does_not_fit(path: Path, error: BaseException) -> str:
    """Return the message for a checkpoint that cannot be loaded."""
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return (
        f"{path} does not fit this model or optimizer, or is damaged: {reason} Resume with the run file that wrote "
        "it, or start afresh with another training.output_dir."
    )
