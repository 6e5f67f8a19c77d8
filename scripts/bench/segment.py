"""How much of a recording with a faulty text `finetune.segment` saves, and how much wrong text it lets through.

    python scripts/bench/segment.py --model M [--minutes 40] [--seed 0] [--json docs/benchmarks/segment_cpu.json]

The recording is made of English voice prompts in random order, with pauses of 0.3 to 2 s, noise, and a text of which a
tenth is wrong or missing: of every fifty prompts one has no text, one that of another prompt, one lacks a word, one has
a word exchanged, and beside one stands a text that is not read. What was said is known, so is what should come out.
"""

import argparse
import datetime
import io
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import soundfile

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from finetune.data.normalization import normalize_text
from finetune.durable_files import write_json

RATE = 16_000
PAUSES = (0.3, 2.0)  # seconds
KINDS = ("no text", "another text", "a word left out", "a word exchanged", "a text that is not read")
NOISE_DB = 30.0  # below the speech


@dataclass
class Prompt:
    """A prompt in the recording; seconds."""

    start: float
    end: float
    spoken: str
    kind: str
    """One of KINDS, or empty where the text is right."""
    seen: bool
    """Of the prompts' training split."""


def prompts(language: str = "en") -> list[tuple[np.ndarray, str, bool]]:
    """Return samples, text, and whether it is of the training split, of all prompts of a language."""
    found = []
    for file in sorted((ROOT / "examples" / "voice_prompts" / "data").glob("*.parquet")):
        for row in pq.read_table(file).to_pylist():
            if row["language"] == language:
                audio_S, _ = soundfile.read(io.BytesIO(row["audio"]["bytes"]), dtype="float32")
                found.append((audio_S, row["text"], file.name.startswith("train")))
    return found


def make_recording(
    clips: list[tuple[np.ndarray, str, bool]], minutes: float, seed: int
) -> tuple[np.ndarray, str, list[Prompt]]:
    """Return the samples, the faulty text, and what is said where."""
    rng, noise = random.Random(seed), np.random.default_rng(seed)
    parts, lines, truth, seconds = [], [], [], 0.0
    order: list[int] = []
    while seconds < 60 * minutes:
        if not order:
            order = rng.sample(range(len(clips)), len(clips))
        audio_S, text, seen = clips[order.pop()]
        pause = rng.uniform(*PAUSES)
        parts += [np.zeros(int(pause * RATE), dtype=np.float32), audio_S]
        words, other = text.split(), clips[rng.randrange(len(clips))][1]
        kind = KINDS[rng.randrange(len(KINDS))] if rng.random() < 0.1 else ""
        if kind == "another text" and normalize_text(other, "basic") == normalize_text(text, "basic"):
            kind = ""
        place, written = rng.randrange(len(words)), list(words)
        if kind == "no text":
            written = []
        elif kind == "another text":
            written = other.split()
        elif kind == "a word left out":
            written.pop(place)
        elif kind == "a word exchanged":
            written[place] = next(w for w in _words(clips, rng) if w.lower() != words[place].lower())
        elif kind == "a text that is not read":
            written += other.split()
        lines.append(" ".join(written))
        start = seconds + int(pause * RATE) / RATE
        seconds = start + len(audio_S) / RATE
        truth.append(Prompt(start, seconds, text, kind, seen))
    speech_S = np.concatenate(parts)
    level = np.sqrt((speech_S[np.abs(speech_S) > 1e-3] ** 2).mean()) * 10 ** (-NOISE_DB / 20)
    return speech_S + level * noise.standard_normal(len(speech_S)).astype(np.float32), "\n".join(lines), truth


def _words(clips: list[tuple[np.ndarray, str, bool]], rng: random.Random) -> Any:
    while True:
        words = clips[rng.randrange(len(clips))][1].split()
        yield words[rng.randrange(len(words))]
