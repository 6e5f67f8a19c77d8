"""A run that was killed continues as if nothing had happened: the same clips, losses and weights."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT, read_lines
from safetensors.torch import load_file

# Everything that draws random numbers is on: dropout, SpecAugment, shuffling, the choice between TDT and RNN-T.
MODEL = {"omega": 0.3}
DATA = {"shuffle_buffer_size": 8, "group_by_duration": True}
TRAINING = {
    "max_steps": 16,
    "save_steps": 2,
    "save_total_limit": 0,
    "eval_steps": 5,
    "dataloader_num_workers": 2,
    "logging_steps": 3,
    "log_clips": True,
    "resume_from_checkpoint": True,
}


def compare(unbroken: Path, resumed: Path) -> None:
    """Clips, losses and final weights, without any tolerance."""
    assert read_lines(resumed / "clips.jsonl") == read_lines(unbroken / "clips.jsonl")
    exact = ("step", "samples", "epoch", "loss", "grad_norm", "learning_rate")
    curves = [[[row[k] for k in exact] for row in read_lines(run / "metrics.jsonl")] for run in (unbroken, resumed)]
    assert curves[0] == curves[1]
    counts = [
        [(r["step"], r["split"], r["language"], r["word_errors"]) for r in read_lines(run / "evaluations.jsonl")]
        for run in (unbroken, resumed)
    ]
    assert counts[0] == counts[1]
    last = "checkpoints/step-00000016/model.safetensors"
    weights = [load_file(run / last) for run in (unbroken, resumed)]
    assert all(torch.equal(weights[0][k], weights[1][k]) for k in weights[0])


def kill_behind_step(arguments: list[str], run: Path, step: int) -> None:
    """Starts the training as a user would, and sends SIGKILL once `step` is done and the checkpoint before it is
    there."""
    said = run.with_name("said.txt")
    last = step - step % TRAINING["save_steps"]
    awaited = run / "checkpoints" / f"step-{last - TRAINING['save_steps'] * (last == step):08d}"
    with said.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "tests" / "rank_faults.py"), *arguments],
            stdout=output,
            stderr=output,
            start_new_session=True,
            # It waits before the next step for as long as it takes to see the checkpoint; a later one may be half
            # written.
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "FAULT": f"0:{step + 1}:hang"},
        )
    deadline = time.monotonic() + 900
    while not awaited.is_dir():
        shown = said.read_text(encoding="utf-8", errors="replace")
        assert process.poll() is None, f"the run ended before it could be killed: {shown}"
        assert time.monotonic() < deadline, shown
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("kept") / "unbroken"


@pytest.fixture
def unbroken(run_train, tiny_run, kept) -> Path:
    """The run that nothing stops, once for all tests here, which leave it as it is."""
    if not (kept / "summary.json").is_file():
        training = {**TRAINING, "output_dir": str(kept)}
        assert run_train(*tiny_run(model=MODEL, data=DATA, training=training)) == 0
        clips = [i for row in read_lines(kept / "clips.jsonl") for b in row["ids_by_rank"][0] for i in b]
        assert clips[:24] != clips[24:48], "the second epoch has to have an order of its own"
        assert sorted(clips[:24]) == sorted(clips[24:48])
    return kept


def test_killed_twice_and_equal_to_unbroken(unbroken, run_train, tiny_run, tmp_path):
    """SIGKILL in the first epoch (6 or more steps) and again in a later one; resumed by a process and in this one."""
    resumed = tmp_path / "resumed"
    arguments = tiny_run(model=MODEL, data=DATA, training={**TRAINING, "output_dir": str(resumed)})
    seeded = random.Random(7)
    kill_behind_step(arguments, resumed, seeded.randint(3, 5))
    assert (resumed / "checkpoints").is_dir()
    kill_behind_step(arguments, resumed, seeded.randint(10, 13))
    assert run_train(*arguments) == 0
    told = json.loads((resumed / "summary.json").read_text())
    assert told["resumed_from"] >= 8
    compare(unbroken, resumed)


@pytest.mark.slow
def test_every_checkpoint_of_a_run_continues_to_the_same_end(unbroken, run_train, tiny_run, tmp_path):
    """All positions, the ends of epochs among them (24 clips in batches of 4: steps 6 and 12)."""
    for step in (2, 6, 12, 14):
        resumed = tmp_path / f"from-{step}"
        shutil.copytree(unbroken, resumed)
        for later in (resumed / "checkpoints").glob("step-*"):
            if int(later.name.removeprefix("step-")) > step:
                shutil.rmtree(later)
        arguments = tiny_run(model=MODEL, data=DATA, training={**TRAINING, "output_dir": str(resumed)})
        assert run_train(*arguments) == 0
        compare(unbroken, resumed)


def test_resume_without_a_checkpoint_starts_at_step_0_and_says_so(run_train, tiny_run, tmp_path, capfd):
    training = {"resume_from_checkpoint": True, "eval_on_start": False}
    assert run_train(*tiny_run(data={"test": None}, training=training)) == 0
    assert "no whole checkpoint" in capfd.readouterr().err
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["resumed_from"] is None


def test_a_half_written_checkpoint_does_not_count(run_train, tiny_run, tmp_path, capfd):
    training = {"max_steps": 4, "save_steps": 2, "eval_on_start": False}
    assert run_train(*tiny_run(data={"test": None}, training=training)) == 0
    newest = tmp_path / "run" / "checkpoints" / "step-00000004"
    newest.rename(newest.with_name(".step-00000004.tmp"))
    training["resume_from_checkpoint"] = True
    assert run_train(*tiny_run(data={"test": None}, training=training)) == 0
    assert "resumed from step-00000002" in capfd.readouterr().err


@pytest.mark.slow
def test_another_number_of_workers_goes_on_with_the_clips_that_are_left(run_train, tiny_run, tmp_path, capfd):
    training = {"max_steps": -1, "num_train_epochs": 1, "save_steps": 1, "save_total_limit": 0, "log_clips": True}
    training |= {"eval_on_start": False, "dataloader_num_workers": 1}
    data = {"validation": None, "test": None, **DATA}
    assert run_train(*tiny_run(data=data, training=training)) == 0
    for later in sorted((tmp_path / "run" / "checkpoints").glob("step-*"))[2:]:
        shutil.rmtree(later)
    training |= {"resume_from_checkpoint": True, "dataloader_num_workers": 3}
    assert run_train(*tiny_run(data=data, training=training)) == 0
    said = capfd.readouterr().err
    assert "1 ranks x 1 workers are 1 x 3 now" in said
    seen = [i for row in read_lines(tmp_path / "run" / "clips.jsonl") for b in row["ids_by_rank"][0] for i in b]
    assert len(seen) == len(set(seen)) == 24
