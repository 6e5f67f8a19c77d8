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


def ends_with_this_process() -> Callable[..., None] | None:
    """`end_with_parent` for workers that the present thread is about to start. The kernel minds the thread rather than the process, so
    that there is None but in the main thread, which lasts.
    """
    if threading.current_thread() is not threading.main_thread():
        return None
    return functools.partial(end_with_parent, os.getpid())
