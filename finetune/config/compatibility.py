"""Settings that do not go together: a table of options that exclude each other, and checks of values by other values.

Code, tests and documents read the table.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from finetune.config.optimizers import ALLOWED_ARGS, BITSANDBYTES, TORCHAO, gpu_lacks_fp8
from finetune.config.schema import DataConfig, RunConfig, TrainingConfig
from finetune.config.tokenizer_setting import changes_vocabulary, parse_tokenizer
from finetune.errors import UserError


@dataclass(frozen=True)
class Rule:
    """Two conditions that must not hold together.

    Attributes:
        holds: (configuration, engine as in `Strategy.engine`, whether there is a GPU) -> whether both hold.
        reason: why they exclude each other.
        instead: what to set.
    """

    first: str
    second: str
    holds: Callable[[RunConfig, str, bool], bool]
    reason: str
    instead: str


def _deepspeed_offloads(engine: str) -> bool:
    return engine.startswith("deepspeed") and engine.endswith("_offload")


def _has_frozen_batchnorm(c: RunConfig) -> bool:
    """Return whether freezing the encoder freezes its statistics."""
    return bool((c.model.freeze_encoder and not c.model.unfreeze_encoder_layers) or c.model.lora_rank)


def _releases(c: RunConfig) -> bool:
    return c.training.optimizer == "flash_adamw_gradient_release"


def _offloads_optimizer(c: RunConfig) -> bool:
    return c.training.optimizer.startswith("cpu_offload")


def _accumulates(c: RunConfig) -> bool:
    return c.training.gradient_accumulation_steps > 1


RULES = (
    Rule(
        "training.bf16",
        "training.fp16",
        lambda c, engine, gpu: c.training.bf16 and c.training.fp16,
        "a run has one mixed precision",
        "keep training.bf16: true on GPUs since Ampere, training.fp16: true on older ones",
    ),
    Rule(
        "training.fp16",
        "no GPU",
        lambda c, engine, gpu: c.training.fp16 and not gpu,
        "fp16 training needs a GPU's loss scaling",
        "set training.fp16: false, or training.bf16: true",
    ),
    Rule(
        "training.fp16",
        "DeepSpeed",
        lambda c, engine, gpu: c.training.fp16 and engine.startswith("deepspeed"),
        "DeepSpeed's fp16 mode casts parameters but not BatchNorm's buffers",
        "set training.bf16: true, or train without DeepSpeed",
    ),
    Rule(
        "training.optimizer other than adamw",
        "DeepSpeed optimizer offload",
        lambda c, engine, gpu: c.training.optimizer != "adamw" and _deepspeed_offloads(engine),
        "DeepSpeed's CPU offload steps with its own DeepSpeedCPUAdam and would silently replace the optimizer",
        "choose one: --strategy adamw_8bit, or --strategy zero2_offload with training.optimizer: adamw",
    ),
    Rule(
        "training.fp16",
        "FSDP",
        lambda c, engine, gpu: c.training.fp16 and engine.startswith("fsdp"),
        "each process would lower the loss scale for its own shards",
        "set training.bf16: true, or use --strategy ddp",
    ),
    Rule(
        "training.optimizer of bitsandbytes",
        "FSDP",
        lambda c, engine, gpu: c.training.optimizer in BITSANDBYTES and engine.startswith("fsdp"),
        "bitsandbytes cannot step on parameters that FSDP2 has sharded (DTensor)",
        "use --strategy adamw_8bit_ao with fsdp2, or adamw_8bit with --strategy zero1, zero2, zero3 or ddp",
    ),
    Rule(
        "training.optimizer of torchao",
        "DeepSpeed",
        lambda c, engine, gpu: c.training.optimizer in TORCHAO and engine.startswith("deepspeed"),
        "torchao silently keeps 32-bit states for tensors whose size is no multiple of its blocks, such as ZeRO's "
        "flat partitions",
        "use --strategy adamw_8bit with zero1, zero2 or zero3, or adamw_8bit_ao with fsdp2",
    ),
    Rule(
        "training.optimizer adamw_fp8_ao",
        "a GPU of compute capability below 8.9",
        lambda c, engine, gpu: c.training.optimizer == "adamw_fp8_ao" and gpu and gpu_lacks_fp8(),
        "the GPU has no FP8",
        "use --strategy adamw_8bit_ao, whose states are as small",
    ),
    Rule(
        "model.freeze_batchnorm",
        "model.sync_batchnorm",
        lambda c, engine, gpu: c.model.freeze_batchnorm and c.model.sync_batchnorm,
        "frozen statistics have nothing to synchronise",
        "keep one of them",
    ),
    Rule(
        "model.freeze_encoder or model.lora_rank",
        "model.sync_batchnorm",
        lambda c, engine, gpu: c.model.sync_batchnorm and _has_frozen_batchnorm(c),
        "the frozen encoder's statistics are stored ones, which have nothing to synchronise",
        "set model.sync_batchnorm: false",
    ),
    Rule(
        "model.lora_rank",
        "model.freeze_encoder",
        lambda c, engine, gpu: c.model.lora_rank > 0 and c.model.freeze_encoder,
        "LoRA freezes the encoder's own weights itself and trains adapters within it",
        "set model.freeze_encoder: false to train adapters, or model.lora_rank: 0 to train without the encoder or "
        "with its last layers",
    ),
    Rule(
        "model.tokenizer extend_from or replace_with",
        "model.lora_train_decoder false",
        lambda c, engine, gpu: c.model.lora_rank > 0 and not c.model.lora_train_decoder and changes_vocabulary(c),
        "the rows of new pieces lie in the heads, which would stay at their initial values",
        "set model.lora_train_decoder: true",
    ),
    Rule(
        "model.add_ctc",
        "model.lora_train_decoder false",
        lambda c, engine, gpu: c.model.add_ctc and c.model.lora_rank > 0 and not c.model.lora_train_decoder,
        "the new CTC head would stay at its random values",
        "set model.lora_train_decoder: true",
    ),
    Rule(
        "model.add_ctc",
        "model.adapter",
        lambda c, engine, gpu: c.model.add_ctc and bool(c.model.adapter),
        "the adapter was trained without the new CTC head",
        "merge it (finetune.export --to nemo), and add the head to that model",
    ),
    Rule(
        "model.add_ctc",
        "model.ctc_loss_weight 0",
        lambda c, engine, gpu: c.model.add_ctc and c.model.ctc_loss_weight == 0,
        "the new CTC head would stay at its random values",
        "leave model.ctc_loss_weight out (0.3), or set it up to 1",
    ),
    Rule(
        "model.distillation",
        "model.ctc_loss_weight 1",
        lambda c, engine, gpu: c.model.distillation > 0 and c.model.ctc_loss_weight == 1,
        "the distillation is of the transducer's posteriors, and CTC alone is trained",
        "set model.distillation: 0, or model.ctc_loss_weight below 1",
    ),
    Rule(
        "model.distillation",
        "a NeMo model YAML as model.name",
        lambda c, engine, gpu: c.model.distillation > 0 and c.model.name.endswith((".yaml", ".yml")),
        "random weights know nothing that could be kept",
        "set model.distillation: 0, or give a trained model as model.name",
    ),
    Rule(
        "model.sync_batchnorm",
        "no GPU",
        lambda c, engine, gpu: c.model.sync_batchnorm and not gpu,
        "torch's SyncBatchNorm runs on GPUs only",
        "set model.freeze_batchnorm: true, or neither",
    ),
    Rule(
        "model.activation_offload",
        "FSDP or ZeRO-3",
        lambda c, engine, gpu: c.model.activation_offload and engine.startswith(("fsdp", "deepspeed_zero3")),
        "weights gathered for a layer would be taken for activations and copied while they are freed",
        "set model.gradient_checkpointing: true and model.activation_offload: false",
    ),
    Rule(
        "training.optimizer cpu_offload_ao",
        "no GPU",
        lambda c, engine, gpu: _offloads_optimizer(c) and not gpu,
        "there is no GPU memory to save",
        "set training.optimizer: adamw or adamw_8bit",
    ),
    Rule(
        "training.optimizer cpu_offload_ao",
        "several processes, DeepSpeed or FSDP",
        lambda c, engine, gpu: _offloads_optimizer(c) and engine != "none",
        "gradients are copied to the host before they are averaged over the processes",
        "use --strategy zero2_offload or fsdp2_offload",
    ),
    Rule(
        "training.optimizer cpu_offload_ao",
        "training.fp16",
        lambda c, engine, gpu: _offloads_optimizer(c) and c.training.fp16,
        "gradients are copied to the host before they are unscaled",
        "set training.bf16: true and training.fp16: false",
    ),
    Rule(
        "training.optimizer cpu_offload_gradients_ao",
        "training.gradient_accumulation_steps above 1",
        lambda c, engine, gpu: c.training.optimizer == "cpu_offload_gradients_ao" and _accumulates(c),
        "each gradient leaves the GPU as soon as it is computed, so there is nothing to accumulate into",
        "use --strategy cpu_offload_ao, or set training.gradient_accumulation_steps: 1",
    ),
    Rule(
        "training.optimizer flash_adamw",
        "no GPU",
        lambda c, engine, gpu: c.training.optimizer.startswith("flash_adamw") and not gpu,
        "flashoptim's kernels run on CUDA GPUs only",
        "use --strategy bf16_full, or set training.optimizer: adamw_8bit",
    ),
    Rule(
        "training.optimizer flash_adamw",
        "DeepSpeed or FSDP",
        lambda c, engine, gpu: c.training.optimizer == "flash_adamw" and engine.startswith(("deepspeed", "fsdp")),
        "flashoptim cannot save the states of uneven shards, and its kernels do not take partitions in host memory",
        "use --strategy adamw_8bit_ao with fsdp2, or adamw_8bit with zero1, zero2 or zero3",
    ),
    Rule(
        "training.optimizer adamw_compiled",
        "DeepSpeed or FSDP",
        lambda c, engine, gpu: c.training.optimizer == "adamw_compiled" and engine.startswith(("deepspeed", "fsdp")),
        "the step is compiled for the parameters as they were before the engine sharded or moved them",
        "set training.optimizer: adamw, whose fused step is faster as well",
    ),
    Rule(
        "training.optimizer adamw_bf16_ao",
        "model.dtype float32",
        lambda c, engine, gpu: c.training.optimizer == "adamw_bf16_ao" and c.model.dtype == "float32",
        "its states have the weights' type, so no memory is saved",
        "use --strategy bf16_stochastic_rounding, which sets model.dtype: bfloat16 as well",
    ),
    Rule(
        "model.compile",
        "ZeRO-3",
        lambda c, engine, gpu: c.model.compile and engine.startswith("deepspeed_zero3"),
        "the hooks that gather a layer's weights are inside the compiled region",
        "set model.compile: false, or use --strategy zero2 or fsdp2",
    ),
    Rule(
        "training.optimizer flash_adamw_gradient_release",
        "training.gradient_accumulation_steps above 1",
        lambda c, engine, gpu: _releases(c) and _accumulates(c),
        "each gradient is applied and freed as soon as it is computed",
        "use --strategy flash_adamw, or set training.gradient_accumulation_steps: 1",
    ),
    Rule(
        "training.optimizer flash_adamw_gradient_release",
        "training.max_grad_norm above 0",
        lambda c, engine, gpu: _releases(c) and c.training.max_grad_norm > 0,
        "the norm of all gradients is not known when the first of them is applied",
        "set training.max_grad_norm: 0, or use --strategy flash_adamw",
    ),
    Rule(
        "training.optimizer flash_adamw_gradient_release",
        "several processes, DeepSpeed or FSDP",
        lambda c, engine, gpu: _releases(c) and engine != "none",
        "gradients are applied before they are averaged over the processes",
        "use --strategy flash_adamw",
    ),
    Rule(
        "training.optimizer flash_adamw_gradient_release",
        "training.fp16",
        lambda c, engine, gpu: _releases(c) and c.training.fp16,
        "gradients are applied before they are unscaled",
        "set training.fp16: false; the strategy's weights are in bf16 already",
    ),
    Rule(
        "training.optimizer flash_adamw_gradient_release",
        "training.spike_threshold",
        lambda c, engine, gpu: _releases(c) and c.training.spike_threshold > 0,
        "the norm of all gradients is not known when the first of them is applied",
        "set training.spike_threshold: 0, or use --strategy flash_adamw",
    ),
    Rule(
        "training.ema_decay",
        "DeepSpeed ZeRO-3",
        lambda c, engine, gpu: c.training.ema_decay > 0 and engine.startswith("deepspeed_zero3"),
        "its parameters are empty until a layer gathers them, so each update would gather the whole model",
        "use --strategy fsdp2, where each process averages its shards, or zero2; or training.average_checkpoints "
        "instead",
    ),
    Rule(
        "training.ema_decay",
        "training.optimizer flash_adamw_gradient_release or cpu_offload_ao",
        lambda c, engine, gpu: c.training.ema_decay > 0 and (_releases(c) or _offloads_optimizer(c)),
        "these change weights outside the step: in the backward pass, before it is known whether the step counts, or "
        "on the host, from which they are still being copied back when the step returns",
        "use --strategy flash_adamw or adamw_8bit, or training.average_checkpoints instead",
    ),
    Rule(
        "training.l2_sp",
        "DeepSpeed",
        lambda c, engine, gpu: bool(c.training.l2_sp) and engine.startswith("deepspeed"),
        "ZeRO steps on partitions of its own, from which the weights are written anew after each step",
        "use --strategy ddp or fsdp2, where each process holds the start of its own shards only; or set "
        "training.l2_sp: 0 and training.layer_decay or data.rehearsal",
    ),
    Rule(
        "training.l2_sp",
        "training.optimizer flash_adamw_gradient_release or cpu_offload_ao",
        lambda c, engine, gpu: bool(c.training.l2_sp) and (_releases(c) or _offloads_optimizer(c)),
        "these change weights outside the step: in the backward pass, before it is known whether the step counts, or "
        "on the host, from which they are still being copied back when the step returns",
        "use --strategy adamw_8bit or fsdp2_offload, or set training.l2_sp: 0",
    ),
    Rule(
        "training.l2_sp",
        "model.dtype bfloat16",
        lambda c, engine, gpu: bool(c.training.l2_sp) and c.model.dtype == "bfloat16",
        "a pull smaller than a 256th of a weight is lost in rounding",
        "set model.dtype: float32 and training.bf16: true",
    ),
    Rule(
        "training.ema_device cpu",
        "FSDP",
        lambda c, engine, gpu: (
            c.training.ema_decay > 0 and c.training.ema_device == "cpu" and engine.startswith("fsdp")
        ),
        "shards are gathered on their own device, and those of an average on the host could not be",
        "set training.ema_device: same; each GPU holds the average of its own shards only",
    ),
    Rule(
        "model.dtype bfloat16",
        "DeepSpeed or FSDP",
        lambda c, engine, gpu: c.model.dtype == "bfloat16" and engine.startswith(("deepspeed", "fsdp")),
        "ZeRO-3 and FSDP2 gather weights of one type only, and BatchNorm stays in float32; ZeRO-1 and 2 step on "
        "float32 copies, so no memory is saved",
        "set model.dtype: float32 and training.bf16: true, with an optimizer for float32 weights",
    ),
    Rule(
        "model.dtype bfloat16",
        "training.fp16",
        lambda c, engine, gpu: c.model.dtype == "bfloat16" and c.training.fp16,
        "loss scaling is for float32 weights with float16 computation",
        "set training.fp16: false",
    ),
)


def find_conflicts(config: RunConfig, engine: str = "none", gpu: bool = True) -> list[str]:
    """Return one sentence for each rule that the configuration breaks."""
    return [
        f"{r.first} and {r.second} exclude each other: {r.reason}. Instead: {r.instead}."
        for r in RULES
        if r.holds(config, engine, gpu)
    ]


def peak_rate(t: TrainingConfig) -> float:
    """Return the highest peak learning rate of any part."""
    parts = (t.encoder_learning_rate, t.decoder_learning_rate, t.joint_learning_rate)
    return max(t.learning_rate, *(rate or 0.0 for rate in parts))


def limit_pulls(config: RunConfig, engine: str = "none") -> bool:
    """Return whether data.guard_limit turns the pull towards the base (training.l2_sp) on: nothing else that keeps
    what the model knows is set, and nothing excludes it."""
    m, d, t = config.model, config.data, config.training
    if d.guard_limit is None or t.l2_sp is not None:
        return False
    if d.rehearsal or m.distillation or m.freeze_encoder or m.lora_rank or t.layer_decay < 1:
        return False
    pulled = config.replaced({"training.l2_sp": 1e-9})
    return not any(rule.holds(pulled, engine, True) for rule in RULES if rule.first == "training.l2_sp")


def _limit_contradictions(d: DataConfig, t: TrainingConfig) -> Iterator[tuple[str, str]]:
    if not d.guard:
        yield "data.guard_limit", "has no effect without data.guard: name the data that must not get worse there."
    if not d.validation:
        yield "data.guard_limit", "needs data.validation, whose WER chooses among the models that keep the limit."
    if t.guard_steps != -1:
        yield (
            "training.guard_steps",
            f"{t.guard_steps} and data.guard_limit exclude each other: no model is taken without being judged. Leave "
            "it out (-1), and set training.eval_steps for fewer evaluations.",
        )


def find_contradictions(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield the key and what is wrong with its value, where that depends on another key."""
    m, d, t = config.model, config.data, config.training
    if m.adapter and not m.lora_rank:
        yield (
            "model.adapter",
            "needs model.lora_rank and the other LoRA keys as the adapter has them (`r` in its adapter_config.json), "
            "to continue training it. To train from base and adapter merged, give its directory as model.name.",
        )
    if m.adapter and changes_vocabulary(config):
        yield (
            "model.adapter",
            "fits the base model's own vocabulary, which model.tokenizer changes. Give the adapter's directory as "
            "model.name, which begins from the merged weights, or leave model.tokenizer out.",
        )
    for key in ("train", "rehearsal"):
        value = getattr(d, key)
        sources = value if isinstance(value, list) else [value]
        if not m.distillation and any(isinstance(source, dict) and "distillation" in source for source in sources):
            yield f"data.{key}", "a source's `distillation` has no effect without model.distillation. Set it above 0."
    if d.min_duration > d.max_duration:
        yield "data.min_duration", f"{d.min_duration} is above data.max_duration {d.max_duration}."
    if 1 <= d.max_samples <= d.skip_samples:
        yield "data.skip_samples", f"{d.skip_samples} leaves nothing of data.max_samples {d.max_samples}."
    if 0 < d.batch_duration < d.max_duration:
        yield (
            "data.batch_duration",
            f"{d.batch_duration} is below data.max_duration {d.max_duration}: the longest clips fit no batch.",
        )
    if t.max_steps == -1 and t.num_train_epochs <= 0:
        yield "training.num_train_epochs", f"has to be above 0, found {t.num_train_epochs}."
    peak = peak_rate(t)
    if (t.l2_sp or 0) * peak >= 1:
        yield (
            "training.l2_sp",
            f"{t.l2_sp:g} at a learning rate of {peak:g} pulls past the start in each step. Their product has to be "
            f"below 1, and is about 1e-3 in most runs: set training.l2_sp below {1 / peak:g}.",
        )
    if d.guard_limit is not None:
        yield from _limit_contradictions(d, t)
    for name in ("ema_decay", "average_checkpoints"):
        if getattr(t, name) and not d.validation:
            yield (
                f"training.{name}",
                "has no effect without data.validation, whose WER decides whether the average is taken. Set it, or "
                "set this to 0.",
            )
    allowed = ALLOWED_ARGS[t.optimizer]
    for name in sorted(set(t.optimizer_args) - allowed):
        yield "training.optimizer_args", f"{t.optimizer} has no option {name}; it has {', '.join(sorted(allowed))}."
    try:
        parse_tokenizer(m.tokenizer)
    except UserError as error:
        key, _, why = str(error).partition(": ")
        yield key, why
