"""The loss where others hold the weights: DDP, FSDP2 and ZeRO-3 in two processes, activation checkpointing, compiled
encoders."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from torch import nn

from finetune.losses import fused_tdt_loss


@pytest.mark.slow
@pytest.mark.parametrize("how", ["fsdp2", "ddp", "zero3"])
def test_two_processes_equal_one(how):
    torchrun = Path(sys.executable).parent / "torchrun"
    done = subprocess.run(
        [torchrun, "--standalone", "--nproc_per_node", "2", ROOT / "tests/sharded.py", how],
        capture_output=True,
        text=True,
        timeout=1500,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.count(f"{how}: rank") == 2


@pytest.mark.parametrize("how", ["checkpointed", "compiled"])
def test_encoders_that_are_recomputed_or_compiled(how):
    torch.manual_seed(0)
    encoder, head = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 12)), nn.Linear(12, 16)
    audio_BTF, pred_BUH = torch.randn(2, 9, 8), torch.randn(2, 4, 12)
    targets, frames, tokens = torch.randint(0, 10, (2, 3)), torch.tensor([9, 7]), torch.tensor([3, 2])
    forwards = {
        "plain": encoder,
        "checkpointed": lambda x: torch.utils.checkpoint.checkpoint(encoder, x, use_reentrant=False),
        "compiled": torch.compile(encoder, backend="aot_eager"),
    }
    found = []
    for name in ("plain", how):
        loss = fused_tdt_loss(forwards[name](audio_BTF), pred_BUH, head.weight, head.bias, targets, frames, tokens)
        found.append([loss, *torch.autograd.grad(loss, [*encoder.parameters(), *head.parameters()])])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
