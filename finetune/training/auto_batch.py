"""Batch bounds from the plan (training.auto_batch), confirmed by trying the worst batches before the run begins."""

import logging
import math
from pathlib import Path
from typing import Any

import torch

from finetune.data.stream import Batch
from finetune.errors import UserError
from finetune.models.nemo import learning_batchnorms, set_batchnorm_mode
from finetune.planning import cache
from finetune.planning.engines import engine_of
from finetune.planning.follow import Kind
from finetune.planning.gpus import GIB, card_here
from finetune.planning.layout import read_layout
from finetune.planning.optimizer_memory import RELEASES_GRADIENTS
from finetune.planning.plan import TOKENS_A_SECOND, Data, Predictor, as_json, row_of
from finetune.training import trial
from finetune.training.memory_guard import earlier_limits, say
from finetune.training.outputs import write_json
from finetune.training.stages import agreed

log = logging.getLogger(__name__)

EDGES = (1 / 12, 1 / 8, 1 / 6, 1 / 4, 1 / 3, 1 / 2, 2 / 3, 5 / 6, 1)
"""Of the longest clip, where one bound ends and the next begins."""
MOST_CLIPS = 512
PLAN_FILE = "plan.json"


def set_bounds(accelerator: Any, config: Any, strategy: Any) -> None:
    """Fills `data.batch_bounds` where the run file asks for `training.auto_batch`; a run that goes on keeps what it had.

    Raises:
        UserError: not even one clip fits, or the model's layout is not known before it is loaded.
    """
    t, output_dir = config.training, Path(config.training.output_dir)
    if not t.auto_batch:
        return
    earlier = earlier_limits(output_dir) if t.resume_from_checkpoint else None
    if earlier is not None:
        config.data.batch_bounds = earlier["bounds"]
        log.info("auto batch: bounds of the run that goes on")
        return
    usable = usable_bytes(accelerator, t.memory_limit_gib)
    found = agreed(_planned(accelerator, config, strategy, usable) if accelerator.is_main_process else None)
    if isinstance(found, str):
        raise UserError(found)
    config.data.batch_bounds = found
    log.info(
        "auto batch: clips a batch by length, %s",
        ", ".join(f"{clips:g} up to {seconds:g} s" for seconds, clips in found),
    )


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


def predictor_for(accelerator: Any, config: Any, strategy: Any) -> Predictor:
    """Predicts this run's steps on this machine; follows them first where that was not done before.

    Raises:
        UserError: they cannot be followed.
    """
    t, card = config.training, card_here()
    layout = read_layout(config.model.name, config.model.tokenizer)
    data = Data(config.data.max_duration, config.data.max_duration / 2, None, TOKENS_A_SECOND)
    lengths = [data.longest, 0.6 * data.longest, 0.3 * data.longest]
    precision = "bf16" if t.bf16 else "fp16" if t.fp16 else "no"
    kind = Kind(config.model, precision, t.optimizer in RELEASES_GRADIENTS, card.is_gpu)
    memory = next(iter(cache.follow_all(layout, [kind], lengths, data.tokens_a_second).values()))
    if isinstance(memory, str):
        raise UserError(f"training.auto_batch: a step of this run cannot be followed ({memory}); set it to false.")
    return Predictor(config, engine_of(strategy, accelerator.num_processes), card, data, layout, memory)


def _planned(accelerator: Any, config: Any, strategy: Any, usable: float) -> list[list[float]] | str:
    """Pairs (seconds, clips), or why there are none."""
    try:
        predictor = predictor_for(accelerator, config, strategy)
    except UserError as error:
        return str(error)
    longest = config.data.max_duration
    bounds = []
    for edge in EDGES:
        seconds = math.ceil(10 * edge * longest) / 10
        bounds.append([seconds, min(predictor.most_clips(seconds, usable), MOST_CLIPS)])
    if bounds[-1][1] < 1:
        needed = predictor.peak(1, longest) / GIB
        return (
            f"training.auto_batch: one clip of data.max_duration={longest:g} s needs {needed:.2f} GiB, and {usable / GIB:.2f} can be used. Lower "
            "data.max_duration, or take a strategy that needs less (python -m finetune.plan lists them)."
        )
    row = row_of("+".join(strategy.names) or "run file alone", predictor, "")
    write_json(
        Path(config.training.output_dir) / PLAN_FILE,
        as_json([row], predictor.card, accelerator.num_processes, predictor.data, None, "the run's own prediction"),
    )
    return bounds


def confirm(trainer: Any) -> None:
    """Forward and backward of the worst batches that the bounds allow; where memory runs out the bounds are halved.

    Nothing is learnt: gradients are dropped, random states and BatchNorm's statistics stay.
    """
    guard = trainer.guard
    if guard is None or not guard.steps_back:
        return
    worst, survey = trial.worst_batches(trainer)
    devices = [trainer.accelerator.device] if trainer.accelerator.device.type == "cuda" else []
    kept = [(m.training, m) for m in learning_batchnorms(trainer.model)]
    trainer.module.train()
    with torch.random.fork_rng(devices):
        set_batchnorm_mode(trainer.model, training=False)
        try:
            for name, batch in worst.items():
                _try_batch(trainer, name, batch)
        finally:
            for training, module in kept:
                module.training = training
            trainer.optimizer.zero_grad()
    trainer.progress.out_of_memory = 0
    guard.write()
    log.info("auto batch: the worst batches fit (%d clips looked at)", survey.looked)


def _try_batch(trainer: Any, name: str, batch: Batch) -> None:
    step_input = trial.worst_step(trainer, batch)
    before = [list(pair) for pair in trainer.guard.bounds]
    trainer.guard.gradients(step_input.group, step_input.batches, max(step_input.clips, 1.0), False)
    trainer.optimizer.zero_grad()
    said = say(trainer.guard.describe(batch))
    changed = "" if before == trainer.guard.bounds else ", in smaller pieces"
    log.info("auto batch: %s fit%s: %s", name, changed, said)
