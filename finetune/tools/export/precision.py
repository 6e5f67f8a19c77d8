"""Float32 ONNX graphs in fewer bits: float16, or int8 with activations quantised as they come (dynamic), or in ranges
that were measured before (static).

N rows, K inputs, M outputs of a product of matrices.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

WHOLE = 1_900_000_000  # bytes of a graph with its weights; protobuf ends at 2 GiB
QUANTIZED = ("MatMul", "Gemm", "Gather")
"""What int8 covers: products of matrices and the embedding of tokens. An LSTM in int8 as well changed twice as many
texts of the quickstart's model, and convolutions are a hundredth of the bytes."""


def convert(
    source: Path,
    path: Path,
    precision: str,
    keep_float: Collection[str],
    metadata: Mapping[str, str],
    ranges: Path | None = None,
) -> None:
    """Write a float32 graph in another precision.

    Args:
        source: file of the graph, its weights in it or beside it; it is left as it is.
        path: of the new file; weights of more than 1.9 GB go into `path`.data beside it.
        precision: fp32, fp16 or int8.
        keep_float: names of nodes that int8 leaves alone.
        metadata: of the new file.
        ranges: of `calibrate`, for static int8; None: dynamic.
    """
    import onnx

    with tempfile.TemporaryDirectory(prefix=".precision-", dir=path.parent) as folder:
        if precision == "int8":
            source = quantize(source, Path(folder) / path.name, keep_float, ranges)
        model = _in_float16(source) if precision == "fp16" else onnx.load(str(source))
    for key, value in metadata.items():
        entry = model.metadata_props.add()
        entry.key, entry.value = key, value
    save(model, path)


def save(model: Any, path: Path, whole: int = WHOLE) -> None:
    """Write a graph with its weights in it, or in `path`.data beside it where they are more than `whole` bytes.

    The graph in memory may lose its weights.
    """
    import onnx

    _remove(path)
    if sum(len(tensor.raw_data) for tensor in model.graph.initializer) <= whole:
        onnx.save(model, str(path))
    else:
        beside = path.with_name(f"{path.name}.data")
        onnx.save(model, str(path), save_as_external_data=True, location=beside.name, size_threshold=1024)
        beside.chmod(path.stat().st_mode)  # onnx lets nobody but its owner read it


def _remove(path: Path) -> None:
    """Remove a graph and the weights beside it: onnx appends to those that are there."""
    for file in (path, path.with_name(f"{path.name}.data")):
        file.unlink(missing_ok=True)


def size_of(source: Path) -> int:
    """Bytes of a graph and of all files with its weights beside it."""
    import onnx

    graph = onnx.load(str(source), load_external_data=False).graph
    beside = {entry.value for t in graph.initializer for entry in t.external_data if entry.key == "location"}
    return source.stat().st_size + sum((source.parent / name).stat().st_size for name in beside)


def quantize(source: Path, path: Path, keep_float: Collection[str] = frozenset(), ranges: Path | None = None) -> Path:
    """Write a graph with the weights of its products of matrices in 8 bits, a scale for each output, and return its
    path; the products' inputs are quantised as they come, or in ranges that were measured.

    Weights are unsigned: on processors without VNNI the signed product saturates.

    Args:
        keep_float: names of nodes that stay as they are, such as the first of `sensitivities`.
        ranges: of `calibrate` for the same graph; None: inputs are quantised as they come.
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic

    _remove(path)
    if ranges is not None:
        _quantize_static(source, path, keep_float, ranges, None)
        return path
    with _quiet(), _temporary_files_in(path.parent):
        quantize_dynamic(
            str(source),
            str(path),
            op_types_to_quantize=list(QUANTIZED),
            per_channel=True,
            weight_type=QuantType.QUInt8,
            nodes_to_exclude=sorted(keep_float),
            use_external_data_format=size_of(source) > WHOLE,
            extra_options={"MatMulConstBOnly": True},
        )
    return path


def calibrate(source: Path, ranges: Path, inputs: Iterable[Mapping[str, np.ndarray]]) -> None:
    """Measure the least and the largest value of what enters products of matrices, for `quantize`.

    Args:
        source: the float32 graph.
        ranges: new file for the ranges.
        inputs: of the whole graph, clip by clip or window by window.
    """
    with tempfile.TemporaryDirectory(prefix=".calibration-", dir=ranges.parent) as folder:
        _quantize_static(source, Path(folder) / source.name, (), ranges, iter(inputs))


def _quantize_static(
    source: Path,
    path: Path,
    keep_float: Collection[str],
    ranges: Path,
    inputs: Iterator[Mapping[str, np.ndarray]] | None,
) -> None:
    """Outputs of products stay in float, as in dynamic int8."""
    from onnxruntime.quantization import (
        CalibrationDataReader,
        CalibrationMethod,
        QuantFormat,
        QuantType,
        quantize_static,
    )

    class Reader(CalibrationDataReader):
        def get_next(self) -> Any:
            return None if inputs is None else next(inputs, None)

    with _quiet(), _temporary_files_in(path.parent):
        quantize_static(
            str(source),
            str(path),
            Reader(),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=["MatMul"],
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QUInt8,
            calibrate_method=CalibrationMethod.MinMax,
            calibration_cache_path=ranges,
            nodes_to_exclude=sorted(keep_float),
            use_external_data_format=size_of(source) > WHOLE,
            extra_options={"MatMulConstBOnly": True, "OpTypesToExcludeOutputQuantization": ["MatMul"]},
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """onnxruntime's quantisation advises preprocessing, which changes nothing here, through the root logger."""
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)
    try:
        yield
    finally:
        root.setLevel(level)


@contextlib.contextmanager
def _temporary_files_in(folder: Path) -> Iterator[None]:
    """onnxruntime writes a graph of gigabytes into the system's temporary directory, which may be a small one."""
    before = tempfile.tempdir
    tempfile.tempdir = os.fspath(folder)
    try:
        yield
    finally:
        tempfile.tempdir = before


def _in_float16(source: Path) -> Any:
    """Return a graph with weights and activations in float16, inputs and outputs in float32.

    What does not come from the signal (lengths, positions) stays in float32, which counts frames above 2048.
    """
    import onnx
    from onnx.external_data_helper import load_external_data_for_model
    from onnxruntime.transformers.float16 import DEFAULT_OP_BLOCK_LIST, convert_float_to_float16

    # Types are inferred before the weights are there: protobuf cannot pass on more than 2 GiB.
    model = onnx.shape_inference.infer_shapes(onnx.load(str(source), load_external_data=False))
    load_external_data_for_model(model, str(source.parent))
    names = {value.name for value in model.graph.input} - {"length", "target_length"}
    blocked = []
    for node in model.graph.node:
        if node.op_type == "Shape" or (node.op_type not in ("MatMul", "Gemm") and names.isdisjoint(node.input)):
            blocked.append(node.name)
        else:
            names.update(node.output)
    with _quiet():
        return convert_float_to_float16(
            model,
            keep_io_types=True,
            disable_shape_infer=True,
            op_block_list=DEFAULT_OP_BLOCK_LIST,
            node_block_list=blocked,
        )


def sensitivities(source: Path, inputs: Sequence[Mapping[str, np.ndarray]], rows: int = 512) -> dict[str, float]:
    """Measure what int8 does to each product of matrices with fixed weights, by real inputs.

    Args:
        source: the float32 graph.
        inputs: of the whole graph, clip by clip, such as {"audio_signal": (1, F, T), "length": (1,)}.
        rows: of a product's input, at most, that are looked at for each clip.

    Returns:
        The squared error of the product's output in parts of its square, by the node's name, the largest first.
    """
    import onnx
    import onnxruntime
    from onnx import numpy_helper

    model = onnx.load(str(source), load_external_data=False)
    fixed = {tensor.name: tensor for tensor in model.graph.initializer}
    products = {
        node.name: (node.input[0], node.input[1])
        for node in model.graph.node
        if node.op_type == "MatMul" and node.input[1] in fixed and node.input[0] not in fixed
    }
    graph_inputs = {value.name for value in model.graph.input}
    shown = sorted({x for x, _ in products.values()} - graph_inputs)
    model.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in shown)
    errors, squares = dict.fromkeys(products, 0.0), dict.fromkeys(products, 0.0)
    # Beside the source, for its weights may be files there.
    descriptor, name = tempfile.mkstemp(suffix=".onnx", prefix=".shown-", dir=source.parent)
    os.close(descriptor)
    try:
        onnx.save(model, name)
        session = onnxruntime.InferenceSession(name, providers=["CPUExecutionProvider"])
        for feed in inputs:
            values = dict(zip(shown, session.run(shown, dict(feed)), strict=True)) | dict(feed)
            for node, (x, weight) in products.items():
                x_NK = np.asarray(values[x], dtype=np.float32)
                x_NK = x_NK.reshape(-1, x_NK.shape[-1])
                weight_KM = numpy_helper.to_array(fixed[weight], base_dir=str(source.parent))
                quantised_NK = rounded(x_NK)[:: max(1, len(x_NK) // rows)]
                y_NM = x_NK[:: max(1, len(x_NK) // rows)] @ weight_KM
                errors[node] += float(((quantised_NK @ rounded(weight_KM, axis=0) - y_NM) ** 2).sum())
                squares[node] += float((y_NM**2).sum())
    finally:
        os.unlink(name)
    found = {node: errors[node] / squares[node] if squares[node] else 0.0 for node in products}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def rounded(x: np.ndarray, axis: int | None = None) -> np.ndarray:
    """Return values as unsigned 8 bits hold them: 256 steps from the least to the largest, zero among them; over all,
    or over an axis."""
    low, high = np.minimum(x.min(axis, keepdims=True), 0), np.maximum(x.max(axis, keepdims=True), 0)
    step = np.maximum((high - low) / 255, np.finfo(np.float32).tiny)
    zero = np.round(-low / step)
    return (np.clip(np.round(x / step) + zero, 0, 255) - zero) * step
