"""Speed of evaluations in bfloat16 on the layout of parakeet-tdt-0.6b-v3, and whether a trained model's texts stay.

    python scripts/bench/evaluation.py [--json FILE]        on a GPU
    python scripts/bench/evaluation.py --rehearsal          small, on the CPU

Speed: random weights on clips of noise of 1 to 20 s, in the order of their length, through the evaluation of
`python -m finetune.evaluate`. Biases make the joint emit a token each fourth frame, 3.1 a second, about as many as
speech has: the prediction network steps as often as in a real decoding. RTFx is audio by time, once for decoding alone
and once with reading, behind one batch as a warm-up. Texts: examples/base/fastconformer_tdt_3m.nemo on the sample
data's test split, in bfloat16 against float32.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

from compare_strategies import machine
from real_size import LAYOUT, ROOT, make_data, make_tokenizer
from throughput import SMALL_LAYOUT

from finetune.evaluation.dataset import EvaluationSettings, count_errors, evaluate_model, open_sources
from finetune.logs import set_up_logging
from finetune.models.loading import load_model
from finetune.models.nemo import cast_parameters

if TYPE_CHECKING:
    from finetune.evaluation.scores import Utterance


def speed(arguments: argparse.Namespace, dtype: str, device: str) -> dict[str, Any]:
    """Decode the noise with one type of weights."""
    model = load_model(str(arguments.layout), str(arguments.folder / "tokenizer")).eval()
    head = model.joint.joint_net[-1]
    with torch.no_grad():  # token 0 wins against all others, and the longest duration
        head.bias[0] += 1e3
        head.bias[-1] += 1e3
    cast_parameters(model, getattr(torch, dtype))
    model.to(device)
    manifest = str(arguments.folder / "data" / "manifest.jsonl")
    settings = EvaluationSettings([manifest], batch_size=arguments.batch_size, workers=arguments.workers)
    sources = open_sources(settings.data, settings.split)
    settings.max_samples = arguments.batch_size
    count_errors(model, sources, settings)
    settings.max_samples = -1
    started = time.perf_counter()
    counted = count_errors(model, sources, settings)
    seconds = time.perf_counter() - started
    return {
        "clips": counted.total.clips,
        "audio_seconds": counted.audio_seconds,
        "rtfx": counted.audio_seconds / counted.decoding_seconds,
        "rtfx_whole": counted.audio_seconds / seconds,
    }


def texts(arguments: argparse.Namespace, device: str) -> dict[str, Any]:
    """Compare the texts of a trained model in both types."""
    found: dict[str, list[Utterance]] = {"float32": [], "bfloat16": []}
    rates = {}
    for dtype, kept in found.items():
        settings = EvaluationSettings(
            [str(ROOT / "examples" / "voice_prompts")], max_samples=arguments.texts, device=device, dtype=dtype,
            resamples=0,
        )  # fmt: skip
        model = str(ROOT / "examples" / "base" / "fastconformer_tdt_3m.nemo")
        rates[dtype] = evaluate_model(model, settings, keep=kept)["wer"]
    pairs = zip(found["float32"], found["bfloat16"], strict=True)
    differing = [(a.id, a.hypothesis, b.hypothesis) for a, b in pairs if a.hypothesis != b.hypothesis]
    return {"clips": len(found["float32"]), "wer": rates, "differing": len(differing), "examples": differing[:5]}


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", type=Path, default=LAYOUT, help="NeMo model YAML")
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--clips", type=int, default=1500)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--texts", type=int, default=-1, help="clips of the sample data; -1: all")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--rehearsal", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path("runs/evaluation"))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    set_up_logging()
    longest, device = 20.0, "cuda"
    if arguments.rehearsal:
        small = {"layout": SMALL_LAYOUT, "vocabulary": 200, "clips": 8, "batch_size": 4, "texts": 6, "workers": 0}
        vars(arguments).update(small)
        longest, device = 2.0, "cpu"
    words = make_tokenizer(arguments.folder / "tokenizer", arguments.vocabulary)
    lengths = np.sort(np.random.default_rng(0).uniform(1.0, longest, arguments.clips)).round(2)
    make_data(arguments.folder / "data", words, lengths.tolist())
    found: dict[str, Any] = {"machine": machine(), "command": "python " + " ".join(sys.argv)}

    def write() -> None:
        if arguments.json:
            arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    for dtype in ("bfloat16", "float32"):
        found[dtype] = speed(arguments, dtype, device)
        print(f"{dtype}: RTFx {found[dtype]['rtfx']:.0f} decoding, {found[dtype]['rtfx_whole']:.0f} with reading")
        write()
    found["texts"] = texts(arguments, device)
    print(f"texts that differ in bfloat16: {found['texts']['differing']} of {found['texts']['clips']}")
    write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
