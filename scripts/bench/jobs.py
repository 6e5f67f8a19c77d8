"""What a second worker brings to a job, and what Ray costs: an evaluation in shards, with one thread a worker.

    python scripts/bench/jobs.py [--passes 4] [--rounds 3] [--json FILE]

Each round does the same job with the local engine and one worker, two workers, and with Ray and two workers, in turns.
The rate is that of the last two thirds of the shards, without the start of processes, cluster and models; the seconds
until the first shard is written are printed beside it. Ratios: the median of the rounds, and their range.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from finetune.durable_files import write_json

WAYS = {"local 1": ("local", 1), "local 2": ("local", 2), "ray 2": ("ray", 2)}
RATIOS = (("two workers / one", "local 2", "local 1"), ("Ray / local", "ray 2", "local 2"))


def measure(
    folder: Path, data: list[str], model: str, way: tuple[str, int], clips_a_shard: int
) -> tuple[float, float]:
    """Return clips a second from the first shard to the last, and the seconds before."""
    from finetune.evaluation.dataset import EvaluationSettings, open_sources
    from finetune.tools.evaluation_job import MakeRecogniser
    from finetune.tools.jobs.engines import EngineSettings
    from finetune.tools.jobs.job import Job
    from finetune.tools.jobs.running import run_job

    shutil.rmtree(folder, ignore_errors=True)
    settings = EvaluationSettings(data=data)
    job = Job("bench", folder, {}, open_sources(data, "train"), MakeRecogniser(model, settings, None), clips_a_shard)
    started = time.time()
    totals = run_job(job, EngineSettings(*way))
    assert totals.is_whole
    assert not totals.failed
    written = sorted(
        (file.stat().st_mtime, len(file.read_bytes().splitlines())) for file in job.shard_file(0).parent.iterdir()
    )
    first = len(written) // 3
    rate = sum(clips for _, clips in written[first + 1 :]) / (written[-1][0] - written[first][0])
    return rate, written[0][0] - started


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "examples/base/fastconformer_tdt_3m.nemo"))
    parser.add_argument("--data", default=str(ROOT / "examples/voice_prompts"))
    parser.add_argument("--passes", type=int, default=4, help="over the data, in one job (default: 4)")
    parser.add_argument("--clips-a-shard", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    a = parser.parse_args()
    data = [a.data] * a.passes
    if a.one:
        engine, workers, folder = a.one
        print(*measure(Path(folder), data, a.model, (engine, int(workers)), a.clips_a_shard))
        return 0
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(a.rounds):
            for name, (engine, workers) in WAYS.items():
                words = [sys.executable, *sys.argv, "--one", engine, str(workers), f"{folder}/job"]
                out = subprocess.run(words, env=environment, capture_output=True, text=True)
                if out.returncode:
                    sys.exit(out.stderr)
                rate, start = map(float, out.stdout.split()[-2:])
                found[name].append((rate, start))
                print(f"{name}: {rate:.2f} clips/s after {start:.1f} s of start", flush=True)
    result = {"rounds": found, "ratios": {}}
    for what, above, below in RATIOS:
        ratios = [x[0] / y[0] for x, y in zip(found[above], found[below], strict=True)]
        result["ratios"][what] = ratios
        print(f"{what}: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    if a.json:
        write_json(a.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
