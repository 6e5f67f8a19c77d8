"""The rank's side of its rank monitor: start it, report how the rank ends, and end when told to.

The collectives of a training wait for every rank, for half an hour where one is gone. With a monitor beside each rank
(finetune/rank_monitor/monitor.py) the others end at once, with one message.
"""

import contextlib
import json
import logging
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from finetune import signals

log = logging.getLogger(__name__)

MONITOR = Path(__file__).with_name("monitor.py")
SHOW_CURSOR = b"\x1b[?25h"


class MonitorProcess:
    """The rank monitor of this rank.

    Args:
        settings: fields of `finetune.rank_monitor.monitor.Settings`.
    """

    def __init__(self, settings: dict[str, Any]):
        self.timeout, self.cause = settings["timeout"], ""
        # A session of its own: a launcher kills the rank's whole process group, and the monitor has to outlive it.
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(MONITOR)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd="/",
            start_new_session=True,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._stdin, self._stdout = self.process.stdin, self.process.stdout
        self.send(settings)

    def send(self, values: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # gone: the launcher has to report how this rank ends
            os.write(self._stdin.fileno(), json.dumps(values).encode() + b"\n")

    def port(self) -> int | None:
        """Return the port of rank 0's monitor; None where it could not start (a system without pidfd_open)."""
        line = self._stdout.readline()
        return int(json.loads(line)["port"]) if line else None

    def listen(self) -> None:
        """Let the monitor end this process; for a thread."""
        for line in self._stdout:
            message = json.loads(line)
            if "unwatched" in message:
                log.error(
                    "the other ranks will not learn of this one's death: rank 0's monitor, %s", message["unwatched"]
                )
            if "end" in message:
                if sys.stderr.isatty():
                    os.write(2, SHOW_CURSOR)  # a panel may have hidden it
                signals.write_exit_code(message["code"])
                # Not sys.exit: the main thread waits for a rank that will not come.
                os._exit(signals.code_for_launcher(message["code"]))
        if self.process.wait() != 0:
            log.error("the rank monitor of this rank has ended: the other ranks will not learn how this one ends")


_monitor: MonitorProcess | None = None


def watch(timeout: float) -> None:
    """Start this rank's monitor, once a process. All ranks call it.

    Args:
        timeout: `training.rank_timeout`, seconds; 0: no monitor.
    """
    global _monitor
    import torch

    from finetune.distributed import broadcast

    if _monitor is not None or timeout <= 0 or not torch.distributed.is_initialized():
        return
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if world == 1:
        return
    settings: dict[str, Any] = {"rank": rank, "world": world, "pid": os.getpid(), "timeout": timeout}
    settings["reports"] = os.environ.get("LOCAL_RANK", "0") == "0"
    shared: dict[str, Any] = {"token": secrets.token_hex(16), "coordinator_host": socket.gethostname()}
    if rank == 0:
        _monitor = MonitorProcess(settings | shared)
        shared["coordinator"] = (own_address(), _monitor.port())
    shared = broadcast(shared)
    if shared["coordinator"][1] is None:
        if rank == 0:
            log.warning("nothing watches whether a rank dies: the rank monitor of rank 0 could not start")
        _monitor = None
        return
    _monitor = _monitor or MonitorProcess(settings | shared)
    threading.Thread(target=_monitor.listen, name="rank monitor", daemon=True).start()
    _set_excepthook(_monitor)


def own_address() -> str:
    """Return the address at which other ranks reach this one: that of the interface that leads to MASTER_ADDR."""
    master = os.environ.get("MASTER_ADDR", "localhost")
    port = int(os.environ.get("MASTER_PORT", "1"))
    try:
        family, kind, _, _, address = socket.getaddrinfo(master, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            found = probe.getsockname()[0]
    except OSError:
        return master
    # A host's own name often leads it to its loopback, and the others to its address.
    return master if found.startswith("127.") or found == "::1" else found


def failed(error: BaseException | str) -> None:
    """Record why this rank is about to end, for the other ranks' message; the first cause counts."""
    if _monitor is not None:
        text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        _monitor.cause = _monitor.cause or text.strip()


def report_exit(code: int) -> None:
    """Report that this process ends with an exit code."""
    if _monitor is not None:
        _monitor.send({"left": code, "cause": _monitor.cause or f"exit code {code}"})


def is_of_another_rank(error: BaseException) -> bool:
    """Return whether an exception only means that another rank, or the connection to it, is gone."""
    import torch

    if isinstance(error, torch.distributed.DistError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(
        sign in text for sign in ("gloo", "nccl", "connection closed by peer")
    )


def _set_excepthook(monitor: MonitorProcess) -> None:
    """Show no traceback of a broken connection where another rank is the cause, which its monitor reports."""
    print_traceback = sys.excepthook

    def end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if is_of_another_rank(error):
            deadline = time.monotonic() + monitor.timeout + 10
            while time.monotonic() < deadline and monitor.process.poll() is None:
                time.sleep(0.1)  # until `listen` ends the process
        print_traceback(kind, error, trace)
        failed(error)
        report_exit(1)
        signals.write_exit_code(1)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # shutting the interpreter down may wait for ranks that are gone

    sys.excepthook = end
