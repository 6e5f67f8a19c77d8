"""Write a model for onnx-asr or sherpa-onnx."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from finetune.models.loading import load_option
from finetune.models.look_ahead import one_context
from finetune.models.nemo import set_head
from finetune.tools.export.graphs import Graphs, write_graphs
from finetune.tools.export.online_graphs import write_online_graphs
from finetune.tools.export.refusals import check_expressible

if TYPE_CHECKING:
    from pathlib import Path


def graphs_of(
    model_name: str,
    folder: Path,
    to: str,
    head: str | None = None,
    tokenizer: str | None = None,
    look_ahead: str | None = None,
) -> Graphs:
    """Load a model and write its float32 graphs into `folder`; the model is dropped.

    Args:
        to: onnx or sherpa.
        head: "ctc" or "transducer", which a hybrid model has both of; None: the one it decodes with.
        look_ahead: in encoder frames, for sherpa-onnx's online recogniser; None: for whole recordings.

    Raises:
        UserError: it cannot be loaded, or the runtime cannot decode it as NeMo does (with every reason).
    """
    model = load_option(model_name, tokenizer)
    if head is not None:
        set_head(model, head, model_name)
    context = None if look_ahead is None else one_context(model, look_ahead)
    check_expressible(model, to, model_name, online=context is not None)
    graphs = write_graphs(model, folder, to) if context is None else write_online_graphs(model, folder, context)
    del model
    gc.collect()  # a trace leaves circles that hold all weights, and int8 needs the memory
    return graphs
