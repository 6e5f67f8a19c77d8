"""The templates for clusters: Slurm and ssh with stand-ins for their commands that really run the training, and real signals."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import DETERMINISTIC, ONLY_TRAIN, ROOT
from test_launchers import BIN, curve, start, summary

SCRIPTS = ROOT / "scripts"
FAULTY = str(ROOT / "tests" / "rank_faults.py")

SRUN = """#!/usr/bin/env bash
# One node: runs the command as its task, with the output file of --output, and hands signals on as srun does.
while [[ "$1" == --* ]]; do
    case "$1" in --output=*) out=${1#--output=} ;; --kill-on-bad-exit=0) ;; *) echo "srun: $1?" >&2; exit 99 ;; esac
    shift
done
SLURM_NODEID=0 SLURM_PROCID=0 "$@" > "${out/\\%N/node0}" 2>&1 &
task=$!
trap 'kill -USR1 $task' USR1
trap 'kill -TERM $task' TERM
while :; do code=0; wait $task || code=$?; kill -0 $task 2> /dev/null || break; done
exit $code
"""
SCONTROL = """#!/usr/bin/env bash
if [ "$1 $2" = "show hostnames" ]; then echo "$3"; else echo "$*" >> "$SCONTROL_LOG"; fi
"""

SBATCH_OPTIONS = {"job-name", "nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "exclusive", "time"}
SBATCH_OPTIONS |= {"signal", "requeue", "open-mode", "output"}


@pytest.mark.parametrize("script", ["run_training.sh", "slurm.sbatch", "ssh_torchrun.sh", "two_machines.sh"])
def test_scripts_are_sound_bash(script):
    done = subprocess.run(["bash", "-n", str(SCRIPTS / script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_slurm_options_stand_before_the_first_command():
    lines = (SCRIPTS / "slurm.sbatch").read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    options = [line for line in lines if line.startswith("#SBATCH")]
    assert options == [line for line in lines[:first] if line.startswith("#SBATCH")]
    names = {re.match(r"#SBATCH --([a-z-]+)(=\S+)?$", line).group(1) for line in options}
    assert names == SBATCH_OPTIONS


def test_the_jobset_is_one():
    jobset = yaml.safe_load((SCRIPTS / "jobset.yaml").read_text())
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
    deadline = time.monotonic() + 400
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


@pytest.mark.slow
def test_a_slurm_job_saves_is_requeued_and_goes_on(tiny_run, tmp_path):
    """USR1 to the batch script in mid-training, exit code 75 through launcher and srun, requeue, and the unbroken run's result."""
    training = {"max_steps": 60, "save_steps": 0, "dataloader_num_workers": 0}
    arguments = [*tiny_run(model=DETERMINISTIC, data=ONLY_TRAIN, training=training), "--strategy", "ddp"]
    whole = [str(BIN / "torchrun"), "--standalone", "--nproc_per_node", "2", FAULTY, *arguments]
    start([*whole, f"training.output_dir={tmp_path / 'whole'}"], PYTHONPATH=str(ROOT))
    job = {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "localhost", "SLURM_JOB_NUM_NODES": "1"}
    job |= {"SCONTROL_LOG": str(tmp_path / "scontrol"), "LOGS": str(tmp_path / "logs"), "STEP_SECONDS": "0.2"}
    environment = cluster_environment(tmp_path, **job)
    command = ["bash", str(SCRIPTS / "slurm.sbatch"), *arguments]
    codes = []
    for attempt in range(2):
        process = subprocess.Popen(command, cwd=ROOT, env={**environment, "SLURM_RESTART_COUNT": str(attempt)})
        if attempt == 0:
            wait_for_lines(tmp_path / "run" / "metrics.jsonl", 5, process)
            process.send_signal(signal.SIGUSR1)
        codes.append(process.wait(timeout=500))
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
    assert process.wait(timeout=100) == 75
    assert len(list((tmp_path / "run" / "checkpoints").glob("step-*"))) == 1


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["none", "1:5:kill"])
def test_ssh_starts_all_hosts_and_ends_all(tiny_run, tmp_path, fault):
    """Two "hosts" on this machine, through a stand-in for ssh that runs the command in a shell, as sshd does."""
    (tmp_path / "ssh").write_text('#!/usr/bin/env bash\nshift\nexec bash -c "$*"\n')
    training = {"max_steps": 20 if fault == "none" else 100_000, "save_steps": 0}
    arguments = tiny_run(model=DETERMINISTIC, data=ONLY_TRAIN, training=training)
    environment = cluster_environment(tmp_path, NUM_PROCESSES="1", SSH=f"bash {tmp_path / 'ssh'}", GRACE="60")
    environment |= {"MASTER_PORT": "29617", "FAULT": "-1:0:none" if fault == "none" else fault}
    command = ["bash", str(SCRIPTS / "ssh_torchrun.sh"), "localhost,127.0.0.1", *arguments, "--strategy", "ddp"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    if fault == "none":
        assert done.returncode == 0, done.stderr[-3000:]
        assert summary(tmp_path / "run")["world_size"] == 2
    else:
        assert done.returncode == 1, done.stderr[-3000:]
        assert "killed by signal 9 (SIGKILL)" in done.stderr
    assert not list(Path("/tmp").glob("ssh-*-0"))
