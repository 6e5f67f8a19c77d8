"""Trainings in several processes each, one after another: python tests/engine_runs.py PLAN.json.

PLAN.json is a list of {"name", "processes", "arguments"}. NeMo is imported once, then each training's processes are forked, which saves
its ten seconds for each of them. What train.py does under a launcher is the same; test_launchers.py starts the launchers themselves.
Each rank writes what it holds of parameters, gradients and states to DIRECTORY/NAME-RANK.json, beside the plan; its output
goes to NAME-RANK.log.
"""

import json
import os
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from finetune import train
from finetune.models.nemo import import_nemo
from finetune.strategies.optimizers import describe_optimizer, state_tensors, unwrap_optimizer
from finetune.training import run


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def sizes(tensors: list[torch.Tensor]) -> dict[str, Any]:
    tensors = [local(t) for t in tensors]
    return {"elements": sum(t.numel() for t in tensors), "devices": sorted({t.device.type for t in tensors})}


def watch_gradients(found: dict[str, Any]) -> None:
    """Notes what the optimizer that really steps is given, in its last step, and how often it steps."""

    def note(optimizer: Any, *_: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        found["steps"] = found.get("steps", 0) + 1
        found["stepped"] = sizes(parameters)
        found["gradients"] = sizes([p.grad for p in parameters if p.grad is not None])

    register_optimizer_step_pre_hook(note)


def describe(trainer: Any) -> dict[str, Any]:
    """What this process holds of the model and of the optimizer's state."""
    parameters = list(trainer.model.parameters())
    return {
        "kept": sizes([p.data for p in parameters]),
        "shards": sizes([p.ds_tensor for p in parameters if hasattr(p, "ds_tensor")]),
        "whole": sum(getattr(p, "ds_numel", p.numel()) for p in parameters),
        "state": sizes(state_tensors(trainer.optimizer)),
        "layer": type(trainer.model.encoder.layers[0]).__name__,
        "mesh": list(parameters[0].device_mesh.shape) if hasattr(parameters[0], "device_mesh") else None,
        "optimizer": type(unwrap_optimizer(trainer.optimizer)).__name__,
        "described": describe_optimizer(trainer.optimizer),
        "has_replica": trainer.replica is not None,
    }


def in_rank(entry: dict[str, Any], rank: int, port: int, folder: Path) -> int:
    processes = entry["processes"]
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(processes), LOCAL_WORLD_SIZE=str(processes))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), **entry.get("environment", {}))
    out = os.open(folder / f"{entry['name']}-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    found: dict[str, Any] = {"rank": rank}
    watch_gradients(found)
    finish = run.finish

    def note_and_finish(accelerator: Any, trainer: Any, config: Any, strategy: Any) -> None:
        found.update(describe(trainer), world=accelerator.num_processes, engine=strategy.engine)
        finish(accelerator, trainer, config, strategy)

    run.finish = note_and_finish
    code = train.main(entry["arguments"])
    found["code"] = code
    (folder / f"{entry['name']}-{rank}.json").write_text(json.dumps(found))
    return code


def main(plan: Path) -> None:
    torch.set_num_threads(1)
    import_nemo()
    for entry in json.loads(plan.read_text()):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        children = []
        for rank in range(entry["processes"]):
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    code = in_rank(entry, rank, port, plan.parent)
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(code)
            children.append(child)
        codes = []
        while children:
            child, status = os.wait()
            children.remove(child)
            codes.append(os.waitstatus_to_exitcode(status))
            if codes[-1] != 0:  # the others wait for it in vain
                for other in children:
                    os.kill(other, 9)
        print(entry["name"], codes, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
