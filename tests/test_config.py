"""Run files, strategies and command line: what is taken, and what is refused with place and remedy before anything loads."""

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from conftest import ROOT

from finetune.config.load import load_config, overlay_path, schema_fields
from finetune.errors import UserError
from finetune.strategies import accelerate_files
from finetune.strategies.accelerate_files import (
    Strategy,
    check_num_gpus,
    resolve_precision,
    resolve_strategy,
    strategy_names,
)
from finetune.strategies.compatibility import RULES, find_conflicts
from finetune.train import parse_arguments

ACCELERATE_FILES = sorted((ROOT / "accelerate_configs").glob("*.yaml"))
OVERLAYS = sorted((ROOT / "finetune" / "strategies").glob("*.yaml"))
RUN_FILES = sorted((ROOT / "finetune" / "configs").glob("*.yaml"))

# The keys that a memory strategy may be about. One that needs another key is about something else.
STRATEGY_KEYS = {
    "adamw": {"training.optimizer", "training.optimizer_args"},
    "adamw_8bit": {"training.optimizer", "training.optimizer_args"},
    "gradient_checkpointing": {"model.gradient_checkpointing", "model.gradient_checkpointing_every"},
}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests themselves may run under a launcher."""
    for name in ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP", "ACCELERATE_MIXED_PRECISION", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def run_file(tmp_path: Path) -> Callable[..., Path]:
    """Writes tmp_path/RUN.yaml: a run file without problems, with some keys set to other values."""

    def write(**keys: Any) -> Path:
        values: dict[str, Any] = {
            "model": {"name": "m.nemo"},
            "data": {"train": "train.jsonl"},
            "training": {"output_dir": "out"},
        }
        for key, value in keys.items():
            section, name = key.split("__")
            values[section][name] = value
        path = tmp_path / "RUN.yaml"
        path.write_text(yaml.safe_dump(values), encoding="utf-8")
        return path

    return write


@pytest.fixture
def messages() -> Iterator[list[str]]:
    """What the project logs."""
    found: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    project, handler = logging.getLogger("finetune"), Keep()
    level = project.level
    project.addHandler(handler)
    project.setLevel(logging.INFO)
    yield found
    project.removeHandler(handler)
    project.setLevel(level)


@pytest.fixture
def refused(
    run_train: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """Calls train.py, which has to end with 2 before it makes a model; returns the message."""

    def build(*_: Any) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("finetune.training.run.build_model", build)

    def run(*arguments: Any) -> str:
        capsys.readouterr()
        assert run_train(*arguments) == 2
        return capsys.readouterr().err

    return run


def problem(path: Path, *overrides: str, strategies: tuple[str, ...] = ()) -> str:
    """The message with which a configuration is refused."""
    with pytest.raises(UserError) as caught:
        load_config(path, list(strategies), list(overrides))
    assert caught.value.exit_code == 2
    return str(caught.value)


# ---- the run file --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "key", "suggested"),
    [
        ("training.learning_rat=1", "training.learning_rat", "training.learning_rate"),
        ("training.per_device_batch_size=1", "training.per_device_batch_size", "per_device_train_batch_size"),
        ("max_steps=1", "max_steps", "training.max_steps"),
        ("model.bf16=true", "model.bf16", "training.bf16"),
        ("data.zzz=1", "data.zzz", "docs/configuration.md"),
    ],
)
def test_unknown_key(run_file: Callable[..., Path], override: str, key: str, suggested: str) -> None:
    message = problem(run_file(), override)
    assert f"command line: unknown key {key}." in message
    assert suggested in message.split(f"{key}.", 1)[1]


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("training__learning_rate", "fast", "float"),
        ("training__max_steps", 2.5, "int"),
        ("training__max_steps", True, "int"),
        ("training__max_steps", None, "int"),
        ("training__bf16", "maybe", "bool"),
        ("training__optimizer_args", 3, "dict"),
        ("model__name", ["a", "b"], "str"),
        ("model__dropout", "some", "float"),
    ],
)
def test_wrong_type(run_file: Callable[..., Path], key: str, value: Any, expected: str) -> None:
    path = run_file(**{key: value})
    message = problem(path)
    assert message.startswith(f"{path}: {key.replace('__', '.')}: ")
    assert f"expected {expected}" in message
    assert repr(value) in message


def test_section_that_is_no_mapping(tmp_path: Path) -> None:
    path = tmp_path / "RUN.yaml"
    path.write_text("model: {name: m.nemo}\ndata: {train: t}\ntraining: 3\n")
    assert f"{path}: training has to be a mapping, found 3" in problem(path)


def test_all_problems_at_once(run_file: Callable[..., Path]) -> None:
    path = run_file(
        training__learning_rat=1e-4,
        training__max_steps="many",
        training__optimizer="adamw8bit",
        training__logging_steps=0,
        training__bf16=True,
        training__fp16=True,
        data__max_bad_fraction=5,
    )
    first, *lines = problem(path, "model.dropout=2", "model.nam=x", "model.name=${nowhere}").splitlines()
    expected = [
        (str(path), "training.learning_rat.", "Did you mean training.learning_rate"),
        (str(path), "training.max_steps", "expected int, found 'many'"),
        ("command line", "model.nam.", "Did you mean model.name"),
        ("command line", "model.name", "nowhere"),
        (str(path), "training.optimizer", "Did you mean adamw_8bit?"),
        (str(path), "training.logging_steps", "1 or more, found 0"),
        (str(path), "data.max_bad_fraction", "0 to 1, found 5"),
        ("command line", "model.dropout", "probability below 1, found 2"),
        ("training.bf16", "training.fp16", "exclude each other"),
    ]
    assert first.startswith(f"{len(expected)} problems")
    assert len(lines) == len(expected)
    for words in expected:
        assert any(all(word in line for word in words) for line in lines), (words, lines)


@pytest.mark.parametrize("key", ["model.name", "data.train", "training.output_dir"])
@pytest.mark.parametrize("how", ["absent", "null", "???", "empty"])
def test_required_keys(tmp_path: Path, key: str, how: str) -> None:
    values: dict[str, Any] = {"model": {"name": "m"}, "data": {"train": "t"}, "training": {"output_dir": "o"}}
    section, name = key.split(".")
    del values[section][name]
    if how != "absent":
        values[section][name] = {"null": None, "???": "???", "empty": ""}[how]
    path = tmp_path / "RUN.yaml"
    path.write_text(yaml.safe_dump(values))
    message = problem(path)
    assert key in message
    assert "is not set" in message or "found None" in message


def test_interpolation(run_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_DATA", "/data/mine")
    path = run_file(data__train="${oc.env:MY_DATA}/train.jsonl", training__output_dir="${oc.env:NOT_SET_ANYWHERE}")
    message = problem(path)
    assert "training.output_dir" in message
    assert "NOT_SET_ANYWHERE" in message
    config, _ = load_config(path, [], ["training.output_dir=out"])
    assert config.data.train == "/data/mine/train.jsonl"


@pytest.mark.parametrize(
    ("key", "value", "hint"),
    [
        ("training__optimizer", "adamw8bit", "Did you mean adamw_8bit?"),
        ("training__lr_scheduler_type", "cosin", "Did you mean cosine?"),
        ("training__loss_reduction", "sum", "mean_batch, mean_volume"),
        ("data__text_normalization", "upper", "none, lower, basic"),
        ("data__wer_normalization", "basics", "Did you mean basic?"),
        ("training__report_to", "tensorbord", "tensorboard"),
        ("training__report_to", ["tensorboard", "wandbd"], "wandb"),
        ("training__report_to", None, "none"),
    ],
)
def test_choices(run_file: Callable[..., Path], key: str, value: Any, hint: str) -> None:
    path = run_file(**{key: value})
    message = problem(path)
    assert f"{path}: {key.replace('__', '.')}: " in message
    assert "is not one of" in message
    assert hint in message


@pytest.mark.parametrize(
    ("key", "bad", "good"),
    [
        ("training__per_device_train_batch_size", 0, 1),
        ("training__per_device_eval_batch_size", 0, 1),
        ("training__gradient_accumulation_steps", 0, 1),
        ("training__logging_steps", 0, 1),
        ("training__dataloader_prefetch_factor", 0, 1),
        ("training__eval_steps", -1, 0),
        ("training__save_steps", -1, 0),
        ("training__save_total_limit", -1, 0),
        ("training__dataloader_num_workers", -1, 0),
        ("training__max_grad_norm", -0.1, 0.0),
        ("training__max_grad_norm", float("nan"), 1.0),
        ("training__weight_decay", -0.1, 0.0),
        ("training__warmup_steps", -1, 0),
        ("training__num_gpus", -1, 0),
        ("training__num_threads", -1, 0),
        ("training__sample_predictions", -1, 0),
        ("training__seed", -1, 0),
        ("training__learning_rate", 0.0, 1e-9),
        ("training__learning_rate", float("nan"), 1e-9),
        ("training__learning_rate", float("inf"), 1e-9),
        ("training__encoder_learning_rate", -1e-4, None),
        ("training__decoder_learning_rate", 0.0, 1e-4),
        ("training__joint_learning_rate", 0.0, 1e-4),
        ("training__warmup_ratio", 1.1, 1.0),
        ("training__warmup_ratio", -0.1, 0.0),
        ("training__max_steps", 0, 1),
        ("training__max_steps", -2, -1),
        ("training__num_train_epochs", 0.0, 0.5),
        ("data__max_bad_fraction", 1.01, 1.0),
        ("data__max_bad_fraction", -0.01, 0.0),
        ("data__min_duration", 40.5, 40.0),
        ("data__max_samples", 0, -1),
        ("data__max_samples", -2, 1),
        ("data__shuffle_buffer_size", 0, 1),
        ("model__gradient_checkpointing_every", 0, 1),
        ("model__dropout", 1.0, 0.999),
        ("model__omega", -0.5, 0.0),
        ("model__occupancy_threshold", 1.5, 0.0),
        ("model__sigma", -0.1, 0.0),
        ("model__fastemit_lambda", -0.1, 0.0),
        ("model__joint_memory_budget", 0, None),
    ],
)
def test_bounds(run_file: Callable[..., Path], key: str, bad: Any, good: Any) -> None:
    path = run_file(**{key: bad})
    message = problem(path)
    assert message.startswith(f"{path}: {key.replace('__', '.')}: "), message
    assert str(bad) in message
    load_config(run_file(**{key: good}), [], [])


def test_no_limit_on_duration(run_file: Callable[..., Path]) -> None:
    config, _ = load_config(run_file(data__max_duration=float("inf")), [], [])
    assert config.data.max_duration == float("inf")


def test_optimizer_without_the_option(run_file: Callable[..., Path]) -> None:
    message = problem(run_file(training__optimizer_args={"min_8bit_size": 4096}))
    assert "training.optimizer_args: adamw has no option min_8bit_size; it has betas, eps" in message
    message = problem(run_file(training__optimizer="adamw_8bit", training__optimizer_args={"min_8bit_sise": 4096}))
    assert "has no option min_8bit_sise; it has betas, eps, min_8bit_size" in message


def test_missing_and_broken_files(tmp_path: Path) -> None:
    assert str(tmp_path / "nowhere.yaml") in problem(tmp_path / "nowhere.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("model:\n  name: m\n  tokenizer: [a\ndata: {train: t}\n")
    message = problem(broken)
    assert f"{broken} is not valid YAML" in message
    assert "line 4" in message
    broken.write_text("model: {name: a}\nmodel: {name: b}\n")
    assert "duplicate key" in problem(broken)
    broken.write_bytes(b"model: {name: \xff\xfe}\n")
    assert f"{broken} is not valid YAML" in problem(broken)
    broken.write_text("- model\n- data\n")
    assert f"{broken} has to be a mapping, found list" in problem(broken)
    broken.write_text("")
    assert "model.name is not set" in problem(broken)


# ---- key=value and the order of the layers -------------------------------------------------------------------------


def test_order_of_layers(run_file: Callable[..., Path], messages: list[str]) -> None:
    path = run_file(training__optimizer="adamw", training__learning_rate=1e-3)
    config, origin = load_config(path, [], [])
    assert (config.training.optimizer, origin["training.optimizer"]) == ("adamw", str(path))
    assert messages == []
    config, origin = load_config(path, ["adamw_8bit"], [])
    assert (config.training.optimizer, origin["training.optimizer"]) == ("adamw_8bit", "strategy adamw_8bit")
    assert config.training.learning_rate == 1e-3
    assert messages == [f"strategy adamw_8bit: training.optimizer replaces adamw ({path}) by adamw_8bit"]
    messages.clear()
    config, origin = load_config(path, ["adamw_8bit", "gradient_checkpointing"], ["training.optimizer=adamw"])
    assert (config.training.optimizer, origin["training.optimizer"]) == ("adamw", "command line")
    assert config.model.gradient_checkpointing is True
    assert messages[-1] == "command line: training.optimizer replaces adamw_8bit (strategy adamw_8bit) by adamw"
    config, _ = load_config(path, ["adamw_8bit", "adamw"], [])
    assert config.training.optimizer == "adamw"


def test_values_are_read_as_yaml(run_file: Callable[..., Path], tmp_path: Path) -> None:
    path = tmp_path / "numbers.yaml"
    path.write_text(
        "model: {name: m}\ndata: {train: t}\n"
        "training: {output_dir: o, learning_rate: 1e-4, optimizer_args: {eps: 1e-6}}\n"
    )
    config, _ = load_config(path, [], [])
    assert config.training.learning_rate == 1e-4
    assert config.training.optimizer_args.eps == 1e-6
    config, _ = load_config(
        run_file(model__tokenizer="somewhere"),
        [],
        [
            "training.learning_rate=2e-5",
            "training.bf16=true",
            "training.report_to=[tensorboard, wandb]",
            "data.train=[{path: a.jsonl, weight: 0.9}, {path: b=c.jsonl, weight: 0.1}]",
            "data.test=x=y.jsonl",
            "model.tokenizer=",
            "training.resume_from_checkpoint=true",
        ],
    )
    assert config.training.learning_rate == 2e-5
    assert config.training.bf16 is True
    assert list(config.training.report_to) == ["tensorboard", "wandb"]
    assert config.data.train[1] == {"path": "b=c.jsonl", "weight": 0.1}
    assert config.data.test == "x=y.jsonl"
    assert config.model.tokenizer is None
    assert config.training.resume_from_checkpoint is True


def test_single_options_of_the_optimizer(run_file: Callable[..., Path]) -> None:
    path = run_file(training__optimizer="adamw_8bit", training__optimizer_args={"eps": 1e-6, "betas": [0.9, 0.95]})
    config, _ = load_config(
        path, [], ["training.optimizer_args.min_8bit_size=1024", "training.optimizer_args.eps=1e-7"]
    )
    assert config.training.optimizer_args == {"eps": 1e-7, "betas": [0.9, 0.95], "min_8bit_size": 1024}


def test_a_source_is_replaced_as_a_whole(run_file: Callable[..., Path]) -> None:
    path = run_file(data__train={"path": "a.jsonl", "language": "en"})
    config, _ = load_config(path, [], ["data.train={path: b.jsonl}"])
    assert config.data.train == {"path": "b.jsonl"}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("training.report_to=[a",), ("training.report_to=[a", "not valid YAML")),
        (("training=1", "training.max_steps=2"), ("training.max_steps=2", "value of its own")),
        (("=3",), ("'=3'", "key=value")),
    ],
)
def test_unreadable_overrides(
    run_file: Callable[..., Path], overrides: tuple[str, ...], words: tuple[str, ...]
) -> None:
    message = problem(run_file(), *overrides)
    assert all(word in message for word in words), message


# ---- the command line ----------------------------------------------------------------------------------------------


def test_no_config(refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    message = refused("training.max_steps=1")
    assert "usage:" in message
    assert "no --config, and no config.yaml" in message
    assert "finetune/configs/quickstart.yaml" in message
    (tmp_path / "config.yaml").write_text("training: {output_dir: 3, max_stps: 2}\n")
    message = refused("model.name=m")
    assert "config.yaml: unknown key training.max_stps. Did you mean training.max_steps" in message


@pytest.mark.parametrize("argument", ["--learning_rate=3", "--bf16", "-x", "quickly"])
def test_unknown_arguments(refused: Callable[..., str], run_file: Callable[..., Path], argument: str) -> None:
    message = refused("--config", run_file(), argument)
    assert argument in message
    assert "key=value" in message


def test_arguments_in_any_order() -> None:
    arguments = parse_arguments(
        ["a.b=1", "--strategy", "x", "c.d=2", "--local_rank=3", "--config", "f.yaml", "--strategy", "y", "e.f=4"]
    )
    assert arguments.overrides == ["a.b=1", "c.d=2", "e.f=4"]
    assert arguments.strategy == ["x", "y"]
    assert arguments.config == Path("f.yaml")
    assert parse_arguments(["--config", "f.yaml", "--local-rank", "1"]).overrides == []


def test_run_with_deepspeeds_local_rank(
    run_train: Callable[..., int], tiny_run: Callable[..., list[str]], tmp_path: Path
) -> None:
    arguments = tiny_run("training.max_steps=1", data={"validation": None, "test": None})
    assert run_train("--local_rank=0", *arguments, "training.learning_rate=3e-4") == 0
    settings = json.loads((tmp_path / "run" / "summary.json").read_text())["effective_settings"]
    assert settings["training"]["learning_rate"] == 3e-4
    assert settings["training"]["max_steps"] == 1
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text()) == settings


def test_main_refuses_bad_configuration(refused: Callable[..., str], run_file: Callable[..., Path]) -> None:
    message = refused("--config", run_file(training__max_steps="many"), "data.trian=x")
    assert message.startswith("error: 2 problems in the configuration:")
    assert "training.max_steps" in message
    assert "data.trian" in message


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
        assert config[section][name] == values[section][name]


@pytest.mark.parametrize("path", RUN_FILES, ids=lambda p: p.stem)
def test_shipped_run_files_load_under_every_strategy(path: Path) -> None:
    for name in strategy_names():
        config, _ = load_config(path, [name], [])
        assert find_conflicts(config, resolve_strategy([name]).engine) == []


def test_strategies_and_engines() -> None:
    engines = {name: resolve_strategy([name]).engine for name in strategy_names()}
    expected = {"adamw": "none", "adamw_8bit": "none", "gradient_checkpointing": "none"}
    assert engines.items() >= {**expected, "zero2_offload": "deepspeed_offload", "ddp": "ddp"}.items()
    both = resolve_strategy(["gradient_checkpointing", "zero2_offload", "gradient_checkpointing"])
    assert both.names == ["gradient_checkpointing", "zero2_offload"]
    assert both.engine == "deepspeed_offload"
    assert overlay_path("zero2_offload").exists() is False


def test_unknown_strategy(refused: Callable[..., str], run_file: Callable[..., Path]) -> None:
    message = refused("--config", run_file(), "--strategy", "zero9")
    assert "--strategy: there is no strategy 'zero9'" in message
    assert all(name in message for name in strategy_names())


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
    (tmp_path / "sharded.yaml").write_text("distributed_type: FSDP\nmixed_precision: bf16\nfsdp_config: {}\n")
    (tmp_path / "half.yaml").write_text("distributed_type: 'NO'\nmixed_precision: fp16\n")
    monkeypatch.setattr(accelerate_files, "ACCELERATE_CONFIGS", tmp_path)
    monkeypatch.setattr("finetune.paths.ACCELERATE_CONFIGS", tmp_path)
    assert resolve_strategy(["adamw", "sharded"]).engine == "fsdp"
    with pytest.raises(UserError, match=r"strategy zero2_offload.*strategy sharded.*two engines"):
        resolve_strategy(["zero2_offload", "sharded"])
    with pytest.raises(UserError, match=r"strategy half wants mixed precision fp16.*bf16"):
        resolve_strategy(["sharded", "half"])


# ---- what excludes each other --------------------------------------------------------------------------------------

CONFLICTS: dict[tuple[str, str], list[str]] = {
    ("training.bf16", "training.fp16"): ["training.bf16=true", "training.fp16=true"],
    ("training.fp16", "no GPU"): ["training.fp16=true"],
    ("training.fp16", "DeepSpeed"): ["training.fp16=true", "--strategy=zero2_offload"],
    ("training.optimizer: adamw_8bit", "DeepSpeed optimizer offload"): [
        "--strategy=adamw_8bit",
        "--strategy=zero2_offload",
    ],
    ("model.sync_batchnorm", "no GPU"): ["model.sync_batchnorm=true"],
    ("model.freeze_batchnorm", "model.sync_batchnorm"): ["model.freeze_batchnorm=true", "model.sync_batchnorm=true"],
}


def test_every_rule_has_a_case() -> None:
    assert {(rule.first, rule.second) for rule in RULES} == set(CONFLICTS)


@pytest.mark.parametrize("rule", RULES, ids=lambda r: f"{r.first} and {r.second}")
def test_rule_fires_before_anything_loads(
    rule: Any, refused: Callable[..., str], run_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    message = refused("--config", run_file(), *CONFLICTS[rule.first, rule.second])
    assert f"{rule.first} and {rule.second} exclude each other" in message
    assert rule.reason in message
    assert rule.instead in message


def test_rules_let_the_rest_through(run_file: Callable[..., Path]) -> None:
    for keys in ({}, {"training__bf16": True}, {"training__fp16": True}, {"model__sync_batchnorm": True}):
        config, _ = load_config(run_file(**keys), [], [])
        for engine in ("none", "ddp") if config.training.fp16 else ("none", "ddp", "deepspeed", "deepspeed_offload"):
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
    with pytest.raises(UserError, match=r"starts DeepSpeed with settings of its own, strategy zero2_offload uses"):
        resolve_strategy(["zero2_offload"])
    with pytest.raises(UserError, match=r"--deepspeed .*zero3.json contradicts the launcher .*settings of its own"):
        resolve_strategy([], str(other))
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(other))
    with pytest.raises(UserError, match=r"starts DeepSpeed with .*zero3.json, strategy zero2_offload uses"):
        resolve_strategy(["zero2_offload"])
    assert resolve_strategy([]).deepspeed_config == other


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"betas": 0.9}, "betas are two numbers"),
        ({"betas": [0.9]}, "betas are two numbers"),
        ({"betas": [0.9, 1.0]}, "betas are two numbers"),
        ({"eps": "abc"}, "eps is a number above 0, found 'abc'"),
        ({"eps": 0}, "eps is a number above 0"),
        ({"eps": 1e-6, "betas": [0.9, 0.99]}, None),
    ],
)
def test_optimizer_arguments(
    problem: Callable[..., str], run_file: Callable[..., Path], arguments: dict[str, Any], words: str | None
) -> None:
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
