"""Start the sides of a comparison, each in a fresh process, one after the other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from finetune.data.worker_lifetime import ends_with_this_process
from finetune.errors import UserError
from finetune.logs import without_secrets
from finetune.paths import ROOT
from finetune.security.safe_text import one_line

LAST_LINES, LONGEST_LINE = 2, 300
"""Lines of a failed side's output that its message has, and their characters."""


@dataclass
class Request:
    """What a side has to do."""

    kind: Literal["nemo", "transformers", "exported"]
    model: str
    clips: str
    """Folder of `gate.clips`."""
    threads: int
    batch: int = 1
    """Clips decoded together."""
    head: str | None = None
    """transducer or ctc, of a hybrid NeMo model."""
    tokenizer: str | None = None
    """Tokenizer directory, for a NeMo model YAML."""
    look_ahead: str | None = None
    """Chunk by chunk with a tail of silence, as NeMo's cache-aware inference; None: whole recordings."""


class SideFailed(UserError):
    """A side's process ended without a result: its message says how."""

    def __init__(self, message: str):
        super().__init__(message, exit_code=1)


def run_side(request: Request) -> dict[str, Any]:
    """Run a side to its end; return its texts, seconds and bytes.

    Raises:
        SideFailed: it ended without a result.
    """
    return run_alone("finetune.tools.export.gate.one_side", asdict(request), request.threads)


def run_alone(module: str, request: dict[str, Any], threads: int) -> dict[str, Any]:
    """Run `python -m MODULE REQUEST.json` in a process that ends with this one; return what it wrote to `output`.

    Args:
        request: its JSON, without `output`.
        threads: that its libraries may use.

    Raises:
        SideFailed: it ended without a result.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": _path()}
    with tempfile.TemporaryDirectory(prefix="finetune-side-") as folder:
        file, output = Path(folder) / "request.json", Path(folder) / "result.json"
        file.write_text(json.dumps({**request, "output": str(output)}), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-m", module, str(file)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
            preexec_fn=ends_with_this_process(),
        )
        if done.returncode or not output.is_file():
            raise SideFailed(_why(done.returncode, done.stdout))
        return json.loads(output.read_text(encoding="utf-8"))


def _path() -> str:
    """This package first, wherever the command was started."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def _why(code: int, said: str) -> str:
    text = without_secrets(said)
    _, found, message = text.rpartition("error: ")
    lines = [
        one_line(line).strip()[:LONGEST_LINE] for line in (message if found else text).splitlines() if line.strip()
    ]
    if found:
        return lines[0] if lines else f"exit code {code}"
    ended = f"its process was killed by signal {-code}" if code < 0 else f"its process ended with exit code {code}"
    return f"{ended}: {' | '.join(lines[-LAST_LINES:])}" if lines else ended
