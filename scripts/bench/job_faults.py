"""A job over many clips whose workers and driver are killed again and again: is a clip lost, or twice?

    python scripts/bench/job_faults.py [--clips 100000] [--worker-kills 20] [--driver-kills 4] [--json FILE]

The worker is light: it returns the text of a manifest's row, without model or audio. Kills come at numbers of shards
that are drawn from a seed. Memory is the driver's (resident), at each kill of a worker.
"""

import argparse
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from finetune.durable_files import write_json

SECONDS_BETWEEN_LOOKS = 0.02


def drive(folder: Path) -> None:
    """Run the job to its end, with two workers."""
    from job_workers import make_job  # pyright: ignore[reportMissingImports]

    from finetune.tools.jobs.engines import EngineSettings
    from finetune.tools.jobs.running import run_job

    run_job(make_job(folder, clips_a_shard=1000), EngineSettings(workers=2))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clips", type=int, default=100_000)
    parser.add_argument("--worker-kills", type=int, default=20)
    parser.add_argument("--driver-kills", type=int, default=4)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--drive", type=Path, help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.drive:
        drive(a.drive)
        return 0
    command = [sys.executable, __file__]
    with tempfile.TemporaryDirectory() as name:
        folder, started = Path(name), time.monotonic()
        with (folder / "manifest.jsonl").open("w") as file:
            for i in range(a.clips):
                file.write(json.dumps({"audio_filepath": f"{i}.wav", "id": f"clip{i}", "text": f"text {i}"}) + "\n")
        kinds = ["worker"] * a.worker_kills + ["driver"] * a.driver_kills
        draw = random.Random(0)
        draw.shuffle(kinds)
        points = sorted(draw.sample(range(1, a.clips // 1000), len(kinds)))
        shards, done, memory, starts = folder / "out" / "shards", Counter(), [], 1
        driver = subprocess.Popen([*command, "--drive", str(folder)])
        for point, kind in zip(points, kinds, strict=True):
            while driver.poll() is None and len([*shards.glob("*.jsonl")]) < point:
                time.sleep(SECONDS_BETWEEN_LOOKS)
            if driver.poll() is not None:
                break  # it has ended before: fewer kills than were asked for, which the result says
            process = psutil.Process(driver.pid)
            if kind == "driver":
                driver.kill()
                driver.wait()
                driver, starts = subprocess.Popen([*command, "--drive", str(folder)]), starts + 1
            else:
                memory.append(process.memory_info().rss / 1e6)
                children = [c for c in process.children() if "spawn_main" in " ".join(c.cmdline())]
                if not children:
                    continue
                os.kill(draw.choice(children).pid, signal.SIGKILL)
            done[kind] += 1
        code = driver.wait()
        found = Counter(json.loads(line)["id"] for file in shards.glob("*.jsonl") for line in file.open())
        failed = [json.loads(line) for line in (folder / "out" / "failed.jsonl").open()]
    lost = sum(f"clip{i}" not in found for i in range(a.clips)) - len(failed)
    result = {
        "clips": a.clips,
        "worker": "light: without model and audio",
        "exit_code": code,
        "kills": dict(done),
        "starts_of_the_driver": starts,
        "lost": lost,
        "twice": sum(n > 1 for n in found.values()),
        "noted_as_failed": len(failed),
        "driver_memory_mb": [round(value, 1) for value in memory],
        "seconds": round(time.monotonic() - started, 1),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "date": datetime.now(UTC).date().isoformat(),
        "command": "python scripts/bench/job_faults.py " + " ".join(sys.argv[1:]),
    }
    print(json.dumps(result, indent=1))
    if a.json:
        write_json(a.json, result)
    return int(bool(code or lost or result["twice"]))


if __name__ == "__main__":
    sys.exit(main())
