"""Shards of an inspection as tasks of a Ray cluster, which write their parts themselves: their folder is shared."""

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from finetune.errors import UserError
from finetune.tools.data_check import inspection
from finetune.tools.jobs.on_ray import import_ray, join, own_paths

RETRIES = 3  # of a shard whose process or node is lost


def read_on_ray(make_work: Callable[[], inspection.Work], address: str | None, shards: int) -> Iterator[Path]:
    """Inspect so many shards on a cluster, one a CPU at a time; yield their parts in order.

    Args:
        make_work: sent to the processes, for a tokenizer cannot be.
        address: of the cluster; None: one on this machine.

    Raises:
        UserError: no cluster answers, or a shard ends its process again and again.
    """
    ray = import_ray()
    join(address)
    try:
        environment = {"env_vars": {"PYTHONPATH": os.pathsep.join(own_paths()), "OMP_NUM_THREADS": "1"}}
        task = ray.remote(_read).options(num_cpus=1, max_retries=RETRIES, runtime_env=environment)
        work = ray.put(partial(_work_at, os.getcwd(), make_work))
        for index, answer in enumerate([task.remote(work, index) for index in range(shards)]):
            try:
                yield ray.get(answer)
            except ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, UserError):
                    raise error.cause from None
                raise
            except ray.exceptions.RayError as error:
                raise UserError(
                    f"shard {index} ended its process {RETRIES + 1} times ({type(error).__name__}). What has been "
                    "read is kept: the same line goes on there.",
                    exit_code=1,
                ) from error
    finally:
        ray.shutdown()


def _work_at(folder: str, make_work: Callable[[], inspection.Work]) -> inspection.Work:
    """Make the work where relative paths mean what they mean to the process that asks."""
    os.chdir(folder)
    return make_work()


def _read(make_work: Callable[[], inspection.Work], index: int) -> Path:
    if not inspection._inherited:  # a process of Ray serves one job only
        inspection._inherited[:] = [make_work()]
    return inspection.inspect_shard(index)
