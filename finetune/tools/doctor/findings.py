"""A line of the doctor's report, and what the checks are told of the run that is meant."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from finetune.config.optimizers import BITSANDBYTES, TORCHAO

OK, WARNING, MISSING = "OK", "warning", "missing"


@dataclass(frozen=True)
class Line:
    """What one check found."""

    name: str
    state: str
    """OK; warning: runs, but not as well as it could, or something that is not needed cannot be used; missing: cannot run."""
    found: str
    remedy: str = ""
    section: str = ""


@dataclass
class Wanted:
    """The run that is to be started here; without a strategy and a run file, any."""

    config: Any
    """The run file with its strategies; where none was given, the quickstart's with them."""
    config_file: Path | None = None
    names: list[str] = field(default_factory=list)
    """Strategies, with those of the launcher."""
    engine: str = "none"
    """As in `accelerate_files.Strategy`."""

    @property
    def chosen(self) -> bool:
        return bool(self.names) or self.config_file is not None

    @property
    def optimizer(self) -> str:
        """`training.optimizer` of what was chosen; none where nothing was."""
        return str(self.config.training.optimizer) if self.chosen else "none"

    def needs(self, what: str) -> bool:
        """Whether the chosen run cannot start, or not train as it says, without this.

        Args:
            what: bitsandbytes, torchao, flashoptim, deepspeed, cpu_adam (DeepSpeed's optimizer on the host), compiler or processes.
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


def ok(name: str, found: str) -> Line:
    return Line(name, OK, found)


def warning(name: str, found: str, remedy: str) -> Line:
    return Line(name, WARNING, found, remedy)


def fault(needed: bool, name: str, found: str, remedy: str) -> Line:
    """missing where the chosen run needs it, else a warning."""
    return Line(name, MISSING if needed else WARNING, found, remedy)


def reason_of(error: BaseException) -> str:
    """An exception as one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


Check = Callable[[Wanted], list[Line]]


def run_checks(sections: dict[str, list[Check]], wanted: Wanted, tell: Callable[[Line], None]) -> list[Line]:
    """Runs all checks in their order; a check that fails itself is a warning that names it.

    Args:
        tell: called with each line as soon as it is there.
    """
    lines = []
    for section, checks in sections.items():
        for check in checks:
            started = time.perf_counter()
            try:
                found = check(wanted)
            except Exception as error:
                name = check.__name__.replace("_", " ")
                found = [warning(name, f"this check failed: {reason_of(error)}", "Report it, with --bundle.")]
            seconds = time.perf_counter() - started
            for line in found:
                slow = f" (checked in {seconds:.0f} s)" if seconds > 10 else ""
                lines.append(replace(line, section=section, found=line.found + slow))
                tell(lines[-1])
    return lines
