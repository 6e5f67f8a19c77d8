#!/usr/bin/env python3
"""Put the parts of scripts/gpu_check.sh into one JSON file and judge the goals of the 0.6B layout.

    python scripts/gpu/report.py FOLDER_OF_PARTS REPORT.json

A part is NAME.exit (its exit code) with NAME.json (its figures) where it wrote some. The goals are judged once the
part `strategies` is there. Ends with 0 when every part ended well and every goal is met, else with 1.
"""

import json
import sys
from pathlib import Path
from typing import Any

# bf16, 16 clips of 20 s a step: peak of the CUDA allocator in 10^9 bytes, and time a step against plain AdamW's.
MEMORY_GOALS_GB = {"recommended": 11.0, "recommended_small": 7.5}
TIME_GOALS = {"recommended": 1.25}
PREDICTION_GOAL = 0.10  # of finetune.plan's memory, either way


def judge(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each goal with what was found and whether it is met; a row that did not run misses its goals.

    Args:
        rows: of scripts/bench/compare_strategies.py; the yardstick is called adamw.
    """
    by_name = {row["name"]: row for row in rows}
    found = []
    for name, limit in MEMORY_GOALS_GB.items():
        peak = by_name.get(name, {}).get("peak_bytes")
        gigabytes = None if peak is None else peak / 1e9
        found.append({"goal": f"{name}: peak memory, GB", "at_most": limit, "found": gigabytes})
    for name, limit in TIME_GOALS.items():
        own, plain = (by_name.get(x, {}).get("seconds_per_step") for x in (name, "adamw"))
        ratio = None if own is None or plain is None else own / plain
        found.append({"goal": f"{name}: time a step against adamw", "at_most": limit, "found": ratio})
    for row in rows:
        if "predicted_over_measured" in row:
            off = abs(row["predicted_over_measured"] - 1)
            found.append(
                {"goal": f"{row['name']}: predicted memory, share off", "at_most": PREDICTION_GOAL, "found": off}
            )
    for goal in found:
        goal["met"] = goal["found"] is not None and goal["found"] <= goal["at_most"]
    return found


def gather(parts: Path) -> dict[str, Any]:
    """Return the figures and exit codes of all parts, and the goals."""
    report: dict[str, Any] = {}
    for ended in sorted(parts.glob("*.exit")):
        figures = ended.with_suffix(".json")
        report[ended.stem] = {"exit_code": int(ended.read_text())}
        if figures.is_file():
            report[ended.stem] |= json.loads(figures.read_text(encoding="utf-8"))
    seconds = parts / "seconds"
    if seconds.is_file():
        report["wall"] = {"exit_code": 0, "seconds": int(seconds.read_text())}
    return report | {"goals": judge(report["strategies"].get("rows", [])) if "strategies" in report else []}


def main() -> int:
    """Command line."""
    parts, file = (Path(argument) for argument in sys.argv[1:3])
    report = gather(parts)
    file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    goals = report.pop("goals")
    for goal in goals:
        found = "not measured" if goal["found"] is None else f"{goal['found']:.2f}"
        print(f"{goal['goal']}: {found}, at most {goal['at_most']} wanted: {'met' if goal['met'] else 'MISSED'}")
    if "wall" in report:
        print(f"{report['wall']['seconds']} s in all; 8 minutes are what it may take")
    failed = [name for name, part in report.items() if part["exit_code"]]
    failed += ["goals"] if not all(goal["met"] for goal in goals) else []
    print(f"{file} holds all figures; " + (f"FAILED: {', '.join(failed)}" if failed else "every check holds"))
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
