"""`finetune/train.py --smoke N`: N real steps, the worst batches first, to see whether memory suffices and stays."""

import itertools
import logging
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import stats
from tqdm import tqdm

from finetune.callbacks.defaults import add_step_callbacks
from finetune.callbacks.out_of_memory import MemoryRecovery
from finetune.config.schema import RunConfig
from finetune.data.batch import Batch
from finetune.distributed import gather
from finetune.errors import UserError
from finetune.strategies.strategy import Strategy
from finetune.tools.preflight import auto_batch, trial
from finetune.training import run
from finetune.training.trainer import Trainer

log = logging.getLogger(__name__)

FIRST_PART = 1 / 3  # of the steps: caches fill, and lengths come for the first time
CERTAIN_FROM = 30  # steps
FEWEST_POINTS = 6
PAIRS_OF = 400  # points, whose slopes are compared two by two
NOISES = 3.0
# What counts as a leak: bytes a step, and bytes over the assessed steps. Live tensors are counted exactly; resident
# memory creeps for a while, since small blocks lie scattered among what was freed.
LEAKS = {"tensors": (1000.0, 4096.0), "resident": (2.0**20, 2.0**25)}
LEAKING = {
    "tensors": "live tensors",
    "resident": "the process's resident memory and with it objects that are no tensors",
}
TIGHT = 0.05  # share of the memory that should stay free
MIB, GIB = 2**20, 2**30


def smoke(config: RunConfig, strategy: Strategy, steps: int, observe: Callable[[Trainer], None] | None = None) -> int:
    """Run optimizer steps, log what they need, and write OUTPUT_DIR/smoke.json; a run that is there stays as it is.

    Returns:
        Exit code: 0 memory suffices and stays, 1 it does not, or a loss is not finite.
    """
    settings = trial.trial_config(config, "smoke")
    accelerator = run.build_accelerator(settings, strategy)
    with trial.trial_folder(accelerator, settings):
        sources = run.open_sources(settings)
        auto_batch.set_bounds(accelerator, settings, strategy)
        planned = run.plan_steps(accelerator, settings, sources)
        settings.training.max_steps = planned  # the whole run's schedule, by steps
        model = run.build_model(accelerator, settings, sources)
        trainer = run.build_trainer(accelerator, model, sources, settings, planned)
        recovery = add_step_callbacks(trainer)
        trainer.begin(None)
        if observe is not None:
            observe(trainer)
        run.describe(trainer, strategy)
        worst, survey = trial.worst_batches(trainer)
        log.info("%s", survey)
        if not trial.saw_all(survey):
            log.warning("longer clips may come: up to data.max_duration=%g s", settings.data.max_duration)
        result = {
            "steps": steps,
            "planned_steps": planned,
            "processes": accelerator.num_processes,
            "device": accelerator.device.type,
            "rows_looked_at": survey.looked,
            "longest_clip_seconds": survey.longest,
        }
        rows, problem = take_steps(trainer, strategy, worst, steps)
        result |= report_bounds(trainer, recovery)
        if problem is not None:
            # Other ranks may wait for this one: it writes the result itself, and the launcher ends them.
            found = {"verdict": "bad", "problems": [problem], **result, "by_step": rows}
            path = trial.write_result(config, "smoke", found)
            raise UserError(f"smoke test of {steps} steps: {problem}\nresult: {path}", exit_code=1)
        by_rank = gather(rows)
        gpu, scaled = accelerator.device.type == "cuda", accelerator.scaler is not None
        found = assess_steps(by_rank, gpu=gpu, planned=planned, scaled=scaled)
        if accelerator.is_main_process:
            path = trial.write_result(config, "smoke", {**found, **result, "by_step": by_rank[found["rank"]]})
            log_result(found, steps)
            log.info("result: %s", path)
    accelerator.end_training()
    return 0 if found["verdict"] == "good" else 1


def take_steps(
    trainer: Trainer, strategy: Strategy, worst: dict[str, Batch], steps: int
) -> tuple[list[dict[str, Any]], str | None]:
    """Take steps with the worst batches, each twice, then ordinary ones.

    Returns:
        Bytes, batch and loss of each step of this rank; and what stopped it.
    """
    ordinary = (("ordinary clips", step_batches) for step_batches in trial.ordinary_steps(trainer))
    all_steps = itertools.chain(trial.worst_steps(trainer, worst), ordinary)
    rows: list[dict[str, Any]] = []
    trainer.module.train()
    meter = trial.MemoryMeter(trainer, strategy)
    with tqdm(
        total=steps, desc="smoke", unit="step", leave=False, disable=not trainer.accelerator.is_main_process
    ) as bar:
        for number, (kind, step_batches) in enumerate(itertools.islice(all_steps, steps), 1):
            size = trial.describe_step(trainer.model, step_batches)
            if kind in worst and number <= len(worst):
                log.info("%s: %s", kind, trial.format_batch(size))
            try:
                done, memory = meter.train_on(step_batches)
            except trial.StepDoesNotFit as error:
                return rows, f"step {number} does not fit, with {kind}: {error}"
            except UserError as error:
                return rows, f"step {number}: {error}"
            loss = done.loss if done.skipped is None else None
            rows.append({"step": number, "clips": kind, "loss": loss, "batch": size, **memory})
            bar.update(1)
            bar.set_postfix(mem=f"{(memory['peak_tensors'] or memory['peak_resident']) / GIB:.2f}G", refresh=False)
    return rows, None


def report_bounds(trainer: Trainer, recovery: MemoryRecovery | None) -> dict[str, Any]:
    """Log and return, with training.auto_batch, how often memory ran out and which bounds were halved."""
    if recovery is None:
        return {}
    times, planned, left = trainer.progress.out_of_memory, trainer.config.data.batch_bounds, recovery.bounds
    halved = [
        f"{now:g} in place of {was:g} up to {seconds:g} s"
        for (seconds, was), (_, now) in zip(planned, left, strict=True)
        if now < was
    ]
    if times:
        bounds = ", ".join(halved) or "as planned"
        log.warning("auto batch: memory ran out %d time(s); clips a batch: %s", times, bounds)
    else:
        log.info("auto batch: memory never ran out, the bounds stay as planned")
    return {"out_of_memory": times, "batch_bounds": {"planned": [list(pair) for pair in planned], "now": left}}


def assess_steps(by_rank: list[list[dict[str, Any]]], *, gpu: bool, planned: int, scaled: bool) -> dict[str, Any]:
    """Return peak, growth and headroom, each of the rank where it is worst, and the verdict.

    Args:
        by_rank: rows of `take_steps` of each rank.
        gpu: whether the memory is a GPU's.
        planned: steps of the whole run.
        scaled: whether fp16's loss scaling is on, which finds its scale by first steps that are not finite.
    """
    # Resident memory keeps what the allocator has not returned, and so does not show which step needed it.
    key = "peak_tensors" if by_rank[0][0]["peak_tensors"] is not None else "peak_resident"
    rank = max(range(len(by_rank)), key=lambda r: max(row[key] for row in by_rank[r]))
    peak_row = max(by_rank[rank], key=lambda row: row[key])
    growths = [{"rank": r, **g} for r, rows in enumerate(by_rank) for g in growth_of(rows)]
    growth = max(growths, key=lambda g: (g["leaking"], g["what"] == "tensors", g["mib_per_1000_steps"]))
    headroom = min(headroom_of(rows, gpu, len(by_rank)) for rows in by_rank)
    total = peak_row["total"]
    problems = []
    if headroom < 0:
        problems.append(
            f"memory does not suffice: the peak of step {peak_row['step']} leaves {headroom / GIB:.2f} GiB of the "
            f"{'GPU' if gpu else 'host'}'s {total / GIB:.1f} GiB beside what others hold; lower training."
            "per_device_train_batch_size, or take a strategy that needs less (python -m finetune.plan lists them)"
        )
    if growth["leaking"]:
        rate = growth["mib_per_1000_steps"]
        full = max(headroom, 0) / (rate * MIB / 1000)
        until = f"full after some {full:,.0f} steps" if full < 100 * planned else "far from full in this run"
        grown = f"{LEAKING[growth['what']]} grow by {rate:.1f} MiB per 1,000 steps"
        problems.append(f"leaking: {grown}, {until} ({planned:,} are planned)")
    judged = [row for rows in by_rank for row in rows[len(rows) // 2 if scaled else 0 :]]
    if bad := sorted({row["step"] for row in judged if row["loss"] is None}):
        problems.append(
            f"loss or gradient is not finite in step {', '.join(map(str, bad[:8]))} of {len(by_rank[0])}; lower "
            "training.learning_rate, or look at the clips that the log names"
        )
    return {
        "verdict": "bad" if problems else "good",
        "problems": problems,
        "rank": rank,
        "peak_gib": peak_row[key] / GIB,
        "peak_of": "tensors" if key == "peak_tensors" else "resident",
        "peak_resident_gib": max(row["peak_resident"] for rows in by_rank for row in rows) / GIB,
        "reserved_gib": max(row["reserved"] for row in by_rank[rank]) / GIB if gpu else None,
        "peak_step": peak_row["step"],
        "peak_clips": peak_row["clips"],
        "peak_batch": peak_row["batch"],
        "growth": growth,
        "certain": len(by_rank[0]) >= CERTAIN_FROM,
        "headroom_gib": headroom / GIB,
        "headroom_fraction": headroom / total,
        "total_gib": total / GIB,
        "memory": "GPU" if gpu else "host",
    }


def growth_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the slopes of live tensors and of resident memory over a rank's later steps, and whether they leak."""
    found = []
    later = rows[min(math.ceil(len(rows) * FIRST_PART), len(rows) - 1) :]
    for what, (per_step, overall) in LEAKS.items():
        held = np.array([row[what] for row in later if row[what] is not None], float)
        if not len(held):
            continue
        slope, noise = slope_of(held)
        # Growth that slows down is no leak: the last half has to grow as well.
        leaking = (
            len(held) >= FEWEST_POINTS
            and grows(held, per_step, overall)
            and grows(held[len(held) // 2 :], per_step, overall / 2)
        )
        growth = {"mib_per_1000_steps": 1000 * slope / MIB, "noise_mib": noise / MIB, "judged_steps": len(held)}
        found.append({"what": what, "leaking": leaking, **growth})
    return found


def grows(held: np.ndarray, per_step: float, overall: float) -> bool:
    """Return whether memory grows by more than so many bytes a step and overall, and by more than its noise."""
    slope, noise = slope_of(held)
    return slope > per_step and slope * (len(held) - 1) > max(overall, NOISES * noise)


def slope_of(held: np.ndarray) -> tuple[float, float]:
    """Return the Theil-Sen slope, the median of those between any two points, and the noise (the scaled MAD)."""
    if len(held) < 2:
        return 0.0, 0.0
    x = np.unique(np.linspace(0, len(held) - 1, min(len(held), PAIRS_OF)).astype(int))
    slope = float(np.asarray(stats.theilslopes(held[x], x))[0])
    return slope, 1.4826 * float(stats.median_abs_deviation(held[x] - slope * x))


def headroom_of(rows: list[dict[str, Any]], gpu: bool, processes: int) -> int:
    """Return the bytes that stay free at the peak: of the GPU beside what others hold, or of the host, where all
    processes may peak together."""
    if gpu:
        return min(row["total"] - row["outside"] - row["peak_tensors"] for row in rows)
    return min(row["available"] - processes * (row["peak_resident"] - row["resident"]) for row in rows)


def log_result(v: dict[str, Any], steps: int) -> None:
    """Log what `assess_steps` returned."""
    growth = v["growth"]
    of = "tensors" if v["peak_of"] == "tensors" else "resident memory"
    where = f"step {v['peak_step']}" + (f" on rank {v['rank']}" if v["rank"] else "")
    batch = f"{v['peak_clips']}: {trial.format_batch(v['peak_batch'])}"
    reserved = "" if v["reserved_gib"] is None else f"; {v['reserved_gib']:.2f} GiB reserved by the allocator"
    log.info("peak %s of %s at %s, with %s%s", trial.format_bytes(v["peak_gib"] * GIB), of, where, batch, reserved)
    slope = f"{growth['mib_per_1000_steps']:+.1f} MiB per 1,000 steps of {growth['what']}"
    over = f"the last {growth['judged_steps']} steps"
    judged = "leaking" if growth["leaking"] else "stable"
    if growth["judged_steps"] < FEWEST_POINTS:
        log.info("slope: %s too few to tell", "1 step is" if steps == 1 else f"{steps} steps are")
    elif v["certain"]:
        log.info("slope %s over %s: %s", slope, over, judged)
    else:
        few = f"uncertain: {steps} steps are few; take {CERTAIN_FROM} or more"
        log.info("slope %s over %s: %s (%s)", slope, over, judged, few)
    share = f"{100 * v['headroom_fraction']:.0f} % of the {v['memory']}'s {v['total_gib']:.1f} GiB"
    resident = "" if v["memory"] == "GPU" else f" (resident at most {v['peak_resident_gib']:.2f} GiB a process)"
    log.info("headroom %.1f GiB, %s%s", v["headroom_gib"], share, resident)
    if v["headroom_fraction"] < TIGHT:
        log.warning("that is tight: evaluations, fragments and longer clips may not fit")
    for problem in v["problems"]:
        log.error("%s", problem)
    log.info("smoke test of %d steps: %s", steps, "good" if v["verdict"] == "good" else "BAD")
