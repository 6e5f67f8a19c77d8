"""What `--smoke` and `--dry-run` share: a folder of their own, the worst batches, and steps with measured memory."""

import contextlib
import os
import shutil
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate import Accelerator

from finetune.callbacks.out_of_memory import is_out_of_memory, out_of_memory_message
from finetune.config.schema import RunConfig
from finetune.data.batch import Batch, describe_batch
from finetune.data.survey import Survey, batch_of, survey_lengths
from finetune.distributed import broadcast
from finetune.durable_files import write_json
from finetune.errors import UserError
from finetune.models.host_memory import return_freed_memory
from finetune.models.nemo import encoder_lengths
from finetune.models.protocols import AsrModel
from finetune.strategies.strategy import Strategy, engine_with
from finetune.tools.planning.accounting import StepAccount
from finetune.training import run
from finetune.training.callbacks import StepResult
from finetune.training.step_batches import StepBatches
from finetune.training.trainer import Trainer

LONGEST, COSTLIEST, FULLEST = "the longest clips", "the clips with the most lattice cells", "the most audio in a batch"


def trial_config(config: RunConfig, name: str) -> RunConfig:
    """Return the configuration with a folder of its own below training.output_dir; it resumes nothing."""
    return config.replaced(
        {
            "training.output_dir": str(Path(config.training.output_dir) / name),
            "training.resume_from_checkpoint": False,
            "training.overwrite_output_dir": True,
        }
    )


@contextlib.contextmanager
def trial_folder(accelerator: Accelerator, trial: RunConfig) -> Iterator[None]:
    """Lock the trial's folder, and remove it at the end. Remove an older result, and send nothing to trackers.

    Raises:
        UserError: it cannot be written, or another trial uses it.
    """
    # The accelerator was made with them, which checks that they are installed.
    trial.training.report_to = "none"
    with run.output_directory(accelerator, trial) as folder:
        if accelerator.is_main_process:
            folder.with_suffix(".json").unlink(missing_ok=True)
        accelerator.wait_for_everyone()
        try:
            yield
        finally:
            if accelerator.is_main_process:
                shutil.rmtree(folder, ignore_errors=True)


def result_path(config: RunConfig, name: str) -> Path:
    """Return OUTPUT_DIR/name.json, the one file that a trial leaves."""
    return Path(config.training.output_dir) / f"{name}.json"


def write_result(config: RunConfig, name: str, result: dict[str, Any]) -> Path:
    """Write OUTPUT_DIR/name.json; several ranks may when memory runs out."""
    path = result_path(config, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    write_json(aside, result)
    os.replace(aside, path)
    return path


def ordinary_steps(trainer: Trainer) -> Generator[StepBatches, None, None]:
    """Yield the batches of ordinary steps, epoch after epoch.

    Raises:
        UserError: no utterance is left to train on, or the data cannot be read.
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
    """Find the batches that need most memory, the same on all ranks.

    Returns:
        Batches by what they hold: the longest utterances, those with the most lattice cells, and, where other bounds
        let shorter ones fill a batch better, the most audio; and the survey that found them.
    """
    found: dict[str, Batch] = {}
    survey = broadcast(survey_lengths(trainer.stream) if trainer.accelerator.is_main_process else Survey())
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


def saw_all(survey: Survey) -> bool:
    """Return whether a survey looked at every row, so that no longer utterance can come."""
    return survey.rows is not None and survey.looked >= survey.rows


def worst_step(trainer: Trainer, batch: Batch) -> StepBatches:
    """Return an optimizer step that holds a batch as often as the run accumulates."""
    repeated = iter([batch] * trainer.config.training.gradient_accumulation_steps)
    return trainer.batcher.next_step(repeated)


def worst_steps(trainer: Trainer, worst: dict[str, Batch]) -> list[tuple[str, StepBatches]]:
    """Return the worst batches as steps, each twice: the second time the optimizer's states are there."""
    return [(name, worst_step(trainer, batch)) for _ in range(2) for name, batch in worst.items()]


def describe_step(model: AsrModel, step_batches: StepBatches) -> dict[str, Any]:
    """Return `describe_batch` of the largest batch of this rank's step; {} where it has none."""
    rate = model.preprocessor._sample_rate
    sizes = [describe_batch(b, encoder_lengths(model, b.audio_lengths_B), rate) for b in step_batches.batches]
    return max(sizes, key=lambda size: size["padded_seconds"], default={})


def format_batch(size: dict[str, Any]) -> str:
    """Return what `describe_step` found as text."""
    if not size:
        return "no batch of its own"
    return (
        f"{size['clips']} clips of up to {size['longest_seconds']:.1f} s, {size['padded_seconds']:.0f} s with "
        f"padding, {size['tokens']} tokens, {size['cells']} cells"
    )


def format_bytes(n: float) -> str:
    return f"{n / 2**30:.2f} GiB" if n >= 2**29 else f"{n / 2**20:.1f} MiB"


class StepDoesNotFit(UserError):
    """A step ran out of memory; the text names its batch and what would help."""


class MemoryMeter:
    """Steps of a trainer, and the bytes that this process holds in and after each.

    On a GPU the allocator tells. Elsewhere every tensor that an operation of a step makes is accounted for
    (finetune.tools.planning.accounting), which takes time; not where the encoder is compiled, whose tensors are made
    out of sight.

    Args:
        trainer: whose steps are measured.
        strategy: of the run, for what would help where memory runs out.
    """

    def __init__(self, trainer: Trainer, strategy: Strategy):
        self.trainer, self.device = trainer, trainer.accelerator.device
        self.engine = engine_with(strategy.engine, trainer.accelerator.num_processes)
        self.gpu = self.device.type == "cuda"
        self.follow: StepAccount | None = None
        if not self.gpu and not trainer.config.model.compile:
            beside = [t for c in trainer.callbacks for t in (*c.held_tensors().values(), *c.frozen_tensors())]
            self.follow = StepAccount(trainer.module, trainer.optimizer, beside=beside)
            self.follow.account.parts["inputs"] = 0
        self.process = psutil.Process()

    def train_on(self, step_batches: StepBatches) -> tuple[StepResult, dict[str, Any]]:
        """Take a step; return its result and its memory (`_read`).

        Raises:
            StepDoesNotFit: memory ran out.
            UserError: the run ends here, such as after too many steps that are not finite.
        """
        try:
            with self._measure(step_batches.batches):
                result = self.trainer.train_on(step_batches)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            batch = format_batch(describe_step(self.trainer.model, step_batches))
            message = out_of_memory_message(error, self.trainer.config, self.gpu, self.engine)
            raise StepDoesNotFit(f"{batch}: {message}") from error
        return result, self._read()

    @contextlib.contextmanager
    def _measure(self, batches: list[Batch]) -> Iterator[None]:
        """Measure a step with these batches, which do not count on the host: they are not of the step's making."""
        if self.gpu:
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        _reset_resident_peak()
        with self.follow or contextlib.nullcontext() as account:
            if account is not None:
                account.add((t for b in batches for t in vars(b).values() if isinstance(t, torch.Tensor)), "inputs")
                account.peak = account.total
            yield

    def _read(self) -> dict[str, Any]:
        """Return bytes after the step and at its peak.

        Returns:
            tensors, peak_tensors: allocated ones; None where they cannot be counted.
            resident, peak_resident: of the process, on the host.
            reserved, outside: on a GPU, by the allocator at its peak, and by others than the allocator, other
                processes included; else None.
            total: the GPU's memory, or the host's.
            available: host memory that nobody uses.
        """
        peak_resident, account = _resident_peak(), self.follow and self.follow.account
        inputs = account.parts["inputs"] if account else 0
        return_freed_memory()  # so that resident memory is what is in use
        resident = self.process.memory_info().rss
        host = psutil.virtual_memory()
        found: dict[str, Any] = {
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
