"""Break a training at random once a minute for an hour, restart it by the same command, and leave a twin alone.

    python scripts/faults/soak.py [--minutes 60] [--steps N] [--seed 0] [--folder DIR] [--json FILE]

The faults come from outside, to `python finetune/train.py` with the base model of examples/base: SIGKILL, SIGTERM,
SIGUSR1, SIGINT, SIGSTOP and SIGCONT, a flipped bit in the newest checkpoint, a disk that is full for a while (a small
one in memory, where mounts are allowed). Where the broken run is done before the time is over, another one begins. At
the end of each, weights, clips, losses, evaluations, summary and model.nemo are compared bit by bit. Memory and open
files of the process and its data workers are sampled every few seconds. Everything done is a line of DIR/soak.log; the
runs are removed only where all is well. Ends with 1 where anything is not. Every attempt imports the program anew, so
its files must not change meanwhile; that is checked.

Flat means here: over the second half of the longest attempt, which is the training left alone, the straight line
through the resident memory of the process rises by less than 3 % of its mean, and so for each data worker; the median
of its open files is in the last quarter no more than in the quarter before. (In the first hundreds of steps the C
allocator's arenas still grow with the lengths that come.) Over the attempts that were broken: the memory after the
same number of steps, as medians of their first and last third, differs by less than 5 %.
"""

import argparse
import contextlib
import hashlib
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from disks import damage, fill, own_mounts, small_disk
from matrix import about
from runs import ROOT, differences

KINDS = {
    "SIGKILL": 30,
    "SIGTERM": 12,
    "SIGUSR1": 8,
    "SIGINT": 8,
    "SIGSTOP and SIGCONT": 12,
    "SIGKILL, then a flipped bit": 18,
    "disk full for a while": 12,
}
"""Faults and their shares."""

SAMPLE_SECONDS = 5.0
USEFUL = 0.45
"""Share of the time in which a training broken once a minute advances; the rest is starting and repeated steps."""
CALIBRATION_STEPS = 40
DISK_MEBIBYTES = 600
LONGEST_GRACE = 120.0
JUDGED_FROM = 8.0
"""Minutes of a second half from which on memory is judged."""
RISE = 0.03
DRIFT = 0.05


def write_run_file(folder: Path, steps: int) -> Path:
    """The quickstart's training with all that is random switched on, two data workers, and saving every 20 steps."""
    quickstart = yaml.safe_load((ROOT / "finetune" / "configs" / "quickstart.yaml").read_text(encoding="utf-8"))
    run = {**quickstart, "model": {**quickstart["model"], "omega": 0.2, "spec_augment": True, "dropout": 0.1}}
    run["data"] = {**run["data"], "max_duration": 6.0, "max_eval_samples": 24}
    run["training"] |= {
        "max_steps": steps,
        "per_device_train_batch_size": 8,
        "ema_decay": 0.99,
        "eval_steps": 200,
        "save_steps": 20,
        "save_total_limit": 3,
        "log_clips": True,
        "resume_from_checkpoint": True,
        "dataloader_num_workers": 2,
        "num_threads": 1,
        "report_to": "none",
    }
    path = folder / "RUN.yaml"
    path.write_text(yaml.safe_dump(run), encoding="utf-8")
    return path


class Log:
    """Prints lines and keeps them in a file."""

    def __init__(self, path: Path):
        self.path, self.began = path, time.monotonic()

    def __call__(self, text: str) -> None:
        line = f"{(time.monotonic() - self.began) / 60:6.2f} min  {text}"
        print(line, flush=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


class Training:
    """One process of `python finetune/train.py`.

    Args:
        name: of the run, for logs and samples.
        number: of the attempt.
    """

    def __init__(self, name: str, number: int, run_file: Path, output_dir: Path, logs: Path):
        self.name, self.number, self.output_dir = name, number, output_dir
        self.said = logs / f"{name}-{number:03d}.txt"
        command = [sys.executable, str(ROOT / "finetune" / "train.py"), "--config", str(run_file)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        with self.said.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, f"training.output_dir={output_dir}"],
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                cwd=ROOT,
                env=environment,
            )
        self.began = time.monotonic()

    def text(self) -> str:
        """What it has written."""
        return self.said.read_text(encoding="utf-8", errors="replace")

    def trains(self) -> bool:
        """Whether it has come as far as its output directory."""
        return "strategy " in self.text()

    def resumed_from(self) -> int:
        """Step that it continued from."""
        found = re.search(r"resumed from step-(\d+)", self.text())
        return int(found.group(1)) if found else 0

    def samples(self) -> list[dict[str, Any]]:
        """Memory and open files of the process and its workers now."""
        rows = []
        with contextlib.suppress(psutil.Error):
            own = psutil.Process(self.process.pid)
            workers = sorted(own.children(), key=lambda p: p.pid)
            for role, process in [("process", own), *((f"worker {i}", p) for i, p in enumerate(workers))]:
                with contextlib.suppress(psutil.Error):
                    rows.append(
                        {
                            "run": self.name,
                            "attempt": self.number,
                            "age": round(time.monotonic() - self.began, 1),
                            "step": last_step(self.output_dir),
                            "role": role,
                            "rss_mib": round(process.memory_info().rss / 2**20, 1),
                            "open_files": process.num_fds(),
                        }
                    )
        return rows

    def end(self) -> None:
        """Kills it, if it is still there."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def last_step(output_dir: Path) -> int:
    """The step of the last whole line of metrics.jsonl."""
    try:
        lines = (output_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    for line in reversed(lines[-2:]):
        with contextlib.suppress(ValueError, KeyError):
            return json.loads(line)["step"]
    return 0


def checkpoints_of(output_dir: Path) -> list[Path]:
    """Finished checkpoints, oldest first."""
    return sorted((output_dir / "checkpoints").glob("step-*"))


class Soak:
    """The broken run, the one left alone, and what is known of both.

    Args:
        folder: for logs and runs.
        disk: small disk of the broken run; None: it lies in the folder, and the disk is never full.
    """

    def __init__(self, folder: Path, disk: Path | None, steps: int, minutes: float, seed: int):
        self.folder, self.disk, self.steps, self.minutes = folder, disk, steps, minutes
        self.draw, self.log = random.Random(seed), Log(folder / "soak.log")
        self.run_file = write_run_file(folder, steps)
        self.output_dir = (disk or folder) / "broken"
        self.alone = Training("alone", 0, self.run_file, folder / "alone", folder)
        self.sampled: list[dict[str, Any]] = []
        self.attempts: list[dict[str, Any]] = []
        self.problems: list[str] = []
        self.different: list[str] = []
        self.rounds, self.expected, self.flipped = 0, 0, ""
        self.next_sample = 0.0

    def wait(self, seconds: float, training: Training | None) -> bool:
        """Lets time pass and samples; returns early, with True, where the training ends."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if training is not None and training.process.poll() is not None:
                return True
            if time.monotonic() >= self.next_sample:
                self.next_sample = time.monotonic() + SAMPLE_SECONDS
                running = [t for t in (self.alone, training) if t is not None and t.process.poll() is None]
                rows = [row for t in running for row in t.samples()]
                self.sampled += rows
                with (self.folder / "samples.jsonl").open("a", encoding="utf-8") as file:
                    file.writelines(json.dumps(row) + "\n" for row in rows)
            time.sleep(0.05)
        return False

    def run(self) -> None:
        """Breaks the run until it is done all the same, compares it, and begins anew until the time is over."""
        limit = time.monotonic() + 3 * 60 * self.minutes + 3600
        while self.rounds == 0 or not self._over():
            self.rounds, self.expected, self.flipped = self.rounds + 1, 0, ""
            shutil.rmtree(self.output_dir, ignore_errors=True)
            if not self._one_run(limit):
                self.problems.append("the broken run did not come to its end")
                return
            while self.alone.process.poll() is None and time.monotonic() < limit:
                self.wait(5, self.alone)
            if self.alone.process.poll() != 0:
                self.problems.append(f"the training left alone: exit code {self.alone.process.poll()}")
            found = differences(self.alone.output_dir, self.output_dir, steps=self.steps)
            self.different += [f"run {self.rounds}: {what}" for what in found]
            self.log(f"run {self.rounds} is done: {'; '.join(found) or 'equal to the training left alone'}")
            if found:
                return

    def _over(self) -> bool:
        return time.monotonic() - self.log.began > 60 * self.minutes

    def _one_run(self, limit: float) -> bool:
        """Attempts until the run is done; returns whether it is."""
        while time.monotonic() < limit:
            training = Training("broken", len(self.attempts), self.run_file, self.output_dir, self.folder)
            faults = [] if self._over() else self.break_it(training)
            while not self.wait(60, training) and time.monotonic() < limit:
                pass
            training.end()
            if self.judge(training, faults):
                return True
            if sum(a["failed"] for a in self.attempts[-3:]) == 3:
                self.problems.append("three attempts in a row failed")
                return False
        return False

    def break_it(self, training: Training) -> list[str]:
        """Let a training run for a while, break it, and again where that did not end it; return how."""
        if self.wait(self.draw.uniform(20, 100), training):
            return []
        kinds = [k for k in KINDS if self.disk is not None or not k.startswith("disk")]
        fault = self.draw.choices(kinds, [KINDS[k] for k in kinds])[0]
        process, phase = training.process, "training" if training.trains() else "starting"
        self.log(f"attempt {training.number}, step {last_step(self.output_dir)}, {phase}: {fault}")
        if fault == "SIGSTOP and SIGCONT":
            process.send_signal(signal.SIGSTOP)
            self.wait(self.draw.uniform(2, 15), None)
            process.send_signal(signal.SIGCONT)
            return [fault, *self.break_it(training)]
        if fault == "disk full for a while":
            filler = self.disk / "filler"
            fill(filler)
            ended = self.wait(self.draw.uniform(5, 30), training)
            filler.unlink()
            return [fault] if ended else [fault, *self.break_it(training)]
        if fault.startswith("SIGKILL"):
            process.kill()
            process.wait()
            if fault.endswith("bit"):
                self.flip()
            return [fault]
        process.send_signal(getattr(signal, fault))
        if not self.wait(LONGEST_GRACE, training):
            self.problems.append(f"attempt {training.number}: {fault} had not ended it after {LONGEST_GRACE:.0f} s")
            training.end()
        return [f"{fault} while {phase}"]

    def flip(self) -> None:
        """Flips a bit in a file of the newest checkpoint, where there is one before it to fall back on."""
        found = [p for p in checkpoints_of(self.output_dir) if p.is_dir()]
        if len(found) < 2:
            self.log("  no second checkpoint: nothing flipped")
            return
        files = sorted(p for p in found[-1].rglob("*") if p.is_file())
        chosen = self.draw.choice(files)
        damage(chosen, "one bit flipped", self.draw.randrange(2**31))
        self.flipped = f"{found[-1].name}/{chosen.name}"
        self.log(f"  flipped a bit of {self.flipped}")

    def judge(self, training: Training, faults: list[str]) -> bool:
        """Looks at an attempt that has ended; returns whether the run is done."""
        code, said = training.process.wait(), training.text()
        resumed, kept = training.resumed_from(), checkpoints_of(self.output_dir)
        newest = int(kept[-1].name[5:]) if kept else 0
        problems = []
        if training.trains() and resumed < self.expected:
            problems.append(f"resumed from step {resumed}, a whole checkpoint was of step {self.expected}")
        fault = faults[-1] if faults else "none"
        allowed = {0}
        if fault.startswith("SIGKILL"):
            allowed = {-signal.SIGKILL}
        elif fault.endswith("while training"):
            allowed = {0, 75}
        elif fault.endswith("while starting"):  # perhaps before the program listens
            allowed = {0, 75, 1, -signal.SIGTERM, -signal.SIGUSR1, -signal.SIGINT}
        elif fault.startswith("disk full"):
            allowed = {0, 1}
        if code not in allowed:
            problems.append(f"exit code {code}: {(said.strip().splitlines() or [''])[-1][:300]}")
        if training.trains() and "Traceback" in said and code != -signal.SIGKILL:
            problems.append("a traceback")
        self.attempts.append(
            {
                "faults": faults,
                "code": code,
                "seconds": round(time.monotonic() - training.began, 1),
                "resumed_from": resumed,
                "newest_checkpoint": newest,
                "damage_said": "damaged" in said,
                "failed": bool(problems),
            }
        )
        self.log(
            f"attempt {training.number} ended with {code}: steps {resumed} to {last_step(self.output_dir)}, "
            f"checkpoint {newest}"
        )
        self.problems += [f"attempt {training.number} ({', '.join(faults) or 'none'}): {p}" for p in problems]
        if self.flipped and "flipped" not in fault and training.trains():
            if f"{self.flipped.split('/')[0]} is damaged" not in said:
                self.problems.append(f"attempt {training.number}: the damaged {self.flipped} is not said")
            self.flipped = ""
        before = int(kept[-2].name[5:]) if len(kept) > 1 else 0
        self.expected = before if self.flipped else newest
        return code == 0


def steps_that_fill(minutes: float, folder: Path) -> int:
    """Return the steps of a training of some minutes, broken beside another one, from two short ones side by side."""
    run_file = write_run_file(folder, CALIBRATION_STEPS)
    both = [Training("pace", i, run_file, folder / f"pace-{i}", folder) for i in (0, 1)]
    for training in both:
        if training.process.wait():
            raise RuntimeError(f"the training fails without any fault: {training.text()[-2000:]}")
    summaries = [json.loads((t.output_dir / "summary.json").read_text(encoding="utf-8")) for t in both]
    pace = max(s["train_seconds"] / s["steps"] for s in summaries)
    for training in both:
        shutil.rmtree(training.output_dir)
    return max(100, round(60 * minutes * USEFUL / pace))


def hash_of_program() -> str:
    """Of the files that a training imports from here."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "finetune").rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


# ---- memory and open files ------------------------------------------------------------------------------------------


def slope(points: list[tuple[float, float]]) -> float:
    """Of the least-squares line."""
    xs, ys = [p[0] for p in points], [p[1] for p in points]
    return statistics.linear_regression(xs, ys).slope if len(set(xs)) > 1 else 0.0


def growth(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Memory and open files over the second half of the training left alone, for each process of it."""
    found = {}
    for role in sorted({s["role"] for s in samples}):
        # One without memory is just ending, as the reader of each evaluation does.
        rows = [s for s in samples if s["run"] == "alone" and s["role"] == role and s["rss_mib"] > 0]
        late = [s for s in rows if s["age"] > rows[-1]["age"] / 2]
        if len(late) < 10:
            continue
        mean, hours = statistics.fmean(s["rss_mib"] for s in late), (late[-1]["age"] - late[0]["age"]) / 3600
        files = [
            statistics.median_high(s["open_files"] for s in part)
            for part in (late[: len(late) // 2], late[len(late) // 2 :])
        ]
        rise = slope([(s["age"] / 3600, s["rss_mib"]) for s in late])
        found[role] = {
            "samples": len(late),
            "minutes": round(60 * hours, 1),
            "mean_rss_mib": round(mean, 1),
            "slope_mib_per_hour": round(rise, 1),
            "rise_fraction": round(rise * hours / mean, 4),
            "open_files_first_quarter": files[0],
            "open_files_last_quarter": files[1],
            "flat": None if 60 * hours < JUDGED_FROM else rise * hours / mean < RISE and files[1] <= files[0],
        }
    return found


def drift(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Memory of the broken run's main process after the same number of steps, in its first and in its last attempts.

    Not at the same age: a machine with other work is not equally fast all the time.
    """
    begun: dict[int, int] = {}
    own = [s for s in samples if s["run"] == "broken" and s["role"] == "process"]
    for s in own:
        begun[s["attempt"]] = min(s["step"], begun.get(s["attempt"], s["step"]))
    after = {s["attempt"]: s for s in own if 20 <= s["step"] - begun[s["attempt"]] <= 60}
    rows = [after[a] for a in sorted(after)]
    third = len(rows) // 3
    if third < 2:
        return {"attempts": len(rows)}
    early, late = (statistics.median(s["rss_mib"] for s in part) for part in (rows[:third], rows[-third:]))
    files = [max(s["open_files"] for s in part) for part in (rows[:third], rows[-third:])]
    return {
        "attempts": len(rows),
        "after_steps": "20 to 60",
        "first_third_mib": round(early, 1),
        "last_third_mib": round(late, 1),
        "most_open_files": files,
        "flat": abs(late - early) < DRIFT * early,
    }


def main(argv: list[str] | None = None) -> int:
    """Runs the soak; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="scripts/faults/soak.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="how long faults are injected (default: 60)")
    parser.add_argument(
        "--steps", type=int, help="of the training (default: as many as fill the minutes; this is measured first)"
    )
    parser.add_argument("--seed", type=int, default=0, help="decides faults and moments (default: 0)")
    parser.add_argument("--folder", type=Path, help="for logs and runs (default: a temporary one, kept on failure)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    arguments = parser.parse_args(argv)
    words = sys.argv[1:] if argv is None else argv
    no_mounts = own_mounts()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    folder = folder.resolve()
    began, program = time.monotonic(), hash_of_program()
    steps = arguments.steps or steps_that_fill(arguments.minutes, folder)
    with contextlib.ExitStack() as stack:
        disk = None if no_mounts else stack.enter_context(small_disk(folder / "disk", DISK_MEBIBYTES))
        soak = Soak(folder, disk, steps, arguments.minutes, arguments.seed)
        stack.callback(soak.alone.end)
        soak.log(f"{steps} steps; logs in {folder}" + (f"; no full disks: {no_mounts}" if no_mounts else ""))
        soak.run()
        soak.problems += [f"differs from the training left alone: {what}" for what in soak.different]
        if soak.problems and disk is not None and soak.output_dir.is_dir():
            shutil.copytree(soak.output_dir, folder / "broken-kept", dirs_exist_ok=True)
    if hash_of_program() != program:
        soak.problems.append("the program's files were changed meanwhile")
    memory, over_attempts = growth(soak.sampled), drift(soak.sampled)
    soak.problems += [f"memory or open files of {role} rise" for role, row in memory.items() if row["flat"] is False]
    if not over_attempts.get("flat", True):
        soak.problems.append("memory differs between the first and the last attempts")
    done = [fault for attempt in soak.attempts for fault in attempt["faults"]]
    faults = {
        kind: sum(fault.removesuffix(" while starting").removesuffix(" while training") == kind for fault in done)
        for kind in KINDS
    }
    result = {
        **about(words, time.monotonic() - began),
        "steps": steps,
        "faults": faults,
        "attempts": len(soak.attempts),
        "runs": soak.rounds,
        "equal": not soak.different,
        "different": soak.different,
        "damage_said": sum(a["damage_said"] for a in soak.attempts),
        "memory_of_the_training_left_alone": memory,
        "memory_over_the_attempts": over_attempts,
        "problems": soak.problems,
        "each_attempt": soak.attempts,
    }
    for path in filter(None, (arguments.json, folder / "result.json")):
        path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(json.dumps({k: v for k, v in result.items() if k != "each_attempt"}, indent=1, ensure_ascii=False))
    if not soak.problems:
        for path in (folder / "alone", folder / "broken", folder / "broken-kept"):
            shutil.rmtree(path, ignore_errors=True)
        if arguments.folder is None:
            shutil.rmtree(folder)
    return 1 if soak.problems else 0


if __name__ == "__main__":
    sys.exit(main())
