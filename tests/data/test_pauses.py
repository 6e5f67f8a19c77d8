"""Where speech lies in a recording: pauses, noise, gain, digital silence, and blocks of any length."""

import io
import itertools
from collections.abc import Iterator

import numpy as np
import pyarrow.parquet as pq
import pytest
import soundfile
from conftest import VOICE_PROMPTS

from finetune.data.pauses import Stretch, speech_stretches

RATE = 16_000


@pytest.fixture(scope="module")
def clips() -> list[np.ndarray]:
    """Voice prompts, cut to where they are louder than 30 dB below their loudest 10 ms."""
    rows = pq.read_table(next(VOICE_PROMPTS.glob("validation-*.parquet"))).slice(0, 12).to_pylist()
    found = []
    for row in rows:
        audio_S, _ = soundfile.read(io.BytesIO(row["audio"]["bytes"]), dtype="float32")
        power_N = (audio_S[: len(audio_S) // 160 * 160].reshape(-1, 160) ** 2).mean(1)
        loud = np.flatnonzero(power_N > power_N.max() * 1e-3)
        found.append(audio_S[loud[0] * 160 : (loud[-1] + 1) * 160])
    return found


def recording(clips: list[np.ndarray], noise: float, gain: float = 1.0) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Join clips with pauses of 0.6 to 3 s, and return the samples with first and last sample of each clip."""
    rng = np.random.default_rng(0)
    parts, places, length = [], [], 0
    for clip_S in clips:
        pause = int(rng.uniform(0.6, 3) * RATE)
        parts += [np.zeros(pause, dtype=np.float32), clip_S]
        places.append((length + pause, length + pause + len(clip_S)))
        length += pause + len(clip_S)
    audio_S = np.concatenate([*parts, np.zeros(RATE, dtype=np.float32)])
    noise_S = noise * rng.standard_normal(len(audio_S)).astype(np.float32)
    return gain * (audio_S + noise_S), places


def blocks_of(audio_S: np.ndarray, size: int) -> Iterator[np.ndarray]:
    yield from (audio_S[i : i + size] for i in range(0, len(audio_S), size))


def covered(stretches: list[Stretch], places: list[tuple[int, int]]) -> float:
    """Return the share of the clips' samples that lie in stretches."""
    inside = sum(max(0, min(s.end(), e) - max(s.start, b)) for s in stretches for b, e in places)
    return inside / sum(e - b for b, e in places)


@pytest.mark.parametrize("gain", [1.0, 0.02])
@pytest.mark.parametrize("noise", [0.0, 0.001, 0.01])
def test_speech_comes_out_and_pauses_stay(clips: list[np.ndarray], noise: float, gain: float) -> None:
    audio_S, places = recording(clips, noise, gain)
    stretches = list(speech_stretches(blocks_of(audio_S, 5000), RATE))
    assert covered(stretches, places) > 0.99
    speech = sum(e - b for b, e in places)
    # Half a second a clip: what is kept of the pauses, and what lies below the clips' own limits.
    assert sum(len(s.audio_S) for s in stretches) < speech + len(places) * RATE / 2
    assert len(stretches) >= len(places)
    for one, other in itertools.pairwise(stretches):
        assert one.end() <= other.start
    for s in stretches:
        np.testing.assert_array_equal(s.audio_S, audio_S[s.start : s.end()])


def test_blocks_may_have_any_length(clips: list[np.ndarray]) -> None:
    audio_S, _ = recording(clips, 0.001)
    places = [
        [(s.start, s.end()) for s in speech_stretches(blocks_of(audio_S, size), RATE)]
        for size in (777, 160_000, len(audio_S))
    ]
    assert places[0] == places[1] == places[2]


@pytest.mark.parametrize("seconds", [0, 0.005, 3, 95])
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_without_speech_there_is_none(seconds: float, noise: float) -> None:
    audio_S = (noise * np.random.default_rng(1).standard_normal(int(seconds * RATE))).astype(np.float32)
    assert list(speech_stretches(blocks_of(audio_S, 16_000), RATE)) == []


def test_speech_without_pauses_is_cut_where_it_is_quietest(clips: list[np.ndarray]) -> None:
    audio_S = np.concatenate([clips[0], *[np.concatenate([c, 0.001 * c[:3200]]) for c in clips * 3]])
    stretches = list(speech_stretches(blocks_of(audio_S, 16_000), RATE, max_seconds=5, min_pause=2))
    assert len(stretches) > 3
    assert max(len(s.audio_S) for s in stretches) <= 5 * RATE
    assert [s.start for s in stretches[1:]] == [s.end() for s in stretches[:-1]]
    assert sum(len(s.audio_S) for s in stretches) > len(audio_S) - RATE
    loudness = np.sqrt((audio_S**2).mean())
    for s in stretches[1:]:
        around_S = audio_S[s.start - 320 : s.start + 320]
        assert np.sqrt((around_S**2).mean()) < 0.1 * loudness


def test_what_is_left_behind_a_cut_comes_out() -> None:
    rng = np.random.default_rng(0)
    level_N = np.full(1100, 1e-4)  # frames of 10 ms
    level_N[300:780] = 0.1
    level_N[750:770] = 0.005  # the quietest place of 4.8 s of speech, just before its end
    audio_S = (np.repeat(level_N, 160) * rng.standard_normal(1100 * 160)).astype(np.float32)
    one, other = speech_stretches(blocks_of(audio_S, 16_000), RATE, max_seconds=5, min_pause=2)
    assert abs(one.end() - 760 * 160) < 1600
    assert other.start == one.end()
    assert abs(other.end() - 795 * 160) < 800
