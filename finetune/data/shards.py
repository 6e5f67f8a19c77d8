"""Shards: parts of a source that can be read from any row on, without what lies before where the format allows it."""

import io
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np

from finetune.data.storage import open_binary
from finetune.security.secrets import clean_urls

if TYPE_CHECKING:
    import datasets

MANIFEST_CHUNK_BYTES = 2**18  # some thousand lines: a limit on the samples takes whole chunks in random order
SMALLEST_CHUNK_BYTES = 2**12
CHUNKS_OF_A_SMALL_MANIFEST = 64
SCAN_BYTES = 2**22
PARQUET_BUFFER_BYTES = 2**23
ROWS_AT_ONCE = 16
FOOTERS_AT_ONCE = 16
LONGEST_LINE = 2**24
BAD_LINE = "(bad line)"  # no key of a manifest

Row = dict[str, Any]
NumberedRows = Iterator[tuple[int, Row]]


@dataclass(frozen=True)
class Shard:
    """A part of a source."""

    file: str
    """What it is a part of."""
    unit: str
    """"line", counted from 1, or "row", counted from 0."""
    first: int
    """Number of its first row in the file."""
    rows: int | None
    """Number of rows, blank lines included; None where only reading tells."""
    read: Callable[[int], NumberedRows]
    """The rows from a number within the shard on, each with its number."""
    light: Callable[[int], NumberedRows] | None = None
    """The same without the audio, where that spares reading it."""

    def place(self, row: int) -> str:
        """Name a row for people."""
        file = clean_urls(self.file) if "://" in self.file else self.file
        return f"{file} {self.unit} {self.first + row}"


# ---- manifests -----------------------------------------------------------------------------------------------------


def manifest_shards(path: str, chunk_bytes: int | None = None) -> tuple[list[Shard], int]:
    """Cut a NeMo manifest into chunks at line breaks; also return the number of lines that are not blank.

    The file is read once for its line breaks, a gigabyte in a few seconds; its length decides that of a chunk.
    """
    breaks, size, blank = line_breaks(path)
    chunk = chunk_bytes or min(max(size // CHUNKS_OF_A_SMALL_MANIFEST, SMALLEST_CHUNK_BYTES), MANIFEST_CHUNK_BYTES)
    ends = breaks + 1
    # The line break at or behind each multiple of the chunk's length ends a chunk.
    last_lines = np.unique(np.searchsorted(ends, np.arange(chunk, size + chunk, chunk)).clip(max=len(ends) - 1))
    bounds = [(0, 0), *((int(ends[i]), i + 1) for i in last_lines.tolist())]
    shards = []
    for (start, first), (end, behind) in pairwise(bounds):
        shards.append(Shard(path, "line", first + 1, behind - first, partial(read_manifest_chunk, path, start, end)))
    return shards, len(ends) - blank


def line_breaks(path: str) -> tuple[np.ndarray, int, int]:
    """Return a file's line breaks (one is added to a last line without), its bytes, and its blank lines."""
    found, offset, last = [], 0, b""
    with open_binary(path) as file:
        while block := file.read(SCAN_BYTES):
            found.append(np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == 10) + offset)
            offset += len(block)
            last = block[-1:]
    if last not in (b"", b"\n"):
        found.append(np.array([offset]))
    breaks = np.concatenate(found) if found else np.zeros(0, dtype=np.int64)
    # Lines of no character, or of a carriage return; longer ones of white space are found when they are read.
    short = np.flatnonzero(np.diff(breaks, prepend=-1) <= 2)
    blank = 0
    if len(short):
        with open_binary(path) as file:
            for i in short:
                start = int(breaks[i - 1]) + 1 if i else 0
                file.seek(start)
                blank += not file.read(int(breaks[i]) - start).strip()
    return breaks, offset, blank


def read_manifest_chunk(path: str, start: int, end: int, first: int = 0) -> NumberedRows:
    """Read a part of a manifest from a line of it on. Blank lines have a number and are no rows."""
    if "://" in path:  # in one request; a remote file's readline fetches and searches a block of megabytes
        system, inner = fsspec.core.url_to_fs(path)
        content = system.cat_file(inner, start=start, end=end)
    else:
        with open(path, "rb") as file:
            file.seek(start)
            content = file.read(end - start)
    for number, line in enumerate(io.BytesIO(content)):
        if number >= first and line.strip():
            yield number, parse_line(line)


def parse_line(line: bytes) -> Row:
    """Parse a manifest's line; a bad one becomes a row whose BAD_LINE tells why."""
    if len(line) > LONGEST_LINE:
        return {BAD_LINE: f"the line has {len(line):,} bytes; {LONGEST_LINE:,} at most are expected"}
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        return {BAD_LINE: f"the line is not valid JSON: {error}"}
    return row if isinstance(row, dict) else {BAD_LINE: "the line is not valid JSON: it is not a JSON object"}


# ---- parquet -------------------------------------------------------------------------------------------------------


def parquet_shards(files: list[str], columns: list[str], audio: str | None = None) -> list[Shard]:
    """Make one shard a row group, so that reading can begin in the middle of a file; empty row groups are left out.

    Shards read `columns`; `Shard.light` leaves out `audio`.

    Raises:
        OSError, pyarrow.ArrowInvalid: a file is missing, or no parquet file.
    """
    with ThreadPoolExecutor(FOOTERS_AT_ONCE) as pool:
        counts = list(pool.map(row_groups_of, files))
    shards, light = [], [name for name in columns if name != audio]
    for file, rows_of_groups in zip(files, counts, strict=True):
        first = 0
        for group, rows in enumerate(rows_of_groups):
            if rows:
                read, read_light = (partial(read_row_group, file, group, names) for names in (columns, light))
                shards.append(Shard(file, "row", first, rows, read, read_light))
            first += rows
    return shards


def row_groups_of(file: str) -> list[int]:
    """Return the rows of each row group of a parquet file."""
    import pyarrow.parquet as pq

    with open_binary(file) as opened:
        footer = pq.read_metadata(opened)
    return [footer.row_group(i).num_rows for i in range(footer.num_row_groups)]


def read_row_group(file: str, group: int, columns: list[str], first: int = 0) -> NumberedRows:
    """Read a row group from a row on."""
    import pyarrow.parquet as pq

    with open_binary(file) as opened:
        # With a buffer pyarrow reads page by page; without one, the group's whole column at once.
        parquet = pq.ParquetFile(opened, buffer_size=PARQUET_BUFFER_BYTES)
        present = [name for name in columns if name in parquet.schema_arrow.names]
        number = 0
        for batch in parquet.iter_batches(batch_size=ROWS_AT_ONCE, row_groups=[group], columns=present):
            if number + len(batch) > first:
                skipped = max(first - number, 0)
                yield from enumerate(batch.slice(skipped).to_pylist(), number + skipped)
            number += len(batch)


# ---- everything else that `datasets` reads -------------------------------------------------------------------------


def dataset_shards(dataset: "datasets.IterableDataset", names: list[str]) -> list[Shard]:
    """Return the shards of a `datasets.IterableDataset`, whose numbers of rows are unknown."""
    count = dataset.num_shards
    return [Shard(names[i], "row", 0, None, partial(read_dataset_shard, dataset, count, i)) for i in range(count)]


def read_dataset_shard(dataset: "datasets.IterableDataset", count: int, index: int, first: int = 0) -> NumberedRows:
    """Read a shard from a row on; those before it are read and dropped.

    `IterableDataset.__iter__` gives rows to the first DataLoader worker only; `iter` leaves the sharding to the
    caller.
    """
    shard = dataset.shard(num_shards=count, index=index)
    number = first
    for columns in (shard.skip(first) if first else shard).iter(batch_size=ROWS_AT_ONCE):
        for values in zip(*columns.values(), strict=True):
            yield number, dict(zip(columns, values, strict=True))
            number += 1


def arrow_shards(dataset: "datasets.Dataset", name: str, rows: int = 1000) -> list[Shard]:
    """Cut a `datasets.Dataset` on the disk into shards."""
    starts = range(0, len(dataset), rows)
    return [
        Shard(name, "row", start, min(rows, len(dataset) - start), partial(read_stretch, dataset, start, rows))
        for start in starts
    ]


def read_stretch(dataset: "datasets.Dataset", start: int, rows: int, first: int = 0) -> NumberedRows:
    """Read one of `arrow_shards` from a row on."""
    for number in range(first, min(rows, len(dataset) - start)):
        yield number, dataset[start + number]
