"""The progress of a job: clips, hours of audio, clips a second, hours left, failures."""

import logging
import time
from types import TracebackType

from tqdm import tqdm

from finetune.tools.jobs.job import Job
from finetune.tools.jobs.work import Outcome

log = logging.getLogger(__name__)

SECONDS_A_LINE = 60.0
"""Between the lines of a log; a terminal has one that changes."""


class Progress:
    """A line at the terminal, or one a minute in a log."""

    def __init__(self, job: Job, missing: list[int]):
        self.job, self.totals = job, job.totals()
        self.began = self.last = time.monotonic()
        self.before = self.totals.clips
        self.workers = 0, 0
        rows = [piece.rows() for number in missing for piece in job.shards[number]]
        self.left = None if None in rows else sum(n or 0 for n in rows)
        """Clips to do at the start; None where only reading tells."""

    def __enter__(self) -> "Progress":
        if self.totals.shards_done:
            done = f"{self.totals.shards_done} of {len(self.job.shards)} shards were done before"
            log.info("%s goes on: %s", self.job.command, done)
        self.bar = tqdm(total=self.left, desc=self.job.command, leave=False, bar_format="{desc}", disable=None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.close()
        log.info("%s", self)

    def add(self, outcome: Outcome) -> None:
        """Count what is done."""
        self.totals.clips += outcome.clips
        self.totals.seconds += outcome.seconds
        self.totals.failed += outcome.failed
        self.totals.filtered.update(outcome.filtered)

    def show(self, ready: int, workers: int) -> None:
        """Show the line, in a log once a minute, with how many of the workers have their model."""
        self.workers = ready, workers
        if not self.bar.disable:
            self.bar.set_description_str(str(self))
        elif time.monotonic() - self.last > SECONDS_A_LINE:
            self.last = time.monotonic()
            log.info("%s", self)

    def __str__(self) -> str:
        done = self.totals.clips - self.before
        rate = done / max(time.monotonic() - self.began, 1e-3)
        of_all = "" if self.job.clips is None else f" of {self.job.clips:,}"
        parts = [f"{self.totals.clips:,}{of_all} clips"]
        if self.totals.seconds:
            parts.append(f"{self.totals.seconds / 3600:,.2f} h of audio")
        parts.append(f"{rate:,.1f} clips/s")
        if self.left is not None and rate:
            parts.append(f"{max(self.left - done, 0) / rate / 3600:,.2f} h left")
        if self.workers[0] < self.workers[1]:
            parts.append(f"{self.workers[0]} of {self.workers[1]} workers")
        if self.totals.failed:
            parts.append(f"{len(self.totals.failed):,} failed")
        return f"{self.job.command}: {', '.join(parts)}"
