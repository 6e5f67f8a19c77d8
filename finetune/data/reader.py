"""Reading the rows of one lane: piece after piece, from any position on, past failures that may pass."""

import logging
from collections.abc import Iterable, Iterator
from typing import Any

from finetune.data.order import Piece, chosen_pieces, deal, from_json, interleave, shuffled
from finetune.data.retry import wait_before
from finetune.data.shards import NumberedRows, Row, Shard
from finetune.security.secrets import clean_urls

log = logging.getLogger(__name__)

Group = list[tuple[Any, Shard]]
"""Shards that are read as one, each with its `finetune.data.sources.OpenSource`."""


class UnreadableShard(Exception):
    """A shard that cannot be read on; the text names it and the row."""


def rows_from(shard: Shard, first: int, retries: int) -> NumberedRows:
    """Rows from one on. A read that fails is tried again from its row on, after a delay that doubles and is jittered.

    Args:
        shard: what is read.
        first: row of the shard.
        retries: attempts after a failure without one row in between; 0 where a failure cannot pass, as with local files.

    Raises:
        UnreadableShard: it cannot be read, with the row.
    """
    row, failures = first, 0
    while True:
        try:
            for number, content in shard.read(row):
                yield number, content
                row, failures = number + 1, 0
            return
        except Exception as error:
            what = f"{shard.file} cannot be read from {shard.unit} {shard.first + row} on: {type(error).__name__}: {error}"
            what = clean_urls(what) if "://" in what else what
            failures += 1
            if failures > retries or isinstance(error, FileNotFoundError | PermissionError):
                raise UnreadableShard(what) from error
            log.warning("%s; attempt %d of %d follows", what, failures + 1, retries + 1)
            wait_before(failures + 1)


def fetch(group: Group, wanted: Iterable[tuple[int, int]], retries: int) -> dict[tuple[int, int], Row]:
    """Single rows by (shard, row), such as those that waited in a buffer.

    Raises:
        UnreadableShard: as `rows_from`; also where a row is not there any more.
    """
    found = {}
    numbers: dict[int, list[int]] = {}
    for index, row in sorted(wanted):
        numbers.setdefault(index, []).append(row)
    for index, rows in numbers.items():
        source, shard = group[index]
        waiting = iter(rows)
        next_row = next(waiting)
        for number, content in rows_from(shard, next_row, retries if source.remote else 0):
            if number == next_row:
                found[index, number] = content
                next_row = next(waiting, None)
                if next_row is None:
                    break
        if next_row is not None:
            raise UnreadableShard(f"{shard.place(next_row)} is not there any more")
    return found


class GroupReader:
    """The rows of one lane of a group of sources that are read as one.

    Args:
        group: the shards.
        limit: rows of the group that take part; -1 for all.
        skip: of these, rows that are left out: those that a smaller limit would take.
        shuffle: whether pieces come in another order in each pass.
        interleaved: whether neighbouring rows go to different lanes.
        seed, epoch, lane, lanes: what the order follows from.
        retries: as in `rows_from`, for sources that are not local.
    """

    def __init__(
        self,
        group: Group,
        *,
        limit: int,
        skip: int,
        shuffle: bool,
        interleaved: bool,
        seed: int,
        epoch: int,
        lane: int,
        lanes: int,
        retries: int,
    ):
        self.group, self.limit, self.skip, self.seed = group, limit, skip, seed
        self.shuffle, self.interleaved = shuffle, interleaved
        self.epoch, self.lane, self.lanes, self.retries = epoch, lane, lanes, retries
        # Where a source does not tell its rows, a limit on them is kept by counting, and all lanes read all shards.
        self.counts = limit >= 0 and any(shard.rows is None for _, shard in group)
        self.set_position({"passes": 0})

    def set_position(self, position: dict[str, Any]) -> None:
        """Goes to where `position` was taken; {"passes": n} is the beginning of a pass."""
        self.passes = position["passes"]
        own = position.get("pieces")
        self.pieces = self._pieces_of_pass() if own is None else from_json(own)
        self.own, self.changed = own is not None, False
        self.at, self.row = position.get("at", 0), position.get("row")
        self.seen, self.failed = position.get("seen", 0), set(position.get("failed", ()))
        self.rows: Iterator[tuple[int, Row]] | None = None

    def position(self) -> dict[str, Any]:
        """Where the next row is, as JSON-able numbers."""
        done = self.at if self.changed else 0
        return {
            "passes": self.passes,
            "at": self.at - done,
            "row": self.row,
            # Those that the stream gave it are known there: it sends them only where they have changed.
            **(
                {"pieces": [list(p) for p in self.pieces[done:]]}
                if self.changed
                else {"given": True}
                if self.own
                else {}
            ),
            **({"seen": self.seen} if self.counts else {}),
            **({"failed": sorted(self.failed)} if self.failed else {}),
        }

    def restart(self) -> None:
        """Goes to the beginning of another pass, in an order of its own."""
        self.set_position({"passes": self.passes + 1})

    def _pieces_of_pass(self) -> list[Piece]:
        rows = [shard.rows for _, shard in self.group]
        chosen = chosen_pieces(rows, self.limit, self.seed if self.shuffle else None, self.skip)
        if self.counts:
            return chosen
        if self.shuffle:
            chosen = shuffled(chosen, (self.seed, self.epoch, 1))
        own = (interleave if self.interleaved else deal)(chosen, self.lane, self.lanes)
        # Further passes over a source of a mixture: the lane's own rows again, in another order.
        return (
            shuffled(own, (self.seed, self.epoch, self.lane, self.passes, 3)) if self.shuffle and self.passes else own
        )

    def rest(self) -> list[Piece]:
        """What has not been read of this pass."""
        pieces = self.pieces[self.at :]
        if pieces and self.row is not None:
            pieces[0] = pieces[0]._replace(start=self.row)
        return [p for p in pieces if p.stop is None or p.start < p.stop]

    def next_row(self) -> tuple[int, int, Row, bool] | None:
        """The next row as (shard, row, content, whether it is read for the first time), or None at the end of the pass.

        A shard that cannot be read is put last and tried again there.

        Raises:
            UnreadableShard: a shard failed in both attempts.
        """
        while self.at < len(self.pieces):
            piece = self.pieces[self.at]
            if self.row is None:
                self.row = piece.start
            if self.counts and self.seen >= self.limit:
                return None
            if self.rows is None:
                source, shard = self.group[piece.shard]
                self.rows = rows_from(shard, self.row, self.retries if source.remote else 0)
            try:
                number, content = next(self.rows, (None, None))
            except UnreadableShard as error:
                self._put_last(piece, error)
                continue
            if number is None or (piece.stop is not None and number >= piece.stop):
                self._next_piece(number, content)
                continue
            if self.counts:
                self.row, self.seen = number + 1, self.seen + 1
                if (self.seen - 1) % self.lanes == self.lane:
                    return piece.shard, number, content, True
            elif (number - piece.start) % piece.stride == 0:
                self.row = number + piece.stride
                return piece.shard, number, content, not piece.read_before
        return None

    def _next_piece(self, number: int | None, content: Row | None) -> None:
        """Goes on to the next piece; where it lies ahead in the same shard, without opening that anew."""
        before = self.pieces[self.at]
        self.at, self.row = self.at + 1, None
        after = self.pieces[self.at] if self.at < len(self.pieces) else None
        if number is not None and after is not None and after.shard == before.shard and after.start >= number:
            self.rows = _from(self.rows, number, content, after.start)
        else:
            self.rows = None

    def _put_last(self, piece: Piece, error: UnreadableShard) -> None:
        """All that is left of the shard, once. Where rows are shared by counting, all lanes have to see the same order."""
        if piece.shard in self.failed or self.counts:
            raise error
        self.failed.add(piece.shard)
        log.warning("%s; it is tried again when the rest is read", error)
        rest = self.rest()
        self.pieces = [p for p in rest if p.shard != piece.shard] + [p for p in rest if p.shard == piece.shard]
        self.own = self.changed = True
        self.at, self.row, self.rows = 0, None, None


def _from(rows: Iterator[tuple[int, Row]], number: int, content: Row, start: int) -> NumberedRows:
    """The rows with the one that has been taken off already, from `start` on."""
    if number >= start:
        yield number, content
    for following in rows:
        if following[0] >= start:
            yield following
