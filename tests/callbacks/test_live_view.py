"""What a run shows while it runs: lines in a log, a panel on a terminal, warnings, trackers."""

import gzip
import json
import math
import os
import pty
import random
import re
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import ROOT, read_lines
from run_callbacks import callback_of

from finetune.callbacks.drift import REPEAT_AFTER_LINES, DriftMonitor, steady_growth
from finetune.training.progress import Progress

# ---- lines in a log -------------------------------------------------------------------------------------------------


def test_a_log_has_one_line_of_fixed_width_a_logged_step(run_train, tiny_run, tmp_path, capsys):
    run = tiny_run(training={"max_steps": 5, "eval_steps": 2, "logging_steps": 2})
    capsys.readouterr()
    assert run_train(*run) == 0
    said = capsys.readouterr().err
    assert "\r" not in said
    assert "\x1b" not in said
    lines = [re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in said.splitlines()]
    start = next(i for i, line in enumerate(lines) if re.match(r" *step +epoch +loss +grad norm", line))
    rows = read_lines(tmp_path / "run" / "metrics.jsonl")
    shown = [line for line in lines if re.match(r" *\d+/5 ", line)]
    assert [row["step"] for row in rows] == [1, 2, 4, 5]
    assert {len(line) for line in shown} == {len(lines[start])}
    for line, row in zip(shown, rows, strict=True):
        step, epoch, loss, grad_norm, rate, speed = line.split()[:6]
        assert (step, epoch) == (f"{row['step']}/5", str(row["epoch"]))
        assert [float(loss), float(grad_norm)] == pytest.approx([row["loss"], row["grad_norm"]], rel=1e-3)
        assert [float(rate), float(speed)] == pytest.approx(
            [row["learning_rate"], row["audio_seconds_per_second"]], rel=0.01, abs=0.06
        )
    assert re.fullmatch(r"\d+:\d\d:\d\d", shown[-1].split()[-1])


@pytest.mark.parametrize("loss", [None, 123456.789, 1e-9, math.inf])
def test_columns_keep_their_width_whatever_the_numbers(loss):
    from finetune.callbacks.panel import line_cells

    row = {
        "step": 7,
        "epoch": 0,
        "loss": loss,
        "grad_norm": None if loss is None else 1e12,
        "learning_rate": 1e-4,
        "audio_seconds_per_second": 1e6,
        "data_wait_fraction": 1.0,
        "padding_fraction": 0.0,
        "peak_memory_gib": 79.999,
    }
    usual = {**row, "loss": 1.0, "grad_norm": 1.0, "audio_seconds_per_second": 100.0, "peak_memory_gib": 1.0}
    widths = [[len(value) for _, value in line_cells(r, 100, 80.0, None, "0:00:01", None)] for r in (row, usual)]
    assert widths[0] == widths[1]
    assert [len(name) for name, _ in line_cells(row, 100, 80.0, None, "0:00:01", None)] == widths[0]


def test_time_left_counts_evaluations_and_later_stages(monkeypatch):
    from finetune.callbacks import eta as module

    clock = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: clock[0])
    eta = module.Eta(eval_steps=10, judged=("test",))
    eta.evaluated("validation", 5.0)
    eta.evaluated("test", 7.0)
    clock[0] = 12.0
    eta.begin(0)
    for step in range(1, 11):
        clock[0] += 60.0 if step == 1 else 2.0  # the first one compiles
        eta.stepped(step)
        assert (eta.seconds_left(step, 100) is None) == (step == 1), step
    clock[0] += 5.0
    eta.evaluated("validation", 5.0)
    # 90 steps, 9 evaluations, the test at the end
    assert eta.seconds_left(10, 100) == pytest.approx(90 * 2 + 9 * 5 + 7)
    assert eta.seconds_left(10, 95) == pytest.approx(85 * 2 + 9 * 5 + 7)
    place = module.place_in_plan(2, [50, 100, 30, 40])
    assert eta.plan_left(10, 100, place) == pytest.approx(90 * 2 + 9 * 5 + 7 + 70 * 2)
    assert eta.plan_left(10, 100, module.place_in_plan(1, [50, -1])) is None


# ---- the panel ------------------------------------------------------------------------------------------------------


class Terminal:
    """A pseudo-terminal in place of the errors, and what was written to it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.setenv("COLUMNS", "140")
        monkeypatch.setenv("LINES", "50")
        self.master, slave = pty.openpty()
        self.slave = os.fdopen(slave, "w", buffering=1)
        monkeypatch.setattr(sys, "stderr", self.slave)
        self.data = b""
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        try:
            while chunk := os.read(self.master, 65536):
                self.data += chunk
        except OSError:  # the other end is closed
            return

    def close(self) -> str:
        self.slave.close()
        self.reader.join(900)
        os.close(self.master)
        return self.data.decode()


def screen(written: str, width: int = 140) -> list[str]:
    """The lines that a terminal shows in the end, all that scrolled away included."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[\d;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", written):
        if part == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif part == "\r":
            column = 0
        elif part.startswith("\x1b"):
            number = re.match(r"\x1b\[(\d*)", part)[1]
            if part.endswith("A"):
                row -= int(number or 1)
            elif part.endswith("K"):
                lines[row] = "" if number == "2" else lines[row][:column]
        else:
            lines[row] = lines[row][:column].ljust(column) + part + lines[row][column + len(part) :]
            column += len(part)
    return lines


def test_a_terminal_gets_a_panel_that_logging_does_not_tear(run_train, tiny_run, tmp_path, monkeypatch):
    terminal = Terminal(monkeypatch)
    assert run_train(*tiny_run(training={"max_steps": 4, "eval_steps": 2})) == 0
    written = terminal.close()
    plain = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", written)
    for words in ("loss", "real-time factor", "data wait", "padding", "peak memory", "learning rate", "4/4 steps"):
        assert words in plain
    assert "evaluate validation" in plain
    pair = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert f"{pair['loss']:.4f}" in plain
    shown = screen(written)
    assert not any(border in line for line in shown for border in "│╭╰"), "the panel is gone in the end"
    logged = [line for line in shown if line]
    assert all(re.match(r"\d\d:\d\d:\d\d |           (before|after) ", line) for line in logged), logged
    assert len([line for line in logged if re.search(r" [1-4]/4 ", line)]) == 4
    assert written.rindex("\x1b[?25h") > written.rfind("\x1b[?25l"), "the cursor is there"


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError("broken")])
def test_whatever_ends_a_run_takes_the_panel_away(run_train, tiny_run, monkeypatch, error):
    from finetune.training.trainer import Trainer

    stepping = Trainer._optimizer_step

    def fail(self: Trainer, step_input: Any) -> Any:
        if self.progress.step == 1:
            raise error
        return stepping(self, step_input)

    monkeypatch.setattr(Trainer, "_optimizer_step", fail)
    terminal = Terminal(monkeypatch)
    stream = sys.stderr
    run = tiny_run(data={"validation": None, "test": None}, training={"save_steps": 0})
    if error is KeyboardInterrupt:
        assert run_train(*run) == 130
    else:
        with pytest.raises(RuntimeError):
            run_train(*run)
    assert sys.stderr is stream
    written = terminal.close()
    assert "0/2 steps" in written
    assert not any(border in line for line in screen(written) for border in "│╭╰")
    assert written.rindex("\x1b[?25h") > written.rfind("\x1b[?25l")


@pytest.mark.parametrize("with_panel", [True, False])
def test_a_terminal_that_goes_away_ends_no_run(run_train, tiny_run, tmp_path, monkeypatch, with_panel):
    from finetune.callbacks.panel import ProgressPanel
    from finetune.training.trainer import Trainer

    stepping = Trainer._optimizer_step
    terminal = Terminal(monkeypatch)
    if not with_panel:
        monkeypatch.setenv("TERM", "dumb")

    def hang_up(self: Trainer, step_input: Any) -> Any:
        if self.progress.step == 2:
            assert bool(callback_of(self, ProgressPanel).live) == with_panel
            os.close(terminal.master)
            os.write(terminal.slave.fileno(), b"\n")  # wakes the reader, which holds the terminal open
            terminal.reader.join(900)
            with pytest.raises(OSError):
                os.write(terminal.slave.fileno(), b"x")
        return stepping(self, step_input)

    monkeypatch.setattr(Trainer, "_optimizer_step", hang_up)
    try:
        assert run_train(*tiny_run(training={"max_steps": 5, "eval_steps": 2})) == 0
    finally:
        terminal.slave.close()
    assert "2/5 " in terminal.data.decode()
    assert [row["step"] for row in read_lines(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 5


# ---- warnings -------------------------------------------------------------------------------------------------------


def row(step: int, **values: Any) -> dict[str, Any]:
    return {"step": step, "seconds_per_step": 0.5, "data_wait_fraction": 0.05, "rss_gib": 4.0, **values}


def drift_monitor(loss_scaling: bool = False) -> DriftMonitor:
    """Of a run with one process on the CPU."""
    device = torch.device("cpu")
    run = SimpleNamespace(
        num_processes=1, is_main_process=True, device=device, scaler=object() if loss_scaling else None
    )
    return DriftMonitor(run, torch.nn.Identity(), Progress(), workers=2)


@pytest.fixture
def watch() -> DriftMonitor:
    return drift_monitor()


def test_waiting_for_data_is_said_once_until_it_is_over(watch, messages):
    shares = [0.9] + [0.1] * 20 + [0.6] * 20 + [0.02] * 20 + [0.4] * (REPEAT_AFTER_LINES + 10)
    for line, share in enumerate(shares, 1):
        watch.check_row(row(10 * line, data_wait_fraction=share), 0, [])
        if line == 21:
            assert not messages, "the first line holds the start of the workers"
        if line == 41:
            assert len(messages) == 1
            assert "in 30 % of the last 50 steps' time" in messages[0]
            assert "training.dataloader_num_workers (now 2" in messages[0]
    assert len(messages) == 3, "when it began again, and once more while it lasted"
    assert watch.progress.drift_warnings == {"data_wait": 3}


def test_growing_memory_is_told_from_memory_that_fills_up(watch):
    generator = random.Random(0)

    def window(level: Any) -> list[tuple[int, float]]:
        return [(10 * i, level(i) + generator.gauss(0, 5)) for i in range(40)]

    assert steady_growth(window(lambda i: 4000 + 8 * i)) == pytest.approx(800, rel=0.1)
    assert steady_growth(window(lambda i: 4000)) is None
    assert steady_growth(window(lambda i: 4000 + 1000 * (1 - math.exp(-i / 6)))) is None, "longer batches are met"
    assert steady_growth(window(lambda i: 4000 + 300 * (i > 12))) is None, "one new longest batch"
    assert steady_growth(window(lambda i: 4000 + 400 * (i % 14) / 14)) is None, "up and down"
    assert steady_growth(window(lambda i: 4000 + 200 * math.log(3 + i))) is None
    assert steady_growth(window(lambda i: 2100 + 20 * min(i, 27))) is None, "at rest since a while"


def test_a_leak_is_said_with_its_slope(watch, messages):
    for line in range(1, 60):
        watch.check_row(row(10 * line, rss_gib=4 + 0.02 * line), 0, [])
    assert len(messages) == 1
    assert "resident memory keeps growing by 2048 MiB per 1000 steps" in messages[0]
    assert watch.progress.drift_warnings == {"memory": 1}


def test_the_guard_set_is_evaluated_as_often_as_told():
    from finetune.training.evaluation import splits_due

    def steps(guard_steps: int, eval_steps: int = 10) -> list[int]:
        due = range(eval_steps, 101, eval_steps)
        return [s for s in due if "guard" in splits_due(s, s == 100, eval_steps, guard_steps)]

    assert steps(-1) == [*range(10, 100, 10)]
    assert steps(0) == []
    assert steps(10) == steps(5) == steps(-1)
    assert steps(30) == [30, 60, 90]
    assert steps(25) == [30, 50, 80]
    assert splits_due(7, False, 0, -1) == ("validation", "guard")


def test_time_left_counts_the_guard_set(monkeypatch):
    from finetune.callbacks import eta as module

    clock = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: clock[0])
    for guard_steps, times in ((-1, 8), (0, 0), (30, 3)):
        eta = module.Eta(10, ("test", "guard"), guard_steps)
        for split, seconds in (("validation", 5.0), ("test", 7.0), ("guard", 3.0)):
            eta.evaluated(split, seconds)
        eta.begin(0)
        for step in range(1, 11):
            clock[0] += 2.0
            eta.stepped(step)
        assert eta.seconds_left(10, 100) == pytest.approx(90 * 2 + 9 * 5 + times * 3 + 7 + 3), guard_steps


def test_steps_that_are_not_finite_are_counted(watch, messages):
    for line, skipped in enumerate([0, 0, 3, 3, 4], 1):
        watch.check_row(row(10 * line), skipped, [])
    assert [m.split(" of the ")[0][-1] for m in messages] == ["3", "1"]
    assert watch.progress.drift_warnings == {"loss_not_finite": 2}
    scaled = drift_monitor(loss_scaling=True)
    for line, skipped in enumerate([3, 4, 4, 24], 1):
        scaled.check_row(row(10 * line), skipped, [])
    assert scaled.progress.drift_warnings == {"loss_not_finite": 1}, "loss scaling skips a few steps of its own accord"


def test_a_wer_above_the_base_models_is_said(watch, messages):
    for step, wer in ((10, 0.7), (20, 0.9), (30, 0.95), (40, 0.7), (50, 0.81)):
        watch.check_evaluation(step, "validation", wer, 0.8)
    watch.check_evaluation(50, "test", 0.9, None)
    assert ["at step 20" in messages[0], "at step 50" in messages[1], len(messages)] == [True, True, 2]
    assert "0.900" in messages[0]
    assert "0.800" in messages[0]


def test_a_loss_on_the_guard_set_is_said_where_it_is_more_than_chance(watch, messages):
    def change(difference: float, p_value: float) -> dict[str, float]:
        return {"wer_a": 0.2, "wer_b": 0.2 + difference, "difference": difference, "p_value": p_value}

    for step, found in ((10, None), (20, change(0.05, 0.03)), (30, change(-0.05, 1e-6)), (40, change(0.06, 0.001))):
        watch.check_evaluation(step, "guard", 0.9, 0.2, found)
    watch.check_evaluation(50, "guard", 0.9, 0.2, change(0.07, 0.001))
    assert len(messages) == 1
    assert (
        "WER on guard is 0.260 at step 40, above the base model's 0.200 by more than chance (p = 0.001)" in messages[0]
    )
    assert watch.progress.drift_warnings == {"guard_lost": 1}


def test_a_slow_rank_is_named(watch, messages):
    for line in range(1, 8):
        slow = 1.6 if line > 2 else 1.0
        watch.check_row(row(10 * line), 0, [1.0, 1.0, slow, 1.0 if line != 5 else 1.5])
    assert len(messages) == 1
    assert "rank 2 computes 1.60 times as long" in messages[0]
    assert watch.progress.drift_warnings == {"slow_rank": 1}


# ---- a real run -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_slow_source_is_noticed_in_a_real_run(run_train, tiny_run, tmp_path, monkeypatch, capsys):
    from finetune.data import utterances

    decode, longest_step = utterances.decode, [0.1]

    def slowly(*arguments: Any) -> Any:
        time.sleep(longest_step[0])
        return decode(*arguments)

    def observe(trainer: Any) -> None:
        train_on = trainer.train_on

        def timed(step_input: Any) -> Any:
            started = time.perf_counter()
            result = train_on(step_input)
            longest_step[0] = max(longest_step[0], time.perf_counter() - started)
            return result

        trainer.train_on = timed

    monkeypatch.setattr(utterances, "decode", slowly)
    training = {"max_steps": 14, "eval_on_start": False, "save_steps": 0}
    arguments = tiny_run(data={"validation": None, "test": None}, training=training)
    assert run_train(*arguments, observe=observe) == 0
    shares = [r["data_wait_fraction"] for r in read_lines(tmp_path / "run" / "metrics.jsonl")]
    assert min(shares[1:]) > 0.3, "the source has to be slow"
    summary = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    assert summary["drift_warnings"]["data_wait"] == 1
    assert "drift: training waited for data" in capsys.readouterr().err


SLOW_RANK = """
import os, sys, time
from finetune import train
from finetune.models.loss_module import LossModule

forward = LossModule.forward

def slowly(*arguments, **options):
    time.sleep(2.0)
    return forward(*arguments, **options)

if os.environ["RANK"] == "1":
    LossModule.forward = slowly
train.leave(train.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_slow_rank_is_named_and_the_profile_shows_what_waiting_costs(tiny_run, tmp_path):
    script = tmp_path / "slow_rank.py"
    script.write_text(SLOW_RANK, encoding="utf-8")
    run = tiny_run(data={"validation": None, "test": None}, training={"max_steps": 8, "save_steps": 0})
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*launch, *run, "--strategy", "ddp", "--profile", "4"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=1500,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    warned = re.findall(r"drift: rank (\d) computes ([\d.]+) times as long", done.stderr)
    assert [rank for rank, _ in warned] == ["1"]
    assert float(warned[0][1]) > 1.25
    summary = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    assert summary["drift_warnings"]["slow_rank"] == 1
    table = json.loads((tmp_path / "run" / "profile" / "table.json").read_text(encoding="utf-8"))
    waited = sum(row["ms_per_step"] for row in table["rows"] if row["part"] in ("communication", "data"))
    assert waited > 150, "rank 0 waits for the gradients of rank 1"


# ---- --profile ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_profile_accounts_for_the_steps_and_changes_nothing(run_train, tiny_run, tmp_path, capsys):
    settings = {"max_steps": 8, "eval_on_start": False, "save_steps": 0, "eval_steps": 4}
    data = {"test": None}
    assert run_train(*tiny_run(data=data, training={**settings, "output_dir": str(tmp_path / "plain")})) == 0
    assert run_train(*tiny_run(data=data, training=settings), "--profile", "3") == 0
    assert "encoder, backward" in capsys.readouterr().err
    rows = [read_lines(tmp_path / name / "metrics.jsonl") for name in ("plain", "run")]
    assert [r["loss"] for r in rows[0]] == [r["loss"] for r in rows[1]]
    folder = tmp_path / "run" / "profile"
    table = json.loads((folder / "table.json").read_text())
    parts = {r["part"]: r["ms_per_step"] for r in table["rows"]}
    assert {
        "data",
        "encoder_forward",
        "encoder_backward",
        "joint_loss_forward",
        "joint_loss_backward",
        "optimizer",
    } <= {*parts}
    assert table["steps"] == 3
    # Steps 2 and 4 lie beside an evaluation: recording begins behind step 5.
    wall = sum(r["seconds_per_step"] for r in rows[1] if 6 <= r["step"] <= 8)
    named = sum(ms for part, ms in parts.items() if part != "other")
    assert 0.85 * wall <= 3 * named / 1000 <= 1.05 * wall
    with gzip.open(folder / "trace.json.gz", "rt") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert {"optimizer", "backward", "part: encoder_backward"} <= names


def test_a_profile_longer_than_the_run_is_refused(run_train, tiny_run, failed):
    said = failed(2, *tiny_run(data={"validation": None, "test": None}), "--profile", "3")
    assert "Set training.max_steps to 5" in said
