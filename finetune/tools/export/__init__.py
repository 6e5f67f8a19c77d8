"""Write models in other formats."""

CLIPS = 16
"""Clips that an export is compared on."""
TOLERANCE = 1e-3
"""Largest difference of encoder and joint outputs, in parts of the largest value."""
DTYPES = ("float32", "bfloat16", "float16")
"""Types of written weights."""
RUNTIMES = {"onnx": "onnx-asr", "sherpa": "sherpa-onnx"}
"""The package that decodes each ONNX layout."""
PRECISIONS = ("fp32", "fp16", "int8")
"""Of the weights of an ONNX layout."""
