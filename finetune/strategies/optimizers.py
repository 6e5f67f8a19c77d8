"""Building the optimizer that a strategy names, and saying which one really runs."""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import torch

from finetune.config.optimizers import ALLOWED_ARGS, BITSANDBYTES, TORCHAO
from finetune.errors import UserError
from finetune.strategies import low_bit
from finetune.strategies.low_bit import BETAS, EPS

ROUNDS_SAFELY = {*TORCHAO, "flash_adamw", "flash_adamw_gradient_release"}
"""Optimizers whose updates of bf16 weights are not lost in rounding."""

RELEASES_GRADIENTS = ("flash_adamw_gradient_release", "cpu_offload_gradients_ao")
"""Optimizers that free each gradient as soon as it is complete."""


def parameter_groups(
    model: torch.nn.Module,
    learning_rates: dict[str, float],
    default: float,
    weight_decay: float,
    layer_decay: float = 1.0,
) -> list[dict[str, Any]]:
    """Group parameters by component (encoder, decoder, joint), weight decay, being an embedding, and type; with
    `layer_decay` the encoder's by their depth as well.

    Biases, norms and every other tensor with fewer than two dimensions are not decayed, nor are the attention's
    position biases.

    Args:
        model: NeMo transducer.
        learning_rates: component -> peak learning rate.
        default: peak learning rate of everything else.
        weight_decay: for the decayed groups.
        layer_decay: the rate of Conformer layer i of L is multiplied by this to the power of L - 1 - i, that of the
            encoder's other parts to the power of L (Howard and Ruder, arXiv 1801.06146; Bao et al., arXiv 2106.08254).
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    layers = 1 + max((layer_of(name) for name, _ in model.named_parameters()), default=-1)
    groups: dict[str, dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        component, embedding = name.split(".")[0], id(parameter) in embeddings
        decayed = parameter.ndim >= 2 and not re.search(r"pos_bias_[uv]$", name)
        depth = 0
        label = component
        if layer_decay < 1 and component == "encoder":
            layer = layer_of(name)
            depth = layers - 1 - layer
            label += "_below" if layer < 0 else f"_layer{layer}"
        label += ("_embedding" if embedding else "") + ("" if decayed else "_no_decay")
        if parameter.dtype != torch.float32:
            label += f"_{str(parameter.dtype).removeprefix('torch.')}"
        group = {
            "name": label,
            "params": [],
            "lr": learning_rates.get(component, default) * layer_decay**depth,
            "weight_decay": weight_decay if decayed else 0.0,
            "embedding": embedding,
        }
        groups.setdefault(label, group)["params"].append(parameter)
    return list(groups.values())


def layer_of(name: str) -> int:
    """Return the Conformer layer that a parameter of a NeMo model belongs to; -1 where it belongs to none."""
    found = re.match(r"encoder\.layers\.(\d+)\.", name)
    return int(found[1]) if found else -1


def rates_in_words(groups: list[dict[str, Any]]) -> str:
    """Return the peak learning rates of groups from `parameter_groups` with lower rates below."""
    rates = {group["name"].split("_embedding")[0].split("_no_decay")[0]: float(group["lr"]) for group in groups}
    depths = sorted((int(name.removeprefix("encoder_layer")), name) for name in rates if "_layer" in name)
    parts = [f"below the layers {rates['encoder_below']:.3g}"] if "encoder_below" in rates else []
    if depths:
        (lowest, first), (highest, last) = depths[0], depths[-1]
        rise = f" to {rates[last]:.3g}" if lowest < highest else ""
        parts.append(f"layer{'s' if rise else ''} {lowest}{f' to {highest}' if rise else ''} {rates[first]:.3g}{rise}")
    parts += [f"{name} {rate:.3g}" for name, rate in rates.items() if not name.startswith("encoder_")]
    return f"peak learning rates: {', '.join(parts)}"


def build_optimizer(name: str, groups: list[dict[str, Any]], args: dict[str, Any]) -> torch.optim.Optimizer:
    """Make the optimizer that `training.optimizer` names.

    Args:
        name: a name of `finetune.config.optimizers.OPTIMIZERS`.
        groups: from `parameter_groups`.
        args: `training.optimizer_args`.

    Raises:
        UserError: options that the optimizer does not have.
    """
    unknown = sorted(set(args) - ALLOWED_ARGS[name])
    if unknown:
        raise UserError(
            f"training.optimizer_args: {name} has no option {', '.join(unknown)}; it has "
            f"{', '.join(sorted(ALLOWED_ARGS[name]))}."
        )
    if "betas" in args:
        args = {**args, "betas": tuple(args["betas"])}
    if name in BITSANDBYTES:
        return low_bit.bitsandbytes_optimizer(name, groups, args)
    args = {"betas": BETAS, "eps": EPS, **args}
    if name.startswith("cpu_offload"):
        from finetune.strategies.offload import offloaded_adamw

        return offloaded_adamw(groups, offload_gradients="gradients" in name, **args)
    if name.startswith("flash"):
        from finetune.strategies.flash import flash_adamw

        return flash_adamw(groups, release="release" in name, **args)
    if name.endswith("_ao"):
        return low_bit.torchao_optimizer(name, groups, args)
    if name == "adamw_compiled":
        return CompiledAdamW(groups, **args)
    how = {"adamw": {"fused": True}, "adamw_foreach": {"foreach": True}, "adamw_loop": {"foreach": False}}
    return torch.optim.AdamW(groups, **how[name], **args)


SMALLEST_RATE = 1e-30
"""torch's compiled step divides by the learning rate: at 0 weights without a gradient become NaN."""


class CompiledAdamW(torch.optim.AdamW):
    """AdamW whose whole step is compiled. Learning rates are tensors, so that a schedule does not compile it anew."""

    def __init__(self, groups: list[dict[str, Any]], **args: Any):
        on_gpu = groups[0]["params"][0].is_cuda
        for group in groups:
            group["lr"] = torch.tensor(float(group["lr"]), device=group["params"][0].device)
        # Only inductor's GPU code merges the tensors of a foreach into one kernel; torch refuses it with tensor rates
        # elsewhere.
        super().__init__(groups, lr=groups[0]["lr"], foreach=True if on_gpu else None, capturable=on_gpu, **args)
        self.compiled_step: Callable[[], Any] | None = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = closure() if closure is not None else None
        if self.compiled_step is None:
            self.compiled_step = torch.compile(super().step, fullgraph=False)
        for group in self.param_groups:
            group["lr"].clamp_(min=SMALLEST_RATE)
        self.compiled_step()
        return loss

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "compiled_step": None}


def unwrap_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer that steps, below the wrappers of Accelerate and DeepSpeed."""
    while hasattr(inner := getattr(optimizer, "optimizer", None), "param_groups"):
        optimizer = cast(torch.optim.Optimizer, inner)
    return optimizer


def stored_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors that hold a tensor's bytes: those inside of a quantised one, or itself."""
    from torch.distributed.tensor import DTensor

    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return [tensor]
    names, _ = flatten()
    return [inner for name in names for inner in stored_tensors(getattr(tensor, name))]


def state_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the plain tensors of the optimizer's state on this process, each once; empty before the first step."""
    found: dict[tuple[int, str], torch.Tensor] = {}
    for state in unwrap_optimizer(optimizer).state.values():
        for value in state.values():
            is_tensor = isinstance(value, torch.Tensor)
            # flashoptim keeps its moments in objects of its own, with values and scales as tensors inside.
            inside = [value] if is_tensor else vars(value).values() if hasattr(value, "__dict__") else []
            for outer in (x for x in inside if isinstance(x, torch.Tensor)):
                for tensor in stored_tensors(outer):
                    found[tensor.untyped_storage().data_ptr(), str(tensor.device)] = tensor
    return list(found.values())


def describe_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return class, bytes, types and devices of the state, as they are after a step."""
    tensors = state_tensors(optimizer)
    bytes_by_dtype: Counter[str] = Counter()
    for tensor in tensors:
        bytes_by_dtype[str(tensor.dtype).removeprefix("torch.")] += tensor.nbytes
    return {
        "optimizer": type(unwrap_optimizer(optimizer)).__name__,
        "optimizer_state_bytes": sum(bytes_by_dtype.values()),
        "optimizer_state_dtypes": dict(bytes_by_dtype),
        "optimizer_state_devices": sorted({t.device.type for t in tensors}),
    }


def optimizer_in_words(optimizer: torch.optim.Optimizer) -> str:
    """Return what `describe_optimizer` does as text: "AdamW: 22.8 MB of state (float32) on the CPU"."""
    told = describe_optimizer(optimizer)
    sizes: dict[str, int] = told["optimizer_state_dtypes"]
    if not sizes:
        return f"{told['optimizer']}: no state"
    each = ", ".join(f"{n / 1e6:,.1f} MB {dtype}" for dtype, n in sizes.items()) if len(sizes) > 1 else "".join(sizes)
    devices: list[str] = told["optimizer_state_devices"]
    where = " and ".join({"cpu": "the CPU", "cuda": "the GPU"}.get(device, device) for device in devices)
    return f"{told['optimizer']}: {told['optimizer_state_bytes'] / 1e6:,.1f} MB of state ({each}) on {where}"
