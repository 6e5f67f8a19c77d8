"""A pull of the weights towards the start of a run (L2-SP)."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from safetensors.torch import load_file

from finetune.errors import UserError
from finetune.models.protocols import AsrModel
from finetune.strategies.optimizers import unwrap_optimizer
from finetune.training.callbacks import Callback, StepResult
from finetune.training.trained_state import START_FILE, local_part, take_over, whole_tensor

NEW_HEAD = "ctc_decoder."
NAMED = 3


class BasePull(Callback):
    """L2 towards the starting point (L2-SP: Li, Grandvalet and Davoine, "Explicit inductive bias for transfer learning
    with convolutional networks", ICML 2018, arXiv 1802.01483), decoupled from the gradient as AdamW's weight decay.

    After each step that counts, w <- w - rate x strength x (w - w0), with the learning rate of w's group in that
    step. It is the gradient step of strength / 2 x ||w - w0||^2 under plain descent, and no optimizer's moments see
    it. w0 is what w was when the run began: a copy in w's type where w is, sharded as w is.

    Args:
        model: as it is trained, prepared by its engine.
        optimizer: prepared; its groups hold the model's parameters.
        strength: `training.l2_sp`, in 1 / learning rate.
        new_head: whether the CTC head began with random weights, to which nothing should be pulled.
    """

    def __init__(self, model: AsrModel, optimizer: AcceleratedOptimizer, strength: float, new_head: bool):
        self.optimizer, self.strength = optimizer, strength
        self.trained: dict[str, torch.nn.Parameter] = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and not (new_head and name.startswith(NEW_HEAD))
        }
        self.start = {name: parameter.detach().clone() for name, parameter in self.trained.items()}

    def frozen_tensors(self) -> Iterable[torch.Tensor]:
        return [local_part(tensor) for tensor in self.start.values()]

    @torch.no_grad()
    def on_step_end(self, result: StepResult) -> None:
        """Pull, after a step that counts."""
        if result.skipped is not None:
            return
        names = {id(parameter): name for name, parameter in self.trained.items()}
        for group in unwrap_optimizer(self.optimizer).param_groups:
            own = [names[id(parameter)] for parameter in group["params"] if id(parameter) in names]
            pull = float(group["lr"]) * self.strength
            if own and pull:
                weights = [local_part(self.trained[name].detach()) for name in own]
                torch._foreach_lerp_(weights, [local_part(self.start[name]) for name in own], pull)

    @torch.no_grad()
    def before_save(self, is_main: bool) -> tuple[dict[str, Any], dict[str, dict[str, torch.Tensor]]]:
        kept = {}
        for name, tensor in self.start.items():
            whole = whole_tensor(tensor)  # all ranks take part
            if is_main:
                kept[name] = whole.to("cpu", copy=True).contiguous()
        return {}, {START_FILE: kept}

    @torch.no_grad()
    def on_resume(self, checkpoint: Path, state: dict[str, Any]) -> None:
        """Take over the start of the run, of any engine and number of processes.

        Raises:
            UserError: the checkpoint does not hold it, or that of other parameters.
        """
        file, way_out = checkpoint / START_FILE, "Set training.l2_sp: 0 to go on without the pull"
        if not file.is_file():  # a checkpoint that has lost it is damaged and never comes here
            raise UserError(
                f"training.l2_sp: {checkpoint} was written without it, and does not hold the weights that the run "
                f"started from. {way_out}, or begin a new run."
            )
        saved = load_file(file)
        if other := [name for name, own in self.start.items() if name not in saved or saved[name].shape != own.shape]:
            some = ", ".join(other[:NAMED]) + (f" and {len(other) - NAMED} more" if len(other) > NAMED else "")
            raise UserError(
                f"training.l2_sp: {file} holds no start of {some}, which the run trains now. Train what it trained "
                f"before (model.freeze_encoder, model.lora_rank). {way_out}."
            )
        for name, start in self.start.items():
            take_over(start, saved[name])
