"""training.auto_batch: bounds from the plan, and a step that runs out of memory is made again in smaller batches."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import DETERMINISTIC, ONLY_TRAIN, ROOT, read_lines
from launching import start
from run_callbacks import callback_of

from finetune.callbacks.out_of_memory import MemoryRecovery
from finetune.data.batch import part_of
from finetune.data.batching import BatchLimits, bound_at
from finetune.tools.planning.accounting import StepAccount
from finetune.training.callbacks import StepResult
from finetune.training.step_batches import StepBatches

MIB = 2**20


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """One cache for all tests here: they follow the same model."""
    folder = tmp_path_factory.getbasetemp() / "plan_cache"
    monkeypatch.setenv("PARAKEET_FINETUNE_CACHE", str(folder))


def summary_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text(encoding="utf-8"))


def limited(trainer: Any, most_seconds: float, rank: int | None = None) -> None:
    """A card whose memory ends at so many padded seconds of a batch."""
    forward = trainer.loss_module.forward

    def guarded(audio_BS: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if audio_BS.numel() > most_seconds * 16_000 and rank in (None, trainer.accelerator.process_index):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return forward(audio_BS, *args, **kwargs)

    trainer.loss_module.forward = guarded


def test_bounds_by_length() -> None:
    limits = BatchLimits(bounds=((1.0, 8), (3.0, 2)))
    assert [limits.clips_of_length(s) for s in (0.2, 1.0, 1.5, 3.0, 9.0)] == [8, 8, 2, 2, 2]
    assert BatchLimits(seconds=6.0, bounds=((1.0, 8), (3.0, 2))).clips_of_length(1.0) == 6
    assert [bound_at([[1.0, 8], [3.0, 2]], s) for s in (0.2, 1.5, 9.0)] == [8, 2, 2]


@pytest.mark.slow
def test_batches_stay_within_the_memory_that_they_were_planned_for(run_train, tiny_run, tmp_path: Path) -> None:
    """The account of each step's tensors against the limit, with the bounds used to the full."""
    limit = 12 * MIB
    peaks: list[int] = []
    clips: list[int] = []
    samples: list[int] = []

    def measure(trainer: Any) -> None:
        step = trainer.train_on

        def accounted(batches: StepBatches) -> StepResult:
            clips.extend(len(batch.ids) for batch in batches.batches)
            samples.extend(int(batch.audio_lengths_B.sum()) for batch in batches.batches)
            with StepAccount(trainer.module, trainer.optimizer) as account:
                result = step(batches)
            peaks.append(account.peak)
            return result

        trainer.train_on = accounted

    run = tiny_run(
        data={"max_duration": 3.0},
        training={"max_steps": 6, "auto_batch": True, "memory_limit_gib": limit / 2**30, "save_steps": 0},
    )
    assert run_train(*run, observe=measure) == 0
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    bounds = config["data"]["batch_bounds"]
    assert bounds[-1][0] == 3.0
    assert [n for _, n in bounds] == sorted((n for _, n in bounds), reverse=True)
    assert bounds[0][1] > bounds[-1][1] >= 1
    # Random weights have the loss look at every cell, as the plan assumes.
    assert 0.5 * limit < max(peaks) <= 1.05 * limit
    assert max(clips) > 4, "not the run file's batches"
    found = summary_of(tmp_path / "run")
    assert (found["out_of_memory"], found["batch_bounds"]) == (0, bounds)
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    row = plan["strategies"][0]
    assert row["fits"]
    assert 0.5 * limit < row["peak_memory_gib"] * 2**30 <= limit, "of the bounds, not of the run file's batch"
    assert found["audio_hours"] * 3600 == pytest.approx(sum(samples) / 16_000), (
        "what was tried beforehand does not count"
    )


@pytest.mark.slow
def test_nothing_fits(failed, tiny_run) -> None:
    run = tiny_run(training={"auto_batch": True, "memory_limit_gib": 0.001})
    said = failed(2, *run)
    assert "training.auto_batch: one clip of data.max_duration=40 s needs" in said
    assert "python -m finetune.plan" in said


BOUNDS = {"auto_batch": True, "memory_limit_gib": 1.0, "per_device_train_batch_size": 4}


def test_a_step_is_made_again_in_smaller_batches(run_train, tiny_run, tmp_path: Path) -> None:
    """The same clips and the same losses as without: only the pieces are smaller."""
    losses = {}
    for name, most in (("whole", 1000.0), ("halved", 12.0)):
        run = tiny_run(
            model=DETERMINISTIC,
            data={"validation": None, "test": None, "max_duration": 3.0, "batch_duration": 24.0},
            training={
                **BOUNDS,
                "max_steps": 8,
                "save_steps": 0,
                "output_dir": str(tmp_path / name),
                "log_clips": True,
            },
        )
        assert run_train(*run, observe=lambda trainer, most=most: limited(trainer, most)) == 0
        losses[name] = [row["loss"] for row in read_lines(tmp_path / name / "metrics.jsonl")]
    assert losses["halved"] == pytest.approx(losses["whole"], rel=1e-5)
    assert (tmp_path / "halved/clips.jsonl").read_text() == (tmp_path / "whole/clips.jsonl").read_text()
    assert summary_of(tmp_path / "whole")["out_of_memory"] == 0
    found = summary_of(tmp_path / "halved")
    before = yaml.safe_load((tmp_path / "halved" / "config.yaml").read_text())["data"]["batch_bounds"]
    assert found["batch_bounds"][-1][1] < before[-1][1]
    assert [n for _, n in found["batch_bounds"]] == sorted((n for _, n in found["batch_bounds"]), reverse=True)


@pytest.mark.slow
def test_a_cache_in_pieces_halves_no_bound(run_train, tiny_run, tmp_path: Path) -> None:
    """Where emptying the allocator's cache helps, a step is made again as it was."""
    failures: list[int] = []

    def in_pieces(trainer: Any) -> None:
        callback_of(trainer, MemoryRecovery).has_cache = True
        forward = trainer.loss_module.forward

        def guarded(*args: Any, **kwargs: Any) -> torch.Tensor:
            if trainer.progress.step not in failures:
                failures.append(trainer.progress.step)
                raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
            return forward(*args, **kwargs)

        trainer.loss_module.forward = guarded

    run = tiny_run(data={**ONLY_TRAIN, "max_duration": 3.0}, training={**BOUNDS, "max_steps": 2, "save_steps": 0})
    assert run_train(*run, observe=in_pieces) == 0
    assert failures == [0, 1]
    found = summary_of(tmp_path / "run")
    assert (found["steps"], found["out_of_memory"]) == (2, 0)
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert found["batch_bounds"] == config["data"]["batch_bounds"]


@pytest.mark.slow
def test_memory_that_runs_out_later_is_named_kept_and_counted(run_train, tiny_run, tmp_path: Path, capsys) -> None:
    def later(trainer: Any) -> None:
        step = trainer.train_on

        def from_step_3(batches: StepBatches) -> StepResult:
            if trainer.progress.step == 2:
                limited(trainer, 6.0)
            return step(batches)

        trainer.train_on = from_step_3

    run = tiny_run(
        data={"max_duration": 3.0, "batch_duration": 24.0}, training={**BOUNDS, "max_steps": 5, "save_steps": 5}
    )
    assert run_train(*run, observe=later) == 0
    found = summary_of(tmp_path / "run")
    assert found["out_of_memory"] >= 1
    said = next(line for line in capsys.readouterr().err.splitlines() if "out of memory with" in line)
    assert " step 3: " in said
    assert "tokens" in said
    assert "cells" in said
    kept = torch.load(next((tmp_path / "run" / "out_of_memory").glob("*.pt")))
    assert len(kept["ids"]) == len(kept["audio_BS"]) > 1
    assert kept["audio_BS"].numel() > 6.0 * 16_000
    # A run that goes on keeps the bounds, and has no need to halve them again.
    more = [*run, "training.max_steps=8", "training.resume_from_checkpoint=true"]
    assert run_train(*more, observe=lambda trainer: limited(trainer, 6.0)) == 0
    assert summary_of(tmp_path / "run")["out_of_memory"] == found["out_of_memory"]


@pytest.mark.slow
def test_one_clip_that_does_not_fit_ends_the_run(failed, tiny_run, run_train, capsys) -> None:
    run = tiny_run(data={"max_duration": 3.0}, training=BOUNDS)
    assert run_train(*run, observe=lambda trainer: limited(trainer, 0.1)) == 1
    said = capsys.readouterr().err.rsplit("error: ", 1)[-1]
    assert said.startswith("1 clip of up to ")
    assert "What would help" in said


@pytest.mark.slow
def test_weights_that_were_stepped_in_backward_are_not_stepped_again(run_train, tiny_run, tmp_path, capsys) -> None:
    """The bound is halved for the next start instead."""

    def cannot(trainer: Any) -> None:
        limited(trainer, 12.0)
        callback_of(trainer, MemoryRecovery).steps_back = False

    run = tiny_run(data={"max_duration": 3.0, "batch_duration": 24.0}, training={**BOUNDS, "save_steps": 1})
    assert run_train(*run, observe=cannot) == 1
    said = capsys.readouterr().err.rsplit("error: ", 1)[-1]
    assert "cannot take a step back" in said
    limits = json.loads((tmp_path / "run" / "batch_limits.json").read_text())
    assert limits["now"][-1][1] < limits["bounds"][-1][1]


RANK_1_RUNS_OUT = """
import sys, torch
sys.path[:0] = [{root!r}]
from finetune import train

def observe(trainer):
    forward = trainer.loss_module.forward
    def guarded(audio_BS, *args, **kwargs):
        in_third_step = trainer.accelerator.process_index == 1 and trainer.progress.step == 2
        if in_third_step and audio_BS.numel() > {most} * 16_000:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return forward(audio_BS, *args, **kwargs)
    trainer.loss_module.forward = guarded

train.leave(train.main(sys.argv[1:], observe))
"""


@pytest.mark.slow
def test_all_ranks_halve_alike_and_none_hangs(tiny_run, tmp_path: Path) -> None:
    """Two DDP processes, of which one runs out of memory in the third step; the losses are those of plain DDP with the
    same bounds."""

    def losses(name: str, most: float, **changes: Any) -> list[float]:
        script = tmp_path / f"{name}.py"
        script.write_text(RANK_1_RUNS_OUT.format(root=str(ROOT), most=most), encoding="utf-8")
        training = {**BOUNDS, "max_steps": 4, "save_steps": 0, "output_dir": str(tmp_path / name), **changes}
        run = tiny_run(model=DETERMINISTIC, data=data, training=training)
        start(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script), *run]
        )
        return [row["loss"] for row in read_lines(tmp_path / name / "metrics.jsonl")]

    data: dict[str, Any] = {**ONLY_TRAIN, "max_duration": 3.0, "batch_duration": 12.0}
    halved = losses("halved", 3.0)
    found = summary_of(tmp_path / "halved")
    assert found["world_size"] == 2
    assert found["out_of_memory"] >= 1
    limits = json.loads((tmp_path / "halved" / "batch_limits.json").read_text())
    assert limits["now"] == found["batch_bounds"]
    assert limits["now"][-1][1] < limits["bounds"][-1][1]
    data["batch_bounds"] = limits["bounds"]
    assert losses("plain", 1000.0, auto_batch=False) == pytest.approx(halved, rel=1e-5)


def test_parts_of_a_batch(tiny_run, run_train, tmp_path) -> None:
    seen: list[Any] = []

    def look(trainer: Any) -> None:
        step = trainer.train_on

        def keep(batches: StepBatches) -> StepResult:
            seen.extend(batches.batches)
            return step(batches)

        trainer.train_on = keep

    assert run_train(*tiny_run(training={"max_steps": 1}), observe=look) == 0
    whole = seen[0]
    parts = [part_of(whole, 0, 1), part_of(whole, 1, 4)]
    assert [i for part in parts for i in part.ids] == whole.ids
    for part in parts:
        assert part.audio_BS.shape == (len(part.ids), int(part.audio_lengths_B.max()))
        assert part.tokens_BU.shape == (len(part.ids), int(part.token_lengths_B.max()))
        first = whole.ids.index(part.ids[0])
        length = int(part.audio_lengths_B[0])
        assert torch.equal(part.audio_BS[0, :length], whole.audio_BS[first, :length])


@pytest.mark.parametrize("bounds", [[[5, 8], [3, 2]], [[5, 0]], [5, 8], [[5, 8, 1]], "many"])
def test_bounds_that_make_no_sense(refused, tiny_run, bounds) -> None:
    assert "data.batch_bounds" in refused(*tiny_run(data={"batch_bounds": bounds}))
