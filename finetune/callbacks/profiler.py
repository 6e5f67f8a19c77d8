"""`--profile N`: where the time of N training steps goes, as a table, and torch.profiler's trace of them.

The table comes from a clock that is read at the boundaries between parts, so that each moment counts for exactly one part; on a GPU
it is a clock of the GPU's own (CUDA events). In the backward pass the boundaries are where gradients reach the outputs of encoder and
prediction network.
"""

import contextlib
import gzip
import itertools
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from finetune.durable_files import write_json
from finetune.errors import UserError
from finetune.security.safe_text import Block

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

    def gradient(self, *_: Any) -> None:
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


def _around(clock: PartClock, part: str, function: Callable[..., Any], after: str = "other") -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        clock.begin(part)
        with record_function(part):
            try:
                return function(*args, **kwargs)
            finally:
                clock.begin(after)

    return call


class Hooks:
    """Boundaries between the parts, put on a Trainer and taken off again."""

    def __init__(self, trainer: Any, clock: PartClock):
        self.undo: list[Callable[[], None]] = []
        core, accelerator, engine = trainer.core, trainer.accelerator, trainer.module
        self._wrap(trainer, "_next_step", _around(clock, "data", trainer._next_step))
        self._wrap(trainer, "_to_device", _around(clock, "data", trainer._to_device))
        self._wrap(trainer, "_clip", _around(clock, "clipping", trainer._clip))
        self._wrap(trainer.optimizer, "step", _around(clock, "optimizer", trainer.optimizer.step))
        self._wrap(trainer, "evaluate", _around(clock, "evaluation", trainer.evaluate))
        self._wrap(trainer, "save", _around(clock, "saving", trainer.save))
        if accelerator.distributed_type == "DEEPSPEED":  # its step is part of accelerator.backward
            self._wrap(engine, "step", _around(clock, "optimizer", engine.step))
        self._wrap_backward(accelerator, clock)
        if accelerator.num_processes > 1:
            over_ranks = _around(clock, "communication", trainer.intake._over_ranks, after="data")
            self._wrap(trainer.intake, "_over_ranks", over_ranks)
            for parameter in core.parameters():
                if parameter.requires_grad:
                    self._keep(parameter.register_post_accumulate_grad_hook(clock.gradient))
        self._on_forward(core, clock, "features", "other")
        self._on_forward(core.nemo.encoder, clock, "encoder_forward", "joint_loss_forward", "encoder_backward")
        self._on_forward(core.nemo.decoder, clock, "prediction_forward", "joint_loss_forward", "prediction_backward")

    def _keep(self, handle: Any) -> None:
        self.undo.append(handle.remove)

    def _wrap(self, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        before = owner.__dict__.get(name)
        object.__setattr__(owner, name, replacement)

        def put_back() -> None:
            object.__delattr__(owner, name)
            if before is not None:
                object.__setattr__(owner, name, before)

        self.undo.append(put_back)

    def _wrap_backward(self, accelerator: Any, clock: PartClock) -> None:
        backward = accelerator.backward

        def call(*args: Any, **kwargs: Any) -> None:
            clock.begin("joint_loss_backward")
            with record_function("backward"):
                backward(*args, **kwargs)
            clock.end_backward()

        self._wrap(accelerator, "backward", call)

    def _on_forward(
        self, module: torch.nn.Module, clock: PartClock, part: str, after: str, backward: str | None = None
    ) -> None:
        """Marks the module's forward pass, and the moment when the gradient of its first output is there."""

        def before_forward(*_: Any) -> None:
            if torch.is_grad_enabled():
                clock.begin(part)

        def after_forward(_module: Any, _inputs: Any, output: Any) -> None:
            if not torch.is_grad_enabled():
                return
            clock.begin(after)
            first = output[0] if isinstance(output, tuple) else output
            if backward is not None and isinstance(first, torch.Tensor) and first.requires_grad:
                first.register_hook(lambda gradient: clock.begin(backward))

        self._keep(module.register_forward_pre_hook(before_forward, with_kwargs=False))
        self._keep(module.register_forward_hook(after_forward))

    def remove(self) -> None:
        """Everything is as before."""
        while self.undo:
            self.undo.pop()()


@contextlib.contextmanager
def profiling(trainer: Any, steps: int | None) -> Iterator[None]:
    """Records `steps` steps of the training inside, after two for warming up; None records nothing.

    The main process writes profile/table.txt, profile/table.json and profile/trace.json.gz into training.output_dir.

    Raises:
        UserError: the run has too few steps left.
    """
    if steps is None:
        yield
        return
    p = trainer.progress
    left = trainer.total_steps - p.step
    if left < steps + WARM_UP_STEPS and trainer.max_epochs is None:
        raise UserError(
            f"--profile {steps}: {WARM_UP_STEPS} steps for warming up and {steps} to record are more than the {max(left, 0)} that the "
            f"run has left. Set training.max_steps to {p.step + steps + WARM_UP_STEPS} or more, or a smaller N."
        )
    if not trainer.accelerator.is_main_process:
        yield
        return
    recorder = _Recorder(trainer, steps)
    around_step = trainer.around_step

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        with around_step():
            yield
        recorder.stepped()

    trainer.around_step = around
    try:
        yield
    except BaseException:
        recorder.stop()
        raise
    finally:
        trainer.around_step = around_step
    recorder.finish()


class _Recorder:
    def __init__(self, trainer: Any, steps: int):
        self.trainer, self.steps = trainer, steps
        self.done = self.recorded = 0
        self.clock = PartClock(trainer.accelerator.device)
        self.hooks: Hooks | None = None
        self.profiler: Any = None

    def stepped(self) -> None:
        self.done += 1
        if self.profiler is not None:
            self.recorded += 1
            if self.recorded == self.steps:
                self.finish()
        elif self.done >= WARM_UP_STEPS and self._may_start():
            self._start()

    def _may_start(self) -> bool:
        """Whether no evaluation and no checkpoint falls into the steps ahead, or cannot be kept out of them by waiting."""
        t, step = self.trainer.config.training, self.trainer.progress.step
        last = self.trainer.total_steps - self.steps

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
        self.hooks = Hooks(self.trainer, self.clock)
        self.clock.running = True
        if self.clock.on_gpu:
            torch.cuda.synchronize()
        self._pause(began)
        self.began = time.perf_counter()
        self.clock.begin("other")

    def stop(self) -> None:
        """Takes everything off; whether something had been recorded."""
        if self.hooks is not None:
            self.clock.begin("other")
            self.clock.running = False
            self.hooks.remove()
            self.hooks = None
            if self.clock.on_gpu:
                torch.cuda.synchronize()
            self.wall = time.perf_counter() - self.began
            self.profiler.stop()

    def finish(self) -> None:
        """Writes the results, once."""
        if self.hooks is None:
            if self.profiler is None:
                log.warning("--profile: the data ended before a step was recorded")
            return
        began = time.perf_counter()
        self.stop()
        folder = self.trainer.output_dir / "profile"
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
        self._write_trace(folder / "trace.json.gz")
        log.info("profile of %d steps, in %s:\n%s", self.recorded, folder, Block(text))
        self._pause(began)

    def _pause(self, began: float) -> None:
        """The time since then is no part of the training."""
        seconds = time.perf_counter() - began
        self.trainer.window.started += seconds
        self.trainer.view.pace.paused += seconds

    def _write_trace(self, path: Path) -> None:
        plain = path.with_suffix("")
        self.profiler.export_chrome_trace(str(plain))
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
