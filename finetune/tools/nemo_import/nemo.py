"""What each key of NeMo's fine-tuning YAML becomes in a run file: model, optimizer, trainer, experiment manager."""

import itertools
from typing import Any

from finetune.tools.nemo_import.nemo_data import translate_data
from finetune.tools.nemo_import.reasons import LAYOUT
from finetune.tools.nemo_import.source import Import

OPTIMIZER_NAMES = {
    "adamw": "adamw",
    "adam": "adamw",
    "fused_adam": "adamw",
    "distributed_fused_adam": "adamw",
    "megatron_fused_adam": "adamw",
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw8bit": "adamw_8bit",
    "adamw_8bit": "adamw_8bit",
    "8bit_adamw": "adamw_8bit",
    "adam8bit": "adamw_8bit",
    "adamw_bnb_8bit": "adamw_8bit",
    "paged_adamw_8bit": "paged_adamw_8bit",
    "lion": "lion_8bit",
    "lion_8bit": "lion_8bit",
    "adamw_torch_8bit": "adamw_8bit_ao",
    "adamw_torch_4bit": "adamw_4bit_ao",
}
SCHEDULE_NAMES = {
    "CosineAnnealing": "cosine",
    "NoamAnnealing": "inverse_sqrt",
    "NoamHoldAnnealing": "inverse_sqrt",
    "InverseSquareRootAnnealing": "inverse_sqrt",
    "T5InverseSquareRootAnnealing": "inverse_sqrt",
    "WarmupAnnealing": "linear",
    "WarmupHoldAnnealLinear": "linear",
    "PolynomialDecayAnnealing": "polynomial",
    "PolynomialHoldDecayAnnealing": "polynomial",
    "WarmupPolicy": "constant_with_warmup",
    "WarmupHoldPolicy": "constant_with_warmup",
    "OneCycleLR": "onecycle",
    "SquareAnnealing": "polynomial",
    "SquareRootAnnealing": "polynomial",
}
COPIED = {
    "model.optim.lr": "training.learning_rate",
    "model.optim.weight_decay": "training.weight_decay",
    "model.optim.sched.warmup_steps": "training.warmup_steps",
    "trainer.accumulate_grad_batches": "training.gradient_accumulation_steps",
    "trainer.log_every_n_steps": "training.logging_steps",
    "exp_manager.checkpoint_callback_params.every_n_train_steps": "training.save_steps",
}
ELSEWHERE = (
    "name",  # part of training.output_dir
    "trainer.accelerator",
    "trainer.enable_checkpointing",
    "trainer.logger",
    "trainer.enable_progress_bar",
    "exp_manager.resume_ignore_no_checkpoint",  # always so: without a checkpoint a run starts at step 0
)
"""Keys that say nothing here, or whose part another key has."""


def is_nemo(tree: dict[str, Any]) -> bool:
    """Return whether a configuration is of NeMo's kind, rather than one with `training:`."""
    model = tree.get("model")
    inside = isinstance(model, dict) and {"train_ds", "optim", "encoder", "joint"} & model.keys()
    return bool(inside or "trainer" in tree or any(str(key).startswith("init_from_") for key in tree))


def translate(imported: Import) -> None:
    """Translate `model:` with its data sets and optimizer, `trainer:` and `exp_manager:`."""
    for source, key in COPIED.items():
        imported.copy(source, key)
    for key in ELSEWHERE:
        imported.get(key)
    _model(imported)
    translate_data(imported)
    _optimizer(imported)
    _schedule(imported, "model.optim.sched")
    _devices(imported)
    _trainer(imported)
    _exp_manager(imported)
    imported.used.update(key for key, value in imported.leaves.items() if value is None)  # null says nothing


def _model(imported: Import) -> None:
    for source in ("init_from_nemo_model", "init_from_pretrained_model"):
        value = imported.get(source)
        if isinstance(value, dict):  # model0: {path: ..., include: [...]}
            first = next(iter(value.values()))
            value = first.get("path") or first.get("name") if isinstance(first, dict) else first
        if value and "model.name" not in imported.settings:
            imported.set("model.name", value, source)
            if source == "init_from_pretrained_model" and "/" not in str(value):
                imported.set("model.name", f"nvidia/{value}", f"{source} {value}, as the hub names it")
    if "model.name" not in imported.settings:
        if imported.section("model.encoder"):
            _layout(imported)
        else:
            imported.to_fill["model.name"] = "init_from_nemo_model or init_from_pretrained_model"
    _vocabulary(imported)
    names = ("gradient_checkpointing", "activation_checkpointing", "use_gradient_checkpointing")
    for section, name in itertools.product(("model.encoder", "encoder", "model.decoder", "decoder"), names):
        if imported.get(f"{section}.{name}"):
            comment = f"{section}.{name}, which NeMo's modules do not have"
            imported.set("model.gradient_checkpointing", True, comment)
    masks = imported.section("model.spec_augment")
    if masks.get("freq_masks") == masks.get("time_masks") == 0:
        imported.get("model.spec_augment")
        imported.set("model.spec_augment", False, "model.spec_augment: no masks")
    kind = next((k for k in ("tdt_kwargs", "warprnnt_numba_kwargs") if imported.get(f"model.loss.{k}")), "tdt_kwargs")
    for name in ("sigma", "omega", "fastemit_lambda"):
        imported.copy(f"model.loss.{kind}.{name}", f"model.{name}")
    imported.copy("model.train_ds.unified_auto_ratio", "model.unified_auto_ratio")
    for key in ("model.rnnt_reduction", "model.ctc_reduction"):
        reduction = imported.get(key)
        if reduction in ("mean_batch", "mean_volume"):
            imported.set("training.loss_reduction", reduction, key)
        elif reduction:
            imported.leave(key, "training.loss_reduction is mean_batch or mean_volume")
    imported.copy("model.aux_ctc.ctc_loss_weight", "model.ctc_loss_weight")
    if imported.get("model.aux_ctc.ctc_reduction"):
        imported.leave("model.aux_ctc.ctc_reduction", "both parts of the loss are reduced alike")
    if imported.get("model.log_prediction") is False:
        imported.set("training.sample_predictions", 0, "model.log_prediction")
    for name in ("fuse_loss_wer", "fused_batch_size"):
        why = "the loss works block by block in any case; model.joint_memory_budget sets the size of a block"
        imported.leave(f"model.joint.{name}", why)
    if imported.get("model.sample_rate", 16000) != 16000:
        imported.leave("model.sample_rate", "audio is resampled to the model's own rate")


def _layout(imported: Import) -> None:
    """Take the file itself as the layout of a model with random weights."""
    imported.set("model.name", str(imported.file), "no init_from_...: the layout of this file, with random weights")
    for section in LAYOUT:
        imported.get(section)
    tokenizer = imported.get("model.tokenizer.dir")
    imported.set("model.tokenizer", tokenizer or "???", "model.tokenizer.dir")
    if not tokenizer:
        imported.to_fill["model.tokenizer"] = "model.tokenizer.dir"
    imported.get("model.tokenizer")


def _vocabulary(imported: Import) -> None:
    """Translate `update_tokenizer` of NeMo's fine-tuning script; character models have no counterpart."""
    if imported.get("model.char_labels.update_labels"):
        imported.leave("model.char_labels.update_labels", "models of characters are not supported")
    else:
        imported.get("model.char_labels")
    if not imported.get("model.tokenizer.update_tokenizer"):
        imported.get("model.tokenizer")
        return
    directory, kind = imported.get("model.tokenizer.dir"), imported.get("model.tokenizer.type")
    if directory and kind in (None, "bpe"):
        comment = "model.tokenizer.update_tokenizer; extend_from would keep the model's own pieces"
        imported.set("model.tokenizer", {"replace_with": directory}, comment)
    else:
        why = "a vocabulary is replaced by one SentencePiece tokenizer: its directory is model.tokenizer.replace_with"
        imported.leave("model.tokenizer.update_tokenizer", why)


def _optimizer(imported: Import) -> None:
    name = str(imported.get("model.optim.name") or "adamw")
    ours = OPTIMIZER_NAMES.get(name.lower())
    if ours is None:
        ours, comment = "adamw", f"in place of model.optim.name {name}"
        why = f"there is no optimizer {name}; adamw takes its place, and its learning rate may not fit"
        imported.leave("model.optim.name", why)
    else:
        comment = "model.optim.name" + (f" {name}" if name != ours else "")
    imported.set("training.optimizer", ours, comment)
    betas, eps = imported.get("model.optim.betas"), imported.get("model.optim.eps")
    if ours.startswith("lion"):
        arguments = {"betas": betas} if betas else {}
    else:
        arguments = {"betas": betas or [0.9, 0.999]} | ({} if eps is None else {"eps": eps})
    if arguments:
        comment = "model.optim.betas" if betas else "torch's own, as NeMo takes them"
        imported.set("training.optimizer_args", arguments, comment)


def _schedule(imported: Import, sched: str) -> None:
    name = imported.get(f"{sched}.name")
    steps, ratio = imported.get(f"{sched}.warmup_steps"), imported.get(f"{sched}.warmup_ratio")
    if ratio is not None and not steps:
        imported.set("training.warmup_ratio", ratio, f"{sched}.warmup_ratio")
    elif not steps:
        imported.set("training.warmup_ratio", 0.0, "NeMo has no warm-up where none is set")
    if not name:
        value = "constant_with_warmup" if steps or ratio else "constant"
        imported.set("training.lr_scheduler_type", value, f"no {sched}")
        return
    ours, comment = SCHEDULE_NAMES.get(str(name)), f"{sched}.name {name}"
    floor, peak = imported.get(f"{sched}.min_lr") or 0.0, imported.get("model.optim.lr")
    if ours is None:
        ours, comment = "cosine", f"in place of {sched}.name {name}"
        imported.leave(f"{sched}.name", f"there is no schedule {name}; cosine takes its place")
    if str(name) in ("SquareAnnealing", "SquareRootAnnealing"):
        comment += ", nearest to it"
    if str(name).startswith("Noam"):
        _noam_peak(imported, sched, steps, peak)
    elif floor and peak and ours == "cosine" and float(floor) >= 0.05 * float(peak):
        ours = "cosine_with_min_lr"
        comment += f" with min_lr {floor:g}: here the floor is a tenth of the peak, {float(peak) / 10:g}"
    elif floor:
        imported.leave(f"{sched}.min_lr", "the schedule has no floor")
    imported.set("training.lr_scheduler_type", ours, comment)


def _noam_peak(imported: Import, sched: str, steps: Any, factor: Any) -> None:
    """Set Noam's peak: its lr is a factor of d_model^-0.5 x warmup^-0.5."""
    width = imported.get(f"{sched}.d_model")
    if isinstance(width, int) and isinstance(steps, int) and steps > 0 and factor:
        peak = float(f"{float(factor) * width**-0.5 * steps**-0.5:.4g}")
        imported.set("training.learning_rate", peak, f"peak of Noam's schedule with model.optim.lr {factor}")
    else:
        imported.settings.pop("training.learning_rate", None)
        why = "the peak of Noam's schedule needs d_model and warmup_steps as numbers; set training.learning_rate"
        imported.leave("model.optim.lr", why)


def _devices(imported: Import) -> None:
    devices, nodes = imported.get("trainer.devices", 1), imported.get("trainer.num_nodes", 1)
    if isinstance(devices, list):
        devices = len(devices)
    elif isinstance(devices, str):
        is_number = devices.lstrip("-").isdigit()
        devices = int(devices) if is_number else -1 if devices == "auto" else len(devices.split(","))
    imported.processes, imported.nodes = devices, nodes if isinstance(nodes, int) else 1
    if devices > 0 and devices * imported.nodes > 1:
        imported.set("training.num_gpus", devices * imported.nodes, "trainer.devices x trainer.num_nodes")
    strategy = imported.get("trainer.strategy")
    options = strategy if isinstance(strategy, dict) else {}
    target = str(options.get("_target_", "") if options else strategy or "")
    if target.startswith("deepspeed_stage_"):  # deepspeed_stage_2_offload
        imported.strategies.append(target.replace("deepspeed_stage_", "zero"))
    elif "DeepSpeed" in target:
        stage = str(options.get("stage", 2))
        imported.strategies.append(
            f"zero{stage}" + ("_offload" if options.get("offload_optimizer") and stage != "1" else "")
        )
    elif "fsdp" in target.lower() or "ModelParallel" in target:
        imported.strategies.append("fsdp2")
    elif devices != 1 or imported.nodes > 1:
        imported.strategies.append("ddp")


def _trainer(imported: Import) -> None:
    steps = imported.get("trainer.max_steps")
    if isinstance(steps, int) and steps > 0:
        imported.set("training.max_steps", steps, "trainer.max_steps")
        if imported.get("trainer.max_epochs"):
            imported.leave("trainer.max_epochs", "training.max_steps ends the run")
    else:
        imported.copy("trainer.max_epochs", "training.num_train_epochs")
    take_precision(imported, "trainer.precision")
    norm = imported.get("trainer.gradient_clip_val")
    comment = "trainer.gradient_clip_val" if norm is not None else "NeMo does not clip where nothing is set"
    imported.set("training.max_grad_norm", float(norm or 0.0), comment)
    every = imported.leaves.get("trainer.val_check_interval")
    if isinstance(every, int) and every > 1:
        imported.get("trainer.val_check_interval")
        accumulated = imported.get("trainer.accumulate_grad_batches") or 1
        comment = "trainer.val_check_interval" + (f" {every} batches, in steps" if accumulated > 1 else "")
        imported.set("training.eval_steps", max(1, every // accumulated), comment)
    if imported.get("trainer.sync_batchnorm") and imported.processes != 1:
        imported.set("model.sync_batchnorm", True, "trainer.sync_batchnorm; refused on a machine without a GPU")


def take_precision(imported: Import, key: str) -> None:
    """Translate mixed precision, as Lightning names it."""
    value = imported.get(key)
    name = str(value).lower()
    if name.startswith("bf16"):
        imported.set("training.bf16", True, f"{key} {value}")
        if name == "bf16-true":
            note = "weights in bf16 (bf16-true): add --strategy bf16_stochastic_rounding, which rounds updates safely"
            imported.notes.append(note)
    elif name in ("16", "16-mixed", "fp16"):
        imported.set("training.fp16", True, f"{key} {value}; bf16 is safer on GPUs since Ampere")
    elif value is not None and name not in ("32", "32-true", "no", "fp32"):
        imported.leave(key, "float32, bf16 or fp16; TensorFloat-32 is training.tf32")


def _exp_manager(imported: Import) -> None:
    folder = imported.get("exp_manager.exp_dir")
    name = imported.get("exp_manager.name") or imported.get("name") or imported.file.stem
    value = f"{str(folder).rstrip('/')}/{name}" if folder else f"runs/{name}"
    imported.set("training.output_dir", value, "exp_manager.exp_dir and name" if folder else "no exp_manager.exp_dir")
    trackers = ["tensorboard"] if imported.get("exp_manager.create_tensorboard_logger", True) else []
    trackers += [name for name in ("wandb", "clearml", "mlflow") if imported.get(f"exp_manager.create_{name}_logger")]
    if not trackers:
        imported.set("training.report_to", "none", "exp_manager.create_tensorboard_logger")
    elif trackers != ["tensorboard"]:
        imported.set("training.report_to", trackers, "exp_manager.create_..._logger")
    if imported.get("exp_manager.resume_if_exists"):
        imported.set("training.resume_from_checkpoint", True, "exp_manager.resume_if_exists")
    key = "exp_manager.checkpoint_callback_params.save_top_k"
    kept = imported.get(key)
    if isinstance(kept, int) and kept > 0:
        imported.set("training.save_total_limit", kept, f"{key}: the newest here, with the best beside them")
