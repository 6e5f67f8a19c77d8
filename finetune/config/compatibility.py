"""The one table of options that exclude each other; code, tests and documents read it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf

from finetune.config.tokenizer_setting import changes_vocabulary
from finetune.strategies.low_bit import BITSANDBYTES, TORCHAO, gpu_lacks_fp8


@dataclass(frozen=True)
class Rule:
    """Two conditions that must not hold together. `engine` is as in `accelerate_files.Strategy`."""

    first: str
    second: str
    holds: Callable[[Any, str, bool], bool]
    """(configuration, engine, whether there is a GPU) -> whether both conditions hold."""
    reason: str
    instead: str


def _get(config: Any, key: str) -> Any:
    return OmegaConf.select(config, key, throw_on_missing=False)


def _deepspeed_offloads(engine: str) -> bool:
    return engine.startswith("deepspeed") and engine.endswith("_offload")


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
        lambda c, engine, gpu: _get(c, "training.optimizer") != "adamw" and _deepspeed_offloads(engine),
        "DeepSpeed's CPU offload steps its own DeepSpeedCPUAdam and would replace the optimizer in silence",
        "choose one: --strategy adamw_8bit, or --strategy zero2_offload with training.optimizer: adamw",
    ),
    Rule(
        "training.fp16",
        "FSDP",
        lambda c, engine, gpu: bool(_get(c, "training.fp16")) and engine.startswith("fsdp"),
        "the loss scale would be lowered by each process for its own shards",
        "set training.bf16: true, or use --strategy ddp",
    ),
    Rule(
        "training.optimizer of bitsandbytes",
        "FSDP",
        lambda c, engine, gpu: _optimizer(c) in BITSANDBYTES and engine.startswith("fsdp"),
        "bitsandbytes cannot step on parameters that FSDP2 has sharded (DTensor)",
        "use --strategy adamw_8bit_ao with fsdp2, or adamw_8bit with --strategy zero1, zero2, zero3 or ddp",
    ),
    Rule(
        "training.optimizer of torchao",
        "DeepSpeed",
        lambda c, engine, gpu: _optimizer(c) in TORCHAO and engine.startswith("deepspeed"),
        "torchao keeps 32-bit states, in silence, for tensors whose size is no multiple of its blocks, as the flat partitions of ZeRO are",
        "use --strategy adamw_8bit with zero1, zero2 or zero3, or adamw_8bit_ao with fsdp2",
    ),
    Rule(
        "training.optimizer adamw_fp8_ao",
        "a GPU of compute capability below 8.9",
        lambda c, engine, gpu: _optimizer(c) == "adamw_fp8_ao" and gpu and gpu_lacks_fp8(),
        "the GPU has no FP8",
        "use --strategy adamw_8bit_ao, whose states are as small",
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
        "model.tokenizer extend_from or replace_with",
        "model.lora_train_decoder false",
        lambda c, engine, gpu: bool(
            _get(c, "model.lora_rank") and not _get(c, "model.lora_train_decoder") and changes_vocabulary(c)
        ),
        "the rows of new pieces lie in prediction network and joint, which would stay as they began",
        "set model.lora_train_decoder: true",
    ),
    Rule(
        "model.sync_batchnorm",
        "no GPU",
        lambda c, engine, gpu: bool(_get(c, "model.sync_batchnorm") and not gpu),
        "torch's SyncBatchNorm runs on GPUs only",
        "set model.freeze_batchnorm: true, or neither",
    ),
    Rule(
        "model.activation_offload",
        "FSDP or ZeRO-3",
        lambda c, engine, gpu: (
            bool(_get(c, "model.activation_offload")) and engine.startswith(("fsdp", "deepspeed_zero3"))
        ),
        "weights that are gathered for a layer would be taken for activations and copied while they are let go",
        "set model.gradient_checkpointing: true and model.activation_offload: false",
    ),
    Rule(
        "training.optimizer cpu_offload_ao",
        "no GPU",
        lambda c, engine, gpu: _optimizer(c).startswith("cpu_offload") and not gpu,
        "there is no GPU whose memory could be spared",
        "set training.optimizer: adamw or adamw_8bit",
    ),
    Rule(
        "training.optimizer cpu_offload_ao",
        "several processes, DeepSpeed or FSDP",
        lambda c, engine, gpu: _optimizer(c).startswith("cpu_offload") and engine != "none",
        "gradients are copied to the host before they are averaged over the processes",
        "use --strategy zero2_offload or fsdp2_offload",
    ),
    Rule(
        "training.optimizer cpu_offload_ao",
        "training.fp16",
        lambda c, engine, gpu: _optimizer(c).startswith("cpu_offload") and bool(_get(c, "training.fp16")),
        "gradients are copied to the host before their scale is taken out",
        "set training.bf16: true and training.fp16: false",
    ),
    Rule(
        "training.optimizer cpu_offload_gradients_ao",
        "training.gradient_accumulation_steps above 1",
        lambda c, engine, gpu: _optimizer(c) == "cpu_offload_gradients_ao" and _accumulates(c),
        "each gradient leaves the GPU when it is made, so that nothing is left to add to",
        "use --strategy cpu_offload_ao, or set training.gradient_accumulation_steps: 1",
    ),
    Rule(
        "training.optimizer flash_adamw",
        "no GPU",
        lambda c, engine, gpu: _optimizer(c).startswith("flash_adamw") and not gpu,
        "flashoptim's kernels run on CUDA GPUs only",
        "use --strategy bf16_full, or set training.optimizer: adamw_8bit",
    ),
    Rule(
        "training.optimizer flash_adamw",
        "DeepSpeed or FSDP",
        lambda c, engine, gpu: _optimizer(c) == "flash_adamw" and engine.startswith(("deepspeed", "fsdp")),
        "flashoptim cannot save its states of shards that are not even, and its kernels take no partitions that lie in host memory",
        "use --strategy adamw_8bit_ao with fsdp2, or adamw_8bit with zero1, zero2 or zero3",
    ),
    Rule(
        "training.optimizer adamw_compiled",
        "DeepSpeed or FSDP",
        lambda c, engine, gpu: _optimizer(c) == "adamw_compiled" and engine.startswith(("deepspeed", "fsdp")),
        "the step is compiled for the parameters as they were before the engine sharded or moved them",
        "set training.optimizer: adamw, whose fused step is faster as well",
    ),
    Rule(
        "training.optimizer adamw_bf16_ao",
        "model.dtype float32",
        lambda c, engine, gpu: _optimizer(c) == "adamw_bf16_ao" and _get(c, "model.dtype") == "float32",
        "its states have the weights' type, so that nothing is saved",
        "use --strategy bf16_stochastic_rounding, which sets model.dtype: bfloat16 as well",
    ),
    Rule(
        "model.compile",
        "ZeRO-3",
        lambda c, engine, gpu: bool(_get(c, "model.compile")) and engine.startswith("deepspeed_zero3"),
        "the hooks that gather a layer's weights stand inside of what is compiled",
        "set model.compile: false, or use --strategy zero2 or fsdp2",
    ),
    Rule(
        "training.optimizer flash_adamw_gradient_release",
        "training.gradient_accumulation_steps above 1",
        lambda c, engine, gpu: _releases(c) and _accumulates(c),
        "each gradient is stepped with and freed when it is made",
        "use --strategy flash_adamw, or set training.gradient_accumulation_steps: 1",
    ),
    Rule(
        "training.optimizer flash_adamw_gradient_release",
        "training.max_grad_norm above 0",
        lambda c, engine, gpu: _releases(c) and (_get(c, "training.max_grad_norm") or 0) > 0,
        "the norm of all gradients is not known when the first of them is stepped with",
        "set training.max_grad_norm: 0, or use --strategy flash_adamw",
    ),
    Rule(
        "training.optimizer flash_adamw_gradient_release",
        "several processes, DeepSpeed or FSDP",
        lambda c, engine, gpu: _releases(c) and engine != "none",
        "gradients are stepped with before they are averaged over the processes",
        "use --strategy flash_adamw",
    ),
    Rule(
        "training.optimizer flash_adamw_gradient_release",
        "training.fp16",
        lambda c, engine, gpu: _releases(c) and bool(_get(c, "training.fp16")),
        "gradients are stepped with before their scale is taken out",
        "set training.fp16: false; the strategy's weights are in bf16 already",
    ),
    Rule(
        "training.optimizer flash_adamw_gradient_release",
        "training.spike_guard",
        lambda c, engine, gpu: _releases(c) and (_get(c, "training.spike_guard") or 0) > 0,
        "the norm of all gradients is not known when the first of them is stepped with",
        "set training.spike_guard: 0, or use --strategy flash_adamw",
    ),
    Rule(
        "training.ema_decay",
        "DeepSpeed ZeRO-3",
        lambda c, engine, gpu: _averages(c) and engine.startswith("deepspeed_zero3"),
        "its parameters are empty between the layers' own gatherings, so that each update would gather the whole model",
        "use --strategy fsdp2, where each process averages its shards, or zero2; or training.average_checkpoints instead",
    ),
    Rule(
        "training.ema_decay",
        "training.optimizer flash_adamw_gradient_release or cpu_offload_ao",
        lambda c, engine, gpu: _averages(c) and (_releases(c) or _optimizer(c).startswith("cpu_offload")),
        "these change weights outside of the step: in the backward pass, before it is known whether the step counts, or on the host, from "
        "where they are on their way back when the step returns",
        "use --strategy flash_adamw or adamw_8bit, or training.average_checkpoints instead",
    ),
    Rule(
        "training.ema_device cpu",
        "FSDP",
        lambda c, engine, gpu: _averages(c) and _get(c, "training.ema_device") == "cpu" and engine.startswith("fsdp"),
        "shards are gathered where they lie, and those of an average on the host could not be",
        "set training.ema_device: same; each GPU holds the average of its own shards only",
    ),
    Rule(
        "model.dtype bfloat16",
        "DeepSpeed or FSDP",
        lambda c, engine, gpu: _get(c, "model.dtype") == "bfloat16" and engine.startswith(("deepspeed", "fsdp")),
        "ZeRO-3 and FSDP2 gather weights of one type only, and BatchNorm stays in float32; ZeRO-1 and 2 step on float32 copies, so that "
        "nothing is spared",
        "set model.dtype: float32 and training.bf16: true, with an optimizer for float32 weights",
    ),
    Rule(
        "model.dtype bfloat16",
        "training.fp16",
        lambda c, engine, gpu: _get(c, "model.dtype") == "bfloat16" and bool(_get(c, "training.fp16")),
        "loss scaling is for float32 weights with float16 computation",
        "set training.fp16: false",
    ),
)


def _optimizer(config: Any) -> str:
    return str(_get(config, "training.optimizer"))


def _releases(config: Any) -> bool:
    return _optimizer(config) == "flash_adamw_gradient_release"


def _averages(config: Any) -> bool:
    return (_get(config, "training.ema_decay") or 0) > 0


def _accumulates(config: Any) -> bool:
    return (_get(config, "training.gradient_accumulation_steps") or 1) > 1


def find_conflicts(config: Any, engine: str = "none", gpu: bool = True) -> list[str]:
    """One sentence for each rule that the configuration breaks."""
    return [
        f"{r.first} and {r.second} exclude each other: {r.reason}. Instead: {r.instead}."
        for r in RULES
        if r.holds(config, engine, gpu)
    ]
