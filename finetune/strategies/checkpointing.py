"""Activation checkpointing for NeMo's Conformer encoder, which has none of its own.

Each chosen layer keeps only its input; everything inside is computed again in the backward pass (arXiv 1604.06174). So
does the convolutional subsampling below the layers, which alone stores as much as three or four layers. Prediction
network and joint projections are left alone: they store less than a hundredth of what the encoder does.
"""

import contextlib
import types
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch.utils.checkpoint import checkpoint

from finetune.models.protocols import AsrModel


@contextlib.contextmanager
def _batchnorm_counts_once(layer: torch.nn.Module) -> Iterator[None]:
    """Keep the recomputation from adding the same batch statistics to the running ones again."""
    norms = [m for m in layer.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm) and m.training]
    kept = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for norm, (momentum, batches) in zip(norms, kept, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, batches


def enable_gradient_checkpointing(model: AsrModel, every: int = 1) -> int:
    """Let the subsampling and each `every`-th Conformer layer of `model.encoder` recompute its activations, in place.

    Active only while gradients are recorded, so evaluation is untouched. Non-reentrant: works with DDP, frozen inputs
    and keyword arguments. Dropout repeats the same mask (the random states are kept).

    Returns:
        The number of layers that are checkpointed.
    """
    layers = list(model.encoder.layers)[::every]
    for module in (model.encoder.pre_encode, *layers):
        module.forward = _recomputed(cast(types.MethodType, module.forward))
    return len(layers)


def _recomputed(forward: types.MethodType) -> types.MethodType:
    """Return a bound method that checkpoints a bound method; a deep copy of the module rebinds it to the copy."""
    inner = forward.__func__

    def run(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not (torch.is_grad_enabled() and self.training):
            return inner(self, *args, **kwargs)

        def call(*inputs: Any) -> Any:
            return inner(self, *inputs[: len(args)], **dict(zip(kwargs, inputs[len(args) :], strict=True)))

        # All inputs by position: torch looks only there for the GPUs whose random state it keeps, and hands only those
        # to saved-tensor hooks (activation offload).
        return checkpoint(
            call,
            *args,
            *kwargs.values(),
            use_reentrant=False,
            context_fn=lambda: (contextlib.nullcontext(), _batchnorm_counts_once(self)),
        )

    return types.MethodType(run, forward.__self__)
