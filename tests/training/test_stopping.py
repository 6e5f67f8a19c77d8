"""Signals: the run saves what it has, leaves with 75, and goes on as if it had never stopped."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, read_lines, slow
from run_callbacks import around_steps, before_evaluations
from safetensors.torch import load_file

MODEL = {"omega": 0.3}
DATA = {"shuffle_buffer_size": 8}
TRAINING = {"max_steps": 8, "save_steps": 3, "eval_steps": 4, "log_clips": True, "resume_from_checkpoint": True}
LAST = "checkpoints/step-00000008/model.safetensors"


def signal_in_step(step: int, number: int) -> Callable[[Any], None]:
    """`observe` that sends this process a signal in the forward pass of a step."""

    def observe(trainer: Any) -> None:
        def around() -> Any:
            if trainer.progress.step == step - 1:
                os.kill(os.getpid(), number)
            return contextlib.nullcontext()

        around_steps(trainer, around)

    return observe


def signal_in_evaluation(step: int, split: str) -> Callable[[Any], None]:
    """`observe` that sends this process SIGTERM while it evaluates a split at a step."""

    def observe(trainer: Any) -> None:
        def and_signal(name: str) -> None:
            if (trainer.progress.step, name) == (step, split):
                os.kill(os.getpid(), signal.SIGTERM)

        before_evaluations(trainer, and_signal)

    return observe


@pytest.fixture(scope="module")
def kept() -> dict[str, Any]:
    return {}


@pytest.fixture
def unbroken(run_train: Any, tiny_run: Any, tmp_path: Path, kept: dict[str, Any]) -> dict[str, Any]:
    """What the run leaves that nothing stops."""
    if not kept:
        run = tmp_path / "unbroken"
        assert run_train(*tiny_run(model=MODEL, data=DATA, training={**TRAINING, "output_dir": str(run)})) == 0
        kept.update(result_of(run))
    return kept


def result_of(run: Path) -> dict[str, Any]:
    told = json.loads((run / "summary.json").read_text())
    return {
        "weights": load_file(run / LAST),
        "clips": read_lines(run / "clips.jsonl"),
        "losses": [(r["step"], r["loss"], r["learning_rate"]) for r in read_lines(run / "metrics.jsonl")],
        "evaluations": [
            (r["step"], r["split"], r["language"], r["wer"]) for r in read_lines(run / "evaluations.jsonl")
        ],
        "told": {name: told[name] for name in ("best_step", "wer_before", "wer_after", "samples", "skipped_steps")},
    }


def assert_equal(run: Path, unbroken: dict[str, Any]) -> None:
    found = result_of(run)
    for name in ("clips", "losses", "evaluations", "told"):
        assert found[name] == unbroken[name], name
    assert all(torch.equal(found["weights"][k], unbroken["weights"][k]) for k in unbroken["weights"])


@pytest.mark.parametrize("number", [signal.SIGTERM, slow(signal.SIGINT), slow(signal.SIGUSR1)])
def test_a_signal_saves_and_the_run_goes_on_from_there(run_train, tiny_run, tmp_path, unbroken, capfd, number):
    arguments = tiny_run(model=MODEL, data=DATA, training=TRAINING)
    assert run_train(*arguments, observe=signal_in_step(5, number)) == 75
    said = capfd.readouterr().err
    assert "stopped: the checkpoint of step 5 is saved. Start the same command again" in said
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").glob("step-*"))[-1] == "step-00000005"
    assert run_train(*arguments) == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["resumed_from"] == 5
    assert_equal(tmp_path / "run", unbroken)


@pytest.mark.parametrize(("step", "split"), [(4, "validation"), slow(8, "validation")])
def test_a_signal_cuts_an_evaluation_short_which_is_made_again(
    run_train, tiny_run, tmp_path, unbroken, capfd, step, split
):
    arguments = tiny_run(model=MODEL, data=DATA, training=TRAINING)
    assert run_train(*arguments, observe=signal_in_evaluation(step, split)) == 75
    assert f"the checkpoint of step {step} is saved" in capfd.readouterr().err
    assert not [r for r in read_lines(tmp_path / "run" / "evaluations.jsonl") if r["step"] == step]
    assert run_train(*arguments) == 0
    assert_equal(tmp_path / "run", unbroken)


def test_a_signal_while_the_run_closes_or_before_it_begins(run_train, tiny_run, tmp_path, unbroken, capfd):
    arguments = tiny_run(model=MODEL, data=DATA, training=TRAINING)
    assert run_train(*arguments, observe=signal_in_evaluation(0, "validation")) == 75
    assert "SIGTERM came while there was nothing to save" in capfd.readouterr().err
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert run_train(*arguments, observe=signal_in_evaluation(8, "test")) == 75
    assert list((tmp_path / "run" / "checkpoints").glob("step-00000008"))
    assert run_train(*arguments) == 0
    assert_equal(tmp_path / "run", unbroken)


def test_a_second_interrupt_does_not_wait(run_train, tiny_run, tmp_path, capfd):
    def observe(trainer: Any) -> None:
        def around() -> Any:
            if trainer.progress.step == 1:
                os.kill(os.getpid(), signal.SIGINT)
                os.kill(os.getpid(), signal.SIGINT)
            return contextlib.nullcontext()

        around_steps(trainer, around)

    before = signal.getsignal(signal.SIGINT)
    assert run_train(*tiny_run(training=TRAINING), observe=observe) == 130
    assert "interrupted: training.resume_from_checkpoint=true" in capfd.readouterr().err
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.slow
def test_a_signal_to_the_whole_process_group_and_the_exit_code_file(tiny_run, tmp_path):
    """As Slurm and terminals send it: the workers that read data get it, too."""
    code = tmp_path / "code"
    training = {**TRAINING, "max_steps": 100_000, "dataloader_num_workers": 2, "eval_steps": 0, "eval_on_start": False}
    with (tmp_path / "said.txt").open("wb") as output:
        process = subprocess.Popen(
            [
                sys.executable,
                str(ROOT / "finetune" / "train.py"),
                *tiny_run(model=MODEL, data=DATA, training=training),
            ],
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "FINETUNE_EXIT_CODE_FILE": str(code)},
        )
    said, metrics, deadline = tmp_path / "said.txt", tmp_path / "run" / "metrics.jsonl", time.monotonic() + 900
    while not (metrics.is_file() and metrics.stat().st_size):
        assert process.poll() is None, said.read_text()
        assert time.monotonic() < deadline, said.read_text()
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(timeout=900) == 75, said.read_text()
    assert code.read_text() == "75\n"
    assert "Traceback" not in said.read_text()
    steps = [int(p.name.removeprefix("step-")) for p in (tmp_path / "run" / "checkpoints").glob("step-*")]
    assert max(steps) == read_lines(metrics)[-1]["step"]


@pytest.mark.slow
def test_epochs_that_are_cut_off_while_the_run_closes(run_train, tiny_run, tmp_path, capfd):
    """The last evaluation of a run by epochs is made while it closes; its lines are there once."""
    training = {"max_steps": -1, "num_train_epochs": 1, "save_steps": 1, "resume_from_checkpoint": True}
    arguments = tiny_run(training=training)
    assert run_train(*arguments, observe=signal_in_evaluation(6, "test")) == 75
    assert run_train(*arguments) == 0
    rows = [
        (r["step"], r["split"]) for r in read_lines(tmp_path / "run" / "evaluations.jsonl") if r["language"] is None
    ]
    assert rows == [(0, "validation"), (0, "test"), (6, "validation"), rows[-1]]
    assert rows[-1][1] == "test"


@pytest.mark.slow
def test_a_signal_while_the_last_checkpoint_is_written(run_train, tiny_run, tmp_path, capfd):
    def observe(trainer: Any) -> None:
        save = trainer.save

        def and_signal(wait: bool = False) -> None:
            if trainer.progress.step == 2 and not wait:
                os.kill(os.getpid(), signal.SIGTERM)
            save(wait)

        trainer.save = and_signal

    arguments = tiny_run("training.resume_from_checkpoint=true")
    assert run_train(*arguments, observe=observe) == 75
    said = capfd.readouterr().err
    assert "stopped: " in said
    assert "Traceback" not in said
    assert run_train(*arguments) == 0
