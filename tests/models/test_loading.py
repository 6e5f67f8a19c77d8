"""Names of models that are no local files."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import LAYOUT, ROOT

from finetune.errors import UserError
from finetune.models.loading import files_of, load_model, load_option
from finetune.tools.export.hugging_face import nemo_file


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with the directories of two runs."""
    for name in ("quickstart", "large"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("runs/quikstart", " Did you mean runs/quickstart?"),
        ("./runs/quikstart", " Did you mean runs/quickstart?"),
        ("runs/large/checkpoint", ""),
        ("large.nemo", ""),
        ("./rums/large", " Did you mean runs/large?"),
        ("rums/quickstart/step/1", " Did you mean runs?"),
        ("~/large", ""),
        ("./nowhere", ""),
        ("/nowhere/at/all", ""),
    ],
)
def test_a_mistyped_path_is_no_hub_name(runs: Path, name: str, hint: str) -> None:
    message = f"there is no file or directory {name} (looked in {runs}).{hint}"
    with pytest.raises(UserError) as loading:
        load_model(name)
    assert (str(loading.value), loading.value.exit_code) == (f"model.name: {message}", 2)
    for of_a_command in (load_option, lambda name: nemo_file(name, runs)):
        with pytest.raises(UserError) as loading:
            of_a_command(name)
        assert (str(loading.value), loading.value.exit_code) == (f"--model: {message}", 2)


@pytest.mark.parametrize(
    ("loaded", "beside"),
    [
        (["model.nemo"], ["report.html", "metrics.jsonl", "config.json"]),
        (["adapter_config.json", "adapter_model.safetensors", "base_model.json"], ["other.nemo", "README.md"]),
        (["config.json", "model.safetensors", "tokenizer.json"], ["README.md", "model.safetensors.tmp"]),
        ([], ["report.html"]),
    ],
)
def test_the_files_of_a_model_are_those_that_are_loaded(tmp_path: Path, loaded: list[str], beside: list[str]) -> None:
    for name in (*loaded, *beside):
        (tmp_path / name).touch()
    assert files_of(str(tmp_path)) == [tmp_path / name for name in loaded]
    assert files_of("nvidia/parakeet-tdt-0.6b-v3") == []


def test_a_command_names_its_own_option_for_the_tokenizer() -> None:
    with pytest.raises(UserError, match=r"^--tokenizer: .* Set --tokenizer to the directory"):
        load_option(str(LAYOUT))


@pytest.mark.slow
def test_a_hub_out_of_reach_is_asked_once(tmp_path: Path) -> None:
    """Neither NeMo is imported nor a retry waited for, whether the hub is offline by setting or does not answer."""
    code = """
import sys
from pathlib import Path
from huggingface_hub import constants
from finetune.errors import UserError
from finetune.models.loading import load_model
from finetune.tools.export.hugging_face import nemo_file

def wait(seconds):
    raise AssertionError("a retry")

import time
time.sleep = wait
for constants.HF_HUB_OFFLINE in (False, True):
    for find in (load_model, lambda name: nemo_file(name, Path())):
        try:
            find("nobody/no-such-model")
        except UserError as error:
            print(error.exit_code, error)
assert "nemo.collections.asr.models" not in sys.modules
"""
    environment = {
        **os.environ,
        "HF_HOME": str(tmp_path),
        "HF_HUB_OFFLINE": "0",
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "PYTHONPATH": str(ROOT),
    }
    environment.pop("HF_HUB_CACHE", None)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert len(said) == 4
    for loading, exporting in (said[:2], said[2:]):
        assert loading.startswith(
            "1 model.name: nobody/no-such-model is no local file, and loading it from the hub failed: "
        )
        assert exporting.startswith(
            "1 --model: nobody/no-such-model is not a local file, and downloading no-such-model.nemo "
        )
    assert "offline mode" in said[2]
    assert "offline mode" not in said[0]


@pytest.mark.slow
def test_a_hub_that_never_answers_is_left_after_one_timeout(tmp_path: Path) -> None:
    code = """
import os, socket, threading, time

server = socket.create_server(("127.0.0.1", 0))
os.environ["HF_ENDPOINT"] = f"http://127.0.0.1:{server.getsockname()[1]}"

from finetune.errors import UserError
from finetune.models.huggingface import reading
from finetune.models.loading import load_model

assert reading.HUB_TIMEOUT <= 6  # beside the 3 s that huggingface_hub waits for /api/agent-harnesses
reading.HUB_TIMEOUT = 0.3
connections, asked = [], []

def accept():
    while True:
        connections.append(server.accept()[0])
        asked.append(connections[-1].recv(4096).split()[1].decode())

def wait(seconds):
    raise AssertionError("a retry")

threading.Thread(target=accept, daemon=True).start()
time.sleep = wait
try:
    load_model("nobody/no-such-model")
except UserError as error:
    print([path for path in asked if path != "/api/agent-harnesses"], error.exit_code, error)
"""
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0", "PYTHONPATH": str(ROOT)}
    environment.pop("HF_HUB_CACHE", None)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr
    said = "model.name: nobody/no-such-model is no local file, and loading it from the hub failed: ReadTimeout"
    assert done.stdout.startswith(f"['/api/models/nobody/no-such-model'] 1 {said}")
