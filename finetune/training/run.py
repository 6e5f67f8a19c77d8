"""What a run is made of, in the order in which finetune/train.py builds it."""

import contextlib
import copy
import fcntl
import gc
import logging
import math
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator, DistributedType

from finetune.config.allocator import allocator_of_environment, allocator_settings
from finetune.config.compatibility import find_conflicts, limit_pulls, peak_rate
from finetune.config.redaction import without_secrets, write_config
from finetune.config.schema import RunConfig
from finetune.config.tokenizer_setting import tokenizer_setting
from finetune.data.guard_halves import few_words, halve, measure_halves, with_clips
from finetune.data.overlap import find_overlap, warnings_about
from finetune.data.run_file import count_clips, mean_seconds, new_sources, train_limits
from finetune.data.run_file import open_sources as open_sources
from finetune.data.sources import OpenSource
from finetune.data.stream import UtteranceStream
from finetune.data.usable import Usable, judge, look_at_usable
from finetune.distributed import broadcast, on_main
from finetune.durable_files import write_json
from finetune.errors import UserError
from finetune.models.adapters import base_hash, check_base, load_into_lora, name_base, read_adapter
from finetune.models.add_ctc import add_ctc_head
from finetune.models.dropout import use_fast_dropout
from finetune.models.frozen_base import FrozenBase
from finetune.models.host_memory import keep_freed_memory
from finetune.models.loading import load_model
from finetune.models.look_ahead import describe_contexts
from finetune.models.loss_module import LossModule
from finetune.models.nemo import cast_parameters, ctc_loss_weight, prepare_for_training
from finetune.models.protocols import AsrModel
from finetune.rank_monitor import client as rank_monitor
from finetune.security.secrets import clean, known_secrets
from finetune.strategies.accelerator import make_accelerator
from finetune.strategies.activation_offload import ActivationOffload
from finetune.strategies.encoder import apply_encoder_options
from finetune.strategies.optimizers import ROUNDS_SAFELY, build_optimizer, parameter_groups, rates_in_words
from finetune.strategies.sharded import count_parameters, make_replica, shards_parameters
from finetune.strategies.strategy import Strategy, engine_with, number_of_processes, resolve_precision
from finetune.training import checkpoints, elastic_restart
from finetune.training.data import make_stream, prompts_of_rows
from finetune.training.outputs import environment
from finetune.training.resume import has_another_guard, take_weights
from finetune.training.schedule import Schedule, warmup_steps
from finetune.training.trained_state import START_FILE
from finetune.training.trainer import Trainer
from finetune.training.vocabulary_change import set_vocabulary

log = logging.getLogger(__name__)

OVERLAP_SECONDS = 10.0  # at the start of a run; a dry run takes longer, and a check reads the audio as well


def build_accelerator(config: RunConfig, strategy: Strategy) -> Accelerator:
    """Check what excludes each other, then make Accelerate's Accelerator and seed everything."""
    t = config.training
    precision = resolve_precision(t.bf16, t.fp16, strategy)
    t.bf16, t.fp16 = precision == "bf16", precision == "fp16"
    engine = engine_with(strategy.engine, number_of_processes())
    conflicts = find_conflicts(config, engine, torch.cuda.is_available())
    if conflicts:
        raise UserError("\n".join(conflicts))
    t.cuda_alloc_conf = allocator_settings(t, torch.cuda.is_available())
    set_allocator(t.cuda_alloc_conf)
    if t.num_threads:
        torch.set_num_threads(t.num_threads)
    allow_tf32(t.tf32)
    chosen = trackers_of(config)
    elastic_restart.rendezvous(t.ddp_timeout)
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
    if accelerator.device.type == "cpu":
        keep_freed_memory()
    rank_monitor.watch(t.rank_timeout)
    missing = sorted(set(chosen) - {getattr(t, "value", str(t)) for t in accelerator.log_with})
    if missing:
        raise UserError(
            f"training.report_to: {', '.join(missing)} is not installed. Install it (pip install -c constraints.txt "
            "-e '.[tracking]') or set training.report_to: tensorboard."
        )
    # The same on all ranks while the model is made; each rank gets its own for dropout afterwards.
    seed_everything(t.seed)
    return accelerator


@contextlib.contextmanager
def output_directory(accelerator: Accelerator, config: RunConfig) -> Iterator[Path]:
    """Make and lock training.output_dir. A run that is to be overwritten stays until `Trainer.begin`.

    Raises:
        UserError: another process uses it, or it holds a run that is not to be resumed.
    """
    t, path, agents = config.training, Path(config.training.output_dir), elastic_restart.agents()
    with contextlib.ExitStack() as lock:

        def take() -> bool:
            """Lock the directory; return whether this launch has begun the run in it."""
            try:
                path.mkdir(parents=True, exist_ok=True)
                # A record lock: it ends with this process, and processes forked from it (loader workers) have none.
                fcntl.lockf(lock.enter_context((path / ".lock").open("w")), fcntl.LOCK_EX | fcntl.LOCK_NB)
                again = elastic_restart.is_same_launch(path, agents)
                problem = None if again else _why_not_into(path, config)
                if problem is None:
                    elastic_restart.record_launch(path, agents)
                    return again
            except BlockingIOError:
                problem = f"{path} is in use by another process. Wait for it or name another directory."
            except OSError as error:
                problem = f"{path} cannot be written: {error}."
            raise UserError(f"training.output_dir: {problem}")

        if on_main(take):
            elastic_restart.continue_run(t)
        yield path


def _why_not_into(path: Path, config: RunConfig) -> str | None:
    """Return why a run may not begin in a directory, or None."""
    t = config.training
    holds_run = (path / "config.yaml").is_file() or bool(checkpoints.checkpoints_of(path))
    if holds_run and not t.resume_from_checkpoint and not t.overwrite_output_dir:
        return (
            f"{path} holds another run. Continue it with training.resume_from_checkpoint=true, delete it with "
            "training.overwrite_output_dir=true, or name another directory."
        )
    for model in (Path(name) for name in (config.model.name, config.model.adapter) if name):
        if t.overwrite_output_dir and model.exists() and model.resolve().is_relative_to(path.resolve()):
            return (
                f"{model} lies in {path}, which would be overwritten. Name another training.output_dir, or copy the "
                "model elsewhere."
            )
    return None


def check_overlap(config: RunConfig, sources: dict[str, list[OpenSource]], checkpoint: Path | None = None) -> None:
    """Warn of texts of the evaluation sets that are also in data.train or data.rehearsal. A run that continues looks
    where its data.guard is another one.

    Raises:
        UserError: clips of theirs are there, without data.allow_overlap.
    """

    def look() -> None:
        if checkpoint is not None and not has_another_guard(config, checkpoint):
            return
        found = find_overlap(sources, config, OVERLAP_SECONDS)
        if not found.whole:
            rest = "--dry-run takes 5 minutes for it, parakeet-finetune check --config RUN.yaml compares all"
            log.info("%s in %.0f s; %s", found.scope(), OVERLAP_SECONDS, rest)
        for text in warnings_about(found, sources, config):
            log.warning("%s", text)

    on_main(look)


def halve_guard(config: RunConfig, sources: dict[str, list[OpenSource]]) -> dict[str, list[OpenSource]]:
    """Return the sources with data.guard in its halves, where data.guard_limit is set.

    Raises:
        UserError: a half is empty.
    """
    if config.data.guard_limit is None:
        return sources
    guard = sources["guard"]
    found = on_main(lambda: measure_halves(guard, config.data.max_eval_samples, OVERLAP_SECONDS))
    log.info("%s", found)
    for text in few_words(found):
        log.warning("%s", text)
    return {**sources, **with_clips(halve(guard), found)}


def find_checkpoint(config: RunConfig) -> Path | None:
    """Return the checkpoint that the run continues from; None starts at step 0."""
    t = config.training
    # The other ranks need not read gigabytes as well.
    return on_main(lambda: checkpoints.find_checkpoint(t.resume_from_checkpoint, Path(t.output_dir)))


def build_model(
    accelerator: Accelerator,
    config: RunConfig,
    sources: dict[str, list[OpenSource]],
    checkpoint: Path | None = None,
) -> AsrModel:
    """Return the NeMo model on the training device, prepared as the run file's `model:` says, with the weights of a
    checkpoint; where it distils, with `frozen_base` beside it."""
    started = time.perf_counter()
    m = config.model
    with accelerator.local_main_process_first():  # the first one downloads, the others find it
        model = load_model(m.name, tokenizer_setting(config).dir)
    changed = grown = set_vocabulary(accelerator, model, config, new_sources(sources.get("train", [])), checkpoint)
    if m.add_ctc:
        changed = add_ctc_head(model, m.name) or changed
    prepare_for_training(
        model,
        spec_augment=m.spec_augment,
        dropout=m.dropout,
        freeze_batchnorm=m.freeze_batchnorm,
        ctc_weight=m.ctc_loss_weight,
    )
    if m.sync_batchnorm and accelerator.num_processes > 1:
        torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)  # in place
    adapter = read_adapter(Path(m.adapter)) if m.adapter else None
    if adapter is not None:
        check_base(adapter, model, m.name)
    base = base_hash(model, m.lora_train_decoder) if m.lora_rank else ""
    apply_encoder_options(model, m)
    if adapter is not None:
        load_into_lora(model, adapter)
        log.info("training goes on with the adapter %s", adapter.path)
    cast_parameters(model, getattr(torch, m.dtype))
    if m.distillation:
        model.frozen_base = freeze_base(model, m.name, grown)
    started_from = base_hash(model, m.lora_train_decoder) if m.lora_rank and checkpoint is not None else None
    if checkpoint is not None:
        take_weights(model, checkpoint)
    if m.lora_rank:
        name_base(model, m, base, started_from, changed)
    model.to(accelerator.device)
    if m.distillation:
        model.frozen_base.model.to(accelerator.device)
    if accelerator.device.type == "cpu" and not m.compile:
        use_fast_dropout(model)
    millions, seconds = count_parameters(model) / 1e6, time.perf_counter() - started
    log.info("model %s: %.1f M parameters, loaded in %.0f s", m.name, millions, seconds)
    return model


def freeze_base(model: AsrModel, name: str, grown: bool) -> FrozenBase:
    """Return a frozen copy of the model as the run begins, on the host.

    Args:
        model: prepared, without a checkpoint's weights.
        name: `model.name`.
        grown: whether the run changes its vocabulary.

    Raises:
        UserError: it has no transducer that is trained.
    """
    if ctc_loss_weight(model) == 1:
        raise UserError(
            f"model.distillation: {name} is trained by CTC alone, and the distillation is of a transducer's "
            "posteriors. Set model.distillation: 0."
        )
    base = make_replica(model)
    return FrozenBase(base.eval(), name, grown)


def plan_steps(accelerator: Accelerator, config: RunConfig, sources: dict[str, list[OpenSource]]) -> int:
    """Return the optimizer steps of the run: from the number of clips where the epochs decide (filters may make it
    fewer), and from the mean length of some of them where batches are made by duration."""
    t, d = config.training, config.data
    if t.max_steps > 0:
        return t.max_steps
    clips = count_clips(sources["train"], d.max_samples, d.skip_samples)
    if clips is None:
        raise UserError(
            "training.num_train_epochs: the number of clips of data.train is not known beforehand (a stream). Set "
            "training.max_steps."
        )
    batch = t.per_device_train_batch_size
    if d.batch_duration or d.batch_bounds:
        mean = broadcast(mean_seconds(sources["train"], d))
        batch = d.batch_duration / mean if d.batch_duration else train_limits(config).clips_of_length(mean)
    per_step = batch * t.gradient_accumulation_steps * accelerator.num_processes
    return max(1, math.ceil(clips / per_step * t.num_train_epochs))


def turn_on_pull(accelerator: Accelerator, config: RunConfig, total_steps: int, checkpoint: Path | None) -> None:
    """Set training.l2_sp where data.guard_limit alone is there to keep what the model knows, and say so.

    A weight that nothing else moves then comes back by a factor of about e over the run, whose mean rate is half of
    the peak in most schedules. A resumed run that began without it goes on without it.
    """
    d, t = config.data, config.training
    if checkpoint is not None and not (checkpoint / START_FILE).is_file():
        return
    deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
    if limit_pulls(config, "deepspeed" if deepspeed else "none"):
        t.l2_sp = float(f"{min(2 / total_steps, 0.5) / peak_rate(t):.3g}")
        log.info(
            f"data.guard_limit {d.guard_limit} alone: training.l2_sp={t.l2_sp:g} is turned on (0: off), and points on "
            "the way from the base model are looked at in the end. data.rehearsal keeps more, where there are clips "
            "of the old domain"
        )
    elif d.guard_limit is not None and limit_pulls(config):
        log.info(
            f"data.guard_limit {d.guard_limit} alone: points on the way from the base model are looked at in the end; "
            "training.l2_sp, which would keep more, does not go with DeepSpeed"
        )


def build_trainer(
    accelerator: Accelerator,
    model: AsrModel,
    sources: dict[str, list[OpenSource]],
    config: RunConfig,
    total_steps: int,
    checkpoint: Path | None = None,
) -> Trainer:
    """Put loss, optimizer, schedule and stream around the model.

    Args:
        checkpoint: from which the run continues.
    """
    m, t = config.model, config.training
    turn_on_pull(accelerator, config, total_steps, checkpoint)
    replica = make_replica(model) if shards_parameters(accelerator) else None
    module = LossModule(
        model,
        sigma=m.sigma,
        omega=m.omega,
        fastemit_lambda=m.fastemit_lambda,
        occupancy_threshold=m.occupancy_threshold,
        joint_memory_budget=m.joint_memory_budget,
        encoder_context=ActivationOffload(model.encoder) if m.activation_offload else contextlib.nullcontext,
        length_bucket=m.compile_bucket if m.compile else 0.0,
        frozen_base=getattr(model, "frozen_base", None),
        distillation=m.distillation,
    )
    rates = {"encoder": t.encoder_learning_rate, "decoder": t.decoder_learning_rate, "joint": t.joint_learning_rate}
    own_rates = {part: rate for part, rate in rates.items() if rate is not None}
    groups = parameter_groups(model, own_rates, t.learning_rate, t.weight_decay, t.layer_decay)
    if t.layer_decay < 1:
        log.info("%s", rates_in_words(groups))
    peaks = [{"lr": group["lr"]} for group in groups]  # some optimizers turn them into tensors of 32 bits
    optimizer = build_optimizer(t.optimizer, groups, dict(t.optimizer_args))
    schedule = Schedule(t.lr_scheduler_type, peaks, warmup_steps(t, total_steps), total_steps)
    prepared, prepared_optimizer = accelerator.prepare(module, optimizer)
    stream = make_stream(accelerator, model, config, sources["train"], training=True)
    seed_everything(t.seed + 1000 * accelerator.process_index)
    # A part of a pass only steps can measure.
    epochs = int(t.num_train_epochs) if t.max_steps <= 0 and float(t.num_train_epochs).is_integer() else None
    trainer = Trainer(
        accelerator, prepared, prepared_optimizer, schedule, stream, sources, config, total_steps, epochs, replica
    )
    clips_per_step = t.per_device_train_batch_size * t.gradient_accumulation_steps * accelerator.num_processes
    for text in warnings_for(config, count_parameters(model), clips_per_step, total_steps):
        log.warning("%s", text)
    return trainer


def check_languages(trainer: Trainer) -> None:
    """Log which prompts the languages of data.train mean to a prompt model; nothing for other models.

    Raises:
        UserError: too many rows have none.
    """
    if not trainer.stream.options.prompts:
        return
    line, _, refused = on_main(lambda: prompts_of_rows(trainer.stream, trainer.config.data.max_bad_fraction))
    log.info("%s", line)
    for reason, rows in refused.items():
        log.warning("%d rows go into quarantine: %s", rows, reason)


def how_much_is_left(
    stream: UtteranceStream, config: RunConfig, ranks: int
) -> tuple[str, Usable, str | None, list[str]]:
    """Find on rank 0 what training leaves out of data.train, and of data.rehearsal, and how often it passes over the
    rest.

    Returns:
        Text to log; the figures of data.train; why a run should not begin with so little, or None; and warnings.

    Raises:
        UserError: no clip is left.
    """
    if not config.data.rehearsal:
        return _left_of("data.train", 1.0, stream, config, ranks)
    new, old, share = copy.copy(stream), copy.copy(stream), config.data.rehearsal_share
    new.sources, old.sources = (stream.sources.part(rehearsal) for rehearsal in (False, True))
    line, found, problem, warnings = _left_of("data.train", 1 - share, new, config, ranks)
    beside = share / (1 - share) * found.epoch_clips
    line_2, _, problem_2, warnings_2 = _left_of("data.rehearsal", share, old, config, ranks, beside)
    problem = "; ".join(filter(None, (problem, problem_2))) or None
    return f"{line}\n{line_2}", found, problem, warnings + warnings_2


def _left_of(
    key: str, share: float, stream: UtteranceStream, config: RunConfig, ranks: int, beside: float | None = None
) -> tuple[str, Usable, str | None, list[str]]:
    """Return what `how_much_is_left` does, of the sources of one key.

    Args:
        key: data.train or data.rehearsal.
        share: of the training clips that are drawn from them.
        stream: of these sources alone.
        config: of the run.
        ranks: their number.
        beside: clips that come beside one pass over data.train, where the sources are not those; 0: not known.
    """
    t, d = config.training, config.data

    def look() -> tuple[Usable, str | None, list[str]]:
        found = look_at_usable(stream)
        return found, *judge(found, d.max_bad_fraction, key)

    found, problem, warnings = on_main(look)
    line = f"{key}: {found}"
    if t.max_steps <= 0 and beside is not None:
        often = t.num_train_epochs * beside / found.epoch_clips if found.epoch_clips else 0.0
        return (
            line + (found.epochs(f"{t.num_train_epochs:g} epochs", often) if often else ""),
            found,
            problem,
            warnings,
        )
    if t.max_steps <= 0:
        often = f"; {t.num_train_epochs:g} passes over them"
        if found.passes_of_epoch:
            often = found.epochs(f"{t.num_train_epochs:g} epochs", t.num_train_epochs)
        return line + often, found, problem, warnings
    per_step = share * t.gradient_accumulation_steps * ranks
    clips = 0 if d.batch_duration else train_limits(config).clips_of_length(found.seconds / max(found.clips, 1))
    return line + found.passes(t.max_steps, clips * per_step, d.batch_duration * per_step), found, problem, warnings


def check_what_is_left(trainer: Trainer, resumes: bool) -> None:
    """Log how much of data.train, and of data.rehearsal, the run trains on.

    Raises:
        UserError: none of it, or less than half without data.allow_large_losses where the run begins.
    """
    config = trainer.config
    line, _, problem, warnings = how_much_is_left(trainer.stream, config, trainer.accelerator.num_processes)
    if problem is not None and not resumes and not config.data.allow_large_losses:
        raise UserError(f"{line}.\n{problem}.", exit_code=1)
    for part in line.splitlines():
        log.info("%s", part)
    for text in (*warnings, *filter(None, [problem])):
        log.warning("%s", text)


def describe(trainer: Trainer, strategy: Strategy) -> None:
    """Write config.yaml and environment.json, start the trackers, and log the run in a line."""
    accelerator, config = trainer.accelerator, trainer.config
    t = config.training
    if accelerator.is_main_process:
        write_config(trainer.output_dir / "config.yaml", config)
        started = {"processes": accelerator.num_processes, "total_steps": trainer.total_steps}
        found = {**environment(t.seed), "strategy": strategy.names, **started}
        write_json(trainer.output_dir / "environment.json", clean(found, known_secrets(found), personal=False))
        for name in ("metrics.jsonl", "evaluations.jsonl", "quarantine.jsonl"):
            (trainer.output_dir / name).touch()
    if trackers_of(config):
        accelerator.init_trackers("finetune", config=flat_settings(config))
    if strategy.engine == "ddp" and accelerator.num_processes == 1:
        log.warning("%s, but one process was started: it trains alone", strategy.engine_from)
    processes, clips = accelerator.num_processes, train_limits(config).clips
    accumulated = t.gradient_accumulation_steps
    parts = [f"{n} {what}" for n, what in ((processes, "processes"), (accumulated, "batches")) if n > 1]
    batch = " x ".join([*parts, f"{clips} clips" if clips else "a batch by length"])
    of = f"{clips * processes * accumulated} clips ({batch})" if clips and parts else batch
    log.info(
        f"strategy {'+'.join(strategy.names) or 'none'}, engine {strategy.engine}, {processes} "
        f"process{'es' if processes > 1 else ''}, precision {'bf16' if t.bf16 else 'fp16' if t.fp16 else 'fp32'}, "
        f"{trainer.total_steps} step{'s' if trainer.total_steps > 1 else ''} of {of}"
    )
    if len(trainer.contexts[0]) > 1:
        log.info("%s", describe_contexts(trainer.model, *trainer.contexts))
    if trainer.resumed_from is not None:
        p = trainer.progress
        log.info("resumed from step-%08d: step %d, epoch %d, %d clips", p.step, p.step, p.epoch, p.samples)


def trackers_of(config: RunConfig) -> list[str]:
    """Return the trackers of `training.report_to`."""
    names = config.training.report_to
    return [name for name in ([names] if isinstance(names, str) else names) if name != "none"]


def flat_settings(config: RunConfig) -> dict[str, Any]:
    """Return dotted keys and plain values, the form that every tracker takes; without passwords and signatures, since
    trackers may be hosted."""
    flat = {}
    for section, values in without_secrets(config)[0].items():
        for key, value in values.items():
            flat[f"{section}.{key}"] = value if isinstance(value, bool | int | float | str) else str(value)
    return flat


def end_stage(accelerator: Accelerator) -> None:
    """Release what a run holds beside its variables, so that another may begin in this process."""
    from accelerate.state import AcceleratorState, GradientState

    accelerator.free_memory()
    # Precision and plugins of the next one may be others; the process group stays.
    AcceleratorState._reset_state()
    GradientState._reset_state()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ---- settings of the process that have to stand before the model is made --------------------------------------------


def allow_tf32(allowed: bool) -> None:
    """Let float32 products of a GPU round their factors to TensorFloat-32. Without it torch's own choice stays:
    products no, convolutions yes."""
    if not allowed:
        return
    if not torch.cuda.is_available():
        log.warning("training.tf32 has no effect: there is no GPU")
        return
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    log.info("float32 products and convolutions in TF32")


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def set_allocator(cuda_alloc_conf: str | None) -> None:
    """Set up the GPU's memory allocator, before the first tensor on a GPU."""
    if not cuda_alloc_conf:
        return
    theirs = allocator_of_environment()
    if theirs is not None and theirs != cuda_alloc_conf:
        log.warning(
            "training.cuda_alloc_conf: the environment's allocator settings %r count, not %r", theirs, cuda_alloc_conf
        )
        return
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = cuda_alloc_conf
    if torch.cuda.is_available():
        # The variable may have been read already; a setting that torch does not know is refused here.
        try:
            torch._C._accelerator_setAllocatorSettings(cuda_alloc_conf)
        except (RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"training.cuda_alloc_conf: {cuda_alloc_conf!r} is not understood: {reason}") from error


# ---- settings that are known to make a good model worse -------------------------------------------------------------


def warnings_for(config: RunConfig, parameters: int, clips_per_step: int, total_steps: int) -> list[str]:
    """Return one sentence for each risky setting; `clips_per_step` is over all processes and accumulated batches."""
    m, t, found = config.model, config.training, []
    pretrained = not str(m.name).endswith((".yaml", ".yml"))
    rates = (t.learning_rate, t.encoder_learning_rate, t.decoder_learning_rate, t.joint_learning_rate)
    rate, big = max(r or 0.0 for r in rates), parameters > 100_000_000
    if pretrained and big and rate > 5e-5 and clips_per_step < 64:
        found.append(
            f"learning rate {rate:g} with {clips_per_step} clips a step: fine-tuning Parakeet at 8e-5 with 16 clips "
            "has raised WER from 2.5 to 7.3 % on its own domain (NeMo issue 15382). Try training.learning_rate=1e-5 "
            "or more accumulation, and watch data.guard."
        )
    elif pretrained and rate > 2e-3:
        found.append(f"learning rate {rate:g} is high for a trained model; 1e-3 is a lot even for a small one.")
    starts_high = t.lr_scheduler_type not in ("constant", "inverse_sqrt") and warmup_steps(t, total_steps) == 0
    if starts_high and total_steps > 20:
        found.append(
            "no warm-up: the first steps at full learning rate can wreck a trained model. Set "
            "training.warmup_ratio=0.1."
        )
    moves = not m.freeze_batchnorm and not m.sync_batchnorm
    if pretrained and moves and t.per_device_train_batch_size < 8:
        found.append(
            f"batches of {t.per_device_train_batch_size} clips move the BatchNorm statistics with every small batch "
            "(accumulation does not help: it sees them one by one). Set model.freeze_batchnorm=true."
        )
    if m.dtype == "bfloat16" and t.optimizer not in ROUNDS_SAFELY:
        found.append(
            f"model.dtype bfloat16 with {t.optimizer}: updates smaller than a 256th of a weight are lost in rounding. "
            f"Take an optimizer that rounds safely: {', '.join(sorted(ROUNDS_SAFELY))}."
        )
    if not config.data.validation:
        found.append("no data.validation: nothing can tell whether the model gets better; the last weights are kept.")
    return found
