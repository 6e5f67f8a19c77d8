"""Memory and time of strategies on the layout of parakeet-tdt-0.6b-v3: random weights, noise for speech, 8,192 pieces.

    python scripts/bench/real_size.py                              # on a GPU: bf16, 16 clips of 20 s a step
    python scripts/bench/real_size.py --strategies all --no-plan --minutes 7     # another call goes on
    python scripts/bench/real_size.py --strategies adamw_8bit --clips 1 --seconds 5 --precision fp32   # on a CPU

Makes a tokenizer of random words and a data set of noise in --output-dir, and hands them to
scripts/bench/compare_strategies.py, whose figures it prints, with what finetune.plan predicts beside them. Nothing is
learnt; needed memory and time depend on lengths and sizes only. Dropout is the model's own.
"""

import argparse
import itertools
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

ROOT = Path(__file__).resolve().parents[2]
LAYOUT = ROOT / "finetune" / "configs" / "models" / "parakeet_tdt_0.6b_v3.yaml"
STRATEGIES = (
    "adamw,adamw_8bit,gradient_checkpointing,recommended,recommended_small,activation_offload+adamw_8bit,"
    "flash_adamw_gradient_release+gradient_checkpointing,cpu_offload_ao+gradient_checkpointing,zero2_offload"
)
TOKENS_A_SECOND = 5
RATE = 16_000


def make_tokenizer(folder: Path, vocabulary: int) -> list[str]:
    """Trains SentencePiece on random words; returns words that are one piece each."""
    import sentencepiece

    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    words = sorted({"".join(random.choice(letters, size=random.integers(2, 7))) for _ in range(2 * vocabulary)})
    text = folder / "words.txt"
    with text.open("w", encoding="utf-8") as file:
        for _ in range(20_000):
            file.write(" ".join(random.choice(words, size=10)) + "\n")
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(folder / "tokenizer"), vocab_size=vocabulary, model_type="bpe",
        character_coverage=1.0, bos_id=-1, eos_id=-1, minloglevel=2,
    )  # fmt: skip
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    (folder / "vocab.txt").write_text(
        "".join(f"{pieces.id_to_piece(i)}\n" for i in range(vocabulary)), encoding="utf-8"
    )
    return [word for word in words if len(pieces.encode(word)) == 1]


def make_data(folder: Path, words: list[str], lengths: Sequence[float], times: int = 1) -> Path:
    """Write clips of noise with random texts and a manifest, in which each clip is `times` over with other texts.

    Args:
        lengths: of the clips, seconds.
    """
    import soundfile

    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(1)
    for i, seconds in enumerate(lengths):
        soundfile.write(folder / f"{i}.flac", 0.1 * random.standard_normal(int(seconds * RATE)), RATE)
    rows = []
    for again, (i, seconds) in itertools.product(range(times), enumerate(lengths)):
        text = " ".join(random.choice(words, size=max(1, int(seconds * TOKENS_A_SECOND))))
        rows.append({"audio_filepath": f"{i}.flac", "duration": seconds, "text": text, "id": f"{i}-{again}"})
    manifest = folder / "manifest.jsonl"
    manifest.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return manifest


def add_predictions(rows: list[dict[str, Any]], run_file: Path, clips: int, seconds: float) -> None:
    """Puts what finetune.plan predicts beside what was measured, and prints the ratios.

    Args:
        rows: of scripts/bench/compare_strategies.py; those that ran get predicted_peak_bytes and
            predicted_over_measured.
        run_file: that they ran with.
        clips, seconds: of a step.
    """
    from finetune.tools.planning.gpus import GIB, card_here
    from finetune.tools.planning.prediction import Data, make_plan

    measured = [row for row in rows if "peak_bytes" in row]
    same = [f"training.per_device_train_batch_size={clips}", "training.gradient_accumulation_steps=1"]
    data = Data(seconds, seconds, None, TOKENS_A_SECOND)
    plan = make_plan(run_file, same, [row["strategies"] for row in measured], card_here(), 1, data).strategies
    for row, predicted in zip(measured, plan, strict=True):
        if predicted.peak_memory_gib is None:
            print(f"{row['name']}: not predicted: {predicted.reason}")
            continue
        row["predicted_peak_bytes"] = predicted.peak_memory_gib * GIB
        row["predicted_over_measured"] = row["predicted_peak_bytes"] / row["peak_bytes"]
        print(
            f"{row['name']}: predicted {row['predicted_peak_bytes'] / 1e9:.2f} GB, measured "
            f"{row['peak_bytes'] / 1e9:.2f} GB, "
            f"ratio {row['predicted_over_measured']:.3f}"
        )


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", default=STRATEGIES, help="with commas between; all: every one there is")
    parser.add_argument("--matrix", help="cross them with compile, attention, ... of compare_strategies.py")
    parser.add_argument("--clips", type=int, default=16, help="clips of a step")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of each")
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no strategy after so many")
    parser.add_argument("--no-plan", action="store_true", help="leave finetune.plan's predictions out")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--layout", type=Path, default=LAYOUT, help="NeMo model YAML")
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--yardstick", default="adamw", help="the row that the others are compared with")
    parser.add_argument(
        "--limit-gib", type=float, default=24.0, help="on a CPU: resident memory that no row may exceed"
    )
    parser.add_argument("--output-dir", type=Path, default=Path("runs/real_size"))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    words = make_tokenizer(arguments.output_dir / "tokenizer", arguments.vocabulary)
    manifest = arguments.output_dir / "data" / "manifest.jsonl"
    if not manifest.is_file():
        make_data(manifest.parent, words, [arguments.seconds] * 2 * arguments.clips)
    run = {
        "model": {"name": str(arguments.layout), "tokenizer": str(arguments.output_dir / "tokenizer")},
        "data": {"train": str(manifest), "max_duration": arguments.seconds + 1},
        "training": {
            "output_dir": "unused",
            "per_device_train_batch_size": arguments.clips,
            "learning_rate": 1e-5,
            "bf16": arguments.precision == "bf16",
            "dataloader_num_workers": 1,
        },
    }
    file = arguments.output_dir / "RUN.yaml"
    file.write_text(yaml.safe_dump(run), encoding="utf-8")
    command = [
        sys.executable, str(ROOT / "scripts" / "bench" / "compare_strategies.py"), "--config", str(file),
        *(["--strategies", arguments.strategies] if arguments.strategies != "all" else []),
        *(["--matrix", arguments.matrix] if arguments.matrix else []),
        "--own-dropout", "--minutes", str(arguments.minutes), "--steps", str(arguments.steps),
        "--output-dir", str(arguments.output_dir), "--yardstick", arguments.yardstick,
    ]  # fmt: skip
    results = arguments.json or arguments.output_dir / "results.json"
    results.unlink(missing_ok=True)
    code = subprocess.run([*command, "--json", str(results)], check=False).returncode
    if not results.is_file():
        return code or 1
    found = json.loads(results.read_text(encoding="utf-8"))
    if not arguments.no_plan:
        add_predictions(found["rows"], file, arguments.clips, arguments.seconds)
    results.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    over = [r["name"] for r in found["rows"] if r.get("peak_rss_gib", 0) > arguments.limit_gib]
    if over and found["machine"]["gpu"] is None:
        print(f"error: more than {arguments.limit_gib:g} GiB of resident memory: {', '.join(over)}", file=sys.stderr)
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main())
