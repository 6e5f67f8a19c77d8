"""Which layers of an encoder int8 hurts most, measured one by one, in a process of its own.

    python -m finetune.tools.export.gate.one_ranking REQUEST.json

F mel bins, T frames.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from finetune.errors import UserError
from finetune.evaluation.recognise import evaluation_mode
from finetune.logs import set_up_logging
from finetune.models.features import log_mel
from finetune.models.loading import load_option
from finetune.tools.export.gate.clips import load_clips
from finetune.tools.export.online import Cut, cut_of_metadata, encode_windows
from finetune.tools.export.precision import quantize

QUANTISED = ("MatMul", "Gemm")
LAYER = re.compile(r"(?:/\w+)*?/layers\.(\d+)/")


def nodes_of(path: Path) -> dict[str, list[str]]:
    """Return the nodes of a graph that int8 quantises, by layer; those outside of a layer by the first part of their
    name."""
    import onnx

    graph = onnx.load(str(path), load_external_data=False).graph
    constants = {tensor.name for tensor in graph.initializer}
    found: dict[str, list[str]] = {}
    for node in graph.node:
        if node.op_type in QUANTISED and node.input[1] in constants:
            layer = LAYER.match(node.name)
            name = f"layer {layer[1]}" if layer else node.name.strip("/").partition("/")[0]
            found.setdefault(name, []).append(node.name)
    return found


def features_of(request: dict[str, Any], cut: Cut | None) -> list[np.ndarray]:
    """Return NeMo's (F, T) features of the chosen clips."""
    clips, model = load_clips(Path(request["clips"])), load_option(request["model"], request["tokenizer"])
    found = []
    with evaluation_mode(model):
        for i in request["chosen"]:
            audio_S = torch.from_numpy(clips.audio(i) if cut is None else cut.with_tail(clips.audio(i)))
            mel_1FT, lengths_1 = log_mel(model.preprocessor, audio_S[None], torch.tensor([len(audio_S)]))
            found.append(mel_1FT[0, :, : int(lengths_1[0])].numpy())
    return found


def outputs_of(path: Path, mels: list[np.ndarray], threads: int, cut: Cut | None = None) -> list[np.ndarray]:
    """Run an encoder's graph on features, chunk by chunk where it is made so."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    if cut is not None:
        return [encode_windows(session, mel_FT, cut) for mel_FT in mels]
    names = [i.name for i in session.get_inputs()]
    inputs = [dict(zip(names, (m[None], np.array([m.shape[1]])), strict=True)) for m in mels]
    return [np.asarray(session.run(None, values)[0]) for values in inputs]


def rank(request: dict[str, Any]) -> list[dict[str, Any]]:
    """Return each layer with its nodes and the difference that it makes in 8 bits alone, the largest first."""
    source, threads = Path(request["graph"]), request["threads"]
    ranges = None if request.get("ranges") is None else Path(request["ranges"])
    groups = nodes_of(source)
    cut = None if request.get("online") is None else cut_of_metadata(request["online"])
    mels = features_of(request, cut)
    exact = outputs_of(source, mels, threads, cut)
    largest = max(float(np.abs(out).max()) for out in exact)
    every = {node for nodes in groups.values() for node in nodes}
    found = []
    with tempfile.TemporaryDirectory(prefix="finetune-ranking-", dir=request["work"]) as folder:
        for name, nodes in groups.items():
            path = Path(folder) / "one.onnx"
            quantize(source, path, every - set(nodes), ranges)
            rounded = outputs_of(path, mels, threads, cut)
            harm = max(float(np.abs(a - b).max()) for a, b in zip(exact, rounded, strict=True)) / largest
            found.append({"name": name, "nodes": nodes, "harm": harm})
    return sorted(found, key=lambda row: -row["harm"])


def main(argv: list[str]) -> int:
    """Rank what a request names; an error's message goes to standard error."""
    set_up_logging()
    request = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
    try:
        blocks = rank(request)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    Path(request["output"]).write_text(json.dumps({"blocks": blocks}), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
