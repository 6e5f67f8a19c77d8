"""Whether pseudo-labels are as right as promised, and how much of taken away labels they win back.

    python scripts/bench/pseudo_labels.py promise --model M.nemo --data LABELLED.jsonl
    python scripts/bench/pseudo_labels.py trial --seeds 1 2 3

promise: clips with true texts that the model was not trained on are divided at random, by text, many times: one half
calibrates, the other one judges. Of each promised precision: how often it can be promised, what is reached on the
judging half (1 - WER of what is kept), and how many of the words are kept. With `--signals` a threshold on one signal
alone is chosen in the same way, to see what each is worth.

trial: the quickstart's recipe on the voice prompts of a language. `full` has the labels of all training texts, `half`
of half of them; then `half` labels the audio of the others, calibrated on the validation prompts, and `pseudo` is
trained on both. As many steps for all three. What is won back: (half - pseudo) / (half - full), of the WER on the test
prompts. Runs that are finished in the output directory are not made again.
"""

import argparse
import json
import statistics
import subprocess
import sys
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "bench")]

from compare_vocabularies import processor_name
from forgetting import train, write_manifests

from finetune.data.normalization import normalize_text
from finetune.durable_files import write_json
from finetune.errors import UserError
from finetune.evaluation.scores import score_pair
from finetune.tools.pseudo_labels.calibration import Labelled, calibrate, choose, text_number
from finetune.tools.pseudo_labels.labelling import SIGNALS

PACKAGES = ("torch", "nemo_toolkit", "scikit-learn")


def hear(model: str, data: str) -> Labelled:
    """Return what the model makes of labelled clips, in this process."""
    from finetune.data.order import Piece
    from finetune.evaluation.dataset import open_sources
    from finetune.tools.jobs.clips import Clips
    from finetune.tools.pseudo_labels.labelling import Labeller, MakeLabeller

    group = [(source, shard) for source in open_sources([data], "test") for shard in source.shards]
    clips = Clips(group, [Piece(number, 0, shard.rows) for number, (_, shard) in enumerate(group)])
    rows = []
    for result in Labeller(MakeLabeller(model, len(group))).process(clips):
        if "signals" in result:
            scores = score_pair(result["reference"], result["text"], "basic", result["lang"])
            text = text_number(normalize_text(result["reference"], "basic"))
            rows.append((result["signals"], scores.words, scores.word_errors, result["lang"], text))
    signals, words, errors, languages, texts = zip(*rows, strict=True)
    return Labelled(np.array(signals), np.array(words), np.array(errors), np.array(languages), np.array(texts))


def promise(labelled: Labelled, precisions: list[float], certainty: float, splits: int, signals: bool) -> list[Any]:
    """Return a row for each precision, and with `signals` for each signal alone."""
    rows = []
    ways = ["all", *SIGNALS] if signals else ["all"]
    for precision in precisions:
        for way in ways:
            reached, shares = [], []
            for seed in range(splits):
                texts = np.unique(labelled.texts_N)
                half = np.random.default_rng(seed).permutation(texts)[: len(texts) // 2]
                own_N = np.isin(labelled.texts_N, half)
                ours, theirs = labelled.part(own_N), labelled.part(~own_N)
                if way == "all":
                    try:
                        found = calibrate(ours, precision, certainty)
                    except UserError:
                        continue
                    point, confidence_N = found.together.point, found.regression.confidence(theirs.signals_NF)
                else:
                    column = SIGNALS.index(way)
                    point = choose(ours, ours.signals_NF[:, column], precision, certainty).point
                    confidence_N = theirs.signals_NF[:, column]
                if point is None:
                    continue
                kept_N = confidence_N >= point.threshold
                words = int(theirs.words_N[kept_N].sum())
                if words:
                    reached.append(1 - int(theirs.errors_N[kept_N].sum()) / words)
                    shares.append(words / int(theirs.words_N.sum()))
            row = {
                "precision": precision,
                "by": way,
                "splits": splits,
                "promised": len(reached),
                "reached_mean": statistics.fmean(reached) if reached else None,
                "reached_lowest": min(reached, default=None),
                "below": sum(r < precision for r in reached),
                "below_by_3_points": sum(r < precision - 0.03 for r in reached),
                "kept_mean": statistics.fmean(shares) if shares else None,
            }
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def run_trial(folder: Path, language: str, seed: int, precision: float, steps: int) -> dict[str, Any]:
    """Return the WERs of the three trainings, and what the labels are worth."""
    common = {f"data.{split}": str(folder / f"{language}-old-{split}.jsonl") for split in ("validation", "test")}
    common |= {"training.seed": seed, "training.max_steps": steps, "training.report_to": "none"}
    common |= {"training.eval_steps": max(steps // 2, 1)}
    half, whole = folder / f"{language}-old-train.jsonl", folder / f"{language}-train.jsonl"
    known = {json.loads(line)["audio_filepath"] for line in half.read_text(encoding="utf-8").splitlines()}
    rest = [json.loads(line) for line in whole.read_text(encoding="utf-8").splitlines()]
    rest = [row for row in rest if row["audio_filepath"] not in known]
    truth = {row["audio_filepath"]: row["text"] for row in rest}
    audio = folder / f"{language}-unlabelled.jsonl"
    lines = [json.dumps({k: v for k, v in row.items() if k != "text"}) + "\n" for row in rest]
    if not audio.is_file():  # another file would be another job
        audio.write_text("".join(lines), encoding="utf-8")

    def wer(name: str, sources: list[str]) -> float:
        output = folder / f"{name}-{language}-{seed}"
        if not (output / "summary.json").is_file():
            train(folder, output, {**common, "data.train": sources})
        return json.loads((output / "summary.json").read_text(encoding="utf-8"))["wer_after"]

    wers = {"full": wer("full", [str(whole)]), "half": wer("half", [str(half)])}
    labels = folder / f"labels-{language}-{seed}"
    line = [sys.executable, "-m", "finetune.pseudo_label", "--model", str(folder / f"half-{language}-{seed}")]
    line += ["--data", str(audio), "--calibrate", str(common["data.validation"]), "--output", str(labels)]
    subprocess.run([*line, "--precision", str(precision)], check=True, cwd=ROOT)
    wers["pseudo"] = wer("pseudo", [str(half), str(labels / "manifest.jsonl")])
    kept = [json.loads(line) for line in (labels / "manifest.jsonl").read_text(encoding="utf-8").splitlines()]
    scores = [score_pair(truth[row["audio_filepath"]], row["text"], "basic") for row in kept]
    words = sum(s.words for s in scores)
    return {
        "language": language,
        "seed": seed,
        **{f"wer_{name}": value for name, value in wers.items()},
        "won_back": (wers["half"] - wers["pseudo"]) / (wers["half"] - wers["full"]),
        "precision": precision,
        "precision_reached": 1 - sum(s.word_errors for s in scores) / words if words else None,
        "kept_clips": len(kept),
        "unlabelled_clips": len(rest),
        "labelled_clips": len(known),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    one, two = kinds.add_parser("promise"), kinds.add_parser("trial")
    one.add_argument("--model", required=True)
    one.add_argument("--data", required=True, help="manifest of labelled clips that the model was not trained on")
    one.add_argument("--precision", type=float, nargs="+", default=[0.7, 0.8, 0.9, 0.95])
    one.add_argument("--certainty", type=float, default=0.9)
    one.add_argument("--splits", type=int, default=40)
    one.add_argument("--signals", action="store_true", help="each signal alone as well")
    two.add_argument("--language", default="en", choices=("en", "fr"))
    two.add_argument("--precision", type=float, default=0.8)
    two.add_argument("--seeds", type=int, nargs="+", default=[1])
    two.add_argument("--steps", type=int, default=500)
    two.add_argument("--output-dir", type=Path, default=Path("runs/pseudo_labels"))
    for kind in (one, two):
        kind.add_argument("--json", type=Path)
    a = parser.parse_args()
    if a.kind == "promise":
        rows = promise(hear(a.model, a.data), a.precision, a.certainty, a.splits, a.signals)
    else:
        folder = a.output_dir.absolute()
        write_manifests(folder)
        rows = []
        for seed in a.seeds:
            rows.append(run_trial(folder, a.language, seed, a.precision, a.steps))
            print(json.dumps(rows[-1]), flush=True)
    if a.json:
        versions = {name: metadata.version(name) for name in PACKAGES}
        before = json.loads(a.json.read_text(encoding="utf-8")) if a.json.is_file() else {}
        machine = {"processor": processor_name(), "date": str(date.today()), **versions}
        write_json(a.json, {**before, **machine, a.kind: rows})


if __name__ == "__main__":
    main()
