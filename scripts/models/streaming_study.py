"""Turn the small base model into a cache-aware streaming model, train it, and measure WER by look-ahead.

    python scripts/models/streaming_study.py --output-dir runs/streaming --steps 1500 --json FILE
    python scripts/models/streaming_study.py --head rnnt --output-dir runs/streaming_rnnt --steps 1500

Convolutions and subsampling become causal, attention goes by chunks with four look-aheads, and features are no longer
normalised over the recording, as in NVIDIA's streaming models. The base's weights are taken over, the subsampling's
last layer shifted by the bin that causal padding adds. With --head rnnt, as sherpa-onnx's online recogniser takes it,
the joint keeps the rows of the tokens alone. A run in the output directory goes on where it was stopped.
"""

import argparse
import json
import os
import subprocess
import sys
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "bench")]

from compare_vocabularies import processor_name

BASE = ROOT / "examples" / "base" / "fastconformer_tdt_3m.nemo"
DATA = ROOT / "examples" / "voice_prompts"
LOOK_AHEADS = [[56, 13], [56, 6], [56, 1], [56, 0]]


def to_cache_aware(path: Path, head: str = "tdt") -> None:
    """Write the base as a cache-aware model with a tdt or rnnt head, not trained yet."""
    from omegaconf import OmegaConf

    from finetune.models.loading import load_model
    from finetune.models.nemo import build
    from finetune.models.nemo_archive import NOT_BUILT, save_nemo

    base = load_model(str(BASE))
    config: Any = OmegaConf.to_container(base.cfg, resolve=True)
    for section in NOT_BUILT:
        config.pop(section, None)
    config["preprocessor"]["normalize"] = "NA"
    config["encoder"] |= {
        "causal_downsampling": True,
        "conv_context_size": "causal",
        "att_context_style": "chunked_limited",
        "att_context_size": LOOK_AHEADS,
    }
    config["tokenizer"] = {"dir": str(ROOT / "examples" / "base" / "tokenizer"), "type": "bpe"}
    if head == "rnnt":
        config["joint"]["num_extra_outputs"] = 0
        config["decoding"] = {"strategy": "greedy_batch", "model_type": "rnnt", "greedy": {"max_symbols": 10}}
        config["loss"] = {"loss_name": "default"}
        for key in ("tdt_durations", "num_tdt_durations"):
            config["model_defaults"].pop(key)
    model = build(config, "the cache-aware model")
    mean, deviation = feature_level()
    weights = base.state_dict()
    name = "encoder.pre_encode.out.weight"
    own = model.state_dict()[name].view(len(weights[name]), 64, -1).zero_()
    own[:, :, 1:] = weights[name].view(len(own), 64, -1)
    weights[name] = own.flatten(1)
    for name in [name for name in weights if name.startswith("joint.joint_net.")]:
        weights[name] = weights[name][: len(model.state_dict()[name])]
    # The normalisation goes into the first convolution, with one level for all bins.
    first = "encoder.pre_encode.conv.0"
    weights[f"{first}.bias"] -= mean / deviation * weights[f"{first}.weight"].sum(dim=(1, 2, 3))
    weights[f"{first}.weight"] /= deviation
    for buffer in ("preprocessor.featurizer.fb", "preprocessor.featurizer.window"):
        weights[buffer] = model.state_dict()[buffer]
    model.load_state_dict(weights)
    save_nemo(model, path)


def feature_level() -> tuple[float, float]:
    """Return mean and standard deviation of the base's features before they are normalised, over 200 clips."""
    from finetune.data.decode import as_float
    from finetune.evaluation.dataset import open_sources, stream_in_order
    from finetune.evaluation.recognise import evaluation_limits
    from finetune.models.loading import load_model

    preprocessor = load_model(str(BASE)).eval().preprocessor
    preprocessor.featurizer.normalize = None
    stream = stream_in_order(open_sources([str(DATA)], "train"), 16_000, evaluation_limits(1, 40.0), max_samples=200)
    clips = (batch for batch in stream.batches() if batch.ids)
    values = [preprocessor(input_signal=as_float(b.audio_BS), length=b.audio_lengths_B)[0] for b in clips]
    level = torch.cat([mel_1FT[:, :, :-1].flatten() for mel_1FT in values])
    return float(level.mean()), float(level.std())


def train(model: Path, output: Path, steps: int) -> None:
    """Train as the quickstart does; the validation is short, since a model that is new to its context says much."""
    run = yaml.safe_load((ROOT / "finetune" / "configs" / "quickstart.yaml").read_text(encoding="utf-8"))
    run["model"]["name"] = str(model.resolve())
    run["data"].update(train=str(DATA), validation=str(DATA), test=None, max_eval_samples=64)
    run["training"].update(output_dir=str(output), resume_from_checkpoint=True, max_steps=steps, save_steps=50)
    run["training"].update(eval_on_start=False, eval_steps=steps)
    file = output.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(run), encoding="utf-8")
    subprocess.run([sys.executable, str(ROOT / "finetune" / "train.py"), "--config", str(file)], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, default=Path("runs/streaming"))
    parser.add_argument("--head", choices=("tdt", "rnnt"), default="tdt")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--max-samples", type=int, default=-1, help="clips of the test set (default: all)")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    folder = arguments.output_dir.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    untrained = folder / "untrained.nemo"
    if not untrained.is_file():
        to_cache_aware(untrained, arguments.head)
    if not (folder / "run" / "summary.json").is_file():
        train(untrained, folder / "run", arguments.steps)
    options = ["--data", str(DATA), "--look-ahead", "all", "--max-samples", str(arguments.max_samples)]
    measured = folder / "evaluation.json"
    command = [sys.executable, "-m", "finetune.evaluate", "--model", str(folder / "run"), *options]
    subprocess.run([*command, "--json", str(measured)], check=True, cwd=ROOT)
    found = json.loads(measured.read_text(encoding="utf-8"))
    rows = [{"look_ahead": "offline", "att_context_size": found["att_context_size"], **rates(found)}]
    for one in found["streaming"]:
        latency = {key: one[key] for key in ("look_ahead_ms", "chunk_ms", "latency_ms", "chunk_compute_ms")}
        rows.append({"look_ahead": one["look_ahead"], "att_context_size": one["att_context_size"], **rates(one)})
        rows[-1] |= latency
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        summary = json.loads((folder / "run" / "summary.json").read_text(encoding="utf-8"))
        result = {
            "date": date.today().isoformat(),
            "processor": processor_name(),
            "cpus": os.cpu_count(),
            "versions": {name: metadata.version(name) for name in ("torch", "nemo_toolkit", "accelerate")},
            "command": f"python scripts/models/streaming_study.py --head {arguments.head} --steps {arguments.steps}",
            "steps": summary["steps"],
            "train_seconds": summary["train_seconds"],
            "rows": rows,
        }
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


def rates(result: dict[str, Any]) -> dict[str, Any]:
    """Return what the table shows of an evaluation."""
    return {key: result[key] for key in ("wer", "wer_interval", "cer", "words", "clips")}


if __name__ == "__main__":
    sys.exit(main())
