"""Bytes that an optimizer keeps for a parameter, asked of the optimizer itself on one parameter of that shape."""

import functools
import json
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from finetune.config.optimizers import TORCHAO
from finetune.strategies.optimizers import build_optimizer, state_tensors
from finetune.tools.planning.accounting import TensorAccount

OFFLOADED_FROM = 4096  # elements; torchao's CPUOffloadOptimizer keeps smaller tensors on the GPU
FLASH_GROUP = 32  # elements that share a scale of two bytes in flashoptim's states
ParameterShape = tuple[tuple[int, ...], str, bool, int]
"""Shape, type, whether it is an embedding, and how many such parameters there are."""

# Optimizers whose step needs memory that counts, beside states and gradients.
STEPS_FOLLOWED = ("adamw_foreach", "adamw_loop")


class StateBytes(NamedTuple):
    """Bytes on the training device, and on the host beside what a run without offload has there."""

    device: int
    host: int


def state_bytes(
    name: str, args: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype, embedding: bool
) -> StateBytes:
    """Return the bytes of the optimizer's state for one parameter; bitsandbytes keeps embeddings' in 32 bits."""
    return _state_bytes(name, json.dumps(args, sort_keys=True), tuple(shape), dtype, embedding)


@functools.cache
def _state_bytes(name: str, args: str, shape: tuple[int, ...], dtype: torch.dtype, embedding: bool) -> StateBytes:
    elements = torch.Size(shape).numel()
    if name.startswith("flash"):
        # Its states are made by GPU kernels: two moments in 8 bits, a scale for each group, a byte that continues a
        # 16-bit weight.
        groups = -(-elements // FLASH_GROUP)
        return StateBytes(2 * (elements + 2 * groups) + (elements if dtype != torch.float32 else 0), 8)
    if name.startswith("cpu_offload"):
        states = _measured("adamw", "{}", shape, dtype, embedding)
        if elements < OFFLOADED_FROM:
            return StateBytes(states, 0)
        return StateBytes(0, states + 2 * elements * dtype.itemsize)  # and pinned copies of weight and gradient
    return StateBytes(_measured(name, args, shape, dtype, embedding), 0)


def _measured(name: str, args: str, shape: tuple[int, ...], dtype: torch.dtype, embedding: bool) -> int:
    """Bytes of the state tensors after a step; torchao's are made without one, which it would compile."""
    parameter = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
    group = {"params": [parameter], "lr": 1e-3, "weight_decay": 0.0, "embedding": embedding}
    optimizer = build_optimizer("adamw" if name == "adamw_compiled" else name, [group], json.loads(args))
    if name in TORCHAO:
        zeros = getattr(optimizer, "_new_buffer", lambda like, signed: torch.zeros_like(like))
        moments = {n: zeros(parameter, n == "exp_avg") for n in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(0.0), **moments}
    else:
        parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    return sum(tensor.untyped_storage().nbytes() for tensor in state_tensors(optimizer))


def step_bytes(name: str, shapes: list[ParameterShape]) -> int:
    """Follow a step on fake tensors; return the most bytes at once beside weights, gradients and states."""
    if name not in STEPS_FOLLOWED:
        return 0
    with FakeTensorMode():
        parameters = [
            torch.nn.Parameter(torch.empty(tuple(shape), dtype=getattr(torch, dtype)))
            for shape, dtype, _, times in shapes
            for _ in range(times if name == "adamw_foreach" else 1)  # the loop lets one go before the next
        ]
        optimizer = build_optimizer(name, [{"params": parameters, "lr": 1e-3, "weight_decay": 0.01}], {})
        gradients = [torch.empty_like(p) for p in parameters]
        for p, gradient in zip(parameters, gradients):
            p.grad = gradient
        optimizer.step()
        with TensorAccount() as account:
            states = [x for state in optimizer.state.values() for x in state.values()]
            account.add([*(p.detach() for p in parameters), *gradients, *states], "parameters")
            before = account.total
            optimizer.step()
    return account.peak - before
