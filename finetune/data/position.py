"""The stream's position: what a checkpoint keeps, so that a run resumes at the next batch, on any number of ranks.

The position of a worker shard behind a batch is {"finished": True}, or
    readers    one a group of sources (`finetune.data.reader.GroupReader.position`)
    draws      batches drawn from the buffer;  drawn: rows drawn from a mixture
    exhausted  whether nothing is left to read
    buffer     (n, 4) refs of the utterances that wait in the buffer; a resumed run reads these rows again
in JSON-able numbers, some ten kilobytes a worker shard.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from finetune.data.options import StreamOptions
from finetune.data.order import Piece, as_pieces, deal
from finetune.data.reader import Sources, make_readers

Position = dict[str, Any]
FINISHED: Position = {"finished": True}

ORDERING = ("seed", "shuffle", "interleave")
"""Options that a resumed epoch has to share with the one that was stopped, or its rest is dealt anew."""
SUBSET = ("max_samples", "skip_samples")
"""Options of which another value makes a resumed run begin the next epoch."""
SAVED = (*ORDERING, "shuffle_buffer_size", "shuffle_buffer_bytes", "group_by_duration", *SUBSET)


def reshard(
    states: list[dict[str, Any]], sources: Sources, options: StreamOptions, worker_shards: range, count: int
) -> dict[int, Position] | None:
    """Deal what is left of an epoch over another number of worker shards, or in another order.

    Nothing is lost and nothing comes twice, but for rows that a finished worker shard left of a mixture's further
    sources, which come in a later pass.

    Args:
        states: `state_dict` of the streams of all ranks that were.
        sources, options: of the stream that goes on.
        worker_shards: those of this rank.
        count: worker shards of all ranks.

    Returns:
        Their positions; None where `max_samples` is kept by counting rows, which cannot be dealt anew.
    """
    first = states[0]
    positions = {int(n): position for state in states for n, position in state["positions"].items()}
    before = first["ranks"] * max(1, first["workers"])
    options = replace(options, **{name: first["options"][name] for name in ORDERING})
    groups = len(sources.groups)
    rest: list[list[Piece]] = [[] for _ in range(groups)]
    waiting: list[list[int]] = []
    passes = [0] * groups
    for n in range(before):
        position = positions.get(n)
        if position == FINISHED:
            continue
        for g, reader in enumerate(make_readers(sources, options, first["epoch"], n, before)):
            if reader.counts:
                return None
            if position is not None:
                reader.set_position(position["readers"][g])
                waiting += [ref for ref in np.asarray(position["buffer"]).reshape(-1, 4).tolist() if ref[0] == g]
            # Sources of a mixture begin again as needed: the furthest reader says which pass it is.
            if reader.passes > passes[g]:
                passes[g], rest[g] = reader.passes, []
            if reader.passes == passes[g]:
                rest[g] += reader.rest()
    # Of a mixture's further sources the rows of the pass before come again in this one.
    waited = [[(s, row) for group, n, s, row in waiting if (group, n) == (g, passes[g])] for g in range(groups)]
    dealt: dict[int, Position] = {}
    for n in worker_shards:
        readers = [
            {
                "passes": passes[g],
                "at": 0,
                "row": None,
                "pieces": [list(p) for p in deal(as_pieces(waited[g]), n, count) + deal(rest[g], n, count)],
            }
            for g in range(groups)
        ]
        dealt[n] = {"readers": readers, "draws": 0, "drawn": 0, "exhausted": False, "buffer": []}
    return dealt
