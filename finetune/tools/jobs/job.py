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
import os
import socket
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune.data.quarantine import Record
from finetune.data.reader import Group
from finetune.data.sources import OpenSource
from finetune.durable_files import put_in_place, write_json, write_text
from finetune.errors import UserError
from finetune.security.safe_text import json_line
from finetune.tools.jobs.arguments import MAX_FAILED
from finetune.tools.jobs.clips import cut_into_shards
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
    the files of `model` follow by themselves."""
    sources: list[OpenSource]
    make_worker: MakeWorker
    clips_a_shard: int | None = None
    """None: by the number of clips."""
    max_samples: int = -1
    max_failed: float = MAX_FAILED
    """Share of the clips that may fail before the job is given up."""

    def __post_init__(self) -> None:
        self.group = [(source, shard) for source in self.sources for shard in source.shards]
        if self.clips_a_shard is None:
            self.clips_a_shard = _clips_a_shard(self.group, self.max_samples)
        self.shards = cut_into_shards(self.group, self.clips_a_shard, self.max_samples)

    @property
    def clips(self) -> int | None:
        """Rows of all shards; None where only reading tells."""
        rows = [piece.rows() for pieces in self.shards for piece in pieces]
        known = [n for n in rows if n is not None]
        return sum(known) if len(known) == len(rows) else None

    def identity(self) -> dict[str, Any]:
        """Return what tells this job from others, by name."""
        parts = [(shard.file, shard.first, shard.rows) for _, shard in self.group]
        files = sorted({shard.file for _, shard in self.group})
        stats = [(file, os.stat(file).st_size, os.stat(file).st_mtime_ns) for file in files if os.path.isfile(file)]
        named = {f"data.{n}": source.source.model_dump() for n, source in enumerate(self.sources)}
        cut = {"clips_a_shard": self.clips_a_shard, "max_samples": self.max_samples}
        digest = hashlib.sha256(json.dumps([parts, stats]).encode()).hexdigest()
        model = {"model_files": stamp(self.settings["model"])} if "model" in self.settings else {}
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
                if self.directory.exists() and any(not p.name.startswith(".") for p in self.directory.iterdir()):
                    raise UserError(
                        f"--output: {self.directory} is not empty and holds no job. Name a new or an empty directory."
                    )
                self.directory.mkdir(parents=True, exist_ok=True)
                # Several tasks of an array may begin at once.
                aside = self.directory / f".job.{socket.gethostname()}.{os.getpid()}.tmp"
                content = json.dumps({**wanted, "hash": _hash(wanted)}, indent=2, ensure_ascii=False)
                aside.write_text(content + "\n", encoding="utf-8")
                put_in_place(aside, file)
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
        """Keep a second process from doing the same shards at the same time, as `alone_in`."""
        with alone_in(self.directory, f"-{part[0]}-of-{part[1]}"):
            yield

    def shard_file(self, number: int) -> Path:
        return self.directory / "shards" / f"{number:05d}.jsonl"

    def is_done(self, number: int) -> bool:
        return self.shard_file(number).is_file()

    def write(self, number: int, outcome: Outcome) -> None:
        """Write the outcome of a shard, all of it or nothing."""
        values = {"clips": outcome.clips, "seconds": outcome.seconds, "filtered": outcome.filtered}
        write_json(self._counts_file(number), {**values, "failed": outcome.failed})
        write_text(self.shard_file(number), outcome.lines)

    def _counts_file(self, number: int) -> Path:
        return self.directory / "counts" / f"{number:05d}.json"

    def totals(self) -> Totals:
        """Return what the shards that are there hold together."""
        totals = Totals(shards=len(self.shards))
        for number in filter(self.is_done, range(len(self.shards))):
            counts = json.loads(self._counts_file(number).read_text(encoding="utf-8"))
            totals.shards_done += 1
            totals.clips += counts["clips"]
            totals.seconds += counts["seconds"]
            totals.filtered.update(counts["filtered"])
            totals.failed += counts["failed"]
        return totals

    def write_failed(self, totals: Totals) -> None:
        """Write failed.jsonl: all that failed in the shards that are there."""
        write_text(self.directory / "failed.jsonl", "".join(json_line(record) + "\n" for record in totals.failed))

    def results(self) -> Iterator[Result]:
        """Yield all results, in the order of the data; the job is done."""
        for number in range(len(self.shards)):
            with self.shard_file(number).open(encoding="utf-8") as lines:
                yield from map(json.loads, lines)


@contextlib.contextmanager
def alone_in(directory: Path, part: str = "") -> Iterator[None]:
    """Keep a second process from working on a directory, or a part of it, where the file system has locks.

    Raises:
        UserError: one is at it.
    """
    with (directory / f".lock{part}").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"--output: another process works on {directory}.", exit_code=1) from error
        except OSError:  # a file system without locks
            pass
        yield


def stamp(name: str) -> list[list[Any]]:
    """Return path, bytes and time of a model's file, or of the files in its directory; nothing for a hub name."""
    path = Path(name)
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files if file.is_file()]


def _clips_a_shard(group: Group, max_samples: int) -> int:
    known = sum(shard.rows or 0 for _, shard in group)
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
