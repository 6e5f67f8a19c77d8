"""The loss's GPU kernels without a GPU: run by Triton's interpreter, and compiled for capability 8.0 and 9.0."""

import os
import subprocess
import sys

import pytest
from conftest import ROOT


@pytest.mark.slow
@pytest.mark.parametrize("what", ["run", "compile"])
def test_kernels(what):
    pytest.importorskip("triton", reason="the GPU's kernels are Triton's, which cannot be imported here")
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "losses" / "interpreted.py"), what],
        capture_output=True,
        text=True,
        timeout=1500,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "as it should be" in done.stdout
