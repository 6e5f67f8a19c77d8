"""Merging run file, strategies and `key=value` into one typed configuration, with all problems reported at once."""

import dataclasses
import difflib
import itertools
import logging
import math
import typing
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from finetune.config.compatibility import find_conflicts
from finetune.config.schema import RunConfig
from finetune.config.tokenizer_setting import changes_vocabulary, parse_tokenizer
from finetune.errors import UserError
from finetune.paths import OVERLAYS
from finetune.security.documents import check_references, first_line, leaves, parse_yaml, read_text
from finetune.security.safe_text import lines
from finetune.security.secrets import REMOVED, is_secret_name
from finetune.strategies.optimizers import ALLOWED_ARGS

log = logging.getLogger(__name__)

TOKENIZER = "model.tokenizer"
REQUIRED = ("model.name", "data.train", "training.output_dir")
TRACKERS = ("tensorboard", "wandb", "trackio", "aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "none")


def schema_fields(cls: type = RunConfig, prefix: str = "") -> dict[str, dataclasses.Field]:
    """Every key of the run file in dotted form, with its dataclass field."""
    hints = typing.get_type_hints(cls)
    found: dict[str, dataclasses.Field] = {}
    for f in dataclasses.fields(cls):
        key = f"{prefix}{f.name}"
        if dataclasses.is_dataclass(hints[f.name]):
            found.update(schema_fields(hints[f.name], key + "."))
        else:
            found[key] = f
    return found


def _as_written(config: DictConfig, key: str) -> Any:
    """A value without resolving its `${...}`; "???" where it is not set."""
    section, name = key.split(".", 1)
    return OmegaConf.to_container(config[section])[name]


def _resolved(config: DictConfig, key: str) -> Any:
    """A value as plain Python; None where it is not set."""
    value = OmegaConf.select(config, key, throw_on_missing=False)
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


class Layers:
    """The configuration while layers are laid over it; remembers where each value came from and what was wrong."""

    def __init__(self) -> None:
        self.config = OmegaConf.structured(RunConfig)
        self.fields = schema_fields()
        self.origin: dict[str, str] = {}
        self.refused: set[str] = set()
        self.problems: list[str] = []

    def apply(self, values: dict[str, Any], origin: str, announce: bool = True) -> None:
        """Lays nested values over the configuration. A value that replaces an explicit one is logged."""
        for key, value in self._leaves(values, origin):
            before = _as_written(self.config, key)
            try:
                # A section with keys of its own choice (optimizer_args) is laid over, key by key; a source is replaced.
                value = self._beside_directory(key, before, value)
                OmegaConf.update(self.config, key, value, merge=self._is_section(key) and isinstance(value, dict))
            except (OmegaConfBaseException, ValueError) as error:
                reason = str(error).splitlines()[0]
                self.problems.append(f"{origin}: {key}: {reason} (expected {self._type(key)}, found {value!r})")
                self.refused.add(key)
                continue
            if announce and key in self.origin and self.origin[key] != origin and before != value:
                log.info("%s: %s replaces %s (%s) by %s", origin, key, before, self.origin[key], value)
            self.origin[key] = origin

    def _leaves(self, values: Any, origin: str, prefix: str = "") -> typing.Iterator[tuple[str, Any]]:
        sections = {k.split(".")[0] for k in self.fields}
        if not isinstance(values, dict):
            self.problems.append(f"{origin}: {prefix.rstrip('.') or 'the file'} has to be a mapping, found {values!r}")
            return
        for name, value in values.items():
            key = f"{prefix}{name}"
            if key in self.fields:
                yield key, value
            elif key in sections:
                yield from self._leaves({} if value is None else value, origin, key + ".")
            else:
                self.problems.append(f"{origin}: unknown key {key}.{self._suggest(key)}")

    def _check_references(self) -> None:
        """What `${...}` may do, before any is followed; what is refused is left at its default for the other checks."""
        defaults = OmegaConf.structured(RunConfig)
        for key in self.fields:
            whole = OmegaConf.to_container(self.config)
            section, name = key.split(".", 1)
            problems = check_references(whole, environment_refused, at=(section, name))
            removed = [
                k for k, value in leaves(whole[section][name], key) if isinstance(value, str) and REMOVED in value
            ]
            problems += [f"{k}: a secret stood here and was taken out. Write it again" for k in removed]
            if problems:
                self.problems += [f"{self.origin.get(key, 'default')}: {problem}." for problem in problems]
                self.refused.add(key)
                OmegaConf.update(self.config, key, _as_written(defaults, key), merge=False)

    def _is_section(self, key: str) -> bool:
        return typing.get_origin(self.fields[key].type) is dict or key == TOKENIZER

    def _beside_directory(self, key: str, before: Any, value: Any) -> Any:
        """`model.tokenizer` is a directory or a mapping: what is laid over a directory keeps it."""
        is_directory = key == TOKENIZER and isinstance(before, str) and before != "???"
        return {"dir": before, **value} if is_directory and isinstance(value, dict) else value

    def _suggest(self, key: str) -> str:
        last = key.rsplit(".", 1)[-1]
        same_name = [k for k in self.fields if k.rsplit(".", 1)[-1] == last]
        near = same_name or difflib.get_close_matches(key, self.fields, n=2, cutoff=0.6)
        return f" Did you mean {' or '.join(near)}?" if near else " docs/configuration.md lists all keys."

    def _type(self, key: str) -> str:
        hint = self.fields[key].type
        return str(hint).removeprefix("typing.") if not isinstance(hint, type) else hint.__name__

    def check_values(self) -> None:
        """References, missing values, choices and bounds."""
        self._check_references()
        defaults = OmegaConf.structured(RunConfig)
        for key, f in self.fields.items():
            if key in self.refused:
                continue  # said already; what counts here is an earlier layer's value or the default
            problem = None
            try:
                value = _resolved(self.config, key)
                if OmegaConf.is_missing(self.config, key) or (key in REQUIRED and not value):
                    problem = f"{key} is not set. {f.metadata['help']}"
            except OmegaConfBaseException as error:
                problem = f"{self.origin.get(key, 'default')}: {key}: {str(error).splitlines()[0]}"
            if problem:
                self.problems.append(problem)
                # The default, so that everything else can still be checked.
                OmegaConf.update(self.config, key, _as_written(defaults, key), merge=False)
                continue
            choices = f.metadata.get("choices")
            if choices and value not in choices:
                near = difflib.get_close_matches(str(value), choices, n=1)
                hint = f" Did you mean {near[0]}?" if near else ""
                self.problems.append(
                    f"{self.origin.get(key, 'default')}: {key}: {value!r} is not one of {', '.join(choices)}.{hint}"
                )
        self.problems += [f"{self.origin.get(k, 'default')}: {k}: {why}" for k, why in _bounds(self)]


def environment_refused(call: str) -> str | None:
    """Why a call in `${...}` of a run file is refused: it may read a variable of the environment that holds no secret, and nothing else.

    Args:
        call: such as "oc.env:HOME" or "oc.env:DATA,/data".
    """
    function, _, rest = call.partition(":")
    name = rest.partition(",")[0].strip().strip("'\"")
    if function.strip() != "oc.env":
        return "a run file refers to its own keys, as ${training.seed}, and to variables of the environment, as ${oc.env:NAME}"
    if is_secret_name(name):
        return (
            f"the name {name} is that of a secret, which would stand in paths, addresses and logs. Storage and trackers take their "
            "credentials from the environment themselves"
        )
    return None


def _bounds(layers: Layers) -> list[tuple[str, str]]:
    config, problems = layers.config, []
    at_least_one = (
        "per_device_train_batch_size",
        "per_device_eval_batch_size",
        "gradient_accumulation_steps",
        "logging_steps",
        "dataloader_prefetch_factor",
        "spike_window",
    )
    at_least_zero = (
        "eval_steps",
        "save_steps",
        "save_total_limit",
        "dataloader_num_workers",
        "max_grad_norm",
        "max_skipped_steps",
        "weight_decay",
        "warmup_steps",
        "num_gpus",
        "num_threads",
        "sample_predictions",
        "seed",
    )
    t = config.training
    for key in layers.fields:
        value = _resolved(config, key)
        if isinstance(value, float) and not math.isfinite(value) and key != "data.max_duration":
            problems.append((key, f"has to be a finite number, found {value}"))
    for name in at_least_one:
        if t[name] < 1:
            problems.append((f"training.{name}", f"has to be 1 or more, found {t[name]}"))
    for name in at_least_zero:
        if t[name] < 0:
            problems.append((f"training.{name}", f"has to be 0 or more, found {t[name]}"))
    for name in ("learning_rate", "encoder_learning_rate", "decoder_learning_rate", "joint_learning_rate"):
        if t[name] is not None and t[name] <= 0:
            problems.append((f"training.{name}", f"has to be above 0, found {t[name]}"))
    if t.spike_guard and t.spike_guard <= 1:
        problems.append(("training.spike_guard", f"is a factor above 1, or 0 for none; found {t.spike_guard}"))
    if t.guard_steps < -1:
        problems.append(("training.guard_steps", f"is a number of steps, or -1 or 0; found {t.guard_steps}"))
    if not 0 <= t.warmup_ratio <= 1:
        problems.append(("training.warmup_ratio", f"is a fraction from 0 to 1, found {t.warmup_ratio}"))
    if t.max_steps == 0 or t.max_steps < -1:
        problems.append(("training.max_steps", f"is a number of steps, or -1; found {t.max_steps}"))
    if t.max_steps == -1 and not t.num_train_epochs > 0:
        problems.append(("training.num_train_epochs", f"has to be above 0, found {t.num_train_epochs}"))
    if not 0 <= config.data.max_bad_fraction <= 1:
        problems.append(("data.max_bad_fraction", f"is a fraction from 0 to 1, found {config.data.max_bad_fraction}"))
    if config.data.min_duration > config.data.max_duration:
        problems.append(
            ("data.min_duration", f"{config.data.min_duration} is above data.max_duration {config.data.max_duration}")
        )
    if config.data.max_samples == 0 or config.data.max_samples < -1:
        problems.append(("data.max_samples", f"is a number of clips, or -1 for all; found {config.data.max_samples}"))
    if config.data.max_eval_samples == 0 or config.data.max_eval_samples < -1:
        value = config.data.max_eval_samples
        problems.append(("data.max_eval_samples", f"is a number of clips, or -1 for all; found {value}"))
    if 1 <= config.data.max_samples <= config.data.skip_samples:
        why = f"{config.data.skip_samples} leaves nothing of data.max_samples {config.data.max_samples}"
        problems.append(("data.skip_samples", why))
    if config.data.temperature is not None and config.data.temperature < 1:
        problems.append(("data.temperature", f"has to be 1 or more, found {config.data.temperature}"))
    if t.stage_margin < 0:
        problems.append(("training.stage_margin", f"has to be 0 or more, found {t.stage_margin}"))
    if 0 < config.data.batch_duration < config.data.max_duration:
        why = f"{config.data.batch_duration} is below data.max_duration {config.data.max_duration}: the longest clips fit no batch"
        problems.append(("data.batch_duration", why))
    problems += _check_bounds(OmegaConf.to_container(config.data)["batch_bounds"])
    if t.memory_limit_gib is not None and t.memory_limit_gib <= 0:
        problems.append(("training.memory_limit_gib", f"has to be above 0, found {t.memory_limit_gib}"))
    for name in ("batch_duration", "batch_cells", "read_retries", "skip_samples"):
        if config.data[name] < 0:
            problems.append((f"data.{name}", f"has to be 0 or more, found {config.data[name]}"))
    if config.data.shuffle_buffer_mib < 1:
        problems.append(("data.shuffle_buffer_mib", f"has to be 1 or more, found {config.data.shuffle_buffer_mib}"))
    if config.data.shuffle_buffer_size < 1:
        problems.append(("data.shuffle_buffer_size", f"has to be 1 or more, found {config.data.shuffle_buffer_size}"))
    if config.model.gradient_checkpointing_every < 1:
        problems.append(
            (
                "model.gradient_checkpointing_every",
                f"has to be 1 or more, found {config.model.gradient_checkpointing_every}",
            )
        )
    problems += _averages(config)
    for name in ("lora_rank", "unfreeze_encoder_layers"):
        if config.model[name] < 0:
            problems.append((f"model.{name}", f"has to be 0 or more, found {config.model[name]}"))
    if config.model.compile_bucket < 0:
        problems.append(("model.compile_bucket", f"has to be 0 or more, found {config.model.compile_bucket}"))
    if config.model.lora_alpha is not None and config.model.lora_alpha <= 0:
        problems.append(("model.lora_alpha", f"has to be above 0, found {config.model.lora_alpha}"))
    for name in ("dropout", "omega", "occupancy_threshold", "lora_dropout"):
        value = config.model[name]
        if value is not None and not (0 <= value <= 1 if name == "omega" else 0 <= value < 1):
            below = "" if name == "omega" else " below 1"
            problems.append((f"model.{name}", f"is a probability{below}, found {value}"))
    for name in ("sigma", "fastemit_lambda"):
        value = config.model[name]
        if value is not None and value < 0:
            problems.append((f"model.{name}", f"has to be 0 or more, found {value}"))
    if config.model.joint_memory_budget is not None and config.model.joint_memory_budget < 1:
        problems.append(
            ("model.joint_memory_budget", f"has to be 1 MiB or more, found {config.model.joint_memory_budget}")
        )
    trackers = _resolved(config, "training.report_to")
    for tracker in trackers if isinstance(trackers, list) else [trackers]:
        if tracker not in TRACKERS:
            problems.append(("training.report_to", f"{tracker!r} is not one of {', '.join(TRACKERS)}"))
    allowed = ALLOWED_ARGS.get(t.optimizer, set(t.optimizer_args))
    for name in sorted(set(t.optimizer_args) - allowed):
        problems.append(
            ("training.optimizer_args", f"{t.optimizer} has no option {name}; it has {', '.join(sorted(allowed))}")
        )
    try:
        parse_tokenizer(_resolved(config, TOKENIZER))
    except UserError as error:
        where, _, why = str(error).partition(": ")
        problems.append((where, why))
    problems += _optimizer_arguments(_resolved(config, "training.optimizer_args") or {})
    return problems


def _averages(config: DictConfig) -> list[tuple[str, str]]:
    """What is wrong with averages of the weights, and with an adapter to go on with."""
    t, problems = config.training, []
    if not 0 <= t.ema_decay < 1:
        problems.append(("training.ema_decay", f"is a fraction from 0 to below 1, found {t.ema_decay}"))
    if t.average_checkpoints < 0 or t.average_checkpoints == 1:
        why = f"is 0 for no average, or 2 or more states to average, found {t.average_checkpoints}"
        problems.append(("training.average_checkpoints", why))
    for name in ("ema_decay", "average_checkpoints"):
        if t[name] and not _resolved(config, "data.validation"):
            why = "has no effect without data.validation, whose WER decides whether the average is taken. Set it, or set this to 0"
            problems.append((f"training.{name}", why))
    if config.model.adapter and not config.model.lora_rank:
        why = (
            "needs model.lora_rank and the others as the adapter has them (`r` in its adapter_config.json), to go on training it. To train "
            "from base and adapter merged, give its directory as model.name"
        )
        problems.append(("model.adapter", why))
    if config.model.adapter and changes_vocabulary(config):
        why = (
            "fits the base model's own vocabulary, which model.tokenizer changes. Give the adapter's directory as model.name, which begins "
            "from the merged weights, or leave model.tokenizer out"
        )
        problems.append(("model.adapter", why))
    return problems


def _optimizer_arguments(values: dict[str, Any]) -> list[tuple[str, str]]:
    """What is wrong with the values of `training.optimizer_args` that every optimizer has."""

    def number(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool)

    problems = []
    betas = values.get("betas", [0.9, 0.98])
    if not isinstance(betas, list) or len(betas) != 2 or not all(number(b) and 0 <= b < 1 for b in betas):
        problems.append(("training.optimizer_args", f"betas are two numbers from 0 to below 1, found {betas!r}"))
    for name, least in (("eps", 0), ("min_8bit_size", 0)):
        if name in values and not (number(values[name]) and values[name] > least):
            problems.append(("training.optimizer_args", f"{name} is a number above 0, found {values[name]!r}"))
    size = values.get("block_size", 1)
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        problems.append(("training.optimizer_args", f"block_size is a number of elements above 0, found {size!r}"))
    wide = values.get("embeddings_32bit", True)
    if not isinstance(wide, bool):
        problems.append(("training.optimizer_args", f"embeddings_32bit is true or false, found {wide!r}"))
    return problems


def _check_bounds(bounds: Any) -> list[tuple[str, str]]:
    """What is wrong with `data.batch_bounds`."""
    key, form = "data.batch_bounds", "pairs (seconds, clips), such as [[5, 64], [15, 24]]"
    if not isinstance(bounds, list) or any(not isinstance(pair, list) or len(pair) != 2 for pair in bounds):
        return [(key, f"is a list of {form}, found {bounds!r}")]
    for seconds, clips in bounds:
        number = isinstance(seconds, int | float) and not isinstance(seconds, bool) and seconds > 0
        if not number or not isinstance(clips, int) or isinstance(clips, bool) or clips < 1:
            return [
                (
                    key,
                    f"is a list of {form}, seconds above 0 and whole clips from 1 on; found [{seconds!r}, {clips!r}]",
                )
            ]
    if any(later[0] <= earlier[0] for earlier, later in itertools.pairwise(bounds)):
        return [(key, f"is ordered by seconds, found {bounds!r}")]
    return []


def read_yaml(path: Path, what: str) -> dict[str, Any]:
    """A YAML mapping, with the place of a syntax error in the message."""
    if not path.is_file():
        raise UserError(f"{what}: there is no file {path} (looked in {Path.cwd()}).")
    try:
        values = parse_yaml(read_text(path))
    except OSError as error:
        raise UserError(f"{what}: {path} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise UserError(f"{what}: {path} is not valid YAML: {lines(error)}") from error
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise UserError(f"{what}: {path} has to be a mapping, found {type(values).__name__}.")
    return values


def parse_overrides(overrides: list[str]) -> dict[str, Any]:
    """`key=value` arguments as nested values; the value is read as YAML."""
    nested: dict[str, Any] = {}
    for text in overrides:
        key, sign, value = text.partition("=")
        if not sign or not key or key.startswith("-"):
            raise UserError(
                f"unknown argument {text!r}. Settings are given as key=value, such as training.max_steps=100."
            )
        section = nested
        parts = key.split(".")
        for part in parts[:-1]:
            section = section.setdefault(part, {})
            if not isinstance(section, dict):
                raise UserError(f"{text}: {part} was given a value of its own by another argument.")
        try:
            section[parts[-1]] = parse_yaml(value) if value else None
        except ValueError as error:
            raise UserError(f"{text}: the value is not valid YAML ({first_line(error)}).") from error
    return nested


def overlay_path(strategy: str) -> Path:
    """The strategy's overlay of the run file; it exists only where the strategy concerns model or optimizer."""
    return OVERLAYS / f"{strategy}.yaml"


def load_config(
    config_file: Path,
    strategies: list[str],
    overrides: list[str],
    stage: tuple[dict[str, Any], str] | None = None,
) -> tuple[DictConfig, dict[str, str]]:
    """Run file, strategies, `key=value`, a stage of a plan, in this order.

    Args:
        stage: nested settings, and their name for messages.

    Returns:
        The typed configuration, and for each key that was set the name of the layer that set it.

    Raises:
        UserError: lists every problem of every layer.
    """
    layers = Layers()
    values = read_yaml(config_file, "--config")
    if "stages" in values and isinstance(values.get("training"), dict):
        values["training"]["stages"] = values.pop("stages")
    layers.apply(values, str(config_file))
    for strategy in strategies:
        path = overlay_path(strategy)
        if path.is_file():
            layers.apply(read_yaml(path, f"--strategy {strategy}"), f"strategy {strategy}")
    layers.apply(parse_overrides(overrides), "command line")
    if stage is not None:
        layers.apply(*stage)
    layers.check_values()
    problems = layers.problems + find_conflicts(layers.config)
    if problems:
        raise UserError(_listed(problems))
    return layers.config, layers.origin


def _listed(problems: list[str]) -> str:
    if len(problems) == 1:
        return problems[0]
    return f"{len(problems)} problems in the configuration:\n" + "\n".join(
        f"  {i}. {p}" for i, p in enumerate(problems, 1)
    )
