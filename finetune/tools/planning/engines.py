"""What DDP, FSDP2 and ZeRO share out over the GPUs, put on top of a followed step.

A step on one GPU is followed; how an engine cuts weights, gradients and states up, and which buffers it keeps, is
computed here from its own settings. Shape of the sums: docs/plan.md.
"""

from dataclasses import dataclass

import numpy as np

from finetune.errors import UserError
from finetune.security.documents import read_json_object
from finetune.strategies.strategy import Strategy, engine_with
from finetune.tools.planning.follow import Parts
from finetune.tools.planning.memory import Step

FLOAT = 4
LAYERS_GATHERED = 2  # FSDP2 gathers the next layer while one computes
BUCKET_ELEMENTS = 500_000_000  # DeepSpeed's default


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
    beside: float = 0.0
    """The moving average and the start of L2-SP, beside the weights and as whole as they are; counted with the
    optimizer's states."""
    ema_on_host: float = 0.0
    way_on_host: float = 0.0
    """Base and tuned weights, from which points on the way are made in the end of a run with data.guard_limit."""
    gradient_copies: float = 1.0
    """2 where DDP's buckets lie idle beside gradients that are exchanged otherwise."""


@dataclass(frozen=True)
class Engine:
    """An engine with its settings."""

    name: str
    """As `finetune.strategies.strategy.Strategy.engine`, DeepSpeed's with the stage behind it."""
    processes: int
    shards: int
    """Processes that share one copy of what is cut up (fewer than all under hybrid sharding)."""
    bucket_elements: int = 0
    """Of DeepSpeed's reduction buckets."""
    buckets: int = 0

    @property
    def shares_out(self) -> bool:
        """Whether it cuts up more than the batch."""
        return self.name.startswith(("fsdp", "deepspeed"))

    @property
    def offloads(self) -> bool:
        """Whether optimizer states are on the host."""
        return "_offload" in self.name


def engine_of(strategy: Strategy, processes: int) -> Engine:
    """Return the engine of a strategy on so many GPUs."""
    name = engine_with(strategy.engine, processes)
    if name.startswith("deepspeed") and strategy.deepspeed_config is not None:
        zero = read_json_object(strategy.deepspeed_config, "--deepspeed").get("zero_optimization", {})
        bucket = zero.get("reduce_bucket_size", "auto")
        try:
            bucket = BUCKET_ELEMENTS if bucket == "auto" else int(bucket)
            stage = int(zero.get("stage", 1))
        except (TypeError, ValueError, OverflowError) as error:
            raise UserError(
                f"{strategy.deepspeed_config}: zero_optimization: stage and reduce_bucket_size are whole numbers."
            ) from error
        buckets = 2 if zero.get("overlap_comm") and stage < 3 else 1
        return Engine(f"{name}_{stage}", processes, processes, bucket, buckets)
    replicas = 1
    if name.startswith("fsdp"):
        replicas = int(strategy.fsdp_settings.get("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", 1))
    return Engine(name, processes, max(processes // replicas, 1))


def peak_of_step(step: Step, weights: Weights, engine: Engine, accumulates: bool) -> Parts:
    """Return the bytes by part on one GPU, in the phase that needs most, with the optimizer's states.

    Args:
        step: followed on one process.
        weights: of the model.
        engine: that shares it out.
        accumulates: gradients of earlier batches of the step are held through the whole step.
    """
    parts = dict(step.peaks)
    if accumulates or engine.name == "ddp":  # DDP's buckets are the gradients, and stay
        copies = 1 if engine.shares_out else weights.gradient_copies
        parts = {**step.without_gradients, "gradients": np.full(len(step.phases), weights.trained * copies)}
    in_step = np.array([name == "step" for name in step.phases])
    parts["temporary"] = np.where(in_step, weights.optimizer_step, parts.get("temporary", 0.0))
    if engine.name.startswith("fsdp"):
        parts |= _shared_by_fsdp(parts, weights, engine)
    elif engine.shares_out:
        parts |= _shared_by_zero(parts, weights, engine)
    else:
        parts["optimizer"] = np.array(weights.optimizer + weights.beside)
    phase = int(np.argmax(sum(parts.values())))
    return {name: float(np.broadcast_to(sizes, in_step.shape)[phase]) for name, sizes in parts.items()}


def _shared_by_fsdp(parts: dict[str, np.ndarray], weights: Weights, engine: Engine) -> dict[str, np.ndarray]:
    """Return the parts that FSDP2 changes: shards, with whole layers where they are needed."""
    own = 0.0 if engine.offloads else 1 / engine.shards
    gathered = min(weights.around_layers + LAYERS_GATHERED * weights.layer, weights.parameters)
    on_their_way = min(LAYERS_GATHERED * weights.layer, weights.trained)
    return {
        "optimizer": np.array(own * (weights.optimizer + weights.beside)),
        "parameters": parts["parameters"] - weights.parameters + own * weights.parameters + gathered,
        "gradients": own * parts["gradients"] + on_their_way * (parts["gradients"] > 0),
    }


def _shared_by_zero(parts: dict[str, np.ndarray], weights: Weights, engine: Engine) -> dict[str, np.ndarray]:
    """Return the parts that ZeRO changes: shards, float32 copies of the weights, and buckets."""
    stage = int(engine.name.rsplit("_", 1)[1])
    own = 0.0 if engine.offloads else 1 / engine.shards
    parameters = parts["parameters"] + own * FLOAT * weights.trained_elements
    if stage == 3:
        live = min(FLOAT * engine.bucket_elements + weights.layer, weights.parameters)
        parameters = parameters - weights.parameters + live + own * weights.parameters
    # Stage 1 keeps whole gradients, the others those of their own part, which they fill while backward runs.
    gradients = parts["gradients"] * (1.0 if stage == 1 else own)
    return {
        "optimizer": np.array(own * weights.optimizer + weights.beside),  # the average is whole, as ZeRO-2's weights
        "parameters": parameters,
        "gradients": gradients + FLOAT * engine.bucket_elements * engine.buckets,
    }


def host_bytes(weights: Weights, engine: Engine) -> float:
    """Return the bytes on the host for one process, beside what a run without offload has there."""
    if not engine.offloads:
        return weights.optimizer_on_host + weights.ema_on_host + weights.way_on_host
    masters = 2 * FLOAT * weights.trained_elements / engine.shards  # and their gradients
    ema = weights.beside / engine.shards if engine.name.startswith("fsdp") else 0.0  # where the shards are
    return weights.optimizer / engine.shards + masters + ema + weights.ema_on_host + weights.way_on_host
