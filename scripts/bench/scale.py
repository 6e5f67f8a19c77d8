#!/usr/bin/env python3
"""Measure what grows with data, ranks and steps: slopes of the real code on small data and the small base model.

    python scripts/bench/scale.py [--json FILE] [--cases data,check,overlap,ranks,steps] [--rows 1000,10000]
                                  [--ranks 1,2,4,8]

data   of manifests and parquet files of so many rows: seconds and memory to open them, what is sent to a DataLoader
       worker, the stream's state in a checkpoint (for 1 and for 8 ranks); the quarantine's file and its set in memory.
       Decoding is replaced by 0.1 s of silence.
check  finetune.check: reading short files of 0.2 s, and putting together what was found in all shards.
overlap  looking for 5,000 rows of a validation set in a training set of so many rows, before a run starts.
ranks  processes over gloo on this machine that train examples/base: seconds to the first step, of the exchange of a
       step's counts, and of a checkpoint; its bytes, and those of each rank's part. NeMo is imported once and the
       processes are forked from there.
steps  bytes of a line of metrics.jsonl and of TensorBoard's file, from real runs; size, seconds and memory of
       report.html at 1,000, 10,000 and 100,000 lines (every tenth step) with an evaluation each 500 steps.

Seconds of `data`, `check` and `steps` are CPU time of one process; those of `ranks` are wall time. Slopes are least
squares over the sizes.
"""

import argparse
import io
import itertools
import json
import multiprocessing
import os
import pickle
import resource
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import data as bench_data
import numpy as np
import psutil
import soundfile
import torch
import yaml

from finetune.config.schema import RunConfig
from finetune.data import worker_shards
from finetune.data.batching import BatchLimits
from finetune.data.options import StreamOptions
from finetune.data.sources import open_source, parse_sources
from finetune.data.stream import UtteranceStream
from finetune.training.outputs import LineFile

ROW_GROUP, ROWS_A_FILE = 1000, 50_000
BATCHES = 40  # of 64 clips, before the state is looked at: the buffer is full
CHECKED = (1000, 10_000, 40_000)
LINES = (1000, 10_000, 100_000)
RUNS = (20, 60)  # steps, each logged
HELD = 5000  # rows of an evaluation set
EXCHANGES = 200
TRAINED_STEPS = 4
MODEL = ROOT / "examples" / "base" / "fastconformer_tdt_3m.nemo"


def in_child(measure: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns in a process of its own, whose memory begins as this one's."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        return pool.submit(measure, *arguments).result()


def resident() -> int:
    return psutil.Process().memory_info().rss


def slopes(table: list[dict[str, float]], by: str) -> dict[str, dict[str, float]]:
    """Least squares of each column over `by`: what there is at 0, and what each one more adds."""
    x = np.array([row[by] for row in table], dtype=float)
    found = {}
    for name in table[0]:
        values = np.array([row[name] for row in table], dtype=float)
        if name != by and len(table) > 1:
            slope, start = np.polyfit(x, values, 1)
            found[name] = {"at_0": float(start), f"a_{by}": float(slope)}
    return found


# ---- data ----------------------------------------------------------------------------------------------------------


def write_parquet(folder: Path, rows: int) -> str:
    """Parquet files of so many rows, each with the same 0.1 s of silence; their glob."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = io.BytesIO()
    soundfile.write(file, np.zeros(1600, dtype=np.float32), 16_000, format="FLAC")
    for first in range(0, rows, ROWS_A_FILE):
        count = min(ROWS_A_FILE, rows - first)
        columns = {
            "id": [f"clip-{i:08d}" for i in range(first, first + count)],
            "audio": [{"bytes": file.getvalue(), "path": None}] * count,
            "text": [f"word{i % 500:03d} word{i % 499:03d}" for i in range(first, first + count)],
            "duration": bench_data.lengths(count, seed=first).tolist(),
        }
        pq.write_table(
            pa.table(columns), folder / f"train-{first // ROWS_A_FILE:05d}.parquet", row_group_size=ROW_GROUP
        )
    return str(folder / "*.parquet")


def stream_of(path: str, ranks: int) -> UtteranceStream:
    sources = [open_source(source, "data") for source in parse_sources(path, "data", "train")]
    options = StreamOptions(limits=BatchLimits(clips=64), sample_rate=16_000, seed=1, group_by_duration=True)
    return UtteranceStream(sources, options, bench_data.encode, rank=0, ranks=ranks)


def measure_source(path: str, rows: int) -> dict[str, float]:
    """Opening a source, and its stream."""
    worker_shards.decode_all = bench_data.silence
    before, began = resident(), time.process_time()
    stream = stream_of(path, 1)
    found = {"rows": rows, "open_cpu_seconds": time.process_time() - began, "open_memory_bytes": resident() - before}
    found["shards"] = sum(len(group) for group in stream.sources.groups)
    found["sent_to_a_worker_bytes"] = len(pickle.dumps(stream.sources))
    for ranks in (1, 8):
        stream = stream_of(path, ranks)
        began = time.process_time()
        for number, _ in enumerate(stream.batches()):
            if number == 0:
                found[f"first_batch_cpu_seconds_of_{ranks}"] = time.process_time() - began
            if number == BATCHES:
                break
        began = time.process_time()
        state = json.dumps(stream.state_dict())
        found[f"state_bytes_of_{ranks}"] = len(state)
        found[f"state_cpu_seconds_of_{ranks}"] = time.process_time() - began
    return found


def measure_quarantine(path: Path, rows: int) -> dict[str, float]:
    """A quarantine of so many lines: written, and read back into the set that a continued run keeps."""
    from finetune.tools.report.read import quarantine_reasons

    file = LineFile(path)
    for first in range(0, rows, 1000):  # few at once: memory that was let go would be taken for the set's
        numbers = range(first, first + 1000)
        file.append(
            *(
                {
                    "id": f"speaker-{i % 9999:05d}-chapter-{i:08d}",
                    "source": f"/data/train/shard-{i // 1000:05d}.parquet row {i % 1000}",
                    "reason": f"the text holds characters that the tokenizer does not have: 'ß{i % 7}'",
                }
                for i in numbers
            )
        )
    before, began = resident(), time.process_time()
    found = file.pairs("source", "id", lines=rows)
    seconds, memory = time.process_time() - began, resident() - before
    assert len(found) == rows
    began = time.process_time()
    quarantine_reasons(path)
    told = {"rows": rows, "file_bytes": path.stat().st_size, "set_memory_bytes": memory, "set_cpu_seconds": seconds}
    return {**told, "report_cpu_seconds": time.process_time() - began}


def measure_check(folder: Path, rows: int) -> dict[str, float]:
    """finetune.check of a manifest whose rows name a hundred short files in turn."""
    from finetune import check

    for i in range(100):
        soundfile.write(folder / f"{i}.flac", 0.1 * np.random.default_rng(i).standard_normal(3200), 16_000)
    with (folder / "manifest.jsonl").open("w") as file:
        for i in range(rows):
            row = {
                "audio_filepath": f"{i % 100}.flac",
                "duration": 0.2,
                "text": f"word {i % 997} and {i % 991}",
                "id": str(i),
            }
            file.write(json.dumps(row) + "\n")
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    arguments = [
        "--data",
        str(folder / "manifest.jsonl"),
        "--workers",
        "1",
        "--output-dir",
        str(folder / "check"),
        "--overwrite",
    ]
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        check.main(arguments)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = time.process_time() - began + children.ru_utime + children.ru_stime
    parts = sum(file.stat().st_size for file in (folder / "check").rglob("*") if file.is_file())
    return {"rows": rows, "memory_bytes": used * 1024, "cpu_seconds": seconds, "files_bytes": parts}


def measure_gather(folder: Path, rows: int) -> dict[str, float]:
    """Gather the parts of so many shards as the check does: those of one real shard, each time with new ids."""
    from finetune.tools.data_check import inspection

    measure_check(folder, ROW_GROUP)
    parts = sorted((folder / "check" / "parts").glob("*.json"))
    whole, ids = (
        [json.loads(file.read_text()) for file in parts],
        [np.load(file.with_suffix(".npy")) for file in parts],
    )
    sample = [pair for part in whole for pair in part["sample"]][: inspection.SAMPLED_A_SHARD]
    files, random = [], np.random.default_rng(0)
    for i in range(rows // ROW_GROUP):
        files.append(folder / f"part-{i}.json")
        files[-1].write_text(json.dumps({**whole[0], "rows": ROW_GROUP, "clips": ROW_GROUP, "sample": sample}))
        named = np.concatenate(ids)[:ROW_GROUP].copy()
        named[:, 0] = random.integers(0, np.iinfo(named.dtype).max, len(named), dtype=named.dtype)
        np.save(files[-1].with_suffix(".npy"), named)
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    inspection.gather(files)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"rows": rows, "memory_bytes": used * 1024, "cpu_seconds": time.process_time() - began}


def bench_data_growth(sizes: list[int]) -> dict[str, Any]:
    """Tables and slopes for manifests, parquet, quarantine and check."""
    tables: dict[str, list[dict[str, float]]] = {"manifest": [], "parquet": [], "quarantine": []}
    for rows in sizes:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            bench_data.write_manifest(folder / "m.jsonl", rows)
            tables["manifest"].append(
                {
                    **in_child(measure_source, str(folder / "m.jsonl"), rows),
                    "file_bytes": (folder / "m.jsonl").stat().st_size,
                }
            )
            (folder / "p").mkdir()
            tables["parquet"].append(in_child(measure_source, write_parquet(folder / "p", rows), rows))
            tables["quarantine"].append(in_child(measure_quarantine, folder / "quarantine.jsonl", rows))
        print(json.dumps({name: table[-1] for name, table in tables.items() if table}), flush=True)
    # Memory below 100,000 rows is within the allocator's steps.
    large = {name: [row for row in table if row["rows"] >= 100_000] or table for name, table in tables.items()}
    return {"tables": tables, "slopes": {name: slopes(table, "rows") for name, table in large.items()}}


def bench_check(sizes: list[int]) -> dict[str, Any]:
    """Tables and slopes of the check: reading and decoding, and putting together what was found at its end."""
    tables: dict[str, list[dict[str, float]]] = {"read": [], "gather": []}
    for name, measure, numbers in (("read", measure_check, CHECKED), ("gather", measure_gather, sizes)):
        for rows in (n for n in numbers if n <= max(sizes)):
            with tempfile.TemporaryDirectory() as folder:
                tables[name].append(in_child(measure, Path(folder), rows))
            print(json.dumps({name: tables[name][-1]}), flush=True)
    return {"tables": tables, "slopes": {name: slopes(table, "rows") for name, table in tables.items()}}


def measure_overlap(train: str, held: str, rows: int) -> dict[str, float]:
    """Comparing a training set with an evaluation set, which has the texts of the manifest's first rows."""
    from finetune.data.overlap import find_overlap

    paths = {"train": train, "validation": held}
    config = RunConfig.model_validate(
        {"model": {"name": str(MODEL)}, "data": paths, "training": {"output_dir": "none"}}
    )
    opened = {key: [open_source(s, "data") for s in parse_sources(path, "data", key)] for key, path in paths.items()}
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    found = find_overlap(opened, config, float("inf"))
    seconds, used = time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert found.whole
    assert found.looked == rows
    [one] = found.by_set()
    return {"rows": rows, "cpu_seconds": seconds, "memory_bytes": used * 1024, "same_texts": one["same_texts"]}


def bench_overlap(sizes: list[int]) -> dict[str, Any]:
    """Tables and slopes of the search for evaluation sets in manifests and parquet files."""
    tables: dict[str, list[dict[str, float]]] = {"manifest": [], "parquet": []}
    for rows in sizes:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "p").mkdir()
            (folder / "held").mkdir()
            bench_data.write_manifest(folder / "m.jsonl", rows)
            with (folder / "m.jsonl").open(encoding="utf-8") as file:  # the paths are relative: other audio
                (folder / "held" / "held.jsonl").write_text("".join(itertools.islice(file, HELD)), encoding="utf-8")
            for kind, path in (("manifest", str(folder / "m.jsonl")), ("parquet", write_parquet(folder / "p", rows))):
                tables[kind].append(in_child(measure_overlap, path, str(folder / "held" / "held.jsonl"), rows))
                print(json.dumps({kind: tables[kind][-1]}), flush=True)
    return {"tables": tables, "slopes": {name: slopes(table, "rows") for name, table in tables.items()}}


# ---- ranks ---------------------------------------------------------------------------------------------------------


def run_file(folder: Path, **training: Any) -> Path:
    """A short training of the small base model."""
    audio = str(ROOT / "examples" / "voice_prompts")
    settings = {
        "output_dir": str(folder / "run"),
        "max_steps": TRAINED_STEPS,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-5,
        "eval_on_start": False,
        "eval_steps": 0,
        "save_steps": 0,
        "dataloader_num_workers": 0,
        "num_threads": 1,
        "report_to": "none",
    }
    values = {
        "model": {"name": str(MODEL), "freeze_batchnorm": True},
        "data": {"train": audio, "text_normalization": "basic", "max_duration": 3.0},
        "training": {**settings, **training},
    }
    path = folder / "RUN.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def train_as(rank: int, ranks: int, port: int, engine: str, folder: Path) -> None:
    """Run one rank of a training, which writes its times to RANK.json."""
    from finetune import train
    from finetune.training.callbacks import Callback, StepResult
    from finetune.training.trainer import Trainer

    began, times = time.perf_counter(), SimpleNamespace(first=0.0, exchange=[], save=0.0)
    out = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)
    if ranks > 1:
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        os.environ.update(
            {name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
        )

    class Timer(Callback):
        def __init__(self, trainer: Trainer):
            self.trainer = trainer
            trainer.add_callback(self)

        def on_step_begin(self, step: int) -> None:
            times.first = times.first or time.perf_counter() - began

        def on_step_end(self, result: StepResult) -> None:
            if result.step == TRAINED_STEPS - 1:
                self.trainer.accelerator.wait_for_everyone()
                for _ in range(EXCHANGES):
                    started = time.perf_counter()
                    self.trainer.batcher._gather_counts([0.0] * 11)
                    times.exchange.append(time.perf_counter() - started)
            if result.step == TRAINED_STEPS:
                self.trainer.accelerator.wait_for_everyone()
                started = time.perf_counter()
                self.trainer.save()
                times.save = time.perf_counter() - started

    strategy = ["--strategy", engine] if engine != "none" else []
    code = train.main(["--config", str(folder / "RUN.yaml"), *strategy], Timer)
    (folder / f"{rank}.json").write_text(json.dumps({**vars(times), "code": code}))


def measure_ranks(ranks: int, engine: str) -> dict[str, Any]:
    """Start, exchange and checkpoint of so many processes."""
    with tempfile.TemporaryDirectory() as name, socket.socket() as probe:
        folder = Path(name)
        run_file(folder)
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        children = []
        for rank in range(ranks):
            child = os.fork()
            if child == 0:
                try:
                    train_as(rank, ranks, port, engine, folder)
                finally:
                    os._exit(0)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
        missing = [rank for rank in range(ranks) if not (folder / f"{rank}.json").is_file()]
        if missing:
            raise SystemExit(
                f"{ranks} ranks under {engine}: rank {missing[0]} failed\n"
                f"{(folder / f'{missing[0]}.log').read_text()[-2000:]}"
            )
        told = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
        checkpoint = folder / "run" / "checkpoints" / f"step-{TRAINED_STEPS:08d}"
        files = {
            str(f.relative_to(checkpoint)): f.stat().st_size for f in sorted(checkpoint.rglob("*")) if f.is_file()
        }
    names = (f"_{ranks - 1}.", f"-{ranks - 1}.", f"__{ranks - 1}_")
    of_last = {file: size for file, size in files.items() if any(name in Path(file).name for name in names)}
    return {
        "ranks": ranks,
        "start_up_seconds": max(t["first"] for t in told),
        "exchange_ms": 1000 * statistics.median(max(t["exchange"][i] for t in told) for i in range(EXCHANGES)),
        "save_seconds": max(t["save"] for t in told),
        "checkpoint_bytes": sum(files.values()),
        "files": len(files),
        "bytes_of_the_last_rank": sum(of_last.values()),
        "files_of_the_last_rank": sorted(of_last),
        "load_average": os.getloadavg()[0],
    }


def bench_ranks(numbers: list[int]) -> dict[str, Any]:
    """Tables by engine."""
    from finetune.models.nemo import import_nemo

    torch.set_num_threads(1)
    began = time.perf_counter()
    import_nemo()
    found: dict[str, Any] = {"import_seconds": time.perf_counter() - began, "tables": {"ddp": [], "fsdp2": []}}
    for engine, table in found["tables"].items():
        for ranks in numbers:
            if ranks > 1 or engine == "ddp":
                table.append(measure_ranks(ranks, engine if ranks > 1 else "none"))
                print(json.dumps({engine: table[-1]}), flush=True)
    plain = {
        e: [{k: v for k, v in row.items() if k != "files_of_the_last_rank"} for row in t]
        for e, t in found["tables"].items()
    }
    found["slopes"] = {engine: slopes(table, "ranks") for engine, table in plain.items() if len(table) > 1}
    return found


# ---- steps ---------------------------------------------------------------------------------------------------------


def run_of(steps: int, folder: Path) -> dict[str, Any]:
    """A real run whose every step is logged; what its files hold."""
    from finetune import train

    audio = str(ROOT / "examples" / "voice_prompts")
    path = run_file(folder, max_steps=steps, logging_steps=1, report_to="tensorboard", eval_steps=steps)
    code = train.main(["--config", str(path), f"data.validation={audio}", "data.max_eval_samples=8"])
    run = folder / "run"
    assert code == 0
    files = {"metrics": run / "metrics.jsonl", "evaluations": run / "evaluations.jsonl"}
    told = {name: file.read_text().splitlines() for name, file in files.items()}
    events = sum(file.stat().st_size for file in (run / "logs").rglob("*tfevents*"))
    return {**told, "config": (run / "config.yaml").read_text(), "tensorboard_bytes": events}


def measure_report(folder: Path, told: dict[str, Any], lines: int) -> dict[str, float]:
    """The page of a run with so many lines of metrics.jsonl, each of ten steps."""
    from finetune.tools.report.page import write_run_page

    rows = [json.loads(line) for line in told["metrics"]]
    judged = [json.loads(line) for line in told["evaluations"] if '"model"' not in line]
    (folder / "config.yaml").write_text(told["config"])
    metrics, evaluations = LineFile(folder / "metrics.jsonl"), LineFile(folder / "evaluations.jsonl")
    metrics.append(*({**rows[i % len(rows)], "step": 10 * i + 10} for i in range(lines)))
    evaluations.append(*({**row, "step": step} for step in range(0, 10 * lines + 1, 500) for row in judged))
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    page = write_run_page(folder)
    seconds = time.process_time() - began
    used = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    sizes = {f"{file.path.stem}_bytes": file.path.stat().st_size for file in (metrics, evaluations)}
    return {"lines": lines, "page_bytes": page.stat().st_size, "cpu_seconds": seconds, "memory_bytes": used, **sizes}


def bench_steps() -> dict[str, Any]:
    """Bytes of a logged line, and the page at some numbers of lines."""
    told = []
    for steps in RUNS:
        with tempfile.TemporaryDirectory() as name:
            told.append(in_child(run_of, steps, Path(name)))
    more = RUNS[1] - RUNS[0]
    pages = []
    for lines in LINES:
        with tempfile.TemporaryDirectory() as name:
            pages.append(in_child(measure_report, Path(name), told[1], lines))
        print(json.dumps(pages[-1]), flush=True)
    return {
        "metrics_bytes_a_line": statistics.fmean(len(line.encode()) + 1 for line in told[1]["metrics"]),
        "tensorboard_bytes_a_line": (told[1]["tensorboard_bytes"] - told[0]["tensorboard_bytes"]) / more,
        "lines_an_evaluation": len([line for line in told[1]["evaluations"] if '"model"' not in line]),
        "tables": {"report": pages},
        "slopes": {"report": slopes(pages, "lines")},
    }


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="data,check,overlap,ranks,steps")
    parser.add_argument("--rows", default="1000,10000,100000,1000000", help="sizes of the data sets")
    parser.add_argument("--ranks", default="1,2,4,8", help="numbers of processes")
    parser.add_argument("--json", type=Path, help="results; those of other cases in the file are kept")
    arguments = parser.parse_args()
    rows, ranks = ([int(n) for n in text.split(",")] for text in (arguments.rows, arguments.ranks))
    cases = {
        "data": lambda: bench_data_growth(rows),
        "check": lambda: bench_check(rows),
        "overlap": lambda: bench_overlap(rows),
        "ranks": lambda: bench_ranks(ranks),
        "steps": bench_steps,
    }
    unknown = set(arguments.cases.split(",")) - set(cases)
    if unknown:
        parser.error(f"--cases: {', '.join(sorted(unknown))}: there are {', '.join(cases)}")
    found = json.loads(arguments.json.read_text()) if arguments.json and arguments.json.is_file() else {}
    for name in arguments.cases.split(","):
        about = {"machine": bench_data.machine(), "command": "python scripts/bench/scale.py " + " ".join(sys.argv[1:])}
        found[name] = {**about, **cases[name]()}
        print(json.dumps({name: found[name]["slopes"]}, indent=1), flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
