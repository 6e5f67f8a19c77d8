"""Clips and texts that stand in the training set and in an evaluation set as well.

The rows of the evaluation sets are held in memory, and those of the training set pass by, however many they are.
"""

import contextlib
import functools
import hashlib
import itertools
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from finetune.config.schema import RunConfig
from finetune.data.batching import BatchLimits
from finetune.data.leave_out import LeaveOut
from finetune.data.normalization import normalize_text
from finetune.data.options import StreamOptions
from finetune.data.reader import group_sources
from finetune.data.shards import Row, Shard
from finetune.data.sources import OpenSource
from finetune.data.survey import count_rows, spread_rows
from finetune.data.utterances import ABSURD_SECONDS, row_duration
from finetune.durable_files import sha256_of
from finetune.errors import UserError

EVALUATION_SETS = ("validation", "test", "guard")
HELD_ROWS = 100_000  # of each evaluation set: about 100 MB
SAME_LENGTH = 0.01  # seconds
EXAMPLES = 3
ADVICE = (
    "Divide the data anew (parakeet-finetune split --data {data} --output DIR), or let parakeet-finetune check "
    "--config RUN.yaml list these clips for data.leave_out. data.allow_overlap=true trains all the same."
)

Hit = tuple[int, str]
"""Number of a held row, and what a training row has in common with it: "row", "audio", "id", "bytes" or "text"."""
WHY = {"row": "their row", "audio": "their audio file", "id": "their id", "bytes": "the bytes of their audio"}


@dataclass(slots=True)
class HeldRow:
    """A row of an evaluation set."""

    split: str
    place: str
    text: str
    """Normalised as `basic`, like all texts that are compared."""
    start: float
    """Seconds into its audio file."""
    seconds: float | None
    """None: the rest of it."""


@dataclass
class HeldOut:
    """The rows of the evaluation sets, by what tells that a row of the training set is the same."""

    rows: list[HeldRow] = field(default_factory=list)
    by_key: dict[int, list[int]] = field(default_factory=dict)
    """Numbers of rows by the hashes of `_keys`."""
    texts: dict[int, int] = field(default_factory=dict)
    """The first row with a text, by the text's hash."""
    names: set[str] = field(default_factory=set)
    """Of audio files and of the files that the rows stand in."""
    cut: list[str] = field(default_factory=list)
    """Evaluation sets of which only a part is held."""

    def add(self, split: str, source: OpenSource, shard: Shard, number: int, row: Row, content: bool) -> None:
        """Hold a row; `content`: its audio is read as well, and compared by its bytes."""
        text = _text(source, row)
        index, (start, seconds) = len(self.rows), _part(source, row)
        self.rows.append(HeldRow(split, shard.place(number), text, start, seconds))
        for _, key in _keys(source, shard, number, row, content):
            self.by_key.setdefault(key, []).append(index)
        audio = row.get(source.columns["audio"])
        path = audio.get("path") if isinstance(audio, dict) else audio
        self.names |= {_name(str(path)), _name(shard.file)}
        if text:
            self.texts.setdefault(hash(text), index)

    def find(self, source: OpenSource, shard: Shard, number: int, row: Row, content: bool = False) -> list[Hit]:
        """Return the held clips that a row of the training set is, then the first held row with its text."""
        text, (start, seconds) = _text(source, row), _part(source, row)
        found: dict[int, str] = {}
        for kind, key in _keys(source, shard, number, row, content, self.names):
            for index in self.by_key.get(key, ()):
                held = self.rows[index]
                if kind == "id" and seconds is not None and held.seconds is not None:
                    alike = abs(seconds - held.seconds) <= SAME_LENGTH
                elif kind == "id":
                    alike = text == held.text
                else:
                    alike = kind == "row" or _shares_most(start, seconds, held.start, held.seconds)
                if alike:
                    found.setdefault(index, kind)
        hits = list(found.items())
        if text and (index := self.texts.get(hash(text))) is not None:
            hits.append((index, "text"))
        return hits


def _keys(
    source: OpenSource, shard: Shard, number: int, row: Row, content: bool, names: set[str] | None = None
) -> Iterator[tuple[str, int]]:
    """Yield hashes by which equal clips are found: place, audio file, id, and, where it is read, the audio's bytes.

    Files of other names than `names` are passed over: a name costs less than a place.
    """
    s = source.source
    if names is None or _name(shard.file) in names:
        yield "row", hash(("row", _real(shard.file), s.name, s.revision, shard.first + number))
    audio = row.get(source.columns["audio"])
    data, path = (audio.get("bytes"), audio.get("path")) if isinstance(audio, dict) else (None, audio)
    file = None
    if isinstance(path, str) and path and data is None and (content or names is None or _name(path) in names):
        file = _file(path, source.folder)
        yield "audio", hash(("audio", file))
    column = source.columns.get("id", "")
    if column not in ("__key__", "file_name") and (name := row.get(column)):  # those name files within a shard
        yield "id", hash(("id", str(name)))
    if content and (digest := _digest(data, file)) is not None:
        yield "bytes", hash(("bytes", digest))


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def _file(path: str, folder: str | None) -> str:
    """Return where audio lies, the same for each way of writing it."""
    if "://" in path:
        return path
    if folder is not None and "://" in folder:
        return f"{folder.rstrip('/')}/{path}"
    directory, name = os.path.split(path if folder is None else os.path.join(folder, path))
    return f"{_real(directory)}/{name}"


@functools.lru_cache(4096)
def _real(path: str) -> str:
    if "://" in path:
        return path
    try:
        return os.path.realpath(path)
    except ValueError:  # no path: a zero in it, or half of a character
        return path


def _digest(data: Any, file: str | None) -> str | None:
    if isinstance(data, bytes):
        return hashlib.sha256(data).hexdigest()
    return _digest_of_file(file) if file is not None and "://" not in file else None


@functools.lru_cache(16)  # the utterances of a long file mostly follow each other
def _digest_of_file(file: str) -> str | None:
    with contextlib.suppress(OSError, ValueError):  # decoding reports it
        return sha256_of(Path(file))
    return None


def _text(source: OpenSource, row: Row) -> str:
    text = row.get(source.columns["text"])
    return normalize_text(text, "basic") if isinstance(text, str) else ""


def _part(source: OpenSource, row: Row) -> tuple[float, float | None]:
    """Return where an utterance begins in its file and its length, both in seconds."""
    offset = row.get("offset") if source.is_manifest else None
    if not isinstance(offset, int | float) or not 0 <= offset < ABSURD_SECONDS:
        offset = 0.0
    return float(offset), row_duration(row)


def _shares_most(a: float, a_seconds: float | None, b: float, b_seconds: float | None) -> bool:
    """Return whether two parts of a file have more than half of the shorter one in common: neighbours may touch."""
    a_length, b_length = a_seconds or ABSURD_SECONDS, b_seconds or ABSURD_SECONDS
    return min(a + a_length, b + b_length) - max(a, b) > min(a_length, b_length) / 2


@dataclass
class Overlap:
    """What the training set has in common with the evaluation sets."""

    held: HeldOut
    looked: int = 0
    """Rows of the training set."""
    of: int | None = None
    """All of its rows; None where that is not known."""
    whole: bool = True
    """Whether every row was compared."""
    clips: dict[int, tuple[str, str]] = field(default_factory=dict)
    """(what they have in common, place in the training set) by the number of the held row."""
    texts: dict[int, str] = field(default_factory=dict)
    """Place in the training set by the number of the first held row with the text."""

    def add(self, hits: list[Hit], place: str) -> None:
        for index, kind in hits:
            if kind == "text":
                self.texts.setdefault(index, place)
            else:
                self.clips.setdefault(index, (kind, place))

    def by_set(self) -> list[dict[str, Any]]:
        """Return counts and examples for each evaluation set; a clip that is the same does not count for its text."""
        rows, found = self.held.rows, []
        for split in dict.fromkeys(row.split for row in rows):
            own = [index for index, row in enumerate(rows) if row.split == split]
            same = [index for index in own if index in self.clips]
            first = {index: self.held.texts.get(hash(rows[index].text), -1) for index in own}
            known = [index for index in own if index not in self.clips and first[index] in self.texts]
            words, words_known = (sum(len(rows[index].text.split()) for index in some) for some in (own, known))
            found.append(
                {
                    "set": split,
                    "clips": len(own),
                    "same_clips": len(same),
                    "same_by": dict(Counter(self.clips[index][0] for index in same).most_common()),
                    "same_texts": len(known),
                    "words_in_same_texts": words_known / max(words, 1),
                    "clip_examples": [f"{rows[i].place} is {self.clips[i][1]}" for i in same[:EXAMPLES]],
                    "text_examples": [f"{rows[i].text[:60]!r} ({self.texts[first[i]]})" for i in known[:EXAMPLES]],
                }
            )
        return found

    def said(self) -> tuple[list[str], list[str]]:
        """Return a line for each evaluation set with clips of the training set, and one for each with its texts."""
        sets = self.by_set()
        clips = [
            f"data.{one['set']}: {one['same_clips']} of {one['clips']} clips stand in data.train "
            f"({', '.join(f'{n} by {WHY[kind]}' for kind, n in one['same_by'].items())}): "
            + "; ".join(one["clip_examples"])
            for one in sets
            if one["same_clips"]
        ]
        texts = [
            f"data.{one['set']}: {one['same_texts']} of {one['clips']} clips have a text that stands in data.train as "
            f"well, {one['words_in_same_texts']:.1%} of its words: {'; '.join(one['text_examples'])}"
            for one in sets
            if one["same_texts"]
        ]
        return clips, texts

    def scope(self) -> str:
        """Say what was compared."""
        held = Counter(row.split for row in self.held.rows)
        some = ", ".join(f"{n:,} of {split}" + " (a part)" * (split in self.held.cut) for split, n in held.items())
        of = "" if self.whole or self.of is None else f" of {self.of:,}"
        return f"{self.looked:,}{of} rows of data.train compared with {some}"


def warnings_about(found: Overlap, opened: dict[str, list[OpenSource]], config: RunConfig) -> list[str]:
    """Return a sentence for each evaluation set that has something in common with the training set.

    Raises:
        UserError: clips are the same, and data.allow_overlap does not allow it.
    """
    clips, texts = found.said()
    if clips and not config.data.allow_overlap:
        data = " ".join(dict.fromkeys(source.source.path for source in opened["train"]))
        raise UserError("\n".join([*(f"{line}." for line in clips), ADVICE.format(data=data)]))
    return clips + texts


def hold_out(opened: dict[str, list[OpenSource]], config: RunConfig, seconds: float, content: bool = False) -> HeldOut:
    """Read what is evaluated, without the audio where the format allows that.

    Args:
        opened: sources by key.
        seconds: bound on the time.
        content: read the audio as well, and compare it by its bytes.
    """
    held, until = HeldOut(), time.monotonic() + seconds
    options = StreamOptions(BatchLimits(), 16_000, shuffle=False)
    for split in (name for name in EVALUATION_SETS if name in opened):
        sources = opened[split]
        if content:  # no reading without the audio
            sources = [replace(s, shards=[replace(shard, light=None) for shard in s.shards]) for s in sources]
        grouped = group_sources(sources, config.data.max_eval_samples)
        rows = spread_rows(grouped, options, None, until - time.monotonic(), lengths=False)
        for ref, row in itertools.islice(rows, HELD_ROWS):
            held.add(split, *grouped.groups[ref[0]][ref[2]], ref[3], row, content)
        if next(rows, None) is not None or time.monotonic() > until:
            held.cut.append(split)
    return held


def find_overlap(opened: dict[str, list[OpenSource]], config: RunConfig, seconds: float) -> Overlap:
    """Look for the rows of data.validation, test and guard in data.train, by row, audio file, id and text.

    Rows that data.leave_out names do not count. The audio itself is not read where the format allows that.

    Args:
        opened: sources by key.
        seconds: bound on the time; what was looked at until then is a sample of whole shards.
    """
    d, until = config.data, time.monotonic() + seconds
    held = hold_out(opened, config, seconds / 2)
    found = Overlap(held, whole=not held.cut)
    if not held.rows:
        return found
    leave_out = LeaveOut(d.leave_out, "data.leave_out") if d.leave_out else None
    options = StreamOptions(
        BatchLimits(), 16_000, seed=config.training.seed, shuffle=d.shuffle, skip_samples=d.skip_samples
    )
    grouped = group_sources(opened["train"], d.max_samples)
    found.of = count_rows(grouped, options)
    for ref, row in spread_rows(grouped, options, None, until - time.monotonic(), lengths=False):
        source, shard = grouped.groups[ref[0]][ref[2]]
        found.looked += 1
        if hits := held.find(source, shard, ref[3], row):
            place = shard.place(ref[3])
            if leave_out is None or leave_out.reason(place) is None:
                found.add(hits, place)
    found.whole = time.monotonic() <= until and not held.cut
    return found
