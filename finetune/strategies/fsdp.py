"""FSDP2 through Accelerate: its settings from a strategy's file or from the launcher, and the plugin made of them.

Accelerate takes the settings from environment variables, which `accelerate launch` sets from the file. Under other
launchers they are set here, so that every launcher gives the same run; some of Accelerate's decisions read nothing
else.
"""

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from finetune.errors import UserError

if TYPE_CHECKING:
    from accelerate import FullyShardedDataParallelPlugin


def is_true(environment: Mapping[str, str], name: str) -> bool:
    """Return whether a variable says true, as Accelerate's do."""
    return environment.get(name, "false").lower() == "true"


def fsdp_environment(values: dict[str, Any]) -> dict[str, str]:
    """Return the variables that `accelerate launch` would set for an Accelerate file with `distributed_type: FSDP`."""
    mesh = values.get("parallelism_config") or {}
    settings = {"accelerate_use_fsdp": True, **(values.get("fsdp_config") or {}), **mesh}
    if mesh:
        settings["accelerate_use_parallelism_config"] = True
    layers = settings.pop("fsdp_transformer_layer_cls_to_wrap", None)
    if layers:
        settings["fsdp_transformer_cls_to_wrap"] = layers
    return {
        key.upper(): str(value).lower() if isinstance(value, bool) else str(value) for key, value in settings.items()
    }


def check_settings(environment: Mapping[str, str], origin: str) -> None:
    """Refuse settings that this project does not train under, naming their origin.

    Raises:
        UserError: FSDP1, or FSDP's own activation checkpointing.
    """
    version = environment.get("FSDP_VERSION", "1")
    if version != "2":
        raise UserError(
            f"{origin}: FSDP version {version} is not supported, for it flattens parameters that the optimizers here "
            "treat apart. Write fsdp_version: 2 (accelerate launch --fsdp_version 2), or take --strategy fsdp2."
        )
    if is_true(environment, "FSDP_ACTIVATION_CHECKPOINTING"):
        raise UserError(
            f"{origin}: fsdp_activation_checkpointing draws other dropout masks in the recomputation than in the "
            "forward pass. Write fsdp_activation_checkpointing: false and set model.gradient_checkpointing: true."
        )


def contradictions(wanted: dict[str, str]) -> list[str]:
    """Return the launcher's settings that contradict a strategy's file, as `NAME: theirs instead of ours`."""
    return [
        f"{name}: {os.environ.get(name, 'nothing')} instead of {value}"
        for name, value in wanted.items()
        if not name.endswith("_SIZE")  # of the mesh, which the launcher's command line may set
        and os.environ.get(name, "").lower() != value.lower()
    ]


def check_mesh(processes: int) -> None:
    """Check the replicate x shard mesh of the environment against the processes that were started.

    Raises:
        UserError: their product is another number.
    """
    if not is_true(os.environ, "ACCELERATE_USE_PARALLELISM_CONFIG"):
        return
    replicate, shard = (
        int(os.environ.get(f"PARALLELISM_CONFIG_DP_{name}_SIZE", "1")) for name in ("REPLICATE", "SHARD")
    )
    if replicate * shard != processes:
        raise UserError(
            f"the device mesh is {replicate} replicas x {shard} shards = {replicate * shard} processes, but "
            f"{processes} process{'es were' if processes > 1 else ' was'} started. Start {replicate * shard}, or set "
            "the numbers of nodes and of GPUs in each: parallelism_config_dp_replicate_size and _dp_shard_size in "
            "accelerate_configs/hybrid_shard.yaml, or the environment variables of these names in capitals."
        )


def make_plugin() -> "FullyShardedDataParallelPlugin":
    """Make Accelerate's plugin from the environment.

    FSDP casts nothing: autocast does, as without FSDP, so that audio and lengths reach the model unrounded, BatchNorm
    stays in float32 and gradients are reduced in float32. Every process has loaded the whole model already, so
    RAM-efficient loading would save nothing.
    """
    from accelerate import FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    offload = is_true(os.environ, "FSDP_OFFLOAD_PARAMS")
    return FullyShardedDataParallelPlugin(
        mixed_precision_policy=MixedPrecisionPolicy(cast_forward_inputs=False),
        cpu_ram_efficient_loading=False,
        cpu_offload=CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if offload else False,
    )


def join_on_cpu(timeout: timedelta) -> None:
    """Join the process group over gloo, for FSDP2 on CPUs.

    Accelerate starts FSDP only where it has found GPUs, so it is told of some; FSDP2 itself needs none.
    """
    from accelerate import DistributedType, PartialState

    PartialState(backend="gloo", timeout=timeout)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    PartialState._shared_state["device"] = torch.device("cpu")
