"""Warnings of drift: waiting for data, growing memory, losses that are not finite, a WER above the base model's,
divergence, a slow rank."""

import itertools
import logging
import os
import statistics
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from finetune.callbacks.divergence import Divergence
from finetune.callbacks.moments import Moment, moment, seconds_between
from finetune.data.guard_halves import CHOICE
from finetune.distributed import broadcast, gather_rows
from finetune.evaluation.significance import p_value_text
from finetune.training.callbacks import LOST_ON_GUARD, Callback, EvaluationResult
from finetune.training.progress import Progress

log = logging.getLogger(__name__)

REPEAT_AFTER_LINES = 50

WAIT_LIMIT, WAIT_OVER = 0.20, 0.15
"""Share of the time at which waiting for data is said, and below which it is over."""
WAIT_LINES, WAIT_STEPS = 5, 10
"""It is judged over so many logged lines and at least so many steps."""

MEMORY_SKIPPED_LINES, MEMORY_LINES, MEMORY_BLOCKS = 5, 40, 5
MEMORY_LEAST_MIB, MEMORY_LEAST_SHARE = 64.0, 0.02
MEMORY_STEADY = 0.6
"""A leak grows in the second half of the window at least this much of what it grew in the first, and in the last block
at least this much of what it grew in the mean one; what fills up does not."""

SCALER_SKIPS = 4
"""Steps a line that fp16's loss scaling may skip while it finds its scale."""

SLOW_RANK, SLOW_RANK_LINES = 1.25, 3

GUARD_LEVEL = 0.01
"""p-value below which a loss on data.guard is said while the run goes on."""


class ForwardClock:
    """Seconds of this rank's own forward passes and the audio in them, between two logged steps.

    A forward pass under DDP waits for no other rank, a backward pass does. Under engines that gather weights in the
    forward pass (FSDP, ZeRO-3) a slow rank slows all and cannot be told from them.
    """

    def __init__(self, module: torch.nn.Module, device: torch.device):
        self.device, self.samples = device, 0
        self.began = moment(device)
        self.passes: list[tuple[Moment, Moment]] = []
        """Begin and end of each forward pass, read at the logged step, when they have passed."""
        module.register_forward_pre_hook(self._before)
        module.register_forward_hook(self._after)

    def _before(self, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        self.samples += inputs[0].numel()
        self.began = moment(self.device)

    def _after(self, module: torch.nn.Module, inputs: object, output: object) -> None:
        self.passes.append((self.began, moment(self.device)))

    def take(self) -> float:
        """Return seconds for a million samples, padding included, since the last call."""
        seconds = sum(seconds_between(began, ended) for began, ended in self.passes)
        pace = 1e6 * seconds / max(self.samples, 1)
        self.passes, self.samples = [], 0
        return pace


class DriftMonitor(Callback):
    """Warns once when something begins to drift, again only after many lines, and counts by kind.

    Args:
        module: whose forward passes are timed, where there are several ranks.
        workers: training.dataloader_num_workers.
        divergence: what looks for it; None: nothing does.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        module: torch.nn.Module,
        progress: Progress,
        workers: int = 0,
        divergence: Divergence | None = None,
    ):
        self.accelerator, self.progress, self.workers = accelerator, progress, workers
        self.clock = ForwardClock(module, accelerator.device) if accelerator.num_processes > 1 else None
        self.allowed_skips = SCALER_SKIPS if accelerator.scaler is not None else 0
        self.divergence = divergence
        self.diverges: dict[str, str] = {}
        """Signs of divergence that last, by where they were seen."""
        self.lines = self.step = self.skipped = 0
        self.reported: dict[str, int] = {}
        self.waits: deque[tuple[int, float, float]] = deque()
        self.memory: dict[str, deque[tuple[int, float]]] = {}
        self.lasting: dict[str, int] = {}
        """By kind and rank: logged lines in a row in which a rank was slow."""

    def on_train_begin(self) -> None:
        self.step, self.skipped = self.progress.step, self._skipped_steps()

    def on_log(self, row: dict[str, Any], own_wait_seconds: float) -> None:
        paces, waits = [], []
        if self.clock is not None:  # of each rank; all enter
            own = torch.tensor([[self.clock.take(), own_wait_seconds]], dtype=torch.float64)
            table_R2 = gather_rows(self.accelerator, own.to(self.accelerator.device))
            paces, waits = table_R2.T.tolist()
        if self.accelerator.is_main_process:
            self.check_row(row, self._skipped_steps(), paces, waits)
            if self.divergence is not None:
                self._say_divergence("loss", self.divergence.of_row(row))

    def on_evaluation_end(self, result: EvaluationResult) -> None:
        rate = result.wer.total.rates()["wer"]
        if self.accelerator.is_main_process and result.in_training and result.step and rate is not None:
            self.check_evaluation(result.step, result.split, rate, result.base_wer, result.change)
            if self.divergence is not None and result.split == "validation":
                self._say_divergence("wer", self.divergence.of_evaluation(result.step, rate, result.base_wer))

    def ends_run(self) -> str | None:
        return next(iter(self.diverges.values()), None)

    def before_save(self, is_main: bool) -> tuple[dict[str, Any], dict[str, dict[str, torch.Tensor]]]:
        return {} if self.divergence is None else {"divergence": broadcast(self.divergence.state())}, {}

    def on_resume(self, checkpoint: Path, state: dict[str, Any]) -> None:
        if self.divergence is not None and (found := state.get("divergence")) is not None:
            self.divergence.restore(found)

    def _say_divergence(self, by: str, said: str | None) -> None:
        self.diverges.pop(by, None)
        if said is not None:
            self.diverges[by] = said
        self._warn_if(f"diverges:{by}", said is not None, said or "")

    def _skipped_steps(self) -> int:
        return self.progress.skipped_steps + self.progress.scale_skips

    def _warn_if(self, kind: str, drifts: bool, text: str) -> None:
        """Log a warning that begins, or that has lasted for many lines since it was logged."""
        if not drifts:
            self.reported.pop(kind, None)
        elif kind not in self.reported or self.lines - self.reported[kind] >= REPEAT_AFTER_LINES:
            self.reported[kind] = self.lines
            name = kind.split(":")[0]
            self.progress.drift_warnings[name] = self.progress.drift_warnings.get(name, 0) + 1
            log.warning("drift: %s", text)

    def check_row(self, row: dict[str, Any], skipped: int, paces: list[float], waits: Sequence[float] = ()) -> None:
        """Look at a logged step.

        Args:
            row: a line of metrics.jsonl.
            skipped: steps skipped so far because loss or gradient was not finite.
            paces: of each rank.
            waits: for its own data, of each rank, seconds.
        """
        self.lines += 1
        step, steps = row["step"], row["step"] - self.step
        self.step, seconds = step, steps * row["seconds_per_step"]
        new, self.skipped = skipped - self.skipped, skipped
        self._warn_if(
            "loss_not_finite",
            new > self.allowed_skips,
            f"loss or gradient was not finite in {new} of the {steps} steps before step {step}, {skipped} in all; "
            "they changed nothing. Lower training.learning_rate, lengthen training.warmup_steps, or set "
            "training.max_grad_norm; look at the clips that are named.",
        )
        if self.lines > 1:  # the first line holds the start: workers, compilers, caches
            self._look_at_waiting(steps, seconds, row["data_wait_fraction"])
        remedy = (
            "lower training.dataloader_num_workers and data.shuffle_buffer_size, and look for what the last change to "
            "the data keeps."
        )
        self._look_at_memory("memory", "resident memory", step, row["rss_gib"], remedy)
        if self.accelerator.device.type == "cuda":
            allocated = torch.cuda.memory_allocated(self.accelerator.device) / 2**30
            remedy = (
                "keep checkpoints to resume from (training.save_steps), and look for tensors that are kept from step "
                "to step."
            )
            self._look_at_memory("gpu_memory", "memory in use on the GPU", step, allocated, remedy)
        self._look_at_ranks(paces, waits, seconds)

    def _look_at_waiting(self, steps: int, seconds: float, share: float) -> None:
        self.waits.append((steps, seconds, share))
        count = sum(n for n, _, _ in self.waits)
        while len(self.waits) > WAIT_LINES and count - self.waits[0][0] >= WAIT_STEPS:
            count -= self.waits.popleft()[0]
        if len(self.waits) < WAIT_LINES or count < WAIT_STEPS:
            return
        waited = sum(s * w for _, s, w in self.waits) / max(sum(s for _, s, _ in self.waits), 1e-9)
        self._warn_if(
            "data_wait",
            waited > (WAIT_OVER if "data_wait" in self.reported else WAIT_LIMIT),
            f"training waited for data in {100 * waited:.0f} % of the last {count} steps' time. Raise "
            f"training.dataloader_num_workers (now {self.workers}; this machine has {os.cpu_count() or 1} cores), or "
            "bring the data nearer: local disk, larger shards, 16 kHz audio.",
        )

    def _look_at_memory(self, kind: str, name: str, step: int, gib: float, remedy: str) -> None:
        if self.lines <= MEMORY_SKIPPED_LINES:
            return
        values = self.memory.setdefault(kind, deque(maxlen=MEMORY_LINES))
        values.append((step, 1024 * gib))
        slope = steady_growth(list(values)) if len(values) == MEMORY_LINES else None
        self._warn_if(
            kind,
            slope is not None,
            f"{name} keeps growing by {slope or 0.0:.0f} MiB per 1000 steps ({gib:.2f} GiB at step {step}). If it "
            f"goes on, the run ends out of memory: {remedy}",
        )

    def _look_at_ranks(self, paces: Sequence[float], waits: Sequence[float], seconds: float) -> None:
        for rank, pace in enumerate(paces):
            others = statistics.median(p for r, p in enumerate(paces) if r != rank)
            ratio = pace / others if others > 0 else 1.0
            self._warn_if_lasting(
                f"slow_rank:{rank}",
                ratio > SLOW_RANK,
                f"rank {rank} computes {ratio:.2f} times as long as the others for the same audio, and all wait for "
                "it. Look at its device: other processes on it, its clocks and temperature (nvidia-smi -q -d "
                "PERFORMANCE), its CPU cores.",
            )
        for rank, waited in enumerate(waits):  # under every engine: a rank waits for its data alone
            others = statistics.median(w for r, w in enumerate(waits) if r != rank)
            share = (waited - others) / seconds if seconds > 0 else 0.0
            self._warn_if_lasting(
                f"slow_data:{rank}",
                self.lines > 1 and share > WAIT_LIMIT,
                f"rank {rank} waits for its data {100 * share:.0f} % of the time longer than the others, and all wait "
                "for it. Look at its machine's disk, network and CPU cores, and at what lies in its part of the data.",
            )

    def _warn_if_lasting(self, kind: str, slow: bool, text: str) -> None:
        self.lasting[kind] = self.lasting.get(kind, 0) + 1 if slow else 0
        self._warn_if(kind, self.lasting[kind] >= SLOW_RANK_LINES, text)

    def check_evaluation(
        self, step: int, split: str, wer: float, base: float | None, change: dict[str, Any] | None = None
    ) -> None:
        """Look at an evaluation after step 0.

        Args:
            base: WER of the base model on the same split; None where it was not measured.
            change: of data.guard, the paired comparison with the base model. It is tested many times in a run, so that
                a warning needs more than the usual level.
        """
        if split == CHOICE:
            return  # data.guard_limit judges it, and says so
        if split != "guard":
            self._warn_if(
                f"wer_above_base:{split}",
                base is not None and wer > base,
                f"WER on {split} is {wer:.3f} at step {step}, above the base model's {base or 0.0:.3f}. Lower "
                "training.learning_rate or lengthen the warm-up; compare the samples' spelling with the references' "
                "(data.text_normalization). The best model so far is kept.",
            )
        elif change is not None and change["difference"] > 0 and change["p_value"] < GUARD_LEVEL:
            self._warn_if(
                "guard_lost",
                True,
                f"WER on {split} is {change['wer_b']:.3f} at step {step}, above the base model's "
                f"{change['wer_a']:.3f} by more than chance ({p_value_text(change)}): the model forgets its original "
                f"domain. {LOST_ON_GUARD}",
            )
        else:
            self._warn_if("guard_lost", False, "")


def steady_growth(values: list[tuple[int, float]]) -> float | None:
    """Growth in MiB per 1000 steps where memory keeps growing; None where it rests, goes up and down, or fills up.

    Args:
        values: (step, MiB) of the window.
    """
    size = len(values) // MEMORY_BLOCKS
    blocks = [values[i * size : (i + 1) * size] for i in range(MEMORY_BLOCKS)]
    levels = [statistics.median(mib for _, mib in block) for block in blocks]
    middle, growth = levels[MEMORY_BLOCKS // 2], levels[-1] - levels[0]
    grows = all(later > earlier for earlier, later in itertools.pairwise(levels))
    steady = levels[-1] - middle >= MEMORY_STEADY * (middle - levels[0])
    still = levels[-1] - levels[-2] >= MEMORY_STEADY * growth / (MEMORY_BLOCKS - 1)
    if not grows or not steady or not still or growth < max(MEMORY_LEAST_MIB, MEMORY_LEAST_SHARE * levels[0]):
        return None
    steps = statistics.median(s for s, _ in blocks[-1]) - statistics.median(s for s, _ in blocks[0])
    return 1000 * growth / max(steps, 1)
