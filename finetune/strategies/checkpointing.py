"""Activation checkpointing for NeMo's Conformer encoder, which has none of its own.

Each chosen layer keeps only its input; everything inside is computed again in the backward pass (arXiv 1604.06174).
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint


@contextlib.contextmanager
def _batchnorm_counts_once(layer: torch.nn.Module) -> Iterator[None]:
    """Recomputation normalises by the same batch statistics but must not add them to the running ones again."""
    norms = [m for m in layer.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm) and m.training]
    kept = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for norm, (momentum, batches) in zip(norms, kept, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, batches


def enable_gradient_checkpointing(model: Any, every: int = 1) -> int:
    """Makes each `every`-th Conformer layer of `model.encoder` recompute its activations, in place.

    Active only while gradients are recorded, so evaluation is untouched. Non-reentrant: works with DDP, frozen inputs and
    keyword arguments. Dropout repeats the same mask (the random state is kept).

    Returns:
        The number of layers that are checkpointed.
    """
    layers = list(model.encoder.layers)[::every]
    for layer in layers:
        layer.forward = _checkpointed(layer, layer.forward)
    return len(layers)


def _checkpointed(layer: torch.nn.Module, forward: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not (torch.is_grad_enabled() and layer.training):
            return forward(*args, **kwargs)
        return checkpoint(
            forward,
            *args,
            use_reentrant=False,
            context_fn=lambda: (contextlib.nullcontext(), _batchnorm_counts_once(layer)),
            **kwargs,
        )

    return run
