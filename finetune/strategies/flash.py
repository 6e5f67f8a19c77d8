"""flashoptim: bf16 weights kept to 24 bits by a correction byte, 8-bit states, and a step inside the backward pass.

Its Triton kernels need a CUDA GPU.
"""

import math
from typing import Any, cast

import torch
from flashoptim import FlashAdamW

from finetune.errors import UserError


def flash_adamw(
    groups: list[dict[str, Any]], *, release: bool, betas: tuple[float, float], eps: float
) -> torch.optim.Optimizer:
    """Make FlashAdamW with 8-bit states, and a correction byte for each weight where the weights are in bf16.

    Args:
        groups: parameter groups, each of one type.
        release: step each parameter as soon as its gradient is there, and free the gradient.

    Raises:
        UserError: the parameters are not on a CUDA GPU.
    """
    parameters = [p for group in groups for p in group["params"]]
    if not parameters[0].is_cuda:
        raise UserError(
            "training.optimizer: flash_adamw runs on CUDA GPUs only, the model is on the "
            f"{parameters[0].device.type}. Take adamw_8bit, or adamw_8bit_ao with model.dtype: bfloat16."
        )
    bits = 24 if any(p.dtype != torch.float32 for p in parameters) else None
    kind = ReleasingAdamW if release else FlashAdamW
    return kind(cast(Any, groups), lr=groups[0]["lr"], betas=betas, eps=eps, master_weight_bits=bits)


class ReleasingAdamW(FlashAdamW):
    """FlashAdamW that steps each parameter when its gradient is complete and frees the gradient at once.

    `step` and `zero_grad` have nothing left to do. All gradients never exist at once, so they cannot be clipped,
    accumulated or checked beforehand; their norm is known only afterwards.
    """

    def __init__(self, groups: list[dict[str, Any]], **options: Any):
        super().__init__(cast(Any, groups), **options)  # annotated as tensors alone
        self.squared_norms: list[torch.Tensor] = []
        # By position: loading a state makes new groups.
        self.group_of = {id(p): i for i, group in enumerate(self.param_groups) for p in group["params"]}
        for group in self.param_groups:
            for p in group["params"]:
                p.register_post_accumulate_grad_hook(self._step_now)

    @torch.no_grad()
    def _step_now(self, p: torch.Tensor) -> None:
        assert p.grad is not None
        self.squared_norms.append(p.grad.float().square().sum())
        self.step_param(p, self.param_groups[self.group_of[id(p)]])
        p.grad = None

    def step(self, closure: object = None) -> None:
        """Nothing: the backward pass did it."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: the backward pass did it."""

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Return the norm of the gradients that have been stepped with.

        Raises:
            UserError: it is not finite; the weights are spoilt.
        """
        norm = torch.stack(self.squared_norms).sum().sqrt().cpu() if self.squared_norms else torch.zeros(())
        self.squared_norms.clear()
        if not math.isfinite(norm):
            raise UserError(
                "a gradient was not finite and has been stepped with, for flash_adamw_gradient_release steps in the "
                "backward pass: the weights are spoilt. Continue from the last checkpoint "
                "(training.resume_from_checkpoint=true) with training.optimizer=flash_adamw, which skips such steps.",
                exit_code=1,
            )
        return norm
