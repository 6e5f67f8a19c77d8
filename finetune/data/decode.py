"""Decoding: audio bytes or files to mono waveforms at one rate, with a reason for everything that cannot be used."""

import contextlib
import io
import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import soxr
import torch
import torchaudio

from finetune.data.filters import FilteredUtterance
from finetune.data.quarantine import BadUtterance
from finetune.data.retry import RETRIES, Unreachable, wait_before
from finetune.data.storage import open_binary
from finetune.security.secrets import clean_urls

LOWEST_RATE, HIGHEST_RATE = 2_000, 768_000  # Hz
LONGEST_RATIO = 1_000
LARGEST_FILE = 2**30  # bytes of a remote one
MOST_SAMPLES = 2**29  # of an utterance, all channels: 9 hours at 16 kHz, 2 GiB
UNKNOWN_FRAMES = 2**53  # libsndfile reports more where a stream does not tell its length


def decode_audio(
    audio: object,
    sample_rate: int,
    folder: str | Path | None = None,
    offset: float | None = None,
    duration: float | None = None,
) -> np.ndarray:
    """Return the (S,) float32 samples of one utterance in [-1, 1], channels averaged.

    Args:
        audio: a path, or a mapping with "bytes" or "path" (the form of `datasets.Audio(decode=False)`), or one with
            "array" and "sampling_rate".
        sample_rate: Hz of the result.
        folder: where relative paths start.
        offset: seconds into the file at which the utterance begins; None takes the whole file.
        duration: seconds of the utterance, from `offset` on; None takes the rest. No effect without `offset`.

    Raises:
        BadUtterance: missing, unreadable, empty, or not finite.
    """
    return mono_at(*read_audio(audio, folder, offset, duration), sample_rate)


def mono_at(samples_SC: np.ndarray, rate: int, sample_rate: int) -> np.ndarray:
    """Convert (S,) or (S, C) samples, float32 or int16 in 1/32768, to one channel at another rate (Hz).

    Returns:
        (S,) float32; int16 where nothing had to be computed.

    Raises:
        BadUtterance: empty, not finite, or of a rate that no speech has.
    """
    if samples_SC.shape[0] == 0:
        raise BadUtterance("the audio is empty")
    if samples_SC.ndim == 2 and samples_SC.shape[1] == 1:
        samples_SC = samples_SC[:, 0]
    if samples_SC.dtype == np.int16:
        if samples_SC.ndim == 1 and rate == sample_rate:
            return np.ascontiguousarray(samples_SC)
        samples_SC = as_float(torch.from_numpy(samples_SC)).numpy()
    if samples_SC.ndim == 2:
        samples_SC = samples_SC.mean(axis=1)
    if not np.isfinite(samples_SC).all():
        raise BadUtterance("the audio holds samples that are not finite")
    if not LOWEST_RATE <= rate <= HIGHEST_RATE:
        raise BadUtterance(f"the sample rate is {rate} Hz; speech lies between {LOWEST_RATE} and {HIGHEST_RATE} Hz")
    if rate != sample_rate:
        samples_SC = _resample(samples_SC, rate, sample_rate)
    return np.ascontiguousarray(samples_SC, dtype=np.float32)


def as_float(audio: torch.Tensor) -> torch.Tensor:
    """Convert samples of any shape to float32 in [-1, 1]; int16 is in 1/32768, and nothing is lost."""
    return audio.float() / 32768 if audio.dtype == torch.int16 else audio.float()


def audio_seconds(
    audio: object, folder: str | Path | None = None, offset: float | None = None, retries: int = RETRIES
) -> float:
    """Return the length of an utterance from the head of its audio; where that does not tell, from all of it.

    Arguments and errors are those of `read_audio`.
    """
    if not (isinstance(audio, dict) and audio.get("array") is not None):
        with open_audio(audio, folder, retries) as sound:
            if 0 <= sound.frames < UNKNOWN_FRAMES:
                return max(sound.frames / sound.samplerate - (offset or 0.0), 0.0)
    samples, rate = read_audio(audio, folder, offset, None, retries=retries)
    return len(samples) / rate


def _resample(samples_S: np.ndarray, rate: int, sample_rate: int) -> np.ndarray:
    """Resample with torchaudio; with soxr at ratios such as 22254 : 16000, whose filter would take gigabytes."""
    if max(rate, sample_rate) // math.gcd(rate, sample_rate) > LONGEST_RATIO:
        return soxr.resample(samples_S, rate, sample_rate)
    return torchaudio.functional.resample(torch.from_numpy(samples_S), rate, sample_rate).numpy()


def read_audio(
    audio: object,
    folder: str | Path | None,
    offset: float | None,
    duration: float | None,
    check: Callable[[float], None] | None = None,
    compact: bool = False,
    retries: int = RETRIES,
) -> tuple[np.ndarray, int]:
    """Return the samples (S,) or (S, C) as they are in a file, and their rate; arguments as in `decode_audio`.

    Args:
        check: called with the seconds that the head of the file tells, before the rest is read.
        compact: return int16 instead of float32 for 16-bit files: the same samples, in 1/32768.
        retries: after a failed download.
    """
    if isinstance(audio, dict) and audio.get("array") is not None:
        if not audio.get("sampling_rate"):
            raise BadUtterance("the audio is an array without sampling_rate")
        try:
            return np.asarray(audio["array"], dtype=np.float32), int(audio["sampling_rate"])
        except (ValueError, TypeError, OverflowError) as error:
            raise BadUtterance(f"the audio is no array of samples with a rate: {error}") from error
    with open_audio(audio, folder, retries) as sound:
        if check is not None and 0 <= sound.frames < UNKNOWN_FRAMES:
            check(sound.frames / sound.samplerate)
        dtype = "int16" if compact and sound.subtype == "PCM_16" else "float32"
        if offset is None:
            check_samples(sound, sound.frames)
            return sound.read(MOST_SAMPLES // sound.channels, dtype=dtype), sound.samplerate
        first = round(offset * sound.samplerate)
        if first >= sound.frames > 0:
            raise BadUtterance(
                f"offset {offset} s lies behind the end of the audio ({sound.frames / sound.samplerate} s)"
            )
        if first:
            sound.seek(first)
        frames = MOST_SAMPLES // sound.channels if duration is None else round(duration * sound.samplerate)
        check_samples(sound, min(frames if duration is not None else sound.frames - first, sound.frames - first))
        return sound.read(frames, dtype=dtype), sound.samplerate


def check_samples(sound: soundfile.SoundFile, frames: int) -> None:
    """Raise BadUtterance for audio that would fill the memory: a few megabytes of compressed silence may be days."""
    if frames < UNKNOWN_FRAMES and frames * sound.channels > MOST_SAMPLES:
        hours = frames / sound.samplerate / 3600
        raise BadUtterance(
            f"the clip is {hours:,.1f} h long with {sound.channels} channel(s); "
            "that does not go into the memory at once"
        )


@contextlib.contextmanager
def open_audio(audio: object, folder: str | Path | None, retries: int = RETRIES) -> Iterator[soundfile.SoundFile]:
    """Open audio as a file; whatever fails while it is open becomes a BadUtterance."""
    if not isinstance(audio, str | dict):
        raise BadUtterance(f"no audio (found {type(audio).__name__})")
    found: dict[str, Any] = {"path": audio} if isinstance(audio, str) else audio
    data, path = found.get("bytes"), found.get("path")
    if data is None and not path:
        raise BadUtterance("no audio")
    if data is not None and len(data) == 0:
        raise BadUtterance("the audio is empty (0 bytes)")
    try:
        file = io.BytesIO(data) if data is not None else _file_of(str(path), folder, retries)
        with soundfile.SoundFile(file) as sound:
            yield sound
    except (BadUtterance, FilteredUtterance, Unreachable):
        raise
    except Exception as error:
        raise BadUtterance(f"the audio cannot be decoded: {str(error).strip() or type(error).__name__}") from error


def _download(url: str, retries: int) -> bytes:
    """Read a remote file; raise BadUtterance where there is none or it is too large, Unreachable after all retries."""
    for attempt in itertools.count(1):
        try:
            with open_binary(url) as remote:
                content = remote.read(LARGEST_FILE + 1)
            if len(content) > LARGEST_FILE:
                raise BadUtterance(f"{clean_urls(url)} has more than {LARGEST_FILE:,} bytes")
            return content
        except BadUtterance:
            raise
        except FileNotFoundError as error:
            raise BadUtterance(f"there is no file {clean_urls(url)}") from error
        except Exception as error:
            if attempt > retries:
                raise Unreachable(clean_urls(f"{url} cannot be read: {type(error).__name__}: {error}")) from error
            wait_before(attempt + 1)
    raise AssertionError  # an attempt returned or raised


def _file_of(path: str, folder: str | Path | None, retries: int) -> str | io.BytesIO:
    """Return a local file's name, or the content of a remote one."""
    if "://" in path or (folder is not None and "://" in str(folder)):
        url = path if "://" in path else f"{str(folder).rstrip('/')}/{path}"
        content = _download(url, retries)
        if not content:
            raise BadUtterance("the audio is empty (0 bytes)")
        return io.BytesIO(content)
    return local_file(path, folder)


def local_file(path: str, folder: str | Path | None) -> str:
    """Return the name of a local file of audio; raise BadUtterance where there is none, or nothing in it."""
    file = Path(path) if folder is None or Path(path).is_absolute() else Path(folder) / path
    if not file.is_file():
        raise BadUtterance(f"there is no file {file}")
    if file.stat().st_size == 0:
        raise BadUtterance("the audio is empty (0 bytes)")
    return str(file)
