"""Runs with data.guard_limit, which model they choose and what they say of it; and runs that diverge."""

import contextlib
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import read_lines, write_manifest
from run_callbacks import around_steps

from finetune.config.guard_limit import parse_guard_limit
from finetune.errors import UserError
from finetune.evaluation.utterance_counts import BEST_TRAINED, UtteranceCounts
from finetune.training.guard_limit import GuardJudge, log_outcome
from finetune.training.progress import Progress

LIMIT = "+0.4"
Arguments = Callable[..., list[str]]


@pytest.fixture(scope="module")
def guard(tiny_model: Path, clips: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A guard whose references are what the base model hears, so that any training makes it worse."""
    from finetune.transcribe import main

    rows = [{**r, "audio_filepath": str(clips / r["audio_filepath"])} for r in read_lines(clips / "manifest.jsonl")]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert main(["--model", str(tiny_model), *(row["audio_filepath"] for row in rows)]) == 0
    texts = [json.loads(line)["text"] for line in said.getvalue().splitlines()]
    heard = [{**row, "text": text} for row, text in zip(rows, texts, strict=True) if text.strip()]
    return write_manifest(tmp_path_factory.mktemp("guard") / "guard.jsonl", heard)


@pytest.fixture(scope="module")
def limited(tiny_model: Path, clips: Path, guard: Path, tmp_path_factory: pytest.TempPathFactory) -> Arguments:
    """`limited(folder, *overrides)`: arguments of a run in which the guard gets worse step by step."""
    run = {
        "model": {"name": str(tiny_model), "freeze_batchnorm": True, "dropout": 0.0, "spec_augment": False},
        "data": {
            **dict.fromkeys(("train", "validation"), str(clips / "manifest.jsonl")),
            "guard": str(guard), "guard_limit": LIMIT,
            "allow_overlap": True, "text_normalization": "basic",
        },
        "training": {
            "max_steps": 4, "eval_steps": 1, "save_steps": 2, "logging_steps": 1, "ema_decay": 0.9,
            "learning_rate": 2e-6, "seed": 2, "lr_scheduler_type": "constant", "warmup_ratio": 0.0,
            "per_device_train_batch_size": 4, "per_device_eval_batch_size": 12, "dataloader_num_workers": 0,
            "num_threads": 1, "report_to": "none", "eval_on_start": False, "l2_sp": 0,
        },
    }  # fmt: skip

    def arguments(folder: Path, *overrides: str) -> list[str]:
        path = tmp_path_factory.mktemp("run") / "RUN.yaml"
        run["training"]["output_dir"] = str(folder)
        path.write_text(yaml.safe_dump(run), encoding="utf-8")
        return ["--config", str(path), *overrides]

    return arguments


@pytest.fixture(scope="module")
def chosen(limited: Arguments, run_train_for_module: Callable[..., int], tmp_path_factory: Any) -> Path:
    """A finished run whose first steps keep the limit, and whose later ones do not."""
    folder = tmp_path_factory.mktemp("chosen") / "run"
    assert run_train_for_module(*limited(folder, "training.average_checkpoints=2")) == 0
    return folder


def rows_of(run: Path, split: str) -> list[tuple[Any, ...]]:
    """Step, weights and model of the lines of evaluations.jsonl over all languages."""
    rows = [r for r in read_lines(run / "evaluations.jsonl") if r["split"] == split and r["language"] is None]
    return [(r["step"], r.get("weights", "raw"), r.get("model")) for r in rows]


def summary_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "summary.json").read_text(encoding="utf-8"))


def test_the_best_model_is_the_best_of_those_that_keep_the_limit(chosen):
    told = summary_of(chosen)
    found = told["guard_limit"]
    judged = [row for row in found["judged"] if row["step"]]
    assert found["judged"][0] == {**found["judged"][0], "step": 0, "guard_wer": 0.0, "kept": True}
    assert [row["kept"] for row in judged] == [row["guard_wer"] <= 0.4 + 1e-9 for row in judged]
    assert {row["kept"] for row in judged} == {True, False}, "the case of this test"
    best = min((row for row in found["judged"] if row["kept"]), key=lambda row: row["validation_wer"])
    assert (told["best_step"], told["best_weights"]) == (best["step"], best["weights"])
    assert told["best_validation_wer"] == best["validation_wer"]
    free = min(found["judged"], key=lambda row: row["validation_wer"])
    assert not free["kept"], "the case of this test"
    assert found["best_without_limit"] == free
    assert (found["limit"], found["kept"], found["only_base"]) == (LIMIT, True, False)
    assert found["choice_wer"] == best["guard_wer"] <= found["highest_wer"] == found["base_wer"] + 0.4
    low, high = found["choice_change"]["difference_interval"]
    assert low <= found["choice_change"]["difference"] <= high
    assert found["test_wer"] == told["guard_wer_after"]
    assert found["test_base_wer"] == told["guard_wer_before"]
    assert found["test_kept"] == (found["test_wer"] <= found["test_highest_wer"])
    assert found["test_change"]["difference"] == told["significance"]["guard"]["difference"]
    kept = json.loads((chosen / "checkpoints" / "best.json").read_text())
    assert (kept["step"], kept["guard_wer"]) == (best["step"], best["guard_wer"])


def test_one_half_chooses_and_the_other_is_seen_twice(chosen):
    steps = [(0, "raw", None), *((s, w, None) for s in range(1, 5) for w in ("raw", "ema"))]
    *points, average = rows_of(chosen, "guard_choice")[len(steps) :]
    assert rows_of(chosen, "guard_choice")[: len(steps)] == steps
    told = summary_of(chosen)
    assert 1 <= len(points) == len(told["way_from_base"]["points"]) <= 6, "how many depends on what they keep"
    assert {*points} == {(4, point["weights"], None) for point in told["way_from_base"]["points"]}
    assert all(weights.startswith("way ") for _, weights, _ in points)
    assert average == (4, "average", None)
    assert rows_of(chosen, "guard") == [(0, "raw", None), (told["best_step"], told["best_weights"], "best")]
    assert rows_of(chosen, "validation")[0] == (0, "raw", None), "although training.eval_on_start is false"
    assert told["significance"]["guard"]["clips"] + len(_half_of_choice(chosen)) == 24
    assert told["significance"]["guard"]["unmatched"] == 0


def _half_of_choice(run: Path) -> Any:
    from finetune.evaluation.utterance_counts import UtteranceCounts

    return UtteranceCounts.load(run / "base-guard_choice.npz")


@pytest.mark.slow
def test_the_picture_has_a_point_for_each_model(chosen):
    from finetune.tools.report.guard_plot import axes_of, guard_plot, points_of
    from finetune.tools.report.read import read_run

    run, told = read_run(chosen), summary_of(chosen)
    points = points_of(run)
    models = 1 + 2 * 4 + len(told["way_from_base"]["points"]) + 1  # base, steps raw and ema, way, average
    assert len(points) == len(told["guard_limit"]["judged"]) == models
    taken = next(p for p in points if p["kind"] == "taken")
    assert taken["x"] == told["best_validation_wer"]
    assert taken["y"] == told["guard_limit"]["choice_wer"]
    named = {p["name"] for p in points if p["kind"] != "step"}
    assert {"base model", "average", *(w["weights"] for w in told["way_from_base"]["points"])} <= named
    plot = guard_plot(points, run.highest_guard_wer, axes_of(run))
    assert plot is not None
    assert sum(len(trace["x"]) for trace in plot.traces) == models
    assert plot.layout["shapes"][0]["y0"] == pytest.approx(100 * told["guard_limit"]["highest_wer"])
    page = (chosen / "report.html").read_text(encoding="utf-8")
    assert 'id="guard"' in page
    assert f"The limit {LIMIT} is kept on guard_choice, which chose" in page
    assert "Word error rate on guard_choice" in page
    picture = (chosen / "guard.svg").read_text(encoding="utf-8")
    assert picture.count("<svg") == 1
    run.summary.clear()  # as if it were still going on
    again = next(p for p in points_of(run) if p["kind"] == "taken")
    assert again == taken


@pytest.mark.slow
def test_a_killed_run_chooses_as_an_unbroken_one(chosen, limited, run_train, tmp_path):
    class Died(Exception):
        pass

    def observe(trainer: Any) -> None:
        def step() -> Any:
            if trainer.progress.step == 3:
                raise Died
            return contextlib.nullcontext()

        around_steps(trainer, step)

    arguments = limited(tmp_path / "run", "training.average_checkpoints=2")
    with pytest.raises(Died):
        run_train(*arguments, observe=observe)
    assert run_train(*arguments, "training.resume_from_checkpoint=true") == 0
    told, unbroken = summary_of(tmp_path / "run"), summary_of(chosen)
    assert told["resumed_from"] == 2
    for key in ("guard_limit", "best_step", "best_weights", "guard_wer_after"):
        assert told[key] == unbroken[key], key
    assert rows_of(tmp_path / "run", "guard_choice") == rows_of(chosen, "guard_choice")
    # A finished run that is started again judges its final candidates once more, and writes no line twice.
    assert run_train(*arguments, "training.resume_from_checkpoint=true") == 0
    assert summary_of(tmp_path / "run")["guard_limit"] == unbroken["guard_limit"]
    assert rows_of(tmp_path / "run", "guard_choice") == rows_of(chosen, "guard_choice")


@pytest.mark.slow
def test_a_damaged_model_is_chosen_anew_within_the_limit(chosen, limited, failed, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(chosen, run)
    (run / "model.nemo").write_bytes(b"damaged")
    checkpoint = f"training.resume_from_checkpoint={run / 'checkpoints' / 'step-00000002'}"
    said = failed(0, *limited(run, "training.average_checkpoints=2", checkpoint))
    assert f"model.nemo is damaged (its checksum differs) in {run}: the best model is chosen anew" in said
    told = summary_of(run)
    later = [row for row in told["guard_limit"]["judged"] if row["step"] > 2 and row["kept"]]
    best = min(later, key=lambda row: row["validation_wer"])
    assert (told["best_step"], told["best_weights"]) == (best["step"], best["weights"])
    assert told["guard_limit"]["choice_wer"] == best["guard_wer"] <= told["guard_limit"]["highest_wer"]


@pytest.mark.slow
def test_only_the_base_model_keeps_a_narrow_limit(limited, run_train, tmp_path, tiny_model, capfd):
    from finetune.models.loading import load_model

    changes = ("data.guard_limit=+0.0", "training.max_steps=2", "training.ema_decay=0", "training.eval_on_start=true")
    changes += ("training.learning_rate=1e-3",)  # no point on the way from the base model keeps it either
    assert run_train(*limited(tmp_path / "run", *changes)) == 0
    told, said = summary_of(tmp_path / "run"), capfd.readouterr().err
    found = told["guard_limit"]
    assert (told["best_step"], found["only_base"], found["kept"], found["choice_wer"]) == (0, True, True, 0.0)
    nearest = min(found["judged"][1:], key=lambda row: row["guard_wer"])
    assert found["nearest"] == nearest
    line = f"only the base model keeps it; the nearest is step {nearest['step']} ({nearest['weights']}), "
    assert f"data.guard_limit +0 (WER on guard_choice 0.0000 at most): {line}" in said
    assert found["test_kept"] is True
    mine, base = (load_model(str(path)).state_dict() for path in (tmp_path / "run", tiny_model))
    assert all(torch.equal(mine[name], base[name]) for name in base)

    (tmp_path / "run" / "model.nemo").write_bytes(b"damaged")
    assert run_train(*limited(tmp_path / "run", *changes, "training.resume_from_checkpoint=true")) == 1
    said = capfd.readouterr().err
    assert "data.guard_limit: there is no model that keeps it. The base model" in said
    assert "is damaged or gone" in said


@pytest.mark.slow
def test_the_bound_at_a_confidence_has_to_keep_the_limit(limited, run_train, failed, tmp_path):
    from finetune.tools.report.guard_plot import points_of
    from finetune.tools.report.read import read_run

    run = tmp_path / "run"
    assert run_train(*limited(run, "data.guard_confidence=0.95")) == 0
    told = summary_of(run)
    found, judged = told["guard_limit"], told["guard_limit"]["judged"]
    assert found["confidence"] == 0.95
    assert all(row["guard_bound"] >= row["guard_wer"] for row in judged)
    assert any(row["guard_bound"] > row["guard_wer"] for row in judged)
    assert [row["kept"] for row in judged] == [row["step"] == 0 or row["guard_bound"] <= 0.4 + 1e-9 for row in judged]
    assert found["choice_wer"] <= found["choice_bound"] <= found["highest_wer"]
    rows = [r for r in read_lines(run / "evaluations.jsonl") if r["split"] == "guard_choice" and r["language"] is None]
    assert [r.get("wer_bound") for r in rows[1:]] == [row["guard_bound"] for row in judged[1:]]
    points = read_run(run)
    points.summary.clear()
    assert next(p for p in points_of(points) if p["kind"] == "taken")["x"] == told["best_validation_wer"]
    (run / "base-guard_choice.npz").unlink()
    said = failed(2, *limited(run, "data.guard_confidence=0.95", "training.resume_from_checkpoint=true"))
    assert (
        f"data.guard_confidence: {run / 'base-guard_choice.npz'}, the base model's errors by clip, is not there"
        in said
    )


def test_a_limit_kept_on_one_half_only_is_said(messages):
    judge = GuardJudge(parse_guard_limit("+5 %"), 0.5, Progress(base_wer={"guard_choice": 0.4}))
    judge.judge("raw", 0.9, 0.4, None, None)
    judge.progress.step = 10
    assert judge.judge("raw", 0.5, 0.42, None, 0.42)
    assert not judge.judge("ema", 0.4, 0.4201, None, 0.4201)
    judge.progress.best_step, judge.progress.best_wer = 10, 0.5
    change = {"difference": 0.03, "difference_interval": [0.01, 0.05], "p_value": 0.01, "words": 9}
    found = judge.summary(0.4, 0.43, change)
    assert (found["kept"], found["test_kept"], found["test_change"]["difference"]) == (True, False, 0.03)
    log_outcome(judge.outcome(), found)
    best, said = messages[-2:]
    assert "step 10, WER 0.5000 on validation, WER 0.4200 on guard_choice is the best that keeps it" in best
    assert "the best on validation without it is step 10 (ema), WER 0.4000 on validation" in best
    assert "kept on the half of data.guard that chose, and not on the other: WER 0.4300 on guard" in said
    assert "+3.00 points since the base model (95 % interval +1.00 to +5.00)" in said
    assert judge.summary(0.4, 0.42, None)["test_kept"]


def test_nothing_is_kept_without_the_bound_that_a_confidence_asks_for(messages):
    judge = GuardJudge(parse_guard_limit("+5 %"), 0.9, Progress(base_wer={"guard_choice": 0.4}))
    assert judge.judge("raw", 0.9, 0.4, None, None), "the base model"
    judge.progress.step = 10
    for base in (None, UtteranceCounts()):  # lost, and of other clips
        bound = judge.bound(0.41, base, UtteranceCounts())
        assert not judge.judge("raw", 0.5, 0.41, None, bound)
    assert messages[-1].endswith("WER 0.4100 (up to anything) on guard_choice, 0.4200 at most: not kept")
    assert "only the base model" in judge.outcome()


def test_a_point_that_is_judged_again_after_a_restart_is_there_once():
    progress = Progress(base_wer={"guard_choice": 0.4}, step=4, best_step=4, best_weights="average", best_wer=0.5)
    judge = GuardJudge(parse_guard_limit("+5 %"), 0.5, progress)
    best = {"step": 4, "weights": "average", "validation_wer": 0.5, "guard_wer": 0.41, "guard_bound": 0.41}
    judge.check_after_resume(best)
    assert judge.summary(None, None, None)["choice_wer"] == 0.41
    change = {"difference": 0.01, "difference_interval": [0.0, 0.02], "p_value": 0.2}
    judge.judge("average", 0.5, 0.41, change, 0.41)
    found = judge.summary(None, None, None)
    assert found["choice_change"] == change
    assert len(found["judged"]) == 1


@pytest.mark.parametrize(
    ("now", "said"),
    [
        ((0.9, "basic", 7), "data.guard_confidence was 0.5 when the run began, and is 0.9"),
        ((0.5, "whisper", 7), "data.wer_normalization of data.guard was basic when the run began, and is whisper"),
        ((0.5, "basic", 8), "data.guard has other clips than when the run began"),
    ],
)
def test_a_run_is_judged_by_one_guard_and_confidence(now, said):
    progress = Progress(base_wer={"guard_choice": 0.4, "validation": 0.9})
    judge = GuardJudge(parse_guard_limit("+5 %"), 0.5, progress, "basic", 7)
    judge.check_base()
    judge.check_after_resume(None)
    with pytest.raises(UserError, match=said):
        GuardJudge(parse_guard_limit("+5 %"), now[0], progress, *now[1:]).check_after_resume(None)
    # A guard that is not looked at to its end, and a checkpoint of before, tell nothing.
    GuardJudge(parse_guard_limit("+5 %"), 0.5, progress, "basic", None).check_after_resume(None)
    progress.guard_judged_by = {}
    GuardJudge(parse_guard_limit("+5 %"), 0.9, progress, "basic", 8).check_after_resume(None)


@pytest.mark.parametrize(
    "case", ["limit is new", "limit was out", "limit is lower", "other clips", "base makes no error", "no words"]
)
def test_what_cannot_be_judged_is_refused(chosen, limited, failed, clips, tmp_path, case):
    again = "training.resume_from_checkpoint=true"
    if case == "base makes no error":
        said = failed(2, *limited(tmp_path / "run", "data.guard_limit=+5 %"))
        assert "data.guard_limit: +5 % of a WER of 0 is 0" in said
        assert "data.guard_limit=+0.01" in said
    elif case == "no words":
        rows = [
            {**r, "audio_filepath": str(clips / r["audio_filepath"])} for r in read_lines(clips / "manifest.jsonl")
        ]
        silent = write_manifest(tmp_path / "silent.jsonl", [{**row, "text": "!"} for row in rows[:4]])
        said = failed(2, *limited(tmp_path / "run", f"data.validation={silent}"))
        assert "data.guard_limit: no clip with words of data.validation could be used" in said
    elif case == "limit is lower":
        shutil.copytree(chosen, tmp_path / "run")
        said = failed(2, *limited(tmp_path / "run", "data.guard_limit=+0.1", again))
        assert "does not keep +0.1 (0.1000 at most)" in said
    elif case == "other clips":
        shutil.copytree(chosen, tmp_path / "run")
        said = failed(2, *limited(tmp_path / "run", "data.max_eval_samples=20", again))
        assert "data.guard has other clips than when the run began (data.guard, data.max_eval_samples)" in said
        rows = [
            {**r, "audio_filepath": str(clips / r["audio_filepath"])} for r in read_lines(clips / "manifest.jsonl")
        ]
        held = write_manifest(tmp_path / "held.jsonl", rows[:4])
        said = failed(2, *limited(tmp_path / "run", f"data.guard={held}", "data.allow_overlap=false", again))
        assert "data.allow_overlap" in said, "another guard is looked for in data.train, also at a resume"
    elif case == "limit was out":
        shutil.copytree(chosen, tmp_path / "run")
        best = tmp_path / "run" / "checkpoints" / "best.json"
        kept = json.loads(best.read_text())
        best.write_text(json.dumps({key: kept[key] for key in kept if not key.startswith("guard_")}))
        said = failed(2, *limited(tmp_path / "run", again))
        assert f"model.nemo (step {kept['step']}) was chosen without it" in said
    else:
        failed(0, *limited(tmp_path / "run", "data.guard_limit=null", "training.max_steps=1"))
        assert summary_of(tmp_path / "run")["guard_limit"] is None
        said = failed(2, *limited(tmp_path / "run", again))
        assert "data.guard_limit: the run began without it" in said


# ---- divergence ----------------------------------------------------------------------------------------------------


def test_a_run_that_diverges_ends_early_with_its_best_model(limited, failed, tmp_path, guard):
    diverges = (
        "training.stop_if_diverged=true", "training.max_steps=60", "training.eval_steps=30", "training.ema_decay=0",
        "training.learning_rate=1", "training.max_grad_norm=0", "training.save_steps=0", "data.guard_limit=+0.01",
        f"data.train={guard}", f"data.validation={guard}",
    )  # fmt: skip
    said = failed(1, *limited(tmp_path / "run", *diverges))
    told = summary_of(tmp_path / "run")
    assert told["diverged"] in said
    assert "training diverges: the loss is" in said
    assert f"The best model so far, the base model, {told['steps']} steps ago (WER 0.000), is kept" in said
    order = ["training.learning_rate=0.1 (now 1)", "training.warmup_steps=", "training.max_grad_norm=1 (now 0, off)"]
    assert [said.index(setting) for setting in order] == sorted(said.index(setting) for setting in order)
    assert "model.freeze_batchnorm" not in said, "it is frozen"
    assert told["steps"] < 20
    assert told["best_step"] == 0
    assert told["guard_limit"]["kept"]
    assert not (tmp_path / "run" / BEST_TRAINED).exists(), "no evaluation after step 0 keeps the limit"
    assert told["drift_warnings"]["diverges"] == 1
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert f"Stopped after {told['steps']} steps in" in page
    again = failed(1, *limited(tmp_path / "run", *diverges, "training.resume_from_checkpoint=true"))
    assert told["diverged"] in again, "its last checkpoint is not worth going on from"
    assert summary_of(tmp_path / "run")["steps"] == told["steps"]


def divergence(**training: Any) -> Any:
    from finetune.callbacks.divergence import Divergence
    from finetune.config.schema import DataConfig, ModelConfig, RunConfig, TrainingConfig
    from finetune.training.progress import Progress

    config = RunConfig(
        model=ModelConfig(name="m.nemo"),
        data=DataConfig(train="t.jsonl", validation="v.jsonl"),
        training=TrainingConfig(output_dir="out", **training),
    )
    return Divergence(config, Progress(best_step=20, best_wer=0.4), warmup=0)


def logged(step: int, loss: float | None, norm: float = 1.0, seconds: float = 1.0) -> dict[str, Any]:
    lengths = {"1": [1, 4, 4 * seconds, 4 * seconds]}
    return {"step": step, "loss": loss, "grad_norm": norm, "batch_lengths": lengths}


def test_signs_of_divergence():
    def seen(rows: list[dict[str, Any]], **training: Any) -> list[int]:
        found = divergence(**training)
        return [row["step"] for row in rows if found.of_row(row) is not None]

    level = [logged(10 * i, 1.0 + i % 3) for i in range(1, 21)]
    assert not seen(level)
    assert not seen([*level, *(logged(210 + 10 * i, 50.0) for i in range(2)), *level]), "a few lines are no divergence"
    assert seen([*level, *(logged(210 + 10 * i, 50.0) for i in range(9))])[:1] == [250]
    assert not seen([*level, *(logged(210 + 10 * i, None) for i in range(9))]), "another warning speaks of it"
    assert seen([*level, *(logged(210 + 10 * i, 1.0, norm=1e3) for i in range(9))])[:1] == [250]
    assert not seen([*level, *(logged(210 + 10 * i, 1.0, norm=50) for i in range(9))])
    long = [*level, *(logged(210 + 10 * i, 20.0, seconds=10.0) for i in range(20))]
    assert not seen(long), "long clips have a higher loss"
    assert seen(long, loss_reduction="mean_volume"), "which a loss by tokens does not"


def test_a_wer_far_above_the_base_models_is_divergence():
    watch = divergence(max_grad_norm=5.0)
    found = [watch.of_evaluation(s, wer, 0.5) for s, wer in ((10, 0.8), (20, 0.78), (30, 0.79), (40, 0.6), (50, 0.9))]
    assert [bool(said) for said in found] == [False, False, True, False, False]
    assert "WER on validation is 0.790, 0.500 before training, at step 30" in found[2]
    assert "The best model so far, that of step 20, 10 steps ago (WER 0.400), is kept" in found[2]
    assert "training.max_grad_norm=1 (now 5), model.freeze_batchnorm=true." in found[2]
    assert not any(watch.of_evaluation(s, 9.0, None) for s in (60, 70)), "nothing to compare with"
    again = divergence()
    again.restore(json.loads(json.dumps(watch.state())))
    assert again.state() == watch.state()
