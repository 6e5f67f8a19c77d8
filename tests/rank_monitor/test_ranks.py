"""Several ranks of which one dies: who is told what, and how the run continues. The faults are real, in processes."""

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from conftest import DETERMINISTIC, ONLY_TRAIN, ROOT, own_port, read_lines, slow
from launching import BIN, TRAIN, curve, start, summary

from finetune.rank_monitor.client import MONITOR
from finetune.rank_monitor.monitor import ENDED_WELL, LEAVING_TOGETHER, MAX_UNAUTHENTICATED, Ending, Member, find_lost
from finetune.training.elastic_restart import rendezvous

FAULTY = str(ROOT / "tests" / "rank_faults.py")

HANG = 300.0
"""Seconds after which a test gives up on what has to come; on a busy machine it comes late."""
NEVER = 10 * HANG
"""A `rank_timeout` that no test reaches, so that silence is not the cause."""

# ---- rank monitors, beside processes that stand for ranks -----------------------------------------------------------

RANK = "import sys, time; sys.stdin.readline()"
"""A rank that does nothing until it is told to end."""


class Ranks:
    """Processes with a rank monitor each, as finetune.rank_monitor.client starts them."""

    def __init__(self, count: int, timeout: float):
        self.processes = [subprocess.Popen([sys.executable, "-c", RANK], stdin=subprocess.PIPE) for _ in range(count)]
        self.monitors: list[subprocess.Popen[bytes]] = []
        self.timeout, coordinator = timeout, None
        for rank in range(count):
            self.monitors.append(self.start_monitor(rank, coordinator))
            if rank == 0:
                self.port = json.loads(self.monitors[0].stdout.readline())["port"]
                coordinator = ["127.0.0.1", self.port]
        joined = 1
        while joined < count:
            joined = json.loads(self.monitors[0].stdout.readline())["joined"]

    def start_monitor(self, rank: int, coordinator: list[Any] | None) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(MONITOR)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        settings = {"rank": rank, "world": len(self.processes), "pid": self.processes[rank].pid, "token": "t"}
        settings |= {"timeout": self.timeout, "coordinator": coordinator, "coordinator_host": "first"}
        process.stdin.write(json.dumps(settings).encode() + b"\n")
        process.stdin.flush()
        return process

    def report_exit(self, rank: int, code: int, cause: str) -> None:
        """The rank reports the code with which it will end."""
        with contextlib.suppress(BrokenPipeError):  # behind a rank 0 that has ended well nothing watches any more
            os.write(self.monitors[rank].stdin.fileno(), json.dumps({"left": code, "cause": cause}).encode() + b"\n")

    def leave(self, rank: int, code: int, cause: str) -> None:
        """The rank reports it, and ends."""
        self.report_exit(rank, code, cause)
        self.processes[rank].stdin.close()
        self.processes[rank].wait()

    def told_to_end(self, rank: int, within: float = HANG) -> str | None:
        """What its monitor tells a rank to end with."""
        os.set_blocking(self.monitors[rank].stdout.fileno(), False)
        deadline = time.monotonic() + within
        while time.monotonic() < deadline:
            line = self.monitors[rank].stdout.readline()
            if line:
                return json.loads(line)["end"]
            time.sleep(0.05)
        return None

    def end(self) -> list[str]:
        """Ends all that is left; what each monitor wrote into the log."""
        for process in self.processes:
            process.kill()
            process.wait()
        return [m.communicate(timeout=HANG)[1].decode() for m in self.monitors]


@pytest.fixture
def ranks() -> Iterator[Callable[..., Ranks]]:
    """`ranks(3)`."""
    made: list[Ranks] = []

    def make(count: int, timeout: float = NEVER) -> Ranks:
        made.append(Ranks(count, timeout))
        return made[-1]

    yield make
    for one in made:
        for process in (*one.processes, *one.monitors):
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()


@pytest.mark.parametrize("lost", [0, 1])
def test_a_killed_rank_ends_the_others_with_one_message(ranks, lost):
    three = ranks(3)
    three.processes[lost].kill()
    others = [r for r in range(3) if r != lost]
    for rank in others:
        text = three.told_to_end(rank)
        assert text is not None, f"rank {rank} was told nothing"
        assert f"error: rank {lost} on host" in text
        assert "killed by signal 9 (SIGKILL)" in text
    assert [said.count("error: ") for said in three.end()] == [1, 0, 0]


@pytest.mark.slow
def test_a_stopped_rank_is_lost_and_killed_but_not_where_all_are_stopped(ranks):
    three = ranks(3, timeout=5)
    for process in three.processes:
        process.send_signal(signal.SIGSTOP)
    assert three.told_to_end(0, within=7) is None, "someone who stops all ranks wants to go on with them"
    for process in (three.processes[0], three.processes[2]):
        process.send_signal(signal.SIGCONT)
    text = three.told_to_end(2)
    assert text is not None
    assert "error: rank 1 on host" in text
    assert "rank 0 on host" not in text
    assert "rank 2 on host" not in text
    assert "stopped (SIGSTOP)" in text
    assert three.processes[1].wait(timeout=HANG) == -signal.SIGKILL


def test_a_rank_that_is_not_heard_of_ends_the_others_and_itself(ranks):
    """As where a network is down: the monitor of rank 1 is stopped and sends nothing."""
    two = ranks(2, timeout=2)
    two.monitors[1].send_signal(signal.SIGSTOP)
    text = two.told_to_end(0)
    assert text is not None
    assert "rank 1 on host" in text
    assert "not heard of for 2 s" in text


def test_a_rank_that_goes_with_its_monitor_is_known_at_once(ranks):
    """As where a container is killed."""
    two = ranks(2)
    two.monitors[1].kill()
    two.processes[1].kill()
    text = two.told_to_end(0)
    assert text is not None
    assert "rank 1 on host" in text
    assert "its process and the rank monitor beside it are gone" in text


def test_without_rank_0_and_its_monitor_the_others_end(ranks):
    two = ranks(2)
    two.monitors[0].kill()
    two.processes[0].kill()
    text = two.told_to_end(1)
    assert text is not None
    assert "rank 0 on host first" in text


@pytest.mark.parametrize("code", ENDED_WELL)
def test_ranks_that_end_well_end_nobody(ranks, code):
    three = ranks(3)
    for rank in (2, 0, 1):
        three.leave(rank, code, "")
    assert three.end() == ["", "", ""]
    assert all(w.returncode == 0 for w in three.monitors)


@pytest.mark.parametrize("asked", [0, slow(1)])
def test_a_rank_that_was_asked_to_stop_takes_those_along_that_wait_for_it(ranks, asked):
    two = ranks(2)
    two.leave(asked, 75, "")
    text = two.told_to_end(1 - asked)
    assert text is not None
    assert f"stopped: rank {asked} on host" in text
    assert [said.count("stopped: ") for said in two.end()] == [1, 0]


@pytest.mark.parametrize("closing", [0, slow(1)])
def test_a_rank_that_still_closes_what_it_has_open_is_left_to_it(ranks, closing):
    """As where rank 0 uploads its last figures; the third one waits in an exchange and is taken along."""
    three = ranks(3)
    three.report_exit(closing, 75, "")
    three.leave(1 - closing, 75, "")
    text = three.told_to_end(2)
    assert text is not None
    assert f"stopped: rank {1 - closing} on host" in text
    three.processes[2].kill()
    time.sleep(LEAVING_TOGETHER)
    assert three.told_to_end(closing, within=0.5) is None
    assert three.processes[closing].poll() is None
    three.processes[closing].stdin.close()
    assert three.processes[closing].wait(timeout=HANG) == 0
    assert all(w.wait(timeout=HANG) == 0 for w in three.monitors)


def test_ranks_that_all_refuse_the_same_report_it_themselves(ranks):
    two = ranks(2)
    for rank in range(2):
        two.report_exit(rank, 2, "a bad setting")
    two.leave(0, 2, "a bad setting")
    two.leave(1, 2, "a bad setting")
    assert two.end() == ["", ""]


@pytest.mark.slow
def test_the_cause_of_a_rank_that_fails_alone_reaches_the_others(ranks):
    two = ranks(2)
    two.leave(1, 1, "ValueError: a file of this node")
    text = two.told_to_end(0)
    assert text is not None
    assert "rank 1 on host" in text
    assert "ValueError: a file of this node" in text


FOREIGN_LINES = {
    "another token": b'{"token": "x", "rank": 1, "host": "h", "pid": 1}\n'
    b'{"ended": {"code": 9, "cause": "", "reported": false}}\n',
    "deeply nested": b"[" * 20_000 + b"\n",
    "nested within the limit": b"[" * 1000 + b"\n",
    "a long line": b"x" * 2000,
    "no line at all": b"",
}


def disconnected(peer: socket.socket) -> bool:
    """Whether the other side has ended the connection without an answer."""
    try:
        return peer.recv(100) == b""
    except ConnectionResetError:
        return True


def test_the_monitor_ignores_unauthenticated_peers_and_outlives_them(ranks):
    two = ranks(2)
    crowd = []
    for data in FOREIGN_LINES.values():
        crowd.append(socket.create_connection(("127.0.0.1", two.port), timeout=HANG))
        crowd[-1].sendall(data)
    for name, peer in zip(FOREIGN_LINES, crowd, strict=True):
        with peer:
            assert disconnected(peer), name
    assert all(w.poll() is None for w in two.monitors)
    two.processes[1].kill()
    text = two.told_to_end(0)
    assert text is not None, "and it still does its work"
    assert "rank 1 on host" in text


def test_a_crowd_of_unauthenticated_peers_keeps_no_monitor_out(ranks):
    two = ranks(2)
    with contextlib.ExitStack() as stack:
        crowd = [
            stack.enter_context(socket.create_connection(("127.0.0.1", two.port), timeout=HANG))
            for _ in range(MAX_UNAUTHENTICATED + 20)
        ]
        assert all(disconnected(peer) for peer in crowd[:10]), "the oldest have to go"
        assert len(list(Path(f"/proc/{two.monitors[0].pid}/fd").iterdir())) < MAX_UNAUTHENTICATED + 20
        two.processes[1].kill()
        text = two.told_to_end(0)
    assert text is not None
    assert "rank 1 on host" in text


def member(rank: int, **values: Any) -> Member:
    return Member(rank, "h", 1, values.pop("heard", 100.0), **values)


def test_only_ranks_that_wait_for_the_one_asked_to_stop_are_taken_along():
    asked = member(1, ended=100.0, ending=Ending(75, ""))
    assert find_lost([member(0, heard=106.0, leaving=75), asked], 30, 106.0) is None
    found = find_lost([member(0, heard=106.0), asked], 30, 106.0)
    assert found is not None
    assert found[0] == [asked]


def test_a_launchers_sigterm_is_not_taken_for_the_cause():
    killed = member(1, ended=100.1, ending=Ending(137, "killed"))
    ended = member(0, ended=100.0, ending=Ending(128 + signal.SIGTERM, "ended by the launcher"))
    assert find_lost([ended, killed], 30, 100.2) == ([killed], "killed")
    assert find_lost([ended, member(1)], 30, 100.2) is None, "the real cause may still come"
    assert find_lost([ended, member(1)], 30, 101.0) == ([ended], "ended by the launcher")


# ---- rendezvous of restarted ranks ----------------------------------------------------------------------------------


def meet(rank: int, port: int, place: Connection) -> None:
    """A rank that torchrun has started; it sends the address at which the ranks meet."""
    launcher = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ.update(launcher, WORLD_SIZE="2", RANK=str(rank))
    rendezvous(600)
    place.send([os.environ[name] for name in launcher])


def test_restarted_ranks_do_not_meet_at_the_address_of_those_before():
    """The second time rank 1 comes first, and finds in the launcher's store what earlier ranks have left there."""
    import torch

    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    fork = multiprocessing.get_context("fork")
    started = []

    def start_rank(rank: int) -> Connection:
        receiver, sender = fork.Pipe(duplex=False)
        started.append(fork.Process(target=meet, args=(rank, store.port, sender), daemon=True))
        started[-1].start()
        sender.close()
        return receiver

    def places(*ranks: Connection) -> list[list[str]]:
        assert all(rank.poll(2 * HANG) for rank in ranks)
        return [rank.recv() for rank in ranks]

    first = places(start_rank(0), start_rank(1))
    earlier = store.get("finetune/here/1")
    rank_1 = start_rank(1)
    while store.get("finetune/here/1") == earlier:
        assert started[-1].is_alive(), "it ended alone"
        time.sleep(0.05)
    second = places(start_rank(0), rank_1)
    for zero, one in (first, second):
        assert zero == one
        assert zero[2] == "False"
    assert first[0] != second[0]
    for process in started:
        process.join(HANG)


# ---- trainings ------------------------------------------------------------------------------------------------------


def launch(how: str, count: int = 2, *options: str) -> list[str]:
    """A launcher's words."""
    if how == "torchrun":
        return [str(BIN / "torchrun"), "--standalone", *options, "--nproc_per_node", str(count)]
    if how == "deepspeed":
        return [str(BIN / "deepspeed"), f"--num_gpus={count}", *own_port("deepspeed")]
    words = ["launch", "--multi_gpu", "--num_processes", str(count), "--num_machines", "1", "--mixed_precision", "no"]
    return [str(BIN / "accelerate"), *words, "--dynamo_backend", "no", *own_port("accelerate")]


def fault_of(
    how: str, strategy: str, fault: str, arguments: list[str], metrics: Path
) -> tuple[subprocess.CompletedProcess[str], float]:
    """A training that a fault ends, and the seconds from its last step to its end."""
    command = [*launch(how), FAULTY, *arguments, "--strategy", strategy]
    environment = {"PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment["FAULT"] = fault
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=1500, cwd="/", env={**os.environ, **environment}
    )
    assert done.returncode != 0
    return done, time.time() - metrics.stat().st_mtime


FAULTS = [
    ("torchrun", "ddp", "0:3:kill", "killed by signal 9 (SIGKILL)"),
    ("torchrun", "ddp", "1:3:raise", "RuntimeError: a fault of the test"),
    ("torchrun", "ddp", "1:3:exit", "exit code 3"),
    ("torchrun", "fsdp2", "1:3:kill", "killed by signal 9 (SIGKILL)"),
    ("torchrun", "zero3", "1:3:stop", "stopped (SIGSTOP)"),
    ("accelerate", "ddp", "1:3:segfault", "killed by signal 11 (SIGSEGV)"),
    ("deepspeed", "zero2", "1:3:kill", "killed by signal 9 (SIGKILL)"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("how", "strategy", "fault", "cause"), FAULTS)
def test_one_rank_dies_and_the_user_reads_its_name_and_cause(tiny_run, tmp_path, how, strategy, fault, cause):
    training = {"max_steps": 100_000, "save_steps": 0, "rank_timeout": 8.0}
    arguments = tiny_run(model=DETERMINISTIC, data=ONLY_TRAIN, training=training)
    done, seconds = fault_of(how, strategy, fault, arguments, tmp_path / "run" / "metrics.jsonl")
    said = [line for line in (done.stderr + done.stdout).splitlines() if line.startswith("error: ")]
    assert len(said) == 1, said
    assert f"error: rank {fault[0]} on host {os.uname().nodename}" in said[0]
    assert cause in said[0]
    assert seconds < 600, "the exchange's own time-out of 1800 s is not waited for"
    if "raise" not in fault:
        assert "onnection closed by peer" not in done.stderr, "the others' broken connections are no news"


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "resumed"), [("1:7:kill", 4), ("0:3:raise", None)])
def test_torchrun_restarts_a_run_that_goes_on_by_itself(tiny_run, tmp_path, fault, resumed):
    """From the newest checkpoint, or from step 0 where nothing is saved; never from a foreign run that lies there."""
    training = {"max_steps": 10, "save_steps": 4, "save_total_limit": 0, "num_gpus": 2}
    arguments = tiny_run(model=DETERMINISTIC, data=ONLY_TRAIN, training=training)
    options = [*arguments, "--strategy", "ddp"]
    start([*launch("torchrun"), FAULTY, *options, f"training.output_dir={tmp_path / 'whole'}"])
    restarts = launch("torchrun", 2, "--max-restarts", "1")
    start([*restarts, FAULTY, *options], FAULT=fault, FAULT_ONCE=str(tmp_path / "once"))
    assert (tmp_path / "once").exists(), "the fault never happened"
    assert summary(tmp_path / "run")["resumed_from"] == resumed
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")
    done = start([*restarts, FAULTY, *options], expect=1)
    assert "holds another run" in done.stderr
    assert 'Traceback (most recent call last):\n  File "' + FAULTY not in done.stderr


SAME_CLIPS = {1: {"dataloader_num_workers": 2, "gradient_accumulation_steps": 2}, 2: {"dataloader_num_workers": 1}}
"""Settings under which one process and two have the same clips in each step."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "before", "after"),
    [
        ("ddp", 2, 1),
        ("ddp", 1, 2),
        ("fsdp2", 2, 1),
        ("fsdp2", 1, 2),
        ("zero1", 2, 1),
        ("zero2", 1, 2),
        ("zero2", 2, 1),
        ("zero3", 2, 1),
        ("zero3", 1, 2),
    ],
)
def test_a_run_goes_on_with_another_number_of_ranks(tiny_run, tmp_path, strategy, before, after):
    """Weights, optimizer state and the place in the data carry over: the losses are those of the unbroken run."""
    training = {"max_steps": 8, "save_steps": 4, "save_total_limit": 0, "learning_rate": 1e-2}

    def run(count: int, *overrides: str) -> None:
        arguments = tiny_run(model=DETERMINISTIC, data=ONLY_TRAIN, training={**training, **SAME_CLIPS[count]})
        done = start([*launch("torchrun", count), TRAIN, *arguments, *overrides, "--strategy", strategy])
        assert "start anew" not in done.stderr or "the optimizer's state of" in done.stderr
        assert "cannot be dealt out" not in done.stderr

    run(before)
    whole = curve(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000008")
    run(after, "training.resume_from_checkpoint=true")
    told = summary(tmp_path / "run")
    assert (told["resumed_from"], told["world_size"]) == (4, after)
    assert [loss for loss, _ in curve(tmp_path / "run")] == pytest.approx([loss for loss, _ in whole], rel=1e-5)


@pytest.mark.slow
def test_two_ranks_become_three(tiny_run, tmp_path):
    """In the middle of an epoch: what is left of it comes once, and the losses go on from where they were."""
    training = {"max_steps": 6, "save_steps": 1, "save_total_limit": 0, "log_clips": True}
    arguments = tiny_run(model=DETERMINISTIC, data=ONLY_TRAIN, training=training)
    start([*launch("torchrun", 2), TRAIN, *arguments, "training.max_steps=1", "--strategy", "ddp"])
    resume = "training.resume_from_checkpoint=true"
    done = start([*launch("torchrun", 3), TRAIN, *arguments, resume, "--strategy", "ddp"])
    assert "2 ranks x 0 workers are 3 x 0 now" in done.stderr
    assert summary(tmp_path / "run")["world_size"] == 3
    rows = read_lines(tmp_path / "run" / "clips.jsonl")
    steps = [[i for rank in row["ids_by_rank"] for batch in rank for i in batch] for row in rows]
    assert [len(step) for step in steps[:3]] == [8, 12, 4]
    assert len(set(steps[0] + steps[1] + steps[2])) == 24
    assert summary(tmp_path / "run")["final_loss"] < curve(tmp_path / "run")[0][0]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero2"])
def test_ranks_without_any_clip_keep_step(tiny_run, tmp_path, strategy):
    """Two clips for three ranks: the third one never has any, and the losses are those of one process."""
    data = {**ONLY_TRAIN, "max_samples": 2}
    training = {"max_steps": 4, "learning_rate": 1e-2}
    arguments = tiny_run(model=DETERMINISTIC, data=data, training=training)
    start([*launch("torchrun", 1), TRAIN, *arguments, f"training.output_dir={tmp_path / 'one'}"])
    done = start([*launch("torchrun", 3), TRAIN, *arguments, "--strategy", strategy])
    assert "has no more clips in this epoch and keeps step with the others" in done.stderr
    assert summary(tmp_path / "run")["samples"] == 8
    alone, together = ([loss for loss, _ in curve(tmp_path / name)] for name in ("one", "run"))
    assert together == pytest.approx(alone, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp2", "zero3"])
def test_a_rank_with_slow_data_is_named_under_engines_that_shard(tiny_run, tmp_path, strategy):
    training = {"max_steps": 12, "save_steps": 0}
    arguments = tiny_run(model=DETERMINISTIC, data=ONLY_TRAIN, training=training)
    done = start(
        [*launch("torchrun"), FAULTY, *arguments, "--strategy", strategy], SLOW_DATA="1:0.5", PYTHONPATH=str(ROOT)
    )
    assert "rank 1 waits for its data" in done.stderr
    assert "rank 0 waits for its data" not in done.stderr
    assert summary(tmp_path / "run")["drift_warnings"]["slow_data"] == 1


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ip"), reason="network namespaces need root and iproute2")
def test_two_machines_as_network_namespaces(tiny_run, tmp_path):
    """torchrun and accelerate over two addresses, a cable that is pulled out, and a machine that is lost for good."""
    training = {
        "max_steps": 60,
        "save_steps": 20,
        "save_total_limit": 0,
        "rank_timeout": 15.0,
        "dataloader_num_workers": 0,
    }
    arguments = tiny_run(model=DETERMINISTIC, data=ONLY_TRAIN, training=training)
    environment = {"WORK": str(tmp_path / "two"), "TRAIN_SCRIPT": FAULTY, "STEP_SECONDS": "0.1", "CUT_AFTER": "25"}
    environment["LAUNCH_TIMEOUT"] = "1500"  # on a busy machine a launch takes minutes
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "cluster" / "two_machines.sh"), *arguments, "--strategy", "ddp"],
        capture_output=True,
        text=True,
        timeout=3600,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert not [line for line in subprocess.getoutput("ip netns list").splitlines() if line.startswith("ft")]
