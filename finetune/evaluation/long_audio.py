"""Audio of any length as chunks that full attention can take, and their tokens as one sequence again.

Two chunks share `overlap` seconds, with the seam in their middle at the quietest place that is near. Both chunks hear the
words around the seam with sound on both sides of them; of what both recognised, `splice` takes the part before the seam from the
one and the part behind it from the other, at a token on which they agree.

All times are encoder frames since the beginning of the recording. S samples.
"""

import itertools
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

CHUNK_SECONDS = 30.0
OVERLAP_SECONDS = 4.0
SEARCH_SECONDS = 5.0
QUIET_SECONDS = 0.2
TOLERANCE_SECONDS = 0.3
LONGEST_WORD = 6  # times the tolerance
SHORTEST_FRAMES = 2


class Token(NamedTuple):
    """One recognised token."""

    id: int
    start: int
    """Frame of the recording."""
    duration: int
    """Frames that the model says it lasts; 1 where the model has no durations."""
    begins_word: bool
    is_punctuation: bool
    confidence: float | None = None
    """Probability of the token; None where it was not asked for."""


@dataclass
class Cutting:
    """How a recording is cut, in samples and frames.

    Args:
        frame: samples of an encoder frame; all chunks begin at a multiple of it, so that frames of different chunks coincide.
        limit: most frames of a chunk; None: no chunk is cut.
        margin: frames that a chunk has beyond a seam.
        search: frames before the last possible seam in which the quietest place is looked for.
        quiet: samples over which loudness is taken.
        tolerance: frames by which two chunks may differ about the time of one token.
    """

    frame: int
    limit: int | None
    margin: int
    search: int
    quiet: int
    tolerance: int

    @classmethod
    def of_seconds(
        cls,
        sample_rate: int,
        frame_seconds: float,
        chunk: float | None,
        overlap: float | None = None,
        search: float = SEARCH_SECONDS,
    ) -> "Cutting":
        """The same in seconds.

        Args:
            sample_rate: Hz.
            frame_seconds: of an encoder frame.
            chunk: longest chunk; None: the recording at once.
            overlap: what two chunks share, less than half of a chunk; None: 4 s, of short chunks a quarter.
            search: before the last possible seam.
        """
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
    """From this frame on its words count; 0 in the first chunk."""


def chunks_of(blocks: Iterable[np.ndarray], cutting: Cutting) -> Iterator[Chunk]:
    """Cuts a stream of samples into chunks; no more than one chunk and one block are held.

    Every sample is in a chunk, and those within `margin` frames of a seam are in two. A recording of no more than `limit`
    frames is one chunk as it is.
    """
    blocks, held, length = iter(blocks), [], 0
    start, seam, more = 0, 0, True
    while True:
        while more and (cutting.limit is None or length <= cutting.limit * cutting.frame):
            block_S = next(blocks, None)
            more = block_S is not None
            if more:
                held.append(block_S)
                length += len(block_S)
        audio_S = np.concatenate(held) if held else np.zeros(0, dtype=np.float32)
        if not more and (cutting.limit is None or length <= cutting.limit * cutting.frame):
            yield Chunk(start, audio_S, seam)
            return
        cut = quietest_frame(audio_S, cutting)
        yield Chunk(start, audio_S[: (cut + cutting.margin) * cutting.frame].copy(), seam)
        seam = start + cut
        start = seam - cutting.margin
        audio_S = audio_S[(cut - cutting.margin) * cutting.frame :].copy()
        held, length = [audio_S], len(audio_S)


def quietest_frame(audio_S: np.ndarray, cutting: Cutting) -> int:
    """The frame, counted from the beginning of these samples, at whose beginning the next seam is best put.

    It leaves room for the margin behind it, so that the chunk keeps to the limit; of equally quiet ones it is the last.
    """
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
    """The tokens of a recording, of which chunk after chunk is added."""

    def __init__(self, cutting: Cutting):
        self.tolerance, self.frame = cutting.tolerance, cutting.frame
        self.tokens: list[Token] = []
        self._end = 0

    def add(self, chunk: Chunk, tokens: list[Token]) -> None:
        """Adds the tokens of the next chunk, in order, with times of the recording."""
        # What both chunks heard: our tokens from the beginning of this chunk on, its tokens up to the end of the last one.
        first = len(self.tokens)
        while first and self.tokens[first - 1].start >= chunk.start:
            first -= 1
        behind = sum(1 for _ in itertools.takewhile(lambda t: t.start < self._end, tokens))
        keep, skip = splice(self.tokens[first:], tokens[:behind], chunk.seam, self.tolerance)
        del self.tokens[first + keep :]
        self.tokens += tokens[skip:]
        self._end = chunk.start + -(-len(chunk.audio_S) // self.frame)


def splice(left: list[Token], right: list[Token], seam: int, tolerance: int) -> tuple[int, int]:
    """Where to pass from one chunk's tokens to the next chunk's: `left[:i] + right[j:]`.

    Both lists tell what was heard in the time that the chunks share. Where they agree on tokens (same token, times no
    further apart than `tolerance`), the pair nearest to the seam is the place, a pair that begins a word before others: the word at
    the seam is whole and comes once, even when the chunks put it on different sides of it. Where they agree on nothing, words
    go by their middle: left ones before the seam, right ones behind it; two readings of a word at the seam count as one.

    Returns:
        i and j.
    """
    pairs = agreeing(left, right, tolerance)
    if pairs:
        return min(
            pairs, key=lambda p: (not left[p[0]].begins_word, abs(left[p[0]].start + right[p[1]].start - 2 * seam))
        )
    words_left, words_right = _units(left, tolerance), _units(right, tolerance)
    n = sum(middle < seam for _, middle in words_left)
    m = sum(middle < seam for _, middle in words_right)
    # Middles grow with the words, so the first n and the first m lie before the seam.
    if n and m < len(words_right) and abs(words_left[n - 1][1] - words_right[m][1]) <= tolerance:
        m += 1  # kept twice
    elif m and n < len(words_left) and abs(words_left[n][1] - words_right[m - 1][1]) <= tolerance:
        n += 1  # kept by nobody
    return (
        words_left[n][0] if n < len(words_left) else len(left),
        words_right[m][0] if m < len(words_right) else len(right),
    )


def agreeing(left: list[Token], right: list[Token], tolerance: int) -> list[tuple[int, int]]:
    """The longest common subsequence of tokens that are close in time, as pairs of indices; of equally long ones the closest."""
    best = np.zeros((len(left) + 1, len(right) + 1))
    gain = np.zeros((len(left), len(right)))
    for i in range(len(left) - 1, -1, -1):
        for j in range(len(right) - 1, -1, -1):
            apart = abs(left[i].start - right[j].start)
            if left[i].id == right[j].id and apart <= tolerance:
                # The share for closeness is too small, over all pairs, to outweigh a pair.
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


def _units(tokens: list[Token], tolerance: int) -> list[tuple[int, float]]:
    """Words as (index of the first token, middle in frames). A word of many times the tolerance is none, but text without
    blanks, as in Chinese: each of its tokens stands by itself."""
    firsts = [i for i, t in enumerate(tokens) if t.begins_word or i == 0]
    units: list[tuple[int, float]] = []
    middle = -np.inf
    for first, end in itertools.pairwise([*firsts, len(tokens)]):
        # Punctuation often comes in the silence long behind its word.
        spoken = [t.start for t in tokens[first:end] if not t.is_punctuation] or [tokens[first].start]
        if spoken[-1] - spoken[0] > LONGEST_WORD * tolerance:
            parts = [(i, float(tokens[i].start)) for i in range(first, end)]
        else:
            parts = [(first, (spoken[0] + spoken[-1]) / 2)]
        for place, own in parts:
            middle = max(middle, own)
            units.append((place, middle))
    return units


class Pieces:
    """What the tokens of a NeMo tokenizer are, for `Token`."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.known: dict[int, tuple[bool, bool]] = {}
        self.hyphenated = any(str(piece).startswith("##") for piece in getattr(tokenizer, "vocab", ()))

    def kind(self, token_id: int) -> tuple[bool, bool]:
        """Whether a token begins a word, and whether it is punctuation."""
        if token_id not in self.known:
            piece = self.tokenizer.ids_to_tokens([token_id])[0]
            begins = not piece.startswith("##") if self.hyphenated else piece.startswith("\u2581")
            letters = piece.removeprefix("##").lstrip("\u2581")
            punctuation = bool(letters) and all(unicodedata.category(c)[0] == "P" for c in letters)
            self.known[token_id] = begins, punctuation
        return self.known[token_id]
