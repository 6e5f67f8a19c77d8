"""What happens beside the training: the moments of a run that a callback can take part in.

All ranks have the same callbacks and call them in the same order, so a callback may communicate.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from finetune.data.batch import Batch
from finetune.evaluation.scores import WerAccumulator
from finetune.models.protocols import AsrModel
from finetune.training.step_batches import StepBatches

LOST_ON_GUARD = (
    "Less forgetting: a share of the original domain's data (data.rehearsal), a lower training.learning_rate, "
    "training.layer_decay, training.l2_sp, or fewer steps."
)
"""The remedy where data.guard gets worse."""


@dataclass(frozen=True)
class StepResult:
    """What an optimizer step came to, the same on all ranks but for `batches`."""

    step: int
    """Number of the step, from 1."""
    loss: float
    """Over all ranks; may be not finite."""
    grad_norm: float | None
    """Before clipping; None where the engine does not report it."""
    skipped: str | None
    """Why the step changed nothing: loss, gradient, spike or scale. None: it counts."""
    batches: StepBatches


@dataclass(frozen=True)
class EvaluationResult:
    """An evaluation of one split, merged over all ranks."""

    step: int
    split: str
    wer: WerAccumulator
    weights: str = "raw"
    """Which weights were evaluated: raw, or a candidate's (ema, average, way 0.5)."""
    is_best: bool = False
    """Whether this is the closing evaluation of the best model rather than of the model in training."""
    base_wer: float | None = None
    """WER of the base model on this split; None where it was not measured."""
    change: dict[str, Any] | None = None
    """On data.guard and its halves: the paired comparison with the base model, see
    `finetune.evaluation.utterance_counts.compare_evaluations`."""

    @property
    def in_training(self) -> bool:
        """Whether the raw weights of the model in training were evaluated."""
        return self.weights == "raw" and not self.is_best


@dataclass(frozen=True)
class Candidate:
    """Other weights than the raw ones, which may become the best model."""

    weights: str
    """Their name in logs and files, such as ema."""
    inside: AbstractContextManager[None]
    """Puts them into the model while it is entered; a final candidate may leave them there."""
    description: str = ""
    """For the log."""
    details: dict[str, Any] = field(default_factory=dict)
    """For summary.json."""


class ComputeGradients(Protocol):
    """Forward and backward over the micro-batches of a step; return the sum of this rank's losses (float64)."""

    def __call__(self, batches: list[Batch], micro_batches: int, exchange: bool = True) -> torch.Tensor:
        """Accumulate gradients.

        Args:
            batches: micro-batches of this rank.
            micro_batches: the most that any rank has.
            exchange: average the gradients over the ranks with the last one.
        """
        ...


class Callback:
    """Takes part in a run. Every method does nothing by default."""

    def on_train_begin(self) -> None:
        """The first step of this process is about to begin."""

    def on_step_begin(self, step: int) -> None:
        """Step number `step` has its batches and is about to run."""

    def on_batch_begin(self, batch: Batch) -> None:
        """The forward pass of a micro-batch is about to run."""

    def on_part(self, part: str) -> None:
        """From here on time belongs to `part` (see `finetune.callbacks.profiler.PARTS`)."""

    def on_step_end(self, result: StepResult) -> None:
        """A step is done."""

    def on_log(self, row: dict[str, Any], own_wait_seconds: float) -> None:
        """A line of metrics.jsonl is written; this rank waited for its own data so long since the last one."""

    def on_evaluation_begin(self, split: str, clips: int | None) -> None:
        """An evaluation begins; `clips` is this rank's share, None where unknown."""

    def on_evaluation_batch(self, split: str, batch: Batch, hypotheses: list[str], wer: WerAccumulator) -> None:
        """A batch is decoded; `wer` counts this rank's errors so far."""

    def on_evaluation_end(self, result: EvaluationResult) -> None:
        """A split is evaluated."""

    def on_evaluation_cancelled(self, split: str) -> None:
        """An evaluation is left early because the run has to stop."""

    def on_evaluations_done(self) -> None:
        """All evaluations that were due are written."""

    def on_pause(self, seconds: float) -> None:
        """`seconds` went by that are no part of the training."""

    def on_steps_end(self, failed: bool) -> None:
        """No more steps come: all are done, or an error or a signal ends them (`failed`)."""

    def on_train_end(self) -> None:
        """The run is over and its results are written."""

    def on_fresh_run(self) -> None:
        """The run begins at step 0: remove what another one left. On the main process."""

    # ---- what a callback adds to the run ----------------------------------------------------------------------------

    def around_step(self, step: int) -> AbstractContextManager[None]:
        """Return a context that encloses the step."""
        return nullcontext()

    def wrap_gradients(self, compute: ComputeGradients) -> ComputeGradients:
        """Return what computes a step's gradients in place of `compute`."""
        return compute

    def candidates(self, model: AsrModel, final: bool) -> Iterable[Candidate]:
        """Return other weights to evaluate on data.validation; `model` is whole, `final` where training is over.

        A generator is asked for the next one when the one before is evaluated, so that it may go by what
        `on_evaluation_end` found of it.
        """
        return []

    def on_validated(self, model: AsrModel, step: int, wer: float) -> None:
        """The raw weights of `step` have this WER on data.validation; `model` holds them whole."""

    def held_tensors(self) -> dict[str, torch.Tensor]:
        """Return this process's weights beside the model's, by name; none is saved unless all are finite."""
        return {}

    def frozen_tensors(self) -> Iterable[torch.Tensor]:
        """Return this process's weights beside the model's that training does not change, for accounts of memory."""
        return []

    def ends_run(self) -> str | None:
        """Return why the run should end at the present step; None: it goes on. Asked where
        `training.stop_if_diverged` is set, after logged steps and evaluations; the main process's word counts."""
        return None

    def before_save(self, is_main: bool) -> tuple[dict[str, Any], dict[str, dict[str, torch.Tensor]]]:
        """Return what a checkpoint keeps of this callback: JSON by key, the same on all ranks, and tensors by
        safetensors file, on the main process."""
        return {}, {}

    def on_resume(self, checkpoint: Path, state: dict[str, Any]) -> None:
        """Take over what `before_save` put into a checkpoint; `state` is its whole JSON state."""

    def summary(self) -> dict[str, Any]:
        """Return entries of summary.json."""
        return {}
