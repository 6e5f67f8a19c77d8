"""Transcribing audio of any length: cut at the quietest places into pieces that full attention can take."""

from dataclasses import dataclass

import numpy as np


@dataclass
class Piece:
    """A part of a recording."""

    start: float
    """Seconds from the beginning of the recording."""
    audio_S: np.ndarray


def cut_at_silence(audio_S: np.ndarray, sample_rate: int, longest: float, search: float = 5.0) -> list[Piece]:
    """Cuts a recording into pieces of at most `longest` seconds.

    Each cut is put at the quietest 0.2 s of the last `search` seconds before the limit, so that words stay whole. Every
    sample is in exactly one piece.

    Args:
        audio_S: (S,) waveform.
        sample_rate: Hz.
        longest: seconds a piece.
        search: seconds before the limit in which the quietest place is looked for.
    """
    pieces, start = [], 0
    limit, window, hop = int(longest * sample_rate), int(0.2 * sample_rate), int(0.02 * sample_rate)
    while len(audio_S) - start > limit:
        begin = start + limit - int(min(search, longest / 2) * sample_rate)
        region = audio_S[begin : start + limit].astype(np.float64)
        sums = np.concatenate([[0.0], np.cumsum(region**2)])
        offsets = np.arange(0, len(region) - window, hop)
        cut = begin + int(offsets[np.argmin(sums[offsets + window] - sums[offsets])]) + window // 2
        pieces.append(Piece(start / sample_rate, audio_S[start:cut]))
        start = cut
    pieces.append(Piece(start / sample_rate, audio_S[start:]))
    return pieces
