"""What exports for onnx-asr and sherpa-onnx keep and save: texts, WER, speed, size, memory, start-up, beside NeMo's.

    python scripts/bench/exports.py --model runs/quickstart [--turns 3] [--json docs/benchmarks/export_cpu.json]
    python scripts/bench/exports.py --layout finetune/configs/models/parakeet_tdt_0.6b_v3.yaml --max-samples 8

With --model: the test and validation clips of examples/voice_prompts, decoded by NeMo and by each export in fresh
processes, in turns, one clip at a time and in batches; and through finetune.transcribe and finetune.evaluate. The gate
holds nothing back here: what it would say is a figure.

With --layout: random weights, with which a joint would emit tokens without end. So the blank, and a duration of two
frames, get a bias: decoding costs a step for every two frames, and there is no text. Size, speed, start-up and the
memory of each step are those of the layout. --json keeps the part that is not measured.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from finetune.durable_files import write_json
from finetune.tools.export.gate.clips import Clips, load_clips
from finetune.tools.export.gate.one_side import memory_bytes
from finetune.tools.export.gate.report import bytes_of, machine
from finetune.tools.export.gate.sides import Request, run_side
from finetune.tools.export.gate.verdict import judge, plain

DATA, SPLITS = "examples/voice_prompts", ("test", "validation")
INT8 = ("int8", "int8_static")
EXPORTS = tuple((to, precision) for to in ("onnx", "sherpa") for precision in ("fp32", *INT8))
HOST_GOAL, SHARE_GOAL, LOSS_GOAL, SPEED_GOAL = 12e9, 0.35, 0.01, 2.0
"""Bytes of memory, share of fp32's bytes, WER as a fraction, times NeMo's speed."""


# ---- steps, each in a process of its own ---------------------------------------------------------------------------


def build(folder: Path, arguments: argparse.Namespace) -> None:
    """Give a layout random weights that say nothing, as a .nemo."""
    import torch

    from finetune.models.loading import load_model
    from finetune.models.nemo_archive import save_nemo

    torch.manual_seed(0)
    model = load_model(arguments.layout, arguments.tokenizer)
    bias, blank = model.joint.joint_net[-1].bias.data, model.tokenizer.vocab_size
    bias[blank] += 1000
    if len(bias) > blank + 1:
        bias[blank + 1 + 2] += 1000
    save_nemo(model, folder / "model.nemo")


def gather(folder: Path, arguments: argparse.Namespace) -> None:
    """Keep the clips of both splits."""
    from finetune.tools.export.gate.gate import gather_clips

    for split in SPLITS:
        gather_clips([DATA], split, 16000, folder / split, max_samples=arguments.max_samples)


def graphs(folder: Path, arguments: argparse.Namespace) -> None:
    """Trace the model for a runtime."""
    from finetune.tools.export.onnx import graphs_of

    own = folder / f"graphs-{arguments.export}"
    own.mkdir(exist_ok=True)
    found = graphs_of(arguments.model, own, arguments.export)
    own.with_suffix(".json").write_text(json.dumps(asdict(found), default=str), encoding="utf-8")


def ranges(folder: Path, arguments: argparse.Namespace) -> None:
    """Measure the ranges of activations for static int8, as the gate does."""
    from finetune.tools.export.gate.gate import gather_clips
    from finetune.tools.export.gated import READ_CLIPS, measure_ranges

    files = json.loads((folder / f"graphs-{arguments.export}.json").read_text(encoding="utf-8"))["files"]
    clips = gather_clips([DATA], "train", 16000, folder / "train", max_samples=READ_CLIPS)
    path = ranges_of(folder, arguments.export)
    path.unlink(missing_ok=True)
    original = Request("nemo", arguments.model, clips.folder, 2)
    measure_ranges(original, clips, Path(files.get("encoder") or files["model"]), path)


def ranges_of(folder: Path, to: str) -> Path:
    return folder / f"ranges-{to}.json"


def layout(folder: Path, arguments: argparse.Namespace) -> None:
    """Write one export."""
    from finetune.tools.export.graphs import Graphs
    from finetune.tools.export.layouts import write_layout

    to, precision = arguments.export.split("-")
    static = ranges_of(folder, to) if precision == "int8_static" else None
    values = json.loads((folder / f"graphs-{to}.json").read_text(encoding="utf-8"))
    values["files"] = {part: Path(path) for part, path in values["files"].items()}
    directory = folder / arguments.export
    directory.mkdir(exist_ok=True)
    write_layout(Graphs(**values), directory, to, precision.removesuffix("_static"), ranges=static)


STEPS = {"build": build, "gather": gather, "graphs": graphs, "ranges": ranges, "layout": layout}


def run_step(step: str, folder: Path, arguments: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """Run a step in a fresh process; return its seconds and peak memory."""
    values = {**{k: v for k, v in vars(arguments).items() if k in ("model", "layout", "tokenizer")}, **more}
    words = [word for key, value in values.items() if value is not None for word in (f"--{key}", str(value))]
    words += ["--max-samples", str(arguments.max_samples), "--folder", str(folder), "--step", step]
    began = time.perf_counter()
    done = subprocess.run([sys.executable, __file__, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{step} failed: {done.stderr[-2000:]}")
    peak = int(done.stdout.rsplit("peak ", 1)[1])
    row = {
        "step": " ".join([step, *map(str, more.values())]),
        "seconds": time.perf_counter() - began,
        "peak_bytes": peak,
    }
    print(f"{row['step']}: {row['seconds']:.1f} s, {peak / 1e9:.2f} GB", flush=True)
    return row


def written(folder: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Trace the model for each runtime, and write each export."""
    steps = []
    for to in dict.fromkeys(to for to, _ in arguments.exports):
        steps.append(run_step("graphs", folder, arguments, export=to))
        if (to, "int8_static") in arguments.exports:
            steps.append(run_step("ranges", folder, arguments, export=to))
    return steps + [run_step("layout", folder, arguments, export=f"{to}-{p}") for to, p in arguments.exports]


# ---- measuring -----------------------------------------------------------------------------------------------------


def measure_turns(
    sides: dict[str, Request], turns: int, keep_texts: bool
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, list[str]]]:
    """Run all sides in turns, every other turn backwards; return what each measured, and its texts."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    texts: dict[str, list[str]] = {}
    for turn in range(turns):
        for name in list(sides) if turn % 2 == 0 else list(sides)[::-1]:
            found = run_side(sides[name])
            told = found.pop("texts")
            if keep_texts and texts.setdefault(name, told) != told:
                raise RuntimeError(f"{name} gave other texts in turn {turn + 1}")
            runs[name].append(found)
            print(
                f"turn {turn + 1}, {name}: RTFx {found['rtfx']:.1f}, start {found['start_seconds']:.1f} s", flush=True
            )
    return runs, texts


def summed_up(runs: dict[str, list[dict[str, Any]]], sizes: dict[str, int], yardstick: str) -> list[dict[str, Any]]:
    """Return a row for each side: medians over the turns, and how many times NeMo's speed in the same turn."""
    rows = []
    for name, found in runs.items():
        ratios = [one["rtfx"] / base["rtfx"] for one, base in zip(found, runs[yardstick], strict=True)]
        keys = ("rtfx", "start_seconds", "load_seconds", "loaded_bytes", "peak_bytes", "processor_seconds")
        rows.append(
            {
                "side": name,
                "runtime": found[0]["runtime"],
                "threads": found[0]["threads"],
                "batch": found[0]["batch"],
                **{key: statistics.median(one[key] for one in found) for key in keys},
                "rtfx_by_turn": [one["rtfx"] for one in found],
                "disk_bytes": sizes.get(name),
                "times_nemo": statistics.median(ratios),
                "times_nemo_by_turn": ratios,
            }
        )
    return rows


def print_rows(rows: list[dict[str, Any]]) -> None:
    for r in rows:
        disk = "-" if r["disk_bytes"] is None else f"{r['disk_bytes'] / 1e6:.1f}"
        memory = f"{disk:>7} MB on disk {r['peak_bytes'] / 1e6:7.0f} MB in memory"
        speed = f"RTFx {r['rtfx']:7.1f} {r['times_nemo']:6.2f} x NeMo"
        print(f"{r['side']:24} {speed} {memory} start {r['start_seconds']:5.1f} s")


def sides_of(folder: Path, split: str, model: str, arguments: argparse.Namespace) -> dict[str, Request]:
    """Return NeMo, with single clips and with its batch, and each export."""
    clips, threads = str(folder / split), arguments.threads
    sides = {
        f"NeMo, batch {b}": Request("nemo", model, clips, threads, b) for b in dict.fromkeys((1, arguments.batch))
    }
    for to, precision in arguments.exports:
        directory = str(folder / f"{to}-{precision}")
        for b in dict.fromkeys((1, arguments.batch)):
            sides[f"{to}-{precision}, batch {b}"] = Request("exported", directory, clips, threads, b)
    return sides


def of_model(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure a trained model."""
    from finetune.evaluation.scores import Utterance
    from finetune.models.nemo_archive import archive_of

    folder = arguments.folder
    steps = [run_step("gather", folder, arguments), *written(folder, arguments)]
    archive = archive_of(Path(arguments.model), "--model")
    assert archive is not None
    sizes: dict[str, int] = {}
    found: dict[str, Any] = {"model": arguments.model, "steps": steps, "texts": [], "own_commands": []}
    both: dict[str, dict[str, list[Utterance]]] = {}
    for split in SPLITS:
        sides = sides_of(folder, split, arguments.model, arguments)
        turns = arguments.turns if split == SPLITS[0] else 1
        runs, texts = measure_turns(sides, turns, keep_texts=True)
        clips = load_clips(folder / split)
        for name, request in sides.items():
            sizes[name] = bytes_of(archive if request.kind == "nemo" else Path(request.model))
            told = [Utterance(*row) for row in zip(clips.ids, clips.languages, clips.texts, texts[name], strict=True)]
            both.setdefault(name, {})[split] = told
            equal = sum(plain(a) == plain(b) for a, b in zip(texts[name], texts["NeMo, batch 1"], strict=True))
            found["texts"].append({"side": name, "split": split, "equal_to_nemo": equal, "clips": len(clips)})
            print(f"{name}, {split}: {equal} of {len(clips)} texts are NeMo's", flush=True)
        if split == SPLITS[0]:
            found["sides"] = summed_up(runs, sizes, "NeMo, batch 1")
            found["speed_clips"] = {"split": split, "clips": len(clips), "audio_seconds": clips.seconds}
        for to, precision in arguments.exports:
            found["own_commands"] += own_commands(folder, f"{to}-{precision}", split, clips, texts, arguments)
    found["losses"] = losses(both)
    print_rows(found["sides"])
    return found


def losses(both: dict[str, dict[str, list[Any]]]) -> list[dict[str, Any]]:
    """Compare each export with NeMo, and int8 with fp32, on the clips of both splits."""
    rows = []
    joined = {name: [u for split in SPLITS for u in parts[split]] for name, parts in both.items()}
    for name, utterances in joined.items():
        references = ["NeMo, batch 1"] if name != "NeMo, batch 1" else []
        if "int8" in name and (fp32 := name.replace("int8_static", "fp32").replace("int8", "fp32")) in joined:
            references.append(fp32)
        for other in references:
            verdict = judge(joined[other], utterances, exact=False, max_loss=100 * LOSS_GOAL)
            compared = verdict.comparison or {}
            keys = ("wer_a", "wer_b", "difference", "difference_interval", "p_value", "words")
            rows.append(
                {
                    "side": name,
                    "against": other,
                    "clips": verdict.clips,
                    "other_texts": len(verdict.differing),
                    **{key: compared.get(key) for key in keys},
                    "clips_needed_for_the_goal": verdict.clips_needed,
                    "said": verdict.reason,
                }
            )
            print(f"{name} against {other}: {verdict.reason}", flush=True)
    return rows


def own_commands(
    folder: Path, export: str, split: str, clips: Clips, texts: dict[str, list[str]], arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """Recognise the clips with finetune.transcribe and finetune.evaluate; count texts that are those of the runtime
    alone, and of NeMo."""
    import soundfile

    wavs = folder / f"{split}-wav"
    if not wavs.is_dir():
        wavs.mkdir()
        for i in range(len(clips)):
            soundfile.write(wavs / f"{i:04d}.wav", clips.audio(i), clips.rate, subtype="FLOAT")
    files = [str(wavs / f"{i:04d}.wav") for i in range(len(clips))]
    command = [sys.executable, "-m", "finetune.transcribe", "--model", str(folder / export), "--batch-size", "1"]
    done = subprocess.run([*command, *files], cwd=ROOT, capture_output=True, text=True, check=True)
    heard = {"transcribe": [json.loads(line)["text"] for line in done.stdout.splitlines()]}
    lines = folder / "utterances.jsonl"
    command = [sys.executable, "-m", "finetune.evaluate", "--model", str(folder / export), "--data", DATA]
    more = [
        "--split",
        split,
        "--batch-size",
        "1",
        "--utterances",
        str(lines),
        "--max-samples",
        str(arguments.max_samples),
    ]
    subprocess.run([*command, *more], cwd=ROOT, capture_output=True, check=True)
    rows = {row["id"]: row["hypothesis"] for row in map(json.loads, lines.read_text(encoding="utf-8").splitlines())}
    heard["evaluate"] = [rows[name] for name in clips.ids]
    found = []
    for name, own in heard.items():
        equal = {
            key: sum(plain(a) == plain(b) for a, b in zip(own, texts[side], strict=True))
            for key, side in (("equal_to_runtime", f"{export}, batch 1"), ("equal_to_nemo", "NeMo, batch 1"))
        }
        found.append({"command": name, "export": export, "split": split, "clips": len(clips), **equal})
        print(f"finetune.{name}, {export}, {split}: {equal}", flush=True)
    return found


def of_layout(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure a layout with random weights."""
    folder = arguments.folder
    steps = [run_step("build", folder, arguments), run_step("gather", folder, arguments)]
    arguments.model, name = str(folder / "model.nemo"), arguments.layout
    arguments.layout = None
    steps += written(folder, arguments)
    sides = sides_of(folder, SPLITS[0], arguments.model, arguments)
    runs, _ = measure_turns(sides, arguments.turns, keep_texts=False)
    sizes = {side: bytes_of(Path(request.model)) for side, request in sides.items()}
    rows = summed_up(runs, sizes, "NeMo, batch 1")
    print_rows(rows)
    clips = load_clips(folder / SPLITS[0])
    about = {"split": SPLITS[0], "clips": len(clips), "audio_seconds": clips.seconds}
    return {"layout": name, "steps": steps, "sides": rows, "speed_clips": about}


def goals(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return each goal with its figure and whether it is met."""
    rows: list[dict[str, Any]] = []

    def add(goal: str, figure: Any, met: bool) -> None:
        rows.append({"goal": goal, "figure": figure, "met": met})
        print(f"{'met    ' if met else 'NOT met'}  {goal}: {figure}")

    if part := found.get("model"):
        size = {r["side"]: r["disk_bytes"] for r in part["sides"]}
        speed = {r["side"]: r["rtfx"] for r in part["sides"]}
        fastest = max(rtfx for side, rtfx in speed.items() if side.startswith("NeMo"))
        present = [name for name in ("onnx", "sherpa") if f"{name}-fp32, batch 1" in speed]
        for to in present:
            equal = [r for r in part["texts"] if r["side"] == f"{to}-fp32, batch 1"]
            told = sum(r["equal_to_nemo"] for r in equal), sum(r["clips"] for r in equal)
            add(f"fp32 in {to}: texts as NeMo's", f"{told[0]} of {told[1]}", told[0] == told[1])
        own = [r for r in part["own_commands"] if r["export"] == "onnx-fp32"]
        told = sum(r["equal_to_nemo"] for r in own), sum(r["clips"] for r in own)
        add("fp32 through transcribe and evaluate: texts as NeMo's", f"{told[0]} of {told[1]}", told[0] == told[1])
        for to, int8 in [(to, p) for to in present for p in INT8 if f"{to}-{p}, batch 1" in speed]:
            share = size[f"{to}-{int8}, batch 1"] / size[f"{to}-fp32, batch 1"]
            add(f"{int8} in {to}: share of fp32's bytes, at most {SHARE_GOAL}", round(share, 3), share <= SHARE_GOAL)
            [loss] = [
                r
                for r in part["losses"]
                if r["side"] == f"{to}-{int8}, batch 1" and r["against"] == f"{to}-fp32, batch 1"
            ]
            low, high = loss["difference_interval"]
            told = f"{100 * loss['difference']:+.2f} [{100 * low:+.2f}, {100 * high:+.2f}] points"
            add(f"{int8} in {to}: WER against fp32, upper end at most +1 point", told, high <= LOSS_GOAL)
            times = speed[f"{to}-{int8}, batch 1"] / fastest
            add(f"{int8} in {to}: times the speed of NeMo's faster way", round(times, 2), times >= SPEED_GOAL)
    if part := found.get("layout"):
        peak = max([s["peak_bytes"] for s in part["steps"]] + [r["peak_bytes"] for r in part["sides"]])
        add("0.6 B: host memory of any step below 12 GB", f"{peak / 1e9:.2f} GB", peak < HOST_GOAL)
    return rows


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a trained model: a run's directory or a .nemo file")
    parser.add_argument("--layout", help="a NeMo model YAML, measured with random weights")
    parser.add_argument("--tokenizer", help="its tokenizer's directory")
    parser.add_argument("--exports", nargs="+", default=["-".join(pair) for pair in EXPORTS], help="such as onnx-int8")
    parser.add_argument("--turns", type=int, default=3, help="of the test clips; each in fresh processes")
    parser.add_argument("--batch", type=int, default=8, help="clips decoded together, beside one at a time")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-samples", type=int, default=-1, help="only the first N clips of each split")
    parser.add_argument("--folder", type=Path, default=Path("runs/bench_exports"))
    parser.add_argument("--note", help="kept with the figures, such as what else the machine did")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    parser.add_argument("--export", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.folder = arguments.folder.resolve()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if arguments.step:
        STEPS[arguments.step](arguments.folder, arguments)
        print(f"peak {memory_bytes('VmHWM')}")
        return 0
    if (arguments.model is None) == (arguments.layout is None):
        parser.error("give --model or --layout")
    arguments.exports = [tuple(name.split("-")) for name in arguments.exports]
    part = "model" if arguments.model else "layout"
    about = {"command": "python scripts/bench/exports.py " + " ".join(sys.argv[1:]), "machine": machine()}
    about |= {"note": arguments.note} if arguments.note else {}
    measured = {**about, **(of_model if arguments.model else of_layout)(arguments)}
    found = json.loads(arguments.json.read_text()) if arguments.json and arguments.json.is_file() else {}
    found[part] = measured
    found["goals"] = goals(found)
    if arguments.json:
        write_json(arguments.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
