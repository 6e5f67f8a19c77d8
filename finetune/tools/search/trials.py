"""One trial: a training process of its own, what its evaluations say while it runs, and why a bad one is bad."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from finetune.config.guard_limit import GuardLimit
from finetune.data.worker_lifetime import ends_with_this_process
from finetune.logs import without_secrets
from finetune.paths import ROOT
from finetune.security.safe_text import one_line
from finetune.tools.report.read import json_lines, number
from finetune.tools.search.space import Settings

TRAIN = (sys.executable, str(ROOT / "finetune" / "train.py"))
POLL_SECONDS = 0.5
OUT_OF_MEMORY, DIVERGED = "out of memory", "diverged"
MEMORY_WORDS = re.compile(r"out of memory|can't allocate memory|ALLOC_FAILED|_ALLOCATION_FAILED|MemoryError")
DIVERGED_WORDS = re.compile(r"not finite|diverge|steps in a row were skipped")
LOG_END = 20_000  # bytes
CONFIGURATION = 2
"""Exit code of a training whose configuration is refused."""
OVER_LIMIT = 1.0
"""What a state beyond data.guard_limit is worse by than any within it, as a WER."""
FAR_ABOVE = 1.5, 0.05
"""A model has diverged whose WER is above this factor times the base model's, and this on top."""
# A trial keeps what says how it went; of the best one the model stays as well.
LARGE = ("model.nemo", "report.html", "checkpoints", "adapter", "logs", "tokenizer", "out_of_memory")


@dataclass(frozen=True)
class Standing:
    """What an evaluation says of some weights, as fractions."""

    step: int
    wer: float
    guard: float | None = None
    excess: float | None = None
    """Guard WER above what data.guard_limit allows, 0 where it is kept; None without a limit or without both WERs."""

    @property
    def score(self) -> float:
        """What is minimised: the WER, of a state beyond the limit above that of any within it."""
        return self.wer if self.excess is None or self.excess <= 0 else OVER_LIMIT + self.wer + self.excess


@dataclass(frozen=True)
class Evaluations:
    """What a trial's evaluations.jsonl says so far."""

    base_wer: float | None
    base_guard: float | None
    standings: list[Standing]
    """Of trained weights, in the order of the file."""

    @property
    def best(self) -> Standing | None:
        return min(self.standings, key=lambda s: s.score, default=None)


def read_evaluations(folder: Path, limit: GuardLimit | None) -> Evaluations:
    """Read a run's evaluations of data.validation, and of its guard for choosing: `guard_choice`, else `guard`."""
    states: dict[tuple[int, str], dict[str, float]] = {}
    bounds: dict[tuple[int, str], float] = {}
    for row in json_lines(folder / "evaluations.jsonl"):
        step, wer = number(row.get("step")), number(row.get("wer"))
        if row.get("language") is None and row.get("model") != "best" and step is not None and wer is not None:
            key = int(step), str(row.get("weights", "raw"))
            states.setdefault(key, {})[str(row.get("split"))] = wer
            if (bound := number(row.get("wer_bound"))) is not None:
                bounds[key] = bound
    guard = "guard_choice" if any("guard_choice" in state for state in states.values()) else "guard"
    base = states.get((0, "raw"), {})
    found = []
    for (step, weights), state in states.items():
        if step and "validation" in state:
            excess = None
            if limit is not None and guard in state and guard in base:
                bound = bounds.get((step, weights), state[guard])
                excess = 0.0 if limit.keeps(bound, base[guard]) else bound - limit.highest(base[guard])
            if limit is None or excess is not None:  # without its guard WER a state is not judged yet
                found.append(Standing(step, state["validation"], state.get(guard), excess))
    return Evaluations(base.get("validation"), base.get(guard), found)


def has_diverged(wer: float, base_wer: float | None) -> bool:
    """Return whether a WER is so far above the base model's that the training destroyed the model."""
    return base_wer is not None and wer > FAR_ABOVE[0] * base_wer + FAR_ABOVE[1]


def setting_words(settings: Settings) -> list[str]:
    """Return settings as `key=value` words."""
    return [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in settings.items()]


def start_training(words: list[str], output: BinaryIO) -> subprocess.Popen[bytes]:
    """Start a training that ends with this process. A terminal's Ctrl-C comes to this process alone."""
    return subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env={k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")},
        start_new_session=True,
        preexec_fn=ends_with_this_process(),
    )


def run_training(words: list[str], log: Path, watch: Callable[[], bool]) -> tuple[int | None, float]:
    """Start a training; return its exit code, None where `watch` stopped it, and its seconds. It ends with this
    process, whatever ends that.

    Args:
        words: the command line.
        log: file for all that it prints.
        watch: asked all the while; true stops the training at once, without a checkpoint.
    """
    began = time.monotonic()
    with log.open("wb") as output:
        process = start_training(words, output)
        code = None
        try:
            while code is None and not watch():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = process.wait(POLL_SECONDS)
        finally:
            if code is None:  # SIGKILL: after SIGTERM it would write a checkpoint that nobody needs
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return code, time.monotonic() - began


def reason_of(code: int, log: Path) -> str:
    """Return why a training failed, in one line: `out of memory: ...`, `diverged: ...` or its own message."""
    text = without_secrets(_end_of(log))
    _, found, message = text.rpartition("error: ")
    lines = [one_line(line)[:300] for line in (message if found else text).splitlines() if line.strip()]
    said = lines[0 if found else -1] if lines else f"exit code {code}"
    if code == -signal.SIGKILL:
        return f"{OUT_OF_MEMORY}: killed by SIGKILL, as the system does where the host's memory runs out"
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    if MEMORY_WORDS.search(text):
        return ": ".join([OUT_OF_MEMORY, *(line for line in lines if MEMORY_WORDS.search(line))][:2])
    return f"{DIVERGED}: {said}" if found and DIVERGED_WORDS.search(message) else said


def _end_of(log: Path) -> str:
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(os.fstat(file.fileno()).st_size - LOG_END, 0))
        return file.read().decode("utf-8", errors="replace")
    return ""


def remove_large_files(folder: Path, keep: tuple[str, ...] = ()) -> None:
    """Remove what takes space in a trial's folder; its numbers, log lines and configuration stay."""
    for name in set(LARGE) - set(keep):
        shutil.rmtree(folder / name, ignore_errors=True)
        with contextlib.suppress(OSError):
            (folder / name).unlink()
