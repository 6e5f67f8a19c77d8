"""Whole small trainings: gradients, strategies, what a run leaves behind."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import read_lines, slow

from finetune.evaluation.utterance_counts import BEST_TRAINED, UtteranceCounts

# What makes two runs the same function of the weights: no dropout, no SpecAugment, BatchNorm on its stored statistics.
DETERMINISTIC = {"spec_augment": False, "dropout": 0.0, "freeze_batchnorm": True}
IN_ORDER = {"shuffle": False, "group_by_duration": False}


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in read_lines(run / "metrics.jsonl")]


def summary(run: Path) -> dict[str, Any]:
    return json.loads((run / "summary.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("reduction", ["mean_batch", slow("mean_volume")])
def test_accumulated_batches_train_like_one_big_batch(run_train, tiny_run, tmp_path, reduction):
    curves = []
    for batch, accumulation in ((8, 1), (2, 4)):
        output = tmp_path / f"run-{batch}"
        training = {
            "per_device_train_batch_size": batch,
            "gradient_accumulation_steps": accumulation,
            "loss_reduction": reduction,
            "max_steps": 7,
            "learning_rate": 1e-2,
            "eval_on_start": False,
            "output_dir": str(output),
        }
        assert run_train(*tiny_run(model=DETERMINISTIC, data={**IN_ORDER, "test": None}, training=training)) == 0
        curves.append([(r["loss"], r["grad_norm"], r["samples"]) for r in read_lines(output / "metrics.jsonl")])
    for whole, cut in zip(*curves, strict=True):
        assert cut == pytest.approx(whole, rel=1e-4)
    assert curves[0][-1][0] < 0.95 * curves[0][0][0], (
        "the model has to learn something for the comparison to mean much"
    )


def test_gradient_checkpointing_changes_memory_and_nothing_else(run_train, tiny_run, tmp_path):
    """Dropout and BatchNorm in training mode: a wrong mask or statistics counted twice would show."""
    for name in ("plain", "checkpointed"):
        strategy = ["--strategy", "gradient_checkpointing"] if name == "checkpointed" else []
        training = {"max_steps": 8, "output_dir": str(tmp_path / name), "eval_on_start": False}
        assert (
            run_train(*tiny_run(model={"spec_augment": False}, data={"test": None}, training=training), *strategy) == 0
        )
    assert losses(tmp_path / "checkpointed") == pytest.approx(losses(tmp_path / "plain"), rel=1e-6)
    from safetensors.torch import load_file

    weights = [
        load_file(tmp_path / name / "checkpoints" / "step-00000008" / "model.safetensors")
        for name in ("plain", "checkpointed")
    ]
    statistics = [k for k in weights[0] if "running_" in k or "num_batches" in k]
    assert statistics
    for key in weights[0]:
        torch.testing.assert_close(weights[1][key], weights[0][key], rtol=1e-5, atol=1e-6)
    assert summary(tmp_path / "checkpointed")["strategy"] == ["gradient_checkpointing"]


def test_gradient_checkpointing_keeps_fewer_bytes(tiny_model):
    from finetune.models.loading import load_model
    from finetune.strategies.checkpointing import enable_gradient_checkpointing

    def saved_bytes(every: int | None) -> int:
        model = load_model(str(tiny_model)).train()
        if every is not None:
            assert enable_gradient_checkpointing(model, every) == math.ceil(2 / every)
        total = 0

        def count(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal total
            total += tensor.numel() * tensor.element_size()
            return tensor

        mel_BFT = torch.randn(2, 80, 300, generator=torch.Generator().manual_seed(0))
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            model.encoder(audio_signal=mel_BFT, length=torch.tensor([300, 200]))
        return total

    everything, all_layers, every_second = saved_bytes(None), saved_bytes(1), saved_bytes(2)
    # both leave the subsampling out as well, which here stores more than a layer
    assert all_layers < every_second < everything
    assert everything - every_second > every_second - all_layers > 0.1 * everything


def test_8bit_adamw_has_8bit_states_and_far_fewer_bytes(run_train, tiny_run, tmp_path):
    for name in ("adamw", "adamw_8bit"):
        training = {"max_steps": 12, "output_dir": str(tmp_path / name), "eval_on_start": False}
        if name == "adamw_8bit":
            training["optimizer_args"] = {"min_8bit_size": 1024}
        run = tiny_run(model=DETERMINISTIC, data={"test": None}, training=training)
        assert run_train(*run, "--strategy", name) == 0
    plain, small = summary(tmp_path / "adamw"), summary(tmp_path / "adamw_8bit")
    assert plain["optimizer"] == "AdamW"
    assert small["optimizer"] == "AdamW8bit"
    assert set(plain["optimizer_state_dtypes"]) == {"float32"}
    assert small["optimizer_state_dtypes"]["uint8"] > 0.5 * 2 * small["trainable_parameters"]
    assert small["optimizer_state_bytes"] < 0.5 * plain["optimizer_state_bytes"]
    assert losses(tmp_path / "adamw_8bit") == pytest.approx(losses(tmp_path / "adamw"), rel=0.05)
    rates = [[r["learning_rate"] for r in read_lines(tmp_path / n / "metrics.jsonl")] for n in ("adamw", "adamw_8bit")]
    assert rates[0] == rates[1]


def test_8bit_adamw_falls_back_to_adamw_with_one_warning(run_train, tiny_run, tmp_path, monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    training = {"max_steps": 4, "eval_on_start": False}
    assert run_train(*tiny_run(data={"test": None}, training=training), "--strategy", "adamw_8bit") == 0
    told = capfd.readouterr().err
    assert told.count("AdamW8bit cannot be used here") == 1
    assert "optimizer AdamW:" in told
    assert summary(tmp_path / "run")["optimizer"] == "AdamW"
    rates = [r["learning_rate"] for r in read_lines(tmp_path / "run" / "metrics.jsonl")]
    # warm-up of 0 steps, then a cosine over 4: the rates that the steps were taken with
    assert rates == pytest.approx([1e-3 * 0.5 * (1 + math.cos(math.pi * i / 4)) for i in range(4)])


def test_adamw_is_fused_and_spares_biases_and_norms(tiny_model):
    from finetune.models.loading import load_model
    from finetune.strategies.optimizers import build_optimizer, parameter_groups

    model = load_model(str(tiny_model))
    groups = parameter_groups(model, {"encoder": 1e-5, "joint": 3e-4}, 1e-4, 0.1)
    optimizer = build_optimizer("adamw", groups, {})
    assert optimizer.defaults["fused"] is True
    rate = {id(p): (g["lr"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}
    assert len(rate) == len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        expected = {"encoder": 1e-5, "joint": 3e-4}.get(name.split(".")[0], 1e-4)
        undecayed = parameter.ndim < 2 or "pos_bias" in name
        assert rate[id(parameter)] == (expected, 0.0 if undecayed else 0.1), name


def test_what_a_run_leaves(run_train, tiny_run, tmp_path):
    training = {
        "max_steps": 9,
        "save_steps": 2,
        "save_total_limit": 2,
        "eval_steps": 3,
        "logging_steps": 2,
        "report_to": "tensorboard",
        "lr_scheduler_type": "onecycle",
        "log_clips": True,
    }
    assert run_train(*tiny_run(training=training)) == 0
    run = tmp_path / "run"
    assert {p.name for p in (run / "checkpoints").glob("*step*")} == {"step-00000008", "step-00000009"}
    metrics = read_lines(run / "metrics.jsonl")
    assert [r["step"] for r in metrics] == [1, 2, 4, 6, 8, 9]
    wanted = (
        "samples audio_hours epoch loss grad_norm learning_rate audio_seconds_per_second data_wait_fraction "
        "padding_fraction peak_memory_gib rss_gib"
    )
    assert set(wanted.split()) <= set(metrics[0])
    assert metrics[-1]["samples"] == 9 * 4
    assert metrics[-1]["epoch"] == 1
    evaluations = read_lines(run / "evaluations.jsonl")
    assert [(r["step"], r["split"]) for r in evaluations if "model" not in r and r["language"] is None] == [
        (0, "validation"), (0, "test"), (3, "validation"), (6, "validation"), (9, "validation"),
    ]  # fmt: skip
    assert {r["language"] for r in evaluations if r["step"] == 0} == {None, "en", "fr"}
    told = summary(run)
    wanted = (
        "strategy optimizer world_size steps samples wer_before wer_after wer_by_language best_step peak_memory_gib "
        "peak_rss_gib optimizer_state_bytes trainable_parameters audio_seconds_per_second wall_seconds quarantined "
        "filtered resumed_from effective_settings"
    )
    assert set(wanted.split()) <= set(told)
    assert told["steps"] == 9
    judged = [r for r in evaluations if "model" not in r and r["split"] == "validation" and r["language"] is None]
    assert told["best_step"] == min(judged, key=lambda r: (r["wer"], r["step"]))["step"]
    environment = json.loads((run / "environment.json").read_text())
    assert environment["versions"]["torch"].startswith("2.11")
    assert (run / "config.yaml").is_file()
    assert list((run / "logs").rglob("events.out.tfevents*"))
    clips = read_lines(run / "clips.jsonl")
    first_epoch = [i for r in clips[:6] for batch in r["ids_by_rank"][0] for i in batch]
    assert len(first_epoch) == len(set(first_epoch)) == 24


def test_the_base_model_stays_when_nothing_improves(run_train, tiny_run, tmp_path, tiny_model, capfd):
    training = {"max_steps": 3, "learning_rate": 1e-12, "eval_steps": 1}
    assert run_train(*tiny_run(model=DETERMINISTIC, training=training)) == 0
    assert "no evaluation was better than the base model" in capfd.readouterr().err
    told = summary(tmp_path / "run")
    assert told["best_step"] == 0
    assert told["wer_after"] == told["wer_before"]
    rows = [r for r in read_lines(tmp_path / "run" / "evaluations.jsonl") if r["step"] and r["language"] is None]
    trained = [r["wer"] for r in rows if r["split"] == "validation"]
    assert UtteranceCounts.load(tmp_path / "run" / BEST_TRAINED).wer() == min(trained)
    from finetune.models.loading import load_model

    base, kept = load_model(str(tiny_model)), load_model(str(tmp_path / "run"))
    for a, b in zip(base.state_dict().values(), kept.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_frozen_batchnorm_keeps_its_statistics(run_train, tiny_run, tmp_path, tiny_model):
    from finetune.models.loading import load_model

    before = load_model(str(tiny_model)).state_dict()
    for frozen in (True, False):
        output = tmp_path / str(frozen)
        training = {"output_dir": str(output), "eval_on_start": False}
        assert (
            run_train(
                *tiny_run(
                    model={"freeze_batchnorm": frozen}, data={"validation": None, "test": None}, training=training
                )
            )
            == 0
        )
        after = load_model(str(output)).state_dict()
        same = [torch.equal(before[k], after[k]) for k in before if "running_mean" in k]
        assert same
        assert all(same) if frozen else not any(same)


def test_bf16_trains_close_to_fp32(run_train, tiny_run, tmp_path):
    for precision in ("fp32", "bf16"):
        training = {
            "max_steps": 8,
            "output_dir": str(tmp_path / precision),
            "bf16": precision == "bf16",
            "eval_on_start": False,
        }
        assert run_train(*tiny_run(model=DETERMINISTIC, data={"test": None}, training=training)) == 0
    assert summary(tmp_path / "bf16")["mixed_precision"] == "bf16"
    assert losses(tmp_path / "bf16") != losses(tmp_path / "fp32")
    assert losses(tmp_path / "bf16") == pytest.approx(losses(tmp_path / "fp32"), rel=0.03)


@pytest.mark.slow
def test_omega_draws_plain_rnnt_steps(run_train, tiny_run, tmp_path, tiny_model):
    """omega 1 trains with the RNN-T loss alone, so the duration head gets no gradient; omega 0 moves it."""
    from finetune.models.loading import load_model

    start = load_model(str(tiny_model)).joint.joint_net[-1].weight[-5:]
    for omega in (0.0, 1.0):
        output = tmp_path / str(omega)
        training = {"output_dir": str(output), "weight_decay": 0.0, "eval_on_start": False}
        assert (
            run_train(*tiny_run(model={"omega": omega}, data={"validation": None, "test": None}, training=training))
            == 0
        )
        durations = load_model(str(output)).joint.joint_net[-1].weight[-5:]
        assert torch.equal(durations, start) == (omega == 1.0)


def test_epochs_end_the_run_with_every_clip_seen(run_train, tiny_run, tmp_path):
    """24 clips in batches of 4, 4 batches a step: 1.5 steps an epoch, of which the second is a smaller one."""
    training = {"max_steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": 4, "log_clips": True}
    assert run_train(*tiny_run(data={"test": None}, training=training)) == 0
    told = summary(tmp_path / "run")
    assert (told["samples"], told["epochs"], told["steps"]) == (48, 2, 4)
    ids = [i for r in read_lines(tmp_path / "run" / "clips.jsonl") for b in r["ids_by_rank"][0] for i in b]
    assert all(ids.count(i) == 2 for i in ids)
    assert {r["step"] for r in read_lines(tmp_path / "run" / "evaluations.jsonl")} == {0, told["best_step"], 4}


def test_epochs_of_many_small_batches_keep_their_learning_rate(run_train, tiny_run, tmp_path):
    """24 clips over 4 workers in batches of 16: four batches an epoch where two were planned."""
    training = {
        "max_steps": -1,
        "num_train_epochs": 2,
        "per_device_train_batch_size": 16,
        "dataloader_num_workers": 4,
        "warmup_ratio": 0.1,
    }
    data = {"validation": None, "test": None}
    assert run_train(*tiny_run(data=data, training=training)) == 0
    rates = [row["learning_rate"] for row in read_lines(tmp_path / "run" / "metrics.jsonl")]
    assert summary(tmp_path / "run")["steps"] == len(rates) > summary(tmp_path / "run")["total_steps"]
    assert all(rate > 0 for rate in rates[1:])
    assert rates[-1] < 0.5 * max(rates)


def test_the_last_lines_say_each_thing_once_and_what_was_clipped(run_train, tiny_run, tmp_path, capsys):
    """Without a test set the closing evaluation is of what was measured already."""
    training = {"max_steps": 3, "eval_steps": 3, "max_grad_norm": 1e-3, "gradient_accumulation_steps": 2}
    arguments = tiny_run(data={"test": None}, training=training)
    assert run_train(*arguments) == 0
    said = capsys.readouterr().err
    assert [said.count(f" step {step} validation: WER ") for step in (0, 3)] == [1, 1]
    assert said.count(" WER on validation: ") == 1
    assert "1 process, precision fp32, 3 steps of 8 clips (2 batches x 4 clips)" in said
    assert "gradients were clipped in 3 of 3 steps, all to the same norm (training.max_grad_norm=0.001)" in said
    assert summary(tmp_path / "run")["clipped_steps"] == 3
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "Before clipping at training.max_grad_norm=0.001, which clipped 3 of 3 steps." in page
    assert run_train(*arguments, "training.max_grad_norm=1e6", "training.overwrite_output_dir=true") == 0
    assert "clipped" not in capsys.readouterr().err
    assert summary(tmp_path / "run")["clipped_steps"] == 0
