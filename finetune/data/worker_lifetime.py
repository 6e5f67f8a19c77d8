"""Lifetime of worker processes: they end with the process that they work for, however that ends."""

import contextlib
import ctypes
import functools
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor

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


def begin_task_process(parent: int) -> None:
    """Let this process end with its parent, to which a terminal's Ctrl-C is left."""
    end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextlib.contextmanager
def task_processes(workers: int, begin: Callable[..., None] = begin_task_process) -> Iterator[ProcessPoolExecutor]:
    """Fork processes for the tasks that are submitted within; an exception there, such as Ctrl-C, kills them."""
    others = multiprocessing.active_children()
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), ends_with_this_process(begin))
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)  # first: a pool that works takes a death for a failure
        for process in multiprocessing.active_children():
            if process not in others:
                process.kill()
        raise
    pool.shutdown()
