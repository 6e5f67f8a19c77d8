"""Fixtures of the tests of sharing: a finished run, a hub on loopback, and the command as a user calls it."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import read_lines, write_manifest
from sharing_cases import EVIL_FILE, EVIL_LANGUAGE, PRIVATE_FOLDER
from upload_server import TOKEN, State, serve_uploads


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory, tiny_model, clips, run_train_for_session) -> Path:
    """A real run of the tiny model with train, validation, test and guard, in a folder with a telling name.

    One language has markup in its name.
    """
    folder = tmp_path_factory.mktemp("run") / PRIVATE_FOLDER
    folder.mkdir()
    rows = [
        {**row, "audio_filepath": str(clips / row["audio_filepath"])} for row in read_lines(clips / "manifest.jsonl")
    ]
    manifest = write_manifest(folder / "all.jsonl", rows)
    evil = write_manifest(folder / EVIL_FILE, [*rows[:8], *({**row, "lang": EVIL_LANGUAGE} for row in rows[8:16])])
    base = folder / "base-of-alice.nemo"
    shutil.copy(tiny_model, base)
    run = {
        "model": {"name": str(base)},
        "data": {
            **{"train": str(evil), "validation": str(manifest), "test": str(evil), "guard": str(manifest)},
            "allow_overlap": True,
        },
        "training": {
            "output_dir": str(folder / "run"),
            "max_steps": 2,
            "per_device_train_batch_size": 4,
            "learning_rate": 1e-3,
            "dataloader_num_workers": 0,
            "num_threads": 1,
            "report_to": "none",
        },
    }
    (folder / "RUN.yaml").write_text(yaml.safe_dump(run), encoding="utf-8")
    assert run_train_for_session("--config", folder / "RUN.yaml") == 0
    return folder / "run"


@pytest.fixture
def hub(monkeypatch, tmp_path) -> Iterator[State]:
    """A hub on loopback, with a token for it, and no way to another one."""
    from huggingface_hub import constants

    with serve_uploads() as state:
        monkeypatch.setattr(constants, "ENDPOINT", state.endpoint)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield state


@pytest.fixture
def push(capsys) -> Callable[..., tuple[int, str, str]]:
    """Calls the command; its exit code, output and error output. The token is never in them."""
    from finetune.push_to_hub import main

    def call(*arguments: Any) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(a) for a in arguments])
        said = capsys.readouterr()
        assert TOKEN not in said.out + said.err
        assert "Traceback" not in said.err
        return code, said.out, said.err

    return call
