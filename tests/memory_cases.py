"""Tiny models, runs and saved storages for the tests of memory strategies."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from conftest import read_lines


def batch(sizes: tuple[int, ...] = (300, 180), seed: int = 0) -> dict[str, torch.Tensor]:
    """Mel frames of clips of these lengths, as the encoder takes them."""
    mel_BFT = torch.randn(len(sizes), 80, max(sizes), generator=torch.Generator().manual_seed(seed))
    return {"audio_signal": mel_BFT, "length": torch.tensor(sizes)}


def forward_and_backward(model: Any, context: Any = None, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    """Encoder output and gradients; the sum of cubes, since that of squares is constant behind a layer norm."""
    model.zero_grad()
    with context or contextlib.nullcontext():
        enc_BHT, _ = model.encoder(**(inputs or batch()))
    (enc_BHT**3).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"output": enc_BHT.detach(), **gradients}


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float = 1e-4) -> None:
    assert ours.keys() == theirs.keys()
    for name in theirs:
        scale = float(theirs[name].abs().max()) + 1e-6
        assert torch.isfinite(theirs[name]).all(), name
        torch.testing.assert_close(ours[name] / scale, theirs[name] / scale, rtol=0, atol=tolerance, msg=name)


def saved_storages(model: Any, run: Callable[[], Any]) -> dict[int, torch.Tensor]:
    """What autograd keeps of a forward besides parameters and buffers, one tensor a storage."""
    own = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor  # alive, so that no other gets the same address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run()
    return kept


def saved_bytes(model: Any, **inputs: torch.Tensor) -> int:
    kept = saved_storages(model, lambda: model.encoder(**(inputs or batch())))
    return sum(t.untyped_storage().nbytes() for t in kept.values())


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in read_lines(run / "metrics.jsonl")]
