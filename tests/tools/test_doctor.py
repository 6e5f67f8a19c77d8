"""The doctor, on this machine as it is and with planted faults."""

import getpass
import http.server
import json
import os
import resource
import socket
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import ROOT, write_manifest

from finetune.doctor import main

QUICKSTART = "finetune/configs/quickstart.yaml"
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


@pytest.fixture
def examine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Calls the doctor in the repository's root; returns the exit code and the lines by name, the last of a name."""
    monkeypatch.chdir(ROOT)

    def run(*arguments: object) -> tuple[int, dict[str, Any]]:
        report = tmp_path / "doctor.json"
        code = main([*map(str, arguments), "--json", str(report)])
        values = json.loads(report.read_text(encoding="utf-8"))
        printed = capsys.readouterr().out
        assert printed.rstrip().endswith(values["verdict"])
        assert values["can_run"] == (code == 0) == all(line["state"] != "missing" for line in values["lines"])
        for line in values["lines"]:
            assert line["state"] in ("OK", "warning", "missing")
            assert bool(line["remedy"]) == (line["state"] != "OK"), line
            assert f"  {line['state']:<8} {line['name']}" in printed
        return code, {line["name"]: line for line in values["lines"]} | {"verdict": values["verdict"]}

    return run


def test_the_shipped_example_can_run_here(examine):
    code, lines = examine("--config", QUICKSTART, "--strategy", "adamw_8bit")
    assert code == 0
    assert "can run here" in lines["verdict"]
    for name in ("decoders", "bitsandbytes", "torchao", "gloo", "loss", "model", "data.train"):
        assert lines[name]["state"] == "OK", lines[name]
    assert lines["training.output_dir"]["state"] != "missing"  # a slow disk is a warning
    assert "AdamW8bit stepped" in lines["bitsandbytes"]["found"]
    assert lines["decoders"]["found"].startswith("WAV, FLAC, Ogg Vorbis, Ogg Opus, MP3")
    assert "examples/base/fastconformer_tdt_3m.nemo" in lines["model"]["found"]
    assert not list(ROOT.glob(f"**/.doctor-{os.getpid()}*"))


@no_gpu
def test_the_exit_code_is_the_verdict_on_the_strategy(examine):
    code, lines = examine("--strategy", "flash_adamw")
    assert code == 1
    assert lines["flashoptim"]["state"] == "missing"
    assert "no GPU" in lines["strategy flash_adamw"]["found"]
    assert lines["strategy flash_adamw"]["remedy"].startswith("Use --strategy bf16_full")
    assert "--strategy flash_adamw cannot run here: flashoptim, strategy flash_adamw missing" in lines["verdict"]
    code, lines = examine()
    assert code == 0
    assert lines["flashoptim"]["state"] == "warning"
    # The engine's rules count too, which the run file alone does not show.
    code, lines = examine("--strategy", "zero2_offload", "--strategy", "adamw_8bit")
    assert code == 1
    assert "DeepSpeed" in lines["strategy zero2_offload+adamw_8bit"]["found"]


def test_bad_arguments(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(ROOT)
    assert main(["--strategy", "adamw_9bit"]) == 2
    assert "adamw_9bit" in capsys.readouterr().err
    assert main(["--config", QUICKSTART, "training.optimiser=adamw"]) == 2
    assert "unknown key training.optimiser" in capsys.readouterr().err
    assert main(["--config", str(tmp_path / "none.yaml")]) == 2
    with pytest.raises(SystemExit) as stop:
        main(["--no-such-option"])
    assert stop.value.code == 2


def test_an_installation_that_does_not_import_is_said_in_one_line(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "finetune.doctor"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("missing: libcudart.so.13")
    assert "scripts/setup.sh" in done.stderr
    assert "Traceback" not in done.stderr


def test_faults_of_the_machine_are_named_with_their_remedies(examine, tmp_path, monkeypatch):
    lock = tmp_path / "extensions" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(lock.parents[1]))
    monkeypatch.setenv("CXX", str(tmp_path / "no-such-compiler"))
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    other = tmp_path / "site" / "jiwer-0.0.1.dist-info" / "METADATA"
    other.parent.mkdir(parents=True)
    other.write_text("Metadata-Version: 2.1\nName: jiwer\nVersion: 0.0.1\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1000, hard))
    try:
        with socket.socket() as taken:
            taken.bind(("", 0))
            taken.listen()
            port = taken.getsockname()[1]
            monkeypatch.setenv("MASTER_PORT", str(port))
            code, lines = examine("--strategy", "zero2_offload")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert code == 1
    assert lines["compile lock"]["state"] == "missing"
    assert lines["compile lock"]["remedy"] == f"rm {lock}"
    assert lines["C++ compiler"]["state"] == "missing"
    assert "no-such-compiler" in lines["C++ compiler"]["found"]
    assert "jiwer 0.0.1 instead of" in lines["versions"]["found"]
    assert lines["open files"]["state"] == "warning"
    assert "up to 1000" in lines["open files"]["found"]
    assert lines["port"]["state"] == "warning"
    assert str(port) in lines["port"]["found"]
    assert f"--main_process_port {port}" not in lines["port"]["remedy"]
    # Not needed by this strategy; one that names it falls back to 32-bit states and runs.
    assert lines["bitsandbytes"]["state"] == "warning"
    monkeypatch.setenv("CXX", "g++")
    with lock.open():
        code, lines = examine("--strategy", "adamw_8bit")
    assert code == 0
    assert "32-bit" in lines["bitsandbytes"]["found"]
    assert f"process {os.getpid()} compiles now" in lines["compile lock"]["found"]


def test_what_the_run_file_names_has_to_be_there(examine, tmp_path, monkeypatch):
    gone = tmp_path / "gone.jsonl"
    (tmp_path / "file").touch()
    tarred = {"path": str(tmp_path / "m__OP_0..1_CL_.json"), "tarred_audio": str(tmp_path / "audio__OP_0..1_CL_.tar")}
    for name in ("m_0.json", "m_1.json", "audio_0.tar"):
        (tmp_path / name).touch()
    run = {
        "model": {"name": str(tmp_path / "m.nemo")},
        "data": {"train": [str(gone), "examples/voice_prompts"], "validation": tarred},
        "training": {"output_dir": str(tmp_path / "file" / "run")},
    }
    path = tmp_path / "RUN.yaml"
    path.write_text(yaml.safe_dump(run))
    code, lines = examine("--config", path)
    assert code == 1
    assert str(tmp_path / "m.nemo") in lines["model"]["found"]
    assert str(gone) in lines["data.train"]["found"]
    assert "voice_prompts" not in lines["data.train"]["found"]
    assert lines["data.validation"]["state"] == "missing"
    assert lines["training.output_dir"]["state"] == "missing"
    (tmp_path / "audio_1.tar").touch()
    model = ROOT / "examples" / "base" / "fastconformer_tdt_3m.nemo"
    code, lines = examine("--config", path, f"model.name={model}", "training.save_total_limit=1000000000")
    assert lines["data.validation"]["state"] == lines["model"]["state"] == "OK"
    own = f"training.output_dir={tmp_path / 'run'}"  # the quickstart may have been run in this checkout
    code, lines = examine("--config", QUICKSTART, own, "training.save_total_limit=1000000000")
    assert code == 1
    assert "GiB" in lines["training.output_dir"]["found"]


class Page(http.server.BaseHTTPRequestHandler):
    """Answers everything."""

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


def test_the_hub_is_asked_and_missing_only_where_the_run_needs_it(examine, monkeypatch, tmp_path):
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_TOKEN", "hf_" + "Q" * 30)
    model = tmp_path / "RUN.yaml"
    model.write_text(
        "model: {name: owner/some-model}\ndata: {train: examples/voice_prompts}\ntraining: {output_dir: x}\n"
    )
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        code, lines = examine("--config", model)
        server.shutdown()
    assert code == 0
    assert "answers" in lines["hub"]["found"]
    assert "owner/some-model" in lines["hub"]["found"]
    assert lines["hub token"]["found"].startswith("one is set")
    assert "QQQ" not in json.dumps(lines)
    code, lines = examine("--config", model)
    assert code == 1
    assert lines["hub"]["state"] == "missing"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code, lines = examine("--config", model)
    assert code == 1
    assert lines["hub"]["remedy"].startswith("unset HF_HUB_OFFLINE")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    code, lines = examine()
    assert code == 0
    assert lines["hub"]["state"] == "warning"


# ---- the bundle ----------------------------------------------------------------------------------------------------

SECRETS = {
    "key": "k3y-0f-a-bucket",
    "token": "hf_" + "AbCdEf" * 5,
    "password": "p@ss/w0rd!",
    "url": "s3cr3t-in-url",
    "signature": "f00dfeedbeef",
    "environment": "value-of-MY_API_TOKEN",
    "list": "second-of-a-list",
    "text": "what was said in a clip",
    "comment": "written-beside-a-key",
    "inline": "inl1ne-assigned",
}


def test_the_bundle_holds_the_records_and_no_secret(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    home = tmp_path / "home" / "jane.doe"
    output = home / "run"
    output.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("USER", "jane.doe")
    monkeypatch.setenv("MY_API_TOKEN", SECRETS["environment"])
    monkeypatch.setenv("NOT_ON_THE_LIST", "a-private-value")
    manifest = write_manifest(
        home / "train.jsonl", [{"audio_filepath": "a.flac", "text": SECRETS["text"], "duration": 1}]
    )
    run = {
        "model": {"name": "examples/base/fastconformer_tdt_3m.nemo"},
        "data": {
            "train": [str(manifest), f"https://jane:{SECRETS['url']}@example.org/x.jsonl"],
            "validation": f"https://example.org/v.jsonl?X-Amz-Credential=AK&X-Amz-Signature={SECRETS['signature']}",
            "filters": {"max_tokens": 123},
        },
        "training": {"output_dir": str(output), "optimizer_args": {"betas": [0.9, 0.98]}, "seed": 4711},
    }
    path = home / "RUN.yaml"
    path.write_text(yaml.safe_dump(run) + f"# api_key: {SECRETS['comment']}\n")
    config = {**run, "access_key": SECRETS["key"], "storage": {"password": SECRETS["password"]}}
    config["tokens_of_users"] = ["first", SECRETS["list"]]
    config["note"] = f"started with --token={SECRETS['inline']} by {SECRETS['environment']} in {Path.home()}/x"
    (output / "config.yaml").write_text(yaml.safe_dump(config))
    (output / "environment.json").write_text(
        json.dumps({"python": "3.11", "hub": SECRETS["token"], "key": SECRETS["key"]})
    )
    (output / "summary.json").write_text(json.dumps({"wer_after": 0.25, "pairs": [{"reference": SECRETS["text"]}]}))
    rows = [{"step": i, "loss": 1.5, "note": SECRETS["password"]} for i in range(1000)]
    (output / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 10')
    (output / "evaluations.jsonl").write_text('{"step": 0, "wer": 0.5}\n')
    (output / "quarantine.jsonl").write_text(json.dumps({"id": "x", "reason": SECRETS["text"]}) + "\n")
    bundle = tmp_path / "report.zip"
    main(["--config", str(path), "training.report_to=none", "--bundle", str(bundle)])
    printed = capsys.readouterr().out
    assert "look into it before you send it" in printed
    assert not [name for name, secret in SECRETS.items() if secret in printed]
    with zipfile.ZipFile(bundle) as archive:
        contents = {name: archive.read(name).decode() for name in archive.namelist()}
    everything = "\n".join([*contents, *contents.values()])
    for name, secret in SECRETS.items():
        assert secret not in everything, name
    for personal in (str(home), "jane", "a-private-value", "NOT_ON_THE_LIST"):
        assert personal not in everything
    if getpass.getuser() != "root":
        assert getpass.getuser() not in everything
    # What a report needs is there.
    records = {"config.yaml", "environment.json", "summary.json", "metrics.jsonl", "evaluations.jsonl"}
    assert {f"run/{name}" for name in records} | {
        "doctor.txt",
        "doctor.json",
        "packages.txt",
        "run_file.yaml",
    } < contents.keys()
    assert "quarantine" not in "".join(contents)
    run_file = yaml.safe_load(contents["run_file.yaml"])
    assert run_file["data"]["filters"] == {"max_tokens": 123}
    assert run_file["training"]["seed"] == 4711
    assert run_file["data"]["train"][0] == "~/train.jsonl"
    assert run_file["training"]["optimizer_args"] == {"betas": [0.9, 0.98]}
    metrics = [json.loads(line) for line in contents["run/metrics.jsonl"].splitlines()]
    assert [row["step"] for row in metrics] == list(range(801, 1000))
    assert metrics[0]["loss"] == 1.5
    assert json.loads(contents["run/summary.json"])["wer_after"] == 0.25
    assert f"torch=={torch.__version__.split('+')[0]}" in contents["packages.txt"]
    assert "tokenizers==" in contents["packages.txt"]
    report = json.loads(contents["doctor.json"])
    assert any(line["name"] == "data.train" for line in report["lines"])


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("https://user:pa@ss@host/x", "https://<removed>@host/x"),
        (
            "s3://bucket/a.parquet?AWSAccessKeyId=AK&Expires=12",
            "s3://bucket/a.parquet?AWSAccessKeyId=<removed>&Expires=<removed>",
        ),
        ("Authorization: Bearer abcdefgh12345", "Authorization: Bearer <removed>"),
        ('{"wandb_api_key": "0123456789abcdef"}', '{"wandb_api_key": <removed>}'),
        ("AKIAIOSFODNN7EXAMPLE and ghp_" + "a" * 36, "<removed> and <removed>"),
        ("tokenizer: examples/base/tokenizer, max_tokens: 40", "tokenizer: examples/base/tokenizer, max_tokens: 40"),
        ("is there a file? yes, in train-*.parquet?", "is there a file? yes, in train-*.parquet?"),
        ("/home/someone/data", "/home/<user>/data"),
        ("https://user:p/w?0r#d@host/x", "https://<removed>@host/x"),
        ("s3://AK:a/b+c/d=@bucket/p,s3://b:c@other", "s3://<removed>@bucket/p,s3://<removed>@other"),
        ("http://host.org:8080/x@y", "http://host.org:8080/x@y"),
        ("hf://datasets/owner/name@main/x", "hf://datasets/owner/name@main/x"),
        (
            "data.train={path: s3://b/x, options: {key: minioadmin77, pass: x, secret: 'a b'}}",
            "data.train={path: s3://b/x, options: {key: <removed>, pass: <removed>, secret: <removed>}}",
        ),
        ("key: minioadmin77\n- pass: x", "key: <removed>\n- pass: <removed>"),
        ("train.py --hf-token x --api-key=y --json z", "train.py --hf-token <removed> --api-key=<removed> --json z"),
        ("a.options.key=minio", "a.options.key=<removed>"),
        ("https://h/x?sig=abc%3D&se=1", "https://h/x?sig=<removed>&se=<removed>"),
        ("unknown key: data.trian", "unknown key: data.trian"),
        ("hub token: one is set", "hub token: one is set"),
        ("settings are given as key=value", "settings are given as key=value"),
        ("keyword: yes, tokens_a_second: 8.0, max_tokens: 5", "keyword: yes, tokens_a_second: 8.0, max_tokens: 5"),
        ("--max-tokens 5 --tokenizer a/b", "--max-tokens 5 --tokenizer a/b"),
    ],
)
def test_what_is_taken_out_of_a_text(text, left):
    from finetune.security.secrets import clean_text

    assert clean_text(text) == left


@pytest.mark.parametrize(
    ("value", "left"),
    [
        (
            {"tokens_a_second": 8.0, "max_tokens": 5, "tokens": [1, 2]},
            {"tokens_a_second": 8.0, "max_tokens": 5, "tokens": [1, 2]},
        ),
        ({"token": "abc", "pass": "x", "sig": 5}, {"token": "<removed>", "pass": "<removed>", "sig": "<removed>"}),
        (
            ["train.py", "--hf-token", "x", "--max-tokens", "5"],
            ["train.py", "--hf-token", "<removed>", "--max-tokens", "5"],
        ),
    ],
)  # fmt: skip
def test_what_is_taken_out_of_a_structure(value, left):
    from finetune.security.secrets import clean

    assert clean(value) == left


def test_secrets_on_the_command_line_stay_out_of_the_bundle(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    options = "{key: minioadmin77, pass: x-y-z, note: 'is minioadmin77'}"
    place = f"{{path: 's3://bucket/p-minioadmin77-q', storage_options: {options}}}"
    gone = "https://jane:a/b-c-d@example.org/gone.jsonl"
    bundle = tmp_path / "report.zip"
    main(["--config", QUICKSTART, "--bundle", str(bundle), f"data.train={place}", f"data.validation={gone}"])
    with zipfile.ZipFile(bundle) as archive:
        everything = "".join(archive.read(name).decode() for name in archive.namelist())
    assert "s3://bucket/p-<removed>-q" in everything
    for secret in ("minioadmin77", "x-y-z", "b-c-d"):
        assert secret not in everything
