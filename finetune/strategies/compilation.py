"""The Conformer layers under torch.compile."""

import types
from collections.abc import Callable
from typing import Any

import torch

from finetune.models.protocols import AsrModel, EncoderLayer

LENGTHS = 32


def compile_layers(model: AsrModel, backend: str = "inductor") -> int:
    """Compile the Conformer layers of `model.encoder` in place, with torch.compile's `backend`; return their number.

    All layers share one compiled function, whose graph takes their weights as inputs, and lengths and batch sizes are
    symbols in it: the first step captures one graph, and another is needed only for a batch of one utterance (torch
    specialises the size 1), for batches on either side of a size at which a convolution changes its kernel (16
    utterances on a CPU), and for the recomputation under gradient checkpointing. Only training is compiled. Names in
    the state dict stay as they are.

    On a CPU the symbols do not last: torch 2.11's inductor lays a tensor of the attention out anew and writes its
    strides into the backward kernels as numbers, so that each length is compiled again, for minutes.
    model.compile_bucket keeps the number of lengths small; after LENGTHS of them torch runs the layers uncompiled.
    Compile on GPUs.
    """
    torch._dynamo.config.optimize_ddp = False  # it would cut a layer's graph where DDP's buckets end
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, LENGTHS)
    layers = list(model.encoder.layers)
    for layer in layers:
        layer.forward = types.MethodType(_compiled_forward(type(layer), backend), layer)
    return len(layers)


_compiled: dict[tuple[type, str], Callable[..., Any]] = {}


def _compiled_forward(kind: type[EncoderLayer], backend: str) -> Callable[..., Any]:
    """Return the forward of a class of layers, compiled in training; one for all layers of the class."""
    if (kind, backend) not in _compiled:
        plain = kind.forward

        def traced(self: EncoderLayer, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.self_attention_model == "rel_pos":
                # Without this the shift of the relative scores looks like an arbitrary reshape, and each length gets a
                # graph.
                torch._check(kwargs["pos_emb"].size(1) == 2 * x.size(1) - 1)
            return plain(self, x, *args, **kwargs)

        fast = torch.compile(traced, dynamic=True, backend=backend)

        def run(self: EncoderLayer, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if not (self.training and torch.is_grad_enabled()):
                return plain(self, x, *args, **kwargs)
            # The first layer's input is a view where there is no dropout before it, and views get a graph of their
            # own.
            return fast(self, x.clone() if x._is_view() else x, *args, **kwargs)

        _compiled[kind, backend] = run
    return _compiled[kind, backend]
