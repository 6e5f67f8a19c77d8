"""Audio of any length in blocks, so that hours take no more memory than seconds. S samples, C channels."""

import math
from collections.abc import Iterable, Iterator

import numpy as np
import soxr
import torch
import torchaudio

from finetune.data.decode import LONGEST_RATIO, mono_at, open_audio

BLOCK_SECONDS = 10.0
# Of torchaudio's resampler: zero crossings of its filter on either side, cut-off as a share of half the lower rate.
FILTER_WIDTH, ROLLOFF = 6, 0.99


def read_blocks(audio: object, sample_rate: int, block_seconds: float = BLOCK_SECONDS) -> Iterator[np.ndarray]:
    """Yield (S,) blocks of the samples that `finetune.data.decode.decode_audio` gives for a file, without a seek.

    Raises:
        BadUtterance: as `decode_audio`; the blocks before the fault are yielded first.
    """
    with open_audio(audio, None) as sound:
        rate, frames = sound.samplerate, max(1, int(block_seconds * sound.samplerate))
        # soundfile seeks to where it is after each read, which loses the decoder's state: a click in MP3 and Opus.
        sound.seekable = lambda: False

        def blocks() -> Iterator[np.ndarray]:
            block_SC = sound.read(frames, dtype="float32")
            mono_at(block_SC[:1], rate, rate)  # an empty file, or a rate that no speech has
            while len(block_SC):
                yield mono_at(block_SC, rate, rate)
                block_SC = sound.read(frames, dtype="float32")

        yield from resample_blocks(blocks(), rate, sample_rate)


def resample_blocks(blocks: Iterable[np.ndarray], rate: int, sample_rate: int) -> Iterator[np.ndarray]:
    """Resample a stream of (S,) float32 blocks as `finetune.data.decode.mono_at` resamples the whole."""
    step = math.gcd(rate, sample_rate)
    if rate == sample_rate:
        yield from blocks
    elif max(rate, sample_rate) // step > LONGEST_RATIO:
        stream = soxr.ResampleStream(rate, sample_rate, 1, dtype="float32")
        for block_S in blocks:
            yield stream.resample_chunk(block_S)
        yield stream.resample_chunk(np.zeros(0, dtype=np.float32), last=True)
    else:
        yield from _polyphase(blocks, rate // step, sample_rate // step)


def _polyphase(blocks: Iterable[np.ndarray], orig: int, new: int) -> Iterator[np.ndarray]:
    """Run torchaudio's resampler on a stream; `orig` and `new` are the rates without their common divisor.

    Each step of it turns `orig` samples into `new` ones and sees no more than the filter's width around them, so a
    block is resampled together with that many samples of its neighbours, and what they alone decide is cut off.
    """

    def resample(samples_S: np.ndarray) -> np.ndarray:
        return torchaudio.functional.resample(
            torch.from_numpy(samples_S), orig, new, lowpass_filter_width=FILTER_WIDTH, rolloff=ROLLOFF
        ).numpy()

    width = math.ceil(FILTER_WIDTH * orig / (min(orig, new) * ROLLOFF))
    margin = math.ceil(width / orig) + 1  # steps
    held_S = np.zeros(0, dtype=np.float32)
    given = 0  # steps at the front of `held_S` that were yielded before
    for block_S in blocks:
        held_S = np.concatenate([held_S, block_S])
        steps = len(held_S) // orig
        ready = steps - margin  # no later sample can change the output of these
        if ready > given:
            yield resample(held_S[: steps * orig])[given * new : ready * new]
            first = max(0, ready - margin)
            held_S, given = held_S[first * orig :].copy(), ready - first
    if len(held_S):
        yield resample(held_S)[given * new :]
