"""Collectives over the ranks of a run: every rank calls them, in the same order. A lone process needs no group."""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar, cast

import torch

from finetune.errors import UserError

if TYPE_CHECKING:
    from accelerate import Accelerator

T = TypeVar("T")


def _is_alone() -> bool:
    return not (torch.distributed.is_available() and torch.distributed.is_initialized())


def broadcast(value: T) -> T:
    """Return rank 0's value on every rank: of a shared file system, each may see another state."""
    if _is_alone():
        return value
    values = [value]
    torch.distributed.broadcast_object_list(values)
    return values[0]


def on_main(work: Callable[[], T]) -> T:
    """Call `work` on rank 0 alone; return its value, or raise its UserError, on every rank."""
    if _is_alone():
        return work()
    found: tuple[T | None, tuple[str, int] | None] = None, None
    if torch.distributed.get_rank() == 0:
        try:
            found = work(), None
        except UserError as error:
            found = None, (str(error), error.exit_code)
    value, problem = broadcast(found)
    if problem is not None:
        raise UserError(*problem)
    return cast(T, value)


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


def gather_rows(accelerator: "Accelerator", row: torch.Tensor) -> torch.Tensor:
    """Return the rows of all ranks, each (1, N) on the accelerator's device, as one table on the host."""
    table = accelerator.gather(row)
    assert isinstance(table, torch.Tensor)
    return table.cpu()
