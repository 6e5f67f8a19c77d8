"""Exports for tests: written, damaged on purpose, and asked as sherpa-onnx's server."""

import json
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from finetune.tools.export.beside import write_beside
from finetune.tools.export.gate.report import hashes_of
from finetune.tools.export.graphs import Graphs
from finetune.tools.export.layouts import write_layout
from finetune.tools.export.onnx import graphs_of


def write_export(
    model: Path, output: Path, to: str, *, head: str | None = None, look_ahead: str | None = None
) -> Graphs:
    """Write an export in fp32 to a new directory, without a gate; its graphs lie beside it."""
    graphs = output.with_name(f"{output.name}-graphs")
    for folder in (output, graphs):
        folder.mkdir()
    found = graphs_of(str(model), graphs, to, head, look_ahead=look_ahead)
    write_layout(found, output, to, "fp32")
    return found


def write_release(model: Path, output: Path, to: str, *, look_ahead: str | None = None) -> Graphs:
    """As `write_export`, with what is written beside a model, and a report with the files of it all."""
    graphs = write_export(model, output, to, look_ahead=look_ahead)
    write_beside(graphs, output, to, "fp32")
    report = {"passed": True, "reason": "texts equal", "files": hashes_of(output)}
    (output / "export.json").write_text(json.dumps(report))
    return graphs


def heard_by_the_server(directory: Path, wav: Path, folder: Path) -> str:
    """Start sherpa-onnx's server as the export's README.md says, and return what its client prints of a WAV file."""
    text = (directory / "README.md").read_text(encoding="utf-8")
    [command] = re.findall(r"^(sherpa-onnx-\w+-websocket-server .*?)^```", text, re.MULTILINE | re.DOTALL)
    [client] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    words = shlex.split(command.replace("6006", port).replace("\\\n", " "))
    words[0] = str(Path(sys.executable).parent / words[0])
    (folder / "client.py").write_text(client.replace("6006", port), encoding="utf-8")
    log = folder / "server.log"
    with log.open("wb") as output:
        words.append(f"--log-file={folder / 'log.txt'}")
        server = subprocess.Popen(words, cwd=directory, stdout=output, stderr=output)
    try:
        while not _listens(int(port)):
            assert server.poll() is None, log.read_text(errors="replace")
            time.sleep(0.05)
        done = subprocess.run([sys.executable, folder / "client.py", wav], capture_output=True, text=True, check=False)
    finally:
        server.terminate()
        server.wait()
    assert done.returncode == 0, done.stderr
    return done.stdout


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def damaged(export: Path, folder: Path, what: str) -> Path:
    """A copy of an export, damaged.

    Args:
        what: `scale` of a weight of the encoder, `joint`: of one of the joint, `tokens`: the table is shifted by one,
            `features`: the runtime computes others.
    """
    copy = folder / f"{export.name}-{what}"
    shutil.copytree(export, copy)
    if what in ("scale", "joint"):
        patterns = ("encoder*.onnx", "model.onnx") if what == "scale" else ("*join*.onnx",)
        _scale_weight(next(path for pattern in patterns for path in copy.glob(pattern)), 1.5)
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
