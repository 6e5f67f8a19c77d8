"""Batch bounds from the plan (training.auto_batch), confirmed by trying the worst batches before the run begins."""

import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from finetune.callbacks.memory_recovery import MemoryRecovery, describe_report, earlier_limits
from finetune.data.batch import Batch
from finetune.distributed import broadcast
from finetune.durable_files import write_json
from finetune.errors import UserError
from finetune.models.nemo import learning_batchnorms, set_batchnorm_mode
from finetune.strategies.optimizers import RELEASES_GRADIENTS
from finetune.tools.planning import cache
from finetune.tools.planning.dataset import TOKENS_A_SECOND, Data
from finetune.tools.planning.engines import engine_of
from finetune.tools.planning.follow import Kind
from finetune.tools.planning.gpus import GIB, card_here
from finetune.tools.planning.layout import layout_of
from finetune.tools.planning.optimizer_memory import state_bytes
from finetune.tools.planning.prediction import (
    RUN_FILE,
    Predictor,
    as_json,
    followed_lengths,
    row_of,
)
from finetune.tools.preflight import trial
from finetune.training.trainer import Trainer

log = logging.getLogger(__name__)

EDGES = (1 / 12, 1 / 8, 1 / 6, 1 / 4, 1 / 3, 1 / 2, 2 / 3, 5 / 6, 1)
"""Of the longest clip, where one bound ends and the next begins."""
MOST_CLIPS = 512
PLAN_FILE = "plan.json"


def set_bounds(accelerator: Any, config: Any, strategy: Any) -> dict[str, Any] | None:
    """Fills `data.batch_bounds` where the run file asks for `training.auto_batch`; a run that goes on keeps what it had.

    Returns:
        The run's prediction, as finetune.plan's `--json`; None where none was made.

    Raises:
        UserError: not even one clip fits, or the model's layout is not known before it is loaded.
    """
    t, output_dir = config.training, Path(config.training.output_dir)
    if not t.auto_batch:
        return None
    earlier = earlier_limits(output_dir) if t.resume_from_checkpoint else None
    if earlier is not None:
        config.data.batch_bounds = earlier["bounds"]
        log.info("auto batch: bounds of the run that goes on")
        return None
    usable = usable_bytes(accelerator, t.memory_limit_gib)
    problem, bounds, plan = broadcast(
        _planned(accelerator, config, strategy, usable) if accelerator.is_main_process else None
    )
    if problem:
        raise UserError(problem)
    config.data.batch_bounds = bounds
    log.info(
        "auto batch: clips a batch by length, %s",
        ", ".join(f"{clips:g} up to {seconds:g} s" for seconds, clips in bounds),
    )
    return plan


def usable_bytes(accelerator: Any, limit_gib: float | None) -> float:
    """Bytes that tensors may take on the card that has least."""
    card = card_here()
    usable = card.usable
    if accelerator.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(accelerator.device)
        others = total - free - torch.cuda.memory_reserved(accelerator.device)
        usable = min(usable, 0.95 * (total - max(others, 0)))
    if limit_gib is not None:
        usable = min(usable, limit_gib * GIB)
    if accelerator.num_processes > 1:
        least = torch.tensor([usable], dtype=torch.float64, device=accelerator.device)
        torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN)
        usable = float(least)
        if not card.is_gpu:
            usable = usable if limit_gib is not None else usable / accelerator.num_processes
    return usable


def predictor_for(config: Any, strategy: Any, processes: int, follow: bool = True) -> Predictor | None:
    """Predicts this run's steps on this machine.

    Args:
        follow: follow a step where that was not done before; else None is returned then.

    Raises:
        UserError: it cannot be followed.
    """
    t, card = config.training, card_here()
    layout = layout_of(config)
    data = Data(config.data.max_duration, config.data.max_duration / 2, None, TOKENS_A_SECOND)
    lengths = followed_lengths(data.longest)
    precision = "bf16" if t.bf16 else "fp16" if t.fp16 else "no"
    kind = Kind(config.model, precision, t.optimizer in RELEASES_GRADIENTS, card.is_gpu)
    if not follow and cache.find(cache.key_of(layout, kind, lengths, data.tokens_a_second)) is None:
        return None
    with torch.random.fork_rng([]):  # following makes random weights of its own
        memory = next(iter(cache.follow_all(layout, [kind], lengths, data.tokens_a_second).values()))
    if isinstance(memory, str):
        raise UserError(f"a step of this run cannot be followed: {memory}.")
    predictor = Predictor(config, engine_of(strategy, processes), card, data, layout, memory)
    if t.auto_batch and predictor.engine.name == "ddp":
        # Gradients that are exchanged by hand lie beside DDP's buckets.
        predictor.weights = replace(predictor.weights, gradient_copies=2)
    return predictor


def _planned(
    accelerator: Any, config: Any, strategy: Any, usable: float
) -> tuple[str | None, list[list[float]], dict[str, Any] | None]:
    """What is wrong, or pairs (seconds, clips) and the prediction."""
    try:
        predictor = predictor_for(config, strategy, accelerator.num_processes)
    except UserError as error:
        return f"training.auto_batch: {error} Or set training.auto_batch: false.", [], None
    longest = config.data.max_duration
    bounds = []
    for edge in EDGES:
        seconds = math.ceil(10 * edge * longest) / 10
        bounds.append([seconds, min(predictor.most_clips(seconds, usable), MOST_CLIPS)])
    if bounds[-1][1] < 1:
        needed = predictor.peak(1, longest) / GIB
        return (
            f"training.auto_batch: one clip of data.max_duration={longest:g} s needs {needed:.2f} GiB, and {usable / GIB:.2f} can be used. Lower "
            "data.max_duration, or take a strategy that needs less (python -m finetune.plan lists them).",
            [],
            None,
        )
    predictor.config = config.replaced({"data.batch_bounds": bounds})
    return None, bounds, _as_plan(predictor, strategy, accelerator.num_processes, usable)


def _as_plan(predictor: Predictor, strategy: Any, processes: int, usable: float) -> dict[str, Any]:
    row = row_of("+".join(strategy.names) or RUN_FILE, predictor, "")
    row.fits = row.peak_memory_gib * GIB <= usable
    return as_json([row], predictor.card, processes, predictor.data, None, "the run's own prediction")


def keep_prediction(trainer: Trainer, strategy: Any, plan: dict[str, Any] | None) -> None:
    """Writes plan.json: the prediction that bounds were made by, else one that was followed before; else there is none."""
    if not trainer.accelerator.is_main_process:
        return
    try:
        if plan is None:
            processes = trainer.accelerator.num_processes
            predictor = predictor_for(trainer.config, strategy, processes, follow=False)
            plan = predictor and _as_plan(predictor, strategy, processes, predictor.card.usable)
        if plan is not None:
            write_json(trainer.output_dir / PLAN_FILE, plan)
    except (UserError, OSError) as error:
        log.debug("no prediction: %s", error)


def confirm(trainer: Trainer, recovery: MemoryRecovery | None) -> None:
    """Run forward and backward of the worst batches that the bounds allow; where memory runs out the bounds are halved.

    Nothing is learnt: gradients are dropped; random states, counters and BatchNorm's statistics stay. As much memory as the optimizer's
    states will need is taken meanwhile.

    Args:
        trainer: of the run, before its first step.
        recovery: its callback that halves bounds; None where the run has none.
    """
    if recovery is None:
        return
    if recovery.steps_back:
        _try_worst_batches(trainer, recovery)
    if trainer.accelerator.is_main_process:
        recovery.write()


def _try_worst_batches(trainer: Trainer, recovery: MemoryRecovery) -> None:
    worst, survey = trial.worst_batches(trainer)
    device = trainer.accelerator.device
    progress = trainer.progress.snapshot()
    norms = [(m.training, m) for m in learning_batchnorms(trainer.model)]
    trainer.module.train()
    states = torch.empty(state_bytes_of(trainer), dtype=torch.uint8, device=device)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        set_batchnorm_mode(trainer.model, training=False)
        try:
            for name, batch in worst.items():
                _try_batch(trainer, recovery, name, batch)
        finally:
            del states
            for training, module in norms:
                module.training = training
            trainer.optimizer.zero_grad()
    trainer.progress.restore(progress)
    log.info("auto batch: the worst batches fit (%d clips looked at)", survey.looked)


def state_bytes_of(trainer: Trainer) -> int:
    """Bytes of the optimizer's states on the device, which the first step makes."""
    t = trainer.config.training
    args = dict(t.optimizer_args)
    embeddings = {id(m.weight) for m in trainer.model.modules() if isinstance(m, torch.nn.Embedding)}
    return sum(
        state_bytes(t.optimizer, args, tuple(p.shape), p.dtype, id(p) in embeddings).device
        for p in trainer.model.parameters()
        if p.requires_grad
    )


def _try_batch(trainer: Trainer, recovery: MemoryRecovery, name: str, batch: Batch) -> None:
    before = [list(pair) for pair in recovery.bounds]
    trainer.compute_gradients(trial.worst_step(trainer, batch))
    trainer.optimizer.zero_grad()
    changed = "" if before == recovery.bounds else ", in smaller pieces"
    log.info("auto batch: %s fit%s: %s", name, changed, describe_report(recovery.describe(batch)))
