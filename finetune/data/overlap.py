"""Clips and texts of the evaluation sets that are also in the training set.

The rows of the evaluation sets are held in memory, and those of the training set pass by, however many they are.
"""

import bisect
import contextlib
import functools
import hashlib
import itertools
import math
import os
import shlex
import stat
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from finetune.config.schema import RunConfig
from finetune.data.audio_root import check_place
from finetune.data.batching import BatchLimits
from finetune.data.leave_out import LeaveOut
from finetune.data.normalization import normalize_text
from finetune.data.options import StreamOptions
from finetune.data.quarantine import BadUtterance
from finetune.data.reader import group_sources
from finetune.data.run_file import training_keys
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

Hit = tuple[int, str]
"""Number of a held row, and what a training row has in common with it: "row", "audio", "bytes", "id" or "text";
"id of another": the same id stands at another clip.
"""
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
    """Numbers of rows by the hashes of `_keys`, by their start; of an id, the first of each set."""
    not_unique: set[int] = field(default_factory=set)
    """Hashes of ids that several clips of a set have, such as those of a speaker or call."""
    longest: float = 0.0
    """Seconds of the longest row."""
    texts: dict[int, int] = field(default_factory=dict)
    """The first row with a text, by the text's hash."""
    names: set[str] = field(default_factory=set)
    """Of audio files and of the files that the rows stand in."""
    cut: list[str] = field(default_factory=list)
    """Evaluation sets of which only a part is held."""
    sizes: dict[int, list[tuple[int, str]]] = field(default_factory=dict)
    """By the bytes of their audio, since only equal numbers need be read: rows and their files that are yet to be."""
    seconds: float = math.inf
    """Left for comparing audio by its bytes."""
    with_audio: int = 0
    """Rows that are compared so."""
    heard: int = 0
    """Rows of the training set that were."""

    def add(self, split: str, source: OpenSource, shard: Shard, number: int, row: Row) -> None:
        """Hold a row."""
        text = _text(source, row)
        index, (start, seconds) = len(self.rows), _part(source, row)
        self.rows.append(HeldRow(split, shard.place(number), text, start, seconds))
        self.longest = max(self.longest, seconds or ABSURD_SECONDS)
        data, file, size = _audio(source, row)
        self.with_audio += size > 0
        if size:
            self.sizes.setdefault(size, []).extend([(index, file)] if data is None else [])
        if data is not None:
            self._hold(_hash_of_bytes(data, ""), index)
        for kind, key in _keys(source, shard, number, row):
            if kind != "id":
                self._hold(key, index)
                continue
            own = self.by_key.setdefault(key, [])
            first = next((i for i in own if self.rows[i].split == split), None)
            if first is None:
                own.append(index)
            elif not self._is_alike(first, text, seconds):
                self.not_unique.add(key)
        audio = row.get(source.columns["audio"])
        path = audio.get("path") if isinstance(audio, dict) else audio
        self.names |= {_name(str(path)), _name(shard.file)}
        if text:
            self.texts.setdefault(hash(text), index)

    def find(self, source: OpenSource, shard: Shard, number: int, row: Row) -> list[Hit]:
        """Return the held clips that a row of the training set is, then the first held row with its text."""
        text, (start, seconds) = _text(source, row), _part(source, row)
        found: dict[int, str] = {}
        keys = list(_keys(source, shard, number, row, self.names))
        same_file = any(kind == "audio" and key in self.by_key for kind, key in keys)
        self.heard += same_file
        if self.sizes and self.seconds > 0 and not same_file:
            started = time.perf_counter()
            if (key := self._hash_of_equal(source, row)) is not None:
                keys = sorted([*keys, ("bytes", key)], key=lambda one: one[0] == "id")
            self.seconds -= time.perf_counter() - started
        for kind, key in keys:
            own = self.by_key.get(key, ())
            if kind == "id":
                for index in own if key not in self.not_unique else ():
                    found.setdefault(index, kind if self._is_alike(index, text, seconds) else "id of another")
                continue
            first = bisect.bisect_left(own, start - self.longest, key=self._start)
            behind = bisect.bisect_right(own, start + (seconds or ABSURD_SECONDS), key=self._start)
            for index in own[first:behind]:
                held = self.rows[index]
                if kind == "row" or _shares_most(start, seconds, held.start, held.seconds):
                    found.setdefault(index, kind)
        hits = list(found.items())
        if text and (index := self.texts.get(hash(text))) is not None:
            hits.append((index, "text"))
        return hits

    def _hash_of_equal(self, source: OpenSource, row: Row) -> int | None:
        """Return the hash of a training row's audio where that of a held row has as many bytes."""
        data, file, size = _audio(source, row)
        self.heard += size > 0
        if (unread := self.sizes.get(size)) is None:
            return None
        for index, own in unread:
            self._hold(_hash_of_bytes(None, own), index)
        unread.clear()
        return _hash_of_bytes(data, file)

    def _hold(self, key: int | None, index: int) -> None:
        if key is not None:
            bisect.insort(self.by_key.setdefault(key, []), index, key=self._start)

    def _start(self, index: int) -> float:
        return self.rows[index].start

    def _is_alike(self, index: int, text: str, seconds: float | None) -> bool:
        """Return whether text and length are those of a held row: many data sets number their clips."""
        held = self.rows[index]
        if not text or text != held.text:
            return False
        return seconds is None or held.seconds is None or abs(seconds - held.seconds) <= SAME_LENGTH


def _keys(
    source: OpenSource, shard: Shard, number: int, row: Row, names: set[str] | None = None
) -> Iterator[tuple[str, int]]:
    """Yield hashes by which equal clips are found: place, audio file, and id.

    Files of other names than `names` are passed over: a name costs less than a place.
    """
    s = source.source
    if names is None or _name(shard.file) in names:
        yield "row", hash(("row", _real(shard.file), s.name, s.revision, shard.first + number))
    audio = row.get(source.columns["audio"])
    data, path = (audio.get("bytes"), audio.get("path")) if isinstance(audio, dict) else (None, audio)
    if isinstance(path, str) and path and data is None and (names is None or _name(path) in names):
        yield "audio", hash(("audio", _file(path, source.folder)))
    column = source.columns.get("id", "")
    if column not in ("__key__", "file_name") and (name := row.get(column)):  # those name files within a shard
        yield "id", hash(("id", str(name)))


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


def _audio(source: OpenSource, row: Row) -> tuple[bytes | None, str, int]:
    """Return the audio that comes with a row, or its file on this machine; and its number of bytes, 0 without both."""
    audio = row.get(source.columns["audio"])
    data, path = (audio.get("bytes"), audio.get("path")) if isinstance(audio, dict) else (None, audio)
    if isinstance(data, bytes):
        return data, "", len(data)
    if not isinstance(path, str) or "://" in path or "://" in (source.folder or ""):
        return None, "", 0
    return None, os.path.join(source.folder or "", path), _size_of_file(path, source.folder, source.root)


@functools.lru_cache(16)  # the utterances of a long file mostly follow each other
def _size_of_file(path: str, folder: str | None, root: str | None) -> int:
    with contextlib.suppress(OSError, ValueError, BadUtterance):  # decoding reports it
        check_place(path, folder, root)
        found = os.stat(os.path.join(folder or "", path))
        return found.st_size if stat.S_ISREG(found.st_mode) else 0
    return 0


def _hash_of_bytes(data: bytes | None, file: str) -> int | None:
    digest = hashlib.sha256(data).hexdigest() if data is not None else _digest_of_file(file)
    return None if digest is None else hash(("bytes", digest))


@functools.lru_cache(16)
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
    unread: list[str] = field(default_factory=list)
    """Files of the training set that could not be read."""
    found: dict[int, tuple[str, str]] = field(default_factory=dict)
    """(what they have in common, place in the training set) by the number of the held row."""
    ids_of_others: set[int] = field(default_factory=set)
    """Held rows whose id another clip of the training set has as well."""
    same_rows: int = 0
    """Rows of the training set that are a held clip."""
    trained: str = "data.train"
    """What the training set is called in messages."""
    texts: dict[int, str] = field(default_factory=dict)
    """Place in the training set by the number of the first held row with the text."""

    @property
    def clips(self) -> dict[int, tuple[str, str]]:
        """Those of `found` that are the same indeed."""
        return {i: how for i, how in self.found.items() if how[0] != "id" or i not in self.ids_of_others}

    def add(self, hits: list[Hit], place: str) -> None:
        for index, kind in hits:
            if kind == "text":
                self.texts.setdefault(index, place)
            elif kind == "id of another":
                self.ids_of_others.add(index)
            elif index not in self.found or (kind != "id" and self.found[index][0] == "id"):
                self.found[index] = kind, place
        self.same_rows += bool(self.sets_of(hits))

    def sets_of(self, hits: list[Hit]) -> list[str]:
        """Return the evaluation sets that a row of the training set is a clip of."""
        same = (i for i, kind in hits if kind in WHY and (kind != "id" or i not in self.ids_of_others))
        return list(dict.fromkeys(self.held.rows[i].split for i in same))

    def by_set(self) -> list[dict[str, Any]]:
        """Return counts and examples for each evaluation set; a clip that is the same does not count for its text."""
        rows, clips, found = self.held.rows, self.clips, []
        for split in dict.fromkeys(row.split for row in rows):
            own = [index for index, row in enumerate(rows) if row.split == split]
            same = [index for index in own if index in clips]
            first = {index: self.held.texts.get(hash(rows[index].text), -1) for index in own}
            known = [index for index in own if index not in clips and first[index] in self.texts]
            words, words_known = (sum(len(rows[index].text.split()) for index in some) for some in (own, known))
            found.append(
                {
                    "set": split,
                    "clips": len(own),
                    "same_clips": len(same),
                    "same_by": dict(Counter(clips[index][0] for index in same).most_common()),
                    "same_texts": len(known),
                    "words_in_same_texts": words_known / max(words, 1),
                    "clip_examples": [f"{rows[i].place} is {clips[i][1]}" for i in same[:EXAMPLES]],
                    "text_examples": [f"{rows[i].text[:60]!r} ({self.texts[first[i]]})" for i in known[:EXAMPLES]],
                }
            )
        return found

    def said(self) -> tuple[list[str], list[str]]:
        """Return a line for each evaluation set with clips of the training set, and one for each with its texts."""
        sets = self.by_set()
        clips = [
            f"data.{one['set']}: {one['same_clips']} of {one['clips']} clips are also in {self.trained} "
            f"({', '.join(f'{n} by {WHY[kind]}' for kind, n in one['same_by'].items())}): "
            + "; ".join(one["clip_examples"])
            for one in sets
            if one["same_clips"]
        ]
        texts = [
            f"data.{one['set']}: {one['same_texts']} of {one['clips']} clips share their text with {self.trained} "
            f"({100 * one['words_in_same_texts']:.1f} % of the words): {'; '.join(one['text_examples'])}"
            for one in sets
            if one["same_texts"]
        ]
        return clips, texts

    def scope(self) -> str:
        """Say what was compared."""
        held = Counter(row.split for row in self.held.rows)
        some = ", ".join(f"{n:,} of {split}" + " (a part)" * (split in self.held.cut) for split, n in held.items())
        of = "" if self.whole or not self.of else f" of {self.of:,}"
        of += f" ({self.looked / self.of:.1%})" if self.of and self.looked < self.of else ""
        lost = f" ({self.unread[0]} cannot be read)" if self.unread else ""
        heard, with_audio = self.held.heard, self.held.with_audio
        means = "row, file, id and text"
        if heard >= self.looked and with_audio == len(self.held.rows):
            means = "row, file, id, text and audio"
        elif heard and with_audio:
            means += f", the audio of {heard:,} with that of {with_audio:,}"
        return f"{self.looked:,}{of} rows of {self.trained}{lost} compared with {some} by {means}"

    def way_out(self, sources: list[OpenSource], leave_out: str) -> str:
        """Say what to do about clips that are the same.

        Args:
            sources: of training.
            leave_out: how to train without them, where other clips are left.
        """
        data = " ".join(shlex.quote(path) for path in dict.fromkeys(source.source.path for source in sources))
        split = f"Split the data again (parakeet-finetune split --data {data} --output DIR)"
        rest = f", or {leave_out}" if self.same_rows < self.looked else f": all of {self.trained} is evaluated as well"
        return f"{split}{rest}. data.allow_overlap=true trains anyway."


def warnings_about(found: Overlap, opened: dict[str, list[OpenSource]], config: RunConfig) -> list[str]:
    """Return a sentence for each evaluation set that has clips or texts in common with the training set.

    Raises:
        UserError: clips are the same, and data.allow_overlap does not allow it.
    """
    clips, texts = found.said()
    if clips and not config.data.allow_overlap:
        leave_out = "let parakeet-finetune check --config RUN.yaml list these clips for data.leave_out"
        raise UserError("\n".join([*(f"{line}." for line in clips), found.way_out(opened["train"], leave_out)]))
    return clips + texts


def hold_out(
    opened: dict[str, list[OpenSource]], config: RunConfig, seconds: float, with_audio: bool = False
) -> HeldOut:
    """Read what is evaluated, without the audio where the format allows that.

    Args:
        opened: sources by key.
        seconds: bound on the time.
        with_audio: all of it.
    """
    held, until = HeldOut(), time.monotonic() + seconds
    options = StreamOptions(BatchLimits(), 16_000, shuffle=False)
    for split in (name for name in EVALUATION_SETS if name in opened):
        sources = opened[split]
        if with_audio:
            sources = [replace(s, shards=[replace(shard, light=None) for shard in s.shards]) for s in sources]
        grouped = group_sources(sources, config.data.max_eval_samples)
        unread: list[str] = []
        rows = spread_rows(grouped, options, None, until - time.monotonic(), lengths=False, unread=unread)
        for ref, row in itertools.islice(rows, HELD_ROWS):
            held.add(split, *grouped.groups[ref[0]][ref[2]], ref[3], row)
        if next(rows, None) is not None or unread or time.monotonic() > until:
            held.cut.append(split)
    return held


def find_overlap(opened: dict[str, list[OpenSource]], config: RunConfig, seconds: float) -> Overlap:
    """Look for the rows of data.validation, test and guard in data.train and data.rehearsal, by row, audio file, id,
    text and audio.

    Rows that data.leave_out names do not count. Audio is compared by its bytes where it is a file on this machine or
    comes with its row: files only where as many bytes as those of a held clip are found, and all for half of the time.

    Args:
        opened: sources by key.
        seconds: bound on the time; what was looked at until then is a sample of whole shards.
    """
    d, until = config.data, time.monotonic() + seconds
    held = hold_out(opened, config, seconds / 2)
    held.seconds = seconds / 2
    found = Overlap(held, whole=not held.cut, trained=training_keys(opened["train"]))
    if not held.rows:
        return found
    leave_out = LeaveOut(d.leave_out, "data.leave_out") if d.leave_out else None
    options = StreamOptions(
        BatchLimits(), 16_000, seed=config.training.seed, shuffle=d.shuffle, skip_samples=d.skip_samples
    )
    grouped = group_sources(opened["train"], d.max_samples)
    found.of = count_rows(grouped, options)
    rows = spread_rows(grouped, options, None, until - time.monotonic(), lengths=False, unread=found.unread)
    for ref, row in rows:
        source, shard = grouped.groups[ref[0]][ref[2]]
        found.looked += 1
        if hits := held.find(source, shard, ref[3], row):
            place = shard.place(ref[3])
            if leave_out is None or leave_out.reason(place) is None:
                found.add(hits, place)
    found.whole = time.monotonic() <= until and held.seconds > 0 and not held.cut and not found.unread
    return found
