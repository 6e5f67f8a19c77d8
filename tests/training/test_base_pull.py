"""L2-SP: the pull of the weights towards the start of a run."""

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import DETERMINISTIC, ONLY_TRAIN, problem, read_lines, slow
from launching import summary
from safetensors.torch import load_file

from finetune.callbacks.base_pull import BasePull
from finetune.config.compatibility import find_conflicts
from finetune.config.load import load_config

PULLED = {
    "max_steps": 6, "save_steps": 3, "save_total_limit": 0, "eval_on_start": False,
    "lr_scheduler_type": "constant", "warmup_ratio": 0.0, "optimizer": "adamw_loop",
}  # fmt: skip


def weights_of(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / f"step-{step:08d}" / "model.safetensors")


def start_of(run: Path, step: int) -> dict[str, torch.Tensor]:
    found = load_file(run / "checkpoints" / f"step-{step:08d}" / "l2_sp_start.safetensors")
    return {f"nemo.{name}": tensor for name, tensor in found.items()}


def distance(run: Path, start: dict[str, torch.Tensor], step: int = 6) -> float:
    weights = weights_of(run, step)
    return math.sqrt(sum(float((weights[name] - tensor).square().sum()) for name, tensor in start.items()))


@pytest.fixture
def trained(run_train: Any, tiny_run: Any, tmp_path: Path) -> Any:
    """Trains into tmp_path/NAME."""

    def run(name: str, *arguments: str, **training: Any) -> Path:
        training = {**PULLED, "output_dir": str(tmp_path / name), **training}
        assert run_train(*tiny_run(*arguments, model=DETERMINISTIC, data=ONLY_TRAIN, training=training)) == 0
        return tmp_path / name

    return run


def test_a_step_is_the_formula(trained: Any) -> None:
    """After one step: the weights of a run without the pull, moved by rate times strength of the way back, with the
    rate of each part."""
    one = {"max_steps": 1, "save_steps": 1, "learning_rate": 2e-3, "encoder_learning_rate": 5e-4}
    free = weights_of(trained("free", **one), 1)
    run = trained("pulled", l2_sp=200.0, **one)
    start, pulled = start_of(run, 1), weights_of(run, 1)
    assert len(start) > 50
    for name, base in start.items():
        rate = 5e-4 if name.startswith("nemo.encoder") else 2e-3
        expected = free[name] - rate * 200.0 * (free[name] - base)
        torch.testing.assert_close(pulled[name], expected, rtol=1e-5, atol=1e-7, msg=lambda m, n=name: n + m)
    assert distance(run, start, 1) < 0.95 * math.sqrt(
        sum(float((free[n] - b).square().sum()) for n, b in start.items())
    )


def test_a_skipped_step_pulls_nothing(trained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from finetune.models.loss_module import LossModule

    whole, calls = LossModule.forward, []

    def forward(self: Any, *inputs: Any, **options: Any) -> torch.Tensor:
        calls.append(1)
        return whole(self, *inputs, **options) * (math.nan if len(calls) == 4 else 1.0)

    monkeypatch.setattr(LossModule, "forward", forward)
    run = trained("run", max_steps=4, save_steps=1, l2_sp=300.0)
    assert summary(run)["skipped_steps"] == 1
    before, after = weights_of(run, 3), weights_of(run, 4)
    assert all(torch.equal(before[name], after[name]) for name in start_of(run, 4))


@pytest.mark.slow
def test_a_stronger_pull_stays_nearer_to_the_start_until_nothing_moves(trained: Any) -> None:
    runs = [trained(str(strength), l2_sp=strength) for strength in (1e-6, 100.0, 999.0)]
    start = start_of(runs[0], 6)
    free, some, strong = (distance(run, start) for run in runs)
    assert strong < 0.05 * free < some < 0.9 * free


@pytest.mark.parametrize("strategies", [(), slow(("lora",)), slow(("adamw_8bit", "gradient_checkpointing"))])
def test_a_run_resumes_exactly_with_the_start_of_the_run(trained: Any, tmp_path: Path, strategies: Any) -> None:
    named = [word for name in strategies for word in ("--strategy", name)]
    settings = {"l2_sp": 100.0, "ema_decay": 0.0} | ({"optimizer": "adamw_8bit"} if strategies[1:] else {})
    run = trained("run", *named, **settings)
    whole, weights, start = read_lines(run / "metrics.jsonl"), weights_of(run, 6), start_of(run, 6)
    shutil.rmtree(run / "checkpoints" / "step-00000006")
    trained("run", *named, "training.resume_from_checkpoint=true", **settings)
    assert summary(run)["resumed_from"] == 3
    assert [row["loss"] for row in read_lines(run / "metrics.jsonl")] == [row["loss"] for row in whole]
    assert all(torch.equal(tensor, weights_of(run, 6)[name]) for name, tensor in weights.items())
    assert all(torch.equal(tensor, start_of(run, 6)[name]) for name, tensor in start.items())
    assert any(not torch.equal(tensor, weights[name]) for name, tensor in start.items())


@pytest.mark.slow
def test_a_start_that_is_not_there_any_more(trained: Any, failed: Any, tiny_run: Any, tmp_path: Path) -> None:
    def resume(run: Path, exit_code: int, **model: Any) -> str:
        checkpoint = run / "checkpoints" / "step-00000006"
        training = {**PULLED, "output_dir": str(run), "max_steps": 8, "l2_sp": 100.0}
        training |= {"resume_from_checkpoint": str(checkpoint)}
        return failed(exit_code, *tiny_run(model={**DETERMINISTIC, **model}, data=ONLY_TRAIN, training=training))

    said = resume(trained("without"), 2)
    assert "was written without it, and does not hold the weights that the run started from" in said
    assert "Set training.l2_sp: 0" in said
    run = trained("frozen", "model.freeze_encoder=true", l2_sp=100.0)
    said = resume(run, 2)
    assert "holds no start of encoder." in said
    assert "Train what it trained before" in said
    (run / "checkpoints" / "step-00000006" / "l2_sp_start.safetensors").unlink()
    assert "l2_sp_start.safetensors" in resume(run, 1)


def test_what_excludes_it(run_file: Any) -> None:
    said = problem(run_file(training__l2_sp=1e5, training__learning_rate=1e-4))
    assert "training.l2_sp: 100000 at a learning rate of 0.0001 pulls past the start" in said
    assert "below 10000" in said

    def conflicts(engine: str) -> list[str]:
        config, _ = load_config(run_file(training__l2_sp=10.0), [], [])
        return [line for line in find_conflicts(config, engine) if line.startswith("training.l2_sp")]

    assert not conflicts("fsdp2")
    for engine in ("deepspeed_zero1", "deepspeed_zero3_offload"):
        assert "ZeRO steps on partitions of its own" in conflicts(engine)[0]
    for keys, why in (
        ({"training__optimizer": "cpu_offload_ao"}, "on the host"),
        ({"model__dtype": "bfloat16", "training__optimizer": "adamw_8bit_ao"}, "lost in rounding"),
    ):
        said = problem(run_file(training__l2_sp=10.0, **keys))
        assert "training.l2_sp and" in said
        assert why in said


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_two_processes_pull_like_one(trainings: Any, tmp_path: Path, engine: str) -> None:
    from engine_cases import assert_two_ranks_train_like_one

    parts = "training.l2_sp=50", "training.learning_rate=3e-3", "training.optimizer=adamw_loop"
    assert_two_ranks_train_like_one(trainings, tmp_path, engine, ("loss",), *parts)


@pytest.mark.parametrize(
    ("more", "strength"),
    [
        ([], 2 / (8 * 1e-3)),
        slow(["training.l2_sp=0"], None),
        slow(["training.l2_sp=7"], 7),
        slow(["training.layer_decay=0.9"], None),
    ],
)
def test_a_limit_alone_turns_the_pull_on(run_train, tiny_run, clips, tmp_path, capfd, more, strength):
    """With another way of keeping what the model knows, or where the pull is refused, it stays off."""
    guarded = {"guard": str(clips / "manifest.jsonl"), "guard_limit": "+5 %", "test": None}
    arguments = tiny_run(data=guarded, training={"max_steps": 8, "eval_on_start": False})
    pulls: list[float] = []

    def observe(trainer: Any) -> None:
        pulls.extend(c.strength for c in trainer.callbacks if isinstance(c, BasePull))

    assert run_train(*arguments, *more, observe=observe) == 0
    assert pulls == ([] if strength is None else [pytest.approx(strength)])
    said = capfd.readouterr().err
    assert (f"training.l2_sp={2 / (8 * 1e-3):g} is turned on (0: off)" in said) == (more == [])
    told = summary(tmp_path / "run")["effective_settings"]["training"]["l2_sp"]
    assert told == (pytest.approx(strength) if strength else 0 if "training.l2_sp=0" in more else None)


def test_a_limit_does_not_pull_where_the_pull_is_refused(tiny_run, clips):
    from finetune.config.compatibility import limit_pulls

    guarded = {"guard": str(clips / "manifest.jsonl"), "guard_limit": "+5 %"}
    config, _ = load_config(Path(tiny_run(data=guarded)[1]), [], [])
    assert limit_pulls(config)
    assert not limit_pulls(config, "deepspeed")
    assert not limit_pulls(config.replaced({"model.dtype": "bfloat16"}))
    assert not limit_pulls(config.replaced({"data.guard_limit": None}))
