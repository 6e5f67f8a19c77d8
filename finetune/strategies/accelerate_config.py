"""Strategy names, the Accelerate files behind them, and an Accelerator that follows them under every launcher."""

import logging
import os
import socket
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml

from finetune.config.suggestions import did_you_mean
from finetune.errors import UserError
from finetune.logs import capture_prints
from finetune.paths import ACCELERATE_CONFIGS, SHARE, strategy_names
from finetune.security.documents import first_line, parse_json, read_text
from finetune.strategies import fsdp

log = logging.getLogger(__name__)


@dataclass
class Strategy:
    """What was asked for, by name and by launcher."""

    names: list[str] = field(default_factory=list)
    engine: str = "none"
    """none (DDP too, where a launcher alone started more processes), ddp, deepspeed, deepspeed_zero3 or fsdp; the last three with _offload
    behind them where the optimizer's states lie on the host."""
    engine_from: str = ""
    """The strategy or file that set the engine."""
    from_launcher: bool = False
    """The launcher already put the engine's settings into the environment."""
    deepspeed_config: Path | None = None
    fsdp_settings: dict[str, str] = field(default_factory=dict)
    """FSDP's settings from a strategy's file, as environment variables."""
    mixed_precision: str | None = None


def engine_with(engine: str, processes: int) -> str:
    """The engine that runs: DDP where none was asked for and a launcher started several processes."""
    return "ddp" if engine == "none" and processes > 1 else engine


def launcher_config_file() -> Path | None:
    """The `--config_file` of the `accelerate launch` that started this process, found in its parents' command lines."""
    if not any(key.startswith("ACCELERATE_") for key in os.environ):
        return None
    for parent in psutil.Process().parents()[:6]:
        try:
            words = parent.cmdline()
        except psutil.Error:
            return None
        for word, following in zip(words, words[1:] + [""], strict=True):
            if word in ("--config_file", "--config-file"):
                return Path(parent.cwd()) / following
            if word.startswith(("--config_file=", "--config-file=")):
                return Path(parent.cwd()) / word.split("=", 1)[1]
    return None


def resolve_strategy(named: list[str], deepspeed_file: str | None = None) -> Strategy:
    """Strategies from `--strategy`, the launcher's Accelerate file, and `--deepspeed FILE`, as one.

    Raises:
        UserError: unknown names, two engines, or a launcher whose settings contradict the strategy.
    """
    strategy = Strategy()
    launched_with = launcher_config_file()
    if launched_with is not None:
        if launched_with.stem in strategy_names() and launched_with.resolve().parent == ACCELERATE_CONFIGS:
            strategy.names.append(launched_with.stem)
            log.info("strategy %s, from the launcher's --config_file %s", launched_with.stem, launched_with)
        else:
            log.info("the launcher's own Accelerate file %s sets engine and precision", launched_with)
    for name in named:
        if name not in strategy_names():
            raise UserError(
                f"--strategy: there is no strategy {name!r}.{did_you_mean(name, strategy_names())} There are: {', '.join(strategy_names())}."
            )
        if name not in strategy.names:
            strategy.names.append(name)
    for name in strategy.names:
        values = yaml.safe_load((ACCELERATE_CONFIGS / f"{name}.yaml").read_text(encoding="utf-8"))
        _take_engine(strategy, values, f"strategy {name}")
    _compare_with_launcher(strategy, launched_with)
    if deepspeed_file is not None:
        path = Path(deepspeed_file)
        if not path.is_file():
            raise UserError(f"--deepspeed: there is no file {path} (looked in {Path.cwd()}).")
        if (strategy.from_launcher or strategy.deepspeed_config is not None) and (
            strategy.deepspeed_config is None or strategy.deepspeed_config.resolve() != path.resolve()
        ):
            used = strategy.deepspeed_config or "settings of its own"
            raise UserError(
                f"--deepspeed {path} contradicts {strategy.engine_from}, which uses {used}. Give one of them."
            )
        _set_engine(strategy, _deepspeed_engine(path), f"--deepspeed {path}")
        strategy.deepspeed_config = path
    return strategy


def _set_engine(strategy: Strategy, engine: str, origin: str) -> None:
    if strategy.engine not in ("none", engine):
        raise UserError(
            f"{strategy.engine_from} ({strategy.engine}) and {origin} ({engine}) are two engines; a run has one. Leave one out."
        )
    strategy.engine, strategy.engine_from = engine, origin


def _deepspeed_engine(path: Path) -> str:
    """Name of the engine that a DeepSpeed file asks for."""
    try:
        values = parse_json(read_text(path))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error} (looked in {Path.cwd()}).") from error
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {first_line(error)}") from error
    zero = values.get("zero_optimization", {}) if isinstance(values, dict) else None
    offload = zero.get("offload_optimizer") or {} if isinstance(zero, dict) else None
    if not isinstance(offload, dict):
        raise UserError(
            f"{path} is no DeepSpeed file: an object is expected, with zero_optimization and offload_optimizer in it as objects."
        )
    return _name_deepspeed(zero.get("stage"), str(offload.get("device", "none")))


def _name_deepspeed(stage: Any, offload_device: str) -> str:
    return "deepspeed" + ("_zero3" if str(stage) == "3" else "") + ("" if offload_device == "none" else "_offload")


def _fsdp_engine(settings: Any) -> str:
    return "fsdp_offload" if settings.get("FSDP_OFFLOAD_PARAMS", "false").lower() == "true" else "fsdp"


def _take_engine(strategy: Strategy, values: dict[str, Any], origin: str) -> None:
    kind = str(values.get("distributed_type", "NO")).upper()
    if kind == "DEEPSPEED":
        path = SHARE / values["deepspeed_config"]["deepspeed_config_file"]
        if strategy.deepspeed_config not in (None, path):
            raise UserError(
                f"{strategy.engine_from} and {origin} are two DeepSpeed files; a run has one. Leave one out."
            )
        _set_engine(strategy, _deepspeed_engine(path), origin)
        strategy.deepspeed_config = path
    elif kind == "FSDP":
        settings = fsdp.fsdp_environment(values)
        fsdp.check_settings(settings, origin)
        if strategy.fsdp_settings not in ({}, settings):
            raise UserError(
                f"{strategy.engine_from} and {origin} shard in different ways; a run has one. Leave one out."
            )
        _set_engine(strategy, _fsdp_engine(settings), origin)
        strategy.fsdp_settings = settings
    elif kind.startswith("MULTI_"):
        _set_engine(strategy, "ddp", origin)
    precision = str(values.get("mixed_precision", "no"))
    if precision != "no":
        if strategy.mixed_precision not in (None, precision):
            raise UserError(
                f"{origin} wants mixed precision {precision}, another strategy {strategy.mixed_precision}. Leave one out."
            )
        strategy.mixed_precision = precision


def _compare_with_launcher(strategy: Strategy, launched_with: Path | None) -> None:
    """The environment that `accelerate launch` made must not ask for another engine than the strategies."""
    launcher = "none"
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true":
        launcher = "deepspeed"
    elif os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        launcher = "fsdp"
    if launcher == "none":
        return
    origin = f"the launcher ({launched_with or 'accelerate launch'})"
    if strategy.engine.split("_")[0] not in ("none", launcher):
        raise UserError(
            f"{origin} starts {launcher}, but {strategy.engine_from} is for {strategy.engine}. Start with the strategy's own file: accelerate launch --config_file accelerate_configs/{strategy.engine_from.removeprefix('strategy ')}.yaml"
        )
    strategy.from_launcher = True
    if launcher == "fsdp":
        fsdp.check_settings(os.environ, origin)
        different = fsdp.contradictions(strategy.fsdp_settings)
        if different:
            raise UserError(
                f"{origin} shards otherwise than {strategy.engine_from}: {'; '.join(different)}. Leave one of them out."
            )
        strategy.engine = _fsdp_engine(os.environ)
    else:
        _compare_deepspeed_files(strategy, origin)
    strategy.engine_from = origin


def _compare_deepspeed_files(strategy: Strategy, origin: str) -> None:
    """The launcher's DeepSpeed file has to be the strategy's; without a strategy it says what the engine is."""
    file = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    if strategy.deepspeed_config is not None and (
        file.lower() == "none" or Path(file).resolve() != strategy.deepspeed_config.resolve()
    ):
        missing = "" if file.lower() == "none" or Path(file).is_file() else f" (not found from {Path.cwd()})"
        theirs = "settings of its own" if file.lower() == "none" else file + missing
        raise UserError(
            f"{origin} starts DeepSpeed with {theirs}, {strategy.engine_from} uses {strategy.deepspeed_config}. Leave one of them out."
        )
    if strategy.engine == "none" and file.lower() != "none":
        strategy.deepspeed_config = Path(file)
        strategy.engine = _deepspeed_engine(Path(file))
    elif strategy.engine == "none":
        strategy.engine = _name_deepspeed(
            os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE"),
            os.environ.get("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "none"),
        )


def number_of_processes() -> int:
    """Processes of this run, from the launcher's environment."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def check_num_gpus(num_gpus: int) -> None:
    """`training.num_gpus` against the processes that were really started."""
    started = number_of_processes()
    if num_gpus and num_gpus != started:
        raise UserError(
            f"training.num_gpus is {num_gpus}, but {started} process{'es were' if started > 1 else ' was'} started. Type: "
            f"torchrun --nproc_per_node {num_gpus} finetune/train.py ... (or accelerate launch --multi_gpu --num_processes "
            f"{num_gpus} finetune/train.py ...), or set training.num_gpus: {started}."
        )


def resolve_precision(bf16: bool, fp16: bool, strategy: Strategy) -> str:
    """no, bf16 or fp16, from the run file, the strategy and the launcher.

    Raises:
        UserError: two of them name different ones.
    """
    wanted = {"training.bf16": "bf16"} if bf16 else {"training.fp16": "fp16"} if fp16 else {}
    if strategy.mixed_precision:
        wanted[f"strategy {'+'.join(strategy.names)}"] = strategy.mixed_precision
    launcher = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if launcher not in ("no", ""):
        wanted["the launcher"] = launcher
    if len(set(wanted.values())) > 1:
        said = ", ".join(f"{origin} says {precision}" for origin, precision in wanted.items())
        raise UserError(f"mixed precision is contradictory: {said}. Make them equal.")
    return next(iter(wanted.values()), "no")


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
) -> Any:
    """An Accelerator for the strategy, with the engine's settings taken from the launcher or made here.

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

    options: dict[str, Any] = {
        # DeepSpeed's own bf16 mode casts parameters and leaves BatchNorm's buffers, so autocast does it under DeepSpeed too.
        "mixed_precision": "no" if strategy.engine.startswith("deepspeed") else precision,
        "log_with": log_with or None,
        "project_config": ProjectConfiguration(project_dir=str(project_dir), logging_dir=str(project_dir / "logs")),
        "kwargs_handlers": [DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)],
    }
    # Without the backend's name Accelerate counts one process under DeepSpeed on CPUs, while DeepSpeed counts all of them.
    named = {"backend": "gloo"} if strategy.engine.startswith("deepspeed") and not torch.cuda.is_available() else {}
    options["kwargs_handlers"].append(InitProcessGroupKwargs(timeout=timedelta(seconds=timeout), **named))
    if not torch.cuda.is_available():
        # Accelerate takes DDP over gloo only when it is told that the CPU is meant.
        options["cpu"] = strategy.engine in ("none", "ddp")
    if strategy.engine.startswith("deepspeed"):
        _single_process_environment()
        if not strategy.from_launcher:
            options["deepspeed_plugin"] = DeepSpeedPlugin(hf_ds_config=str(strategy.deepspeed_config))
    if strategy.engine.startswith("fsdp"):
        _single_process_environment()
        for name, value in strategy.fsdp_settings.items():
            if name.startswith("PARALLELISM_CONFIG_"):
                os.environ.setdefault(name, value)
            else:
                os.environ[name] = value
        fsdp.check_mesh(number_of_processes())
        options["fsdp_plugin"] = fsdp.make_plugin()
    try:
        if strategy.engine.startswith("fsdp") and not torch.cuda.is_available():
            fsdp.join_on_cpu(timeout)
        with capture_prints():  # of DeepSpeed, which may compile its communication
            accelerator = Accelerator(**options)
    except torch.distributed.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise UserError(
            f"port {os.environ.get('MASTER_PORT')} is in use, probably by another run on this machine. Give the launcher a free one: "
            "accelerate launch --main_process_port N, deepspeed --master_port N, torchrun --master_port N (or --standalone)."
        ) from error
    if strategy.engine.startswith("deepspeed"):
        _fill_deepspeed_config(
            accelerator.state.deepspeed_plugin.deepspeed_config,
            batch_size,
            accumulation,
            accelerator.num_processes,
            max_grad_norm,
            precision,
        )
    return accelerator


def _fill_deepspeed_config(
    config: dict[str, Any], batch_size: int, accumulation: int, processes: int, max_grad_norm: float, precision: str
) -> None:
    """Fills what the run file decides into a DeepSpeed configuration, in place.

    Raises:
        UserError: the file holds values of its own that say otherwise.
    """
    if config.get("bf16", {}).get("enabled") is True or config.get("fp16", {}).get("enabled") is True:
        raise UserError(
            "the DeepSpeed file switches on bf16 or fp16, which casts parameters but not BatchNorm's buffers and fails on "
            "FastConformer. Remove these keys and set training.bf16: true."
        )
    zero = config.get("zero_optimization") or {}
    if str(zero.get("stage", 0)) == "0" or zero.get("compute_grad_norm") is False:
        raise UserError(
            "the DeepSpeed file has ZeRO stage 0 or compute_grad_norm: false, under which DeepSpeed steps with gradients that are not "
            "finite. Set zero_optimization.stage to 1, 2 or 3 without compute_grad_norm, or use --strategy ddp."
        )
    ours = {
        "train_micro_batch_size_per_gpu": (batch_size, "training.per_device_train_batch_size"),
        "gradient_clipping": (max_grad_norm, "training.max_grad_norm"),
    }
    for key, (value, origin) in ours.items():
        theirs = config.get(key, "auto")
        if theirs not in ("auto", value):
            raise UserError(
                f'the DeepSpeed file says {key}: {theirs}, {origin} says {value}. Write "auto" in the file.'
            )
        config[key] = value
    if config.get("gradient_accumulation_steps", "auto") not in ("auto", 1, accumulation):
        raise UserError(
            f"the DeepSpeed file says gradient_accumulation_steps: {config['gradient_accumulation_steps']}, "
            f'training.gradient_accumulation_steps says {accumulation}. Write "auto" in the file.'
        )
    # The training loop accumulates and normalises itself and tells the engine where a step ends.
    config["gradient_accumulation_steps"] = 1
    config["train_batch_size"] = batch_size * processes
    if precision == "bf16":
        config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}


def _single_process_environment() -> None:
    """DeepSpeed looks for mpi4py unless a launcher has set these; a single process needs no launcher, nor its port.

    DeepSpeed's launcher gives every run port 29500, so that a second one on the same machine would fail; one process meets nobody
    there. torchrun and accelerate's agents listen on theirs themselves and expect the process to come.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
