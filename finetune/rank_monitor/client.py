"""A run of several ranks in which one dies: the others end with one message, and a launcher's restart goes on from the checkpoint.

The collectives of a training wait for every rank, for half an hour where one is gone. So each rank has a witness beside it
(finetune.rank_monitor.monitor), and this is the rank's side of it: starting it, telling it how the rank ends, and ending when it says so.
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
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from finetune import signals as stopping

log = logging.getLogger(__name__)

WITNESS = Path(__file__).with_name("monitor.py")
SHOW_CURSOR = b"\x1b[?25h"

_watch: "Watch | None" = None


class Watch:
    """The witness of this rank.

    Args:
        settings: of `finetune.rank_monitor.monitor.Settings`.
    """

    def __init__(self, settings: dict[str, Any]):
        self.timeout, self.cause = settings["timeout"], ""
        # A session of its own: a launcher ends the rank's whole process group, and the witness has to outlive it.
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(WITNESS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd="/",
            start_new_session=True,
        )
        self._send(settings)

    def _send(self, values: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # gone: the launcher has to tell how this rank ends
            os.write(self.process.stdin.fileno(), json.dumps(values).encode() + b"\n")  # type: ignore[union-attr]

    def port(self) -> int | None:
        """Where rank 0's witness listens; None where it could not start (a system without pidfd_open)."""
        line = self.process.stdout.readline()  # type: ignore[union-attr]
        return int(json.loads(line)["port"]) if line else None

    def listen(self) -> None:
        """From here on the witness can end this process."""
        threading.Thread(target=self._listen, name="witness", daemon=True).start()

    def _listen(self) -> None:
        for line in self.process.stdout:  # type: ignore[union-attr]
            word = json.loads(line)
            if "unwatched" in word:
                log.error(
                    "the other ranks would not be told of this one's death: the witness of rank 0, %s",
                    word["unwatched"],
                )
            if "end" in word:
                if sys.stderr.isatty():
                    os.write(2, SHOW_CURSOR)  # a panel may have hidden it
                stopping.write_exit_code(word["code"])
                os._exit(
                    stopping.code_for_launcher(word["code"])
                )  # the main thread waits for a rank that will not come
        if self.process.wait() != 0:
            log.error("the witness of this rank has ended: the other ranks will not be told how this one does")

    def left(self, code: int) -> None:
        """This rank is about to end by itself."""
        self._send({"left": code, "cause": self.cause or f"exit code {code}"})


def watch(accelerator: Any, timeout: float) -> None:
    """Starts this rank's witness, once a process. All ranks call it.

    Args:
        accelerator: Accelerate's Accelerator.
        timeout: `training.rank_timeout`, seconds; 0: no witness.
    """
    global _watch
    if _watch is not None or accelerator.num_processes == 1 or timeout <= 0:
        return
    from accelerate.utils import broadcast_object_list

    rank = accelerator.process_index
    settings = {
        "rank": rank,
        "world": accelerator.num_processes,
        "pid": os.getpid(),
        "token": secrets.token_hex(16),
        "timeout": timeout,
        "hub": None,
        "hub_host": socket.gethostname(),
        "speaks": os.environ.get("LOCAL_RANK", "0") == "0",
    }
    hub: list[Any] = [None]
    if rank == 0:
        _watch = Watch(settings)
        port = _watch.port()
        if port is None:
            log.warning("nobody watches whether a rank dies: the witness of rank 0 could not start")
            _watch = None
        else:
            hub = [{"hub": [own_address(), port], "token": settings["token"], "hub_host": settings["hub_host"]}]
    hub = broadcast_object_list(hub)
    if hub[0] is None:
        return
    if rank > 0:
        _watch = Watch({**settings, **hub[0]})
    _watch.listen()
    sys.excepthook = _end_by_exception


def own_address() -> str:
    """Where the other ranks reach this one: on the interface that leads to the address at which all of them have met."""
    meeting = os.environ.get("MASTER_ADDR", "localhost")
    try:
        family, kind, _, _, place = socket.getaddrinfo(
            meeting, int(os.environ.get("MASTER_PORT", "1")), type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # sends nothing
            found = probe.getsockname()[0]
    except OSError:
        return meeting
    # A host's own name often leads it to its loopback, and the others to its address.
    return meeting if found.startswith("127.") or found == "::1" else found


def failed(error: BaseException | str) -> None:
    """Takes down the reason for which this rank is going to end, for the message that the other ranks' user reads."""
    if _watch is not None:
        text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        _watch.cause = text.strip()


def left(code: int) -> None:
    """This process ends with an exit code."""
    if _watch is not None:
        _watch.left(code)


def is_of_another_rank(error: BaseException) -> bool:
    """Whether an exception says no more than that another rank, or the way to it, is gone."""
    if isinstance(error, torch.distributed.DistError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(
        sign in text for sign in ("gloo", "nccl", "connection closed by peer")
    )


def _end_by_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """sys.excepthook of a rank: where another rank is the reason, its witness tells, and not the traceback of a broken connection."""
    assert _watch is not None
    if is_of_another_rank(error):
        deadline = time.monotonic() + _watch.timeout + 10
        while time.monotonic() < deadline and _watch.process.poll() is None:
            time.sleep(0.1)  # until `_listen` ends the process
    traceback.print_exception(kind, error, trace)
    failed(error)
    left(1)
    stopping.write_exit_code(1)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)  # taking the interpreter down may wait for ranks that are gone
