"""Collectives over the ranks of a run: every rank calls each function, in the same order. One process alone needs no process group."""

from typing import TypeVar, cast

import torch

T = TypeVar("T")


def _is_alone() -> bool:
    return not (torch.distributed.is_available() and torch.distributed.is_initialized())


def broadcast(value: T) -> T:
    """Return rank 0's value on every rank, such as what it sees of a shared file system that others may see an older state of."""
    if _is_alone():
        return value
    values = [value]
    torch.distributed.broadcast_object_list(values)
    return values[0]


def gather(value: T) -> list[T]:
    """Return every rank's value, by rank, on every rank."""
    if _is_alone():
        return [value]
    values: list[T | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return cast(list[T], values)  # all filled


def sum_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """Sum a tensor over the ranks, in place."""
    if not _is_alone():
        torch.distributed.all_reduce(tensor)
    return tensor
