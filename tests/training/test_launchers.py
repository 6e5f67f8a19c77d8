"""The same script under every launcher, in processes of their own, as users start it."""

import contextlib
import io
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import psutil
import pytest
import torch
import yaml
from conftest import DETERMINISTIC, ONLY_TRAIN, ROOT, read_lines, slow
from launching import BIN, TRAIN, curve, start, summary


@pytest.fixture
def adamw_curve(run_train, tiny_run, tmp_path) -> list[tuple[float, float]]:
    """Eight steps of plain AdamW in one process."""
    training = {"max_steps": 8, "output_dir": str(tmp_path / "adamw"), "dataloader_num_workers": 1}
    assert run_train(*tiny_run(model=DETERMINISTIC, data=ONLY_TRAIN, training=training)) == 0
    return curve(tmp_path / "adamw")


@pytest.mark.slow
def test_accelerate_launch_with_a_strategys_file(tiny_run, tmp_path):
    """train.py finds the strategy's name in the launcher's command line and applies its overlay."""
    file = ROOT / "accelerate_configs" / "adamw_8bit.yaml"
    done = start(
        [str(BIN / "accelerate"), "launch", "--config_file", str(file), TRAIN, *tiny_run(data=ONLY_TRAIN)],
    )
    told = summary(tmp_path / "run")
    assert told["strategy"] == ["adamw_8bit"]
    assert told["optimizer"] == "AdamW8bit"
    environment = json.loads((tmp_path / "run" / "environment.json").read_text(encoding="utf-8"))
    assert environment["command"][:4] == ["accelerate", "launch", "--config_file", str(file)]
    assert (tmp_path / "run" / "report.html").is_file()
    assert "strategy adamw_8bit, from the launcher's --config_file" in done.stderr


RUN_TRAINING = ["bash", str(ROOT / "scripts" / "run_training.sh")]
ACCELERATE = [str(BIN / "accelerate"), "launch", "--num_processes", "1", "--num_machines", "1"]
ACCELERATE += ["--mixed_precision", "no", "--dynamo_backend", "no"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "code"),
    [
        ([*ACCELERATE, "--quiet", TRAIN], 1),
        ([*ACCELERATE, TRAIN], 0),
        slow([str(BIN / "torchrun"), "--standalone", "--nproc_per_node", "2", TRAIN], -signal.SIGKILL),
        slow([str(BIN / "deepspeed"), "--num_gpus=1", TRAIN], 75),
        ([sys.executable, TRAIN], 75),
        ([sys.executable, "-m", "finetune.cli", "train"], 75),
        (RUN_TRAINING, 75),
    ],
    ids=["accelerate --quiet", "accelerate", "torchrun", "deepspeed", "python", "console command", "run_training.sh"],
)
def test_ctrl_c_at_a_terminal_says_one_sentence(tiny_run, tmp_path, monkeypatch, launcher, code):
    """Each launcher leads its process group at a terminal, as a shell starts it; the panel is shown there."""
    arguments = tiny_run(data=ONLY_TRAIN, training={"max_steps": 100_000, "save_steps": 0})
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PATH", f"{BIN}:{os.environ['PATH']}")
    process, terminal = pty.fork()
    if not process:
        os.chdir("/")
        os.execvp(launcher[0], [*launcher, *arguments])
    os.set_blocking(terminal, False)
    said, status, interrupted = b"", None, False
    deadline = time.monotonic() + 500
    while status is None:
        assert time.monotonic() < deadline, said.decode()[-3000:]
        with contextlib.suppress(OSError):  # nothing to read
            said += os.read(terminal, 65536)
        metrics = tmp_path / "run" / "metrics.jsonl"
        if not interrupted and metrics.is_file() and metrics.stat().st_size:
            os.write(terminal, b"\x03")
            interrupted = True
        ended, how = os.waitpid(process, os.WNOHANG)
        status = os.waitstatus_to_exitcode(how) if ended else None
        time.sleep(0.02)
    with contextlib.suppress(OSError):
        said += os.read(terminal, 1 << 20)
    os.close(terminal)
    shown = said.decode()
    assert status == code, shown[-3000:]
    assert "Traceback" not in shown
    assert "KeyboardInterrupt" not in shown
    (saved,) = re.findall(r"stopped: the checkpoint of step (\d+) is saved\. Start the same command again", shown)
    assert read_lines(metrics)[-1]["step"] == int(saved)
    assert (tmp_path / "run" / "checkpoints" / f"step-{int(saved):08d}").is_dir()


@pytest.mark.slow
def test_bare_accelerate_launch_with_combined_strategies(tiny_run, tmp_path):
    strategies = ["--strategy", "adamw_8bit", "--strategy", "gradient_checkpointing"]
    start([str(BIN / "accelerate"), "launch", TRAIN, *tiny_run(data=ONLY_TRAIN), *strategies])
    told = summary(tmp_path / "run")
    assert told["strategy"] == ["adamw_8bit", "gradient_checkpointing"]
    assert told["effective_settings"]["model"]["gradient_checkpointing"] is True
    assert told["optimizer"] == "AdamW8bit"


@pytest.mark.slow
def test_deepspeed_zero2_offload_equals_adamw_with_its_state_on_the_cpu(adamw_curve, tiny_run, tmp_path):
    """`deepspeed --num_gpus=1`; DeepSpeed compiles its CPU optimizer the first time, a minute or so."""
    training = {"max_steps": 8, "dataloader_num_workers": 1}
    arguments = tiny_run(model=DETERMINISTIC, data=ONLY_TRAIN, training=training)
    start([str(BIN / "deepspeed"), "--num_gpus=1", TRAIN, *arguments, "--strategy", "zero2_offload"])
    told = summary(tmp_path / "run")
    assert told["engine"] == "deepspeed_offload"
    assert told["optimizer"] == "DeepSpeedCPUAdam"
    assert told["optimizer_state_devices"] == ["cpu"]
    for ours, theirs in zip(curve(tmp_path / "run"), adamw_curve, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.slow
def test_deepspeed_accumulates_like_one_big_batch(adamw_curve, tiny_run, tmp_path):
    """`deepspeed --num_gpus=1`, as the README starts it."""
    training = {"max_steps": 8, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    arguments = tiny_run(model=DETERMINISTIC, data=ONLY_TRAIN, training=training)
    start([str(BIN / "deepspeed"), "--num_gpus=1", TRAIN, *arguments, "--strategy", "zero2"])
    told = summary(tmp_path / "run")
    assert (told["strategy"], told["engine"]) == (["zero2"], "deepspeed")
    for (loss, norm), (expected_loss, expected_norm) in zip(curve(tmp_path / "run"), adamw_curve, strict=True):
        assert loss == pytest.approx(expected_loss, rel=1e-4)
        assert norm == pytest.approx(expected_norm, rel=1e-3)


@pytest.mark.slow
def test_deepspeed_file_by_argument_resumes(run_train, tiny_run, tmp_path):
    """HF's way: --deepspeed FILE, here in a plain process without any launcher; then resumed from step 4 of 8."""
    training = {"max_steps": 8, "save_steps": 4, "dataloader_num_workers": 1, "save_total_limit": 0}
    arguments = tiny_run(model=DETERMINISTIC, data=ONLY_TRAIN, training=training)
    deepspeed = ["--deepspeed", str(ROOT / "ds_configs" / "zero2_offload.json")]
    start([sys.executable, TRAIN, *arguments, *deepspeed])
    whole = curve(tmp_path / "run")
    import shutil

    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000008")
    start([sys.executable, TRAIN, *arguments, *deepspeed, "training.resume_from_checkpoint=true"])
    assert summary(tmp_path / "run")["resumed_from"] == 4
    for ours, theirs in zip(curve(tmp_path / "run"), whole, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.slow
def test_a_second_deepspeed_run_on_a_machine_is_not_stopped_by_the_launchers_port(tiny_run, tmp_path):
    """Every launcher takes port 29500. A single process needs none; several are told what to write."""
    import socket

    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        arguments = tiny_run(data=ONLY_TRAIN, training={"max_steps": 1})
        start(
            [
                str(BIN / "deepspeed"),
                "--num_gpus=1",
                f"--master_port={port}",
                TRAIN,
                *arguments,
                "--strategy",
                "zero2_offload",
            ]
        )
        assert summary(tmp_path / "run")["steps"] == 1
        environment = {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        done = start([sys.executable, TRAIN, *arguments, "--strategy", "ddp"], expect=2, **environment)
        assert f"port {port} is in use" in done.stderr
        assert "--main_process_port" in done.stderr


@pytest.mark.slow
def test_deepspeed_in_bf16_stays_close_to_fp32(adamw_curve, tiny_run, tmp_path):
    """The 0.6 B run file has bf16: true; DeepSpeed's own bf16 mode fails on BatchNorm's buffers."""
    training = {"max_steps": 8, "dataloader_num_workers": 1, "bf16": True, "gradient_accumulation_steps": 1}
    arguments = tiny_run(model=DETERMINISTIC, data=ONLY_TRAIN, training=training)
    file = ROOT / "accelerate_configs" / "zero2_offload.yaml"
    launch = [str(BIN / "accelerate"), "launch", "--config_file", str(file)]
    start([*launch, TRAIN, *arguments], cwd=ROOT)
    told = summary(tmp_path / "run")
    assert (told["strategy"], told["mixed_precision"]) == (["zero2_offload"], "bf16")
    ours = curve(tmp_path / "run")
    assert ours != adamw_curve
    for (loss, _), (theirs, _) in zip(ours, adamw_curve, strict=True):
        assert loss == pytest.approx(theirs, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["deepspeed", "accelerate"])
def test_a_users_own_deepspeed_file_with_bf16_is_training_in_bf16(adamw_curve, tiny_run, tmp_path, launcher):
    """As the instructions of other projects have it; the run file says nothing of a precision."""
    offload = {"device": "cpu", "pin_memory": True}
    settings = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": 1.0,
        "fp16": {"enabled": False},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, "offload_optimizer": offload, "contiguous_gradients": True},
    }
    file = tmp_path / "deepspeed_config.json"
    file.write_text(json.dumps(settings))
    training = {"max_steps": 8, "dataloader_num_workers": 1}
    arguments = tiny_run(model=DETERMINISTIC, data=ONLY_TRAIN, training=training)
    if launcher == "deepspeed":
        start([str(BIN / "deepspeed"), "--num_gpus=1", TRAIN, *arguments, "--deepspeed", str(file)])
    else:
        named = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": str(file)}}
        config = {"compute_environment": "LOCAL_MACHINE", "num_processes": 1, **named}
        (tmp_path / "accelerate.yaml").write_text(yaml.safe_dump(config))
        start(
            [str(BIN / "accelerate"), "launch", "--config_file", str(tmp_path / "accelerate.yaml"), TRAIN, *arguments]
        )
    told = summary(tmp_path / "run")
    assert (told["engine"], told["mixed_precision"]) == ("deepspeed_offload", "bf16")
    ours = curve(tmp_path / "run")
    assert ours != adamw_curve
    for (loss, _), (theirs, _) in zip(ours, adamw_curve, strict=True):
        assert loss == pytest.approx(theirs, rel=0.05)


def test_two_ddp_processes_equal_one_with_the_same_global_batch(run_train, tiny_run, clips, tmp_path):
    """Two ranks with one worker each see what one rank with two workers and two accumulated batches sees."""
    one = {
        "max_steps": 8,
        "dataloader_num_workers": 2,
        "gradient_accumulation_steps": 2,
        "output_dir": str(tmp_path / "one"),
    }
    assert run_train(*tiny_run(model=DETERMINISTIC, data=ONLY_TRAIN, training=one)) == 0
    two = {"max_steps": 8, "dataloader_num_workers": 1, "num_gpus": 2}
    arguments = tiny_run(model=DETERMINISTIC, data=ONLY_TRAIN, training=two)
    start([str(BIN / "torchrun"), "--standalone", "--nproc_per_node", "2", TRAIN, *arguments, "--strategy", "ddp"])
    assert summary(tmp_path / "run")["world_size"] == 2
    assert summary(tmp_path / "run")["samples"] == summary(tmp_path / "one")["samples"]
    for ours, theirs in zip(curve(tmp_path / "run"), curve(tmp_path / "one"), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.slow
def test_uneven_ranks_do_not_hang_and_lose_nothing(tiny_run, clips, tmp_path):
    """One rank has a tar file of 1,000 clips, the other one of 37; every clip comes once an epoch, and the short rank
    is named.

    Started through run_training.sh.
    """
    shards = tmp_path / "shards"
    shards.mkdir()
    few = [json.loads(line) for line in (clips / "manifest.jsonl").read_text().splitlines()]
    rows = [{**few[i % len(few)], "id": f"clip{i}"} for i in range(1037)]
    for number, part in enumerate((rows[:1000], rows[1000:])):
        with tarfile.open(shards / f"train-{number}.tar", "w") as tar:
            for row in part:
                for suffix, content in (
                    ("flac", (clips / row["audio_filepath"]).read_bytes()),
                    ("txt", row["text"].encode()),
                ):
                    member = tarfile.TarInfo(f"{row['id']}.{suffix}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    data = {**ONLY_TRAIN, "shuffle": True, "train": str(shards / "*.tar")}
    training = {"max_steps": 11, "dataloader_num_workers": 1, "log_clips": True, "per_device_train_batch_size": 100}
    arguments = tiny_run(model=DETERMINISTIC, data=data, training=training)
    launch = ["bash", str(ROOT / "scripts" / "run_training.sh"), *arguments, "--strategy", "ddp"]
    done = start(launch, NUM_PROCESSES="2")
    lines = read_lines(tmp_path / "run" / "clips.jsonl")
    seen = [i for row in lines[:10] for r in row["ids_by_rank"] for b in r for i in b]
    assert sorted(seen) == sorted(row["id"] for row in rows)
    assert [len(b) for b in lines[10]["ids_by_rank"][0]] == [100]
    assert done.stderr.count("has no more clips in this epoch and keeps step with the others") == 1
    assert summary(tmp_path / "run")["samples"] == 1037 + 137


@pytest.mark.slow
def test_a_plan_of_stages_in_two_processes(tiny_run, tmp_path):
    """One launch, two runs, of which the second goes on from the first and has another precision."""
    stages = [{"max_samples": 8}, {"max_samples": 24, "training": {"bf16": True, "learning_rate": 1e-12}}]
    training = {
        "max_steps": 2,
        "dataloader_num_workers": 0,
        "stages": stages,
        "stage_margin": 9.0,
        "eval_on_start": True,
    }
    arguments = tiny_run(data={"test": None, "max_eval_samples": 4}, training=training)
    start([str(BIN / "torchrun"), "--standalone", "--nproc_per_node", "2", TRAIN, *arguments, "--strategy", "ddp"])
    first, second = (summary(tmp_path / "run" / f"stage-{n}") for n in (1, 2))
    assert (first["world_size"], second["world_size"]) == (2, 2)
    assert (first["mixed_precision"], second["mixed_precision"]) == ("no", "bf16")
    base = yaml.safe_load(Path(arguments[1]).read_text())["model"]["name"]
    models = [base, *(tmp_path / "run" / f"stage-{n}" / "model.nemo" for n in (1, 2))]
    before, between, after = (weight_of(model) for model in models)
    assert torch.allclose(between, after, atol=1e-7)
    assert not torch.allclose(before, between, atol=1e-5)


def weight_of(model: Path | str) -> torch.Tensor:
    with tarfile.open(model) as archive:
        member = next(m for m in archive.getmembers() if m.name.endswith("model_weights.ckpt"))
        state = torch.load(io.BytesIO(archive.extractfile(member).read()), weights_only=True)
    return state["joint.enc.weight"]


@pytest.mark.slow
def test_two_ranks_with_two_workers_go_on_after_sigkill(tiny_run, tmp_path):
    """The same clips in the same order on each rank as in an unbroken run."""
    training = {"max_steps": 7, "save_steps": 2, "save_total_limit": 0, "log_clips": True, "logging_steps": 1}
    training |= {"dataloader_num_workers": 2, "per_device_train_batch_size": 2, "resume_from_checkpoint": True}
    data = {**ONLY_TRAIN, "shuffle": True, "group_by_duration": True, "shuffle_buffer_size": 4}
    launch = [str(BIN / "torchrun"), "--standalone", "--nproc_per_node", "2", TRAIN]

    def command(name: str) -> list[str]:
        settings = {**training, "output_dir": str(tmp_path / name)}
        return [*launch, *tiny_run(model=DETERMINISTIC, data=data, training=settings), "--strategy", "ddp"]

    start(command("unbroken"))
    killed = command("killed")
    faulty = [str(ROOT / "tests" / "rank_faults.py") if word == TRAIN else word for word in killed]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "FAULT": "0:6:hang"}
    process = subprocess.Popen(faulty, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/", env=environment)
    deadline = time.monotonic() + 900
    while not (tmp_path / "killed" / "checkpoints" / "step-00000002").is_dir():
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for one in [*psutil.Process(process.pid).children(recursive=True), process]:
        one.kill()
    process.wait()
    start(killed)
    assert summary(tmp_path / "killed")["resumed_from"] in (2, 4)
    logs = [read_lines(tmp_path / name / "clips.jsonl") for name in ("unbroken", "killed")]
    assert logs[0] == logs[1]
    assert all(len(row["ids_by_rank"]) == 2 for row in logs[0])
    for ours, theirs in zip(curve(tmp_path / "killed"), curve(tmp_path / "unbroken"), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.slow
def test_a_run_of_two_processes_goes_on_with_one(run_train, tiny_run, clips, tmp_path, capfd):
    """Every clip once in the epoch that both share; the short rank is named."""
    training = {"max_steps": -1, "num_train_epochs": 1, "save_steps": 1, "save_total_limit": 0, "log_clips": True}
    training |= {"dataloader_num_workers": 1, "per_device_train_batch_size": 3}
    arguments = tiny_run(model=DETERMINISTIC, data={**ONLY_TRAIN, "shuffle": True}, training=training)
    start([str(BIN / "torchrun"), "--standalone", "--nproc_per_node", "2", TRAIN, *arguments, "--strategy", "ddp"])
    for later in sorted((tmp_path / "run" / "checkpoints").glob("step-*"))[2:]:
        shutil.rmtree(later)
    assert run_train(*arguments, "training.resume_from_checkpoint=true") == 0
    assert "2 ranks x 1 workers are 1 x 1 now" in capfd.readouterr().err
    rows = read_lines(tmp_path / "run" / "clips.jsonl")
    assert [len(row["ids_by_rank"]) for row in rows] == [2, 2, 1, 1, 1, 1]
    seen = [i for row in rows for r in row["ids_by_rank"] for b in r for i in b]
    assert sorted(seen) == sorted(line["id"] for line in read_lines(clips / "manifest.jsonl"))


@pytest.mark.slow
def test_ddp_judges_one_model_and_resumes(run_train, tiny_run, clips, tmp_path):
    """BatchNorm in training mode on two ranks: what is judged, kept and resumed is one and the same model."""
    training = {"max_steps": 6, "save_steps": 3, "eval_steps": 2, "dataloader_num_workers": 1, "save_total_limit": 0}
    training["learning_rate"] = 1e-2
    arguments = tiny_run(training=training)
    launch = [str(BIN / "torchrun"), "--standalone", "--nproc_per_node", "2", TRAIN]
    start([*launch, *arguments, "--strategy", "ddp"])
    whole, told = curve(tmp_path / "run"), summary(tmp_path / "run")
    rows = [r for r in read_lines(tmp_path / "run" / "evaluations.jsonl") if r["language"] is None]
    assert all(r["clips"] == 24 for r in rows), "each clip is judged once, by one of the ranks"
    compared = told["significance"]["test"]
    assert (compared["clips"], compared["unmatched"]) == (24, 0), "the base model's counts are those of both ranks"
    assert (compared["wer_a"], compared["wer_b"]) == (told["wer_before"], told["wer_after"])
    from finetune.evaluate import main

    judged = tmp_path / "judged.json"
    manifest = str(clips / "manifest.jsonl")
    assert main(["--model", str(tmp_path / "run"), "--data", manifest, "--json", str(judged)]) == 0
    assert json.loads(judged.read_text())["word_errors"] == rows[-1]["word_errors"]
    assert json.loads(judged.read_text())["character_errors"] == rows[-1]["character_errors"]
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000006")
    start([*launch, *arguments, "--strategy", "ddp", "training.resume_from_checkpoint=true"])
    assert summary(tmp_path / "run")["resumed_from"] == 3
    assert summary(tmp_path / "run")["wer_after"] == told["wer_after"]
    assert summary(tmp_path / "run")["significance"] == told["significance"]
    for ours, theirs in zip(curve(tmp_path / "run"), whole, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)
