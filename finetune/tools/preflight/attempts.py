"""What a dry run tries, one part after the other: a line each with go or no-go and seconds, and dry_run.json."""

import logging
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from finetune.callbacks.out_of_memory import is_out_of_memory, out_of_memory_message
from finetune.config.schema import RunConfig
from finetune.errors import UserError
from finetune.strategies.strategy import Strategy, engine_with
from finetune.tools.preflight import trial

log = logging.getLogger(__name__)

Found = tuple[str, dict[str, Any]]
"""What a part found: a line for the log, and values for dry_run.json."""


class Attempts:
    """What has been tried so far."""

    def __init__(self, config: RunConfig, strategy: Strategy):
        self.config, self.strategy = config, strategy
        self.accelerator: Accelerator | None = None
        """Set as soon as there is one."""
        self.found: list[dict[str, Any]] = []
        self.warnings: list[str] = []
        self.begun = time.perf_counter()

    @property
    def failed(self) -> list[str]:
        """Names of the parts that are no-go."""
        return [part["part"] for part in self.found if not part["go"]]

    def attempt(self, name: str, part: Callable[[], Found]) -> bool:
        """Try one part; return whether it is a go. An exception is its no-go.

        Raises:
            UserError: with several processes, for a no-go: the others may wait in the middle of the part.
        """
        started = time.perf_counter()
        go, values = True, {}
        try:
            line, values = part()
        except Exception as error:
            go, line = False, self._reason(error)
        seconds = time.perf_counter() - started
        self.found.append({"part": name, "go": go, "seconds": round(seconds, 2), "said": line, **values})
        (log.info if go else log.error)("%-6s  %-14s %5.1f s  %s", "go" if go else "NO-GO", name, seconds, line)
        if not go and self.accelerator is not None and self.accelerator.num_processes > 1:
            path = trial.result_path(self.config, "dry_run")
            if not path.exists():  # else another rank has written it, and this one failed since that one left
                self._write()
            rank = self.accelerator.process_index
            raise UserError(f"NO-GO: {name} on rank {rank}: {line}\nresult: {path}", exit_code=1)
        return go

    def warn(self, text: str) -> None:
        """Log what is no reason to stop."""
        self.warnings.append(text)
        log.warning("%s", text)

    def close(self) -> int:
        """Log the outcome and write the result; return the exit code."""
        if self.accelerator is None or self.accelerator.is_main_process:
            path, seconds = self._write(), time.perf_counter() - self.begun
            if self.failed:
                log.error("NO-GO after %.0f s: %s. See the lines above, and %s", seconds, ", ".join(self.failed), path)
            else:
                n = len(self.warnings)
                some = f", {n} warning{'s' if n > 1 else ''}" if n else ""
                parts = len(self.found)
                log.info("GO after %.0f s%s: all %d parts of the run work here. %s", seconds, some, parts, path)
        return 1 if self.failed else 0

    def _reason(self, error: Exception) -> str:
        """Return why a part is no-go: the user's message, or the error and where it came from."""
        if isinstance(error, UserError):
            return str(error).replace("\n", " ")
        if is_out_of_memory(error) and self.accelerator is not None:
            engine = engine_with(self.strategy.engine, self.accelerator.num_processes)
            return out_of_memory_message(error, self.config, self.accelerator.device.type == "cuda", engine)
        place = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {error} ({Path(place.filename).name}, line {place.lineno})"

    def _write(self) -> Path:
        result = {
            "verdict": "NO-GO" if self.failed else "GO",
            "no_go": self.failed,
            "warnings": self.warnings,
            "seconds": round(time.perf_counter() - self.begun, 1),
            "strategy": self.strategy.names,
            "parts": self.found,
        }
        return trial.write_result(self.config, "dry_run", result)
