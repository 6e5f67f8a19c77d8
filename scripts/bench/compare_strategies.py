"""Runs each memory strategy for a few steps from the same weights on the same clips, and says what it needs and costs.

    python scripts/bench/compare_strategies.py --config RUN.yaml [--strategies adamw,adamw_8bit+gradient_checkpointing]
    python scripts/bench/compare_strategies.py --config RUN.yaml --strategies adamw_8bit --matrix precision,compile
    python scripts/bench/compare_strategies.py --config RUN.yaml --own-batches    # recommended* with their own batches
    python scripts/bench/compare_strategies.py --config RUN.yaml --own-dropout --minutes 7   # go on with another call

Each strategy runs in fresh processes of its own. Memory is the CUDA allocator's peak on a GPU, and on the CPU the
account of the process's tensors (finetune/tools/planning/accounting.py) in one step after the optimizer's states
exist; of several processes that of the first. Seconds a step are the median without the first three steps and the
accounted one. An interrupted comparison goes on where it was: rows lie in --output-dir. results.json there is written
after each row, table.md and strategies.png at the end.

All rows see the same clips in each step: the clips of the run's first steps are written to --output-dir/clips once,
and come in that order to whatever number of processes. The yardstick runs again in the middle and at the end: ratios
of time are to the median of its runs, and the table says how far these lie apart, which is what a difference in time
has to exceed.

Exit codes: 0 done, 1 a strategy that must run on this machine did not, 2 bad arguments.
"""

import argparse
import functools
import hashlib
import itertools
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from datetime import date
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "bench")]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}

import yaml
from compare_strategies_report import picture, spread, table, together  # noqa: F401
from tqdm import tqdm

from finetune.durable_files import write_json
from finetune.errors import UserError
from finetune.paths import ACCELERATE_CONFIGS, OVERLAYS, strategy_names

# Only these may say that they cannot run on a machine without a GPU.
NEEDS_A_GPU = ("cpu_offload_ao", "cpu_offload_gradients_ao", "flash_adamw", "flash_adamw_gradient_release")
SKIPPED_STEPS = 3
OUT_OF_TIME = "not measured yet: the --minutes were over"
# Nothing random, and clips in the order of the data. A limit on the samples, here one beyond all data, makes processes
# share the data out by rows; with one worker a process nothing reorders them.
NO_DROPOUT = "model.dropout=0.0"
SAME_BATCHES = (
    "training.dataloader_num_workers=1",
    "data.max_samples=1000000000",
    "data.shuffle=false",
    "data.group_by_duration=false",
    NO_DROPOUT,
    "model.spec_augment=false",
    "model.freeze_batchnorm=true",
)
AXES = {
    "precision": {
        "fp32": ["training.bf16=false", "model.dtype=float32"],
        "amp": ["training.bf16=true", "model.dtype=float32"],
        "full bf16": ["training.bf16=false", "model.dtype=bfloat16"],
    },
    "compile": {"eager": ["model.compile=false"], "compiled": ["model.compile=true"]},
    "offload": {
        "no offload": [],
        "activations on the host": ["model.activation_offload=true"],
        "32-bit AdamW on the host": ["training.optimizer=cpu_offload_ao", "training.optimizer_args={}"],
    },
    "attention": {
        "NeMo's attention": ["model.scaled_dot_product_attention=false"],
        "SDPA": ["model.scaled_dot_product_attention=true"],
    },
    "tf32": {"no TF32": ["training.tf32=false"], "TF32": ["training.tf32=true"]},
    "loading": {
        "no worker": ["training.dataloader_num_workers=0"],
        "no prefetch": ["training.dataloader_prefetch_factor=1"],
        "prefetch": ["training.dataloader_prefetch_factor=4"],
    },
    "pinning": {
        "pageable": ["training.dataloader_pin_memory=false"],
        "pinned": ["training.dataloader_pin_memory=true"],
    },
}


# ---- one strategy, in a process of its own -------------------------------------------------------------------------


def measure(file: Path, arguments: list[str]) -> int:
    """Run a training under a probe; return its exit code."""
    from step_probe import StepProbe

    from finetune import train

    probes: list[StepProbe] = []
    code = train.main(arguments, observe=lambda trainer: probes.append(StepProbe(trainer, SKIPPED_STEPS)))
    if code == 0:
        probes[0].write(file)
    return code


class Prepared(Exception):
    """The clips are written."""


def prepare(folder: Path, steps: int, arguments: list[str]) -> int:
    """Write the usable clips of a run's first steps as a manifest, in their order; return an exit code."""
    import soundfile

    from finetune import train

    def write(trainer: Any) -> None:
        t = trainer.config.training
        wanted = steps * t.per_device_train_batch_size * t.gradient_accumulation_steps
        rate, lines = trainer.model.preprocessor._sample_rate, []
        while len(lines) < wanted:
            for batch in trainer.stream.batches():
                for i, text in enumerate(batch.texts[: wanted - len(lines)]):
                    name = f"{len(lines):06d}.flac"
                    length = int(batch.audio_lengths_B[i])
                    soundfile.write(folder / name, batch.audio_BS[i, :length].numpy(), rate)
                    row = {"audio_filepath": name, "duration": length / rate, "text": text, "lang": batch.languages[i]}
                    lines.append(json.dumps({**row, "id": batch.ids[i]}))
                if len(lines) >= wanted:
                    break
            if not lines:
                raise trainer.batcher.nothing_left()
            trainer.stream.next_epoch()
        (folder / "clips.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        raise Prepared

    folder.mkdir(parents=True, exist_ok=True)
    try:
        return train.main(arguments, observe=write)
    except Prepared:
        return 0


# ---- all of them ---------------------------------------------------------------------------------------------------


def rows_to_run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One description a row: name, strategies, settings.

    Raises:
        UserError: unknown strategies or axes.
    """
    names = arguments.strategies.split(",") if arguments.strategies else strategy_names()
    unknown = [part for name in names for part in name.split("+") if part not in strategy_names()]
    if unknown:
        raise UserError(f"--strategies: there is no {', '.join(unknown)}. There are: {', '.join(strategy_names())}.")
    axes = arguments.matrix.split(",") if arguments.matrix else []
    if set(axes) - set(AXES):
        raise UserError(f"--matrix takes {', '.join(AXES)}, found {', '.join(sorted(set(axes) - set(AXES)))}.")
    rows = [{"name": arguments.yardstick, "strategies": arguments.yardstick.split("+"), "settings": []}]
    for name in names:
        for cell in itertools.product(*(AXES[axis].items() for axis in axes)):
            label = f"{name} [{', '.join(words for words, _ in cell)}]" if cell else name
            settings = [setting for _, part in cell for setting in part]
            if label != arguments.yardstick:
                rows.append({"name": label, "strategies": name.split("+"), "settings": settings})
    return [*rows[: len(rows) // 2 + 1], {**rows[0], "again": 1}, *rows[len(rows) // 2 + 1 :], {**rows[0], "again": 2}]


def processes_of(strategies: list[str], gpus: int) -> int:
    """Return the processes of a strategy that shares work out: all GPUs, on a CPU two, or the places of a mesh."""
    files = [yaml.safe_load((ACCELERATE_CONFIGS / f"{name}.yaml").read_text()) for name in strategies]
    meshes = [file["parallelism_config"] for file in files if "parallelism_config" in file]
    if meshes:
        return math.prod(int(size) for key, size in meshes[0].items() if key.endswith("_size"))
    if any(file["num_processes"] > 1 for file in files):
        return max(2, gpus)
    return 1


def train_arguments(row: dict[str, Any], arguments: argparse.Namespace, run_dir: Path, processes: int) -> list[str]:
    """Return train.py's command line of a row."""
    same = [] if arguments.own_batches else arguments.batches
    if processes > 1 and same:
        name, size = same[0].split("=")
        same = [f"{name}={int(size) // processes}", *same[1:]]
    fixed = [setting for setting in SAME_BATCHES if setting != NO_DROPOUT or not arguments.own_dropout]
    return [
        "--config", str(arguments.config), *(f"--strategy={name}" for name in row["strategies"]),
        f"training.output_dir={run_dir}", f"training.max_steps={arguments.steps}",
        f"training.warmup_steps={arguments.warmup_steps}", "training.eval_on_start=false", "training.eval_steps=0",
        "training.save_steps=0", "training.logging_steps=1", "data.test=null", "data.guard=null",
        "training.report_to=none", f"data.max_eval_samples={arguments.eval_clips}",
        *arguments.overrides, f"data.train={arguments.clips / 'clips.jsonl'}", *fixed, *same, *row["settings"],
    ]  # fmt: skip


def run_row(row: dict[str, Any], arguments: argparse.Namespace, gpus: int) -> dict[str, Any]:
    """Runs one row in fresh processes; the row with its figures, or with the reason why it cannot run here."""
    processes = processes_of(row["strategies"], gpus)
    if gpus and processes > gpus:
        return {**row, "lacks": True, "reason": f"needs {processes} GPUs, there {'is' if gpus == 1 else 'are'} {gpus}"}
    size = int(arguments.batches[0].split("=")[1])
    if size % processes and not arguments.own_batches:
        return {**row, "reason": f"{size} clips are not shared out evenly over {processes} processes"}
    run_dir = arguments.output_dir / "run"
    shutil.rmtree(run_dir, ignore_errors=True)
    probed = arguments.output_dir / "probe.json"
    probed.unlink(missing_ok=True)
    launch = [sys.executable]
    if processes > 1:
        launch += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command = [
        *launch, str(Path(__file__).resolve()), "--measure", str(probed),
        *train_arguments(row, arguments, run_dir, processes),
    ]  # fmt: skip
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=False)
    row = {**row, "processes": processes, "wall_seconds": time.perf_counter() - started}
    if done.returncode or not probed.is_file():
        said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return {**row, "reason": said[0].removeprefix("error: ") if said else f"exit code {done.returncode}: {last}"}
    summary = json.loads((run_dir / "summary.json").read_text())
    losses = [json.loads(line)["loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    shutil.rmtree(run_dir, ignore_errors=True)
    if None in losses:
        return {**row, "reason": f"loss or gradient not finite in step {losses.index(None) + 1}"}
    seen = json.loads(probed.read_text())
    parts = seen["parts_bytes"]
    peak = seen.get("allocator_peak_bytes", seen["account_peak_bytes"])
    # What the allocator holds beyond the account (workspaces, what compiled code allocates) is temporary.
    parts["activations"] = max(peak - sum(size for part, size in parts.items() if part != "activations"), 0)
    return {
        **row,
        "optimizer": summary["optimizer"],
        "peak_bytes": peak,
        "parts_bytes": parts,
        "optimizer_bytes_per_parameter": summary["optimizer_state_bytes"] / max(summary["trainable_parameters"], 1),
        "trainable_parameters": summary["trainable_parameters"],
        "seconds_per_step": statistics.median(seen["seconds"]),
        "losses": losses,
        "loss": statistics.fmean(losses[-min(5, len(losses)) :]),
        "wer": summary["wer_after"],
        "peak_rss_gib": summary["peak_rss_gib"],
    }


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
    import torch

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return {
        "cpu": next((x.split(":")[1].strip() for x in lines if "model name" in x), ""),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": date.today().isoformat(),
    }


def excused(row: dict[str, Any], where: dict[str, Any]) -> bool:
    """Whether a row may fail on this machine: for want of a GPU, of an FP8 unit, or of the GPU's memory."""
    if row["settings"] and "exclude each other" in row["reason"]:
        return True  # a cell of a matrix may be impossible
    if not where["gpu"]:
        return bool(set(row["strategies"]) & set(NEEDS_A_GPU))
    return "out of memory" in row["reason"] or "compute capability" in row["reason"]


@functools.cache
def code_digest() -> str:
    """Tells this state of the package and of this script from others."""
    files = [*sorted((ROOT / "finetune").rglob("*.py")), Path(__file__).resolve()]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


@functools.cache
def versions() -> str:
    """Versions of what the strategies are made of."""
    names = ("torch", "accelerate", "bitsandbytes", "torchao", "deepspeed", "flashoptim", "peft", "nemo_toolkit")
    return " ".join(f"{name} {metadata.version(name)}" for name in names if find_spec(name.partition("_")[0]))


def file_mark(path: str) -> str:
    """Size and time of a file; its name where it is none."""
    file = Path(path)
    return f"{path} {file.stat().st_size} {file.stat().st_mtime_ns}" if file.is_file() else path


def prepared_clips(arguments: argparse.Namespace) -> Path:
    """The folder of the clips that all rows train on, written by a process of its own where it is not there.

    Raises:
        UserError: the run file does not get as far as its first batches.
    """
    settings = [arguments.config.read_text(encoding="utf-8"), arguments.steps, arguments.overrides, arguments.batches]
    settings += [code_digest(), file_mark(arguments.model)]
    key = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]
    folder = arguments.output_dir / "clips" / key
    if not (folder / "clips.jsonl").is_file():
        run_dir = arguments.output_dir / "run"
        shutil.rmtree(run_dir, ignore_errors=True)
        command = [
            sys.executable, str(Path(__file__).resolve()), "--prepare", str(folder), str(arguments.steps),
            "--config", str(arguments.config),
            f"training.output_dir={run_dir}", "training.report_to=none", "training.bf16=false", "training.max_steps=1",
            *arguments.overrides, *arguments.batches, "data.validation=null", "data.test=null", "data.guard=null",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=False)
        shutil.rmtree(run_dir, ignore_errors=True)
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
            raise UserError(said[0].removeprefix("error: ") if said else done.stderr.strip()[-2000:], exit_code=1)
    return folder


def settings_key(row: dict[str, Any], arguments: argparse.Namespace, where: dict[str, Any]) -> str:
    """Return a hash of what a measured row depends on: settings, code, files, model, versions and machine."""
    files = [arguments.config]
    for name in row["strategies"]:
        files += [ACCELERATE_CONFIGS / f"{name}.yaml", OVERLAYS / f"{name}.yaml", ROOT / "ds_configs" / f"{name}.json"]
    texts = [file.read_text(encoding="utf-8") for file in files if file.is_file()]
    texts += [code_digest(), versions(), file_mark(arguments.model)]
    machine_of = {key: value for key, value in where.items() if key != "date"}
    settings = [arguments.steps, arguments.warmup_steps, arguments.eval_clips, arguments.overrides, arguments.batches]
    which = [row["name"], row.get("again", 0), row["settings"]]
    text = json.dumps([which, settings, arguments.own_batches, arguments.own_dropout, texts, machine_of])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def compare(arguments: argparse.Namespace) -> int:
    """Runs the rows that are missing, writes the results, prints the table; returns the exit code."""
    import torch

    from finetune.config.load import load_config

    config, _ = load_config(arguments.config, [], arguments.overrides)
    t = config.training
    arguments.batches = [
        f"training.per_device_train_batch_size={t.per_device_train_batch_size}",
        f"training.gradient_accumulation_steps={t.gradient_accumulation_steps}",
        f"training.per_device_eval_batch_size={t.per_device_eval_batch_size}",
        f"data.max_duration={config.data.max_duration}",
    ]
    gpus = torch.cuda.device_count()
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    arguments.model = str(config.model.name)
    arguments.clips = prepared_clips(arguments)
    kept_file = arguments.output_dir / "rows.json"
    kept = json.loads(kept_file.read_text()) if kept_file.is_file() else {}
    rows, where, ends = [], machine(), time.monotonic() + 60 * arguments.minutes
    command = "python scripts/bench/compare_strategies.py " + " ".join(sys.argv[1:])
    with tqdm(rows_to_run(arguments), desc="compare", unit="strategy") as bar:
        for row in bar:
            bar.set_postfix_str(row["name"])
            key = settings_key(row, arguments, where)
            if key in kept and "reason" not in kept[key]:  # what failed is tried again
                rows.append(kept[key])
            elif time.monotonic() >= ends:
                rows.append({**row, "date": where["date"], "lacks": True, "reason": OUT_OF_TIME})
            else:
                kept[key] = {**run_row(row, arguments, gpus), "date": where["date"]}
                rows.append(kept[key])
                write_json(kept_file, kept)
            found = {"machine": where, "command": command, "rows": together(rows)}
            write_json(arguments.json or arguments.output_dir / "results.json", found)
    rows = together(rows)
    text = table(rows, where, arguments.steps)
    (arguments.output_dir / "table.md").write_text(text, encoding="utf-8")
    if any("reason" not in r for r in rows):
        picture(rows, where, arguments.output_dir / "strategies.png")
    print(text)
    failed = [r for r in rows if "reason" in r and "lacks" not in r and not excused(r, where)]
    for r in failed:
        print(f"error: {r['name']} has to run on every machine and did not: {r['reason']}", file=sys.stderr)
    return 1 if failed else 0


def main() -> int:
    """Command line."""
    if sys.argv[1:2] == ["--measure"]:
        return measure(Path(sys.argv[2]), sys.argv[3:])
    if sys.argv[1:2] == ["--prepare"]:
        return prepare(Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="run file")
    parser.add_argument("--strategies", help="names with commas between; + combines (default: all)")
    parser.add_argument("--matrix", help=f"axes to cross each strategy with: {','.join(AXES)}")
    parser.add_argument("--yardstick", default="adamw", help="the row that the others are compared with")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps of each row")
    parser.add_argument("--warmup-steps", type=int, default=2)
    parser.add_argument("--eval-clips", type=int, default=32, help="validation clips for the WER column")
    parser.add_argument("--own-batches", action="store_true", help="let strategies that set batch sizes have them")
    parser.add_argument("--own-dropout", action="store_true", help="train with the model's own dropout")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no row after so many")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/compare"))
    parser.add_argument("--json", type=Path, help="results file (default: results.json in --output-dir)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings for all rows")
    arguments = parser.parse_intermixed_args()
    if arguments.steps < SKIPPED_STEPS + 2:
        parser.error(f"--steps has to be {SKIPPED_STEPS + 2} or more: the first ones are not timed")
    try:
        return compare(arguments)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    code = main()
    if sys.argv[1:2] in (["--measure"], ["--prepare"]):
        from finetune.train import leave

        leave(code)
    sys.exit(code)
