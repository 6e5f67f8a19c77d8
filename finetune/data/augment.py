"""Augmentation of waveforms in the workers: speed, room, noise, gain. S samples.

The draws of an utterance follow from (seed, epoch, place of its row) alone, so that they are the same after a resume
and on any number of ranks.
"""

import logging
from dataclasses import dataclass, fields
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchaudio

from finetune.data.decode import audio_seconds, decode_audio
from finetune.data.quarantine import BadUtterance
from finetune.errors import UserError

log = logging.getLogger(__name__)

AUDIO_SUFFIXES = (".wav", ".flac", ".ogg", ".opus", ".mp3")
PROBABILITIES = ("speed", "gain", "noise", "room")


@dataclass(frozen=True)
class Augmentation:
    """Settings of `data.augment`. A probability of 0 turns a kind off."""

    speed: float = 0.0
    """Probability of another speed, and with it pitch (Ko et al., Interspeech 2015)."""
    speed_factors: tuple[float, ...] = (0.9, 1.1)
    """One of these; above 1 is faster."""
    gain: float = 0.0
    """Probability of another level."""
    gain_db: tuple[float, float] = (-6.0, 6.0)
    """Range, in dB; never above full scale."""
    noise: float = 0.0
    """Probability of added noise."""
    noise_folder: str | None = None
    """Folder of audio files of noise, any length."""
    noise_snr_db: tuple[float, float] = (5.0, 25.0)
    """Range of the ratio of speech to noise, in dB."""
    room: float = 0.0
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
    known = {f.name: f for f in fields(Augmentation)}
    given = dict(value or {})
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise UserError(f"{key}: there is no setting {', '.join(unknown)}; there are {', '.join(known)}.")
    for name in PROBABILITIES:
        chance = given.get(name, 0.0)
        if not isinstance(chance, int | float) or not 0 <= chance <= 1:
            raise UserError(f"{key}.{name}: a probability from 0 to 1 is expected, found {chance!r}.")
    for name in ("speed_factors", "gain_db", "noise_snr_db"):
        if name in given:
            numbers = given[name]
            fits = isinstance(numbers, list | tuple) and all(isinstance(n, int | float) for n in numbers) and numbers
            if not fits or (name != "speed_factors" and (len(numbers) != 2 or numbers[0] > numbers[1])):
                form = "a list of factors" if name == "speed_factors" else "two numbers, the lower one first,"
                raise UserError(f"{key}.{name}: {form} is expected, found {numbers!r}.")
            given[name] = tuple(float(n) for n in numbers)
    if any(not 0.5 <= factor <= 2.0 for factor in given.get("speed_factors", ())):
        raise UserError(f"{key}.speed_factors: factors from 0.5 to 2 are expected, found {given['speed_factors']}.")
    for name in ("noise", "room"):
        folder = given.get(f"{name}_folder")
        if given.get(name, 0.0) > 0 and not folder:
            raise UserError(f"{key}.{name} needs {key}.{name}_folder, a folder of audio files.")
        if folder and not audio_files(str(folder)):
            raise UserError(f"{key}.{name}_folder: there is no audio file ({', '.join(AUDIO_SUFFIXES)}) in {folder}.")
    return Augmentation(**given)


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
        decibels = np.random.default_rng(draws["gain"]).uniform(*settings.gain_db)
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
    snr = torch.tensor(float(random.uniform(*settings.noise_snr_db)))
    mixed_S = torchaudio.functional.add_noise(torch.from_numpy(audio_S), torch.from_numpy(noise_S.copy()), snr).numpy()
    return _within_full_scale(mixed_S)


@cache
def _warn_of(file: str, reason: str) -> None:
    log.warning("data.augment: %s adds nothing: %s", file, reason)


def _within_full_scale(audio_S: np.ndarray) -> np.ndarray:
    peak = float(np.abs(audio_S).max(initial=0.0))
    return audio_S / peak if peak > 1.0 else audio_S
