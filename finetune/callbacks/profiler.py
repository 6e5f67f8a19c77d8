"""`--profile N`: where the time of N training steps goes, as a table, and torch.profiler's trace of them.

The table comes from a clock that is read at the boundaries between parts, so that each moment counts for exactly one
part; on a GPU it is a clock of the GPU's own (CUDA events). In the backward pass the boundaries are where gradients
reach the outputs of encoder and
prediction network.
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

from finetune.config.schema import RunConfig
from finetune.durable_files import write_json
from finetune.errors import UserError
from finetune.models.protocols import Transducer
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


class PartClock:
    """Reads the clock where one part of a step ends and the next begins.

    Args:
        device: of the training.
    """

    def __init__(self, device: torch.device):
        self.on_gpu = device.type == "cuda"
        self.marks: list[tuple[str, Any]] = []
        self.last_gradient: Any = None
        self.running = False

    def now(self) -> Any:
        """A moment on the GPU's time line, or in seconds."""
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def begin(self, part: str) -> None:
        """From here on time counts for `part`."""
        if self.running:
            with record_function(f"part: {part}"):  # a mark in the trace
                self.marks.append((part, self.now()))

    def gradient(self, *_: object) -> None:
        """A parameter has its gradient. What comes after the last one waits for the other ranks."""
        if self.running:
            self.last_gradient = self.now()

    def end_backward(self) -> None:
        """The backward pass is done."""
        if self.running and self.last_gradient is not None:
            self.marks.append(("communication", self.last_gradient))
        self.last_gradient = None
        self.begin("other")

    def seconds(self) -> dict[str, float]:
        """Seconds of each part between the first and the last mark."""
        if self.on_gpu:
            torch.cuda.synchronize()
        sums = dict.fromkeys([*PARTS, *BETWEEN_STEPS], 0.0)
        for (part, began), (_, ended) in itertools.pairwise(self.marks):
            sums[part] += began.elapsed_time(ended) / 1000 if self.on_gpu else ended - began
        return sums


class Profiler(Callback):
    """Records some steps, after two for warming up, and writes profile/table.txt, table.json and trace.json.gz on the
    main process.

    The Trainer announces where a part of a step begins (`on_part`); boundaries inside forward and backward are hooks
    on the modules.

    Args:
        accelerator, config, progress: of the run.
        model: its encoder and prediction network are told apart.
        loss_module: the module around it.
        total_steps: of the run.
        steps: to record.
        on_pause: called with seconds that are no part of the training.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        config: RunConfig,
        progress: Progress,
        model: Transducer,
        loss_module: torch.nn.Module,
        total_steps: int,
        steps: int,
        on_pause: Callable[[float], None],
    ):
        self.accelerator, self.config, self.progress = accelerator, config, progress
        self.model, self.loss_module, self.total_steps, self.steps = model, loss_module, total_steps, steps
        self.on_pause_of_run = on_pause
        self.done = self.recorded = 0
        self.clock = PartClock(accelerator.device)
        self.hooks: list[Any] = []
        self.profiler: profile | None = None
        self.finished = not accelerator.is_main_process
        self.began = self.wall = 0.0

    # ---- moments of the run -----------------------------------------------------------------------------------------

    def on_part(self, part: str) -> None:
        if part == "after_backward":
            self.clock.end_backward()
        else:
            self.clock.begin(part)

    def on_step_end(self, result: StepResult) -> None:
        if self.finished:
            return
        self.done += 1
        if self.profiler is not None:
            self.recorded += 1
            if self.recorded == self.steps:
                self.finish()
        elif self.done >= WARM_UP_STEPS and self._may_start():
            self._start()

    def on_steps_end(self, failed: bool) -> None:
        if self.finished:
            return
        if failed and self.profiler is not None:
            self.finished = True
            self._stop()
        elif self.profiler is None and not failed:
            log.warning("--profile: the data ended before a step was recorded")
        else:
            self.finish()

    # ---- recording --------------------------------------------------------------------------------------------------

    def _may_start(self) -> bool:
        """Return whether no evaluation and no checkpoint falls into the steps ahead, or waiting would not keep them
        out."""
        t, step = self.config.training, self.progress.step
        last = self.total_steps - self.steps

        def undisturbed(begin: int) -> bool:
            end = begin + self.steps - 1
            intervals = [every for every in (t.eval_steps, t.save_steps) if every]
            return all(begin % every and begin // every == end // every for every in intervals)

        return undisturbed(step) or not any(undisturbed(later) for later in range(step + 1, last + 1))

    def _start(self) -> None:
        began = time.perf_counter()
        os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # it complains where there is no GPU
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if self.clock.on_gpu else [])
        self.profiler = profile(activities=activities, acc_events=True)
        self.profiler.start()
        self._add_hooks()
        self.clock.running = True
        if self.clock.on_gpu:
            torch.cuda.synchronize()
        self.on_pause_of_run(time.perf_counter() - began)
        self.began = time.perf_counter()
        self.clock.begin("other")

    def _add_hooks(self) -> None:
        if self.accelerator.num_processes > 1:
            for parameter in self.loss_module.parameters():
                if parameter.requires_grad:
                    self.hooks.append(parameter.register_post_accumulate_grad_hook(self.clock.gradient))
        self._mark_forward(self.loss_module, "features", "other")
        self._mark_forward(self.model.encoder, "encoder_forward", "joint_loss_forward", "encoder_backward")
        self._mark_forward(self.model.decoder, "prediction_forward", "joint_loss_forward", "prediction_backward")

    def _mark_forward(self, module: torch.nn.Module, part: str, after: str, backward: str | None = None) -> None:
        """Mark the module's forward pass, and the moment when the gradient of its first output arrives."""

        def before_forward(_module: torch.nn.Module, _inputs: tuple[object, ...]) -> None:
            if torch.is_grad_enabled():
                self.clock.begin(part)

        def after_forward(_module: torch.nn.Module, _inputs: object, output: object) -> None:
            if not torch.is_grad_enabled():
                return
            self.clock.begin(after)
            first = output[0] if isinstance(output, tuple) else output
            if backward is not None and isinstance(first, torch.Tensor) and first.requires_grad:
                part_of_backward = backward
                first.register_hook(lambda gradient: self.clock.begin(part_of_backward))

        self.hooks.append(module.register_forward_pre_hook(before_forward))
        self.hooks.append(module.register_forward_hook(after_forward))

    def _stop(self) -> None:
        self.clock.begin("other")
        self.clock.running = False
        for hook in self.hooks:
            hook.remove()
        if self.clock.on_gpu:
            torch.cuda.synchronize()
        self.wall = time.perf_counter() - self.began
        if self.profiler is not None:
            self.profiler.stop()

    def finish(self) -> None:
        """Write the results, once."""
        if self.profiler is None:
            return
        self.finished = True
        began = time.perf_counter()
        self._stop()
        folder = Path(self.config.training.output_dir) / "profile"
        folder.mkdir(exist_ok=True)
        table = part_table(self.clock.seconds(), self.wall, self.recorded, self.clock.on_gpu)
        events = self.profiler.key_averages()
        if self.clock.on_gpu:
            table["nccl_ms_per_step"] = _collectives_ms(events) / self.recorded
        write_json(folder / "table.json", table)
        order = "self_cuda_time_total" if self.clock.on_gpu else "self_cpu_time_total"
        text = table_text(table)
        operations = events.table(sort_by=order, row_limit=OPERATIONS_TO_LIST, max_name_column_width=60)
        (folder / "table.txt").write_text(f"{text}\n\n{operations}\n", encoding="utf-8")
        self._write_trace(self.profiler, folder / "trace.json.gz")
        log.info("profile of %d steps, in %s:\n%s", self.recorded, folder, Block(text))
        self.on_pause_of_run(time.perf_counter() - began)

    @staticmethod
    def _write_trace(profiler: profile, path: Path) -> None:
        plain = path.with_suffix("")
        profiler.export_chrome_trace(str(plain))
        with plain.open("rb") as source, gzip.open(path, "wb", compresslevel=6) as target:
            shutil.copyfileobj(source, target)
        plain.unlink()


def _collectives_ms(events: Any) -> float:
    """Milliseconds of NCCL's kernels, those that ran beside computation included."""
    return sum(event.self_device_time_total for event in events if "nccl" in event.key.lower()) / 1000


def part_table(seconds: dict[str, float], wall: float, steps: int, on_gpu: bool) -> dict[str, Any]:
    """The table as an object: milliseconds a step of each part and its share of the wall time.

    Args:
        seconds: of each part, over all steps.
        wall: seconds of all steps, with what happened between them.
    """
    wall -= sum(seconds[part] for part in BETWEEN_STEPS)
    rows = [
        {"part": part, "ms_per_step": 1000 * seconds[part] / steps, "share": seconds[part] / wall}
        for part in PARTS
        if seconds[part] > 0 and part not in BETWEEN_STEPS
    ]
    covered = sum(row["share"] for row in rows if row["part"] != "other")
    clock = "CUDA events" if on_gpu else "CPU time line"
    return {"steps": steps, "wall_ms_per_step": 1000 * wall / steps, "covered": covered, "clock": clock, "rows": rows}


def table_text(table: dict[str, Any]) -> str:
    """The table for people."""
    lines = [f"{'part':56} {'ms a step':>10} {'share':>7}"]
    for row in table["rows"]:
        lines.append(f"{PARTS[row['part']]:56} {row['ms_per_step']:10.1f} {100 * row['share']:6.1f} %")
    lines.append(f"{'wall time, slowed by the profiler':56} {table['wall_ms_per_step']:10.1f} {100.0:6.1f} %")
    lines.append(f"named parts cover {100 * table['covered']:.1f} % of the wall time ({table['clock']})")
    if table.get("nccl_ms_per_step"):
        lines.append(
            f"NCCL's kernels in all, most of them beside the backward pass: {table['nccl_ms_per_step']:.1f} ms a step"
        )
    return "\n".join(lines)
