"""Sharing a run: the dry run, and the upload to a hub on loopback."""

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys

import pytest
import yaml
from conftest import ROOT
from sharing_cases import REPO, card_in, copied, members
from upload_server import TOKEN, UploadHub, serve_uploads

pytest_plugins = ["sharing_fixtures"]


# ---- the dry run ----------------------------------------------------------------------------------------------------


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


# ---- the upload -----------------------------------------------------------------------------------------------------


ARGUMENTS = ("--base-licence", "cc-by-4.0", "--yes")


@pytest.mark.parametrize(
    ("pattern", "status", "says"),
    [
        ("PUT /storage", 403, "may not do that (403)"),
        ("POST .*/commit/", 400, "status 400"),
        ("POST .*/commit/", 500, "a fault of its own (status 500)"),
        ("POST .*/preupload/", 401, "does not accept the token (401)"),
    ],
)
def test_a_failure_in_the_middle_leaves_no_half_commit_and_says_so(finished_run, hub, push, pattern, status, says):
    hub.failures[pattern] = status
    code, said, error = push("--model", finished_run, "--repo", REPO, *ARGUMENTS)
    assert code == 1
    assert says in error
    assert f"{REPO} was made and is empty" in error
    assert said == ""
    assert hub.repositories[REPO].branches["main"].files == {}
    hub.failures.clear()
    assert push("--model", finished_run, "--repo", REPO, *ARGUMENTS)[0] == 0
    assert len(hub.repositories[REPO].branches["main"].messages) == 1


def test_a_commit_whose_answer_was_lost_is_not_called_lost(finished_run, hub, push, monkeypatch):

    commit = UploadHub.commit

    def commit_and_fail(self, name, branch, lines):
        answer, self.json = self.json, lambda *_: None
        commit(self, name, branch, lines)
        self.json = answer
        self.json({"error": "bad gateway"}, 502)

    monkeypatch.setattr(UploadHub, "commit", commit_and_fail)
    code, _, error = push("--model", finished_run, "--repo", REPO, *ARGUMENTS)
    assert code == 1
    assert f"But {REPO} has a new commit" in error


@pytest.mark.parametrize(
    ("status", "says"),
    [(401, "hf auth login"), (403, "may not"), (404, "no such owner"), (429, "too often"), (503, "Try again later")],
)
def test_refusals_give_one_message_without_the_token(finished_run, hub, push, status, says):
    hub.failures["POST /api/repos/create"] = status
    code, _, error = push("--model", finished_run, "--repo", REPO, *ARGUMENTS)
    assert code == 1
    assert says in error
    assert "Nothing was uploaded" in error
    assert sum("error: " in line for line in error.splitlines()) == 1
    assert hub.repositories == {}


def test_without_a_token_a_network_or_permission_to_use_it(finished_run, hub, push, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code, _, error = push("--model", finished_run, "--repo", REPO, *ARGUMENTS)
    assert (code, "unset HF_HUB_OFFLINE" in error) == (2, True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free.getsockname()[1]}")
    code, _, error = push("--model", finished_run, "--repo", REPO, *ARGUMENTS)
    assert code == 1
    assert "does not answer" in error
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(finished_run / "no-such-token"))
    code, _, error = push("--model", finished_run, "--repo", REPO, *ARGUMENTS)
    assert (code, "hf auth login" in error) == (2, True)
    assert hub.asked == []


def test_a_public_repository_is_not_uploaded_to_by_accident(finished_run, hub, push):
    assert push("--model", finished_run, "--repo", REPO, "--public", *ARGUMENTS)[0] == 0
    assert not hub.repositories[REPO].private
    before = dict(hub.repositories[REPO].branches["main"].files)
    code, _, error = push("--model", finished_run, "--repo", REPO, "--message", "again", *ARGUMENTS)
    assert code == 2
    assert "--public" in error
    assert hub.repositories[REPO].branches["main"].files == before
    assert push("--model", finished_run, "--repo", REPO, "--public", "--message", "again", *ARGUMENTS)[0] == 0
    assert hub.repositories[REPO].branches["main"].messages[-1] == "again"


def test_a_branch_takes_the_upload_and_the_card_names_it(finished_run, hub, push):
    code, said, _ = push("--model", finished_run, "--repo", REPO, "--revision", "trial/one", *ARGUMENTS)
    assert code == 0
    assert said.startswith(f"{hub.endpoint}/{REPO}/tree/trial")
    branches = hub.repositories[REPO].branches
    assert branches["main"].files == {}
    assert 'revision="trial/one"' in branches["trial/one"].files["README.md"].decode()


def test_hugging_face_and_adapter_directories_arrive_byte_for_byte_without_local_names(
    finished_run, hub, push, tmp_path
):
    tokenizer = next(
        content for name, content in members(finished_run / "model.nemo").items() if name.endswith("tokenizer.model")
    )
    hf = tmp_path / "export"
    hf.mkdir()
    (hf / "config.json").write_text(json.dumps({"_name_or_path": "/data/alice/model", "vocab_size": 8193}))
    (hf / "tokenizer.json").write_text(json.dumps({"vocab": {"and/or": 1, "/data/alice": 2}}))
    (hf / "tokenizer.model").write_bytes(tokenizer)
    (hf / "nemo_config.yaml").write_text("# of /data/alice\ntokenizer:\n  dir: examples/base/tokenizer\n  type: bpe\n")
    (hf / "model.safetensors").write_bytes(bytes(range(256)) * 8000)
    (hf / "README.md").write_text("another card")
    (hf / ".cache").mkdir()
    (hf / ".cache" / "x.json").write_text("{}")
    assert push("--model", finished_run, "--repo", REPO, "--format", "both", "--hf-dir", hf, *ARGUMENTS)[0] == 0
    files = hub.repositories[REPO].branches["main"].files
    assert {
        "tiny-model.nemo",
        "config.json",
        "tokenizer.json",
        "tokenizer.model",
        "nemo_config.yaml",
        "model.safetensors",
    } <= set(files)
    assert not any(name.startswith(".cache") for name in files)
    assert files["model.safetensors"] == (hf / "model.safetensors").read_bytes()
    assert files["tokenizer.json"] == (hf / "tokenizer.json").read_bytes()
    assert json.loads(files["config.json"]) == {"_name_or_path": "model", "vocab_size": 8193}
    assert yaml.safe_load(files["nemo_config.yaml"]) == {"tokenizer": {"dir": "tokenizer", "type": "bpe"}}
    assert b"/tmp/" not in files["tokenizer.model"]
    assert b"alice" not in files["nemo_config.yaml"]
    card = files["README.md"].decode()
    assert "from transformers import pipeline" in card
    assert "ASRModel" in card

    # The directory alone; then an adapter.
    code, shown, _ = push("--model", hf, "--repo", REPO, "--base-licence", "mit")
    assert code == 0
    assert "library_name: transformers" in shown
    assert "ASRModel" not in shown
    run = copied(finished_run, tmp_path / "run")
    (run / "adapter").mkdir()
    named = {"base_model_name_or_path": str(finished_run.parent / "base-of-alice.nemo"), "peft_type": "LORA"}
    (run / "adapter" / "adapter_config.json").write_text(json.dumps(named))
    (run / "adapter" / "base_model.json").write_text(
        json.dumps({"name": named["base_model_name_or_path"], "sha256": "0"})
    )
    (run / "adapter" / "adapter_model.safetensors").write_bytes(b"weights" * 1000)
    code, shown, _ = push("--model", run, "--repo", REPO, "--format", "adapter", "--base-licence", "mit")
    assert "look at this: the adapter is of use with its base model only (base-of-alice.nemo)" in shown
    assert "write where the base model lies as `name` into adapter/base_model.json" in shown
    arguments = ("--model", run, "--repo", "someone/adapter", "--format", "adapter", "--base-model", "owner/base")
    assert push(*arguments, *ARGUMENTS)[0] == 0
    files = hub.repositories["someone/adapter"].branches["main"].files
    assert json.loads(files["adapter_config.json"])["base_model_name_or_path"] == "owner/base"
    assert json.loads(files["base_model.json"]) == {"name": "owner/base", "sha256": "0"}
    assert files["adapter_model.safetensors"] == b"weights" * 1000
    assert not any(name.endswith(".nemo") for name in files)
    card = files["README.md"].decode()
    assert "base_model_relation: adapter" in card
    assert "merged into [owner/base](https://huggingface.co/owner/base)" in card
    assert "python -m finetune.transcribe --model adapter audio.wav" in card
    assert "write where the base model lies" not in card


def test_the_page_on_sharing_names_every_option_and_no_other(capsys):
    from finetune.push_to_hub import main

    with pytest.raises(SystemExit):
        main(["--help"])
    known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out)) - {"--help", "--base-license", "--license"}
    page = (ROOT / "docs" / "sharing.md").read_text(encoding="utf-8")
    assert set(re.findall(r"--[a-z][a-z-]+", page)) == known
    assert known > {"--model", "--repo", "--yes"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--repo", "no-owner"), "OWNER/NAME"),
        (("--repo", "a/b/c"), "--repo"),
        (("--repo", "a/--b"), "--repo"),
        (("--repo", REPO, "--language", "english"), "--language"),
        (("--repo", REPO, "--base-model", "/data/x.nemo"), "--base-model"),
        (("--repo", REPO, "--format", "hf", "--hf-dir", "finetune"), "--hf-dir: finetune holds no config.json"),
        (("--repo", REPO, "--format", "adapter"), "adapter_config.json"),
        (("--repo", REPO, "--model", "/no/such/run"), "there is no /no/such/run"),
    ],
)
def test_wrong_arguments_are_refused(finished_run, push, arguments, says):
    code, _, error = push("--model", finished_run, *arguments)
    assert code == 2
    assert says in error


def test_a_plan_of_stages_is_shared_stage_by_stage(finished_run, push, tmp_path):
    shutil.copytree(finished_run, tmp_path / "plan" / "stage-2")
    code, _, error = push("--model", tmp_path / "plan", "--repo", REPO, "--base-licence", "mit")
    assert code == 2
    assert f"Name one of them, such as {tmp_path / 'plan' / 'stage-2'}" in error
    assert push("--model", tmp_path / "plan" / "stage-2", "--repo", REPO, "--base-licence", "mit")[0] == 0


def test_a_token_or_a_local_folder_in_a_file_stops_the_upload(finished_run, hub, push, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hf = tmp_path / "export"
    hf.mkdir()
    (hf / "config.json").write_text("{}")
    for name, private in (("code.py", f"token = '{TOKEN}'"), ("notes.txt", f"made in {tmp_path}/runs")):
        (hf / name).write_text(private)
        code, _, error = push("--model", hf, "--repo", REPO, *ARGUMENTS)
        (hf / name).unlink()
        assert code == 2
        assert error.startswith(f"error: {name} ")
    assert hub.asked == []


def test_as_a_user_calls_it_no_file_and_no_output_holds_the_token(finished_run, tmp_path):
    """In a process of its own, with a login of huggingface_hub in place of HF_TOKEN."""
    copied(finished_run, tmp_path / "run")
    home = tmp_path / "hf-home"
    home.mkdir()
    (home / "token").write_text(TOKEN)
    with serve_uploads() as state:
        environment = {
            k: v for k, v in os.environ.items() if k not in ("HF_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
        }
        environment |= {
            "HF_ENDPOINT": state.endpoint,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_VERBOSITY": "debug",
        }
        environment |= {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
        line = [sys.executable, "-m", "finetune.push_to_hub", "--model", "run", "--repo", REPO, *ARGUMENTS]
        done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        files = state.repositories[REPO].branches["main"].files
        assert "tiny-model.nemo" in files
    assert TOKEN not in done.stdout + done.stderr
    for name, content in files.items():
        assert TOKEN.encode() not in content, name
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path != home / "token"]
    assert not [path for path in written if TOKEN.encode() in path.read_bytes()]
    assert not list(tmp_path.glob("tmp*")), "the copy without paths is gone"


@pytest.mark.slow
def test_the_other_format_is_made_where_none_is_given(push, hub):
    base = ROOT / "examples" / "base" / "fastconformer_tdt_3m.nemo"
    code, said, error = push("--model", base, "--repo", REPO, "--format", "hf")
    assert code == 0, error
    assert "texts equal" in error
    for name in ("config.json", "model.safetensors", "tokenizer.json", "processor_config.json"):
        assert name in said
    assert 'pipeline("automatic-speech-recognition"' in said
    assert hub.asked == []


def test_an_interrupted_upload_says_how_things_are(capsys):
    from finetune.tools.command_line import run_command
    from finetune.tools.publishing.hub_upload import explained

    def upload() -> int:
        with explained("uploading to me/model", "Nothing was changed.", {"hf_secret"}):
            raise KeyboardInterrupt("hf_secret")

    assert run_command(upload) == 130
    assert capsys.readouterr().err == "interrupted: uploading to me/model. Nothing was changed.\n"
