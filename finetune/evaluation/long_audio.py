"""Cut audio of any length into chunks for full attention, and join their tokens into one sequence again.

Neighbouring chunks share `overlap` seconds. The seam lies in the middle of the overlap, at the quietest place nearby,
so that both chunks hear the words around it with context on both sides. Of what both recognised, `splice` takes the
part before the seam from one and the part after it from the other.

All times are encoder frames since the beginning of the recording. S samples.
"""

from __future__ import annotations

import itertools
import unicodedata
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from finetune.models.protocols import Tokenizer

CHUNK_SECONDS = 30.0
LONGEST_AT_ONCE = 40.0
"""Seconds of an utterance that an evaluation decodes at once: the default of `data.max_duration`, so that what is
trained on is evaluated whole."""
OVERLAP_SECONDS = 2.0
SEARCH_SECONDS = 5.0
QUIET_SECONDS = 0.2
TOLERANCE_SECONDS = 0.3
LONGEST_WORD = 6  # in tolerances
SHORTEST_FRAMES = 2


class Token(NamedTuple):
    """One recognised token."""

    id: int
    start: int
    """Frame of the recording."""
    duration: int
    """Frames, as predicted by the model; 1 without predicted durations."""
    begins_word: bool
    is_punctuation: bool
    confidence: float | None = None
    """Probability of the token; None without `enable_timestamps`."""


@dataclass
class Cutting:
    """How to cut a recording, in samples and frames."""

    frame: int
    """Samples of an encoder frame; chunks begin at multiples of it, so that their frames coincide."""
    limit: int | None
    """Most frames of a chunk; None: the recording is one chunk."""
    margin: int
    """Frames of a chunk beyond its seam."""
    search: int
    """Frames before the last possible seam that are searched for the quietest place."""
    quiet: int
    """Samples over which loudness is averaged."""
    tolerance: int
    """Frames by which two chunks may differ about the time of one token."""

    @classmethod
    def of_seconds(
        cls,
        sample_rate: int,
        frame_seconds: float,
        chunk: float | None,
        overlap: float | None = None,
        search: float = SEARCH_SECONDS,
    ) -> Cutting:
        """Convert from seconds and Hz; an overlap of None is 2 s, or a quarter of a shorter chunk."""
        if overlap is None:
            overlap = OVERLAP_SECONDS if chunk is None else min(OVERLAP_SECONDS, chunk / 4)
        limit = None if chunk is None else max(int(chunk / frame_seconds + 1e-6), 4 * SHORTEST_FRAMES)
        searched = search if chunk is None else min(search, (chunk - overlap) / 2)
        return cls(
            frame=round(frame_seconds * sample_rate),
            limit=limit,
            margin=round(overlap / 2 / frame_seconds),
            search=max(0, int(searched / frame_seconds)),
            quiet=int(QUIET_SECONDS * sample_rate),
            tolerance=round(TOLERANCE_SECONDS / frame_seconds),
        )


@dataclass
class Chunk:
    """A part of a recording."""

    start: int
    """Its first frame."""
    audio_S: np.ndarray
    seam: int
    """Its words count from this frame on; 0 in the first chunk."""


def chunks_of(blocks: Iterable[np.ndarray], cutting: Cutting) -> Iterator[Chunk]:
    """Cut a stream of samples into chunks, holding at most one chunk and one block.

    Every sample is in a chunk, and those within `margin` frames of a seam are in two. A recording of up to `limit`
    frames is one chunk.
    """
    held: list[np.ndarray] = []
    blocks, length, most = iter(blocks), 0, np.inf if cutting.limit is None else cutting.limit * cutting.frame
    start = seam = 0
    while True:
        while length <= most and (block_S := next(blocks, None)) is not None:
            held.append(block_S)
            length += len(block_S)
        audio_S = np.concatenate(held) if held else np.zeros(0, dtype=np.float32)
        if length <= most:
            yield Chunk(start, audio_S, seam)
            return
        cut = quietest_frame(audio_S, cutting)
        yield Chunk(start, audio_S[: (cut + cutting.margin) * cutting.frame].copy(), seam)
        seam = start + cut
        start = seam - cutting.margin
        audio_S = audio_S[(cut - cutting.margin) * cutting.frame :].copy()
        held, length = [audio_S], len(audio_S)


def quietest_frame(audio_S: np.ndarray, cutting: Cutting) -> int:
    """The frame, counted from the first of these samples, at whose beginning to put the next seam.

    It leaves room for the margin, so that the chunk keeps to the limit; of equally quiet frames it is the last.
    """
    assert cutting.limit is not None
    last = cutting.limit - max(cutting.margin, SHORTEST_FRAMES)
    first = max(last - cutting.search, cutting.margin + 1)
    begin = max(0, first * cutting.frame - cutting.quiet // 2)
    end = last * cutting.frame + cutting.quiet // 2
    sums = np.concatenate([[0.0], np.cumsum(audio_S[begin:end].astype(np.float64) ** 2)])
    centres = np.arange(last, first - 1, -1) * cutting.frame - begin
    lower = np.clip(centres - cutting.quiet // 2, 0, len(sums) - 1)
    upper = np.clip(centres + cutting.quiet // 2, 0, len(sums) - 1)
    return int(last - np.argmin((sums[upper] - sums[lower]) / np.maximum(upper - lower, 1)))


class Stitcher:
    """Joins the tokens of a recording chunk by chunk."""

    def __init__(self, cutting: Cutting):
        self.tolerance, self.frame = cutting.tolerance, cutting.frame
        self.tokens: list[Token] = []
        self._end = 0

    def add(self, chunk: Chunk, tokens: list[Token]) -> None:
        """Add the tokens of the next chunk, in order, with times of the recording."""
        # The overlap: our tokens from the beginning of this chunk on, its tokens up to the end of the last one.
        first = len(self.tokens)
        while first and self.tokens[first - 1].start >= chunk.start:
            first -= 1
        behind = sum(1 for _ in itertools.takewhile(lambda t: t.start < self._end, tokens))
        keep, skip = splice(self.tokens[first:], tokens[:behind], chunk.seam, self.tolerance)
        del self.tokens[first + keep :]
        self.tokens += tokens[skip:]
        self._end = chunk.start + -(-len(chunk.audio_S) // self.frame)


def splice(left: list[Token], right: list[Token], seam: int, tolerance: int) -> tuple[int, int]:
    """Find where to pass from one chunk's tokens to the next chunk's: `left[:i] + right[j:]`.

    Both lists are the tokens of the overlap. Words go by their middle: left words before the seam, right words after
    it. That is not enough where a word lies across the seam, or where the two chunks put one word on different sides
    of it: then the place is the pair of tokens nearest to the seam on which both agree (same token, times no further
    apart than `tolerance`), preferably one that begins a word, so that the word at the seam is whole and comes once.
    Two readings of a word that have no token in common count as one word if their middles are as close.

    Returns:
        i and j.
    """
    pairs = agreeing(left, right, tolerance)
    units_left, units_right = _units(left, tolerance), _units(right, tolerance)
    # Middles grow with the words, so the first n and the first m lie before the seam.
    n = sum(unit.middle < seam for unit in units_left)
    m = sum(unit.middle < seam for unit in units_right)
    i, j = _first(units_left, n, left), _first(units_right, m, right)
    across = any(unit.start < seam <= unit.last for unit in (*units_left, *units_right))
    if pairs and (across or any((a < i) != (b < j) for a, b in pairs)):

        def badness(pair: tuple[int, int]) -> float:
            one, other = left[pair[0]], right[pair[1]]
            return abs((one.start + other.start) / 2 - seam) + (0 if one.begins_word else 2 * tolerance)

        return min(pairs, key=badness)
    paired_left, paired_right = {a for a, _ in pairs}, {b for _, b in pairs}

    def two_readings(one: Unit, other: Unit) -> bool:
        alone = paired_left.isdisjoint(one.tokens) and paired_right.isdisjoint(other.tokens)
        return alone and abs(one.middle - other.middle) <= tolerance

    if n and m < len(units_right) and two_readings(units_left[n - 1], units_right[m]):
        j = _first(units_right, m + 1, right)  # otherwise kept twice
    elif m and n < len(units_left) and two_readings(units_left[n], units_right[m - 1]):
        i = _first(units_left, n + 1, left)  # otherwise lost
    return i, j


def agreeing(left: list[Token], right: list[Token], tolerance: int) -> list[tuple[int, int]]:
    """Longest common subsequence of tokens that are close in time, as pairs of indices; of equally long ones the
    closest."""
    best = np.zeros((len(left) + 1, len(right) + 1))
    gain = np.zeros((len(left), len(right)))
    for i in range(len(left) - 1, -1, -1):
        for j in range(len(right) - 1, -1, -1):
            apart = abs(left[i].start - right[j].start)
            if left[i].id == right[j].id and apart <= tolerance:
                # The bonus for closeness is too small, over all pairs, to outweigh a pair.
                gain[i, j] = 1 + (tolerance - apart) / ((tolerance + 1) * (len(left) + len(right)))
            best[i, j] = max(best[i + 1, j], best[i, j + 1], gain[i, j] and gain[i, j] + best[i + 1, j + 1])
    pairs, i, j = [], 0, 0
    while i < len(left) and j < len(right) and best[i, j] > 0:
        if gain[i, j] and best[i, j] == gain[i, j] + best[i + 1, j + 1]:
            pairs.append((i, j))
            i, j = i + 1, j + 1
        elif best[i, j] == best[i + 1, j]:
            i += 1
        else:
            j += 1
    return pairs


class Unit(NamedTuple):
    """A word among tokens; times in frames."""

    tokens: range
    start: int
    last: int
    """Of its last token that is not punctuation, which often comes in the silence long after its word."""
    middle: float


def _units(tokens: list[Token], tolerance: int) -> list[Unit]:
    """The words. One much longer than the tolerance is text without blanks, as in Chinese: each of its tokens is a
    unit."""
    firsts = [i for i, t in enumerate(tokens) if t.begins_word or i == 0]
    units: list[Unit] = []
    middle = -np.inf
    for first, end in itertools.pairwise([*firsts, len(tokens)]):
        spoken = [t.start for t in tokens[first:end] if not t.is_punctuation] or [tokens[first].start]
        if spoken[-1] - spoken[0] > LONGEST_WORD * tolerance:
            parts = [(range(i, i + 1), tokens[i].start, tokens[i].start) for i in range(first, end)]
        else:
            parts = [(range(first, end), spoken[0], spoken[-1])]
        for places, start, last in parts:
            middle = max(middle, (start + last) / 2)
            units.append(Unit(places, start, last, middle))
    return units


def _first(units: list[Unit], n: int, tokens: list[Token]) -> int:
    return units[n].tokens.start if n < len(units) else len(tokens)


class Pieces:
    """Tells which tokens of a NeMo tokenizer begin a word or are punctuation, for `Token`."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.known: dict[int, tuple[bool, bool]] = {}
        vocabulary = [str(piece) for piece in getattr(tokenizer, "vocab", ())]
        # WordPiece marks what continues a word, SentencePiece what begins one.
        self.marks_continuation = not any(piece.startswith("\u2581") for piece in vocabulary) and any(
            piece.startswith("##") for piece in vocabulary
        )

    def kind(self, token_id: int) -> tuple[bool, bool]:
        """Whether a token begins a word, and whether it is punctuation."""
        if token_id not in self.known:
            piece = self.tokenizer.ids_to_tokens([token_id])[0]
            begins = not piece.startswith("##") if self.marks_continuation else piece.startswith("\u2581")
            letters = piece.removeprefix("##" if self.marks_continuation else "").lstrip("\u2581")
            punctuation = bool(letters) and all(unicodedata.category(c)[0] == "P" for c in letters)
            self.known[token_id] = begins, punctuation
        return self.known[token_id]
