"""The steps of a run, in the order in which finetune/train.py tells them."""

import contextlib
import fcntl
import gc
import json
import logging
import math
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from finetune.callbacks import averaging, trackers
from finetune.config.compatibility import find_conflicts
from finetune.config.redaction import without_secrets, write_config
from finetune.config.tokenizer_setting import tokenizer_setting
from finetune.distributed import broadcast
from finetune.durable_files import write_json
from finetune.errors import UserError
from finetune.models.adapters import base_hash, check_base, load_into_lora, name_base, read_adapter
from finetune.models.loading import load_model
from finetune.models.loss_module import TransducerLossModule
from finetune.models.nemo import cast_parameters, prepare_for_training
from finetune.rank_monitor import client as ranks
from finetune.security.secrets import clean, known_secrets
from finetune.strategies.accelerator import make_accelerator
from finetune.strategies.activation_offload import ActivationOffload
from finetune.strategies.encoder import apply_encoder_options
from finetune.strategies.optimizers import build_optimizer, describe_optimizer, parameter_groups
from finetune.strategies.sharded import count_parameters, make_replica, shards_parameters
from finetune.strategies.strategy import Strategy, engine_with, number_of_processes, resolve_precision
from finetune.tools.report.page import keep_report
from finetune.training import best, checkpoints
from finetune.training import elastic_restart as restart
from finetune.training import vocabulary_change as vocabulary
from finetune.training.advice import warnings_for
from finetune.training.data import count_clips, make_stream, mean_seconds, train_limits
from finetune.training.data import open_sources as open_sources
from finetune.training.evaluation import check_decoding
from finetune.training.nonfinite import SKIPPED_FILE
from finetune.training.outputs import environment, peak_memory_gib, peak_rss_gib
from finetune.training.process import allow_tf32, seed_everything, set_allocator
from finetune.training.resume import resume, take_weights
from finetune.training.schedule import Schedule
from finetune.training.trainer import Trainer
from finetune.training.verdict import forget_base, say_result, significance

log = logging.getLogger(__name__)


def build_accelerator(config: Any, strategy: Strategy) -> Any:
    """Checks what excludes itself, then makes Accelerate's Accelerator and seeds everything."""
    t = config.training
    precision = resolve_precision(t.bf16, t.fp16, strategy)
    t.bf16, t.fp16 = precision == "bf16", precision == "fp16"
    engine = engine_with(strategy.engine, number_of_processes())
    conflicts = find_conflicts(config, engine, torch.cuda.is_available())
    if conflicts:
        raise UserError("\n".join(conflicts))
    set_allocator(t.cuda_alloc_conf)
    if t.num_threads:
        torch.set_num_threads(t.num_threads)
    allow_tf32(t.tf32)
    chosen = t.report_to if not isinstance(t.report_to, str) else [t.report_to]
    chosen = [name for name in chosen if name != "none"]
    restart.meet_afresh(t.ddp_timeout)
    accelerator = make_accelerator(
        strategy,
        precision=precision,
        batch_size=t.per_device_train_batch_size,
        accumulation=t.gradient_accumulation_steps,
        max_grad_norm=t.max_grad_norm,
        log_with=chosen,
        project_dir=Path(t.output_dir),
        timeout=t.ddp_timeout,
    )
    ranks.watch(accelerator, t.rank_timeout)
    missing = sorted(set(chosen) - {getattr(t, "value", str(t)) for t in accelerator.log_with})
    if missing:
        raise UserError(
            f"training.report_to: {', '.join(missing)} is not installed. Install it (pip install -c constraints.txt -e '.[tracking]') "
            "or set training.report_to: tensorboard."
        )
    # The same on all ranks while the model is made; each rank gets its own for dropout afterwards.
    seed_everything(t.seed)
    return accelerator


@contextlib.contextmanager
def output_directory(accelerator: Any, config: Any) -> Iterator[Path]:
    """Makes and locks training.output_dir. A run that is to be overwritten stays until `begin_run`.

    Raises:
        UserError: another process uses it, or it holds a run that is not to be resumed.
    """
    t = config.training
    path = Path(t.output_dir)
    lock = None
    problem = None
    agents = restart.agents(accelerator)
    again = False
    if accelerator.is_main_process:
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = (path / ".lock").open("w")
            # A record lock: it ends with this process, and processes forked from it (loader workers) do not hold it on.
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            again = restart.began_here(path, agents)
            holds_run = (path / "config.yaml").is_file() or bool(checkpoints.checkpoints_of(path))
            if holds_run and not again and not t.resume_from_checkpoint and not t.overwrite_output_dir:
                problem = (
                    f"training.output_dir: {path} holds another run. Continue it with training.resume_from_checkpoint=true, "
                    "delete it with training.overwrite_output_dir=true, or name another directory."
                )
        except BlockingIOError:
            problem = (
                f"training.output_dir: {path} is in use by another process. Wait for it or name another directory."
            )
        except OSError as error:
            problem = f"training.output_dir: {path} cannot be written: {error}."
    for model in (Path(name) for name in (config.model.name, config.model.adapter) if name):
        if t.overwrite_output_dir and model.exists() and model.resolve().is_relative_to(path.resolve()):
            problem = problem or (
                f"training.overwrite_output_dir: {model} lies in {path}, which would be overwritten. Name another "
                "training.output_dir, or copy the model elsewhere."
            )
    if accelerator.num_processes > 1:
        from accelerate.utils import broadcast_object_list

        problem, again = broadcast_object_list([problem, again])
    if problem:
        raise UserError(problem)
    if again:
        restart.go_on(t)
    if accelerator.is_main_process:
        restart.keep(path, agents)
    try:
        yield path
    finally:
        if lock is not None:
            lock.close()


def begin_run(accelerator: Any, trainer: Trainer, config: Any, checkpoint: Path | None) -> bool:
    """Continues from a checkpoint, or removes the run that is overwritten and begins anew; whether it continues."""
    if checkpoint is not None:
        resume(trainer, checkpoint)
        return True
    if accelerator.is_main_process:
        if config.training.overwrite_output_dir:
            _remove_run(trainer.output_dir)
        forget_base(trainer.output_dir)
        averaging.forget_kept(trainer.output_dir)
        for file in (trainer.metrics, trainer.evaluations, trainer.quarantine, trainer.clips, trainer.step_guard.file):
            if file.path.exists():
                file.cut(0)
        vocabulary.settle([trainer.model, trainer.replica], trainer.output_dir)
    accelerator.wait_for_everyone()
    return False


def find_checkpoint(config: Any) -> Path | None:
    """The checkpoint that the run continues from; None starts at step 0."""
    t = config.training
    found, problem = None, None
    if int(os.environ.get("RANK", "0")) == 0:  # the others need not read gigabytes as well
        try:
            found = checkpoints.find_checkpoint(t.resume_from_checkpoint, Path(t.output_dir))
        except UserError as error:
            problem = (str(error), error.exit_code)
    found, problem = broadcast((found, problem))
    if problem:
        raise UserError(*problem)
    return found


def _remove_run(path: Path) -> None:
    """Removes what a run leaves, and nothing else that may lie there."""
    for name in ("checkpoints", "adapter", "logs", "profile", "out_of_memory", vocabulary.FOLDER):
        shutil.rmtree(path / name, ignore_errors=True)
    for name in (
        "config.yaml",
        "environment.json",
        "metrics.jsonl",
        "evaluations.jsonl",
        "quarantine.jsonl",
        "clips.jsonl",
        SKIPPED_FILE,
        "model.nemo",
        "summary.json",
        "report.html",
        "batch_limits.json",
        "plan.json",
        *(f"errors-{split}.json" for split in ("validation", "test", "guard")),
    ):
        (path / name).unlink(missing_ok=True)


def build_model(accelerator: Any, config: Any, checkpoint: Path | None = None) -> Any:
    """The NeMo model on the training device, prepared as the run file's `model:` says, with the weights of a checkpoint."""
    started = time.perf_counter()
    m = config.model
    with accelerator.local_main_process_first():  # the first one downloads, the others find it
        model = load_model(m.name, tokenizer_setting(config).dir)
    changed = vocabulary.set_vocabulary(accelerator, model, config, checkpoint)
    prepare_for_training(model, spec_augment=m.spec_augment, dropout=m.dropout, freeze_batchnorm=m.freeze_batchnorm)
    if m.sync_batchnorm and accelerator.num_processes > 1:
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    adapter = read_adapter(Path(m.adapter)) if m.adapter else None
    if adapter is not None:
        check_base(adapter, model, m.name)
    base = base_hash(model, m.lora_train_decoder) if m.lora_rank else None
    apply_encoder_options(model, m)
    if adapter is not None:
        load_into_lora(model, adapter)
        log.info("training goes on with the adapter %s", adapter.path)
    cast_parameters(model, getattr(torch, m.dtype))
    started_from = base_hash(model, m.lora_train_decoder) if m.lora_rank and checkpoint is not None else None
    if checkpoint is not None:
        take_weights(model, checkpoint)
    if m.lora_rank:
        name_base(model, m, base, started_from, changed)
    model.to(accelerator.device)
    log.info(
        "model %s: %.1f M parameters, loaded in %.0f s",
        m.name,
        count_parameters(model) / 1e6,
        time.perf_counter() - started,
    )
    return model


def plan_steps(accelerator: Any, config: Any, sources: dict[str, list[Any]]) -> int:
    """Optimizer steps of the run; from the number of clips where the epochs decide (filters may make it fewer), and from the mean
    length of some of them where batches are made by duration."""
    t = config.training
    if t.max_steps > 0:
        return t.max_steps
    clips = count_clips(sources["train"], config.data.max_samples, config.data.skip_samples)
    if clips is None:
        raise UserError(
            "training.num_train_epochs: the number of clips of data.train is not known beforehand (a stream). Set "
            "training.max_steps."
        )
    d, batch = config.data, t.per_device_train_batch_size
    if d.batch_duration or d.batch_bounds:
        mean = broadcast(mean_seconds(sources["train"], config))
        batch = d.batch_duration / mean if d.batch_duration else train_limits(config).clips_of_length(mean)
    per_step = batch * t.gradient_accumulation_steps * accelerator.num_processes
    return max(1, math.ceil(clips / per_step * t.num_train_epochs))


def epoch_limit(config: Any) -> int | None:
    """Whole passes that end the run; None where max_steps does, or a part of a pass that only steps can measure."""
    t = config.training
    return int(t.num_train_epochs) if t.max_steps <= 0 and float(t.num_train_epochs).is_integer() else None


def build_trainer(accelerator: Any, model: Any, sources: dict[str, list[Any]], config: Any, total: int) -> Trainer:
    """Optimizer, schedule and stream around the model."""
    m, t = config.model, config.training
    replica = make_replica(model) if shards_parameters(accelerator) else None
    module = TransducerLossModule(
        model,
        sigma=m.sigma,
        omega=m.omega,
        fastemit_lambda=m.fastemit_lambda,
        occupancy_threshold=m.occupancy_threshold,
        joint_memory_budget=m.joint_memory_budget,
        encoder_context=ActivationOffload(model.encoder) if m.activation_offload else contextlib.nullcontext,
        length_bucket=m.compile_bucket if m.compile else 0.0,
    )
    rates = {
        part: rate
        for part, rate in (
            ("encoder", t.encoder_learning_rate),
            ("decoder", t.decoder_learning_rate),
            ("joint", t.joint_learning_rate),
        )
        if rate is not None
    }
    groups = parameter_groups(model, rates, t.learning_rate, t.weight_decay)
    peaks = [{"lr": group["lr"]} for group in groups]  # some optimizers turn them into tensors of 32 bits
    optimizer = build_optimizer(t.optimizer, groups, OmegaConf.to_container(t.optimizer_args, resolve=True))
    warmup = t.warmup_steps or int(t.warmup_ratio * total)
    schedule = Schedule(t.lr_scheduler_type, peaks, warmup, total)
    prepared, prepared_optimizer = accelerator.prepare(module, optimizer)
    stream = make_stream(accelerator, model, config, sources["train"], training=True)
    seed_everything(t.seed + 1000 * accelerator.process_index)
    trainer = Trainer(
        accelerator,
        prepared,
        prepared_optimizer,
        schedule,
        stream,
        sources,
        config,
        total,
        epoch_limit(config),
        replica,
    )
    for text in warnings_for(
        config,
        pretrained=not str(m.name).endswith((".yaml", ".yml")),
        parameters=count_parameters(model),
        clips_per_step=t.per_device_train_batch_size * t.gradient_accumulation_steps * accelerator.num_processes,
        total_steps=total,
    ):
        log.warning("advice: %s", text)
    return trainer


def describe(accelerator: Any, trainer: Trainer, config: Any, strategy: Strategy) -> None:
    """Writes config.yaml and environment.json, starts the trackers, and logs the run in a few lines."""
    t = config.training
    if accelerator.is_main_process:
        write_config(trainer.output_dir / "config.yaml", config)
        started = {
            "strategy": strategy.names,
            "processes": accelerator.num_processes,
            "total_steps": trainer.total_steps,
        }
        found = {**environment(t.seed), **started}
        write_json(trainer.output_dir / "environment.json", clean(found, known_secrets(found), personal=False))
        trainer.metrics.path.touch()
        trainer.evaluations.path.touch()
        trainer.quarantine.path.touch()
    if any(name != "none" for name in ([t.report_to] if isinstance(t.report_to, str) else t.report_to)):
        accelerator.init_trackers("finetune", config=flat_settings(config))
    if strategy.engine == "ddp" and accelerator.num_processes == 1:
        log.warning("%s, but one process was started: it trains alone", strategy.engine_from)
    log.info(
        "strategy %s, engine %s, %d process(es), precision %s, %d steps of %d x %d x %s",
        "+".join(strategy.names) or "none",
        strategy.engine,
        accelerator.num_processes,
        "bf16" if t.bf16 else "fp16" if t.fp16 else "fp32",
        trainer.total_steps,
        accelerator.num_processes,
        t.gradient_accumulation_steps,
        "batches by length" if not train_limits(config).clips else f"{t.per_device_train_batch_size} clips",
    )


def flat_settings(config: Any) -> dict[str, Any]:
    """Dotted keys and plain values, the form that every tracker takes; without passwords and signatures, since trackers may be hosted."""
    flat = {}
    for section, values in without_secrets(config)[0].items():
        for key, value in values.items():
            flat[f"{section}.{key}"] = value if isinstance(value, bool | int | float | str) else str(value)
    return flat


def evaluate_base(trainer: Trainer, config: Any) -> None:
    """Measures the base model as step 0."""
    with trainer.whole_model() as model:
        check_decoding(trainer.accelerator, model, config, trainer.sources)
    if config.training.eval_on_start:
        boards = trainer.evaluate(("validation", "test", "guard"))
        judged = boards.get("test") or boards.get("validation")
        if judged is not None:
            trainer.progress.wer_before = {**judged.result(), "pairs": judged.pairs}
        if "guard" in boards:
            trainer.progress.guard_before = boards["guard"].total.rates()["wer"]


def finish(accelerator: Any, trainer: Trainer, config: Any, strategy: Strategy) -> None:
    """Settles the best model, measures it, and writes summary.json."""
    p = trainer.progress
    if p.step > 0 and p.last_evaluated != p.step and "validation" in trainer.sources:
        trainer.evaluate(("validation",))  # the end of the last epoch is rarely a step with an evaluation
        trainer.last_saved = -1  # a checkpoint of this step does not know of it yet
    trainer.save(settle=True)
    judged = "test" if "test" in trainer.sources else "validation"
    if p.best_step is None:  # nothing to choose by
        trainer.keep_model()
    average = best.try_average(trainer) if config.training.average_checkpoints else None
    if p.best_step == 0:
        log.info("no evaluation was better than the base model's WER %.3f: model.nemo is the base model", p.best_wer)
    boards = trainer.evaluate_best((judged, "guard"))
    after = boards.get(judged)
    if accelerator.is_main_process:
        trainer.count_wall_seconds()
        summary = summarise(accelerator, trainer, config, strategy, after)
        summary.update(significance(trainer.output_dir, boards, judged))
        summary["average_checkpoints"] = average
        if "guard" in boards:
            summary["guard_wer_before"] = p.guard_before
            summary["guard_wer_after"] = boards["guard"].total.rates()["wer"]
        write_json(trainer.output_dir / "summary.json", summary)
        say_result(summary, p.wer_before, after, trainer.output_dir)
        keep_report(trainer.output_dir, say=True)
    accelerator.wait_for_everyone()


def end_stage(accelerator: Any) -> None:
    """Lets go of what a run holds beside its variables, so that another may begin in this process and its process group."""
    from accelerate.state import AcceleratorState, GradientState

    trackers.finish(accelerator)
    accelerator.free_memory()
    # Precision and plugins of the next one may be others; the process group stays.
    AcceleratorState._reset_state()
    GradientState._reset_state()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def summarise(accelerator: Any, trainer: Trainer, config: Any, strategy: Strategy, after: Any) -> dict[str, Any]:
    """The run as one object."""
    p = trainer.progress
    before = p.wer_before or {}
    result = after.result() if after is not None else {}
    languages = sorted(set(before.get("by_language", {})) | set(result.get("by_language", {})))
    return {
        "strategy": strategy.names,
        "engine": strategy.engine,
        **describe_optimizer(trainer.optimizer),
        "world_size": accelerator.num_processes,
        "mixed_precision": "bf16" if config.training.bf16 else "fp16" if config.training.fp16 else "no",
        "steps": p.step,
        "total_steps": trainer.total_steps,
        "samples": p.samples,
        "epochs": p.epoch,
        "audio_hours": p.audio_seconds / 3600,
        "judged_on": "test" if "test" in trainer.sources else "validation",
        "wer_before": before.get("wer"),
        "wer_after": result.get("wer"),
        "cer_before": before.get("cer"),
        "cer_after": result.get("cer"),
        "wer_by_language": {
            name: {
                "before": before.get("by_language", {}).get(name, {}).get("wer"),
                "after": result.get("by_language", {}).get(name, {}).get("wer"),
            }
            for name in languages
        },
        "best_step": p.best_step,
        "best_validation_wer": p.best_wer,
        "best_weights": p.best_weights,
        **best.sizes(trainer),
        "peak_memory_gib": peak_memory_gib(),
        "peak_memory_is": "CUDA allocator" if torch.cuda.is_available() else "resident memory of the process",
        "peak_rss_gib": peak_rss_gib(),
        "trainable_parameters": count_parameters(trainer.model, trainable=True),
        "parameters": count_parameters(trainer.model),
        "audio_seconds_per_second": p.audio_seconds / p.train_seconds if p.train_seconds else None,
        "train_seconds": p.train_seconds,
        "wall_seconds": p.wall_seconds,
        "padding_fraction": 1 - p.audio_seconds / p.padded_seconds if p.padded_seconds else None,
        "quarantined": p.quarantine_lines,
        "filtered": p.filtered,
        "infeasible": p.infeasible,
        "skipped_steps": p.skipped_steps,
        "spikes": p.spikes,
        "scale_skips": p.scale_skips,
        "out_of_memory": p.out_of_memory,
        "batch_bounds": None if trainer.guard is None else trainer.guard.bounds,
        "drift_warnings": p.drift_warnings,
        "saving_seconds": trainer.saver.blocked_seconds,
        "failed_checkpoints": trainer.saver.failed,
        "resumed_from": trainer.resumed_from,
        "final_loss": trainer.last_loss(),
        "effective_settings": json.loads(json.dumps(without_secrets(config)[0])),
    }
