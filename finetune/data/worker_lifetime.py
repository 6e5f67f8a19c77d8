"""Worker processes end with the process that they work for, however that ends."""

import ctypes
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

PR_SET_PDEATHSIG = 1  # of Linux's prctl
SECONDS_AFTER_SIGTERM = 60


def end_with_parent(parent: int, *_: Any) -> None:
    """Called in a worker: the kernel kills it when its parent is gone.

    A worker of torch looks for its parent only between batches, and at its end waits for its last batches to be read; its own copy of the
    pipe's reading end keeps it from noticing that nobody will. On other systems than Linux nothing happens.

    Args:
        parent: process id of the process that started this one.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # gone before the call
        os._exit(1)


def begin_worker(parent: int, *_: Any) -> None:
    """Called in a worker that reads data: it ends with its parent, and not before it.

    A terminal and Slurm send their signals to all processes of a run; the main one needs data until it has saved what there is.
    """
    end_with_parent(parent)
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    # torch ends a worker with SIGTERM that does not end by itself, so this one counts after a while.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(SECONDS_AFTER_SIGTERM))


def ends_with_this_process(begin: Callable[..., None] = end_with_parent) -> Callable[..., None] | None:
    """`begin` for workers that the present thread is about to start. The kernel minds the thread rather than the process, so
    that there is None but in the main thread, which lasts.
    """
    if threading.current_thread() is not threading.main_thread():
        return None
    return functools.partial(begin, os.getpid())
