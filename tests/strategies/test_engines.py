"""Engines that spread a model over processes: what each process holds, that the mathematics stays, and that everything
saves and resumes.

Each test starts tests/engine_runs.py once, which runs several small trainings in two or four processes.
"""

import json
import math
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from conftest import DETERMINISTIC, ROOT, own_port, read_lines
from engine_cases import NOTHING_STAYS, SAVED, STEPS, UNSHUFFLED, evaluated, reference
from launching import BIN, TRAIN, start, summary

from finetune.errors import UserError
from finetune.strategies.fsdp import check_mesh, fsdp_environment
from finetune.strategies.sharded import read_whole_weights
from finetune.strategies.strategy import resolve_strategy


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


def curve(run: Path) -> list[tuple[float, ...]]:
    """Loss and gradient norm of each step; nan where a step was skipped."""
    rows = read_lines(run / "metrics.jsonl")
    return [tuple(math.nan if row[k] is None else row[k] for k in ("loss", "grad_norm")) for row in rows]


def same(ours: list[Any], theirs: list[Any], rel: float) -> None:
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert a == pytest.approx(b, rel=rel, nan_ok=True)


def check_model_file(run: Path) -> None:
    """model.nemo restores in plain NeMo, and its weights are the last checkpoint's whole ones where the last model was
    the best."""
    from nemo.collections.asr.models import ASRModel

    restored = ASRModel.restore_from(str(run / "model.nemo"), map_location="cpu").state_dict()
    step = summary(run)["best_step"]
    assert step in (SAVED, STEPS)
    whole = read_whole_weights(run / "checkpoints" / f"step-{step:08d}")
    assert {f"nemo.{name}" for name in restored} == set(whole)
    for name, tensor in restored.items():
        assert torch.equal(whole[f"nemo.{name}"], tensor), name


def bytes_of(rank: dict[str, Any]) -> int:
    return rank["described"]["optimizer_state_bytes"]


def test_fsdp2(trainings, clips, tmp_path):
    save = [f"training.save_steps={SAVED}", f"training.eval_steps={SAVED}", *evaluated(clips / "manifest.jsonl")]
    fsdp2 = (2, "--strategy", "fsdp2")
    resume = f"training.resume_from_checkpoint={tmp_path / 'fsdp2' / 'checkpoints' / f'step-{SAVED:08d}'}"
    told = trainings(adamw=reference(), fsdp2=(*fsdp2, *save), resumed=(*fsdp2, *save, resume))
    whole = told["adamw"][0]["whole"]
    for rank in told["fsdp2"]:
        assert (rank["engine"], rank["layer"], rank["mesh"]) == ("fsdp", "FSDPConformerLayer", [2])
        for held in (rank["kept"]["elements"], rank["gradients"] / STEPS, rank["stepped"] / STEPS):
            assert held == pytest.approx(whole / 2, rel=0.01)
        assert bytes_of(rank) == pytest.approx(bytes_of(told["adamw"][0]) / 2, rel=0.01)
    same(curve(tmp_path / "fsdp2"), curve(tmp_path / "adamw"), rel=1e-6)
    assert summary(tmp_path / "resumed")["resumed_from"] == SAVED
    assert curve(tmp_path / "resumed") == curve(tmp_path / "fsdp2")[SAVED:]
    check_model_file(tmp_path / "fsdp2")


@pytest.mark.slow
def test_fsdp2_with_other_things(trainings, uneven, tmp_path):
    """Checkpointed layers, accumulation, uneven ranks and a step that is not finite."""
    rough = [uneven, "training.num_train_epochs=2", "training.max_steps=-1", "model.freeze_batchnorm=false"]
    rough += [{"spoiled": [1, 2]}]
    small = ["training.per_device_train_batch_size=2", "training.gradient_accumulation_steps=2"]
    fsdp2 = (2, "--strategy", "fsdp2")
    trainings(
        adamw=(*reference(), "training.max_steps=6"),
        checkpointed=(*fsdp2, "--strategy", "gradient_checkpointing", *small, "training.max_steps=6"),
        rough_ddp=(2, "--strategy", "ddp", *rough),
        rough_fsdp2=(*fsdp2, *rough, "training.save_steps=99"),
    )
    same(curve(tmp_path / "checkpointed"), curve(tmp_path / "adamw"), rel=1e-5)
    # Norms are summed over shards: their rounding scales the clipped gradients, and Adam makes whole steps of
    # gradients near zero.
    check_rough(tmp_path, "rough_fsdp2", rel=1e-4, compared="running_var")


def check_rough(folder: Path, name: str, rel: float, compared: str) -> None:
    """Uneven ranks, BatchNorm in training, and a step that is not finite: losses, norms and weights as under DDP.

    Args:
        rel: of losses and norms.
        compared: end of the names of the weights that are compared.
    """
    for told in (summary(folder / name), summary(folder / "rough_ddp")):
        assert (told["skipped_steps"], told["samples"], told["epochs"]) == (1, 42, 2)
    same(curve(folder / name), curve(folder / "rough_ddp"), rel)
    last = f"checkpoints/step-{summary(folder / name)['steps']:08d}"
    ours, theirs = read_whole_weights(folder / name / last), read_whole_weights(folder / "rough_ddp" / last)
    keys = [key for key in theirs if key.endswith(compared)]
    assert any(key.endswith("running_var") for key in keys)
    for key in keys:
        torch.testing.assert_close(ours[key], theirs[key], rtol=1e-3, atol=1e-6, msg=lambda m, k=key: f"{k}: {m}")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero2", "zero3"])
def test_zero(trainings, clips, bare_zero3, tmp_path, name):
    save = [f"training.save_steps={SAVED}", f"training.eval_steps={SAVED}", *evaluated(clips / "manifest.jsonl")]
    strategy = (2, "--strategy", "zero2") if name == "zero2" else (2, "--deepspeed", bare_zero3)
    resume = f"training.resume_from_checkpoint={tmp_path / 'sharded' / 'checkpoints' / f'step-{SAVED:08d}'}"
    told = trainings("deepspeed", adamw=reference(), sharded=(*strategy, *save), resumed=(*strategy, *save, resume))
    whole, state = told["adamw"][0]["whole"], bytes_of(told["adamw"][0])
    engine, kept = ("deepspeed", whole) if name == "zero2" else ("deepspeed_zero3", 0)
    for rank in told["sharded"]:
        assert (rank["engine"], rank["kept"]["elements"]) == (engine, kept)
        assert rank["has_replica"] is (kept == 0)
        assert rank["gradients"] / STEPS == pytest.approx(whole / 2, rel=0.01)
        assert bytes_of(rank) == pytest.approx(state / 2, rel=0.01)
    same(curve(tmp_path / "sharded"), curve(tmp_path / "adamw"), rel=1e-5)
    assert summary(tmp_path / "resumed")["resumed_from"] == SAVED
    same(curve(tmp_path / "resumed"), curve(tmp_path / "sharded")[SAVED:], rel=1e-5)
    check_model_file(tmp_path / "sharded")
    if name == "zero3":
        assert sum(rank["shards"]["elements"] for rank in told["sharded"]) == pytest.approx(whole, rel=0.01)


@pytest.mark.slow
def test_zero_with_other_things(trainings, uneven, bare_zero3, tmp_path):
    """8-bit states in the shards, accumulation, checkpointed layers, uneven ranks and a step that is not finite."""
    zero1, zero3, short = (2, "--strategy", "zero1"), (2, "--deepspeed", bare_zero3), "training.max_steps=6"
    rough = [uneven, "training.num_train_epochs=2", "training.max_steps=-1", "model.freeze_batchnorm=false"]
    rough += [{"spoiled": [1, 2]}]
    small = [short, "training.per_device_train_batch_size=2", "training.gradient_accumulation_steps=2"]
    eight_bit = ["--strategy", "adamw_8bit", "training.optimizer_args={min_8bit_size: 64, embeddings_32bit: false}"]
    told = trainings(
        "deepspeed",
        adamw=(*reference(), short),
        zero1=(*zero1, *eight_bit, short),
        zero3=(*zero3, *eight_bit, short),
        zero1_accumulating=(*zero1, *small),
        zero3_checkpointed=(*zero3, "--strategy", "gradient_checkpointing", *small),
        rough_ddp=(2, "--strategy", "ddp", *rough),
        rough_zero3=(*zero3, *rough),
    )
    for name in ("zero1", "zero3"):
        for rank in told[name]:
            assert rank["optimizer"] == "AdamW8bit"
            assert bytes_of(rank) < bytes_of(told["adamw"][0]) / 2 / 3.5
        for (loss, _), (theirs, _) in zip(curve(tmp_path / name), curve(tmp_path / "adamw"), strict=True):
            assert loss == pytest.approx(theirs, rel=0.02)
    for name in ("zero1_accumulating", "zero3_checkpointed"):
        same(curve(tmp_path / name), curve(tmp_path / "adamw"), rel=1e-5)
    # ZeRO adds up in another order, and AdamW makes whole steps of gradients that are nothing but rounding: those of
    # the convolutions' biases before BatchNorm.
    check_rough(tmp_path, "rough_zero3", rel=1e-3, compared="running_var")


@pytest.mark.slow
def test_hybrid_shard_and_bf16(trainings, tmp_path):
    """Two replicas of two shards each; and autocast under FSDP2 as under DDP, without a rounding of its own."""
    hybrid = ["training.gradient_accumulation_steps=4", "training.dataloader_num_workers=4", "training.max_steps=6"]
    half = ["training.bf16=true", "training.max_steps=6"]
    told = trainings(
        adamw=(1, *hybrid, "training.per_device_train_batch_size=2"),
        hybrid=(4, "--strategy", "hybrid_shard", "training.max_steps=6", "training.per_device_train_batch_size=2"),
        ddp=(2, "--strategy", "ddp", *half),
        fsdp2=(2, "--strategy", "fsdp2", *half),
        lora=(2, "--strategy", "fsdp2", "--strategy", "lora", "training.max_steps=6"),
        lora_ddp=(2, "--strategy", "ddp", "--strategy", "lora", "training.max_steps=6"),
    )
    whole = told["adamw"][0]["whole"]
    for rank in told["hybrid"]:
        assert rank["mesh"] == [2, 2]
        assert rank["kept"]["elements"] == pytest.approx(whole / 2, rel=0.01)
        assert bytes_of(rank) == pytest.approx(bytes_of(told["adamw"][0]) / 2, rel=0.01)
    same(curve(tmp_path / "hybrid"), curve(tmp_path / "adamw"), rel=1e-5)
    same(curve(tmp_path / "fsdp2"), curve(tmp_path / "ddp"), rel=1e-5)
    same(curve(tmp_path / "lora"), curve(tmp_path / "lora_ddp"), rel=1e-5)


@pytest.mark.slow
def test_offload(trainings, clips, bare_zero3, tmp_path):
    """Parameters and states on the host. DeepSpeed compiles its CPU optimizer the first time, minutes long."""
    values = json.loads((ROOT / "ds_configs" / "zero3_offload.json").read_text())
    values["zero_optimization"].update(NOTHING_STAYS)
    (tmp_path / "offload.json").write_text(json.dumps(values))
    save = [f"training.save_steps={SAVED}", f"training.eval_steps={SAVED}", *evaluated(clips / "manifest.jsonl")]
    zero3, fsdp2 = (2, "--deepspeed", str(tmp_path / "offload.json")), (2, "--strategy", "fsdp2_offload")
    told = trainings(
        "deepspeed",
        adamw=reference(),
        zero3=(*zero3, *save),
        zero3_resumed=(
            *zero3,
            *save,
            f"training.resume_from_checkpoint={tmp_path}/zero3/checkpoints/step-{SAVED:08d}",
        ),
        fsdp2=(*fsdp2, *save),
        fsdp2_resumed=(
            *fsdp2,
            *save,
            f"training.resume_from_checkpoint={tmp_path}/fsdp2/checkpoints/step-{SAVED:08d}",
        ),
    )
    engines = {"zero3": "deepspeed_zero3_offload", "fsdp2": "fsdp_offload"}
    for name, engine in engines.items():
        for rank in told[name]:
            assert rank["engine"] == engine
            assert (rank["stepped_on"], rank["described"]["optimizer_state_devices"]) == (["cpu"], ["cpu"])
            assert bytes_of(rank) == pytest.approx(bytes_of(told["adamw"][0]) / 2, rel=0.01)
        same(curve(tmp_path / name), curve(tmp_path / "adamw"), rel=1e-4)
        same(curve(tmp_path / f"{name}_resumed"), curve(tmp_path / name)[SAVED:], rel=1e-5)
        check_model_file(tmp_path / name)
    assert told["zero3"][0]["optimizer"] == "DeepSpeedCPUAdam"
    assert told["zero3"][0]["kept"]["elements"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launch", "strategy"),
    [
        (["accelerate", "launch", "--config_file", str(ROOT / "accelerate_configs" / "fsdp2.yaml")], "fsdp2"),
        (["accelerate", "launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"], "fsdp2"),
        (["torchrun", "--standalone", "--nproc_per_node", "2"], "zero1"),
        (["deepspeed", "--num_gpus=2"], "zero3"),
        (["accelerate", "launch", "--config_file", str(ROOT / "accelerate_configs" / "zero2.yaml")], "zero2"),
        (["accelerate", "launch"], "fsdp2"),
    ],
    ids=["accelerate_file", "accelerate", "torchrun", "deepspeed", "accelerate_zero2", "accelerate_one"],
)
def test_launchers(launch, strategy, tiny_run, tmp_path):
    arguments = tiny_run(model=DETERMINISTIC, data=UNSHUFFLED | {"validation": None}, training={"eval_steps": 0})
    named = [] if any(word.endswith(".yaml") for word in launch) else ["--strategy", strategy]
    start([str(BIN / launch[0]), *launch[1:], *own_port(launch[0]), TRAIN, *arguments, *named], cwd=ROOT)
    told = summary(tmp_path / "run")
    assert (told["strategy"], told["steps"]) == ([strategy], 2)
    assert told["world_size"] == (1 if launch == ["accelerate", "launch"] else 2)
    assert told["engine"] == {"fsdp2": "fsdp", "zero3": "deepspeed_zero3"}.get(strategy, "deepspeed")


# ---- settings, without a training ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fsdp2", "fsdp2_offload", "hybrid_shard"])
def test_settings_are_those_of_the_launcher(name, monkeypatch):
    """What train.py reads from the file by itself is what `accelerate launch --config_file` would put into the
    environment."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    file = ROOT / "accelerate_configs" / f"{name}.yaml"
    for variable in [v for v in os.environ if v.startswith(("FSDP_", "ACCELERATE_", "PARALLELISM_"))]:
        monkeypatch.delenv(variable)
    arguments = launch_command_parser().parse_args(["--config_file", str(file), "train.py"])
    arguments, *_ = _validate_launch_command(arguments)
    theirs = prepare_multi_gpu_env(arguments)
    ours = fsdp_environment(yaml.safe_load(file.read_text()))
    assert len(ours) >= 9
    assert {key: theirs.get(key) for key in ours} == ours
    monkeypatch.setattr(os, "environ", {**os.environ, **theirs})
    strategy = resolve_strategy([name])
    assert strategy.from_launcher
    assert strategy.engine == ("fsdp_offload" if name == "fsdp2_offload" else "fsdp")
    for other in {"fsdp2", "fsdp2_offload", "hybrid_shard"} - {name}:
        if (name, other) != ("hybrid_shard", "fsdp2"):  # the mesh is the launcher's matter
            with pytest.raises(UserError, match=rf"accelerate launch.*(strategy {other}|fsdp)"):
                resolve_strategy([other])


def test_fsdp_that_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(UserError, match=r"FSDP version 1 is not supported.*fsdp_version: 2.*--strategy fsdp2"):
        resolve_strategy([])
    monkeypatch.setenv("FSDP_VERSION", "2")
    assert resolve_strategy([]).engine == "fsdp"
    monkeypatch.setenv("FSDP_ACTIVATION_CHECKPOINTING", "true")
    with pytest.raises(UserError, match=r"dropout masks.*model.gradient_checkpointing: true"):
        resolve_strategy([])
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "2")
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_SHARD_SIZE", "4")
    with pytest.raises(UserError, match=r"2 replicas x 4 shards = 8 processes, but 2 processes were started. Start 8"):
        check_mesh(2)
    check_mesh(8)


def test_two_ways_to_shard_are_refused():
    with pytest.raises(UserError, match=r"strategy fsdp2 and strategy hybrid_shard shard in different ways"):
        resolve_strategy(["fsdp2", "hybrid_shard"])
    with pytest.raises(
        UserError, match=r"zero3 contradicts strategy zero2: DeepSpeed with .*zero3.json, not with .*zero2.json"
    ):
        resolve_strategy(["zero2", "zero3"])
    with pytest.raises(UserError, match=r"strategy zero2 .* and strategy fsdp2 .* are two engines"):
        resolve_strategy(["zero2", "fsdp2"])
