"""Order: which worker shard reads which rows of an epoch, and in which order.

A *worker shard* is the part of one DataLoader worker of one rank (or of the rank itself without workers). An epoch is
a list of *pieces*, stretches of rows of shards, in an order that follows from the seed and the epoch alone. Worker
shards get equal numbers of rows, each a run of neighbouring pieces; where a source does not tell its number of rows,
they get whole shards and share the rest row by row. So every row belongs to one worker shard, whose position is a
piece and a row.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

SHARDS_A_WORKER = 5  # with as many, a worker with one shard more than another works at most a fifth longer


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
        """Return its number of rows."""
        return None if self.stop is None else max(0, -(-(self.stop - self.start) // self.stride))

    @property
    def is_empty(self) -> bool:
        return self.stop is not None and self.start >= self.stop


def chosen_pieces(shard_rows: list[int | None], limit: int, seed: int | None, skip: int = 0) -> list[Piece]:
    """Choose the rows that take part: all, or a fixed subset of `limit` rows, which lies within every larger one.

    The subset takes whole shards in a random order (their own without a seed) until it is full, so that it reads few
    of them.

    Args:
        shard_rows: rows of each shard, or None.
        limit: rows to take; -1 takes all. With an unknown number of rows all shards are returned, in that order, and
            the reader counts.
        seed: of the order.
        skip: leave out the smaller subset of so many rows. Needs known numbers of rows.
    """
    pieces = [Piece(i, 0, rows) for i, rows in enumerate(shard_rows)]
    if limit < 0 and not skip:
        return pieces
    if seed is not None:
        pieces = [pieces[i] for i in np.random.default_rng((seed, 11)).permutation(len(pieces))]
    sizes = _known_sizes(pieces)
    if sizes is None:
        return pieces
    return _stretch(pieces, sizes, skip, limit if limit >= 0 else sum(sizes))


def _known_sizes(pieces: list[Piece]) -> list[int] | None:
    """Return the rows of each piece; None where one does not tell."""
    sizes = [rows for piece in pieces if (rows := piece.rows()) is not None]
    return sizes if len(sizes) == len(pieces) else None


def shuffled(pieces: list[Piece], seed: tuple[int, ...]) -> list[Piece]:
    """Return the pieces in a random order."""
    return [pieces[i] for i in np.random.default_rng(seed).permutation(len(pieces))]


def turned(pieces: list[Piece], seed: tuple[int, ...]) -> list[Piece]:
    """Return the pieces from a random row on, with what is before it at the end; as they are, where one does not tell
    its rows."""
    sizes = _known_sizes(pieces)
    if not sizes:
        return pieces
    first = int(np.random.default_rng(seed).integers(sum(sizes)))
    return _stretch(pieces, sizes, first, sum(sizes)) + _stretch(pieces, sizes, 0, first)


def deal(pieces: list[Piece], worker_shard: int, worker_shards: int) -> list[Piece]:
    """Return the part of one worker shard; over all of them each row comes once.

    Where all numbers of rows are known the parts differ by at most one row.
    """
    sizes = _known_sizes(pieces)
    if sizes is not None:
        begin, end = (n * sum(sizes) // worker_shards for n in (worker_shard, worker_shard + 1))
        return _stretch(pieces, sizes, begin, end)
    # Sharing makes every worker read these shards, so with many shards a worker it is cheaper to be uneven.
    whole = len(pieces)
    if whole < SHARDS_A_WORKER * worker_shards:
        whole -= whole % worker_shards
    shared = [_every(p, worker_shard, worker_shards) for p in pieces[whole:]]
    return pieces[:whole][worker_shard::worker_shards] + [p for p in shared if not p.is_empty]


def interleave(pieces: list[Piece], worker_shard: int, worker_shards: int) -> list[Piece]:
    """Return every `worker_shards`-th row over all pieces in a line, so that a step reads in the order of the data.

    Every worker shard reads every shard. Where a shard does not tell its rows, each shard begins with the first worker
    shard.
    """
    part, first = [], 0
    for piece in pieces:
        part.append(_every(piece, (worker_shard - first) % worker_shards, worker_shards))
        first += piece.rows() or 0
    return [piece for piece in part if not piece.is_empty]


def _every(piece: Piece, first: int, step: int) -> Piece:
    """Return every `step`-th row of a piece, from its row `first` on."""
    return piece._replace(start=piece.start + first * piece.stride, stride=piece.stride * step)


def _stretch(pieces: list[Piece], sizes: list[int], begin: int, end: int) -> list[Piece]:
    """Return rows begin to end of the pieces in a line."""
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
    """Return pieces of rows (shard, row) that were read before, neighbours joined."""
    pieces: list[Piece] = []
    for shard, row in sorted(rows):
        if pieces and pieces[-1].shard == shard and pieces[-1].stop == row:
            pieces[-1] = pieces[-1]._replace(stop=row + 1)
        else:
            pieces.append(Piece(shard, row, row + 1, 1, 1))
    return pieces
