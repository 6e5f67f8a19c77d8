"""Signs that a training diverges, in logged lines and evaluations, and which settings to change."""

import statistics
from collections import deque
from typing import Any

from finetune.config.schema import RunConfig
from finetune.training.progress import Progress

FIRST_LINES = 5
"""Logged lines whose median is the level of the first steps, or twice the first line's value if that is less: the
first step is the base model's."""
LINES, LASTING_LINES = 5, 3
"""Logged lines over which values are smoothed, by their median; and in a row in which a sign has to last."""
LOSS_FACTOR = 3.0
NORM_FACTOR = 100.0
LEAST_RISE = 0.5
"""Of the loss for a second of audio, in nats, and of the norm: a model that fits its first clips has a loss near 0."""
WER_FACTOR, WER_MORE = 1.5, 0.1
"""Times the base model's WER on validation, and above it by so much."""
WER_EVALUATIONS = 2
"""In a row above that, the last no better than the one before."""


class Divergence:
    """Looks for divergence. What it keeps goes into checkpoints (`state`).

    The loss is taken for a second of audio where it is a mean over clips, so that lines of long clips compare with
    lines of short ones.

    Args:
        warmup: steps of rising learning rate, after which lines are judged.
    """

    def __init__(self, config: RunConfig, progress: Progress, warmup: int):
        self.config, self.progress, self.warmup = config, progress, warmup
        self.first: dict[str, list[float]] = {"loss": [], "grad_norm": []}
        self.last: dict[str, deque[float]] = {name: deque(maxlen=LINES) for name in self.first}
        self.lasting = dict.fromkeys(self.first, 0)
        self.wers: list[float] = []
        """On validation, of the last evaluations."""

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, as JSON."""
        last = {name: list(values) for name, values in self.last.items()}
        return {"first": self.first, "last": last, "lasting": self.lasting, "wers": self.wers}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on with what `state` returned."""
        self.first, self.lasting, self.wers = state["first"], state["lasting"], state["wers"]
        self.last = {name: deque(values, maxlen=LINES) for name, values in state["last"].items()}

    def of_row(self, row: dict[str, Any]) -> str | None:
        """Look at a logged line; return the sign that has lasted long enough, with the settings to change."""
        length = 1.0
        if self.config.training.loss_reduction == "mean_batch":
            _, clips, seconds, _ = (sum(column) for column in zip((0, 0, 0.0, 0.0), *row["batch_lengths"].values()))
            length = seconds / clips if clips else 1.0
        # What distillation adds begins near 0 and rises rightly.
        loss = None if row["loss"] is None else row["loss"] - row.get("distillation", 0.0)
        signs = [
            self._look("loss", loss, length, LOSS_FACTOR, row["step"]),
            self._look("grad_norm", row["grad_norm"], 1.0, NORM_FACTOR, row["step"]),
        ]
        sign = next(filter(None, signs), None)
        return None if sign is None else self.message(sign, row["step"])

    def _look(self, name: str, value: float | None, length: float, factor: float, step: int) -> str | None:
        if value is None:  # no step counted: that is said elsewhere
            return None
        first, last = self.first[name], self.last[name]
        if len(first) < FIRST_LINES:
            first.append(value / length)
        last.append(value / length)
        if len(first) < FIRST_LINES:
            return None
        level, now = min(statistics.median(first), 2 * first[0]), statistics.median(last)
        sign = step > self.warmup and now > max(factor * level, level + LEAST_RISE)
        self.lasting[name] = self.lasting[name] + 1 if sign else 0
        if self.lasting[name] < LASTING_LINES:
            return None
        what = {"loss": "the loss", "grad_norm": "the gradient norm"}[name]
        return f"{what} is {now / max(level, 1e-9):.1f} times that of the first steps over {LINES} logged lines"

    def of_evaluation(self, step: int, wer: float, base: float | None) -> str | None:
        """Look at an evaluation of data.validation after step 0."""
        self.wers = [*self.wers, wer][-WER_EVALUATIONS:]
        above = base is not None and all(w > max(WER_FACTOR * base, base + WER_MORE) for w in self.wers)
        if not above or len(self.wers) < WER_EVALUATIONS or self.wers[-1] < self.wers[-2]:
            return None
        return self.message(f"WER on validation is {wer:.3f}, {base or 0.0:.3f} before training", step)

    def message(self, sign: str, step: int) -> str:
        """Return the sign, what is kept, and the settings to change, the likeliest first."""
        p, has_validation = self.progress, self.config.data.validation is not None
        kept = "There is no evaluation yet, and so no better model to keep"
        if p.best_step is not None and p.best_wer is not None:
            best = "the base model" if p.best_step == 0 else f"that of step {p.best_step}"
            kept = f"The best model so far, {best}, {step - p.best_step} steps ago (WER {p.best_wer:.3f}), is kept"
        elif not has_validation:
            kept = "Without data.validation no better model is kept; earlier weights are in checkpoints only"
        return f"training diverges: {sign}, at step {step}. {kept}. To change, likeliest first: {self._advice()}."

    def _advice(self) -> str:
        m, t = self.config.model, self.config.training
        found = [f"training.learning_rate={t.learning_rate / 10:g} (now {t.learning_rate:g})"]
        longer = max(2 * self.warmup, 100)
        found.append(f"training.warmup_steps={longer} (now {self.warmup})")
        if not t.max_grad_norm or t.max_grad_norm > 1:
            found.append(f"training.max_grad_norm=1 (now {t.max_grad_norm:g}{'' if t.max_grad_norm else ', off'})")
        if not (m.freeze_batchnorm or m.sync_batchnorm or m.freeze_encoder or m.lora_rank):
            found.append("model.freeze_batchnorm=true")
        return ", ".join(found)
