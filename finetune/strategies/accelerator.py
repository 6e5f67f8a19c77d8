"""Make the Accelerator of a run, with the DeepSpeed or FSDP plugin of its strategy, under every launcher."""

import os
import socket
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from finetune.errors import UserError
from finetune.logs import capture_prints
from finetune.strategies import fsdp
from finetune.strategies.strategy import Strategy, number_of_processes, read_deepspeed_file

if TYPE_CHECKING:
    from accelerate import Accelerator


def make_accelerator(
    strategy: Strategy,
    *,
    precision: str,
    batch_size: int,
    accumulation: int,
    max_grad_norm: float,
    log_with: list[str],
    project_dir: Path,
    timeout: float,
) -> "Accelerator":
    """Make the Accelerator of a strategy, with the engine's settings from the launcher or from the strategy's file.

    Accumulation is 1 for Accelerate: the training loop normalises and synchronises accumulated batches itself.

    Args:
        timeout: `training.ddp_timeout`, seconds.
    """
    from accelerate import Accelerator
    from accelerate.utils import (
        DeepSpeedPlugin,
        DistributedDataParallelKwargs,
        InitProcessGroupKwargs,
        ProjectConfiguration,
    )

    deepspeed, fsdp2 = strategy.engine.startswith("deepspeed"), strategy.engine.startswith("fsdp")
    patience = timedelta(seconds=timeout)
    options: dict[str, Any] = {}
    # Without the backend's name Accelerate counts one process under DeepSpeed on CPUs, while DeepSpeed counts all.
    backend = "gloo" if deepspeed and not torch.cuda.is_available() else "nccl"
    if not torch.cuda.is_available():
        # Accelerate takes DDP over gloo only when it is told that the CPU is meant.
        options["cpu"] = strategy.engine in ("none", "ddp")
    if deepspeed or fsdp2:
        _set_single_process_environment()
    if deepspeed and strategy.deepspeed_config is not None:
        settings = read_deepspeed_file(strategy.deepspeed_config)
        # Precision is autocast's (`resolve_precision`), not DeepSpeed's.
        settings = {key: value for key, value in settings.items() if key not in ("bf16", "fp16")}
        options["deepspeed_plugin"] = DeepSpeedPlugin(hf_ds_config=settings)
    if fsdp2:
        for name, value in strategy.fsdp_settings.items():
            if name.startswith("PARALLELISM_CONFIG_"):
                os.environ.setdefault(name, value)
            else:
                os.environ[name] = value
        fsdp.check_mesh(number_of_processes())
        options["fsdp_plugin"] = fsdp.make_plugin()
    try:
        if fsdp2 and not torch.cuda.is_available():
            fsdp.join_on_cpu(patience)
        with capture_prints():  # of DeepSpeed, which may compile its communication
            accelerator = Accelerator(
                # DeepSpeed's bf16 mode casts parameters but not BatchNorm's buffers, so autocast does it there too.
                mixed_precision="no" if deepspeed else precision,
                log_with=[*log_with] or None,
                project_config=ProjectConfiguration(str(project_dir), logging_dir=str(project_dir / "logs")),
                kwargs_handlers=[
                    DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True),
                    InitProcessGroupKwargs(backend=backend, timeout=patience),
                ],
                **options,
            )
    except torch.distributed.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise UserError(
            f"port {os.environ.get('MASTER_PORT')} is in use, probably by another run on this machine. Give the "
            "launcher a free one: accelerate launch --main_process_port N, deepspeed --master_port N, torchrun "
            "--master_port N (or --standalone)."
        ) from error
    if deepspeed:
        plugin, processes = accelerator.state.deepspeed_plugin, accelerator.num_processes
        assert plugin is not None
        _fill_config(plugin.deepspeed_config, batch_size, accumulation, processes, max_grad_norm, precision)
    return accelerator


def _fill_config(
    config: dict[str, Any], batch_size: int, accumulation: int, processes: int, max_grad_norm: float, precision: str
) -> None:
    """Fill a DeepSpeed configuration with the run file's values, in place.

    Raises:
        UserError: the file has values of its own that contradict them.
    """
    zero = config.get("zero_optimization") or {}
    if str(zero.get("stage", 0)) == "0" or zero.get("compute_grad_norm") is False:
        raise UserError(
            "the DeepSpeed file has ZeRO stage 0 or compute_grad_norm: false, under which DeepSpeed steps with "
            "gradients that are not finite. Set zero_optimization.stage to 1, 2 or 3 without compute_grad_norm, or "
            "use --strategy ddp."
        )
    ours = {
        "train_micro_batch_size_per_gpu": (batch_size, "per_device_train_batch_size"),
        "gradient_clipping": (max_grad_norm, "max_grad_norm"),
        "gradient_accumulation_steps": (accumulation, "gradient_accumulation_steps"),
    }
    for key, (value, name) in ours.items():
        theirs = config.get(key, "auto")
        if theirs not in ("auto", value) and (key, theirs) != ("gradient_accumulation_steps", 1):
            raise UserError(
                f'the DeepSpeed file says {key}: {theirs}, training.{name} says {value}. Write "auto" in the file.'
            )
        config[key] = value
    # The training loop accumulates and normalises itself and tells the engine where a step ends.
    config["gradient_accumulation_steps"] = 1
    config["train_batch_size"] = batch_size * processes
    if precision == "bf16":
        config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}


def _set_single_process_environment() -> None:
    """Set a launcher's environment for a single process, without which DeepSpeed would look for mpi4py.

    The port is a free one: DeepSpeed's launcher gives every run 29500, so that a second one on the same machine would
    fail. torchrun's and accelerate's agents listen on their port themselves and expect the process to connect.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
