"""Configurations of NeMo and of other scripts as run files: the result is loaded as training loads it."""

import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT, TOKENIZER, tiny_layout

from finetune.config.load import load_config
from finetune.config.optimizers import OPTIMIZERS
from finetune.config.schema import SCHEDULES
from finetune.tools.nemo_import.run_file import as_yaml, import_config, left_over

NEMO: dict[str, Any] = {
    "name": "calls",
    "init_from_pretrained_model": "nvidia/parakeet-tdt-0.6b-v3",
    "model": {
        "sample_rate": 16000,
        "train_ds": {
            "manifest_filepath": "train.json",
            "sample_rate": "${model.sample_rate}",
            "batch_size": 12,
            "shuffle": True,
            "num_workers": 6,
            "pin_memory": False,
            "max_duration": 20,
            "min_duration": 0.2,
            "is_tarred": False,
            "tarred_audio_filepaths": None,
            "shuffle_n": 512,
            "bucketing_strategy": "fully_randomized",
        },
        "validation_ds": {"manifest_filepath": "valid.json", "batch_size": 9, "shuffle": False, "num_workers": 8},
        "test_ds": {"manifest_filepath": None, "batch_size": 9},
        "tokenizer": {"update_tokenizer": False, "dir": None, "type": "bpe"},
        "spec_augment": {"freq_masks": 2, "time_masks": 10, "time_width": 0.05},
        "optim": {
            "name": "adamw",
            "lr": 1e-4,
            "betas": [0.9, 0.95],
            "weight_decay": 1e-3,
            "sched": {"name": "CosineAnnealing", "warmup_steps": 50, "warmup_ratio": None, "min_lr": 1e-6},
        },
    },
    "trainer": {
        "devices": 2,
        "max_epochs": 7,
        "max_steps": -1,
        "val_check_interval": 1.0,
        "accumulate_grad_batches": 4,
        "gradient_clip_val": 0.5,
        "precision": "bf16-mixed",
        "log_every_n_steps": 20,
        "sync_batchnorm": True,
        "strategy": {"_target_": "lightning.pytorch.strategies.DDPStrategy", "gradient_as_bucket_view": True},
        "benchmark": False,
    },
    "exp_manager": {"exp_dir": "results", "name": "${name}", "resume_if_exists": True, "create_wandb_logger": False},
}

Result = tuple[dict[str, Any], Any]


@pytest.fixture
def converted(tmp_path: Path) -> Callable[..., Result]:
    """Imports a configuration with settings changed, and loads the result; returns its settings and the import."""

    def run(source: dict[str, Any], *overrides: str, **changes: Any) -> Result:
        path, run_file = tmp_path / "source.yaml", tmp_path / "RUN.yaml"
        path.write_text(yaml.safe_dump(source), encoding="utf-8")
        given = [*overrides, *(f"{key.replace('__', '.')}={value}" for key, value in changes.items())]
        imported = import_config(path, given)
        run_file.write_text(as_yaml(imported), encoding="utf-8")
        config, origin = load_config(run_file, [], [])
        flat = {key: value for key, value in _flat(config).items() if key in origin}
        return flat, imported

    return run


def _flat(config: Any) -> dict[str, Any]:
    return {f"{top}.{name}": value for top, section in config.as_dict().items() for name, value in section.items()}


def test_a_nemo_fine_tuning(converted):
    settings, imported = converted(NEMO)
    assert settings == {
        "model.name": "nvidia/parakeet-tdt-0.6b-v3",
        "model.sync_batchnorm": True,
        "data.train": "train.json",
        "data.validation": "valid.json",
        "data.min_duration": 0.2,
        "data.max_duration": 20,
        "data.shuffle": True,
        "data.shuffle_buffer_size": 512,
        "training.output_dir": "results/calls",
        "training.optimizer": "adamw",
        "training.optimizer_args": {"betas": [0.9, 0.95]},
        "training.learning_rate": 1e-4,
        "training.weight_decay": 1e-3,
        "training.lr_scheduler_type": "cosine",
        "training.warmup_steps": 50,
        "training.max_grad_norm": 0.5,
        "training.per_device_train_batch_size": 12,
        "training.per_device_eval_batch_size": 9,
        "training.gradient_accumulation_steps": 4,
        "training.num_train_epochs": 7,
        "training.bf16": True,
        "training.num_gpus": 2,
        "training.dataloader_num_workers": 6,
        "training.dataloader_pin_memory": False,
        "training.logging_steps": 20,
        "training.resume_from_checkpoint": True,
    }
    # Each key is either translated or listed, and what says nothing is neither.
    said = "\n".join(left_over(imported))
    assert "trainer.val_check_interval: a share of an epoch" in said
    assert "model.train_ds.bucketing_strategy" in said
    assert "trainer.benchmark" in said
    assert "model.spec_augment (freq_masks, time_masks, time_width): comes with the model" in said
    assert not {"model.optim.lr", "model.train_ds.tarred_audio_filepaths", "trainer.precision"} & imported.left.keys()
    assert as_yaml(imported).count("# model.optim.lr\n") == 1


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"trainer__precision": "16-mixed"}, {"training.fp16": True, "training.bf16": None}),
        ({"trainer__precision": "32"}, {"training.fp16": None, "training.bf16": None}),
        (
            {"trainer__max_steps": 900, "trainer__val_check_interval": 100},
            {"training.max_steps": 900, "training.eval_steps": 25},
        ),
        ({"trainer__gradient_clip_val": "null"}, {"training.max_grad_norm": 0.0}),
        ({"model__optim__sched__warmup_steps": "null"}, {"training.warmup_ratio": 0.0, "training.warmup_steps": None}),
        (
            {"model__optim__sched__warmup_steps": "null", "model__optim__sched__warmup_ratio": 0.2},
            {"training.warmup_ratio": 0.2},
        ),
        ({"model__optim__sched__min_lr": 1e-5}, {"training.lr_scheduler_type": "cosine_with_min_lr"}),
        ({"model__optim__sched": "null"}, {"training.lr_scheduler_type": "constant", "training.warmup_ratio": 0.0}),
        ({"model__optim__betas": "null"}, {"training.optimizer_args": {"betas": [0.9, 0.999]}}),
        ({"model__optim__name": "adamw8bit"}, {"training.optimizer": "adamw_8bit"}),
        ({"model__aux_ctc__ctc_loss_weight": 0.4}, {"model.ctc_loss_weight": 0.4}),
        ({"model__ctc_reduction": "mean_volume"}, {"training.loss_reduction": "mean_volume"}),
        ({"model__train_ds__max_duration": "null"}, {"data.max_duration": float("inf")}),
        (
            {"model__train_ds__batch_duration": 15},
            {"data.batch_duration": 15, "data.max_duration": 15, "training.per_device_train_batch_size": None},
        ),
        ({"model__train_ds__use_bucketing": "false"}, {"data.group_by_duration": False}),
        (
            {"model__train_ds__manifest_filepath": "[[a.json],[b.json]]"},
            {"data.train": ["a.json", "b.json"]},
        ),
        (
            {
                "model__train_ds__manifest_filepath": "a__OP_0..3_CL_.json",
                "model__train_ds__tarred_audio_filepaths": "a__OP_0..3_CL_.tar",
            },
            {"data.train": {"path": "a__OP_0..3_CL_.json", "tarred_audio": "a__OP_0..3_CL_.tar"}},
        ),
        ({"model__encoder__gradient_checkpointing": "true"}, {"model.gradient_checkpointing": True}),
        ({"model__spec_augment__freq_masks": 0, "model__spec_augment__time_masks": 0}, {"model.spec_augment": False}),
        ({"init_from_pretrained_model": "null", "init_from_nemo_model": "m.nemo"}, {"model.name": "m.nemo"}),
        ({"init_from_pretrained_model": "stt_en_conformer"}, {"model.name": "nvidia/stt_en_conformer"}),
        ({"exp_manager__create_wandb_logger": "true"}, {"training.report_to": ["tensorboard", "wandb"]}),
        ({"trainer__devices": 1}, {"training.num_gpus": None, "model.sync_batchnorm": None}),
    ],
)
def test_single_values(converted, changes, expected):
    settings, _ = converted(NEMO, **changes)
    assert {key: settings.get(key) for key in expected} == expected


def test_sources_of_the_hub_and_of_lhotse(converted):
    hub = {"manifest_filepath": "hugginface", "batch_size": 4, "text_key": "sentence", "audio_key": "audio.array"}
    hub["hf_data_cfg"] = [
        {"path": "${model.data_path}", "name": "fr", "split": s, "streaming": True} for s in ("a", "b")
    ]
    source = {**NEMO, "model": {**NEMO["model"], "data_path": "owner/speech", "train_ds": hub}}
    settings, _ = converted(source)
    one = {"path": "owner/speech", "name": "fr", "text_column": "sentence"}
    assert settings["data.train"] == [{**one, "split": "a"}, {**one, "split": "b"}]
    weighted = [
        {"type": "nemo", "manifest_filepath": "a.json", "weight": 3, "tags": {"lang": "en"}},
        {
            "type": "group",
            "weight": 1,
            "input_cfg": [{"manifest_filepath": "b.json"}, {"manifest_filepath": "c.json"}],
        },
        {"type": "lhotse_shar", "shar_path": "shar", "weight": 4},
    ]
    source["model"]["train_ds"] = {
        "input_cfg": weighted,
        "use_lhotse": True,
        "batch_duration": 100,
        "max_duration": 30,
    }
    settings, imported = converted(source)
    assert settings["data.train"] == [
        {"path": "a.json", "weight": 0.375, "language": "en"},
        {"path": "b.json", "weight": 0.0625},
        {"path": "c.json", "weight": 0.0625},
    ]
    assert any("lhotse_shar" in key for key in imported.left)


def test_noam_has_a_peak(converted):
    sched = {"name": "NoamAnnealing", "d_model": "${model.encoder.d_model}", "warmup_steps": 10_000, "min_lr": 1e-6}
    model = {**NEMO["model"], "encoder": {"d_model": 512}, "optim": {"name": "adamw", "lr": 5.0, "sched": sched}}
    settings, _ = converted({**NEMO, "model": model})
    assert settings["training.learning_rate"] == pytest.approx(5.0 * 512**-0.5 * 10_000**-0.5, rel=1e-3)
    assert settings["training.lr_scheduler_type"] == "inverse_sqrt"


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("deepspeed_stage_2_offload", "zero2_offload"),
        ("{_target_: lightning.pytorch.strategies.DeepSpeedStrategy, stage: 3}", "zero3"),
        ("{_target_: lightning.pytorch.strategies.ModelParallelStrategy}", "fsdp2"),
        ("ddp", "ddp"),
    ],
)
def test_the_strategy_is_one_that_ships(converted, strategy, expected):
    from finetune.paths import strategy_names

    source = {**NEMO, "trainer": {**NEMO["trainer"], "strategy": None}}
    _, imported = converted(source, f"trainer.strategy={strategy}")
    assert imported.strategies == [expected]
    assert expected in strategy_names()


def test_names_that_are_translated_to_exist():
    from finetune.config.load import schema_fields
    from finetune.tools.nemo_import import nemo, nemo_data
    from finetune.tools.nemo_import.nemo import OPTIMIZER_NAMES, SCHEDULE_NAMES
    from finetune.tools.nemo_import.similar import OTHER_NAMES

    assert set(OPTIMIZER_NAMES.values()) <= set(OPTIMIZERS)
    assert set(SCHEDULE_NAMES.values()) <= set(SCHEDULES)
    assert {*OTHER_NAMES.values(), *nemo.COPIED.values(), *nemo_data.COPIED.values()} <= schema_fields().keys()
    reasons = (ROOT / "finetune" / "tools" / "nemo_import" / "reasons.py").read_text(encoding="utf-8")
    named = set(re.findall(r"(?<![\w.])((?:data|training)\.[a-z]\w+)", reasons))
    assert not {n for n in named if n not in schema_fields() and n not in ("training.deepspeed", "data.md")}


def test_a_config_that_is_nearly_ours(converted):
    source = {
        "model": {"name": "nvidia/parakeet-tdt-0.6b-v3", "gradient_checkpointing": True},
        "encoder": {"gradient_checkpointing": True},
        "data": {"train_manifest": "a.jsonl", "max_samples": -1, "cache": "x"},
        "training": {
            "optimizer": "8bit_adamw",
            "per_device_train_batch_size": 20,
            "gradient_accumulation_steps": 6,
            "num_epochs": 2,
            "num_gpus": 2,
            "bf16": True,
            "learning_rat": 1e-4,
        },
    }
    settings, imported = converted(source)
    assert settings["training.optimizer"] == "adamw_8bit"
    assert settings["data.train"] == "a.jsonl"
    assert settings["training.num_train_epochs"] == 2
    assert settings["model.gradient_checkpointing"] is True
    assert settings["training.output_dir"] == "runs/source"
    assert imported.left == {"data.cache": "", "training.learning_rat": "near it: training.learning_rate"}


@pytest.fixture
def script(capsys: Any) -> Callable[..., tuple[int, str, str]]:
    """Calls the command; returns exit code, stdout and stderr."""
    from finetune.import_nemo import main

    earlier = runpy.run_path(str(ROOT / "scripts" / "import_nemo_config.py"))
    assert earlier["main"] is main

    def run(*arguments: object) -> tuple[int, str, str]:
        code = main([str(a) for a in arguments])
        return code, *capsys.readouterr()

    return run


def test_the_command_names_what_is_missing_and_how_to_start(script, tmp_path):
    """A layout without weights: the file itself is the model, when its tokenizer and data are given."""
    layout = tiny_layout()
    layout["model"]["train_ds"] = {"manifest_filepath": "???", "batch_size": 4, "seed": "${now:%s}"}
    layout["model"]["tokenizer"]["dir"] = "???"
    layout["model"]["optim"] = {"name": "novograd", "lr": 0.01}
    layout["trainer"] = {"devices": 1, "max_steps": 5}
    source, run_file = tmp_path / "layout.yaml", tmp_path / "RUN.yaml"
    source.write_text(yaml.safe_dump(layout), encoding="utf-8")
    code, _, said = script(source, "--output", run_file)
    assert code == 1
    assert f"data.train (model.train_ds.manifest_filepath of {source} is not set)" in said
    assert "model.tokenizer (model.tokenizer.dir of" in said
    assert "there is no optimizer novograd" in said
    assert "model.train_ds.seed: ${now:%s} is known to Hydra only" in said
    settings = ["model.train_ds.manifest_filepath=t.jsonl", f"++model.tokenizer.dir={TOKENIZER}"]
    code, _, said = script(source, *settings, "--output", run_file)
    assert code == 0, said
    assert f"bash scripts/run_training.sh --config {run_file}" in said
    config, _ = load_config(run_file, [], [])
    assert config.model.name == str(source)
    assert config.model.tokenizer == str(TOKENIZER)
    # The model that the run file names can be built.
    from finetune.models.loading import load_model

    assert sum(p.numel() for p in load_model(config.model.name, config.model.tokenizer).parameters()) > 50_000


def test_files_that_are_refused(script, tmp_path):
    other = tmp_path / "other.yaml"
    other.write_text("services: {web: {image: nginx}}\n")
    code, printed, said = script(other)
    assert code == 2
    assert "neither NeMo's" in said
    assert printed == ""
    other.write_text("trainer: {devices: 1}\nmodel: {train_ds: {batch_size: '${model.gone}'}}\n")
    code, _, said = script(other)
    assert code == 2
    assert "model.train_ds.batch_size" in said
    other.write_text("trainer: {devices: 1}\nmodel: {train_ds: {batch_duration: many, max_duration: 2}}\n")
    assert script(other)[0] == 2
    assert script(tmp_path / "none.yaml")[0] == 2
