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

EXIT_CODE = 75
"""EX_TEMPFAIL of sysexits.h."""

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

EXIT_CODE_FILE = "FINETUNE_EXIT_CODE_FILE"
"""Environment variable that names a file for the exit code: launchers return 1 whatever the training returned."""

_received: str | None = None
_saving_first = False


class Stopped(BaseException):
    """The run was asked to stop and has nothing more to do. Like KeyboardInterrupt no Exception: it is no failure."""


class CutShort(Exception):
    """An evaluation was interrupted because the run has to stop; raised on all ranks alike."""


def requested() -> str | None:
    """Return the name of the signal that asked this process to stop, or None."""
    return _received


def _on_signal(number: int, frame: FrameType | None) -> None:
    global _received
    before, _received = _received, signal.Signals(number).name
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


def code_for_launcher(code: int) -> int:
    """Return the process's exit code: 0 for 75 where a wrapper reads it from a file, for torchrun would restart."""
    elastic = EXIT_CODE_FILE in os.environ and "TORCHELASTIC_RUN_ID" in os.environ
    return 0 if code == EXIT_CODE and elastic else code


def write_exit_code(code: int) -> None:
    """Write the exit code to the file that `FINETUNE_EXIT_CODE_FILE` names, on the first process of a machine."""
    file = os.environ.get(EXIT_CODE_FILE)
    if file and os.environ.get("LOCAL_RANK", "0") == "0":
        with contextlib.suppress(OSError):
            Path(file).write_text(f"{code}\n", encoding="utf-8")
