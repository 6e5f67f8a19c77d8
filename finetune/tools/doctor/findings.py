"""Findings of the doctor's checks, and the run that they are about."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from finetune.config.schema import RunConfig

OK, WARNING, MISSING = "OK", "warning", "missing"


@dataclass
class Finding:
    """Result of a check."""

    name: str
    state: str
    """OK; warning: runs, but not as well as it could, or what does not work is not needed; missing: cannot run."""
    found: str
    remedy: str = ""
    section: str = ""


@dataclass
class Wanted:
    """The run to be started here; without a strategy and a run file, any run."""

    config: RunConfig
    """The run file with its strategies; without a run file, the quickstart's with them."""
    config_file: Path | None = None
    names: list[str] = field(default_factory=list)
    """Strategies, including the launcher's."""
    engine: str = "none"
    """As in `finetune.strategies.strategy.Strategy`."""

    @property
    def chosen(self) -> bool:
        return bool(self.names) or self.config_file is not None

    @property
    def optimizer(self) -> str:
        """`training.optimizer` of the chosen run, or none."""
        return str(self.config.training.optimizer) if self.chosen else "none"

    @property
    def deepspeed(self) -> bool:
        return self.engine.startswith("deepspeed")

    @property
    def cpu_adam(self) -> bool:
        """Whether DeepSpeed's optimizer on the host steps."""
        return self.deepspeed and self.engine.endswith("_offload")


Check = Callable[[Wanted], Iterator[Finding]]


def ok(name: str, found: str) -> Finding:
    return Finding(name, OK, found)


def warning(name: str, found: str, remedy: str) -> Finding:
    return Finding(name, WARNING, found, remedy)


def problem(needed: bool, name: str, found: str, remedy: str) -> Finding:
    """missing if the chosen run needs it, else a warning."""
    return Finding(name, MISSING if needed else WARNING, found, remedy)


def reason_of(error: BaseException) -> str:
    """An exception in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
