"""A launcher that starts a run anew after a rank died (torchrun --max-restarts, or a node that left or came): it goes on by itself.

Such a start is told from a new one by the launcher's agent, the process that starts the ranks of a node: it stays while ranks come and
go. Each start leaves the agents of all its ranks in the run's directory; where one of them is an agent of the present start as well, it
is the same launch.

torchrun keeps one store for the meeting of the ranks through all restarts, and with it the addresses of the ranks that are gone, which
new ones may read (github.com/pytorch/pytorch/issues/135712). `meet_afresh` has the ranks meet at a store of their own.
"""

import json
import logging
import os
import secrets
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from finetune.durable_files import write_json
from finetune.errors import UserError
from finetune.rank_monitor.client import own_address
from finetune.training.checkpoints import checkpoints_of

log = logging.getLogger(__name__)

LAUNCH_FILE = ".launch.json"


def own_agent() -> str | None:
    """The launcher's process that would restart this one, told from every other of its host; None under launchers that restart nothing."""
    if "TORCHELASTIC_RESTART_COUNT" not in os.environ:
        return None
    parent = os.getppid()
    try:
        started = Path(f"/proc/{parent}/stat").read_text(errors="replace").rpartition(")")[2].split()[19]
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except (OSError, IndexError):  # it has just gone
        return None
    return f"{socket.gethostname()} {boot} {parent} {started}"


def agents(accelerator: Any) -> list[str]:
    """Those of all ranks. All ranks call it."""
    own = [own_agent()]
    if accelerator.num_processes > 1:
        from accelerate.utils import gather_object

        own = gather_object(own)
    return sorted({agent for agent in own if agent is not None})


def began_here(output_dir: Path, present: list[str]) -> bool:
    """Whether the run that lies in a directory was begun by the launch that started this one.

    Args:
        present: from `agents`.
    """
    try:
        earlier = json.loads((output_dir / LAUNCH_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(earlier, list) and not set(present).isdisjoint(earlier)


def keep(output_dir: Path, present: list[str]) -> None:
    """Leaves the agents of this start for the next one."""
    if present:
        write_json(output_dir / LAUNCH_FILE, present)


def meet_afresh(timeout: float) -> None:
    """Sets MASTER_ADDR and MASTER_PORT to a place at rank 0 where no earlier rank has ever been. All ranks call it before they meet.

    Each rank leaves a word of its own in the launcher's store and takes only an answer to it; rank 0 answers until all have agreed.

    Args:
        timeout: seconds to wait for the other ranks.

    Raises:
        UserError: a rank has not come.
    """
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or torch.distributed.is_initialized():
        return
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = torch.distributed.TCPStore(address, port, None, False, timedelta(seconds=timeout))
    deadline = time.monotonic() + timeout
    if rank == 0:
        place = f"{own_address()} {_free_port()}"
        token = secrets.token_hex(8)
        answered: dict[int, bytes] = {}
        coming = set(range(1, world))
        while coming:
            for other in sorted(coming):
                if store.check([f"finetune/here/{other}"]):
                    word = store.get(f"finetune/here/{other}")
                    if answered.get(other) != word:
                        store.set(f"finetune/answer/{word.decode()}", f"{place} {token}")
                        answered[other] = word
                if store.check([f"finetune/agreed/{token}/{other}"]):
                    coming.remove(other)
            _wait_for(deadline, f"rank {', '.join(map(str, sorted(coming)))}")
    else:
        word = secrets.token_hex(8)
        store.set(f"finetune/here/{rank}", word)
        while not store.check([f"finetune/answer/{word}"]):
            _wait_for(deadline, "rank 0")
        place, token = store.get(f"finetune/answer/{word}").decode().rsplit(" ", 1)
        store.set(f"finetune/agreed/{token}/{rank}", "1")
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = place.split(" ")
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"


def _wait_for(deadline: float, whom: str) -> None:
    if time.monotonic() > deadline:
        raise UserError(f"{whom} did not come to the meeting of the ranks within training.ddp_timeout.", exit_code=1)
    time.sleep(0.02)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def go_on(training: Any) -> None:
    """Has a restarted run continue where it was, in place: from its newest checkpoint, or from the start where it has none.

    Args:
        training: the configuration's section; `resume_from_checkpoint` may name a checkpoint that the first start began with.
    """
    training.overwrite_output_dir = False  # it was overwritten already
    named = training.resume_from_checkpoint
    newest = checkpoints_of(Path(training.output_dir))[-1:]
    if isinstance(named, bool) or (newest and newest[0].name > Path(str(named)).name):
        training.resume_from_checkpoint = True
    log.info(
        "restarted by the launcher: the run goes on from %s",
        newest[0].name if newest else "step 0, for it had saved nothing",
    )
