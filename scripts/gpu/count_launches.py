#!/usr/bin/env python3
"""Count the kernels that one transducer loss launches on a GPU, its copies, and how often the host waits; no GPU needed.

    python scripts/gpu/count_launches.py [--json FILE]

The loss runs as it would on CUDA, Triton's path included, on torch's fake tensors of device cuda: they have the real
shapes and no values, so that loops over blocks and clips run as often as they would. What depends on values is the
number of cells in each round of the band and in backward: flat takes all of them, learnt the shares that the sample
base has on real sentences (scripts/bench/tdt_loss.py), measured on the CPU at the start. A value that is read from the
device without the counter's knowing it is an error, so no wait goes uncounted.

Launches: each operation of torch that computes is one, views and allocations none; SEVERAL holds those that are more,
by torch's sources, and Triton's kernels are counted where they are launched. A matrix product counts once, though
cuBLAS may split it. Copies between host and device are counted apart; one that blocks, or reads memory that is not
page-locked, is a wait. Forward and backward call the autograd function itself: torch's engine cannot run on CUDA
devices that are not there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "bench")]

from finetune.losses import fused_tdt_loss
from finetune.losses.lattice import triton_works
from finetune.losses.operations import REAL

aten = torch.ops.aten
ALLOCATES = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.detach, aten._unsafe_view}
# Kernels of one operation, where it is not one.
SEVERAL = {
    aten.constant_pad_nd: 2,  # fill, copy
    aten.cumsum: 2,
    aten.masked_fill: 2,  # clone, fill
    aten.logsumexp: 9,
    aten.nonzero: 4,
    aten.nonzero_static: 5,
    aten.repeat_interleave: 3,
    aten.convolution_backward: 3,
    aten.native_layer_norm_backward: 2,
    aten.index_put_: 8,  # of accumulation, which sorts
}
# Operations whose results have sizes that depend on values: the host waits for these.
WAIT = {aten.nonzero, aten.masked_select, aten._unique2, aten.unique_dim, aten.equal, aten.is_nonzero}
# Functions of the loss, by file and name, and the part that they and what they call belong to.
PARTS = {
    ("band.py", "arc_scores"): "arc scores",
    ("band.py", "log_sum_exp"): "log-sum-exps",
    ("band.py", "_lattice"): "lattices",
    ("fused.py", "backward"): "backward",
}
CASES = {
    "B16 T250 U100": {"B": 16, "T": 250, "U": 100},
    "B16 T2000 U500": {"B": 16, "T": 2000, "U": 500},
}


class LaunchCounter(TorchDispatchMode):
    """Counts what is launched on CUDA while it is entered.

    Args:
        answers: values that the host reads, in turn.

    Attributes:
        launches: kernels by part.
        operations: kernels by operation, Triton's by their own names.
        waits: by operation.
        copies: between host and device.
    """

    def __init__(self, answers: Iterable[int] = ()):
        super().__init__()
        self.answers = iter(answers)
        self.launches: Counter[str] = Counter()
        self.operations: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.copies = 0

    def count(self, name: str, launches: int = 1) -> None:
        self.operations[name] += launches
        self.launches[_part()] += launches

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        packet, kwargs = func._overloadpacket, kwargs or {}
        if packet is aten._pin_memory:
            pinned = torch.empty_like(args[0])
            pinned.is_page_locked = True  # pyright: ignore[reportAttributeAccessIssue]
            return pinned
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if packet is aten._local_scalar_dense:
            if given[0].is_cuda:
                self.waits[str(packet)] += 1
            return next(self.answers)
        result = func(*args, **kwargs)
        made = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        devices = {x.device.type for x in (*given, *made) if x.dim() or x in made}
        if "cuda" not in devices or func.is_view or packet in ALLOCATES:
            return result
        if packet in (aten._to_copy, aten.copy_) and "cpu" in devices:
            self.copies += 1
            non_blocking = kwargs.get("non_blocking", False) or (packet is aten.copy_ and args[2:3] == (True,))
            source = given[-1]
            if not non_blocking or not (source.is_cuda or hasattr(source, "is_page_locked")):
                self.waits[f"{packet} {source.device.type} to {made[0].device.type}"] += 1
            return result
        boolean = packet in (aten.index, aten.index_put, aten.index_put_) and any(x.dtype == torch.bool for x in given)
        if packet in WAIT or boolean:
            self.waits[str(packet)] += 1
        if packet is aten.cat:
            self.count(str(packet), -(-len(args[0]) // 128))
        elif any(x.numel() for x in made):
            self.count(str(packet), SEVERAL.get(packet, 1))
        return result


def _part() -> str:
    frame = sys._getframe(2)
    while frame is not None:
        found = PARTS.get((Path(frame.f_code.co_filename).name, frame.f_code.co_name))
        if found:
            return found
        frame = frame.f_back
    return "around"


@contextlib.contextmanager
def pretended_cuda(counter: LaunchCounter) -> Iterator[None]:
    """Tensors made inside may lie on a CUDA device that is not there; Triton counts its launches and runs nothing."""

    def run(kernel: Any, *_: Any, **__: Any) -> None:
        counter.count(f"triton.{kernel.fn.__name__}")

    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        mock.patch.object(triton.runtime.JITFunction, "run", run),
        mock.patch.object(torch.cuda, "_exchange_device", lambda _: 0),
        mock.patch.object(torch.cuda, "_maybe_exchange_device", lambda _: 0),
    ):
        triton_works.cache_clear()
        assert triton_works()
        counter.launches.clear()
        counter.operations.clear()
        try:
            with counter:
                yield
        finally:
            triton_works.cache_clear()


def count_loss(
    B: int,
    T: int,
    U: int,
    V: int = 8192,
    H: int = 640,
    dropout: float = 0.2,
    shares: tuple[float, ...] | None = None,
) -> LaunchCounter:
    """Count one loss, forward and backward, under bf16 autocast with float32 weights.

    Args:
        B, T, U, V, H: clips, frames, tokens, vocabulary, the joint's width; all clips have full length.
        dropout: of the joint.
        shares: of the cells, in the rounds of the band and in backward (`learnt_shares`); None: a flat lattice.
    """
    cells = B * T * (U + 1)
    answers = [cells, cells] if shares is None else [int(cells * share) for share in shares]
    lengths = torch.full((B,), T), torch.full((B,), U)
    targets = torch.randint(V, (B, U), generator=torch.Generator().manual_seed(0))
    counter = LaunchCounter(answers)

    def check_values(*given: Any) -> Any:
        with _disable_current_modes():  # targets and lengths are real and lie on the host
            return REAL.check_values(*given)

    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    with warnings.catch_warnings(), pretended_cuda(counter):
        warnings.simplefilter("ignore")  # autocast's, that there is no GPU
        given = [
            torch.empty(shape, dtype=dtype, device="cuda", requires_grad=True)
            for shape, dtype in (
                ((B, T, H), torch.bfloat16), ((B, U + 1, H), torch.bfloat16), ((V + 6, H), torch.float32),
                ((V + 6,), torch.float32),
            )
        ]  # fmt: skip
        if targets_on == "cuda":
            raise NotImplementedError
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        try:
            losses_B = fused_tdt_loss(
                *given, targets, *lengths, dropout=dropout, reduction="none", sigma=0.02,
                occupancy_threshold=1e-4, operations=replace(REAL, draw_seed=lambda: 0, check_values=check_values),
            )  # fmt: skip
            assert losses_B.grad_fn is not None
            losses_B.grad_fn.apply(torch.empty(B, device="cuda"))  # pyright: ignore[reportAttributeAccessIssue]
        finally:
            torch.set_autocast_enabled("cuda", before[0])
            torch.set_autocast_dtype("cuda", before[1])
    return counter


if __name__ == "__main__":
    import time
    for name, sizes in CASES.items():
        for shares in (None, (0.05, 0, 0.04)):
            t=time.time()
            c = count_loss(**sizes, shares=shares)
            print(name, shares, sum(c.launches.values()), dict(c.launches), dict(c.waits), c.copies, time.time()-t)
            print(c.operations.most_common(40))
