"""Options of the commands that run jobs. Nothing heavy is imported, so that --help answers at once."""

import argparse
from typing import TYPE_CHECKING

from finetune.tools.command_line import positive

if TYPE_CHECKING:
    from finetune.tools.jobs.engines import EngineSettings


WORKERS = "processes that hold a model each (default: one a GPU; without GPUs one, with Ray one a node)"
MAX_FAILED = 0.05  # as data.max_bad_fraction


def add_engine(
    parser: argparse.ArgumentParser, *, workers: bool = True, what: str = "clips", max_failed: float = MAX_FAILED
) -> None:
    """Add the options of a job: --engine, --workers (unless the command has its own), --address, --shard,
    --max-failed and --retry-failed."""
    group = parser.add_argument_group(f"many {what}", "docs/jobs.md has the whole of it")
    if workers:
        group.add_argument("--workers", type=positive, metavar="N", help=WORKERS)
    add_cluster(group)
    group.add_argument(
        "--shard",
        type=_part,
        default=(0, 1),
        metavar="I/N",
        help="only every N-th shard from shard I on, 0 to N - 1, beside other processes with the same --output",
    )
    group.add_argument(
        "--max-failed",
        type=float,
        default=max_failed,
        metavar="SHARE",
        help=f"give up where a larger share of the {what} fails (default: {max_failed:g})",
    )
    again = f"do the shards again in which {what} failed: where memory was short, or files were not there"
    group.add_argument("--retry-failed", action="store_true", help=again)


def add_cluster(group: argparse._ActionsContainer) -> None:
    """Add --engine and --address."""
    group.add_argument("--engine", choices=("local", "ray"), default="local", help="processes here, or a Ray cluster")
    group.add_argument(
        "--address", metavar="A", help="of the Ray cluster: auto or HOST:PORT (default: one on this machine)"
    )


def check_address(arguments: argparse.Namespace) -> None:
    """Raise UserError for --address without --engine ray."""
    from finetune.errors import UserError

    if arguments.address is not None and arguments.engine != "ray":
        raise UserError("--address is of a Ray cluster: add --engine ray.")


def engine_of(arguments: argparse.Namespace) -> "EngineSettings":
    """Return how the job of these arguments is run.

    Raises:
        UserError: --address without --engine ray.
    """
    from finetune.tools.jobs.engines import EngineSettings

    a = arguments
    check_address(a)
    return EngineSettings(a.engine, a.workers, a.address, getattr(a, "device", None), a.shard, a.retry_failed)


def worker_device(arguments: argparse.Namespace) -> str | None:
    """Return the device for workers, which see one GPU at most: what --device names, without the number."""
    device = getattr(arguments, "device", None)
    return device if device is None else device.partition(":")[0]


def _part(text: str) -> tuple[int, int]:
    try:
        part, parts = (int(number) for number in text.split("/"))
    except ValueError:
        part, parts = 0, 0
    if not 0 <= part < parts:
        raise argparse.ArgumentTypeError("is I/N, such as 0/8 to 7/8")
    return part, parts
