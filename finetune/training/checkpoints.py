"""Checkpoints: whole or absent, the newest found again, old ones removed."""

import logging
import os
import shutil
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException

from finetune.errors import UserError
from finetune.strategies.sharded import write_whole_weights
from finetune.training.averaging import EMA_FILE
from finetune.training.outputs import write_json
from finetune.untrusted.documents import read_json_object
from finetune.untrusted.pickles import check_checkpoint

log = logging.getLogger(__name__)

MOST_RANKS = 100_000


def checkpoint_path(output_dir: Path, step: int) -> Path:
    return output_dir / "checkpoints" / f"step-{step:08d}"


def whole_checkpoints(output_dir: Path) -> list[Path]:
    """Complete checkpoints, oldest first. One that was being written when the run died has another name."""
    return sorted(p for p in (output_dir / "checkpoints").glob("step-*") if (p / "trainer_state.json").is_file())


def save_checkpoint(
    accelerator: Any,
    output_dir: Path,
    step: int,
    state: dict[str, Any],
    rank_state: dict[str, Any],
    replica: Any | None = None,
    ema: dict[str, torch.Tensor] | None = None,
) -> Path:
    """Writes a checkpoint beside the others under a temporary name and renames it at last.

    Args:
        accelerator: holds model, optimizer, scaler and random states.
        state: what is the same on all ranks (JSON).
        rank_state: what each rank has of its own (JSON).
        replica: from `sharded.model_to_keep`: the present model with whole weights, written too where the engine's own files hold them
            in shards or in a pickle.
        ema: the moving average of the weights, on the main process.
    """
    final = checkpoint_path(output_dir, step)
    aside = final.with_name(f".{final.name}.tmp")
    if accelerator.is_main_process:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(aside))
    write_json(aside / f"stream-{accelerator.process_index}.json", rank_state)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        if replica is not None:
            write_whole_weights(aside, replica)
        if ema:
            save_file(ema, aside / EMA_FILE)
        write_json(aside / "trainer_state.json", state)
        _sync(aside)
        if final.exists():
            _remove(final)
        os.replace(aside, final)
        _sync_directory(final.parent)
    accelerator.wait_for_everyone()
    return final


def _sync(directory: Path) -> None:
    """Pushes everything to the disk before the rename makes it count."""
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    _sync_directory(directory)


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove(checkpoint: Path) -> None:
    """Takes its name away first: killed half-way through, a removal must not leave what looks whole."""
    condemned = checkpoint.with_name(f".{checkpoint.name}.old.tmp")
    shutil.rmtree(condemned, ignore_errors=True)
    os.replace(checkpoint, condemned)
    shutil.rmtree(condemned, ignore_errors=True)


def remove_old_checkpoints(output_dir: Path, keep: int) -> None:
    """Keeps the newest `keep` checkpoints; 0 keeps all. Also removes remains of unfinished ones."""
    for leftover in (output_dir / "checkpoints").glob(".step-*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)
    if keep:
        for old in whole_checkpoints(output_dir)[:-keep]:
            _remove(old)


def remove_later_checkpoints(output_dir: Path, step: int) -> None:
    """Removes the checkpoints behind the step that a run is resumed from: they belong to a course that is given up."""
    for path in whole_checkpoints(output_dir):
        if path > checkpoint_path(output_dir, step):
            _remove(path)


def find_checkpoint(resume: Any, output_dir: Path) -> Path | None:
    """The checkpoint to continue from, or None to start at step 0.

    Args:
        resume: `training.resume_from_checkpoint`: true, false or a path.
    """
    if not resume:
        return None
    if resume is True:
        found = whole_checkpoints(output_dir)
        if not found:
            log.info(
                "resume_from_checkpoint: there is no whole checkpoint in %s; the run starts at step 0", output_dir
            )
            return None
        return found[-1]
    path = Path(str(resume))
    if not (path / "trainer_state.json").is_file():
        raise UserError(
            f"training.resume_from_checkpoint: {path} is no whole checkpoint (it has no trainer_state.json)."
        )
    return path


def read_checkpoint_state(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The states given to `save_checkpoint`: the common one, and those of all ranks.

    Raises:
        UserError: it cannot be read, or the state of a rank is missing.
    """
    state = read_json_object(path / "trainer_state.json", "training.resume_from_checkpoint")
    ranks = state.get("world_size")
    if not isinstance(ranks, int) or isinstance(ranks, bool) or not 1 <= ranks <= MOST_RANKS:
        raise UserError(
            f"training.resume_from_checkpoint: {path / 'trainer_state.json'} is none of this program: world_size is {str(ranks)[:50]}."
        )
    rank_files = [path / f"stream-{rank}.json" for rank in range(state["world_size"])]
    missing = [file.name for file in rank_files if not file.is_file()]
    if missing:
        raise UserError(
            f"{path} lacks {', '.join(missing)}: each of the {state['world_size']} processes that wrote it left one. On a cluster "
            "training.output_dir has to be a directory that all nodes share."
        )
    return state, [read_json_object(file, "training.resume_from_checkpoint") for file in rank_files]


def load_checkpoint(accelerator: Any, path: Path) -> None:
    """Model, optimizer, scaler and random states of this rank.

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


def does_not_fit(path: Path, error: Exception) -> str:
    """The message for a checkpoint that cannot be loaded."""
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return (
        f"{path} does not fit this model or optimizer, or is damaged: {reason} Resume with the run file that wrote it, or start "
        "afresh with another training.output_dir."
    )
