"""Weights in bf16: what is cast, that it learns, and that a run continues exactly though rounding is random."""

import json
import shutil

import pytest
import torch
from conftest import DETERMINISTIC, ONLY_TRAIN, read_lines
from safetensors.torch import load_file


@pytest.fixture(autouse=True)
def without_compiler():
    """torchao's step as it stands, without a minute of compilation."""
    with torch._dynamo.config.patch(disable=True):
        yield


def test_what_is_cast(tiny):
    from finetune.models.nemo import cast_parameters

    model = tiny()
    cast_parameters(model, torch.bfloat16)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point():
            wide = "batch_norm" in name or name.startswith("preprocessor")
            assert tensor.dtype == (torch.float32 if wide else torch.bfloat16), name


@pytest.mark.slow
def test_bf16_weights_learn_like_float32_ones(train, plain_losses):
    for strategy, state_dtype in (("bf16_full", "uint8"), ("bf16_stochastic_rounding", "bfloat16")):
        run = train(strategy, "--strategy", strategy)
        losses = [row["loss"] for row in read_lines(run / "metrics.jsonl")]
        assert losses == pytest.approx(plain_losses, rel=0.05)
        told = json.loads((run / "summary.json").read_text())
        assert told["optimizer_state_dtypes"][state_dtype] > 0
        newest = max((run / "checkpoints").glob("step-*"))
        weights = load_file(newest / "model.safetensors")
        assert weights["nemo.joint.enc.weight"].dtype == torch.bfloat16


@pytest.mark.slow
def test_a_run_continues_exactly(run_train, tiny_run, tmp_path):
    training = {"max_steps": 6, "save_steps": 3, "save_total_limit": 0, "eval_on_start": False}
    arguments = [*tiny_run(model=DETERMINISTIC, data=ONLY_TRAIN, training=training), "--strategy", "bf16_full"]
    assert run_train(*arguments) == 0
    newest = tmp_path / "run" / "checkpoints" / "step-00000006"
    whole, weights = read_lines(tmp_path / "run" / "metrics.jsonl"), load_file(newest / "model.safetensors")
    shutil.rmtree(newest)
    assert run_train(*arguments, "training.resume_from_checkpoint=true") == 0
    assert [r["loss"] for r in read_lines(tmp_path / "run" / "metrics.jsonl")] == [r["loss"] for r in whole]
    for name, tensor in load_file(newest / "model.safetensors").items():
        torch.testing.assert_close(tensor, weights[name], rtol=0, atol=0)


def test_an_unsafe_optimizer_is_said(failed, tiny_run):
    said = failed(0, *tiny_run(data=ONLY_TRAIN), "model.dtype=bfloat16")
    assert "updates smaller than a 256th of a weight are lost in rounding" in said
