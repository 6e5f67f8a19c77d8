"""Streams over a small corpus, and what the tests of sources and order ask of them."""

import functools
import io
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import soundfile
import torch

from finetune.data.batch import Batch
from finetune.data.batching import BatchLimits
from finetune.data.filters import Filters, parse_filters
from finetune.data.options import StreamOptions
from finetune.data.sources import (
    OpenSource,
    open_source,
    parse_sources,
)
from finetune.data.stream import UtteranceStream

RATE = 16_000
ROWS = 47
SHARDS = 5
HELD_OUT = 6


def encode(text: str) -> list[int]:
    return [ord(c) for c in text]


def flac(samples_S: np.ndarray) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples_S, RATE, format="FLAC")
    return file.getvalue()


def write_parquet(path: Path, rows: list[dict[str, Any]], columns: tuple[str, ...] = ()) -> None:
    """Rows (id, audio, text, language, duration) as one parquet file, on demand under other column names."""
    table = pa.Table.from_pylist(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table.rename_columns(list(columns)) if columns else table, path, row_group_size=5)


@functools.cache
def opened(value: str, folder: str) -> list[OpenSource]:
    """Opened once for all streams of a place, as in a run."""
    return [open_source(source, "data.train") for source in parse_sources(json.loads(value), "data.train", "train")]


def make_stream(value: Any, *, rank: int = 0, ranks: int = 1, workers: int = 0, **options: Any) -> UtteranceStream:
    """A stream over what a run file would name, in small windows so that there are several."""
    bounds = Filters(min_duration=options.pop("min_duration", None), max_duration=options.pop("max_duration", None))
    sources = [
        replace(source, filters=parse_filters(source.source.filters, "filters", bounds))
        for source in opened(json.dumps(value), os.getcwd())
    ]
    limits = BatchLimits(options.pop("batch_size", 4), options.pop("seconds", 0.0), options.pop("cells", 0))
    defaults = {"limits": limits, "sample_rate": RATE, "seed": 1, "shuffle_buffer_size": 9}
    return UtteranceStream(
        sources, StreamOptions(**{**defaults, **options}), encode, rank=rank, ranks=ranks, workers=workers
    )


def read_epoch(stream: UtteranceStream) -> list[Batch]:
    batches = list(stream.batches())
    stream.next_epoch()
    return batches


def ids(batches: list[Batch]) -> list[str]:
    return [clip_id for batch in batches for clip_id in batch.ids]


def all_ids(rows: int = ROWS) -> list[str]:
    return [f"clip{i:02d}" for i in range(rows)]


def same_batches(first: list[Batch], second: list[Batch]) -> bool:
    """Whether two lists of batches hold the same clips, padding and reports, in the same order."""
    if len(first) != len(second):
        return False
    for a, b in zip(first, second, strict=True):
        if (a.ids, a.texts, a.languages, a.worker_shard) != (b.ids, b.texts, b.languages, b.worker_shard):
            return False
        if (a.rows_read, a.quarantined, a.filtered, a.error) != (b.rows_read, b.quarantined, b.filtered, b.error):
            return False
        for name in ("audio_BS", "audio_lengths_B", "tokens_BU", "token_lengths_B"):
            x, y = getattr(a, name), getattr(b, name)
            if (x is None) != (y is None) or (x is not None and not torch.equal(x, y)):
                return False
    return True


def check_resume(make: Callable[[], UtteranceStream], epoch: int, cuts: list[int] | None) -> None:
    """A stream that is stopped after some batches of an epoch and made anew goes on as if it had not been.

    Args:
        make: makes the stream anew.
        epoch: in which epoch it is stopped.
        cuts: after how many batches, negative ones from the end; None for each number of batches.
    """
    unbroken = make()
    for _ in range(epoch):
        unbroken.next_epoch()
    whole, following = read_epoch(unbroken), read_epoch(unbroken)
    assert len(whole) > 8
    for cut in range(len(whole) + 1) if cuts is None else [c % (len(whole) + 1) for c in cuts]:
        stopped = make()
        for _ in range(epoch):
            stopped.next_epoch()
        iterator = stopped.batches()
        head = [next(iterator) for _ in range(cut)]
        state = json.loads(json.dumps(stopped.state_dict()))
        del iterator
        resumed = make()
        assert resumed.load_state_dict([state]) == []
        assert same_batches(head + list(resumed.batches()), whole), f"cut after {cut} batches"
        if cut == len(whole) // 2 or (cuts and cut == cuts[0]):
            resumed.next_epoch()
            assert same_batches(list(resumed.batches()), following), f"the epoch after the cut at {cut}"
