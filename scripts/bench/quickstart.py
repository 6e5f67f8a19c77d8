"""The quickstart's training on a CPU against transformers' Trainer with ParakeetForTDT: same clips, batches and steps.

    python scripts/bench/quickstart.py [--steps 150] [--turns 3] [--json FILE]

Both sides start from the small base model, which is exported to transformers' format first, and train with dropout
0.1, AdamW, the quickstart's learning rates and one worker process, in turns and in a process each:
  ours          finetune/train.py with finetune/configs/quickstart.yaml, without evaluations and checkpoints
  transformers  Trainer, with the batches of our first run, from FLAC files of 16 kHz
Subnormal numbers are flushed on both sides, since transformers' loss is several times as slow with them. Ours masks
mel bands and frames as well (SpecAugment), which transformers' model does not. Seconds are those between the end of a
warm-up and the end of the last step; loading is not among them. Prints the ratio of the medians and the range of the
ratios over the turns, and the same of the processor's time without the workers', which says more on a machine that
has other work.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from throughput import RATE, Meter, with_trainer

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from compare_strategies import machine

RUN = ROOT / "finetune" / "configs" / "quickstart.yaml"
BASE = ROOT / "examples" / "base" / "fastconformer_tdt_3m.nemo"
DATA = ROOT / "examples" / "voice_prompts"
SIDES = ("ours", "transformers")


def ours(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train with finetune/train.py in this process; the first time, leave what the batches were."""
    import soundfile

    from finetune import train
    from finetune.data.decode import as_float
    from finetune.training.callbacks import Callback, StepResult
    from finetune.training.trainer import Trainer

    meter, batches, clips = Meter(arguments.skipped), [], {}

    class Watch(Callback):
        def __init__(self, trainer: Trainer):
            trainer.saves_checkpoints = trainer.evaluator.keeps_models = False
            trainer.add_callback(self)

        def on_step_end(self, result: StepResult) -> None:
            (batch,) = result.batches.batches
            meter.step(batch.audio_lengths_B, batch.token_lengths_B, result.step == arguments.steps)
            batches.append([])
            lengths = zip(batch.audio_lengths_B.tolist(), batch.token_lengths_B.tolist(), strict=True)
            for b, (samples, tokens) in enumerate(lengths):
                clips[batch.ids[b]] = batch.audio_BS[b, :samples]
                ids = batch.tokens_BU[b, :tokens].tolist()
                file = f"{batch.ids[b]}.flac".replace("/", "_")
                batches[-1].append({"audio_filepath": file, "duration": samples / RATE, "ids": ids})

    settings = {
        "model.name": BASE, "data.train": DATA, "data.validation": "null", "data.test": "null",
        "training.output_dir": arguments.folder / "run", "training.overwrite_output_dir": True,
        "training.max_steps": arguments.steps, "training.eval_steps": 0, "training.eval_on_start": False,
        "training.save_steps": 0, "training.report_to": "none", "training.dataloader_num_workers": arguments.workers,
    }  # fmt: skip
    if train.main(["--config", str(RUN), *(f"{k}={v}" for k, v in settings.items())], observe=Watch):
        raise RuntimeError("the training failed")
    file = arguments.folder / "batches.json"
    if not file.is_file():
        (arguments.folder / "clips").mkdir(exist_ok=True)
        for name, audio_S in clips.items():
            path = arguments.folder / "clips" / f"{name}.flac".replace("/", "_")
            soundfile.write(path, as_float(audio_S).numpy(), RATE)
        file.write_text(json.dumps(batches), encoding="utf-8")
    return meter.result()


def transformers(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train with transformers' Trainer on the batches of our first run."""
    from transformers import ParakeetFeatureExtractor, ParakeetForTDT, ParakeetTDTConfig

    exported = arguments.folder / "exported"
    config = ParakeetTDTConfig.from_pretrained(exported)
    for name in ("dropout", "activation_dropout", "attention_dropout"):
        setattr(config.encoder_config, name, 0.1)
    model = ParakeetForTDT.from_pretrained(exported, config=config)
    features = ParakeetFeatureExtractor.from_pretrained(exported)
    batches = json.loads((arguments.folder / "batches.json").read_text(encoding="utf-8"))
    return with_trainer(
        model, features, batches, arguments.folder / "clips", arguments, "cpu",
        learning_rate=1e-3, lr_scheduler_type="cosine", warmup_steps=0.05, weight_decay=0.01, seed=1,
    )  # fmt: skip


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150, help="of each training, the warm-up beside them")
    parser.add_argument("--skipped", type=int, default=10, help="steps of the warm-up")
    parser.add_argument("--turns", type=int, default=3, help="trainings of each side")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path("runs/bench_quickstart"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    folder = arguments.folder
    if arguments.side:
        arguments.steps += arguments.skipped
        torch.set_flush_denormal(True)  # before there are further threads, which take it over
        measured = {"ours": ours, "transformers": transformers}[arguments.side](arguments)
        (folder / f"{arguments.side}.json").write_text(json.dumps(measured), encoding="utf-8")
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "batches.json").unlink(missing_ok=True)
    if not (folder / "exported").is_dir():
        export = ["--model", str(BASE), "--to", "hf", "--output", str(folder / "exported"), "--data", str(DATA)]
        subprocess.run([sys.executable, "-m", "finetune.export", *export], cwd=ROOT, check=True)
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for turn in range(arguments.turns):
        for side in SIDES if turn % 2 == 0 else SIDES[::-1]:
            subprocess.run([sys.executable, *sys.argv, "--side", side], check=True)
            runs[side].append(json.loads((folder / f"{side}.json").read_text(encoding="utf-8")))
            measured = runs[side][-1]
            print(f"{side}: {measured['seconds']:.1f} s for {arguments.steps} steps", flush=True)
    found: dict[str, Any] = {"machine": machine(), "command": "python " + " ".join(sys.argv), **runs, "ratios": {}}
    for what in ("seconds", "processor_seconds"):
        own, theirs = ([run[what] for run in runs[side]] for side in SIDES)
        ratio, ratios = (
            statistics.median(theirs) / statistics.median(own),
            [b / a for a, b in zip(own, theirs, strict=True)],
        )
        found["ratios"][what] = {"of_medians": ratio, "by_turn": ratios}
        print(f"{what}: transformers / ours {ratio:.2f} ({min(ratios):.2f} to {max(ratios):.2f} over the turns)")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
