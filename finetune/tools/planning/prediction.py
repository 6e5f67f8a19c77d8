"""Memory and time of every strategy for a run file, and which one to take."""

import copy
import logging
import math
import shlex
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from finetune.config.compatibility import find_conflicts
from finetune.config.load import load_config
from finetune.data.batching import BatchLimits
from finetune.errors import UserError
from finetune.paths import ACCELERATE_CONFIGS, strategy_names
from finetune.strategies.optimizers import RELEASES_GRADIENTS
from finetune.strategies.strategy import Strategy, engine_with, resolve_precision, resolve_strategy
from finetune.tools.planning import cache
from finetune.tools.planning.engines import FLOAT, Engine, Weights, engine_of, host_bytes, peak_of_step
from finetune.tools.planning.follow import Kind, Parts
from finetune.tools.planning.gpus import GIB, Card
from finetune.tools.planning.layout import Layout, layout_of
from finetune.tools.planning.memory import StepMemory, optimizer_bytes
from finetune.tools.planning.optimizer_memory import step_bytes
from finetune.tools.planning.speed import loss_flops, seconds_of_step

log = logging.getLogger(__name__)

TOKENS_A_SECOND = 5.0
MOST_CLIPS = 4096
RUN_FILE = "run file alone"
PARTS = ("parameters", "gradients", "optimizer", "encoder", "joint", "temporary")
# By how little each costs in time; the first that fits is recommended.
ONE_GPU = (
    "adamw", "adamw_8bit", "recommended", "activation_offload", "recommended_small", "flash_adamw_gradient_release", "cpu_offload_ao",
    "cpu_offload_gradients_ao", "zero2_offload", "zero3_offload", "lora", "partial_unfreeze", "freeze_encoder",
)  # fmt: skip
SEVERAL_GPUS = (
    "ddp",
    "recommended_multi",
    "fsdp2",
    "zero2",
    "zero3",
    "zero2_offload",
    "fsdp2_offload",
    "zero3_offload",
    "lora",
)


@dataclass(frozen=True)
class Data:
    """What is known of the clips."""

    longest: float
    """Seconds."""
    mean: float
    """Seconds."""
    hours: float | None
    """Of the whole data set."""
    tokens_a_second: float = TOKENS_A_SECOND


@dataclass
class Row:
    """A strategy and what it would take on one GPU."""

    strategy: str
    peak_memory_gib: float | None = None
    parts_gib: dict[str, float] = field(default_factory=dict)
    fits: bool | None = None
    batch: int | None = None
    """Clips of the run's own batch that needs most."""
    batch_seconds: float | None = None
    """Length of each: the longest, unless the run's bounds let shorter clips take more."""
    max_batch: int | None = None
    """The most clips of the longest length that fit."""
    max_batch_by_seconds: dict[str, int] = field(default_factory=dict)
    """The most clips that fit, by their length in seconds."""
    max_batch_duration: float | None = None
    """The most seconds of audio that fit whatever the length of the clips: data.batch_duration."""
    host_memory_gib: float | None = None
    seconds_per_step: float | None = None
    hours: float | None = None
    """Of one pass over the data."""
    followed: bool = True
    """The memory was followed as it is; False: followed on one process, and cut up or moved away by rules (docs/plan.md)."""
    command: str = ""
    reason: str = ""


class Predictor:
    """Predictions for one configuration on one kind of card.

    Args:
        config: the run's, with its strategies.
        engine: and its processes.
        card: on which.
        data: of the clips.
        layout: the model's.
        memory: of its step.
    """

    def __init__(self, config: Any, engine: Engine, card: Card, data: Data, layout: Layout, memory: StepMemory):
        t, w = config.training, memory.weights
        self.config, self.engine, self.card, self.data = config, engine, card, data
        self.layout, self.memory = layout, memory
        states = optimizer_bytes(memory, t.optimizer, dict(t.optimizer_args))
        around = w["parameters"] - layout.layers * w["layer"]
        self.weights = Weights(
            w["parameters"],
            w["trained"],
            w["trained_elements"],
            w["layer"],
            around,
            states.device,
            states.host,
            step_bytes(t.optimizer, memory.shapes),
            **{
                "ema_on_host" if t.ema_device == "cpu" else "ema": FLOAT * w["trained_elements"]
                if t.ema_decay
                else 0.0
            },
        )
        self.accumulates = t.gradient_accumulation_steps > 1

    def parts(self, clips: float, seconds: float) -> Parts:
        """Bytes by part at the peak of a step with so many clips of one length."""
        step = self.memory.at(clips, seconds)
        parts = peak_of_step(step, self.weights, self.engine, self.accumulates)
        if self.config.model.activation_offload and self.card.is_gpu:
            # What one layer stores stays; the others' waits on the host.
            kept = step.peaks[step.names.index("subsampling forward")].get("encoder", 0.0)
            parts["encoder"] = min(parts.get("encoder", 0.0), kept)
        return parts

    def peak(self, clips: float, seconds: float) -> float:
        """Bytes at the peak."""
        return sum(self.parts(clips, seconds).values())

    def most_clips(self, seconds: float, usable: float | None = None) -> int:
        """The most clips of one length that fit; 0 where none does.

        Args:
            seconds: length of each.
            usable: bytes; None: the card's.
        """
        usable = self.card.usable if usable is None else usable
        low, high = 0, MOST_CLIPS
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.peak(middle, seconds) <= usable else (low, middle - 1)
        return low

    def seconds_of_step(self, clips: float, seconds: float) -> float | None:
        """Estimated seconds of an optimizer step of such batches."""
        m = self.layout.model
        frames, tokens = seconds / self.layout.seconds_a_frame, self.data.tokens_a_second * seconds
        width = int(m.joint.jointnet.joint_hidden)
        outputs = self.layout.tokens + 1 + int(m.joint.get("num_extra_outputs", 0) or 0)
        more = loss_flops(clips, frames, tokens, width, outputs, self.config.model.occupancy_threshold)
        step = self.memory.at(clips, seconds)
        stored = max(parts.get("encoder", 0.0) for parts in step.peaks)
        offloaded = stored if self.config.model.activation_offload else 0.0
        batches = self.config.training.gradient_accumulation_steps
        return seconds_of_step(step.work, more, batches, self.weights, self.engine, self.card, offloaded)

    def clips_of_length(self, seconds: float) -> int:
        """Clips of the run's own batches where all are of one length."""
        d = self.config.data
        bounds = tuple((float(upto), int(clips)) for upto, clips in d.batch_bounds)
        own = 0 if d.batch_duration or bounds else self.config.training.per_device_train_batch_size
        return BatchLimits(clips=own, seconds=d.batch_duration, bounds=bounds).clips_of_length(seconds)

    def worst(self) -> tuple[int, float]:
        """The run's own batch that needs most: clips, and the seconds of each."""
        longest = self.data.longest
        ends = [float(upto) for upto, _ in self.config.data.batch_bounds if upto < longest]
        batches = [(self.clips_of_length(seconds), seconds) for seconds in (longest, *lengths_to_show(longest), *ends)]
        return max(batches, key=lambda batch: self.peak(*batch))


def followed_lengths(longest: float) -> list[float]:
    """Lengths of clips that steps are followed for, seconds."""
    return [longest, 0.6 * longest, 0.3 * longest]


def lengths_to_show(longest: float) -> list[float]:
    """Lengths of clips that bounds are given for, seconds."""
    return [s for s in (2.0, 5.0, 10.0, 15.0, 20.0, 30.0) if s < 0.95 * longest] + [longest]


def row_of(name: str, predictor: Predictor, command: str) -> Row:
    """What a strategy takes."""
    longest, usable = predictor.data.longest, predictor.card.usable
    clips, length = predictor.worst()
    parts = predictor.parts(clips, length)
    bounds = {f"{s:g}": predictor.most_clips(s) for s in lengths_to_show(longest)}
    durations = [float(s) * clips_that_fit for s, clips_that_fit in bounds.items()]
    shown = {part: parts.get(part, 0.0) / GIB for part in PARTS}
    shown["parameters"] += parts.get("weight_copies", 0.0) / GIB
    shown["temporary"] += (parts.get("weight_gradients", 0.0) + parts.get("activations", 0.0)) / GIB
    peak = sum(parts.values())
    usual = predictor.clips_of_length(predictor.data.mean)
    seconds = predictor.seconds_of_step(usual, predictor.data.mean)
    hours = None
    if seconds is not None and predictor.data.hours is not None:
        audio = usual * predictor.data.mean * predictor.config.training.gradient_accumulation_steps
        hours = predictor.data.hours * 3600 / (audio * predictor.engine.processes) * seconds / 3600
    return Row(
        strategy=name,
        peak_memory_gib=peak / GIB,
        parts_gib=shown,
        fits=peak <= usable,
        batch=clips,
        batch_seconds=length,
        max_batch=bounds[f"{longest:g}"],
        max_batch_by_seconds=bounds,
        max_batch_duration=float(math.floor(min(durations))),
        host_memory_gib=host_bytes(predictor.weights, predictor.engine) / GIB,
        seconds_per_step=seconds,
        hours=hours,
        followed=not (
            predictor.engine.name.startswith(("fsdp", "deepspeed")) or predictor.config.model.activation_offload
        ),
        command=command,
    )


def command_for(
    config_file: Path, names: list[str], engine: str, processes: int, overrides: Iterable[str] = ()
) -> str:
    """The line to type."""
    run = f"finetune/train.py --config {config_file}"
    engines = [n for n in names if engine != "none" and _has_engine(n)]
    others = "".join(f" --strategy {n}" for n in names if n not in engines)
    others += "".join(f" {shlex.quote(setting)}" for setting in overrides)
    if engines:
        return f"accelerate launch --config_file accelerate_configs/{engines[0]}.yaml --num_processes {processes} {run}{others}"
    if processes > 1:
        return f"accelerate launch --multi_gpu --num_processes {processes} {run}{others}"
    return f"accelerate launch {run}{others}"


def _has_engine(name: str) -> bool:
    text = (ACCELERATE_CONFIGS / f"{name}.yaml").read_text(encoding="utf-8")
    return "distributed_type: NO" not in text and 'distributed_type: "NO"' not in text


@dataclass
class _Wanted:
    """A combination of strategies on its way to a row."""

    name: str
    names: list[str]
    config: Any
    strategy: Strategy
    kind: Kind


def make_plan(
    config_file: Path,
    overrides: list[str],
    combinations: Iterable[list[str]],
    card: Card,
    processes: int,
    data: Data,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> list[Row]:
    """A row for each combination of strategies; one that cannot run or be followed has a reason instead of figures.

    Args:
        config_file: the run file.
        overrides: `key=value`.
        combinations: strategies to combine, [] for the run file alone.
        card: the GPU.
        processes: how many of them.
        data: what is known of the clips.
        progress: told how many of how many kinds of steps have been followed.

    Raises:
        UserError: the run file itself cannot be used.
    """
    base, _ = load_config(config_file, [], overrides)
    layout = layout_of(base)
    if layout.guessed:
        log.warning(layout.guessed)
    lengths = followed_lengths(data.longest)
    wanted: list[_Wanted | Row] = []
    for names in combinations:
        name = "+".join(names) or RUN_FILE
        try:
            wanted.append(_prepare(name, names, config_file, overrides, card, processes))
        except UserError as error:
            wanted.append(Row(name, reason=" ".join(str(error).split())))
    kinds = [w.kind for w in wanted if isinstance(w, _Wanted)]
    followed = cache.follow_all(layout, kinds, lengths, data.tokens_a_second, progress)
    rows = []
    for w in wanted:
        if isinstance(w, Row):
            rows.append(w)
            continue
        memory = followed[cache.key_of(layout, w.kind, lengths, data.tokens_a_second)]
        if isinstance(memory, str):
            reason = memory.removeprefix(cache.REFUSED)
            rows.append(Row(w.name, reason=reason if reason != memory else f"cannot be followed here: {memory}"))
            continue
        engine = engine_of(w.strategy, processes)
        predictor = Predictor(w.config, engine, card, _within(data, w.config), layout, memory)
        command = command_for(config_file, w.names, w.strategy.engine, processes, overrides)
        rows.append(row_of(w.name, predictor, command))
    return rows


def _prepare(
    name: str, names: list[str], config_file: Path, overrides: list[str], card: Card, processes: int
) -> _Wanted:
    strategy = resolve_strategy(names)
    config, _ = load_config(config_file, names, overrides)
    engine = engine_with(strategy.engine, processes)
    precision = resolve_precision(config.training.bf16, config.training.fp16, strategy)
    precise = copy.deepcopy(config)
    precise.training.bf16, precise.training.fp16 = precision == "bf16", precision == "fp16"
    conflicts = find_conflicts(precise, engine, card.is_gpu)
    if precision == "bf16" and not card.bf16:
        conflicts.append(f"{card.name} has no bfloat16; set training.bf16: false and training.fp16: true")
    if conflicts:
        raise UserError("; ".join(conflicts))
    kind = Kind(config.model, precision, config.training.optimizer in RELEASES_GRADIENTS, card.is_gpu)
    return _Wanted(name, names, config, strategy, kind)


def _within(data: Data, config: Any) -> Data:
    """The data as a strategy that has a `data.max_duration` of its own sees them."""
    longest = min(data.longest, config.data.max_duration)
    return Data(longest, min(data.mean, longest), data.hours, data.tokens_a_second)


def recommend(rows: list[Row], card: Card, processes: int) -> tuple[str | None, str]:
    """The strategy to take and why: the first that fits of those in the order of what they cost in time."""
    by_name = {row.strategy: row for row in rows}
    order = [name for name in (SEVERAL_GPUS if processes > 1 else ONE_GPU) if name in by_name] or list(by_name)
    too_large, impossible = [], []
    for name in order:
        row = by_name[name]
        if row.fits:
            why = (
                f"of those that fit it should cost least time: {_gib(row.peak_memory_gib)} of {card.usable / GIB:.1f} GiB that can be "
                f"used, with {row.batch} clips of the longest length"
            )
            if too_large:
                why += "; " + ", ".join(f"{r.strategy} needs {_gib(r.peak_memory_gib)}" for r in too_large)
            return name, why
        (too_large if row.fits is False else impossible).append(row)
    smallest = min(too_large, key=lambda row: row.peak_memory_gib, default=None)
    if smallest is None:
        return None, "none of them can run: " + "; ".join(f"{r.strategy}: {r.reason}" for r in impossible[:3])
    if smallest.max_batch:
        return smallest.strategy, (
            f"none fits with the run's own batch; this one needs least, {_gib(smallest.peak_memory_gib)} GiB, and fits with "
            f"training.per_device_train_batch_size={smallest.max_batch} (accumulate more batches for the same step)"
        )
    return None, (
        f"none fits, not even with one clip; {smallest.strategy} needs least. Lower data.max_duration, or take a GPU with more memory"
    )


def _gib(size: float) -> str:
    return f"{size:.1f}" if size >= 1 else f"{size:.2g}"


def all_combinations(names: list[str], only: str | None = None) -> list[list[str]]:
    """The run file alone, every strategy alone, and the combination that the user asks for.

    Args:
        names: that combination.
        only: strategies in place of all, such as "adamw,adamw_8bit+gradient_checkpointing".
    """
    found = [[], *([name] for name in strategy_names())] if only is None else [w.split("+") for w in only.split(",")]
    return found if not names or names in found else [names, *found]


def as_json(
    rows: list[Row], card: Card, processes: int, data: Data, recommended: str | None, why: str
) -> dict[str, Any]:
    """What `--json` writes."""
    return {
        "gpu": card.name,
        "gpus": processes,
        "memory_gib": card.memory / GIB,
        "usable_gib": card.usable / GIB,
        "data": asdict(data),
        "strategies": [asdict(row) for row in rows],
        "recommended": recommended,
        "why": why,
    }
