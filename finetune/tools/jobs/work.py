"""What a worker process does: it makes its worker once, and processes one piece of a shard after the other."""

import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from finetune.data.quarantine import Record
from finetune.data.reader import Group
from finetune.data.retry import Unreachable
from finetune.errors import UserError
from finetune.security.safe_text import json_line
from finetune.tools.jobs.clips import Clips, Pieces, halves, with_counts

Result = dict[str, Any]
LENGTHS = ("duration_seconds", "duration")
LOST_DEVICE = 70
"""Exit code of a worker process whose GPU takes no more work."""


class Worker(Protocol):
    """What processes clips, such as a model with its settings."""

    def process(self, clips: Clips) -> Iterable[Result]:
        """Yield the results of the clips, one or more each, in any order.

        A result's `source`, where it has one, is the place of its clip: results are sorted by it. Its `duration` or
        `duration_seconds` counts as audio that is done. An exception costs the clip that raises it, and all results
        of the call are computed again without that clip; UserError ends the job.
        """
        ...


MakeWorker = Callable[[], Worker]
"""Makes the worker in its process. It is sent there by pickle: a function of a module, a partial or a dataclass."""


@dataclass
class Outcome:
    """What came of a shard, or of a part of one."""

    lines: str = ""
    """The results, one JSON line each."""
    failed: list[Record] = field(default_factory=list)
    filtered: Counter[str] = field(default_factory=Counter)
    clips: int = 0
    """Rows read, failed and filtered ones too."""
    seconds: float = 0.0
    """Of the audio of the results, where they tell."""

    def __add__(self, other: "Outcome") -> "Outcome":
        return Outcome(
            self.lines + other.lines,
            self.failed + other.failed,
            self.filtered + other.filtered,
            self.clips + other.clips,
            self.seconds + other.seconds,
        )


def process(worker: Worker, group: Group, pieces: Pieces) -> Outcome:
    """Process clips. Where that raises, do it again in halves, down to the clips that raise, which are noted.

    Raises:
        UserError: the data or the settings are at fault; Unreachable: storage does not answer.
    """
    clips = Clips(group, pieces)
    try:
        results = list(worker.process(clips))
        reason = None
    except (UserError, Unreachable):
        raise
    except Exception as error:
        if isinstance(error, torch.AcceleratorError):
            os._exit(LOST_DEVICE)  # nothing can be computed in this process any more
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:500]}"
    if reason is not None:  # behind the handler, which holds the tensors of an error for want of memory
        parts = halves(with_counts(group, pieces))
        if parts:
            return process(worker, group, parts[0]) + process(worker, group, parts[1])
        clips.fail("exception", group[pieces[0].shard][1].place(pieces[0].start), reason)
        return Outcome(failed=clips.failed[-1:], clips=1)
    places = {place: number for number, place in enumerate(clips.ids)}
    results.sort(key=lambda result: places.get(str(result.get("source")), len(places)))
    seconds = [result[name] for result in results for name in LENGTHS if name in result]
    lines = "".join(json_line(result) + "\n" for result in results)
    return Outcome(lines, clips.failed, clips.filtered, clips.read, float(sum(seconds)))


@dataclass
class Task:
    """What a worker process is asked for: to process pieces, or to count their rows."""

    shard: int
    pieces: Pieces
    deaths: int = 0
    """Worker processes that ended over it."""
    only_count: bool = False


def answer(worker: Worker, group: Group, task: Task) -> Outcome | Pieces:
    """Do a task.

    Raises:
        UserError: the data or the settings are at fault, or storage does not answer.
    """
    try:
        return with_counts(group, task.pieces) if task.only_count else process(worker, group, task.pieces)
    except Unreachable as error:
        raise UserError(f"{error}. What is done is kept; the same line goes on there.", exit_code=1) from error
