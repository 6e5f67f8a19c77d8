"""Fine-tune the small base model on English prompts as they are, and with the same texts in letters that it lacks.

    python scripts/bench/new_alphabet.py --output-dir runs/new_alphabet --json FILE
    python scripts/bench/new_alphabet.py --starts heard,lowered,even,unigram,noise --steps 100 --eval-steps 50

Letter by letter, a to z become the first 26 letters of the Georgian alphabet: nothing of the sound changes, so the
difference is what a new alphabet costs. Recipe, clips, order and steps are those of the quickstart for both sides. The
base model knows English in the old alphabet: that side begins with what it knows, and the other has to keep it. CER is
that of the validation and test splits together; nothing is chosen by it.

`--beside fr` trains on the French prompts too, as they are on both sides, and measures each language by itself: what
an old language loses where a new alphabet is learnt beside it.

`--starts`, how new pieces begin:
    heard    as a run with model.tokenizer.extend_from does it: as the pieces that the model writes where they are
             spoken, biases by use
    and with merges of the texts, as where nothing is heard:
    lowered  as the mean of all old pieces, biases lowered by log(n / 0.1), n new pieces
    even     as the mean, biases not lowered
    unigram  as the mean, biases by use
    noise    as the mean and noise with the spread of the old rows, biases not lowered
Settings (key=value) after the options count for the new alphabet only. Runs that are finished in the output directory
are not made again.
"""

import argparse
import io
import json
import math
import os
import sys
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import soundfile
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "bench")]

from compare_vocabularies import processor_name

from finetune.data.normalization import normalize_text
from finetune.durable_files import write_json

BASE = ROOT / "examples" / "base" / "fastconformer_tdt_3m.nemo"
RECIPE = ROOT / "finetune" / "configs" / "quickstart.yaml"
IN_GEORGIAN = {ord("a") + i: chr(0x10D0 + i) for i in range(26)}
STARTS = ("heard", "lowered", "even", "unigram", "noise")
PACKAGES = ("torch", "nemo_toolkit", "sentencepiece", "accelerate")


def write_manifests(folder: Path, beside: str | None) -> None:
    """Write train.jsonl and heldout.jsonl into folder/old, with the texts in lower case and without punctuation, and
    into folder/new, with the English ones in other letters."""
    (folder / "audio").mkdir(parents=True, exist_ok=True)
    for name, splits in (("train", ["train"]), ("heldout", ["validation", "test"])):
        lines: dict[str, list[str]] = {"old": [], "new": []}
        shards = [s for split in splits for s in sorted((ROOT / "examples/voice_prompts/data").glob(f"{split}-*"))]
        for row in (
            r for shard in shards for r in pq.read_table(shard).to_pylist() if r["language"] in ("en", beside)
        ):
            file = folder / "audio" / f"{row['id'].replace('/', '-')}.flac"
            samples_S, rate = soundfile.read(io.BytesIO(row["audio"]["bytes"]))
            soundfile.write(file, samples_S, rate)
            text = normalize_text(row["text"], "basic")
            entry = {"audio_filepath": str(file.resolve()), "duration": row["duration"], "lang": row["language"]}
            new = text.translate(IN_GEORGIAN) if row["language"] == "en" else text
            for side, written in (("old", text), ("new", new)):
                lines[side].append(json.dumps({**entry, "text": written}, ensure_ascii=False) + "\n")
        for side, rows in lines.items():
            (folder / side).mkdir(exist_ok=True)
            (folder / side / f"{name}.jsonl").write_text("".join(rows), encoding="utf-8")


def make_model(start: str, manifest: Path, folder: Path) -> Path:
    """Write the base model with the vocabulary that `extend_from` gives it, whose new pieces begin in another way."""
    from finetune.config.tokenizer_setting import default_growth
    from finetune.data.text_corpus import read_texts
    from finetune.models.loading import load_model
    from finetune.models.nemo_archive import save_nemo
    from finetune.models.sentencepiece_model import tokenizer_of, write_tokenizer
    from finetune.models.tokenizer_growth import grow_on_texts
    from finetune.models.vocabulary_rows import SHARE_OF_NEW_PIECES, change_vocabulary, start_as_heard

    torch.manual_seed(1)
    model = load_model(str(BASE))
    old = tokenizer_of(model, "model")
    before, texts = len(old.pieces), [t.text for t in read_texts(str(manifest), "texts", "none")]
    growth = grow_on_texts(old, texts, default_growth(before), key="texts")
    write_tokenizer(growth.model, folder / f"tokenizer_{start}")
    change_vocabulary(model, folder / f"tokenizer_{start}")
    after = len(growth.model.pieces)
    head, embedding = model.joint.joint_net[-1], model.decoder.prediction.embed
    with torch.no_grad():
        if start in ("even", "noise"):
            head.bias[before:after] += math.log((after - before) / SHARE_OF_NEW_PIECES)
        if start == "noise":
            for rows in (head.weight, embedding.weight):
                rows[before:after] += torch.randn_like(rows[before:after]) * rows[1:before].std(0)
    if start == "unigram":
        start_as_heard(model, old, {}, texts)
    save_nemo(model, folder / f"{start}.nemo")
    return folder / f"{start}.nemo"


def train(folder: Path, side: str, output: Path, steps: int, eval_steps: int, settings: list[str]) -> None:
    """Train as the quickstart does, with these clips and steps."""
    from finetune.train import main as train_main

    arguments = [
        "--config",
        str(RECIPE),
        f"model.name={BASE}",
        f"data.train={folder / side / 'train.jsonl'}",
        f"data.validation={folder / side / 'heldout.jsonl'}",
        "data.test=null",
        f"training.output_dir={output}",
        "training.overwrite_output_dir=true",
        f"training.max_steps={steps}",
        f"training.eval_steps={eval_steps}",
        "training.save_steps=0",
        "training.report_to=none",
        *settings,
    ]
    if code := train_main(arguments):
        sys.exit(code)


def curve(output: Path, language: str | None) -> dict[str, dict[str, Any]]:
    """Return WER and CER of a run by step, of one language where there are two."""
    rows = [json.loads(line) for line in (output / "evaluations.jsonl").read_text(encoding="utf-8").splitlines()]
    there = [r for r in rows if r["language"] == language and "model" not in r]
    return {str(r["step"]): {"wer": r["wer"], "cer": r["cer"]} for r in there}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, default=Path("runs/new_alphabet"))
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--eval-steps", type=int, default=100)
    parser.add_argument("--starts", default="heard", help=f"with commas between them: {', '.join(STARTS)}")
    parser.add_argument("--beside", metavar="LANGUAGE", help="of the sample data, such as fr")
    parser.add_argument("--json", type=Path, help="add the runs to this file")
    parser.add_argument("settings", nargs="*", metavar="key=value")
    arguments = parser.parse_args()
    starts = arguments.starts.split(",")
    if unknown := set(starts) - set(STARTS):
        parser.error(f"--starts: {', '.join(sorted(unknown))} is none of {', '.join(STARTS)}")
    folder = arguments.output_dir.resolve()
    languages: list[str | None] = ["en", arguments.beside] if arguments.beside else [None]
    if arguments.beside:
        folder = folder / f"beside_{arguments.beside}"
    write_manifests(folder, arguments.beside)
    texts, settings = folder / "new" / "train.jsonl", arguments.settings
    name = "+".join(["", *settings]).replace("/", "_")
    results: list[dict[str, Any]] = []
    for start in ["old alphabet", *starts]:
        side = "old" if start == "old alphabet" else "new"
        title, own = (start, []) if side == "old" else (start + name, settings)
        output = folder / f"{title.replace(' ', '_')}-{arguments.steps}"
        if not (output / "summary.json").is_file():
            if start == "heard":
                own = [f"model.tokenizer.extend_from={texts}", *own]
            elif side == "new":
                own = [f"model.name={make_model(start, texts, folder)}", *own]
            train(folder, side, output, arguments.steps, arguments.eval_steps, own)
        for language in languages:
            found = curve(output, language)
            run = " ".join(filter(None, [title, language and f"beside {arguments.beside}: {language}"]))
            base = results[languages.index(language)]["by_step"] if len(results) >= len(languages) else found
            for step, row in found.items():
                row["ratio"] = row["cer"] / base[step]["cer"] if step in base else None
                print(f"{run}, step {step}: CER {row['cer']:.3f}, WER {row['wer']:.3f}, ratio {row['ratio'] or 0:.2f}")
            results.append({"run": run, "steps": arguments.steps, "by_step": found})
    if arguments.json:
        earlier = json.loads(arguments.json.read_text(encoding="utf-8"))["runs"] if arguments.json.is_file() else []
        mine = {(r["run"], r["steps"]) for r in results}
        result = {
            "date": date.today().isoformat(),
            "processor": processor_name(),
            "cpus": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "versions": {name: metadata.version(name) for name in PACKAGES},
            "command": "python scripts/bench/new_alphabet.py",
            "runs": [r for r in earlier if (r["run"], r["steps"]) not in mine] + results,
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        write_json(arguments.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
