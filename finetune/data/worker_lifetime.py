"""Lifetime of worker processes: they end with the process that they work for, however that ends."""

import ctypes
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable

PR_SET_PDEATHSIG = 1  # of Linux's prctl
SECONDS_AFTER_SIGTERM = 60


def end_with_parent(parent: int, *_: object) -> None:
    """Let the kernel kill this worker when its parent, by process id, is gone. Linux only.

    A worker of torch looks for its parent only between batches, and at its end waits for its last batches to be read;
    its own copy of the pipe's reading end keeps it from noticing that nobody will.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # gone before the call
        os._exit(1)


def begin_worker(parent: int, *_: object) -> None:
    """Let this worker end with its parent, and not before: its signals are the parent's to handle.

    A terminal and Slurm signal all processes of a run, whose main one needs data until it has saved a checkpoint.
    """
    end_with_parent(parent)
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    # torch sends SIGTERM to a worker that does not end by itself, so this one counts after a while.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(SECONDS_AFTER_SIGTERM))


def ends_with_this_process(begin: Callable[..., None] = end_with_parent) -> Callable[..., None] | None:
    """Return `begin` for workers that this thread is about to start; None but in the main thread.

    The kernel watches the thread that started them rather than the process, and other threads may end before.
    """
    if threading.current_thread() is not threading.main_thread():
        return None
    return functools.partial(begin, os.getpid())
