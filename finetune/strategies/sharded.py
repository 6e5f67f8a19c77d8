"""Parameters sharded over the processes (ZeRO-3, FSDP2): a whole replica for evaluating and saving, and counting.

Ranks decode different numbers of batches, and decoding takes as many steps as an utterance has words: a model that
gathers its weights in each forward would wait for ranks that are already done. So the weights are gathered once,
parameter by parameter, into an ordinary model of each rank, which is on the host except while it is used.
"""

import contextlib
import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file

from finetune.models.host_lstm import use_native_lstm
from finetune.models.protocols import AsrModel

if TYPE_CHECKING:
    from accelerate import Accelerator

WHOLE_WEIGHTS = "weights.safetensors"


def shards_parameters(accelerator: "Accelerator") -> bool:
    """Return whether the engine keeps only a part of each parameter in a process."""
    plugin = accelerator.state.deepspeed_plugin
    return accelerator.is_fsdp2 or (plugin is not None and plugin.zero_stage == 3)


def make_replica(model: AsrModel) -> AsrModel:
    """Copy a NeMo model to the host, without gradients, before an engine shards it.

    What strategies put on the modules of the original (checkpointing, compilation) is taken off: the copy would call
    the original.
    """
    device = next(model.parameters()).device
    model.cpu()
    # Two things cannot be copied and need not be: Python's `random` in NeMo's SpecAugment, and Lightning's wrapper of
    # training_step.
    replica = copy.deepcopy(model, {id(random): random, id(model.__dict__.get("training_step")): None})
    replica.__dict__.pop("training_step", None)
    model.to(device)
    for module in replica.modules():
        module.__dict__.pop("forward", None)
        module.__dict__.pop("_compiled_call_impl", None)
    use_native_lstm(replica)  # it is a `forward` of the module, too
    return replica.requires_grad_(False)


@torch.no_grad()
def copy_weights(model: AsrModel, replica: AsrModel) -> None:
    """Gather each parameter of `model` into `replica`, and copy the buffers of checkpoints. All ranks take part."""
    targets = replica.state_dict()
    for name, parameter in model.named_parameters():
        with gathered(parameter) as whole:
            targets[name].copy_(whole)
    for name, buffer in model.named_buffers():
        if name in targets:
            targets[name].copy_(buffer)


@contextlib.contextmanager
def gathered(parameter: torch.Tensor) -> Iterator[torch.Tensor]:
    """Provide the whole of a parameter that ZeRO-3 or FSDP2 may have sharded. All ranks enter."""
    from torch.distributed.tensor import DTensor

    if hasattr(parameter, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            yield parameter.data
    else:
        yield parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


@contextlib.contextmanager
def whole_model(model: AsrModel, replica: AsrModel | None, device: torch.device) -> Iterator[AsrModel]:
    """Provide the model with whole weights, on the device. All ranks enter.

    Args:
        replica: from `make_replica`; None where the engine keeps whole parameters and the model itself serves.
    """
    if replica is None:
        yield model
        return
    copy_weights(model, replica)
    replica.to(device)
    try:
        yield replica
    finally:
        replica.cpu()


def count_parameters(model: torch.nn.Module, trainable: bool = False) -> int:
    """Count the parameters of the whole model, however they are sharded."""
    return sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters() if p.requires_grad or not trainable)


def model_to_keep(accelerator: "Accelerator", model: AsrModel, replica: AsrModel | None) -> AsrModel | None:
    """Return the model whose weights a checkpoint holds as safetensors beside the engine's own files; None where the
    engine writes safetensors itself.
    """
    # DeepSpeed keeps weights in a pickle that only the full unpickler reads.
    return model if replica is None and accelerator.distributed_type == "DEEPSPEED" else replica


def write_whole_weights(directory: Path, replica: AsrModel) -> None:
    """Write a model's weights into a checkpoint, named as in the state of the trained module (`nemo.` first)."""
    weights = {f"nemo.{name}": tensor.contiguous().clone() for name, tensor in replica.state_dict().items()}
    save_file(weights, directory / WHOLE_WEIGHTS)


def read_whole_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Read the weights of a checkpoint of any engine, named as in LossModule's state (`nemo.encoder...`).

    Raises:
        FileNotFoundError: the checkpoint holds no whole weights.
    """
    for name in (WHOLE_WEIGHTS, "model.safetensors"):
        if (checkpoint / name).is_file():
            return load_file(checkpoint / name)
    raise FileNotFoundError("it holds no whole weights")
