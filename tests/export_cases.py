"""Exports for tests: written once, and damaged on purpose."""

import json
import shutil
from pathlib import Path

import numpy as np


def damaged(export: Path, folder: Path, what: str) -> Path:
    """A copy of an export, damaged.

    Args:
        what: `scale` of a weight of the encoder, `joint`: of one of the joint, `tokens`: the table is shifted by one,
            `features`: the runtime computes others.
    """
    copy = folder / f"{export.name}-{what}"
    shutil.copytree(export, copy)
    if what in ("scale", "joint"):
        pattern = "encoder*.onnx" if what == "scale" else "*join*.onnx"
        _scale_weight(next(copy.glob(pattern)), 1.5)
    elif what == "tokens":
        table = next(path for path in (copy / "tokens.txt", copy / "vocab.txt") if path.is_file())
        *tokens, blank = [line.rpartition(" ")[0] for line in table.read_text(encoding="utf-8").splitlines()]
        shifted = [*tokens[1:], tokens[0], blank]
        table.write_text("".join(f"{token} {i}\n" for i, token in enumerate(shifted)), encoding="utf-8")
    elif (copy / "config.json").is_file():
        config = json.loads((copy / "config.json").read_text(encoding="utf-8"))
        (copy / "config.json").write_text(json.dumps({**config, "features_size": 128}), encoding="utf-8")
    else:
        _set_metadata(copy / "encoder.onnx", "normalize_type", "")
    return copy


def _scale_weight(path: Path, factor: float) -> None:
    import onnx
    from onnx import numpy_helper

    model = onnx.load(str(path))
    matrices = [tensor for tensor in model.graph.initializer if len(tensor.dims) == 2]
    chosen = max(matrices, key=lambda tensor: tensor.dims[0] * tensor.dims[1])
    values = numpy_helper.to_array(chosen) * np.float32(factor)
    chosen.CopyFrom(numpy_helper.from_array(values, chosen.name))
    onnx.save(model, str(path))


def _set_metadata(path: Path, key: str, value: str) -> None:
    import onnx

    model = onnx.load(str(path))
    for entry in model.metadata_props:
        if entry.key == key:
            entry.value = value
    onnx.save(model, str(path))
