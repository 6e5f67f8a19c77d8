"""Batch bounds from the plan (training.auto_batch), confirmed by trying the worst batches before the run begins."""

import logging
import math
from dataclasses import asdict, replace
from pathlib import Path

import torch
from accelerate import Accelerator

from finetune.callbacks.out_of_memory import MemoryRecovery, describe_report, earlier_limits
from finetune.config.schema import RunConfig
from finetune.distributed import broadcast
from finetune.durable_files import write_json
from finetune.errors import UserError
from finetune.models.nemo import learning_batchnorms, set_batchnorm_mode
from finetune.strategies.optimizers import RELEASES_GRADIENTS
from finetune.strategies.strategy import Strategy
from finetune.tools.planning import cache
from finetune.tools.planning.dataset import Data
from finetune.tools.planning.engines import engine_of
from finetune.tools.planning.follow import Kind
from finetune.tools.planning.gpus import GIB, card_here
from finetune.tools.planning.layout import Layout, layout_of
from finetune.tools.planning.optimizer_memory import state_bytes
from finetune.tools.planning.prediction import RUN_FILE, Plan, Predictor, followed_lengths, plan_of, row_of
from finetune.tools.preflight import trial
from finetune.training.trainer import Trainer

log = logging.getLogger(__name__)

EDGES = (1 / 12, 1 / 8, 1 / 6, 1 / 4, 1 / 3, 1 / 2, 2 / 3, 5 / 6, 1)
"""Where one bound ends and the next begins, as shares of the longest utterance."""
MOST_CLIPS = 512


def set_bounds(accelerator: Accelerator, config: RunConfig, strategy: Strategy) -> Plan | None:
    """Set `data.batch_bounds` where the run file asks for `training.auto_batch`; a resumed run keeps its own.

    Returns:
        The run's prediction; None where none was made.

    Raises:
        UserError: not even one utterance fits, or the model's layout is not known before it is loaded.
    """
    t = config.training
    if not t.auto_batch:
        return None
    earlier = earlier_limits(Path(t.output_dir)) if t.resume_from_checkpoint else None
    if earlier is not None:
        config.data.batch_bounds = earlier["bounds"]
        log.info("auto batch: the bounds of the resumed run")
        return None
    usable = usable_bytes(accelerator, t.memory_limit_gib)
    planned, problem = None, ""
    if accelerator.is_main_process:
        try:
            planned = _plan_bounds(config, strategy, accelerator.num_processes, usable)
        except UserError as error:
            problem = f"training.auto_batch: {error}"
    planned, problem = broadcast((planned, problem))
    if planned is None:
        raise UserError(problem)
    config.data.batch_bounds, plan = planned
    bounds = ", ".join(f"{clips:g} up to {seconds:g} s" for seconds, clips in config.data.batch_bounds)
    log.info("auto batch: clips a batch by length, %s", bounds)
    return plan


def usable_bytes(accelerator: Accelerator, limit_gib: float | None) -> float:
    """Return the bytes that tensors may take on the device that has least."""
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
        if not card.is_gpu and limit_gib is None:
            usable /= accelerator.num_processes
    return usable


def _plan_bounds(
    config: RunConfig, strategy: Strategy, processes: int, usable: float
) -> tuple[list[list[float]], Plan]:
    """Return the bounds as pairs (seconds, clips), and the prediction with them.

    Raises:
        UserError: a step cannot be followed, or one clip does not fit.
    """
    try:
        predictor = _predictor(config, strategy, processes)
    except UserError as error:
        raise UserError(f"{error} Or set training.auto_batch: false.") from error
    longest = config.data.max_duration
    ends = [math.ceil(10 * edge * longest) / 10 for edge in EDGES]
    bounds = [[seconds, min(predictor.most_clips(seconds, usable), MOST_CLIPS)] for seconds in ends]
    if bounds[-1][1] < 1:
        raise UserError(
            f"one clip of data.max_duration={longest:g} s needs {predictor.peak(1, longest) / GIB:.2f} GiB, and "
            f"{usable / GIB:.2f} can be used. Lower data.max_duration, or take a strategy that needs less (python -m "
            "finetune.plan lists them)."
        )
    predictor.config = config.replaced({"data.batch_bounds": bounds})
    return bounds, _plan_of_run(predictor, strategy, usable)


def _predictor(config: RunConfig, strategy: Strategy, processes: int) -> Predictor:
    """Return what predicts this run's steps on this machine.

    Raises:
        UserError: a step of the run cannot be followed.
    """
    layout, kind, data = _what_to_follow(config)
    with torch.random.fork_rng([]):  # following a step initialises weights
        [memory] = cache.follow_all(layout, [kind], followed_lengths(data.longest), data.tokens_a_second)
    if isinstance(memory, str):
        raise UserError(f"a step of this run {memory}." if memory.startswith(cache.CANNOT) else memory)
    predictor = Predictor(config, engine_of(strategy, processes), card_here(), data, layout, memory)
    if config.training.auto_batch and predictor.engine.name == "ddp":
        # MemoryRecovery exchanges gradients itself: they lie beside DDP's buckets.
        predictor.weights = replace(predictor.weights, gradient_copies=2)
    return predictor


def _what_to_follow(config: RunConfig) -> tuple[Layout, Kind, Data]:
    t, longest = config.training, config.data.max_duration
    precision = "bf16" if t.bf16 else "fp16" if t.fp16 else "no"
    kind = Kind(config.model, precision, t.optimizer in RELEASES_GRADIENTS, card_here().is_gpu)
    return layout_of(config), kind, Data(longest, longest / 2, None)


def _is_cached(config: RunConfig) -> bool:
    layout, kind, data = _what_to_follow(config)
    key = cache.key_of(layout, kind, followed_lengths(data.longest), data.tokens_a_second)
    return cache.find(key) is not None


def _plan_of_run(predictor: Predictor, strategy: Strategy, usable: float) -> Plan:
    row = row_of("+".join(strategy.names) or RUN_FILE, predictor)
    row.fits = predictor.peak(*predictor.worst()) <= usable
    card, processes = predictor.card, predictor.engine.processes
    return plan_of([row], card, processes, predictor.data, None, "the run's own prediction")


def keep_prediction(trainer: Trainer, strategy: Strategy, plan: Plan | None) -> None:
    """Write plan.json: the prediction that set the bounds, else one of a step that was followed before, else none."""
    if not trainer.accelerator.is_main_process:
        return
    try:
        if plan is None and _is_cached(trainer.config):
            predictor = _predictor(trainer.config, strategy, trainer.accelerator.num_processes)
            plan = _plan_of_run(predictor, strategy, predictor.card.usable)
        if plan is not None:
            write_json(trainer.output_dir / "plan.json", asdict(plan))
    except (UserError, OSError) as error:
        log.debug("no prediction: %s", error)


def confirm(trainer: Trainer, recovery: MemoryRecovery | None) -> None:
    """Run forward and backward of the worst batches that the bounds allow, and halve the bounds where memory runs out.

    Nothing is learnt: gradients are dropped; random states, counters and BatchNorm statistics stay. Memory for the
    optimizer's states is held meanwhile.

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
    states = torch.empty(_state_bytes(trainer), dtype=torch.uint8, device=device)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        set_batchnorm_mode(trainer.model, training=False)
        try:
            for name, batch in worst.items():
                before = [list(pair) for pair in recovery.bounds]
                trainer.compute_gradients(trial.worst_step(trainer, batch), context=trainer.contexts[0][-1])
                trainer.optimizer.zero_grad()
                pieces = "" if before == recovery.bounds else ", in smaller pieces"
                log.info("auto batch: %s fit%s: %s", name, pieces, describe_report(recovery.describe(batch)))
        finally:
            del states
            for training, module in norms:
                module.training = training
            trainer.optimizer.zero_grad()
    trainer.progress.restore(progress)
    log.info("auto batch: the worst batches fit (of %d clips that were read)", survey.looked)


def _state_bytes(trainer: Trainer) -> int:
    """Return the bytes that the first step allocates on the device for the optimizer's states."""
    t = trainer.config.training
    embeddings = {id(m.weight) for m in trainer.model.modules() if isinstance(m, torch.nn.Embedding)}
    return sum(
        state_bytes(t.optimizer, dict(t.optimizer_args), tuple(p.shape), p.dtype, id(p) in embeddings).device
        for p in trainer.model.parameters()
        if p.requires_grad
    )
