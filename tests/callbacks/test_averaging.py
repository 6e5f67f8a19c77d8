"""Averages of the weights: a moving one (EMA), and the mean of evaluated states."""

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import problem, read_lines, slow
from engine_cases import evaluated, reference
from launching import summary
from safetensors.torch import load_file

from finetune.training.callbacks import StepResult
from finetune.training.step_batches import StepBatches
from finetune.training.trained_state import averaged_tensors

DECAY = 0.8
EMA = {"ema_decay": DECAY, "max_steps": 8, "save_steps": 4, "eval_steps": 4, "save_total_limit": 0}
QUIET = {"model": {"spec_augment": False, "dropout": 0.1}, "data": {"test": None, "max_eval_samples": 4}}


def ema_of(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / f"step-{step:08d}" / "ema.safetensors")


def rows(run: Path, weights: str = "raw") -> list[dict[str, Any]]:
    """Lines of evaluations.jsonl for all languages together, of the model in training or of an average."""
    found = [r for r in read_lines(run / "evaluations.jsonl") if r["language"] is None and "model" not in r]
    return [r for r in found if r.get("weights", "raw") == weights]


# ---- the moving average --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["same", "cpu"])
def test_ema_equals_a_computation_by_hand(run_train, tiny_run, tmp_path, monkeypatch, device):
    """Over a real training, with BatchNorm that learns and a step that is skipped, which must not count."""
    from finetune.models.loss_module import LossModule

    seen: list[dict[str, torch.Tensor]] = []
    whole, calls = LossModule.forward, []

    def forward(self: Any, *inputs: Any, **options: Any) -> torch.Tensor:
        losses_B = whole(self, *inputs, **options)
        calls.append(1)
        return losses_B * math.nan if len(calls) == 3 else losses_B

    def watch(trainer: Any) -> None:
        def copy() -> dict[str, torch.Tensor]:
            return {n: t.detach().double() for n, t in averaged_tensors(trainer.model).items()}

        def train_on(batches: StepBatches) -> StepResult:
            result = step(batches)
            if result.skipped is None:
                seen.append(copy())
            return result

        seen.append(copy())
        step, trainer.train_on = trainer.train_on, train_on

    monkeypatch.setattr(LossModule, "forward", forward)
    training = {**EMA, "ema_device": device, "eval_on_start": False}
    assert run_train(*tiny_run(training=training, **QUIET), observe=watch) == 0
    run = tmp_path / "run"
    assert summary(run)["skipped_steps"] == 1
    assert len(seen) == 1 + 7
    average = seen[0]
    for n, weights in enumerate(seen[1:], 1):
        d = min(DECAY, (1 + n) / (10 + n))
        average = {name: d * average[name] + (1 - d) * weights[name] for name in average}
    kept = ema_of(run, 8)
    assert kept.keys() == average.keys()
    assert any(name.endswith("running_var") for name in kept)
    assert all(tensor.dtype == torch.float32 for tensor in kept.values())
    for name, tensor in kept.items():
        torch.testing.assert_close(tensor.double(), average[name], rtol=1e-5, atol=1e-7, msg=lambda m, n=name: n + m)
    far = max(float((average[n] - seen[-1][n]).abs().max()) for n in average)
    assert far > 1e-3, "the average has to differ from the last weights for the comparison to mean much"
    assert [r["step"] for r in rows(run, "ema")] == [r["step"] for r in rows(run)] == [4, 8]


def test_running_statistics_are_means_over_processes(tiny, monkeypatch):
    """Each process has its own; the weights are equal on all of them. The order has to be the same everywhere."""
    from finetune.callbacks.averaging import Ema

    ema = Ema(tiny(), DECAY)
    before = {name: tensor.clone() for name, tensor in ema.average.items()}
    statistics = [name for name in before if "running_" in name]
    shapes: list[torch.Size] = []

    def all_reduce(tensor: torch.Tensor) -> None:
        shapes.append(tensor.shape)
        tensor += 3.0  # the other process's part

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    ema.mean_over_processes()
    assert not shapes
    ema.processes = 2
    ema.mean_over_processes()
    assert len(statistics) == 4
    assert shapes == [before[name].shape for name in statistics]
    for name, tensor in before.items():
        expected = (tensor + 3.0) / 2 if name in statistics else tensor
        assert torch.equal(ema.average[name], expected), name


def test_evaluating_the_average_leaves_the_training_as_it_is(run_train, tiny_run, tmp_path):
    losses = {}
    for name, decay in (("with", DECAY), ("without", 0.0)):
        training = {**EMA, "ema_decay": decay, "output_dir": str(tmp_path / name)}
        assert run_train(*tiny_run(training=training, **QUIET)) == 0
        losses[name] = [row["loss"] for row in read_lines(tmp_path / name / "metrics.jsonl")]
    assert losses["with"] == losses["without"]
    assert rows(tmp_path / "with") == rows(tmp_path / "without")
    assert not (tmp_path / "without" / "checkpoints" / "step-00000008" / "ema.safetensors").exists()


@pytest.mark.parametrize(
    "strategies",
    [slow(("lora",)), slow(("adamw_8bit", "gradient_checkpointing"))],
    ids=lambda names: "+".join(names),
)
def test_a_run_with_averages_resumes_exactly(run_train, tiny_run, tmp_path, strategies):
    named = [word for name in strategies for word in ("--strategy", name)]

    def train(name: str, *more: str) -> Path:
        training = {**EMA, "average_checkpoints": 3, "eval_steps": 2, "output_dir": str(tmp_path / name)}
        assert run_train(*tiny_run(*more, training=training, **QUIET), *named) == 0
        return tmp_path / name

    whole = train("whole")
    shutil.copytree(whole, tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed" / "checkpoints" / "step-00000008")
    resumed = train("resumed", "training.resume_from_checkpoint=true")
    assert summary(resumed)["resumed_from"] == 4
    first, again = ema_of(whole, 8), ema_of(resumed, 8)
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert ("lora" in strategies) == all(".lora_" in n for n in first if n.startswith("encoder."))
    for weights in ("raw", "ema", "average"):
        assert rows(resumed, weights) == rows(whole, weights)
    assert [r["step"] for r in rows(whole, "ema")] == [2, 4, 6, 8]
    assert summary(resumed)["average_checkpoints"] == summary(whole)["average_checkpoints"]
    # 4 was kept before the restart; 6 and 8 were made again
    assert summary(whole)["average_checkpoints"]["steps"] == [4, 6, 8]


@pytest.mark.slow
def test_a_checkpoint_without_an_average(run_train, tiny_run, tmp_path, capfd):
    """One that is switched on later begins with the present weights; one of other tensors is not taken."""
    training = {**EMA, "ema_decay": 0.0, "max_steps": 4, "average_checkpoints": 2, "eval_steps": 2}
    assert run_train(*tiny_run(training=training, **QUIET)) == 0
    more = ("training.resume_from_checkpoint=true", "training.max_steps=6", "training.ema_decay=0.5")
    capfd.readouterr()
    assert run_train(*tiny_run(*more, training={**EMA, **training}, **QUIET), "--strategy", "freeze_encoder") == 0
    said = capfd.readouterr().err
    assert "holds no moving average of what is trained now: it starts anew" in said
    assert "training.ema_decay was 0.0 when the checkpoint was written and is 0.5 now" in said
    assert "step-00000004.safetensors holds other tensors than are trained now" in said
    assert not any(name.startswith("encoder.") for name in ema_of(tmp_path / "run", 6))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "zero2", "fsdp2"])
def test_two_processes_have_the_average_of_one(trainings, clips, tmp_path, engine):
    steps = 6 if engine == "ddp" else 12
    common = [f"training.ema_decay={DECAY}", f"training.max_steps={steps}", "training.average_checkpoints=2"]
    common += [f"training.save_steps={steps // 2}", f"training.eval_steps={steps // 2}"]
    common += [*evaluated(clips / "manifest.jsonl"), "data.max_eval_samples=5"]
    two = (2, "--strategy", engine, *common)
    runs: dict[str, tuple[Any, ...]] = {"one": (*reference(), *common), "two": two}
    if engine != "ddp":
        resume = f"training.resume_from_checkpoint={tmp_path}/two/checkpoints/step-{steps // 2:08d}"
        runs |= {"resumed": (*two, resume), "by_ddp": (2, "--strategy", "ddp", *common, resume)}
    told = trainings("deepspeed" if engine == "zero2" else "torch", **runs)
    assert told["two"][0]["has_replica"] is (engine == "fsdp2")
    one, ours = ema_of(tmp_path / "one", steps), ema_of(tmp_path / "two", steps)
    assert one.keys() == ours.keys()
    for (
        name
    ) in one:  # sums over processes round otherwise, of which AdamW makes steps where gradients are next to nothing
        torch.testing.assert_close(ours[name], one[name], rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
    for weights in ("raw", "ema", "average"):
        for a, b in zip(rows(tmp_path / "two", weights), rows(tmp_path / "one", weights), strict=True):
            assert (a["step"], a["clips"]) == (b["step"], b["clips"])
            assert (a["wer"], a["cer"]) == pytest.approx((b["wer"], b["cer"]), abs=0.05)
    kept = tmp_path / "two" / "checkpoints" / "average"
    assert len(list(kept.glob("*.safetensors"))) == 2
    if engine != "ddp":
        again = ema_of(tmp_path / "resumed", steps)
        assert all(torch.equal(ours[name], again[name]) for name in ours)
        said = (tmp_path / "by_ddp-0.log").read_text()
        assert "was written under another strategy" in said
        assert "holds no moving average" not in said
        carried = ema_of(tmp_path / "by_ddp", steps)
        for name in ours:  # optimizer states start anew under another engine, so that only the way there is alike
            torch.testing.assert_close(carried[name], ours[name], rtol=0.1, atol=2e-2)


# ---- the mean of evaluated states, and which model is kept ---------------------------------------------------------


@pytest.fixture
def judged(monkeypatch) -> dict[str, list[float]]:
    """WERs on validation that the evaluations of the next run find, in their order."""
    from finetune.evaluation.scores import Counts, WerAccumulator
    from finetune.training.evaluation import Evaluator

    planned: dict[str, list[float]] = {"wers": []}
    whole = Evaluator.evaluate_split

    def evaluate_split(self: Evaluator, model: Any, split: str, max_clips: int | None = None) -> WerAccumulator:
        counted = whole(self, model, split, max_clips)
        wer = planned["wers"].pop(0) if planned["wers"] else 0.99
        found = WerAccumulator(counted.normalization)
        found.total = Counts(clips=1, words=1000, word_errors=round(1000 * wer), characters=1, character_errors=1)
        return found

    monkeypatch.setattr(Evaluator, "evaluate_split", evaluate_split)
    return planned


MEAN = {"max_steps": 8, "eval_steps": 2, "save_steps": 0, "eval_on_start": False, "average_checkpoints": 2}


def mean_by_hand(run: Path, steps: list[int]) -> dict[str, torch.Tensor]:
    files = [load_file(run / "checkpoints" / "average" / f"step-{step:08d}.safetensors") for step in steps]
    return {name: sum(f[name].double() for f in files) / len(files) for name in files[0]}


@pytest.mark.parametrize(
    ("settings", "wers", "steps", "weights", "best_step"),
    [
        ({}, [0.5, 0.4, 0.6, 0.7, 0.3], [6, 8], "average", 8),
        slow({"average_by": "best"}, [0.5, 0.4, 0.6, 0.7, 0.3], [2, 4], "average", 8),
        ({"average_by": "best"}, [0.5, 0.4, 0.6, 0.3, 0.3], [4, 8], "raw", 8),  # as good is not better
        ({"ema_decay": 0.5}, [0.5, 0.6, 0.4, 0.35, 0.6, 0.5, 0.7, 0.8, 0.36], [6, 8], "ema", 4),
    ],
)  # fmt: skip
def test_the_better_one_is_kept(
    run_train, tiny_run, tmp_path, judged, capfd, settings, wers, steps, weights, best_step
):
    from finetune.models.loading import load_model

    judged["wers"] = list(wers)
    trained: dict[int, dict[str, torch.Tensor]] = {}

    def watch(trainer: Any) -> None:
        def evaluate(splits: Any, last: bool = False) -> Any:
            state = {n: t.detach().clone() for n, t in averaged_tensors(trainer.model).items()}
            trained[trainer.progress.step] = state
            return whole(splits, last)

        whole, trainer.evaluate = trainer.evaluate, evaluate

    assert run_train(*tiny_run(training={**MEAN, **settings}, **QUIET), observe=watch) == 0
    run, told = tmp_path / "run", summary(tmp_path / "run")
    single = min(wers[:-1])
    assert told["average_checkpoints"] == {
        "steps": steps,
        "validation_wer": wers[-1],
        "best_single_validation_wer": single,
        "taken": weights == "average",
    }
    assert (told["best_weights"], told["best_step"], told["best_validation_wer"]) == (weights, best_step, min(wers))
    said = capfd.readouterr().err
    assert f"mean of the weights of steps {', '.join(map(str, steps))}: WER {wers[-1]:.4f} on validation" in said
    assert [r["wer"] for r in rows(run, "average")] == [wers[-1]]
    mean, found = mean_by_hand(run, steps), load_model(str(run)).state_dict()
    assert sorted(p.name for p in (run / "checkpoints" / "average").iterdir()) == [
        f"step-{step:08d}.safetensors" for step in steps
    ]
    for step in steps:
        file = load_file(run / "checkpoints" / "average" / f"step-{step:08d}.safetensors")
        assert all(torch.equal(file[name], trained[step][name]) for name in file)
    for name, tensor in mean.items():
        if weights == "average":
            torch.testing.assert_close(found[name].double(), tensor, rtol=1e-6, atol=1e-7)
        elif weights == "raw":
            assert torch.equal(found[name], trained[best_step][name])
    if weights == "ema":
        assert not torch.equal(found["joint.pred.weight"], trained[best_step]["joint.pred.weight"])
        assert rows(run, "ema")[1]["wer"] == told["best_validation_wer"]
    final = [r for r in read_lines(run / "evaluations.jsonl") if r.get("model") == "best"]
    assert {r.get("weights", "raw") for r in final} == {weights}


@pytest.mark.slow
def test_what_was_kept_of_another_run_goes(run_train, tiny_run, tmp_path, judged):
    training = {**MEAN, "max_steps": 4}
    assert run_train(*tiny_run(training=training, **QUIET)) == 0
    folder = tmp_path / "run" / "checkpoints" / "average"
    assert len(list(folder.iterdir())) == 2
    again = {**training, "overwrite_output_dir": True, "average_checkpoints": 0}
    assert run_train(*tiny_run(training=again, **QUIET)) == 0
    assert not folder.exists()
    assert summary(tmp_path / "run")["average_checkpoints"] is None
    # files without a checkpoint to continue from
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000004")
    folder.mkdir(parents=True)
    (folder / "step-00000099.safetensors").write_bytes(b"of another run")
    assert run_train(*tiny_run("training.resume_from_checkpoint=true", training=training, **QUIET)) == 0
    assert [p.name for p in sorted(folder.iterdir())] == ["step-00000002.safetensors", "step-00000004.safetensors"]


def test_the_report_shows_the_model_in_training(run_train, tiny_run, tmp_path, judged):
    from finetune.tools.report.read import read_run

    judged["wers"] = [0.5, 0.1, 0.4, 0.1, 0.05]
    settings = {**MEAN, "max_steps": 4, "ema_decay": 0.5}
    assert run_train(*tiny_run(training=settings, **QUIET)) == 0
    run = read_run(tmp_path / "run")
    assert [row["wer"] for row in run.rows("validation")] == [0.5, 0.4]
    assert run.summary["best_weights"] == "average"
    assert "mean of evaluated states, chosen by WER" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")


# ---- settings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("training.ema_decay=1.0", "training.ema_decay: has to be 0 to below 1, found 1.0"),
        ("training.average_checkpoints=1", "training.average_checkpoints: has to be 2 or more, or 0, found 1"),
        ("training.average_by=first", "training.average_by: 'first' is not one of last, best"),
        ("training.ema_device=gpu", "training.ema_device: 'gpu' is not one of same, cpu"),
        ("model.adapter=somewhere", "model.adapter: needs model.lora_rank"),
    ],
)
def test_settings_that_make_no_sense(run_file, setting, expected):
    assert expected in problem(run_file(data__validation="v.jsonl"), setting)


def test_averages_without_validation(run_file):
    said = problem(run_file(), "training.ema_decay=0.9", "training.average_checkpoints=2")
    assert "training.ema_decay: has no effect without data.validation" in said
    assert "training.average_checkpoints: has no effect without data.validation" in said


@pytest.mark.parametrize(
    ("settings", "engine", "expected"),
    [
        ({}, "deepspeed_zero3", "training.ema_decay and DeepSpeed ZeRO-3"),
        ({}, "deepspeed_zero3_offload", "training.ema_decay and DeepSpeed ZeRO-3"),
        ({"optimizer": "flash_adamw_gradient_release"}, "none", "training.ema_decay and training.optimizer flash"),
        ({"optimizer": "cpu_offload_ao"}, "none", "training.ema_decay and training.optimizer flash"),
        ({"ema_device": "cpu"}, "fsdp", "training.ema_device cpu and FSDP"),
    ],
)
def test_what_an_average_excludes(settings, engine, expected):
    from finetune.config.compatibility import find_conflicts
    from finetune.config.schema import DataConfig, ModelConfig, RunConfig, TrainingConfig

    training = TrainingConfig(output_dir="o", **settings)
    config = RunConfig(model=ModelConfig(name="m"), data=DataConfig(train="t"), training=training)
    assert not any("ema" in text for text in find_conflicts(config, engine))
    config.training.ema_decay = 0.999
    assert any(text.startswith(expected) for text in find_conflicts(config, engine))
    for other in ("none", "ddp", "deepspeed", "fsdp"):
        config = config.replaced({"training.optimizer": "adamw", "training.ema_device": "same"})
        assert not find_conflicts(config, other)


def test_the_plan_counts_the_average():
    from finetune.tools.planning.engines import FLOAT, Engine, Weights, host_bytes, peak_of_step
    from finetune.tools.planning.memory import Step

    whole = np.array([100.0])
    step = Step(["step"], {"parameters": whole, "gradients": whole}, {"parameters": whole}, {})
    plain = {"parameters": 100.0, "trained": 100.0, "trained_elements": 25.0, "layer": 10.0, "around_layers": 10.0}
    plain |= {"optimizer": 200.0, "optimizer_on_host": 0.0}
    ema = FLOAT * plain["trained_elements"]

    def states(engine: Engine, **more: float) -> float:
        return peak_of_step(step, Weights(**plain, **more), engine, accumulates=False)["optimizer"]

    for engine, share in (
        (Engine("none", 1, 1), 1.0),
        (Engine("ddp", 2, 2), 1.0),
        (Engine("deepspeed_2", 4, 4), 1.0),
        (Engine("fsdp", 4, 4), 0.25),
        (Engine("fsdp_offload", 4, 4), 0.0),
    ):
        assert states(engine, beside=ema) - states(engine) == pytest.approx(share * ema)
        assert states(engine, ema_on_host=ema) == states(engine)
    alone, sharded = Engine("none", 1, 1), Engine("fsdp_offload", 4, 4)
    for engine, kind, share in ((alone, "ema_on_host", 1.0), (sharded, "beside", 0.25)):
        more = host_bytes(Weights(**plain, **{kind: ema}), engine) - host_bytes(Weights(**plain), engine)
        assert more == pytest.approx(share * ema)
