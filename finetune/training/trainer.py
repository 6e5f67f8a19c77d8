"""The training loop. B batch, S samples, U target tokens."""

import json
import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from finetune import signals as stopping
from finetune.callbacks import trackers
from finetune.callbacks.averaging import Ema
from finetune.callbacks.drift import ForwardClock, Watch, gather_paces
from finetune.callbacks.eta import splits_due
from finetune.callbacks.memory_recovery import MemoryGuard, earlier_limits
from finetune.callbacks.panel import View
from finetune.data.batch import Batch
from finetune.data.run_file import count_clips
from finetune.data.stream import UtteranceStream
from finetune.errors import UserError
from finetune.models.nemo import set_batchnorm_mode
from finetune.strategies import sharded
from finetune.strategies.optimizers import describe_optimizer, unwrap_optimizer
from finetune.training import best, resume
from finetune.training.batches import Intake, StepInput
from finetune.training.evaluation import average_batchnorm
from finetune.training.metrics import MetricsWindow, rates_by_part
from finetune.training.nonfinite import StepGuard
from finetune.training.outputs import LineFile
from finetune.training.progress import Progress
from finetune.training.saving import Saver

log = logging.getLogger(__name__)


class Trainer:
    """State of a run: the prepared objects, the progress, and the open files.

    Args:
        accelerator: Accelerate's Accelerator.
        module: prepared TransducerLossModule.
        optimizer: prepared optimizer.
        schedule: `finetune.training.schedule.Schedule`.
        stream: training batches of this rank.
        sources: opened sources by key (train, validation, test, guard).
        config: the run's configuration.
        total_steps: optimizer steps of the run, which the schedule is laid out for.
        max_epochs: passes over the data that end the run, whatever `total_steps` estimated; None: `total_steps` ends it.
        replica: a whole copy of the NeMo model on the host (finetune.strategies.sharded), where the engine shards parameters.
    """

    def __init__(
        self,
        accelerator: Any,
        module: Any,
        optimizer: Any,
        schedule: Any,
        stream: UtteranceStream,
        sources: dict[str, list[Any]],
        config: Any,
        total_steps: int,
        max_epochs: int | None,
        replica: Any | None = None,
    ):
        self.accelerator, self.module, self.optimizer, self.schedule = accelerator, module, optimizer, schedule
        self.stream, self.sources, self.config = stream, sources, config
        self.total_steps, self.max_epochs = total_steps, max_epochs
        self.core = accelerator.unwrap_model(module)
        self.model, self.replica = self.core.nemo, replica
        self.output_dir = Path(config.training.output_dir)
        self.progress = Progress()
        self.metrics = LineFile(self.output_dir / "metrics.jsonl")
        self.evaluations = LineFile(self.output_dir / "evaluations.jsonl")
        self.quarantine = LineFile(self.output_dir / "quarantine.jsonl")
        self.clips = LineFile(self.output_dir / "clips.jsonl")
        self.intake = Intake(accelerator, self.model, self.core.durations, config, self.progress, self.quarantine)
        self.window = MetricsWindow(self.model.preprocessor._sample_rate)
        # One generator for the draw between TDT and RNN-T, equal on all ranks and kept in checkpoints.
        self.omega_generator = torch.Generator().manual_seed(config.training.seed)
        t = config.training
        self.ema = Ema(self.model, t.ema_decay, t.ema_device) if t.ema_decay else None
        self.resumed_from: int | None = None
        self.optimizer_description: dict[str, Any] = {}
        self.saver = Saver(accelerator, self.output_dir, t.save_total_limit, t.async_save)
        self.last_saved, self.saved_at = -1, time.monotonic()
        self.intake.asks = self._asks
        self.heard: set[str] = set()
        self.step_guard = StepGuard(self)
        self.clock = time.perf_counter()
        self.view = View(self)
        self.watch = self._make_watch()
        self.forward_clock = ForwardClock(self.core, accelerator.device) if accelerator.num_processes > 1 else None
        self.guard: MemoryGuard | None = None
        if config.training.auto_batch and config.data.batch_bounds:
            self.guard = MemoryGuard(self, list(config.data.batch_bounds))
            earlier = earlier_limits(self.output_dir) if config.training.resume_from_checkpoint else None
            if earlier is not None:
                self.guard.take(earlier["now"])
        # What else happens around each optimizer step, such as measuring it.
        self.around_step: Callable[[], AbstractContextManager[Any]] = nullcontext

    def _make_watch(self) -> Watch:
        device = self.accelerator.device
        return Watch(
            self.progress.drift_warnings,
            self.config.training.dataloader_num_workers,
            self.accelerator.scaler is not None,
            (lambda: torch.cuda.memory_allocated(device) / 2**30) if device.type == "cuda" else None,
        )

    # ---- saving -------------------------------------------------------------------------------------------------------

    def restore_progress(self, values: dict[str, Any]) -> None:
        """The counters of a checkpoint."""
        self._take_progress(values)
        self.saver.blocked_seconds, self.saver.failed = self.progress.saving_seconds, self.progress.failed_checkpoints

    def _take_progress(self, values: dict[str, Any]) -> None:
        self.progress = self.intake.progress = Progress(**values)
        self.watch.counts = self.progress.drift_warnings

    def walk_schedule_to(self, state: dict[str, Any]) -> None:
        """The schedule's place in a checkpoint."""
        if self.max_epochs is None:
            self.schedule.load_state_dict(state)
        else:  # by the share of the data: batches of another size have another number of steps
            self.schedule.walk_to(self.share_done())

    def _asks(self) -> tuple[bool, bool]:
        """Whether this rank was asked to stop, and whether it is time for a checkpoint by the clock of the main process."""
        minutes = self.config.training.save_minutes if self.accelerator.is_main_process else 0
        return stopping.requested() is not None, bool(minutes) and time.monotonic() - self.saved_at >= 60 * minutes

    def save(self, settle: bool = False) -> None:
        """Writes a checkpoint of the present step, or begins to.

        Args:
            settle: wait until it is there; UserError where it cannot be written.
        """
        if settle and self.saver.failed_anywhere():
            self.last_saved = -1  # one more attempt
        if self.last_saved != self.progress.step:
            self._save()
        if settle:
            self.saver.settled()

    def _save(self) -> None:
        self.step_guard.require_finite()
        self.count_wall_seconds()
        self.progress.saving_seconds = self.saver.blocked_seconds
        self.progress.failed_checkpoints = self.saver.failed
        self.progress.omega_state = self.omega_generator.get_state().numpy().tobytes().hex()
        average_batchnorm(self.accelerator, self.model, self.config)
        state = {
            "progress": asdict(self.progress),
            "schedule": self.schedule.state_dict(),
            "window": self.window.state_dict(),
            "step_guard": self.step_guard.state_dict(),
            "world_size": self.accelerator.num_processes,
            "settings": resume.settings_of(self),
            "kind": resume.kind_of(self),
            "lora_scaling": getattr(self.model, "lora_scaling", None),
            "ema_updates": None if self.ema is None else self.ema.updates,
        }
        ema = None
        if self.ema is not None:
            self.ema.mean_over_processes(self.accelerator.num_processes)
            ema = self.ema.whole_state(keep=self.accelerator.is_main_process)
        if self.replica is not None:
            sharded.copy_weights(self.model, self.replica)
        kept = sharded.model_to_keep(self.accelerator, self.model, self.replica)
        if self.accelerator.is_main_process:
            for lines in (self.metrics, self.evaluations, self.quarantine, self.clips, self.step_guard.file):
                lines.sync()  # what a resume finds up to this step has to outlive a power cut as well
        self.saver.save(self.progress.step, state, self.stream.state_dict(), kept, ema)
        self.last_saved, self.saved_at = self.progress.step, time.monotonic()

    def count_wall_seconds(self) -> None:
        """Adds the time since the last call, so that the sum survives an interruption."""
        now = time.perf_counter()
        self.progress.wall_seconds += now - self.clock
        self.clock = now

    # ---- evaluation ------------------------------------------------------------------------------------------------

    def whole_model(self) -> AbstractContextManager[Any]:
        """The model to evaluate and to save: itself, or under an engine that shards parameters a whole replica. All ranks enter."""
        return sharded.whole_model(self.model, self.replica, self.accelerator.device)

    def evaluate(self, splits: tuple[str, ...]) -> dict[str, Any]:
        """Evaluates the splits that the run file names; keeps the best model by validation WER (finetune.training.best)."""
        return best.evaluate(self, splits)

    def evaluate_best(self, splits: tuple[str, ...]) -> dict[str, Any]:
        """Evaluates the chosen model, read again from model.nemo where it is not the present one; its lines carry the best step."""
        return best.evaluate_best(self, splits)

    def last_loss(self) -> float | None:
        """Loss of the last line of metrics.jsonl."""
        lines = self.metrics.path.read_text(encoding="utf-8").splitlines()
        return json.loads(lines[-1])["loss"] if lines else None

    def keep_model(self) -> None:
        """Writes the present weights as model.nemo."""
        with self.whole_model() as model:
            self._keep(model)

    def _keep(self, model: Any) -> None:
        best.keep(self, model)

    # ---- training --------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Trains until `max_epochs` passes over the data are done, or else until `total_steps`.

        Raises:
            Stopped: a signal asked for it; a checkpoint of the last step is there.
        """
        with stopping.saving_first(), self.saver.finishing():
            self._run()

    def _run(self) -> None:
        self.window.started = time.perf_counter()
        self.view.begin()
        self.watch.begin(self.progress.step, self.progress.skipped_steps + self.progress.scale_skips)
        self.module.train()
        if self.progress.evaluation_due:  # the run was stopped before it, or in it
            self.last_saved = -1
            self._close_step()
        while not self._done():
            self.saver.wait()  # no worker is forked beside a writing thread
            samples_before, whole_epoch = self.progress.samples, not self.stream.positions
            iterator = self.stream.batches()
            try:
                while not self._done():
                    waited = time.perf_counter()
                    step_input = self._next_step(iterator)
                    self.window.waited += time.perf_counter() - waited
                    if step_input.batches == 0:
                        self.progress.epoch += 1
                        self._empty_cache()
                        self.stream.next_epoch()
                        break
                    self.train_on(step_input)
                    self._after_step()
            finally:
                iterator.close()
            if whole_epoch and self.progress.samples == samples_before:
                raise self.intake.nothing_left()
        if self.window.steps:  # the steps since the last line, where the end of an epoch ended the run
            self._log_window()

    def _next_step(self, iterator: Iterator[Batch]) -> StepInput:
        """The next step's batches; where the data end the run, what has been trained so far is kept in a checkpoint."""
        p, stream = self.progress, self.stream
        before, place = replace(p, filtered=dict(p.filtered)), stream.snapshot()
        try:
            return self.intake.next_step(iterator)
        except UserError:
            self.progress = before
            stream.go_back(place)
            if (self.config.training.save_steps or self.config.training.save_minutes) and self.progress.step:
                self.save(settle=True)
                log.info("the state of step %d is kept in %s", self.progress.step, self.output_dir / "checkpoints")
            raise

    def _done(self) -> bool:
        if self.max_epochs is not None:
            return self.progress.epoch >= self.max_epochs
        return self.progress.step >= self.total_steps

    def train_on(self, step_input: StepInput) -> None:
        """One optimizer step, with what else happens around it."""
        with self.around_step():
            self._optimizer_step(step_input)

    def _optimizer_step(self, step_input: StepInput) -> None:
        """Forward and backward over the accumulated batches, then one step.

        Every loss is divided by what the whole step holds over all ranks and batches, so gradients equal those of one big
        batch however it is cut.
        """
        accelerator, t = self.accelerator, self.config.training
        group = step_input.group
        denominator = max(step_input.clips if t.loss_reduction == "mean_batch" else step_input.tokens, 1.0)
        rnnt_draw = self._draw_rnnt()  # once a step, so that a step cut into more batches or ranks stays the same
        self.schedule.apply(self.optimizer)
        self.applied_rates = self.schedule.rates()
        self.step_guard.begin()
        forward_and_backward = self.forward_and_backward if self.guard is None else self.guard.gradients
        loss_sum = forward_and_backward(group, step_input.batches, denominator, rnnt_draw)
        accelerator.sync_gradients = True
        grad_norm = self._clip()
        loss, reason = self.step_guard.step(loss_sum, grad_norm)
        self.optimizer.zero_grad()
        if reason is not None:
            self.step_guard.count(reason, loss, grad_norm)
        else:
            self._walk_schedule()
            if self.ema is not None:
                self.ema.update()
        p = self.progress
        p.step += 1
        p.samples += step_input.samples
        self.window.add(loss, grad_norm, step_input, counted=reason is None)
        if t.log_clips:
            self._log_clips(group)

    def forward_and_backward(
        self, group: list[Batch], batches: int, denominator: float, rnnt_draw: bool, exchange: bool = True
    ) -> torch.Tensor:
        """Gradients of a step's batches, and the sum of this rank's losses.

        Args:
            group: of this rank.
            batches: the most that any rank has.
            denominator: of every loss.
            rnnt_draw: the step's draw of omega.
            exchange: the last batch averages gradients over the ranks.
        """
        accelerator = self.accelerator
        loss_sum = torch.zeros((), dtype=torch.float64, device=accelerator.device)
        self.step_guard.begin_forward()
        for index in range(batches):
            last = index == batches - 1
            # A rank without a batch of its own runs its last one with weight zero: DDP and ZeRO wait for every rank.
            weight = 1.0 if index < len(group) else 0.0
            batch = group[index] if weight else self._stand_in(group)
            if self.guard is not None:
                self.guard.batch = batch
            accelerator.sync_gradients = last
            if not weight and not self.config.model.sync_batchnorm:
                set_batchnorm_mode(self.model, training=False)  # a stand-in must not move the statistics
            try:
                with self._no_sync(not (last and exchange)), accelerator.autocast():
                    losses_B = self.module(*self._to_device(batch), rnnt_draw=rnnt_draw)
                    loss = weight * losses_B[batch.feasible_B].sum() / denominator
                    loss_sum += loss.detach().double()
                    if weight:
                        self.step_guard.note(batch, losses_B)
                    if last:
                        loss = self.step_guard.admit(loss, loss_sum)
                    if loss is not None:
                        # DDP, ZeRO and FSDP average gradients over the ranks; the denominator already counts all of them.
                        accelerator.backward(loss * accelerator.num_processes)
            finally:
                if not weight:
                    self.module.train()
        return loss_sum

    def _walk_schedule(self) -> None:
        """By steps, or by the share of the rows read where epochs end the run: windows and lanes leave smaller batches, so that
        the number of steps is an estimate, and rates of 0 before the end would waste what comes."""
        if self.max_epochs is None:
            self.schedule.step()
        else:
            self.schedule.walk_to(self.share_done())

    def share_done(self) -> float:
        """Share of the run by rows read; below the last step's, since there is a step after this one, or none at all."""
        rows = count_clips(self.sources["train"], self.config.data.max_samples, self.config.data.skip_samples)
        return min(self.progress.rows_read / (rows * self.max_epochs), 1 - 0.5 / self.total_steps)

    def _log_clips(self, group: list[Batch]) -> None:
        ids = [[batch.ids for batch in group]]
        if self.accelerator.num_processes > 1:
            from accelerate.utils import gather_object

            ids = gather_object(ids)
        if self.accelerator.is_main_process:
            self.clips.append({"step": self.progress.step, "ids_by_rank": ids})

    def _draw_rnnt(self) -> bool:
        if self.core.omega <= 0:
            return False
        return bool(torch.rand((), generator=self.omega_generator) < self.core.omega)

    def _no_sync(self, skip: bool) -> AbstractContextManager[Any]:
        """DDP adds up in each process and exchanges once a step. ZeRO and FSDP exchange each time: what they spread over the processes
        would otherwise have to be kept whole in each of them until the step's last batch."""
        if skip and isinstance(self.module, torch.nn.parallel.DistributedDataParallel):
            return self.accelerator.no_sync(self.module)
        return nullcontext()

    def _stand_in(self, group: list[Batch]) -> Batch:
        """A batch for a rank that has none: its last one, or a second of silence."""
        if group:
            return group[-1]
        rate = self.model.preprocessor._sample_rate
        return Batch(
            ["silence"], [""], [""], torch.zeros(1, rate), torch.tensor([rate]), torch.zeros(1, 1, dtype=torch.int64), torch.tensor([1]), -1, {},
            feasible_B=torch.tensor([True]),
        )  # fmt: skip

    def _to_device(self, batch: Batch) -> tuple[torch.Tensor, ...]:
        tensors = (batch.audio_BS, batch.audio_lengths_B, batch.tokens_BU, batch.token_lengths_B)
        return tuple(tensor.to(self.accelerator.device, non_blocking=True) for tensor in tensors)

    def _clip(self) -> float | None:
        """Clips after accumulation and returns the norm before it; None where the engine does not tell."""
        limit = self.config.training.max_grad_norm or math.inf
        own = getattr(unwrap_optimizer(self.optimizer), "clip_grad_norm_", None)
        if own is not None:  # the gradients that count lie elsewhere, or are gone already
            return float(own(limit))
        norm = self.accelerator.clip_grad_norm_(self.module.parameters(), limit)
        if hasattr(norm, "full_tensor"):  # each rank has the norm of its own shards
            norm = norm.full_tensor()
        return None if norm is None else float(norm)

    def _empty_cache(self) -> None:
        if self.config.training.empty_cache_each_epoch and self.accelerator.device.type == "cuda":
            torch.cuda.empty_cache()

    def _log_window(self) -> None:
        """One line of metrics.jsonl, the trackers and the view."""
        row = self.window.row(self.progress, rates_by_part(self.optimizer, self.applied_rates))
        paces, waits = gather_paces(self.forward_clock, self.intake.take_waited(), self.accelerator)
        if self.accelerator.is_main_process:
            self.metrics.append(row)
            trackers.log_row(self.accelerator, row)
            self.watch.logged(row, self.progress.skipped_steps + self.progress.scale_skips, paces, waits)
        self.view.logged(row)
        self.window.reset()

    def _after_step(self) -> None:
        t, p = self.config.training, self.progress
        if not self.optimizer_description:
            self.optimizer_description = describe_optimizer(self.optimizer)
            log.info(
                "optimizer %(optimizer)s: %(optimizer_state_bytes)d bytes of state %(optimizer_state_dtypes)s on %(optimizer_state_devices)s",
                self.optimizer_description,
            )
        if p.step % t.logging_steps == 0 or p.step == 1 or self._done():
            self._log_window()
        self.view.stepped()
        p.evaluation_due = bool(t.eval_steps and p.step % t.eval_steps == 0) or self._at_last_step()
        self._close_step()

    def _at_last_step(self) -> bool:
        return self.max_epochs is None and self._done()

    def _close_step(self) -> None:
        """The evaluation and the checkpoint that are due at the present step; leaves where the run was asked to stop."""
        t, p, paused = self.config.training, self.progress, time.perf_counter()
        one = self.accelerator.num_processes == 1  # nobody to agree with
        stop = self.intake.asked_to_stop or (one and stopping.requested() is not None)
        self.saver.poll()
        if p.evaluation_due and not stop:
            stop = not self._evaluate_due()
        if stop or self.intake.asked_to_save or self._at_last_step() or (t.save_steps and p.step % t.save_steps == 0):
            self.save(settle=stop)
        if stop:
            raise stopping.Stopped(f"the checkpoint of step {p.step} is saved")
        self.window.started += time.perf_counter() - paused

    def _evaluate_due(self) -> bool:
        """Evaluates; False where it was cut short because the run has to stop, with the progress as it was before."""
        t, p = self.config.training, self.progress
        before = asdict(p)
        p.evaluation_due = False
        self.saver.wait()  # no worker is forked beside a writing thread
        try:
            self.evaluate(splits_due(p.step, self._at_last_step(), t.eval_steps, t.guard_steps))
        except stopping.CutShort:
            self._take_progress(before)
            return False
        self._empty_cache()
        self.module.train()
        return True
