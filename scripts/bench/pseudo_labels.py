"""Whether pseudo-labels are as right as promised, and how much of taken away labels they win back.

    python scripts/bench/pseudo_labels.py promise --model M.nemo --data LABELLED.jsonl
    python scripts/bench/pseudo_labels.py trial --seeds 1 2 3

promise: clips with true texts that the model was not trained on are divided at random, by text, many times: one half
calibrates, the other one judges. Of each promised precision: how often it can be promised, what is reached on the
judging half (1 - WER of what is kept), and how many of the words are kept. With `--signals` a threshold on one signal
alone is chosen in the same way, to see what each is worth. `--calibrating` takes so many texts in place of half of
them, and `--noise` judges by the same clips with noise that the calibration lacks.

trial: the quickstart's recipe on the voice prompts of a language. `full` has the labels of all training texts, `half`
of half of them; then `half` labels the audio of the others, calibrated on the validation prompts, and `pseudo` is
trained on both. As many steps for all three. What is won back: (half - pseudo) / (half - full), of the WER on the test
prompts. With `--rounds 2` what was trained on the labels labels again, and `pseudo_2` is trained on that. What is
finished in the output directory is not made again.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

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
from finetune.tools.pseudo_labels.outputs import HARDER

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
    for result in Labeller(MakeLabeller(model, labelled=True)).process(clips):
        if "signals" in result:
            scores = score_pair(result["reference"], result["text"], "basic", result["lang"])
            text = text_number(normalize_text(result["reference"], "basic"))
            rows.append((result["signals"], scores.words, scores.word_errors, result["lang"], text))
    signals, words, errors, languages, texts = zip(*rows, strict=True)
    return Labelled(np.array(signals), np.array(words), np.array(errors), np.array(languages), np.array(texts))


def hear_in_noise(model: str, data: str, snr: float) -> Labelled:
    """As `hear`, with white noise on each clip; `snr` in dB against the clip's mean power."""
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        lines = []
        for number, line in enumerate(Path(data).read_text(encoding="utf-8").splitlines()):
            row = json.loads(line)
            audio_S, rate = soundfile.read(row["audio_filepath"])
            noise_S = random.standard_normal(len(audio_S)) * np.sqrt((audio_S**2).mean()) * 10 ** (-snr / 20)
            row["audio_filepath"] = f"{folder}/{number}.flac"
            soundfile.write(row["audio_filepath"], np.clip(audio_S + noise_S, -1, 1), rate)
            lines.append(json.dumps(row) + "\n")
        manifest = Path(folder) / "noisy.jsonl"
        manifest.write_text("".join(lines), encoding="utf-8")
        return hear(model, str(manifest))


def promise(
    labelled: Labelled, judging: Labelled, a: argparse.Namespace, calibrating: int | None, noise: float | None
) -> list[Any]:
    """Return a row for each precision, and with `--signals` for each signal alone.

    Args:
        judging: the same clips, maybe with noise.
        calibrating: texts; None: half of them.
    """
    rows, precisions, certainty, splits, signals = [], a.precision, a.certainty, a.splits, a.signals
    ways = ["all", *SIGNALS] if signals else ["all"]
    for precision in precisions:
        for way in ways:
            reached, shares, warned = [], [], 0
            for seed in range(splits):
                texts = np.unique(labelled.texts_N)
                order = np.random.default_rng(seed).permutation(texts)
                own = order[: calibrating or len(texts) // 2]
                ours = labelled.part(np.isin(labelled.texts_N, own))
                theirs = judging.part(np.isin(judging.texts_N, order[len(own) :]))
                if way == "all":
                    try:
                        found = calibrate(ours, precision, certainty)
                    except UserError:
                        continue
                    point, confidence_N = found.together.point, found.regression.confidence(theirs.signals_NF)
                    own_N = found.regression.confidence(ours.signals_NF)
                    gap = np.average(own_N, weights=ours.words_N) - np.average(confidence_N, weights=theirs.words_N)
                    warned += gap > HARDER
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
                "calibrating": calibrating,
                "noise_db": noise,
                "splits": splits,
                "promised": len(reached),
                "reached_mean": statistics.fmean(reached) if reached else None,
                "reached_lowest": min(reached, default=None),
                "warned": int(warned),
                "below": sum(r < precision for r in reached),
                "below_by_3_points": sum(r < precision - 0.03 for r in reached),
                "kept_mean": statistics.fmean(shares) if shares else None,
            }
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def run_trial(folder: Path, language: str, seed: int, precision: float, steps: int, rounds: int) -> dict[str, Any]:
    """Return the WERs of the trainings, and what the labels are worth."""
    common = {f"data.{split}": str(folder / f"{language}-old-{split}.jsonl") for split in ("validation", "test")}
    common |= {"training.seed": seed, "training.max_steps": steps, "training.report_to": "none"}
    common |= {"training.eval_steps": max(steps // 2, 1)}
    half, whole = folder / f"{language}-old-train.jsonl", folder / f"{language}-train.jsonl"
    known = {row["audio_filepath"] for row in rows_of(half)}
    rest = [row for row in rows_of(whole) if row["audio_filepath"] not in known]
    truth = {row["audio_filepath"]: row["text"] for row in rest}
    audio = folder / f"{language}-unlabelled.jsonl"
    lines = [json.dumps({k: v for k, v in row.items() if k != "text"}) + "\n" for row in rest]
    audio.write_text("".join(lines), encoding="utf-8")

    def wer(name: str, sources: list[Path]) -> float:
        output = folder / f"{name}-{language}-{seed}"
        if not (output / "summary.json").is_file():
            train(folder, output, {**common, "data.train": list(map(str, sources))})
        return json.loads((output / "summary.json").read_text(encoding="utf-8"))["wer_after"]

    full, base = wer("full", [whole]), wer("half", [half])
    found: dict[str, Any] = {"language": language, "seed": seed, "wer_full": full, "wer_half": base}
    found |= {"precision": precision, "unlabelled_clips": len(rest), "labelled_clips": len(known)}
    model = "half"
    for number in range(1, rounds + 1):
        end = "" if number == 1 else f"_{number}"
        labels = folder / f"labels{end}-{language}-{seed}"
        if not (labels / "manifest.jsonl").is_file():
            line = [
                sys.executable,
                "-m",
                "finetune.pseudo_label",
                "--model",
                str(folder / f"{model}-{language}-{seed}"),
            ]
            line += ["--data", str(audio), "--calibrate", str(common["data.validation"]), "--output", str(labels)]
            subprocess.run([*line, "--precision", str(precision)], check=True, cwd=ROOT)
        model = f"pseudo{end}"
        found[f"wer_{model}"] = wer(model, [half, labels / "manifest.jsonl"])
        kept = rows_of(labels / "manifest.jsonl")
        scores = [score_pair(truth[row["audio_filepath"]], row["text"], "basic") for row in kept]
        words = sum(s.words for s in scores)
        found[f"won_back{end}"] = (base - found[f"wer_{model}"]) / (base - full)
        found[f"precision_reached{end}"] = 1 - sum(s.word_errors for s in scores) / words if words else None
        found[f"kept_clips{end}"] = len(kept)
    return found


def rows_of(manifest: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in manifest.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    one, two = kinds.add_parser("promise"), kinds.add_parser("trial")
    one.add_argument("--model", required=True)
    one.add_argument("--data", required=True, help="manifest of labelled clips that the model was not trained on")
    one.add_argument("--precision", type=float, nargs="+", default=[0.7, 0.8, 0.9, 0.95])
    one.add_argument("--certainty", type=float, default=0.9)
    one.add_argument("--splits", type=int, default=40)
    one.add_argument("--calibrating", type=int, nargs="*", default=[], help="texts, in place of half of them")
    one.add_argument("--noise", type=float, nargs="*", default=[], help="dB of the clips above it")
    one.add_argument("--signals", action="store_true", help="each signal alone as well")
    two.add_argument("--language", default="en", choices=("en", "fr"))
    two.add_argument("--precision", type=float, default=0.8)
    two.add_argument("--seeds", type=int, nargs="+", default=[1])
    two.add_argument("--steps", type=int, default=500)
    two.add_argument("--rounds", type=int, default=1)
    two.add_argument("--output-dir", type=Path, default=Path("runs/pseudo_labels"))
    for kind in (one, two):
        kind.add_argument("--json", type=Path)
    a = parser.parse_args()
    if a.kind == "promise":
        clean, rows = hear(a.model, a.data), []
        if not a.calibrating and not a.noise:
            rows = promise(clean, clean, a, None, None)
        for calibrating in a.calibrating:
            rows += promise(clean, clean, a, calibrating, None)
        for noise in a.noise:
            rows += promise(clean, hear_in_noise(a.model, a.data, noise), a, None, noise)
    else:
        folder = a.output_dir.absolute()
        write_manifests(folder)
        rows = []
        for seed in a.seeds:
            rows.append(run_trial(folder, a.language, seed, a.precision, a.steps, a.rounds))
            print(json.dumps(rows[-1]), flush=True)
    if a.json:
        versions = {name: metadata.version(name) for name in PACKAGES}
        before = json.loads(a.json.read_text(encoding="utf-8")) if a.json.is_file() else {}
        # Other cases of the same measurement stay.
        case = ("calibrating", "noise_db") if a.kind == "promise" else ("language", "seed")
        new = {tuple(row.get(key) for key in case) for row in rows}
        rows = [row for row in before.get(a.kind, []) if tuple(row.get(key) for key in case) not in new] + rows
        machine = {"processor": processor_name(), "cores": os.cpu_count(), "date": str(date.today()), **versions}
        write_json(a.json, {**before, **machine, a.kind: rows})


if __name__ == "__main__":
    main()
