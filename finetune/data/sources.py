"""Opening what `data.train` and its siblings name, as lists of shards."""

import csv
import itertools
import logging
import os
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import datasets
import fsspec
from pydantic import Field

from finetune.config.mappings import Mapping, parse_mapping
from finetune.data.filters import Filters, parse_filters
from finetune.data.normalization import ScoreNormalization, TextNormalization
from finetune.data.retry import wait_before
from finetune.data.shards import (
    Shard,
    arrow_shards,
    dataset_shards,
    line_breaks,
    manifest_shards,
    parquet_shards,
    row_groups_of,
)
from finetune.data.storage import expand
from finetune.data.tarred import tarred_shards
from finetune.errors import UserError
from finetune.paths import check_access, looks_local, near_path
from finetune.security.archives import bound_headers

log = logging.getLogger(__name__)

ATTEMPTS = 3  # to open a source
MANIFEST_SUFFIXES = (".json", ".jsonl", ".ndjson")
COLUMNS = {
    "audio": ("audio", "audio_filepath", "wav", "flac", "mp3", "ogg", "opus"),
    "text": ("text", "sentence", "transcription", "transcript", "normalized_text", "raw_text", "txt"),
    "language": ("language", "lang", "locale", "target_lang"),
    "id": ("id", "__key__", "utt_id", "file_name"),
    "speaker": ("speaker", "speaker_id", "spk_id", "client_id", "session", "session_id"),
}
"""What columns are called where a source does not name them; the first one found counts."""


@dataclass
class StoredAudio(datasets.Audio):
    """Audio as it is in the file.

    `Audio(decode=False)` asks for torchcodec where a builder gives rows instead of tables (tar shards, audio folders),
    although it encodes nothing.
    """

    decode: bool = False

    def encode_example(self, value: object) -> dict[str, Any] | None:
        if isinstance(value, dict):
            return {"bytes": value.get("bytes"), "path": value.get("path")}
        return {"bytes": None, "path": None if value is None else str(value)}


class Source(Mapping):
    """One entry of `data.train`, `data.rehearsal`, `data.validation`, `data.test` or `data.guard`."""

    path: str
    """A NeMo manifest (.json, .jsonl), a folder or glob of parquet or tar shards, an audio folder, or a hub name."""
    split: str | None = None
    """Split of a folder or hub data set. Default: train, validation or test, after the key that it stands under."""
    name: str | None = None
    """Configuration of a hub data set."""
    revision: str | None = None
    """Revision of a hub data set."""
    language: str | None = None
    """Language of the utterances where no column says it."""
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Share in a mixture. With weights, an epoch is one pass over the first source; the others restart as needed."""
    distillation: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Factor of `model.distillation` for these clips of `data.train` or `data.rehearsal`; 0: they are not distilled.
    null: 1, but 0 for `data.train` where there is `data.rehearsal`."""
    audio_column: str | None = None
    text_column: str | None = None
    language_column: str | None = None
    id_column: str | None = None
    speaker_column: str | None = None
    """Speaker or session, whose clips `parakeet-finetune split` keeps together."""
    tarred_audio: str | None = None
    """Tar files of a NeMo manifest's audio, such as `audio__OP_0..127_CL_.tar`."""
    text_normalization: TextNormalization | None = None
    """Overrides `data.text_normalization`."""
    wer_normalization: ScoreNormalization | None = None
    """Overrides `data.wer_normalization` where the source is evaluated; alike in all sources of a list."""
    filters: dict[str, Any] | None = None
    """Filters of this source; their bounds override those of `data.filters`."""


@dataclass
class OpenSource:
    """An opened source, whose `shards` can be read one by one, each from any row on."""

    source: Source
    shards: list[Shard]
    folder: str | None = None
    """Directory or URL where relative audio paths start."""
    clips: int | None = None
    """Number of rows, where it is known without reading them."""
    columns: dict[str, str] = field(default_factory=dict)
    """Columns of audio, text, language, id and speaker; of a manifest's last two only where the source names them."""
    is_manifest: bool = False
    """A NeMo manifest: rows are lines of JSON, and `offset` and `duration` cut an utterance out of its file."""
    filters: Filters = Filters()
    """What leaves an utterance out; none for evaluations."""
    root: str | None = None
    """`data.root`, links resolved: audio that a row names is below it; None: anywhere."""
    remote: bool = False
    """Read over a network, where failures may pass."""
    rehearsal_share: float = 0.0
    """Share of the training clips that all sources of `data.rehearsal` have together; 0: it is none of them."""
    distillation: float = 1.0
    """Factor of `model.distillation` for its clips."""
    texts: int | None = None
    """Sum of the hashes of all its texts, where they were looked at: other clips have another."""

    @property
    def is_rehearsal(self) -> bool:
        return self.rehearsal_share > 0

    @property
    def reads_audio(self) -> bool:
        """Whether rows come with their audio only."""
        rows_alone = self.is_manifest and self.source.tarred_audio is None
        return not rows_alone and any(shard.light is None for shard in self.shards)


def parse_sources(value: Any, key: str, split: str) -> list[Source]:
    """Parse the sources that a key of the run file names: a string, a mapping, or a list of these.

    Raises:
        UserError: unknown keys, missing paths, or weights on only some sources.
    """
    sources = []
    for entry in value if isinstance(value, list) else [value]:
        if isinstance(entry, str):
            entry = {"path": entry}
        if not isinstance(entry, dict) or not isinstance(entry.get("path"), str) or not entry["path"]:
            raise UserError(f"{key}: a source is a path, or a mapping with `path`; found {entry!r}.")
        _check_split(entry.get("split"), entry["path"], key)
        sources.append(parse_mapping(Source, {"split": split, **entry}, key))
        parse_filters(sources[-1].filters, f"{key}.filters")
    if len({source.weight is None for source in sources}) > 1:
        raise UserError(f"{key}: give every source of the list a weight, or none.")
    if len({source.wer_normalization for source in sources}) > 1:
        raise UserError(f"{key}: give every source of the list the same wer_normalization; they share one WER.")
    return sources


def split_to_read(data: list[str], split: str | None, default: str) -> str:
    """Return the split that a command reads: what --split says, or the default.

    Raises:
        UserError: --split says what would choose nothing in any of `data`, which are not empty then.
    """
    if split is None:
        return default
    if "[" in split or not any(map(_has_splits, data)):
        _check_split(split, data[0], "--split")
    return split


def _check_split(split: object, path: str, key: str) -> None:
    """Raise UserError for a `split` that would choose nothing."""
    if split is None:
        return
    way_out = f"`parakeet-finetune split --data {shlex.quote(path)} --output DIR` splits data into manifests."
    if "[" in str(split):
        raise UserError(f"{key}: split {split!r}: a stream reads a split as a whole. {way_out}")
    if not _has_splits(path):
        raise UserError(
            f"{key}: `split` has no effect on {path}, which has no splits: all of it would be read. Leave it out. "
            + way_out
        )


def _has_splits(path: str) -> bool:
    """Return whether a source can have splits: a folder or a hub data set."""
    is_file = path.endswith(MANIFEST_SUFFIXES) or os.path.isfile(path) or any(c in path for c in "*?[")
    return not (is_file or "://" in path or os.path.isfile(os.path.join(path, "dataset_info.json")))


def open_source(source: Source, key: str, needs_text: bool = True) -> OpenSource:
    """Open a source without reading its utterances, with retries where a network may be at fault.

    Args:
        needs_text: whether a source without a column of texts is refused; else `text` stands for it.

    Raises:
        UserError: it is missing or empty, or lacks a column of audio or text.
    """
    for attempt in itertools.count(2):
        try:
            return _open_source(source, key, needs_text)
        except UserError as error:
            cause = error.__cause__
            lasting = not isinstance(cause, OSError) or isinstance(cause, FileNotFoundError | PermissionError)
            if lasting or attempt > ATTEMPTS or os.path.exists(source.path) or "Offline" in str(cause):
                raise
            log.warning("%s; attempt %d of %d follows", error, attempt, ATTEMPTS)
            wait_before(attempt)
    raise AssertionError("unreachable")


def _open_source(source: Source, key: str, needs_text: bool) -> OpenSource:
    path, split = source.path, f"{source.path} (split {source.split})"
    for url in (path, source.tarred_audio or ""):
        if "://" in url:
            _check_protocol(url, key)
        else:
            check_access(url, key)
    if path.endswith(MANIFEST_SUFFIXES):
        return _open_manifest(source, key)
    bound_headers()  # of the tar shards that `datasets` reads
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    if any(os.path.isfile(os.path.join(path, name)) for name in ("dataset_info.json", "dataset_dict.json")):
        return _open_arrow(source, key, needs_text)
    arguments, options = _how_to_load(source, key)
    try:
        dataset = datasets.load_dataset(*arguments, **options)
    except Exception as error:
        local = os.path.exists(path) or "data_files" in options
        hint = "" if local else f" It is no local path either; check the name and the network.{near_path(path)}"
        raise UserError(f"{key}: {split} cannot be opened: {_in_words(error)}{hint}") from error
    columns = _find_columns(source, list(dataset.features or _first_row(dataset, key, path)), key, needs_text)
    remote = "://" in path or (not os.path.exists(path) and "data_files" not in options)
    folder = path if os.path.isdir(path) else str(Path(path).parent) if os.path.isfile(path) else None
    files = _parquet_files(dataset)
    if files:
        try:
            shards = parquet_shards(files, [*columns.values(), "duration"], columns["audio"])
        except (OSError, ValueError) as error:
            raise UserError(f"{key}: {split} cannot be opened: {_in_words(error)}") from error
        if not shards:
            raise UserError(f"{key}: {split} is empty: it holds no clips.")
        clips = sum(shard.rows or 0 for shard in shards)
        return OpenSource(source, shards, folder, clips, columns, remote=remote)
    tables = getattr(dataset._ex_iterable, "kwargs", {}).get("metadata_files", ())
    if dataset.features and isinstance(dataset.features.get(columns["audio"]), datasets.Audio):
        dataset = dataset.cast_column(columns["audio"], StoredAudio())
    count = dataset.num_shards
    names = [f"{path}[{source.split}] shard {i + 1} of {count}" for i in range(count)]
    info = (dataset.info.splits or {}).get(source.split)
    clips = _rows_of_folder(tables) if info is None else info.num_examples
    return OpenSource(source, dataset_shards(dataset, names), folder, clips or None, columns, remote=remote)


def _check_protocol(url: str, key: str) -> None:
    protocol = url.split("://")[0]
    try:
        fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        extra = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs"}.get(protocol)
        install = f": pip install -c constraints.txt -e '.[{extra}]'" if extra else f" ({_first_line(error)})"
        raise UserError(f"{key}: {url} needs a package that is not installed{install}.") from error
    except ValueError as error:
        raise UserError(f"{key}: {url}: {protocol}:// is no storage that fsspec knows.") from error


def _how_to_load(source: Source, key: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of `datasets.load_dataset`."""
    path = source.path
    options: dict[str, Any] = {"split": source.split, "streaming": True}
    if source.name:
        options["name"] = source.name
    if any(c in path for c in "*?["):
        files = expand(path)
        if not files:
            raise UserError(f"{key}: no file matches {path} (looked in {Path.cwd()}).")
        return (_builder_for(files[0], key),), {**options, "split": "train", "data_files": files}
    if os.path.isfile(path) or "://" in path:
        return (_builder_for(path, key),), {**options, "split": "train", "data_files": [path]}
    if os.path.isdir(path):
        if not any(files for _, _, files in os.walk(path)):
            raise UserError(f"{key}: the directory {path} is empty.")
        return (path,), options
    if looks_local(path):
        raise UserError(f"{key}: there is no file or directory {path} (looked in {Path.cwd()}).{near_path(path)}")
    return (path,), {**options, "revision": source.revision}


def _parquet_files(dataset: datasets.IterableDataset) -> list[str]:
    """Return the parquet files of a streamed data set; none for other formats."""
    arguments = getattr(dataset._ex_iterable, "kwargs", {})
    files = [str(file) for file in arguments.get("files", ())] if "row_groups_list" in arguments else []
    return files if all(file.split("?")[0].endswith(".parquet") for file in files) else []


def _rows_of_folder(tables: Iterable[tuple[str, ...]]) -> int | None:
    """Return the rows of an audio folder, by its metadata files; None where these are not on this machine."""
    rows = 0
    for file in (str(table[-1]) for table in tables):
        if not os.path.isfile(file):
            return None
        if file.endswith(".csv"):
            try:
                with open(file, encoding="utf-8", newline="") as lines:
                    rows += sum(1 for row in csv.reader(lines) if row) - 1
            except (ValueError, csv.Error):  # reading reports it
                return None
        elif file.endswith(".parquet"):
            rows += sum(row_groups_of(file))
        else:
            breaks, _, blank = line_breaks(file)
            rows += len(breaks) - blank
    return rows or None


def _open_arrow(source: Source, key: str, needs_text: bool) -> OpenSource:
    """Open a data set that `save_to_disk` wrote."""
    dataset = datasets.load_from_disk(source.path)
    if isinstance(dataset, dict):
        if source.split not in dataset:
            raise UserError(f"{key}: {source.path} has no split {source.split!r}; it has {sorted(dataset)}.")
        dataset = dataset[source.split]
    if not len(dataset):
        raise UserError(f"{key}: {source.path} (split {source.split}) is empty: it holds no clips.")
    columns = _find_columns(source, dataset.column_names, key, needs_text)
    if isinstance(dataset.features.get(columns["audio"]), datasets.Audio):
        dataset = dataset.cast_column(columns["audio"], datasets.Audio(decode=False))
    name = f"{source.path}[{source.split}]"
    return OpenSource(source, arrow_shards(dataset, name), source.path, len(dataset), columns)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {_first_line(error)}"


def _builder_for(file: str, key: str) -> str:
    for suffix, builder in ((".parquet", "parquet"), (".arrow", "arrow"), (".tar", "webdataset"), (".csv", "csv")):
        if file.endswith(suffix):
            return builder
    raise UserError(
        f"{key}: {file} is neither a manifest ({', '.join(MANIFEST_SUFFIXES)}) nor .parquet, .arrow or .tar."
    )


def _first_row(dataset: datasets.IterableDataset, key: str, path: str) -> dict[str, Any]:
    for row in dataset.take(1):
        return row
    raise UserError(f"{key}: {path} is empty: it holds no clips.")


def _find_columns(source: Source, columns: list[str], key: str, needs_text: bool) -> dict[str, str]:
    found = {}
    for role, guesses in COLUMNS.items():
        named = getattr(source, f"{role}_column")
        if named is not None and named not in columns:
            raise UserError(f"{key}: {source.path} has no column {named!r}; it has {columns}.")
        column = named or next((c for c in guesses if c in columns), None)
        if column is not None:
            found[role] = column
        elif role == "text" and not needs_text:
            found[role] = role
        elif role in ("audio", "text"):
            raise UserError(
                f"{key}: {source.path} has no column of {role}; it has {columns}. Set `{role}_column` of the source."
            )
    return found


def _open_manifest(source: Source, key: str) -> OpenSource:
    path, remote = source.path, "://" in source.path
    if source.tarred_audio:
        shards, clips = tarred_shards(path, source.tarred_audio, key)
    else:
        if not remote and not os.path.isfile(path):
            raise UserError(f"{key}: there is no manifest {path} (looked in {Path.cwd()}).{near_path(path)}")
        try:
            shards, clips = manifest_shards(path)
        except OSError as error:
            raise UserError(f"{key}: the manifest {path} cannot be read: {_in_words(error)}") from error
    if not shards:
        raise UserError(f"{key}: the manifest {path} is empty.")
    columns = {
        "audio": source.audio_column or "audio_filepath",
        "text": source.text_column or "text",
        "id": source.id_column or "id",
    }
    for role in ("language", "speaker"):
        if named := getattr(source, f"{role}_column"):
            columns[role] = named
    folder = path.rsplit("/", 1)[0] if remote else str(Path(path).parent)
    return OpenSource(source, shards, folder, clips, columns, is_manifest=True, remote=remote)
