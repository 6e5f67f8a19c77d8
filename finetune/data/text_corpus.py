"""The texts of data sets, without their audio where the format allows that."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.data.batching import BatchLimits
from finetune.data.normalization import normalize_text
from finetune.data.options import StreamOptions
from finetune.data.reader import Sources
from finetune.data.sources import OpenSource, open_source, parse_sources
from finetune.data.survey import spread_rows
from finetune.data.utterances import row_duration, row_language
from finetune.errors import UserError

log = logging.getLogger(__name__)

ROWS_AT_MOST, SECONDS_AT_MOST = 1_000_000, 300.0


@dataclass(frozen=True)
class Text:
    """One transcript."""

    text: str
    """Normalised, not empty."""
    language: str
    """Empty where nothing says it."""
    seconds: float | None
    """Length of its audio; None where the row does not tell it."""


def read_texts(
    value: Any,
    key: str,
    normalization: str,
    split: str = "train",
    rows: int = ROWS_AT_MOST,
    seconds: float = SECONDS_AT_MOST,
) -> list[Text]:
    """Read transcripts of data sets, from all their parts, or the lines of text files.

    Args:
        value: as `data.train`; a path that ends with .txt is a text file, one transcript a line.
        key: its name, for messages.
        normalization: as `data.text_normalization`; a source's own goes before it.
        split: of a data set that names none.
        rows, seconds: bounds of the search in data sets.
    """
    found: list[Text] = []
    named = []
    for entry in value if isinstance(value, list) else [value]:
        if isinstance(entry, str) and entry.endswith(".txt"):
            found += _lines(entry, key, normalization)
        else:
            named.append(entry)
    if named:
        opened = [open_source(source, key) for source in parse_sources(named, key, split)]
        found += _rows(opened, key, normalization, rows, seconds)
    if not found:
        raise UserError(f"{key}: there is no text in {value}.")
    return found


def _lines(file: str, key: str, normalization: str) -> Iterator[Text]:
    if not Path(file).is_file():
        raise UserError(f"{key}: there is no file {file} (looked in {Path.cwd()}).")
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise UserError(f"{key}: {file} is no text in UTF-8: {error}.") from error
    texts = (normalize_text(line, normalization) for line in lines)
    return (Text(text, "", None) for text in texts if text)


def _rows(sources: list[OpenSource], key: str, normalization: str, rows: int, seconds: float) -> list[Text]:
    group = [(source, shard) for source in sources for shard in source.shards]
    options = StreamOptions(limits=BatchLimits(), sample_rate=16_000)
    found, looked, unusable = [], 0, 0
    for (_, _, shard, _), row in spread_rows(Sources([group], None, [-1]), options, rows, seconds, lengths=False):
        source = group[shard][0]
        looked += 1
        text = row.get(source.columns["text"])
        if not isinstance(text, str) or any("\ud800" <= c <= "\udfff" for c in text):
            unusable += 1
            continue
        text = normalize_text(text, source.source.text_normalization or normalization)
        if text:
            found.append(Text(text, row_language(source, row), row_duration(row)))
    counts = [source.clips for source in sources if source.clips is not None]
    total = sum(counts) if len(counts) == len(sources) else None
    if total is None or looked < total:
        log.info("%s: texts of %d%s rows", key, looked, "" if total is None else f" of {total}")
    if unusable:
        log.warning("%s: %d rows without a text are left out", key, unusable)
    return found
