"""Times the steps of a run, and takes the account of one of them, for scripts/bench/compare_strategies.py."""

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from finetune.tools.planning.accounting import StepAccount
from finetune.training.callbacks import Callback
from finetune.training.trainer import Trainer


class StepProbe(Callback):
    """Measure a run that draws no random features and leaves nothing but figures.

    Args:
        trainer: of the run.
        skipped: first steps, which compile and fill caches; the one after them is accounted.
    """

    def __init__(self, trainer: Trainer, skipped: int):
        self.trainer, self.skipped = trainer, skipped
        self.seconds: list[float] = []
        self.memory: dict[str, Any] = {}
        self.held: list[torch.Tensor] = []
        trainer.model.preprocessor.featurizer.dither = 0.0
        trainer.saves_checkpoints = trainer.evaluator.keeps_models = False
        trainer.add_callback(self)

    def on_part(self, part: str) -> None:
        """Remember DDP's gradients: views of its buckets, which stay where they are when gradients are set to none."""
        if part == "optimizer" and type(self.trainer.module).__name__ == "DistributedDataParallel":
            self.held[:] = [p.grad.detach() for p in self.trainer.module.parameters() if p.grad is not None]

    @contextlib.contextmanager
    def around_step(self, step: int) -> Iterator[None]:
        """Time the step, or account for the memory of its tensors."""
        on_gpu = self.trainer.accelerator.device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        if step == self.skipped + 1:
            device = "cuda" if on_gpu else None
            with StepAccount(self.trainer.module, self.trainer.optimizer, device, self.held) as account:
                yield
            self.memory |= {"account_peak_bytes": account.peak, "parts_bytes": account.parts_at_peak}
            return
        yield
        if on_gpu:
            torch.cuda.synchronize()
            seen = self.memory.get("allocator_peak_bytes", 0)
            self.memory["allocator_peak_bytes"] = max(seen, torch.cuda.max_memory_allocated())
        if step > self.skipped:
            self.seconds.append(time.perf_counter() - started)

    def write(self, file: Path) -> None:
        """Write what was measured, on the main process."""
        if self.trainer.accelerator.is_main_process:
            file.write_text(json.dumps({"seconds": self.seconds, **self.memory}), encoding="utf-8")
