"""What training changes of a model, by name, whole and in parts: for averages, and for points between two states.

That is the trained parameters, and the running means and variances of BatchNorm modules that learn. What is frozen
stays as it is, and so does BatchNorm's count of batches, which nothing reads here.
"""

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from finetune.models.nemo import learning_batchnorms
from finetune.models.protocols import AsrModel
from finetune.strategies.sharded import gathered

START_FILE = "l2_sp_start.safetensors"
"""Of a checkpoint: the trained weights as the run began, for the pull towards them."""


def averaged_tensors(model: AsrModel) -> dict[str, torch.Tensor]:
    """Return what training changes, by name: trained parameters, and running statistics of learning BatchNorm modules,
    of a model that may be sharded."""
    found: dict[str, torch.Tensor] = {name: p for name, p in model.named_parameters() if p.requires_grad}
    names = {id(module): name for name, module in model.named_modules()}
    for norm in learning_batchnorms(model):
        for kind in ("running_mean", "running_var"):
            found[f"{names[id(norm)]}.{kind}"] = getattr(norm, kind)
    return found


def all_tensors(model: AsrModel) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's part of a sharded tensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of a tensor that FSDP2 may have sharded; all ranks take part."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def take_over(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a value, whole or sharded alike, into a tensor that FSDP2 may have sharded."""
    if isinstance(tensor, DTensor) and not isinstance(value, DTensor):
        mesh = tensor.device_mesh
        # Without a source rank each process cuts its own part out.
        value = distribute_tensor(value.to(mesh.device_type), mesh, tensor.placements, src_data_rank=None)
    local_part(tensor).copy_(local_part(value))


@torch.no_grad()
def copy_to_host(model: AsrModel, is_main: bool) -> dict[str, torch.Tensor]:
    """Copy `averaged_tensors` of a model of any engine, whole, to the host of the main process; other processes get
    nothing, but take part."""
    copies = {}
    for name, tensor in averaged_tensors(model).items():
        with gathered(tensor) as whole:
            if is_main:
                copies[name] = whole.detach().to("cpu", copy=True).contiguous()
    return copies
