"""One training step, followed without allocating it: torch's fake tensors go through the real modules, the real loss and the real
backward pass, and an account sees each storage that the step would make.

What a fake step cannot know is taken at its worst: every lattice cell is computed (a trained model's alignments pass through few), every
token of a text is another one. The loss works block by block, and one block stands for all.
B batch, S samples, U target tokens, T encoder frames.
"""

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.nn import functional
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from finetune.losses import band, dropout, joint, lattice, tdt
from finetune.losses.joint import GPU_BLOCK_BYTES
from finetune.models.loss_module import TransducerLossModule
from finetune.models.nemo import cast_parameters, prepare_for_training
from finetune.strategies.encoder import apply_encoder_options
from finetune.tools.planning.accounting import TensorAccount
from finetune.tools.planning.layout import Layout, Skeleton

Parts = dict[str, float]
"""Bytes of parameters, weight_copies (of autocast), gradients, weight_gradients (on their way), encoder (activations), joint (and prediction
network and loss), temporary."""
# Functions that CUDA's autocast computes in float32 and the CPU's in 16 bits.
WIDE_UNDER_CUDA_AUTOCAST = (
    (functional, "layer_norm"),
    (functional, "softmax"),
    (functional, "log_softmax"),
    (torch, "softmax"),
    (torch, "log_softmax"),
    (torch.Tensor, "softmax"),
    (torch.Tensor, "log_softmax"),
)
WORK = ("flops_16", "flops_32", "bytes", "launches")
COSTS_NOTHING = {
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.empty_strided,
    torch.ops.aten.new_empty,
    torch.ops.aten.detach,
    torch.ops.aten._unsafe_view,
    torch.ops.prim.device,
}


@dataclass(frozen=True)
class Kind:
    """What decides on the tensors of a step, beside their sizes."""

    options: Any
    """The run's `model:` section."""
    precision: str
    """no, bf16 or fp16: autocast."""
    releases: bool
    """A gradient is let go as soon as it is complete."""
    cuda: bool
    """Follow what the kernels of a GPU keep; else those of a CPU."""


@dataclass
class Phase:
    """A stretch of the step: what was held when it began, and its peak."""

    name: str
    held: Parts
    """Bytes by part."""
    peak: Parts
    """Bytes by part when the sum was largest."""
    peak_without_gradients: Parts
    """The same when the sum without gradients was largest."""
    work: Parts
    """flops_16 and flops_32 of matrix products and convolutions, bytes that the other operations read and write, launches of kernels."""


class PhaseAccount(TensorAccount):
    """An account with a peak for each phase of the step.

    Args:
        weights: shapes of the parameters; what backward makes in these shapes is a gradient to be.
    """

    def __init__(self, weights: set[tuple[int, ...]]):
        super().__init__()
        self.weights = weights
        self.phases: list[Phase] = []

    def enter(self, name: str, new: str) -> None:
        """Begins a phase, whose new tensors are counted as `new`."""
        held = dict(self.parts)
        self.new = new
        without = {n: b for n, b in held.items() if n != "gradients"}
        self.phases.append(Phase(name, held, held, without, dict.fromkeys(WORK, 0.0)))

    def _look_for_a_peak(self) -> None:
        super()._look_for_a_peak()
        if not self.phases:
            return
        phase = self.phases[-1]
        if self.total > sum(phase.peak.values()):
            phase.peak = dict(self.parts)
        if self.total - self.parts["gradients"] > sum(phase.peak_without_gradients.values()):
            phase.peak_without_gradients = {n: b for n, b in self.parts.items() if n != "gradients"}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func._overloadpacket
        if packet is torch.ops.aten.mkldnn_rnn_layer:
            result = _with_workspace(func, args)
            self.add(result, self.new)
        else:
            result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.phases and packet not in COSTS_NOTHING and not func.is_view:
            made = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
            work = self.phases[-1].work
            work["launches"] += 1
            if packet in flop_registry and made:
                wide = "flops_32" if made[0].dtype == torch.float32 else "flops_16"
                work[wide] += flop_registry[packet](*args, **(kwargs or {}), out_val=result)
            else:
                read = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
                work["bytes"] += sum(x.numel() * x.element_size() for x in (*read, *made))
        return result

    def _part_of_result(self, func: Any, args: Any, tensor: torch.Tensor) -> str:
        """What grows with the model and not with the batch is told apart: autocast's copies of weights, gradients on their way."""
        if func is torch.ops.aten._to_copy.default:
            known = self._part_of.get(args[0].untyped_storage()._cdata)
            if known is not None and known[0] in ("parameters", "weight_gradients"):
                return "weight_copies" if known[0] == "parameters" else "weight_gradients"
        if self.new == "temporary" and tuple(tensor.shape) in self.weights:
            return "weight_gradients"
        return self.new


def _with_workspace(func: Any, args: Any) -> Any:
    """An LSTM layer on the CPU with the memory that oneDNN keeps for backward, which fake tensors leave out: the layer itself says how much."""
    *outputs, workspace = func(*args)
    with unset_fake_temporarily():
        real = [torch.zeros(x.shape, dtype=x.dtype) if isinstance(x, torch.Tensor) else x for x in args]
        bytes_kept = func(*real)[-1].untyped_storage().nbytes()
    return *outputs, workspace.new_empty(bytes_kept // workspace.element_size())


def _lstm_at_once(lstm: torch.nn.LSTM, x_UBH: torch.Tensor, state: Any = None) -> Any:
    """All steps of an LSTM in one: as many bytes as cuDNN keeps, and not an operation for each token."""
    for i in range(lstm.num_layers):
        w_ih, w_hh, b_ih, b_hh = lstm.all_weights[i]
        before_UBH = x_UBH.new_zeros(*x_UBH.shape[:2], lstm.hidden_size)
        gates = functional.linear(x_UBH, w_ih, b_ih) + functional.linear(before_UBH, w_hh, b_hh)
        enter, forget, cell, out = gates.chunk(4, -1)
        cell = torch.sigmoid(forget) * before_UBH + torch.sigmoid(enter) * torch.tanh(cell)
        x_UBH = torch.sigmoid(out) * torch.tanh(cell)
        if i + 1 < lstm.num_layers:
            x_UBH = functional.dropout(x_UBH, lstm.dropout, lstm.training)
    return x_UBH, (x_UBH[-1:], x_UBH[-1:])


@contextlib.contextmanager
def _on_cuda() -> Iterator[None]:
    """What a GPU's kernels keep where they differ from the CPU's: masks of dropout in a byte, what CUDA's autocast leaves in float32, and
    an LSTM in one piece. Functions are replaced: a mode of torch's would be off where checkpointed layers are computed again."""

    def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        return torch.native_dropout(input, p, training)[0] if training and p > 0 else input

    def widened(function: Any) -> Any:
        def wide(input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if not torch.is_autocast_enabled("cpu"):
                return function(input, *args, **kwargs)
            with torch.autocast("cpu", enabled=False):
                return function(
                    *(x.float() if isinstance(x, torch.Tensor) else x for x in (input, *args)),
                    **{n: x.float() if isinstance(x, torch.Tensor) else x for n, x in kwargs.items()},
                )

        return wide

    with contextlib.ExitStack() as stack:
        replaced = [(torch.nn.LSTM, "forward", _lstm_at_once), (functional, "dropout", dropout)]
        replaced += [(where, name, widened(getattr(where, name))) for where, name in WIDE_UNDER_CUDA_AUTOCAST]
        for where, name, by in replaced:
            stack.enter_context(mock.patch.object(where, name, by))
        yield


class Parameter(NamedTuple):
    """What an optimizer has to know of a parameter."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    trained: bool
    embedding: bool


class Follower:
    """Follows steps of one model.

    Args:
        layout: of the model.
    """

    def __init__(self, layout: Layout):
        self.layout = layout
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.skeleton = Skeleton(layout)
        self.models: dict[tuple[str, int], Skeleton] = {}
        self.loss_slopes: dict[Any, dict[str, float]] = {}
        self.block_cells = 1
        """Lattice cells of a full block of the loss, in the step followed last."""

    def model(self, kind: Kind, depth: int) -> Skeleton:
        """The model at a depth as the options change it, its parameters fake."""
        m = kind.options
        key = (str(m), depth)
        if key not in self.models:
            model = self.skeleton.deepen(depth)
            prepare_for_training(model, spec_augment=False, dropout=m.dropout, freeze_batchnorm=m.freeze_batchnorm)
            options = copy.deepcopy(m)
            options.compile = False
            apply_encoder_options(model, options)
            cast_parameters(model, getattr(torch, m.dtype))
            self.models[key] = self._without_values(model)
        return self.models[key]

    def layer_bytes(self, kind: Kind, depth: int, layer: int) -> int:
        """Bytes of one Conformer layer's parameters and buffers."""
        module = self.model(kind, depth).encoder.layers[layer]
        return sum(x.numel() * x.element_size() for x in (*module.parameters(), *module.buffers()))

    def parameters(self, kind: Kind, depth: int) -> list["Parameter"]:
        """The parameters of the model at a depth."""
        model = self.model(kind, depth)
        embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
        return [
            Parameter(name, tuple(p.shape), str(p.dtype).removeprefix("torch."), p.requires_grad, id(p) in embeddings)
            for name, p in model.named_parameters()
        ]

    def _without_values(self, model: Skeleton) -> Skeleton:
        """The model with fake parameters and buffers, in place."""
        for module in model.modules():
            for name, p in module._parameters.items():
                if p is not None:
                    fake = self.mode.from_tensor(p.detach())
                    module._parameters[name] = torch.nn.Parameter(fake, requires_grad=p.requires_grad)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = self.mode.from_tensor(buffer)
        return model

    def follow(self, kind: Kind, depth: int, clips: int, seconds: float, tokens: int) -> list[Phase]:
        """The phases of one step; the optimizer's states are not in them.

        Args:
            kind: what is trained how.
            depth: Conformer layers.
            clips: of the batch, all of one length.
            seconds: that length.
            tokens: of each text.
        """
        model = self.model(kind, depth)
        m = kind.options
        module = TransducerLossModule(
            model,
            sigma=m.sigma,
            omega=0.0,
            fastemit_lambda=m.fastemit_lambda,
            occupancy_threshold=m.occupancy_threshold,
            joint_memory_budget=m.joint_memory_budget or (GPU_BLOCK_BYTES // 2**20 if kind.cuda else None),
            length_bucket=m.compile_bucket if m.compile else 0.0,
        )
        module.train()
        account = PhaseAccount({tuple(p.shape) for p in module.parameters() if p.ndim > 1})
        trained = [p for p in module.parameters() if p.requires_grad]
        emulated = _on_cuda() if kind.cuda else contextlib.nullcontext()
        precision = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(kind.precision)
        hooks = [p.register_post_accumulate_grad_hook(self._gradient(account, kind)) for p in trained]
        hooks += self._marks(account, model)
        steps: list[int] = []
        try:
            with self.mode, _loss_at_its_worst(clips, tokens, kind.cuda, steps):
                batch = (
                    torch.empty(clips, int(seconds * self.layout.sample_rate), dtype=torch.int16),
                    torch.empty(clips, dtype=torch.int64),
                    torch.empty(clips, tokens, dtype=torch.int64),
                    torch.empty(clips, dtype=torch.int64),
                )
                account.add(model.buffers(), "parameters")
                account.add((p.detach() for p in model.parameters()), "parameters")
                account.enter("spectrogram", "encoder")
                with account, emulated:
                    with torch.autocast("cpu", precision, enabled=precision is not None):
                        losses_B = module(*batch)
                    account.enter("loss backward", "joint")
                    loss = losses_B.sum() / clips
                    del losses_B
                    loss.backward()
                    account.enter("step", "temporary")
        finally:
            for hook in hooks:
                hook.remove()
            for p in trained:
                p.grad = None
        self.block_cells = min(steps)
        return account.phases

    @staticmethod
    def _gradient(account: PhaseAccount, kind: Kind) -> Any:
        def complete(p: torch.Tensor) -> None:
            if kind.releases:
                p.grad = None
            elif p.grad is not None:
                account.add([p.grad], "gradients")

        return complete

    @staticmethod
    def _marks(account: PhaseAccount, model: Skeleton) -> list[Any]:
        """Hooks that tell the phases apart: where the forward of each layer begins, the end of the encoder's, and where each layer's
        backward begins."""

        def enter_at_gradient(tensor: torch.Tensor, name: str) -> None:
            if tensor.requires_grad:
                tensor.register_hook(lambda grad: account.enter(name, "temporary"))

        def after_encoder(module: Any, args: Any, output: Any) -> None:
            account.enter("loss forward", "joint")
            enter_at_gradient(output[0], "backward above the layers")

        def before_encoder(module: Any, args: Any) -> None:
            account.enter("subsampling forward", "encoder")

        hooks = [
            model.encoder.register_forward_pre_hook(before_encoder),
            model.encoder.register_forward_hook(after_encoder),
        ]
        for i, layer in enumerate(model.encoder.layers):

            def before_layer(module: Any, args: Any, kwargs: Any, i: int = i) -> None:
                account.enter(f"forward of layer {i}", "encoder")
                if i == 0:
                    enter_at_gradient(args[0] if args else kwargs["x"], "backward below the layers")

            def after_layer(module: Any, args: Any, output: Any, i: int = i) -> None:
                enter_at_gradient(output[0] if isinstance(output, tuple) else output, f"backward of layer {i}")

            hooks.append(layer.register_forward_pre_hook(before_layer, with_kwargs=True))
            hooks.append(layer.register_forward_hook(after_layer))
        return hooks


@contextlib.contextmanager
def _loss_at_its_worst(clips: int, tokens: int, cuda: bool, steps: list[int]) -> Iterator[None]:
    """The loss on fake tensors: what depends on values is replaced by the most that it could be. `steps` gets the cells of full blocks."""
    feasible_clips = tdt.feasible_clips

    def lengths(enc_BTH: Any, *_: Any) -> tuple[list[int], list[int]]:
        return [enc_BTH.shape[1]] * clips, [tokens] * clips

    def feasible(*arguments: Any) -> Any:
        with unset_fake_temporarily():
            return feasible_clips(torch.tensor([1] * clips), torch.tensor([0] * clips), ())

    def first_block(start: int, end: int, step: int) -> Iterator[tuple[int, int]]:
        steps.append(step)
        if end > start:
            yield start, min(start + step, end)

    def first_clip(plan: joint.Plan) -> list[tuple[int, int, int]]:
        return [(0, plan.frames[0], plan.tokens[0])]

    def all_cells(mask_N: torch.Tensor) -> torch.Tensor:
        return torch.empty(mask_N.shape[0], dtype=torch.int64)

    def all_distinct(targets_U: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty_like(targets_U), torch.empty_like(targets_U)

    def empty_mask(cell_N: torch.Tensor, H: int, *_: Any) -> torch.Tensor:
        return torch.empty(cell_N.shape[0], H, dtype=torch.bool)

    def hashed(cell_N: torch.Tensor, H: int, *_: Any) -> torch.Tensor:
        return dropout._torch_mask(cell_N, H, 1, 1)

    def solved(blank_N: Any, label_N: Any, duration_ND: Any, *_: Any, posteriors: bool = True, **__: Any) -> Any:
        N, D = duration_ND.shape
        inputs = blank_N.double(), label_N.double(), duration_ND.double()
        walked = torch.empty(2, N, dtype=torch.float64) if cuda else None
        losses_B = torch.empty(clips, dtype=torch.float64)
        if not posteriors:
            return lattice.LatticeResult(losses_B, None, None, None)
        label_N, blank_N = torch.empty(2, N, dtype=torch.float64)
        result = lattice.LatticeResult(losses_B, label_N, blank_N, torch.empty(N, D, dtype=torch.float64))
        del inputs, walked
        return result

    with (
        mock.patch.object(tdt, "check_values", lengths),
        mock.patch.object(tdt, "feasible_clips", feasible),
        mock.patch.object(tdt, "draw_seed", return_value=0),
        mock.patch.object(joint, "blocks", first_block),
        mock.patch.object(band, "clips_of", first_clip),
        mock.patch.object(joint, "cells_where", all_cells),
        mock.patch.object(joint, "dropout_mask", hashed if cuda else empty_mask),
        mock.patch.object(band, "distinct_tokens", all_distinct),
        mock.patch.object(lattice, "forward_backward", solved),
    ):
        yield
