"""Callbacks with which tests take part in a training: faults, signals and looks around its steps and evaluations."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from finetune.training.callbacks import Callback
from finetune.training.trainer import Trainer


class _AroundSteps(Callback):
    def __init__(self, make: Callable[[], AbstractContextManager[Any]]):
        self.make = make

    def around_step(self, step: int) -> AbstractContextManager[None]:
        return self.make()


class _BeforeEvaluations(Callback):
    def __init__(self, call: Callable[[str], None]):
        self.call = call

    def on_evaluation_begin(self, split: str, clips: int | None) -> None:
        self.call(split)


def around_steps(trainer: Trainer, make: Callable[[], AbstractContextManager[Any]]) -> None:
    """Encloses each step of the run in the context that `make` returns."""
    trainer.add_callback(_AroundSteps(make))


def before_evaluations(trainer: Trainer, call: Callable[[str], None]) -> None:
    """Calls `call` with the split as each evaluation begins."""
    trainer.add_callback(_BeforeEvaluations(call))


def call_base_wer(trainer: Trainer, wer: float) -> None:
    """Lets the base model's WER on guard_choice be `wer`, once it is evaluated."""
    evaluate_base = trainer.evaluate_base

    def then() -> None:
        evaluate_base()
        trainer.progress.base_wer["guard_choice"] = wer

    trainer.evaluate_base = then


def callback_of(trainer: Trainer, kind: type[Callback]) -> Any:
    """The run's callback of a class."""
    return next(c for c in trainer.callbacks if isinstance(c, kind))


def held_tensors(trainer: Trainer) -> list[torch.Tensor]:
    """What callbacks hold of weights, such as a moving average."""
    return [tensor for callback in trainer.callbacks for tensor in callback.held_tensors().values()]
