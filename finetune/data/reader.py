"""Reading the rows of a worker shard: piece after piece, from any position on, retrying reads over a network."""

import hashlib
import itertools
import json
import logging
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from finetune.data.options import StreamOptions
from finetune.data.order import Piece, chosen_pieces, deal, interleave, shuffled, turned
from finetune.data.retry import UnreadableShard, wait_before
from finetune.data.shards import NumberedRows, Row, Shard
from finetune.data.sources import OpenSource
from finetune.security.secrets import clean_urls

log = logging.getLogger(__name__)

Group = list[tuple[OpenSource, Shard]]
"""Shards that are read as one."""


@dataclass
class Sources:
    """What a stream reads: groups of shards, and the weights of a mixture."""

    groups: list[Group]
    weights: list[float] | None
    """Chances of the groups; None for a single one."""
    limits: list[int]
    """Rows of each group that take part; -1 for all."""
    new_groups: int = sys.maxsize
    """How many groups come first that are of `data.train`; those behind them are of `data.rehearsal`."""

    def skip(self, group: int, options: StreamOptions) -> int:
        """Return how many rows of its subset a group leaves out."""
        return options.skip_samples if group < self.new_groups else 0

    def part(self, rehearsal: bool) -> "Sources":
        """Return what is of `data.rehearsal` alone, or of `data.train`."""
        own = slice(self.new_groups, None) if rehearsal else slice(0, self.new_groups)
        groups, weights = self.groups[own], (self.weights or [1.0])[own]
        alone = [w / sum(weights) for w in weights] if len(groups) > 1 else None
        return Sources(groups, alone, self.limits[own], 0 if rehearsal else sys.maxsize)

    def digest(self) -> str:
        """Return a hash that tells these shards from others."""
        shards = [[shard.file, shard.first, shard.rows] for group in self.groups for _, shard in group]
        return hashlib.sha256(json.dumps([shards, self.weights]).encode()).hexdigest()


def group_sources(sources: list[OpenSource], max_samples: int) -> Sources:
    """Make one group of sources without weights, or one of each with a weight, with its share of `max_samples`; then
    the same of the sources of `data.rehearsal`, whole, with their share of the clips."""
    old = [s for s in sources if s.is_rehearsal]
    if not old:
        return _group_alike(sources, max_samples)
    parts = _group_alike([s for s in sources if not s.is_rehearsal], max_samples), _group_alike(old, -1)
    shares = 1 - old[0].rehearsal_share, old[0].rehearsal_share
    weights = [share * w for share, part in zip(shares, parts, strict=True) for w in part.weights or [1.0]]
    new, rehearsed = parts
    return Sources(new.groups + rehearsed.groups, weights, new.limits + rehearsed.limits, len(new.groups))


def _group_alike(sources: list[OpenSource], max_samples: int) -> Sources:
    weighted = [s.source.weight for s in sources if s.source.weight is not None]
    if not weighted:
        return Sources([[(s, shard) for s in sources for shard in s.shards]], None, [max_samples])
    weights = [w / sum(weighted) for w in weighted]
    limits = [-1 if max_samples < 0 else max(1, round(max_samples * w)) for w in weights]
    return Sources([[(s, shard) for shard in s.shards] for s in sources], weights, limits)


def rows_from(shard: Shard, first: int, retries: int) -> NumberedRows:
    """Read a shard from a row on. A failed read is retried from its row on.

    `retries` counts attempts after a failure without one row in between.

    Raises:
        UnreadableShard: it still cannot be read.
    """
    row, failures = first, 0
    while True:
        try:
            for number, content in shard.read(row):
                yield number, content
                row, failures = number + 1, 0
            return
        except Exception as error:
            what = f"{shard.file} cannot be read from {shard.unit} {shard.first + row} on: "
            what += f"{type(error).__name__}: {error}"
            what = clean_urls(what) if "://" in what else what
            failures += 1
            if failures > retries or isinstance(error, FileNotFoundError | PermissionError):
                raise UnreadableShard(what) from error
            log.warning("%s; attempt %d of %d follows", what, failures + 1, retries + 1)
            wait_before(failures + 1)


def fetch(group: Group, wanted: Iterable[tuple[int, int]], retries: int) -> dict[tuple[int, int], Row]:
    """Read single rows by (shard, row), such as those that waited in a buffer.

    Raises:
        UnreadableShard: as `rows_from`; also where a row is missing now.
    """
    found: dict[tuple[int, int], Row] = {}
    missing: dict[int, set[int]] = {}
    for index, row in wanted:
        missing.setdefault(index, set()).add(row)
    for index, rows in sorted(missing.items()):
        source, shard = group[index]
        for number, content in rows_from(shard, min(rows), retries if source.remote else 0):
            if number in rows:
                found[index, number] = content
                rows.remove(number)
            if not rows:
                break
        if rows:
            raise UnreadableShard(f"{shard.place(min(rows))} is not there any more")
    return found


@dataclass
class GroupReader:
    """The rows of one worker shard of a group, from the beginning of the epoch or from `set_position` on."""

    group: Group
    limit: int
    """Rows of the group that take part; -1 for all."""
    options: StreamOptions
    epoch: int
    worker_shard: int
    worker_shards: int
    skip: int
    """Rows of the group's subset that are left out."""
    turns: bool
    """Whether an epoch begins at any row of the group: one that reads a part of it would only ever see the heads of
    shards."""

    def __post_init__(self) -> None:
        # Where a source does not tell its rows, a limit is kept by counting, and all worker shards read all shards.
        self.counts = self.limit >= 0 and any(shard.rows is None for _, shard in self.group)
        self.set_position({"passes": 0})

    def set_position(self, position: dict[str, Any]) -> None:
        """Go to where `position` was taken; {"passes": n} is the beginning of a pass."""
        self.passes = position["passes"]
        self.given: list[list[Any]] | None = position.get("pieces")
        """Pieces that do not follow from the epoch alone."""
        self.pieces = self._pieces_of_pass() if self.given is None else [Piece(*piece) for piece in self.given]
        self.at, self.row = position.get("at", 0), position.get("row")
        self.seen, self.failed = position.get("seen", 0), set(position.get("failed", ()))
        self.rows: Iterator[tuple[int, Row]] | None = None

    def position(self) -> dict[str, Any]:
        """Return where the next row is, as JSON-able numbers."""
        position: dict[str, Any] = {"passes": self.passes, "at": self.at, "row": self.row}
        if self.given is not None:
            position |= {"at": 0, "pieces": self.given[self.at :]}
        if self.counts:
            position["seen"] = self.seen
        if self.failed:
            position["failed"] = sorted(self.failed)
        return position

    def restart(self) -> None:
        """Go to the beginning of another pass, in an order of its own."""
        self.set_position({"passes": self.passes + 1})

    def _pieces_of_pass(self) -> list[Piece]:
        o, rows = self.options, [shard.rows for _, shard in self.group]
        chosen = chosen_pieces(rows, self.limit, o.seed if o.shuffle else None, self.skip)
        if self.counts:
            return chosen
        if o.shuffle:
            chosen = shuffled(chosen, (o.seed, self.epoch, 1))
        own = (interleave if o.interleave else deal)(chosen, self.worker_shard, self.worker_shards)
        if o.shuffle and self.passes:  # of a mixture's further sources: the worker shard's own rows in another order
            own = shuffled(own, (o.seed, self.epoch, self.worker_shard, self.passes, 3))
        elif o.shuffle and self.turns:
            own = turned(own, (o.seed, self.epoch, self.worker_shard, 29))
        return own

    def rest(self) -> list[Piece]:
        """Return what has not been read of this pass."""
        pieces = self.pieces[self.at :]
        if pieces and self.row is not None:
            pieces[0] = pieces[0]._replace(start=self.row)
        return [piece for piece in pieces if not piece.is_empty]

    def next_row(self) -> tuple[int, int, Row, bool] | None:
        """Return (shard, row, content, whether it is read for the first time), or None at the end of the pass.

        A shard that cannot be read is put last and retried there, once.
        """
        while self.at < len(self.pieces):
            piece = self.pieces[self.at]
            if self.row is None:
                self.row = piece.start
            if self.counts and self.seen >= self.limit:
                return None
            if self.rows is None:
                source, shard = self.group[piece.shard]
                self.rows = rows_from(shard, self.row, self.options.read_retries if source.remote else 0)
            try:
                number, content = next(self.rows, (None, None))
            except UnreadableShard as error:
                self._put_last(piece, error)
                continue
            if number is None or content is None or (piece.stop is not None and number >= piece.stop):
                self._next_piece(number, content)
                continue
            if self.counts:
                self.row, self.seen = number + 1, self.seen + 1
                if (self.seen - 1) % self.worker_shards == self.worker_shard:
                    return piece.shard, number, content, True
            elif (number - piece.start) % piece.stride == 0:
                self.row = number + piece.stride
                return piece.shard, number, content, not piece.read_before
        return None

    def _next_piece(self, number: int | None, content: Row | None) -> None:
        """Go on to the next piece, without opening its shard anew where it lies ahead in the same one."""
        before = self.pieces[self.at]
        self.at, self.row = self.at + 1, None
        after = self.pieces[self.at] if self.at < len(self.pieces) else None
        rows, self.rows = self.rows, None
        if rows is None or number is None or content is None or after is None:
            return
        if after.shard == before.shard and after.start >= number:
            following = itertools.chain([(number, content)], rows)
            self.rows = itertools.dropwhile(lambda row: row[0] < after.start, following)

    def _put_last(self, piece: Piece, error: UnreadableShard) -> None:
        """Move the rest of a shard to the end, once; not where rows are counted, which needs one order everywhere."""
        if piece.shard in self.failed or self.counts:
            raise error
        self.failed.add(piece.shard)
        log.warning("%s; it is tried again when the rest is read", error)
        rest = self.rest()
        self.pieces = [p for p in rest if p.shard != piece.shard] + [p for p in rest if p.shard == piece.shard]
        self.given = [list(p) for p in self.pieces]
        self.at, self.row, self.rows = 0, None, None


def make_readers(
    sources: Sources, options: StreamOptions, epoch: int, worker_shard: int, worker_shards: int
) -> list[GroupReader]:
    """Make a reader for each group, at the beginning of the epoch."""
    return [
        GroupReader(
            group,
            limit,
            options,
            epoch,
            worker_shard,
            worker_shards,
            sources.skip(g, options),
            g >= sources.new_groups,
        )
        for g, (group, limit) in enumerate(zip(sources.groups, sources.limits, strict=True))
    ]
