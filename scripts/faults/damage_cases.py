"""Faults of disks and files: full, read-only, damaged; and runs of two processes."""

import random
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from cases import GRACE, Case, Trial, check_end, go_on, last_line, line_with, matching
from disks import DAMAGES, damage, fill, make_read_only, small_disk, unmount
from injection import Moment, kill, send
from runs import STEPS, Attempt, Laboratory, Training, differences, read_lines

MEBIBYTES = 64

FULL_PLACES = {
    # place: events of which one fills the disk
    "writing a checkpoint": "open:checkpoints/.step-*",
    "naming a checkpoint": "rename:checkpoints/step-*",
    "writing model.nemo": "open:.model.nemo*",
    "writing best.json": "open:checkpoints/.best.json*",
    "writing report.html": "open:.report.html*",
    "writing summary.json": "open:.summary.json*",
    "a line of metrics.jsonl": "open:metrics.jsonl",
    "a line of clips.jsonl": "open:clips.jsonl",
    "a line of evaluations.jsonl": "open:evaluations.jsonl",
    "a line of quarantine.jsonl": "open:quarantine.jsonl",
}


def disk_full_cases(laboratory: Laboratory, events: list[tuple[float, int, str]]) -> Iterator[Case]:
    """Another program takes the disk's room; then there is room again."""
    draw = random.Random(f"{laboratory.seed} full")
    for place, patterns in FULL_PLACES.items():
        moments = matching(events, patterns)
        for leave in (0, draw.choice((100, 5000, 100_000))):
            name, count, step = draw.choice([m for m in moments if m[2] > 0] or moments)
            words = f"step {step}, {name} no. {count}, {leave} bytes left"
            quick = place == "writing a checkpoint" and leave == 0
            yield Case(f"disk full: {place}", words, _full(Moment(name, count), leave), quick)
    for seconds in (0.3, 1.5):
        name, count, step = draw.choice([m for m in matching(events, "open:checkpoints/.step-*") if 0 < m[2] < 10])
        yield Case(
            "disk full for a while: the run goes on",
            f"step {step}, {name}, for {seconds} s",
            _full_for(Moment(name, count), seconds),
        )


def _full(moment: Moment, leave: int) -> Callable[[Laboratory, Path], Trial]:
    def run(laboratory: Laboratory, folder: Path) -> Trial:
        trial = Trial()
        with small_disk(folder, MEBIBYTES):
            filler, output = folder / "filler", folder / "run"
            attempt = Training(laboratory, output, [(moment, lambda: fill(filler, leave))]).result()
            trial.said = _named(attempt)
            if not filler.exists():
                trial.problems.append("the disk was not filled")
            check_end(trial, attempt, (0, 1, 75))
            if not trial.said:
                trial.problems.append(f"the full disk is not named: {last_line(attempt)[:200]}")
            filler.unlink(missing_ok=True)
            go_on(laboratory, output, trial, attempt, attempt.last_checkpoint)
        return trial

    return run


def _full_for(moment: Moment, seconds: float) -> Callable[[Laboratory, Path], Trial]:
    def run(laboratory: Laboratory, folder: Path) -> Trial:
        trial = Trial()
        with small_disk(folder, MEBIBYTES):
            filler, output = folder / "filler", folder / "run"

            def fill_for_a_while() -> None:
                fill(filler)
                threading.Timer(seconds, filler.unlink).start()

            attempt = Training(laboratory, output, [(moment, fill_for_a_while)]).result()
            trial.said = _named(attempt)
            check_end(trial, attempt, (0,))
            if attempt.code:
                go_on(laboratory, output, trial, attempt, attempt.last_checkpoint)
            else:
                trial.problems += differences(laboratory.unbroken, output)
        return trial

    return run


def _named(attempt: Attempt) -> str:
    return line_with(attempt, "No space left", "os error 28", "disk is full", "full disk", "Errno 28")


def read_only_cases(laboratory: Laboratory, events: list[tuple[float, int, str]]) -> Iterator[Case]:
    """The output directory cannot be written any more."""
    draw = random.Random(f"{laboratory.seed} read-only")
    yield Case("read-only output_dir", "at the start", _read_only_from_the_start)
    for patterns in ("open:checkpoints/.step-*", "open:metrics.jsonl", "open:.model.nemo*"):
        name, count, step = draw.choice([m for m in matching(events, patterns) if m[2] > 2])
        yield Case("read-only output_dir", f"step {step}, {name} no. {count}", _read_only_from(Moment(name, count)))


def _read_only_from_the_start(laboratory: Laboratory, folder: Path) -> Trial:
    trial = Trial()
    folder.mkdir()
    make_read_only(folder)
    attempt = Training(laboratory, folder).result()
    unmount(folder)
    trial.said = line_with(attempt, "Read-only", "cannot be written")
    check_end(trial, attempt, (2,))
    if not trial.said:
        trial.problems.append(f"it is not named: {last_line(attempt)[:200]}")
    go_on(laboratory, folder, trial, attempt, 0)
    return trial


def _read_only_from(moment: Moment) -> Callable[[Laboratory, Path], Trial]:
    def run(laboratory: Laboratory, folder: Path) -> Trial:
        trial = Trial()
        folder.mkdir()
        attempt = Training(laboratory, folder, [(moment, lambda: make_read_only(folder))]).result()
        unmount(folder)
        trial.said = line_with(attempt, "Read-only", "os error 30", "cannot be written")
        check_end(trial, attempt, (0, 1, 75))
        if not trial.said:
            trial.problems.append(f"it is not named: {last_line(attempt)[:200]}")
        go_on(laboratory, folder, trial, attempt, attempt.last_checkpoint)
        return trial

    return run


# ---- damaged files --------------------------------------------------------------------------------------------------

NEWEST, BEFORE = 12, 10


def _killed_run(laboratory: Laboratory) -> Path:
    """A run that was killed once it had a checkpoint of step 12, made once; the cases take copies."""
    path = laboratory.folder / "killed"
    if not path.is_dir():
        moment = Moment(f"renamed:checkpoints/step-{NEWEST:08d}")
        attempt = Training(laboratory, path, [(moment, kill)]).result()
        if attempt.code != -signal.SIGKILL:
            raise RuntimeError(f"it was not killed at {moment.pattern}: {last_line(attempt)}")
    return path


def damage_cases(laboratory: Laboratory, events: list[tuple[float, int, str]]) -> Iterator[Case]:
    """Every file of the newest checkpoint in every way; then all checkpoints; then model.nemo."""
    newest = laboratory.unbroken / "checkpoints" / f"step-{STEPS:08d}"
    for file in sorted(p.relative_to(newest) for p in newest.rglob("*") if p.is_file()):
        for kind in DAMAGES:
            quick = file.name == "optimizer.bin" and kind == DAMAGES[0]
            yield Case(f"a file of the newest checkpoint: {kind}", str(file), _damaged(str(file), kind), quick)
    yield Case("all checkpoints damaged", "one bit of each model.safetensors", _all_damaged)
    for kind in DAMAGES:
        yield Case(f"model.nemo: {kind}", f"before step {NEWEST} is resumed", _damaged_model(kind))


def _damaged(file: str, kind: str) -> Callable[[Laboratory, Path], Trial]:
    def run(laboratory: Laboratory, folder: Path) -> Trial:
        trial = Trial(attempts=1)
        shutil.copytree(_killed_run(laboratory), folder)
        damage(folder / "checkpoints" / f"step-{NEWEST:08d}" / file, kind, laboratory.seed)
        attempt = Training(laboratory, folder).result()
        trial.attempts += 1
        trial.said = line_with(attempt, "damaged")
        check_end(trial, attempt, (0,))
        if attempt.resumed_from == NEWEST:
            trial.corrupt += 1
            trial.problems.append(f"the damaged {file} was taken")
        if file not in trial.said and "lists" not in trial.said:
            trial.problems.append(f"the damage is not said with the name of {file}: {trial.said!r}")
        trial.lost += max(0, BEFORE - attempt.resumed_from)
        found = differences(laboratory.unbroken, folder)
        trial.corrupt += len(found)
        trial.problems += found
        return trial

    return run


def _all_damaged(laboratory: Laboratory, folder: Path) -> Trial:
    """Nothing is right then but to say so; what is there has to stay for the user."""
    trial = Trial()
    shutil.copytree(_killed_run(laboratory), folder)
    for checkpoint in sorted((folder / "checkpoints").glob("step-*")):
        damage(checkpoint / "model.safetensors", DAMAGES[0], laboratory.seed)
    before = sorted(str(p) for p in folder.rglob("*"))
    attempt = Training(laboratory, folder).result()
    trial.attempts += 1
    trial.said = line_with(attempt, "error:")
    check_end(trial, attempt, (1,))
    if "damaged" not in trial.said:
        trial.problems.append(f"it is not said: {last_line(attempt)[:200]}")
    gone = set(before) - {str(p) for p in folder.rglob("*")}
    if gone:
        trial.problems.append(f"files were removed: {sorted(gone)[:3]}")
    return trial


def _damaged_model(kind: str) -> Callable[[Laboratory, Path], Trial]:
    def run(laboratory: Laboratory, folder: Path) -> Trial:
        trial = Trial()
        shutil.copytree(_killed_run(laboratory), folder)
        damage(folder / "model.nemo", kind, laboratory.seed)
        attempt = Training(laboratory, folder).result()
        trial.attempts += 1
        trial.said = line_with(attempt, "model.nemo")
        check_end(trial, attempt, (0,))
        # The best model is gone; the training itself must be as before, and another best model be named truthfully.
        found = differences(laboratory.unbroken, folder)
        own = {"model.nemo", "summary", "best.json", "evaluations"}
        trial.problems += [what for what in found if what not in own]
        trial.problems += [what for what in found if what.startswith("model.nemo cannot be read")]
        trial.corrupt += "model.nemo" not in trial.said
        if "model.nemo" not in trial.said:
            trial.problems.append("the loss of model.nemo is not said")
        return trial

    return run


# ---- two processes --------------------------------------------------------------------------------------------------

ROUNDING = 1e-5


def rank_cases(laboratory: Laboratory, events: list[tuple[float, int, str]]) -> Iterator[Case]:
    """Two ranks over gloo (ddp)."""
    for rank in (0, 1):
        yield Case(f"2 ranks: SIGKILL of rank {rank}", "step 7, backward", _rank_killed(rank))
    for ranks in ((0, 1), (0,), (1,)):
        words = "both ranks" if len(ranks) == 2 else f"rank {ranks[0]} alone"
        yield Case(f"2 ranks: SIGTERM to {words}", "step 7, forward", _ranks_stopped(ranks))


def _both(laboratory: Laboratory, folder: Path, plans: dict[int, list] | None = None) -> list[Training]:
    """Both ranks of a run, started."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = []
    for rank in (0, 1):
        environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
        environment = {**{k: str(v) for k, v in environment.items()}, "MASTER_ADDR": "127.0.0.1"}
        overrides = ("--strategy", "ddp", "training.per_device_train_batch_size=2")
        own = (plans or {}).get(rank, [])
        started.append(Training(laboratory, folder, own, None, overrides, environment, rank))
    return started


def _ended(ranks: list[Training]) -> list[Attempt]:
    return [training.result() for training in ranks]


def _unbroken_by_two(laboratory: Laboratory) -> Path:
    path = laboratory.folder / "unbroken-two"
    if not path.is_dir():
        attempts = _ended(_both(laboratory, path))
        assert [a.code for a in attempts] == [0, 0], attempts[0].said[-1000:] + attempts[1].said[-1000:]
        assert len(read_lines(path / "clips.jsonl")) == STEPS
    return path


def _two_go_on(laboratory: Laboratory, folder: Path, trial: Trial, checkpoint: int) -> None:
    attempts = _ended(_both(laboratory, folder))
    trial.attempts += 1
    for attempt in attempts:
        check_end(trial, attempt, (0,))
    trial.lost += max(0, checkpoint - attempts[0].resumed_from)
    found = differences(_unbroken_by_two(laboratory), folder, tolerance=ROUNDING)
    trial.corrupt += len(found)
    trial.problems += found


def _rank_killed(rank: int) -> Callable[[Laboratory, Path], Trial]:
    def run(laboratory: Laboratory, folder: Path) -> Trial:
        trial = Trial()
        _unbroken_by_two(laboratory)
        both = _both(laboratory, folder, {rank: [(Moment("backward", 7), kill)]})
        both[rank].wait()
        dead = time.monotonic()
        other = both[1 - rank].result()
        trial.seconds = time.monotonic() - dead
        if trial.seconds > 60:
            trial.problems.append(f"the other rank took {trial.seconds:.0f} s to end")
        if other.code in (0, 75):
            trial.problems.append(f"the other rank ended with {other.code}")
        killed = both[rank].result()
        trial.said = line_with(killed, "error: rank") or line_with(other, "error: rank")
        if "SIGKILL" not in trial.said:
            trial.problems.append("what killed the rank is not said")
        _two_go_on(laboratory, folder, trial, (killed if rank == 0 else other).last_checkpoint)
        return trial

    return run


def _ranks_stopped(ranks: tuple[int, ...]) -> Callable[[Laboratory, Path], Trial]:
    def run(laboratory: Laboratory, folder: Path) -> Trial:
        trial = Trial()
        _unbroken_by_two(laboratory)
        plans = {rank: [(Moment("forward", 7), send(signal.SIGTERM))] for rank in ranks}
        began = time.monotonic()
        attempts = _ended(_both(laboratory, folder, plans))
        trial.seconds = None
        for attempt in attempts:
            check_end(trial, attempt, (75,))
        trial.said = line_with(attempts[0], "stopped")
        if time.monotonic() - began > 60 + GRACE:
            trial.problems.append("it took too long to end")
        if attempts[0].last_checkpoint != attempts[0].last_step:
            trial.problems.append(f"stopped at {attempts[0].last_step}, last checkpoint {attempts[0].last_checkpoint}")
        _two_go_on(laboratory, folder, trial, attempts[0].last_checkpoint)
        return trial

    return run
