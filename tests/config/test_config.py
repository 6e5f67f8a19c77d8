"""Run files, strategies and command line: what is taken, and what is refused with place and remedy before anything
loads."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT, problem

from finetune.config.load import load_config
from finetune.config.schema import RENAMED, schema_fields
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


# ---- the run file --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "key", "suggested"),
    [
        ("training.learning_rat=1", "training.learning_rat", "training.learning_rate"),
        ("training.per_device_batch_size=1", "training.per_device_batch_size", "per_device_train_batch_size"),
        ("max_steps=1", "max_steps", "training.max_steps"),
        ("model.bf16=true", "model.bf16", "training.bf16"),
        ("data.zzz=1", "data.zzz", "docs/configuration.md"),
        ("training.lr=1", "training.lr", "Did you mean training.learning_rate"),
        ("training.epochs=1", "training.epochs", "Did you mean training.num_train_epochs?"),
        ("training.steps_eval=1", "training.steps_eval", "Did you mean training.eval_steps?"),
        ("training.batch_size=1", "training.batch_size", " Did you mean training.per_device_train_batch_size?"),
        ("lr=1", "lr", " Did you mean training.learning_rate?"),
        ("model.learning_rate=1", "model.learning_rate", " Did you mean training.learning_rate?"),
        ("optimizer.lr=1", "optimizer.lr", " Did you mean training.learning_rate?"),
        ("per_device_train_batch_size=1", "per_device_train_batch_size", " training.per_device_train_batch_size"),
        ("num_train_epochs=1", "num_train_epochs", " Did you mean training.num_train_epochs?"),
        ("training.grad_accum=1", "training.grad_accum", " Did you mean training.gradient_accumulation_steps?"),
        (
            "training.gradient_accumulation=1",
            "training.gradient_accumulation",
            " training.gradient_accumulation_steps?",
        ),
        ("fp16=true", "fp16", " Did you mean training.fp16?"),
        ("trainer.precision=16", "trainer.precision", " Did you mean training.bf16 or training.fp16?"),
        ("trainer.max_epochs=3", "trainer.max_epochs", " Did you mean training.num_train_epochs?"),
        ("data.train_ds.manifest_filepath=a.json", "data.train_ds.manifest_filepath", " Did you mean data.train?"),
    ],
)
def test_unknown_key(run_file: Callable[..., Path], override: str, key: str, suggested: str) -> None:
    message = problem(run_file(), override)
    assert f"command line: unknown key {key}." in message
    assert suggested in message.split(f"{key}.", 1)[1]


def test_the_usual_names_lead_to_keys_that_there_are() -> None:
    from finetune.config.load import FIELDS
    from finetune.config.suggestions import OTHER_NAMES

    assert {key for keys in OTHER_NAMES.values() for key in keys} <= set(FIELDS)
    assert not [name for name in OTHER_NAMES if any(key.endswith(f".{name}") for key in FIELDS)]


def test_keys_that_were_renamed(run_file: Callable[..., Path], messages: list[str]) -> None:
    path = run_file(training__spike_guard=20)
    config, origin = load_config(path, [], [])
    assert (config.training.spike_threshold, origin["training.spike_threshold"]) == (20, str(path))
    assert messages == [f"{path}: training.spike_guard is called training.spike_threshold now"]
    config, _ = load_config(path, [], ["training.spike_threshold=0"])
    assert config.training.spike_threshold == 0
    both = run_file(training__spike_guard=20, training__spike_threshold=10)
    assert f"{both}: training.spike_guard is the old name of training.spike_threshold" in problem(both)
    assert "training.spike_threshold: has to be above 1, or 0, found 0.5" in problem(path, "training.spike_guard=0.5")
    assert set(RENAMED.values()) <= schema_fields().keys()


def test_the_configuration_is_plain_and_typed(run_file: Callable[..., Path]) -> None:
    overrides = [
        "data.batch_bounds=[[5, 64], [15.5, 24]]",
        "training.optimizer_args.eps=1e-6",
        "data.train=[a, {path: b}]",
    ]
    config, _ = load_config(run_file(), [], overrides)
    assert type(config.training.learning_rate) is float
    assert type(config.training.optimizer_args) is dict
    assert config.data.batch_bounds == [[5, 64], [15.5, 24]]
    assert config.as_dict()["data"]["train"] == ["a", {"path": "b"}]
    changed = config.replaced({"data.max_samples": 5, "training.bf16": True})
    assert (changed.data.max_samples, changed.get("training.bf16")) == (5, True)
    changed.training.optimizer_args["eps"] = 1.0
    assert (config.data.max_samples, config.training.optimizer_args) == (-1, {"eps": 1e-6})
    defaults, _ = load_config(run_file(), [], [])
    defaults.data.filters["max_tokens"] = 3
    assert load_config(run_file(), [], [])[0].data.filters == {}


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
        training__optimizer="8bit_adamw",
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
        ("command line", "model.dropout", "0 to below 1, found 2"),
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
        ("training__optimizer", "8bit_adamw", "Did you mean adamw_8bit?"),
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
        ("training__spike_threshold", 1.0, 1.5),
        ("training__average_checkpoints", 1, 0),
        ("training__max_steps", 0, 1),
        ("training__max_steps", -2, -1),
        ("training__num_train_epochs", 0.0, 0.5),
        ("data__max_bad_fraction", 1.01, 1.0),
        ("data__max_bad_fraction", -0.01, 0.0),
        ("data__min_duration", 40.5, 40.0),
        ("data__max_samples", 0, -1),
        ("data__max_samples", -2, 1),
        ("data__shuffle_buffer_size", 0, 1),
        ("data__shuffle_buffer_mib", 0, 1),
        ("data__batch_duration", -1, 0),
        ("data__batch_cells", -1, 0),
        ("data__read_retries", -1, 0),
        ("data__skip_samples", -1, 0),
        ("data__temperature", 0.5, 1.0),
        ("training__stage_margin", -0.1, 0.0),
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
    assert "has no option min_8bit_sise; it has betas, embeddings_32bit, eps, min_8bit_size" in message


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
    assert messages == [f"strategy adamw_8bit: training.optimizer=adamw_8bit in place of adamw ({path})"]
    messages.clear()
    config, origin = load_config(path, ["adamw_8bit", "gradient_checkpointing"], ["training.optimizer=adamw"])
    assert (config.training.optimizer, origin["training.optimizer"]) == ("adamw", "command line")
    assert config.model.gradient_checkpointing is True
    assert messages[-1] == "command line: training.optimizer=adamw in place of adamw_8bit (strategy adamw_8bit)"
    guarded = run_file(data__guard="examples/voice_prompts")
    load_config(guarded, [], ["data.guard=null"])
    assert messages[-1] == f"command line: data.guard=null in place of examples/voice_prompts ({guarded})"
    load_config(guarded, [], ["data.guard={path: my.jsonl, language: fr}"])
    assert "command line: data.guard={path: my.jsonl, language: fr} in place of examples/voice_prompts" in messages[-1]
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
    assert config.training.optimizer_args["eps"] == 1e-6
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
    assert config.training.report_to == ["tensorboard", "wandb"]
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
    assert message.startswith("2 problems in the configuration:")
    assert "training.max_steps" in message
    assert "data.trian" in message
