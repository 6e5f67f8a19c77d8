"""One training step, followed without allocating it.

Torch's fake tensors go through the real modules, the real loss and the real backward pass, and an account sees each
storage that the step would make. What a fake step cannot know is taken at its worst (worst_case.py).

B batch, S samples, U target tokens, T encoder frames.
"""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.nn import Module
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torch.utils.hooks import RemovableHandle

from finetune.config.schema import ModelConfig
from finetune.models.frozen_base import FrozenBase
from finetune.models.host_lstm import use_native_lstm
from finetune.models.look_ahead import training_contexts
from finetune.models.loss_module import LossModule
from finetune.models.nemo import cast_parameters, ctc_loss_weight, prepare_for_training
from finetune.strategies.attention import use_scaled_dot_product_attention
from finetune.strategies.encoder import apply_encoder_options
from finetune.tools.planning.accounting import TensorAccount
from finetune.tools.planning.cuda_kernels import CudaKernels, backward
from finetune.tools.planning.layout import Layout, Skeleton
from finetune.tools.planning.worst_case import worst_case

# weight_copies: of autocast; weight_gradients: not yet complete; encoder: its activations; joint: with prediction
# network and loss; base: weights of the frozen base.
PARTS: tuple[str, ...] = (
    *("parameters", "weight_copies", "gradients", "weight_gradients"),
    *("encoder", "joint", "temporary", "base"),
)
BASE_FORWARD = "base forward"
Parts = dict[str, float]
"""Bytes by part."""
WORK: tuple[str, ...] = ("flops_16", "flops_32", "bytes", "launches")
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

    options: ModelConfig
    precision: str
    """no, bf16 or fp16: autocast."""
    releases: bool
    """Gradients are freed as soon as they are complete."""
    cuda: bool
    """As on a GPU, else as on a CPU."""


@dataclass
class Phase:
    """A stretch of the step."""

    name: str
    held: Parts
    """When it began."""
    peak: Parts
    """When the sum was largest."""
    peak_without_gradients: Parts
    """When the sum without gradients was largest."""
    work: Parts
    """flops_16 and flops_32 of matrix products and convolutions, bytes that all other operations read and write,
    launches of kernels."""


class PhaseAccount(TensorAccount):
    """An account with a peak for each phase of the step.

    Args:
        weights: shapes of the parameters; what backward makes in such a shape becomes a gradient.
    """

    def __init__(self, weights: set[tuple[int, ...]]):
        super().__init__()
        self.weights = weights
        self.phases: list[Phase] = []

    def enter(self, name: str, new: str) -> None:
        """Begin a phase, whose new tensors are counted as `new`."""
        self.new = new
        held: Parts = dict(self.parts)
        self.phases.append(Phase(name, held, held, _without_gradients(held), dict.fromkeys(WORK, 0.0)))

    def _update_peak(self) -> None:
        super()._update_peak()
        if not self.phases:
            return
        phase = self.phases[-1]
        if self.total > sum(phase.peak.values()):
            phase.peak = dict(self.parts)
        if self.total - self.parts["gradients"] > sum(phase.peak_without_gradients.values()):
            phase.peak_without_gradients = _without_gradients(self.parts)

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        packet = func._overloadpacket
        if packet is torch.ops.aten._local_scalar_dense and args[0].dtype == torch.bool:
            return False  # where there is a GPU, NeMo's preprocessor asks whether a clip has one frame alone
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

    def _part_of_result(self, func: OpOverload, args: tuple[Any, ...], tensor: torch.Tensor) -> str:
        """Keep apart what grows with the model and not with the batch: autocast's copies of weights, gradients."""
        if func is torch.ops.aten._to_copy.default:
            known = self._part_of.get(args[0].untyped_storage()._cdata)
            if known is not None and known[0] in ("parameters", "weight_gradients", "base"):
                return "weight_copies" if known[0] == "parameters" else known[0]
        if self.new == "temporary" and tuple(tensor.shape) in self.weights:
            return "weight_gradients"
        return self.new


def _without_gradients(parts: Mapping[str, float]) -> Parts:
    return {n: size for n, size in parts.items() if n != "gradients"}


def _with_workspace(func: OpOverload, args: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    """Add oneDNN's workspace to an LSTM layer on the CPU: fake tensors leave it out, and a real layer tells."""
    *outputs, workspace = func(*args)
    with unset_fake_temporarily():
        real = [torch.zeros(x.shape, dtype=x.dtype) if isinstance(x, torch.Tensor) else x for x in args]
        kept = func(*real)[-1]
    size = 0 if kept is None else kept.untyped_storage().nbytes()  # none without a backward pass
    return *outputs, workspace.new_empty(size // workspace.element_size())


class Follower:
    """Follows steps of one model, with any options."""

    def __init__(self, layout: Layout):
        self.layout = layout
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.skeleton = Skeleton(layout)
        self.models: dict[tuple[str, int], Skeleton] = {}
        self.bases: dict[tuple[str, int], FrozenBase] = {}
        self.loss_slopes: dict[tuple[Any, ...], dict[str, float]] = {}
        """Of memory.py, by what they depend on."""
        self.block_cells = 1
        """Lattice cells of a full block of the loss, in the latest step; 0 where CTC is the whole loss."""

    def model(self, kind: Kind, depth: int) -> Skeleton:
        """Return the model with `depth` layers, changed as the options say, with fake parameters."""
        m = kind.options
        key = (str(m), depth)
        if key not in self.models:
            model = self.skeleton.deepen(depth)
            prepare_for_training(
                model,
                spec_augment=False,
                dropout=m.dropout,
                freeze_batchnorm=m.freeze_batchnorm,
                ctc_weight=m.ctc_loss_weight,
            )
            apply_encoder_options(model, m.model_copy(update={"compile": False}))
            cast_parameters(model, getattr(torch, m.dtype))
            self.models[key] = model._apply(self.mode.from_tensor)
        return self.models[key]

    def base(self, kind: Kind, depth: int) -> FrozenBase | None:
        """Return the frozen base with `depth` layers, where the options ask for one: as the model, with nothing on it
        that counts in training only."""
        m = kind.options
        if not m.distillation or ctc_loss_weight(self.model(kind, depth)) == 1:
            return None
        key = (f"{m.dtype} {m.scaled_dot_product_attention}", depth)
        if key not in self.bases:
            model = self.skeleton.deepen(depth)
            if m.scaled_dot_product_attention:
                use_scaled_dot_product_attention(model)
            use_native_lstm(model)
            cast_parameters(model, getattr(torch, m.dtype))
            model.eval().requires_grad_(False)
            self.bases[key] = FrozenBase(model._apply(self.mode.from_tensor), m.name)
        return self.bases[key]

    def follow(
        self,
        kind: Kind,
        depth: int,
        clips: int,
        seconds: float,
        tokens: int,
        loss: Callable[..., torch.Tensor] | None = None,
    ) -> list[Phase]:
        """Follow one step with `depth` layers, without optimizer states; all clips and texts have one length.

        Args:
            loss: stands in for the transducer's.
        """
        model, base, m = self.model(kind, depth), self.base(kind, depth), kind.options
        block_sizes: list[int] = []
        module = LossModule(
            model,
            sigma=m.sigma,
            omega=0.0,
            fastemit_lambda=m.fastemit_lambda,
            occupancy_threshold=m.occupancy_threshold,
            joint_memory_budget=m.joint_memory_budget,
            length_bucket=m.compile_bucket if m.compile else 0.0,
            frozen_base=base,
            distillation=m.distillation,
            operations=worst_case(clips, tokens, kind.cuda, block_sizes),
        )
        module.loss = loss or module.loss
        module.train()
        account = PhaseAccount({tuple(p.shape) for p in module.parameters() if p.ndim > 1})
        trained = [p for p in module.parameters() if p.requires_grad]
        kernels = CudaKernels() if kind.cuda else contextlib.nullcontext()
        precision = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(kind.precision)

        def gradient_complete(p: torch.Tensor) -> None:
            if kind.releases:
                p.grad = None
            elif p.grad is not None:
                account.add([p.grad], "gradients")

        hooks = [p.register_post_accumulate_grad_hook(gradient_complete) for p in trained]
        hooks += _mark_phases(account, model)
        if base is not None:
            hooks.append(
                base.model.encoder.register_forward_pre_hook(lambda *_: account.enter(BASE_FORWARD, "temporary"))
            )
        try:
            with self.mode:
                batch = (
                    torch.empty(clips, int(seconds * self.layout.sample_rate), dtype=torch.int16),
                    torch.empty(clips, dtype=torch.int64),
                    torch.empty(clips, tokens, dtype=torch.int64),
                    torch.empty(clips, dtype=torch.int64),
                )
                account.add(model.buffers(), "parameters")
                account.add((p.detach() for p in model.parameters()), "parameters")
                if base is not None:
                    account.add((x.detach() for x in (*base.model.parameters(), *base.model.buffers())), "base")
                account.enter("spectrogram", "encoder")
                with account, kernels:
                    with torch.autocast("cpu", precision, enabled=precision is not None):
                        # Of a unified model a chunked context, whose masks take more than seeing everything.
                        losses_B = module(*batch, context=training_contexts(model)[0][-1])
                    account.enter("loss backward", "joint")
                    mean = losses_B.sum() / clips
                    del losses_B
                    backward(mean)
                    account.enter("step", "temporary")
        finally:
            for hook in hooks:
                hook.remove()
            for p in trained:
                p.grad = None
        self.block_cells = min(block_sizes, default=0)
        return account.phases


def _mark_phases(account: PhaseAccount, model: Skeleton) -> list[RemovableHandle]:
    """Register hooks where phases begin: forward and backward of each layer, and the end of the encoder's forward."""

    def enter_at_gradient(tensor: torch.Tensor, name: str) -> None:
        if tensor.requires_grad:
            tensor.register_hook(lambda grad: account.enter(name, "temporary"))

    def before_encoder(module: Module, args: object) -> None:
        account.enter("subsampling forward", "encoder")

    def after_encoder(module: Module, args: object, output: tuple[torch.Tensor, ...]) -> None:
        account.enter("loss forward", "joint")
        enter_at_gradient(output[0], "backward above the layers")

    def before_layer(i: int, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        account.enter(f"forward of layer {i}", "encoder")
        if i == 0:
            enter_at_gradient(args[0] if args else kwargs["x"], "backward below the layers")

    def after_layer(i: int, module: Module, args: object, output: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
        enter_at_gradient(output[0] if isinstance(output, tuple) else output, f"backward of layer {i}")

    hooks = [
        model.encoder.register_forward_pre_hook(before_encoder),
        model.encoder.register_forward_hook(after_encoder),
    ]
    for i, layer in enumerate(model.encoder.layers):
        hooks.append(layer.register_forward_pre_hook(partial(before_layer, i), with_kwargs=True))
        hooks.append(layer.register_forward_hook(partial(after_layer, i)))
    return hooks
