"""The command that compares strategies, on the tiny model."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT

from finetune.errors import UserError
from finetune.paths import strategy_names

SCRIPT = ROOT / "scripts" / "bench" / "compare_strategies.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("compare_strategies", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def wanted(**values) -> SimpleNamespace:
    return SimpleNamespace(**{"strategies": None, "matrix": None, "yardstick": "adamw", **values})


def test_rows(script):
    rows = script.rows_to_run(wanted())
    assert [i for i, r in enumerate(rows) if r["name"] == "adamw"] == [0, len(rows) // 2, len(rows) - 1]
    assert sorted({r["name"] for r in rows}) == strategy_names()
    combined = script.rows_to_run(wanted(strategies="adamw_8bit+gradient_checkpointing"))[1]
    assert combined["strategies"] == ["adamw_8bit", "gradient_checkpointing"]
    crossed = script.rows_to_run(wanted(strategies="adamw_8bit_ao", matrix="precision,compile,offload"))
    assert len(crossed) == 3 + 3 * 2 * 3
    cell = next(r for r in crossed if r["name"] == "adamw_8bit_ao [full bf16, compiled, no offload]")
    assert cell["settings"] == ["training.bf16=false", "model.dtype=bfloat16", "model.compile=true"]
    plain = next(r for r in crossed if r["name"] == "adamw_8bit_ao [fp32, eager, no offload]")
    assert plain["settings"] == ["training.bf16=false", "model.dtype=float32", "model.compile=false"]
    with pytest.raises(UserError, match="there is no zero9"):
        script.rows_to_run(wanted(strategies="adamw,zero9"))
    with pytest.raises(UserError, match=r"--matrix takes precision, .*pinning, found speed"):
        script.rows_to_run(wanted(matrix="speed"))


def test_processes(script):
    assert script.processes_of(["adamw_8bit", "gradient_checkpointing"], gpus=0) == 1
    assert script.processes_of(["ddp"], gpus=0) == 2
    assert script.processes_of(["fsdp2"], gpus=4) == 4
    assert script.processes_of(["hybrid_shard"], gpus=0) == 4
    assert script.processes_of(["zero2"], gpus=0) == 2
    assert script.processes_of(["zero2_offload"], gpus=0) == 1
    lacking = script.run_row({"name": "ddp", "strategies": ["ddp"], "settings": []}, None, gpus=1)
    assert lacking["reason"] == "needs 2 GPUs, there is 1"


def test_what_may_fail(script):
    row = {"strategies": ["flash_adamw", "gradient_checkpointing"], "settings": [], "reason": "exit code 1: killed"}
    assert script.excused(row, {"gpu": None})
    assert not script.excused(row, {"gpu": "H100"})
    assert not script.excused({**row, "strategies": ["adamw"]}, {"gpu": None})
    assert script.excused({**row, "reason": "the GPU is out of memory: tried to allocate 2 GiB"}, {"gpu": "H100"})


def test_runs_of_the_yardstick_are_one_row(script):
    def run(seconds: float, again: int = 0) -> dict:
        return {
            "name": "adamw",
            "settings": [],
            "seconds_per_step": seconds,
            "loss": seconds,
            **({"again": again} if again else {}),
        }

    other = {"name": "lora", "settings": [], "seconds_per_step": 1.0}
    base, rest = script.together([run(3.0), other, run(1.0, 1), run(2.0, 2)])
    assert (base["seconds_per_step"], base["loss"], rest) == (2.0, 3.0, other)
    assert script.spread(base) == "3 runs of adamw, between the others, took 0.50 to 1.50 of their median time."
    failed = {"name": "adamw", "settings": [], "reason": "killed"}
    base, _ = script.together([failed, other, run(1.0, 1), run(2.0, 2)])
    assert "reason" not in base
    assert script.together([failed, other])[0] == failed


@pytest.mark.slow
def test_one_row_in_this_process(script, tiny_run, tmp_path):
    """Its clips are written, and a training under the probe leaves times, memory and parts."""
    config = Path(tiny_run(data={"test": None})[1])
    batches = ["training.per_device_train_batch_size=2", "training.gradient_accumulation_steps=1"]
    arguments = SimpleNamespace(
        config=config, batches=batches, own_batches=False, own_dropout=True, steps=6, warmup_steps=1, eval_clips=2,
        overrides=[], clips=tmp_path / "clips",
    )  # fmt: skip
    own = ["--config", str(config), f"training.output_dir={tmp_path / 'run'}", "data.validation=null", *batches]
    assert script.prepare(arguments.clips, 6, own) == 0
    assert len((arguments.clips / "clips.jsonl").read_text().splitlines()) == 12
    row = {"name": "adamw", "strategies": ["adamw"], "settings": ["training.overwrite_output_dir=true"]}
    command = script.train_arguments(row, arguments, tmp_path / "run", 1)
    assert script.NO_DROPOUT not in command
    assert script.measure(tmp_path / "probe.json", command) == 0
    seen = json.loads((tmp_path / "probe.json").read_text())
    assert len(seen["seconds"]) == 2, "without the first three steps and the accounted one"
    assert seen["account_peak_bytes"] == sum(seen["parts_bytes"].values()) > 0


def test_rows_beyond_the_minutes_are_left_to_another_call(script, tmp_path, monkeypatch):
    measured = []

    def run_row(row, arguments, gpus):
        measured.append(row["name"])
        return {**row, "reason": "only counted"}

    monkeypatch.setattr(script, "run_row", run_row)
    monkeypatch.setattr(script, "prepared_clips", lambda arguments: tmp_path)
    config = tmp_path / "RUN.yaml"
    config.write_text("model: {name: none.nemo}\ndata: {train: none.jsonl}\ntraining: {output_dir: unused}\n")
    arguments = SimpleNamespace(
        config=config, overrides=[], output_dir=tmp_path, strategies="lora", matrix=None, yardstick="adamw", steps=6,
        warmup_steps=1, eval_clips=2, own_batches=False, own_dropout=False, minutes=0.0, json=None,
    )  # fmt: skip
    script.compare(arguments)
    assert measured == []
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert {row["name"]: row["reason"] for row in rows} == dict.fromkeys(("adamw", "lora"), script.OUT_OF_TIME)


def rows_that_ran(out: Path) -> dict:
    rows = json.loads((out / "rows.json").read_text())
    return {key: row for key, row in rows.items() if "reason" not in row}


@pytest.mark.slow
def test_a_comparison_goes_on_where_it_was(tiny_run, tmp_path):
    """Two rows that run and one that cannot; then the same again, where only the one that failed is tried anew."""
    run_file = tiny_run(data={"test": None})[1]
    out = tmp_path / "compared"
    command = [
        sys.executable, str(SCRIPT), "--config", run_file, "--strategies", "adamw_8bit,flash_adamw,ddp",
        "--steps", "5", "--eval-clips", "4", "--output-dir", str(out),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads((out / "results.json").read_text())
    adamw, low_bit, flash, ddp = results["rows"]
    assert [row["name"] for row in results["rows"]] == ["adamw", "adamw_8bit", "flash_adamw", "ddp"]
    assert ddp["losses"] == pytest.approx(adamw["losses"], rel=1e-5), "two processes see the clips that one sees"
    assert ddp["parts_bytes"]["gradients"] >= 4 * ddp["trainable_parameters"], "DDP's buckets are there all the time"
    assert "exclude each other" in flash["reason"]
    assert adamw["optimizer_bytes_per_parameter"] == pytest.approx(8.0, abs=0.1)
    assert low_bit["parts_bytes"]["optimizer"] < 0.6 * adamw["parts_bytes"]["optimizer"]
    assert low_bit["parts_bytes"]["parameters"] == adamw["parts_bytes"]["parameters"]
    assert adamw["peak_bytes"] == sum(adamw["parts_bytes"].values())
    assert len(adamw["losses"]) == 5
    assert low_bit["losses"][0] == pytest.approx(adamw["losses"][0], rel=1e-6)
    assert adamw["wer"] >= 0
    assert adamw["seconds_per_step"] > 0
    assert (out / "strategies.png").stat().st_size > 10_000
    table = (out / "table.md").read_text()
    assert table in done.stdout
    assert "cannot run here" in table
    kept = rows_that_ran(out)
    assert sorted(row["name"] for row in kept.values()) == ["adamw", "adamw", "adamw", "adamw_8bit", "ddp"]
    assert "3 runs of adamw, between the others, took " in table
    again = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert again.returncode == 0
    assert rows_that_ran(out) == kept


@pytest.mark.slow
def test_a_row_that_has_to_run_fails_the_command(tiny_run, tmp_path):
    run_file = tiny_run()[1]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--config", run_file, "--strategies", "ddp", "--yardstick", "ddp",
         "--output-dir", str(tmp_path / "out"), "training.per_device_train_batch_size=3"],
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert (
        "error: ddp has to run on every machine and did not: 3 clips are not shared out evenly over 2" in done.stderr
    )
