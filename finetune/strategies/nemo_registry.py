"""This project's low-bit optimizers in NeMo's own registry, for models that NeMo and Lightning train.

    from finetune.strategies.nemo_registry import register_optimizers

    register_optimizers(model)
    model.setup_optimization(
        {"name": "adamw_8bit", "lr": 1e-4, "betas": [0.9, 0.98], "weight_decay": 1e-3,
         "sched": {"name": "CosineAnnealing", "warmup_steps": 500, "max_steps": 10000, "min_lr": 1e-6}}
    )

NeMo's schedules work on top. NeMo puts all parameters into one group, so that biases and norms are decayed too, as
with NeMo's own optimizers; `optim_param_groups` of its configuration makes groups.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from omegaconf import MISSING

from finetune.config.optimizers import BITSANDBYTES, TORCHAO
from finetune.strategies.optimizers import build_optimizer

log = logging.getLogger(__name__)

WIDE = "keeps_32bit_states"  # attribute of an embedding's weight
WEIGHT_DECAY = 0.01


@dataclass
class OptimizerParams:
    """Options where NeMo's configuration says `args: {name: auto}`; None: the optimizer's own default."""

    lr: float | None = MISSING
    weight_decay: float = WEIGHT_DECAY
    betas: tuple[float, float] | None = None
    eps: float | None = None
    min_8bit_size: int | None = None
    embeddings_32bit: bool | None = None
    block_size: int | None = None


def register_optimizers(model: torch.nn.Module | None = None) -> list[str]:
    """Register BITSANDBYTES and TORCHAO for `setup_optimization` of every NeMo model; a second call changes nothing.

    Args:
        model: its embedding tables keep 32-bit states under bitsandbytes, as in this project's own runs; NeMo hands
            parameters over without saying what they are. Without it they are treated like any matrix.

    Returns:
        The names that NeMo knows now.
    """
    from nemo.core.optim.optimizers import AVAILABLE_OPTIMIZERS, register_optimizer

    for module in model.modules() if model is not None else ():
        if isinstance(module, torch.nn.Embedding):
            setattr(module.weight, WIDE, True)
    names = [*BITSANDBYTES, *TORCHAO]
    for name in names:
        known = AVAILABLE_OPTIMIZERS.get(name)
        if known is None:
            # NeMo's annotations name instances where it takes classes.
            register_optimizer(name, cast(Any, _factory(name)), cast(Any, OptimizerParams))
        elif getattr(known, "__module__", None) != __name__:
            log.warning("NeMo already has another optimizer %s (%s); it stays.", name, known)
    return names


def _factory(name: str) -> Callable[..., torch.optim.Optimizer]:
    """Return what NeMo calls in place of an optimizer's class; it looks up default options by the function's name."""

    def make(
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        weight_decay: float = WEIGHT_DECAY,
        **options: Any,
    ) -> torch.optim.Optimizer:
        options = {k: v for k, v in options.items() if v is not None}
        return build_optimizer(name, _groups(params, lr, weight_decay), options)

    make.__name__ = make.__qualname__ = name
    return make


def _groups(
    params: Iterable[torch.Tensor] | Iterable[dict[str, Any]], lr: float, weight_decay: float
) -> list[dict[str, Any]]:
    """Return parameter groups with their own rates, without frozen parameters, and with embeddings apart."""
    given = list(params)
    tensors = [p for p in given if isinstance(p, torch.Tensor)]
    found = []
    for group in [{"params": tensors}] if tensors else [g for g in given if isinstance(g, dict)]:
        trained = [p for p in group["params"] if p.requires_grad]
        for embedding in (False, True):
            part = [p for p in trained if getattr(p, WIDE, False) == embedding]
            if part:
                found.append({"lr": lr, "weight_decay": weight_decay, **group, "params": part, "embedding": embedding})
    return found
