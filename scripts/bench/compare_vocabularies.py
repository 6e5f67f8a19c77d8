"""Compare four vocabularies for French prompts with capitals and punctuation, which the base model cannot write.

    python scripts/bench/compare_vocabularies.py --output-dir runs/vocabulary --steps 150 --json FILE

`nemo` is what NeMo's own change_vocabulary leaves, prediction network and joint with random weights, but trained with
the TDT loss. Runs that are finished in the output directory are not made again.
"""

import argparse
import io
import json
import os
import platform
import subprocess
import sys
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import soundfile
import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]
BASE = ROOT / "examples" / "base" / "fastconformer_tdt_3m.nemo"
SPLITS = ("train", "validation", "test")
PIECES = 128


def processor_name() -> str:
    """As the kernel gives it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())


def write_manifests(folder: Path) -> dict[str, str]:
    """The French clips of the prompts as they are, a manifest a split."""
    manifests = {}
    (folder / "audio").mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        lines = []
        for shard in sorted((ROOT / "examples" / "voice_prompts" / "data").glob(f"{split}-*.parquet")):
            for row in pq.read_table(shard).to_pylist():
                if row["language"] != "fr":
                    continue
                file = folder / "audio" / f"{row['id'].replace('/', '-')}.flac"
                samples_S, rate = soundfile.read(io.BytesIO(row["audio"]["bytes"]))
                soundfile.write(file, samples_S, rate)
                entry = {"audio_filepath": str(file), "text": row["text"], "duration": row["duration"], "lang": "fr"}
                lines.append(json.dumps(entry, ensure_ascii=False) + "\n")
        path = folder / f"{split}.jsonl"
        path.write_text("".join(lines), encoding="utf-8")
        manifests[split] = str(path.resolve())
    return manifests


def as_nemo_does(folder: Path, tokenizer: Path) -> str:
    """Return the base model after NeMo's change_vocabulary; its configuration still names the TDT loss."""
    from finetune.models.loading import load_model
    from finetune.models.nemo_archive import save_nemo

    model = load_model(str(BASE))
    model.change_vocabulary(str(tokenizer), "bpe")
    save_nemo(model, folder / "nemo_base.nemo")
    return str(folder / "nemo_base.nemo")


def run_file(manifests: dict[str, str], model: dict[str, Any], output: Path, steps: int) -> dict[str, Any]:
    """The same run for each way."""
    return {
        "model": model,
        "data": {**manifests, "text_normalization": "none", "min_duration": 0.5, "max_duration": 8},
        "training": {
            "output_dir": str(output),
            "overwrite_output_dir": True,
            "max_steps": steps,
            "per_device_train_batch_size": 8,
            "learning_rate": 1e-3,
            "warmup_steps": steps // 10,
            "eval_steps": max(steps // 3, 1),
            "save_steps": 0,
            "dataloader_num_workers": 0,
            "num_threads": 1,
            "report_to": "none",
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, default=Path("runs/vocabulary"))
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    folder = arguments.output_dir
    manifests = write_manifests(folder)
    texts = manifests["train"]
    ways: dict[str, dict[str, Any]] = {
        "new_characters": {"extend_from": texts},
        "all": {"extend_from": texts, "pieces": "all", "size": PIECES},
        "replace": {"replace_with": texts},
    }
    rows = []
    for way in (*ways, "nemo"):
        output = folder / way
        if not (output / "summary.json").is_file():
            if way == "nemo":
                model: dict[str, Any] = {"name": as_nemo_does(folder, folder / "replace" / "tokenizer")}
            else:
                model = {"name": str(BASE), "tokenizer": ways[way]}
            config = folder / f"{way}.yaml"
            config.write_text(yaml.safe_dump(run_file(manifests, model, output, arguments.steps)), encoding="utf-8")
            subprocess.run([sys.executable, str(ROOT / "finetune" / "train.py"), "--config", str(config)], check=True)
        told = json.loads((output / "summary.json").read_text(encoding="utf-8"))
        report = json.loads((folder / ("replace" if way == "nemo" else way) / "tokenizer" / "report.json").read_text())
        rates = report["by_language"]["all"]
        rows.append(
            {
                "way": way,
                "pieces": report["pieces"],
                "tokens_per_second": rates["new"]["tokens_per_second"],
                "same_pieces": rates["same_segmentation"],
                "steps": told["steps"],
                "wer_before": told["wer_before"],
                "wer_after": told["wer_after"],
                "cer_after": told["cer_after"],
            }
        )
        print(json.dumps(rows[-1]))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        packages = ("torch", "nemo_toolkit", "sentencepiece", "accelerate")
        result = {
            "date": date.today().isoformat(),
            "processor": processor_name(),
            "cpus": os.cpu_count(),
            "versions": {name: metadata.version(name) for name in packages},
            "command": f"python scripts/bench/compare_vocabularies.py --steps {arguments.steps}",
            "rows": rows,
        }
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
