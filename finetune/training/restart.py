"""A launcher that starts a run anew after a rank died (torchrun --max-restarts, or a node that left or came): it goes on by itself.

Such a start is told from a new one by the launcher's agent, the process that starts the ranks of a node: it stays while ranks come and
go. Each start leaves the agents of all its ranks in the run's directory; where one of them is an agent of the present start as well, it
is the same launch.
"""

import json
import logging
import os
import socket
from pathlib import Path
from typing import Any

from finetune.training.checkpoints import checkpoints_of
from finetune.training.outputs import write_json

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
