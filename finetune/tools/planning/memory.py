"""From steps followed at a small depth and one batch size to the memory of the whole model with any batch.

A Conformer layer stores as much as the next, so a step is followed with a few layers and the others are put in: what a
layer adds to each phase is read off between two of them. In the batch, activations grow in proportion to the clips,
weights not at all, and the loss by its lattices beside a block of fixed size. In the length of the clips, everything
is a polynomial of second degree (attention). Each is exact but for rounding of lengths.

L lengths that were followed, P phases, N parts, W kinds of work.
"""

import collections
import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from finetune.models.protocols import AsrModel
from finetune.tools.planning.follow import BASE_FORWARD, PARTS, WORK, Follower, Kind, Parts, Phase
from finetune.tools.planning.optimizer_memory import ParameterShape, StateBytes, state_bytes

GROWS_WITH_CLIPS = ("encoder", "joint", "temporary")
JOINT = PARTS.index("joint")
# Deeper models are followed with a few layers.
FOLLOWED_WHOLE = 6
CLIPS = 16
LOSS = ("loss forward", "loss backward")


@dataclass(frozen=True)
class Step:
    """One step of the whole model at one batch: the same phases for every batch, so that batches can be compared."""

    phases: list[str]
    peaks: dict[str, np.ndarray]
    """(P,) bytes of each part at the peak of each phase."""
    without_gradients: dict[str, np.ndarray]
    """(P,) bytes of each part when the sum without gradients was largest."""
    work: Parts
    """Of the whole step."""


@dataclass(frozen=True)
class StepMemory:
    """Memory and work of a step for any batch, from three lengths that were followed."""

    lengths: list[float]
    """Seconds of the clips that were followed, the longest first."""
    tokens_a_second: float
    phases: list[str]
    peaks_L2PN: np.ndarray
    """Bytes with CLIPS clips of each length: at the peak, and when the sum without gradients was largest."""
    work_LW: np.ndarray
    loss_block: list[float]
    """(P,) bytes of the loss that do not grow with the clips once they fill a block."""
    weights: dict[str, float]
    """The fields of `engines.Weights` that say how large the model is."""
    shapes: list[ParameterShape]
    """Shape, type, whether it is an embedding, and how often, of the trained parameters."""
    block_seconds: float = 0.0
    """Seconds of audio times tokens, with the end of the text, whose lattice fills a block of the loss."""

    def tokens_of(self, seconds: float) -> int:
        """Return the tokens of a text of that length."""
        return tokens_of(self.tokens_a_second, seconds)

    def at(self, clips: float, seconds: float) -> Step:
        """Return the step of a batch of so many clips of one length."""
        shares_L = self._shares(seconds)
        cells = seconds * (self.tokens_of(seconds) + 1)
        full = min(1.0, clips * cells / self.block_seconds) if self.block_seconds else 1.0
        growth = clips / CLIPS
        peaks_2PN = np.tensordot(shares_L, self.peaks_L2PN, 1)
        peaks_2PN *= [growth if part in GROWS_WITH_CLIPS else 1.0 for part in PARTS]
        peaks_2PN[..., JOINT] += (full - growth) * np.array(self.loss_block)
        peaks_2NP = np.maximum(peaks_2PN, 0.0).swapaxes(1, 2)
        work_W = growth * np.maximum(shares_L @ self.work_LW, 0.0)
        work: Parts = dict(zip(WORK, work_W.tolist()))
        return Step(self.phases, _by_part(peaks_2NP[0]), _by_part(peaks_2NP[1]), work)

    def _shares(self, seconds: float) -> np.ndarray:
        """Return the weights of the followed lengths in the parabola through them."""
        x_L = np.array(self.lengths)
        others = (np.delete(x_L, i) for i in range(len(x_L)))
        return np.array([np.prod((seconds - other) / (x - other)) for x, other in zip(x_L, others)])


def _by_part(sizes_NP: np.ndarray) -> dict[str, np.ndarray]:
    return dict(zip(PARTS, sizes_NP))


def tokens_of(tokens_a_second: float, seconds: float) -> int:
    """Return the tokens of a text of that length."""
    return max(1, round(tokens_a_second * seconds))


def measure(follower: Follower, kind: Kind, lengths: list[float], tokens_a_second: float) -> StepMemory:
    """Follow a step of each length.

    Args:
        follower: of the model.
        kind: what is trained how.
        lengths: seconds of the clips, three of them, the longest first.
        tokens_a_second: of the texts.
    """

    def step(clips: int, seconds: float) -> list[Phase]:
        return followed_step(follower, kind, clips, seconds, tokens_of(tokens_a_second, seconds))

    steps = [step(CLIPS, seconds) for seconds in lengths]
    middle = steps[1]
    m = kind.options
    # What a clip adds to the loss is the same for all that share head, precision and texts.
    key = (kind.precision, kind.cuda, m.dtype, m.dropout, m.joint_memory_budget, tuple(lengths), tokens_a_second)
    key += (m.distillation > 0,)
    if key not in follower.loss_slopes:
        follower.loss_slopes[key] = {
            name: (b.peak.get("joint", 0.0) - a.peak.get("joint", 0.0)) / CLIPS
            for name, a, b in zip(LOSS, _loss_of(middle), _loss_of(step(2 * CLIPS, lengths[1])), strict=True)
        }
    slopes = follower.loss_slopes[key]
    weights, shapes = _weights_and_shapes(follower, kind)
    return StepMemory(
        lengths=lengths,
        tokens_a_second=tokens_a_second,
        phases=[phase.name for phase in middle],
        peaks_L2PN=np.array([_peaks(phases) for phases in steps]),
        work_LW=np.array([[sum(phase.work[n] for phase in phases) for n in WORK] for phases in steps]),
        loss_block=[p.peak.get("joint", 0.0) - CLIPS * slopes[p.name] if p.name in slopes else 0.0 for p in middle],
        weights=weights,
        shapes=shapes,
        block_seconds=follower.block_cells * follower.layout.seconds_a_frame,
    )


def _loss_of(phases: list[Phase]) -> list[Phase]:
    return [phase for phase in phases if phase.name in LOSS]


def _peaks(phases: list[Phase]) -> list[list[list[float]]]:
    sides = [phase.peak for phase in phases], [phase.peak_without_gradients for phase in phases]
    return [[[parts.get(n, 0.0) for n in PARTS] for parts in side] for side in sides]


def followed_step(follower: Follower, kind: Kind, clips: int, seconds: float, tokens: int) -> list[Phase]:
    """Follow a step of the whole model, deep models with the layers of `_depth` alone."""
    phases = follower.follow(kind, _depth(follower, kind), clips, seconds, tokens)
    stand_ins, times = _stand_ins(follower, kind)
    if times == 1:
        return phases
    first, last = stand_ins[0], stand_ins[-1]
    held = {phase.name: phase.held for phase in phases}

    def made_between(earlier: str, later: str, *parts: str) -> Parts:
        """Bytes that the layers left out would add between two phases, as their stand-ins do."""
        if earlier not in held or later not in held:  # frozen layers have no backward pass
            return {}
        return {n: (times - 1) * (held[later].get(n, 0) - held[earlier].get(n, 0)) for n in parts}

    above = f"forward of layer {last + 1}"
    top, bottom = f"backward of layer {last}", f"backward of layer {first - 1}"
    by_graph = ("encoder", "weight_copies")
    # What the layers left out hold, from the phases on where that changes.
    gradients = made_between(top, bottom, "gradients")
    changes = {
        f"forward of layer {last}": made_between(
            f"forward of layer {first}", above if above in held else "loss forward", *by_graph
        ),
        "loss backward": made_between(bottom, top, *by_graph),
        bottom: gradients,
        "step": gradients,
    }
    depth, base = _depth(follower, kind), follower.base(kind, _depth(follower, kind))
    left_out = (times - 1) * len(stand_ins)
    weights = left_out * _layer_bytes(follower.model(kind, depth), first)
    of_base = 0.0 if base is None else left_out * _layer_bytes(base.model, first)
    added: Parts = {}
    whole = []
    for phase in phases:
        added = changes.get(phase.name, added)
        more = {**added, "parameters": weights, "base": of_base}
        found = re.fullmatch(r"(?:forward|backward) of layer (\d+)", phase.name)
        repeated = times if found and int(found[1]) in stand_ins else 1.0
        if phase.name == BASE_FORWARD:  # all its layers, which do nearly all of the work
            repeated = follower.layout.layers / depth
        whole.append(
            replace(
                phase,
                peak=_sum(phase.peak, more),
                peak_without_gradients=_sum(phase.peak_without_gradients, {**more, "gradients": 0.0}),
                work={n: repeated * amount for n, amount in phase.work.items()},
            )
        )
    return whole


def _layer_bytes(model: AsrModel, number: int) -> int:
    layer = model.encoder.layers[number]
    return sum(x.numel() * x.element_size() for x in (*layer.parameters(), *layer.buffers()))


def _sum(a: Parts, b: Parts) -> Parts:
    return {n: a.get(n, 0.0) + b.get(n, 0.0) for n in {*a, *b}}


def _period(kind: Kind) -> int:
    """Return how many layers make a pattern that repeats."""
    return kind.options.gradient_checkpointing_every if kind.options.gradient_checkpointing else 1


def _depth(follower: Follower, kind: Kind) -> int:
    """Return how many layers show what every layer does: two of each kind, and all that are trained where others are
    frozen.
    """
    m, layers = kind.options, follower.layout.layers
    depth = (m.unfreeze_encoder_layers if m.freeze_encoder else 0) + 2 * _period(kind)
    return layers if layers <= max(FOLLOWED_WHOLE, depth) else depth


def _stand_ins(follower: Follower, kind: Kind) -> tuple[range, float]:
    """Return the followed layers that stand for those left out too, and for how many layers each of them does."""
    period = _period(kind)
    left_out = follower.layout.layers - _depth(follower, kind)
    return range(period, 2 * period), 1 + left_out / period


def _weights_and_shapes(follower: Follower, kind: Kind) -> tuple[dict[str, float], list[ParameterShape]]:
    """Of the whole model."""
    stand_ins, repeats = _stand_ins(follower, kind)
    model = follower.model(kind, _depth(follower, kind))
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    weights: dict[str, float] = dict.fromkeys(("parameters", "trained", "trained_elements", "layer"), 0.0)
    shapes: dict[tuple[tuple[int, ...], str, bool], float] = collections.defaultdict(float)
    for name, p in model.named_parameters():
        found = re.match(r"encoder\.layers\.(\d+)\.", name)
        times = repeats if found and int(found[1]) in stand_ins else 1.0
        weights["parameters"] += times * p.nbytes
        if found and int(found[1]) == 0:
            weights["layer"] += p.nbytes
        if p.requires_grad:
            weights["trained"] += times * p.nbytes
            weights["trained_elements"] += times * p.numel()
            shapes[tuple(p.shape), str(p.dtype).removeprefix("torch."), id(p) in embeddings] += times
    weights["around_layers"] = weights["parameters"] - follower.layout.layers * weights["layer"]
    return weights, [(*key, round(times)) for key, times in shapes.items()]


def optimizer_bytes(memory: StepMemory, name: str, args: dict[str, Any]) -> StateBytes:
    """Return the bytes of the optimizer's states for all trained parameters."""
    on_device = on_host = 0
    for shape, dtype, embedding, times in memory.shapes:
        found = state_bytes(name, args, tuple(shape), getattr(torch, dtype), embedding)
        on_device, on_host = on_device + times * found.device, on_host + times * found.host
    return StateBytes(on_device, on_host)
