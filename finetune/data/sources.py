"""Opening what `data.train` and its siblings name, as lists of `datasets.IterableDataset`, one a shard."""

import glob
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import datasets

from finetune.errors import UserError

MANIFEST_CHUNK_BYTES = 8 * 2**20
MANIFEST_SUFFIXES = (".json", ".jsonl", ".ndjson")
TEXT_COLUMNS = ("text", "sentence", "transcription", "transcript", "normalized_text", "raw_text", "txt")
LANGUAGE_COLUMNS = ("language", "lang", "locale")
AUDIO_COLUMNS = ("audio", "audio_filepath", "wav", "flac", "mp3", "ogg", "opus")
BAD_LINE = "(bad line)"  # no key of a manifest
ID_COLUMNS = ("id", "__key__", "utt_id", "file_name")


@dataclass
class StoredAudio(datasets.Audio):
    """Audio as it lies in the file. `Audio(decode=False)` asks for torchcodec where a builder gives rows instead of tables
    (tar shards, audio folders), although it encodes nothing."""

    decode: bool = False

    def encode_example(self, value: Any) -> dict[str, Any] | None:
        if isinstance(value, dict):
            return {"bytes": value.get("bytes"), "path": value.get("path")}
        return {"bytes": None, "path": None if value is None else str(value)}


@dataclass
class Source:
    """One entry of `data.train`, `data.validation`, `data.test` or `data.guard`."""

    path: str
    """A NeMo manifest (.json, .jsonl), a folder or glob of parquet or tar shards, an audio folder, or a hub name."""
    split: str | None = None
    """Split of a folder or hub data set. Default: train, validation or test, after the key that it stands under."""
    name: str | None = None
    """Configuration of a hub data set."""
    revision: str | None = None
    """Revision of a hub data set."""
    language: str | None = None
    """Language of the clips where no column says it."""
    weight: float | None = None
    """Share in a mixture. With weights, an epoch is one pass over the first source; the others start again as needed."""
    audio_column: str | None = None
    text_column: str | None = None
    language_column: str | None = None
    id_column: str | None = None


@dataclass
class OpenSource:
    """An opened source: `shards` can be read one by one, each from any row on."""

    source: Source
    shards: list[Any]
    shard_names: list[str]
    folder: Path | None = None
    """Where relative audio paths start."""
    clips: int | None = None
    """Number of rows, where it is known without reading them."""
    columns: dict[str, str] = field(default_factory=dict)
    """Columns of audio, text, language and id."""
    is_manifest: bool = False
    """A NeMo manifest: rows are lines of JSON, and `offset` and `duration` cut a clip out of its file."""


def parse_sources(value: Any, key: str, split: str) -> list[Source]:
    """The sources that a key of the run file names.

    Args:
        value: a string, a mapping, or a list of these.
        key: the key, for messages, such as "data.train".
        split: the split that is meant where none is given.

    Raises:
        UserError: unknown keys, missing paths, or weights on only some sources.
    """
    entries = value if isinstance(value, list) else [value]
    known = [f.name for f in fields(Source)]
    sources = []
    for entry in entries:
        if isinstance(entry, str):
            entry = {"path": entry}
        if not isinstance(entry, dict) or not isinstance(entry.get("path"), str) or not entry["path"]:
            raise UserError(f"{key}: a source is a path, or a mapping with `path`; found {entry!r}.")
        unknown = sorted(set(entry) - set(known))
        if unknown:
            raise UserError(f"{key}: unknown keys {unknown} in a source; known are {known}.")
        sources.append(Source(**{"split": split, **entry}))
    weighted = [s.weight is not None for s in sources]
    if any(weighted) and not all(weighted):
        raise UserError(f"{key}: give every source of the list a weight, or none.")
    for weight in (s.weight for s in sources if s.weight is not None):
        if not isinstance(weight, int | float) or not 0 < weight < math.inf:
            raise UserError(f"{key}: a weight is a number above 0, found {weight!r}.")
    return sources


def open_source(source: Source, key: str) -> OpenSource:
    """Opens a source without reading its clips.

    Raises:
        UserError: it is not there, is empty, or lacks a column of audio or text.
    """
    path = source.path
    if path.endswith(MANIFEST_SUFFIXES):
        return _open_manifest(source, key)
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    options: dict[str, Any] = {"split": source.split, "streaming": True}
    if any(c in path for c in "*?["):
        files = sorted(glob.glob(path, recursive=True))
        if not files:
            raise UserError(f"{key}: no file matches {path} (looked in {Path.cwd()}).")
        builder, options["split"] = _builder_for(files[0], key), "train"
        arguments: tuple[Any, ...] = (builder,)
        options["data_files"] = files
    elif os.path.isfile(path):
        arguments, options["split"] = (_builder_for(path, key),), "train"
        options["data_files"] = [path]
    elif os.path.isdir(path):
        if not any(files for _, _, files in os.walk(path)):
            raise UserError(f"{key}: the directory {path} is empty.")
        arguments = (path,)
    elif path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise UserError(f"{key}: there is no file or directory {path} (looked in {Path.cwd()}).")
    else:
        arguments = (path,)
        options["revision"] = source.revision
    if source.name:
        options["name"] = source.name
    try:
        dataset = datasets.load_dataset(*arguments, **options)
    except Exception as error:
        local = os.path.exists(path) or "data_files" in options
        hint = "" if local else " It is no local path either; check the name and the network."
        raise UserError(
            f"{key}: {path} (split {source.split}) cannot be opened: {type(error).__name__}: {_first_line(error)}{hint}"
        ) from error
    columns = _find_columns(source, list(dataset.features or _first_row(dataset, key, path)), key)
    if dataset.features and isinstance(dataset.features.get(columns["audio"]), datasets.Audio):
        dataset = dataset.cast_column(columns["audio"], StoredAudio())
    shards = [dataset.shard(num_shards=dataset.num_shards, index=i) for i in range(dataset.num_shards)]
    names = [f"{path}[{source.split}] shard {i + 1} of {len(shards)}" for i in range(len(shards))]
    rows = _rows_of_parquet_files(path, source.split, source.name)
    if rows is not None and len(rows) == len(shards):  # a file without rows would be an error when it is read
        shards, names = ([x for x, n in zip(these, rows, strict=True) if n] for these in (shards, names))
    splits = dataset.info.splits or {}
    clips = splits[source.split].num_examples if source.split in splits else rows and sum(rows)
    if rows is not None and not sum(rows):
        raise UserError(f"{key}: {path} (split {source.split}) is empty: it holds no clips.")
    folder = Path(path) if os.path.isdir(path) else Path(path).parent if os.path.isfile(path) else None
    return OpenSource(source, shards, names, folder, clips or None, columns)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def _builder_for(file: str, key: str) -> str:
    for suffix, builder in ((".parquet", "parquet"), (".arrow", "arrow"), (".tar", "webdataset"), (".csv", "csv")):
        if file.endswith(suffix):
            return builder
    raise UserError(
        f"{key}: {file} is neither a manifest ({', '.join(MANIFEST_SUFFIXES)}) nor .parquet, .arrow or .tar."
    )


def _first_row(dataset: Any, key: str, path: str) -> dict[str, Any]:
    for row in dataset.take(1):
        return row
    raise UserError(f"{key}: {path} is empty: it holds no clips.")


def _find_columns(source: Source, columns: list[str], key: str) -> dict[str, str]:
    found = {}
    wanted = {
        "audio": (source.audio_column, AUDIO_COLUMNS, True),
        "text": (source.text_column, TEXT_COLUMNS, True),
        "language": (source.language_column, LANGUAGE_COLUMNS, False),
        "id": (source.id_column, ID_COLUMNS, False),
    }
    for role, (named, guesses, required) in wanted.items():
        if named is not None and named not in columns:
            raise UserError(f"{key}: {source.path} has no column {named!r}; it has {columns}.")
        column = named or next((c for c in guesses if c in columns), None)
        if column is None and required:
            raise UserError(
                f"{key}: {source.path} has no column of {role}; it has {columns}. Set `{role}_column` of the source."
            )
        if column is not None:
            found[role] = column
    return found


def _rows_of_parquet_files(path: str, split: str | None, name: str | None) -> list[int] | None:
    """Rows of each local parquet file, from the footers; None for anything else."""
    import pyarrow.parquet as pq

    if any(c in path for c in "*?["):
        files = sorted(glob.glob(path, recursive=True))
    elif os.path.isfile(path):
        files = [path]
    elif os.path.isdir(path):
        files = [str(f) for f in (datasets.load_dataset_builder(path, name).config.data_files or {}).get(split, [])]
    else:
        return None
    if not files or not all(f.endswith(".parquet") and os.path.isfile(f) for f in files):
        return None
    return [pq.read_metadata(f).num_rows for f in files]


def _open_manifest(source: Source, key: str) -> OpenSource:
    path = Path(source.path)
    if not path.is_file():
        raise UserError(f"{key}: there is no manifest {path} (looked in {Path.cwd()}).")
    size = path.stat().st_size
    if size == 0:
        raise UserError(f"{key}: the manifest {path} is empty.")
    bounds = manifest_chunks(path)
    shards = [
        datasets.IterableDataset.from_generator(
            read_manifest_chunk, gen_kwargs={"path": str(path), "start": a, "end": b}
        )
        for a, b in bounds
    ]
    with path.open("rb") as file:
        clips = sum(block.count(b"\n") for block in iter(lambda: file.read(2**22), b""))
        file.seek(-1, os.SEEK_END)
        clips += file.read(1) != b"\n"
    names = [f"{path} bytes {a} to {b}" for a, b in bounds]
    columns = {"audio": "audio_filepath", "text": "text", "language": "lang", "id": "id"}
    for role, named in (
        ("audio", source.audio_column),
        ("text", source.text_column),
        ("language", source.language_column),
        ("id", source.id_column),
    ):
        columns[role] = named or columns[role]
    return OpenSource(source, shards, names, path.parent, clips, columns, is_manifest=True)


def manifest_chunks(path: Path, size: int = MANIFEST_CHUNK_BYTES) -> list[tuple[int, int]]:
    """Byte ranges of about `size` that begin and end at line breaks."""
    end = path.stat().st_size
    bounds, start = [], 0
    with path.open("rb") as file:
        while start < end:
            file.seek(min(start + size, end))
            file.readline()
            stop = min(file.tell(), end)
            bounds.append((start, stop))
            start = stop
    return bounds


def read_manifest_chunk(path: str, start: int, end: int) -> Iterator[dict[str, bytes]]:
    """Lines of a part of a NeMo manifest, as they are; `plain_row` reads them."""
    with open(path, "rb") as file:
        file.seek(start)
        while file.tell() < end:
            line = file.readline()
            if line.strip():
                yield {"line": line}  # one column of bytes: rows of a manifest may differ in their keys and types


def plain_row(stored: dict[str, bytes]) -> dict[str, Any]:
    """The row of a manifest's line; for a line that cannot be read, a row whose BAD_LINE says why."""
    try:
        row = json.loads(stored["line"])
    except (ValueError, RecursionError) as error:
        return {BAD_LINE: f"the line is not valid JSON: {error}"}
    return row if isinstance(row, dict) else {BAD_LINE: "the line is not valid JSON: it is not a JSON object"}
