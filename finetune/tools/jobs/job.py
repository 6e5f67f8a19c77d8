"""A job: its data, its settings, and the directory in which each shard of its results is whole or absent.

DIR/job.json             what the results depend on; another job is refused
DIR/shards/NNNNN.jsonl   the results of a shard, in the order of the data
DIR/counts/NNNNN.json    its clips, seconds, and what failed; written before the shard
DIR/failed.jsonl         all that failed: kind, id, source and reason
"""

import contextlib
import fcntl
import hashlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from finetune.data.quarantine import Record
from finetune.data.reader import Group
from finetune.data.retry import Unreachable
from finetune.data.sources import OpenSource
from finetune.durable_files import write_json, write_text
from finetune.errors import UserError
from finetune.models.loading import files_of
from finetune.security.safe_text import json_line
from finetune.tools.command_line import writing
from finetune.tools.jobs.arguments import MAX_FAILED
from finetune.tools.jobs.clips import cut_into_shards, known_rows
from finetune.tools.jobs.work import MakeWorker, Outcome, Result

FEWEST_CLIPS, MOST_CLIPS, SHARDS = 100, 1000, 20
"""A shard has a 20th of the clips, within these bounds: small data too are shared out, and progress is seen."""
DATA = "the files of the data"
CONTENT = (DATA, "model_files")
"""Keys whose values say nothing to people."""


@dataclass
class Totals:
    """What is done of a job."""

    clips: int = 0
    """Rows read, failed and filtered ones too."""
    seconds: float = 0.0
    """Of audio, where the results tell."""
    seconds_now: float = 0.0
    """Of these, what this start did."""
    filtered: Counter[str] = field(default_factory=Counter)
    failed: list[Record] = field(default_factory=list)
    shards_done: int = 0
    shards: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether every shard is there; not where other tasks of an array (--shard) are still at work."""
        return self.shards_done == self.shards


@dataclass
class Job:
    """Results for all clips of a data source, by workers that do not know of each other."""

    command: str
    """Who makes it, such as clean."""
    directory: Path
    settings: dict[str, Any]
    """What the results depend on beside the data, as JSON-able values: model, language, thresholds. Bytes and times of
    the files of `model` follow by themselves. The size of batches is left out: it may change where memory is short."""
    sources: list[OpenSource]
    make_worker: MakeWorker
    clips_a_shard: int | None = None
    """None: by the number of clips."""
    max_samples: int = -1
    max_failed: float = MAX_FAILED
    """Share of the clips that may fail before the job is given up."""

    def __post_init__(self) -> None:
        """Cut the data into shards; raise UserError where rows have to be counted and storage does not answer."""
        self.group = [(source, shard) for source in self.sources for shard in source.shards]
        if self.clips_a_shard is None:
            self.clips_a_shard = _clips_a_shard(self.group, self.max_samples)
        try:
            self.shards = cut_into_shards(self.group, self.clips_a_shard, self.max_samples)
        except Unreachable as error:
            raise UserError(f"--data: {error}.", exit_code=1) from error

    @property
    def clips(self) -> int | None:
        """Rows of all shards; None where only reading tells."""
        rows = [piece.rows() for pieces in self.shards for piece in pieces]
        known = [n for n in rows if n is not None]
        return sum(known) if len(known) == len(rows) else None

    @property
    def said_clips(self) -> int | None:
        """Clips that the data say they have; None where they say nothing, or some are left out."""
        said = [source.clips for source in self.sources]
        known = [n for n in said if n is not None]
        return sum(known) if len(known) == len(said) and self.max_samples < 0 else None

    def identity(self) -> dict[str, Any]:
        """Return what tells this job from others, by name.

        Raises:
            UserError: the model is a directory of several.
        """
        parts = [(shard.file, shard.first, shard.rows) for _, shard in self.group]
        files = sorted({shard.file for _, shard in self.group})
        stats = [(file, os.stat(file).st_size, os.stat(file).st_mtime_ns) for file in files if os.path.isfile(file)]
        named = {f"data.{n}": source.source.model_dump() for n, source in enumerate(self.sources)}
        cut = {"clips_a_shard": self.clips_a_shard, "max_samples": self.max_samples}
        digest = hashlib.sha256(json.dumps([parts, stats]).encode()).hexdigest()
        model = {"model_files": stamp_of_model(self.settings["model"])} if "model" in self.settings else {}
        values = {"command": self.command, **self.settings, **model, **named, **cut, DATA: digest}
        return json.loads(json.dumps(values, default=str))

    def begin(self) -> None:
        """Make the directory, or take it over from an earlier start of the same job.

        Raises:
            UserError: it holds another job, or other things, or cannot be written.
        """
        file, wanted = self.directory / "job.json", self.identity()
        try:
            if not file.is_file():
                # Several tasks of an array may begin at once: job.json comes before all else, and is looked for again.
                used = self.directory.exists() and any(not p.name.startswith(".") for p in self.directory.iterdir())
                if used and not file.is_file():
                    raise UserError(
                        f"--output: {self.directory} is not empty and holds no job. Name a new or an empty directory."
                    )
                if not used:
                    self.directory.mkdir(parents=True, exist_ok=True)
                    write_json(file, {**wanted, "hash": _hash(wanted)})
            found = json.loads(file.read_text(encoding="utf-8"))
            for name in ("shards", "counts"):
                (self.directory / name).mkdir(exist_ok=True)
        except (OSError, ValueError) as error:
            raise UserError(f"--output: {self.directory} cannot be used: {error}", exit_code=1) from error
        there = _flat({key: value for key, value in found.items() if key != "hash"})
        differing = [
            f"{key} have changed" if key in CONTENT else f"{key} was {there.get(key, 'not set')}, is {value}"
            for key, value in {**dict.fromkeys(there, "not set"), **_flat(wanted)}.items()
            if there.get(key, "not set") != value
        ]
        if differing:
            raise UserError(
                f"--output: {self.directory} holds another job: {'; '.join(differing)}. Name another directory, or "
                "give this one's settings again."
            )

    @contextlib.contextmanager
    def alone(self, part: tuple[int, int]) -> Iterator[None]:
        """Keep a second process from doing the same shards at the same time, as `alone_in`.

        Raises:
            UserError: one does some of them.
        """
        with alone_in(self.directory, f"-{part[0]}-of-{part[1]}"):
            for lock in self.directory.glob(".lock-*-of-*"):
                other, others = map(int, re.findall(r"\d+", lock.name))
                if (other, others) == part or (other - part[0]) % math.gcd(others, part[1]):
                    continue
                with writing("--output", self.directory), lock.open("r+") as file:
                    if not _locked(file, fcntl.LOCK_SH):
                        its = "without --shard" if others == 1 else f"with --shard {other}/{others}"
                        raise UserError(
                            f"--output: another process works on {self.directory}, {its}: both would do some shards.",
                            exit_code=1,
                        )
            yield

    def shard_file(self, number: int) -> Path:
        return self.directory / "shards" / f"{number:05d}.jsonl"

    def is_done(self, number: int) -> bool:
        return self.shard_file(number).is_file()

    def write(self, number: int, outcome: Outcome) -> None:
        """Write the outcome of a shard, all of it or nothing.

        Raises:
            UserError: it cannot be written.
        """
        values = {"clips": outcome.clips, "seconds": outcome.seconds, "filtered": outcome.filtered}
        with writing("--output", self.directory):
            write_json(self._counts_file(number), {**values, "failed": outcome.failed})
            write_text(self.shard_file(number), outcome.lines)

    def forget_failed(self, shards: Iterable[int]) -> None:
        """Take away those of some shards in which clips failed, so that they are done again."""
        with writing("--output", self.directory):
            for number in filter(self.is_done, shards):
                if self._counts(number)["failed"]:
                    self.shard_file(number).unlink()

    def _counts_file(self, number: int) -> Path:
        return self.directory / "counts" / f"{number:05d}.json"

    def _counts(self, number: int) -> dict[str, Any]:
        return json.loads(self._counts_file(number).read_text(encoding="utf-8"))

    def totals(self) -> Totals:
        """Return what the shards that are there hold together."""
        totals = Totals(shards=len(self.shards))
        for number in filter(self.is_done, range(len(self.shards))):
            counts = self._counts(number)
            totals.shards_done += 1
            totals.clips += counts["clips"]
            totals.seconds += counts["seconds"]
            totals.filtered.update(counts["filtered"])
            totals.failed += counts["failed"]
        return totals

    def finish(self) -> Totals:
        """Return the totals, and write failed.jsonl: all that failed in the shards that are there.

        Raises:
            UserError: it cannot be written.
        """
        with writing("--output", self.directory), (self.directory / ".lock.failed").open("w") as lock:
            # Of tasks that end together, the last to write has seen the most.
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(lock, fcntl.LOCK_EX)
            totals = self.totals()
            write_failed(totals, self.directory / "failed.jsonl")
        return totals

    def results(self) -> Iterator[Result]:
        """Yield all results, in the order of the data; the job is done."""
        for number in range(len(self.shards)):
            with self.shard_file(number).open(encoding="utf-8") as lines:
                yield from map(json.loads, lines)


def write_failed(totals: Totals, file: Path) -> None:
    """Write all that failed, a JSON line each."""
    write_text(file, "".join(json_line(record) + "\n" for record in totals.failed))


@contextlib.contextmanager
def alone_in(directory: Path, part: str = "") -> Iterator[None]:
    """Keep a second process from working on a directory, or a part of it, where the file system has locks.

    Raises:
        UserError: one is at it, or the directory cannot be written.
    """
    with writing("--output", directory):
        file = (directory / f".lock{part}").open("w")
    with file:
        if not _locked(file, fcntl.LOCK_EX):
            raise UserError(f"--output: another process works on {directory}.", exit_code=1)
        yield


def _locked(file: IO[str], kind: int) -> bool:
    """Lock a file; return False where another process has it. A file system without locks keeps nobody out."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def stamp(*files: Path) -> list[list[Any]]:
    """Return name, bytes and time of files."""
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]


def stamp_of_model(name: str) -> list[list[Any]]:
    """Return the stamp of the files that a model is loaded from; nothing for a hub name.

    Raises:
        UserError: it is a directory of several models.
    """
    return stamp(*files_of(name, "--model"))


def _clips_a_shard(group: Group, max_samples: int) -> int:
    known = sum(known_rows(*part) or 0 for part in group)
    clips = known if max_samples < 0 else min(known, max_samples)
    return min(max(-(-clips // SHARDS), FEWEST_CLIPS), MOST_CLIPS)


def _hash(identity: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def _flat(values: dict[str, Any], above: str = "") -> dict[str, Any]:
    """Return nested settings with dotted keys."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _flat(value, f"{above}{key}.") if isinstance(value, dict) else {above + key: value}
    return found
