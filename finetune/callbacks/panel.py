"""What a run shows while it runs: a panel on a terminal, and one line of fixed width a logged step everywhere."""

import contextlib
import logging
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import torch
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from finetune import logs
from finetune.callbacks.eta import Pace, Place, as_clock, expected_steps
from finetune.security.safe_text import one_line

log = logging.getLogger(__name__)

LINES_BETWEEN_HEADERS = 20
SECONDS_BETWEEN_REFRESHES = 0.25
SHARE_OF_TIME = 0.01
"""Of the run's time that drawing the panel may take."""
SECONDS_BETWEEN_EVALUATION_LINES = 20.0
LOSSES_TO_DRAW = 40
SAMPLES_TO_SHOW = 2
BARS = "▁▂▃▄▅▆▇█"


def fit(value: float | None, width: int, digits: int) -> str:
    """A number in exactly `width` characters: with fewer digits where it is large, `-` for None."""
    if value is None:
        return f"{'-':>{width}}"
    if not math.isfinite(value):
        return f"{value:>{width}}"[:width]
    for places in range(digits, -1, -1):
        text = f"{value:.{places}f}"
        if len(text) <= width:
            return f"{text:>{width}}"
    return f"{f'{value:.0e}':>{width}}"[:width]


def percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def real_time_factor(row: dict[str, Any]) -> float | None:
    """Seconds of training for one second of audio."""
    speed = row["audio_seconds_per_second"]
    return 1 / speed if speed else None


def line_cells(
    row: dict[str, Any], total: int, memory_gib: float, best_wer: float | None, left: str, plan_left: str | None
) -> list[tuple[str, str]]:
    """Heading and value of each column of a logged step, padded to the same width.

    Args:
        row: a line of metrics.jsonl.
        total: steps of the run.
        memory_gib: of the card, or of the machine where there is none.
        left, plan_left: time left of the run and of the whole plan; the latter None without stages.
    """
    width = max(4, 2 * len(str(total)) + 1)
    cells = [
        ("step", f"{row['step']}/{total}".rjust(width)),
        ("epoch", f"{row['epoch']:5d}"),
        ("loss", fit(row["loss"], 8, 4)),
        ("grad norm", fit(row["grad_norm"], 9, 3)),
        ("lr", f"{row['learning_rate']:8.2e}"),
        ("audio s/s", fit(row["audio_seconds_per_second"], 9, 1)),
        ("RTF", fit(real_time_factor(row), 7, 5)),
        ("wait %", fit(percent(row["data_wait_fraction"]), 6, 1)),
        ("pad %", fit(percent(row["padding_fraction"]), 5, 1)),
        ("mem GiB", fit(row["peak_memory_gib"], 7, 2)),
        ("mem %", fit(100 * row["peak_memory_gib"] / memory_gib, 5, 0)),
        ("best WER", fit(best_wer, 8, 3)),
        ("time left", left.rjust(9)),
    ]
    if plan_left is not None:
        cells.append(("plan left", plan_left.rjust(9)))
    return [(name.rjust(len(value)), value) for name, value in cells]


def _left(seconds: float | None) -> str:
    return "" if seconds is None else f"{as_clock(seconds)} left"


def memory_of(device: torch.device) -> float:
    """Memory of the card, or of the machine where the run has none, GiB."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory / 2**30
    return psutil.virtual_memory().total / 2**30


def spark_line(values: list[float]) -> str:
    """Values as a row of bars between their least and their largest."""
    finite = [v for v in values if math.isfinite(v)]
    if len(finite) < 2:
        return ""
    low, high = min(finite), max(finite)
    scale = (len(BARS) - 1) / (high - low or 1)
    return "".join(BARS[round((v - low) * scale)] for v in finite)


def takes_a_panel(stream: Any) -> bool:
    """Whether the stream is a terminal that can move its cursor."""
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")


class Drawn:
    """A picture of the panel: log lines are printed above it without drawing it anew."""

    def __init__(self, console: Console, panel: Panel):
        # Room for the ^C that a terminal echoes: it must not begin a new line under the panel.
        options = console.options.update(width=max(console.width - 4, 20))
        self.lines = console.render_lines(panel, options, pad=False)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in self.lines:
            yield from line
            yield Segment.line()


class View:
    """Shows a run. Only the main process shows anything; nothing here exchanges anything between processes.

    Args:
        trainer: whose progress is shown.
    """

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.main = trainer.accelerator.is_main_process
        t = trainer.config.training
        judged = ("test" if "test" in trainer.sources else "validation", "guard")
        self.pace = Pace(t.eval_steps, judged, t.guard_steps)
        self.place = Place()
        self.memory_gib = memory_of(trainer.accelerator.device)
        self.lines = 0
        self.row: dict[str, Any] | None = None
        self.losses: deque[float] = deque(maxlen=LOSSES_TO_DRAW)
        self.wers: dict[str, float] = {}
        self.samples: tuple[str, list[dict[str, str]]] = ("", [])
        self.evaluation: tuple[str, int, int | None, float | None] | None = None
        self.live: Live | None = None
        self.drawn, self.cost = -math.inf, 0.0

    @contextlib.contextmanager
    def shown(self, place: Place | None = None) -> Iterator[None]:
        """The panel, where the errors go to a terminal; it goes away at the end, whatever ends it."""
        self.place = place or Place()
        if not (self.main and takes_a_panel(sys.stderr)):
            yield
            return
        console = Console(file=sys.stderr)
        # No thread draws: a worker process forked while it does would inherit its lock.
        live = Live(
            Drawn(console, self.panel()),
            console=console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=sys.stdout.isatty(),
        )
        try:
            live.start()
            console.show_cursor(True)  # so that a process that is killed leaves the terminal as it was
        except OSError as error:
            logs.silence_lost_terminal(error)
        else:
            self.live = live
        with logs.above(console):
            try:
                yield
            finally:
                self.live = None
                try:
                    live.stop()
                except OSError as error:
                    logs.silence_lost_terminal(error)

    def draw(self, now: bool = False) -> None:
        """Draws the panel anew, at most four times a second and never for more than its share of the time."""
        if self.live is None:
            return
        started = time.perf_counter()
        if now or started - self.drawn >= max(SECONDS_BETWEEN_REFRESHES, self.cost / SHARE_OF_TIME):
            try:
                self.live.update(Drawn(self.live.console, self.panel()), refresh=True)
            except OSError as error:  # the terminal was closed, and the run goes on
                logs.silence_lost_terminal(error)
                self.live = None
            self.drawn = time.perf_counter()
            self.cost = self.drawn - started

    # ---- what happens ------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Training begins."""
        self.pace.begin(self.trainer.progress.step)
        self.draw(now=True)

    def stepped(self) -> None:
        """A step is done."""
        self.pace.stepped(self.trainer.progress.step)
        self.draw()

    def logged(self, row: dict[str, Any]) -> None:
        """A line of metrics.jsonl has been written."""
        if not self.main:
            return
        self.row = row
        self.losses.append(math.nan if row["loss"] is None else row["loss"])
        step, total = row["step"], expected_steps(self.trainer)
        left = as_clock(self.pace.seconds_left(step, total))
        plan = as_clock(self.pace.plan_left(step, total, self.place)) if self.place.stages > 1 else None
        best = self.trainer.progress.best_wer
        cells = line_cells(row, total, self.memory_gib, best, left, plan)
        if self.lines % LINES_BETWEEN_HEADERS == 0:
            log.info(" ".join(name for name, _ in cells), extra=logs.ONE_LINE)
        log.info(" ".join(value for _, value in cells), extra=logs.ONE_LINE)
        self.lines += 1

    @contextlib.contextmanager
    def evaluating(self, split: str, clips: int | None) -> Iterator[Callable[[int, float | None], None]]:
        """An evaluation; what is given is to be called with the clips done and the WER so far.

        Args:
            clips: of this process; None where unknown.
        """
        started = said = time.perf_counter()

        def advance(done: int, wer: float | None) -> None:
            nonlocal said
            self.evaluation = (split, done, clips, wer)
            self.draw()
            now = time.perf_counter()
            if self.main and self.live is None and now - said >= SECONDS_BETWEEN_EVALUATION_LINES:
                said = now
                left = as_clock((now - started) / done * (clips - done)) if clips else "-"
                rate = "-" if wer is None else f"{wer:.3f}"
                log.info("evaluate %s: %d of %s clips, WER so far %s, %s left", split, done, clips or "?", rate, left)

        self.evaluation = (split, 0, clips, None)
        self.draw(now=True)
        try:
            yield advance
        finally:
            self.evaluation = None
            self.pace.evaluated(split, time.perf_counter() - started)

    def evaluated(self, step: int, split: str, board: Any) -> None:
        """An evaluation is done."""
        wer = board.total.rates()["wer"]
        if wer is not None:
            self.wers[split] = wer
        if split != "guard" and board.pairs:
            self.samples = (f"{split}, step {step}", board.pairs[:SAMPLES_TO_SHOW])
        self.draw(now=True)

    # ---- the panel ---------------------------------------------------------------------------------------------------

    def panel(self) -> Panel:
        """The panel as it stands."""
        step, total = self.trainer.progress.step, expected_steps(self.trainer)
        bars = Table.grid(padding=(0, 1), expand=True)
        for options in ({"no_wrap": True}, {"ratio": 1}, {"no_wrap": True}, {"no_wrap": True}):
            bars.add_column(**options)
        bars.add_row(
            "train", ProgressBar(total, step), f"{step}/{total} steps", _left(self.pace.seconds_left(step, total))
        )
        if self.place.stages > 1:
            done = self.place.number - 1 + step / max(total, 1)
            plan = _left(self.pace.plan_left(step, total, self.place))
            place = f"stage {self.place.number} of {self.place.stages}"
            bars.add_row("plan", ProgressBar(self.place.stages, done), place, plan)
        if self.evaluation is not None:
            split, clips, of, wer = self.evaluation
            bar = ProgressBar(of or 1, clips, pulse=of is None)
            rate = "" if wer is None else f"WER {wer:.3f}"
            bars.add_row(f"evaluate {split}", bar, f"{clips}/{of or '?'} clips", rate)
        parts: list[Any] = [bars, Text(), self._figures(), *self._notes(), *self._samples()]
        return Panel(Group(*parts), title=Text(one_line(self.trainer.output_dir)), title_align="left")

    def _figures(self) -> Table:
        grid = Table.grid(padding=(0, 2), expand=True)
        for style, ratio in (("dim", None), (None, 3), ("dim", None), (None, 2)):
            grid.add_column(style=style, ratio=ratio, no_wrap=True)
        row = self.row
        if row is None:
            return grid
        rates = row["learning_rates"]
        same = len(set(rates.values())) == 1
        rate = f"{row['learning_rate']:.2e}" if same else " ".join(f"{k} {v:.1e}" for k, v in rates.items())
        loss = "not finite" if row["loss"] is None else f"{row['loss']:.4f}"
        peak = row["peak_memory_gib"]
        memory = f"{peak:.2f} of {self.memory_gib:.1f} GiB ({100 * peak / self.memory_gib:.0f} %)"
        factor = fit(real_time_factor(row), 7, 5).strip()
        grid.add_row(
            "loss", f"{loss} {spark_line(list(self.losses))}", "audio s/s", f"{row['audio_seconds_per_second']:.1f}"
        )
        grid.add_row("grad norm", fit(row["grad_norm"], 8, 3).strip(), "real-time factor", factor)
        grid.add_row("learning rate", rate, "seconds a step", f"{row['seconds_per_step']:.3f}")
        grid.add_row("epoch", str(row["epoch"]), "data wait", f"{percent(row['data_wait_fraction']):.1f} %")
        grid.add_row("peak memory", memory, "padding", f"{percent(row['padding_fraction']):.1f} %")
        return grid

    def _notes(self) -> list[Text]:
        """WER by split, and what drifted."""
        p, notes = self.trainer.progress, []
        base = p.base_wer
        for split, wer in self.wers.items():
            before = f", base model {base[split]:.3f}" if split in base else ""
            best = (
                f", best {p.best_wer:.3f} at step {p.best_step}"
                if split == "validation" and p.best_wer is not None
                else ""
            )
            notes.append(f"WER {split} {wer:.3f}{before}{best}")
        if p.drift_warnings:
            notes.append("warnings: " + ", ".join(f"{k.replace('_', ' ')} {n}" for k, n in p.drift_warnings.items()))
        return [Text(note, no_wrap=True, overflow="ellipsis") for note in notes]

    def _samples(self) -> list[Text]:
        title, pairs = self.samples
        texts = [Text(), Text(title, style="dim")] if pairs else []
        for pair in pairs:
            for name, style in (("reference", "dim"), ("hypothesis", "")):
                texts.append(Text(f"{name:<11}{one_line(pair[name])}", style=style, no_wrap=True, overflow="ellipsis"))
        return texts
