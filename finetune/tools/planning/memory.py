"""From steps followed at a small depth and one batch size to the memory of the whole model with any batch.

A Conformer layer stores as much as the next, so a step is followed with a few layers and the others are put in: what a
layer adds to each phase is read off between two of them. In the batch, activations grow in proportion to the clips,
weights not at all, and the loss by its lattices beside a block of fixed size. In the length of the clips, everything
is a polynomial of second degree (attention). Each is exact but for rounding of lengths.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from finetune.tools.planning.follow import WORK, Follower, Kind, Parts, Phase
from finetune.tools.planning.optimizer_memory import ParameterShape, StateBytes, state_bytes

GROWS_WITH_CLIPS = ("encoder", "temporary", *WORK)
# Deeper models are followed with a few layers.
FOLLOWED_WHOLE = 6
CLIPS = 16
LOSS = ("loss forward", "loss backward")


@dataclass(frozen=True)
class Step:
    """One step of the whole model at one batch: the same phases for every batch, so that batches can be compared."""

    names: list[str]
    peaks: list[Parts]
    """Bytes by part at the peak of each phase."""
    without_gradients: list[Parts]
    """Bytes by part when the sum without gradients was largest."""
    work: Parts
    """Of the whole step."""


def depth_to_follow(kind: Kind, layers: int) -> int:
    """How many layers show what every layer does: two of each kind, and all that are trained where others are
    frozen.
    """
    m = kind.options
    period = m.gradient_checkpointing_every if m.gradient_checkpointing else 1
    trained = m.unfreeze_encoder_layers if m.freeze_encoder else 0
    depth = trained + 2 * period
    return layers if layers <= max(FOLLOWED_WHOLE, depth) else depth


def followed_step(
    follower: Follower, kind: Kind, layers: int, clips: int, seconds: float, tokens: int
) -> tuple[list[Phase], Step]:
    """The phases as followed, and the step of a model with so many layers."""
    depth = depth_to_follow(kind, layers)
    phases = follower.follow(kind, depth, clips, seconds, tokens)
    return phases, _with_all_layers(phases, follower, kind, depth, layers)


def _with_all_layers(phases: list[Phase], follower: Follower, kind: Kind, depth: int, layers: int) -> Step:
    more = layers - depth
    by_name = {phase.name: phase for phase in phases}
    period = kind.options.gradient_checkpointing_every if kind.options.gradient_checkpointing else 1
    first, after = (period, 2 * period) if more else (0, 0)

    def difference(upper: Phase | None, lower: Phase | None, parts: Callable[[Phase], Parts]) -> Parts:
        """What one layer between two phases makes, by part."""
        if upper is None or lower is None or not more:
            return {}
        a, b = parts(upper), parts(lower)
        return {n: (a.get(n, 0) - b.get(n, 0)) / period for n in {*a, *b}}

    def backward(i: int) -> Phase | None:
        return by_name.get(f"backward of layer {i}")

    def forward(i: int) -> Phase:
        return by_name[f"forward of layer {i}" if i < depth else "loss forward"]

    # Layers `first` to `after` stand for those that are put in between them.
    layer_bytes = follower.layer_bytes(kind, depth, first) if more else 0
    stored = difference(forward(after), forward(first), lambda p: p.held)
    lower = backward(first - 1) or by_name.get("backward below the layers")
    freed = difference(backward(after - 1), lower, lambda p: p.held)
    gradients = -freed.get("gradients", 0.0)
    held_by_graph = {n: freed.get(n, 0.0) for n in ("encoder", "weight_copies")}
    work: Parts = dict.fromkeys(WORK, 0.0)
    for phase in phases:
        for n, amount in phase.work.items():
            work[n] += amount
    for i in range(first, after):
        for phase in (forward(i), backward(i)):
            for n, amount in (phase.work if phase else {}).items():
                work[n] += amount * more / period

    def extended(parts: Parts, name: str) -> Parts:
        new = dict(parts)
        if not more:
            return new
        new["parameters"] = new.get("parameters", 0) + more * layer_bytes
        word, _, number = name.partition(" of layer ")
        below = name in ("spectrogram", "subsampling forward", "backward below the layers", "step") or (
            number and int(number) < (first if word == "backward" else after - 1)
        )
        if not below:  # all layers have been through forward, and none of those put in through backward
            grown = stored if name == "loss forward" or word == "forward" else held_by_graph
            for n in ("encoder", "weight_copies"):
                new[n] = new.get(n, 0) + more * grown.get(n, 0)
        elif word == "backward" or name in ("backward below the layers", "step"):
            new["gradients"] = new.get("gradients", 0.0) + more * gradients
        return new

    def without(phase: Phase) -> Parts:
        return {n: b for n, b in extended(phase.peak_without_gradients, phase.name).items() if n != "gradients"}

    names = [phase.name for phase in phases]
    return Step(names, [extended(p.peak, p.name) for p in phases], [without(p) for p in phases], work)


@dataclass(frozen=True)
class StepMemory:
    """Memory and work of a step for any batch, from three lengths that were followed."""

    lengths: list[float]
    """Seconds of the clips that were followed, the longest first."""
    tokens_a_second: float
    steps: list[Step]
    """With CLIPS clips of each length."""
    loss_slopes: dict[str, float]
    """Bytes that a clip of the second length adds to the loss, by phase; the rest is of a fixed size."""
    weights: dict[str, float]
    """Bytes `parameters`, `trained`, `layer`, and `trained_elements`."""
    shapes: list[ParameterShape]
    """Shape, type, whether it is an embedding, and how often, of the trained parameters."""
    block_seconds: float = 0.0
    """Seconds of audio times tokens, with the end of the text, whose lattice fills a block of the loss."""

    def tokens_of(self, seconds: float) -> int:
        """Tokens of a text of that length."""
        return tokens_of(self.tokens_a_second, seconds)

    def at(self, clips: float, seconds: float) -> Step:
        """The step of a batch of so many clips of one length."""
        shares = self._shares(seconds)
        cells = seconds * (self.tokens_of(seconds) + 1)
        full = min(1.0, clips * cells / self.block_seconds) if self.block_seconds else 1.0
        fixed = {
            name: peak.get("joint", 0.0) - CLIPS * self.loss_slopes[name]
            for name, peak in zip(self.steps[1].names, self.steps[1].peaks)
            if name in self.loss_slopes
        }

        def scaled(names: list[str], choose: Callable[[Step], list[Parts]]) -> list[Parts]:
            found = []
            for name, *parts_at in zip(names, *(choose(step) for step in self.steps)):
                kinds = {n for parts in parts_at for n in parts}
                parts: Parts = {n: sum(w * p.get(n, 0.0) for w, p in zip(shares, parts_at)) for n in kinds}
                for n in GROWS_WITH_CLIPS:
                    if n in parts:
                        parts[n] *= clips / CLIPS
                if name in fixed:
                    parts["joint"] = full * fixed[name] + (parts["joint"] - fixed[name]) * clips / CLIPS
                elif "joint" in parts:
                    parts["joint"] *= clips / CLIPS
                found.append({n: max(b, 0.0) for n, b in parts.items()})
            return found

        names = self.steps[0].names
        return Step(
            names,
            scaled(names, lambda step: step.peaks),
            scaled(names, lambda step: step.without_gradients),
            scaled(["work"], lambda step: [step.work])[0],
        )

    def _shares(self, seconds: float) -> list[float]:
        """Weights of the followed lengths in the parabola through them."""
        x, shares = np.asarray(self.lengths), []
        for i in range(len(x)):
            others = np.delete(x, i)
            shares.append(float(np.prod((seconds - others) / (x[i] - others))))
        return shares


def tokens_of(tokens_a_second: float, seconds: float) -> int:
    """Tokens of a text of that length."""
    return max(1, round(tokens_a_second * seconds))


def measure(follower: Follower, kind: Kind, layers: int, lengths: list[float], tokens_a_second: float) -> StepMemory:
    """Follows a step of each length.

    Args:
        follower: of the model.
        kind: what is trained how.
        layers: Conformer layers of the model.
        lengths: seconds of the clips, three of them, the longest first.
        tokens_a_second: of the texts.
    """

    def step(clips: int, seconds: float) -> Step:
        return followed_step(follower, kind, layers, clips, seconds, tokens_of(tokens_a_second, seconds))[1]

    steps = [step(CLIPS, seconds) for seconds in lengths]
    m = kind.options
    # The same for all that share head, precision and texts.
    key = (kind.precision, kind.cuda, m.dtype, m.dropout, m.joint_memory_budget, tuple(lengths), tokens_a_second)
    if key not in follower.loss_slopes:
        more = step(2 * CLIPS, lengths[1])
        follower.loss_slopes[key] = {
            name: (b.get("joint", 0.0) - a.get("joint", 0.0)) / CLIPS
            for name, a, b in zip(more.names, steps[1].peaks, more.peaks)
            if name in LOSS
        }
    weights, shapes = _weights_and_shapes(follower, kind, layers)
    block_seconds = follower.block_cells * follower.layout.seconds_a_frame
    return StepMemory(lengths, tokens_a_second, steps, follower.loss_slopes[key], weights, shapes, block_seconds)


def _weights_and_shapes(follower: Follower, kind: Kind, layers: int) -> tuple[dict[str, float], list[ParameterShape]]:
    """Of the whole model."""
    depth = depth_to_follow(kind, layers)
    period = kind.options.gradient_checkpointing_every if kind.options.gradient_checkpointing else 1
    repeated = range(period, 2 * period) if layers > depth else range(0)
    weights: dict[str, float] = dict.fromkeys(("parameters", "trained", "trained_elements", "layer"), 0.0)
    shapes: dict[tuple[tuple[int, ...], str, bool], float] = {}
    for p in follower.parameters(kind, depth):
        found = re.match(r"encoder\.layers\.(\d+)\.", p.name)
        times = 1.0 + ((layers - depth) / period if found and int(found[1]) in repeated else 0.0)
        elements = int(np.prod(p.shape))
        size = elements * getattr(torch, p.dtype).itemsize
        weights["parameters"] += times * size
        if found and int(found[1]) == 0:
            weights["layer"] += size
        if p.trained:
            weights["trained"] += times * size
            weights["trained_elements"] += times * elements
            key = (p.shape, p.dtype, p.embedding)
            shapes[key] = shapes.get(key, 0.0) + times
    return weights, [(*key, round(times)) for key, times in shapes.items()]


def optimizer_bytes(memory: StepMemory, name: str, args: dict[str, Any]) -> StateBytes:
    """Bytes of the optimizer's states for all trained parameters."""
    on_device = on_host = 0
    for shape, dtype, embedding, times in memory.shapes:
        found = state_bytes(name, args, tuple(shape), getattr(torch, dtype), embedding)
        on_device, on_host = on_device + times * found.device, on_host + times * found.host
    return StateBytes(on_device, on_host)
