"""The stream of batches of one rank: which utterance comes when, and how a run continues at exactly the next one.

A DataLoader worker reads, decodes and batches one worker shard (`finetune.data.worker_shards`). Worker shard n belongs
to rank n % ranks, so R ranks with W workers see what one rank with R x W workers sees. Each batch carries the position
behind it (`finetune.data.position`).
"""

import copy
import json
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from finetune.data.batch import Batch
from finetune.data.options import StreamOptions
from finetune.data.position import FINISHED, ORDERING, SAVED, SUBSET, Position, reshard
from finetune.data.reader import group_sources
from finetune.data.sources import OpenSource
from finetune.data.worker_lifetime import begin_worker, ends_with_this_process
from finetune.data.worker_shards import WorkerShard

Encode = Callable[[str], list[int]]


class WorkerShardDataset(torch.utils.data.IterableDataset):
    """What a DataLoader worker iterates: the batches of its worker shard from a position on."""

    def __init__(self, stream: "UtteranceStream"):
        self.stream = copy.copy(stream)  # as it stands now: the stream itself moves on

    def __iter__(self) -> Iterator[Batch]:
        s, info = self.stream, torch.utils.data.get_worker_info()
        workers = max(1, s.workers)
        worker = (s.next_worker + (info.id if info else 0)) % workers
        number = worker * s.ranks + s.rank
        position = s.positions.get(number)
        if position == FINISHED:
            return
        count = s.ranks * workers
        yield from WorkerShard(s.sources, s.options, s.encode, s.epoch, number, count, worker, position).batches()


class UtteranceStream:
    """The batches of one rank, and the position in them.

    Args:
        sources: opened sources; with weights they are a mixture, without they are read as one.
        options: how rows become batches.
        encode: text to token ids; raises BadUtterance.
        rank, ranks: this process and how many there are.
        workers: DataLoader workers; 0 reads in this process.
        prefetch_factor: batches that each worker keeps ready.
        pin_memory: whether batches are put into page-locked memory.
    """

    def __init__(
        self,
        sources: list[OpenSource],
        options: StreamOptions,
        encode: Encode,
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
        """By the number of the worker shard."""

    @property
    def worker_shards(self) -> range:
        """Numbers of this rank's worker shards."""
        return range(self.rank, self.ranks * max(1, self.workers), self.ranks)

    def batches(self) -> Generator[Batch, None, None]:
        """Yield the rest of the present epoch. After each batch the stream's position lies behind it."""
        # A generator of its own: the loader draws a seed at each start, which must not move torch's global one.
        loader = torch.utils.data.DataLoader(
            WorkerShardDataset(self),
            batch_size=None,
            num_workers=self.workers,
            prefetch_factor=self.prefetch_factor if self.workers else None,
            pin_memory=self.pin_memory,
            worker_init_fn=ends_with_this_process(begin_worker) if self.workers else None,
            generator=torch.Generator().manual_seed(0),
        )
        for batch in loader:
            if batch.error is None:  # else a resumed run continues with the shard that could not be read
                self.positions[batch.worker_shard] = batch.position
            self.next_worker = (batch.worker_shard // self.ranks + 1) % max(1, self.workers)
            yield batch

    def next_epoch(self) -> None:
        """Go to the next epoch. A separate call, since other ranks may still have batches of this one."""
        self.epoch, self.next_worker, self.positions = self.epoch + 1, 0, {}

    def snapshot(self) -> tuple[dict[int, Position], int]:
        """Return the position, for `go_back`."""
        return dict(self.positions), self.next_worker

    def go_back(self, snapshot: tuple[dict[int, Position], int]) -> None:
        """Take back the batches since a snapshot of the same epoch, for the next `batches` or checkpoint."""
        self.positions, self.next_worker = snapshot

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's position as JSON-able numbers."""
        return {
            "epoch": self.epoch,
            "next_worker": self.next_worker,
            "rank": self.rank,
            "ranks": self.ranks,
            "workers": self.workers,
            "shards": self.sources.digest(),
            "options": {name: getattr(self.options, name) for name in SAVED}
            | {"limits": json.loads(json.dumps(asdict(self.options.limits)))},
            "positions": {
                str(number): {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in position.items()}
                for number, position in self.positions.items()
            },
        }

    def load_state_dict(self, states: list[dict[str, Any]]) -> list[str]:
        """Continue where `state_dict` was taken on all ranks.

        With the same ranks and workers the batches that follow are the same. With others, the rest of the epoch is
        dealt anew (`reshard`): nothing is lost and nothing comes twice, in another order.

        Args:
            states: of every rank of the run that was saved.

        Returns:
            What changes the order of the utterances, such as another seed or another number of ranks. Where the
            sources are others, the stream stands at the beginning of the next epoch.
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
            self.positions = {int(number): position for number, position in own["positions"].items()}
            return changes
        if not alike:
            changes.append(
                f"{first['ranks']} ranks x {first['workers']} workers are {self.ranks} x {self.workers} now"
            )
        dealt = reshard(states, self.sources, self.options, self.worker_shards, self.ranks * max(1, self.workers))
        if dealt is None:
            self.next_epoch()
            changes.append(
                "data.max_samples with a source that does not tell its rows cannot be dealt out anew: the "
                f"stream begins epoch {self.epoch}"
            )
        else:
            self.next_worker, self.positions = 0, dealt
        return changes
