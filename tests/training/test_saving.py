"""Checkpoints: written beside the training, verified when they are read, and what a full disk does."""

import contextlib
import json
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, read_lines
from run_callbacks import around_steps
from safetensors.torch import load_file

DATA = {"validation": None, "test": None}
TRAINING = {"max_steps": 6, "save_steps": 2, "save_total_limit": 0, "eval_on_start": False}
STEADY = {"freeze_batchnorm": True}
RESUME = "training.resume_from_checkpoint=true"


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file of this process grows beyond so many bytes: the kernel refuses the write, as it does on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def full_in_steps(first: int, last: int, size: int) -> Any:
    """`observe` that lets no file grow beyond a size from the beginning of one step to that of another."""

    def observe(trainer: Any) -> None:
        limit = contextlib.ExitStack()

        def around() -> Any:
            if trainer.progress.step == first - 1:
                trainer.writer.wait()  # what was begun before finds room
                limit.enter_context(largest_file(size))
            if trainer.progress.step == last:
                trainer.writer.wait()
                limit.close()
            return contextlib.nullcontext()

        around_steps(trainer, around)

    return observe


def weights_of(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / f"step-{step:08d}" / "model.safetensors")


@pytest.mark.slow
def test_a_checkpoint_in_a_thread_is_that_of_its_step(run_train, tiny_run, tmp_path):
    """Later steps change the weights while they are written: both ways leave the same files."""
    for name, beside in (("beside", True), ("at_once", False)):
        training = {**TRAINING, "output_dir": str(tmp_path / name), "save_steps": 1, "async_save": beside}
        assert run_train(*tiny_run(data=DATA, training=training)) == 0
    for step in range(1, 7):
        beside, at_once = (weights_of(tmp_path / name, step) for name in ("beside", "at_once"))
        assert all(torch.equal(beside[k], at_once[k]) for k in at_once)
        states = [
            torch.load(tmp_path / name / "checkpoints" / f"step-{step:08d}" / "optimizer.bin", weights_only=True)
            for name in ("beside", "at_once")
        ]
        assert all(
            torch.equal(states[0]["state"][i][key], values[key])
            for i, values in states[1]["state"].items()
            for key in values
        )
    told = json.loads((tmp_path / "beside" / "summary.json").read_text())
    assert 0 < told["saving_seconds"] < told["wall_seconds"]
    assert told["failed_checkpoints"] == 0


@pytest.mark.parametrize("beside", [True, False])
def test_a_full_disk_costs_a_checkpoint_and_not_the_run(run_train, tiny_run, tmp_path, capfd, beside):
    training = {**TRAINING, "async_save": beside}
    assert run_train(*tiny_run(data=DATA, training=training), observe=full_in_steps(3, 4, 50_000)) == 0
    said = capfd.readouterr().err
    assert "the checkpoint of step 4 could not be written: " in said
    assert "a run that ended now would continue from step-00000002" in said
    found = sorted(p.name for p in (tmp_path / "run" / "checkpoints").glob("*step-*"))
    assert found == ["step-00000002", "step-00000006"]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["failed_checkpoints"] == 1


def test_the_last_checkpoint_has_to_be_there(run_train, tiny_run, tmp_path, capfd):
    assert run_train(*tiny_run(data=DATA, training=TRAINING), observe=full_in_steps(5, 99, 50_000)) == 1
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    said = capfd.readouterr().err
    assert "error: the checkpoint of step 6 could not be written: " in said
    assert "it continues from step-00000004" in said
    assert "Traceback" not in said
    assert run_train(*tiny_run(RESUME, data=DATA, training=TRAINING)) == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["resumed_from"] == 4


def test_a_model_that_cannot_be_kept_ends_the_run_which_then_continues(run_train, tiny_run, tmp_path, capfd):
    training = {**TRAINING, "eval_steps": 4}
    arguments = tiny_run(data={"test": None}, training=training)
    assert run_train(*arguments, observe=full_in_steps(3, 99, 50_000)) == 1
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    said = capfd.readouterr().err
    assert "model.nemo, the best model so far (step 4), cannot be written" in said
    assert "Traceback" not in said
    assert not list((tmp_path / "run").glob(".model*"))
    assert run_train(*arguments, RESUME) == 0
    steps = [r["step"] for r in read_lines(tmp_path / "run" / "evaluations.jsonl") if r["language"] is None]
    assert steps == [4, 6, 4]


@pytest.mark.parametrize("harm", ["flip", "cut", "remove"])
def test_a_damaged_checkpoint_is_said_and_the_one_before_taken(run_train, tiny_run, tmp_path, capfd, harm):
    arguments = tiny_run(data=DATA, training=TRAINING)
    assert run_train(*arguments) == 0
    end = weights_of(tmp_path / "run", 6)
    newest = tmp_path / "run" / "checkpoints" / "step-00000006"
    for file in sorted(newest.iterdir()):
        shutil.copytree(tmp_path / "run", tmp_path / "copy")
        spoiled = tmp_path / "copy" / "checkpoints" / newest.name / file.name
        content = bytearray(file.read_bytes())
        if harm == "flip":
            content[len(content) // 2] ^= 1
        spoiled.write_bytes(content[: len(content) // 2] if harm == "cut" else content)
        if harm == "remove":
            spoiled.unlink()
        from finetune.training.checkpoints import damage_of, find_checkpoint

        assert damage_of(spoiled.parent), file.name
        assert find_checkpoint(True, tmp_path / "copy").name == "step-00000004"
        shutil.rmtree(tmp_path / "copy")
    spoiled = newest / "optimizer.bin"
    spoiled.write_bytes(spoiled.read_bytes()[:-1] + b"?")
    capfd.readouterr()
    assert run_train(*arguments, RESUME) == 0
    said = capfd.readouterr().err
    assert f"{newest} is damaged and not used: optimizer.bin is not as it was written (its checksum differs)" in said
    assert "resumed from step-00000004" in said
    again = weights_of(tmp_path / "run", 6)
    assert all(torch.equal(end[k], again[k]) for k in end)


@pytest.mark.slow
def test_a_damaged_best_model_is_said_and_chosen_anew(run_train, tiny_run, tmp_path, capfd):
    training = {**TRAINING, "eval_steps": 2, "learning_rate": 1e-9}  # the first evaluation stays the best
    arguments = tiny_run(model=STEADY, data={"test": None}, training=training)
    assert run_train(*arguments) == 0
    model = tmp_path / "run" / "model.nemo"
    content = bytearray(model.read_bytes())
    content[len(content) // 2] ^= 1
    model.write_bytes(content)
    for later in (4, 6):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step-{later:08d}")
    capfd.readouterr()
    assert run_train(*arguments, RESUME) == 0
    assert "model.nemo is damaged (its checksum differs)" in capfd.readouterr().err
    assert model.read_bytes() != content
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["best_step"] == 4


def test_a_replacement_of_the_best_model_that_was_cut_off_is_no_damage(run_train, tiny_run, tmp_path):
    from finetune.durable_files import write_json
    from finetune.training.outputs import check_best

    assert run_train(*tiny_run(data={"test": None}, training={**TRAINING, "eval_steps": 6})) == 0
    run = tmp_path / "run"
    best, damaged = check_best(run)
    assert not damaged
    newer = {**best, "step": 99, "sha256": "0" * 64}
    write_json(run / "checkpoints" / "best.json", {**newer, "previous": best})
    assert check_best(run) == (best, False)
    write_json(run / "checkpoints" / "best.json", newer)
    assert check_best(run) == (None, True)


@pytest.mark.slow
def test_by_the_clock_and_beside_the_best(run_train, tiny_run, tmp_path):
    training = {"max_steps": 6, "save_steps": 0, "save_minutes": 1e-9, "save_total_limit": 1}
    training |= {"eval_steps": 2, "learning_rate": 1e-9}  # the first evaluation stays the best
    assert run_train(*tiny_run(model=STEADY, data={"test": None}, training={**training, "eval_on_start": False})) == 0
    found = sorted(p.name for p in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert found == ["step-00000002", "step-00000006"]


def test_lines_wait_for_room(tmp_path, monkeypatch):
    from finetune.training import outputs
    from finetune.training.outputs import LineFile

    messages: list[str] = []
    for level in ("info", "warning"):
        monkeypatch.setattr(outputs.log, level, lambda text, *values: messages.append(text % values))
    lines = LineFile(tmp_path / "metrics.jsonl")
    lines.append({"step": 1, "text": "x" * 100})
    with largest_file(150):
        lines.append({"step": 2, "text": "y" * 100})
        assert read_lines(lines.path) == [{"step": 1, "text": "x" * 100}], "no half line"
        lines.append({"step": 3})
        assert not lines.sync()
    lines.append({"step": 4})
    assert [row["step"] for row in read_lines(lines.path)] == [1, 2, 3, 4]
    assert lines.sync()
    said = " ".join(messages)
    assert said.count("its lines wait in memory until it can") == 1
    assert "2 lines that waited are in it" in said


@pytest.mark.slow
def test_a_full_disk_on_one_of_two_ranks(tiny_run, tmp_path):
    """The main process alone cannot write: both ranks agree on that, while it goes on and at the end."""
    settings = [f"training.{key}={value}" for key, value in TRAINING.items()]
    program = tmp_path / "limited.py"
    program.write_text(
        "import os, resource, sys\n"
        f"sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}]\n"
        "from run_callbacks import around_steps\n"
        "from finetune.train import leave, main\n"
        "def observe(trainer):\n"
        "    import contextlib\n"
        "    def around():\n"
        "        if trainer.progress.step == 4 and os.environ['RANK'] == '0':\n"
        "            trainer.writer.wait()\n"
        "            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))\n"
        "        return contextlib.nullcontext()\n"
        "    around_steps(trainer, around)\n"
        "leave(main(observe=observe))\n"
    )
    arguments = [*tiny_run(data=DATA), "--strategy", "ddp", *settings]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(program)]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 1
    assert "error: the checkpoint of step 6 could not be written: " in done.stderr
    assert "it continues from step-00000004" in done.stderr
    assert done.stderr.count("Traceback") == 1, "the launcher's own"


@pytest.mark.slow
def test_a_checkpoint_tells_of_its_own_step_alone(run_train, tiny_run, tmp_path):
    """What is written in the thread is not what the run counts meanwhile."""
    import time

    from finetune.training import saving

    training = {**TRAINING, "save_steps": 1, "logging_steps": 4}
    write, states = saving.write_json, []

    def observe(trainer: Any) -> None:
        def slowly(path: Path, value: Any) -> None:
            if path.name == "trainer_state.json":
                time.sleep(0.3)
                states.append(sum(row[0] for row in value["window"]["batch_lengths"].values()))
            write(path, value)

        saving.write_json = slowly

    try:
        assert run_train(*tiny_run(data=DATA, training=training), observe=observe) == 0
    finally:
        saving.write_json = write
    assert states == [0, 1, 2, 0, 1, 0]
