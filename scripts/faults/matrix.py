"""Break a small training in every way that a machine can, let it continue, and compare it with the unbroken one.

    python scripts/faults/matrix.py [--groups kill signals ...] [--kills 50] [--seed 0] [--json FILE] [--folder DIR]

The training is real, with all that is random switched on: dropout, SpecAugment, shuffling, the draw between TDT and
RNN-T, two data workers, evaluations, a moving average, asynchronous saving. Each fault hits a run of its own, which
the same command continues; weights, clips, losses, evaluations, summary and model.nemo have to be bit-equal to the
unbroken run's at the end (two ranks: within rounding).
Goal: no step lost that a checkpoint held, no damaged file taken for good. Ends with 1 where anything is not as
promised. Full and read-only disks need root for mounts, which only this process sees; without it they are left out,
and the table says so.
"""

import argparse
import atexit
import contextlib
import importlib
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import cases
import damage_cases as files
from disks import own_mounts
from runs import Laboratory, Process, Training, write_model

GROUPS = {
    "kill": cases.kill_cases,
    "signals": cases.signal_cases,
    "power": cases.power_cases,
    "full": files.disk_full_cases,
    "read_only": files.read_only_cases,
    "damage": files.damage_cases,
    "clock": cases.clock_cases,
    "second": cases.second_process_cases,
    "ranks": files.rank_cases,
}
IMPORTED = (
    "finetune.train",
    "finetune.export",
    "finetune.tools.preflight.auto_batch",
    "finetune.callbacks.profiler",
    "finetune.training.run",
)
NEED_MOUNTS = ("full", "read_only")
PACKAGES = ("torch", "nemo_toolkit", "accelerate", "safetensors")


def import_everything() -> None:
    """What a training imports, so that the processes forked from this one need not."""
    for name in IMPORTED:
        importlib.import_module(name)
    importlib.import_module("finetune.models.nemo").import_nemo()


def make_laboratory(folder: Path, seed: int) -> Laboratory:
    """Model, data and the unbroken run.

    Raises:
        RuntimeError: the training fails without any fault.
    """
    laboratory = Laboratory(folder, seed)
    if Process(lambda: 0 if write_model(folder) else 1, folder / "model.txt").wait():
        raise RuntimeError((folder / "model.txt").read_text(encoding="utf-8"))
    modules = folder / "modules.txt"

    def tell_modules(_: Any) -> None:
        atexit.register(lambda: modules.write_text("\n".join(list(sys.modules)), encoding="utf-8"))

    attempt = Training(laboratory, laboratory.unbroken, prepare=tell_modules).result()
    if attempt.code or not attempt.events:
        raise RuntimeError(f"the unbroken run ended with {attempt.code}: {attempt.said[-3000:]}")
    for name in modules.read_text(encoding="utf-8").split():  # what it imported on its way need not be imported again
        if name not in sys.modules:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    laboratory.unbroken_seconds = attempt.seconds
    laboratory.events = attempt.events
    return laboratory


def run_cases(
    laboratory: Laboratory, groups: list[str], kills: int, quick: bool, keep: bool, only: str = ""
) -> Iterator[dict[str, Any]]:
    """Does the cases of some groups one after the other; yields what came of each.

    Args:
        kills: number of tries with SIGKILL.
        quick: only the few that the fast tests take.
        keep: the runs of cases with problems stay.
        only: part of the fault's or the moment's name.
    """
    for group in groups:
        more = (kills,) if group == "kill" else ()
        for number, case in enumerate(GROUPS[group](laboratory, laboratory.events, *more)):
            if (quick and not case.quick) or only not in f"{case.fault}: {case.moment}":
                continue
            folder = laboratory.folder / f"{group}-{number:03d}"
            began = time.monotonic()
            try:
                trial = case.run(laboratory, folder)
            except Exception as error:  # the matrix goes on; a case that cannot be judged has failed
                trial = cases.Trial(problems=[f"{type(error).__name__}: {error}"])
            row = {"group": group, "fault": case.fault, "moment": case.moment, **asdict(trial)}
            row["wall_seconds"] = round(time.monotonic() - began, 1)
            if not (keep and trial.problems):
                remove(laboratory.folder, folder.name)
            yield row


def remove(folder: Path, name: str) -> None:
    """Removes a case's run and logs."""
    for path in [*folder.glob(f"{name}*"), *folder.glob("run.r*")]:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def summarise(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a fault: tries, attempts, lost steps, corrupt files, and how many were not as promised."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        total = found.setdefault(
            row["fault"],
            {
                "fault": row["fault"],
                "tries": 0,
                "processes": 0,
                "redone": 0,
                "lost": 0,
                "corrupt": 0,
                "failed": 0,
                "said": "",
            },
        )
        total["tries"] += 1
        total["processes"] += row["attempts"]
        for key in ("redone", "lost", "corrupt"):
            total[key] += row[key]
        total["failed"] += bool(row["problems"])
        total["said"] = total["said"] or row["said"]
        if row["seconds"] is not None:
            total["most_seconds"] = round(max(total.get("most_seconds", 0.0), row["seconds"]), 1)
    return list(found.values())


def table(rows: list[dict[str, Any]], skipped: dict[str, str]) -> str:
    """The summary as Markdown."""
    lines = [
        "| Fault | Tries | Processes | Steps redone | Steps lost | Corrupt taken | Not as promised |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    keys = ("fault", "tries", "processes", "redone", "lost", "corrupt", "failed")
    totals = {key: sum(row[key] for row in rows) for key in keys[1:]}
    for row in [*rows, {"fault": "**all**", **totals}]:
        lines.append("| " + " | ".join(str(row[key]) for key in keys) + " |")
    lines += [f"| {group}: left out, {reason} | | | | | | |" for group, reason in skipped.items()]
    return "\n".join(lines)


def about(argv: list[str], seconds: float) -> dict[str, Any]:
    """Command, date, machine and versions."""
    try:
        cpu = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        processor = next(line.split(":", 1)[1].strip() for line in cpu if line.startswith("model name"))
    except (OSError, StopIteration):
        processor = platform.machine()
    return {
        "command": " ".join(["python", f"scripts/{Path(sys.argv[0]).name}", *argv]),
        "date": str(date.today()),
        "machine": f"{processor}, {os.cpu_count()} core(s), one thread a process",
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in PACKAGES},
        "minutes": round(seconds / 60, 1),
    }


def main(argv: list[str] | None = None) -> int:
    """Runs the matrix; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="scripts/faults/matrix.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--groups", nargs="+", choices=GROUPS, default=list(GROUPS), help="kinds of faults (default: all)"
    )
    parser.add_argument("--kills", type=int, default=50, help="tries with SIGKILL (default: 50)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases whose description has this in it")
    parser.add_argument("--quick", action="store_true", help="a few of each group only")
    parser.add_argument("--seed", type=int, default=0, help="decides the moments (default: 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here, after each case anew")
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help="work here and keep runs that failed (default: a temporary folder)"
    )
    arguments = parser.parse_args(argv)
    words = sys.argv[1:] if argv is None else argv
    problem = own_mounts() if set(arguments.groups) & set(NEED_MOUNTS) else None
    skipped = {g: problem for g in arguments.groups if g in NEED_MOUNTS and problem}
    groups = [g for g in arguments.groups if g not in skipped]
    import_everything()
    began, rows = time.monotonic(), []
    # No TemporaryDirectory: a fork that ends would remove it.
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="faults-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        laboratory = make_laboratory(folder.resolve(), arguments.seed)
        print(f"unbroken: {laboratory.unbroken_seconds:.1f} s, {len(laboratory.events)} events", flush=True)
        keep = arguments.folder is not None
        for row in run_cases(laboratory, groups, arguments.kills, arguments.quick, keep, arguments.only):
            rows.append(row)
            verdict = "NOT AS PROMISED: " + "; ".join(row["problems"]) if row["problems"] else "equal"
            print(f"{row['wall_seconds']:6.1f} s  {row['fault']}, {row['moment']}: {verdict}", flush=True)
            if arguments.json:
                result = {
                    **about(words, time.monotonic() - began),
                    "seed": arguments.seed,
                    "skipped": skipped,
                    "summary": summarise(rows),
                    "tries": rows,
                }
                aside = arguments.json.with_name(f".{arguments.json.name}.tmp")
                aside.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
                os.replace(aside, arguments.json)
    finally:
        if arguments.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
    print("\n" + table(summarise(rows), skipped))
    return 1 if any(row["problems"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
