"""The faults, in groups: SIGKILL, signals, power cuts, clocks, a second process.

Disks, damaged files and ranks: damage_cases.py.

Each case does its fault to a run of its own, starts the same command until the run is done, and compares it with the
unbroken one.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from injection import Events, Moment, kill, read_events, send, shift_clock
from power import LOSSES, SyncedState, cut_power
from runs import LONGEST_ATTEMPT, ROOT, Attempt, Laboratory, Process, Training, differences, steps_reached

MOST_ATTEMPTS = 4
GRACE = 30.0
"""Seconds from a signal to the end of the process."""


@dataclass
class Trial:
    """What came of one fault.

    Attributes:
        attempts: processes until the run was done, the one with the fault among them.
        lost: steps that a checkpoint held and that were computed again all the same.
        redone: steps that were computed again because no checkpoint held them.
        corrupt: damaged files that were taken for good.
        said: the line with which the program names the fault.
        seconds: from a signal to the end of the process, where one was sent.
        problems: everything that is not as promised.
    """

    attempts: int = 1
    lost: int = 0
    redone: int = 0
    corrupt: int = 0
    said: str = ""
    seconds: float | None = None
    problems: list[str] = field(default_factory=list)


@dataclass
class Case:
    """A fault at a moment.

    Attributes:
        fault: row of the table.
        moment: which moment, in words.
        run: does it, in a directory of its own.
        quick: one of the few that the fast tests take.
    """

    fault: str
    moment: str
    run: Callable[[Laboratory, Path], Trial]
    quick: bool = False


def line_with(attempt: Attempt, *words: str) -> str:
    """The first line of an attempt's output with one of some words, without its time."""
    for line in attempt.said.splitlines():
        if any(word in line for word in words):
            return line[9:] if line[2:3] == ":" and line[5:6] == ":" else line
    return ""


def last_line(attempt: Attempt) -> str:
    """The last line of an attempt's output."""
    return (attempt.said.strip().splitlines() or ["nothing"])[-1]


def check_end(trial: Trial, attempt: Attempt, codes: tuple[int, ...]) -> None:
    """Notes an exit code that should not be, a traceback, and processes left behind."""
    if attempt.code not in codes:
        trial.problems.append(f"exit code {attempt.code}, not one of {codes}: {last_line(attempt)[:200]}")
    if "Traceback" in attempt.said and attempt.code != -signal.SIGKILL:  # a worker may mourn its parent
        trial.problems.append(f"a traceback: {last_line(attempt)[:200]}")
    if attempt.orphans:
        trial.problems.append(f"{attempt.orphans} processes stayed behind")


def go_on(
    laboratory: Laboratory, run: Path, trial: Trial, broken: Attempt, checkpoint: int, compare: bool = True
) -> Attempt:
    """Starts the same command until the run is done, and compares it with the unbroken one.

    Args:
        broken: the attempt with the fault.
        checkpoint: step of the newest checkpoint that has to count.
    """
    attempt = broken
    for _ in range(MOST_ATTEMPTS):
        before, attempt = attempt, Training(laboratory, run).result()
        trial.attempts += 1
        trial.lost += max(0, checkpoint - attempt.resumed_from)
        trial.redone += max(0, before.last_step - max(attempt.resumed_from, checkpoint))
        checkpoint = attempt.last_checkpoint
        if attempt.code == 0:
            break
    check_end(trial, attempt, (0,))
    if trial.lost:
        trial.problems.append(f"{trial.lost} steps that a checkpoint held were lost")
    if compare:
        found = differences(laboratory.unbroken, run)
        trial.corrupt += len(found)
        trial.problems += found
    return attempt


# ---- SIGKILL --------------------------------------------------------------------------------------------------------

KILL_PLACES = {
    # place: (events, share of the tries in percent)
    "forward": ("forward", 10),
    "backward": ("backward", 10),
    "optimizer step": ("step:*", 10),
    "evaluation": ("evaluation", 8),
    "writing a checkpoint": ("*checkpoints/.step-*", 22),
    "naming a checkpoint, removing old ones": ("*:checkpoints/step-*|fsync*:checkpoints|*.old.tmp|*.gone.tmp", 8),
    "writing model.nemo": ("*model.nemo*|*best.json*", 8),
    "writing report.html": ("*report.html*", 4),
    "writing summary.json": ("*summary.json*", 4),
    "writing logs": ("*.jsonl*|*errors-*|*base-*|*config.yaml*|*environment.json*", 6),
}
"""The rest of the tries: `python finetune/train.py` killed from outside by a timer, and the export."""


def matching(events: list[tuple[float, int, str]], patterns: str) -> list[tuple[str, int, int]]:
    """Events by patterns separated by "|": name, count of its kind, step."""
    counts: dict[str, int] = {}
    found = []
    for _, step, name in events:
        counts[name] = counts.get(name, 0) + 1
        if any(fnmatchcase(name, pattern) for pattern in patterns.split("|")):
            found.append((name, counts[name], step))
    return found


def kill_cases(laboratory: Laboratory, events: list[tuple[float, int, str]], number: int) -> Iterator[Case]:
    """SIGKILL at random moments, by place."""
    draw = random.Random(f"{laboratory.seed} kill")
    for place, (patterns, share) in KILL_PLACES.items():
        moments = matching(events, patterns)
        for _ in range(max(1, round(number * share / 100)) if moments else 0):
            name, count, step = draw.choice(moments)
            delay = draw.choice((0.0, draw.uniform(0.0, 0.02)))
            moment = Moment(name, count, delay)
            yield Case(f"SIGKILL: {place}", _words(moment, step), _killed(moment), place.startswith("naming"))
    for _ in range(max(1, round(number * 0.04))):
        share = draw.uniform(0.3, 1.0)
        yield Case(
            "SIGKILL: by a timer, python finetune/train.py",
            f"after {share:.0%} of its time, or less",
            _killed_command(share),
        )
    for kind in ("nemo", "hf"):
        for _ in range(max(1, round(number * 0.03))):
            yield Case(f"SIGKILL: export to {kind}", "at a random file event", _killed_export(kind, draw.random()))


def _words(moment: Moment, step: int) -> str:
    delay = f", {1000 * moment.delay:.1f} ms later" if moment.delay else ""
    return f"step {step}, {moment.pattern} no. {moment.count}{delay}"


def _killed(moment: Moment) -> Callable[[Laboratory, Path], Trial]:
    def run(laboratory: Laboratory, folder: Path) -> Trial:
        trial = Trial()
        attempt = Training(laboratory, folder, [(moment, kill)]).result()
        # With a delay it may be done before.
        check_end(trial, attempt, (-signal.SIGKILL, 0) if moment.delay else (-signal.SIGKILL,))
        go_on(laboratory, folder, trial, attempt, attempt.last_checkpoint)
        return trial

    return run


def _killed_command(share: float) -> Callable[[Laboratory, Path], Trial]:
    """Kill the real command by a timer; where it was done sooner, once more with a shorter one."""

    def run(laboratory: Laboratory, folder: Path) -> Trial:
        trial, said = Trial(), folder.with_suffix(".txt")
        command = [sys.executable, str(ROOT / "finetune" / "train.py"), *laboratory.arguments(folder)]
        seconds = share * laboratory.unbroken_seconds
        for _ in range(MOST_ATTEMPTS):
            shutil.rmtree(folder, ignore_errors=True)
            with said.open("wb") as output:
                process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True, cwd=ROOT)
            deadline = time.monotonic() + LONGEST_ATTEMPT
            while process.poll() is None and not (folder / "config.yaml").is_file() and time.monotonic() < deadline:
                time.sleep(0.02)
            time.sleep(seconds)
            process.kill()
            if process.wait() == -signal.SIGKILL:
                break
            seconds *= 0.6
        else:
            trial.problems.append("it was done each time before it could be killed")
        checkpoint = max((int(p.name[5:]) for p in (folder / "checkpoints").glob("step-*")), default=0)
        clips = folder / "clips.jsonl"
        steps = len(clips.read_bytes().splitlines()) if clips.is_file() else 0
        trial.said = f"killed after {steps} steps"
        go_on(laboratory, folder, trial, Attempt(-signal.SIGKILL, "", [(0.0, steps, "")], 0.0, 0), checkpoint)
        return trial

    return run


def _killed_export(kind: str, share: float) -> Callable[[Laboratory, Path], Trial]:
    def run(laboratory: Laboratory, folder: Path) -> Trial:
        trial = Trial()

        def export(place: Path, plans: list[Any]) -> int:
            place.mkdir(exist_ok=True)

            def work() -> int:
                from finetune import export

                Events(place, place.with_suffix(".events"), plans).watch_files()
                return export.main(["--model", str(laboratory.unbroken), "--to", kind, "--output", str(place / "out")])

            return Process(work, place.with_suffix(".txt")).wait()

        clean = folder.with_name(f"{folder.name}-clean")
        if export(clean, []) != 0:
            trial.problems.append(f"the unbroken export fails: {clean.with_suffix('.txt').read_text()[-300:]}")
            return trial
        moments = matching(read_events(clean.with_suffix(".events")), "*")
        name, count, _ = moments[int(share * len(moments))]
        trial.said = f"killed at {name} no. {count}"
        if export(folder, [(Moment(name, count), kill)]) != -signal.SIGKILL:
            trial.problems.append(f"it was not killed at {name}")
        half = differing_files(clean / "out", folder / "out", only_present=True)
        trial.corrupt += len(half)
        trial.problems += [f"{file} looks whole and is not" for file in half]
        if differing_files(clean / "out", folder / "out"):  # a directory that is whole is rightly not written again
            trial.attempts += 1
            if export(folder, []) != 0:
                trial.problems.append(f"the second export fails: {folder.with_suffix('.txt').read_text()[-300:]}")
            found = differing_files(clean / "out", folder / "out")
            trial.problems += [f"{file} differs after the second export" for file in found]
        return trial

    return run


def differing_files(one: Path, other: Path, only_present: bool = False) -> list[str]:
    """Files of a folder that another lacks or has with other contents; archives are compared by what they hold.

    Args:
        only_present: a file that is missing is no difference; hidden files never are.
    """
    from runs import _equal, nemo_weights

    found = []
    for path in sorted(one.rglob("*")):
        name = path.relative_to(one)
        twin = other / name
        if not path.is_file() or name.name.startswith(".") or (only_present and not twin.exists()):
            continue
        try:
            if path.suffix == ".nemo":
                equal = _equal(nemo_weights(path), nemo_weights(twin), 0.0)
            else:
                equal = twin.is_file() and path.read_bytes() == twin.read_bytes()
        except Exception:
            equal = False
        if not equal:
            found.append(str(name))
    return found


# ---- SIGTERM, SIGINT, SIGUSR1 ---------------------------------------------------------------------------------------

SIGNAL_PLACES = {
    "forward": "forward",
    "backward": "backward",
    "evaluation": "evaluation",
    "writing a checkpoint": "fsync:checkpoints/.step-*",
    "writing model.nemo": "open:.model.nemo*",
}


def signal_cases(laboratory: Laboratory, events: list[tuple[float, int, str]]) -> Iterator[Case]:
    """Stopped politely: exit code 75 within the grace period, and a checkpoint of the present step."""
    draw = random.Random(f"{laboratory.seed} signals")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        for place, patterns in SIGNAL_PLACES.items():
            name, count, step = draw.choice([m for m in matching(events, patterns) if m[2] > 0])
            moment = Moment(name, count)
            quick = place == "evaluation" and number == signal.SIGTERM
            yield Case(f"{number.name}: {place}", _words(moment, step), _stopped(moment, number), quick)
        yield Case(
            f"{number.name}: before the first step",
            "while the base model is evaluated",
            _stopped(Moment("evaluation"), number),
        )
    name, count, step = draw.choice(matching(events, "forward"))
    moment = Moment(name, count)
    yield Case("SIGTERM to the whole group", _words(moment, step), _stopped(moment, signal.SIGTERM, group=True))
    yield Case("SIGINT twice", _words(moment, step), _interrupted_twice(moment))


def _stopped(moment: Moment, number: signal.Signals, group: bool = False) -> Callable[[Laboratory, Path], Trial]:
    def run(laboratory: Laboratory, folder: Path) -> Trial:
        trial, sent = Trial(), folder.with_suffix(".sent")

        def stop() -> None:
            sent.write_text(str(time.monotonic()))
            if group:
                os.killpg(os.getpid(), number)
            else:
                os.kill(os.getpid(), number)

        attempt = Training(laboratory, folder, [(moment, stop)]).result()
        ended = time.monotonic()
        trial.said = line_with(attempt, "SIG", "stopped", "stop")
        if not sent.is_file():
            trial.problems.append("the signal was not sent")
        else:
            trial.seconds = ended - float(sent.read_text())
            sent.unlink()
            if trial.seconds > GRACE:
                trial.problems.append(f"it took {trial.seconds:.0f} s to end")
        check_end(trial, attempt, (75,))
        if attempt.last_checkpoint != max(0, attempt.last_step):
            trial.problems.append(f"stopped at step {attempt.last_step}, last checkpoint {attempt.last_checkpoint}")
        go_on(laboratory, folder, trial, attempt, max(0, attempt.last_step))
        return trial

    return run


def _interrupted_twice(moment: Moment) -> Callable[[Laboratory, Path], Trial]:
    def run(laboratory: Laboratory, folder: Path) -> Trial:
        trial = Trial()
        interrupt = send(signal.SIGINT)
        second = Moment("backward", moment.count)
        attempt = Training(laboratory, folder, [(moment, interrupt), (second, interrupt)]).result()
        trial.said = last_line(attempt)
        after = [
            name
            for _, step, name in attempt.events
            if name.startswith("renamed:checkpoints/step-") and step >= moment.count - 1
        ]
        if attempt.code in (0, 75) or any(f"{moment.count:08d}" in name for name in after):
            trial.problems.append(f"the second SIGINT did not end it at once (exit code {attempt.code})")
        check_end(trial, attempt, (130, -signal.SIGINT))
        go_on(laboratory, folder, trial, attempt, attempt.last_checkpoint)
        return trial

    return run


# ---- power cuts -----------------------------------------------------------------------------------------------------

POWER_PLACES = {
    "a step": "step:before",
    "the contents of a checkpoint synced": "fsynced:checkpoints/.step-*.tmp",
    "a checkpoint named": "renamed:checkpoints/step-*",
    "the name of a checkpoint synced": "fsynced:checkpoints",
    "model.nemo named": "renamed:model.nemo",
    "best.json named": "renamed:checkpoints/best.json",
    "a line of metrics.jsonl": "open:metrics.jsonl",
    "summary.json named": "renamed:summary.json",
}


def power_cases(laboratory: Laboratory, events: list[tuple[float, int, str]]) -> Iterator[Case]:
    """The process ends, and of the files only what was synced is left for sure."""
    draw = random.Random(f"{laboratory.seed} power")
    for loss in LOSSES:
        for place, patterns in POWER_PLACES.items():
            moments = [m for m in matching(events, patterns) if m[2] > 2]
            if moments:
                name, count, step = draw.choice(moments)
                moment = Moment(name, count)
                quick = place.startswith("the name of") and loss in (LOSSES[0], LOSSES[2])
                yield Case(f"power cut: {loss}", f"after {place}: {_words(moment, step)}", _cut(moment, loss), quick)


def _cut(moment: Moment, loss: str) -> Callable[[Laboratory, Path], Trial]:
    def run(laboratory: Laboratory, folder: Path) -> Trial:
        trial, store = Trial(), folder.with_suffix(".synced")
        folder.mkdir()  # the directory itself outlasts the cut

        def watch(events: Events) -> None:
            SyncedState(folder, store).watch()

        attempt = Training(laboratory, folder, [(moment, kill)], prepare=watch).result()
        check_end(trial, attempt, (-signal.SIGKILL,))
        changed = cut_power(folder, store, loss)
        shutil.rmtree(store)
        trial.said = f"{len(changed)} files lost or changed"
        go_on(laboratory, folder, trial, attempt, attempt.last_synced_checkpoint)
        return trial

    return run


# ---- clocks and a second process ------------------------------------------------------------------------------------

HOUR, YEAR = 3600.0, 365 * 86400.0


def clock_cases(laboratory: Laboratory, events: list[tuple[float, int, str]]) -> Iterator[Case]:
    """The clock of the day jumps; nothing but times may change."""
    for words, seconds in (("an hour back", -HOUR), ("a year ahead", YEAR)):
        yield Case(f"clock: {words}", "at step 5, then SIGKILL at step 9", _jumped(seconds))
        yield Case(f"clock: {words}", "from the resumption on", _resumed_at(seconds))


def _jumped(seconds: float) -> Callable[[Laboratory, Path], Trial]:
    def run(laboratory: Laboratory, folder: Path) -> Trial:
        trial = Trial()
        plans = [(Moment("step:after", 5), lambda: shift_clock(seconds)), (Moment("backward", 9), kill)]
        attempt = Training(laboratory, folder, plans).result()
        check_end(trial, attempt, (-signal.SIGKILL,))
        go_on(laboratory, folder, trial, attempt, attempt.last_checkpoint)
        return trial

    return run


def _resumed_at(seconds: float) -> Callable[[Laboratory, Path], Trial]:
    """Files are of another time than the clock, and come in another order by their times than by their steps."""

    def run(laboratory: Laboratory, folder: Path) -> Trial:
        trial = Trial()
        attempt = Training(laboratory, folder, [(Moment("backward", 9), kill)]).result()
        check_end(trial, attempt, (-signal.SIGKILL,))
        for place, path in enumerate(sorted((folder / "checkpoints").glob("step-*"))):
            os.utime(path, (time.time() - place * HOUR,) * 2)
        again = Training(laboratory, folder, prepare=lambda _: shift_clock(seconds)).result()
        trial.attempts += 1
        check_end(trial, again, (0,))
        trial.lost += max(0, attempt.last_checkpoint - again.resumed_from)
        go_on(laboratory, folder, trial, again, again.last_checkpoint)
        return trial

    return run


def second_process_cases(laboratory: Laboratory, events: list[tuple[float, int, str]]) -> Iterator[Case]:
    """Two processes on one directory."""
    yield Case("second process", "while the first one trains; then the first is killed", _second, quick=True)


def _second(laboratory: Laboratory, folder: Path) -> Trial:
    trial = Trial()
    first = Training(laboratory, folder, [(Moment("backward", 6), send(signal.SIGSTOP))])
    deadline = time.monotonic() + LONGEST_ATTEMPT
    while steps_reached(first.log) < 5 and time.monotonic() < deadline:
        time.sleep(0.05)
    second = Training(laboratory, folder).result()
    trial.said = line_with(second, "in use by")
    check_end(trial, second, (2,))
    if not trial.said:
        trial.problems.append(f"the second process was not refused: {last_line(second)[:200]}")
    first.send(signal.SIGKILL)
    while first.running():
        time.sleep(0.001)
    third = Training(laboratory, folder).result()  # at once: the first one's workers may still be there
    trial.attempts += 2
    check_end(trial, third, (0,))
    broken = first.result()
    trial.lost += max(0, broken.last_checkpoint - third.resumed_from)
    trial.problems += differences(laboratory.unbroken, folder)
    return trial
