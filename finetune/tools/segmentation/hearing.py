"""The first way through a recording: its stretches of speech, and what the model hears in them. S samples."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from finetune.data.audio_blocks import read_blocks
from finetune.data.pauses import speech_stretches
from finetune.durable_files import write_text
from finetune.errors import UserError
from finetune.evaluation.long_audio import Chunk, Pieces
from finetune.evaluation.recognise import recognise_chunks, text_of
from finetune.models.host_memory import return_freed_memory
from finetune.security.safe_text import json_line
from finetune.tools.segmentation.matching import anchored_share
from finetune.tools.segmentation.texts import Word, words_of_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from finetune.data.pauses import Stretch
    from finetune.models.protocols import AsrModel

BATCHES_AT_ONCE = 4
"""Batches whose stretches are sorted by length together."""
SECONDS_EACH = 8.0
"""Of a batch, for each stretch that it may hold: fewer long ones are decoded together, so that the memory of a batch
does not hang on how long the longest stretches of a recording are."""
LOOK_WORDS = 200
"""Heard words that are looked for in the text together, to see whether it is that of the recording."""
LEAST_SHARE = 0.04
"""Of their 3-grams, to be found; texts of other recordings have up to 0.01."""


@dataclass
class Heard:
    """A stretch of speech and what the model heard; samples of the recording at the model's rate."""

    start: int
    end: int
    text: str

    def words(self) -> list[Word]:
        return words_of_line(self.text)


@dataclass(frozen=True)
class Pauses:
    """How a recording is cut into stretches."""

    max_seconds: float
    min_pause: float


class Progress:
    """A file of JSON lines that a job goes on with after it was ended in any way."""

    def __init__(self, path: Path):
        self.path = path
        self.rows: list[dict[str, Any]] = []
        """Of earlier starts."""
        if path.exists():
            for line in path.read_bytes().split(b"\n")[:-1]:
                try:
                    self.rows.append(json.loads(line))
                except ValueError:
                    break  # cut off in the middle, with all that may be behind it
        write_text(path, "".join(json_line(row) + "\n" for row in self.rows))

    def add(self, rows: list[dict[str, Any]]) -> None:
        """Append rows."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(json_line(row) + "\n" for row in rows))


def stretches_of(audio: str, rate: int, pauses: Pauses) -> Iterator[Stretch]:
    """Yield the stretches of speech of a file, the same ones each time."""
    blocks = read_blocks(audio, rate)
    yield from speech_stretches(blocks, rate, max_seconds=pauses.max_seconds, min_pause=pauses.min_pause)


def batches_of(group: list[Stretch], numbers: list[int], batch_size: int, rate: int) -> Iterator[list[int]]:
    """Yield the numbers of stretches to decode together, the longest first: at most `batch_size`, and of at most so
    many times `SECONDS_EACH` with their padding, but at least one."""
    left = sorted(numbers, key=lambda i: -len(group[i].audio_S))
    while left:
        size = int(batch_size * SECONDS_EACH * rate / max(len(group[left[0]].audio_S), 1))
        size = min(max(size, 1), batch_size)
        yield left[:size]
        left = left[size:]


def hear(
    model: AsrModel,
    stretches: Iterator[Stretch],
    progress: Progress,
    *,
    batch_size: int,
    language: str | None,
    check: Callable[[list[Heard], bool], None],
    on_stretch: Callable[[Heard], object],
) -> list[Heard]:
    """Recognise the stretches that `progress` does not have; call inside `evaluation_mode`.

    Args:
        check: called with all that was heard so far, and whether that is all; raises to end it.
        on_stretch: called with each stretch, also those of `progress`.
    """
    heard = [Heard(**row) for row in progress.rows]
    for row in heard:
        on_stretch(row)
    pieces = Pieces(model.tokenizer)
    behind = itertools.islice(stretches, len(heard), None)
    while group := list(itertools.islice(behind, batch_size * BATCHES_AT_ONCE)):
        texts = [""] * len(group)
        for own in batches_of(group, list(range(len(group))), batch_size, model.preprocessor._sample_rate):
            chunks = [Chunk(0, group[i].audio_S, 0) for i in own]
            for i, tokens in zip(own, recognise_chunks(model, chunks, pieces, language), strict=True):
                texts[i] = text_of(model, tokens)
            return_freed_memory()
        rows = [Heard(s.start, s.end(), text) for s, text in zip(group, texts, strict=True)]
        progress.add([asdict(row) for row in rows])
        heard += rows
        for row in rows:
            on_stretch(row)
        check(heard, False)
    check(heard, True)
    return heard


class SameRecording:
    """Finds out within the first minutes of speech whether a text is that of the recording."""

    def __init__(self, text: list[Word], name: str, rate: int, patience: float):
        self.normal = [word.normal for word in text]
        self.name, self.rate, self.patience = name, rate, patience
        self.stretches = 0
        self.words: list[str] = []
        self.seconds = 0.0
        self.found = False

    def __call__(self, heard: list[Heard], complete: bool) -> None:
        """Raise UserError where none of `patience` minutes of speech is in the text."""
        if self.found:
            return
        for row in heard[self.stretches :]:
            self.words += [word.normal for word in row.words()]
            self.seconds += (row.end - row.start) / self.rate
            if len(self.words) >= LOOK_WORDS:
                self._look()
        self.stretches = len(heard)
        if complete and not self.found:
            self._look()
        if not self.found and (complete or self.seconds >= 60 * self.patience):
            said = " ".join(word for row in heard[:20] for word in row.text.split())[:160]
            if not said:
                raise UserError("--audio: the model hears no words in the recording.")
            raise UserError(
                f"--text: the first {self.seconds / 60:.1f} minutes of speech are not in {self.name}. It is that of "
                "another recording or language, or the model does not understand this one; it heard: "
                f"{said!r}. --patience MINUTES looks longer."
            )

    def _look(self) -> None:
        self.found = anchored_share(self.words, self.normal) >= LEAST_SHARE
        # Up to three words have no 3-gram, or one that a misheard word spoils: all of them have to be in the text.
        if not self.found and len(self.words) < LOOK_WORDS:
            shared = set(self.words) & set(self.normal)
            self.found = len(self.words) <= 3 and len(shared) == len(set(self.words)) and bool(shared)
        self.words = []
