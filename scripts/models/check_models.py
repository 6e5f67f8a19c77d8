"""Try every Parakeet family from end to end: build a small archive as NVIDIA publishes it, and run each command on it.

    python scripts/models/check_models.py [--families tdt,ctc] [--folder DIR] [--json FILE]

Each cell is "yes", "refused" where the family has no such thing and the command says so, "not in transformers" with
what no class of transformers expresses, or the end of the error. Exit code 1 if any cell fails.
"""

import argparse
import contextlib
import importlib
import io
import json
import platform
import shutil
import sys
import traceback
from collections.abc import Callable
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from families import FAMILIES, HYBRID, PROMPT, TRANSDUCER, build, sample_texts

CLIPS = 8
PASSED = ("yes", "refused", "not in transformers")
"""How the results begin that are no failures."""
STREAMING_OF = {
    "streaming": "13,6,1,0",
    "streaming-eou": "1",
    "streaming-hybrid": "13,0",
    "prompt": "3,0",
    "unified": "7+7,1+3",
}
"""Look-aheads that a family is tried with."""


def sample(folder: Path) -> Path:
    """Write a manifest of short clips of the sample data into the folder; return its path."""
    import pyarrow.parquet as pq

    prompts = ROOT / "examples" / "voice_prompts" / "data"
    rows = (row for path in sorted(prompts.glob("train-*.parquet")) for row in pq.read_table(path).to_pylist())
    lines = []
    for row in (row for row in rows if row["language"] == "en" and 1 <= row["duration"] <= 2):
        name = f"{len(lines)}.flac"
        (folder / name).write_bytes(row["audio"]["bytes"])
        lines.append({"audio_filepath": name, "duration": row["duration"], "text": row["text"], "lang": "en-US"})
        if len(lines) == CLIPS:
            break
    manifest = folder / "manifest.jsonl"
    manifest.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return manifest


class Check:
    """The commands on one family's archive; each method is a cell."""

    def __init__(self, name: str, folder: Path, manifest: Path) -> None:
        self.name, self.family = name, FAMILIES[name]
        self.folder = folder
        self.manifest = str(manifest)
        self.archive = build(name, sample_texts(), folder / "published.nemo", speaking=True)
        self.run_folder = folder / "run"
        self.run_file = folder / "RUN.yaml"
        self.run_file.write_text(
            yaml.safe_dump(
                {
                    "model": {"name": str(self.archive)},
                    "data": {
                        "train": self.manifest,
                        "validation": self.manifest,
                        "allow_overlap": True,
                        "text_normalization": "basic",
                    },
                    "training": {
                        "output_dir": str(self.run_folder),
                        "max_steps": 4,
                        "per_device_train_batch_size": 4,
                        "per_device_eval_batch_size": 4,
                        "save_steps": 2,
                        "logging_steps": 1,
                        "dataloader_num_workers": 0,
                        "num_threads": 1,
                        "report_to": "none",
                    },
                }
            ),
            encoding="utf-8",
        )

    def plan(self) -> None:
        arguments = ("--config", self.run_file, "--gpu", "a100-80gb", "--strategies", "adamw")
        if "encoder.global_tokens" in self.family.settings:  # looked up by value, so that no step can be followed
            run("plan", *arguments, expect=(2,))
            raise RefusedError
        run("plan", *arguments, expect=(0, 1))

    def dry_run(self) -> None:
        run("train", "--config", self.run_file, "--dry-run")

    def train(self) -> None:
        run("train", "--config", self.run_file)

    def resume(self) -> None:
        shutil.rmtree(self.run_folder / "checkpoints" / "step-00000004")
        (self.run_folder / "summary.json").unlink()
        run("train", "--config", self.run_file, "training.resume_from_checkpoint=true")
        assert json.loads((self.run_folder / "summary.json").read_text())["resumed_from"] == 2

    def evaluate(self) -> None:
        run("evaluate", "--model", self.run_folder, "--data", self.manifest, "--bootstrap", "0")

    def other_heads(self) -> None:
        """--head ctc of hybrids; of a transducer with the head that model.add_ctc gives it."""
        model: str | Path = self.run_folder
        if self.family.target == TRANSDUCER:
            model = self.folder / "with_ctc"
            changes = (f"training.output_dir={model}", "model.add_ctc=true", "training.max_steps=2")
            run("train", "--config", self.run_file, *changes)
        elif self.family.target == PROMPT:
            run("evaluate", "--model", model, "--data", self.manifest, "--head", "ctc", expect=(2,))
            raise RefusedError
        run("evaluate", "--model", model, "--data", self.manifest, "--bootstrap", "0", "--head", "ctc")
        run("transcribe", "--model", model, self.folder.parent / "0.flac", "--timestamps", "--head", "ctc")

    def transcribe(self) -> None:
        run("transcribe", "--model", self.archive, self.folder.parent / "0.flac", "--timestamps")

    def streaming(self) -> None:
        """Chunk by chunk, where the family is made for it; the others are told so."""
        look_ahead = STREAMING_OF.get(self.name)
        model = ("--model", self.run_folder, "--look-ahead", look_ahead or "1")
        clips = ("--data", self.manifest, "--bootstrap", "0", "--json", self.folder / "streaming.json")
        if look_ahead is None:
            try:
                run("evaluate", *model, *clips)
            except CommandError as error:
                if "is no streaming model" in str(error):
                    raise RefusedError from error
                raise
            raise AssertionError("it is streamed")
        run("evaluate", *model, *clips)
        found = json.loads((self.folder / "streaming.json").read_text())["streaming"]
        assert [row["look_ahead"] for row in found] == look_ahead.split(",")
        run("transcribe", *model[:3], look_ahead.split(",")[0], "--streaming", self.folder.parent / "0.flac")

    def languages(self) -> None:
        """--language of a prompt model; the others are told that they take none."""
        expect = (0,) if self.family.target == PROMPT else (2,)
        clips = ("--data", self.manifest, "--bootstrap", "0")
        run("evaluate", "--model", self.run_folder, *clips, "--language", "auto", expect=expect)
        run("transcribe", "--model", self.run_folder, self.folder.parent / "0.flac", "--language", "de", expect=expect)
        if self.family.target != PROMPT:
            raise RefusedError
        run("evaluate", "--model", self.run_folder, *clips, "--language", "xx", expect=(2,))

    def nemo(self) -> None:
        """Plain NeMo restores what was trained, with the published settings."""
        from nemo.core.classes.common import import_class_by_path

        model: Any = import_class_by_path(self.family.target).restore_from(
            str(self.run_folder / "model.nemo"), map_location="cpu"
        )
        assert type(model).__name__ == self.family.target.rpartition(".")[2]
        published = import_class_by_path(self.family.target).restore_from(str(self.archive), return_config=True)
        assert model.cfg.encoder == published.encoder, "the encoder's settings differ"

    def to_hugging_face(self) -> None:
        """With both heads of a hybrid model, where its encoder has a class for both."""
        self.export("hf")
        if self.family.target == HYBRID and not self.family.settings.get("encoder.causal_downsampling"):
            self.export("hf_ctc", "--head", "ctc")

    def export(self, folder: str, *options: str) -> None:
        arguments = ["--model", self.archive, "--to", "hf", "--output", self.folder / folder, "--data", self.manifest]
        try:
            run("export", *arguments, *options)
        except CommandError as error:
            reasons, refused, _ = str(error).partition(" Nothing was written. --to nemo keeps")
            if not refused:
                raise
            raise NotInTransformersError(reasons.rpartition("as transformers' ")[2]) from error

    def from_hugging_face(self) -> None:
        if not (self.folder / "hf").is_dir():
            raise NotInTransformersError("see to_hugging_face")
        for folder in self.folder.glob("hf*"):
            run("evaluate", "--model", folder, "--data", self.manifest, "--bootstrap", "0")


CELLS: tuple[Callable[[Check], None], ...] = (
    Check.plan,
    Check.dry_run,
    Check.train,
    Check.resume,
    Check.evaluate,
    Check.other_heads,
    Check.transcribe,
    Check.streaming,
    Check.languages,
    Check.nemo,
    Check.to_hugging_face,
    Check.from_hugging_face,
)


class CommandError(Exception):
    """A command ended with an exit code that is not expected; its message."""


class RefusedError(Exception):
    """The family has no such thing, and the command says so."""


class NotInTransformersError(Exception):
    """No class of transformers expresses the model; the reasons."""


def run(command: str, *arguments: str | Path, expect: tuple[int, ...] = (0,)) -> str:
    """Run a command of the project in this process; return what it prints.

    Raises:
        CommandError: with the last lines of standard error.
    """
    module = importlib.import_module(f"finetune.{command}")
    printed, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
        code = module.main([str(argument) for argument in arguments])
    reset_process()
    if code not in expect:
        lines = [line for line in (errors.getvalue() or printed.getvalue()).splitlines() if line.strip()]
        raise CommandError(" ".join(line.strip() for line in lines[-3:]))
    return printed.getvalue()


def reset_process() -> None:
    """Forget what Accelerate keeps for a whole process."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def check_family(name: str, folder: Path, manifest: Path) -> dict[str, str]:
    """Return the result of each cell."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        check = Check(name, folder, manifest)
    except Exception as error:
        traceback.print_exc()
        return {"build": f"{type(error).__name__}: {error}"}
    results = {}
    for cell in CELLS:
        try:
            cell(check)
            results[cell.__name__] = "yes"
        except RefusedError:
            results[cell.__name__] = "refused"
        except NotInTransformersError as error:
            results[cell.__name__] = f"not in transformers: {error}"
        except Exception as error:
            results[cell.__name__] = str(error) if isinstance(error, CommandError) else repr(error)
        print(f"{name} {cell.__name__}: {results[cell.__name__][:300]}", flush=True)
    return results


def record(results: dict[str, dict[str, str]]) -> dict[str, Any]:
    """Return what --json writes: results by family and cell, with the versions they hold for."""
    return {
        "date": date.today().isoformat(),
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in ("nemo_toolkit", "transformers", "torch")},
        "command": "python scripts/models/check_models.py --folder DIR --json FILE",
        "families": {name: {"published": FAMILIES[name].published, "cells": cells} for name, cells in results.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", help=f"comma-separated, of {', '.join(FAMILIES)} (default: all)")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    from finetune.models.nemo import import_nemo

    import_nemo()
    manifest = sample(arguments.folder)
    names = arguments.families.split(",") if arguments.families else list(FAMILIES)
    results: dict[str, dict[str, str]] = {}
    for name in names:
        results[name] = check_family(name, arguments.folder / name, manifest)
        if arguments.json:
            arguments.json.write_text(json.dumps(record(results), indent=2) + "\n", encoding="utf-8")
    return int(not all(result.startswith(PASSED) for cells in results.values() for result in cells.values()))


if __name__ == "__main__":
    sys.exit(main())
