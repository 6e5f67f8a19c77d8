"""The table of scripts/cluster/two_machines.sh: losses against one machine's, and how the cut network ended.

    python scripts/cluster/two_machines_table.py WORK

Ends with 1 where a loss is further off than rounding, or a rank did not end as it should. RESULTS names a file for the
table as JSON.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

ROUNDING = 1e-5
"""Relative difference of a loss: two sums of the same numbers in another order."""
MINUTE = 60


def losses(run: Path) -> dict[int, float]:
    """By step."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return {row["step"]: row["loss"] for row in map(json.loads, lines)}


def largest_difference(run: Path, one: Path) -> float:
    """Of the losses, relative; infinite where a step is missing."""
    ours, theirs = losses(run), losses(one)
    if ours.keys() != theirs.keys():
        return float("inf")
    return max(abs(ours[step] - loss) / abs(loss) for step, loss in theirs.items())


def main(work: Path) -> int:
    """Makes the table; returns the exit code."""
    notes: dict[str, dict[str, Any]] = {}
    for line in (work / "notes").read_text(encoding="utf-8").splitlines():
        name, key, value = line.split(" ", 2) if line.count(" ") > 1 else (*line.split(" ", 1), "")
        notes.setdefault(name, {})[key.strip()] = int(value) if value.strip().isdigit() else value
    rows, wrong = [], []
    for name in ("torchrun", "accelerate", "cut", "elastic"):
        run = work / name
        if not run.is_dir():
            continue
        told = json.loads((run / "summary.json").read_text(encoding="utf-8"))
        row = {
            "run": name,
            "steps": told["steps"],
            "processes_at_the_end": told["world_size"],
            "resumed_from": told["resumed_from"],
        }
        if name != "elastic":  # with half the processes a step holds half the clips
            row["largest_relative_difference_of_a_loss"] = largest_difference(run, work / "one")
            if row["largest_relative_difference_of_a_loss"] > ROUNDING:
                wrong.append(f"{name}: a loss differs by {row['largest_relative_difference_of_a_loss']:.2g}")
        row.update(notes.get(name, {}))
        if name == "cut":
            if row["survivor_seconds"] > MINUTE:
                wrong.append(f"cut: the survivor ended after {row['survivor_seconds']} s")
            if "rank 1 on host machine-b" not in row["survivor_message"]:
                wrong.append("cut: the survivor does not name the lost rank and host")
            if "rank 0 on host machine-a" not in row["other_message"]:
                wrong.append("cut: the machine that was cut off does not name the rank that it lost")
        if name == "elastic" and (row["survivor_code"] != 0 or row["processes_at_the_end"] != 1):
            wrong.append("elastic: the survivor did not go on alone")
        rows.append(row)
    table = {"steps": len(losses(work / "one")), "runs": rows, "wrong": wrong}
    text = json.dumps(table, indent=2)
    print(text)
    if os.environ.get("RESULTS"):
        Path(os.environ["RESULTS"]).write_text(text + "\n", encoding="utf-8")
    for line in wrong:
        print(f"two_machines: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
