"""`--profile N`: where the time of N training steps goes, as a table, and torch.profiler's trace of them.

The table comes from a clock that is read at the boundaries between parts, so that each moment counts for exactly one
part; on a GPU it is a clock of the GPU's own (CUDA events). In the backward pass the boundaries are where gradients
reach the outputs of encoder and prediction network.
"""

import gzip
import itertools
import logging
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.hooks import RemovableHandle

from finetune.callbacks.moments import Moment, moment, seconds_between
from finetune.config.schema import RunConfig
from finetune.durable_files import write_json
from finetune.errors import UserError
from finetune.models.nemo import has_transducer
from finetune.models.protocols import AsrModel
from finetune.security.safe_text import Block
from finetune.training.callbacks import Callback, StepResult
from finetune.training.progress import Progress

log = logging.getLogger(__name__)

WARM_UP_STEPS = 2
OPERATIONS_TO_LIST = 20

PARTS = {
    "data": "data: waiting for a batch and copying it to the device",
    "features": "features: mel spectrogram and SpecAugment",
    "encoder_forward": "encoder, forward",
    "encoder_backward": "encoder, backward",
    "prediction_forward": "prediction network, forward",
    "prediction_backward": "prediction network, backward",
    "joint_loss_forward": "joint and loss, forward",
    "joint_loss_backward": "joint and loss, backward",
    "communication": "communication and waiting for other ranks",
    "clipping": "gradient norm and clipping",
    "optimizer": "optimizer",
    "other": "other",
}
BETWEEN_STEPS = ("evaluation", "saving")
"""Parts that are no part of a step; they stand in the trace only."""


def check_steps_left(steps: int, progress: Progress, total_steps: int, max_epochs: int | None) -> None:
    """Raise UserError where the run has too few steps left to record."""
    left = total_steps - progress.step
    if left < steps + WARM_UP_STEPS and max_epochs is None:
        raise UserError(
            f"--profile {steps}: {WARM_UP_STEPS} steps for warming up and {steps} to record are more than the "
            f"{max(left, 0)} that the run has left. Set training.max_steps to {progress.step + steps + WARM_UP_STEPS} "
            "or more, or a smaller N."
        )


class Profiler(Callback):
    """Records some steps, after two for warming up, and writes profile/table.txt, table.json and trace.json.gz on the
    main process.

    The Trainer announces where a part of a step begins (`on_part`); boundaries inside forward and backward are hooks
    on the modules.

    Args:
        loss_module: the module around the model.
        steps: to record.
        pause: called with seconds that are no part of the training.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        config: RunConfig,
        progress: Progress,
        model: AsrModel,
        loss_module: torch.nn.Module,
        total_steps: int,
        steps: int,
        pause: Callable[[float], None],
    ):
        self.accelerator, self.config, self.progress = accelerator, config, progress
        self.model, self.loss_module, self.total_steps, self.steps = model, loss_module, total_steps, steps
        self.device, self.pause = accelerator.device, pause
        self.on_gpu = self.device.type == "cuda"
        self.done = self.recorded = 0
        self.marks: list[tuple[str, Moment]] = []
        """Where a part begins."""
        self.last_gradient: Moment | None = None
        self.hooks: list[RemovableHandle] = []
        self.profiler: profile | None = None
        """While it records."""
        self.finished = not accelerator.is_main_process
        self.began = 0.0

    # ---- moments of the run -----------------------------------------------------------------------------------------

    def on_part(self, part: str) -> None:
        if self.profiler is None:
            return
        if part == "after_backward":
            part = "other"
            if self.last_gradient is not None:  # what comes after the last one waits for the other ranks
                self.marks.append(("communication", self.last_gradient))
                self.last_gradient = None
        with record_function(f"part: {part}"):  # a mark in the trace
            self.marks.append((part, moment(self.device)))

    def on_step_end(self, result: StepResult) -> None:
        if self.finished:
            return
        self.done += 1
        if self.profiler is not None:
            self.recorded += 1
            if self.recorded == self.steps:
                self._finish(self.profiler)
        elif self.done >= WARM_UP_STEPS and self._may_start():
            self._start()

    def on_steps_end(self, failed: bool) -> None:
        if self.profiler is not None and failed:
            self._stop(self.profiler)
        elif self.profiler is not None:
            self._finish(self.profiler)
        elif not self.finished and not failed:
            log.warning("--profile: the data ended before a step was recorded")

    # ---- recording --------------------------------------------------------------------------------------------------

    def _may_start(self) -> bool:
        """Return whether no evaluation and no checkpoint falls into the steps ahead, or waiting would not keep them
        out."""
        t, step = self.config.training, self.progress.step

        def undisturbed(begin: int) -> bool:
            end = begin + self.steps - 1
            intervals = [every for every in (t.eval_steps, t.save_steps) if every]
            return all(begin % every and begin // every == end // every for every in intervals)

        later_ones = range(step + 1, self.total_steps - self.steps + 1)
        return undisturbed(step) or not any(undisturbed(later) for later in later_ones)

    def _start(self) -> None:
        began = time.perf_counter()
        os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # it complains where there is no GPU
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if self.on_gpu else [])
        self.profiler = profile(activities=activities, acc_events=True)
        self.profiler.start()
        if self.accelerator.num_processes > 1:
            trained = [p for p in self.loss_module.parameters() if p.requires_grad]
            self.hooks = [p.register_post_accumulate_grad_hook(self._on_gradient) for p in trained]
        self._mark_forward(self.loss_module, "features", "other")
        self._mark_forward(self.model.encoder, "encoder_forward", "joint_loss_forward", "encoder_backward")
        if has_transducer(self.model):
            self._mark_forward(self.model.decoder, "prediction_forward", "joint_loss_forward", "prediction_backward")
        if self.on_gpu:
            torch.cuda.synchronize()
        self.pause(time.perf_counter() - began)
        self.began = time.perf_counter()
        self.on_part("other")

    def _on_gradient(self, _parameter: torch.Tensor) -> None:
        self.last_gradient = moment(self.device)

    def _mark_forward(self, module: torch.nn.Module, part: str, after: str, backward: str | None = None) -> None:
        """Mark the module's forward pass, and the moment when the gradient of its first output arrives."""

        def before_forward(_module: torch.nn.Module, _inputs: tuple[object, ...]) -> None:
            if torch.is_grad_enabled():
                self.on_part(part)

        def after_forward(_module: torch.nn.Module, _inputs: object, output: object) -> None:
            if not torch.is_grad_enabled():
                return
            self.on_part(after)
            first = output[0] if isinstance(output, tuple) else output
            if backward is not None and isinstance(first, torch.Tensor) and first.requires_grad:
                first.register_hook(lambda gradient, part=backward: self.on_part(part))

        self.hooks.append(module.register_forward_pre_hook(before_forward))
        self.hooks.append(module.register_forward_hook(after_forward))

    def _stop(self, profiler: profile) -> float:
        """Stop recording, for good; return the seconds that were recorded."""
        self.on_part("other")
        self.profiler, self.finished = None, True
        for hook in self.hooks:
            hook.remove()
        if self.on_gpu:
            torch.cuda.synchronize()
        wall = time.perf_counter() - self.began
        profiler.stop()
        return wall

    def _finish(self, profiler: profile) -> None:
        """Write the results."""
        began = time.perf_counter()
        table = self._table(self._stop(profiler))
        folder = Path(self.config.training.output_dir) / "profile"
        folder.mkdir(exist_ok=True)
        events = profiler.key_averages()
        if self.on_gpu:  # NCCL's kernels, those that ran beside computation included
            nccl = sum(event.self_device_time_total for event in events if "nccl" in event.key.lower())
            table["nccl_ms_per_step"] = nccl / 1000 / self.recorded
        write_json(folder / "table.json", table)
        order, text = "self_cuda_time_total" if self.on_gpu else "self_cpu_time_total", table_text(table)
        operations = events.table(sort_by=order, row_limit=OPERATIONS_TO_LIST, max_name_column_width=60)
        (folder / "table.txt").write_text(f"{text}\n\n{operations}\n", encoding="utf-8")
        plain = folder / "trace.json"
        profiler.export_chrome_trace(str(plain))
        with plain.open("rb") as source, gzip.open(folder / "trace.json.gz", "wb", compresslevel=6) as target:
            shutil.copyfileobj(source, target)
        plain.unlink()
        log.info("profile of %d steps, in %s:\n%s", self.recorded, folder, Block(text))
        self.pause(time.perf_counter() - began)

    def _table(self, wall: float) -> dict[str, Any]:
        """Return milliseconds a step of each part and its share of the wall time.

        Args:
            wall: seconds of all steps, with what happened between them.
        """
        seconds = dict.fromkeys([*PARTS, *BETWEEN_STEPS], 0.0)
        for (part, began), (_, ended) in itertools.pairwise(self.marks):
            seconds[part] += seconds_between(began, ended)
        wall -= sum(seconds.pop(part) for part in BETWEEN_STEPS)
        steps = self.recorded
        rows = [
            {"part": part, "ms_per_step": 1000 * spent / steps, "share": spent / wall}
            for part, spent in seconds.items()
            if spent > 0
        ]
        return {
            "steps": steps,
            "wall_ms_per_step": 1000 * wall / steps,
            "covered": sum(row["share"] for row in rows if row["part"] != "other"),
            "clock": "CUDA events" if self.on_gpu else "CPU time line",
            "rows": rows,
        }


def table_text(table: dict[str, Any]) -> str:
    """Return the table for people."""
    lines = [f"{'part':56} {'ms a step':>10} {'share':>7}"]
    for row in table["rows"]:
        lines.append(f"{PARTS[row['part']]:56} {row['ms_per_step']:10.1f} {100 * row['share']:6.1f} %")
    lines.append(f"{'wall time, slowed by the profiler':56} {table['wall_ms_per_step']:10.1f} {100.0:6.1f} %")
    lines.append(f"named parts cover {100 * table['covered']:.1f} % of the wall time ({table['clock']})")
    if table.get("nccl_ms_per_step"):
        text = "NCCL's kernels in all, most of them beside the backward pass"
        lines.append(f"{text}: {table['nccl_ms_per_step']:.1f} ms a step")
    return "\n".join(lines)
