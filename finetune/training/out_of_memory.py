"""What to do when memory runs out, in the run's own settings."""

from typing import Any

import torch

from finetune.config.compatibility import find_conflicts
from finetune.config.schema import RunConfig


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the GPU's or the host's memory ran out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)


def remedies(config: RunConfig, gpu: bool, engine: str = "none") -> list[str]:
    """Return settings that would help, are not in use yet, and go with the rest of the configuration, cheapest first.

    Args:
        config: the run's configuration.
        gpu: whether it is a GPU's memory.
        engine: of the run, as in finetune.config.compatibility.
    """
    m, t, d, found = config.model, config.training, config.data, []

    def add(helps: bool, remedy: str, sets: dict[str, Any] | None = None) -> None:
        if helps and not find_conflicts(config.replaced(sets or {}), engine):
            found.append(remedy)

    narrow = m.dtype == "bfloat16"
    fragments = gpu and "expandable_segments" not in (t.cuda_alloc_conf or "")
    add(fragments, "training.cuda_alloc_conf=expandable_segments:True (memory lost to fragments)")
    evaluates = t.per_device_eval_batch_size > 2
    add(evaluates, "training.per_device_eval_batch_size=2 (where it happened in an evaluation)")
    wide = gpu and not (t.bf16 or t.fp16 or narrow)
    add(wide, "training.bf16=true (half the activations)", {"training.bf16": True})
    small = "adamw_8bit_ao" if narrow or engine.startswith("fsdp") else "adamw_8bit"
    states = not any(word in t.optimizer for word in ("8bit", "4bit", "fp8", "offload", "flash"))
    add(states, f"--strategy {small} (a quarter of the optimizer's state)", {"training.optimizer": small})
    add(
        not m.gradient_checkpointing and not (m.freeze_encoder and m.unfreeze_encoder_layers == 0),
        "--strategy gradient_checkpointing (the encoder's activations are recomputed)",
        {"model.gradient_checkpointing": True},
    )
    if d.batch_duration:
        key, half, helps = "data.batch_duration", d.batch_duration / 2, d.batch_duration / 2 >= d.max_duration
    else:
        key, size = "training.per_device_train_batch_size", t.per_device_train_batch_size
        half, helps = size // 2, size > 1 and size % 2 == 0
    pieces = f"training.gradient_accumulation_steps={2 * t.gradient_accumulation_steps}"
    add(
        helps,
        f"{key}={half:g} with {pieces} (the same step in smaller pieces)",
        {key: half, "training.gradient_accumulation_steps": 2 * t.gradient_accumulation_steps},
    )
    add(d.max_duration > 20, "data.max_duration=20 (the longest clips need most)")
    add(
        gpu and m.gradient_checkpointing and not narrow,
        "--strategy bf16_full (weights and gradients in two bytes)",
        {"model.dtype": "bfloat16", "training.optimizer": "adamw_8bit_ao"},
    )
    add(
        gpu and not m.activation_offload and not m.freeze_encoder,
        "--strategy activation_offload (the encoder's activations in host memory)",
        {"model.activation_offload": True},
    )
    add(
        gpu and not t.optimizer.startswith("cpu_offload"),
        "--strategy cpu_offload_ao (the optimizer in host memory; slower)",
        {"training.optimizer": "cpu_offload_ao"},
    )
    shared = "in place of the one with ddp (parameters, gradients and states shared out over the GPUs)"
    for name, other in (("fsdp2", "fsdp"), ("zero3", "deepspeed_zero3")):
        add(gpu and engine == "ddp" and not find_conflicts(config, other), f"--strategy {name} {shared}")
    caches = gpu and not t.empty_cache_each_epoch
    add(caches, "training.empty_cache_each_epoch=true (where it happens after an evaluation or epoch)")
    few = "--strategy lora (gradients and states for a few percent of the encoder)"
    add(m.lora_rank == 0, few, {"model.lora_rank": 16})
    return found


def out_of_memory_message(error: BaseException, config: RunConfig, gpu: bool, engine: str = "none") -> str:
    """One message: what ran out, and what would help."""
    reason = " ".join(str(error).split("\n")[0].split()) or type(error).__name__
    lines = "\n".join(f"  - {remedy}" for remedy in remedies(config, gpu, engine))
    where = "GPU" if gpu else "host"
    return f"the {where} is out of memory: {reason}\nWhat would help, cheapest first:\n{lines}"
