"""The stream of batches: which clip comes when, and how a run continues at exactly the next one.

A DataLoader worker reads, decodes and batches one lane (`finetune.data.worker_shards`), and each batch carries the lane's position
behind it: where its readers are and which rows wait in its buffer, as numbers, so a checkpoint needs some ten kilobytes a lane.
Lane l belongs to rank l % ranks, so R ranks with W workers see what one rank with R x W workers sees.

B batch, S samples, U target tokens.
"""

import functools
import json
import logging
import math
import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import reduction
from typing import Any

import numpy as np
import torch

from finetune.data import decode as decode_module
from finetune.data.batching import Entry
from finetune.data.decode import BadClip, Unreachable, as_float
from finetune.data.filters import FilteredClip
from finetune.data.options import StreamOptions
from finetune.data.order import Piece, as_pieces, deal
from finetune.data.sources import OpenSource
from finetune.data.utterances import Clip, decode
from finetune.data.worker_lifetime import begin_worker, ends_with_this_process
from finetune.data.worker_shards import FINISHED, Lane, Position, Report, Sources, make_readers

log = logging.getLogger(__name__)

ORDERING = ("seed", "shuffle", "interleave")
SUBSET = ("max_samples", "skip_samples")
SAVED = (*ORDERING, "shuffle_buffer_size", "shuffle_buffer_bytes", "group_by_duration", "max_samples", "skip_samples")


@dataclass
class Batch:
    """One batch of one lane. Its tensors are None where a lane only reports what it left out."""

    ids: list[str]
    texts: list[str]
    languages: list[str]
    audio_BS: torch.Tensor | None
    """float32 in [-1, 1]; int16 in 1/32768 where all files of the batch are of 16 bit and unchanged (see `as_float`)."""
    audio_lengths_B: torch.Tensor | None
    tokens_BU: torch.Tensor | None
    token_lengths_B: torch.Tensor | None
    lane: int
    position: Position
    quarantined: list[dict[str, str]] = field(default_factory=list)
    filtered: dict[str, int] = field(default_factory=dict)
    rows_read: int = 0
    error: str | None = None
    feasible_B: torch.Tensor | None = None
    """Whether an alignment exists for each clip; filled in by the training loop."""

    def __getstate__(self) -> dict[str, Any]:
        """What a DataLoader worker sends: the audio in shared memory, the small tensors in the message itself."""
        state = {k: v.numpy() if isinstance(v, torch.Tensor) else v for k, v in self.__dict__.items()}
        if torch.utils.data.get_worker_info() is not None and self.audio_BS is not None:
            try:
                state["audio_BS"] = _lend(state["audio_BS"])
            except (
                OSError
            ) as error:  # too many open files, a long TMPDIR; an error here would be a batch that never comes
                _warn_of_slow_way(str(error))
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        if isinstance(state["audio_BS"], tuple):
            state["audio_BS"] = _take(*state["audio_BS"])
        self.__dict__.update({k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in state.items()})

    def pin_memory(self) -> "Batch":
        for name in ("audio_BS", "audio_lengths_B", "tokens_BU", "token_lengths_B"):
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, tensor.pin_memory())
        return self


@functools.cache
def _warn_of_slow_way(error: str) -> None:
    log.warning("a worker sends its audio through a pipe, which is slower: memory cannot be shared (%s)", error)


def _lend(array: np.ndarray) -> tuple[Any, tuple[int, ...], str]:
    """Copies an array into memory without a name, for the process that reads what is returned. One write: touching pages of
    shared memory one by one, as torch's tensors in it do, costs a fault for every 4 KiB."""
    file = os.fdopen(os.memfd_create("batch"), "wb", buffering=0)
    with file:
        rest = memoryview(array).cast("B")
        while rest:
            rest = rest[file.write(rest) :]
        return reduction.DupFd(file.fileno()), array.shape, array.dtype.str


def _take(handle: Any, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    descriptor = handle.detach()
    try:
        size = math.prod(shape) * np.dtype(dtype).itemsize
        memory = mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)
    return np.frombuffer(memory, dtype=dtype).reshape(shape)


def collate(clips: list[Clip], lane: int, position: Position) -> Batch:
    """Pads clips to the longest of the batch; no clips give a batch without tensors."""
    if not clips:
        return Batch([], [], [], None, None, None, None, lane, position)
    audio_lengths_B = np.array([len(c.audio_S) for c in clips], dtype=np.int64)
    token_lengths_B = np.array([len(c.tokens) for c in clips], dtype=np.int64)
    compact = all(clip.audio_S.dtype == np.int16 for clip in clips)
    audio_BS = np.empty((len(clips), audio_lengths_B.max()), dtype=np.int16 if compact else np.float32)
    tokens_BU = np.zeros((len(clips), token_lengths_B.max()), dtype=np.int64)
    for i, clip in enumerate(clips):
        audio_S = clip.audio_S if compact else as_float(torch.from_numpy(clip.audio_S)).numpy()
        audio_BS[i, : len(audio_S)], audio_BS[i, len(audio_S) :] = audio_S, 0
        tokens_BU[i, : len(clip.tokens)] = clip.tokens
    return Batch(
        [c.id for c in clips],
        [c.text for c in clips],
        [c.language for c in clips],
        torch.from_numpy(audio_BS),
        torch.from_numpy(audio_lengths_B),
        torch.from_numpy(tokens_BU),
        torch.from_numpy(token_lengths_B),
        lane,
        position,
    )


class LaneDataset(torch.utils.data.IterableDataset):
    """What a DataLoader worker iterates: the batches of its lane from a position on."""

    def __init__(
        self,
        sources: Sources,
        options: StreamOptions,
        encode: Callable[[str], list[int]],
        epoch: int,
        rank: int,
        ranks: int,
        workers: int,
        first_worker: int,
        positions: dict[int, Position],
    ):
        self.sources, self.options, self.encode = sources, options, encode
        self.epoch, self.rank, self.ranks, self.workers = epoch, rank, ranks, workers
        self.first_worker, self.positions = first_worker, positions

    def __iter__(self) -> Iterator[Batch]:
        info = torch.utils.data.get_worker_info()
        worker = (self.first_worker + (info.id if info else 0)) % self.workers
        number = worker * self.ranks + self.rank
        position = self.positions.get(number)
        if position == FINISHED:
            return
        lane = Lane(
            self.sources,
            self.options,
            self.encode,
            epoch=self.epoch,
            lane=number,
            lanes=self.ranks * self.workers,
            worker=worker,
            position=position,
        )
        decode_module.download_retries = self.options.read_retries
        for entries, report, position in lane.batches():
            try:
                clips = decode_all(entries, self.options, self.epoch, report)
            except Unreachable as error:
                clips, report.error = [], str(error)
            batch = collate(clips, number, position)
            batch.quarantined, batch.filtered = report.quarantined, report.filtered
            batch.rows_read, batch.error = report.rows_read, report.error
            yield batch
            if batch.error:
                return


def decode_all(entries: list[Entry], options: StreamOptions, epoch: int, report: Report) -> list[Clip]:
    """The clips of a batch; those that cannot be used go into the report."""
    clips = []
    for entry in entries:
        try:
            clips.append(decode(entry, options, epoch))
        except FilteredClip as reason:
            report.filter(str(reason))
        except BadClip as reason:
            report.quarantine(entry.id, entry.place, str(reason))
    if options.fits is None or not clips:
        return clips
    fitting = options.fits([len(clip.audio_S) for clip in clips], [len(clip.tokens) for clip in clips])
    for _ in range(fitting.count(False)):
        report.filter("more_tokens_than_frames")
    return [clip for clip, fits in zip(clips, fitting, strict=True) if fits]


class ClipStream:
    """The batches of one rank, and the position in them.

    Args:
        sources: opened sources; with weights they are a mixture, without they are read as one.
        options: how rows become batches.
        encode: text to token ids; raises BadClip.
        rank, ranks: this process and how many there are.
        workers: DataLoader workers; 0 reads in this process.
        prefetch_factor: batches that each worker keeps ready.
        pin_memory: whether batches are put into page-locked memory.
    """

    def __init__(
        self,
        sources: list[OpenSource],
        options: StreamOptions,
        encode: Callable[[str], list[int]],
        *,
        rank: int = 0,
        ranks: int = 1,
        workers: int = 0,
        prefetch_factor: int = 4,
        pin_memory: bool = False,
    ):
        self.options, self.encode = options, encode
        self.rank, self.ranks, self.workers = rank, ranks, workers
        self.prefetch_factor, self.pin_memory = prefetch_factor, pin_memory
        self.sources = group_sources(sources, options.max_samples)
        self.epoch = 0
        self.next_worker = 0
        self.positions: dict[int, Position] = {}
        # What lanes read that does not follow from the epoch alone: lists of pieces, one a group of sources.
        self.given: dict[int, list[list[list[int]] | None]] = {}

    def batches(self) -> Iterator[Batch]:
        """The rest of the present epoch. After each batch the stream's position lies behind it."""
        lanes = max(1, self.workers)
        for lane in list(self.positions):
            self._take_position(lane, self._whole(lane))  # positions are told from here on
        dataset = LaneDataset(
            self.sources, self.options, self.encode, self.epoch, self.rank, self.ranks,
            lanes, self.next_worker, dict(self.positions),
        )  # fmt: skip
        # A generator of its own: the loader draws a seed at each start, which must not move torch's global one.
        loader = torch.utils.data.DataLoader(
            dataset,
            batch_size=None,
            num_workers=self.workers,
            prefetch_factor=self.prefetch_factor if self.workers else None,
            pin_memory=self.pin_memory,
            worker_init_fn=ends_with_this_process(begin_worker) if self.workers else None,
            generator=torch.Generator().manual_seed(0),
        )
        for batch in loader:
            if batch.error is None:  # so that a run continues with the shard that could not be read
                self._take_position(batch.lane, batch.position)
            self.next_worker = (batch.lane // self.ranks + 1) % lanes
            yield batch

    def next_epoch(self) -> None:
        """Goes to the beginning of the next epoch. A separate call, since other ranks may still have batches of this one."""
        self.epoch, self.next_worker, self.positions, self.given = self.epoch + 1, 0, {}, {}

    def snapshot(self) -> Any:
        """The position, for `go_back`."""
        return dict(self.positions), {lane: list(pieces) for lane, pieces in self.given.items()}, self.next_worker

    def go_back(self, snapshot: Any) -> None:
        """Takes back the batches since a snapshot of the same epoch, for the next `batches` or checkpoint."""
        self.positions, self.given, self.next_worker = snapshot

    def _whole(self, lane: int) -> Position:
        """A lane's position with the pieces that it does not send along."""
        position = self.positions[lane]
        if "readers" not in position:
            return position
        given = self.given.get(lane, [None] * len(position["readers"]))
        readers = [
            {**{k: v for k, v in r.items() if k not in ("given", "at")}, "at": 0, "pieces": pieces[r["at"] :]}
            if r.get("given")
            else r
            for r, pieces in zip(position["readers"], given, strict=True)
        ]
        return {**position, "readers": readers}

    def _take_position(self, lane: int, position: Position) -> None:
        """Keeps a position, and the pieces in it."""
        self.positions[lane] = position
        for g, reader in enumerate(position.get("readers", ())):
            if "pieces" in reader:
                self.given.setdefault(lane, [None] * len(position["readers"]))[g] = reader["pieces"]

    def state_dict(self) -> dict[str, Any]:
        """Position of this rank as JSON-able numbers."""
        return {
            "epoch": self.epoch,
            "next_worker": self.next_worker,
            "rank": self.rank,
            "ranks": self.ranks,
            "workers": self.workers,
            "shards": self.sources.digest(),
            "options": {name: getattr(self.options, name) for name in SAVED}
            | {"limits": json.loads(json.dumps(asdict(self.options.limits)))},
            "positions": {str(lane): _plain(self._whole(lane)) for lane in self.positions},
        }

    def load_state_dict(self, states: list[dict[str, Any]]) -> list[str]:
        """Continues where `state_dict` was taken on all ranks.

        With the same ranks and workers the batches that follow are the same. With others, the rest of the epoch is dealt out
        anew: nothing is lost and nothing comes twice, in another order.

        Args:
            states: of every rank of the run that was saved.

        Returns:
            What changes the order of the clips, such as another seed or another number of ranks; where the sources are
            others, the stream stands at the beginning of the next epoch.
        """
        first = states[0]
        self.epoch = first["epoch"]
        now = self.state_dict()
        if first["shards"] != now["shards"] or any(first["options"][n] != now["options"][n] for n in SUBSET):
            self.next_epoch()
            return [f"the sources or data.max_samples are others: the stream begins epoch {self.epoch}"]
        changes = [
            f"{name} was {first['options'][name]} and is {now['options'][name]}"
            for name in (*SAVED, "limits")
            if first["options"][name] != now["options"][name]
        ]
        alike = (first["ranks"], max(1, first["workers"])) == (self.ranks, max(1, self.workers))
        if alike and all(first["options"][name] == now["options"][name] for name in ORDERING):
            own = next(state for state in states if state["rank"] == self.rank)
            self.next_worker = own["next_worker"]
            self.positions, self.given = {}, {}
            for lane, position in own["positions"].items():
                self._take_position(int(lane), position)
            return changes
        if not alike:
            changes.append(
                f"{first['ranks']} ranks x {first['workers']} workers are {self.ranks} x {self.workers} now"
            )
        return [*changes, *self._deal_anew(states)]

    def _deal_anew(self, states: list[dict[str, Any]]) -> list[str]:
        """Deals what the lanes of before have not given out over the lanes of now."""
        first = states[0]
        positions = {int(lane): p for state in states for lane, p in state["positions"].items()}
        before = first["ranks"] * max(1, first["workers"])
        options = replace(self.options, **{name: first["options"][name] for name in ORDERING})
        rest: list[list[Piece]] = [[] for _ in self.sources.groups]
        waiting: list[list[int]] = []
        passes = [0] * len(rest)
        for lane in range(before):
            position = positions.get(lane)
            if position == FINISHED:
                continue
            for g, reader in enumerate(make_readers(self.sources, options, self.epoch, lane, before)):
                if reader.counts:
                    self.next_epoch()
                    return [
                        "data.max_samples with a source that does not tell its rows cannot be dealt out anew: the "
                        f"stream begins epoch {self.epoch}"
                    ]
                if position is not None:
                    reader.set_position(position["readers"][g])
                    waiting += [ref for ref in np.asarray(position["buffer"]).reshape(-1, 4).tolist() if ref[0] == g]
                # Sources of a mixture begin again as needed: those that went furthest say which pass it is.
                if reader.passes > passes[g]:
                    passes[g], rest[g] = reader.passes, []
                if reader.passes == passes[g]:
                    rest[g] += reader.rest()
        # Of a mixture's other sources the rows of the pass before come again in this one.
        waited = [[(s, row) for group, n, s, row in waiting if (group, n) == (g, passes[g])] for g in range(len(rest))]
        lanes = self.ranks * max(1, self.workers)
        self.next_worker, self.positions, self.given = 0, {}, {}
        for worker in range(max(1, self.workers)):
            lane = worker * self.ranks + self.rank
            readers = [
                {
                    "passes": n,
                    "at": 0,
                    "row": None,
                    "pieces": [list(p) for p in _deal_parts(as_pieces(again), pieces, lane, lanes)],
                }
                for n, again, pieces in zip(passes, waited, rest, strict=True)
            ]
            position = {"readers": readers, "draws": 0, "drawn": 0, "exhausted": False, "buffer": []}
            self._take_position(lane, position)
        return []


def _deal_parts(waited: list[Piece], pieces: list[Piece], lane: int, lanes: int) -> list[Piece]:
    """The lane's part of the rows that waited in buffers, and of the others."""
    return deal(waited, lane, lanes) + deal(pieces, lane, lanes)


def _plain(position: Position) -> Position:
    if "buffer" not in position:
        return position
    return {**position, "buffer": np.asarray(position["buffer"]).tolist()}


def group_sources(sources: list[OpenSource], max_samples: int) -> Sources:
    """Sources without weights as one group, those with weights as one group each, with their shares of `max_samples`."""
    weighted = [s.source.weight for s in sources]
    if weighted[0] is None:
        return Sources([[(s, shard) for s in sources for shard in s.shards]], None, [max_samples])
    weights = [w / sum(weighted) for w in weighted]
    limits = [-1 if max_samples < 0 else max(1, round(max_samples * w)) for w in weights]
    return Sources([[(s, shard) for shard in s.shards] for s in sources], weights, limits)
