"""Learning-rate schedules of transformers and torch, kept apart from the optimizer.

The schedule runs on a stand-in with one scalar a parameter group and its rates are copied over. So it works with every
optimizer wrapper (DeepSpeed's, offloading ones that are no torch Optimizer), and with learning rates held in tensors.
"""

from typing import Any

import torch
from torch.optim.lr_scheduler import OneCycleLR

from finetune.config.schema import TrainingConfig


def warmup_steps(config: TrainingConfig, total_steps: int) -> int:
    """Return the steps in which the learning rate rises."""
    return config.warmup_steps or int(config.warmup_ratio * total_steps)


class Schedule:
    """Learning rates over `num_training_steps` optimizer steps.

    Args:
        name: a name of `transformers.SchedulerType`, or onecycle (torch's OneCycleLR, cosine).
        groups: parameter groups of the optimizer; each group's `lr` is its peak.
        num_warmup_steps: steps of rising rates.
        num_training_steps: steps of the run.
    """

    def __init__(self, name: str, groups: list[dict[str, Any]], num_warmup_steps: int, num_training_steps: int):
        peaks = [float(group["lr"]) for group in groups]
        self.stand_in = torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(()))], "lr": lr} for lr in peaks])
        if name == "onecycle":
            share = min(max(num_warmup_steps, 1) / num_training_steps, 1.0)
            self.scheduler = OneCycleLR(
                self.stand_in,
                peaks,
                total_steps=num_training_steps + 1,
                pct_start=share,
                anneal_strategy="cos",
                cycle_momentum=False,
            )
        else:
            from transformers import get_scheduler

            specific = {"min_lr_rate": 0.1} if name == "cosine_with_min_lr" else None
            self.scheduler = get_scheduler(name, self.stand_in, num_warmup_steps, num_training_steps, specific)
        self.stand_in.step()  # torch warns when a schedule steps before its optimizer does
        self.limit = num_training_steps
        self.steps = 0

    def rates(self) -> list[float]:
        """The learning rates of the coming step, one a group."""
        return [float(group["lr"]) for group in self.stand_in.param_groups]

    def apply(self, optimizer: torch.optim.Optimizer) -> None:
        """Writes the rates into the optimizer's groups; a rate that is a tensor keeps its identity."""
        for group, rate in zip(optimizer.param_groups, self.rates(), strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def step(self) -> None:
        """One optimizer step is done. Beyond the end the last rate stays."""
        self.steps += 1
        if self.steps <= self.limit:
            self.scheduler.step()

    def step_to(self, share: float) -> None:
        """Step to this share of the run, where epochs and not a number of steps end it."""
        while self.steps < int(share * self.limit):
            self.step()

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Step a fresh schedule to the saved step, so that a longer run than planned gets its own curve."""
        for _ in range(state["steps"]):
            self.step()
