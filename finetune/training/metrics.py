"""What is summed up between two lines of metrics.jsonl."""

import math
import time
from typing import Any

import torch

from finetune.training.outputs import peak_memory_gib, peak_rss_gib, rss_gib
from finetune.training.progress import Progress
from finetune.training.step_batches import StepBatches


class MetricsWindow:
    """Sums between two lines of metrics.jsonl.

    Args:
        sample_rate: of the audio, Hz.
    """

    def __init__(self, sample_rate: int) -> None:
        self.sample_rate = sample_rate
        self.waited = 0.0
        self.reset()

    def reset(self) -> None:
        self.started = time.perf_counter()
        self.earlier_seconds = 0.0
        self.steps, self.finite_steps, self.loss, self.grad_norm, self.waited = 0, 0, 0.0, 0.0, 0.0
        self.audio_seconds = self.padded_seconds = 0.0
        self.loss_parts: dict[str, float] = {}
        """Parts of a hybrid model's loss, and distillation's."""
        self.batch_lengths: dict[str, list[float]] = {}
        """Of this process: seconds of a batch's longest clip, rounded up -> batches, clips, seconds, padded ones."""

    def state_dict(self) -> dict[str, Any]:
        """The sums so far, so that the first line after a resume averages over all its steps."""
        sums = {k: v for k, v in vars(self).items() if k not in ("sample_rate", "started", "earlier_seconds")}
        return {**sums, "seconds": time.perf_counter() - self.started}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.earlier_seconds = state["seconds"]
        vars(self).update({k: v for k, v in state.items() if k != "seconds"})

    def add(
        self,
        loss: float,
        grad_norm: float | None,
        batches: StepBatches,
        counted: bool = True,
        loss_parts: dict[str, float] | None = None,
    ) -> None:
        self.steps += 1
        if counted and math.isfinite(loss + (grad_norm or 0.0)):  # a skipped step has no place in the means
            self.finite_steps += 1
            self.loss += loss
            self.grad_norm += grad_norm or 0.0
            for name, part in (loss_parts or {}).items():
                self.loss_parts[name] = self.loss_parts.get(name, 0.0) + part
        self.audio_seconds += batches.audio_seconds
        self.padded_seconds += batches.padded_seconds
        for batch in batches.batches:
            clips, samples = batch.audio_BS.shape
            seconds, padded = (n / self.sample_rate for n in (float(batch.audio_lengths_B.sum()), clips * samples))
            sums = self.batch_lengths.setdefault(str(math.ceil(samples / self.sample_rate)), [0, 0, 0.0, 0.0])
            sums[:] = [round(total + n, 3) for total, n in zip(sums, (1, clips, seconds, padded))]

    def row(self, progress: Progress, rates: dict[str, float]) -> dict[str, Any]:
        """One line of metrics.jsonl: means over the steps since the line before.

        Args:
            progress: the run's counters.
            rates: learning rates by part of the model.
        """
        seconds = max(self.earlier_seconds + time.perf_counter() - self.started, 1e-9)
        progress.train_seconds += seconds
        steps = max(self.steps, 1)
        return {
            "step": progress.step,
            "samples": progress.samples,
            "audio_hours": progress.audio_seconds / 3600,
            "epoch": progress.epoch,
            "loss": self.loss / self.finite_steps if self.finite_steps else None,
            **{name: part / self.finite_steps for name, part in self.loss_parts.items()},
            **({"infeasible_ctc": progress.infeasible_ctc} if "ctc_loss" in self.loss_parts else {}),
            "grad_norm": self.grad_norm / self.finite_steps if self.finite_steps else None,
            "learning_rate": max(rates.values()),
            "learning_rates": rates,
            "audio_seconds_per_second": self.audio_seconds / seconds,
            "data_wait_fraction": min(self.waited / seconds, 1.0),
            "padding_fraction": 1 - self.audio_seconds / self.padded_seconds if self.padded_seconds else 0.0,
            "peak_memory_gib": peak_memory_gib(),
            "rss_gib": rss_gib(),
            "peak_rss_gib": peak_rss_gib(),
            "seconds_per_step": seconds / steps,
            "batch_lengths": self.batch_lengths,
        }


def rates_by_part(optimizer: torch.optim.Optimizer, rates: list[float]) -> dict[str, float]:
    """The largest learning rate of each part of the model (encoder, decoder, joint), from one a parameter group."""
    parts: dict[str, float] = {}
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        part = str(group.get("name", "all")).split("_")[0]
        parts[part] = max(rate, parts.get(part, 0.0))
    return parts
