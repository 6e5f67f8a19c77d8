"""The callbacks of a run, put together from its configuration."""

from collections.abc import Callable
from pathlib import Path

from finetune.callbacks.averaging import CheckpointAverage, Ema
from finetune.callbacks.base_pull import BasePull
from finetune.callbacks.distillation import DistillationBase
from finetune.callbacks.divergence import Divergence
from finetune.callbacks.drift import DriftMonitor
from finetune.callbacks.eta import Place
from finetune.callbacks.out_of_memory import MemoryRecovery
from finetune.callbacks.panel import ProgressPanel
from finetune.callbacks.profiler import Profiler
from finetune.callbacks.report import ReportWriter
from finetune.callbacks.trackers import TrackerLogger
from finetune.callbacks.way_from_base import WayFromBase
from finetune.training.schedule import warmup_steps
from finetune.training.trainer import Trainer


def add_step_callbacks(trainer: Trainer) -> MemoryRecovery | None:
    """Register what changes the steps of a run or their memory: frozen base, pull towards the base, moving average,
    recovery from out of memory.

    Returns:
        The recovery, where `training.auto_batch` asks for it.
    """
    config, t = trainer.config, trainer.config.training
    if trainer.loss_module.frozen_base is not None:
        trainer.add_callback(DistillationBase(trainer.loss_module.frozen_base))
    if t.l2_sp:  # before the average, which takes in what a step has come to
        pull = BasePull(trainer.model, trainer.optimizer, t.l2_sp, config.model.add_ctc)
        trainer.add_callback(pull)
    if t.ema_decay:
        trainer.add_callback(Ema(trainer.model, t.ema_decay, t.ema_device, trainer.accelerator.num_processes))
    if not (t.auto_batch and config.data.batch_bounds):
        return None
    what, resumed = (trainer.module, trainer.optimizer, trainer.model), bool(t.resume_from_checkpoint)
    recovery = MemoryRecovery(trainer.accelerator, config, trainer.progress, *what, resumed)
    trainer.add_callback(recovery)
    return recovery


def add_run_callbacks(
    trainer: Trainer, write_report: Callable[[Path, bool], None], place: Place, profile_steps: int | None
) -> ProgressPanel:
    """Register what watches a run and shows it.

    Args:
        write_report: as of `ReportWriter`.
        profile_steps: steps to record with torch.profiler; None: none.

    Returns:
        The panel, to be shown.
    """
    accelerator, config, progress = trainer.accelerator, trainer.config, trainer.progress
    t = config.training
    if config.data.guard_limit is not None:
        trainer.add_callback(WayFromBase(accelerator, config, progress, trainer.model))
    if t.average_checkpoints:  # behind the way from the base: a mean stays in the model
        trainer.add_callback(CheckpointAverage(accelerator, config, progress, trainer.model))
    if profile_steps is not None:
        what = (trainer.model, trainer.loss_module, trainer.total_steps, profile_steps, trainer.pause)
        trainer.add_callback(Profiler(accelerator, config, progress, *what))
    trainer.add_callback(TrackerLogger(accelerator, trainer.model.preprocessor._sample_rate, t.sample_predictions))
    divergence = Divergence(config, progress, warmup_steps(t, trainer.total_steps))
    watched = (accelerator, trainer.loss_module, progress)
    trainer.add_callback(DriftMonitor(*watched, workers=t.dataloader_num_workers, divergence=divergence))
    judged = "test" if "test" in trainer.sources else "validation"
    panel = ProgressPanel(accelerator, config, progress, judged, trainer.expected_steps, place)
    trainer.add_callback(panel)
    trainer.add_callback(ReportWriter(accelerator.is_main_process, trainer.output_dir, write_report))
    return panel
