"""From a row of a source to a decoded, tokenised clip, or the reason why it is none."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from finetune.data.decode import BadClip, decode_audio
from finetune.data.lanes import StreamOptions, row_duration
from finetune.data.sources import BAD_LINE, OpenSource
from finetune.data.text import normalize_text


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


def make_clip(
    source: OpenSource, place: str, row: dict[str, Any], options: StreamOptions, encode: Callable[[str], list[int]]
) -> Clip:
    """Checks, decodes and tokenises one row.

    Raises:
        BadClip: it cannot be used; FilteredClip: a filter leaves it out.
    """
    offset = None
    if source.is_manifest:
        if BAD_LINE in row:
            raise BadClip(row[BAD_LINE])
        # As in NeMo, offset and duration cut the clip out of its file, duration from the beginning where no offset is.
        offset = row.get("offset") or 0.0
        if not isinstance(offset, int | float) or not 0 <= offset < float("inf"):
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
    audio_S = decode_audio(row[columns["audio"]], options.sample_rate, source.folder, offset, duration or None)
    _filter_duration(len(audio_S) / options.sample_rate, options)
    if len(audio_S) < options.sample_rate // 50:
        raise BadClip(f"the audio is too short for one frame of features ({len(audio_S)} samples)")
    language = str(row.get(columns.get("language", "")) or source.source.language or "")
    return Clip(row_id(source, place, row), text, language, audio_S, tokens)


def row_id(source: OpenSource, place: str, row: dict[str, Any]) -> str:
    """The clip's id: its id column, the path of its audio, or its place in the source."""
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
