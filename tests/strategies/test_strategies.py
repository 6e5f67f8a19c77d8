"""Strategies, what excludes each other, processes and launchers: what is taken and what is refused with its remedy."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from conftest import ROOT, problem

from finetune.config.compatibility import RULES, find_conflicts
from finetune.config.load import load_config, overlay_path
from finetune.config.optimizers import OPTIMIZERS
from finetune.config.schema import schema_fields
from finetune.errors import UserError
from finetune.paths import strategy_names
from finetune.strategies import strategy as strategy_module
from finetune.strategies.strategy import Strategy, check_num_gpus, resolve_precision, resolve_strategy

ACCELERATE_FILES = sorted((ROOT / "accelerate_configs").glob("*.yaml"))
OVERLAYS = sorted((ROOT / "finetune" / "strategies").glob("*.yaml"))
RUN_FILES = sorted((ROOT / "finetune" / "configs").glob("*.yaml"))

BATCHES = {
    "training.per_device_train_batch_size",
    "training.per_device_eval_batch_size",
    "training.gradient_accumulation_steps",
}
# Autocast over weights in bf16 would only run some operations in float32 again.
BF16_WEIGHTS = {"training.optimizer", "model.dtype", "training.bf16"}
# The keys that a memory strategy may be about. One that needs another key is about something else.
STRATEGY_KEYS = {
    **{name: {"training.optimizer", "training.optimizer_args"} for name in OPTIMIZERS},
    "flash_adamw": BF16_WEIGHTS,
    "flash_adamw_gradient_release": {"training.max_grad_norm"} | BF16_WEIGHTS,
    "bf16_full": BF16_WEIGHTS,
    "bf16_stochastic_rounding": BF16_WEIGHTS,
    "recommended": {"model.gradient_checkpointing", "training.optimizer", "training.bf16"} | BATCHES,
    "recommended_multi": {"training.optimizer", "training.bf16"} | BATCHES,
    "recommended_small": {
        "model.gradient_checkpointing",
        "data.max_duration",
        "training.cuda_alloc_conf",
    }
    | BF16_WEIGHTS
    | BATCHES,
    "gradient_checkpointing": {"model.gradient_checkpointing"},
    "gradient_checkpointing_every_2": {"model.gradient_checkpointing", "model.gradient_checkpointing_every"},
    "activation_offload": {"model.activation_offload"},
    "freeze_encoder": {"model.freeze_encoder"},
    "partial_unfreeze": {"model.freeze_encoder", "model.unfreeze_encoder_layers"},
    "lora": {"model.lora_rank", "model.lora_alpha", "model.lora_dropout", "model.lora_targets"},
}


WITHOUT_ACCUMULATION = ("cpu_offload_gradients_ao", "flash_adamw_gradient_release")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests themselves may run under a launcher."""
    for name in ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP", "ACCELERATE_MIXED_PRECISION", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


# ---- strategies ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ACCELERATE_FILES, ids=lambda p: p.stem)
def test_accelerate_files_are_genuine(path: Path) -> None:
    loaded = load_config_from_file(str(path))  # refuses keys that Accelerate does not know
    values = yaml.safe_load(path.read_text())
    assert loaded.to_dict().items() >= {k: v for k, v in values.items() if k != "distributed_type"}.items()
    assert str(getattr(loaded.distributed_type, "value", loaded.distributed_type)) == values["distributed_type"]
    assert resolve_strategy([path.stem]).names == [path.stem]
    if loaded.deepspeed_config:
        json_file = ROOT / loaded.deepspeed_config["deepspeed_config_file"]
        assert json_file.parent == ROOT / "ds_configs"
        assert json.loads(json_file.read_text())["train_micro_batch_size_per_gpu"] == "auto"


@pytest.mark.parametrize("path", OVERLAYS, ids=lambda p: p.stem)
def test_overlays_set_only_what_they_are_about(path: Path, run_file: Callable[..., Path]) -> None:
    assert path.stem in strategy_names(), "an overlay needs accelerate_configs/NAME.yaml of the same name"
    values = yaml.safe_load(path.read_text())
    keys = {f"{section}.{name}" for section, inner in values.items() for name in inner}
    assert keys
    assert keys <= set(schema_fields())
    assert keys <= STRATEGY_KEYS[path.stem]
    config, origin = load_config(run_file(), [path.stem], [])
    assert {key for key, layer in origin.items() if layer == f"strategy {path.stem}"} == keys
    for key in keys:
        section, name = key.split(".")
        assert config.get(f"{section}.{name}") == values[section][name]


@pytest.mark.parametrize("path", RUN_FILES, ids=lambda p: p.stem)
def test_shipped_run_files_load_under_every_strategy(path: Path) -> None:
    for name in strategy_names():
        # These two refuse accumulation, and say so.
        once = ["training.gradient_accumulation_steps=1"] if name in WITHOUT_ACCUMULATION else []
        config, _ = load_config(path, [name], once)
        assert find_conflicts(config, resolve_strategy([name]).engine) == []


def test_strategies_and_engines() -> None:
    engines = {name: resolve_strategy([name]).engine for name in strategy_names()}
    expected = {"adamw": "none", "adamw_8bit": "none", "gradient_checkpointing": "none"}
    expected |= {"ddp": "ddp", "zero2": "deepspeed", "zero2_offload": "deepspeed_offload", "zero3": "deepspeed_zero3"}
    expected |= {"zero3_offload": "deepspeed_zero3_offload", "fsdp2": "fsdp", "fsdp2_offload": "fsdp_offload"}
    assert engines.items() >= expected.items()
    both = resolve_strategy(["gradient_checkpointing", "zero2_offload", "gradient_checkpointing"])
    assert both.names == ["gradient_checkpointing", "zero2_offload"]
    assert both.engine == "deepspeed_offload"
    assert overlay_path("zero2_offload").exists() is False


def test_unknown_strategy(refused: Callable[..., str], run_file: Callable[..., Path]) -> None:
    message = refused("--config", run_file(), "--strategy", "xyzzy")
    assert "--strategy: there is no strategy 'xyzzy'" in message
    assert all(name in message for name in strategy_names())
    message = refused("--config", run_file(), "--strategy", "adam_8bit")
    assert "there is no strategy 'adam_8bit'. Did you mean adamw_8bit" in message
    assert "docs/strategies.md lists all" in message
    assert "flash_adamw" not in message


def test_two_engines(refused: Callable[..., str], run_file: Callable[..., Path], tmp_path: Path) -> None:
    message = refused("--config", run_file(), "--strategy", "ddp", "--strategy", "zero2_offload")
    assert "strategy ddp" in message
    assert "strategy zero2_offload" in message
    assert "two engines" in message
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    message = refused("--config", run_file(), "--strategy", "zero2_offload", "--deepspeed", other)
    assert str(other) in message
    assert "strategy zero2_offload" in message
    message = refused("--config", run_file(), "--deepspeed", tmp_path / "nowhere.json")
    assert f"--deepspeed: there is no file {tmp_path / 'nowhere.json'}" in message
    other.write_text("{")
    assert f"{other} is not valid JSON" in refused("--config", run_file(), "--deepspeed", other)


def test_deepspeed_file_by_name() -> None:
    named = resolve_strategy([], str(ROOT / "ds_configs" / "zero2_offload.json"))
    assert (named.names, named.engine) == ([], "deepspeed_offload")
    assert resolve_strategy(["zero2_offload"], str(named.deepspeed_config)).engine == "deepspeed_offload"


def test_two_engines_of_ones_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("zero2_offload", "adamw"):
        (tmp_path / f"{name}.yaml").write_text((ROOT / "accelerate_configs" / f"{name}.yaml").read_text())
    (tmp_path / "sharded.yaml").write_text(
        "distributed_type: FSDP\nmixed_precision: bf16\nfsdp_config: {fsdp_version: 2}\n"
    )
    (tmp_path / "half.yaml").write_text("distributed_type: 'NO'\nmixed_precision: fp16\n")
    monkeypatch.setattr(strategy_module, "ACCELERATE_CONFIGS", tmp_path)
    monkeypatch.setattr("finetune.paths.ACCELERATE_CONFIGS", tmp_path)
    assert resolve_strategy(["adamw", "sharded"]).engine == "fsdp"
    with pytest.raises(UserError, match=r"strategy zero2_offload.*strategy sharded.*two engines"):
        resolve_strategy(["zero2_offload", "sharded"])
    with pytest.raises(UserError, match=r"strategy half wants mixed precision fp16.*bf16"):
        resolve_strategy(["sharded", "half"])


# ---- what excludes each other --------------------------------------------------------------------------------------

RELEASE = "--strategy=flash_adamw_gradient_release"
CONFLICTS: dict[tuple[str, str], list[str]] = {
    ("training.bf16", "training.fp16"): ["training.bf16=true", "training.fp16=true"],
    ("training.fp16", "no GPU"): ["training.fp16=true"],
    ("training.fp16", "DeepSpeed"): ["training.fp16=true", "--strategy=zero2_offload"],
    ("training.optimizer other than adamw", "DeepSpeed optimizer offload"): [
        "--strategy=adamw_8bit",
        "--strategy=zero2_offload",
    ],
    ("model.activation_offload", "FSDP or ZeRO-3"): ["--strategy=activation_offload", "--strategy=zero3"],
    ("training.optimizer cpu_offload_ao", "no GPU"): ["--strategy=cpu_offload_ao"],
    ("training.optimizer cpu_offload_ao", "several processes, DeepSpeed or FSDP"): [
        "--strategy=cpu_offload_ao",
        "--strategy=ddp",
    ],
    ("training.optimizer cpu_offload_ao", "training.fp16"): ["--strategy=cpu_offload_ao", "training.fp16=true"],
    ("training.optimizer cpu_offload_gradients_ao", "training.gradient_accumulation_steps above 1"): [
        "--strategy=cpu_offload_gradients_ao",
        "training.gradient_accumulation_steps=2",
    ],
    ("training.optimizer flash_adamw", "no GPU"): ["--strategy=flash_adamw"],
    ("training.optimizer flash_adamw_gradient_release", "training.gradient_accumulation_steps above 1"): [
        RELEASE,
        "training.gradient_accumulation_steps=2",
    ],
    ("training.optimizer flash_adamw_gradient_release", "training.max_grad_norm above 0"): [
        RELEASE,
        "training.max_grad_norm=1",
    ],
    ("training.optimizer flash_adamw_gradient_release", "training.spike_threshold"): [
        RELEASE,
        "training.spike_threshold=5",
    ],
    ("training.optimizer flash_adamw_gradient_release", "several processes, DeepSpeed or FSDP"): [
        RELEASE,
        "--strategy=ddp",
    ],
    ("training.optimizer flash_adamw_gradient_release", "training.fp16"): [RELEASE, "training.fp16=true"],
    ("model.dtype bfloat16", "DeepSpeed or FSDP"): ["model.dtype=bfloat16", "--strategy=fsdp2"],
    ("model.dtype bfloat16", "training.fp16"): ["model.dtype=bfloat16", "training.fp16=true"],
    ("training.fp16", "FSDP"): ["training.fp16=true", "--strategy=fsdp2"],
    ("training.optimizer of bitsandbytes", "FSDP"): ["--strategy=adamw_8bit", "--strategy=fsdp2_offload"],
    ("training.optimizer of torchao", "DeepSpeed"): ["--strategy=adamw_8bit_ao", "--strategy=zero3"],
    ("training.optimizer flash_adamw", "DeepSpeed or FSDP"): ["--strategy=flash_adamw", "--strategy=fsdp2"],
    ("training.optimizer adamw_compiled", "DeepSpeed or FSDP"): ["--strategy=adamw_compiled", "--strategy=zero2"],
    ("training.optimizer adamw_bf16_ao", "model.dtype float32"): ["training.optimizer=adamw_bf16_ao"],
    ("model.compile", "ZeRO-3"): ["model.compile=true", "--strategy=zero3"],
    ("training.optimizer adamw_fp8_ao", "a GPU of compute capability below 8.9"): ["--strategy=adamw_fp8_ao"],
    ("model.freeze_encoder or model.lora_rank", "model.sync_batchnorm"): [
        "model.lora_rank=4",
        "model.sync_batchnorm=true",
    ],
    ("model.lora_rank", "model.freeze_encoder"): ["model.lora_rank=4", "model.freeze_encoder=true"],
    ("model.sync_batchnorm", "no GPU"): ["model.sync_batchnorm=true"],
    ("model.tokenizer extend_from or replace_with", "model.lora_train_decoder false"): [
        "model.lora_rank=4",
        "model.lora_train_decoder=false",
        "model.tokenizer.extend_from=texts.txt",
    ],
    ("model.add_ctc", "model.lora_train_decoder false"): [
        "model.add_ctc=true",
        "model.lora_rank=4",
        "model.lora_train_decoder=false",
    ],
    ("model.add_ctc", "model.adapter"): ["model.add_ctc=true", "model.adapter=somewhere"],
    ("model.add_ctc", "model.ctc_loss_weight 0"): ["model.add_ctc=true", "model.ctc_loss_weight=0"],
    ("training.ema_decay", "DeepSpeed ZeRO-3"): [
        "training.ema_decay=0.9",
        "data.validation=v.jsonl",
        "--strategy=zero3",
    ],
    ("training.ema_decay", "training.optimizer flash_adamw_gradient_release or cpu_offload_ao"): [
        "training.ema_decay=0.9",
        RELEASE,
    ],
    ("model.distillation", "model.ctc_loss_weight 1"): ["model.distillation=1", "model.ctc_loss_weight=1"],
    ("model.distillation", "a NeMo model YAML as model.name"): ["model.distillation=1", "model.name=layout.yaml"],
    ("training.l2_sp", "DeepSpeed"): ["training.l2_sp=1", "--strategy=zero2"],
    ("training.l2_sp", "training.optimizer flash_adamw_gradient_release or cpu_offload_ao"): [
        "training.l2_sp=1",
        RELEASE,
    ],
    ("training.l2_sp", "model.dtype bfloat16"): ["training.l2_sp=1", "--strategy=bf16_full"],
    ("training.ema_device cpu", "FSDP"): [
        "training.ema_decay=0.9",
        "data.validation=v.jsonl",
        "training.ema_device=cpu",
        "--strategy=fsdp2",
    ],
    ("model.freeze_batchnorm", "model.sync_batchnorm"): ["model.freeze_batchnorm=true", "model.sync_batchnorm=true"],
}


def test_every_rule_has_a_case() -> None:
    assert {(rule.first, rule.second) for rule in RULES} == set(CONFLICTS)


@pytest.mark.parametrize("rule", RULES, ids=lambda r: f"{r.first} and {r.second}")
def test_rule_fires_before_anything_loads(
    rule: Any, refused: Callable[..., str], run_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: "a GPU" in rule.second)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    message = refused("--config", run_file(), *CONFLICTS[rule.first, rule.second])
    assert f"{rule.first} and {rule.second} exclude each other" in message
    assert rule.reason in message
    assert rule.instead in message


def test_rules_let_the_rest_through(run_file: Callable[..., Path]) -> None:
    for keys in ({}, {"training__bf16": True}, {"training__fp16": True}, {"model__sync_batchnorm": True}):
        config, _ = load_config(run_file(**keys), [], [])
        others = () if config.training.fp16 else ("deepspeed", "deepspeed_offload", "deepspeed_zero3", "fsdp")
        for engine in ("none", "ddp", *others):
            assert find_conflicts(config, engine, gpu=True) == []


# ---- processes and launchers ---------------------------------------------------------------------------------------


def test_num_gpus(refused: Callable[..., str], run_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    path = run_file(training__num_gpus=4)
    message = refused("--config", path)
    assert "training.num_gpus is 4, but 1 process was started" in message
    assert "torchrun --nproc_per_node 4 finetune/train.py" in message
    assert "training.num_gpus: 1" in message
    monkeypatch.setenv("WORLD_SIZE", "2")
    message = refused("--config", path)
    assert "but 2 processes were started" in message
    monkeypatch.setenv("WORLD_SIZE", "4")
    check_num_gpus(4)
    check_num_gpus(0)


def own_deepspeed_file(folder: Path, **values: Any) -> Path:
    """As a user has it: DeepSpeed's own bf16 mode, ZeRO-2 with the optimizer on the host."""
    file = folder / "deepspeed_config.json"
    settings = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": 1.0,
        "fp16": {"enabled": False},
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "contiguous_gradients": True,
            "overlap_comm": True,
        },
    }
    file.write_text(json.dumps({**settings, **values}))
    return file


def test_the_precision_of_the_users_own_deepspeed_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    file = own_deepspeed_file(tmp_path)
    strategy = resolve_strategy([], str(file))
    assert strategy.engine == "deepspeed_offload"
    assert resolve_precision(False, False, strategy) == resolve_precision(True, False, strategy) == "bf16"
    with pytest.raises(
        UserError, match=rf"training\.fp16 says fp16, {file} \(bf16\.enabled\) says bf16\. Make them equal"
    ):
        resolve_precision(False, True, strategy)
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(file))
    assert resolve_precision(False, False, resolve_strategy([])) == "bf16"
    for values in ({"bf16": {"enabled": "auto"}}, {"bf16": {"enabled": False}}, {"bf16": None}):
        own_deepspeed_file(tmp_path, **values)
        assert resolve_precision(False, False, resolve_strategy([])) == "no"
        assert resolve_precision(True, False, resolve_strategy([])) == "bf16"
    own_deepspeed_file(tmp_path, fp16={"enabled": True})
    with pytest.raises(UserError, match=rf"{file}: fp16\.enabled: true is not supported.* training\.bf16: true"):
        resolve_strategy([])


def test_launcher_with_another_engine(
    refused: Callable[..., str], run_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    message = refused("--config", run_file(), "--strategy", "zero2_offload")
    assert "the launcher (accelerate launch) starts fsdp" in message
    assert "strategy zero2_offload" in message
    assert "accelerate launch --config_file accelerate_configs/zero2_offload.yaml" in message
    monkeypatch.delenv("ACCELERATE_USE_FSDP")
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    message = refused("--config", run_file(), "--strategy", "ddp")
    assert "starts deepspeed" in message
    assert "strategy ddp" in message


def test_launcher_with_the_same_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    file = ROOT / "ds_configs" / "zero2_offload.json"
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(file))
    named = resolve_strategy(["zero2_offload"])
    assert (named.engine, named.from_launcher) == ("deepspeed_offload", True)
    alone = resolve_strategy([], str(file))
    assert (alone.engine, alone.from_launcher, alone.names) == ("deepspeed_offload", True, [])


def test_launcher_with_other_deepspeed_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    other = tmp_path / "zero3.json"
    other.write_text('{"zero_optimization": {"stage": 3}}')
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(
        UserError, match=r"the launcher .* contradicts strategy zero2_offload: DeepSpeed with settings of its own"
    ):
        resolve_strategy(["zero2_offload"])
    with pytest.raises(
        UserError, match=r"--deepspeed .*zero3.json contradicts the launcher .*not with settings of its own"
    ):
        resolve_strategy([], str(other))
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(other))
    with pytest.raises(
        UserError,
        match=r"contradicts strategy zero2_offload: DeepSpeed with .*zero3.json, not with .*zero2_offload.json",
    ):
        resolve_strategy(["zero2_offload"])
    assert resolve_strategy([]).deepspeed_config == other


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"betas": 0.9}, "optimizer_args.betas: expected list, found 0.9"),
        ({"betas": [0.9]}, "optimizer_args.betas: has to have 2 entries, found [0.9]"),
        ({"betas": [0.9, 1.0]}, "optimizer_args.betas.1: has to be below 1, found 1.0"),
        ({"eps": "abc"}, "optimizer_args.eps: expected float, found 'abc'"),
        ({"eps": 0}, "optimizer_args.eps: has to be above 0, found 0"),
        ({"block_size": 0}, "optimizer_args.block_size: has to be 1 or more, found 0"),
        ({"block_size": "many"}, "optimizer_args.block_size: expected int, found 'many'"),
        ({"embeddings_32bit": "yes"}, "optimizer_args.embeddings_32bit: expected bool, found 'yes'"),
        ({"eps": 1e-6, "betas": [0.9, 0.99]}, None),
    ],
)
def test_optimizer_arguments(run_file: Callable[..., Path], arguments: dict[str, Any], words: str | None) -> None:
    path = run_file(training__optimizer_args=arguments)
    if words is None:
        load_config(path, [], [])
    else:
        assert words in problem(path)


def test_strategies_without_the_folders_beside_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("finetune.paths.ACCELERATE_CONFIGS", tmp_path / "accelerate_configs")
    with pytest.raises(UserError, match=r"there is no folder .*accelerate_configs.*pip install -e ."):
        resolve_strategy(["adamw"])


def test_launcher_with_another_precision(
    refused: Callable[..., str], run_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    message = refused("--config", run_file(training__bf16=True))
    assert "training.bf16 says bf16" in message
    assert "the launcher says fp16" in message
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert resolve_precision(True, False, Strategy()) == "bf16"
    assert resolve_precision(False, False, Strategy()) == "bf16"
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    assert resolve_precision(True, False, Strategy()) == "bf16"
    assert resolve_precision(False, False, Strategy()) == "no"
    with pytest.raises(UserError, match=r"training.fp16 says fp16, strategy half says bf16"):
        resolve_precision(False, True, Strategy(names=["half"], mixed_precision="bf16"))
