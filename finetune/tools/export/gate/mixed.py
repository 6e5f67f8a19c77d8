"""int8 with the layers in float32 that it hurts most: as few as let an export pass."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from finetune.evaluation.significance import FEW

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from finetune.tools.export.gate.gate import Outcome

log = logging.getLogger(__name__)

FIRST_SHARE = 16
NAMED = 4
"""Blocks that a try names."""
MOST_SHARE = 0.75
"""Of an fp32 export's bytes: beyond it int8 has lost its purpose."""


@dataclass
class Block:
    """Nodes of the graphs that are kept in float32 together."""

    name: str
    nodes: list[str]
    harm: float
    """Largest difference that it makes in 8 bits alone, in parts of the largest output."""


def search_precision(
    write: Callable[[Collection[str]], int],
    check: Callable[[], Outcome],
    rank: Callable[[], list[Block]],
    float_bytes: int,
) -> tuple[Outcome, list[dict[str, Any]]]:
    """Write and check an int8 export, then with a sixteenth of the blocks in float32, those that hurt most, an eighth,
    a quarter and so on, until it passes or is too large.

    Args:
        write: writes the export with these nodes in float32 and returns its bytes.
        check: holds what was written to the original.
        rank: measures the blocks, the most harmful first; it is not called if plain int8 passes, or if clips are too
            few for any precision.
        float_bytes: of the export in fp32.

    Returns:
        What the gate says of the last export, which is the one that lies there, and each try: kept (names of the
            blocks in float32), bytes and reason.
    """
    tries: list[dict[str, Any]] = []
    kept: list[Block] = []
    blocks: list[Block] | None = None
    while True:
        size = write([node for block in kept for node in block.nodes])
        outcome = check()
        names = ", ".join(block.name for block in kept[:NAMED]) or "none"
        if len(kept) > NAMED:
            names = f"{len(kept)} of {len(blocks or ())} ({names}, ...)"
        tries.append({"kept": names, "bytes": size, "reason": outcome.verdict.reason})
        log.info("int8, in float32: %s: %.1f MB, %s", names, size / 1e6, outcome.verdict.reason)
        if outcome.verdict.passed or outcome.verdict.clips < FEW or not outcome.verdict.differing:
            return outcome, tries
        if size > MOST_SHARE * float_bytes:
            return outcome, tries
        blocks = rank() if blocks is None else blocks
        if len(kept) == len(blocks):
            return outcome, tries
        kept = blocks[: 2 * len(kept) or max(1, len(blocks) // FIRST_SHARE)]


def advice(tries: list[dict[str, Any]]) -> str:
    """Say what was tried in vain, and what is left."""
    last = tries[-1]
    return (
        f"{len(tries)} ways of int8 were tried, the last with {last['kept']} in float32 "
        f"({last['bytes'] / 1e6:,.1f} MB). Take fp16 or fp32, allow more with --max-loss, or give more clips"
    )
