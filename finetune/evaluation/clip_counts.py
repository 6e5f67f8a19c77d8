"""Counts of each clip of an evaluation, kept small, so that two evaluations of the same clips can be compared. N clips."""

import zipfile
import zlib
from array import array
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from finetune.durable_files import put_in_place
from finetune.evaluation.significance import RESAMPLES, compare_counts, rate_interval

COLUMNS = ("word_errors", "words", "character_errors", "characters")


UNREADABLE = (
    *(KeyError, ValueError, TypeError, OverflowError, EOFError, NotImplementedError, RuntimeError, MemoryError),
    *(zipfile.BadZipFile, zlib.error),
)


@dataclass
class ClipCounts:
    """26 bytes a clip (2.6 MB for 100,000): a hash of its id and reference, its language, and four counts."""

    keys: array = field(default_factory=lambda: array("Q"))
    counts: array = field(default_factory=lambda: array("I"))
    """COLUMNS of each clip, one clip after the other."""
    languages: array = field(default_factory=lambda: array("H"))
    names: list[str] = field(default_factory=list)
    """Of the languages."""

    def __len__(self) -> int:
        return len(self.keys)

    def add(self, clip_id: str, reference: str, language: str, counts: Any) -> None:
        """Adds one clip.

        Args:
            reference: as it was scored, so that clips whose reference or normalisation changed are not taken for the same.
            counts: `finetune.evaluation.scores.Counts` of it.
        """
        digest = blake2b(f"{clip_id}\0{reference}".encode(errors="replace"), digest_size=8).digest()
        self.keys.append(int.from_bytes(digest, "little"))
        self.counts.extend(getattr(counts, column) for column in COLUMNS)
        if language not in self.names:
            self.names.append(language)
        self.languages.append(self.names.index(language))

    def extend(self, other: "ClipCounts") -> None:
        """Adds the clips of another part of the same evaluation."""
        self.names += [name for name in other.names if name not in self.names]
        places = [self.names.index(name) for name in other.names]
        self.keys.extend(other.keys)
        self.counts.extend(other.counts)
        self.languages.extend(places[i] for i in other.languages)

    def table(self) -> np.ndarray:
        """(N, 4) int64, columns as in COLUMNS."""
        return np.asarray(self.counts, dtype=np.int64).reshape(-1, len(COLUMNS))

    def language_names(self) -> np.ndarray:
        """(N,) names."""
        return np.asarray(self.names or [""], dtype=str)[np.asarray(self.languages, dtype=np.int64)]

    def intervals(self, resamples: int = RESAMPLES, blocks: np.ndarray | None = None) -> dict[str, Any]:
        """Confidence intervals of WER and CER, and of each language's: wer_interval, cer_interval, by_language.

        Args:
            blocks: (N,) whole numbers; clips of one number are drawn together.
        """

        def both(rows: np.ndarray) -> dict[str, Any]:
            columns = self.table()[rows]
            if blocks is not None:
                _, place = np.unique(blocks[rows], return_inverse=True)
                columns = np.stack([np.bincount(place, weights=c) for c in columns.T], axis=1).astype(np.int64)
            word_errors, words, character_errors, characters = columns.T
            return {
                "wer_interval": rate_interval(word_errors, words, resamples),
                "cer_interval": rate_interval(character_errors, characters, resamples),
            }

        spoken = self.language_names()
        by_language = {name: both(np.flatnonzero(spoken == name)) for name in sorted(self.names)}
        return {**both(np.arange(len(self))), "by_language": by_language}

    def save(self, path: Path) -> None:
        """Writes a .npz, aside first."""
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
    def load(cls, path: Path) -> "ClipCounts":
        """Reads what `save` wrote.

        Raises:
            OSError: it is missing or cannot be read.
            ValueError: it is no such file.
        """
        try:
            with np.load(path, allow_pickle=False) as found:
                return cls(
                    array("Q", found["keys"].tolist()),
                    array("I", found["counts"].tolist()),
                    array("H", found["languages"].tolist()),
                    found["names"].tolist(),
                )
        except UNREADABLE as error:
            raise ValueError(f"{path} does not hold counts of clips") from error


def compare_evaluations(before: ClipCounts, after: ClipCounts, resamples: int = RESAMPLES) -> dict[str, Any]:
    """Two evaluations of the same clips: `finetune.evaluation.significance.compare_counts` of the clips that are in both, and
    `unmatched`, how many are in one only. Clips with equal ids and references count as one."""
    (keys_a, table_a, _), (keys_b, table_b, languages_b) = _by_key(before), _by_key(after)
    _, in_a, in_b = np.intersect1d(keys_a, keys_b, assume_unique=True, return_indices=True)
    a, b = table_a[in_a], table_b[in_b]
    # A clip that is twice in one of them, and once in the other, is not the same.
    same = a[:, 1] == b[:, 1]
    result = compare_counts(a[same, 0], b[same, 0], a[same, 1], languages_b[in_b][same])
    return {**result, "unmatched": len(keys_a) + len(keys_b) - 2 * int(same.sum())}


def _by_key(counts: ClipCounts) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Keys, counts and languages with each key once."""
    keys, first, place = np.unique(np.asarray(counts.keys, dtype=np.uint64), return_index=True, return_inverse=True)
    if len(keys) == len(counts):
        return keys, counts.table()[first], counts.language_names()[first]
    sums = [np.bincount(place, weights=column, minlength=len(keys)) for column in counts.table().T]
    return keys, np.stack(sums, axis=1).astype(np.int64), counts.language_names()[first]
