"""From a row of a source to a decoded, tokenised utterance, or the reason why it is none.

A row is examined first, which reads at most the head of its audio, waits in the buffer, and is decoded when its batch
is made. S samples.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np

from finetune.data.audio_root import check_place
from finetune.data.augment import augment
from finetune.data.batching import Entry, Ref
from finetune.data.decode import audio_seconds, mono_at, read_audio
from finetune.data.filters import FilteredUtterance
from finetune.data.language_prompts import draw_slot, prompt_of
from finetune.data.normalization import normalize_text
from finetune.data.options import StreamOptions
from finetune.data.quarantine import BadUtterance, Report
from finetune.data.retry import Unreachable
from finetune.data.shards import BAD_LINE, Row
from finetune.data.sources import COLUMNS, OpenSource
from finetune.security.secrets import clean_urls

# A row's duration may be rounded; beyond both of these the text belongs to other audio.
SECONDS_OFF, SHARE_OFF = 1.0, 0.2
ABSURD_SECONDS = 1e6
LONGEST_TEXT = 100_000
LONGEST_NAME = 1_000

P = ParamSpec("P")
R = TypeVar("R")


@dataclass
class DecodedUtterance:
    """One utterance of a batch."""

    id: str
    text: str
    language: str
    audio_S: np.ndarray
    """(S,) float32 in [-1, 1], or int16 in 1/32768."""
    tokens: list[int]
    slot: int | None = None
    """Of its prompt, as drawn, for a prompt model."""
    distillation: float = 1.0
    """Factor of its distillation."""
    from_rehearsal: bool = False
    """Whether it is of `data.rehearsal`."""


def contained(function: Callable[P, R]) -> Callable[P, R]:
    """Turn unforeseen errors over a row's content into BadUtterance, so that they cost the row and not the run."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except (BadUtterance, FilteredUtterance, Unreachable, MemoryError):
            raise
        except Exception as error:
            raise BadUtterance(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}") from error

    return call


@contained
def examine(
    source: OpenSource,
    place: str,
    ref: Ref,
    row: Row,
    options: StreamOptions,
    encode: Callable[[str], list[int]],
) -> Entry:
    """Check and tokenise one row, and find the length of its audio.

    Raises:
        BadUtterance: it cannot be used; FilteredUtterance: a filter leaves it out.
    """
    if options.leave_out is not None and (reason := options.leave_out.reason(place)):
        raise FilteredUtterance(reason)
    offset = None
    if source.is_manifest:
        if BAD_LINE in row:
            raise BadUtterance(row[BAD_LINE])
        # As in NeMo, offset and duration cut the utterance out of its file, duration from the start without an offset.
        offset = row.get("offset") or 0.0
        if not isinstance(offset, int | float) or not 0 <= offset < float("inf"):
            raise BadUtterance(f"offset is a number of seconds, found {offset!r}")
    columns = source.columns
    text = "" if options.unlabelled else row.get(columns["text"])
    if not isinstance(text, str):
        raise BadUtterance(f"no text in column {columns['text']!r}")
    if len(text) > LONGEST_TEXT:
        raise BadUtterance(f"the text has {len(text):,} characters; {LONGEST_TEXT:,} at most are expected")
    if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
        raise BadUtterance("the text holds half of a character (a lone surrogate)")
    duration = row_duration(row)
    filters = source.filters
    if duration is not None:
        filters.check_duration(duration)
    filters.check_written(text)
    text = normalize_text(text, source.source.text_normalization or options.text_normalization)
    if not text and not options.keep_empty_text:
        raise FilteredUtterance("empty_text")
    tokens = encode(text)
    filters.check_text(text, len(tokens))
    if columns["audio"] not in row:
        raise BadUtterance(f"no audio in column {columns['audio']!r}")
    audio = row[columns["audio"]]
    check_place(audio, source.folder, source.root)
    limits = options.limits
    if duration is None and (options.group_by_duration or limits.seconds or limits.cells or limits.bounds):
        seconds = audio_seconds(audio, source.folder, offset, options.read_retries)
        filters.check_duration(seconds)
    else:
        seconds = duration or 0.0
    if seconds:
        filters.check_pace(len(text), seconds)
    held = audio.get("bytes") if isinstance(audio, dict) else None
    language = row_language(source, row)
    if options.prompts:
        prompt_of(language, options.prompts)
    cells = math.ceil(seconds * options.frame_rate) * (len(tokens) + 1)
    name = row_id(source, place, row)
    size = len(held) if isinstance(held, bytes) else 0
    has_offset = row.get("offset") is not None
    return Entry(
        ref, seconds, tokens, cells, name, place, text, language, audio, source, offset, has_offset, duration, size
    )


@contained
def decode(entry: Entry, options: StreamOptions, epoch: int) -> DecodedUtterance:
    """Decode the audio of an examined row, and augment it as `options.augmentation` says.

    Raises:
        BadUtterance: it cannot be used; FilteredUtterance: a filter leaves it out.
    """
    # 16-bit samples stay so where nothing computes with them: half the bytes to copy to the trainer and its device.
    compact = not options.augmentation.active and not entry.source.filters.on_samples
    _, _, audio_S = read_samples(entry, options, compact)
    # Draws follow from this alone: the same after a resume and on any number of ranks.
    drawn_from = (options.seed, epoch, entry.ref[0], *entry.ref[2:])
    if options.augmentation.active:
        audio_S = augment(audio_S, options.sample_rate, options.augmentation, (*drawn_from, 13))
    slot = None
    if options.prompts:
        slot = draw_slot(entry.language, options.prompts, options.auto_ratio, (*drawn_from, 19))
    source = entry.source
    return DecodedUtterance(
        entry.id,
        entry.text,
        entry.language,
        audio_S,
        entry.tokens,
        slot,
        source.distillation,
        source.is_rehearsal,
    )


def decode_all(entries: list[Entry], options: StreamOptions, epoch: int, report: Report) -> list[DecodedUtterance]:
    """Decode the utterances of a batch; those that cannot be used go into the report."""
    utterances = []
    for entry in entries:
        try:
            utterances.append(decode(entry, options, epoch))
        except FilteredUtterance as reason:
            report.count_filtered(str(reason))
        except BadUtterance as reason:
            report.quarantine(entry.id, entry.place, str(reason))
    if options.fits is None or not utterances:
        return utterances
    fitting = options.fits([len(u.audio_S) for u in utterances], [u.tokens for u in utterances])
    for _ in range(fitting.count(False)):
        report.count_filtered("more_tokens_than_frames")
    return [u for u, fits in zip(utterances, fitting, strict=True) if fits]


def read_samples(entry: Entry, options: StreamOptions, compact: bool = False) -> tuple[np.ndarray, int, np.ndarray]:
    """Return the samples as they are in the file, their rate, and one channel of them at the stream's rate.

    Raises:
        BadUtterance: it cannot be used; FilteredUtterance: a filter leaves it out.
    """
    filters, expected = entry.source.filters, entry.duration if options.check_durations else None

    def check_head(seconds: float) -> None:  # before hours are read
        if expected is not None and not entry.has_offset:
            check_length(seconds, expected)
        if entry.duration is None and not entry.has_offset:
            filters.check_duration(seconds)

    samples_SC, rate = read_audio(
        entry.audio, entry.source.folder, entry.offset, entry.duration, check_head, compact, options.read_retries
    )
    seconds = len(samples_SC) / rate
    if expected is not None:
        check_length(seconds, expected)
    audio_S = mono_at(samples_SC, rate, options.sample_rate)
    filters.check_duration(len(audio_S) / options.sample_rate)
    filters.check_samples(samples_SC, rate)
    if not entry.seconds:
        filters.check_pace(len(entry.text), seconds)
    if len(audio_S) < options.sample_rate // 50:
        raise BadUtterance(f"the audio is too short for one frame of features ({len(audio_S)} samples)")
    return samples_SC, rate, audio_S


def check_length(seconds: float, expected: float) -> None:
    """Raise BadUtterance where audio is not as long as its row says: its text belongs to other audio."""
    off = abs(seconds - expected)
    if off > SECONDS_OFF and off > SHARE_OFF * expected:
        raise BadUtterance(f"the row says {expected:.2f} s, the audio has {seconds:.2f} s")


def row_duration(row: Row) -> float | None:
    """Return the seconds that the row states; None where it does not, or states no plausible number."""
    duration = row.get("duration")
    if isinstance(duration, bool) or not isinstance(duration, int | float):
        return None
    return float(duration) if 0 < duration < ABSURD_SECONDS else None


def row_id(source: OpenSource, place: str, row: Row) -> str:
    """Return an utterance's id: its id column, the path of its audio, or its place in the source."""
    named = row.get(source.columns.get("id", ""))
    if named:
        return _name(named)
    audio = row.get(source.columns["audio"])
    path = audio.get("path") if isinstance(audio, dict) else audio
    return _name(path) if isinstance(path, str) and path else place


def row_language(source: OpenSource, row: Row) -> str:
    """Return the language that the row names, else its source; empty if neither does."""
    named = source.columns.get("language")
    columns = ("lang", *COLUMNS["language"]) if named is None else (named,)  # `lang` is NeMo's own
    return _name(next((row[c] for c in columns if row.get(c)), None) or source.source.language or "")


def _name(value: object) -> str:
    """Make a row's value fit for files and trackers: bounded, without lone surrogates or passwords in addresses."""
    text = str(value)[:LONGEST_NAME]
    text = clean_urls(text) if "://" in text else text
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def text_encoder(tokenizer: Any) -> Callable[[str], list[int]]:
    """Return the encoder of a NeMo SentencePiece tokenizer; it raises BadUtterance that names unknown characters."""
    unknown_id = tokenizer.tokenizer.unk_id() if hasattr(tokenizer.tokenizer, "unk_id") else None

    def encode(text: str) -> list[int]:
        ids = tokenizer.text_to_ids(text)
        if unknown_id is not None and unknown_id in ids:
            unknown = sorted({c for c in text if not c.isspace() and unknown_id in tokenizer.text_to_ids(c)})
            helps = unknown_id not in tokenizer.text_to_ids(normalize_text(text, "basic"))
            advice = "data.text_normalization=basic" if helps else "model.tokenizer.extend_from=DATA gives it pieces"
            raise BadUtterance(f"the tokenizer has no piece for {''.join(unknown) or text!r} ({advice})")
        return ids

    return encode


def no_tokens(text: str) -> list[int]:
    """Encode nothing: evaluation compares strings, and a reference may hold what the tokenizer cannot write."""
    return []
