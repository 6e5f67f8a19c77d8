"""From a row of a source to a decoded, tokenised clip, or the reason why it is none.

A row is examined first, which reads no more than the head of its audio, waits in the buffer, and is decoded when its batch is
made. S samples.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import numpy as np

from finetune.data.audio_root import check_place
from finetune.data.augment import augment
from finetune.data.batching import Entry
from finetune.data.decode import BadClip, Unreachable, audio_seconds, mono_at, read_audio
from finetune.data.filters import FilteredClip
from finetune.data.normalization import normalize_text
from finetune.data.options import StreamOptions
from finetune.data.shards import BAD_LINE, Row
from finetune.data.sources import OpenSource
from finetune.security.secrets import clean_urls

# A row's duration may be rounded; beyond both of these the text belongs to other audio.
SECONDS_OFF, SHARE_OFF = 1.0, 0.2
ABSURD_SECONDS = 1e6
LONGEST_TEXT = 100_000
LONGEST_NAME = 1_000


@dataclass
class Clip:
    """One decoded clip."""

    id: str
    text: str
    language: str
    audio_S: np.ndarray
    """(S,) float32 in [-1, 1], or int16 in 1/32768."""
    tokens: list[int]


def contained(function: Callable[..., Any]) -> Callable[..., Any]:
    """What nobody thought of in a row's content is that row's problem, with the name of the error, and not the run's."""

    @wraps(function)
    def call(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except (BadClip, FilteredClip, Unreachable, MemoryError):
            raise
        except Exception as error:
            raise BadClip(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}") from error

    return call


@contained
def examine(
    source: OpenSource,
    place: str,
    ref: tuple[int, int, int, int],
    row: Row,
    options: StreamOptions,
    encode: Callable[[str], list[int]],
) -> Entry:
    """Checks and tokenises one row, and finds the length of its clip.

    Raises:
        BadClip: it cannot be used; FilteredClip: a filter leaves it out.
    """
    if options.leave_out is not None and (reason := options.leave_out.reason(place)):
        raise FilteredClip(reason)
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
    if len(text) > LONGEST_TEXT:
        raise BadClip(f"the text has {len(text):,} characters; {LONGEST_TEXT:,} at most are expected")
    if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
        raise BadClip("the text holds half of a character (a lone surrogate)")
    duration = row_duration(row)
    filters = source.filters
    if duration is not None:
        filters.check_duration(duration)
    text = normalize_text(text, source.source.text_normalization or options.text_normalization)
    if not text and not options.keep_empty_text:
        raise FilteredClip("empty_text")
    tokens = encode(text)
    filters.check_text(text, len(tokens))
    if columns["audio"] not in row:
        raise BadClip(f"no audio in column {columns['audio']!r}")
    audio = row[columns["audio"]]
    check_place(audio, source.folder, source.root)
    if duration is None and (
        options.group_by_duration or options.limits.seconds or options.limits.cells or options.limits.bounds
    ):
        seconds = audio_seconds(audio, source.folder, offset)
        filters.check_duration(seconds)
    else:
        seconds = duration or 0.0
    if seconds:
        filters.check_pace(len(text), seconds)
    held = audio.get("bytes") if isinstance(audio, dict) else None
    language = _name(row.get(columns.get("language", "")) or source.source.language or "")
    cells = math.ceil(seconds * options.frame_rate) * (len(tokens) + 1)
    name = row_id(source, place, row)
    size = len(held) if isinstance(held, bytes) else 0
    has_offset = row.get("offset") is not None
    return Entry(
        ref, seconds, tokens, cells, name, place, text, language, audio, source, offset, has_offset, duration, size
    )


@contained
def decode(entry: Entry, options: StreamOptions, epoch: int) -> Clip:
    """Decodes the audio of an examined row, and changes it as `options.augmentation` says.

    Raises:
        BadClip: it cannot be used; FilteredClip: a filter leaves it out.
    """
    # Samples of 16 bit stay so, where nobody computes with them: half the bytes to copy between processes and to the device.
    compact = not options.augmentation.active and not entry.source.filters.on_samples
    _, _, audio_S = read_clip(entry, options, compact)
    if options.augmentation.active:
        place = (entry.ref[0], *entry.ref[2:])
        audio_S = augment(audio_S, options.sample_rate, options.augmentation, (options.seed, epoch, *place, 13))
    return Clip(entry.id, entry.text, entry.language, audio_S, entry.tokens)


def read_clip(entry: Entry, options: StreamOptions, compact: bool = False) -> tuple[np.ndarray, int, np.ndarray]:
    """The samples as they are in the file, their rate, and the clip's one channel at the stream's rate.

    Args:
        entry, options: what is read, and how.
        compact: as in `read_audio`.

    Raises:
        BadClip: it cannot be used; FilteredClip: a filter leaves it out.
    """
    filters, said = entry.source.filters, entry.duration if options.check_durations else None

    # The head tells, before hours are read.
    def check(seconds: float) -> None:
        if said is not None and not entry.has_offset:
            check_length(seconds, said)
        if entry.duration is None and not entry.has_offset:
            filters.check_duration(seconds)

    samples_SC, rate = read_audio(entry.audio, entry.source.folder, entry.offset, entry.duration, check, compact)
    seconds = len(samples_SC) / rate
    if said is not None:
        check_length(seconds, said)
    audio_S = mono_at(samples_SC, rate, options.sample_rate)
    filters.check_duration(len(audio_S) / options.sample_rate)
    filters.check_samples(samples_SC, rate)
    if not entry.seconds:
        filters.check_pace(len(entry.text), seconds)
    if len(audio_S) < options.sample_rate // 50:
        raise BadClip(f"the audio is too short for one frame of features ({len(audio_S)} samples)")
    return samples_SC, rate, audio_S


def check_length(seconds: float, said: float) -> None:
    """Raises BadClip where audio is not as long as its row says: its text belongs to other audio."""
    off = abs(seconds - said)
    if off > SECONDS_OFF and off > SHARE_OFF * said:
        raise BadClip(f"the row says {said:.2f} s, the audio has {seconds:.2f} s")


def row_duration(row: Row) -> float | None:
    """Seconds as the row states them, or None where it does not, or states no number that a clip could have."""
    duration = row.get("duration")
    is_number = isinstance(duration, int | float) and not isinstance(duration, bool)
    return float(duration) if is_number and 0 < duration < ABSURD_SECONDS else None


def row_id(source: OpenSource, place: str, row: Row) -> str:
    """The clip's id: its id column, the path of its audio, or its place in the source."""
    named = row.get(source.columns.get("id", ""))
    if named:
        return _name(named)
    audio = row.get(source.columns["audio"])
    path = audio.get("path") if isinstance(audio, dict) else audio
    return _name(path) if isinstance(path, str) and path else place


def _name(value: Any) -> str:
    """A name from a row that every file and tracker takes: of bounded length, without halves of characters or passwords of an address."""
    text = str(value)[:LONGEST_NAME]
    text = clean_urls(text) if "://" in text else text
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def text_encoder(tokenizer: Any) -> Callable[[str], list[int]]:
    """Encodes texts with a NeMo SentencePiece tokenizer; a text with unknown characters is a BadClip that names them."""
    unknown_id = tokenizer.tokenizer.unk_id() if hasattr(tokenizer.tokenizer, "unk_id") else None

    def encode(text: str) -> list[int]:
        ids = tokenizer.text_to_ids(text)
        if unknown_id is not None and unknown_id in ids:
            unknown = sorted({c for c in text if not c.isspace() and unknown_id in tokenizer.text_to_ids(c)})
            raise BadClip(
                f"the tokenizer has no piece for {''.join(unknown) or text!r}; normalise the texts "
                "(data.text_normalization: basic), or give the model pieces for them (model.tokenizer.extend_from)"
            )
        return ids

    return encode
