"""The files that a run leaves in training.output_dir."""

import contextlib
import itertools
import json
import logging
import os
import platform
import resource
import shutil
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch

from finetune.durable_files import sha256_of, sync_directory, sync_file, write_text
from finetune.paths import ROOT
from finetune.security.safe_text import json_line

log = logging.getLogger(__name__)

VERSIONS = (
    "torch",
    "torchaudio",
    "nemo_toolkit",
    "transformers",
    "accelerate",
    "datasets",
    "bitsandbytes",
    "deepspeed",
    "numpy",
    "numba",
    "soundfile",
    "jiwer",
)

WAY = "way "
"""Begins the names of weights between the base model's and the trained ones."""

LAUNCHERS = ("accelerate", "deepspeed", "torchrun")


def is_final(weights: str) -> bool:
    """Return whether weights of this name are a candidate of the end of a run only."""
    return weights == "average" or weights.startswith(WAY)


def read_best(output_dir: Path) -> dict[str, Any] | None:
    """Return step, validation WER and kind of weights (raw, ema, average, way 0.5) of the model.nemo that lies there;
    None where there is none."""
    path = output_dir / "checkpoints" / "best.json"
    if not path.is_file() or not (output_dir / "model.nemo").is_file():
        return None
    return {"weights": "raw", **json.loads(path.read_text(encoding="utf-8"))}


def check_best(output_dir: Path) -> tuple[dict[str, Any] | None, bool]:
    """Return what `read_best` says of the model.nemo that really lies there, and whether that file is damaged.

    A run that dies while it replaces model.nemo leaves the one before, of which best.json knows as well.
    """
    best = read_best(output_dir)
    if best is None:
        return None, False
    found, entries = sha256_of(output_dir / "model.nemo"), (best, best.get("previous") or {})
    match = next((entry for entry in entries if entry.get("sha256") == found), None)
    return match, match is None


def remove_run(path: Path) -> None:
    """Remove what a run leaves, and nothing else that may lie in its directory."""
    for name in ("checkpoints", "adapter", "logs", "profile", "out_of_memory", "tokenizer"):
        shutil.rmtree(path / name, ignore_errors=True)
    for name in (
        "config.yaml",
        "environment.json",
        "metrics.jsonl",
        "evaluations.jsonl",
        "quarantine.jsonl",
        "clips.jsonl",
        "skipped_steps.jsonl",
        "model.nemo",
        "summary.json",
        "report.html",
        "batch_limits.json",
        "plan.json",
        *(f"errors-{split}.json" for split in ("validation", "test", "guard", "guard_choice")),
        "guard.svg",
    ):
        (path / name).unlink(missing_ok=True)


class LineFile:
    """A JSON-lines file that is appended to and can be cut back on resume."""

    def __init__(self, path: Path):
        self.path = path
        self.waiting: list[str] = []
        """Lines that the disk did not take yet."""
        self.named = False
        """Whether the file's name was pushed to the disk."""

    def append(self, *rows: dict[str, Any]) -> None:
        """Add lines. What a full or broken disk does not take waits, which is said, and is tried again with the next
        lines."""
        before = len(self.waiting)
        self.waiting += [json_line(row, default=float) + "\n" for row in rows]
        size = None
        try:
            with self.path.open("ab") as file:
                size = file.tell()
                file.write("".join(self.waiting).encode("utf-8", errors="backslashreplace"))
        except OSError as error:
            if size is not None:
                with contextlib.suppress(OSError):
                    os.truncate(self.path, size)  # no half lines
            if not before:
                log.warning("%s cannot be written (%s): its lines wait in memory until it can", self.path, error)
            return
        if before:
            log.info("%s can be written again: %d lines that waited are in it", self.path, before)
        self.waiting = []

    def sync(self) -> bool:
        """Push the lines to the disk; whether all of them are there."""
        if self.waiting:
            self.append()
        try:
            sync_file(self.path)
            if not self.named:
                sync_directory(self.path.parent)
            self.named = True
        except FileNotFoundError:
            return not self.waiting
        except OSError:
            return False
        return not self.waiting

    def _lines(self) -> Iterator[str]:
        if self.path.is_file():
            with self.path.open(encoding="utf-8", errors="replace") as file:
                yield from file

    def pairs(self, first: str, second: str, lines: int) -> set[tuple[str, str]]:
        """Return two keys of each of the first `lines` lines."""
        found = set()
        for line in itertools.islice(self._lines(), lines):
            with contextlib.suppress(ValueError, KeyError):  # a line that was cut off when the machine died
                row = json.loads(line)
                found.add((row[first], row[second]))
        return found

    def cut(self, lines: int) -> None:
        """Keep the first `lines` whole lines."""
        write_text(self.path, "".join(itertools.islice(self._lines(), lines)))

    def cut_after_step(self, step: int) -> None:
        """Keep the rows up to a step, without the closing ones of a finished run."""

        def belongs(line: str) -> bool:
            try:
                row = json.loads(line)
                closing = row.get("model") == "best" or is_final(row.get("weights", "raw"))
                return row["step"] <= step and not closing
            except (ValueError, KeyError):  # a line that was cut off when the run died
                return False

        write_text(self.path, "".join(itertools.takewhile(belongs, self._lines())))


def environment(seed: int) -> dict[str, Any]:
    """Return versions, devices, git revision, seed and command line."""
    versions = {}
    for name in VERSIONS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None

    def git(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)

    revision, changed = None, False
    with contextlib.suppress(OSError):  # no git on this machine
        revision = git("rev-parse", "HEAD").stdout.strip() or None
        changed = revision is not None and git("diff", "--quiet", "HEAD").returncode == 1
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "gpus": devices,
        "versions": versions,
        "git_revision": revision,
        "git_changes": changed,
        "seed": seed,
        "command": command_line(),
    }


def command_line() -> list[str]:
    """Return the words that started this run: its launcher's, where train.py has one, or else this process's own."""
    own = psutil.Process()
    found = own.cmdline()
    for parent in own.parents()[:6]:
        try:
            words = parent.cmdline()
        except psutil.Error:  # another user's process
            break
        if any(Path(word).name == "train.py" for word in words):
            found = words
    # A launcher that is a script: `python /path/to/torchrun`.
    if len(found) > 1 and Path(found[1]).name in LAUNCHERS:
        found = found[1:]
    return [Path(found[0]).name, *found[1:]] if found else []


def rss_gib() -> float:
    """Return the resident memory of this process now, GiB."""
    return psutil.Process().memory_info().rss / 2**30


def peak_rss_gib() -> float:
    """Return the largest resident memory of this process so far, GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def peak_memory_gib() -> float:
    """Return the peak of the CUDA allocator; on a machine without a GPU the peak resident memory. GiB."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return peak_rss_gib()
