"""The one table of options that exclude each other; code, tests and documents read it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf


@dataclass(frozen=True)
class Rule:
    """Two conditions that must not hold together. `engine` is none, ddp, deepspeed, deepspeed_offload or fsdp."""

    first: str
    second: str
    holds: Callable[[Any, str, bool], bool]
    """(configuration, engine, whether there is a GPU) -> whether both conditions hold."""
    reason: str
    instead: str


def _get(config: Any, key: str) -> Any:
    return OmegaConf.select(config, key, throw_on_missing=False)


def _batchnorm_frozen_with_encoder(config: Any) -> bool:
    whole = _get(config, "model.freeze_encoder") and not _get(config, "model.unfreeze_encoder_layers")
    return bool(whole or _get(config, "model.lora_rank"))


RULES = (
    Rule(
        "training.bf16",
        "training.fp16",
        lambda c, engine, gpu: bool(_get(c, "training.bf16") and _get(c, "training.fp16")),
        "a run has one mixed precision",
        "keep training.bf16: true on GPUs since Ampere, training.fp16: true on older ones",
    ),
    Rule(
        "training.fp16",
        "no GPU",
        lambda c, engine, gpu: bool(_get(c, "training.fp16") and not gpu),
        "fp16 training needs a GPU's loss scaling",
        "set training.fp16: false, or training.bf16: true",
    ),
    Rule(
        "training.fp16",
        "DeepSpeed",
        lambda c, engine, gpu: bool(_get(c, "training.fp16") and engine.startswith("deepspeed")),
        "DeepSpeed's fp16 mode casts parameters but not BatchNorm's buffers",
        "set training.bf16: true, or train without DeepSpeed",
    ),
    Rule(
        "training.optimizer other than adamw",
        "DeepSpeed optimizer offload",
        lambda c, engine, gpu: _get(c, "training.optimizer") != "adamw" and engine == "deepspeed_offload",
        "DeepSpeed's CPU offload steps its own DeepSpeedCPUAdam and would replace the optimizer in silence",
        "choose one: --strategy adamw_8bit, or --strategy zero2_offload with training.optimizer: adamw",
    ),
    Rule(
        "model.freeze_batchnorm",
        "model.sync_batchnorm",
        lambda c, engine, gpu: bool(_get(c, "model.freeze_batchnorm") and _get(c, "model.sync_batchnorm")),
        "frozen statistics have nothing to synchronise",
        "keep one of them",
    ),
    Rule(
        "model.freeze_encoder or model.lora_rank",
        "model.sync_batchnorm",
        lambda c, engine, gpu: bool(_get(c, "model.sync_batchnorm") and _batchnorm_frozen_with_encoder(c)),
        "the frozen encoder's statistics are stored ones, which have nothing to synchronise",
        "set model.sync_batchnorm: false",
    ),
    Rule(
        "model.lora_rank",
        "model.freeze_encoder",
        lambda c, engine, gpu: bool(_get(c, "model.lora_rank") and _get(c, "model.freeze_encoder")),
        "LoRA freezes the encoder's own weights itself and trains adapters within it",
        "set model.freeze_encoder: false to train adapters, or model.lora_rank: 0 to train without the encoder or with its "
        "last layers",
    ),
    Rule(
        "model.sync_batchnorm",
        "no GPU",
        lambda c, engine, gpu: bool(_get(c, "model.sync_batchnorm") and not gpu),
        "torch's SyncBatchNorm runs on GPUs only",
        "set model.freeze_batchnorm: true, or neither",
    ),
)


def find_conflicts(config: Any, engine: str = "none", gpu: bool = True) -> list[str]:
    """One sentence for each rule that the configuration breaks."""
    return [
        f"{r.first} and {r.second} exclude each other: {r.reason}. Instead: {r.instead}."
        for r in RULES
        if r.holds(config, engine, gpu)
    ]
