"""The second way through a recording: how well each stretch and the words of the text fit, by the alignment lattice.

B stretches, H width, T frames.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from finetune.data.batch import collate
from finetune.data.normalization import NORMALIZATIONS, normalize_text
from finetune.data.quarantine import BadUtterance
from finetune.data.utterances import DecodedUtterance, text_encoder
from finetune.errors import UserError
from finetune.evaluation.alignment import Encoded, normalization_of
from finetune.models.host_memory import return_freed_memory
from finetune.tools.segmentation.hearing import BATCHES_AT_ONCE, Progress, batches_of
from finetune.tools.segmentation.spans import Candidate, Judged, mixture
from finetune.tools.segmentation.texts import Word, joined

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from finetune.data.batch import Batch
    from finetune.data.pauses import Stretch
    from finetune.evaluation.alignment import AlignedClip, Aligner
    from finetune.models.protocols import AsrModel
    from finetune.tools.segmentation.spans import Span

MOST_UNWRITABLE = 0.3
TEXTS_AT_ONCE, CELLS_AT_ONCE = 32, 100_000
"""Alignments that are computed together: of so many texts, and with so many pairs of a frame and a token."""


class Writing:
    """Writes words with a model's tokenizer: as they are, in lower case, or without punctuation as well, whichever
    leaves out fewest; without punctuation where its vocabulary has no capitals.

    Raises:
        UserError: the tokenizer cannot write the text's alphabet.
    """

    def __init__(self, model: AsrModel, text: list[Word], name: str):
        self.encode = text_encoder(model.tokenizer)
        surfaces = {word.surface for word in text}
        modes = NORMALIZATIONS if normalization_of(model) == "none" else ("basic",)
        unknown = {mode: {s for s in surfaces if not self._writes(normalize_text(s, mode))} for mode in modes}
        self.mode = min(modes, key=lambda mode: len(unknown[mode]))
        self.unwritable = {word.surface for word in text if word.surface in unknown[self.mode]}
        lost = sum(word.surface in self.unwritable for word in text)
        if lost > MOST_UNWRITABLE * len(text):
            shown = next(word for word in text if word.surface in self.unwritable)
            raise UserError(
                f"--text: the model's tokenizer cannot write {lost:,} of the {len(text):,} words of {name}, such as "
                f"{shown.surface!r} in line {shown.line}: {self._why(shown)}. It needs a model of this alphabet "
                "(docs/vocabulary.md)."
            )

    def _writes(self, text: str) -> bool:
        try:
            self.encode(text)
        except BadUtterance:
            return False
        return True

    def _why(self, word: Word) -> str:
        try:
            self.encode(normalize_text(word.surface, self.mode))
        except BadUtterance as reason:
            return str(reason).split(" (")[0]
        return ""

    def tokens(self, text: str) -> list[int] | None:
        """Return the ids of a text; None where the tokenizer lacks a character."""
        try:
            return self.encode(normalize_text(text, self.mode))
        except BadUtterance:
            return None


def judge(
    aligner: Aligner,
    stretches: Iterator[Stretch],
    spans: list[Span],
    text: list[Word],
    writing: Writing,
    progress: Progress,
    *,
    batch_size: int,
    on_stretch: Callable[[int], object],
) -> list[Judged | None]:
    """Align each stretch that has a span with its possible texts; None for the others.

    Args:
        progress: what an earlier call has judged already.
        on_stretch: called with the number of each stretch.
    """
    judged = [_of_row(row) for row in progress.rows]
    for number in range(len(judged)):
        on_stretch(number)
    behind = itertools.islice(stretches, len(judged), None)
    while group := list(itertools.islice(behind, batch_size * BATCHES_AT_ONCE)):
        first = len(judged)
        found: list[Judged | None] = [None] * len(group)
        wanted = [i for i in range(len(group)) if spans[first + i].cored or spans[first + i].after]
        for own in batches_of(group, wanted, batch_size, aligner.rate):
            batch = _batch_of([group[i] for i in own])
            results = _judge_batch(aligner, batch, [spans[first + i] for i in own], text, writing)
            for i, result in zip(own, results, strict=True):
                found[i] = result
            return_freed_memory()
        progress.add([{} if j is None else asdict(j) for j in found])
        judged += found
        for number in range(first, len(judged)):
            on_stretch(number)
    return judged


def _of_row(row: dict) -> Judged | None:
    return Judged(row["heard_loss"], [Candidate(**c) for c in row["candidates"]]) if row else None


def _batch_of(stretches: list[Stretch]) -> Batch:
    utterances = [DecodedUtterance(str(s.start), "", "", s.audio_S, []) for s in stretches]
    return collate(utterances, 0, {})


def _judge_batch(
    aligner: Aligner, batch: Batch, spans: list[Span], text: list[Word], writing: Writing
) -> list[Judged]:
    encoded = aligner.encode(batch)
    heard = _align(aligner, batch, encoded, [(i, joined(span.heard)) for i, span in enumerate(spans)], writing)
    judged = [Judged(math.inf if clip is None else clip.loss) for clip in heard]

    def add(wanted: list[tuple[int, tuple[int, int]]]) -> None:
        texts = [(i, joined(mixture(spans[i], text, *words))) for i, words in wanted]
        for (i, words), clip in zip(wanted, _align(aligner, batch, encoded, texts, writing), strict=True):
            if clip is not None and clip.aligned and clip.words:
                confidences = [word.confidence for word in clip.words]
                mean = sum(confidences) / len(confidences)
                judged[i].candidates.append(Candidate(*words, clip.loss, mean, min(confidences)))

    seconds = (batch.audio_lengths_B / aligner.rate).tolist()
    add([(i, words) for i, span in enumerate(spans) for words in span.ranges(seconds[i])])
    both = []
    for i, (span, own) in enumerate(zip(spans, judged, strict=True)):
        if span.cored and own.candidates:
            first = min((c for c in own.candidates if c.end == span.end), key=lambda c: c.loss).first
            end = min((c for c in own.candidates if c.first == span.first), key=lambda c: c.loss).end
            if first < span.first and end > span.end:
                both.append((i, (first, end)))
    add(both)
    return judged


def _align(
    aligner: Aligner, batch: Batch, encoded: Encoded, texts: list[tuple[int, str]], writing: Writing
) -> list[AlignedClip | None]:
    """Align texts with the clips of a batch, given by number; None where the tokenizer cannot write one."""
    tokens = [writing.tokens(text) for _, text in texts]
    found: list[AlignedClip | None] = [None] * len(texts)
    able = [n for n, ids in enumerate(tokens) if ids is not None]
    frames = {n: int(encoded.enc_lengths_B[texts[n][0]]) for n in able}
    able.sort(key=lambda n: (-frames[n], -len(tokens[n] or ())))
    while able:
        size, widest = 1, len(tokens[able[0]] or ()) + 1
        while size < min(len(able), TEXTS_AT_ONCE):
            widest = max(widest, len(tokens[able[size]] or ()) + 1)
            if (size + 1) * frames[able[0]] * widest > CELLS_AT_ONCE:
                break
            size += 1
        own, able = able[:size], able[size:]
        rows = [texts[n][0] for n in own]
        lengths_B = encoded.enc_lengths_B[rows]
        part = Encoded(encoded.enc_BHT[rows, :, : int(lengths_B.max())], lengths_B)
        some = replace(
            batch,
            ids=[batch.ids[i] for i in rows],
            languages=[batch.languages[i] for i in rows],
            audio_BS=batch.audio_BS[rows],
            audio_lengths_B=batch.audio_lengths_B[rows],
        )
        written = [normalize_text(texts[n][1], writing.mode) for n in own]
        for n, clip in zip(
            own, aligner.align_tokens(part, some, [tokens[n] or [] for n in own], written), strict=True
        ):
            found[n] = clip
    return found
