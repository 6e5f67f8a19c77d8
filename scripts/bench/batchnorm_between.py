"""Points between a base model and a tuned one: is BatchNorm better interpolated, or estimated anew?

    python scripts/bench/batchnorm_between.py --output-dir runs/between --json FILE [--seeds 1 2] [--steps 300]

The small base model is trained on the French prompts with the quickstart's recipe. At points on the way its running
statistics are interpolated as the weights are, or estimated anew on training clips of the new language, of the old one
(English), or of both, or on the very clips that the new language is judged on. WER on the validation split of the new
language and of the old one. Trainings that are finished in the output directory are not made again.
"""

import argparse
import sys
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "bench")]

from compare_vocabularies import processor_name

from finetune.durable_files import write_json

BASE = ROOT / "examples" / "base" / "fastconformer_tdt_3m.nemo"
PROMPTS = ROOT / "examples" / "voice_prompts" / "data"
RECIPE = ROOT / "finetune" / "configs" / "quickstart.yaml"
NEW, OLD = "fr", "en"
PACKAGES = ("torch", "nemo_toolkit", "accelerate")
KINDS = {
    "interpolated": None,
    "anew, judged clips": (NEW, "validation"),
    "anew, new language": (NEW, "train"),
    "anew, old language": (OLD, "train"),
    "anew, both": ("both", "train"),
}
CLIPS = 256


def write_languages(folder: Path) -> None:
    """Write folder/LANGUAGE/data with the prompts of each, and folder/both."""
    for shard in sorted(PROMPTS.glob("*.parquet")):
        table = pq.read_table(shard)
        for name in (NEW, OLD, "both"):
            (folder / name / "data").mkdir(parents=True, exist_ok=True)
            rows = table if name == "both" else table.filter(pc.equal(table["language"], name))
            pq.write_table(rows, folder / name / "data" / shard.name)


def train(folder: Path, seed: int, steps: int) -> Path:
    """Train on the new language alone; return the run's directory."""
    from finetune.train import main as train_main

    run = folder / f"seed-{seed}"
    if not (run / "summary.json").is_file():
        data = dict.fromkeys(("train", "validation", "test"), folder / NEW)
        settings = [f"data.{key}={path}" for key, path in data.items()]
        settings += [f"model.name={BASE}", f"training.output_dir={run}", f"training.seed={seed}"]
        settings += [f"training.max_steps={steps}", f"training.eval_steps={steps}", "training.save_steps=0"]
        assert train_main(["--config", str(RECIPE), "training.overwrite_output_dir=true", *settings]) == 0
    return run


@torch.no_grad()
def measure(folder: Path, run: Path, points: list[float]) -> list[dict[str, Any]]:
    """Return a row for each point and kind of statistics: way, batchnorm, wer (new language), guard_wer (old one)."""
    from finetune.evaluation.batchnorm import estimate_batchnorm
    from finetune.evaluation.dataset import EvaluationSettings, open_sources
    from finetune.models.interpolation import on_the_way
    from finetune.tools.averaging import Judge, Merger, Recipe

    def settings(name: str, split: str, clips: int = -1) -> EvaluationSettings:
        return EvaluationSettings(data=[str(folder / name)], split=split, max_samples=clips, resamples=0)

    judge = Judge(settings(NEW, "validation"), settings(OLD, "validation"))
    merger = Merger(Recipe([str(run)], base=str(BASE)), judge)
    base, tuned, rows = merger.base, merger.merged(rate=False), []
    assert base is not None
    for way in points:
        for kind, of in KINDS.items():
            merger.put({name: on_the_way(base[name], tensor, way) for name, tensor in tuned.items()}, estimate=False)
            if of is not None:
                data = settings(*of, clips=CLIPS)
                estimate_batchnorm(merger.model, open_sources(data.data, data.split), data)
            rates = judge.rates(merger.model)
            rows.append({"way": way, "batchnorm": kind, "wer": rates["wer"], "guard_wer": rates["guard_wer"]})
            print(f"{run.name} {way:g} {kind}: {rates['wer']:.3f} {rates['guard_wer']:.3f}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--points", type=float, nargs="+", default=[0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    arguments = parser.parse_args()
    folder = arguments.output_dir
    write_languages(folder)
    found = {seed: measure(folder, train(folder, seed, arguments.steps), arguments.points) for seed in arguments.seeds}
    versions = {name: metadata.version(name) for name in PACKAGES}
    about = {"date": str(date.today()), "processor": processor_name(), "versions": versions, "steps": arguments.steps}
    write_json(arguments.json, {**about, "seeds": found})


if __name__ == "__main__":
    main()
