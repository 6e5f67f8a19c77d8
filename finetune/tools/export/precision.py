"""Float32 ONNX graphs in fewer bits: float16, or int8 with activations quantised as they come (dynamically)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

WHOLE = 1_900_000_000  # bytes; protobuf ends at 2 GiB


def convert(
    source: Path, path: Path, precision: str, keep_float: Collection[str], metadata: Mapping[str, str]
) -> None:
    """Write a float32 graph in another precision.

    Args:
        source: file of the graph, its weights in it or beside it; it is left as it is.
        path: of the new file; weights of more than 1.9 GB go into `path`.data beside it.
        precision: fp32, fp16 or int8.
        keep_float: names of nodes that int8 leaves alone.
        metadata: of the new file.
    """
    import onnx

    if precision == "int8":
        quantize(source, path, keep_float)
        model = onnx.load(str(path))
    else:
        model = onnx.load(str(source))
    for key, value in metadata.items():
        entry = model.metadata_props.add()
        entry.key, entry.value = key, value
    onnx.save(model, str(path))


def quantize(source: Path, path: Path, keep_float: Collection[str] = frozenset()) -> None:
    """Write a graph with its weights in 8 bits, a scale for each column, and activations quantised as they come."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(
        str(source),
        str(path),
        op_types_to_quantize=["MatMul", "Gemm"],
        per_channel=True,
        weight_type=QuantType.QInt8,
        nodes_to_exclude=sorted(keep_float),
        extra_options={"MatMulConstBOnly": True},
    )
