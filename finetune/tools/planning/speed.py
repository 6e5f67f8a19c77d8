"""Time of a step, estimated from what it computes, reads and sends, and from a card's published rates.

Nothing here is measured. Matrix products are taken to reach MATRIX of a card's rate, everything else BANDWIDTH of its
memory's, and each kernel to cost LAUNCH at least; transfers run beside the computation.
"""

from finetune.tools.planning.engines import Engine, Weights
from finetune.tools.planning.follow import Parts
from finetune.tools.planning.gpus import Card

MATRIX, BANDWIDTH = 0.45, 0.7
LAUNCH = 6e-6  # seconds
PCIE = 12e9  # bytes a second between a card and the host
HOST_MEMORY = 20e9  # bytes a second that an optimizer step on the host reads and writes
OVERLAPPED = 0.5  # share of the exchange between cards that is hidden behind the backward pass
# Share of the lattice's cells that the loss computes with where model.occupancy_threshold leaves the others out
# (docs/loss.md).
CELLS_WITH_THRESHOLD = 0.25
PRODUCTS_A_CELL = 4  # logits, logits again in backward, and two gradients


def loss_flops(clips: float, frames: float, tokens: float, width: int, outputs: int, threshold: float) -> float:
    """Of the joint's last layer over the lattices of a batch; a followed step computes one block of it only."""
    share = CELLS_WITH_THRESHOLD if threshold else 1.0
    return 2 * PRODUCTS_A_CELL * share * clips * frames * (tokens + 1) * width * outputs


def seconds_of_step(
    work: Parts,
    more_flops_16: float,
    batches: int,
    weights: Weights,
    engine: Engine,
    card: Card,
    activations_offloaded: float = 0.0,
) -> float | None:
    """Return the seconds of an optimizer step; None where the card's rates are not known.

    Args:
        work: of one batch, from a followed step.
        more_flops_16: of one batch, beside it.
        batches: forward and backward passes of the step.
        activations_offloaded: bytes of a batch that go to the host and back.
    """
    if card.flops_16 is None or card.flops_32 is None or card.bandwidth is None:
        return None
    computed = ((work["flops_16"] + more_flops_16) / card.flops_16 + work["flops_32"] / card.flops_32) / MATRIX
    batch = max(computed + work["bytes"] / (BANDWIDTH * card.bandwidth), work["launches"] * LAUNCH)
    batch = max(batch, 2 * activations_offloaded / PCIE)
    share = engine.shards if engine.shares_out else 1
    if weights.optimizer_on_host > 0 or engine.offloads:
        sent = 2 * weights.trained / share / PCIE  # gradients there, weights back
        # Adam reads 16 and writes 12 bytes an element.
        step = sent + 28 * weights.trained_elements / share / HOST_MEMORY
    else:
        step = (3 * weights.trained + 2 * weights.optimizer) / share / (BANDWIDTH * card.bandwidth)
    n = engine.processes
    if n > 1:
        passes = 3 if engine.name.startswith(("fsdp", "deepspeed_zero3")) else 2
        exchanged = passes * weights.trained * (n - 1) / n
        step += (1 - OVERLAPPED) * exchanged / card.link
    if engine.name.startswith("deepspeed_zero3_offload") or engine.name == "fsdp_offload":
        batch += 2 * weights.parameters / share / PCIE  # weights come from the host in forward and in backward
    return batches * batch + step
