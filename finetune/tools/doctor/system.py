"""Checks of the machine: Python, memory, limits, and the port where processes meet."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch

from finetune.tools.doctor.findings import Finding, Wanted, ok, problem, warning

if TYPE_CHECKING:
    from collections.abc import Iterator

OPEN_FILES = 4096
SHARED_MEMORY_GIB = 1.0
MAIN_PORT = 29500  # of the launchers


def python(wanted: Wanted) -> Iterator[Finding]:
    """The interpreter and the system."""
    version = ".".join(map(str, sys.version_info[:3]))
    if not (3, 11) <= sys.version_info[:2] <= (3, 12):
        remedy = "Install Python 3.11 or 3.12 and make .venv anew: bash scripts/setup.sh"
        yield problem(True, "Python", version, remedy)
    elif sys.platform != "linux":
        yield warning("Python", f"{version} on {sys.platform}", "This project is tested on Linux only.")
    else:
        yield ok("Python", f"{version}, {sys.executable}")


def memory(wanted: Wanted) -> Iterator[Finding]:
    """Processors and memory of the host, within the control group's limit."""
    total, free = psutil.virtual_memory().total / 2**30, psutil.virtual_memory().available / 2**30
    limit = _cgroup_limit()
    found = f"{os.cpu_count()} processors, {free:.1f} of {total:.1f} GiB free"
    if limit is not None and limit < total:
        found += f", limited to {limit:.1f} GiB by the control group"
        free = min(free, limit)
    if free < 4:
        yield warning("memory", found, "Free memory: loading NeMo and a small model takes about 3 GiB.")
    else:
        yield ok("memory", found)


def _cgroup_limit() -> float | None:
    """GiB that the control group allows; None without a limit."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        return int(text) / 2**30 if text.isdigit() and int(text) < 2**60 else None
    return None


def limits(wanted: Wanted) -> Iterator[Finding]:
    """Open files and locked memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < OPEN_FILES:
        unlimited = hard == resource.RLIM_INFINITY
        remedy = f"ulimit -n {OPEN_FILES if unlimited else min(hard, 65536)} in the shell that starts the training"
        if 0 <= hard < OPEN_FILES:
            remedy += f", after raising nofile in /etc/security/limits.conf to {OPEN_FILES}"
        most = "unlimited" if unlimited else hard
        found = f"up to {soft} (hard limit {most}); shards, workers and sockets of a large run need more"
        yield warning("open files", found, remedy)
    else:
        yield ok("open files", f"up to {soft}")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    found = "unlimited" if locked == resource.RLIM_INFINITY else f"up to {locked // 1024} KiB"
    found += " (matters to NCCL over InfiniBand; CUDA's pinned memory does not count)"
    if locked != resource.RLIM_INFINITY and torch.cuda.device_count() > 1:
        remedy = "ulimit -l unlimited (memlock in /etc/security/limits.conf; docker run --ulimit memlock=-1)"
        yield warning("locked memory", found, remedy)
    else:
        yield ok("locked memory", found)


def shared_memory(wanted: Wanted) -> Iterator[Finding]:
    """The shared memory through which workers pass batches."""
    path = Path("/dev/shm")
    if not path.is_dir():
        remedy = "Set training.dataloader_num_workers=0."
        yield warning("/dev/shm", "there is none; workers cannot pass batches", remedy)
        return
    usage = shutil.disk_usage(path)
    found = f"{usage.free / 2**30:.1f} of {usage.total / 2**30:.1f} GiB free"
    if usage.free / 2**30 >= SHARED_MEMORY_GIB or not wanted.config.training.dataloader_num_workers:
        yield ok("/dev/shm", found)
        return
    remedy = "docker run --shm-size=8g (Kubernetes: an emptyDir of medium Memory at /dev/shm), or "
    remedy += "training.dataloader_num_workers=0"
    found += "; workers pass batches through it, and a full one kills them with a bus error"
    yield warning("/dev/shm", found, remedy)


def main_port(wanted: Wanted) -> Iterator[Finding]:
    """The port where the processes of a run meet."""
    port = int(os.environ.get("MASTER_PORT", MAIN_PORT))
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            with socket.socket() as other:
                other.bind(("", 0))
                free = other.getsockname()[1]
            found = f"{port} cannot be used ({error}), most likely by another run; one process needs none"
            remedy = f"accelerate launch --main_process_port {free}, torchrun --master_port {free}, or "
            yield warning("port", found, f"{remedy}deepspeed --master_port {free}")
            return
    yield ok("port", f"{port} is free")
