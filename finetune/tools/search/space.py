"""What a search may change: parameters, with the run file's own value and the settings that a value stands for."""

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from finetune.config.compatibility import find_conflicts, find_contradictions
from finetune.config.load import FIELDS, read_yaml
from finetune.config.messages import explain
from finetune.config.schema import RunConfig
from finetune.config.suggestions import did_you_mean
from finetune.errors import UserError

if TYPE_CHECKING:
    import optuna

Value = float | int | bool | str | None
Settings = dict[str, Any]
"""Dotted key -> value."""

OWN = "as in the run file"
"""Name of the choice that sets nothing, where no other is what the run file has."""
NAME = re.compile(r"[\w.+-]+(?: [\w.+-]+)*")
FORM = (
    "a list of values, a range {low: 1e-4, high: 1e-2, log: true}, or named choices such as "
    "{frozen: {model.freeze_encoder: true}}"
)
RANGE_KEYS = {"low", "high", "log", "times"}


@dataclass(frozen=True)
class Parameter:
    """One dimension of the search.

    Attributes:
        name: a key of the run file, or of the user's choice where each choice sets several keys.
        own: the value that stands for what the run file has.
        low, high: of a range, both included.
        log: whether the range is searched by orders of magnitude.
        whole: whether its values are integers.
        times: a key by whose value that of the range is multiplied.
        choices: value -> the settings that it stands for; empty for a range.
    """

    name: str
    own: Value
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    whole: bool = False
    times: str | None = None
    choices: dict[Value, Settings] = field(default_factory=dict)

    def suggest(self, trial: "optuna.Trial") -> Value:
        """Return the value that Optuna chooses for a trial."""
        if self.choices:
            return trial.suggest_categorical(self.name, list(self.choices))
        if self.whole:
            return trial.suggest_int(self.name, int(self.low), int(self.high), log=self.log)
        return trial.suggest_float(self.name, self.low, self.high, log=self.log)

    def describe(self) -> Any:
        """Return the parameter for JSON; two searches with another description do not share a study."""
        if self.choices:
            return [[value, settings] for value, settings in self.choices.items()]
        return {"low": self.low, "high": self.high, "log": self.log, "whole": self.whole, "times": self.times}

    def share_of(self, value: Value) -> float:
        """Return where a value lies, from 0 at the low end of a range, or the first choice, to 1."""
        if self.choices:
            value, low, high = list(self.choices).index(value), 0, len(self.choices) - 1
        else:
            assert isinstance(value, int | float)
            value, low, high = (math.log(v) if self.log else v for v in (value, self.low, self.high))
        return (value - low) / (high - low) if high > low else 0.5

    def is_at_the_end(self, value: Value) -> bool:
        """Return whether a value lies in the outer twentieth of a range."""
        return not self.choices and not 0.05 < self.share_of(value) < 0.95


def settings_of(parameters: list[Parameter], values: dict[str, Value], config: RunConfig) -> Settings:
    """Return the settings that differ from the run file, by the values of a trial.

    The run file's own values set nothing, so that a trial of them is the run file's run.
    """
    found: Settings = {}
    same = {p.name for p in parameters if values[p.name] == p.own}
    for p in sorted(parameters, key=lambda p: p.times is not None):  # what they are multiplied by comes first
        value = values[p.name]
        if p.times is not None:
            assert isinstance(value, int | float)
            if p.name not in same or (p.times not in same and config.get(p.name) is not None):
                found[p.name] = _short(value * found.get(p.times, config.get(p.times)))
        elif p.name not in same:
            found |= p.choices[value] if p.choices else {p.name: _short(value, 0.0 if p.log else p.high - p.low)}
    return {key: value for key, value in found.items() if value != config.get(key)}


def _short(value: Value, width: float = 0.0) -> Value:
    """Return a float with four significant digits, or in thousandths of a range: more are tiresome to copy."""
    if not isinstance(value, float):
        return value
    return round(value, 3 - math.floor(math.log10(width))) if width else float(f"{value:.4g}")


# ---- settings that go with the length of a run ------------------------------------------------------------------

BY_LENGTH = ("training.warmup_steps", "training.l2_sp")


def for_run_of(steps: int, before: int, values: Settings) -> Settings:
    """Return those of BY_LENGTH among some settings, for a run of another length: the warm-up is as large a share of
    its steps, the pull as strong over all of them.

    Args:
        steps, before: of the run that they are for, and of the one that they are from.
        values: dotted key -> value.
    """
    warmup, pull = (values.get(key) or 0 for key in BY_LENGTH)
    found = max(round(warmup * steps / before), 1 if warmup else 0), _short(pull * before / steps)
    return {key: value for key, value in zip(BY_LENGTH, found, strict=True) if value}


def as_long_as(steps: int | None, config: RunConfig) -> RunConfig:
    """Return the configuration for trials of so many steps; unchanged where the run file's own length is theirs, or
    goes by epochs."""
    t = config.training
    if steps is None or steps == t.max_steps or t.max_steps < 1:
        return config
    found = for_run_of(steps, t.max_steps, {key: config.get(key) for key in BY_LENGTH})
    if "training.l2_sp" in found:  # beyond 1 a step goes past the start
        rates = (t.learning_rate, t.encoder_learning_rate, t.decoder_learning_rate, t.joint_learning_rate)
        highest = _short(0.5 / max(rate for rate in rates if rate is not None))
        found["training.l2_sp"] = max(min(found["training.l2_sp"], highest), t.l2_sp or 0.0)
    return config.replaced(found)


# ---- the space that is searched without --space -----------------------------------------------------------------


def default_space(config: RunConfig, steps: int | None) -> list[Parameter]:
    """Return what is worth a search for this run file. What the rest of the configuration excludes is left out.

    Args:
        steps: of each trial; None: as the run file has them.
    """
    m, d, t = config.model, config.data, config.training
    found = [
        _range(config, "training.learning_rate", t.learning_rate / 10, t.learning_rate * 10, log=True),
        _range(config, "training.encoder_learning_rate", 0.03, 1.0, log=True, times="training.learning_rate"),
    ]
    planned = steps or max(t.max_steps, 0)
    if not t.warmup_steps:
        found.append(_range(config, "training.warmup_ratio", 0.0, 0.3))
    elif planned:
        found.append(_range(config, "training.warmup_steps", 1, max(planned // 3, 1)))
    if not m.adapter:
        keys = ("model.freeze_encoder", "model.unfreeze_encoder_layers", "model.lora_rank")
        sets = {"trained": (False, 0, 0), "frozen": (True, 0, 0), "lora 8": (False, 0, 8), "lora 32": (False, 0, 32)}
        found.append(_named(config, "encoder", {name: dict(zip(keys, s, strict=True)) for name, s in sets.items()}))
    found.append(_values(config, "model.freeze_batchnorm", [False, True]))
    found.append(_values(config, "training.layer_decay", [0.8, 0.9, 1.0]))
    if d.rehearsal:
        found.append(_range(config, "data.rehearsal_share", 0.1, 0.7))
    if d.guard:  # ways to keep the original domain
        if planned:
            one = 2 / (planned * t.learning_rate)  # pulls half way back over the run; the schedule's mean is a half
            found.append(_values(config, "training.l2_sp", [0.0, *(_short(f * one) for f in (0.3, 1.0, 3.0))]))
        found.append(_values(config, "model.distillation", [0.0, 0.3, 1.0, 3.0]))
    for p in found:
        for value in [v for v, sets in p.choices.items() if v != p.own and problem_of(config, sets) is not None]:
            del p.choices[value]
    return [p for p in found if len(p.choices) != 1]


# ---- --space FILE -----------------------------------------------------------------------------------------------


def read_space(path: Path, config: RunConfig) -> list[Parameter]:
    """Read the parameters that a file names.

    Raises:
        UserError: lists what is wrong with them.
    """
    found, problems = [], []
    for name, value in read_yaml(path, "--space").items():
        try:
            found.append(_read_parameter(config, str(name), value))
        except UserError as error:
            problems.append(f"--space {path}: {error}")
    if not found and not problems:
        problems.append(f"--space {path} names nothing to search. Each entry is a key with {FORM}.")
    if problems:
        raise UserError("\n".join(problems))
    return found


def _read_parameter(config: RunConfig, name: str, value: Any) -> Parameter:
    is_named = isinstance(value, dict) and value and all(isinstance(inner, dict) for inner in value.values())
    for word in [name, *map(str, value)] if is_named else [name]:
        if NAME.fullmatch(word) is None:
            raise UserError(f"{word!r} is no name: letters, digits and . _ + - only.")
    _check_keys(*(key for inner in value.values() for key in inner) if is_named else [name])
    if is_named:
        made = _named(config, name, {str(choice): inner for choice, inner in value.items()})
    elif isinstance(value, list) and value:
        made = _values(config, name, value)
    elif isinstance(value, dict) and {"low", "high"} <= value.keys() <= RANGE_KEYS:
        made = _read_range(config, name, value)
    else:
        raise UserError(f"{name} has to be {FORM}, found {value!r}.")
    tried = made.choices.values() if made.choices else () if made.times else ({name: v} for v in (made.low, made.high))
    for settings in tried:
        problem = problem_of(config, settings)
        if problem is not None:
            raise UserError(problem)
    return made


def _read_range(config: RunConfig, name: str, value: dict[str, Any]) -> Parameter:
    low, high, times = value["low"], value["high"], value.get("times")
    if any(isinstance(v, bool) or not isinstance(v, int | float) for v in (low, high)) or low >= high:
        raise UserError(f"{name}: low and high have to be numbers, low below high, found {value!r}.")
    if value.get("log") and low <= 0:
        raise UserError(f"{name}: a range with log: true begins above 0, found low: {low}.")
    _check_keys(*([] if times is None else [times]))
    return _range(config, name, low, high, log=bool(value.get("log")), times=times)


def _check_keys(*keys: str) -> None:
    unknown = next((str(key) for key in keys if key not in FIELDS), None)
    if unknown is not None:
        hint = did_you_mean(unknown, FIELDS, most=2) or " docs/configuration.md lists all keys."
        raise UserError(f"unknown key {unknown}.{hint}")


def problem_of(config: RunConfig, settings: Settings) -> str | None:
    """Return why a run file with these settings would be refused; None where it is not."""
    try:
        changed = RunConfig.model_validate(config.replaced(settings).as_dict())
    except ValidationError as error:
        found = error.errors()[0]
        key = ".".join(str(part) for part in found["loc"][:2])
        return f"{key}: {explain(found, FIELDS[key], settings.get(key))}"
    wrong = [f"{key}: {why}" for key, why in find_contradictions(changed)] + find_conflicts(changed)
    return wrong[0] if wrong else None


# ---- parameters with the run file's own value in them -----------------------------------------------------------


def _range(
    config: RunConfig, name: str, low: float, high: float, log: bool = False, times: str | None = None
) -> Parameter:
    """Return a range, widened to the run file's own value."""
    own = _own(config, name)
    if times is not None:
        factor = config.get(times)
        own = 1.0 if own is None else own / factor if factor else None
    if isinstance(own, bool) or not isinstance(own, int | float) or (log and own <= 0):
        raise UserError(f"{name}: the run file's own value {own!r} lies in no such range. List values to try instead.")
    whole = FIELDS[name].annotation is int
    return Parameter(name, own, min(low, own), max(high, own), log, whole, times)


def _own(config: RunConfig, name: str) -> Any:
    """Return the run file's own value. training.l2_sp: null is 0 where there is no limit that would set it."""
    own = config.get(name)
    return 0.0 if own is None and name == "training.l2_sp" and config.data.guard_limit is None else own


def _values(config: RunConfig, name: str, values: list[Value]) -> Parameter:
    own = _own(config, name)
    if any(isinstance(value, list | dict) for value in [own, *values]):
        raise UserError(f"{name}: lists and mappings need names, as in {FORM}.")
    choices: dict[Value, Settings] = {value: {name: value} for value in (values if own in values else [*values, own])}
    return Parameter(name, own, choices=choices)


def _named(config: RunConfig, name: str, choices: dict[Value, Settings]) -> Parameter:
    own = next((v for v, s in choices.items() if all(config.get(k) == value for k, value in s.items())), None)
    if own is None:
        return Parameter(name, OWN, choices={OWN: {}} | choices)
    return Parameter(name, own, choices=choices)
