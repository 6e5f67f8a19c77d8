#!/usr/bin/env python3
"""Count the kernels that a transducer loss launches on a GPU, its copies, and the host's waits; no GPU needed.

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
    aten.nonzero_static: 6,
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
        # Numbers are tensors without dimensions on the host, and travel with the launch.
        devices = {x.device.type for x in made} | {x.device.type for x in given if x.dim()}
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
        mock.patch.object(torch.cuda, "_exchange_device", return_value=0),
        mock.patch.object(torch.cuda, "_maybe_exchange_device", return_value=0),
    ):
        triton_works.cache_clear()
        try:
            with LaunchCounter():
                assert triton_works()  # its own launches go to the counter too
            counter.launches.clear()
            counter.operations.clear()
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


def learnt_shares() -> tuple[float, ...]:
    """Return the shares of the cells that the loss asks for on the sample base's joint inputs, in the order of asking:
    rounds of the band (the last one, with what backward keeps, is the certificate's)."""
    import tdt_loss

    inputs = tdt_loss.learnt_inputs({"B": 4, "T": 250, "U": 100, "V": 512, "H": 192})
    tensors = [inputs[name].requires_grad_() for name in ("enc", "pred", "weight", "bias")]
    cells = int((inputs["frames"] * (inputs["tokens"] + 1)).sum())
    found: list[float] = []

    def counts(*masks: torch.Tensor) -> list[int]:
        answer = REAL.counts(*masks)
        found.extend(n / cells for n in answer)
        return answer

    fused_tdt_loss(
        *tensors, inputs["targets"], inputs["frames"], inputs["tokens"], occupancy_threshold=1e-4,
        operations=replace(REAL, counts=counts),
    )  # fmt: skip
    return tuple(found)


def count_step(clips: int, seconds: float, tokens: int, shares: tuple[float, ...]) -> dict[str, int]:
    """Return launches by part of a training step of parakeet-tdt-0.6b-v3's layout: bf16 autocast, fused AdamW.

    The encoder is followed as `finetune.plan` does, one launch an operation, with an LSTM as one; dropout, SpecAugment
    and what NeMo's preprocessor does in its own kernels as torch has them.
    """
    from finetune.config.schema import ModelConfig
    from finetune.tools.planning.follow import Follower, Kind
    from finetune.tools.planning.layout import read_layout

    follower = Follower(read_layout("nvidia/parakeet-tdt-0.6b-v3"))
    kind = Kind(ModelConfig(name="nvidia/parakeet-tdt-0.6b-v3"), "bf16", releases=False, cuda=True)
    frames: list[int] = []

    def no_loss(enc_BTH: torch.Tensor, pred_BUH: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        frames.append(enc_BTH.shape[1])
        return enc_BTH.sum((1, 2)) + pred_BUH.sum((1, 2))

    layers = follower.layout.layers
    phases = follower.follow(kind, layers, clips, seconds, tokens, loss=no_loss)
    found: Counter[str] = Counter()
    for phase in phases:
        found[PHASES.get(phase.name, "encoder " + phase.name.split(" of layer")[0])] += int(phase.work["launches"])
    loss = count_loss(clips, frames[0], tokens, shares=shares)
    found["transducer loss"] = sum(loss.launches.values())
    sizes = [p.numel() for p in follower.model(kind, layers).parameters() if p.requires_grad]
    # Norm with its last reduction a launch, stack and norm of norms, scale; then AdamW and its counters.
    norm = _foreach_launches(sizes, 110)
    found["clipping"] = 2 * norm + 2 + norm
    found["AdamW, fused"] = _foreach_launches(sizes, 36) + _foreach_launches([1] * len(sizes), 110)
    return dict(found)


PHASES = {
    "spectrogram": "spectrogram",
    "loss forward": "prediction network and projections",
    "loss backward": "prediction network and projections",
    "step": "around",
}


def _foreach_launches(sizes: list[int], tensors: int) -> int:
    """Return the launches of torch's multi_tensor_apply: so many tensors, 320 blocks of 65,536 elements at most."""
    launches = held = blocks = 0
    for size in sizes:
        held += 1
        for _ in range(-(-size // 65_536)):
            blocks += 1
            if blocks == 320:
                launches, held, blocks = launches + 1, 1, 0
        if held == tensors:
            launches, held, blocks = launches + 1, 0, 0
    return launches + (blocks > 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the figures there")
    options = parser.parse_args()
    shares = learnt_shares()
    rows = []
    for name, sizes in CASES.items():
        for logits, of in (("flat", None), ("learnt", shares)):
            found = count_loss(**sizes, shares=of)
            rows.append(
                {
                    "case": f"{name} V8192 H640, {logits}",
                    "launches": sum(found.launches.values()),
                    **{part: found.launches[part] for part in (*dict.fromkeys(PARTS.values()), "around")},
                    "waits": sum(found.waits.values()),
                    "copies": found.copies,
                }
            )
    print("learnt shares of the cells:", ", ".join(f"{share:.4f}" for share in shares))
    print(" | ".join(rows[0]))
    for row in rows:
        print(" | ".join(map(str, row.values())))
    step = count_step(16, 20.0, 100, shares)
    print(f"a step of parakeet-tdt-0.6b-v3's layout, 16 clips of 20 s, 100 tokens, learnt: {sum(step.values())}")
    for part, launches in step.items():
        print(f"  {part}: {launches}")
    if options.json:
        options.json.write_text(json.dumps({"learnt_shares": shares, "loss": rows, "step": step}, indent=2) + "\n")


if __name__ == "__main__":
    main()
