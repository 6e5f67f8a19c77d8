"""Edges of words beside pauses, by the loudness of the audio between two words.

Encoder frames are long (80 ms in Parakeet), and a model emits a word's last token well before its sound ends. Where
the audio is quiet between the last token of a word and the first of the next, the word ends with the quiet and the
next one begins behind it. Where it is not, a word lasts until the next one begins.

S samples, F frames of loudness, W words.
"""

from __future__ import annotations

import numpy as np

HOP_SECONDS = 0.01
WINDOW_SECONDS = 0.02
TILT = 0.7
"""Of the difference to the sample before: noise is mostly low, and weak consonants are high."""
RISE = 0.2
"""Where between noise floor and speech, in decibels, a frame counts as speech."""
SPEECH_DECIBELS = 40.0
"""Whatever is so far below speech is quiet, in audio without noise."""
LEAST_DECIBELS = 6.0
"""No frame that is less far below speech is quiet: in audio without a pause nothing is."""
PAUSE_SECONDS = 0.07
"""Shorter quiet between two words may be the closure of a consonant."""
SOUND_SECONDS = 0.06
"""At least, from the beginning of a word's last token on."""
MOVED_SECONDS = 0.12
"""By which a pause may move a word's start."""


def loudness(audio_S: np.ndarray, sample_rate: int) -> np.ndarray:
    """Return the mean power around each multiple of 10 ms, high sounds raised, (F,) in decibels.

    Args:
        audio_S: floats in [-1, 1].
    """
    hop, window = round(HOP_SECONDS * sample_rate), round(WINDOW_SECONDS * sample_rate)
    audio_S = np.concatenate([audio_S[:1], audio_S[1:] - TILT * audio_S[:-1]])
    sums = np.concatenate([[0.0], np.cumsum(np.square(audio_S, dtype=np.float64))])
    middle_F = np.arange(len(audio_S) // hop + 1) * hop
    low_F, high_F = (np.clip(middle_F + x, 0, len(audio_S)) for x in (-window // 2, window - window // 2))
    return 10 * np.log10((sums[high_F] - sums[low_F]) / np.maximum(high_F - low_F, 1) + 1e-10)


def quiet_frames(audio_S: np.ndarray, sample_rate: int) -> np.ndarray:
    """Return which frames of `loudness` are quiet, measured against the recording's own floor and speech."""
    level_F = loudness(audio_S, sample_rate)
    floor, speech = np.percentile(level_F, (5, 95))
    threshold = max(floor + RISE * (speech - floor), speech - SPEECH_DECIBELS)
    return level_F < min(threshold, speech - LEAST_DECIBELS)


def longest_quiet(quiet_F: np.ndarray, start: float, end: float) -> tuple[float, float] | None:
    """Return start and end of the longest quiet stretch between two times in seconds; None where nothing is quiet."""
    first = max(round(start / HOP_SECONDS), 0)
    quiet = np.concatenate([[False], quiet_F[first : round(end / HOP_SECONDS) + 1], [False]])
    edges = np.flatnonzero(quiet[1:] != quiet[:-1]).reshape(-1, 2)
    if not len(edges):
        return None
    a, b = edges[np.argmax(edges[:, 1] - edges[:, 0])]
    return (first + a) * HOP_SECONDS, (first + b) * HOP_SECONDS


def word_edges(
    starts_W: np.ndarray, lasts_W: np.ndarray, quiet_F: np.ndarray, duration: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return start and end of each word, and which starts were found behind a pause.

    Args:
        starts_W, lasts_W: times of the first and the last token of each word, in seconds, none before the one before.
        quiet_F: of `quiet_frames`.
        duration: of the clip in seconds.

    Returns:
        (W,) starts and ends in seconds, which do not overlap; (W,) bool.
    """
    starts_W, given_W = starts_W.copy(), starts_W
    ends_W, behind_pause_W = np.append(starts_W[1:], duration), np.zeros(len(starts_W), dtype=bool)
    for before in range(-1, len(starts_W)):
        following = before + 1
        is_inside = before >= 0 and following < len(starts_W)
        low = 0.0 if before < 0 else min(lasts_W[before] + SOUND_SECONDS, ends_W[before])
        high = given_W[following] + MOVED_SECONDS if following < len(starts_W) else duration
        pause = longest_quiet(quiet_F, low, min(high, duration))
        if pause is None or (is_inside and pause[1] - pause[0] < PAUSE_SECONDS):
            continue
        if before >= 0:
            ends_W[before] = pause[0]
        if following < len(starts_W) and abs(pause[1] - given_W[following]) <= MOVED_SECONDS:
            starts_W[following], behind_pause_W[following] = pause[1], True
    starts_W = np.maximum.accumulate(starts_W.clip(0, duration))
    ends_W = np.maximum(ends_W.clip(0, duration), starts_W)
    ends_W[:-1] = np.minimum(ends_W[:-1], starts_W[1:])
    return starts_W, ends_W, behind_pause_W
