"""What to do when memory runs out, in the run's own settings."""

from typing import Any

import torch


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the GPU's or the host's memory ran out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)


def remedies(config: Any, gpu: bool, processes: int = 1) -> list[str]:
    """Settings that would help and are not in use yet, those that cost least first.

    Args:
        config: the run's configuration.
        gpu: whether it is a GPU's memory.
        processes: of the run.
    """
    m, t, found = config.model, config.training, []
    if gpu and "expandable_segments" not in (t.cuda_alloc_conf or ""):
        found.append("training.cuda_alloc_conf=expandable_segments:True (memory lost to fragments)")
    if t.per_device_eval_batch_size > 2:
        found.append("training.per_device_eval_batch_size=2 (where it happened in an evaluation)")
    if gpu and not (t.bf16 or t.fp16 or m.dtype == "bfloat16"):
        found.append("training.bf16=true (half the activations)")
    if t.optimizer.startswith("adamw") and "bit" not in t.optimizer and "fp8" not in t.optimizer:
        found.append("--strategy adamw_8bit (a quarter of the optimizer's state)")
    if not m.gradient_checkpointing and not m.freeze_encoder:
        found.append("--strategy gradient_checkpointing (the encoder's activations are recomputed)")
    if t.per_device_train_batch_size > 1:
        halved = t.per_device_train_batch_size // 2
        found.append(
            f"training.per_device_train_batch_size={halved} with training.gradient_accumulation_steps="
            f"{t.gradient_accumulation_steps * t.per_device_train_batch_size // halved} (the same step in smaller pieces)"
        )
    if config.data.max_duration > 20:
        found.append("data.max_duration=20 (the longest clips need most)")
    if gpu and m.gradient_checkpointing and m.dtype == "float32" and processes == 1:
        found.append("--strategy bf16_full (weights and gradients in two bytes)")
    if gpu and processes == 1:
        found.append("--strategy cpu_offload_ao or zero2_offload (the optimizer in host memory; slower)")
    if gpu and processes > 1:
        found.append("--strategy fsdp2 or zero3 (parameters, gradients and states shared out over the GPUs)")
    if t.empty_cache_each_epoch is False and gpu:
        found.append("training.empty_cache_each_epoch=true (where it happens after an evaluation or epoch)")
    if m.lora_rank == 0:
        found.append("--strategy lora (gradients and states for a few percent of the encoder)")
    return found


def out_of_memory_message(error: BaseException, config: Any, gpu: bool, processes: int = 1) -> str:
    """One message: what ran out, and what would help."""
    reason = " ".join(str(error).split("\n")[0].split()) or type(error).__name__
    lines = "\n".join(f"  - {remedy}" for remedy in remedies(config, gpu, processes))
    where = "GPU" if gpu else "host"
    return f"the {where} is out of memory: {reason}\nWhat would help, cheapest first:\n{lines}"
