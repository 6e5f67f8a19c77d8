"""Engines that spread a model over processes: what each process holds, that the mathematics stays, and that everything saves and resumes.

Each test starts tests/engine_runs.py once, which runs several small trainings in two or four processes.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import ROOT, read_lines
from test_launchers import BIN, DETERMINISTIC, TRAIN, start, summary

from finetune.strategies.sharded import read_whole_weights

UNSHUFFLED = {"test": None, "shuffle": False, "group_by_duration": False}
STEPS, SAVED = 20, 10
# ZeRO keeps small parameters whole, and does not free what fits; these test models are smaller than its thresholds.
NOTHING_STAYS = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
}


@pytest.fixture
def trainings(tiny_run: Callable[..., list[str]], tmp_path: Path) -> Callable[..., dict[str, list[dict[str, Any]]]]:
    """`trainings(name=(processes, *arguments), ...)` runs them into tmp_path/NAME; returns what each rank tells.

    Arguments that are a dictionary are keys of the plan's entry.
    """

    def run(first_import: str = "torch", **wanted: tuple[Any, ...]) -> dict[str, list[dict[str, Any]]]:
        training = {
            "max_steps": STEPS,
            "save_steps": 0,
            "eval_steps": 0,
            "eval_on_start": False,
            "save_total_limit": 0,
        }
        training |= {"dataloader_num_workers": 1}
        common = tiny_run(model=DETERMINISTIC, data=UNSHUFFLED | {"validation": None}, training=training)
        plan = []
        for name, (processes, *arguments) in wanted.items():
            own = [a for a in arguments if isinstance(a, str)]
            extra = {k: v for a in arguments if isinstance(a, dict) for k, v in a.items()}
            options = [a for a in own if "=" not in a]
            values = [f"training.output_dir={tmp_path / name}", *(a for a in own if "=" in a)]
            plan.append({"name": name, "processes": processes, "arguments": [*common, *options, *values], **extra})
        (tmp_path / "plan.json").write_text(json.dumps(plan))
        done = start(
            [sys.executable, str(ROOT / "tests" / "engine_runs.py"), str(tmp_path / "plan.json"), first_import],
            PYTHONPATH=str(ROOT),
        )
        found = {}
        for entry in plan:
            files = [tmp_path / f"{entry['name']}-{rank}" for rank in range(entry["processes"])]
            logs = "\n".join(f.with_name(f.name + ".log").read_text()[-3000:] for f in files)
            assert f"{entry['name']} {[0] * entry['processes']}" in done.stdout, logs
            found[entry["name"]] = [json.loads(f.with_name(f.name + ".json").read_text()) for f in files]
            assert [rank["rank"] for rank in found[entry["name"]]] == list(range(entry["processes"]))
            assert all(rank["world"] == entry["processes"] for rank in found[entry["name"]])
        return found

    return run


@pytest.fixture
def uneven(clips: Path, tmp_path: Path) -> str:
    """Data of which one rank gets 19 clips and the other 2: it steps on without a batch of its own."""
    rows = read_lines(clips / "manifest.jsonl")[:21]
    for row in rows:
        row["audio"] = {"bytes": (clips / row.pop("audio_filepath")).read_bytes(), "path": None}
    (tmp_path / "shards").mkdir()
    pq.write_table(pa.Table.from_pylist(rows[:19]), tmp_path / "shards" / "train-0.parquet")
    pq.write_table(pa.Table.from_pylist(rows[19:]), tmp_path / "shards" / "train-1.parquet")
    return f"data.train={tmp_path / 'shards' / '*.parquet'}"


def curve(run: Path) -> list[tuple[float, float]]:
    return [(row["loss"], row["grad_norm"]) for row in read_lines(run / "metrics.jsonl")]


def same(ours: list[Any], theirs: list[Any], rel: float) -> None:
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert a == pytest.approx(b, rel=rel)


def reference() -> tuple[Any, ...]:
    """One process that sees in two batches what two processes see in one each."""
    return (1, "training.gradient_accumulation_steps=2", "training.dataloader_num_workers=2")


def evaluated(manifest: Path) -> list[str]:
    """17 clips: the ranks decode different numbers of batches, so a collective in there would hang."""
    return [f"data.validation={manifest}", "data.max_eval_samples=17", "training.per_device_eval_batch_size=4"]


def check_model_file(run: Path) -> None:
    """model.nemo restores in plain NeMo, and its weights are the last checkpoint's whole ones where the last model was the best."""
    from nemo.collections.asr.models import ASRModel

    restored = ASRModel.restore_from(str(run / "model.nemo"), map_location="cpu").state_dict()
    step = summary(run)["best_step"]
    assert step in (SAVED, STEPS)
    whole = read_whole_weights(run / "checkpoints" / f"step-{step:08d}")
    assert whole is not None
    assert {f"nemo.{name}" for name in restored} == set(whole)
    for name, tensor in restored.items():
        assert torch.equal(whole[f"nemo.{name}"], tensor), name


def bytes_of(rank: dict[str, Any]) -> int:
    return rank["described"]["optimizer_state_bytes"]


def test_fsdp2(trainings, clips, uneven, tmp_path):
    save = [f"training.save_steps={SAVED}", f"training.eval_steps={SAVED}", *evaluated(clips / "manifest.jsonl")]
    fsdp2 = (2, "--strategy", "fsdp2")
    resume = f"training.resume_from_checkpoint={tmp_path / 'fsdp2' / 'checkpoints' / f'step-{SAVED:08d}'}"
    rough = [uneven, "training.num_train_epochs=2", "training.max_steps=-1", "model.freeze_batchnorm=false", {"spoiled": [1, 2]}]  # fmt: skip
    small = ["training.per_device_train_batch_size=2", "training.gradient_accumulation_steps=2"]
    told = trainings(
        adamw=reference(),
        fsdp2=(*fsdp2, *save),
        resumed=(*fsdp2, *save, resume),
        checkpointed=(*fsdp2, "--strategy", "gradient_checkpointing", *small, "training.max_steps=6"),
        rough_ddp=(2, "--strategy", "ddp", *rough),
        rough_fsdp2=(*fsdp2, *rough, "training.save_steps=99"),
    )
    whole = told["adamw"][0]["whole"]
    for rank in told["fsdp2"]:
        assert (rank["engine"], rank["layer"], rank["mesh"]) == ("fsdp", "FSDPConformerLayer", [2])
        for held in (rank["kept"]["elements"], rank["gradients"] / STEPS, rank["stepped"] / STEPS):
            assert held == pytest.approx(whole / 2, rel=0.01)
        assert bytes_of(rank) == pytest.approx(bytes_of(told["adamw"][0]) / 2, rel=0.01)
    same(curve(tmp_path / "fsdp2"), curve(tmp_path / "adamw"), rel=1e-6)
    assert summary(tmp_path / "resumed")["resumed_from"] == SAVED
    assert curve(tmp_path / "resumed") == curve(tmp_path / "fsdp2")[SAVED:]
    same(curve(tmp_path / "checkpointed"), curve(tmp_path / "adamw")[:6], rel=1e-5)
    check_model_file(tmp_path / "fsdp2")
    check_rough(tmp_path, "rough_fsdp2")


def check_rough(folder: Path, name: str) -> None:
    """Uneven ranks, BatchNorm in training, and a step that is not finite: as under DDP, losses, norms, weights and statistics."""
    for told in (summary(folder / name), summary(folder / "rough_ddp")):
        assert (told["skipped_steps"], told["samples"], told["epochs"]) == (1, 42, 2)
    same(curve(folder / name), curve(folder / "rough_ddp"), rel=1e-5)
    last = f"checkpoints/step-{summary(folder / name)['steps']:08d}"
    ours, theirs = read_whole_weights(folder / name / last), read_whole_weights(folder / "rough_ddp" / last)
    assert ours is not None
    assert theirs is not None
    assert any(n.endswith("running_var") for n in ours)
    for key, tensor in theirs.items():
        torch.testing.assert_close(ours[key], tensor, rtol=1e-4, atol=1e-6, msg=lambda m, k=key: f"{k}: {m}")
