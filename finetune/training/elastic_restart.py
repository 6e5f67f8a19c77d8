"""Restarts by the launcher: a run whose ranks torchrun starts again (--max-restarts, a node that left or came)
continues by itself.

A restart is told from a new launch by the launcher's agent, the process that starts the ranks of a node and outlives
them. Each start records the agents of all its ranks in the run's directory; a start that shares an agent with the
record is of the same launch.

torchrun keeps one rendezvous store through all restarts, and with it the addresses of dead ranks, which new ranks may
read (github.com/pytorch/pytorch/issues/135712). `rendezvous` has the ranks meet at a fresh store of their own.
"""

import json
import logging
import os
import secrets
import socket
import time
from datetime import timedelta
from pathlib import Path

import torch

from finetune.config.schema import TrainingConfig
from finetune.distributed import gather
from finetune.durable_files import write_json
from finetune.errors import UserError
from finetune.rank_monitor.client import own_address
from finetune.training.checkpoints import checkpoints_of

log = logging.getLogger(__name__)

LAUNCH_FILE = ".launch.json"


def own_agent() -> str | None:
    """Return an identifier of the launcher process that would restart this one; None where none would."""
    if "TORCHELASTIC_RESTART_COUNT" not in os.environ:
        return None
    parent = os.getppid()
    try:
        started = Path(f"/proc/{parent}/stat").read_text(errors="replace").rpartition(")")[2].split()[19]
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except (OSError, IndexError):  # it has just gone
        return None
    return f"{socket.gethostname()} {boot} {parent} {started}"


def agents() -> list[str]:
    """Return the agents of all ranks. All ranks call it."""
    return sorted({agent for agent in gather(own_agent()) if agent is not None})


def is_same_launch(output_dir: Path, present: list[str]) -> bool:
    """Return whether the run in a directory was begun by the launch of these `agents`."""
    try:
        earlier = json.loads((output_dir / LAUNCH_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(earlier, list) and not set(present).isdisjoint(earlier)


def record_launch(output_dir: Path, present: list[str]) -> None:
    """Record the agents of this start for the next one."""
    if present:
        write_json(output_dir / LAUNCH_FILE, present)


def rendezvous(timeout: float) -> None:
    """Set MASTER_ADDR and MASTER_PORT to an address at rank 0 that no earlier rank has used. All ranks call it before
    they meet.

    Each rank leaves a key of its own in the launcher's store and accepts only the answer to it; rank 0 answers until
    all have accepted.

    Raises:
        UserError: a rank has not come within `timeout` seconds.
    """
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or torch.distributed.is_initialized():
        return
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    patience = timedelta(seconds=timeout)
    # pyright does not see that torch exports it
    store = torch.distributed.TCPStore(address, port, None, False, patience)  # pyright: ignore[reportPrivateImportUsage]
    deadline = time.monotonic() + timeout
    if rank == 0:
        with socket.socket() as probe:
            probe.bind(("", 0))
            place = f"{own_address()} {probe.getsockname()[1]}"
        token = secrets.token_hex(8)
        answered: dict[int, bytes] = {}
        missing = set(range(1, world))
        while missing:
            for other in sorted(missing):
                if store.check([f"finetune/here/{other}"]):
                    key = store.get(f"finetune/here/{other}")
                    if answered.get(other) != key:
                        store.set(f"finetune/answer/{key.decode()}", f"{place} {token}")
                        answered[other] = key
                if store.check([f"finetune/accepted/{token}/{other}"]):
                    missing.remove(other)
            _poll(deadline, f"rank {', '.join(map(str, sorted(missing)))}")
    else:
        key = secrets.token_hex(8)
        store.set(f"finetune/here/{rank}", key)
        while not store.check([f"finetune/answer/{key}"]):
            _poll(deadline, "rank 0")
        place, token = store.get(f"finetune/answer/{key}").decode().rsplit(" ", 1)
        store.set(f"finetune/accepted/{token}/{rank}", "1")
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = place.split(" ")
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"


def _poll(deadline: float, missing: str) -> None:
    if time.monotonic() > deadline:
        raise UserError(f"{missing} did not come to the rendezvous within training.ddp_timeout.", exit_code=1)
    time.sleep(0.02)


def continue_run(training: TrainingConfig) -> None:
    """Have a restarted run continue from its newest checkpoint, or from the start where it has none; sets the
    configuration in place, which may name a checkpoint that the first start began with."""
    training.overwrite_output_dir = False  # the first start has overwritten it
    named = training.resume_from_checkpoint
    newest = checkpoints_of(Path(training.output_dir))[-1:]
    if isinstance(named, bool) or (newest and newest[0].name > Path(str(named)).name):
        training.resume_from_checkpoint = True
    place = newest[0].name if newest else "step 0, nothing was saved"
    log.info("restarted by the launcher: the run goes on from %s", place)
