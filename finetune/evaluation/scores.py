"""Word and character error rates. Of each utterance only a few small numbers are kept (`UtteranceCounts`)."""

import zlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import jiwer
import torch

from finetune.data.normalization import normalize_text
from finetune.evaluation.mistakes import Mistakes, align
from finetune.evaluation.open_asr import normalize_open_asr
from finetune.evaluation.utterance_counts import Counts, UtteranceCounts


@dataclass
class Utterance:
    """One utterance as a model recognised it."""

    id: str
    language: str
    reference: str
    hypothesis: str


def score_pair(reference: str, hypothesis: str, normalization: str, language: str = "") -> Counts:
    """Edit counts of one utterance after normalisation; all 0, even `clips`, if it is not to be scored.

    Args:
        normalization: of `finetune.data.normalization.normalize_text`, or `open_asr`, which leaves out utterances
            without a reference.
        language: of the utterance, for `open_asr`.
    """
    reference, hypothesis = (normalize_for_scores(text, normalization, language) for text in (reference, hypothesis))
    return Counts() if not reference and normalization == "open_asr" else _score(reference, hypothesis)[0]


def normalize_for_scores(text: str, normalization: str, language: str) -> str:
    """Normalise a reference or a hypothesis for scoring."""
    return normalize_open_asr(text, language) if normalization == "open_asr" else normalize_text(text, normalization)


def _score(reference: str, hypothesis: str) -> tuple[Counts, list[tuple[str, str]]]:
    """Edit counts of two normalised texts, and their words in pairs (see `finetune.evaluation.mistakes.align`)."""
    if not reference:
        words, characters = len(hypothesis.split()), len(hypothesis)
        return Counts(1, 0, words, 0, 0, words, 0, characters), align(reference, hypothesis, None)
    words = jiwer.process_words(reference, hypothesis)
    characters = jiwer.process_characters(reference, hypothesis)
    counts = Counts(
        clips=1,
        words=words.hits + words.substitutions + words.deletions,
        word_errors=words.substitutions + words.deletions + words.insertions,
        substitutions=words.substitutions,
        deletions=words.deletions,
        insertions=words.insertions,
        characters=characters.hits + characters.substitutions + characters.deletions,
        character_errors=characters.substitutions + characters.deletions + characters.insertions,
    )
    return counts, align(reference, hypothesis, words)


@dataclass
class WerAccumulator:
    """Counts overall and per language, a few pairs to look at, and on demand the mistakes."""

    normalization: str
    keep_pairs: int = 0
    total: Counts = field(default_factory=Counts)
    by_language: dict[str, Counts] = field(default_factory=dict)
    pairs: list[dict[str, str]] = field(default_factory=list)
    quarantined: list[dict[str, str]] = field(default_factory=list)
    filtered: Counter[str] = field(default_factory=Counter)
    """Utterances that were left out, by reason."""
    mistakes: Mistakes | None = None
    utterance_counts: UtteranceCounts = field(default_factory=UtteranceCounts)
    left_out: int = 0
    """Utterances whose reference is empty after the normalisation `open_asr`."""
    audio_seconds: float = 0.0
    decoding_seconds: float = 0.0
    """From audio to text: features, encoder, decoder; without reading the data and without scoring."""

    def add(
        self, utterance_id: str, language: str, reference: str, hypothesis: str, audio_S: torch.Tensor | None = None
    ) -> Counts:
        """Score one utterance; its audio (S samples) is for `mistakes`."""
        scored, recognised = (normalize_for_scores(t, self.normalization, language) for t in (reference, hypothesis))
        if not scored and self.normalization == "open_asr":
            self.left_out += 1
            return Counts()
        counts, words = _score(scored, recognised)
        self.total.add(counts)
        self.by_language.setdefault(language or "unknown", Counts()).add(counts)
        self.utterance_counts.add(utterance_id, scored, language or "unknown", counts)
        pair = {"id": utterance_id, "language": language, "reference": reference, "hypothesis": hypothesis}
        self.pairs = self._sample([*self.pairs, pair])
        if self.mistakes is not None:
            self.mistakes.add(pair, words, counts.word_errors, audio_S)
        return counts

    def _sample(self, pairs: list[dict[str, str]]) -> list[dict[str, str]]:
        """The pairs whose ids have the smallest checksums: the same ones in every evaluation, spread over the set."""
        return sorted(pairs, key=lambda pair: zlib.crc32(pair["id"].encode()))[: self.keep_pairs]

    def merge(self, other: "WerAccumulator") -> None:
        """Add what another rank counted."""
        self.total.add(other.total)
        for language, counts in other.by_language.items():
            self.by_language.setdefault(language, Counts()).add(counts)
        self.pairs = self._sample(self.pairs + other.pairs)
        self.quarantined += other.quarantined
        self.filtered.update(other.filtered)
        if self.mistakes is not None and other.mistakes is not None:
            self.mistakes.merge(other.mistakes)
        self.utterance_counts.extend(other.utterance_counts)
        self.left_out += other.left_out
        self.audio_seconds += other.audio_seconds
        self.decoding_seconds += other.decoding_seconds

    def result(self) -> dict[str, Any]:
        """The rates and counts that `evaluate --json` and evaluations.jsonl are made from."""
        return {
            **self.total.rates(),
            "by_language": {name: counts.rates() for name, counts in sorted(self.by_language.items())},
        }
