"""Where speech lies in audio of any length, by its energy: a stream of blocks in, stretches of speech out.

A frame of 10 ms is speech where its level lies above a threshold between the noise floor and the loudest frames around
it, so that both a hum and a recording's gain may change. S samples, N frames.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

FRAME_SECONDS = 0.01
SMOOTH_FRAMES = 5
HOP_SECONDS = 10.0
"""Frames that are judged together, by the levels of the hop before, their own and the next one."""
MAX_SECONDS = 20.0
MIN_PAUSE = 0.3
PADDING = 0.15
SHORTEST_SPEECH = 0.08
QUIET_FRAMES = 20
FLOOR_QUANTILE, LOUD_QUANTILE = 0.05, 0.995
STATIONARY_DB = 6.0
"""Levels that differ by less are a noise without speech."""
DIGITAL_SILENCE_DB = -85.0
MARGIN_SHARE, MARGIN_DB = 0.3, (4.0, 12.0)
"""The threshold above the floor, as a share of the way to the loudest frames, and its bounds."""


@dataclass(frozen=True)
class Stretch:
    """A stretch of speech, with a little of the pauses around it."""

    start: int
    """Its first sample in the recording."""
    audio_S: np.ndarray

    def end(self) -> int:
        """Return the sample behind its last one."""
        return self.start + len(self.audio_S)


def speech_stretches(
    blocks: Iterable[np.ndarray],
    sample_rate: int,
    *,
    max_seconds: float = MAX_SECONDS,
    min_pause: float = MIN_PAUSE,
    padding: float = PADDING,
) -> Iterator[Stretch]:
    """Yield the stretches of speech between pauses, in order and without overlap; holds `max_seconds` and three hops.

    Args:
        blocks: (S,) float32 samples of one recording, as `finetune.data.audio_blocks.read_blocks` gives them.
        sample_rate: Hz.
        max_seconds: longest stretch; a longer one is cut where 0.2 s in its second half are quietest.
        min_pause: seconds without speech that part two stretches.
        padding: seconds that are kept of the pause on either side; at most half of `min_pause`.
    """
    frame = round(FRAME_SECONDS * sample_rate)
    pause = max(1, round(min_pause / FRAME_SECONDS))
    pad = min(round(padding / FRAME_SECONDS), pause // 2)
    longest = max(round(max_seconds / FRAME_SECONDS) - 2 * pad, 2 * QUIET_FRAMES)
    least = shortest = round(SHORTEST_SPEECH / FRAME_SECONDS)
    audio_S, level_N = np.zeros(0, dtype=np.float32), np.zeros(0)
    origin = end = 0  # frames: of the first held sample, and behind the last one that is judged
    start = last = None  # of the speech that is not yielded yet

    def stretch(first: int, behind: int) -> Stretch:
        first = max(first, origin)
        part_S = audio_S[(first - origin) * frame : max(behind - origin, 0) * frame]
        return Stretch(first * frame, part_S.copy())

    for hop_S, hop_level_N, speech_N in _judged(_hops(blocks, sample_rate), frame):
        audio_S, level_N = np.concatenate([audio_S, hop_S]), np.concatenate([level_N, hop_level_N])
        for first, behind in _runs(speech_N, end):
            if last is not None and start is not None and first - last >= pause:
                if last - start >= least:
                    yield stretch(start - pad, last + pad)
                start = None
            if start is None:
                start, least = first, shortest
            last = behind
            while last - start > longest:
                cut = _quietest(level_N[start - origin : start - origin + longest]) + start
                yield stretch(start - pad, cut)
                start, least = cut + pad, -pad  # so that the padding begins at the cut, and all behind it comes out
                origin, audio_S, level_N = cut, audio_S[(cut - origin) * frame :], level_N[cut - origin :]
        end += len(speech_N)
        if start is not None and last is not None and end - last >= pause:
            if last - start >= least:
                yield stretch(start - pad, last + pad)
            start = None
        keep = max(origin, (end if start is None else start) - pad)
        origin, audio_S, level_N = keep, audio_S[(keep - origin) * frame :], level_N[keep - origin :]
    if start is not None and last is not None and last - start >= least:
        yield stretch(start - pad, last + pad)


def levels(audio_S: np.ndarray, frame: int) -> np.ndarray:
    """Return the (N,) levels in dB of full scale, without the mean, over 50 ms; the last frame may be short."""
    count = -(-len(audio_S) // frame)
    padded_S = np.pad(audio_S.astype(np.float64), (0, count * frame - len(audio_S)), mode="edge")
    power_N = padded_S.reshape(count, frame).var(axis=1)
    around_N = np.pad(power_N, SMOOTH_FRAMES // 2, mode="edge")
    return 10 * np.log10(np.convolve(around_N, np.full(SMOOTH_FRAMES, 1 / SMOOTH_FRAMES), "valid") + 1e-12)


def threshold(level_N: np.ndarray) -> float:
    """Return the level in dB above which frames are speech; infinite where there is none."""
    sounding_N = level_N[level_N > DIGITAL_SILENCE_DB]
    if not len(sounding_N):
        return np.inf
    floor, loud = np.quantile(sounding_N, (FLOOR_QUANTILE, LOUD_QUANTILE))
    silent = len(sounding_N) < 0.9 * len(level_N)  # between edits there is nothing, and the floor is speech
    if loud - floor < STATIONARY_DB:
        return DIGITAL_SILENCE_DB if silent else np.inf
    return float(floor + np.clip(MARGIN_SHARE * (loud - floor), *MARGIN_DB))


def _hops(blocks: Iterable[np.ndarray], sample_rate: int) -> Iterator[np.ndarray]:
    """Cut a stream of blocks into hops of one length; the last one may be shorter."""
    size = round(FRAME_SECONDS * sample_rate) * round(HOP_SECONDS / FRAME_SECONDS)
    held, length = [], 0
    for block_S in blocks:
        held.append(block_S)
        length += len(block_S)
        if length >= size:
            joined_S = np.concatenate(held)
            whole = length - length % size
            yield from np.split(joined_S[:whole], whole // size)
            held, length = [joined_S[whole:].copy()], length - whole
    if length:
        yield np.concatenate(held)


def _judged(hops: Iterable[np.ndarray], frame: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield each hop with its levels and which of its frames are speech, one hop behind the stream."""
    before_N, held = np.zeros(0), None
    for hop_S in hops:
        level_N = levels(hop_S, frame)
        if held is not None:
            yield *held, held[1] > threshold(np.concatenate([before_N, held[1], level_N]))
            before_N = held[1]
        held = hop_S, level_N
    if held is not None:
        yield *held, held[1] > threshold(np.concatenate([before_N, held[1]]))


def _runs(speech_N: np.ndarray, origin: int) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(speech_N.astype(np.int8), prepend=0, append=0)) + origin
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def _quietest(level_N: np.ndarray) -> int:
    """Return the middle of the quietest 0.2 s in the second half of these frames; of equally quiet ones the last."""
    first = len(level_N) // 2
    power_N = 10 ** (level_N[first:] / 10)
    sums_N = np.convolve(power_N, np.ones(min(QUIET_FRAMES, len(power_N))), "valid")[::-1]
    return first + len(sums_N) - 1 - int(np.argmin(sums_N)) + QUIET_FRAMES // 2
