"""Building the optimizer that a strategy names, and saying which one really runs."""

import logging
import re
from collections.abc import Callable
from typing import Any

import torch

from finetune.errors import UserError

log = logging.getLogger(__name__)

ADAMW_ARGS = {"betas", "eps"}
ALLOWED_ARGS = {"adamw": ADAMW_ARGS, "adamw_8bit": ADAMW_ARGS | {"min_8bit_size"}}


def parameter_groups(
    model: Any, learning_rates: dict[str, float], default: float, weight_decay: float
) -> list[dict[str, Any]]:
    """Groups by component (encoder, decoder, joint) and by whether weight decay applies.

    Biases, norms and every other tensor with fewer than two dimensions are not decayed, nor are the attention's position
    biases.

    Args:
        model: NeMo transducer.
        learning_rates: component -> peak learning rate.
        default: peak learning rate of everything else.
        weight_decay: for the decayed groups.
    """
    groups: dict[tuple[str, bool], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        component = name.split(".")[0]
        decayed = parameter.ndim >= 2 and not re.search(r"pos_bias_[uv]$", name)
        group = groups.setdefault(
            (component, decayed),
            {
                "name": component if decayed else f"{component}_no_decay",
                "params": [],
                "lr": learning_rates.get(component, default),
                "weight_decay": weight_decay if decayed else 0.0,
            },
        )
        group["params"].append(parameter)
    return list(groups.values())


def build_optimizer(name: str, groups: list[dict[str, Any]], args: dict[str, Any]) -> torch.optim.Optimizer:
    """The optimizer that `training.optimizer` names.

    Args:
        name: a name of `finetune.config.schema.OPTIMIZERS`.
        groups: from `parameter_groups`.
        args: `training.optimizer_args`.

    Raises:
        UserError: options that the optimizer does not have.
    """
    unknown = sorted(set(args) - ALLOWED_ARGS[name])
    if unknown:
        raise UserError(
            f"training.optimizer_args: {name} has no option {', '.join(unknown)}; it has {', '.join(sorted(ALLOWED_ARGS[name]))}."
        )
    args = {"betas": (0.9, 0.98), "eps": 1e-8, **args}
    args["betas"] = tuple(args["betas"])
    builders: dict[str, Callable[..., torch.optim.Optimizer]] = {"adamw": _adamw, "adamw_8bit": _adamw_8bit}
    return builders[name](groups, args)


def _adamw(groups: list[dict[str, Any]], args: dict[str, Any]) -> torch.optim.Optimizer:
    args.pop("min_8bit_size", None)
    return torch.optim.AdamW(groups, fused=True, **args)


def _adamw_8bit(groups: list[dict[str, Any]], args: dict[str, Any]) -> torch.optim.Optimizer:
    """bitsandbytes AdamW with 8-bit block-wise states (arXiv 2110.02861); plain AdamW where bitsandbytes cannot run."""
    try:
        import bitsandbytes as bnb

        _try_8bit_step(bnb, groups)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        log.warning(
            "8-bit AdamW cannot be used here (%s: %s); training goes on with 32-bit AdamW, whose state is four times as "
            "large. The learning-rate schedule stays as it is. `bash scripts/install_8bit_optimizer.sh` installs and "
            "checks bitsandbytes.",
            type(error).__name__,
            reason,
        )
        return _adamw(groups, args)
    return bnb.optim.AdamW8bit(groups, **args)


def _try_8bit_step(bnb: Any, groups: list[dict[str, Any]]) -> None:
    """One step on a scratch tensor: bitsandbytes imports on machines where its kernels do not run."""
    device = groups[0]["params"][0].device
    scratch = torch.nn.Parameter(torch.ones(8192, device=device))
    scratch.grad = torch.ones_like(scratch)
    bnb.optim.AdamW8bit([scratch], lr=1e-3).step()


def unwrap_optimizer(optimizer: Any) -> Any:
    """The optimizer that steps, below the wrappers of Accelerate and DeepSpeed."""
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer) or hasattr(
        getattr(optimizer, "optimizer", None), "param_groups"
    ):
        optimizer = optimizer.optimizer
    return optimizer


def state_tensors(optimizer: Any) -> list[torch.Tensor]:
    """All tensors of the optimizer's state on this process; empty before the first step."""
    found = []
    for state in unwrap_optimizer(optimizer).state.values():
        found += [v for v in state.values() if isinstance(v, torch.Tensor)]
    return found


def describe_optimizer(optimizer: Any) -> dict[str, Any]:
    """Class, bytes, types and devices of the state, as they are after a step."""
    tensors = state_tensors(optimizer)
    bytes_by_dtype: dict[str, int] = {}
    for tensor in tensors:
        dtype = str(tensor.dtype).removeprefix("torch.")
        bytes_by_dtype[dtype] = bytes_by_dtype.get(dtype, 0) + tensor.numel() * tensor.element_size()
    return {
        "optimizer": type(unwrap_optimizer(optimizer)).__name__,
        "optimizer_state_bytes": sum(bytes_by_dtype.values()),
        "optimizer_state_dtypes": bytes_by_dtype,
        "optimizer_state_devices": sorted({t.device.type for t in tensors}),
    }
