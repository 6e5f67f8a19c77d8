"""What the witness of rank 0 hears of the ranks, and how it judges: part of finetune.rank_monitor.monitor, standard library only."""

import contextlib
import json
import os
import signal
from dataclasses import dataclass
from typing import Any

BEAT = 1.0
SETTLE = 0.5
"""Seconds for which another cause is awaited where a rank was ended by SIGTERM: that is how launchers end the rest."""
LEAVING_TOGETHER = 5.0
"""Seconds within which ranks that all fail for a reason of their own, such as a bad setting, are left to say so themselves."""
LINE_LIMIT = 1 << 16
STOPPED = 75
ENDED_WELL = (0, STOPPED)
SILENT = "not heard of for {:.0f} s: the machine or the network to it is down"


class Lines:
    """JSON lines over a file descriptor that must never block.

    Args:
        reader: file descriptor.
        writer: file descriptor; may be the same.
        limit: bytes of the longest line that is taken.
    """

    def __init__(self, reader: int, writer: int, limit: int = LINE_LIMIT):
        self.reader, self.writer, self.limit, self.rest, self.open = reader, writer, limit, b"", True
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)

    def read(self) -> list[dict[str, Any]]:
        """The lines that have come; sets `open` to False at the end of the file."""
        try:
            data = os.read(self.reader, self.limit)
            self.open = bool(data)
        except BlockingIOError:
            return []
        except OSError:
            self.open = False
            return []
        *whole, self.rest = (self.rest + data).split(b"\n")
        found = []
        for line in whole:
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):  # the second where a stranger nests deeply
                value = None
            if not isinstance(value, dict):
                self.open = False
                break
            found.append(value)
        if len(self.rest) > self.limit:
            self.open = False
        return found

    def send(self, **values: Any) -> None:
        """Sends one line; what nobody takes is lost."""
        with contextlib.suppress(OSError):
            os.write(self.writer, json.dumps(values).encode() + b"\n")


@dataclass
class Member:
    """What the hub knows of a rank.

    Attributes:
        heard: when its witness was heard of last.
        stopped: since when the rank's process stands still.
        leaving: exit code with which the rank is about to end well, once it has closed what it has open; it waits for no other rank.
        ended: when it did; None while it runs.
        code: its exit code, as a shell's; None where nobody knows.
        cause: in words.
        said: the rank said the cause itself, and ended of its own accord.
    """

    rank: int
    host: str
    pid: int
    heard: float
    lines: Lines | None = None
    stopped: float | None = None
    leaving: int | None = None
    ended: float | None = None
    code: int | None = None
    cause: str = ""
    said: bool = False

    def note(
        self, now: float, stopped: bool = False, leaving: int | None = None, ended: dict[str, Any] | None = None
    ) -> None:
        """Takes down what its witness says."""
        self.heard, self.leaving = now, leaving
        self.stopped = None if not stopped else self.stopped or now
        if ended is not None:
            self.ended, self.code, self.cause, self.said = now, ended["code"], ended["cause"], ended["said"]

    @property
    def name(self) -> str:
        return f"rank {self.rank} on host {self.host} (process {self.pid})"


def verdict(members: list[Member], timeout: float, now: float) -> tuple[list[Member], str] | None:
    """The ranks that are lost, and why; None while there are none, or where all ended of their own accord.

    Args:
        members: all that have joined.
        timeout: seconds of silence or standing still.
        now: of the same clock as theirs.
    """
    present = [m for m in members if m.ended is None]
    failed = sorted((m for m in members if m.ended is not None and m.code not in ENDED_WELL), key=lambda m: m.ended)
    if failed:
        # A launcher ends the other ranks with SIGTERM, which is no cause where there is another.
        first = next((m for m in failed if m.code != 128 + signal.SIGTERM), failed[0])
        ended_by_launcher = first.code == 128 + signal.SIGTERM
        wait = LEAVING_TOGETHER if first.said and present else SETTLE if ended_by_launcher else 0.0
        settled = now - failed[0].ended >= wait
        alike = not present and all(m.said or m.code in ENDED_WELL for m in members)
        return ([first], first.cause) if settled and not alike else None
    asked = [m for m in members if m.ended is not None and m.code == STOPPED]
    waiting = [m for m in present if m.leaving is None]
    if asked and waiting and now - min(m.ended for m in asked) > LEAVING_TOGETHER:
        return asked, "asked to stop by a signal while no step was being made"
    if any(now - m.heard > timeout for m in present):
        lost = [m for m in present if now - m.heard > timeout - 3 * BEAT]
        return lost, SILENT.format(timeout)
    stopped = [m for m in present if m.stopped is not None and now - m.stopped > timeout]
    if stopped and any(m.stopped is None for m in present):
        return stopped, f"stopped (SIGSTOP) for {timeout:.0f} s while others ran"
    return None


def message(lost: list[Member], cause: str) -> str:
    """What the user reads."""
    names = ", ".join(m.name for m in sorted(lost, key=lambda m: m.rank))
    if all(m.code == STOPPED for m in lost):
        return f"stopped: {names}: {cause}. The other ranks end with it; the last checkpoint counts."
    return f"error: {names}: {cause}. The other ranks end with it. training.resume_from_checkpoint=true continues from the last checkpoint."
