"""How long a run and its plan of stages will still take."""

import time
from collections import deque
from dataclasses import dataclass

STEPS_TO_AVERAGE = 200


@dataclass(frozen=True)
class Place:
    """Where a run stands in its plan of stages."""

    number: int = 1
    """Of the stage, from 1 on."""
    stages: int = 1
    steps_after: int | None = 0
    """Optimizer steps of the later stages; None where they are not known beforehand."""


def place_in_plan(number: int, max_steps: list[int]) -> Place:
    """Return the place of stage `number`, from `training.max_steps` of every stage; below 1 where epochs decide."""
    later = max_steps[number:]
    return Place(number, len(max_steps), sum(later) if all(steps > 0 for steps in later) else None)


class Eta:
    """Estimates the time left from the seconds of a step and of each split's evaluation.

    Args:
        eval_steps: steps between two evaluations of data.validation; 0: none in between.
        judged: the splits that are evaluated at the end.
        guard_steps: steps between two evaluations of data.guard (`training.guard_steps`).
        each: the splits of each evaluation.
    """

    def __init__(
        self,
        eval_steps: int,
        judged: tuple[str, ...],
        guard_steps: int = 0,
        each: tuple[str, ...] = ("validation",),
    ):
        self.each = each
        self.eval_steps, self.judged, self.guard_steps = eval_steps, judged, guard_steps
        self.evaluation_seconds: dict[str, float] = {}
        self.paused = 0.0
        self.marks: deque[tuple[int, float]] = deque(maxlen=STEPS_TO_AVERAGE)
        self.begun = 0

    def begin(self, step: int) -> None:
        self.marks.clear()
        self.marks.append((step, self._now()))
        self.begun = step

    def stepped(self, step: int) -> None:
        if len(self.marks) == 2 and self.marks[0][0] == self.begun:
            self.marks.popleft()  # the first step warms up
        self.marks.append((step, self._now()))

    def evaluated(self, split: str, seconds: float) -> None:
        self.evaluation_seconds[split] = seconds
        self.paused += seconds

    def _now(self) -> float:
        return time.perf_counter() - self.paused

    def seconds_per_step(self) -> float | None:
        """Return the mean of the last steps with everything but evaluations; None before the second: the first one
        waits for workers to start."""
        if len(self.marks) < 2 or self.marks[0][0] == self.begun:
            return None
        (first, began), (last, ended) = self.marks[0], self.marks[-1]
        return (ended - began) / max(last - first, 1)

    def seconds_left(self, step: int, total: int) -> float | None:
        """Return the time left of this run, with evaluations once one has been timed; None before the second step."""
        each = self.seconds_per_step()
        if each is None:
            return None
        known = self.evaluation_seconds
        evaluations = total // self.eval_steps - step // self.eval_steps if self.eval_steps else 0
        if step < total and (not self.eval_steps or total % self.eval_steps):
            evaluations += 1
        guarded = 0
        if self.eval_steps and self.guard_steps and step < total:  # not at the last step: the closing ones follow it
            every = max(self.eval_steps, self.guard_steps)
            guarded = (total - 1) // every - step // every
        during = evaluations * sum(known.get(split, 0.0) for split in self.each)
        during += guarded * known.get("guard", 0.0)
        return (total - step) * each + during + sum(known.get(split, 0.0) for split in self.judged)

    def plan_left(self, step: int, total: int, place: Place) -> float | None:
        """Return the time left of this run and the later stages at the same pace; None where their steps are not
        known."""
        left, each = self.seconds_left(step, total), self.seconds_per_step()
        if left is None or each is None or place.steps_after is None:
            return None
        return left + each * place.steps_after


def as_clock(seconds: float | None) -> str:
    """Format seconds as h:mm:ss."""
    if seconds is None:
        return "-"
    minutes, seconds = divmod(max(round(seconds), 0), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"
