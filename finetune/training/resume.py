"""Continuing a run: exactly under the strategy that wrote the checkpoint, from its weights under another."""

import logging
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError

from finetune.callbacks import averaging
from finetune.distributed import broadcast
from finetune.durable_files import write_json
from finetune.errors import UserError
from finetune.strategies.lora import load_merged_state_dict, merge_saved_lora
from finetune.strategies.optimizers import unwrap_optimizer
from finetune.strategies.sharded import read_whole_weights
from finetune.strategies.zero_shards import redistribute
from finetune.training import checkpoints
from finetune.training.outputs import check_best, read_best

log = logging.getLogger(__name__)


def take_weights(model: Any, path: Path) -> None:
    """Puts a checkpoint's weights into a model that no engine has taken apart yet, in place.

    What the same strategy continues exactly, `resume` loads again; for another strategy this is what carries over.

    Args:
        model: NeMo transducer, with its strategy's adapters.
        path: a whole checkpoint of any strategy.

    Raises:
        UserError: the checkpoint belongs to another model.
    """
    state, _ = checkpoints.read_checkpoint_state(path)
    try:
        weights = {name.removeprefix("nemo."): tensor for name, tensor in read_whole_weights(path).items()}
        scaling = state.get("lora_scaling")
        same = _in_place(model, weights) if scaling == getattr(model, "lora_scaling", None) else None
        if scaling is None:
            load_merged_state_dict(model, weights)
        elif same is None:
            load_merged_state_dict(model, merge_saved_lora(weights, scaling))
        else:  # the same adapters: base and factors stay apart, so that the adapter is one on the same base
            model.load_state_dict(same)
    except (KeyError, RuntimeError, OSError, SafetensorError, UnpicklingError) as error:
        raise UserError(checkpoints.does_not_fit(path, error)) from error


def _in_place(model: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
    """The weights by the names of the model's state, or None where they are those of a model with other layers."""
    own = model.state_dict()
    # A file keeps a tensor that modules share under one of its names only.
    present = {tensor.data_ptr(): name for name, tensor in own.items() if name in weights}
    found = {name: weights.get(name, weights.get(present.get(t.data_ptr(), ""))) for name, t in own.items()}
    if set(weights) - set(own) or any(t is None or t.shape != own[name].shape for name, t in found.items()):
        return None
    return found


def resume(trainer: Any, path: Path) -> None:
    """Continues from a checkpoint: weights, optimizer, schedule, random states, stream, counters and log files.

    Under another strategy than the one that wrote it the optimizer's and the random states start anew, and the log says so.

    Args:
        trainer: a Trainer around a model that has the checkpoint's weights already (`take_weights`).
        path: a whole checkpoint.

    Raises:
        UserError: it does not fit, or the part of a process is missing.
    """
    accelerator = trainer.accelerator
    state, rank_states = checkpoints.read_checkpoint_state(path)
    if "kind" not in state:
        raise UserError(
            f"{path} was written by an earlier version of this program. Start afresh with another training.output_dir."
        )
    changes = trainer.stream.load_state_dict(rank_states)
    _load_states(trainer, path, state["kind"])
    trainer.restore_progress(state["progress"])
    trainer.window.load_state_dict(state["window"])
    trainer.step_guard.load_state_dict(state.get("step_guard"))
    if trainer.ema is not None and not trainer.ema.load(path, state.get("ema_updates")):
        log.warning(
            "%s holds no moving average of what is trained now: it starts anew from the present weights", path.name
        )
    p = trainer.progress
    trainer.omega_generator.set_state(torch.frombuffer(bytearray.fromhex(p.omega_state), dtype=torch.uint8))
    trainer.walk_schedule_to(state["schedule"])
    trainer.resumed_from = trainer.last_saved = p.step
    trainer.intake.quarantined_before = trainer.quarantine.pairs("source", "id", lines=p.quarantine_lines)
    if accelerator.is_main_process:
        trainer.metrics.cut_after_step(p.step)
        # An evaluation that was cut short, or that the checkpoint does not know of, is made again as a whole.
        again = p.last_evaluated != p.step if "validation" in trainer.sources else p.evaluation_due
        trainer.evaluations.cut_after_step(p.step - 1 if again else p.step)
        if trainer.config.training.log_clips:
            trainer.clips.cut_after_step(p.step)
        trainer.quarantine.cut(p.quarantine_lines)
        if trainer.step_guard.file.path.is_file():
            trainer.step_guard.file.cut_after_step(p.step)
        checkpoints.remove_later_checkpoints(trainer.output_dir, p.step)
        shapes = {n: list(t.shape) for n, t in averaging.averaged_tensors(trainer.model).items()}
        averaging.drop_foreign(trainer.output_dir, p.step, shapes)
    _settle_best(trainer)
    if changes:
        log.warning(
            "the clips come in another order than in an unbroken run: %s. What is left of the epoch comes once",
            "; ".join(changes),
        )
    now = settings_of(trainer)
    for key, before in state["settings"].items():
        if before != now.get(key, before):
            log.warning(
                "%s was %s when the checkpoint was written and is %s now; the new value counts", key, before, now[key]
            )
    log.info("resumed from %s: step %d, epoch %d, %d clips", path.name, p.step, p.epoch, p.samples)


def _load_states(trainer: Any, path: Path, kind: dict[str, str]) -> None:
    """Everything that Accelerate keeps, where the checkpoint is of the same kind."""
    now = kind_of(trainer)
    if kind != now and _differs_in_processes(kind, now) and _redistribute(trainer, path):
        return
    if kind != now:
        changed = "; ".join(f"{key} was {kind.get(key)}, is {now[key]}" for key in now if kind.get(key) != now[key])
        log.warning(
            "%s was written under another strategy (%s). Weights, step, schedule, position in the data and counts carry over; the "
            "optimizer's state and the random states start anew.",
            path.name,
            changed,
        )
        return
    groups = [
        {k: v for k, v in g.items() if k not in ("params", "initial_lr")} for g in trainer.optimizer.param_groups
    ]
    checkpoints.load_checkpoint(trainer.accelerator, path)
    for group, values in zip(trainer.optimizer.param_groups, groups, strict=True):
        # The run file counts: weight decay, betas and eps would come from the checkpoint; rates are written before each step.
        group.update(values)
        if group.get("fused") or group.get("capturable"):
            for p in group["params"]:
                state = unwrap_optimizer(trainer.optimizer).state.get(p, {})
                if isinstance(state.get("step"), torch.Tensor):
                    state["step"] = state["step"].to(p.device)  # adamw_loop keeps it in host memory


def _differs_in_processes(before: dict[str, str], now: dict[str, str]) -> bool:
    """Whether the checkpoint was written under the same ZeRO stage by another number of processes, and everything else is as it was."""
    stage = now["engine"].split(" of ")[0]
    return stage.startswith("deepspeed") and {**before, "engine": before.get("engine", "").split(" of ")[0]} == {
        **now,
        "engine": stage,
    }


def _redistribute(trainer: Any, path: Path) -> bool:
    """ZeRO's optimizer state of other processes; whether all of them could take it."""
    problem = None
    try:
        filled = redistribute(trainer.module, path)
        log.info("the optimizer's state of %d parameters is dealt out anew; random states start anew", filled)
    except (ValueError, KeyError, IndexError, AttributeError, RuntimeError, OSError, TypeError) as error:
        problem = f"{type(error).__name__}: {error}"
    if trainer.accelerator.num_processes > 1:
        from accelerate.utils import gather_object

        problem = next((p for p in gather_object([problem]) if p is not None), None)
    if problem is not None:
        log.warning(
            "the optimizer's state of %s cannot be dealt out to another number of processes (%s)", path.name, problem
        )
    return problem is None


def _settle_best(trainer: Any) -> None:
    """model.nemo may be newer than the checkpoint, or of another run; what is said of it has to be true."""
    p = trainer.progress
    kept, damaged = broadcast(check_best(trainer.output_dir) if trainer.accelerator.is_main_process else None)
    if kept is not None and trainer.accelerator.is_main_process and kept != read_best(trainer.output_dir):
        write_json(trainer.output_dir / "checkpoints" / "best.json", kept)  # of the one that really lies there
    known = (p.best_step, p.best_wer, p.best_weights)
    if p.best_step is not None and (
        kept is None or known != tuple(kept[k] for k in ("step", "validation_wer", "weights"))
    ):
        if kept is None:
            what = "model.nemo is damaged (its checksum differs)" if damaged else "there is no model.nemo"
            log.warning("%s in %s: the best model is chosen anew", what, trainer.output_dir)
            kept = {"step": None, "validation_wer": None, "weights": "raw"}
        p.best_step, p.best_wer, p.best_weights = kept["step"], kept["validation_wer"], kept["weights"]


def kind_of(trainer: Any) -> dict[str, str]:
    """What decides how a run's saved state looks: optimizer, engine, what is trained, and in which type."""
    accelerator, m = trainer.accelerator, trainer.config.model
    engine = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type)).lower()
    if engine == "deepspeed":
        # Each process keeps its own part of the optimizer's state.
        engine += f" ZeRO-{accelerator.state.deepspeed_plugin.zero_stage} of {accelerator.num_processes} process(es)"
    elif engine != "fsdp":
        engine = "none"
    trained = "everything"
    if m.lora_rank:
        trained = f"LoRA of rank {m.lora_rank}, scaled by {trainer.model.lora_scaling:g}, on {', '.join(sorted(m.lora_targets))}"
        trained += "" if m.lora_train_decoder else ", without prediction network and joint"
    elif m.freeze_encoder:
        trained = f"the last {m.unfreeze_encoder_layers} layers of the encoder, prediction network and joint"
    return {
        "optimizer": _optimizer_of(trainer),
        "engine": engine,
        "trained": trained,
        "model.dtype": m.dtype,
        "loss scaling": "none" if accelerator.scaler is None else "fp16",
    }


def _optimizer_of(trainer: Any) -> str:
    """Class and library: bitsandbytes and torchao have classes of the same name."""
    kind = type(unwrap_optimizer(trainer.optimizer))
    libraries = [base.__module__.split(".")[0] for base in kind.__mro__]
    return f"{kind.__name__} of {next(name for name in libraries if name not in ('finetune', 'abc', 'builtins'))}"


def settings_of(trainer: Any) -> dict[str, Any]:
    """Settings whose change between a checkpoint and its continuation is said."""
    t, d, m = trainer.config.training, trainer.config.data, trainer.config.model
    return {
        "model.name": m.name,
        "training.seed": t.seed,
        "training.learning_rate": t.learning_rate,
        "training.per_device_train_batch_size": t.per_device_train_batch_size,
        "training.gradient_accumulation_steps": t.gradient_accumulation_steps,
        "training.encoder_learning_rate": t.encoder_learning_rate,
        "training.decoder_learning_rate": t.decoder_learning_rate,
        "training.joint_learning_rate": t.joint_learning_rate,
        "training.weight_decay": t.weight_decay,
        "training.ema_decay": t.ema_decay,
        "training.optimizer_args": dict(t.optimizer_args),
        "processes": trainer.accelerator.num_processes,
        "data.batch_duration": d.batch_duration,
        "data.batch_cells": d.batch_cells,
        "data.min_duration": d.min_duration,
        "data.max_duration": d.max_duration,
        "data.text_normalization": d.text_normalization,
        "total steps": trainer.total_steps,
    }
