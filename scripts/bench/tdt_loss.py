#!/usr/bin/env python3
"""Time and memory of the fused TDT loss against transformers' and, on a GPU, NeMo's, in fresh processes and in turns.

    python scripts/bench/tdt_loss.py [--cases NAME ...] [--repeats 3] [--json FILE]

CPU cases need no GPU; the others say "not measured" without one. The floor and the fused loss need torch, Triton and
numba alone. A side that fails is recorded as failed, and FILE is written anew after each side. Times are the best of
the repeats, forward and backward. Memory is what a call adds at its peak to what was there before it (resident memory
on the CPU, the CUDA allocator's on a GPU). The floor is the four matrix products (forward, recomputation, gradients of
weight and activations) over all valid cells, at the rate of this machine, with the columns rounded up to a multiple of
8, as tensor cores want them. --rehearsal runs the GPU cases with small sizes on the CPU.

The gradient of cells that alignments hardly pass through is made of subnormal numbers, on which a CPU is slow:
transformers' loss is timed as it comes and "flushed", with torch.set_flush_denormal(True), which no side of ours has.

"distilled" is the fused loss with distillation from a teacher of the same size, whose inputs are the student's with a
tenth of noise; its ratios to the same call without are printed below the table.

"learnt" inputs come from examples/base/fastconformer_tdt_3m.nemo on sentences of examples/voice_prompts, joined to
clips of up to 10 s. Its joint is lifted to the width and vocabulary of the case: the further hidden units get random
inputs that no output listens to, and each of its 128 tokens gets V / 128 - 1 near copies (its row with a tenth of
noise) that together weigh a tenth of it.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

GPU = {"device": "cuda", "bf16": True, "dropout": 0.2}
TAUGHT = {"device": "cpu", "teacher": True}
CASES: dict[str, dict[str, Any]] = {
    "cpu_v8192": {"B": 4, "T": 125, "U": 40, "V": 8192, "H": 640, "learnt": False, "device": "cpu"},
    "cpu_v8192_learnt": {"B": 4, "T": 125, "U": 40, "V": 8192, "H": 640, "learnt": True, "device": "cpu"},
    "cpu_v1024": {"B": 4, "T": 125, "U": 40, "V": 1024, "H": 640, "learnt": False, "device": "cpu"},
    "cpu_distilled": {"B": 4, "T": 125, "U": 40, "V": 8192, "H": 640, "learnt": False, **TAUGHT},
    "cpu_distilled_learnt": {"B": 4, "T": 125, "U": 40, "V": 8192, "H": 640, "learnt": True, **TAUGHT},
    "cpu_step_v8192": {"step": True, "V": 8192, "device": "cpu"},
    "gpu_v8192": {"B": 16, "T": 250, "U": 100, "V": 8192, "H": 640, "learnt": False, **GPU},
    "gpu_v8192_learnt": {"B": 16, "T": 250, "U": 100, "V": 8192, "H": 640, "learnt": True, **GPU},
    # B is searched: the most clips of 20 s that 24 GB hold
    "gpu_24gb": {"T": 250, "U": 100, "V": 8192, "H": 640, "learnt": False, **GPU, "gigabytes": 24},
}
REHEARSED = {"B": 2, "T": 50, "U": 20, "V": 256, "H": 160, "device": "cpu"}
# Side -> occupancy threshold of the fused loss; None: another loss, or the floor.
FLUSHED = "transformers flushed"
DISTILLED: dict[str, float | None] = {"fused": 0.0, "distilled": 0.0, "fused 1e-4": 1e-4, "distilled 1e-4": 1e-4}
SIDES: dict[str, dict[str, float | None]] = {
    "cpu_v8192": {"transformers": None, FLUSHED: None, "fused": 0.0, "fused 1e-4": 1e-4, "floor": None},
    "cpu_v8192_learnt": {
        "transformers": None, FLUSHED: None, "fused": 0.0, "fused 1e-8": 1e-8, "fused 1e-4": 1e-4, "floor": None,
    },
    "cpu_v1024": {"transformers": None, FLUSHED: None, "fused": 0.0, "fused 1e-4": 1e-4, "floor": None},
    "cpu_distilled": DISTILLED,
    "cpu_distilled_learnt": DISTILLED,
    "cpu_step_v8192": {"transformers": None, FLUSHED: None, "fused": 0.0, "fused 1e-4": 1e-4},
    "gpu_v8192": {
        "floor": None, "fused": 0.0, "fused 1e-4": 1e-4, "transformers": None, "nemo plain": None,
        "nemo fused batch": None,
    },
    "gpu_v8192_learnt": {"floor": None, "fused": 0.0, "fused 1e-4": 1e-4},
    "gpu_24gb": {"fused": 0.0, "transformers": None, "nemo plain": None, "nemo fused batch": None},
}  # fmt: skip


def random_inputs(case: dict[str, Any]) -> dict[str, Any]:
    """Random joint inputs; lengths drawn from half to full, one clip full."""
    import torch

    g = torch.Generator().manual_seed(0)
    B, T, U, V, H = (case[k] for k in "BTUVH")
    frames, tokens = torch.randint(T // 2, T + 1, (B,), generator=g), torch.randint(U // 2, U + 1, (B,), generator=g)
    frames[0], tokens[0] = T, U
    scale = H**-0.5
    return {
        "enc": torch.randn(B, T, H, generator=g),
        "pred": torch.randn(B, U + 1, H, generator=g),
        "weight": scale * torch.randn(V + 6, H, generator=g),
        "bias": scale * torch.randn(V + 6, generator=g),
        "targets": torch.randint(0, V, (B, U), generator=g),
        "frames": frames,
        "tokens": tokens,
    }


def learnt_inputs(case: dict[str, Any]) -> dict[str, Any]:
    """Return joint inputs of the base model on real sentences, lifted to the case's width and vocabulary."""
    import io

    import pyarrow.parquet as pq
    import soundfile
    import torch

    from finetune.data.normalization import normalize_text
    from finetune.models.loading import load_model

    B, T, U, V, H = (case[k] for k in "BTUVH")
    model = load_model(str(ROOT / "examples" / "base" / "fastconformer_tdt_3m.nemo")).eval()
    rows = iter(
        row
        for path in sorted((ROOT / "examples" / "voice_prompts" / "data").glob("train-*.parquet"))
        for row in pq.read_table(path).to_pylist()
        if row["language"] == "en"
    )
    audio, targets = [], []
    for b in range(B):
        seconds, samples, tokens = 0.08 * T * (0.5 + 0.5 * b / max(B - 1, 1)), [], []
        for row in rows:
            heard, rate = soundfile.read(io.BytesIO(row["audio"]["bytes"]), dtype="float32")
            said = model.tokenizer.text_to_ids(normalize_text(row["text"], "basic"))
            length = sum(map(len, samples))
            if length + len(heard) <= seconds * rate and len(tokens) + len(said) <= U:
                samples.append(torch.from_numpy(heard))
                tokens += said
            elif length > 0.8 * seconds * rate or len(tokens) > 0.8 * U:
                break
        audio.append(torch.cat(samples))
        targets.append(torch.tensor(tokens))
    lengths, tokens = torch.tensor([len(a) for a in audio]), torch.tensor([len(t) for t in targets])
    targets = torch.nn.utils.rnn.pad_sequence(targets, batch_first=True)
    with torch.no_grad():
        padded = torch.nn.utils.rnn.pad_sequence(audio, batch_first=True)
        mel, mel_lengths = model.preprocessor(input_signal=padded, length=lengths)
        encoded, frames = model.encoder(audio_signal=mel, length=mel_lengths)
        decoded, *_ = model.decoder(targets=targets, target_length=tokens)
        enc = torch.from_numpy(model.joint.project_encoder(encoded.transpose(1, 2)).numpy())
        pred = torch.from_numpy(model.joint.project_prednet(decoded.transpose(1, 2)).numpy())
    head, g = model.joint.joint_net[-1].requires_grad_(False), torch.Generator().manual_seed(0)
    own, width, copies = model.tokenizer.vocab_size, enc.shape[2], V // model.tokenizer.vocab_size
    weight, bias = torch.zeros(V + 6, H), torch.zeros(V + 6)
    rows_of = torch.arange(V) // copies
    noise = 0.1 * head.weight[:own].std() * torch.randn(V, width, generator=g)
    weight[:V, :width] = head.weight.detach()[rows_of] + noise
    bias[:V] = head.bias.detach()[rows_of] + torch.log(torch.tensor(0.1 / (copies - 1)))
    bias[:V:copies] = head.bias.detach()[:own]
    weight[:V:copies, :width] = head.weight.detach()[:own]
    weight[V:, :width], bias[V:] = head.weight.detach()[own:], head.bias.detach()[own:]

    def widen(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, torch.randn(*x.shape[:2], H - width, generator=g)], 2)

    return {
        "enc": widen(enc), "pred": widen(pred), "weight": weight, "bias": bias,
        "targets": targets * copies, "frames": torch.from_numpy(frames.numpy()), "tokens": tokens,
    }  # fmt: skip


def loss_call(case: dict[str, Any], side: str, threshold: float | None) -> tuple[Callable[[], float], dict[str, Any]]:
    """A function that runs forward and backward once and returns the loss, and facts about its inputs."""
    import contextlib

    import torch

    given = learnt_inputs(case) if case["learnt"] else random_inputs(case)
    device = case["device"]
    given = {k: v.to(device) for k, v in given.items()}
    leaves = [given[k].requires_grad_() for k in ("enc", "pred", "weight", "bias")]
    frames, tokens, V = given["frames"], given["tokens"], case["V"]
    cells = int((frames * (tokens + 1)).sum())
    facts = {"cells": cells, "frames": frames.tolist(), "tokens": tokens.tolist()}
    half, dropout = case.get("bf16", False), case.get("dropout", 0.0)

    network = []
    if case.get("teacher"):  # made on both sides, so that both begin with the same memory
        g = torch.Generator().manual_seed(1)
        network = [x.detach() + 0.1 * x.detach().std() * torch.randn(x.shape, generator=g).to(device) for x in leaves]

    def precision() -> Any:
        return torch.autocast(device, torch.bfloat16) if half else contextlib.nullcontext()

    def finish(loss: torch.Tensor) -> float:
        loss.backward()
        for leaf in leaves:
            leaf.grad = None
        if device == "cuda":
            torch.cuda.synchronize()
        return loss.item()

    def fused() -> float:
        from finetune.losses import Teacher, fused_tdt_loss

        with precision():
            loss = fused_tdt_loss(
                *leaves, given["targets"], frames, tokens, occupancy_threshold=threshold, reduction="mean_batch",
                dropout=dropout, teacher=Teacher(*network) if side.startswith("distilled") else None,
            )  # fmt: skip
        return finish(loss)

    def joint() -> torch.Tensor:
        hidden = torch.relu(leaves[0][:, :, None] + leaves[1][:, None])
        hidden = torch.nn.functional.dropout(hidden, dropout)
        return torch.nn.functional.linear(hidden, leaves[2], leaves[3])

    def transformers() -> float:
        from transformers.loss.loss_tdt import tdt_loss

        with precision():
            logits = joint()
        loss = tdt_loss(
            logits[..., : V + 1], logits[..., V + 1 :], given["targets"], frames, tokens, V, [0, 1, 2, 3, 4],
            reduction="mean_batch"
        )  # fmt: skip
        return finish(loss)

    def nemo(clips_at_once: int) -> float:
        from nemo.collections.asr.losses.rnnt import RNNTLoss

        kernel = "tdt" if device == "cuda" else "tdt_pytorch"  # the former has none for a CPU
        loss_of = RNNTLoss(num_classes=V, reduction="sum", loss_name=kernel, loss_kwargs={"durations": list(range(5))})
        parts = []
        for b in range(0, len(frames), clips_at_once):
            part = slice(b, b + clips_at_once)
            T, U = int(frames[part].max()), int(tokens[part].max())
            with precision():
                hidden = torch.relu(leaves[0][part, :T, None] + leaves[1][part, None, : U + 1])
                hidden = torch.nn.functional.dropout(hidden, dropout)
                logits = torch.nn.functional.linear(hidden, leaves[2], leaves[3])
            parts.append(
                loss_of(
                    log_probs=logits, targets=given["targets"][part, :U], input_lengths=frames[part],
                    target_lengths=tokens[part]
                )
            )  # fmt: skip
        return finish(torch.stack(parts).sum() / len(frames))

    def make_floor() -> Callable[[], float]:
        dtype = torch.bfloat16 if half else torch.float32
        rows, step = torch.randn(cells, case["H"], device=device, dtype=dtype), 1024 if device == "cpu" else 16384
        weight = torch.randn(-(-len(leaves[2]) // 8) * 8, case["H"], device=device, dtype=dtype)
        grad = torch.zeros_like(weight)

        def floor() -> float:
            for start in range(0, cells, step):
                block = rows[start : start + step]
                out = block @ weight.t()
                out = torch.mm(block, weight.t(), out=out)
                torch.addmm(grad, out.t(), block, out=grad)
                out @ weight
            if device == "cuda":
                torch.cuda.synchronize()
            return 0.0

        return floor

    calls = {
        "transformers": transformers,
        FLUSHED: transformers,
        "nemo plain": lambda: nemo(len(frames)),
        "nemo fused batch": lambda: nemo(4),
    }
    return make_floor() if side == "floor" else calls.get(side, fused), facts


def step_call(case: dict[str, Any], side: str, threshold: float | None) -> tuple[Callable[[], float], dict[str, Any]]:
    """A whole training step of a small ParakeetForTDT: forward, backward, clipping, fused AdamW."""
    import torch
    from transformers import ParakeetEncoderConfig, ParakeetForTDT, ParakeetTDTConfig

    from finetune.losses import use_in_transformers

    torch.manual_seed(0)
    V = case["V"]
    encoder = ParakeetEncoderConfig(
        hidden_size=144, num_hidden_layers=4, num_attention_heads=4, intermediate_size=576, num_mel_bins=80,
        layerdrop=0.0,
        subsampling_conv_channels=64, scale_input=False,
    )  # fmt: skip
    config = ParakeetTDTConfig(
        encoder_config=encoder.to_dict(), vocab_size=V + 1, blank_token_id=V, pad_token_id=2, decoder_hidden_size=640,
        num_decoder_layers=1, durations=[0, 1, 2, 3, 4],
    )  # fmt: skip
    model = ParakeetForTDT(config).train()
    if threshold is not None:
        use_in_transformers(model, occupancy_threshold=threshold)
    g = torch.Generator().manual_seed(0)
    frames, tokens = torch.randint(400, 801, (16,), generator=g), torch.randint(15, 31, (16,), generator=g)
    labels = torch.randint(3, V, (16, 30), generator=g)
    labels[torch.arange(30) >= tokens[:, None]] = 2
    batch = {
        "input_features": torch.randn(16, 800, 80, generator=g),
        "attention_mask": torch.arange(800) < frames[:, None],
        "decoder_input_ids": torch.cat([torch.full((16, 1), V), labels], 1),
        "labels": labels,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> float:
        torch.manual_seed(1)  # the same dropout on every side
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step, {"clips": 16, "mel_frames": frames.tolist(), "tokens": tokens.tolist()}


def memory_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


def run_side(case: dict[str, Any], side: str, threshold: float | None, repeats: int) -> dict[str, Any]:
    """Times one side of one case."""
    import torch

    torch.set_flush_denormal(side == FLUSHED)
    if not case.get("step"):  # what is imported and compiled at the first call belongs to nobody's memory
        small = {**case, "B": 2, "T": 8, "U": 3, "V": 16, "H": 8, "learnt": False}
        loss_call(small, side, threshold)[0]()
    call, facts = (step_call if case.get("step") else loss_call)(case, side, threshold)
    if case.get("teacher"):  # what the inputs' making has freed would hide what a call takes
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    if case["device"] == "cpu":
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
    before, seconds = memory_bytes("VmRSS"), []
    for _ in range(repeats + 1):  # the first compiles, loads and touches pages
        if case["device"] == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        started = time.perf_counter()
        loss = call()
        seconds.append(time.perf_counter() - started)
    peak = torch.cuda.max_memory_allocated() if case["device"] == "cuda" else memory_bytes("VmHWM")
    return {
        "loss": loss,
        "seconds": min(seconds[1:]),
        "all_seconds": seconds,
        "memory_bytes": peak - before,
        "process_peak_bytes": memory_bytes("VmHWM"),
        **facts,
    }


def largest_batch(case: dict[str, Any], side: str, threshold: float | None) -> dict[str, Any]:
    """The most clips whose forward and backward fit into the case's memory, found by doubling and halving; on a CPU,
    which has no limit to set, as if 5 did not fit."""
    import torch

    on_gpu = case["device"] == "cuda"
    if on_gpu:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, case["gigabytes"] * 1e9 / total))

    def fits(clips: int) -> bool:
        torch.cuda.empty_cache()
        try:
            loss_call({**case, "B": clips}, side, threshold)[0]()
        except (torch.OutOfMemoryError, RuntimeError) as error:
            known = ("memory", "2^31", "int32", "alloc_failed", "allocation_failed")
            if not any(words in str(error).lower() for words in known):
                raise
            return False
        return on_gpu or clips < 5

    good, bad = 0, 1
    while bad <= 4096 and fits(bad):
        good, bad = bad, 2 * bad
    while bad - good > max(1, good // 16):
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return {"largest_batch": good, "gigabytes": case["gigabytes"]}


def measure(case: dict[str, Any], side: str, threshold: float | None, repeats: int) -> dict[str, Any]:
    """Measure one side of one case in this process."""
    if "gigabytes" in case:
        return largest_batch(case, side, threshold)
    return run_side(case, side, threshold, repeats)


def side_alone(name: str, side: str, repeats: int, small: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return what a side measured in a process of its own (a rehearsal has one for all), and why it failed or ''."""
    if small:
        try:
            return measure({**CASES[name], **small}, side, SIDES[name][side], repeats), ""
        except Exception as error:  # of whatever library the side belongs to
            return {"failed": f"{type(error).__name__}: {error}"}, str(error)
    command = [sys.executable, __file__, "--cases", name, "--side", side, "--repeats", str(repeats)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return {
            "failed": f"exit code {done.returncode}: {last}"
        }, f"ended with {done.returncode}\n{done.stderr[-3000:]}"
    return json.loads(done.stdout.splitlines()[-1]), ""


def version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def machine() -> dict[str, Any]:
    import torch

    cpu = next(
        (x.split(":")[1].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x), ""
    )
    return {
        "cpu": cpu,
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: version_of(name) for name in ("triton", "numba", "transformers", "nemo_toolkit")},
        "date": date.today().isoformat(),
        "command": "python scripts/bench/tdt_loss.py " + " ".join(sys.argv[1:]),
    }


def print_table(name: str, results: dict[str, dict[str, Any]]) -> None:
    measured = {side: r for side, r in results.items() if "failed" not in r}
    against, flushed = measured.get("transformers"), measured.get(FLUSHED)
    floor = measured.get("floor", {}).get("seconds")
    first = next(iter(measured.values()), {})
    print(f"\n{name}: {first.get('cells', '-')} cells; loss, time and memory of one forward and backward")
    print(
        f"{'side':20} {'loss':>10} {'s':>8} {'x faster':>9} {'x flushed':>9} {'x floor':>8} {'MB':>8} {'x less':>7} "
        f"{'process MB':>11}"
    )
    for side, r in results.items():
        if "failed" in r:
            print(f"{side:20} failed: {r['failed']}")
            continue
        faster = f"{against['seconds'] / r['seconds']:.2f}" if against else "-"
        faster_flushed = f"{flushed['seconds'] / r['seconds']:.2f}" if flushed else "-"
        less = f"{against['memory_bytes'] / max(r['memory_bytes'], 1):.1f}" if against else "-"
        over = f"{r['seconds'] / floor:.2f}" if floor else "-"
        print(
            f"{side:20} {r['loss']:10.4f} {r['seconds']:8.3f} {faster:>9} {faster_flushed:>9} {over:>8} "
            f"{r['memory_bytes'] / 1e6:8.1f} {less:>7} "
            f"{r['process_peak_bytes'] / 1e6:11.0f}"
        )
    for side, r in measured.items():
        plain_side = side.replace("distilled", "fused")
        plain = measured.get(plain_side) if plain_side != side else None
        if plain:
            ratios = [r[key] / max(plain[key], 1e-9) for key in ("seconds", "memory_bytes")]
            print(f"{side} against {plain_side}: time x {ratios[0]:.2f}, memory x {ratios[1]:.2f}")


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rehearsal", action="store_true", help="small sizes, on the CPU")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    small: dict[str, Any] = REHEARSED if arguments.rehearsal else {}
    if arguments.side:
        name, side = arguments.cases[0], arguments.side
        case, threshold = CASES[name], SIDES[name][side]
        print(json.dumps(measure(case, side, threshold, arguments.repeats)))
        return 0
    import torch

    found: dict[str, Any] = {"machine": machine(), "cases": {}}
    failed = []

    def write() -> None:
        if arguments.json:
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    for name in arguments.cases:
        case = {**CASES[name], **small}
        if case["device"] == "cuda" and not torch.cuda.is_available():
            found["cases"][name] = "not measured: no GPU"
            print(f"\n{name}: not measured, there is no GPU here")
            continue
        results = found["cases"][name] = {}
        for side in SIDES[name]:
            results[side], problem = side_alone(name, side, arguments.repeats, small)
            failed += [f"{name}, {side}: {problem}"] if problem else []
            write()
        if "gigabytes" in case:
            print(
                f"\n{name}: most clips of {0.08 * case['T']:g} s in {case['gigabytes']} GB, forward and backward of "
                "joint and loss"
            )
            for side, r in results.items():
                print(f"{side:18} {r.get('largest_batch', r.get('failed'))}")
        else:
            print_table(name, results)
    write()
    print("\n".join(failed), file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
