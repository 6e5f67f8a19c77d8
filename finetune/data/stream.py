"""The stream of batches: which clip comes when, and how a run continues at exactly the next one.

A DataLoader worker reads, decodes and batches one lane (`finetune.data.lanes`), and each batch carries the lane's position
behind it, so a checkpoint needs a few numbers a lane. Lane l belongs to rank l % ranks, so R ranks with W workers see what
one rank with R x W workers sees.

B batch, S samples, U target tokens.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from finetune.data.clips import Clip, FilteredClip, make_clip, row_id
from finetune.data.decode import BadClip
from finetune.data.lanes import StreamOptions, UnreadableShard, read_lane
from finetune.data.sources import OpenSource

REPORT_AFTER_ROWS = 200


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
                        {"id": row_id(source, place, row), "source": place, "reason": str(reason)}
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
            if batch.error is None:  # so that a run continues with the shard that could not be read
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
