"""int8, dynamic or static, with the layers in float32 that it hurts most: as few as let an export pass."""

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
    write: Callable[[Collection[str], bool], int],
    check: Callable[[], Outcome],
    calibrate: Callable[[], bool],
    rank: Callable[[bool], list[Block]],
    float_bytes: int,
) -> tuple[Outcome, list[dict[str, Any]]]:
    """Write and check an int8 export: dynamic, then static; then the better of both with a sixteenth of the blocks in
    float32, those that hurt most, an eighth, a quarter and so on, until it passes or is too large.

    Args:
        write: writes the export with these nodes in float32, static or dynamic, and returns its bytes.
        check: holds what was written to the original.
        calibrate: prepares static int8; returns whether it could. Like `rank` it is not called if plain int8 passes,
            or if clips are too few for any precision.
        rank: measures the blocks, static or dynamic, the most harmful first.
        float_bytes: of the export in fp32.

    Returns:
        What the gate says of the last export, which is the one that lies there, and each try: inputs (dynamic or
            static), kept (names of the blocks in float32), bytes and reason.
    """
    tries: list[dict[str, Any]] = []

    def attempt(static: bool, kept: list[Block], blocks: int) -> tuple[Outcome, bool]:
        """Return what the gate says, and whether nothing more has to be tried."""
        size = write([node for block in kept for node in block.nodes], static)
        outcome = check()
        names = ", ".join(block.name for block in kept[:NAMED]) or "none"
        if len(kept) > NAMED:
            names = f"{len(kept)} of {blocks} ({names}, ...)"
        inputs = "static" if static else "dynamic"
        tries.append({"inputs": inputs, "kept": names, "bytes": size, "reason": outcome.verdict.reason})
        log.info("%s int8, in float32: %s: %.1f MB, %s", inputs, names, size / 1e6, outcome.verdict.reason)
        hopeless = outcome.verdict.clips < FEW or not outcome.verdict.differing or size > MOST_SHARE * float_bytes
        return outcome, outcome.verdict.passed or hopeless

    outcome, ended = attempt(False, [], 0)
    static = False
    if not ended and calibrate():
        dynamic = outcome
        outcome, ended = attempt(True, [], 0)
        static = loss_at_most(outcome) < loss_at_most(dynamic)
    if ended:
        return outcome, tries
    blocks, kept = rank(static), 0
    while not ended and kept < len(blocks):
        kept = min(2 * kept or max(1, len(blocks) // FIRST_SHARE), len(blocks))
        outcome, ended = attempt(static, blocks[:kept], len(blocks))
    return outcome, tries


def loss_at_most(outcome: Outcome) -> float:
    """Return the upper end of the interval of WER's difference; where there is none, the share of other texts."""
    verdict = outcome.verdict
    interval = None if verdict.comparison is None else verdict.comparison["difference_interval"]
    return len(verdict.differing) / verdict.clips if interval is None else interval[1]


def advice(tries: list[dict[str, Any]]) -> str:
    """Say what was tried in vain, and what is left."""
    last = tries[-1]
    return (
        f"{len(tries)} ways of int8 were tried, the last {last['inputs']} with {last['kept']} in float32 "
        f"({last['bytes'] / 1e6:,.1f} MB). Take fp16 or fp32, allow more with --max-loss, or give more clips"
    )
