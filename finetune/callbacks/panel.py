"""The view of a run: a panel on a terminal, and one line of fixed width a logged step everywhere."""

import contextlib
import logging
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from accelerate import Accelerator
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from finetune import logs
from finetune.callbacks.eta import Eta, Place, as_clock
from finetune.config.guard_limit import parse_guard_limit
from finetune.config.schema import RunConfig
from finetune.data.batch import Batch
from finetune.data.guard_halves import CHOICE, GUARDS
from finetune.evaluation.scores import WerAccumulator
from finetune.security.safe_text import one_line
from finetune.training.callbacks import Callback, EvaluationResult, StepResult
from finetune.training.progress import Progress

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
    texts = [f"{value:.{places}f}" for places in range(digits, -1, -1)] + [f"{value:.0e}"]
    return f"{next((text for text in texts if len(text) <= width), texts[-1]):>{width}}"[:width]


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
        ("wait %", fit(100 * row["data_wait_fraction"], 6, 1)),
        ("pad %", fit(100 * row["padding_fraction"], 5, 1)),
        ("mem GiB", fit(row["peak_memory_gib"], 7, 2)),
        ("mem %", fit(100 * row["peak_memory_gib"] / memory_gib, 5, 0)),
        ("best WER", fit(best_wer, 8, 3)),
        ("time left", left.rjust(9)),
    ]
    cells += [] if plan_left is None else [("plan left", plan_left.rjust(9))]
    return [(name.rjust(len(value)), value) for name, value in cells]


def spark_line(values: list[float]) -> str:
    """Values as a row of bars between their least and their largest."""
    finite = [v for v in values if math.isfinite(v)]
    if len(finite) < 2:
        return ""
    low, high = min(finite), max(finite)
    scale = (len(BARS) - 1) / (high - low or 1)
    return "".join(BARS[round((v - low) * scale)] for v in finite)


@dataclass
class Evaluation:
    """An evaluation that is running."""

    split: str
    clips: int | None
    """Of this process; None where unknown."""
    started: float
    logged: float
    done: int = 0
    wer: float | None = None


@contextlib.contextmanager
def _lost_terminal_is_silent() -> Iterator[None]:
    try:
        yield
    except OSError as error:  # the terminal was closed
        logs.silence_lost_terminal(error)


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


class ProgressPanel(Callback):
    """Shows a run on the main process; nothing here communicates.

    Args:
        judged: the split that is evaluated at the end, beside data.guard.
        expected_steps: returns the steps of the whole run, as far as is known.
        place: in a plan of stages.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        config: RunConfig,
        progress: Progress,
        judged: str,
        expected_steps: Callable[[], int],
        place: Place,
    ):
        t = config.training
        self.is_main, self.progress = accelerator.is_main_process, progress
        self.expected_steps, self.place, self.title = expected_steps, place, t.output_dir
        limit = config.data.guard_limit
        self.limit = None if limit is None else parse_guard_limit(limit)
        each, guard_steps = (("validation",), t.guard_steps) if limit is None else (("validation", CHOICE), 0)
        self.eta = Eta(t.eval_steps, (judged, "guard"), guard_steps, each)
        on_gpu, device = accelerator.device.type == "cuda", accelerator.device
        memory = torch.cuda.get_device_properties(device).total_memory if on_gpu else psutil.virtual_memory().total
        self.memory_gib = memory / 2**30
        self.lines = 0
        self.row: dict[str, Any] | None = None
        self.losses: deque[float] = deque(maxlen=LOSSES_TO_DRAW)
        self.wers: dict[str, float] = {}
        self.samples: tuple[str, list[dict[str, str]]] = ("", [])
        self.evaluation: Evaluation | None = None
        self.live: Live | None = None
        self.drawn, self.cost = -math.inf, 0.0

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Show the panel where stderr is a terminal that can move its cursor; take it away on exit, however that
        comes."""
        moves = sys.stderr.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")
        if not (self.is_main and moves):
            yield
            return
        console = Console(file=sys.stderr)
        first, redirect = Drawn(console, self.panel()), sys.stdout.isatty()
        # No thread draws: a worker process forked while it does would inherit its lock.
        live = Live(first, console=console, auto_refresh=False, transient=True, redirect_stdout=redirect)
        with _lost_terminal_is_silent():
            live.start()
            console.show_cursor(True)  # so that a process that is killed leaves the terminal as it was
            self.live = live
        with logs.above(console):
            try:
                yield
            finally:
                self.live = None
                with _lost_terminal_is_silent():
                    live.stop()

    def draw(self, now: bool = False) -> None:
        """Draw the panel anew, at most four times a second and never for more than its share of the time."""
        if self.live is None:
            return
        started = time.perf_counter()
        if now or started - self.drawn >= max(SECONDS_BETWEEN_REFRESHES, self.cost / SHARE_OF_TIME):
            live, self.live = self.live, None
            with _lost_terminal_is_silent():  # the run goes on
                live.update(Drawn(live.console, self.panel()), refresh=True)
                self.live = live
            self.drawn = time.perf_counter()
            self.cost = self.drawn - started

    # ---- moments of the run -----------------------------------------------------------------------------------------

    def on_train_begin(self) -> None:
        self.eta.begin(self.progress.step)
        self.draw(now=True)

    def on_step_end(self, result: StepResult) -> None:
        self.eta.stepped(result.step)
        self.draw()

    def on_pause(self, seconds: float) -> None:
        self.eta.paused += seconds

    def on_log(self, row: dict[str, Any], own_wait_seconds: float) -> None:
        if not self.is_main:
            return
        self.row = row
        self.losses.append(math.nan if row["loss"] is None else row["loss"])
        step, total = row["step"], self.expected_steps()
        left = as_clock(self.eta.seconds_left(step, total))
        plan = as_clock(self.eta.plan_left(step, total, self.place)) if self.place.stages > 1 else None
        cells = line_cells(row, total, self.memory_gib, self.progress.best_wer, left, plan)
        if self.lines % LINES_BETWEEN_HEADERS == 0:
            log.info(" ".join(name for name, _ in cells), extra=logs.ONE_LINE)
        log.info(" ".join(value for _, value in cells), extra=logs.ONE_LINE)
        self.lines += 1

    def on_evaluation_begin(self, split: str, clips: int | None) -> None:
        now = time.perf_counter()
        self.evaluation = Evaluation(split, clips, started=now, logged=now)
        self.draw(now=True)

    def on_evaluation_batch(self, split: str, batch: Batch, hypotheses: list[str], wer: WerAccumulator) -> None:
        e, now = self.evaluation, time.perf_counter()
        assert e is not None
        e.done, e.wer = wer.total.clips, wer.total.rates()["wer"]
        self.draw()
        if self.is_main and self.live is None and now - e.logged >= SECONDS_BETWEEN_EVALUATION_LINES:
            e.logged = now
            left = as_clock((now - e.started) / max(e.done, 1) * (e.clips - e.done)) if e.clips else "-"
            rate = "-" if e.wer is None else f"{e.wer:.3f}"
            log.info("evaluate %s: %d of %s clips, WER so far %s, %s left", split, e.done, e.clips or "?", rate, left)

    def on_evaluation_cancelled(self, split: str) -> None:
        if self.evaluation is not None:
            self.eta.evaluated(split, time.perf_counter() - self.evaluation.started)
            self.evaluation = None

    def on_evaluation_end(self, result: EvaluationResult) -> None:
        self.on_evaluation_cancelled(result.split)
        name = result.split if result.weights == "raw" or result.is_best else f"{result.split} ({result.weights})"
        rate = result.wer.total.rates()["wer"]
        if rate is not None:
            self.wers[name] = rate
        if result.split not in GUARDS and result.wer.pairs:
            self.samples = (f"{name}, step {result.step}", result.wer.pairs[:SAMPLES_TO_SHOW])
        self.draw(now=True)

    # ---- the panel --------------------------------------------------------------------------------------------------

    def panel(self) -> Panel:
        """Return the panel as it stands."""
        step, total, e = self.progress.step, self.expected_steps(), self.evaluation
        bars = Table.grid(padding=(0, 1), expand=True)
        for ratio in (None, 1, None, None):
            bars.add_column(ratio=ratio, no_wrap=ratio is None)
        left = self.eta.seconds_left(step, total)
        bars.add_row("train", ProgressBar(total, step), f"{step}/{total} steps", _left(left))
        if self.place.stages > 1:
            bar = ProgressBar(self.place.stages, self.place.number - 1 + step / max(total, 1))
            plan = _left(self.eta.plan_left(step, total, self.place))
            bars.add_row("plan", bar, f"stage {self.place.number} of {self.place.stages}", plan)
        if e is not None:
            bar = ProgressBar(e.clips or 1, e.done, pulse=e.clips is None)
            rate = "" if e.wer is None else f"WER {e.wer:.3f}"
            bars.add_row(f"evaluate {e.split}", bar, f"{e.done}/{e.clips or '?'} clips", rate)
        parts = [bars, Text(), self._figures(), *self._notes(), *self._samples()]
        return Panel(Group(*parts), title=Text(one_line(self.title)), title_align="left")

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
        share = row["peak_memory_gib"] / self.memory_gib
        memory = f"{row['peak_memory_gib']:.2f} of {self.memory_gib:.1f} GiB ({100 * share:.0f} %)"
        speed, loss = f"{row['audio_seconds_per_second']:.1f}", f"{loss} {spark_line(list(self.losses))}"
        grid.add_row("loss", loss, "audio s/s", speed)
        factor = fit(real_time_factor(row), 7, 5).strip()
        grid.add_row("grad norm", fit(row["grad_norm"], 8, 3).strip(), "real-time factor", factor)
        grid.add_row("learning rate", rate, "seconds a step", f"{row['seconds_per_step']:.3f}")
        grid.add_row("epoch", str(row["epoch"]), "data wait", f"{100 * row['data_wait_fraction']:.1f} %")
        grid.add_row("peak memory", memory, "padding", f"{100 * row['padding_fraction']:.1f} %")
        return grid

    def _notes(self) -> list[Text]:
        """Return WER by split, and what drifted."""
        p, notes = self.progress, []
        for split, wer in self.wers.items():
            note = f"WER {split} {wer:.3f}"
            if split in p.base_wer:
                note += f", base model {p.base_wer[split]:.3f}"
                if split == CHOICE and self.limit is not None:
                    note += f", {self.limit.highest(p.base_wer[split]):.3f} at most"
            if split == "validation" and p.best_wer is not None:
                note += f", best {p.best_wer:.3f} at step {p.best_step}"
            notes.append(note)
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


def _left(seconds: float | None) -> str:
    return "" if seconds is None else f"{as_clock(seconds)} left"
