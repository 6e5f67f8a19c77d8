"""The templates for clusters: Slurm and ssh, with stand-ins for their commands, and real trainings and signals."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import DETERMINISTIC, ONLY_TRAIN, ROOT
from launching import BIN, curve, start, summary

SCRIPTS = ROOT / "scripts"
FAULTY = str(ROOT / "tests" / "rank_faults.py")

SRUN = """#!/usr/bin/env bash
# One node: runs the command as its task, with the output file of --output. Like srun it passes USR1 on, kills at TERM.
while [[ "$1" == --* ]]; do
    case "$1" in --output=*) out=${1#--output=} ;; --kill-on-bad-exit=0) ;; *) echo "srun: $1?" >&2; exit 99 ;; esac
    shift
done
SLURM_NODEID=0 SLURM_PROCID=0 "$@" > "${out/\\%N/node0}" 2>&1 &
task=$!
trap 'kill -USR1 $task' USR1
trap 'echo "srun: forcing job termination" >&2; kill -KILL $task' TERM
while :; do code=0; wait $task || code=$?; kill -0 $task 2> /dev/null || break; done
exit $code
"""
SCONTROL = """#!/usr/bin/env bash
if [ "$1 $2" = "show hostnames" ]; then echo "$3"; else echo "$*" >> "$SCONTROL_LOG"; fi
"""

SBATCH_OPTIONS = {"job-name", "nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "exclusive", "time"}
SBATCH_OPTIONS |= {"signal", "requeue", "open-mode", "output"}


@pytest.mark.parametrize(
    "script", ["run_training.sh", "cluster/slurm.sbatch", "cluster/ssh_torchrun.sh", "cluster/two_machines.sh"]
)
def test_scripts_are_sound_bash(script):
    done = subprocess.run(["bash", "-n", str(SCRIPTS / script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_slurm_options_stand_before_the_first_command():
    lines = (SCRIPTS / "cluster" / "slurm.sbatch").read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    options = [line for line in lines if line.startswith("#SBATCH")]
    assert options == [line for line in lines[:first] if line.startswith("#SBATCH")]
    names = {re.match(r"#SBATCH --([a-z-]+)(=\S+)?$", line).group(1) for line in options}
    assert names == SBATCH_OPTIONS


def test_the_jobset_is_one():
    jobset = yaml.safe_load((SCRIPTS / "cluster" / "jobset.yaml").read_text())
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    environment = {e["name"]: e.get("value") for e in container["env"]}
    nodes = int(environment["NNODES"])
    assert job["completions"] == job["parallelism"] == nodes
    first = f"{jobset['metadata']['name']}-{replicated['name']}-0-0.{jobset['metadata']['name']}"
    assert environment["MASTER_ADDR"] == first
    rules = job["podFailurePolicy"]["rules"]
    assert {"containerName": container["name"], "operator": "In", "values": [75]} in [
        r.get("onExitCodes") for r in rules
    ]
    assert pod["restartPolicy"] == "Never", "podFailurePolicy wants it"
    (rule,) = jobset["spec"]["failurePolicy"]["rules"]
    assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    script = container["args"][0].split()[2]
    assert (ROOT / script).is_file()


def test_several_machines_need_to_know_each_other():
    environment = {k: v for k, v in os.environ.items() if k not in ("NODE_RANK", "MASTER_ADDR")}
    done = subprocess.run(
        ["bash", str(SCRIPTS / "run_training.sh")], env={**environment, "NNODES": "2"}, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "NODE_RANK has to be set" in done.stderr


def wait_for_lines(path: Path, count: int, process: subprocess.Popen[Any]) -> None:
    deadline = time.monotonic() + 900
    while not (path.is_file() and len(path.read_text().splitlines()) >= count):
        assert process.poll() is None, "it ended before its time"
        assert time.monotonic() < deadline
        time.sleep(0.05)


def cluster_environment(tmp_path: Path, **more: str) -> dict[str, str]:
    fake = tmp_path / "bin"
    fake.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (fake / name).write_text(text)
        (fake / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{fake}:{BIN}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    return {**environment, "OMP_NUM_THREADS": "1", "TRAIN_SCRIPT": FAULTY, "NUM_PROCESSES": "2", **more}


LAUNCHER = """#!/usr/bin/env bash
# Stands for torchrun and accelerate: the training is its child, and its words begin at TRAIN_SCRIPT.
while [ "$1" != "$TRAIN_SCRIPT" ]; do shift; done
if [ "${NODE_RANK:-0}" != 0 ]; then # fails, once the first host's training runs
    until [ -s "$PIDS.ready" ]; do read -r -t 0.1 <> <(:) || true; done
    exit 1
fi
trap '' TERM
bash "$@" &
echo "$$ $!" > "$PIDS"
while kill -0 $! 2> /dev/null; do wait $! || code=$?; done
exit $((code ? 1 : 0))
"""
TRAINING = """trap 'echo 75 > "$FINETUNE_EXIT_CODE_FILE"; exit 75' USR1
trap '' TERM  # hangs
echo ready > "$PIDS.ready"
while :; do read -r -t 0.1 <> <(:) || true; done
"""


@pytest.fixture
def scripts_alone(tmp_path) -> Iterator[dict[str, str]]:
    """The environment for a copy of scripts/ under tmp_path, with stand-ins for launcher and training, which hangs."""
    shutil.copytree(SCRIPTS, tmp_path / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name, text in (("python", "#!/bin/sh\necho 0\n"), ("torchrun", LAUNCHER), ("accelerate", LAUNCHER)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (tmp_path / "train").write_text(TRAINING)
    pids = tmp_path / "pids"
    yield {**os.environ, "TRAIN_SCRIPT": str(tmp_path / "train"), "PIDS": str(pids), "NUM_PROCESSES": "1"}
    for pid in pids.read_text().split() if pids.is_file() else []:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def is_gone(pid: str) -> bool:
    """No process, or one that nobody has collected yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_run_training_stops_at_once_while_it_starts(scripts_alone, tmp_path, name):
    """torch's import takes up to a minute."""
    (tmp_path / ".venv/bin/python").write_text('#!/usr/bin/env bash\necho $$ > "$PIDS"\nexec sleep 3600\n')
    environment = {key: value for key, value in scripts_alone.items() if key != "NUM_PROCESSES"}
    process = subprocess.Popen(["bash", str(tmp_path / "scripts/run_training.sh")], env=environment)
    wait_for_lines(tmp_path / "pids", 1, process)
    process.send_signal(getattr(signal, name))
    assert process.wait(timeout=900) == 75


def test_run_training_passes_a_signal_on_where_there_is_no_ps(scripts_alone, tmp_path):
    """As in slim images."""
    (tmp_path / "slim").mkdir()
    for name in ("bash", "sh", "cat", "dirname", "grep", "mktemp", "rm", "setsid", "tr"):
        (tmp_path / "slim" / name).symlink_to(str(shutil.which(name)))
    environment = {**scripts_alone, "PATH": str(tmp_path / "slim")}
    process = subprocess.Popen(["bash", str(tmp_path / "scripts/run_training.sh")], env=environment)
    wait_for_lines(tmp_path / "pids.ready", 1, process)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(timeout=900) == 75


@pytest.mark.slow
def test_ssh_leaves_nothing_behind_of_a_host_that_hangs(scripts_alone, tmp_path):
    """The second host fails at once, and the first one's training does not end within GRACE."""
    (tmp_path / "ssh").write_text('#!/usr/bin/env bash\nshift\nexec bash -c "$*"\n')
    environment = {**scripts_alone, "SSH": f"bash {tmp_path / 'ssh'}", "GRACE": "2"}
    command = [
        "bash",
        str(tmp_path / "scripts/cluster/ssh_torchrun.sh"),
        "localhost,127.0.0.1",
        "training.max_steps=1",
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode != 0
    assert "still running after 2 s: ended" in done.stderr
    pids = (tmp_path / "pids").read_text().split()
    deadline = time.monotonic() + 900
    while not all(is_gone(pid) for pid in pids):
        assert time.monotonic() < deadline, "the launcher and its training live on"
        time.sleep(0.1)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_to_the_slurm_job_lets_the_training_save(tmp_path, name):
    """Also one that srun would answer with SIGKILL."""
    (tmp_path / "scripts").mkdir()
    task = 'trap "exit 75" USR1\necho "${SRUN_CPUS_PER_TASK:-none}" > task\nfor i in $(seq 9000); do sleep 0.1; done\n'
    (tmp_path / "scripts" / "run_training.sh").write_text(task)
    job = {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "localhost", "SLURM_JOB_NUM_NODES": "1"}
    job |= {"SCONTROL_LOG": str(tmp_path / "scontrol"), "SLURM_CPUS_PER_TASK": "32"}
    environment = cluster_environment(tmp_path, **job)
    process = subprocess.Popen(["bash", str(SCRIPTS / "cluster" / "slurm.sbatch")], cwd=tmp_path, env=environment)
    wait_for_lines(tmp_path / "task", 1, process)
    process.send_signal(getattr(signal, name))
    assert process.wait(timeout=600) == 75
    assert (tmp_path / "scontrol").read_text() == "requeue 77\n"
    assert (tmp_path / "task").read_text() == "32\n"


@pytest.mark.slow
def test_a_slurm_job_saves_is_requeued_and_goes_on(tiny_run, tmp_path):
    """USR1 to the batch script in mid-training, 75 through launcher and srun, requeue, the unbroken run's result."""
    training = {"max_steps": 60, "save_steps": 0, "dataloader_num_workers": 0}
    arguments = [*tiny_run(model=DETERMINISTIC, data=ONLY_TRAIN, training=training), "--strategy", "ddp"]
    whole = [str(BIN / "torchrun"), "--standalone", "--nproc_per_node", "2", FAULTY, *arguments]
    start([*whole, f"training.output_dir={tmp_path / 'whole'}"], PYTHONPATH=str(ROOT))
    job = {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "localhost", "SLURM_JOB_NUM_NODES": "1"}
    job |= {"SCONTROL_LOG": str(tmp_path / "scontrol"), "LOGS": str(tmp_path / "logs"), "STEP_SECONDS": "0.2"}
    environment = cluster_environment(tmp_path, **job)
    command = ["bash", str(SCRIPTS / "cluster" / "slurm.sbatch"), *arguments]
    codes = []
    for attempt in range(2):
        process = subprocess.Popen(command, cwd=ROOT, env={**environment, "SLURM_RESTART_COUNT": str(attempt)})
        if attempt == 0:
            wait_for_lines(tmp_path / "run" / "metrics.jsonl", 5, process)
            process.send_signal(signal.SIGUSR1)
        codes.append(process.wait(timeout=1700))
    assert codes == [75, 0]
    assert (tmp_path / "scontrol").read_text() == "requeue 77\n"
    assert sorted(p.name for p in (tmp_path / "logs").iterdir()) == ["77-0-node0.log", "77-1-node0.log"]
    assert 5 <= summary(tmp_path / "run")["resumed_from"] < 60
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_one_process_through_run_training_stops_with_75(tiny_run, tmp_path, name):
    """`accelerate launch` alone would die of a SIGTERM and leave the training behind."""
    training = {"max_steps": 100_000, "save_steps": 0}
    arguments = tiny_run(model=DETERMINISTIC, data=ONLY_TRAIN, training=training)
    environment = cluster_environment(tmp_path, NUM_PROCESSES="1")
    process = subprocess.Popen(["bash", str(SCRIPTS / "run_training.sh"), *arguments], env=environment)
    wait_for_lines(tmp_path / "run" / "metrics.jsonl", 3, process)
    process.send_signal(getattr(signal, name))
    assert process.wait(timeout=900) == 75
    assert len(list((tmp_path / "run" / "checkpoints").glob("step-*"))) == 1


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["none", "1:5:kill"])
def test_ssh_starts_all_hosts_and_ends_all(tiny_run, tmp_path, fault):
    """Two "hosts" on this machine, through a stand-in for ssh that runs the command in a shell, as sshd does."""
    (tmp_path / "ssh").write_text('#!/usr/bin/env bash\nshift\nexec bash -c "$*"\n')
    training = {"max_steps": 20 if fault == "none" else 100_000, "save_steps": 0}
    arguments = tiny_run(model=DETERMINISTIC, data=ONLY_TRAIN, training=training)
    environment = cluster_environment(tmp_path, NUM_PROCESSES="1", SSH=f"bash {tmp_path / 'ssh'}", GRACE="60")
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = str(probe.getsockname()[1])
    environment |= {"MASTER_PORT": port, "FAULT": "-1:0:none" if fault == "none" else fault}
    command = [
        "bash",
        str(SCRIPTS / "cluster" / "ssh_torchrun.sh"),
        "localhost,127.0.0.1",
        *arguments,
        "--strategy",
        "ddp",
    ]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    _, errors = process.communicate(timeout=1700)
    if fault == "none":
        assert process.returncode == 0, errors[-3000:]
        assert summary(tmp_path / "run")["world_size"] == 2
    else:
        assert process.returncode == 1, errors[-3000:]
        assert "killed by signal 9 (SIGKILL)" in errors, errors[-6000:]
    assert not list(Path("/tmp").glob(f"ssh-{process.pid}-*-0"))
