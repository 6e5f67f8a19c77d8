"""Steps and weights that are not finite: what is skipped, what is told of it, what ends a run, and what is never
saved."""

import math
import shutil
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import DETERMINISTIC, ONLY_TRAIN, read_lines
from engine_runs import digest, explode, spoil, watch_digests
from launching import summary
from safetensors.torch import load_file

LEARNING = {**DETERMINISTIC, "freeze_batchnorm": False}  # BatchNorm's statistics move
NO_EVALUATION = {"eval_on_start": False, "eval_steps": 0}


@pytest.fixture
def spoiled(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`spoiled(calls, how)` spoils these calls of the model (counted from 1), in place of those spoiled before."""
    from finetune.models.loss_module import LossModule

    whole = LossModule.forward

    def begin(calls: Container[int], how: str = "nan") -> None:
        monkeypatch.setattr(LossModule, "forward", whole)
        spoil(calls, how)

    return begin


def skipped(run: Path) -> list[tuple[int, str]]:
    return [(row["step"], row["reason"]) for row in read_lines(run / "skipped_steps.jsonl")]


def test_a_step_that_is_not_finite_changes_nothing_and_is_said(run_train, tiny_run, tmp_path, spoiled, capfd):
    """Once with BatchNorm that learns; the clip is told whose loss it was."""
    spoiled([3], "nan_first")
    found: dict[str, Any] = {}
    training = {**NO_EVALUATION, "max_steps": 4, "save_steps": 0, "log_clips": True}
    arguments = tiny_run(model=LEARNING, data=ONLY_TRAIN, training=training)
    assert run_train(*arguments, observe=lambda trainer: watch_digests(trainer, found)) == 0
    run = tmp_path / "run"
    told = summary(run)
    assert (told["skipped_steps"], told["spikes"], told["scale_skips"], told["steps"]) == (1, 0, 0, 4)
    untouched([{"rank": 0, **found}], 4, {3})
    (row,) = read_lines(run / "skipped_steps.jsonl")
    assert (row["step"], row["reason"], row["loss"], row["grad_norm"], row["scale"]) == (3, "loss", "nan", "nan", None)
    ids = read_lines(run / "clips.jsonl")[2]["ids_by_rank"][0][0]
    assert [clip["id"] for clip in row["clips"]] == ids
    assert [clip["loss"] == "nan" for clip in row["clips"]] == [True, False, False, False]
    assert all(0 < clip["seconds"] < 2 and clip["tokens"] > 0 and clip["audio_finite"] for clip in row["clips"])
    said = capfd.readouterr().err
    assert (
        f"step 3: the loss is not finite, the step is skipped; not finite for {ids[0]} (nan, rank 0); its 4 clips: "
        in said
    )
    assert all(clip_id in said for clip_id in ids)


def test_too_many_in_a_row_stop_the_run_with_a_diagnosis(run_train, tiny_run, tmp_path, spoiled, capfd):
    spoiled(range(3, 99))
    training = {**NO_EVALUATION, "max_steps": 60, "save_steps": 0}
    assert run_train(*tiny_run(model=DETERMINISTIC, data=ONLY_TRAIN, training=training)) == 1
    said = capfd.readouterr().err
    assert "error: 20 steps in a row were skipped (training.max_skipped_steps=20): loss 20." in said
    assert [step for step, _ in skipped(tmp_path / "run")] == list(range(3, 23))
    diagnosis = said[said.index("error: ") :]
    for line in (
        "weights: finite",
        "audio of the last step: finite; its features: finite",
        "learning rate: 0.000",
        "precision: float32, weights in float32",
        "what to change: Lower training.learning_rate (now 0.001), or lengthen training.warmup_steps.",
    ):
        assert line in diagnosis
    assert "(4 of 20)" in diagnosis, "each of 24 clips comes in each sixth step"
    assert "Traceback" not in said


def test_the_diagnosis_names_bad_audio(run_train, tiny_run, clips, spoiled, capfd):
    """A clip that turns to noise of no number on its way, as a broken card or a faulty transform would."""
    from finetune.data.decode import as_float

    def observe(trainer: Any) -> None:
        train_on = trainer.train_on

        def broken(batches: Any) -> Any:
            if trainer.progress.step >= 2:
                batch = batches.batches[0]
                batch.audio_BS = as_float(batch.audio_BS).clone()
                batch.audio_BS[1, 1000] = math.nan
            return train_on(batches)

        trainer.train_on = broken

    training = {**NO_EVALUATION, "max_steps": 9, "max_skipped_steps": 2}
    assert run_train(*tiny_run(model=LEARNING, data=ONLY_TRAIN, training=training), observe=observe) == 1
    said = capfd.readouterr().err
    bad = read_lines(clips / "manifest.jsonl")[3 * 4 + 1]["id"]
    assert f"audio of the last step: not finite: {bad}; its features: not finite" in said
    assert "weights: finite" in said
    assert "what to change: Look at these clips, and name what is bad in data.leave_out." in said


def test_a_spike_is_skipped_and_a_continued_run_decides_the_same(run_train, tiny_run, tmp_path, spoiled, capfd):
    training = {**NO_EVALUATION, "max_steps": 10, "save_steps": 5, "spike_threshold": 20.0, "spike_window": 4}
    training |= {"save_total_limit": 0, "lr_scheduler_type": "constant"}
    arguments = tiny_run(model=LEARNING, data=ONLY_TRAIN, training=training)
    run = tmp_path / "run"
    spoiled([2, 7], "spike")  # the second step is not judged: the window holds one
    found: dict[str, Any] = {}
    assert run_train(*arguments, observe=lambda trainer: watch_digests(trainer, found)) == 0
    untouched([{"rank": 0, **found}], 10, {7})
    told = summary(run)
    assert (told["spikes"], told["skipped_steps"]) == (1, 0)
    assert skipped(run) == [(7, "spike")]
    assert "is above 20 times its median over 4 steps, the step is skipped; its 4 clips: " in capfd.readouterr().err
    lines = read_lines(run / "metrics.jsonl")
    assert [row["step"] for row in lines if row["loss"] is None] == [7]
    weights = load_file(run / "checkpoints" / "step-00000010" / "model.safetensors")
    shutil.rmtree(run / "checkpoints" / "step-00000010")
    spoiled([2], "spike")
    assert run_train(*arguments, "training.resume_from_checkpoint=true") == 0
    assert summary(run)["resumed_from"] == 5
    assert skipped(run) == [(7, "spike")], "told once: what lies behind the checkpoint is cut off"
    again = load_file(run / "checkpoints" / "step-00000010" / "model.safetensors")
    assert all(torch.equal(weights[name], again[name]) for name in weights)


def test_weights_that_exploded_are_not_saved(run_train, tiny_run, tmp_path, capfd):
    training = {"max_steps": 6, "save_steps": 2, "eval_steps": 3, "eval_on_start": False, "ema_decay": 0.9}
    arguments = tiny_run(model=DETERMINISTIC, data={"test": None, "max_eval_samples": 8}, training=training)
    run, kept = tmp_path / "run", []

    def observe(trainer: Any) -> None:
        explode(trainer, 4)
        after = trainer._after_step

        def note() -> None:
            if trainer.progress.step == 4:
                kept.append((run / "model.nemo").read_bytes())
            after()

        trainer._after_step = note

    assert run_train(*arguments, observe=observe) == 1
    said = capfd.readouterr().err
    assert "error: the weights are not finite at step 4 (1 of " in said
    assert "joint.joint_net.2.weight" in said
    last = run / "checkpoints" / "step-00000002"
    assert f"Go back to {last} (training.resume_from_checkpoint=true). Then lower training.learning_rate" in said
    assert sorted(p.name for p in (run / "checkpoints").glob("*step-*")) == [last.name]
    assert kept == [(run / "model.nemo").read_bytes()]
    assert run_train(*arguments, "training.resume_from_checkpoint=true") == 0
    assert summary(run)["resumed_from"] == 2


def test_a_base_model_that_is_not_finite_is_refused(run_train, tiny_run, tiny_model, tmp_path, capfd):
    from finetune.models.loading import load_model
    from finetune.models.nemo_archive import save_nemo

    model = load_model(str(tiny_model))
    with torch.no_grad():
        model.decoder.prediction.embed.weight[3, 3] = math.nan
    save_nemo(model, tmp_path / "bad.nemo")
    assert run_train(*tiny_run(model={"name": str(tmp_path / "bad.nemo")})) == 1
    assert "the weights are not finite before the first step: the base model is spoilt" in capfd.readouterr().err


# ---- fp16's loss scale ---------------------------------------------------------------------------------------------


@pytest.fixture
def scaled(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """`scaled(first)`: fp16's loss scaling, begun there, as on a GPU. A CPU has no LSTM in float16, so it computes in
    float32, in which a scale near 2 ** 127 overflows as 2 ** 16 does in float16."""
    from accelerate.utils import AutocastKwargs

    from finetune.training import run

    make = run.make_accelerator

    def begin(first: float) -> None:
        def make_scaled(*arguments: Any, **options: Any) -> Any:
            accelerator = make(*arguments, **options)
            accelerator.state._mixed_precision, accelerator.native_amp = "fp16", True
            accelerator.autocast_handler = AutocastKwargs(enabled=False)
            accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=first, growth_interval=3)
            return accelerator

        monkeypatch.setattr(run, "make_accelerator", make_scaled)

    return begin


def scales(trainer: Any, found: list[Any]) -> None:
    """Notes scale and growth behind each step, and what a skipped step must leave alone."""
    train_on = trainer.train_on

    def noted(batches: Any) -> Any:
        before = digest(trainer)
        result = train_on(batches)
        scaler = trainer.accelerator.scaler
        found.append((scaler.get_scale(), scaler._get_growth_tracker(), digest(trainer) == before))
        return result

    trainer.train_on = noted


@pytest.mark.slow
def test_the_loss_scale_is_found_and_goes_on_after_a_resume(run_train, tiny_run, tmp_path, scaled, capfd):
    scaled(2.0**127)  # far too large: it is halved until the gradients fit
    training = {**NO_EVALUATION, "max_steps": 24, "save_steps": 16, "save_total_limit": 0, "max_skipped_steps": 1}
    arguments = tiny_run(model=LEARNING, data=ONLY_TRAIN, training=training)
    run = tmp_path / "run"
    whole: list[Any] = []
    assert run_train(*arguments, observe=lambda trainer: scales(trainer, whole)) == 0
    told = summary(run)
    lowered = [n for n, (_, _, same) in enumerate(whole, 1) if same]
    assert (told["skipped_steps"], told["scale_skips"]) == (0, len(lowered))
    assert skipped(run) == [(n, "scale") for n in lowered]
    assert lowered[:3] == [1, 2, 3]
    assert len({growth for _, growth, _ in whole[16:]}) > 1
    assert lowered[-1] > 16, "some behind the resume too"
    assert "the step is skipped" in capfd.readouterr().err
    shutil.rmtree(run / "checkpoints" / "step-00000024")
    scaled(2.0**5)
    again: list[Any] = []
    assert run_train(*arguments, "training.resume_from_checkpoint=true", observe=lambda t: scales(t, again)) == 0
    assert summary(run)["resumed_from"] == 16
    assert again == whole[16:]
    assert summary(run)["scale_skips"] == told["scale_skips"]


def test_at_its_floor_the_loss_scale_is_no_excuse(run_train, tiny_run, tmp_path, scaled, spoiled, capfd):
    scaled(4.0)
    spoiled(range(1, 99), "gradient")
    training = {**NO_EVALUATION, "max_steps": 60, "save_steps": 0, "max_skipped_steps": 3}
    assert run_train(*tiny_run(model=DETERMINISTIC, data=ONLY_TRAIN, training=training)) == 1
    assert [reason for _, reason in skipped(tmp_path / "run")] == ["scale", "scale", *["gradient"] * 3]
    assert [row["scale"] for row in read_lines(tmp_path / "run" / "skipped_steps.jsonl")] == [2.0, 1.0, 1.0, 1.0, 1.0]
    assert "loss scale 1\n" in capfd.readouterr().err


def test_a_loss_that_is_not_finite_leaves_the_loss_scale(run_train, tiny_run, tmp_path, scaled, spoiled):
    scaled(8.0)
    spoiled([2])
    found: list[Any] = []
    training = {**NO_EVALUATION, "max_steps": 4, "save_steps": 0}
    arguments = tiny_run(model=LEARNING, data=ONLY_TRAIN, training=training)
    assert run_train(*arguments, observe=lambda trainer: scales(trainer, found)) == 0
    assert found == [(8.0, 1, False), (8.0, 1, True), (8.0, 2, False), (16.0, 0, False)]
    assert skipped(tmp_path / "run") == [(2, "loss")]


def test_a_norm_that_overflows_alone_is_not_the_scales_fault(run_train, tiny_run, tmp_path, scaled, spoiled):
    scaled(8.0)
    spoiled([2], "norm")
    found: list[Any] = []
    training = {**NO_EVALUATION, "max_steps": 3, "save_steps": 0}
    arguments = tiny_run(model=LEARNING, data=ONLY_TRAIN, training=training)
    assert run_train(*arguments, observe=lambda trainer: scales(trainer, found)) == 0
    assert [same for _, _, same in found] == [False, True, False]
    assert skipped(tmp_path / "run") == [(2, "gradient")]


def test_where_the_optimizer_steps_in_backward_a_bad_loss_never_gets_there(run_train, tiny_run, tmp_path, spoiled):
    """As flash_adamw_gradient_release does, which needs a GPU: here hooks that change the weights stand for it."""
    spoiled([3], "inf")
    found: dict[str, Any] = {}

    def observe(trainer: Any) -> None:
        def step_now(p: torch.Tensor) -> None:
            p.data -= 0.001 * p.grad.sign()

        for p in trainer.model.parameters():
            p.register_post_accumulate_grad_hook(step_now)
        trainer.step_filter.releases = True
        watch_digests(trainer, found)

    training = {**NO_EVALUATION, "max_steps": 4, "save_steps": 0}
    assert run_train(*tiny_run(model=LEARNING, data=ONLY_TRAIN, training=training), observe=observe) == 0
    untouched([{"rank": 0, **found}], 4, {3})
    assert skipped(tmp_path / "run") == [(3, "loss")]


# ---- several processes ---------------------------------------------------------------------------------------------

SPOILED = 4  # the call of the model that is spoiled, counted from 1


def untouched(ranks: list[dict[str, Any]], steps: int, skipped: set[int]) -> None:
    """Each rank held the same behind a skipped step as before it, and something else behind any other."""
    for rank in ranks:
        assert len(rank["digests"]) == steps + 1
        same = {n for n in range(1, steps + 1) if rank["digests"][n] == rank["digests"][n - 1]}
        assert same == skipped, rank["rank"]


HOW = {"nan": "loss", "inf": "loss", "gradient": "gradient", "spike": "spike"}


@pytest.mark.slow
@pytest.mark.parametrize("hows", [("nan", "inf"), ("gradient", "spike", "accumulated")], ids="-".join)
@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "zero1", "zero2", "zero2_offload", "zero3"])
def test_a_spoiled_batch_on_one_rank_changes_nothing_on_any(trainings, bare_zero3, clips, tmp_path, engine, hows):
    strategy = ["--deepspeed", bare_zero3] if engine == "zero3" else ["--strategy", engine]
    learning = [
        "model.freeze_batchnorm=false",
        "training.spike_threshold=20",
        "training.spike_window=3",
        "training.max_steps=6",
    ]
    if engine != "zero3":
        learning += [
            "training.ema_decay=0.9",
            f"data.validation={clips / 'manifest.jsonl'}",
            "data.max_eval_samples=8",
        ]
    cut = ["training.per_device_train_batch_size=2", "training.gradient_accumulation_steps=2"]
    plan = {how: (2, *strategy, *learning, {"spoiled": [1, SPOILED, how]}) for how in HOW}
    # The first of a step's two batches.
    plan["accumulated"] = (2, *strategy, *learning, *cut, {"spoiled": [1, 2 * SPOILED - 1, "nan"]})
    first_import = "deepspeed" if engine.startswith("zero") else "torch"
    told = trainings(first_import, **{how: plan[how] for how in hows})
    for name, ranks in told.items():
        how = "nan" if name == "accumulated" else name
        untouched(ranks, 6, {SPOILED})
        run = tmp_path / name
        (row,) = read_lines(run / "skipped_steps.jsonl")
        assert (row["step"], row["reason"]) == (SPOILED, HOW[how])
        assert {clip["rank"] for clip in row["clips"]} == {0, 1}
        bad = {clip["rank"] for clip in row["clips"] if isinstance(clip["loss"], str)}
        assert bad == ({1} if how in ("nan", "inf") else set())
        counts = {"skipped_steps": int(how != "spike"), "spikes": int(how == "spike"), "scale_skips": 0}
        assert {key: summary(run)[key] for key in counts} == counts


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "zero3"])
def test_weights_that_exploded_on_one_rank_are_not_saved_by_any(trainings, bare_zero3, tmp_path, engine):
    strategy = ["--deepspeed", bare_zero3] if engine == "zero3" else ["--strategy", engine]
    few = ["training.max_steps=6", "training.save_steps=2", {"exploded": [1, 4], "expect": 1}]
    trainings("deepspeed" if engine == "zero3" else "torch", run=(2, *strategy, *few))
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").glob("*step-*")) == ["step-00000002"]
    assert not (tmp_path / "run" / "model.nemo").exists()
    for rank in range(2):
        said = (tmp_path / f"run-{rank}.log").read_text()
        assert "error: the weights are not finite at step 4 (1 of " in said
        assert "joint.joint_net.2.weight" in said
