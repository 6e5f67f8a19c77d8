"""Audio bytes or files to 16 kHz mono waveforms, with a reason for everything that cannot be used."""

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import soxr
import torch
import torchaudio

LOWEST_RATE, HIGHEST_RATE = 2_000, 768_000  # Hz
LONGEST_RATIO = 1_000


class BadClip(Exception):
    """A clip that cannot be used; the text is the reason that goes into quarantine.jsonl."""


def decode_audio(
    audio: Any,
    sample_rate: int,
    folder: Path | None = None,
    offset: float | None = None,
    duration: float | None = None,
) -> np.ndarray:
    """Decodes one clip.

    Args:
        audio: a path, or a mapping with "bytes" or "path" (the form of `datasets.Audio(decode=False)`), or one with
            "array" and "sampling_rate".
        sample_rate: Hz of the result.
        folder: where relative paths start.
        offset: seconds into the file at which the clip begins; None takes the whole file.
        duration: seconds of the clip, from `offset` on; None takes the rest. No effect without `offset`.

    Returns:
        (S,) float32 in [-1, 1], channels averaged.

    Raises:
        BadClip: missing, unreadable, empty, or not finite.
    """
    samples_SC, rate = _read(audio, folder, offset, duration)
    if samples_SC.shape[0] == 0:
        raise BadClip("the audio is empty")
    if samples_SC.ndim == 2:
        samples_SC = samples_SC.mean(axis=1) if samples_SC.shape[1] > 1 else samples_SC[:, 0]
    if not np.isfinite(samples_SC).all():
        raise BadClip("the audio holds samples that are not finite")
    if not LOWEST_RATE <= rate <= HIGHEST_RATE:
        raise BadClip(f"the sample rate is {rate} Hz; speech lies between {LOWEST_RATE} and {HIGHEST_RATE} Hz")
    if rate != sample_rate:
        samples_SC = _resample(samples_SC, rate, sample_rate)
    return np.ascontiguousarray(samples_SC, dtype=np.float32)


def _resample(samples_S: np.ndarray, rate: int, sample_rate: int) -> np.ndarray:
    """torchaudio's resampler, but for ratios such as 22254 : 16000, whose polyphase filter would take gigabytes: soxr's."""
    if max(rate, sample_rate) // math.gcd(rate, sample_rate) > LONGEST_RATIO:
        return soxr.resample(samples_S, rate, sample_rate)
    return torchaudio.functional.resample(torch.from_numpy(samples_S), rate, sample_rate).numpy()


def _read(audio: Any, folder: Path | None, offset: float | None, duration: float | None) -> tuple[np.ndarray, int]:
    if isinstance(audio, str):
        audio = {"path": audio}
    if not isinstance(audio, dict):
        raise BadClip(f"no audio (found {type(audio).__name__})")
    if audio.get("array") is not None:
        if not audio.get("sampling_rate"):
            raise BadClip("the audio is an array without sampling_rate")
        return np.asarray(audio["array"], dtype=np.float32), int(audio["sampling_rate"])
    data, path = audio.get("bytes"), audio.get("path")
    if data is None and not path:
        raise BadClip("no audio")
    if data is not None and len(data) == 0:
        raise BadClip("the audio is empty (0 bytes)")
    try:
        if data is not None:
            return _read_part(io.BytesIO(data), offset, duration)
        file = Path(path) if folder is None or Path(path).is_absolute() else folder / path
        if not file.is_file():
            raise BadClip(f"there is no file {file}")
        if file.stat().st_size == 0:
            raise BadClip("the audio is empty (0 bytes)")
        return _read_part(str(file), offset, duration)
    except BadClip:
        raise
    except Exception as error:
        raise BadClip(f"the audio cannot be decoded: {str(error).strip() or type(error).__name__}") from error


def _read_part(file: Any, offset: float | None, duration: float | None) -> tuple[np.ndarray, int]:
    if offset is None:
        return soundfile.read(file, dtype="float32")
    with soundfile.SoundFile(file) as sound:
        first = round(offset * sound.samplerate)
        if first >= sound.frames:
            raise BadClip(f"offset {offset} s lies behind the end of the audio ({sound.frames / sound.samplerate} s)")
        sound.seek(first)
        frames = -1 if duration is None else round(duration * sound.samplerate)
        return sound.read(frames, dtype="float32"), sound.samplerate
