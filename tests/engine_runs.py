"""Trainings in several processes each, one after another.

    python tests/engine_runs.py PLAN.json [MODULE to import beforehand]

PLAN.json is a list of {"name", "processes", "arguments", "spoiled": [rank, call, how] or nothing, "exploded": [rank,
step] or nothing, "base_wer": that on guard_choice, or nothing, "expect": exit code}. NeMo is imported
once, then each training's processes are forked, which saves its ten seconds for each of them; they find the
environment that torchrun makes. Each rank writes what it holds of parameters, gradients and states to NAME-RANK.json
beside the plan, and its output to NAME-RANK.log.
"""

import hashlib
import importlib
import json
import math
import os
import socket
import sys
import traceback
from collections.abc import Container
from pathlib import Path
from typing import Any

import torch
from run_callbacks import call_base_wer, held_tensors
from torch.optim.optimizer import register_optimizer_step_pre_hook

from finetune import train
from finetune.models.loss_module import LossModule
from finetune.models.nemo import import_nemo
from finetune.rank_monitor import client as ranks
from finetune.strategies.optimizers import describe_optimizer, state_tensors, unwrap_optimizer
from finetune.training.callbacks import StepResult
from finetune.training.evaluation import FinalResult
from finetune.training.step_batches import StepBatches
from finetune.training.trainer import Trainer


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def sizes(tensors: list[torch.Tensor]) -> dict[str, Any]:
    tensors = [local(t) for t in tensors]
    return {"elements": sum(t.numel() for t in tensors), "devices": sorted({t.device.type for t in tensors})}


def watch_steps(found: dict[str, Any]) -> None:
    """Notes what the optimizers that really step are given in all. ZeRO steps each parameter group by itself."""
    found.update(stepped=0, gradients=0, stepped_on=[])

    def note(optimizer: Any, *_: Any) -> None:
        if type(optimizer) is torch.optim.SGD:  # of the learning-rate schedule
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        found["stepped"] += sum(local(p).numel() for p in parameters)
        found["gradients"] += sum(local(p.grad).numel() for p in parameters if p.grad is not None)
        found["stepped_on"] = sorted({p.device.type for p in parameters} | set(found["stepped_on"]))

    register_optimizer_step_pre_hook(note)


def spoil(calls: Container[int], how: str = "nan") -> None:
    """Spoils the losses of these calls of the model, counted from 1.

    Args:
        how: `nan`: losses and gradients are not numbers; `inf`: the losses alone are infinite; `gradient`: the
            gradients alone are not numbers; `norm`: the gradients are so large that their norm alone is infinite;
            `spike`: losses and gradients are a thousand times as large; `nan_first`: nan for the first clip only.
    """
    whole, seen = LossModule.forward, []

    def forward(self: Any, *inputs: Any, **options: Any) -> torch.Tensor:
        seen.append(1)
        losses_B = whole(self, *inputs, **options)
        if len(seen) not in calls:
            return losses_B
        if how == "nan_first":
            return losses_B * torch.tensor([math.nan] + [1.0] * (len(losses_B) - 1))
        if how in ("gradient", "norm"):
            losses_B.register_hook(lambda gradient: gradient * (math.nan if how == "gradient" else 1e25))
            return losses_B
        return losses_B + math.inf if how == "inf" else losses_B * (1000 if how == "spike" else math.nan)

    LossModule.forward = forward


def digest(trainer: Any) -> str:
    """Hash all that a skipped step must leave alone here: parameters, states, buffers, moving average, schedule."""
    held = [getattr(p, "ds_tensor", p) for p in trainer.model.parameters()]
    held += [p for group in unwrap_optimizer(trainer.optimizer).param_groups for p in group["params"]]
    held += [*state_tensors(trainer.optimizer), *trainer.model.buffers()]
    held += held_tensors(trainer)
    found = hashlib.sha256(json.dumps(trainer.schedule.state_dict()).encode())
    for tensor in held:
        found.update(local(tensor.detach()).cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def watch_digests(trainer: Any, found: dict[str, Any]) -> None:
    """Notes a digest behind each step, and before the first."""
    step, found["digests"] = trainer.train_on, [digest(trainer)]

    def train_on(batches: StepBatches) -> StepResult:
        result = step(batches)
        found["digests"].append(digest(trainer))
        return result

    trainer.train_on = train_on


def explode(trainer: Any, step: int) -> None:
    """Makes one number of what this process holds of a weight infinite behind a step."""
    train_on = trainer.train_on

    def spoiled(batches: StepBatches) -> StepResult:
        result = train_on(batches)
        if trainer.progress.step == step:
            weight = trainer.model.joint.joint_net[-1].weight
            local(getattr(weight, "ds_tensor", weight).detach()).reshape(-1)[0] = math.inf
        return result

    trainer.train_on = spoiled


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
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    out = os.open(folder / f"{entry['name']}-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    found: dict[str, Any] = {"rank": rank}
    watch_steps(found)
    if entry.get("spoiled", [-1])[0] == rank:
        call, *how = entry["spoiled"][1:]
        spoil([call], *how)

    folders: list[Path] = []

    def observe(trainer: Trainer) -> None:
        finish = trainer.finish

        def note_and_finish() -> FinalResult:
            found.update(describe(trainer), world=trainer.accelerator.num_processes)
            folders.append(trainer.output_dir)
            return finish()

        trainer.finish = note_and_finish
        if "base_wer" in entry:
            call_base_wer(trainer, entry["base_wer"])
        watch_digests(trainer, found)
        if entry.get("exploded", [-1])[0] == rank:
            explode(trainer, entry["exploded"][1])

    code = train.main(entry["arguments"], observe)
    found["code"] = code
    if folders and (folders[0] / "summary.json").is_file():
        found["engine"] = json.loads((folders[0] / "summary.json").read_text())["engine"]
    (folder / f"{entry['name']}-{rank}.json").write_text(json.dumps(found))
    ranks.report_exit(code)  # as train.py does, or its monitor would end the other ranks before they say why they end
    return code


def main(plan: Path) -> None:
    torch.set_num_threads(1)
    import_nemo()
    if len(sys.argv) > 2:
        importlib.import_module(sys.argv[2])
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
            if codes[-1] != entry.get("expect", 0):  # the others wait for it in vain
                for other in children:
                    os.kill(other, 9)
        print(entry["name"], codes, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
