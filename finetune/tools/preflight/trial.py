"""What `--smoke` and `--dry-run` have in common: a run's own configuration, tried in a folder of its own that is removed afterwards.

T encoder frames, U target tokens.
"""

import contextlib
import ctypes
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch

from finetune.data.batch import Batch, describe_batch
from finetune.data.survey import Survey, batch_of, survey_lengths
from finetune.distributed import broadcast
from finetune.durable_files import write_json
from finetune.models.nemo import encoder_lengths
from finetune.tools.planning.accounting import StepAccount
from finetune.training import run
from finetune.training.batches import StepBatches
from finetune.training.out_of_memory import out_of_memory_message
from finetune.training.trainer import Trainer

LONGEST, COSTLIEST, FULLEST = "the longest clips", "the clips with the most lattice cells", "the most audio in a batch"


def trial_config(config: Any, name: str) -> Any:
    """The configuration with a folder of its own below training.output_dir, where it neither continues a run nor meets one."""
    return config.replaced(
        {
            "training.output_dir": str(Path(config.training.output_dir) / name),
            "training.resume_from_checkpoint": False,
            "training.overwrite_output_dir": True,
        }
    )


@contextlib.contextmanager
def trial_folder(accelerator: Any, trial: Any) -> Iterator[Path]:
    """The folder, locked while it is used and removed at the end. Trackers get nothing of a trial, and an older result goes.

    Raises:
        UserError: it cannot be written, or another trial is in it.
    """
    # They were looked for when the accelerator was made; from here on nothing goes to them.
    trial.training.report_to = "none"
    with run.output_directory(accelerator, trial) as folder:
        if accelerator.is_main_process:
            folder.with_suffix(".json").unlink(missing_ok=True)
        accelerator.wait_for_everyone()
        try:
            yield folder
        finally:
            if accelerator.is_main_process:
                shutil.rmtree(folder, ignore_errors=True)


def result_path(config: Any, name: str) -> Path:
    """OUTPUT_DIR/name.json."""
    return Path(config.training.output_dir) / f"{name}.json"


def write_result(config: Any, name: str, result: dict[str, Any]) -> Path:
    """Writes OUTPUT_DIR/name.json, the one file that a trial leaves."""
    path = result_path(config, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")  # when memory runs out several processes may write
    write_json(aside, result)
    os.replace(aside, path)
    return path


def ordinary_steps(trainer: Trainer) -> Iterator[StepBatches]:
    """Ordinary steps, epoch after epoch.

    Raises:
        UserError: no clip is left to train on, or the data cannot be read.
    """
    while True:
        before = trainer.progress.samples
        iterator = trainer.stream.batches()
        try:
            while (step_batches := trainer.batcher.next_step(iterator)).micro_batches:
                yield step_batches
        finally:
            iterator.close()
        if trainer.progress.samples == before:
            raise trainer.batcher.nothing_left()
        trainer.stream.next_epoch()


def worst_batches(trainer: Trainer) -> tuple[dict[str, Batch], Survey]:
    """The batches that need most memory, the same on all ranks: of the longest clips, of those with the most text and length, and,
    where other bounds let shorter clips fill a batch better, the fullest one; and what was looked at to find them."""
    survey = broadcast(survey_lengths(trainer.stream) if trainer.accelerator.is_main_process else None)
    found = {}
    for name, refs in ((LONGEST, survey.by_seconds), (COSTLIEST, survey.by_cells)):
        batch = batch_of(trainer.stream, refs)
        if batch is not None and all(batch.ids != other.ids for other in found.values()):
            found[name] = batch
    bands = [batch_of(trainer.stream, refs) for refs in survey.bands]
    fullest = max((b for b in bands if b is not None), key=lambda b: b.audio_BS.numel(), default=None)
    if fullest is not None and all(fullest.audio_BS.numel() > b.audio_BS.numel() for b in found.values()):
        found[FULLEST] = fullest
    if not found:
        raise trainer.batcher.nothing_left()
    return found, survey


def worst_step(trainer: Trainer, batch: Batch) -> StepBatches:
    """An optimizer step that holds a batch as often as the run accumulates."""
    repeated = iter([batch] * trainer.config.training.gradient_accumulation_steps)
    return trainer.batcher.next_step(repeated)


def batch_size(model: Any, batch: Batch) -> dict[str, Any]:
    """`describe_batch` with the frames of the model's encoder."""
    frames_B = encoder_lengths(model, batch.audio_lengths_B)
    return describe_batch(batch, frames_B, model.preprocessor._sample_rate)


def describe_step(model: Any, step_batches: StepBatches) -> dict[str, Any]:
    """The largest batch of this rank's step, as `describe_batch` tells it."""
    sizes = [batch_size(model, batch) for batch in step_batches.batches]
    return max(sizes, key=lambda size: size["padded_seconds"], default={})


def say_batch(size: dict[str, Any]) -> str:
    """A batch in words."""
    if not size:
        return "no batch of its own"
    return (
        f"{size['clips']} clips of up to {size['longest_seconds']:.1f} s, {size['padded_seconds']:.0f} s with padding, "
        f"{size['tokens']} tokens, {size['cells']} cells"
    )


def say_bytes(n: float) -> str:
    """Bytes in words."""
    return f"{n / 2**30:.2f} GiB" if n >= 2**29 else f"{n / 2**20:.1f} MiB"


def say_out_of_memory(error: BaseException, trainer: Trainer, engine: str, step_batches: StepBatches) -> str:
    """The message for a step that did not fit, with its batch and what would help."""
    gpu = trainer.accelerator.device.type == "cuda"
    batch = say_batch(describe_step(trainer.model, step_batches))
    return f"{batch}: {out_of_memory_message(error, trainer.config, gpu, engine)}"


class MemoryMeter:
    """Bytes of this process in and after each optimizer step: `with meter.step(batches): ...`, then `meter.read()`.

    On a GPU the allocator tells. Elsewhere every tensor that an operation of a step makes is followed (finetune.tools.planning.accounting),
    which takes time; not where the encoder is compiled, whose tensors are made out of sight.

    Args:
        trainer: whose steps are measured.
    """

    def __init__(self, trainer: Trainer):
        self.device = trainer.accelerator.device
        self.gpu = self.device.type == "cuda"
        followed = not self.gpu and not trainer.config.model.compile
        averages = [t for callback in trainer.callbacks for t in callback.held_tensors().values()]
        self.follow = StepAccount(trainer.module, trainer.optimizer, averages=averages) if followed else None
        if self.follow:
            self.follow.account.parts["inputs"] = 0
        self.process = psutil.Process()

    @contextlib.contextmanager
    def step(self, batches: list[Batch]) -> Iterator[None]:
        """Around a step with these batches, which do not count on the host: the next ones are there when the step is over."""
        if self.gpu:
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        _reset_resident_peak()
        with self.follow or contextlib.nullcontext() as account:
            if account is not None:
                account.add((t for b in batches for t in vars(b).values() if isinstance(t, torch.Tensor)), "inputs")
                account.peak = account.total
            yield

    def read(self) -> dict[str, int | None]:
        """Bytes after the step and at its peak.

        Returns:
            tensors, peak_tensors (allocated ones), reserved (by the GPU's allocator, at its peak), resident, peak_resident (of the
            process, on the host), outside (of torch's allocator on this GPU, other processes included), total (the GPU's memory, or the
            host's), available (the host's memory that nobody uses); None where it cannot be told.
        """
        peak_resident, account = _resident_peak(), self.follow and self.follow.account
        inputs = account.parts["inputs"] if account else 0
        _give_back_freed()
        resident = self.process.memory_info().rss
        host = psutil.virtual_memory()
        found: dict[str, int | None] = {
            "resident": resident,
            "peak_resident": max(peak_resident or resident, resident),
            "total": host.total,
            "available": host.available,
            "tensors": account.total - inputs if account else None,
            "peak_tensors": account.peak - inputs if account else None,
            "reserved": None,
            "outside": None,
        }
        if self.gpu:
            torch.cuda.synchronize(self.device)
            free, total = torch.cuda.mem_get_info(self.device)
            found |= {
                "tensors": torch.cuda.memory_allocated(self.device),
                "peak_tensors": torch.cuda.max_memory_allocated(self.device),
                "reserved": torch.cuda.max_memory_reserved(self.device),
                "outside": total - free - torch.cuda.memory_reserved(self.device),
                "total": total,
            }
        return found


def _reset_resident_peak() -> None:
    with contextlib.suppress(OSError):  # Linux only
        Path("/proc/self/clear_refs").write_text("5")


def _resident_peak() -> int | None:
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])
    return None


def _give_back_freed() -> None:
    """What was freed goes back to the system, so that resident memory is what is in use; glibc would keep some for later."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def gathered(accelerator: Any, value: Any) -> list[Any]:
    """A value of each rank, on all of them."""
    if accelerator.num_processes == 1:
        return [value]
    from accelerate.utils import gather_object

    return gather_object([value])
