"""Stands in for finetune/train.py in tests of a search: writes what a run leaves, by the settings that it was given.

The WER is lowest at a learning rate of 1e-2, and each clip's errors follow it. As in a run, the best model is the base
model where that was measured and is better. `STAND_IN` in the environment is JSON:
`out_of_memory`, `diverges` and `refuses` are learning rates from which on that happens, `waits_for` a file without
which a training does not end, `guard` how much the guard's WER rises with the learning rate, `base` the
base model's WER.
"""

import argparse
import json
import math
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from finetune.config.load import load_config
from finetune.evaluation.utterance_counts import BEST, BEST_TRAINED, Counts, UtteranceCounts

CLIPS, WORDS = 200, 10


def main() -> int:
    wishes = json.loads(os.environ.get("STAND_IN", "{}"))
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path)
    parser.add_argument("--strategy", action="append", default=[])
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_intermixed_args()
    config, _ = load_config(arguments.config, arguments.strategy, arguments.overrides)
    t = config.training
    folder, rate = Path(t.output_dir), t.learning_rate
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "arguments.json").write_text(json.dumps(sys.argv[1:]))
    if rate >= wishes.get("refuses", math.inf):
        print("error: data.train: there is nothing", file=sys.stderr)
        return 2
    if rate >= wishes.get("out_of_memory", math.inf):
        print("error: the GPU is out of memory: tried to allocate 2 GiB\nWhat would help:", file=sys.stderr)
        return 1
    guarded = bool(config.data.guard)
    rows = (
        [("validation", 0, wishes.get("base", 0.5)), *([("guard", 0, 0.2)] if guarded else [])]
        if t.eval_on_start
        else []
    )
    final = min(0.2 + 0.1 * abs(math.log10(rate / 1e-2)), 0.45)
    if rate >= wishes.get("diverges", math.inf):
        final = 2.0
    final = round(final * CLIPS * WORDS) / (CLIPS * WORDS)
    for step in range(t.eval_steps, t.max_steps + 1, t.eval_steps):
        rows.append(("validation", step, final + 0.05 * (1 - step / t.max_steps)))
        if guarded:
            rows.append(("guard", step, 0.2 + wishes.get("guard", 0.0) * rate))
        write(folder, rows)
    while "waits_for" in wishes and not Path(wishes["waits_for"]).exists():
        time.sleep(0.02)
    base = rows[0][2] if t.eval_on_start else math.inf
    counts_of(min(base, final)).save(folder / BEST)
    if base <= final:
        counts_of(final).save(folder / BEST_TRAINED)
    (folder / "model.nemo").write_text("weights")
    return 0


def counts_of(wer: float) -> UtteranceCounts:
    """Return counts by clip with so many errors."""
    counts, whole = UtteranceCounts(), round(wer * CLIPS * WORDS)
    for i in range(CLIPS):
        errors = (i + 1) * whole // CLIPS - i * whole // CLIPS
        counts.add(f"clip {i}", "", "en", Counts(clips=1, words=WORDS, word_errors=errors))
    return counts


def write(folder: Path, rows: list[tuple[str, int, float]]) -> None:
    lines = [json.dumps({"step": s, "split": split, "language": None, "wer": wer}) for split, s, wer in rows]
    (folder / "evaluations.jsonl").write_text("".join(line + "\n" for line in lines))


if __name__ == "__main__":
    sys.exit(main())
