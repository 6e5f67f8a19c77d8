"""What scripts/bench/optimizer.py's figures say of each technique, by the rules at its top and beside the claims."""

from __future__ import annotations

import math
import statistics
from typing import Any

MARGIN, SCHEDULE_SHARE = 0.05, 0.01
ALIKE = 1.1  # bytes of state that count as the same
DEFAULT, HAND, FLAT = "adamw", "by hand", "flat"
WHY_NOT_FLAT = "checkpoints, LoRA, frozen layers, 8-bit blocks and sharding need the single tensors"
GAIN, COST = "x", "us"


def verdicts(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one row a technique and claim.

    Keys: section, technique, claim, claimed ((low, high) or None), measured, unit, reached, verdict, because.
    """
    rows = []
    if "step" in found:
        rows += _of_steps(found["step"]["sides"])
    if "clipping" in found:
        rows += _of_clipping(found["clipping"]["sides"])
    if "schedules" in found:
        rows += _of_schedules(found["schedules"]["sides"])
    if "rates" in found:
        rows += _of_rates(found["rates"]["sides"])
    return rows


def _row(
    section: str,
    technique: str,
    claim: str,
    claimed: tuple[float, float] | None,
    measured: float,
    unit: str,
    verdict: tuple[bool, str],
) -> dict[str, Any]:
    reached = None if claimed is None else measured >= claimed[0] if unit == GAIN else measured <= claimed[1]
    return {
        "section": section,
        "technique": technique,
        "claim": claim,
        "claimed": claimed,
        "measured": measured,
        "unit": unit,
        "reached": reached,
        "verdict": "keep" if verdict[0] else "drop",
        "because": verdict[1],
    }


def _keep_step(name: str, sides: dict[str, dict[str, Any]]) -> tuple[bool, str]:
    own, default = sides[name], sides.get(DEFAULT)
    if name == FLAT:
        ratio = own["seconds"] / default["seconds"] if default else math.nan
        return False, f"{ratio:.2f} of the time of {DEFAULT}, of the optimizer's step alone; {WHY_NOT_FLAT}"
    alike = {
        k: max(r["state_bytes"], own["state_bytes"]) / min(r["state_bytes"], own["state_bytes"])
        for k, r in sides.items()
    }
    rivals = [k for k, ratio in alike.items() if k not in (name, FLAT) and ratio <= ALIKE]
    best = min(rivals, key=lambda k: sides[k]["seconds"], default=None)
    if best is not None and sides[best]["seconds"] <= (1 - MARGIN) * own["seconds"]:
        return False, f"{best} takes {sides[best]['seconds'] / own['seconds']:.2f} of its time with the same state"
    if name == DEFAULT or default is None:
        return True, "nothing with the same state takes 5 % less time"
    time, size = own["seconds"] / default["seconds"], own["state_bytes"] / default["state_bytes"]
    gains = time <= 1 - MARGIN or size <= 1 - MARGIN
    return gains, f"{time:.2f} of the time and {size:.2f} of the state of {DEFAULT}"


def _of_steps(sides: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    claims = [  # technique, against, what is compared, claim, range
        ("adamw_loop", "adamw_loop", "seconds", "the slowest", None),
        ("adamw_foreach", "adamw_loop", "seconds", "1.5 to 1.8 times as fast as the loop", (1.5, 1.8)),
        ("adamw", "adamw_loop", "seconds", "2 to 2.5 times as fast as the loop", (2.0, 2.5)),
        ("adamw_compiled", "adamw_foreach", "seconds", "18 to 25 % faster than uncompiled", (1.18, 1.25)),
        ("flat", "adamw", "seconds", "flattened parameters are faster (no figure)", (1.0, float("inf"))),
        ("adamw_8bit", "adamw", "state_bytes", "states 4 times smaller", (4.0, 4.0)),
        ("adamw_8bit", "adamw", "seconds", "training about 5 % slower; here: its step", (1 / 1.05, 1.0)),
        ("adamw_8bit_ao", "adamw", "state_bytes", "none in the sources; its state", None),
        ("adamw_8bit_ao", "adamw", "seconds", "none in the sources; its step", None),
        ("adamw_4bit_ao", "adamw", "state_bytes", "none in the sources; its state", None),
        ("adamw_4bit_ao", "adamw", "seconds", "none in the sources; its step", None),
    ]
    return [
        _row(
            "step",
            f"{name} against {other}, {key.replace('_', ' ')}",
            claim,
            claimed,
            sides[other][key] / sides[name][key],
            GAIN,
            _keep_step(name, sides),
        )
        for name, other, key, claim, claimed in claims
        if name in sides and other in sides
    ]


def _of_clipping(sides: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    fastest = min(sides, key=lambda k: sides[k]["seconds"])
    claims = {"foreach": ("5 to 10 times as fast as the loop", (5.0, 10.0))}
    rows = []
    for name, r in sides.items():
        claim, claimed = claims.get(name, ("none in the sources", None))
        over = r["seconds"] / sides[fastest]["seconds"]
        verdict = (over <= 1 + MARGIN, f"{over:.2f} times the time of {fastest}, the fastest")
        rows.append(
            _row(
                "clipping",
                f"{name} against loop",
                claim,
                claimed,
                sides["loop"]["seconds"] / r["seconds"],
                GAIN,
                verdict,
            )
        )
    return rows


def _of_schedules(sides: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    schedules = {k: r for k, r in sides.items() if k != HAND}
    dearest = max(schedules, key=lambda k: schedules[k]["microseconds"])
    others = statistics.median(r["microseconds"] for k, r in schedules.items() if k != "onecycle")
    rows = []
    for name, r in sides.items():
        claim, claimed = "1 to 1,000 us a step", (1.0, 1000.0)
        if name == "onecycle":
            claim, claimed = "low overhead: no more than the others' median", (0.0, others)
        verdict = (r["share_of_fused_step"] <= SCHEDULE_SHARE, f"{r['share_of_fused_step']:.3%} of a fused step")
        if name == HAND:
            claim, claimed = "no overhead", (0.0, 0.0)
            saved = schedules[dearest]["share_of_fused_step"] - r["share_of_fused_step"]
            verdict = (saved > SCHEDULE_SHARE, f"saves {saved:.3%} of a fused step over {dearest}")
        rows.append(_row("schedules", name, claim, claimed, r["microseconds"], COST, verdict))
    return rows


def _of_rates(sides: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for name, other in (("tensor", "float"), ("float", "tensor")):
        own, its = sides[name], sides[other]
        over = own["later_seconds_median"] / its["later_seconds_median"]
        more = own["compilations"] - its["compilations"]
        because = (
            f"{own['compilations']} compilations against {its['compilations']}; all steps "
            f"{own['total_seconds']:.1f} s against "
            f"{its['total_seconds']:.1f} s, a later one {over:.2f} of its time"
        )
        verdict = (more < 0 or (more == 0 and over <= 1 + MARGIN), because)
        rows.append(
            _row(
                "rates",
                f"rate as {name} against {other}, later step",
                "none in the sources",
                None,
                1 / over,
                GAIN,
                verdict,
            )
        )
    return rows


def print_verdicts(rows: list[dict[str, Any]]) -> None:
    print(f"\n{'technique':44} {'claimed':>13} {'measured':>10} {'reached':>7} {'verdict':>7}  because")
    for r in rows:
        claimed = "-" if r["claimed"] is None else " to ".join(f"{x:g}" for x in sorted(set(r["claimed"])))
        reached = {None: "-", True: "yes", False: "no"}[r["reached"]]
        measured = f"{r['measured']:.2f} {r['unit']}"
        print(f"{r['technique']:44} {claimed:>13} {measured:>10} {reached:>7} {r['verdict']:>7}  {r['because']}")
