"""Writing checkpoints beside the training: a thread writes a copy of the state in host memory while the next steps
run.

Where an engine shards its state (FSDP, DeepSpeed) all processes write their parts at once, and the thread does the
rest: checksums, fsync, the name, and the removal of old checkpoints. Either way the files are those of Accelerate's
`save_state`.
"""

import contextlib
import copy
import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from torch.utils._pytree import tree_flatten, tree_unflatten

from finetune.distributed import gather
from finetune.durable_files import write_json
from finetune.errors import UserError
from finetune.models.protocols import AsrModel
from finetune.strategies.sharded import write_whole_weights
from finetune.training import checkpoints

log = logging.getLogger(__name__)


class CheckpointWriter:
    """Writes the checkpoints of a run, one at a time.

    Args:
        accelerator: holds model, optimizer, scaler and random states.
        output_dir: of the run.
        keep: newest checkpoints that stay; 0: all.
        in_thread: write in a thread, which costs a copy of weights and optimizer state in host memory. False: all at
            once.
    """

    def __init__(self, accelerator: Accelerator, output_dir: Path, keep: int, in_thread: bool):
        self.accelerator, self.output_dir, self.keep, self.in_thread = accelerator, output_dir, keep, in_thread
        self.thread: threading.Thread | None = None
        self.step = -1
        self.error: BaseException | str | None = None
        self.failed = 0
        """Checkpoints that could not be written."""
        self.blocked_seconds = 0.0
        """Time that training waited for its checkpoints."""
        self.pinned: dict[int, torch.Tensor] = {}
        """Host memory for the tensors of a GPU, by their number in the state."""

    def save(
        self,
        step: int,
        state: dict[str, Any],
        rank_state: dict[str, Any],
        replica: AsrModel | None,
        tensors: dict[str, dict[str, torch.Tensor]],
    ) -> None:
        """Write a checkpoint, or begin to; `wait` returns when it is there. All ranks
        call it.

        Args:
            state: what is the same on all ranks (JSON).
            rank_state: what each rank has of its own (JSON).
            replica: the present model with whole weights, written too where the engine's own files hold them in
                shards.
            tensors: further safetensors files by name, on the main process.
        """
        self.wait()
        began = time.perf_counter()
        main = self.accelerator.is_main_process
        # A copy: the thread writes it while the run goes on counting.
        state, self.step, self.error = copy.deepcopy({**state, "checksums": True}), step, None
        aside = checkpoints.aside_of(self.output_dir, step)
        contents: dict[str, Any] = {**tensors}

        def write_parts() -> None:
            contents.update(self._write_parts(aside, rank_state))
            if main and replica is not None:
                write_whole_weights(aside, replica)
            checkpoints.sync_folder(aside)

        errors = self._attempt(lambda: checkpoints.begin_checkpoint(self.output_dir, step) if main else None)
        errors = errors or self._attempt(write_parts)
        if errors:
            self._fail(errors[0])
        elif main and self.in_thread:
            self.thread = threading.Thread(target=self._write, args=(aside, contents, state), daemon=True)
            self.thread.start()
        elif main:
            self._write(aside, contents, state)
            self._check_outcome()
        self.blocked_seconds += time.perf_counter() - began

    def _attempt(self, write: Callable[[], Any]) -> list[str]:
        """Call `write`; return the reasons of the ranks that could not, on all of them, when all are done."""
        error = None
        try:
            write()
        except torch.OutOfMemoryError:
            raise
        except checkpoints.CANNOT_WRITE as reason:
            error = reason
        return self._over_ranks(error)

    def wait(self) -> None:
        """Wait until nothing is being written. Only the main process knows; the others go on."""
        if self.thread is not None:
            began = time.perf_counter()
            self.thread.join()
            self.thread = None
            self.blocked_seconds += time.perf_counter() - began
            self._check_outcome()

    def poll(self) -> None:
        """Report what became of the last checkpoint if that is known, without waiting."""
        if self.thread is not None and not self.thread.is_alive():
            self.wait()

    @contextlib.contextmanager
    def finishing(self) -> Iterator[None]:
        """Finish what is being written when the block is left, however it ends; a second Ctrl-C does not wait."""
        try:
            yield
        except KeyboardInterrupt:
            raise
        except BaseException:
            self.wait()
            raise
        self.wait()

    def failed_anywhere(self) -> bool:
        """Wait for the last checkpoint; return, on all ranks alike, whether it could not be written."""
        self.wait()
        return bool(self._over_ranks(self.error))

    def settle(self) -> None:
        """Wait for the last checkpoint on all ranks.

        Raises:
            UserError: it could not be written.
        """
        self.wait()
        errors = self._over_ranks(self.error)  # the others wait here until the main process has written
        if errors:
            raise UserError(
                f"the checkpoint of step {self.step} could not be written: {errors[0]}. Make room or mend the disk "
                f"of {self.output_dir}, then start the same command again with "
                f"training.resume_from_checkpoint=true: it continues from {self._newest()}.",
                exit_code=1,
            )

    def _write_parts(self, aside: Path, rank_state: dict[str, Any]) -> dict[str, Any]:
        """Write what each rank has of its own; return what the main process has to write for all, by file."""
        accelerator, rank = self.accelerator, self.accelerator.process_index
        contents: dict[str, Any] = {}
        if accelerator.distributed_type in ("DEEPSPEED", "FSDP"):
            accelerator.save_state(str(aside))
        else:
            from accelerate.checkpointing import save_accelerator_state

            scaler = accelerator.scaler if accelerator.is_main_process else None
            save_accelerator_state(str(aside), [], [], [], [], rank, accelerator.step, scaler)  # the random states
            if accelerator.is_main_process:
                contents = self._snapshot()
        write_json(aside / f"stream-{rank}.json", rank_state)
        return contents

    @torch.no_grad()
    def _snapshot(self) -> dict[str, Any]:
        """Return weights and optimizer state by the names of Accelerate's files, copied into host memory where a
        thread writes them. Pinned memory is reused from checkpoint to checkpoint."""
        from accelerate.utils import OPTIMIZER_NAME, SAFE_WEIGHTS_NAME, clean_state_dict_for_safetensors

        (module,), (optimizer,) = self.accelerator._models, self.accelerator._optimizers
        whole: Any = self.accelerator.get_state_dict(module, unwrap=False)
        weights = clean_state_dict_for_safetensors(dict(whole))
        state = {SAFE_WEIGHTS_NAME: weights, f"{OPTIMIZER_NAME}.bin": optimizer.state_dict()}
        leaves, structure = tree_flatten(state)
        needed = sum(t.nbytes for t in leaves if isinstance(t, torch.Tensor))
        ready = sum(t.nbytes for t in self.pinned.values())
        if self.in_thread and needed - ready > 0.9 * psutil.virtual_memory().available:
            log.warning(
                "training.async_save: a copy of the state (%.1f GB) does not fit into the free host memory; from here "
                "on training waits while a checkpoint is written",
                needed / 1e9,
            )
            self.in_thread, self.pinned = False, {}
        if not self.in_thread:
            return state
        copies: dict[Any, torch.Tensor] = {}  # what several parameters share, as bitsandbytes' tables, stays one
        for i, value in enumerate(leaves):
            if not isinstance(value, torch.Tensor):
                continue
            plain = type(value.detach()) is torch.Tensor and value.numel()  # torchao's are several tensors in one
            key = (value.data_ptr(), value.shape, value.stride(), value.dtype) if plain else i
            if key not in copies:
                copies[key] = self._copied(i, value.detach())
            leaves[i] = copies[key]
        if self.pinned:
            torch.cuda.current_stream().synchronize()
        return tree_unflatten(leaves, structure)

    def _copied(self, number: int, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_cuda or type(tensor) is not torch.Tensor:
            return tensor.to("cpu", copy=True)
        place = self.pinned.get(number)
        if place is None or (place.shape, place.dtype) != (tensor.shape, tensor.dtype):
            place = self.pinned[number] = torch.empty_like(tensor, device="cpu", pin_memory=True)
        return place.copy_(tensor, non_blocking=True)

    def _write(self, aside: Path, contents: dict[str, Any], state: dict[str, Any]) -> None:
        """Write what the main process writes for all, in the thread."""
        try:
            for name, content in contents.items():
                if name.endswith(".safetensors"):
                    save_file({k: t.contiguous() for k, t in content.items()}, aside / name, metadata={"format": "pt"})
                else:
                    torch.save(content, aside / name)
            write_json(aside / checkpoints.STATE_FILE, state)
            checkpoints.seal(self.output_dir, self.step)
            try:
                checkpoints.remove_old_checkpoints(self.output_dir, self.keep, state["progress"]["best_step"])
            except OSError as error:
                log.warning("old checkpoints in %s cannot be removed: %s", self.output_dir, error)
        except BaseException as error:  # of a thread: raised by whoever waits for it
            self.error = error

    def _check_outcome(self) -> None:
        """Log a checkpoint that could not be written; raise what is no trouble of the disk."""
        if isinstance(self.error, checkpoints.CANNOT_WRITE) and not isinstance(self.error, torch.OutOfMemoryError):
            self._fail(self.error)
        elif isinstance(self.error, BaseException):
            raise self.error

    def _fail(self, error: BaseException | str) -> None:
        """Go on without this checkpoint; the next one may find room."""
        self.error = error
        self.failed += 1
        if not self.accelerator.is_main_process:
            return
        shutil.rmtree(checkpoints.aside_of(self.output_dir, self.step), ignore_errors=True)
        free = "unknown"
        with contextlib.suppress(OSError):
            free = f"{shutil.disk_usage(self.output_dir).free / 1e9:.2f} GB"
        text = "the checkpoint of step %d could not be written: %s (free in %s: %s). Training goes on"
        log.warning(text, self.step, _reason(error), self.output_dir, free)
        log.warning("a run that ended now would continue from %s", self._newest())

    def _newest(self) -> str:
        found = checkpoints.checkpoints_of(self.output_dir)
        return found[-1].name if found else "step 0"

    def _over_ranks(self, error: BaseException | str | None) -> list[str]:
        """Return the reasons of the ranks that failed, on all of them."""
        return [reason for reason in gather(None if error is None else _reason(error)) if reason is not None]


def _reason(error: BaseException | str) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
