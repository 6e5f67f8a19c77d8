"""Findings of the doctor's checks, and the run that they are about."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from finetune.config.optimizers import BITSANDBYTES, TORCHAO

if TYPE_CHECKING:
    from pathlib import Path

    from finetune.config.schema import RunConfig

OK, WARNING, MISSING = "OK", "warning", "missing"


@dataclass(frozen=True)
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
    """As in `finetune.strategies.accelerate_config.Strategy`."""

    @property
    def chosen(self) -> bool:
        return bool(self.names) or self.config_file is not None

    @property
    def optimizer(self) -> str:
        """`training.optimizer` of the chosen run, or none."""
        return str(self.config.training.optimizer) if self.chosen else "none"

    def needs(self, what: str) -> bool:
        """Whether the chosen run cannot start, or not train as configured, without this.

        Args:
            what: one of the keys below; cpu_adam is DeepSpeed's optimizer on the host.
        """
        optimizer, deepspeed = self.optimizer, self.engine.startswith("deepspeed")
        return {
            "bitsandbytes": optimizer in BITSANDBYTES,
            "torchao": optimizer in TORCHAO or optimizer.startswith("cpu_offload"),
            "flashoptim": optimizer.startswith("flash_adamw"),
            "deepspeed": deepspeed,
            "cpu_adam": deepspeed and self.engine.endswith("_offload"),
            "compiler": deepspeed
            or optimizer in TORCHAO
            or optimizer == "adamw_compiled"
            or (self.chosen and bool(self.config.model.compile)),
            "processes": self.engine != "none",
        }[what]


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


def run_checks(sections: dict[str, list[Check]], wanted: Wanted) -> Iterator[Finding]:
    """Run all checks in their order; a check that raises becomes a warning that names it."""
    for section, checks in sections.items():
        for check in checks:
            started = time.perf_counter()
            try:
                findings = list(check(wanted))
            except Exception as error:
                name = check.__name__.replace("_", " ")
                findings = [warning(name, f"this check failed: {reason_of(error)}", "Report it, with --bundle.")]
            seconds = time.perf_counter() - started
            slow = f" (checked in {seconds:.0f} s)" if seconds > 10 else ""
            for finding in findings:
                yield replace(finding, section=section, found=finding.found + slow)
