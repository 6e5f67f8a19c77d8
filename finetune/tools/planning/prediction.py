"""Memory and time of every strategy for a run file, and which one to take."""

import bisect
import logging
import math
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from finetune.config.compatibility import find_conflicts, limit_pulls
from finetune.config.load import load_config
from finetune.config.schema import RunConfig
from finetune.data.batching import BatchLimits
from finetune.errors import UserError
from finetune.paths import strategy_names
from finetune.strategies.optimizers import RELEASES_GRADIENTS
from finetune.strategies.strategy import Strategy, engine_with, resolve_precision, resolve_strategy
from finetune.tools.planning import cache
from finetune.tools.planning.dataset import Data
from finetune.tools.planning.engines import FLOAT, Engine, Weights, engine_of, host_bytes, peak_of_step
from finetune.tools.planning.follow import Kind, Parts
from finetune.tools.planning.gpus import GIB, Card
from finetune.tools.planning.layout import Layout, layout_of
from finetune.tools.planning.memory import StepMemory, optimizer_bytes
from finetune.tools.planning.optimizer_memory import step_bytes
from finetune.tools.planning.speed import loss_flops, seconds_of_step

log = logging.getLogger(__name__)

MOST_CLIPS = 4096
RUN_FILE = "run file alone"
SHOWN = {
    "parameters": ("parameters", "weight_copies"),
    "gradients": ("gradients",),
    "optimizer": ("optimizer",),
    "encoder": ("encoder",),
    "joint": ("joint",),
    "temporary": ("temporary", "weight_gradients"),
    "base": ("base",),
}
"""Parts as they are shown, and what is in them."""
# The fastest first; the first that fits is recommended.
ONE_GPU = (
    "adamw",
    "adamw_8bit",
    "recommended",
    "activation_offload",
    "recommended_small",
    "flash_adamw_gradient_release",
    "cpu_offload_ao",
    "cpu_offload_gradients_ao",
    "zero2_offload",
    "zero3_offload",
    "lora",
    "partial_unfreeze",
    "freeze_encoder",
)
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
    """False: followed on one process, then split up or moved away by rules (docs/plan.md)."""
    command: str = ""
    reason: str = ""


@dataclass
class Plan:
    """What `--json` writes."""

    gpu: str
    gpus: int
    memory_gib: float
    usable_gib: float
    data: Data
    strategies: list[Row]
    recommended: str | None
    why: str


class Predictor:
    """Predictions for one configuration, with its strategies, on one kind of card."""

    def __init__(self, config: RunConfig, engine: Engine, card: Card, data: Data, layout: Layout, memory: StepMemory):
        t = config.training
        self.config, self.engine, self.card, self.data = config, engine, card, data
        self.layout, self.memory = layout, memory
        states = optimizer_bytes(memory, t.optimizer, dict(t.optimizer_args))
        ema = FLOAT * memory.weights["trained_elements"] if t.ema_decay else 0.0
        start = memory.weights["trained"] if t.l2_sp or limit_pulls(config, engine.name) else 0.0
        self.weights = Weights(
            **memory.weights,
            optimizer=states.device,
            optimizer_on_host=states.host,
            optimizer_step=step_bytes(t.optimizer, memory.shapes),
            beside=start + (0.0 if t.ema_device == "cpu" else ema),
            ema_on_host=ema if t.ema_device == "cpu" else 0.0,
            way_on_host=2 * memory.weights["trained"] if config.data.guard_limit is not None else 0.0,
        )
        self.accumulates = t.gradient_accumulation_steps > 1

    def parts(self, clips: float, seconds: float) -> Parts:
        """Return the bytes by part at the peak of a step with `clips` clips of one length."""
        step = self.memory.at(clips, seconds)
        parts = peak_of_step(step, self.weights, self.engine, self.accumulates)
        if self.config.model.activation_offload and self.card.is_gpu:
            # What one layer stores stays; what the others store waits on the host.
            kept = float(step.peaks["encoder"][step.phases.index("subsampling forward")])
            parts["encoder"] = min(parts["encoder"], kept)
        return parts

    def peak(self, clips: float, seconds: float) -> float:
        """Return the bytes at that peak."""
        return sum(self.parts(clips, seconds).values())

    def most_clips(self, seconds: float, usable: float | None = None) -> int:
        """Return the most clips of one length that fit into `usable` bytes (by default the card's), or 0."""
        usable = self.card.usable if usable is None else usable
        counts = range(1, MOST_CLIPS + 1)
        return bisect.bisect_right(counts, usable, key=lambda clips: self.peak(clips, seconds))

    def seconds_of_step(self, clips: float, seconds: float) -> float | None:
        """Estimate the seconds of an optimizer step of such batches; None where the card's rates are not known."""
        m = self.layout.model
        frames, tokens = seconds / self.layout.seconds_a_frame, self.data.tokens_a_second * seconds
        more = 0.0
        if self.memory.block_seconds:  # a lattice is computed
            width = int(m.joint.jointnet.joint_hidden)
            outputs = self.layout.tokens + 1 + int(m.joint.get("num_extra_outputs", 0) or 0)
            more = loss_flops(clips, frames, tokens, width, outputs, self.config.model.occupancy_threshold)
        step = self.memory.at(clips, seconds)
        offloaded = float(step.peaks["encoder"].max()) if self.config.model.activation_offload else 0.0
        batches = self.config.training.gradient_accumulation_steps
        return seconds_of_step(step.work, more, batches, self.weights, self.engine, self.card, offloaded)

    def clips_of_length(self, seconds: float) -> int:
        """Return the clips of the run's own batches where all are of one length."""
        d = self.config.data
        bounds = tuple((float(upto), int(clips)) for upto, clips in d.batch_bounds)
        own = 0 if d.batch_duration or bounds else self.config.training.per_device_train_batch_size
        return BatchLimits(clips=own, seconds=d.batch_duration, bounds=bounds).clips_of_length(seconds)

    def worst(self) -> tuple[int, float]:
        """Return the run's own batch that needs most: clips, and the seconds of each."""
        longest = self.data.longest
        ends = [float(upto) for upto, _ in self.config.data.batch_bounds if upto < longest]
        batches = [(self.clips_of_length(seconds), seconds) for seconds in (longest, *lengths_to_show(longest), *ends)]
        return max(batches, key=lambda batch: self.peak(*batch))


def followed_lengths(longest: float) -> list[float]:
    """Return the lengths of clips, in seconds, that steps are followed for."""
    return [longest, 0.6 * longest, 0.3 * longest]


def lengths_to_show(longest: float) -> list[float]:
    """Return the lengths of clips, in seconds, that bounds are given for."""
    return [s for s in (2.0, 5.0, 10.0, 15.0, 20.0, 30.0) if s < 0.95 * longest] + [longest]


def row_of(name: str, predictor: Predictor, command: str = "") -> Row:
    """Return the figures of a strategy."""
    data, engine, config = predictor.data, predictor.engine, predictor.config
    clips, length = predictor.worst()
    parts = predictor.parts(clips, length)
    bounds = {s: predictor.most_clips(s) for s in lengths_to_show(data.longest)}
    usual = predictor.clips_of_length(data.mean)
    seconds = predictor.seconds_of_step(usual, data.mean)
    hours = None
    if seconds is not None and data.hours is not None:
        audio = usual * data.mean * config.training.gradient_accumulation_steps * engine.processes
        hours = data.hours * seconds / audio
    return Row(
        strategy=name,
        peak_memory_gib=sum(parts.values()) / GIB,
        parts_gib={shown: sum(parts.get(part, 0.0) for part in of) / GIB for shown, of in SHOWN.items()},
        fits=sum(parts.values()) <= predictor.card.usable,
        batch=clips,
        batch_seconds=length,
        max_batch=bounds[data.longest],
        max_batch_by_seconds={f"{s:g}": most for s, most in bounds.items()},
        max_batch_duration=float(math.floor(min(s * most for s, most in bounds.items()))),
        host_memory_gib=host_bytes(predictor.weights, engine) / GIB,
        seconds_per_step=seconds,
        hours=hours,
        followed=not (engine.shares_out or config.model.activation_offload),
        command=command,
    )


def command_for(config_file: Path, names: list[str], processes: int, overrides: Iterable[str] = ()) -> str:
    """Return the line to type: it starts a process for each GPU, unless told otherwise."""
    as_many = processes > 1 or torch.cuda.device_count() > 1
    words = [*([f"NUM_PROCESSES={processes}"] if as_many else []), "bash scripts/run_training.sh"]
    words += [f"--config {shlex.quote(str(config_file))}", *(f"--strategy {n}" for n in names)]
    return " ".join(words + [shlex.quote(setting) for setting in overrides])


def make_plan(
    config_file: Path,
    overrides: list[str],
    combinations: Iterable[list[str]],
    card: Card,
    processes: int,
    data: Data,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Plan:
    """Plan each combination of strategies; one that cannot run or be followed has a reason, no figures.

    Args:
        config_file: the run file.
        overrides: `key=value`.
        combinations: strategies to combine, [] for the run file alone.
        card: the GPU.
        processes: how many of them.
        data: what is known of the clips.
        progress: called with the number of kinds of steps that have been followed, and of all.

    Raises:
        UserError: the run file itself cannot be used.
    """
    base, _ = load_config(config_file, [], overrides)
    layout = layout_of(base)
    if layout.guessed:
        log.warning(layout.guessed)
    lengths = followed_lengths(data.longest)
    rows: list[Row] = []
    possible: list[tuple[int, list[str], RunConfig, Strategy, Kind]] = []
    for names in combinations:
        rows.append(Row("+".join(names) or RUN_FILE))
        try:
            strategy = resolve_strategy(names)
            config, _ = load_config(config_file, names, overrides)
            possible.append((len(rows) - 1, names, config, strategy, _kind_of(config, strategy, card, processes)))
        except UserError as error:
            rows[-1].reason = " ".join(str(error).split())
    kinds = [kind for *_, kind in possible]
    memories = cache.follow_all(layout, kinds, lengths, data.tokens_a_second, progress)
    for (i, names, config, strategy, _), memory in zip(possible, memories, strict=True):
        if isinstance(memory, str):
            rows[i].reason = memory
            continue
        longest = min(data.longest, config.data.max_duration)  # a strategy may have one of its own
        within = replace(data, longest=longest, mean=min(data.mean, longest))
        predictor = Predictor(config, engine_of(strategy, processes), card, within, layout, memory)
        command = command_for(config_file, names, processes, overrides)
        rows[i] = row_of(rows[i].strategy, predictor, command)
    return plan_of(rows, card, processes, data, *recommend(rows, card, processes))


def plan_of(rows: list[Row], card: Card, processes: int, data: Data, recommended: str | None, why: str) -> Plan:
    """Return the plan for so many cards."""
    return Plan(card.name, processes, card.memory / GIB, card.usable / GIB, data, rows, recommended, why)


def _kind_of(config: RunConfig, strategy: Strategy, card: Card, processes: int) -> Kind:
    """Return what is trained how.

    Raises:
        UserError: the configuration cannot run with this strategy or on this card.
    """
    t = config.training
    precision = resolve_precision(t.bf16, t.fp16, strategy)
    precise = config.replaced({"training.bf16": precision == "bf16", "training.fp16": precision == "fp16"})
    conflicts = find_conflicts(precise, engine_with(strategy.engine, processes), card.is_gpu)
    if precision == "bf16" and not card.bf16:
        conflicts.append(f"{card.name} has no bfloat16; set training.bf16: false and training.fp16: true")
    if conflicts:
        raise UserError("; ".join(conflicts))
    return Kind(config.model, precision, t.optimizer in RELEASES_GRADIENTS, card.is_gpu)


def recommend(rows: list[Row], card: Card, processes: int) -> tuple[str | None, str]:
    """Return the strategy to take, and why: the first that fits, in the order of speed."""
    by_name = {row.strategy: row for row in rows}
    order = [name for name in (SEVERAL_GPUS if processes > 1 else ONE_GPU) if name in by_name] or list(by_name)
    tried = [by_name[name] for name in order]
    too_large = []
    for row in tried:
        if row.fits:
            why = (
                f"{'it' if card.flops_16 is None else 'the first, in the order of speed, that'} fits: {_gib(row)} of "
                f"{card.usable / GIB:.1f} GiB that can be used, with {row.batch} clips of the longest length"
            )
            return row.strategy, "; ".join(filter(None, [why, ", ".join(too_large)]))
        if row.fits is False:
            too_large.append(f"{row.strategy} needs {_gib(row)}")
    smallest = min((row for row in tried if row.fits is False), key=lambda r: r.peak_memory_gib or 0.0, default=None)
    if smallest is None:
        return None, "none of them can run: " + "; ".join(f"{r.strategy}: {r.reason}" for r in tried[:3])
    if smallest.max_batch:
        return smallest.strategy, (
            f"none fits with the run's own batch; this one needs least, {_gib(smallest)} GiB, and fits with "
            f"training.per_device_train_batch_size={smallest.max_batch} (accumulate more batches for the same step)"
        )
    return None, (
        f"none fits, not even with one clip; {smallest.strategy} needs least. Lower data.max_duration, or take a GPU "
        "with more memory"
    )


def _gib(row: Row) -> str:
    size = row.peak_memory_gib or 0.0
    return f"{size:.1f}" if size >= 1 else f"{size:.2g}"


def all_combinations(names: list[str], only: str | None = None) -> list[list[str]]:
    """Return the run file alone, every strategy alone, and the combination `names`.

    Args:
        names: strategies that the user combines.
        only: in place of all, such as "adamw,adamw_8bit+gradient_checkpointing".
    """
    found = [[], *([name] for name in strategy_names())] if only is None else [w.split("+") for w in only.split(",")]
    return found if not names or names in found else [names, *found]
