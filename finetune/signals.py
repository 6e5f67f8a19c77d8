"""Signals that ask a run to stop: it saves a checkpoint and leaves with exit code 75, which means: start me again.

While it trains, a signal is only noted, and the loop looks at the note after each step and each batch of an evaluation. Where there is
nothing to save (loading, closing), the process leaves at once.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

EXIT_CODE = 75
"""EX_TEMPFAIL of sysexits.h."""

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

EXIT_CODE_FILE = "FINETUNE_EXIT_CODE_FILE"
"""Environment variable with a file that takes the exit code: launchers return 1 whatever the training returned."""

_noted: str | None = None
_saves = False


class Stopped(BaseException):
    """The run was asked to stop and has nothing more to do. Like KeyboardInterrupt no Exception, so that nothing takes it for a failure."""


class CutShort(Exception):
    """An evaluation that was left because the run has to stop; on all ranks alike."""


def requested() -> str | None:
    """Name of the signal that asked this process to stop, or None."""
    return _noted


def _on_signal(number: int, frame: Any) -> None:
    global _noted
    before, _noted = _noted, signal.Signals(number).name
    if _saves and before == _noted == "SIGINT":
        raise KeyboardInterrupt  # someone at a terminal does not want to wait for the checkpoint
    if not _saves:
        raise Stopped(f"{_noted} came while there was nothing to save")


@contextlib.contextmanager
def listening() -> Iterator[None]:
    """Takes SIGTERM, SIGINT and SIGUSR1 until the end; only in the main thread, elsewhere nothing changes."""
    global _noted, _saves
    _noted, _saves = None, False
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, _on_signal) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _noted = None


@contextlib.contextmanager
def saving_first() -> Iterator[None]:
    """Within, a signal is noted and left to the caller, who looks at `requested`."""
    global _saves
    before, _saves = _saves, True
    try:
        yield
    finally:
        _saves = before


def code_for_launcher(code: int) -> int:
    """What the process ends with: torchrun's agent would start again what was asked to stop, where a wrapper reads the code from a file."""
    elastic = EXIT_CODE_FILE in os.environ and "TORCHELASTIC_RUN_ID" in os.environ
    return 0 if code == EXIT_CODE and elastic else code


def write_exit_code(code: int) -> None:
    """Leaves the exit code in the file that `FINETUNE_EXIT_CODE_FILE` names, on the first process of a machine."""
    file = os.environ.get(EXIT_CODE_FILE)
    if file and os.environ.get("LOCAL_RANK", "0") == "0":
        with contextlib.suppress(OSError):
            Path(file).write_text(f"{code}\n", encoding="utf-8")
