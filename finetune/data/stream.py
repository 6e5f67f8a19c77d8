"""The stream of batches: which clip comes when, and how a run continues at exactly the next one.

Clips are spread over *lanes*, one for each DataLoader worker of each rank. A lane reads its shards row by row, shuffles
them in windows, decodes, and forms batches. The order within a lane follows from (seed, epoch, lane, position) alone, and
each batch carries the lane's position behind it, so a checkpoint needs a few numbers a lane and resuming reads no more
than a window again. Lane l belongs to rank l % ranks, so R ranks with W workers see what one rank with R x W workers sees.

B batch, S samples, U target tokens.
"""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from finetune.data.decode import BadClip, decode_audio
from finetune.data.sources import OpenSource
from finetune.data.text import normalize_text


REPORT_AFTER_ROWS = 200


class UnreadableShard(Exception):
    """A shard that cannot be read on; the text names it and the row."""


@dataclass
class Batch:
    """One batch of one lane. Its tensors are None where a lane only reports what it left out at its end."""

    ids: list[str]
    texts: list[str]
    languages: list[str]
    audio_BS: torch.Tensor | None
    audio_lengths_B: torch.Tensor | None
    tokens_BU: torch.Tensor | None
    token_lengths_B: torch.Tensor | None
    lane: int
    position: dict[str, Any]
    quarantined: list[dict[str, str]] = field(default_factory=list)
    filtered: dict[str, int] = field(default_factory=dict)
    rows_read: int = 0
    error: str | None = None
    feasible_B: torch.Tensor | None = None
    """Whether an alignment exists for each clip; filled in by the training loop."""

    def pin_memory(self) -> "Batch":
        for name in ("audio_BS", "audio_lengths_B", "tokens_BU", "token_lengths_B"):
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, tensor.pin_memory())
        return self


@dataclass
class StreamOptions:
    """How rows become batches."""

    batch_size: int
    sample_rate: int
    seed: int = 0
    shuffle: bool = True
    shuffle_buffer_size: int = 512
    group_by_duration: bool = False
    max_samples: int = -1
    min_duration: float = 0.0
    max_duration: float = float("inf")
    text_normalization: str = "none"
    keep_empty_text: bool = False


@dataclass
class Clip:
    """One decoded clip."""

    id: str
    text: str
    language: str
    audio_S: np.ndarray
    tokens: list[int]


class FilteredClip(Exception):
    """A clip left out by a filter: counted, not an error. The text is the filter's name."""


def lane_shards(
    group: list[tuple[OpenSource, int]], options: StreamOptions, epoch: int, lane: int, lanes: int
) -> tuple[list[tuple[OpenSource, int]], int, int]:
    """The shards that a lane reads in an epoch, and which of their rows: those with index % step == offset.

    With fewer shards than lanes, or a limit on the samples, every lane walks over all shards and takes each `lanes`-th row.
    """
    by_rows = options.max_samples >= 0 or len(group) < lanes
    order = list(range(len(group)))
    if options.shuffle and options.max_samples < 0:
        order = list(np.random.default_rng((options.seed, epoch, 1)).permutation(len(group)))
    if by_rows:
        return [group[i] for i in order], lanes, lane
    return [group[i] for i in order[lane::lanes]], 1, 0


def iterate_rows(dataset: Any) -> Iterator[dict[str, Any]]:
    """Rows of a one-shard IterableDataset.

    Its `__iter__` would give them to the first DataLoader worker only; `iter` leaves the sharding to the lanes.
    """
    for columns in dataset.iter(batch_size=16):
        for values in zip(*columns.values(), strict=True):
            yield dict(zip(columns, values, strict=True))


class GroupReader:
    """Reads the rows of one group of sources in order, from any position on, and starts again when told to."""

    def __init__(self, group: list[tuple[OpenSource, int]], options: StreamOptions, epoch: int, lane: int, lanes: int):
        self.group, self.options, self.epoch, self.lane, self.lanes = group, options, epoch, lane, lanes
        self.set_position({"passes": 0, "shard": 0, "row": 0, "seen": 0})

    def set_position(self, position: dict[str, int]) -> None:
        self.passes, self.shard, self.row, self.seen = (position[k] for k in ("passes", "shard", "row", "seen"))
        # A pass is as good as an epoch for the order of the shards; the factor keeps the two apart.
        self.shards, self.step, self.offset = lane_shards(
            self.group, self.options, self.epoch + 1_000_003 * self.passes, self.lane, self.lanes
        )
        self.rows: Iterator[dict[str, Any]] | None = None

    def position(self) -> dict[str, int]:
        return {"passes": self.passes, "shard": self.shard, "row": self.row, "seen": self.seen}

    def restart(self) -> None:
        self.set_position({"passes": self.passes + 1, "shard": 0, "row": 0, "seen": 0})

    def next_row(self) -> tuple[OpenSource, str, dict[str, Any]] | None:
        """The next row of this lane as (source, place, row), or None at the end of the pass."""
        limit = self.options.max_samples
        while self.shard < len(self.shards):
            source, index = self.shards[self.shard]
            if limit >= 0 and self.seen >= limit:
                return None
            if self.rows is None:
                dataset = source.shards[index]
                self.rows = iterate_rows(dataset.skip(self.row) if self.row else dataset)
            try:
                row = next(self.rows)
            except StopIteration:
                self.shard, self.row, self.rows = self.shard + 1, 0, None
                continue
            except Exception as error:
                raise UnreadableShard(
                    f"{source.shard_names[index]} cannot be read from row {self.row} on: {type(error).__name__}: {error}"
                ) from error
            place = f"{source.shard_names[index]} row {self.row}"
            self.row += 1
            self.seen += 1
            if (self.seen - 1) % self.step == self.offset:
                return source, place, row
        return None


def read_lane(
    groups: list[list[tuple[OpenSource, int]]],
    weights: list[float] | None,
    options: StreamOptions,
    epoch: int,
    lane: int,
    lanes: int,
    position: dict[str, Any] | None,
) -> Iterator[tuple[OpenSource, str, dict[str, Any], dict[str, Any], bool]]:
    """Rows of one lane in training order, each with the position behind it and whether a batch has to end there."""
    readers = [GroupReader(group, options, epoch, lane, lanes) for group in groups]
    window, skip = 0, 0
    if position is not None:
        window, skip = position["window"], position["taken"]
        for reader, start in zip(readers, position["readers"], strict=True):
            reader.set_position(start)
    size = max(1, options.shuffle_buffer_size) if options.shuffle else 64
    while True:
        start = [reader.position() for reader in readers]
        random = np.random.default_rng((options.seed, epoch, lane, window, 2))
        rows, finished = _draw(readers, weights, random, size)
        order, batch_ends = order_window([row for _, _, row in rows], options, random)
        for taken in range(skip, len(rows)):
            position = {"readers": start, "window": window, "taken": taken + 1}
            yield *rows[order[taken]], position, taken + 1 in batch_ends
        if finished:
            return
        window, skip = window + 1, 0


def order_window(
    rows: list[dict[str, Any]], options: StreamOptions, random: np.random.Generator
) -> tuple[np.ndarray, set[int]]:
    """The order of a window's rows, and after how many of them a batch has to end.

    Grouped by duration, neighbours in length share a batch and the batches are shuffled; without it rows are shuffled.
    """
    order = random.permutation(len(rows)) if options.shuffle else np.arange(len(rows))
    if not options.group_by_duration:
        return order, set()
    durations = np.array([row_duration(row) or 0.0 for row in rows])
    order = order[np.argsort(durations[order], kind="stable")]
    batches = [order[i : i + options.batch_size] for i in range(0, len(order), options.batch_size)]
    if options.shuffle:
        batches = [batches[i] for i in random.permutation(len(batches))]
    ends = np.cumsum([len(batch) for batch in batches])
    return np.concatenate(batches) if batches else order, {int(end) for end in ends}


def row_duration(row: dict[str, Any]) -> float | None:
    """Seconds as the row states them, or None where it does not, or states no number."""
    if row.get("_row"):
        row = json.loads(row["_row"])
    duration = row.get("duration")
    is_number = isinstance(duration, int | float) and not isinstance(duration, bool) and math.isfinite(duration)
    return float(duration) if is_number else None


def _draw(
    readers: list[GroupReader], weights: list[float] | None, random: np.random.Generator, size: int
) -> tuple[list[tuple[OpenSource, str, dict[str, Any]]], bool]:
    """Up to `size` rows, and whether the epoch ends with them. The first group decides where it ends."""
    rows: list[tuple[OpenSource, str, dict[str, Any]]] = []
    while len(rows) < size:
        chosen = 0 if weights is None else int(random.choice(len(readers), p=weights))
        row = readers[chosen].next_row()
        if row is None and chosen == 0:
            return rows, True
        if row is None:
            readers[chosen].restart()
            row = readers[chosen].next_row()
            if row is None:  # this lane has no rows of that source
                continue
        rows.append(row)
    return rows, False


def make_clip(
    source: OpenSource, place: str, row: dict[str, Any], options: StreamOptions, encode: Callable[[str], list[int]]
) -> Clip:
    """Checks, decodes and tokenises one row.

    Raises:
        BadClip: it cannot be used; FilteredClip: a filter leaves it out.
    """
    offset = None
    if "_error" in row:  # a line of a manifest
        if row["_error"]:
            raise BadClip(row["_error"])
        row = json.loads(row["_row"])
        offset = row.get("offset")  # NeMo's manifests cut clips out of longer recordings so
        if not isinstance(offset, int | float | None) or (offset is not None and not 0 <= offset < float("inf")):
            raise BadClip(f"offset is a number of seconds, found {offset!r}")
    columns = source.columns
    text = row.get(columns["text"])
    if not isinstance(text, str):
        raise BadClip(f"no text in column {columns['text']!r}")
    duration = row_duration(row)
    if duration is not None:
        _filter_duration(duration, options)
    text = normalize_text(text, options.text_normalization)
    if not text and not options.keep_empty_text:
        raise FilteredClip("empty_text")
    tokens = encode(text)
    if columns["audio"] not in row:
        raise BadClip(f"no audio in column {columns['audio']!r}")
    audio_S = decode_audio(row[columns["audio"]], options.sample_rate, source.folder, offset, duration)
    _filter_duration(len(audio_S) / options.sample_rate, options)
    if len(audio_S) < options.sample_rate // 50:
        raise BadClip(f"the audio is too short for one frame of features ({len(audio_S)} samples)")
    language = str(row.get(columns.get("language", "")) or source.source.language or "")
    return Clip(row_id(source, place, row), text, language, audio_S, tokens)


def row_id(source: OpenSource, place: str, row: dict[str, Any]) -> str:
    """The clip's id: its id column, the path of its audio, or its place in the source."""
    if isinstance(row.get("_row"), str):
        row = json.loads(row["_row"])
    named = row.get(source.columns.get("id", ""))
    if named:
        return str(named)
    audio = row.get(source.columns["audio"])
    path = audio.get("path") if isinstance(audio, dict) else audio
    return str(path) if isinstance(path, str) and path else place


def _filter_duration(seconds: float, options: StreamOptions) -> None:
    if seconds < options.min_duration:
        raise FilteredClip("shorter_than_min_duration")
    if seconds > options.max_duration:
        raise FilteredClip("longer_than_max_duration")


def text_encoder(tokenizer: Any) -> Callable[[str], list[int]]:
    """Encodes texts with a NeMo SentencePiece tokenizer; a text with unknown characters is a BadClip that names them."""
    unknown_id = tokenizer.tokenizer.unk_id() if hasattr(tokenizer.tokenizer, "unk_id") else None

    def encode(text: str) -> list[int]:
        ids = tokenizer.text_to_ids(text)
        if unknown_id is not None and unknown_id in ids:
            unknown = sorted({c for c in text if not c.isspace() and unknown_id in tokenizer.text_to_ids(c)})
            raise BadClip(
                f"the tokenizer has no piece for {''.join(unknown) or text!r}; normalise the texts "
                "(data.text_normalization: basic) or use a model whose tokenizer covers them"
            )
        return ids

    return encode


def collate(clips: list[Clip], lane: int, position: dict[str, Any]) -> Batch:
    """Pads clips to the longest of the batch."""
    audio_lengths_B = torch.tensor([len(c.audio_S) for c in clips], dtype=torch.int64)
    token_lengths_B = torch.tensor([len(c.tokens) for c in clips], dtype=torch.int64)
    audio_BS = torch.zeros(len(clips), int(audio_lengths_B.max()))
    tokens_BU = torch.zeros(len(clips), int(token_lengths_B.max()), dtype=torch.int64)
    for i, clip in enumerate(clips):
        audio_BS[i, : len(clip.audio_S)] = torch.from_numpy(clip.audio_S)
        tokens_BU[i, : len(clip.tokens)] = torch.tensor(clip.tokens, dtype=torch.int64)
    return Batch(
        [c.id for c in clips],
        [c.text for c in clips],
        [c.language for c in clips],
        audio_BS,
        audio_lengths_B,
        tokens_BU,
        token_lengths_B,
        lane,
        position,
    )


class LaneDataset(torch.utils.data.IterableDataset):
    """What a DataLoader worker iterates: the batches of its lane from a position on."""

    def __init__(
        self,
        groups: list[list[tuple[OpenSource, int]]],
        weights: list[float] | None,
        options: StreamOptions,
        encode: Callable[[str], list[int]],
        epoch: int,
        rank: int,
        ranks: int,
        workers: int,
        first_worker: int,
        positions: dict[int, dict[str, Any]],
    ):
        self.groups, self.weights, self.options, self.encode = groups, weights, options, encode
        self.epoch, self.rank, self.ranks, self.workers = epoch, rank, ranks, workers
        self.first_worker, self.positions = first_worker, positions

    def __iter__(self) -> Iterator[Batch]:
        info = torch.utils.data.get_worker_info()
        worker = (self.first_worker + (info.id if info else 0)) % self.workers
        lane = worker * self.ranks + self.rank
        position = self.positions.get(lane)
        if position is not None and position.get("finished"):
            return
        clips: list[Clip] = []
        report = Batch([], [], [], None, None, None, None, lane, {})
        rows = read_lane(
            self.groups, self.weights, self.options, self.epoch, lane, self.ranks * self.workers, position
        )
        try:
            for source, place, row, position, batch_ends in rows:
                report.rows_read += 1
                try:
                    clips.append(make_clip(source, place, row, self.options, self.encode))
                except FilteredClip as reason:
                    report.filtered[str(reason)] = report.filtered.get(str(reason), 0) + 1
                except BadClip as reason:
                    report.quarantined.append(
                        {"id": _safe_id(source, place, row), "source": place, "reason": str(reason)}
                    )
                if not clips and report.rows_read >= REPORT_AFTER_ROWS:
                    # Nothing usable for long: the loop hears of it now and not at the end of the data.
                    report.position = position
                    yield report
                    report = Batch([], [], [], None, None, None, None, lane, {})
                if len(clips) == self.options.batch_size or (batch_ends and clips):
                    yield _with_report(collate(clips, lane, position), report)
                    clips, report = [], Batch([], [], [], None, None, None, None, lane, {})
        except UnreadableShard as error:
            report.error = str(error)
        finished = {"finished": True}
        yield _with_report(collate(clips, lane, finished) if clips else report, report, finished)


def _safe_id(source: OpenSource, place: str, row: dict[str, Any]) -> str:
    try:
        return row_id(source, place, row)
    except (ValueError, KeyError, AttributeError):
        return place


def _with_report(batch: Batch, report: Batch, position: dict[str, Any] | None = None) -> Batch:
    batch.quarantined, batch.filtered = report.quarantined, report.filtered
    batch.rows_read, batch.error = report.rows_read, report.error
    if position is not None:
        batch.position = position
    return batch


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
        weighted = [s.source.weight for s in sources]
        if weighted[0] is None:
            self.groups = [[(s, i) for s in sources for i in range(len(s.shards))]]
            self.weights = None
        else:
            self.groups = [[(s, i) for i in range(len(s.shards))] for s in sources]
            self.weights = [w / sum(weighted) for w in weighted]
        self.epoch = 0
        self.next_worker = 0
        self.positions: dict[int, dict[str, Any]] = {}

    def batches(self) -> Iterator[Batch]:
        """The rest of the present epoch. After each batch the stream's position lies behind it."""
        lanes = max(1, self.workers)
        dataset = LaneDataset(
            self.groups, self.weights, self.options, self.encode, self.epoch, self.rank, self.ranks,
            lanes, self.next_worker, dict(self.positions),
        )  # fmt: skip
        # A generator of its own: the loader draws a seed at each start, which must not move torch's global one.
        loader = torch.utils.data.DataLoader(
            dataset,
            batch_size=None,
            num_workers=self.workers,
            prefetch_factor=self.prefetch_factor if self.workers else None,
            pin_memory=self.pin_memory,
            generator=torch.Generator().manual_seed(0),
        )
        for batch in loader:
            self.positions[batch.lane] = batch.position
            self.next_worker = (batch.lane // self.ranks + 1) % lanes
            yield batch

    def next_epoch(self) -> None:
        """Goes to the beginning of the next epoch. A separate call, since other ranks may still have batches of this one."""
        self.epoch, self.next_worker, self.positions = self.epoch + 1, 0, {}

    def state_dict(self) -> dict[str, Any]:
        """Position of this rank as JSON-able numbers."""
        return {
            "epoch": self.epoch,
            "next_worker": self.next_worker,
            "ranks": self.ranks,
            "workers": self.workers,
            "shards": [source.shard_names[i] for group in self.groups for source, i in group],
            "options": {k: v for k, v in asdict(self.options).items() if v != float("inf")},
            "positions": {str(lane): position for lane, position in self.positions.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """Continues where `state_dict` was taken.

        Returns:
            What changes the order of the clips, such as another seed or another source. Positions mean nothing then, and
            the stream stands at the beginning of the next epoch.

        Raises:
            ValueError: another number of ranks or workers, which would give other lanes.
        """
        for name in ("ranks", "workers"):
            if state[name] != getattr(self, name):
                raise ValueError(f"the stream was saved with {state[name]} {name} and now has {getattr(self, name)}")
        self.epoch, self.next_worker = state["epoch"], state["next_worker"]
        self.positions = {int(lane): position for lane, position in state["positions"].items()}
        now = self.state_dict()
        ordering = ["seed", "shuffle", "shuffle_buffer_size", "group_by_duration", "max_samples"]
        if self.options.group_by_duration:
            ordering.append("batch_size")
        changes = [
            f"{name} was {state['options'][name]} and is {now['options'][name]}"
            for name in ordering
            if state["options"][name] != now["options"][name]
        ]
        if state["shards"] != now["shards"]:
            changes.append("the sources are others")
        if changes:
            self.next_epoch()
        return changes
