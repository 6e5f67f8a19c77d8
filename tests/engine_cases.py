"""Trainings in several processes, which tests of engines, averages and non-finite steps share."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import DETERMINISTIC, ROOT, read_lines
from launching import start

UNSHUFFLED = {"test": None, "shuffle": False, "group_by_duration": False}
STEPS, SAVED = 20, 10
# ZeRO keeps small parameters whole, and does not free what fits; these test models are smaller than its thresholds.
NOTHING_STAYS = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
}


def run_trainings(
    tiny_run: Callable[..., list[str]], folder: Path, first_import: str = "torch", **wanted: tuple[Any, ...]
) -> dict[str, list[dict[str, Any]]]:
    """Run trainings into folder/NAME; return what each rank tells.

    Args:
        wanted: NAME=(processes, *arguments); arguments that are a dictionary are keys of the plan's entry.
    """
    training = {"max_steps": STEPS, "save_steps": 0, "eval_steps": 0, "eval_on_start": False, "save_total_limit": 0}
    # A shorter run goes the same way as the first steps of a longer one.
    training |= {"dataloader_num_workers": 1, "lr_scheduler_type": "constant", "warmup_ratio": 0.0}
    common = tiny_run(model=DETERMINISTIC, data=UNSHUFFLED | {"validation": None}, training=training)
    plan = []
    for name, (processes, *arguments) in wanted.items():
        own = [a for a in arguments if isinstance(a, str)]
        extra = {k: v for a in arguments if isinstance(a, dict) for k, v in a.items()}
        options = [a for a in own if "=" not in a]
        values = [f"training.output_dir={folder / name}", *(a for a in own if "=" in a)]
        plan.append({"name": name, "processes": processes, "arguments": [*common, *options, *values], **extra})
    (folder / "plan.json").write_text(json.dumps(plan))
    done = start(
        [sys.executable, str(ROOT / "tests" / "engine_runs.py"), str(folder / "plan.json"), first_import],
        PYTHONPATH=str(ROOT),
    )
    found = {}
    for entry in plan:
        files = [folder / f"{entry['name']}-{rank}" for rank in range(entry["processes"])]
        logs = "\n".join(f.with_name(f.name + ".log").read_text()[-3000:] for f in files)
        assert f"{entry['name']} {[entry.get('expect', 0)] * entry['processes']}" in done.stdout, logs
        found[entry["name"]] = [json.loads(f.with_name(f.name + ".json").read_text()) for f in files]
        assert [rank["rank"] for rank in found[entry["name"]]] == list(range(entry["processes"]))
        assert all(rank.get("world", entry["processes"]) == entry["processes"] for rank in found[entry["name"]])
    return found


def reference() -> tuple[Any, ...]:
    """One process that sees in two batches what two processes see in one each."""
    return (1, "training.gradient_accumulation_steps=2", "training.dataloader_num_workers=2")


def assert_two_ranks_train_like_one(
    trainings: Callable[..., Any], folder: Path, engine: str, parts: tuple[str, ...], *arguments: str
) -> None:
    """Two ranks under a strategy log what one process does that sees both ranks' clips, to 1e-3 in these parts."""
    trainings(
        "deepspeed" if engine == "zero2" else "torch",
        one=(*reference(), *arguments),
        two=(2, *arguments, "--strategy", engine),
    )
    one, two = (read_lines(folder / run / "metrics.jsonl") for run in ("one", "two"))
    for a, b in zip(one, two, strict=True):
        assert [b[part] for part in parts] == pytest.approx([a[part] for part in parts], rel=1e-3)


def evaluated(manifest: Path) -> list[str]:
    """17 clips: the ranks decode different numbers of batches, so a collective in there would hang."""
    return [f"data.validation={manifest}", "data.max_eval_samples=17", "training.per_device_eval_batch_size=4"]
