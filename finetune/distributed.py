"""What the ranks of a run tell each other. Each function is a collective: every rank calls it, in the same order."""

from typing import TypeVar

import torch

T = TypeVar("T")


def _alone() -> bool:
    return not (torch.distributed.is_available() and torch.distributed.is_initialized())


def broadcast(value: T) -> T:
    """Rank 0's value on every rank. Each rank may see an older state of a shared file system; this makes them agree."""
    if _alone():
        return value
    values = [value]
    torch.distributed.broadcast_object_list(values)
    return values[0]


def gather(value: T) -> list[T]:
    """Every rank's value, by rank, on every rank."""
    if _alone():
        return [value]
    values: list[T | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values  # type: ignore[return-value]  # all filled


def sum_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """Adds up a tensor over the ranks, in place."""
    if not _alone():
        torch.distributed.all_reduce(tensor)
    return tensor
