"""The worker of a labelling job: cuts long recordings at pauses, transcribes, and says how sure the model was.

S samples.
"""

from __future__ import annotations

import hashlib
import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from finetune.data.audio_blocks import read_blocks
from finetune.data.batch import collate
from finetune.data.batching import BatchLimits, Entry
from finetune.data.decode import as_float
from finetune.data.filters import FilteredUtterance
from finetune.data.options import StreamOptions
from finetune.data.pauses import speech_stretches
from finetune.data.position import FINISHED
from finetune.data.quarantine import BadUtterance
from finetune.data.utterances import DecodedUtterance, decode, examine, no_tokens
from finetune.evaluation.alignment import AlignedClip, Aligner, Encoded
from finetune.evaluation.recognise import decode_encoded, encode_audio, evaluation_mode
from finetune.models.loading import load_option, move_to_device
from finetune.models.nemo import set_head
from finetune.models.prompts import check_language, prompt_slots
from finetune.tools.transcription.words import enable_timestamps

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from finetune.tools.jobs.clips import Clips

HELD_SECONDS = 600.0
"""Audio that waits to be put into batches of like length."""
SIGNALS = ("lattice", "confidence", "weakest", "blanks", "pace", "length")
"""What `signals_of` returns."""
SMALLEST = 1e-6
Value = dict[str, Any]


@dataclass
class Waiting:
    """A clip that waits for its batch, and what its result begins with."""

    result: Value
    clip: DecodedUtterance | None
    """None: a recording without speech."""


@dataclass(frozen=True)
class MakeLabeller:
    """Loads the model in the worker's process."""

    model: str
    labelled: bool
    """Whether the clips have texts, to calibrate on."""
    tokenizer: str | None = None
    head: str | None = None
    language: str | None = None
    """Of clips that name none, as their source says by now; here it is checked."""
    device: str | None = None
    batch_size: int = 16
    longest: float = 20.0
    """Seconds; longer clips without a text are cut at pauses."""

    def __call__(self) -> Labeller:
        return Labeller(self)


class Labeller:
    """Transcribes clips and collects the signals of its confidence."""

    def __init__(self, settings: MakeLabeller):
        self.settings = settings
        device = settings.device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.model = move_to_device(load_option(settings.model, settings.tokenizer), device)
        set_head(self.model, settings.head, settings.model)
        enable_timestamps(self.model)
        prompts = prompt_slots(self.model)
        if prompts and settings.language is not None:
            check_language(self.model, settings.language)
        self.aligner = Aligner(self.model)
        self.rate = self.aligner.rate
        self.options = StreamOptions(
            limits=BatchLimits(clips=settings.batch_size),
            sample_rate=self.rate,
            group_by_duration=True,  # lengths are read where rows do not state them
            keep_empty_text=True,
            unlabelled=not settings.labelled,
            prompts=prompts,
        )

    def process(self, clips: Clips) -> Iterator[Value]:
        """Yield one result a clip, and several for a recording that is cut: source (its place), id, language, duration
        in seconds, a digest of its samples; offset of a part; text and `signals`, which are missing where nothing was
        heard; `silence`, the probability that nothing was said, which a recording without speech lacks; of a labelled
        clip `reference`.
        """
        held: list[Waiting] = []
        seconds = 0.0
        for waiting in self._read(clips):
            if waiting.clip is None:
                yield {**waiting.result, "text": ""}
                continue
            held.append(waiting)
            seconds += waiting.result["duration"]
            if seconds > HELD_SECONDS:
                yield from self._label(held)
                held, seconds = [], 0.0
        yield from self._label(held)

    def _read(self, clips: Clips) -> Iterator[Waiting]:
        labelled = self.settings.labelled
        for source, place, (shard, number), row in clips.rows():
            try:
                entry = examine(source, place, (0, 0, shard, number), row, self.options, no_tokens)
                if entry.seconds > self.settings.longest and not labelled:
                    yield from self._cut(entry)
                    continue
                clip = decode(entry, self.options, 0)
                result = self._begin(entry, clip.audio_S)
                yield Waiting({**result, "reference": entry.text} if labelled else result, clip)
            except FilteredUtterance as reason:
                clips.filtered[str(reason)] += 1
            except BadUtterance as reason:
                clips.fail("bad", place, str(reason))

    def _begin(self, entry: Entry, audio_S: np.ndarray) -> Value:
        # To the microsecond: a duration that is cut shorter would cut samples off.
        return {
            "source": entry.place,
            "id": entry.id,
            "lang": entry.language,
            "duration": round(len(audio_S) / self.rate, 6),
            "digest": hashlib.blake2b(audio_S.tobytes(), digest_size=8).hexdigest(),
        }

    def _cut(self, entry: Entry) -> Iterator[Waiting]:
        """Yield the stretches of speech of a recording, which is read block by block unless it is a part of a file."""
        blocks: Iterable[np.ndarray]
        if entry.offset and entry.seconds <= HELD_SECONDS:
            blocks = [as_float(torch.from_numpy(decode(entry, self.options, 0).audio_S)).numpy()]
        else:
            first = round((entry.offset or 0.0) * self.rate)
            behind = None if entry.duration is None else first + round(entry.duration * self.rate)
            blocks = part_of(read_blocks(located(entry.audio, entry.source.folder), self.rate), first, behind)
        stretch = None
        for stretch in speech_stretches(blocks, self.rate, max_seconds=self.settings.longest):
            result = self._begin(entry, stretch.audio_S)
            result["offset"] = round((entry.offset or 0.0) + stretch.start / self.rate, 6)
            yield Waiting(result, DecodedUtterance(entry.id, "", entry.language, stretch.audio_S, []))
        if stretch is None:
            nothing_S = np.zeros(0, dtype=np.float32)
            yield Waiting({**self._begin(entry, nothing_S), "duration": round(entry.seconds, 6)}, None)

    def _label(self, held: list[Waiting]) -> Iterator[Value]:
        held = sorted(held, key=lambda waiting: waiting.result["duration"])
        for first in range(0, len(held), self.settings.batch_size):
            yield from self._label_batch(held[first : first + self.settings.batch_size])

    def _label_batch(self, held: list[Waiting]) -> Iterator[Value]:
        batch = collate([waiting.clip for waiting in held if waiting.clip is not None], 0, FINISHED)
        batch.languages = [str(waiting.result["lang"]) for waiting in held]
        with evaluation_mode(self.model):
            encoded = Encoded(*encode_audio(self.model, batch.audio_BS, batch.audio_lengths_B, batch.languages))
            heard = decode_encoded(self.model, *encoded)
        ids = [[int(token) for token in hypothesis.y_sequence] for hypothesis in heard]
        aligned = self.aligner.align_tokens(encoded, batch, ids, [hypothesis.text for hypothesis in heard])
        for waiting, hypothesis, clip in zip(held, heard, aligned, strict=True):
            found: Value = {"text": " ".join(hypothesis.text.split())}
            if not found["text"]:
                found["silence"] = math.exp(-clip.loss) if not clip.tokens else 0.0
            elif clip.aligned:
                confidence = [float(p) for p in hypothesis.token_confidence]
                found["signals"] = [round(value, 5) for value in signals_of(clip, confidence)]
            yield {**waiting.result, **found}


def part_of(blocks: Iterable[np.ndarray], first: int, behind: int | None) -> Iterator[np.ndarray]:
    """Yield the samples of a stream of (S,) blocks from one sample up to another, or to the end."""
    begin = 0
    for block_S in blocks:
        if behind is not None and begin >= behind:
            return
        part_S = block_S[max(first - begin, 0) : None if behind is None else behind - begin]
        begin += len(block_S)
        if len(part_S):
            yield part_S


def located(audio: object, folder: str | None) -> object:
    """Return a row's audio with a path that does not depend on the source's folder."""
    held = audio.get("bytes") if isinstance(audio, dict) else None
    path = audio.get("path") if isinstance(audio, dict) else audio
    if held is not None or not isinstance(path, str):
        return audio
    if folder is None or "://" in path:
        return path
    return f"{folder.rstrip('/')}/{path}" if "://" in folder else os.path.join(folder, path)


def signals_of(clip: AlignedClip, confidence: list[float]) -> list[float]:
    """Return what tells a right transcript from a wrong one, in the order of SIGNALS, natural logarithms all:

        lattice     log P(text | audio) over all alignments, a token
        confidence  mean log-probability of the tokens when they were decoded
        weakest     that of the least probable one
        blanks      log-probability of the blanks between the tokens, a token: speech without words lowers it
        pace        tokens a second
        length      tokens

    Args:
        clip: of a text with tokens, aligned.
        confidence: probability of each token, as `enable_timestamps` has it.
    """
    n = len(clip.tokens)
    logs = [math.log(max(p, SMALLEST)) for p in confidence] or [math.log(SMALLEST)]
    blanks = sum(token.blank_log_probability for token in clip.tokens) + clip.last_blank_log_probability
    return [
        -clip.loss / n,
        sum(logs) / len(logs),
        min(logs),
        blanks / n,
        math.log(n / max(clip.duration_seconds, 1e-3)),
        math.log(n),
    ]
