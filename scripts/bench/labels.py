"""Plant errors in the labels of the voice prompts, and see which of them `parakeet-finetune clean` finds.

    python scripts/bench/labels.py --json docs/benchmarks/labels_cpu.json
    python scripts/bench/labels.py --seeds 1 2 3 --train

12 % of the training clips get an error, in equal parts: two clips exchange their texts (of one language), the audio
is cut off, the text is that of the same prompt in the other language, a word is left out, a word is put in. The
quickstart's recipe trains a judge on these dirty labels, for few passes, before it has their errors by heart; `clean`
judges them by that model and sees nothing of the true ones. With --train the whole recipe trains on the dirty, the
cleaned (what is listed is left out) and the clean labels as well, all from the same base model, and the WER on the
prompts' test split says what cleaning wins back.

A planted error counts as found where `clean` lists the clip, and as named where it lists it with the kind that was
planted. What is finished in the output directory is not made again.

Seed 1 is the one that the scores' form was chosen by; `pooled` leaves it out.
"""

import argparse
import io
import json
import os
import random
import shlex
import subprocess
import sys
from collections import Counter
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import soundfile
import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "bench")]

from compare_vocabularies import processor_name

from finetune.data.normalization import normalize_text
from finetune.durable_files import write_json

RECIPE = ROOT / "finetune" / "configs" / "quickstart.yaml"
PROMPTS = ROOT / "examples" / "voice_prompts" / "data"
BAD_SHARE = 0.12
KINDS = ("exchanged", "cut_off", "other_language", "words_missing", "words_not_said")
KEPT_OF_CUT = (0.4, 0.7)  # of the seconds
CUT_AT_START = 0.25  # of the clips that are cut off
FEWEST_WORDS = 3  # of clips that lose a word or a part
CHOSEN_BY = 1  # seed
PACKAGES = ("torch", "nemo_toolkit", "accelerate")

Row = dict[str, Any]


def read_prompts(split: str) -> list[Row]:
    """Read id, text (as `basic` writes it), language and audio of a split's prompts."""
    rows = []
    for shard in sorted(PROMPTS.glob(f"{split}-*")):
        for row in pq.read_table(shard).to_pylist():
            samples_S, rate = soundfile.read(io.BytesIO(row["audio"]["bytes"]))
            text = normalize_text(row["text"], "basic")
            rows.append({"id": row["id"], "lang": row["language"], "text": text, "samples": samples_S, "rate": rate})
    return rows


def plant(rows: list[Row], seed: int) -> dict[str, str]:
    """Change `rows` in place; return the kind of the error of each clip that has one, by its id."""
    random_of = random.Random(seed)
    each = round(BAD_SHARE * len(rows) / len(KINDS))
    planted: dict[str, str] = {}
    by_name = {(row["lang"], row["id"].split("-", 1)[1]): row for row in rows}
    words = {lang: [w for r in rows if r["lang"] == lang for w in r["text"].split()] for lang in ("en", "fr")}

    def draw(fewest: int) -> Row:
        while True:
            row = random_of.choice(rows)
            if row["id"] not in planted and len(row["text"].split()) >= fewest:
                return row

    translated = [(row, by_name.get(("fr" if lang == "en" else "en", name))) for (lang, name), row in by_name.items()]
    pairs = [(row, other["text"]) for row, other in translated if other and other["text"] != row["text"]]
    for row, text in random_of.sample(pairs, each):  # of the texts as they were
        row["text"], planted[row["id"]] = text, "other_language"
    for _ in range(each // 2):
        a = b = draw(2)
        while b["text"] == a["text"] or b["lang"] != a["lang"]:
            b = draw(2)
        a["text"], b["text"] = b["text"], a["text"]
        planted |= {a["id"]: "exchanged", b["id"]: "exchanged"}
    for _ in range(each):
        row = draw(FEWEST_WORDS)
        length = len(row["samples"])
        kept = round(length * random_of.uniform(*KEPT_OF_CUT))
        at_start = random_of.random() < CUT_AT_START
        row["samples"] = row["samples"][length - kept :] if at_start else row["samples"][:kept]
        planted[row["id"]] = "cut_off"
    for _ in range(each):
        row = draw(FEWEST_WORDS)
        left = row["text"].split()
        row["left_out"] = left.pop(random_of.randrange(len(left)))
        row["text"], planted[row["id"]] = " ".join(left), "words_missing"
    for _ in range(each):
        row = draw(FEWEST_WORDS)
        left = row["text"].split()
        row["put_in"] = random_of.choice(words[row["lang"]])
        left.insert(random_of.randint(0, len(left)), row["put_in"])
        row["text"], planted[row["id"]] = " ".join(left), "words_not_said"
    return planted


def write_data(folder: Path, seed: int) -> dict[str, str]:
    """Write dirty.jsonl, clean.jsonl, validation.jsonl, test.jsonl and planted.json with their audio; return the
    latter. The clean labels have the whole audio of clips that are cut off."""
    for split in ("validation", "test"):
        _write(folder, split, read_prompts(split))
    _write(folder, "clean", read_prompts("train"))
    rows = read_prompts("train")
    planted = plant(rows, seed)
    _write(folder, "dirty", rows)
    write_json(folder / "planted.json", planted)
    return planted


def _write(folder: Path, name: str, rows: list[Row]) -> None:
    (folder / name).mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as lines:
        for row in rows:
            soundfile.write(folder / name / f"{row['id']}.flac", row["samples"], row["rate"])
            entry = {"audio_filepath": f"{name}/{row['id']}.flac", "duration": len(row["samples"]) / row["rate"]}
            entry |= {key: row[key] for key in ("id", "lang", "text")}
            lines.write(json.dumps(entry, ensure_ascii=False) + "\n")


def train(folder: Path, name: str, manifest: Path, seed: int, steps: int) -> Path:
    """Train with the quickstart's recipe on a manifest, in a process of its own; return the run's folder."""
    output = folder / f"on-{name}"
    if (output / "summary.json").is_file():
        return output
    recipe = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
    recipe["data"] |= {"train": str(manifest)}
    recipe["data"] |= {split: str(folder / f"{split}.jsonl") for split in ("validation", "test")}
    recipe["training"] |= {"output_dir": str(output), "overwrite_output_dir": True, "seed": seed, "report_to": "none"}
    recipe["training"] |= {"max_steps": steps, "eval_steps": max(steps // 2, 1)}
    run_file = folder / f"on-{name}.yaml"
    run_file.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    _call([str(ROOT / "finetune" / "train.py"), "--config", str(run_file)], folder / f"on-{name}.log")
    return output


def _call(arguments: list[str], log: Path) -> None:
    with log.open("w") as lines:
        command = [sys.executable, *arguments]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        code = subprocess.run(command, stdout=lines, stderr=subprocess.STDOUT, cwd=ROOT, env=environment).returncode
    if code:
        sys.exit(f"{log}: {arguments[0]} failed with exit code {code}")


def score(planted: dict[str, str], found: dict[str, tuple[str, float]], surest: float = 0.0) -> dict[str, Any]:
    """Compare what was planted with what was found as (kind, confidence), both by the clip's id.

    Returns:
        Of each kind: planted, listed (as this kind), named (of these rightly), recall and precision of the name, and
        `found`, the share of the planted ones that are listed as anything. Of `any`: whether a listed clip has an
        error at all.
    """
    found = {name: entry for name, entry in found.items() if entry[1] >= surest}
    result = {}
    for kind in KINDS:
        wanted = {name for name, planted_kind in planted.items() if planted_kind == kind}
        listed = {name for name, (found_kind, _) in found.items() if found_kind == kind}
        named = len(wanted & listed)
        result[kind] = {
            "planted": len(wanted),
            "listed": len(listed),
            "named": named,
            "recall": named / len(wanted) if wanted else None,
            "precision": named / len(listed) if listed else None,
            "found": len(wanted & set(found)) / len(wanted) if wanted else None,
            "really_bad": len(listed & set(planted)) / len(listed) if listed else None,
        }
    right = len(set(planted) & set(found))
    result["any"] = {
        "planted": len(planted),
        "listed": len(found),
        "recall": right / len(planted),
        "precision": right / len(found) if found else None,
    }
    return result


def pool(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return recall and precision over all seeds but the one that the form of the scores was chosen by."""
    scores = [run["scores"] for run in runs if run["seed"] != CHOSEN_BY]
    result: dict[str, Any] = {"seeds": [run["seed"] for run in runs if run["seed"] != CHOSEN_BY]}
    for kind in KINDS if scores else ():
        planted, listed, named = (sum(each[kind][name] for each in scores) for name in ("planted", "listed", "named"))
        found = sum(each[kind]["found"] * each[kind]["planted"] for each in scores)
        result[kind] = {
            "recall": named / planted, "precision": named / listed if listed else None, "found": found / planted
        }  # fmt: skip
    return result


def read_problems(file: Path) -> dict[str, tuple[str, float]]:
    problems = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return {problem["id"]: (problem["kind"], problem["confidence"]) for problem in problems}


def judge(folder: Path, model: Path) -> Path:
    """Clean the dirty labels by a model; return the folder of the result."""
    output = folder / "cleaned"
    if not (output / "problems.jsonl").is_file():
        named = ["--model", str(model), "--data", str(folder / "dirty.jsonl"), "--output", str(output)]
        _call(["-m", "finetune.clean", *named], folder / "clean.log")
    return output


def without_problems(folder: Path, cleaned: Path) -> Path:
    """Write the dirty labels without the clips that are listed; return their manifest."""
    decisions = ["--decisions", str(cleaned / "problems.jsonl"), "--data", str(folder / "dirty.jsonl")]
    _call(["-m", "finetune.clean", *decisions, "--output", str(folder / "without")], folder / "without.log")
    return folder / "without" / "cleaned.jsonl"


def print_scores(seed: int, scores: dict[str, Any]) -> None:
    def shown(value: float | None) -> str:
        return "   -" if value is None else f"{value:4.2f}"

    print(f"seed {seed}: kind              planted listed  recall precision  found, as any kind")
    for kind, row in scores.items():
        cells = f"{row['planted']:7d} {row['listed']:6d}   {shown(row['recall'])}      {shown(row['precision'])}"
        print(f"        {kind:17s} {cells}  {shown(row.get('found'))}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, default=Path("runs/labels"))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument(
        "--judge-steps", type=int, default=200, help="of the judge's training (default: 200, 4 passes)"
    )
    parser.add_argument("--steps", type=int, default=500, help="of the other trainings (default: 500)")
    parser.add_argument("--train", action="store_true", help="train on the cleaned and on the clean labels as well")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    arguments = parser.parse_args()
    runs = []
    for seed in arguments.seeds:
        folder = (arguments.output_dir / f"seed-{seed}").resolve()
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "planted.json").is_file():
            write_data(folder, seed)
        planted = json.loads((folder / "planted.json").read_text(encoding="utf-8"))
        model = train(folder, "judge", folder / "dirty.jsonl", seed, arguments.judge_steps)
        cleaned = judge(folder, model)
        scores = score(planted, read_problems(cleaned / "problems.jsonl"))
        print_scores(seed, scores)
        run: dict[str, Any] = {"seed": seed, "planted": Counter(planted.values()), "scores": scores}
        if arguments.train:
            trained = {
                "dirty": train(folder, "dirty", folder / "dirty.jsonl", seed, arguments.steps),
                "cleaned": train(folder, "cleaned", without_problems(folder, cleaned), seed, arguments.steps),
                "clean": train(folder, "clean", folder / "clean.jsonl", seed, arguments.steps),
            }
            run["wer"] = {name: _wer(output) for name, output in trained.items()}
            lost = run["wer"]["dirty"] - run["wer"]["clean"]
            run["won_back"] = (run["wer"]["dirty"] - run["wer"]["cleaned"]) / lost if lost > 0 else None
            print(f"        WER on test: {run['wer']}; won back: {run['won_back']}")
        runs.append(run)
    if arguments.json:
        result = {
            "date": date.today().isoformat(),
            "processor": processor_name(),
            "cpus": os.cpu_count(),
            "versions": {name: metadata.version(name) for name in PACKAGES},
            "command": shlex.join(["python", "scripts/bench/labels.py", *sys.argv[1:]]),
            "pooled": pool(runs),
            "runs": runs,
        }
        write_json(arguments.json, result)
    return 0


def _wer(output: Path) -> float:
    return json.loads((output / "summary.json").read_text(encoding="utf-8"))["wer_after"]


if __name__ == "__main__":
    sys.exit(main())
