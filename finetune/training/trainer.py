"""The training loop. B batch, S samples, U target tokens."""

import logging
import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch.profiler import record_function

from finetune.config.schema import RunConfig
from finetune.data.batch import Batch
from finetune.data.quarantine import Quarantine
from finetune.data.run_file import count_clips, training_keys
from finetune.data.sources import OpenSource
from finetune.data.stream import UtteranceStream
from finetune.distributed import broadcast, gather, sum_over_ranks
from finetune.errors import UserError
from finetune.evaluation.scores import WerAccumulator
from finetune.losses.transfers import upload
from finetune.models.look_ahead import Context, draw_context, training_contexts
from finetune.models.loss_module import LossModule, OnHost
from finetune.models.nemo import encoder_lengths, has_transducer, set_batchnorm_mode, set_head
from finetune.models.protocols import AsrModel
from finetune.signals import CutShort, Stopped, requested, saving_first
from finetune.strategies import sharded
from finetune.strategies.optimizers import optimizer_in_words, unwrap_optimizer
from finetune.training import resume
from finetune.training.callbacks import Callback, ComputeGradients, StepResult
from finetune.training.checkpoints import read_checkpoint_state, remove_later_checkpoints
from finetune.training.evaluation import Evaluator, FinalResult, average_batchnorm, forget_base, splits_due
from finetune.training.metrics import MetricsWindow, rates_by_part
from finetune.training.nonfinite import StepFilter
from finetune.training.outputs import LineFile, remove_run
from finetune.training.progress import Progress
from finetune.training.saving import CheckpointWriter
from finetune.training.schedule import Schedule
from finetune.training.step_batches import StepBatcher, StepBatches
from finetune.training.vocabulary_change import move_tokenizer_into_run

log = logging.getLogger(__name__)


class Trainer:
    """A run: `begin`, perhaps `evaluate_base`, `train`, `finish`. Callbacks take part in its moments and never see the
        Trainer itself.

    What others may read: accelerator, config, module (prepared), loss_module (unwrapped), model, optimizer, stream,
    batcher, sources, progress, evaluator, output_dir, total_steps, max_epochs, resumed_from, callbacks.

    Args:
        accelerator, config: of the run.
        module: prepared LossModule.
        optimizer: prepared optimizer.
        schedule: learning rates.
        stream: training batches of this rank.
        sources: opened sources by key (train, validation, test, guard).
        total_steps: optimizer steps of the run, which the schedule is laid out for.
        max_epochs: passes over the data that end the run, whatever `total_steps` estimated; None: `total_steps` ends
            it.
        replica: a whole copy of the model on the host (finetune.strategies.sharded), where the engine shards
            parameters.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        module: torch.nn.Module,
        optimizer: AcceleratedOptimizer,
        schedule: Schedule,
        stream: UtteranceStream,
        sources: dict[str, list[OpenSource]],
        config: RunConfig,
        total_steps: int,
        max_epochs: int | None,
        replica: AsrModel | None = None,
    ):
        t = config.training
        self.accelerator, self.module, self.optimizer, self.schedule = accelerator, module, optimizer, schedule
        self.stream, self.sources, self.config = stream, sources, config
        self.total_steps, self.max_epochs = total_steps, max_epochs
        loss_module = accelerator.unwrap_model(module)
        assert isinstance(loss_module, LossModule)
        self.loss_module = loss_module
        self.model: AsrModel = loss_module.nemo
        self.replica = replica
        self.output_dir = Path(t.output_dir)
        self.progress = p = Progress()
        self.callbacks: list[Callback] = []
        self.metrics = LineFile(self.output_dir / "metrics.jsonl")
        self.clips = LineFile(self.output_dir / "clips.jsonl")
        self.unusable = LineFile(self.output_dir / "quarantine.jsonl")
        self.quarantine = Quarantine(accelerator.is_main_process, self.unusable, p)
        self.step_filter = StepFilter(accelerator, self.model, optimizer, config, p, self._held_tensors)
        reports = self.quarantine, self._wishes, self._part, training_keys(sources["train"])
        self.batcher = StepBatcher(accelerator, self.model, config, p, *reports)
        self.evaluator = Evaluator(
            accelerator, config, sources, p, self.quarantine, self.callbacks, self.step_filter.require_finite
        )
        self.writer = CheckpointWriter(accelerator, self.output_dir, t.save_total_limit, t.async_save)
        self.window = MetricsWindow(self.model.preprocessor._sample_rate)
        # One generator for the draw between TDT and RNN-T, equal on all ranks and kept in checkpoints.
        self.omega_generator = torch.Generator().manual_seed(t.seed)
        self.contexts = training_contexts(self.model, config.model.streaming_share)
        self.resumed_from: int | None = None
        self.saves_checkpoints = True
        """False measures a run without writing any."""
        self._optimizer_logged = False
        self._ctc_sum = self._distilled_sum = torch.zeros((), dtype=torch.float64)
        """Of this rank in the present step, over the step's denominator."""
        self._rates: list[float] = []
        self._last_saved, self._saved_at = -1, time.monotonic()
        self._clock = time.perf_counter()

    def add_callback(self, callback: Callback) -> None:
        """Let a callback take part. On all ranks, in the same order, before `begin`."""
        self.callbacks.append(callback)

    # ---- the story of a run ----------------------------------------------------------------------------------------

    def begin(self, checkpoint: Path | None) -> None:
        """Continue from a checkpoint, or begin at step 0 and remove what another run left. UserError where the
        checkpoint does not fit."""
        if checkpoint is not None:
            self._resume(checkpoint)
            return
        if self.accelerator.is_main_process:
            if self.config.training.overwrite_output_dir:
                remove_run(self.output_dir)
            forget_base(self.output_dir)
            for callback in self.callbacks:
                callback.on_fresh_run()
            for file in self._line_files():
                if file.path.exists():
                    file.cut(0)
            move_tokenizer_into_run([self.model, self.replica], self.output_dir)
        self.accelerator.wait_for_everyone()

    def evaluate_base(self) -> None:
        """Measure the base model as step 0, after checking that it decodes batches as it decodes single utterances."""
        with self.whole_model() as model:
            self.evaluator.check_decoding(model)
        if self.config.model.add_ctc and has_transducer(self.model):
            set_head(self.model, "transducer")  # that of the base model: the new head knows nothing
        if self.config.training.eval_on_start:
            self._evaluate_base(("validation", "test", "guard"))
        elif self.evaluator.judge is not None:
            log.info("training.eval_on_start=false: data.guard_limit needs the base model's WER all the same")
            self._evaluate_base(("validation", "guard"))
        set_head(self.model, None)

    def _evaluate_base(self, splits: tuple[str, ...]) -> None:
        found = self.evaluate(splits)
        judged = found.get("test" if "test" in self.sources else "validation")
        if judged is not None:
            self.progress.wer_before = {**judged.result(), "pairs": judged.pairs}
        if "guard" in found:
            self.progress.guard_before = found["guard"].total.rates()["wer"]

    def train(self) -> None:
        """Train until `max_epochs` passes over the data are done, or else until `total_steps`; less where a callback
        ends the run.

        Raises:
            Stopped: a signal asked for it; a checkpoint of the last step is written.
        """
        failed = True
        with saving_first(), self.writer.finishing():
            try:
                self._train()
                failed = False
            finally:
                for callback in self.callbacks:
                    callback.on_steps_end(failed)

    def end(self) -> None:
        """Tell the callbacks that the run is over, after its results are written."""
        for callback in self.callbacks:
            callback.on_train_end()

    def finish(self) -> FinalResult:
        """Evaluate and save the last step, settle which weights are the best model, and evaluate those."""
        p = self.progress
        if p.step > 0 and p.last_evaluated != p.step and "validation" in self.sources:
            self.evaluate(("validation",), last=True)  # the end of the last epoch is rarely a step with an evaluation
            self._last_saved = -1  # a checkpoint of this step does not know of it yet
        self.save(wait=True)
        with self.whole_model() as model:
            result = self.evaluator.finish(model)
        self._count_time()
        return result

    # ---- saving and resuming ---------------------------------------------------------------------------------------

    def save(self, wait: bool = False) -> None:
        """Write a checkpoint of the present step, or begin to; `wait` until it is there, with a UserError where it
        cannot be written."""
        if not self.saves_checkpoints:
            return
        self._part("saving")
        if wait and self.writer.failed_anywhere():
            self._last_saved = -1  # one more attempt
        if self._last_saved != self.progress.step:
            self._save()
        if wait:
            self.writer.settle()
        self._part("other")

    def _count_time(self) -> None:
        """Add the time since the last call, so that the sum survives an interruption."""
        p, now = self.progress, time.perf_counter()
        p.wall_seconds += now - self._clock
        self._clock = now
        p.saving_seconds, p.failed_checkpoints = self.writer.blocked_seconds, self.writer.failed

    def _save(self) -> None:
        p, accelerator = self.progress, self.accelerator
        self.step_filter.require_finite()
        self._count_time()
        p.omega_state = self.omega_generator.get_state().numpy().tobytes().hex()
        average_batchnorm(self.model)
        state = {
            "progress": p.snapshot(),
            "schedule": self.schedule.state_dict(),
            "window": self.window.state_dict(),
            "step_guard": self.step_filter.state_dict(),
            "world_size": accelerator.num_processes,
            "settings": self._settings(),
            "kind": self._kind(),
            "lora_scaling": getattr(self.model, "lora_scaling", None),
        }
        tensors: dict[str, dict[str, torch.Tensor]] = {}
        for callback in self.callbacks:
            values, files = callback.before_save(accelerator.is_main_process)
            state |= values
            tensors |= files
        if self.replica is not None:
            sharded.copy_weights(self.model, self.replica)
        kept = sharded.model_to_keep(accelerator, self.model, self.replica)
        if accelerator.is_main_process:
            for file in self._line_files():
                file.sync()  # what a resume finds up to this step has to outlive a power cut as well
        self.writer.save(p.step, state, self.stream.state_dict(), kept, tensors)
        self._last_saved, self._saved_at = p.step, time.monotonic()

    def _resume(self, checkpoint: Path) -> None:
        """Restore weights, optimizer, schedule, random states, stream, counters and log files.

        Under another strategy than the one that wrote the checkpoint the optimizer's and the random states start anew,
        which is logged. The model has the checkpoint's weights already (`resume.take_weights`).
        """
        state, rank_states = read_checkpoint_state(checkpoint)
        changes = self.stream.load_state_dict(rank_states)
        resume.load_states(self.accelerator, self.module, self.optimizer, checkpoint, state["kind"], self._kind())
        p = self.progress
        p.restore(state["progress"])
        self.writer.blocked_seconds, self.writer.failed = p.saving_seconds, p.failed_checkpoints
        self.window.load_state_dict(state["window"])
        self.step_filter.load_state_dict(state["step_guard"])
        for callback in self.callbacks:
            callback.on_resume(checkpoint, state)
        self.omega_generator.set_state(torch.frombuffer(bytearray.fromhex(p.omega_state), dtype=torch.uint8))
        if self.max_epochs is None:
            self.schedule.load_state_dict(state["schedule"])
        else:  # by the share of the data: batches of another size have another number of steps
            self.schedule.step_to(self.share_done())
        self.resumed_from = self._last_saved = p.step
        self.quarantine.resume()
        if self.accelerator.is_main_process:
            for file in (self.metrics, self.clips, self.step_filter.file):
                if file.path.is_file():
                    file.cut_after_step(p.step)
            self.evaluator.cut_lines_after_resume()
            remove_later_checkpoints(self.output_dir, p.step)
        self.evaluator.check_best_after_resume()
        self.evaluator.check_limit_after_resume()
        if changes:
            text = "the clips come in another order than in an unbroken run: %s. What is left of the epoch comes once"
            log.warning(text, "; ".join(changes))
        resume.log_changed_settings(state["settings"], self._settings())

    def _kind(self) -> dict[str, str]:
        return resume.kind_of(self.accelerator, self.config, self.model, self.optimizer)

    def _settings(self) -> dict[str, Any]:
        return resume.settings_of(self.config, self.accelerator.num_processes, self.total_steps)

    def _line_files(self) -> list[LineFile]:
        return [self.metrics, self.evaluator.file, self.unusable, self.clips, self.step_filter.file]

    def _held_tensors(self) -> dict[str, torch.Tensor]:
        return {name: tensor for callback in self.callbacks for name, tensor in callback.held_tensors().items()}

    def _wishes(self) -> tuple[bool, bool]:
        """Return whether this rank was asked to stop, and whether the main process's clock asks for a checkpoint."""
        minutes = self.config.training.save_minutes if self.accelerator.is_main_process else 0
        return requested() is not None, bool(minutes) and time.monotonic() - self._saved_at >= 60 * minutes

    # ---- evaluation ------------------------------------------------------------------------------------------------

    def whole_model(self) -> AbstractContextManager[AsrModel]:
        """Return a context with the model to evaluate and to save: itself, or a whole replica where parameters are
        sharded. All ranks enter."""
        return sharded.whole_model(self.model, self.replica, self.accelerator.device)

    def evaluate(self, splits: tuple[str, ...], last: bool = False) -> dict[str, WerAccumulator]:
        """Evaluate the splits that the run file names; keep the best model by validation WER. See `Evaluator`."""
        self._part("evaluation")
        self.step_filter.require_finite()
        average_batchnorm(self.model)
        with self.whole_model() as model:
            found = self.evaluator.evaluate(model, splits, last)
        self._part("other")
        return found

    # ---- training --------------------------------------------------------------------------------------------------

    def _train(self) -> None:
        self.window.started = time.perf_counter()
        for callback in self.callbacks:
            callback.on_train_begin()
        self.module.train()
        if self.progress.evaluation_due:  # the run was stopped before it, or in it
            self._last_saved = -1
            self._close_step()
        while not self._done():
            self.writer.wait()  # no worker is forked beside a writing thread
            samples_before, whole_epoch = self.progress.samples, not self.stream.positions
            iterator = self.stream.batches()
            try:
                while not self._done():
                    waited = time.perf_counter()
                    self._part("data")
                    with record_function("data"):
                        batches = self._next_step(iterator)
                    self._part("other")
                    self.window.waited += time.perf_counter() - waited
                    if batches.micro_batches == 0:
                        self.progress.epoch += 1
                        self._empty_cache()
                        self.stream.next_epoch()
                        break
                    self.train_on(batches)
                    self._after_step()
            finally:
                iterator.close()
            if whole_epoch and self.progress.samples == samples_before:
                raise self.batcher.nothing_left()
        if self.window.steps:  # the steps since the last line, where the end of an epoch ended the run
            self._log_window()

    def _next_step(self, iterator: Iterator[Batch]) -> StepBatches:
        """Return the next step's batches; where the data end the run, keep what has been trained in a checkpoint."""
        before, place = self.progress.snapshot(), self.stream.snapshot()
        try:
            return self.batcher.next_step(iterator)
        except UserError:
            self.progress.restore(before)
            self.stream.go_back(place)
            if (self.config.training.save_steps or self.config.training.save_minutes) and self.progress.step:
                self.save(wait=True)
                log.info("the state of step %d is kept in %s", self.progress.step, self.output_dir / "checkpoints")
            raise

    def _done(self) -> bool:
        if self.progress.diverged is not None:
            return True
        if self.max_epochs is not None:
            return self.progress.epoch >= self.max_epochs
        return self.progress.step >= self.total_steps

    def train_on(self, batches: StepBatches) -> StepResult:
        """Run one optimizer step with everything that callbacks do around it."""
        step = self.progress.step + 1
        with ExitStack() as stack:
            for callback in self.callbacks:
                stack.enter_context(callback.around_step(step))
            for callback in self.callbacks:
                callback.on_step_begin(step)
            result = self._optimizer_step(batches)
            for callback in self.callbacks:
                callback.on_step_end(result)
        return result

    def _optimizer_step(self, batches: StepBatches) -> StepResult:
        """Forward and backward over the accumulated batches, then one step.

        Every loss is divided by what the whole step holds over all ranks and batches, so gradients equal those of one
        big batch however it is cut.
        """
        p = self.progress
        self.schedule.apply(self.optimizer)
        self._rates = self.schedule.rates()
        self.step_filter.begin()
        loss_sum = self.compute_gradients(
            batches, self._draw_rnnt(), draw_context(*self.contexts, self.config.training.seed, p.step)
        )
        self.accelerator.sync_gradients = True
        self._part("clipping")
        with record_function("clipping"):
            norm = self._clip_gradients()
        self._part("optimizer")
        with record_function("optimizer"):
            loss, grad_norm, reason = self.step_filter.step(loss_sum, norm)
        self._part("other")
        self.optimizer.zero_grad()
        if reason is not None:
            self.step_filter.record(reason, loss, grad_norm)
        elif self.max_epochs is None:
            self.schedule.step()
        else:  # the number of steps is an estimate, and rates of 0 before the end would waste what comes
            self.schedule.step_to(self.share_done())
        p.step += 1
        p.clipped_steps += grad_norm is not None and grad_norm > (self.config.training.max_grad_norm or math.inf)
        p.samples += batches.samples
        p.rehearsed += batches.rehearsed
        self.window.add(loss, grad_norm, batches, reason is None, self._loss_parts(loss))
        if self.config.training.log_clips:
            ids_by_rank = gather([batch.ids for batch in batches.batches])
            if self.accelerator.is_main_process:
                self.clips.append({"step": p.step, "ids_by_rank": ids_by_rank})
        return StepResult(p.step, loss, grad_norm, reason, batches)

    def compute_gradients(
        self, batches: StepBatches, rnnt_draw: bool = False, context: Context | None = None
    ) -> torch.Tensor:
        """Compute the gradients of a step, and return the sum of this rank's losses (float64 scalar).

        Args:
            batches: of the step.
            rnnt_draw: train the step with the plain RNN-T loss.
            context: of the encoder's attention; None: the model's default. Both are drawn once a step, so that a step
                cut into more batches or ranks stays the same.
        """
        mean_over_clips = self.config.training.loss_reduction == "mean_batch"
        denominator = max(batches.clips if mean_over_clips else batches.tokens, 1.0)

        def forward_and_backward(batches: list[Batch], micro_batches: int, exchange: bool = True) -> torch.Tensor:
            return self._forward_and_backward(batches, micro_batches, denominator, rnnt_draw, context, exchange)

        compute: ComputeGradients = forward_and_backward
        for callback in self.callbacks:
            compute = callback.wrap_gradients(compute)
        return compute(batches.batches, batches.micro_batches)

    def _forward_and_backward(
        self,
        batches: list[Batch],
        micro_batches: int,
        denominator: float,
        rnnt_draw: bool,
        context: Context | None,
        exchange: bool,
    ) -> torch.Tensor:
        """Accumulate gradients as `ComputeGradients`, with one denominator for every loss."""
        accelerator = self.accelerator
        loss_sum = torch.zeros((), dtype=torch.float64, device=accelerator.device)
        self._ctc_sum, self._distilled_sum = loss_sum.clone(), loss_sum.clone()
        self.step_filter.begin_forward()
        for index in range(micro_batches):
            last = index == micro_batches - 1
            # A rank without a batch of its own runs its last one with weight zero: DDP and ZeRO wait for every rank.
            weight = 1.0 if index < len(batches) else 0.0
            batch = batches[index] if weight else self._stand_in(batches)
            for callback in self.callbacks:
                callback.on_batch_begin(batch)
            accelerator.sync_gradients = last
            if not weight and not self.config.model.sync_batchnorm:
                set_batchnorm_mode(self.model, training=False)  # a stand-in must not move the statistics
            try:
                with self._no_sync(not (last and exchange)), accelerator.autocast():
                    losses_B = self.module(
                        *self._to_device(batch), rnnt_draw=rnnt_draw, context=context, on_host=_on_host(batch)
                    )
                    loss = weight * _of_feasible(losses_B, batch).sum() / denominator
                    loss_sum += loss.detach().double()
                    if weight:
                        self.step_filter.losses.append((batch, losses_B.detach()))
                        self._add_parts(batch, denominator)
                    if last:
                        loss = self.step_filter.filter_loss(loss, loss_sum)
                    if loss is not None:
                        self._part("joint_loss_backward")
                        with record_function("backward"):
                            # DDP, ZeRO and FSDP average gradients over the ranks; the denominator counts all of them.
                            accelerator.backward(loss * accelerator.num_processes)
                        self._part("after_backward")
            finally:
                if not weight:
                    self.module.train()
        return loss_sum

    def _add_parts(self, batch: Batch, denominator: float) -> None:
        """Add the parts of the losses of a batch: CTC, where what has no alignment adds nothing, and distillation."""
        if self.loss_module.distilled_B is not None:
            distilled_B = _of_feasible(self.loss_module.distilled_B, batch)
            self._distilled_sum += distilled_B.double().sum() / denominator
        if self.loss_module.ctc_losses_B is not None:
            losses_B = _of_feasible(self.loss_module.ctc_losses_B, batch).double()
            self._ctc_sum += losses_B.masked_fill(losses_B == math.inf, 0.0).sum() / denominator

    def _loss_parts(self, loss: float) -> dict[str, float]:
        """Return both parts of a hybrid model's loss and what distillation adds, over the same denominator; nothing
        where there is only one part."""
        w, parts, distilled = self.loss_module.ctc_weight, {}, 0.0
        if self.loss_module.frozen_base is not None:
            parts["distillation"] = distilled = float(sum_over_ranks(self._distilled_sum))
        if 0 < w < 1:
            ctc = float(sum_over_ranks(self._ctc_sum))
            parts |= {"transducer_loss": (loss - distilled - w * ctc) / (1 - w), "ctc_loss": ctc}
        return parts

    def share_done(self) -> float:
        """Return the share of the run by rows read, which stays below 1 since a step follows this one, or none."""
        assert self.max_epochs is not None
        rows = count_clips(self.sources["train"], self.config.data.max_samples, self.config.data.skip_samples)
        assert rows is not None  # the number of steps was planned with it
        return min(self.progress.rows_read / (rows * self.max_epochs), 1 - 0.5 / self.total_steps)

    def expected_steps(self) -> int:
        """Return the steps of the whole run; where epochs end it, from the share of rows that has been read."""
        if self.max_epochs is None:
            return self.total_steps
        step, share = self.progress.step, self.share_done()
        return max(step, round(step / share) if share > 0.02 else self.total_steps)

    def _draw_rnnt(self) -> bool:
        if self.loss_module.omega <= 0:
            return False
        return bool(torch.rand((), generator=self.omega_generator) < self.loss_module.omega)

    def _no_sync(self, skip: bool) -> AbstractContextManager[Any]:
        """DDP accumulates in each process and exchanges once a step. ZeRO and FSDP exchange each time: what they shard
        would otherwise have to be kept whole in each process until the step's last batch."""
        if skip and isinstance(self.module, torch.nn.parallel.DistributedDataParallel):
            return self.accelerator.no_sync(self.module)
        return nullcontext()

    def _stand_in(self, batches: list[Batch]) -> Batch:
        """Return a batch for a rank that has none: its last one, or a second of silence."""
        if batches:
            return batches[-1]
        rate = self.model.preprocessor._sample_rate
        return Batch(
            ids=["silence"],
            texts=[""],
            languages=[""],
            audio_BS=torch.zeros(1, rate),
            audio_lengths_B=torch.tensor([rate]),
            tokens_BU=torch.zeros(1, 1, dtype=torch.int64),
            token_lengths_B=torch.tensor([1]),
            worker_shard=-1,
            position={},
            frames_B=encoder_lengths(self.model, torch.tensor([rate])),
            feasible_B=torch.tensor([True]),
        )

    def _to_device(self, batch: Batch) -> tuple[torch.Tensor, ...]:
        self._part("data")
        inputs = [batch.audio_BS, batch.audio_lengths_B]
        if batch.mel_BFM is not None and batch.mel_lengths_B is not None:
            inputs = [batch.mel_BFM, batch.mel_lengths_B]
        tensors = [*inputs, batch.tokens_BU, batch.token_lengths_B]
        if batch.slots:
            tensors.append(torch.tensor(batch.slots))
        moved = tuple(tensor.to(self.accelerator.device, non_blocking=True) for tensor in tensors)
        self._part("other")
        return moved

    def _clip_gradients(self) -> torch.Tensor | float | None:
        """Clip after accumulation and return the norm before it; None where the engine does not report it."""
        limit = self.config.training.max_grad_norm or math.inf
        own = getattr(unwrap_optimizer(self.optimizer), "clip_grad_norm_", None)
        if own is not None:  # the gradients that count lie elsewhere, or are gone already
            return own(limit)
        norm: Any = self.accelerator.clip_grad_norm_(self.module.parameters(), limit)
        if hasattr(norm, "full_tensor"):  # each rank has the norm of its own shards
            norm = norm.full_tensor()
        return norm

    def _empty_cache(self) -> None:
        if self.config.training.empty_cache_each_epoch and self.accelerator.device.type == "cuda":
            torch.cuda.empty_cache()

    def pause(self, seconds: float) -> None:
        """Leave time that is no part of the training out of its speed."""
        self.window.started += seconds
        for callback in self.callbacks:
            callback.on_pause(seconds)

    def _part(self, part: str) -> None:
        for callback in self.callbacks:
            callback.on_part(part)

    def _log_window(self) -> None:
        """Write one line of metrics.jsonl, and tell the callbacks."""
        row = self.window.row(self.progress, rates_by_part(self.optimizer, self._rates))
        waited = self.batcher.take_waited()
        if self.accelerator.is_main_process:
            self.metrics.append(row)
        for callback in self.callbacks:
            callback.on_log(row, waited)
        self.window.reset()

    def _after_step(self) -> None:
        t, p = self.config.training, self.progress
        if not self._optimizer_logged:
            self._optimizer_logged = True
            log.info("optimizer %s", optimizer_in_words(self.optimizer))
        if p.step % t.logging_steps == 0 or p.step == 1 or self._done():
            self._log_window()
        p.evaluation_due = bool(t.eval_steps and p.step % t.eval_steps == 0) or self._at_last_step()
        self._close_step()
        if t.stop_if_diverged and not self._done() and (p.step % t.logging_steps == 0 or p.last_evaluated == p.step):
            self._end_if_diverged()

    def _end_if_diverged(self) -> None:
        """End the run where a callback of the main process says so. All ranks enter."""
        said = broadcast(next(filter(None, (callback.ends_run() for callback in self.callbacks)), None))
        if said is not None:
            log.warning("the run ends at step %d of %d: %s", self.progress.step, self.expected_steps(), said)
            self.progress.diverged = said
            self._last_saved = -1  # a checkpoint of this step does not know of it yet

    def _at_last_step(self) -> bool:
        return self.max_epochs is None and self._done()

    def _close_step(self) -> None:
        """Evaluate and save what is due at the present step; leave where the run was asked to stop."""
        t, p, paused = self.config.training, self.progress, time.perf_counter()
        alone = self.accelerator.num_processes == 1  # nobody to agree with
        stop = self.batcher.stop_wanted or (alone and requested() is not None)
        self.writer.poll()
        if p.evaluation_due and not stop:
            stop = not self._evaluate_due()
        if stop or self.batcher.save_wanted or self._at_last_step() or (t.save_steps and p.step % t.save_steps == 0):
            self.save(wait=stop)
        if stop:
            raise Stopped(f"the checkpoint of step {p.step} is saved", on_all_ranks=True)
        self.window.started += time.perf_counter() - paused

    def _evaluate_due(self) -> bool:
        """Evaluate; return False where it was cut short because the run has to stop, with the progress as it was
        before."""
        t, p = self.config.training, self.progress
        before = p.snapshot()
        p.evaluation_due = False
        self.writer.wait()  # no worker is forked beside a writing thread
        try:
            last = self._at_last_step()
            self.evaluate(splits_due(p.step, last, t.eval_steps, t.guard_steps), last)
        except CutShort:
            p.restore(before)
            return False
        self._empty_cache()
        self.module.train()
        return True


def _on_host(batch: Batch) -> OnHost | None:
    if batch.frames_B is None:
        return None
    factor_B = torch.tensor(batch.distillation) if batch.distillation else None
    return OnHost(batch.frames_B, batch.tokens_BU, batch.token_lengths_B, factor_B)


def _of_feasible(losses_B: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return the losses of the utterances that have an alignment, without waiting for the device."""
    assert batch.feasible_B is not None
    if batch.feasible_B.all():
        return losses_B
    return losses_B.index_select(0, *upload(losses_B.device, np.flatnonzero(batch.feasible_B.numpy())))
