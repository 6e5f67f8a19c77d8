"""How well the phrases that matter are recognised, and what that costs the other words.

N utterances.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jiwer
import numpy as np

from finetune.evaluation.scores import normalize_for_scores
from finetune.evaluation.significance import RESAMPLES, compare_counts, rate_interval, sum_blocks

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from finetune.evaluation.scores import Utterance

LISTED = 10
"""Phrases that a result lists as missed, and as said where they are not."""
_END = ""
"""Key of a phrase's end in the tree of words: no word is empty."""


class PhraseFinder:
    """Finds phrases in normalised texts.

    Args:
        phrases: as written.
        normalization: of `finetune.evaluation.scores.normalize_for_scores`.
    """

    def __init__(self, phrases: Iterable[str], normalization: str):
        self.phrases, self.normalization = list(phrases), normalization
        self._trees: dict[str, dict[str, Any]] = {}

    def occurrences(self, words: Sequence[str], language: str) -> list[tuple[int, int, str]]:
        """Return first word, the one behind the last, and the phrase of each occurrence, from left to right: of those
        that begin at a word the longest, and none within another."""
        tree, found, place = self._tree(language), [], 0
        while place < len(words):
            node, longest = tree, 0
            for length, word in enumerate(words[place:], 1):
                node = node.get(word)
                if node is None:
                    break
                longest = length if _END in node else longest
            if longest:
                found.append((place, place + longest, " ".join(words[place : place + longest])))
            place += max(longest, 1)
        return found

    def _tree(self, language: str) -> dict[str, Any]:
        """Return the words of the phrases as a tree; normalisation may go by the language."""
        key = language if self.normalization == "open_asr" else ""
        if key not in self._trees:
            tree = self._trees[key] = {}
            for phrase in self.phrases:
                node = tree
                for word in normalize_for_scores(phrase, self.normalization, language).split():
                    node = node.setdefault(word, {})
                if node is not tree:
                    node[_END] = {}
        return self._trees[key]


@dataclass
class PhraseCounts:
    """Counts of phrases and of the other words, by utterance."""

    said_N: list[int] = field(default_factory=list)
    """Occurrences of phrases in the reference."""
    missed_N: list[int] = field(default_factory=list)
    """Of these, more than the hypothesis has of the same phrase."""
    written_N: list[int] = field(default_factory=list)
    """Occurrences in the hypothesis."""
    false_N: list[int] = field(default_factory=list)
    """Of these, more than the reference has of the same phrase."""
    rest_words_N: list[int] = field(default_factory=list)
    """Words of the reference that belong to no phrase."""
    rest_errors_N: list[int] = field(default_factory=list)
    """Of these, wrong or missing ones, and inserted words; those of a place where a phrase is wrong are the
    phrase's."""
    missed: Counter[str] = field(default_factory=Counter)
    false: Counter[str] = field(default_factory=Counter)

    def add(self, finder: PhraseFinder, utterance: Utterance) -> None:
        """Count an utterance."""
        reference, hypothesis = (
            normalize_for_scores(text, finder.normalization, utterance.language).split()
            for text in (utterance.reference, utterance.hypothesis)
        )
        said = finder.occurrences(reference, utterance.language)
        written = finder.occurrences(hypothesis, utterance.language)
        said_of, written_of = (Counter(phrase for _, _, phrase in found) for found in (said, written))
        missed, false = said_of - written_of, written_of - said_of
        of_phrase = {i for first, behind, _ in said for i in range(first, behind)}
        self.said_N.append(len(said))
        self.written_N.append(len(written))
        self.missed_N.append(missed.total())
        self.false_N.append(false.total())
        self.missed.update(missed)
        self.false.update(false)
        self.rest_words_N.append(len(reference) - len(of_phrase))
        self.rest_errors_N.append(_errors_of_the_rest(reference, hypothesis, of_phrase))

    def result(self, names_N: list[str] | None = None, resamples: int = RESAMPLES) -> dict[str, Any]:
        """Return recall, precision and the WER of the rest as fractions, with intervals and the counts behind them;
        None where there is nothing to divide by.

        Args:
            names_N: utterances with the same name are drawn together.
            resamples: of the bootstrap.
        """
        columns = (self.said_N, self.missed_N, self.written_N, self.false_N, self.rest_words_N, self.rest_errors_N)
        counts_NC = np.asarray(columns, dtype=np.int64).T
        if names_N is not None:
            counts_NC = sum_blocks(counts_NC, names_N)
        said_N, missed_N, written_N, false_N, words_N, errors_N = counts_NC.T
        said, missed, written, false, words, errors = counts_NC.sum(axis=0).tolist()
        return {
            "said": said,
            "written": written,
            "missed": missed,
            "false": false,
            "recall": 1 - missed / said if said else None,
            "recall_interval": _turned(rate_interval(missed_N, said_N, resamples)),
            "precision": 1 - false / written if written else None,
            "precision_interval": _turned(rate_interval(false_N, written_N, resamples)),
            "rest_words": words,
            "rest_errors": errors,
            "rest_wer": errors / words if words else None,
            "rest_wer_interval": rate_interval(errors_N, words_N, resamples),
            "most_missed": self.missed.most_common(LISTED),
            "most_false": self.false.most_common(LISTED),
        }


def count_phrases(utterances: Iterable[Utterance], finder: PhraseFinder) -> PhraseCounts:
    """Count the phrases and the other words of utterances."""
    counts = PhraseCounts()
    for utterance in utterances:
        counts.add(finder, utterance)
    return counts


def compare_phrases(
    a: PhraseCounts, b: PhraseCounts, names_N: list[str] | None = None, resamples: int = RESAMPLES
) -> dict[str, Any]:
    """Compare two decodings of the same utterances by `finetune.evaluation.significance.compare_counts`.

    Returns:
        missed and rest: the comparisons of missed phrases over said ones (None if none is said), and of errors of the
            rest over its words.
    """
    nobody = [""] * len(a.said_N)

    def compared(errors_a_N: list[int], errors_b_N: list[int], of_N: list[int]) -> dict[str, Any] | None:
        if not sum(of_N):
            return None
        errors_a, errors_b, of = (np.asarray(column) for column in (errors_a_N, errors_b_N, of_N))
        found = compare_counts(errors_a, errors_b, of, nobody, names_N=names_N, resamples=resamples)
        del found["by_language"]
        return found

    return {
        "missed": compared(a.missed_N, b.missed_N, a.said_N),
        "rest": compared(a.rest_errors_N, b.rest_errors_N, a.rest_words_N),
    }


def _errors_of_the_rest(reference: list[str], hypothesis: list[str], of_phrase: set[int]) -> int:
    if not reference:
        return len(hypothesis)
    errors = 0
    place: list[jiwer.AlignmentChunk] = []
    chunks = jiwer.process_words(" ".join(reference), " ".join(hypothesis)).alignments[0]
    for chunk in (*chunks, None):
        if chunk is not None and chunk.type != "equal":
            place.append(chunk)
            continue
        # Neighbouring changes are one place: "creek spiel" for "kriegspiel" is a substitution and an insertion.
        words = {i for one in place for i in range(one.ref_start_idx, one.ref_end_idx)}
        inserted = sum(one.hyp_end_idx - one.hyp_start_idx for one in place if one.type == "insert")
        errors += len(words - of_phrase) + (0 if words & of_phrase else inserted)
        place = []
    return errors


def _turned(interval: list[float] | None) -> list[float] | None:
    """Turn the interval of a share into that of what is left."""
    return None if interval is None else [1 - interval[1], 1 - interval[0]]
