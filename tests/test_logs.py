"""The screen shows what this project reports; what libraries report is shown with --verbose only."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
from conftest import ROOT

REPORTS = """
import logging, sys, warnings
from finetune.logs import capture_prints, set_up_logging
set_up_logging()
warnings.warn("a warning of Python")  # before libraries set filters of their own
import bitsandbytes
import deepspeed
from finetune.models.nemo import import_nemo
import_nemo()
from nemo.utils import logging as nemo_logging
from deepspeed.utils import logger as deepspeed_logger
logging.getLogger("some.package").warning("a record of %s", "a library")
logging.getLogger("some.package").warning("a record %s that does not fit", 1, 2)
nemo_logging.warning("a record of NeMo")
deepspeed_logger.warning("a record of DeepSpeed")
logging.getLogger("torch.utils.cpp_extension").warning("a record of torch")
logging.getLogger("torch.distributed.x").warning("a record of the collectives")
with capture_prints():
    print("a printed", end=" ")
    print("line")
"""
"""What libraries report while they are imported, and afterwards in each way."""
REPORTED = [
    "some.package: a record of a library",
    "some.package: a record %s that does not fit",
    "nemo_logger: a record of NeMo",
    "DeepSpeed: a record of DeepSpeed",
    "torch.utils.cpp_extension: a record of torch",
    "a record of the collectives",
    "UserWarning: a warning of Python",
    "a printed line",
]

OWN_LINE = re.compile(r"(\d\d:\d\d:\d\d| {8}) .*")
OF_LIBRARIES = re.compile(
    r"(?i)kernels-community|one_?logger|deepspeed(?! 0\.)|NeMo [WIE] |\wWarning:|W\d{4} |\[WARNING\]|deprecat"
    r"|traceback|site-packages|\d%\||it/s\]"
)
"""With the residue of a progress bar; deepspeed's version is a part of a model card."""


def run_python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, cwd=ROOT, timeout=1500
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow
def test_what_libraries_report_is_shown_with_verbose_only():
    quiet = run_python("-c", REPORTS)
    assert (quiet.stdout, quiet.stderr) == ("", "")
    verbose = run_python("-c", REPORTS, FINETUNE_VERBOSE="1")
    missing = [text for text in REPORTED if text not in verbose.stderr + verbose.stdout]
    assert not missing, verbose.stderr + verbose.stdout


def test_errors_of_libraries_are_shown():
    code = "import logging; from finetune.logs import set_up_logging; set_up_logging()\n"
    code += (
        "logging.getLogger('some.package').error('no disk'); logging.getLogger('nv_one_logger.x').error('telemetry')"
    )
    assert OWN_LINE.fullmatch(run_python("-c", code).stderr.strip())[0].endswith("some.package: no disk")


def test_warnings_of_this_project_are_called_so():
    code = "import logging; from finetune.logs import set_up_logging; set_up_logging(verbose=True)\n"
    code += "log = logging.getLogger('finetune.x')\n"
    code += "log.info('%d %% are left', 70); log.warning('%d %% are left out', 30); log.warning('100 %')\n"
    code += "logging.getLogger('some.package').warning('no disk')\n"
    said = [line[9:] for line in run_python("-c", code).stderr.splitlines()]
    assert said == ["70 % are left", "warning: 30 % are left out", "warning: 100 %", "some.package: no disk"]


@pytest.mark.parametrize("command", ["transcribe", "train", "evaluate"])
def test_help_shows_nothing_of_libraries(command):
    done = run_python("-m", f"finetune.{command}", "--help")
    assert done.stdout.startswith("usage: ")
    assert done.stderr == ""


@pytest.mark.slow
def test_a_transcription_shows_the_text_alone(tiny_model, tmp_path):
    noise = np.random.default_rng(0).standard_normal(16_000).astype("float32")
    soundfile.write(tmp_path / "a.wav", 0.05 * noise, 16_000)
    done = run_python("-m", "finetune.transcribe", "--model", str(tiny_model), str(tmp_path / "a.wav"))
    assert len(done.stdout.splitlines()) == 1
    assert not OF_LIBRARIES.search(done.stderr), done.stderr


@pytest.mark.slow
def test_a_training_shows_its_own_lines_alone(tiny_run):
    """Under DeepSpeed, which reports most."""
    quiet = run_python(str(ROOT / "finetune" / "train.py"), *tiny_run(), "--strategy", "zero2")
    assert quiet.stdout == ""
    assert not [line for line in quiet.stderr.splitlines() if not OWN_LINE.fullmatch(line)], quiet.stderr
    assert not OF_LIBRARIES.search(re.sub(r"engine deepspeed", "", quiet.stderr)), quiet.stderr


@pytest.mark.slow
def test_doctor_shows_nothing_of_libraries(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "finetune.doctor", "--json", str(Path(tmp_path, "doctor.json"))],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        timeout=1500,
    )
    assert done.returncode in (0, 1)
    assert not OF_LIBRARIES.search(done.stderr), done.stderr


WALK_THROUGH = runpy.run_path(str(ROOT / "scripts" / "docs" / "write_your_language.py"))
PAGE = WALK_THROUGH["PAGE"].read_text(encoding="utf-8")
SMALL = {"max_steps": 4, "eval_steps": 2, "save_steps": 2, "logging_steps": 1, "per_device_train_batch_size": 4}
ON_STDERR = re.compile(rf"{OWN_LINE.pattern}|warning: .*|note: .*")


@pytest.fixture
def small_walk(tmp_path, monkeypatch):
    """The folder in which the page's commands run, with 40 recordings and 16 to test on, and a run of four steps."""
    WALK_THROUGH["prepare"](tmp_path, PAGE)
    for name, rows in (("recordings", 40), ("test_recordings", 16), ("old_recordings", 40)):
        table = tmp_path / name / "metadata.csv"
        table.write_text("".join(table.read_text().splitlines(keepends=True)[: rows + 1]))
    run_file = tmp_path / "my_run.yaml"
    for key, value in SMALL.items():
        text, found = re.subn(rf"(?m)^  {key}: .*$", f"  {key}: {value}", run_file.read_text())
        assert found == 1
        run_file.write_text(text)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def say_only_what_matters(commands: list[str], folder: Path) -> None:
    """Each line that the commands leave on the screen is their own."""
    for command in commands:
        done = WALK_THROUGH["run_command"](command, folder, subprocess.PIPE)
        out, err = (WALK_THROUGH["on_screen"](printed) for printed in (done.stdout, done.stderr))
        assert done.returncode == 0, (command, err)
        assert not [line for line in (*out, *err) if OF_LIBRARIES.search(line)], command
        assert not [line for line in err if not ON_STDERR.fullmatch(line)], command
        assert out or "run_training" in command


def shell_commands() -> list[str]:
    """The page's, but what its reader calls without this project."""
    return [command for command in WALK_THROUGH["all_commands"](PAGE) if not command.startswith("python ")]


@pytest.mark.slow
def test_split_shows_no_line_that_is_not_about_the_task(small_walk):
    commands = [command for command in shell_commands() if " split " in command]
    assert len(commands) == 2
    say_only_what_matters(commands, small_walk)


@pytest.mark.slow
def test_no_command_of_the_walk_through_shows_a_line_that_is_not_about_the_task(small_walk):
    assert len(shell_commands()) == 11
    say_only_what_matters(shell_commands(), small_walk)
