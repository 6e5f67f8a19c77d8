"""Memory and time of a training step with a CTC head beside the transducer, against the transducer alone.

    python scripts/bench/hybrid.py [--layout NEMO.yaml --tokenizer DIR] [--clips 4 --seconds 10] [--json FILE]

Two models of one layout with random weights, noise for speech and random tokens; one gets a CTC head. Steps (forward,
backward, AdamW) of both are taken in turns in one process. Prints the median time of each, the ratio with its range
over the turns, and the ratio of the peaks of the tensors that a step holds.
"""

import argparse
import json
import statistics
import time
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from compare_vocabularies import processor_name

from finetune.models.add_ctc import add_ctc_head
from finetune.models.loading import load_model
from finetune.models.loss_module import LossModule
from finetune.models.nemo import prepare_for_training
from finetune.tools.planning.accounting import StepAccount

ROOT = Path(__file__).resolve().parents[2]
SIDES = ("transducer", "hybrid")


class Side:
    """A model in training."""

    def __init__(self, arguments: argparse.Namespace, device: torch.device, with_ctc: bool) -> None:
        torch.manual_seed(0)
        model = load_model(str(arguments.layout), str(arguments.tokenizer))
        if with_ctc:
            add_ctc_head(model, str(arguments.layout))
        prepare_for_training(model, spec_augment=False, dropout=None, freeze_batchnorm=True)
        self.device = device
        self.module = LossModule(model.to(device), omega=0.0).train()
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-5, fused=True)

    def step(self, batch: tuple[torch.Tensor, ...]) -> None:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            losses_B = self.module(*batch)
        losses_B.mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return seconds of the steps and peak bytes by side."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sides = {name: Side(arguments, device, name == "hybrid") for name in SIDES}
    draw, B = torch.Generator().manual_seed(0), arguments.clips
    samples, tokens = int(arguments.seconds * 16_000), max(1, round(arguments.seconds * arguments.tokens_a_second))
    pieces = sides["hybrid"].module.nemo.tokenizer.vocab_size
    batch = (
        0.1 * torch.randn(B, samples, generator=draw),
        torch.full((B,), samples),
        torch.randint(1, pieces, (B, tokens), generator=draw),
        torch.full((B,), tokens),
    )
    batch = tuple(tensor.to(device) for tensor in batch)
    result: dict[str, Any] = {
        "device": str(device),
        "threads": torch.get_num_threads(),
        "seconds": {},
        "peak_bytes": {},
    }
    for name, side in sides.items():
        side.step(batch)  # makes the optimizer's states
        with StepAccount(side.module, side.optimizer, device.type) as account:
            side.step(batch)
        result["peak_bytes"][name], result["seconds"][name] = account.peak, []
    for turn in range(arguments.turns):
        for name in SIDES if turn % 2 else SIDES[::-1]:
            began = time.perf_counter()
            sides[name].step(batch)
            result["seconds"][name].append(time.perf_counter() - began)
    return result


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", type=Path, default=ROOT / "finetune/configs/models/fastconformer_tdt_3m.yaml")
    parser.add_argument("--tokenizer", type=Path, default=ROOT / "examples/base/tokenizer")
    parser.add_argument("--clips", type=int, default=4, help="of a step")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of each")
    parser.add_argument("--tokens-a-second", type=float, default=5.0)
    parser.add_argument("--turns", type=int, default=7, help="timed steps of each side")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    result = measure(arguments)
    alone, hybrid = (result["seconds"][name] for name in SIDES)
    ratios = [b / a for a, b in zip(alone, hybrid, strict=True)]
    times = [statistics.median(result["seconds"][name]) for name in SIDES]
    peaks = [result["peak_bytes"][name] for name in SIDES]
    print(f"{arguments.layout.name}, {arguments.clips} clips of {arguments.seconds:g} s on {result['device']}")
    print(f"time: {times[0]:.3f} s alone, {times[1]:.3f} s with CTC: x {statistics.median(ratios):.3f} (median)")
    print(f"      {min(ratios):.3f} to {max(ratios):.3f} over {len(ratios)} turns")
    print(f"peak: {peaks[0] / 1e6:.1f} MB alone, {peaks[1] / 1e6:.1f} MB with CTC: x {peaks[1] / peaks[0]:.3f}")
    if arguments.json:
        settings = {
            "date": date.today().isoformat(),
            "processor": processor_name(),
            "versions": {name: metadata.version(name) for name in ("torch", "nemo_toolkit")},
            "command": f"python scripts/bench/hybrid.py --clips {arguments.clips} --seconds {arguments.seconds:g}",
            "layout": arguments.layout.name,
        }
        arguments.json.write_text(json.dumps({**settings, **result, "ratios": ratios}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
