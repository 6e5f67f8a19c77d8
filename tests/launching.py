"""Start commands in processes of their own, as users do, and read what a run leaves."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from conftest import ROOT, read_lines

BIN = Path(sys.executable).parent
TRAIN = str(ROOT / "finetune" / "train.py")


def start(
    command: list[str], expect: int = 0, cwd: Path | str = "/", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command from another directory, so that nothing depends on the current one."""
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=1700,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{BIN}:{os.environ['PATH']}", **environment},
    )
    assert done.returncode == expect, done.stdout[-2000:] + done.stderr[-6000:]
    return done


def summary(run: Path) -> dict[str, Any]:
    """Return a run's summary.json."""
    return json.loads((run / "summary.json").read_text(encoding="utf-8"))


def curve(run: Path) -> list[tuple[float, float]]:
    """Return loss and gradient norm of each logged step."""
    return [(row["loss"], row["grad_norm"]) for row in read_lines(run / "metrics.jsonl")]
