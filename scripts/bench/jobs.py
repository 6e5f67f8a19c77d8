"""What a second worker brings to a job, what Ray costs, and whether kills lose clips: on clips of 5 s.

    python scripts/bench/jobs.py speed [--clips 4608] [--rounds 3] [--json FILE]
    python scripts/bench/jobs.py faults [--clips 100000] [--json FILE]

speed: each round does the same job with the local engine and one worker, two workers, and with Ray and two workers, in
turns. The rate is that of the last two thirds of the shards, without the start of processes, cluster and models.
Workers recognise, with one thread each.

faults: a light worker decodes each clip and returns its level. At each twentieth of the shards a worker is killed, at
10, 20 and 30 % the process that runs the job, which is started again.
"""

import argparse
import importlib.metadata
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from finetune.durable_files import write_json

if TYPE_CHECKING:
    from finetune.tools.jobs.clips import Clips
    from finetune.tools.jobs.work import MakeWorker, Result

WAYS = {"local 1": ("local", 1), "local 2": ("local", 2), "ray 2": ("ray", 2)}
RATIOS = (("two workers / one", "local 2", "local 1"), ("Ray / local", "ray 2", "local 2"))
RATE, SECONDS = 16_000, 5
RECORDINGS = 150


class Light:
    """Decode the clips; return the level of each."""

    def process(self, clips: "Clips") -> "Iterator[Result]":
        from finetune.data.batching import BatchLimits
        from finetune.data.decode import as_float
        from finetune.data.options import StreamOptions
        from finetune.data.utterances import no_tokens

        options = StreamOptions(BatchLimits(clips=16), RATE, shuffle=False, keep_empty_text=True)
        for batch, entries in clips.batches(options, no_tokens):
            levels_B = as_float(batch.audio_BS).square().mean(1).sqrt().tolist()
            for entry, level in zip(entries, levels_B, strict=True):
                yield {"id": entry.id, "source": entry.place, "level": level, "duration": entry.seconds}


def make_data(folder: Path, clips: int) -> Path:
    """Lay the voice prompts in a row, cut them into recordings of 5 s, and write a manifest of so many clips."""
    import numpy as np
    import soundfile
    import torch

    from finetune.data.decode import as_float, decode_audio
    from finetune.data.sources import open_source, parse_sources

    source = open_source(parse_sources(str(ROOT / "examples/voice_prompts"), "--data", "train")[0], "--data")
    rows = (row for shard in source.shards for _, row in shard.read(0))
    sound_S, wanted = np.zeros(0, dtype=np.float32), RATE * SECONDS
    for number in range(RECORDINGS):
        while len(sound_S) < wanted:
            sound_S = np.append(sound_S, as_float(torch.as_tensor(decode_audio(next(rows)["audio"], RATE))))
        soundfile.write(folder / f"{number:03d}.flac", sound_S[:wanted], RATE)
        sound_S = sound_S[wanted:]
    manifest = folder / "manifest.jsonl"
    with manifest.open("w") as file:
        for number in range(clips):
            row = {"id": f"clip{number:06d}", "audio_filepath": f"{number % RECORDINGS:03d}.flac", "text": "text"}
            file.write(json.dumps(row | {"duration": float(SECONDS)}) + "\n")
    return manifest


def run_one(folder: Path, manifest: Path, worker: str, engine: str, workers: int, clips_a_shard: int) -> None:
    """Do the job, or what is missing of it; print clips a second from the first third of the shards on."""
    from finetune.evaluation.dataset import EvaluationSettings, open_sources
    from finetune.tools.evaluation_job import MakeRecogniser
    from finetune.tools.jobs.engines import EngineSettings
    from finetune.tools.jobs.job import Job
    from finetune.tools.jobs.running import run_job

    data = [str(manifest)]
    make: MakeWorker
    if worker == "recogniser":
        make = MakeRecogniser(
            str(ROOT / "examples/base/fastconformer_tdt_3m.nemo"), EvaluationSettings(data=data), None
        )
    else:
        make = Light
    job = Job("bench", folder, {"worker": worker}, open_sources(data, "train"), make, clips_a_shard)
    totals = run_job(job, EngineSettings("ray" if engine == "ray" else "local", workers))
    assert totals.is_whole
    assert not totals.failed
    written = sorted(file.stat().st_mtime for file in job.shard_file(0).parent.iterdir())
    first = len(written) // 3 | 1  # the second of a pair, as the last one is: two workers end shards together
    print((len(written) - 1 - first) * clips_a_shard / max(written[-1] - written[first], 1e-9))


def start(folder: Path, manifest: Path, *words: object) -> "subprocess.Popen[str]":
    command = [sys.executable, __file__, "one", str(folder), str(manifest), *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def speed(a: argparse.Namespace, folder: Path) -> dict[str, Any]:
    manifest = make_data(folder, a.clips)
    found: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(a.rounds):
        for name, (engine, workers) in WAYS.items():
            shutil.rmtree(folder / "job", ignore_errors=True)
            process = start(folder / "job", manifest, "recogniser", engine, workers, a.clips_a_shard)
            out, err = process.communicate()
            if process.returncode:
                sys.exit(err)
            found[name].append(float(out.split()[-1]))
            print(f"{name}: {found[name][-1]:.2f} clips/s", flush=True)
    result: dict[str, Any] = {"clips": a.clips, "clips_a_second": found, "ratios": {}}
    for what, above, below in RATIOS:
        ratios = [x / y for x, y in zip(found[above], found[below], strict=True)]
        result["ratios"][what] = {"median": statistics.median(ratios), "rounds": ratios}
        print(f"{what}: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
    return result


def faults(a: argparse.Namespace, folder: Path) -> dict[str, Any]:
    import psutil

    manifest, out = make_data(folder, a.clips), folder / "job"
    shards = -(-a.clips // a.clips_a_shard)
    marks = [shards * twentieth // 20 for twentieth in range(1, 20)]
    ends_driver = {marks[1], marks[3], marks[5]}
    chance, kills = random.Random(0), {"worker": 0, "driver": 0}
    memory: dict[int, dict[str, float]] = {}
    words = manifest, "light", "local", 2, a.clips_a_shard
    began, driver = time.monotonic(), start(out, *words)
    while driver.poll() is None:
        time.sleep(0.2)
        done = len([*(out / "shards").glob("*.jsonl")])
        try:
            children = psutil.Process(driver.pid).children()
            workers = [child for child in children if "spawn_main" in " ".join(child.cmdline())]
            held = {"driver": [psutil.Process(driver.pid)], "worker": workers}
            tenth = memory.setdefault(10 * done // shards, {})
            for name, processes in held.items():
                mib = max((process.memory_info().rss / 2**20 for process in processes), default=0.0)
                tenth[name] = round(max(mib, tenth.get(name, 0.0)), 1)
        except psutil.NoSuchProcess:
            continue
        if marks and done >= marks[0] and workers:
            if marks.pop(0) in ends_driver:
                driver.kill()
                driver.communicate()
                kills["driver"] += 1
                driver = start(out, *words)
            else:
                chance.choice(workers).kill()
                kills["worker"] += 1
    _, err = driver.communicate()
    if driver.returncode:
        sys.exit(err)
    names = [json.loads(line)["id"] for file in sorted((out / "shards").iterdir()) for line in file.open()]
    wanted = [f"clip{number:06d}" for number in range(a.clips)]
    result = {
        "clips": a.clips,
        "seconds": round(time.monotonic() - began, 1),
        "kills": kills,
        "lost": len(set(wanted) - set(names)),
        "twice": len(names) - len(set(names)),
        "in_order": names == wanted,
        "failed": len((out / "failed.jsonl").read_text().splitlines()),
        "largest_mib_by_tenth": memory,
    }
    print(json.dumps(result, indent=2))
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)
    one = commands.add_parser("one", help=argparse.SUPPRESS)
    for name, kind in (("folder", Path), ("manifest", Path), ("worker", str), ("engine", str), ("workers", int)):
        one.add_argument(name, type=kind)
    one.add_argument("clips_a_shard", type=int)
    for name, clips, a_shard in (("speed", 4608, 64), ("faults", 100_000, 1000)):
        own = commands.add_parser(name)
        own.add_argument("--clips", type=int, default=clips)
        own.add_argument("--clips-a-shard", type=int, default=a_shard)
        own.add_argument("--json", type=Path, help="its result is added there")
        if name == "speed":
            own.add_argument("--rounds", type=int, default=3)
    a = parser.parse_args()
    if a.what == "one":
        run_one(a.folder, a.manifest, a.worker, a.engine, a.workers, a.clips_a_shard)
        return 0
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        result = (speed if a.what == "speed" else faults)(a, Path(folder))
    if a.json:
        there = json.loads(a.json.read_text()) if a.json.is_file() else {}
        versions = {name: importlib.metadata.version(name) for name in ("torch", "nemo_toolkit", "ray")}
        head = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "cores": os.cpu_count(), **versions}
        result = {"command": f"scripts/bench/jobs.py {a.what} --clips {a.clips}", "load_before": load, **result}
        write_json(a.json, {**there, **head, a.what: result})
    return 0


if __name__ == "__main__":
    sys.exit(main())
