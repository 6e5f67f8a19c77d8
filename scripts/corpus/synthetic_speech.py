"""Speech synthesis (espeak-ng, flite, festival) and audio colouring for the synthetic corpus."""

from __future__ import annotations

import random
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import sample_data as sd
import soundfile as sf
from scipy import fft, signal

ESPEAK_RATE = 22_050  # Hz
ESPEAK_BASES = {
    "en": {"en-us": 9, "en-gb": 2, "en-gb-x-rp": 2, "en-us-nyc": 2, "en-gb-scotland": 1.5, "en-gb-x-gbclan": 1,
           "en-gb-x-gbcwmd": 1, "en-029": 1},
    "fr": {"fr-fr": 2, "fr-be": 1, "fr-ch": 1},
}  # fmt: skip
FEMALE = [
    "f1",
    "f2",
    "f3",
    "f4",
    "f5",
    "linda",
    "steph",
    "steph2",
    "steph3",
    "belinda",
    "Annie",
    "Andrea",
    "Alicia",
    "aunty",
    "anika",
    "grandma",
]
MALE = [
    "m1",
    "m2",
    "m3",
    "m4",
    "m5",
    "m6",
    "m7",
    "m8",
    "croak",
    "adam",
    "Alex",
    "Andy",
    "antonio",
    "benjamin",
    "boris",
    "caleb",
    "david",
    "Denis",
    "Diogo",
    "ed",
    "edward",
    "edward2",
    "Gene",
    "Gene2",
    "gustave",
    "Henrique",
    "Hugo",
    "iven",
    "iven2",
    "iven3",
    "iven4",
    "Jacky",
    "john",
    "Lee",
    "Marco",
    "marcelo",
    "Mario",
    "max",
    "Michael",
    "michel",
    "miguel",
    "Mike",
    "norbert",
    "pablo",
    "paul",
    "pedro",
    "quincy",
    "rob",
    "robert",
    "sandro",
    "shelby",
    "travis",
    "victor",
    "zac",
    "klatt",
    "klatt2",
    "klatt3",
    "klatt4",
    "grandpa",
]
TEST_VARIANTS = frozenset(["f3", "m5", "linda", "victor", "steph2", "paul", "Andrea", "quincy", "Mike", "klatt3"])
FLITE_VOICES = {"slt": 4, "rms": 3, "awb": 3, "kal16": 1}
FESTIVAL_VOICES = {"train": {"cmu_us_slt_arctic_hts": 1}, "test": {"ked_diphone": 1}}  # validation as train
ENGINE_SHARES = {"en": {"espeak-ng": 0.60, "flite": 0.26, "festival": 0.14}, "fr": {"espeak-ng": 1.0}}
PACKAGES = {"espeak-ng": "espeak-ng", "flite": "flite", "festival": "festival festvox-us-slt-hts festvox-kdlpc16k"}


@dataclass(frozen=True)
class Voice:
    """One voice and its settings. tilt is the resampling factor: below 1 gives a longer vocal tract."""

    engine: str
    name: str
    speed: float  # words a minute for espeak-ng, duration stretch for the others
    pitch: int  # 0..99 for espeak-ng
    gap: int  # pause between words, units of 10 ms
    tilt: float

    @property
    def label(self) -> str:
        """Engine and voice, for row ids."""
        return f"{self.engine}-{self.name}".replace("+", "-")


def missing_engines(with_festival: bool = True) -> list[str]:
    """Messages for each synthesiser that is not installed."""
    engines = ["espeak-ng", "flite", *(["festival"] if with_festival else [])]
    return [f"{e} is missing: apt-get install {PACKAGES[e]}" for e in engines if shutil.which(e) is None]


def draw_voice(rng: random.Random, language: str, split: str, spelled: bool, engines: Sequence[str]) -> Voice:
    """A random voice; those of the test split are used nowhere else. Spelled letters go to espeak-ng only."""
    shares = {k: v for k, v in ENGINE_SHARES[language].items() if k in engines and not (spelled and k != "espeak-ng")}
    engine = rng.choices(list(shares), list(shares.values()))[0]
    if split == "test" and engine == "flite":
        engine = "espeak-ng"
    tilt = rng.uniform(0.9, 1.1) if rng.random() < 0.7 else 1.0
    if engine == "espeak-ng":
        bases = ESPEAK_BASES[language]
        base = rng.choices(list(bases), list(bases.values()))[0]
        weights = dict.fromkeys(FEMALE, 3.0) | dict.fromkeys(MALE, 1.0)
        weights = {v: w for v, w in weights.items() if (v in TEST_VARIANTS) == (split == "test")}
        variant = rng.choices(list(weights), list(weights.values()))[0]
        speed = rng.triangular(110, 205, 150)
        gap = rng.choice([0, 0, 0, 0, 1, 2, 4, 8])
        # The tilt changes the tempo too; the speed takes that back, so that pace and timbre vary independently.
        return Voice(engine, f"{base}+{variant}", speed * tilt, rng.randint(15, 85), gap, tilt)
    stretch = rng.uniform(0.85, 1.25)
    if engine == "festival":
        names = FESTIVAL_VOICES["test" if split == "test" else "train"]
        return Voice(engine, rng.choices(list(names), list(names.values()))[0], stretch, 0, 0, tilt)
    return Voice(engine, rng.choices(list(FLITE_VOICES), list(FLITE_VOICES.values()))[0], stretch, 0, 0, tilt)


def synthesise_one(text: str, voice: Voice, folder: Path) -> tuple[np.ndarray, int]:
    """Samples and rate (Hz) of a text spoken by espeak-ng or flite."""
    if voice.engine == "espeak-ng":
        command = ["espeak-ng", "-v", voice.name, "-s", str(round(voice.speed)), "-p", str(voice.pitch)]
        command += ["-g", str(voice.gap), "-b", "1", "--stdout", "--", text]
        result = subprocess.run(command, capture_output=True, check=False)
        if result.returncode or len(result.stdout) < 100:
            raise RuntimeError(f"espeak-ng failed for voice {voice.name}: {result.stderr.decode(errors='replace')}")
        samples = np.frombuffer(result.stdout[44:][: (len(result.stdout) - 44) // 2 * 2], dtype="<i2")
        return samples.astype(np.float32) / 32768.0, ESPEAK_RATE
    path = folder / "clip.wav"
    command = ["flite", "-voice", voice.name, "--setf", f"duration_stretch={voice.speed:.3f}", "-t", text]
    command += ["-o", str(path)]
    result = subprocess.run(command, capture_output=True, check=False)
    if result.returncode:
        raise RuntimeError(f"flite failed for voice {voice.name}: {result.stderr.decode(errors='replace')}")
    return sf.read(path, dtype="float32")


def synthesise_festival(items: Sequence[tuple[str, Voice]], folder: Path) -> list[tuple[np.ndarray, int] | None]:
    """Samples and rate (Hz) of each text, made in one run of festival as it starts slowly; None where it failed."""
    lines = []
    for index, (text, voice) in sorted(enumerate(items), key=lambda item: item[1][1].name):
        lines += [f"(voice_{voice.name})", f"(Parameter.set 'Duration_Stretch {voice.speed:.3f})"]
        quoted = re.sub(r'["\\]', " ", text)
        lines.append(f'(utt.save.wave (SynthText "{quoted}") "{folder / f"{index}.wav"}" \'riff)')
    subprocess.run(["festival", "--pipe"], input="\n".join(lines), text=True, capture_output=True, check=False)
    audio: list[tuple[np.ndarray, int] | None] = []
    for index in range(len(items)):
        path = folder / f"{index}.wav"
        audio.append(sf.read(path, dtype="float32") if path.is_file() else None)
    return audio


def synthesise(items: Sequence[tuple[str, Voice]]) -> list[np.ndarray | None]:
    """Speech at SAMPLE_RATE of each text with its voice, silence trimmed; None where a synthesiser made none."""
    audio: list[tuple[np.ndarray, int] | None] = [None] * len(items)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        batch = [i for i, (_, voice) in enumerate(items) if voice.engine == "festival"]
        made_by_festival = synthesise_festival([items[i] for i in batch], folder) if batch else []
        for i, made in zip(batch, made_by_festival, strict=True):
            audio[i] = made
        for i, (text, voice) in enumerate(items):
            if voice.engine != "festival":
                audio[i] = synthesise_one(text, voice, folder)
    clips: list[np.ndarray | None] = []
    for made, (_, voice) in zip(audio, items, strict=True):
        if made is None or len(made[0]) < made[1] // 10 or np.abs(made[0]).max() < 0.005:
            clips.append(None)
            continue
        samples, rate = made
        count = round(len(samples) * sd.SAMPLE_RATE / rate / voice.tilt)
        padded = np.pad(samples, (0, fft.next_fast_len(len(samples), real=True) - len(samples)))
        length = round(len(padded) * sd.SAMPLE_RATE / rate / voice.tilt)
        clips.append(trim(signal.resample(padded, length)[:count].astype(np.float32)))
    return clips


def trim(samples: np.ndarray) -> np.ndarray:
    """Cut silence (60 dB under the loudest 10 ms) from both ends."""
    frame = sd.SAMPLE_RATE // 100
    frames = len(samples) // frame
    power = (samples[: frames * frame].reshape(frames, frame) ** 2).mean(axis=1)
    loud = np.flatnonzero(power > power.max() * 1e-6)
    return samples[loud[0] * frame : (loud[-1] + 1) * frame]


def pink_noise(count: int, rng: np.random.Generator) -> np.ndarray:
    """Noise with power falling as 1/f."""
    size = fft.next_fast_len(count, real=True)
    spectrum = fft.rfft(rng.standard_normal(size))
    spectrum[1:] /= np.sqrt(np.arange(1, len(spectrum)))
    spectrum[0] = 0
    return fft.irfft(spectrum, size)[:count]


def colour(samples: np.ndarray, rng: np.random.Generator, telephone: bool) -> np.ndarray:
    """Apply a smooth random equaliser (about +-6 dB), or the telephone band 300 to 3400 Hz."""
    size = fft.next_fast_len(len(samples), real=True)
    hertz = fft.rfftfreq(size, 1 / sd.SAMPLE_RATE)
    if telephone:
        gain = 1 / (1 + np.exp(-(hertz - 300) / 30)) / (1 + np.exp((hertz - 3400) / 80))
    else:
        knots = np.array([0, 200, 600, 1500, 3000, 5500, 8000])
        gain = 10 ** (np.interp(hertz, knots, rng.normal(0, 4, len(knots))) / 20)
    return fft.irfft(fft.rfft(samples, size) * gain, size)[: len(samples)]


def reverberate(samples: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Add a light room: noise that decays by 60 dB in 0.1 to 0.5 s, 8 to 22 dB under the direct sound."""
    seconds = rng.uniform(0.1, 0.5)
    time = np.arange(int(seconds * sd.SAMPLE_RATE)) / sd.SAMPLE_RATE
    tail = rng.standard_normal(len(time)) * 10 ** (-3 * time / seconds)
    tail *= 10 ** (-rng.uniform(8, 22) / 20) / np.sqrt((tail**2).sum())
    tail[0] += 1
    return signal.fftconvolve(samples, tail)[: len(samples)]


def degrade(speech: np.ndarray, others: Sequence[np.ndarray], rng: np.random.Generator) -> np.ndarray:
    """Pad, colour, add noise (babble out of other clips) and set the level; about a third stays clean."""
    pads = (rng.uniform(0.05, 0.3, 2) * sd.SAMPLE_RATE).astype(int)
    samples = np.pad(speech, (pads[0], pads[1])).astype(np.float64)
    if rng.random() < 0.2:
        samples = reverberate(samples, rng)
    chance = rng.random()
    if chance < 0.45:
        samples = colour(samples, rng, telephone=chance < 0.08)
    level = np.sqrt((samples**2).mean())
    if rng.random() < 0.5:
        kind = rng.random()
        if kind < 0.25 and len(others) >= 4:
            chosen = [others[i] for i in rng.choice(len(others), 4, replace=False)]
            noise = np.sum([np.resize(other / np.sqrt((other**2).mean()), len(samples)) for other in chosen], axis=0)
        elif kind < 0.65:
            noise = pink_noise(len(samples), rng)
        else:
            noise = rng.standard_normal(len(samples))
        noise *= level / np.sqrt((noise**2).mean()) * 10 ** (-rng.uniform(15 if kind < 0.25 else 10, 40) / 20)
        samples = samples + noise
    samples *= 10 ** (rng.uniform(-34, -16) / 20) / np.sqrt((samples**2).mean())
    peak = np.abs(samples).max()
    return samples * min(1.0, 0.98 / peak)
