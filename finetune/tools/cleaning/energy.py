"""What the waveform alone says of a clip. S samples, F frames of 20 ms."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

FRAME_SECONDS = 0.02
EDGE_FRAMES = 3  # at either end
SPEECH_RANGE = 25.0  # dB below a clip's loudest frames that still count as speech
LOWEST = -120.0
BEHIND_A_TOKEN = 0.4  # seconds that a token may last from where it begins


@dataclass(frozen=True)
class Energy:
    """Levels in dB of full scale."""

    level: float
    """Of the loud frames (95th percentile)."""
    head: float
    """Of the first 60 ms, against `level`."""
    tail: float
    """Of the last 60 ms, against `level`."""
    middle: float
    """Of 60 ms in the middle, against `level`: what an edge is like where a clip is cut."""
    unheard: float
    """Longest stretch of speech in seconds in which the model heard no token."""


def energy_of(audio_S: np.ndarray, sample_rate: int, token_seconds: Sequence[float]) -> Energy:
    """Measure a clip, float32 in [-1, 1] or int16; `token_seconds` are the times of the tokens that a model heard."""
    samples_S = audio_S.astype(np.float64) / (32768.0 if audio_S.dtype == np.int16 else 1.0)
    width = max(int(FRAME_SECONDS * sample_rate), 1)
    frames = max(len(samples_S) // width, 1)
    padded_S = np.zeros(frames * width)
    padded_S[: min(len(samples_S), len(padded_S))] = samples_S[: len(padded_S)]
    power_F = (padded_S.reshape(frames, width) ** 2).mean(1)
    level_F = np.maximum(10 * np.log10(np.maximum(power_F, 1e-12)), LOWEST)
    loud = float(np.percentile(level_F, 95))
    starts = (0, max(frames - EDGE_FRAMES, 0) // 2, max(frames - EDGE_FRAMES, 0))
    head, middle, tail = (
        float(10 * np.log10(max(power_F[start : start + EDGE_FRAMES].mean(), 1e-12))) - loud for start in starts
    )
    unheard_F = level_F > loud - SPEECH_RANGE
    for start in token_seconds:
        unheard_F[max(int(start / FRAME_SECONDS) - 1, 0) : int((start + BEHIND_A_TOKEN) / FRAME_SECONDS) + 1] = False
    bounds = np.flatnonzero(np.diff(np.concatenate([[0], unheard_F.astype(np.int8), [0]])))
    longest = float((bounds[1::2] - bounds[::2]).max(initial=0)) * FRAME_SECONDS
    return Energy(loud, head, tail, middle, longest)
