"""Which lane reads which rows, in which order, and what is left of an epoch when it goes on with another number of lanes.

A *lane* is one DataLoader worker of one rank (or the rank itself without workers). An epoch is a list of *pieces*, stretches of
rows of shards, in an order that follows from the seed and the epoch alone. Lanes get equal numbers of rows, each a run of
neighbouring pieces; where a source does not say how many rows it has, lanes get whole shards, and share the rest row by row.
So every row belongs to one lane, and a lane's position is a piece and a row.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

SHARDS_A_LANE = 5  # with as many, a lane with one shard more than another works at most a fifth longer


class Piece(NamedTuple):
    """Rows start, start + stride, ... below stop of a shard."""

    shard: int
    """Number in the group of sources."""
    start: int
    stop: int | None
    """None: to the end of a shard whose number of rows is not known."""
    stride: int = 1
    read_before: int = 0
    """1 where these rows have been counted as read already: they waited in a buffer."""

    def rows(self) -> int | None:
        """How many rows it has."""
        return None if self.stop is None else max(0, -(-(self.stop - self.start) // self.stride))


def chosen_pieces(shard_rows: list[int | None], limit: int, seed: int | None, skip: int = 0) -> list[Piece]:
    """The rows that take part: all, or a fixed subset of `limit` rows, each of which lies within every larger subset.

    The subset takes whole shards in a random order until it is full (with a seed; in their own order without), so that a small
    subset reads few shards.

    Args:
        shard_rows: rows of each shard, or None.
        limit: rows to take; -1 takes all. Cannot be kept where rows are not known: then all shards come, in that order, and the
            reader counts.
        seed: of the order.
        skip: rows of the smaller subset of so many, which are left out. Needs known rows.
    """
    pieces = [Piece(i, 0, rows) for i, rows in enumerate(shard_rows)]
    if limit < 0 and not skip:
        return pieces
    if seed is not None:
        pieces = [pieces[i] for i in np.random.default_rng((seed, 11)).permutation(len(pieces))]
    if any(rows is None for rows in shard_rows):
        return pieces
    return _stretch(pieces, rows_of_pieces(pieces), skip, limit if limit >= 0 else sum(shard_rows))


def rows_of_pieces(pieces: list[Piece]) -> list[int]:
    """Rows of each piece."""
    return [piece.rows() for piece in pieces]


def shuffled(pieces: list[Piece], seed: tuple[int, ...]) -> list[Piece]:
    """The pieces in a random order."""
    return [pieces[i] for i in np.random.default_rng(seed).permutation(len(pieces))]


def deal(pieces: list[Piece], lane: int, lanes: int) -> list[Piece]:
    """The part of one lane; over all lanes each row once.

    Where all numbers of rows are known the parts differ by at most one row.
    """
    sizes = rows_of_pieces(pieces)
    if None not in sizes:
        total = sum(sizes)
        return _stretch(pieces, sizes, lane * total // lanes, (lane + 1) * total // lanes)
    # Sharing makes every lane read these shards, so with many shards a lane it is cheaper to be uneven.
    whole = len(pieces) if len(pieces) >= SHARDS_A_LANE * lanes else len(pieces) // lanes * lanes
    shared = [p._replace(start=p.start + lane * p.stride, stride=p.stride * lanes) for p in pieces[whole:]]
    return pieces[:whole][lane::lanes] + [p for p in shared if p.stop is None or p.start < p.stop]


def interleave(pieces: list[Piece], lane: int, lanes: int) -> list[Piece]:
    """Each `lanes`-th row, over all pieces laid behind each other: together the lanes read in the order of the data.

    Every lane reads every shard. Where a shard does not tell its rows, each shard begins with the first lane.
    """
    part, first = [], 0
    for piece in pieces:
        own = piece._replace(start=piece.start + (lane - first) % lanes * piece.stride, stride=piece.stride * lanes)
        part += [own] if own.stop is None or own.start < own.stop else []
        first += piece.rows() or 0
    return part


def _stretch(pieces: list[Piece], sizes: list[int], begin: int, end: int) -> list[Piece]:
    """Rows begin to end of the pieces laid behind each other."""
    part, first = [], 0
    for piece, size in zip(pieces, sizes, strict=True):
        a, b = max(begin - first, 0), min(end - first, size)
        if a < b:
            start = piece.start + a * piece.stride
            part.append(piece._replace(start=start, stop=start + (b - a - 1) * piece.stride + 1))
        first += size
        if first >= end:
            break
    return part


def as_pieces(rows: Iterable[tuple[int, int]]) -> list[Piece]:
    """Single rows (shard, row) that have been read before, neighbours put together."""
    pieces: list[Piece] = []
    for shard, row in sorted(rows):
        if pieces and pieces[-1].shard == shard and pieces[-1].stop == row:
            pieces[-1] = pieces[-1]._replace(stop=row + 1)
        else:
            pieces.append(Piece(shard, row, row + 1, 1, 1))
    return pieces


def from_json(pieces: list[list[Any]]) -> list[Piece]:
    return [Piece(*piece) for piece in pieces]
