"""Continuing a run: exactly under the strategy that wrote the checkpoint, from its weights under another."""

import logging
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from safetensors import SafetensorError

from finetune.config.redaction import without_secrets
from finetune.config.schema import RunConfig
from finetune.distributed import gather
from finetune.errors import UserError
from finetune.models.adapters import load_merged_state_dict, merge_saved_lora
from finetune.models.nemo import ctc_loss_weight
from finetune.models.protocols import AsrModel
from finetune.strategies.optimizers import unwrap_optimizer
from finetune.strategies.sharded import read_whole_weights
from finetune.strategies.zero_shards import redistribute
from finetune.training import checkpoints

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

log = logging.getLogger(__name__)


def take_weights(model: AsrModel, path: Path) -> None:
    """Load a checkpoint's weights, in place, into a model that no engine has taken apart yet.

    What the same strategy continues exactly, `load_states` loads again; for another strategy this is what carries
    over. The model has its strategy's adapters.

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


def _in_place(model: AsrModel, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
    """Return the weights by the names of the model's state, or None where they are of a model with other layers."""
    own = model.state_dict()
    # A file keeps a tensor that modules share under one of its names only.
    present = {tensor.data_ptr(): name for name, tensor in own.items() if name in weights}
    found = {}
    for name, tensor in own.items():
        saved = weights.get(name, weights.get(present.get(tensor.data_ptr(), "")))
        if saved is None or saved.shape != tensor.shape:
            return None
        found[name] = saved
    return None if set(weights) - set(own) else found


def load_states(
    accelerator: Accelerator,
    module: torch.nn.Module,
    optimizer: AcceleratedOptimizer,
    path: Path,
    kind: dict[str, str],
    now: dict[str, str],
) -> None:
    """Load everything that Accelerate keeps, where the `kind_of` what wrote the checkpoint is that of `now`."""
    if kind != now:
        stages = [{**k, "engine": k.get("engine", "").split(" of ")[0]} for k in (kind, now)]
        only_processes = stages[0] == stages[1] and now["engine"].startswith("deepspeed")
        if only_processes and _redistribute(module, path):
            return
        changed = "; ".join(f"{key} was {kind.get(key)}, is {now[key]}" for key in now if kind.get(key) != now[key])
        log.warning(
            "%s was written under another strategy (%s). Weights, step, schedule, position in the data and counts "
            "carry over; the optimizer's state and the random states start anew.",
            path.name,
            changed,
        )
        return
    groups = [{k: v for k, v in g.items() if k not in ("params", "initial_lr")} for g in optimizer.param_groups]
    checkpoints.load_checkpoint(accelerator, path)
    for group, values in zip(optimizer.param_groups, groups, strict=True):
        # The run file counts: weight decay, betas and eps would come from the checkpoint; rates are written before
        # each step.
        group.update(values)
        if group.get("fused") or group.get("capturable"):
            for p in group["params"]:
                state = unwrap_optimizer(optimizer).state.get(p, {})
                if isinstance(state.get("step"), torch.Tensor):
                    state["step"] = state["step"].to(p.device)  # adamw_loop keeps it in host memory


def _redistribute(module: torch.nn.Module, path: Path) -> bool:
    """Take ZeRO's optimizer state of another number of processes; return whether all ranks could."""
    problem = None
    try:
        filled = redistribute(cast("DeepSpeedEngine", module), path)  # only ZeRO's checkpoints come here
        log.info("the optimizer's state of %d parameters is redistributed; random states start anew", filled)
    except (ValueError, KeyError, IndexError, AttributeError, RuntimeError, OSError, TypeError) as error:
        problem = f"{type(error).__name__}: {error}"
    problem = next((p for p in gather(problem) if p is not None), None)
    if problem is not None:
        text = "the optimizer's state of %s cannot be redistributed to another number of processes (%s)"
        log.warning(text, path.name, problem)
    return problem is None


def kind_of(
    accelerator: Accelerator, config: RunConfig, model: AsrModel, optimizer: AcceleratedOptimizer
) -> dict[str, str]:
    """Return what decides how a run's saved state looks: optimizer, engine, what is trained, and in which type."""
    m = config.model
    engine = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type)).lower()
    if engine == "deepspeed":
        # Each process keeps its own part of the optimizer's state.
        plugin = accelerator.state.deepspeed_plugin
        assert plugin is not None
        engine += f" ZeRO-{plugin.zero_stage} of {accelerator.num_processes} process(es)"
    elif engine != "fsdp":
        engine = "none"
    trained = "everything"
    if m.lora_rank:
        targets = ", ".join(sorted(m.lora_targets))
        trained = f"LoRA of rank {m.lora_rank}, scaled by {model.lora_scaling:g}, on {targets}"
        trained += "" if m.lora_train_decoder else ", without the heads"
    elif m.freeze_encoder:
        trained = f"the last {m.unfreeze_encoder_layers} layers of the encoder, and the heads"
    if config.training.layer_decay < 1:
        trained += ", at a rate of its own for each layer"  # one group of parameters a layer
    if hasattr(model, "ctc_decoder") and ctc_loss_weight(model) in (0, 1):
        trained += ", but not " + ("prediction network and joint" if ctc_loss_weight(model) else "the CTC head")
    return {
        "optimizer": _class_and_library(unwrap_optimizer(optimizer)),
        "engine": engine,
        "trained": trained,
        "model.dtype": m.dtype,
        "loss scaling": "none" if accelerator.scaler is None else "fp16",
    }


def _class_and_library(optimizer: torch.optim.Optimizer) -> str:
    """Return class and library: bitsandbytes and torchao have classes of the same name."""
    kind = type(optimizer)
    libraries = [base.__module__.split(".")[0] for base in kind.__mro__]
    return f"{kind.__name__} of {next(name for name in libraries if name not in ('finetune', 'abc', 'builtins'))}"


def settings_of(config: RunConfig, processes: int, total_steps: int) -> dict[str, Any]:
    """Return the settings whose change between a checkpoint and its continuation is logged."""
    t, d = config.training, config.data
    return {
        "model.name": config.model.name,
        "model.unified_auto_ratio": config.model.unified_auto_ratio,
        "model.streaming_share": config.model.streaming_share,
        "training.seed": t.seed,
        "training.learning_rate": t.learning_rate,
        "training.per_device_train_batch_size": t.per_device_train_batch_size,
        "training.gradient_accumulation_steps": t.gradient_accumulation_steps,
        "training.encoder_learning_rate": t.encoder_learning_rate,
        "training.decoder_learning_rate": t.decoder_learning_rate,
        "training.joint_learning_rate": t.joint_learning_rate,
        "training.layer_decay": t.layer_decay,
        "training.weight_decay": t.weight_decay,
        "training.l2_sp": t.l2_sp or 0.0,
        "model.ctc_loss_weight": config.model.ctc_loss_weight,
        "training.ema_decay": t.ema_decay,
        "training.optimizer_args": dict(t.optimizer_args),
        "processes": processes,
        "data.rehearsal_share": d.rehearsal_share,
        "data.batch_duration": d.batch_duration,
        "data.batch_cells": d.batch_cells,
        "data.min_duration": d.min_duration,
        "data.max_duration": d.max_duration,
        "data.text_normalization": d.text_normalization,
        "data.guard": guard_of(config),
        "data.guard_limit": d.guard_limit,
        "data.guard_confidence": d.guard_confidence,
        "data.wer_normalization": d.wer_normalization,
        "data.max_eval_samples": d.max_eval_samples,
        "total steps": total_steps,
    }


def guard_of(config: RunConfig) -> Any:
    """Return data.guard as a checkpoint keeps it: without passwords and signatures."""
    return without_secrets(config)[0]["data"]["guard"]


def has_another_guard(config: RunConfig, checkpoint: Path) -> bool:
    """Return whether data.guard is not what it was when a checkpoint was written."""
    now = guard_of(config)
    return checkpoints.read_checkpoint_state(checkpoint)[0]["settings"].get("data.guard", now) != now


def log_changed_settings(before: dict[str, Any], now: dict[str, Any]) -> None:
    """Warn of each setting that is not what it was when the checkpoint was written."""
    for key, value in before.items():
        if value != now.get(key, value):
            text = "%s was %s when the checkpoint was written and is %s now; the new value counts"
            log.warning(text, key, value, now[key])
