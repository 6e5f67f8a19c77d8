"""Audio of any length in blocks, so that hours take no more memory than seconds. S samples, C channels."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import soxr
import torch
import torchaudio

from finetune.data.decode import LONGEST_RATIO, mono_at, open_audio

BLOCK_SECONDS = 10.0
# Of torchaudio's resampler: zero crossings of its filter on either side, and its cut-off as a share of half the lower rate.
FILTER_WIDTH, ROLLOFF = 6, 0.99


def read_blocks(audio: Any, sample_rate: int, block_seconds: float = BLOCK_SECONDS) -> Iterator[np.ndarray]:
    """The samples that `decode_audio` gives for a file, in order, block by block.

    The file is read from its beginning to its end without a seek.

    Args:
        audio: as `finetune.data.decode.decode_audio` takes it, but no array.
        sample_rate: Hz of the result.
        block_seconds: read at once.

    Yields:
        (S,) float32 in [-1, 1], channels averaged.

    Raises:
        BadUtterance: missing, unreadable, empty, or not finite; blocks before the fault have been given by then.
    """
    with open_audio(audio, None) as sound:
        rate, frames = sound.samplerate, max(1, int(block_seconds * sound.samplerate))
        resampler = stream_resampler(rate, sample_rate)
        # soundfile seeks to where it is after each read, which loses the decoder's state: MP3 and Opus then differ by a click.
        sound.seekable = lambda: False
        block_SC = sound.read(frames, dtype="float32")
        mono_at(block_SC[:1], rate, rate)  # an empty file, or a rate that no speech has
        while len(block_SC):
            yield resampler.push(mono_at(block_SC, rate, rate))
            block_SC = sound.read(frames, dtype="float32")
        yield resampler.finish()


def stream_resampler(rate: int, sample_rate: int) -> "Unchanged | Polyphase | Soxr":
    """What `finetune.data.decode.mono_at` resamples with, for a stream."""
    if rate == sample_rate:
        return Unchanged()
    step = math.gcd(rate, sample_rate)
    if max(rate, sample_rate) // step > LONGEST_RATIO:
        return Soxr(rate, sample_rate)
    return Polyphase(rate // step, sample_rate // step)


class Unchanged:
    """No resampling."""

    def push(self, samples_S: np.ndarray) -> np.ndarray:
        return samples_S

    def finish(self) -> np.ndarray:
        return np.zeros(0, dtype=np.float32)


class Soxr:
    """soxr's own stream."""

    def __init__(self, rate: int, sample_rate: int):
        self.stream = soxr.ResampleStream(rate, sample_rate, 1, dtype="float32")

    def push(self, samples_S: np.ndarray) -> np.ndarray:
        return self.stream.resample_chunk(samples_S)

    def finish(self) -> np.ndarray:
        return self.stream.resample_chunk(np.zeros(0, dtype=np.float32), last=True)


class Polyphase:
    """torchaudio's resampler on a stream.

    Each step of it turns `orig` samples into `new` ones and sees no more than the filter's width around them, so a block
    is resampled together with that many samples of its neighbours, and what they alone decide is cut off.

    Args:
        orig, new: the two rates without their common divisor.
    """

    def __init__(self, orig: int, new: int):
        self.orig, self.new = orig, new
        width = math.ceil(FILTER_WIDTH * orig / (min(orig, new) * ROLLOFF))
        self.margin = math.ceil(width / orig) + 1  # steps
        self.given = 0  # steps at the front of `held` whose output was given before
        self.held_S = np.zeros(0, dtype=np.float32)

    def push(self, samples_S: np.ndarray) -> np.ndarray:
        """The output that no later sample can change."""
        self.held_S = np.concatenate([self.held_S, samples_S])
        steps = len(self.held_S) // self.orig
        ready = steps - self.margin
        if ready <= self.given:
            return np.zeros(0, dtype=np.float32)
        out_S = self._resample(self.held_S[: steps * self.orig])[self.given * self.new : ready * self.new]
        first = max(0, ready - self.margin)
        self.held_S, self.given = self.held_S[first * self.orig :].copy(), ready - first
        return out_S

    def finish(self) -> np.ndarray:
        """The rest."""
        return self._resample(self.held_S)[self.given * self.new :] if len(self.held_S) else self.held_S

    def _resample(self, samples_S: np.ndarray) -> np.ndarray:
        return torchaudio.functional.resample(
            torch.from_numpy(samples_S), self.orig, self.new, lowpass_filter_width=FILTER_WIDTH, rolloff=ROLLOFF
        ).numpy()
