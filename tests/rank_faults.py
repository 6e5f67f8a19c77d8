"""finetune/train.py with a fault on one rank: FAULT=rank:step:kind torchrun ... tests/rank_faults.py --config ...

Kinds: kill, stop, exit (os._exit(3)), segfault, raise (RuntimeError), refuse (UserError), hang. FAULT_ONCE names a
file: the fault happens only while it does not exist, so that a restarted run gets through. STEP_SECONDS lets each step
take at least so long. SLOW_DATA=rank:seconds: this rank's batches come so late.
"""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from finetune.errors import UserError
from finetune.train import leave, main


def fail(kind: str) -> None:
    """Ends or halts this process."""
    if kind == "exit":
        os._exit(3)
    while kind == "hang":
        time.sleep(1)
    if kind == "raise":
        raise RuntimeError("a fault of the test")
    if kind == "refuse":
        raise UserError("data.train: a file of this node cannot be read", exit_code=1)
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "segfault": signal.SIGSEGV}[kind])


def observe(trainer: Any) -> None:
    """Puts the fault before a step of the training."""
    rank, step, kind = os.environ.get("FAULT", "-1:0:none").split(":")
    marker = os.environ.get("FAULT_ONCE")
    train_on = trainer.train_on

    def slower(step_input: Any) -> Any:
        time.sleep(float(os.environ.get("STEP_SECONDS", "0")))
        due = trainer.accelerator.process_index == int(rank) and trainer.progress.step + 1 >= int(step)
        if due and not (marker and Path(marker).exists()):
            if marker:
                Path(marker).touch()
            fail(kind)
        return train_on(step_input)

    trainer.train_on = slower
    late, seconds = os.environ.get("SLOW_DATA", "-1:0").split(":")
    if trainer.accelerator.process_index == int(late):
        batches = trainer.stream.batches

        def late_batches() -> Iterator[Any]:
            for batch in batches():
                time.sleep(float(seconds))
                yield batch

        trainer.stream.batches = late_batches


if __name__ == "__main__":
    leave(main(observe=observe))
