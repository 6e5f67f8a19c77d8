"""Parameters that are spread over the processes (ZeRO-3, FSDP2): a whole replica to evaluate and to save with, and counting.

Ranks decode different numbers of batches, and decoding takes as many steps as a clip has words: a model that gathers its weights in
each forward would wait for ranks that are already done. So the weights are gathered once, parameter by parameter, into an ordinary
model that each rank has for itself, on the host except while it is used.
"""

import contextlib
import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from finetune.security.pickles import check_torch_file

WHOLE_WEIGHTS = "weights.safetensors"


def shards_parameters(accelerator: Any) -> bool:
    """Whether the engine keeps only a part of each parameter in a process."""
    if accelerator.is_fsdp2:
        return True
    plugin = getattr(accelerator.state, "deepspeed_plugin", None) if _is_deepspeed(accelerator) else None
    return plugin is not None and plugin.zero_stage == 3


def _is_deepspeed(accelerator: Any) -> bool:
    return str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type)) == "DEEPSPEED"


def make_replica(model: Any) -> Any:
    """A copy of a NeMo model on the host, made before an engine takes the model apart; without gradients.

    What strategies put on the modules of the original (checkpointing, compilation) is taken off: the copy would call the original.
    """
    device = next(model.parameters()).device
    model.cpu()
    # Two things cannot be copied and need not be: Python's `random` in NeMo's SpecAugment, and a wrapper for Lightning's training.
    replica = copy.deepcopy(model, {id(random): random, id(model.__dict__.get("training_step")): None})
    replica.__dict__.pop("training_step", None)
    model.to(device)
    for module in replica.modules():
        module.__dict__.pop("forward", None)
        module.__dict__.pop("_compiled_call_impl", None)
    return replica.requires_grad_(False)


@torch.no_grad()
def copy_weights(model: Any, replica: Any) -> None:
    """Gathers each parameter of `model` into `replica`, and copies the buffers that checkpoints hold. All ranks take part."""
    targets = replica.state_dict()
    for name, parameter in model.named_parameters():
        with _gathered(parameter) as whole:
            targets[name].copy_(whole)
    for name, buffer in model.named_buffers():
        if name in targets:
            targets[name].copy_(buffer)


@contextlib.contextmanager
def _gathered(parameter: torch.Tensor) -> Iterator[torch.Tensor]:
    if hasattr(parameter, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            yield parameter.data
    else:
        yield parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


@contextlib.contextmanager
def whole_model(model: Any, replica: Any | None, device: torch.device) -> Iterator[Any]:
    """The model with whole weights, on the device. All ranks enter.

    Args:
        model: the NeMo model that is trained.
        replica: from `make_replica`; None where the engine keeps whole parameters and the model itself serves.
        device: of the training.
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


def count_parameters(model: Any, trainable: bool = False) -> int:
    """Parameters of the whole model, wherever their parts lie."""
    return sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters() if p.requires_grad or not trainable)


def model_to_keep(accelerator: Any, model: Any, replica: Any | None) -> Any | None:
    """The model whose weights a checkpoint holds as safetensors beside the engine's own files; None where the engine writes them so itself.

    Args:
        model: the NeMo model that is trained.
        replica: from `make_replica`, with the present weights; None where the engine keeps whole parameters.
    """
    # DeepSpeed keeps weights in a pickle, which only the full unpickler reads: nobody should have to for weights.
    return model if replica is None and _is_deepspeed(accelerator) else replica


def write_whole_weights(directory: Path, replica: Any) -> None:
    """Writes a model's weights into a checkpoint, named as in the state of the module that is trained (`nemo.` first)."""
    from safetensors.torch import save_file

    save_file(
        {f"nemo.{name}": tensor.contiguous().clone() for name, tensor in replica.state_dict().items()},
        directory / WHOLE_WEIGHTS,
    )


def read_whole_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint of any engine, on the host, by the names of TransducerLossModule's state (`nemo.encoder...`).

    Raises:
        FileNotFoundError: the checkpoint holds no whole weights.
        UserError: they are in a pickle that would run something.
    """
    from safetensors.torch import load_file

    for name in (WHOLE_WEIGHTS, "model.safetensors"):
        if (checkpoint / name).is_file():
            return load_file(checkpoint / name)
    # A checkpoint of ZeRO-1 or 2 from before weights.safetensors was written: weights beside settings, for the full unpickler only.
    states = checkpoint / "pytorch_model" / "mp_rank_00_model_states.pt"
    if not states.is_file():
        raise FileNotFoundError("it holds no whole weights")
    check_torch_file(states, "training.resume_from_checkpoint")
    return torch.load(states, map_location="cpu", weights_only=False)["module"]
