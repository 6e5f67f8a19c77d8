"""What checkpoints cost: the same training without any, with them written at once, and in a thread beside the steps.

    python scripts/bench/saving.py --config finetune/configs/quickstart.yaml --steps 60 --every 10
    python scripts/bench/saving.py --config RUN.yaml --steps 12 --every 4 training.optimizer=adamw_8bit

All three train in this process, one after the other and `--rounds` times over, from the same run file. Printed for
each way: seconds of the training, seconds that it stood still for its checkpoints, and their share at the default
interval of training.save_steps.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from compare_strategies import machine

from finetune.config.load import load_config
from finetune.config.schema import TrainingConfig
from finetune.logs import set_up_logging
from finetune.strategies.strategy import resolve_strategy
from finetune.train import train
from finetune.training.callbacks import Callback
from finetune.training.trainer import Trainer

WAYS = {
    "none": ["training.save_steps=0"],
    "at once": ["training.async_save=false"],
    "in a thread": ["training.async_save=true"],
}


def measure(arguments: argparse.Namespace, way: str) -> dict[str, float]:
    """Train once; return seconds of the training, seconds that it stood still, and bytes of a checkpoint."""
    folder = arguments.output_dir / way.replace(" ", "_")
    settings = [
        *arguments.settings,
        f"training.max_steps={arguments.steps}",
        f"training.save_steps={arguments.every}",
        "training.eval_steps=0",
        "training.eval_on_start=false",
        "data.validation=null",
        "data.test=null",
        f"training.output_dir={folder}",
        "training.overwrite_output_dir=true",
        "training.report_to=none",
        *WAYS[way],
    ]
    strategy = resolve_strategy(arguments.strategy, None)
    config, _ = load_config(arguments.config, strategy.names, settings)
    found: dict[str, float] = {}

    class Timer(Callback):
        def __init__(self, trainer: Trainer):
            self.trainer, self.began = trainer, 0.0
            trainer.add_callback(self)

        def on_train_begin(self) -> None:
            self.began = time.perf_counter()

        def on_steps_end(self, failed: bool) -> None:
            self.trainer.writer.wait()  # for the last checkpoint
            found["seconds"] = time.perf_counter() - self.began
            found["blocked"] = self.trainer.writer.blocked_seconds

    train(config, strategy, Timer, last=False)
    newest = sorted((folder / "checkpoints").glob("step-*"))[-1]
    found["bytes"] = sum(file.stat().st_size for file in newest.iterdir() if file.is_file())
    return found


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="run file")
    parser.add_argument("--strategy", action="append", default=[], metavar="NAME")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=10, help="steps between two checkpoints")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--output-dir", type=Path, default=Path("runs/bench_saving"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("settings", nargs="*", metavar="key=value")
    arguments = parser.parse_args()
    set_up_logging()
    measured: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    measure(arguments, "none")  # the first training of a process warms it up
    for _ in range(arguments.rounds):
        for way in WAYS:
            measured[way].append(measure(arguments, way))
    rows, default = [], TrainingConfig.model_fields["save_steps"].default
    step = min(m["seconds"] - m["blocked"] for m in measured["none"]) / arguments.steps
    heads = f"{'checkpoints':12s} {'training s':>11s} {'of none':>8s} {'stood still s':>14s} {'each s':>7s}"
    print(f"\n{heads} {'at ' + str(default):>8s}")
    for way, found in measured.items():
        checkpoints = arguments.steps // arguments.every if way != "none" else 0
        seconds, blocked = (statistics.median(m[key] for m in found) for key in ("seconds", "blocked"))
        each = blocked / checkpoints if checkpoints else None
        extra = max(seconds - step * arguments.steps, 0) / checkpoints if checkpoints else None
        share = None if extra is None else max(extra, each) / (default * step)
        rows.append(
            {
                "way": way,
                "seconds": seconds,
                "of_none": seconds / (step * arguments.steps),
                "stood_still_seconds": blocked,
                "each_seconds": each,
                "extra_seconds_a_checkpoint": extra,
                "share_at_default_interval": share,
                "checkpoint_bytes": found[-1]["bytes"],
                "rounds": found,
            }
        )
        told = ("", "") if each is None else (f"{each:.3f}", f"{share:.2%}")
        print(f"{way:12s} {seconds:11.2f} {rows[-1]['of_none']:8.3f} {blocked:14.3f} {told[0]:>7s} {told[1]:>8s}")
    print(
        f"\none step {step:.3f} s, a checkpoint {rows[-1]['checkpoint_bytes'] / 1e6:.1f} MB; last column: time for a "
        f"checkpoint each {default} steps (the default), as a share of these steps: the longer of standing still and "
        "of what the training took in addition"
    )
    if arguments.json:
        result = {"machine": machine(), "command": "python " + " ".join(sys.argv), "step_seconds": step, "rows": rows}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
