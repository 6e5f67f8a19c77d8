"""Points on the way from the base model as candidates at the end of a run with data.guard_limit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import read_lines, slow
from engine_cases import evaluated, reference
from launching import summary
from safetensors.torch import load_file

from finetune.training.trained_state import all_tensors, averaged_tensors

KEY = "joint.pred.weight"
BASE = 0.3
"""WER on the guard of the base model."""
TRAINING = {"max_steps": 4, "eval_steps": 2, "save_steps": 2, "save_total_limit": 0, "eval_on_start": False}
BASE_FILE = Path("checkpoints") / "interpolation" / "base.safetensors"


def validation_wer(way: float) -> float:
    return 0.9 - 0.5 * way + 0.4 * way**2


@pytest.fixture
def guarded(tiny_run, clips, monkeypatch):
    """`guarded(limit, model={...})`: arguments of a run, and what to call with its Trainer.

    WERs go by how far the weights are from the base model's; the farthest so far are called 1: on the guard 0.1 more
    there, on validation less, and least at 0.625.
    """
    from finetune.evaluation.scores import Counts, WerAccumulator
    from finetune.training.evaluation import Evaluator

    begun: dict[str, torch.Tensor] = {}
    farthest = [1e-12]
    whole = Evaluator.evaluate_split

    def evaluate_split(self: Evaluator, model: Any, split: str, max_clips: int | None = None) -> WerAccumulator:
        counted = whole(self, model, split, max_clips)
        now = all_tensors(model)[KEY].detach().cpu().float()
        far = float((now - begun.setdefault(KEY, now.clone())).abs().max())
        farthest[0] = max(farthest[0], far)
        way = far / farthest[0]
        wer = BASE + 0.1 * way if split.startswith("guard") else validation_wer(way)
        found = WerAccumulator(counted.normalization)
        found.total = Counts(clips=1, words=10**6, word_errors=round(1e6 * wer), characters=1, character_errors=1)
        return found

    def observe(trainer: Any) -> None:
        begun.setdefault(KEY, all_tensors(trainer.model)[KEY].detach().clone())

    monkeypatch.setattr(Evaluator, "evaluate_split", evaluate_split)

    def make(limit: str, *overrides: str, **model: Any) -> list[str]:
        manifest = str(clips / "manifest.jsonl")
        data = {"test": None, "guard": manifest, "guard_limit": limit, "max_eval_samples": 8}
        settings = {"spec_augment": False, "dropout": 0.0, **model}
        return tiny_run(*overrides, model=settings, data=data, training=TRAINING)

    return make, observe


def points(run: Path) -> list[dict[str, Any]]:
    return summary(run)["way_from_base"]["points"]


def rows_of(run: Path) -> list[tuple[str, str]]:
    """Split and weights of the candidates' lines in evaluations.jsonl, in their order."""
    rows = [r for r in read_lines(run / "evaluations.jsonl") if r["language"] is None and "model" not in r]
    return [(r["split"], r["weights"]) for r in rows if r.get("weights", "raw").startswith("way ")]


@pytest.mark.parametrize(
    ("limit", "ways", "kept"),
    [
        ("+0.065", [1, 0.75, 0.5, 0.625, 0.6875], [0.5, 0.625]),
        ("+20 %", [1, 0.75, 0.5, 0.625, 0.5625], [0.5, 0.5625]),  # 0.06 of a base of 0.3
        slow("+0.001", [1, 0.75, 0.5, 0.25, 0.125, 0.0625], []),
        slow("+0.2", [], []),  # the last weights keep it
    ],
)
def test_the_largest_step_that_keeps_the_limit_is_found(run_train, tmp_path, guarded, limit, ways, kept):
    from finetune.models.loading import load_model

    make, observe = guarded
    states: dict[str, dict[str, torch.Tensor]] = {}

    def watch(trainer: Any) -> None:
        def copy() -> dict[str, torch.Tensor]:
            return {n: t.detach().clone() for n, t in averaged_tensors(trainer.model).items()}

        def finish() -> Any:
            states["last"] = copy()
            return whole()

        observe(trainer)
        states["base"] = copy()
        whole, trainer.finish = trainer.finish, finish

    assert run_train(*make(limit), observe=watch) == 0
    run = tmp_path / "run"
    found = points(run)
    assert [p["way"] for p in found] == sorted(ways)
    assert [p["way"] for p in found if p["kept"]] == kept
    for point in found:
        assert point["validation_wer"] == pytest.approx(validation_wer(point["way"]), abs=1e-4)
        assert point["guard_wer"] == pytest.approx(BASE + 0.1 * point["way"], abs=1e-4)
    assert rows_of(run) == [(split, f"way {way:g}") for way in ways for split in ("validation", "guard_choice")]
    base = load_file(run / BASE_FILE)
    assert base.keys() == states["base"].keys()
    assert all(torch.equal(tensor, states["base"][name]) for name, tensor in base.items())
    best = summary(run)["best_weights"]
    if kept:
        assert best == summary(run)["way_from_base"]["taken"]
        way, written = float(best.removeprefix("way ")), load_model(str(run)).state_dict()
        assert way in ways
        weights = [name for name in base if "running" not in name]
        changes = {name: states["last"][name] - base[name] for name in base}
        sizes_N = torch.cat([changes[name].abs().flatten() for name in weights]).sort().values
        least = sizes_N[len(sizes_N) - round(len(sizes_N) / 2)]
        for name, change in changes.items():
            gone = torch.where(change.abs() >= least, change, 0.0) if name in weights else change
            torch.testing.assert_close(written[name], base[name] + way * gone, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_a_lora_update_goes_the_way(run_train, tmp_path, guarded, monkeypatch):
    """The update of the encoder at a point is `way` times the last one; the last weights are in the model again."""
    from finetune.models.adapters import merged_state_dict

    make, observe = guarded
    at: dict[str, dict[str, torch.Tensor]] = {}

    def watch(trainer: Any) -> None:
        def evaluate_splits(model: Any, splits: Any, step: int, weights: str = "raw", is_best: bool = False) -> Any:
            if not is_best:
                at[weights] = {n: t.detach().clone() for n, t in merged_state_dict(model).items()}
            return whole(model, splits, step, weights, is_best)

        observe(trainer)
        at["base"] = {n: t.detach().clone() for n, t in merged_state_dict(trainer.model).items()}
        whole = trainer.evaluator._evaluate_splits
        monkeypatch.setattr(trainer.evaluator, "_evaluate_splits", evaluate_splits)

    assert run_train(*make("+0.065", lora_rank=4), observe=watch) == 0
    key = "encoder.layers.0.self_attn.linear_q.weight"
    whole = at["raw"][key] - at["base"][key]
    assert whole.abs().max() > 1e-4
    for way in (0.5, 0.75, 0.625, 0.6875):
        torch.testing.assert_close(at[f"way {way:g}"][key] - at["base"][key], way * whole, rtol=1e-3, atol=1e-7)


def resumed(guarded: Any, run: Path, change: Any) -> tuple[list[str], Any]:
    """Arguments of a continuation from step 2, before which `change` is called with the file of the base model."""
    make, observe = guarded
    change(run / BASE_FILE)
    checkpoint = run / "checkpoints" / "step-00000002"
    return make("+0.065", f"training.resume_from_checkpoint={checkpoint}"), observe


@pytest.mark.slow
def test_resuming(run_train, tmp_path, guarded, capfd):
    """The base model is read back; where it is gone it is made anew, and a finished run is not judged twice."""
    make, observe = guarded
    run = tmp_path / "run"
    assert run_train(*make("+0.065"), observe=observe) == 0
    base, first, lines = load_file(run / BASE_FILE), summary(run), rows_of(run)
    assert run_train(*make("+0.065", "training.resume_from_checkpoint=true"), observe=observe) == 0
    assert summary(run)["way_from_base"] == first["way_from_base"]
    assert summary(run)["best_weights"] == first["best_weights"] != "raw"
    assert rows_of(run) == lines

    arguments, observe = resumed(guarded, run, lambda file: file.unlink())
    assert run_train(*arguments, observe=observe) == 0
    assert "is not there: the base model is read anew from model.name" in capfd.readouterr().err
    again = load_file(run / BASE_FILE)
    assert again.keys() == base.keys()
    assert all(torch.equal(tensor, base[name]) for name, tensor in again.items())
    assert rows_of(run) == lines

    arguments, observe = resumed(guarded, run, lambda file: file.write_bytes(b"{"))
    assert run_train(*arguments, observe=observe) == 0
    said = capfd.readouterr().err
    assert "base.safetensors is damaged (" in said
    assert "is read anew from model.name" in said


@pytest.mark.slow
def test_an_extended_run_knows_the_point_that_it_has_taken(run_train, tmp_path, guarded):
    """It was judged after the last checkpoint, which does not know of it."""
    make, observe = guarded
    run = tmp_path / "run"
    assert run_train(*make("+0.065"), observe=observe) == 0
    best = summary(run)["best_weights"]
    assert best.startswith("way ")
    assert (
        run_train(*make("+0.065", "training.resume_from_checkpoint=true", "training.max_steps=6"), observe=observe)
        == 0
    )
    told = summary(run)
    before = [row for row in told["guard_limit"]["judged"] if (row["step"], row["weights"]) == (4, best)]
    assert [row["kept"] for row in before] == [True]
    assert told["best_step"] in (4, 6)
    assert told["guard_limit"]["choice_wer"] == pytest.approx(BASE + 0.1 * float(best.removeprefix("way ")), abs=1e-4)
    assert len(points(run)) == 5, "of the last step alone"


@pytest.mark.slow
def test_a_base_that_cannot_be_made_anew(run_train, tmp_path, guarded, capfd):
    """model.tokenizer changes what model.name holds: the run goes on, and says that it looks at no points."""
    make, observe = guarded
    (tmp_path / "texts.txt").write_text("ş ğ ı şı\n" * 9, encoding="utf-8")
    tokenizer = {"extend_from": str(tmp_path / "texts.txt")}
    assert run_train(*make("+0.065", tokenizer=tokenizer), observe=observe) == 0
    run = tmp_path / "run"
    assert len(points(run)) == 5  # the base with the grown vocabulary was kept at the start
    (run / BASE_FILE).unlink()
    checkpoint = run / "checkpoints" / "step-00000002"
    again = make("+0.065", f"training.resume_from_checkpoint={checkpoint}", tokenizer=tokenizer)
    assert run_train(*again, observe=observe) == 0
    said = capfd.readouterr().err
    assert "base.safetensors is not there, and the base model cannot be made anew: model.tokenizer" in said
    assert points(run) == []


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "zero2", "fsdp2"])
def test_two_processes_go_the_way_of_one(trainings, tiny_model, clips, tmp_path, engine):
    """The base model is kept whole, and points under an engine that shards have the WERs of one process."""
    from finetune.models.loading import load_model

    manifest = clips / "manifest.jsonl"
    common = [*evaluated(manifest), "training.max_steps=6", "training.eval_steps=6", f"data.guard={manifest}"]
    common += ["data.guard_limit=+0.0", "training.l2_sp=0", "training.learning_rate=1e-2"]
    settings = {"base_wer": 0.0}  # no point keeps it
    trainings(
        "deepspeed" if engine == "zero2" else "torch",
        one=(*reference(), *common, settings),
        two=(2, "--strategy", engine, *common, settings),
    )
    one, two = (points(tmp_path / name) for name in ("one", "two"))
    assert [p["way"] for p in one] == [p["way"] for p in two] == [0.0625, 0.125, 0.25, 0.5, 0.75, 1]
    for a, b in zip(one, two, strict=True):
        assert [b[key] for key in ("validation_wer", "guard_wer")] == pytest.approx(
            [a["validation_wer"], a["guard_wer"]], abs=0.05
        )
    base = load_model(str(tiny_model)).state_dict()
    for name in ("one", "two"):
        kept = load_file(tmp_path / name / BASE_FILE)
        assert len(kept) > 50
        assert all(torch.equal(tensor, base[key]) for key, tensor in kept.items())
