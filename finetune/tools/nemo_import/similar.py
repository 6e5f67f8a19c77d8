"""A config.yaml of another script, whose keys are nearly those of a run file."""

from finetune.config.load import REQUIRED, schema_fields
from finetune.tools.nemo_import.nemo import OPTIMIZER_NAMES, take_precision
from finetune.tools.nemo_import.source import Import

OTHER_NAMES = {
    "encoder.gradient_checkpointing": "model.gradient_checkpointing",
    "decoder.gradient_checkpointing": "model.gradient_checkpointing",
    "model.encoder.gradient_checkpointing": "model.gradient_checkpointing",
    "model.decoder.gradient_checkpointing": "model.gradient_checkpointing",
    "training.gradient_checkpointing": "model.gradient_checkpointing",
    "model.pretrained_model": "model.name",
    "model.model_name": "model.name",
    "model.freeze_batch_norm": "model.freeze_batchnorm",
    "data.train_manifest": "data.train",
    "data.train_path": "data.train",
    "data.train_data": "data.train",
    "data.validation_manifest": "data.validation",
    "data.val_manifest": "data.validation",
    "data.eval_manifest": "data.validation",
    "data.valid_manifest": "data.validation",
    "data.test_manifest": "data.test",
    "data.max_train_samples": "data.max_samples",
    "training.group_by_length": "data.group_by_duration",
    "data.num_workers": "training.dataloader_num_workers",
    "training.num_workers": "training.dataloader_num_workers",
    "training.batch_size": "training.per_device_train_batch_size",
    "training.train_batch_size": "training.per_device_train_batch_size",
    "training.eval_batch_size": "training.per_device_eval_batch_size",
    "training.lr": "training.learning_rate",
    "training.scheduler": "training.lr_scheduler_type",
    "training.epochs": "training.num_train_epochs",
    "training.num_epochs": "training.num_train_epochs",
    "training.max_epochs": "training.num_train_epochs",
    "training.gradient_clip_val": "training.max_grad_norm",
    "training.accumulate_grad_batches": "training.gradient_accumulation_steps",
    "training.optim": "training.optimizer",
    "training.log_every_n_steps": "training.logging_steps",
    "training.checkpoint_dir": "training.output_dir",
}
"""What other scripts call a key of a run file."""


def translate(imported: Import) -> None:
    """Take equal keys over and translate known other names."""
    own = schema_fields()
    for key in own:
        value = imported.get(key)
        if value is not None:
            imported.set(key, value, "")
        elif imported.is_blank(key) and key in REQUIRED:
            imported.to_fill[key] = key
    for source, key in OTHER_NAMES.items():
        value = imported.get(source)
        if value is None or (source.endswith("gradient_checkpointing") and value is not True):
            continue
        if key in imported.settings and source not in own:
            if imported.settings[key][0] != value:
                imported.leave(source, f"{key} is set as well")
            continue
        is_of_part = source.endswith("coder.gradient_checkpointing")
        imported.set(key, value, source + (", which NeMo's modules do not have" if is_of_part else ""))
    name = imported.settings.get("training.optimizer", (None, ""))[0]
    if isinstance(name, str) and (ours := OPTIMIZER_NAMES.get(name.lower(), name)) != name:
        imported.set("training.optimizer", ours, f"training.optimizer {name}")
    betas = [imported.get(f"training.adam_beta{i}") for i in (1, 2)]
    if None not in betas and "training.optimizer_args" not in imported.settings:
        imported.set("training.optimizer_args", {"betas": betas}, "training.adam_beta1 and adam_beta2")
    take_precision(imported, "training.precision")
    if "training.output_dir" not in imported.settings:
        imported.set("training.output_dir", f"runs/{imported.file.stem}", "none was set")
        imported.to_fill.pop("training.output_dir", None)
    asked = imported.settings.get("training.num_gpus", (1, ""))[0]
    imported.processes = asked if isinstance(asked, int) and asked > 0 else 1
    if imported.processes > 1:
        imported.strategies.append("ddp")
