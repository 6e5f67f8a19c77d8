"""What a training does, told as events from inside its process, and faults that happen at one of them.

Events: `forward`, `backward`, `step:before`, `step:after` and `evaluation` of the model, and what happens to files of
the output directory (NAME relative to it): `open:NAME` for writing, `written:NAME` by a library, `rename:NAME` and
`renamed:NAME` (before and after; NAME is the new one), `fsync:NAME` and `fsynced:NAME`, `remove:NAME`, `mkdir:NAME`,
`truncate:NAME`. Each is one line of a log that outlasts SIGKILL: seconds, step, event.
"""

import datetime
import fnmatch
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

FILE_EVENTS = {"os.rename": 1, "os.remove": 0, "os.mkdir": 0, "os.rmdir": 0, "os.truncate": 0}
"""Audit events, and which argument is the path."""


@dataclass(frozen=True)
class Moment:
    """The `count`-th event whose name matches `pattern` (as file names do), and `delay` seconds after it."""

    pattern: str
    count: int = 1
    delay: float = 0.0


class Events:
    """Tells the events of this process and acts at some.

    Args:
        root: the output directory.
        log: file that gets a line for each event.
        plans: what happens at which moment; each once.
    """

    def __init__(self, root: Path, log: Path, plans: list[tuple[Moment, Callable[[], None]]]):
        self.root = str(root.resolve()) + os.sep
        self.pid = os.getpid()
        self.log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.plans = [[moment, action, 0] for moment, action in plans]
        self.trainer: Any = None
        self.lock = threading.RLock()

    def name(self, path: Any) -> str | None:
        """A path relative to the output directory, "." for itself; None for others and for what is no path."""
        try:
            whole = os.path.abspath(os.fsdecode(path))
        except (TypeError, ValueError):
            return None
        if whole + os.sep == self.root:
            return "."
        return whole[len(self.root) :] if whole.startswith(self.root) else None

    def happened(self, event: str) -> None:
        """Logs an event and acts where its moment has come."""
        if os.getpid() != self.pid:  # a data worker
            return
        due = []
        with self.lock:
            step = -1 if self.trainer is None else self.trainer.progress.step
            os.write(self.log, f"{time.monotonic():.4f} {step} {event}\n".encode())
            for plan in self.plans:
                if fnmatch.fnmatchcase(event, plan[0].pattern):
                    plan[2] += 1
                    if plan[2] == plan[0].count:
                        due.append(plan)
        for moment, action, _ in due:
            self._act(moment, action)

    def _act(self, moment: Moment, action: Callable[[], None]) -> None:
        if not moment.delay:
            action()
            return

        def later() -> None:
            time.sleep(moment.delay)
            action()

        threading.Thread(target=later, daemon=True).start()

    def watch_files(self) -> None:
        """Log events of the output directory's files; around the calls of libraries that write without Python."""
        sys.addaudithook(self._audit)
        os.replace = self._around(os.replace, "renamed", 1)
        os.rename = self._around(os.rename, "renamed", 1)
        for name in ("fsync", "fdatasync"):
            setattr(os, name, self._around_sync(getattr(os, name)))
        torch.save = self._around(torch.save, "written", 1, before="open")
        safetensors.torch.serialize_file = self._around(safetensors.torch.serialize_file, "written", 1, before="open")

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments
            writing = (flags or 0) & (os.O_WRONLY | os.O_RDWR)
            if writing and (name := self.name(path)) is not None:
                self.happened(f"open:{name}")
        elif event in FILE_EVENTS and (name := self.name(arguments[FILE_EVENTS[event]])) is not None:
            self.happened(f"{event.removeprefix('os.')}:{name}")

    def _around(self, function: Callable[..., Any], after: str, index: int, before: str | None = None) -> Any:
        @functools.wraps(function)
        def told(*arguments: Any, **options: Any) -> Any:
            name = self.name(arguments[index]) if len(arguments) > index else None
            if before and name is not None:
                self.happened(f"{before}:{name}")
            result = function(*arguments, **options)
            if name is not None:
                self.happened(f"{after}:{name}")
            return result

        return told

    def _around_sync(self, function: Callable[..., Any]) -> Any:
        @functools.wraps(function)
        def told(file: Any) -> None:
            handle = file if isinstance(file, int) else file.fileno()
            name = self.name(os.readlink(f"/proc/self/fd/{handle}"))
            if name is not None:
                self.happened(f"fsync:{name}")
            function(file)
            if name is not None:
                self.happened(f"fsynced:{name}")

        return told

    def watch_model(self, trainer: Any) -> None:
        """Tells of the model's work; this is `observe` of finetune.train.main."""
        self.trainer = trainer
        layer = trainer.model.encoder.layers[-1]
        layer.register_forward_hook(lambda module, *_: self.happened("forward" if module.training else "evaluation"))
        next(p for p in layer.parameters() if p.requires_grad).register_hook(lambda _: self.happened("backward"))
        optimizer = trainer.optimizer
        while hasattr(optimizer, "optimizer") and not isinstance(optimizer, torch.optim.Optimizer):
            optimizer = optimizer.optimizer
        inner = getattr(optimizer, "optimizer", optimizer)  # Accelerate's wrapper is an Optimizer by itself
        inner.register_step_pre_hook(lambda *_: self.happened("step:before"))
        inner.register_step_post_hook(lambda *_: self.happened("step:after"))


def send(number: signal.Signals) -> Callable[[], None]:
    """Sends this process a signal."""
    return lambda: os.kill(os.getpid(), number)


kill = send(signal.SIGKILL)


def shift_clock(seconds: float) -> None:
    """The clock of the day of this process is ahead from here on (or behind); the monotonic clocks go on."""
    clock, nanoseconds, moment = time.time, time.time_ns, datetime.datetime
    time.time = lambda: clock() + seconds
    time.time_ns = lambda: nanoseconds() + int(seconds * 1e9)

    class Shifted(moment):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return moment.now(tz) + datetime.timedelta(seconds=seconds)

    datetime.datetime = Shifted


def read_events(log: Path) -> list[tuple[float, int, str]]:
    """The lines of an event log: seconds, step, event."""
    if not log.is_file():
        return []
    rows = (line.split(" ", 2) for line in log.read_text(encoding="utf-8").splitlines())
    return [(float(seconds), int(step), event) for seconds, step, event in rows]
