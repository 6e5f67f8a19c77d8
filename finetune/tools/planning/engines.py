"""What DDP, FSDP2 and ZeRO share out over the GPUs, put on top of a followed step.

A step on one GPU is followed; how an engine cuts weights, gradients and states up, and which buffers it keeps, is
computed here from its own settings. Shape of the sums: docs/plan.md.
"""

from dataclasses import dataclass

from finetune.errors import UserError
from finetune.security.documents import read_json_object
from finetune.strategies.strategy import Strategy, engine_with
from finetune.tools.planning.follow import Parts
from finetune.tools.planning.memory import Step

FLOAT = 4
LAYERS_GATHERED = 2  # FSDP2 gathers the next layer while one computes


@dataclass(frozen=True)
class Weights:
    """Bytes of the model's weights and of what training keeps for them."""

    parameters: float
    """All of them, trained or not, without buffers."""
    trained: float
    """Those with gradients; a gradient takes as much."""
    trained_elements: float
    layer: float
    """One Conformer layer."""
    around_layers: float
    """What belongs to no layer: subsampling, prediction network, joint."""
    optimizer: float
    optimizer_on_host: float
    optimizer_step: float = 0.0
    """What a step takes beside all others."""
    ema: float = 0.0
    """The moving average beside the weights, as whole as they are; counted with the optimizer's states."""
    ema_on_host: float = 0.0
    gradient_copies: int = 1
    """2 where DDP's buckets lie idle beside gradients that are exchanged otherwise."""


@dataclass(frozen=True)
class Engine:
    """An engine with its settings."""

    name: str
    """As `finetune.strategies.strategy.Strategy.engine`."""
    processes: int
    shards: int
    """Processes that share one copy of what is cut up (fewer than all under hybrid sharding)."""
    bucket_elements: int = 0
    """Of DeepSpeed's reduction buckets."""
    buckets: int = 0


def engine_of(strategy: Strategy, processes: int) -> Engine:
    """The engine of a strategy.

    Args:
        strategy: `finetune.strategies.strategy.Strategy`.
        processes: GPUs.
    """
    name = engine_with(strategy.engine, processes)
    if name.startswith("deepspeed") and strategy.deepspeed_config is not None:
        zero = read_json_object(strategy.deepspeed_config, "--deepspeed").get("zero_optimization", {})
        bucket = zero.get("reduce_bucket_size", 500_000_000)
        try:
            bucket = 500_000_000 if bucket == "auto" else int(bucket)
            stage = int(zero.get("stage", 1))
        except (TypeError, ValueError, OverflowError) as error:
            raise UserError(
                f"{strategy.deepspeed_config}: zero_optimization: stage and reduce_bucket_size are whole numbers."
            ) from error
        return Engine(
            f"{name}_{stage}", processes, processes, bucket, 2 if zero.get("overlap_comm") and stage < 3 else 1
        )
    shards = processes
    if name.startswith("fsdp"):
        replicas = int(strategy.fsdp_settings.get("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", 1))
        shards = max(processes // replicas, 1)
    return Engine(name, processes, shards)


def peak_of_step(step: Step, weights: Weights, engine: Engine, accumulates: bool) -> Parts:
    """Bytes by part on one GPU, in the phase that needs most, with the optimizer's states.

    Args:
        step: followed on one process.
        accumulates: gradients of earlier batches of the step are held through the whole step.
    """
    found = []
    for name, peak, without in zip(step.names, step.peaks, step.without_gradients):
        if name == "step":
            peak = {**peak, "temporary": weights.optimizer_step}
            without = {**without, "temporary": weights.optimizer_step}
        found.append(_with_engine(peak, without, weights, engine, accumulates))
    return max(found, key=lambda parts: sum(parts.values()))


def _with_engine(peak: Parts, without: Parts, weights: Weights, engine: Engine, accumulates: bool) -> Parts:
    name, n, host = engine.name, engine.shards, engine.name.endswith("_offload") or "_offload_" in engine.name
    if not name.startswith(("fsdp", "deepspeed")):
        held = dict(peak)
        if accumulates or name == "ddp":  # DDP's buckets are the gradients, and stay
            held = {**without, "gradients": weights.trained * weights.gradient_copies}
        held["optimizer"] = weights.optimizer + weights.ema
        return held
    if accumulates:
        peak = {**without, "gradients": weights.trained}
    parts = dict(peak)
    parts["optimizer"] = 0.0 if host else weights.optimizer / n
    if name.startswith("fsdp"):
        parts["optimizer"] += 0.0 if host else weights.ema / n
        gathered = weights.around_layers + LAYERS_GATHERED * weights.layer
        shard = 0.0 if host else weights.parameters / n
        parts["parameters"] = parts["parameters"] - weights.parameters + shard + min(gathered, weights.parameters)
        on_their_way = min(LAYERS_GATHERED * weights.layer, weights.trained)
        parts["gradients"] = (0.0 if host else peak.get("gradients", 0.0) / n) + (
            on_their_way if peak.get("gradients", 0.0) else 0.0
        )
        return parts
    parts["optimizer"] += weights.ema  # whole, as the weights of ZeRO-1 and 2 are
    stage = int(name.rsplit("_", 1)[1])
    master = 0.0 if host else FLOAT * weights.trained_elements / n
    buckets = FLOAT * engine.bucket_elements * engine.buckets
    if stage == 3:
        live = min(FLOAT * engine.bucket_elements + weights.layer, weights.parameters)
        parts["parameters"] = parts["parameters"] - weights.parameters + live + master
        parts["parameters"] += 0.0 if host else weights.parameters / n
    else:
        parts["parameters"] += master
    # Stage 1 keeps whole gradients, the others those of their own part, which they fill while backward runs.
    share = peak.get("gradients", 0.0) / (1 if stage == 1 else n)
    parts["gradients"] = (0.0 if host and stage > 1 else share) + buckets
    return parts


def host_bytes(weights: Weights, engine: Engine) -> float:
    """Bytes on the host for one process, beside what a run without offload has there."""
    if "_offload" not in engine.name:
        return weights.optimizer_on_host + weights.ema_on_host
    masters = 2 * FLOAT * weights.trained_elements / engine.shards  # and their gradients
    ema = weights.ema / engine.shards if engine.name.startswith("fsdp") else 0.0  # where the shards are
    return weights.optimizer / engine.shards + masters + ema + weights.ema_on_host
