"""Counts of each utterance of an evaluation, kept small, so that two evaluations can be compared. N utterances."""

from __future__ import annotations

import zipfile
import zlib
from array import array
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune.durable_files import put_in_place
from finetune.evaluation.significance import RESAMPLES, compare_counts, rate_interval, sum_blocks

if TYPE_CHECKING:
    from pathlib import Path

BEST, BEST_TRAINED = "best-validation.npz", "best-trained-validation.npz"
"""In a run's folder: the counts on validation of model.nemo; and where that is the base model, those of the best
evaluation after step 0."""
COLUMNS = ("word_errors", "words", "character_errors", "characters")
# What numpy raises for a damaged .npz, beside OSError.
DAMAGED = (
    *(KeyError, ValueError, TypeError, OverflowError, EOFError, NotImplementedError, RuntimeError, MemoryError),
    *(zipfile.BadZipFile, zlib.error),
)


@dataclass
class Counts:
    """Edit counts over utterances."""

    clips: int = 0
    """Utterances."""
    words: int = 0
    word_errors: int = 0
    substitutions: int = 0
    deletions: int = 0
    insertions: int = 0
    characters: int = 0
    character_errors: int = 0

    def add(self, other: Counts) -> None:
        for name in vars(self):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def rates(self) -> dict[str, Any]:
        """WER and CER as fractions (None without reference words), and the counts behind them."""
        return {
            "wer": self.word_errors / self.words if self.words else None,
            "cer": self.character_errors / self.characters if self.characters else None,
            **vars(self),
        }


@dataclass
class UtteranceCounts:
    """26 bytes an utterance (2.6 MB for 100,000): a hash of its id and reference, its language, and four counts."""

    keys: array = field(default_factory=lambda: array("Q"))
    counts: array = field(default_factory=lambda: array("I"))
    """COLUMNS of each utterance, one after the other."""
    languages: array = field(default_factory=lambda: array("H"))
    """Indices into `names`."""
    names: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.keys)

    def add(self, utterance_id: str, reference: str, language: str, counts: Counts) -> None:
        """Add one utterance.

        Args:
            reference: as scored, so that an utterance whose reference or normalisation changed counts as another one.
        """
        digest = blake2b(f"{utterance_id}\0{reference}".encode(errors="replace"), digest_size=8).digest()
        self.keys.append(int.from_bytes(digest, "little"))
        self.counts.extend(getattr(counts, column) for column in COLUMNS)
        if language not in self.names:
            self.names.append(language)
        self.languages.append(self.names.index(language))

    def wer(self) -> float | None:
        """Return the WER; None without reference words."""
        errors, words = (int(self.table()[:, COLUMNS.index(name)].sum()) for name in ("word_errors", "words"))
        return errors / words if words else None

    def extend(self, other: UtteranceCounts) -> None:
        """Add the utterances of another part of the same evaluation."""
        self.names += [name for name in other.names if name not in self.names]
        indices = [self.names.index(name) for name in other.names]
        self.keys.extend(other.keys)
        self.counts.extend(other.counts)
        self.languages.extend(indices[i] for i in other.languages)

    def table(self) -> np.ndarray:
        """(N, 4) int64, columns as in COLUMNS."""
        return np.asarray(self.counts, dtype=np.int64).reshape(-1, len(COLUMNS))

    def language_names(self) -> np.ndarray:
        """(N,) names."""
        return np.asarray(self.names or [""], dtype=str)[np.asarray(self.languages, dtype=np.int64)]

    def intervals(self, resamples: int = RESAMPLES, blocks: list[str] | None = None) -> dict[str, Any]:
        """Confidence intervals of WER and CER, also of each language: wer_interval, cer_interval, by_language.

        Args:
            blocks: N names; utterances with the same name are drawn together.
        """
        names_N = None if blocks is None else np.asarray(blocks)

        def intervals_of(rows: np.ndarray) -> dict[str, Any]:
            counts = self.table()[rows]
            if names_N is not None:
                counts = sum_blocks(counts, names_N[rows])
            word_errors, words, character_errors, characters = counts.T
            return {
                "wer_interval": rate_interval(word_errors, words, resamples),
                "cer_interval": rate_interval(character_errors, characters, resamples),
            }

        spoken = self.language_names()
        by_language = {name: intervals_of(np.flatnonzero(spoken == name)) for name in sorted(self.names)}
        return {**intervals_of(np.arange(len(self))), "by_language": by_language}

    def save(self, path: Path) -> None:
        """Write a .npz atomically."""
        aside = path.with_name(f"{path.name}.part")
        with aside.open("wb") as file:
            np.savez_compressed(
                file,
                keys=np.asarray(self.keys, dtype=np.uint64),
                counts=np.asarray(self.counts, dtype=np.uint32),
                languages=np.asarray(self.languages, dtype=np.uint16),
                names=np.asarray(self.names, dtype=str),
            )
        put_in_place(aside, path)

    @classmethod
    def load(cls, path: Path) -> UtteranceCounts:
        """Read what `save` wrote.

        Raises:
            OSError: the file is missing or cannot be read.
            ValueError: the file holds something else.
        """
        try:
            with np.load(path, allow_pickle=False) as found:
                return cls(
                    array("Q", found["keys"].tolist()),
                    array("I", found["counts"].tolist()),
                    array("H", found["languages"].tolist()),
                    found["names"].tolist(),
                )
        except DAMAGED as error:
            raise ValueError(f"{path} does not hold counts of clips") from error


def best_trained_counts(folder: Path) -> UtteranceCounts:
    """Return the counts on validation of a run's best evaluation after step 0, with data.guard_limit of those that
    keep it.

    Raises:
        OSError, ValueError: as from `UtteranceCounts.load`.
    """
    trained = folder / BEST_TRAINED
    return UtteranceCounts.load(trained if trained.is_file() else folder / BEST)


def compare_evaluations(before: UtteranceCounts, after: UtteranceCounts) -> dict[str, Any]:
    """Compare two evaluations by `finetune.evaluation.significance.compare_counts` of the utterances that are in both.

    Utterances with equal ids and references count as one. `unmatched` is how many are in one evaluation only.
    """
    errors_a_N, errors_b_N, words_N, languages_N, unmatched = paired(before, after)
    return {**compare_counts(errors_a_N, errors_b_N, words_N, languages_N), "unmatched": unmatched}


def paired(
    before: UtteranceCounts, after: UtteranceCounts
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, int]:
    """Return word errors of both evaluations, words and languages of the utterances that are in both, and how many
    are in one only."""
    (keys_a, table_a, _), (keys_b, table_b, languages_b) = _by_key(before), _by_key(after)
    _, in_a, in_b = np.intersect1d(keys_a, keys_b, assume_unique=True, return_indices=True)
    a, b = table_a[in_a], table_b[in_b]
    same = a[:, 1] == b[:, 1]  # not an utterance that is twice in one of them, and once in the other
    unmatched = len(keys_a) + len(keys_b) - 2 * int(same.sum())
    return a[same, 0], b[same, 0], a[same, 1], languages_b[in_b][same], unmatched


def _by_key(counts: UtteranceCounts) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Keys, counts and languages with each key once."""
    key_N = np.asarray(counts.keys, dtype=np.uint64)
    keys, first = np.unique(key_N, return_index=True)
    return keys, sum_blocks(counts.table(), key_N), counts.language_names()[first]
