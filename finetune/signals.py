"""Signals that ask a run to stop: it saves a checkpoint and exits with code 75, which means: start me again.

While the run trains, a signal is only recorded, and the loop checks `requested` after each step and each batch of an
evaluation. Where there is nothing to save (loading, closing), the process exits at once.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import psutil

EXIT_CODE = 75
"""EX_TEMPFAIL of sysexits.h."""

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

EXIT_CODE_FILE = "FINETUNE_EXIT_CODE_FILE"
"""Environment variable that names a file for the exit code: launchers return 1 whatever the training returned."""

ACCELERATE = {"accelerate", "accelerate-launch", "accelerate.commands.launch"}
LAUNCHERS = ACCELERATE | {"deepspeed"}

_received: str | None = None
_saving_first = False
_interrupted = False
"""Whether a SIGINT came."""
_quiet_at_end = False
"""At a terminal, under a launcher that prints a traceback for every exit code but 0."""


class Stopped(BaseException):
    """The run was asked to stop and has nothing more to do. Like KeyboardInterrupt no Exception: it is no failure."""

    def __init__(self, text: str, on_all_ranks: bool = False):
        super().__init__(text)
        self.on_all_ranks = on_all_ranks


class CutShort(Exception):
    """An evaluation was interrupted because the run has to stop; raised on all ranks alike."""


def requested() -> str | None:
    """Return the name of the signal that asked this process to stop, or None."""
    return _received


def _on_signal(number: int, frame: FrameType | None) -> None:
    global _received, _interrupted
    before, _received = _received, signal.Signals(number).name
    _interrupted = _interrupted or number == signal.SIGINT
    if _saving_first and before == _received == "SIGINT":
        raise KeyboardInterrupt  # a second Ctrl-C: do not wait for the checkpoint
    if not _saving_first:
        raise Stopped(f"{_received} came while there was nothing to save")


@contextlib.contextmanager
def listening() -> Iterator[None]:
    """Handle SIGTERM, SIGINT and SIGUSR1 within; only in the main thread, elsewhere nothing changes."""
    global _received, _saving_first
    _received, _saving_first = None, False
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, _on_signal) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _received = None


@contextlib.contextmanager
def saving_first() -> Iterator[None]:
    """Within, only record a signal for the caller, who checks `requested`."""
    global _saving_first
    before, _saving_first = _saving_first, True
    try:
        yield
    finally:
        _saving_first = before


@contextlib.contextmanager
def alone_at_the_terminal() -> Iterator[None]:
    """Within, Ctrl-C reaches this process, not the launcher that a terminal's shell started it with: accelerate and
    deepspeed die of it with a traceback and leave the training behind.

    The first process becomes the terminal's foreground process group. Ctrl-Z is ignored, since it would stop the
    training alone, and the shell would wait for the launcher. torchrun starts processes that have no terminal
    (`end_torchrun`).
    """
    global _quiet_at_end
    group = os.getpgrp()
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError, psutil.Error):  # no terminal
            terminal = os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC)
            stack.callback(os.close, terminal)
            words = psutil.Process(group).cmdline() if group != os.getpid() else []
            launcher = LAUNCHERS.intersection(Path(word).name for word in words[:3])
            first = os.environ.get("LOCAL_RANK", "0") == "0"
            if launcher and first and os.tcgetpgrp(terminal) == group:
                _quiet_at_end = bool(launcher & ACCELERATE) and not {"--quiet", "-q"} & set(words)
                os.setpgid(0, 0)
                stack.callback(_to_the_front, terminal, group)
                _to_the_front(terminal, os.getpgrp())
                signal.signal(signal.SIGTSTP, signal.SIG_IGN)
        yield


def _to_the_front(terminal: int, group: int) -> None:
    """Make a process group the terminal's foreground; a group that is gone is left alone."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})  # which stops who asks from the background
    with contextlib.suppress(OSError):
        os.tcsetpgrp(terminal, group)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def code_for_launcher(code: int) -> int:
    """Return the process's exit code: 0 for 75 where a wrapper reads it from a file and torchrun would restart, and
    where a launcher would print a traceback on a terminal."""
    elastic = EXIT_CODE_FILE in os.environ and "TORCHELASTIC_RUN_ID" in os.environ
    return 0 if code == EXIT_CODE and (elastic or _quiet_at_end) else code


def end_torchrun(code: int) -> None:
    """Kill the torchrun that got Ctrl-C at a terminal and passed it on: all that it would still do is to print a
    traceback. On the first process, when all is saved."""
    environment = os.environ
    if (
        code == EXIT_CODE
        and _interrupted
        and "TORCHELASTIC_RUN_ID" in environment
        and environment.get("LOCAL_RANK") == "0"
    ):
        with contextlib.suppress(OSError, psutil.Error):
            if psutil.Process(os.getppid()).terminal() is not None and environment.get("GROUP_WORLD_SIZE") == "1":
                os.kill(os.getppid(), signal.SIGKILL)


def write_exit_code(code: int) -> None:
    """Write the exit code to the file that `FINETUNE_EXIT_CODE_FILE` names, on the first process of a machine."""
    file = os.environ.get(EXIT_CODE_FILE)
    if file and os.environ.get("LOCAL_RANK", "0") == "0":
        with contextlib.suppress(OSError):
            Path(file).write_text(f"{code}\n", encoding="utf-8")
