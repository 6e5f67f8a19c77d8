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
