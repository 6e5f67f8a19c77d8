"""Sharing a run: the card, what is taken out, and the upload to a hub on loopback."""

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import ROOT, read_lines, write_manifest
from upload_server import TOKEN, Repository, State, serve_uploads

REPO = "someone/tiny-model"
EVIL_LANGUAGE = "<img src=x onerror=alert(1)>|[a](http://b)`"
EVIL_FILE = "acme | <b>calls `x`.jsonl"
PRIVATE_FOLDER = "home-of-alice"


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory, tiny_model, clips, run_train_for_module) -> Path:
    """A real run of the tiny model in a folder with a telling name: train, validation, test and guard, one language with markup in its name."""
    folder = tmp_path_factory.mktemp("run") / PRIVATE_FOLDER
    folder.mkdir()
    rows = [{**row, "audio_filepath": str(clips / row["audio_filepath"])} for row in read_lines(clips / "manifest.jsonl")]
    manifest = write_manifest(folder / "all.jsonl", rows)
    evil = write_manifest(folder / EVIL_FILE, [*rows[:8], *({**row, "lang": EVIL_LANGUAGE} for row in rows[8:16])])
    base = folder / "base-of-alice.nemo"
    shutil.copy(tiny_model, base)
    run = {
        "model": {"name": str(base)},
        "data": {"train": str(evil), "validation": str(manifest), "test": str(evil), "guard": str(manifest)},
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
    assert run_train_for_module("--config", folder / "RUN.yaml") == 0
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


def copied(run: Path, to: Path, **changes: Any) -> Path:
    """A copy of a run, with some keys of its summary.json changed."""
    shutil.copytree(run, to)
    summary = json.loads((to / "summary.json").read_text())
    (to / "summary.json").write_text(json.dumps({**summary, **changes}))
    return to


def card_in(output: str) -> str:
    return output.split("README.md:\n\n", 1)[1].split("\n\nlook at this:")[0].split("\n\nlicence of the base")[0].split("\n\nmissing:")[0]


def members(nemo: Path) -> dict[str, bytes]:
    with tarfile.open(nemo) as archive:
        return {Path(m.name).name: archive.extractfile(m).read() for m in archive if m.isfile()}


# ---- the dry run ------------------------------------------------------------------------------------------------------


def test_a_dry_run_asks_nobody_and_its_line_uploads_what_it_showed(finished_run, hub, push):
    code, shown, _ = push("--model", finished_run, "--repo", REPO, "--base-licence", "cc-by-4.0")
    assert code == 0
    assert hub.asked == []
    line = shown.strip().splitlines()[-1]
    words = shlex.split(line)
    assert words[:3] == ["python", "-m", "finetune.push_to_hub"]
    code, said, _ = push(*words[3:])
    assert code == 0
    assert f"{hub.endpoint}/{REPO}" in said
    branch = hub.repositories[REPO].branches["main"]
    assert set(branch.files) == {
        "README.md",
        "tiny-model.nemo",
        *(f"training/{name}" for name in ("config.yaml", "summary.json", "environment.json", "evaluations.jsonl")),
    }
    for name in branch.files:
        assert name in shown
    assert card_in(shown).strip() == branch.files["README.md"].decode().strip()
    assert len(branch.messages) == 1, "one commit"
    assert hub.repositories[REPO].private
    assert hub.tokens_on_storage == 0
    assert any(asked.startswith("PUT /storage/") for asked in hub.asked)


# ---- what is taken out ------------------------------------------------------------------------------------------------


def test_nothing_private_arrives_and_the_model_is_the_same(finished_run, hub, push, tmp_path):
    assert push("--model", finished_run, "--repo", REPO, "--base-licence", "cc-by-4.0", "--yes")[0] == 0
    files = hub.repositories[REPO].branches["main"].files
    arrived = tmp_path / "arrived.nemo"
    arrived.write_bytes(files["tiny-model.nemo"])
    ours, theirs = members(finished_run / "model.nemo"), members(arrived)
    texts = {name: content for name, content in files.items() if not name.endswith(".nemo")}
    texts |= {name: content for name, content in theirs.items() if not name.endswith(".ckpt")}
    spoken = [row["text"] for row in read_lines(finished_run.parent / "all.jsonl") if len(row["text"].split()) > 2]
    assert spoken
    for name, content in texts.items():
        for private in (PRIVATE_FOLDER, str(ROOT), str(Path.home()), socket.gethostname(), "/tmp/", "examples/base", TOKEN):
            assert private.encode() not in content, (name, private)
        for sentence in spoken:
            assert sentence.encode() not in content, (name, sentence)
    with tarfile.open(arrived) as archive:
        assert {(m.uname, m.gname, m.uid, m.gid) for m in archive} == {("", "", 0, 0)}
    # Weights byte for byte, and a model that NeMo reads as before.
    assert set(ours) == set(theirs)
    changed = {name.partition("_")[2] or name for name in ours if ours[name] != theirs[name]}
    assert changed == {"config.yaml", "tokenizer.model"}
    from finetune.models.nemo import load_model

    before, after = load_model(str(finished_run)), load_model(str(arrived))
    for key, value in before.state_dict().items():
        assert torch.equal(value, after.state_dict()[key]), key
    text = read_lines(finished_run.parent / "all.jsonl")[0]["text"].lower()
    assert after.tokenizer.text_to_ids(text) == before.tokenizer.text_to_ids(text) != []
    assert after.tokenizer.vocab == before.tokenizer.vocab
    config = yaml.safe_load(files["training/config.yaml"])
    assert config["model"]["name"] == "base-of-alice.nemo"
    assert config["data"]["train"] == EVIL_FILE
    assert config["training"]["output_dir"] == "run"
    assert config["training"]["learning_rate"] == 1e-3
    evaluations = [json.loads(line) for line in files["training/evaluations.jsonl"].decode().splitlines()]
    assert [row["wer"] for row in evaluations] == [row["wer"] for row in read_lines(finished_run / "evaluations.jsonl")]


def test_a_clean_nemo_is_uploaded_as_it_is(finished_run, hub, push, tmp_path):
    from finetune.publishing.private import private_parts, write_cleaned_nemo

    clean = tmp_path / "clean.nemo"
    write_cleaned_nemo(finished_run / "model.nemo", clean)
    assert private_parts(finished_run / "model.nemo")
    assert private_parts(clean) == []
    assert push("--model", clean, "--repo", REPO, "--base-licence", "cc-by-4.0", "--yes")[0] == 0
    assert hub.repositories[REPO].branches["main"].files["tiny-model.nemo"] == clean.read_bytes()
    # So does the copy of a copy.
    write_cleaned_nemo(clean, tmp_path / "again.nemo")
    assert members(tmp_path / "again.nemo") == members(clean)
