"""What is written beside an exported model: a program that uses it, and how to."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import TYPE_CHECKING

from finetune.tools.export import RUNTIMES
from finetune.tools.export.layouts import MODEL_TYPES, PARTS, suffix_of
from finetune.tools.export.sherpa_features import RATE, SHIFT

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from finetune.tools.export.graphs import Graphs

EXAMPLE, README = "example.py", "README.md"
END_SECONDS = 0.1
"""Of silence that the server puts behind a recording, above a chunk."""


def write_beside(graphs: Graphs, directory: Path, to: str, precision: str) -> None:
    """Write example.py, which needs the runtime alone, and README.md, which says how to use the model."""
    (directory / EXAMPLE).write_text(example(graphs, to, precision), encoding="utf-8")
    (directory / README).write_text(readme(graphs, to, precision), encoding="utf-8")


def _template(name: str) -> str:
    return files("finetune.tools.export").joinpath("templates", name).read_text(encoding="utf-8")


def _files(graphs: Graphs, to: str, precision: str) -> dict[str, str]:
    return {part: f"{stem}{suffix_of(precision)}.onnx" for part, stem in PARTS[to].items() if part in graphs.files}


def example(graphs: Graphs, to: str, precision: str) -> str:
    """Return the program that prints a recording's text with the runtime."""
    if to == "onnx":
        values = {
            "model_type": MODEL_TYPES[graphs.kind],
            "quantization": json.dumps(precision) if precision != "fp32" else "None",
        }
    elif graphs.online is not None:
        return _filled("example_online.txt", _of_online(graphs, precision))
    else:
        named = _files(graphs, to, precision)
        values = {
            "recognizer": "from_nemo_ctc" if graphs.kind == "ctc" else "from_transducer",
            "files": "".join(f'    {part}=str(here / "{file}"),\n' for part, file in named.items()),
            "features": str(graphs.features),
        }
        if graphs.kind != "ctc":
            values["files"] += '    model_type="nemo_transducer",\n'
    return _filled(f"example_{to}.txt", values)


def _filled(template: str, values: Mapping[str, str]) -> str:
    text = _template(template)
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    return text


def _of_online(graphs: Graphs, precision: str) -> dict[str, str]:
    """What the programs for an online recogniser have in place of their marks."""
    assert graphs.online is not None
    named = _files(graphs, "sherpa", precision)
    return {
        "files": "".join(f'    {part}=str(here / "{file}"),\n' for part, file in named.items()),
        "features": str(graphs.features),
        "lead": str(graphs.online.lead),
        "window": str(graphs.online.window * SHIFT),
        "skipped": str(graphs.online.skipped * SHIFT),
    }


def server_command(graphs: Graphs, precision: str) -> str:
    """Return the line that starts sherpa-onnx's websocket server on the model, in the model's directory."""
    named = _files(graphs, "sherpa", precision)
    if graphs.online is not None:
        tail = graphs.online.window * SHIFT / RATE + END_SECONDS
        words = [*(f"--{part}={file}" for part, file in named.items()), "--tokens=tokens.txt"]
        words += [f"--feat-dim={graphs.features}", f"--end-tail-padding={tail:g}", "--port=6006"]
        return " \\\n    ".join(["sherpa-onnx-online-websocket-server", *words])
    words = [f"--{'nemo-ctc-model' if part == 'model' else part}={file}" for part, file in named.items()]
    kind = "nemo_ctc" if graphs.kind == "ctc" else "nemo_transducer"
    rest = ["--tokens=tokens.txt", f"--model-type={kind}", f"--feat-dim={graphs.features}", "--port=6006"]
    return " \\\n    ".join(["sherpa-onnx-offline-websocket-server", *words, *rest])


def readme(graphs: Graphs, to: str, precision: str) -> str:
    """Return README.md."""
    heads = {"tdt": "TDT", "rnnt": "RNN-T", "ctc": "CTC"}
    lines = [
        f"# A speech recogniser for {RUNTIMES[to]}",
        "",
        f"A FastConformer with a {heads[graphs.kind]} head, {precision}.",
        "",
        "```bash",
        "pip install " + ('"onnx-asr[cpu]"' if to == "onnx" else "sherpa-onnx numpy"),
        f"python {EXAMPLE} FILE.wav",
        "```",
    ]
    if graphs.online is not None:
        skipped = graphs.online.skipped * SHIFT * 1000 // RATE
        milliseconds = graphs.online.window * SHIFT * 1000 // RATE
        lines[2] += (
            f" It streams with a look-ahead of {graphs.online.look_ahead} frames: a chunk is {milliseconds} ms."
        )
        lines += [
            "",
            f"Send {graphs.online.lead} samples of silence before the first sound, as the programs do: the model "
            f"leaves the first {skipped} ms out. The last chunk has to be full, so "
            "silence follows the last sound as well.",
        ]
    if to == "sherpa":
        lines += [
            "",
            "## As a server",
            "",
            "sherpa-onnx's websocket server, started in this directory:",
            "",
            "```bash",
            "pip install sherpa-onnx-bin",
            server_command(graphs, precision),
            "```",
            "",
            "A client (`pip install websockets`), which prints the JSON with the text:",
            "",
            "```python",
            _template("client_sherpa.txt").strip()
            if graphs.online is None
            else _filled("client_online.txt", _of_online(graphs, precision)).strip(),
            "```",
        ]
    return "\n".join([*lines, ""])
