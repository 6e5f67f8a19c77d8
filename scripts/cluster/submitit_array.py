"""A job over many clips as an array of Slurm tasks, by submitit (pip install submitit), without Ray.

    python scripts/cluster/submitit_array.py --tasks 32 --logs /shared/logs -- \\
        finetune.evaluate --model /shared/model.nemo --data /shared/test.jsonl --output /shared/evaluation

Task I of N does every N-th shard (--shard I/N) into the same --output. A task that is pre-empted or out of time is put
into the queue again and goes on with what is missing of its part. When all are done, the same command without --shard
puts the parts together. Start it in the repository; it, .venv, model, data and --output have to lie on a file system
that all nodes share.
"""

import argparse
import subprocess
import sys
from pathlib import Path

STOPPED = 75  # asked to stop, what is done is kept


class Part:
    """One task of the array. submitit calls it, and `checkpoint` where the task is pre-empted or out of time."""

    def __call__(self, words: list[str], part: int, parts: int) -> int:
        code = subprocess.run([sys.executable, "-m", *words, "--shard", f"{part}/{parts}"]).returncode
        if code not in (0, STOPPED):
            raise RuntimeError(f"part {part} of {parts} ended with {code}; its log says why")
        return code

    def checkpoint(self, words: list[str], part: int, parts: int) -> object:
        import submitit

        return submitit.helpers.DelayedSubmission(self, words, part, parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, required=True, help="of the array, each with one GPU")
    parser.add_argument("--logs", type=Path, required=True, help="folder of the logs, which all nodes see")
    parser.add_argument("--partition", help="of Slurm")
    parser.add_argument("--hours", type=float, default=24.0, help="of each task (default: 24)")
    parser.add_argument(
        "--cluster", help="slurm, or local: processes on this machine (default: slurm where there is one)"
    )
    parser.add_argument("words", nargs="+", metavar="COMMAND", help="module and arguments, behind --")
    arguments = parser.parse_args()
    import submitit

    executor = submitit.AutoExecutor(folder=arguments.logs, cluster=arguments.cluster)
    executor.update_parameters(
        name="parakeet-job", gpus_per_node=1, cpus_per_task=8, timeout_min=round(60 * arguments.hours)
    )
    if arguments.partition:
        executor.update_parameters(slurm_partition=arguments.partition)
    with executor.batch():
        jobs = [executor.submit(Part(), arguments.words, n, arguments.tasks) for n in range(arguments.tasks)]
    print(f"tasks {jobs[0].job_id} to {jobs[-1].job_id}; waiting for them")
    for job in jobs:
        job.result()
    return subprocess.run([sys.executable, "-m", *arguments.words]).returncode


if __name__ == "__main__":
    sys.exit(main())
