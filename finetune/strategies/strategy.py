"""What strategies ask for: from `--strategy`, the launcher's Accelerate file and `--deepspeed`, as one."""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from finetune.config.suggestions import did_you_mean
from finetune.errors import UserError
from finetune.paths import ACCELERATE_CONFIGS, SHARE, strategy_names
from finetune.security.documents import first_line, parse_json, read_text
from finetune.strategies import fsdp

log = logging.getLogger(__name__)

DEEPSPEED_SECTIONS = ("zero_optimization", "bf16", "fp16")
"""Objects of a DeepSpeed file that are read here."""


@dataclass
class Strategy:
    """What was asked for, by name and by the launcher."""

    names: list[str] = field(default_factory=list)
    engine: str = "none"
    """none (DDP too, where a launcher alone started more processes), ddp, deepspeed, deepspeed_zero3 or fsdp; the last
    three with the suffix _offload where the optimizer's states are on the host.
    """
    engine_from: str = ""
    """The strategy or file that set the engine."""
    from_launcher: bool = False
    """The launcher has already put the engine's settings into the environment."""
    deepspeed_config: Path | None = None
    deepspeed_precision: str | None = None
    """bf16 where that file switches it on."""
    fsdp_settings: dict[str, str] = field(default_factory=dict)
    """FSDP's settings from a strategy's file, as environment variables."""
    mixed_precision: str | None = None


def engine_with(engine: str, processes: int) -> str:
    """Return the engine that runs: DDP where none was asked for and a launcher started several processes."""
    return "ddp" if engine == "none" and processes > 1 else engine


def launcher_config_file() -> Path | None:
    """Return the `--config_file` of the `accelerate launch` that started this process, from its parents' arguments."""
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
    """Combine `--strategy`, the launcher's Accelerate file and `--deepspeed FILE` into one strategy.

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
            near = did_you_mean(name, strategy_names(), most=3)
            every = f" There are: {', '.join(strategy_names())}." if not near else " docs/strategies.md lists all."
            raise UserError(f"--strategy: there is no strategy {name!r}.{near}{every}")
        if name not in strategy.names:
            strategy.names.append(name)
    for name in strategy.names:
        values = yaml.safe_load((ACCELERATE_CONFIGS / f"{name}.yaml").read_text(encoding="utf-8"))
        _take_file(strategy, values, f"strategy {name}")
    _take_launcher(strategy, f"the launcher ({launched_with or 'accelerate launch'})")
    if deepspeed_file is not None:
        path = Path(deepspeed_file)
        if not path.is_file():
            raise UserError(f"--deepspeed: there is no file {path} (looked in {Path.cwd()}).")
        _set_deepspeed(strategy, path, _deepspeed_engine(path), f"--deepspeed {path}")
    return strategy


def _take_file(strategy: Strategy, values: dict[str, Any], origin: str) -> None:
    """Take engine and precision of an Accelerate file."""
    kind = str(values.get("distributed_type", "NO")).upper()
    if kind == "DEEPSPEED":
        path = SHARE / values["deepspeed_config"]["deepspeed_config_file"]
        _set_deepspeed(strategy, path, _deepspeed_engine(path), origin)
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
                f"{origin} wants mixed precision {precision}, another strategy {strategy.mixed_precision}. Leave one "
                "out."
            )
        strategy.mixed_precision = precision


def _take_launcher(strategy: Strategy, origin: str) -> None:
    """Take the engine from the environment made by `accelerate launch`, which has to be that of the strategies."""
    started = [name for name in ("deepspeed", "fsdp") if fsdp.is_true(os.environ, f"ACCELERATE_USE_{name.upper()}")]
    if not started:
        return
    if strategy.engine.split("_")[0] not in ("none", started[0]):
        raise UserError(
            f"{origin} starts {started[0]}, but {strategy.engine_from} is for {strategy.engine}. Start with the "
            "strategy's own file: accelerate launch --config_file "
            f"accelerate_configs/{strategy.engine_from.removeprefix('strategy ')}.yaml"
        )
    strategy.from_launcher = True
    if started[0] == "deepspeed":
        file = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
        stage = os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE")
        device = os.environ.get("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "none")
        if file.lower() == "none":
            _set_deepspeed(strategy, None, _deepspeed_name(stage, device), origin)
        else:
            _set_deepspeed(strategy, Path(file), _deepspeed_engine(Path(file)), origin)
        return
    fsdp.check_settings(os.environ, origin)
    different = fsdp.contradictions(strategy.fsdp_settings)
    if different:
        raise UserError(
            f"{origin} shards otherwise than {strategy.engine_from}: {'; '.join(different)}. Leave one of them out."
        )
    strategy.engine, strategy.engine_from = _fsdp_engine(os.environ), origin


def _set_engine(strategy: Strategy, engine: str, origin: str) -> None:
    if strategy.engine not in ("none", engine):
        raise UserError(
            f"{strategy.engine_from} ({strategy.engine}) and {origin} ({engine}) are two engines; a run has one. "
            "Leave one out."
        )
    strategy.engine, strategy.engine_from = engine, origin


def _set_deepspeed(strategy: Strategy, path: Path | None, engine: str, origin: str) -> None:
    """Set DeepSpeed as the engine, with a file or, for None, with settings of the launcher."""
    before = strategy.deepspeed_config
    same = before.resolve() == path.resolve() if before and path else before is path
    if strategy.engine.startswith("deepspeed") and not same:
        own = "settings of its own"
        raise UserError(
            f"{origin} contradicts {strategy.engine_from}: DeepSpeed with {path or own}, not with {before or own}. "
            "Leave one of them out."
        )
    _set_engine(strategy, engine, origin)
    strategy.deepspeed_config = path
    strategy.deepspeed_precision = None if path is None else _deepspeed_precision(path)


def read_deepspeed_file(path: Path) -> dict[str, Any]:
    """Return the settings of a DeepSpeed file.

    Raises:
        UserError: it cannot be read, or is none.
    """
    try:
        values = parse_json(read_text(path))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error} (looked in {Path.cwd()}).") from error
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {first_line(error)}") from error
    sections = [values, *((values.get(key) or {}) for key in DEEPSPEED_SECTIONS if isinstance(values, dict))]
    if not all(isinstance(section, dict) for section in sections):
        raise UserError(f"{path} is no DeepSpeed file: {', '.join(DEEPSPEED_SECTIONS)} have to be objects.")
    return values


def _deepspeed_engine(path: Path) -> str:
    """Return the name of the engine that a DeepSpeed file asks for."""
    zero = read_deepspeed_file(path).get("zero_optimization") or {}
    offload = zero.get("offload_optimizer") or {}
    if not isinstance(offload, dict):
        raise UserError(f"{path} is no DeepSpeed file: zero_optimization.offload_optimizer has to be an object.")
    return _deepspeed_name(zero.get("stage"), str(offload.get("device", "none")))


def _deepspeed_precision(path: Path) -> str | None:
    """Return bf16 where a DeepSpeed file switches it on: the run computes in it through autocast, since DeepSpeed's
    own mode casts parameters but not BatchNorm's buffers. `auto` is for the run file to say.

    Raises:
        UserError: it switches on fp16.
    """
    values = read_deepspeed_file(path)
    on = [kind for kind in ("bf16", "fp16") if (values.get(kind) or {}).get("enabled") is True]
    if "fp16" in on:
        raise UserError(
            f"{path}: fp16.enabled: true is not supported: DeepSpeed's fp16 mode casts parameters but not BatchNorm's "
            "buffers and fails on FastConformer. Write fp16.enabled: false, and bf16.enabled: true in the file or "
            "training.bf16: true."
        )
    return "bf16" if on else None


def _deepspeed_name(stage: object, offload_device: str) -> str:
    return "deepspeed" + ("_zero3" if str(stage) == "3" else "") + ("" if offload_device == "none" else "_offload")


def _fsdp_engine(settings: Mapping[str, str]) -> str:
    return "fsdp_offload" if fsdp.is_true(settings, "FSDP_OFFLOAD_PARAMS") else "fsdp"


def number_of_processes() -> int:
    """Return the number of processes of this run, from the launcher's environment."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def check_num_gpus(num_gpus: int) -> None:
    """Check `training.num_gpus` against the processes that were started."""
    started = number_of_processes()
    if num_gpus and num_gpus != started:
        raise UserError(
            f"training.num_gpus is {num_gpus}, but {started} process{'es were' if started > 1 else ' was'} started. "
            f"Type: torchrun --nproc_per_node {num_gpus} finetune/train.py ... (or accelerate launch --multi_gpu "
            f"--num_processes {num_gpus} finetune/train.py ...), or set training.num_gpus: {started}."
        )


def resolve_precision(bf16: bool, fp16: bool, strategy: Strategy) -> str:
    """Return no, bf16 or fp16, from the run file, the strategy, the launcher and the DeepSpeed file.

    Raises:
        UserError: they contradict each other.
    """
    wanted = {"training.bf16": "bf16"} if bf16 else {"training.fp16": "fp16"} if fp16 else {}
    if strategy.mixed_precision:
        wanted[f"strategy {'+'.join(strategy.names)}"] = strategy.mixed_precision
    launcher = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if launcher not in ("no", ""):
        wanted["the launcher"] = launcher
    if strategy.deepspeed_precision:
        wanted[f"{strategy.deepspeed_config} (bf16.enabled)"] = strategy.deepspeed_precision
    if len(set(wanted.values())) > 1:
        all_of_them = ", ".join(f"{origin} says {precision}" for origin, precision in wanted.items())
        raise UserError(f"mixed precision is contradictory: {all_of_them}. Make them equal.")
    return next(iter(wanted.values()), "no")
