"""Write a model for onnx-asr or sherpa-onnx."""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path

from finetune.models.loading import load_model
from finetune.models.look_ahead import one_context
from finetune.models.nemo import set_head
from finetune.tools.export.graphs import Graphs, write_graphs
from finetune.tools.export.layouts import whole_or_nothing, write_layout
from finetune.tools.export.online_graphs import write_online_graphs
from finetune.tools.export.refusals import check_expressible


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
    model = load_model(model_name, tokenizer)
    if head is not None:
        set_head(model, head, model_name)
    context = None if look_ahead is None else one_context(model, look_ahead)
    check_expressible(model, to, model_name, online=context is not None)
    graphs = write_graphs(model, folder, to) if context is None else write_online_graphs(model, folder, context)
    del model
    gc.collect()  # a trace leaves circles that hold all weights, and int8 needs the memory
    return graphs


def export_onnx(
    model_name: str,
    output: Path,
    *,
    to: str,
    precision: str = "fp32",
    head: str | None = None,
    tokenizer: str | None = None,
    look_ahead: str | None = None,
) -> str:
    """Write a model in the layout of a runtime, whole or not at all.

    Args:
        model_name: whatever `finetune.models.loading.load_model` takes.
        output: the directory; if it exists, it has to be empty.
        to: onnx (for onnx-asr) or sherpa (for sherpa-onnx).
        precision: fp32, fp16 or int8.
        head: of a hybrid model.
        tokenizer: directory with tokenizer.model, for a NeMo model YAML.
        look_ahead: as of `graphs_of`.

    Returns:
        What was written, in lines to print.

    Raises:
        UserError: the model cannot be expressed (with every reason), or `output` cannot be written.
    """
    with (
        whole_or_nothing(output) as aside,
        tempfile.TemporaryDirectory(prefix=f".{output.name}.graphs-", dir=aside.parent) as folder,
    ):
        graphs = graphs_of(model_name, Path(folder), to, head, tokenizer, look_ahead)
        write_layout(graphs, aside, to, precision)
    size = sum(file.stat().st_size for file in output.iterdir())
    return f"{output} ({graphs.kind}, {precision}, {size / 1e6:.1f} MB)"
