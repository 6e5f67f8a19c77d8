"""Fine-tune a small model on the prompts of a language that it does not know, and see what the other one loses.

    python scripts/bench/forgetting.py --seeds 1 2 3 4 5 --json docs/benchmarks/forgetting_cpu.json
    python scripts/bench/forgetting.py --new fr --ways plain limit --seeds 1
    python scripts/bench/forgetting.py --base runs/quickstart --output-dir runs/forgetting_quickstart

First the quickstart's recipe makes a base model on prompts of one language, in lower case and without punctuation. The
new data are the prompts of the other language as they are written, with capitals and punctuation, which that model
cannot write: its vocabulary grows. The guard is what the base model knows: prompts of its own language that it has not
seen (validation, test, and half of the texts of train), judged without capitals and punctuation. Test prompts of the
new language measure the gain, with them.
`--base` takes another model for both languages, such as the quickstart's, which knows the prompts of both.

The ways:
    plain        as it comes, with nothing against forgetting
    rehearsal    a limit of +5 % for the guard, and clips of the old language in the batches, from which the base
                 model is distilled; 1.4 times the steps, which see nine tenths as many new clips
    without_old  a limit of +50 %, which leaves about a third of what plain loses, and no clip of the old language
    limit        a limit of +5 %, and nothing else
A limit alone turns on a pull towards the base (training.l2_sp) and points on the way from it.
Each of what keeps a guard by itself, without a limit and in the steps of plain (if named in --ways):
    rehearsal_alone, rehearsal_distilled, l2_sp, layer_decay, frozen_batchnorm, lora
The guard's half that no run chooses by is judged in all of them. Runs that are finished in the output directory are
not made again; other settings than theirs are refused. Several processes may share it, each with own seeds, once the
base models are there (`--seeds 0`).
"""

import argparse
import io
import json
import os
import resource
import shlex
import statistics
import subprocess
import sys
import zlib
from collections.abc import Iterable
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

from finetune.data.guard_halves import half_of
from finetune.data.normalization import normalize_text
from finetune.durable_files import write_json

RECIPE = ROOT / "finetune" / "configs" / "quickstart.yaml"
OTHER = {"fr": "en", "en": "fr"}
SPLITS = ("train", "validation", "test")
LIMIT, WIDE_LIMIT = "+5 %", "+50 %"
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rehearsal": {"data.guard_limit": LIMIT, "model.distillation": 1.0},
    "without_old": {"data.guard_limit": WIDE_LIMIT},
    "limit": {"data.guard_limit": LIMIT},
}
ALONE: dict[str, dict[str, Any]] = {
    "rehearsal_alone": {},
    "rehearsal_distilled": {"model.distillation": 1.0},
    "l2_sp": {"training.l2_sp": 5.0},
    "layer_decay": {"training.layer_decay": 0.5},
    "frozen_batchnorm": {"model.freeze_batchnorm": True},
    "lora": {"model.lora_rank": 16},
}
REHEARSED = 0.35
MORE_STEPS = 1.4
"""Nine of ten new clips of the plain run are seen; with the evaluations of the guard, 1.7 times its time."""
PACKAGES = ("torch", "nemo_toolkit", "accelerate")


def write_manifests(folder: Path) -> None:
    """Write LANGUAGE-SPLIT.jsonl with the texts as they are, and LANGUAGE-old-SPLIT.jsonl as the base writes them, of
    train half of the texts.

    LANGUAGE-guard.jsonl are the prompts that the base is not trained on; LANGUAGE-judged.jsonl is the half of them
    that judges where there is a limit.
    """
    (folder / "audio").mkdir(parents=True, exist_ok=True)
    lines: dict[str, list[str]] = {}
    for split in SPLITS:
        for shard in sorted((ROOT / "examples" / "voice_prompts" / "data").glob(f"{split}-*")):
            for row in pq.read_table(shard).to_pylist():
                file = folder / "audio" / f"{row['id'].replace('/', '-')}.flac"
                samples_S, rate = soundfile.read(io.BytesIO(row["audio"]["bytes"]))
                soundfile.write(file, samples_S, rate)
                entry = {"audio_filepath": str(file.resolve()), "duration": row["duration"], "lang": row["language"]}
                as_written = json.dumps({**entry, "text": row["text"]}, ensure_ascii=False)
                old = json.dumps({**entry, "text": normalize_text(row["text"], "basic")}, ensure_ascii=False)
                lines.setdefault(f"{row['language']}-{split}", []).append(as_written)
                held_out = split == "train" and zlib.crc32(normalize_text(row["text"], "basic").encode()) & 1
                if not held_out:
                    lines.setdefault(f"{row['language']}-old-{split}", []).append(old)
                if split != "train" or held_out:
                    lines.setdefault(f"{row['language']}-guard", []).append(as_written)
                    if half_of(row["text"]) == "guard":
                        lines.setdefault(f"{row['language']}-judged", []).append(as_written)
    for name, rows in lines.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")


def make_base(folder: Path, language: str) -> Path:
    """Train the base model of a language as the quickstart does, unless it is there."""
    output = folder / f"base-{language}"
    if not (output / "summary.json").is_file():
        data = {f"data.{split}": str(folder / f"{language}-old-{split}.jsonl") for split in SPLITS}
        train(folder, output, data | {"training.report_to": "none"})
    return output


def settings_of(folder: Path, base: Path, new: str, way: str, seed: int, steps: int) -> dict[str, Any]:
    """Return the settings of a run by key: the quickstart's recipe on the new data, and those of the way."""
    old = OTHER[new]
    of_way = (WAYS | ALONE)[way]
    guard = "guard" if "data.guard_limit" in of_way else "judged"
    settings: dict[str, Any] = {
        "model.name": str(base),
        "model.tokenizer": {"extend_from": str(folder / f"{new}-train.jsonl")},
        "data.train": str(folder / f"{new}-train.jsonl"),
        "data.validation": str(folder / f"{new}-validation.jsonl"),
        "data.test": str(folder / f"{new}-test.jsonl"),
        "data.guard": {"path": str(folder / f"{old}-{guard}.jsonl"), "wer_normalization": "basic"},
        "data.text_normalization": "none",
        "data.wer_normalization": "none",
        "training.max_steps": steps,
        "training.eval_steps": max(steps // 4, 1),
        "training.seed": seed,
        "training.report_to": "none",
        "training.save_steps": 0,
    }
    if way.startswith("rehearsal"):
        settings |= {"data.rehearsal": str(folder / f"{old}-old-train.jsonl"), "data.rehearsal_share": REHEARSED}
    if way == "rehearsal":
        settings["training.max_steps"] = round(MORE_STEPS * steps)
        settings["training.eval_steps"] = max(settings["training.max_steps"] // 4, 1)
    return settings | of_way


def train(folder: Path, output: Path, settings: dict[str, Any]) -> float:
    """Train in a process of its own; return the processor's seconds that it took, with its workers'."""
    recipe = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
    for key, value in (settings | {"training.output_dir": str(output), "training.overwrite_output_dir": True}).items():
        section, name = key.split(".", 1)
        recipe[section][name] = value
    run_file = folder / f"{output.name}.yaml"
    run_file.write_text(yaml.safe_dump(recipe, allow_unicode=True), encoding="utf-8")
    command = [sys.executable, str(ROOT / "finetune" / "train.py"), "--config", str(run_file)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with (folder / f"{output.name}.log").open("w") as log:
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, check=False).returncode
    if code:
        sys.exit(f"{log.name}: the run failed with exit code {code}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def check_same(file: Path, had: dict[str, Any], now: dict[str, Any]) -> None:
    """End where a finished run had other settings than it would have now: their figures do not go together."""
    now = json.loads(json.dumps(now))
    differ = [
        f"{key}: {had.get(key)!r} there, {now.get(key)!r} now" for key in had | now if had.get(key) != now.get(key)
    ]
    if differ:
        sys.exit(f"{file}: that run had other settings ({'; '.join(differ)}). Give another --output-dir.")


def figures_of(output: Path) -> dict[str, Any]:
    """Return what a run came to: WER on the new test clips and on the guard, before and after, and its time."""
    summary = json.loads((output / "summary.json").read_text(encoding="utf-8"))
    return {
        "new_before": summary["wer_before"],
        "new_after": summary["wer_after"],
        "guard_before": summary["guard_wer_before"],
        "guard_after": summary["guard_wer_after"],
        "best_step": summary["best_step"],
        "weights": summary.get("best_weights", "raw"),
        "guard_limit": {k: v for k, v in (summary.get("guard_limit") or {}).items() if k != "judged"} or None,
        "seconds": summary["wall_seconds"],
    }


def compare(runs: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each new language and way: gain and processor's time against the plain run of the same
    seed, and the guard's change, each as the list over the seeds."""
    by_case = {(r["new"], r["way"], r["seed"]): r for r in runs}
    rows = []
    for new, way in sorted(
        {(n, w) for n, w, _ in by_case}, key=lambda case: (case[0], list(WAYS | ALONE).index(case[1]))
    ):
        found = []
        for seed in sorted(s for n, w, s in by_case if (n, w) == (new, way)):
            mine, plain = by_case[new, way, seed], by_case.get((new, "plain", seed))
            gain = mine["new_before"] - mine["new_after"]
            lost = mine["guard_after"] - mine["guard_before"]
            row = {"seed": seed, "new_after": mine["new_after"], "guard_after": mine["guard_after"], "lost": lost}
            row["guard_relative"] = lost / mine["guard_before"]
            if plain is not None:
                row["share_of_gain"] = gain / (plain["new_before"] - plain["new_after"])
                row["share_of_loss"] = lost / (plain["guard_after"] - plain["guard_before"])
                row["times"] = mine["processor_seconds"] / plain["processor_seconds"]
            found.append(row)
        rows.append({"new": new, "way": way, "seeds": found})
    return rows


def _spread(values: list[float], form: str = ".3f") -> str:
    return f"{statistics.fmean(values):{form}} ({min(values):{form}} to {max(values):{form}})" if values else "-"


def print_rows(rows: list[dict[str, Any]]) -> None:
    """Print mean, least and most over the seeds."""
    for row in rows:
        columns = {
            "new WER": ("new_after", ".3f"),
            "guard WER": ("guard_after", ".3f"),
            "guard, relative": ("guard_relative", "+.1%"),
            "share of the gain": ("share_of_gain", ".0%"),
            "share of the loss": ("share_of_loss", ".0%"),
            "time": ("times", ".2f"),
        }
        cells = [
            f"{name} {_spread([s[key] for s in row['seeds'] if key in s], form)}"
            for name, (key, form) in columns.items()
        ]
        kept = sum(s["guard_relative"] <= 0.05 for s in row["seeds"])
        print(f"{row['new']} {row['way']}: {'; '.join(cells)}; within {LIMIT} in {kept} of {len(row['seeds'])} seeds")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, help="another base model, for both languages")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/forgetting"))
    parser.add_argument("--new", nargs="+", choices=OTHER, default=list(OTHER))
    parser.add_argument("--ways", nargs="+", choices=WAYS | ALONE, default=list(WAYS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--steps", type=int, default=400, help="of a run without rehearsal")
    parser.add_argument("--set", nargs="*", default=[], metavar="key=value", help="further settings of all but plain")
    parser.add_argument("--json", type=Path, help="write all finished runs of the output directory to this file")
    arguments = parser.parse_args()
    folder = arguments.output_dir.resolve()
    if not (folder / "en-guard.jsonl").is_file():
        write_manifests(folder)
    further = {key: yaml.safe_load(value) for key, _, value in (s.partition("=") for s in arguments.set)}
    given = None if arguments.base is None else arguments.base.resolve()
    bases = {new: given or make_base(folder, OTHER[new]) for new in arguments.new}

    def settings(new: str, way: str, seed: int) -> dict[str, Any]:
        found = settings_of(folder, bases[new], new, way, seed, arguments.steps)
        return found | (further if way != "plain" else {})

    for file in sorted(folder.glob("*/figures.json")):
        run = json.loads(file.read_text(encoding="utf-8"))
        if run["new"] in arguments.new and run["way"] in arguments.ways and "settings" in run:
            check_same(file, run["settings"], settings(run["new"], run["way"], run["seed"]))
    for seed in (s for s in arguments.seeds if s):
        for new in arguments.new:
            for way in arguments.ways:
                output = folder / f"{new}-{way}-{seed}"
                if not (output / "figures.json").is_file():
                    seconds = train(folder, output, settings(new, way, seed))
                    case = {"new": new, "way": way, "seed": seed, "processor_seconds": seconds}
                    case["settings"] = settings(new, way, seed)
                    write_json(output / "figures.json", {**case, **figures_of(output)})
                figures = json.loads((output / "figures.json").read_text(encoding="utf-8"))
                new_wer = f"{figures['new_before']:.3f} to {figures['new_after']:.3f}"
                guard_wer = f"{figures['guard_before']:.3f} to {figures['guard_after']:.3f}"
                seconds = f"{figures['processor_seconds']:.0f} s of the processor"
                print(f"{output.name}: new {new_wer}, guard {guard_wer}, {seconds}", flush=True)
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*/figures.json"))]
    rows = compare(runs)
    print_rows(rows)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        result = {
            "date": date.today().isoformat(),
            "processor": processor_name(),
            "cpus": os.cpu_count(),
            "threads": os.environ.get("OMP_NUM_THREADS"),
            "versions": {name: metadata.version(name) for name in PACKAGES},
            "command": shlex.join(["python", "scripts/bench/forgetting.py", *sys.argv[1:]]),
            "rows": rows,
            "runs": [{key: value for key, value in run.items() if key != "settings"} for run in runs],
        }
        write_json(arguments.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
