"""What the engines have in common: which one, how many workers, and what they tell of them."""

from dataclasses import dataclass
from typing import Literal, Protocol

from finetune.tools.jobs.clips import Pieces
from finetune.tools.jobs.work import Outcome, Task


@dataclass(frozen=True)
class EngineSettings:
    """How a job is run; its results do not depend on it."""

    engine: Literal["local", "ray"] = "local"
    workers: int | None = None
    """Processes that hold a model each. None: one for each GPU; without GPUs one, or with Ray one a node."""
    address: str | None = None
    """Of a Ray cluster; None: one on this machine, for this job."""
    device: str | None = None
    """cpu: GPUs are not used; cuda:N: only this one is, by the local engine; else all are."""
    part: tuple[int, int] = (0, 1)
    """(i, n): only every n-th shard, from shard i on."""
    retry_failed: bool = False
    """Whether shards in which clips failed are done again."""


@dataclass
class Ready:
    """A worker process has made its worker."""

    worker: int


@dataclass
class Done:
    """A task is done."""

    worker: int
    found: Outcome | Pieces


@dataclass
class Died:
    """A worker process, or its node, has ended by itself."""

    worker: int
    how: str


Event = Ready | Done | Died


class Engine(Protocol):
    """Worker processes, each of which does one task at a time."""

    workers: int
    """How many there should be; with nodes that come and go it changes."""

    def start(self) -> int:
        """Start a worker process; return its number."""
        ...

    def submit(self, worker: int, task: Task) -> None:
        """Give a task to a worker that is ready."""
        ...

    def wait(self, seconds: float) -> list[Event]:
        """Wait for events, for so many seconds at most.

        Raises:
            UserError: a worker cannot be made, or ends the job.
        """
        ...

    def close(self) -> None:
        """End all worker processes."""
        ...
