"""A checkpoint of one strategy continued under another: the weights carry over, and the log says what does not."""

import json
import shutil

import pytest
import torch
from conftest import DETERMINISTIC, ONLY_TRAIN, read_lines, slow

TRAINING = {"max_steps": 2, "save_steps": 2, "eval_on_start": False}
CONTINUE = ("training.resume_from_checkpoint=true", "training.max_steps=4", "training.lr_scheduler_type=constant")


def continued(run_train, arguments, folder, strategy: str) -> list[dict]:
    """The lines of metrics.jsonl of a copy of the run, continued under a strategy or with a setting."""
    copy = folder.parent / f"to-{strategy}"
    shutil.copytree(folder, copy)
    how = [strategy] if "=" in strategy else ["--strategy", strategy]
    assert run_train(*arguments, *CONTINUE, *how, f"training.output_dir={copy}") == 0
    assert json.loads((copy / "summary.json").read_text())["resumed_from"] == 2
    return read_lines(copy / "metrics.jsonl")


@pytest.mark.parametrize("first", ["adamw", slow("lora")])
def test_weights_carry_over(run_train, tiny_run, tmp_path, capfd, first):
    """The loss of the first step behind the checkpoint depends on weights, position in the data and nothing else."""
    arguments = tiny_run(model=DETERMINISTIC, data=ONLY_TRAIN, training=TRAINING)
    assert run_train(*arguments, "training.lr_scheduler_type=constant", "--strategy", first) == 0
    expected = continued(run_train, arguments, tmp_path / "run", first)
    assert expected[2]["loss"] < 0.98 * expected[0]["loss"], "the weights have to have moved"
    assert "another strategy" not in capfd.readouterr().err
    said = {}
    others = {"adamw": ("adamw_8bit", "lora", "freeze_encoder", "model.dtype=bfloat16"), "lora": ("adamw",)}[first]
    for other in others:
        found = continued(run_train, arguments, tmp_path / "run", other)
        assert [row["step"] for row in found] == [1, 2, 3, 4]
        rounding = 2e-2 if "bfloat16" in other else 1e-5
        assert found[2]["loss"] == pytest.approx(expected[2]["loss"], rel=rounding)
        assert found[2]["samples"] == expected[2]["samples"]
        assert found[2]["learning_rate"] == expected[2]["learning_rate"]
        said[other] = capfd.readouterr().err
        assert "was written under another strategy" in said[other]
        assert "the optimizer's state and the random states start anew" in said[other]
    if first == "adamw":
        assert "optimizer was AdamW of torch, is AdamW8bit of bitsandbytes" in said["adamw_8bit"]
        assert "model.dtype was float32, is bfloat16" in said["model.dtype=bfloat16"]


def test_optimizers_of_one_name_are_told_apart():
    """bitsandbytes and torchao both have an AdamW8bit."""
    from types import SimpleNamespace

    from finetune.config.schema import RunConfig
    from finetune.strategies.optimizers import build_optimizer
    from finetune.training.resume import kind_of

    sections = {"model": {"name": "m"}, "data": {"train": "t"}, "training": {"output_dir": "o"}}
    config, kinds = RunConfig.model_validate(sections), {}
    for name in ("adamw", "adamw_foreach", "adamw_8bit", "adamw_8bit_ao"):
        weight = torch.nn.Parameter(torch.zeros(8, 8))
        optimizer = build_optimizer(name, [{"params": [weight], "lr": 1e-3, "weight_decay": 0.0}], {})
        accelerator = SimpleNamespace(distributed_type="NO", scaler=None)
        kinds[name] = kind_of(accelerator, config, model=None, optimizer=optimizer)["optimizer"]
    assert kinds["adamw_8bit"] == "AdamW8bit of bitsandbytes"
    assert kinds["adamw_8bit_ao"] == "AdamW8bit of torchao"
    assert kinds["adamw"] == kinds["adamw_foreach"] == "AdamW of torch"
