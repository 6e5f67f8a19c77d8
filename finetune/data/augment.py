"""Augmentation of waveforms in the workers: speed, room, noise, gain. S samples.

The draws of an utterance follow from (seed, epoch, place of its row) alone, so that they are the same after a resume
and on any number of ranks.
"""

import logging
from functools import cache, lru_cache
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torchaudio
from pydantic import AfterValidator, Field

from finetune.config.mappings import Mapping, parse_mapping
from finetune.data.decode import audio_seconds, decode_audio
from finetune.data.quarantine import BadUtterance
from finetune.errors import UserError

log = logging.getLogger(__name__)

AUDIO_SUFFIXES = (".wav", ".flac", ".ogg", ".opus", ".mp3")
PROBABILITIES = ("speed", "gain", "noise", "room")


def _check_order(bounds: list[float]) -> list[float]:
    if len(bounds) != 2 or bounds[0] > bounds[1]:
        raise ValueError(f"two numbers are expected, the lower one first, found {bounds}.")
    return bounds


Chance = Annotated[float, Field(ge=0, le=1)]
Factor = Annotated[float, Field(ge=0.5, le=2)]
Range = Annotated[list[float], AfterValidator(_check_order)]


class Augmentation(Mapping):
    """Settings of `data.augment`. A probability of 0 turns a kind off."""

    speed: Chance = 0.0
    """Probability of another speed, and with it pitch (Ko et al., Interspeech 2015)."""
    speed_factors: Annotated[list[Factor], Field(min_length=1)] = [0.9, 1.1]
    """One of these; above 1 is faster."""
    gain: Chance = 0.0
    """Probability of another level."""
    gain_db: Range = [-6.0, 6.0]
    """Range, in dB; never above full scale."""
    noise: Chance = 0.0
    """Probability of added noise."""
    noise_folder: str | None = None
    """Folder of audio files of noise, any length."""
    noise_snr_db: Range = [5.0, 25.0]
    """Range of the ratio of speech to noise, in dB."""
    room: Chance = 0.0
    """Probability of a room's response."""
    room_folder: str | None = None
    """Folder of audio files of impulse responses."""

    @property
    def active(self) -> bool:
        return any(getattr(self, name) > 0 for name in PROBABILITIES)


def parse_augmentation(value: Any, key: str = "data.augment") -> Augmentation:
    """Parse the settings of the run file.

    Raises:
        UserError: an unknown name, a value out of its range, or a folder without audio.
    """
    settings = parse_mapping(Augmentation, value or {}, key)
    for name in ("noise", "room"):
        folder = getattr(settings, f"{name}_folder")
        if getattr(settings, name) > 0 and not folder:
            raise UserError(f"{key}.{name} needs {key}.{name}_folder, a folder of audio files.")
        if folder and not audio_files(folder):
            raise UserError(f"{key}.{name}_folder: there is no audio file ({', '.join(AUDIO_SUFFIXES)}) in {folder}.")
    return settings


@cache
def audio_files(folder: str) -> tuple[str, ...]:
    """Return the audio files below a folder, sorted."""
    return tuple(sorted(str(p) for p in Path(folder).rglob("*") if p.suffix.lower() in AUDIO_SUFFIXES))


def augment(audio_S: np.ndarray, sample_rate: int, settings: Augmentation, seed: tuple[int, ...]) -> np.ndarray:
    """Change a (S,) float32 waveform at random, as the settings allow.

    Returns:
        (S',) float32, within full scale; another length at another speed. An unreadable file of noise or of a room's
        response changes nothing, and the log names it.
    """
    random = np.random.default_rng(seed)
    chances = random.random(len(PROBABILITIES))  # whatever is turned on, so that one kind does not change another
    draws = dict(zip(PROBABILITIES, np.random.SeedSequence(seed).spawn(len(PROBABILITIES)), strict=True))
    drawn = {name: chance < getattr(settings, name) for name, chance in zip(PROBABILITIES, chances, strict=True)}
    if drawn["speed"]:
        factor = float(np.random.default_rng(draws["speed"]).choice(settings.speed_factors))
        audio_S = torchaudio.functional.speed(torch.from_numpy(audio_S), sample_rate, factor)[0].numpy()
    if drawn["room"]:
        audio_S = _in_room(audio_S, sample_rate, settings, np.random.default_rng(draws["room"]))
    if drawn["noise"]:
        audio_S = _with_noise(audio_S, sample_rate, settings, np.random.default_rng(draws["noise"]))
    if drawn["gain"]:
        low, high = settings.gain_db
        decibels = np.random.default_rng(draws["gain"]).uniform(low, high)
        peak = float(np.abs(audio_S).max(initial=0.0))
        audio_S = audio_S * min(10 ** (decibels / 20), 1.0 / max(peak, 1e-9))
    return np.ascontiguousarray(audio_S, dtype=np.float32)


@lru_cache(maxsize=256)
def _response(file: str, sample_rate: int) -> torch.Tensor:
    """Read an impulse response; it has energy 1 and begins at its direct sound."""
    response_S = torch.from_numpy(decode_audio(file, sample_rate))
    response_S = response_S[int(response_S.abs().argmax()) :]
    return response_S / response_S.norm().clamp(min=1e-9)


def _in_room(audio_S: np.ndarray, sample_rate: int, settings: Augmentation, random: np.random.Generator) -> np.ndarray:
    files = audio_files(str(settings.room_folder))
    file = files[int(random.integers(len(files)))]
    try:
        response_S = _response(file, sample_rate)
    except BadUtterance as error:
        _warn_of(file, str(error))
        return audio_S
    wet_S = torchaudio.functional.fftconvolve(torch.from_numpy(audio_S), response_S)[: len(audio_S)].numpy()
    return _within_full_scale(wet_S)


def _with_noise(
    audio_S: np.ndarray, sample_rate: int, settings: Augmentation, random: np.random.Generator
) -> np.ndarray:
    files = audio_files(str(settings.noise_folder))
    file = files[int(random.integers(len(files)))]
    wanted = len(audio_S) / sample_rate
    try:
        there = audio_seconds(file)
        # A stretch of the file, repeated where the file is shorter than the utterance.
        offset = float(random.uniform(0.0, max(there - wanted, 0.0)))
        noise_S = decode_audio(file, sample_rate, None, offset, wanted)
    except BadUtterance as error:  # the utterance itself is good
        _warn_of(file, str(error))
        return audio_S
    if not noise_S.any():
        return audio_S
    if len(noise_S) < len(audio_S):
        noise_S = np.resize(np.roll(noise_S, -int(random.integers(len(noise_S)))), len(audio_S))
    noise_S = noise_S[: len(audio_S)]
    low, high = settings.noise_snr_db
    snr = torch.tensor(float(random.uniform(low, high)))
    mixed_S = torchaudio.functional.add_noise(torch.from_numpy(audio_S), torch.from_numpy(noise_S.copy()), snr).numpy()
    return _within_full_scale(mixed_S)


@cache
def _warn_of(file: str, reason: str) -> None:
    log.warning("data.augment: %s adds nothing: %s", file, reason)


def _within_full_scale(audio_S: np.ndarray) -> np.ndarray:
    peak = float(np.abs(audio_S).max(initial=0.0))
    return audio_S / peak if peak > 1.0 else audio_S
