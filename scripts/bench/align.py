"""How far words lie from where they are said, and what alignment costs.

    python scripts/bench/align.py --model M [--json docs/benchmarks/align_cpu.json]

Held-out prompts of examples/voice_prompts, whose texts the base model has never heard, are laid one after the other at
known places: a quarter without any pause between them, the others with 50 to 600 ms. A prompt begins and ends where it
is 35 dB below its loudest 5 ms. Pink noise lies under all of it. Edges are known of the first and the last word of
each prompt. Half of the recordings are English, half French.

Errors are |found - true|. "by the lattice alone" takes the times of first tokens without looking for pauses. Speed
counts everything from samples to words.
"""

import argparse
import datetime
import io
import os
import platform
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq
import soundfile
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from finetune.data.batch import Batch, collate
from finetune.data.position import FINISHED
from finetune.data.utterances import DecodedUtterance
from finetune.durable_files import write_json
from finetune.evaluation.alignment import AlignedClip, Aligner
from finetune.logs import set_up_logging
from finetune.models.loading import load_model, move_to_device
from finetune.models.nemo import set_head
from finetune.models.subsampling import mask_once

RATE = 16_000
LOUD = 0.1  # root mean square of each prompt
SECONDS = 5.0, 12.0  # of a recording: at least, and at most with its last prompt


class Prompt(NamedTuple):
    """Speech without the quiet at its ends, and its text."""

    samples_S: np.ndarray
    words: list[str]
    language: str


class Laid(NamedTuple):
    """A prompt's place in a recording."""

    first: int
    """Number of its first word."""
    last: int
    start: float
    end: float
    pause_before: float
    pause_behind: float


class Recording(NamedTuple):
    samples_S: np.ndarray
    words: list[str]
    language: str
    laid: list[Laid]


def prompts() -> list[Prompt]:
    """Return the validation and test clips."""
    files = sorted((ROOT / "examples" / "voice_prompts" / "data").glob("[tv][ea][sl]*.parquet"))
    found = []
    for row in (row for file in files for row in pq.read_table(file).to_pylist()):
        samples_S, _ = soundfile.read(io.BytesIO(row["audio"]["bytes"]), dtype="float32")
        power_F = (samples_S[: len(samples_S) // 80 * 80].reshape(-1, 80) ** 2).mean(1)
        loud_F = np.flatnonzero(power_F > power_F.max() * 10**-3.5)
        samples_S = samples_S[loud_F[0] * 80 : (loud_F[-1] + 1) * 80]
        found.append(Prompt(samples_S * (LOUD / np.sqrt((samples_S**2).mean())), row["text"].split(), row["language"]))
    return found


def recordings(clips: list[Prompt], count: int, seed: int, noise_db: float) -> list[Recording]:
    """Return recordings of prompts, with noise so many decibels below the speech."""
    rng, found = np.random.default_rng(seed), []
    for number in range(count):
        language = ("en", "fr")[number % 2]
        own = [clip for clip in clips if clip.language == language]
        before = rng.uniform(0.05, 0.5)
        parts, length = [np.zeros(int(before * RATE), dtype=np.float32)], int(before * RATE)
        words: list[str] = []
        laid: list[Laid] = []
        while length < SECONDS[0] * RATE:
            clip = own[rng.integers(len(own))]
            if length + len(clip.samples_S) > SECONDS[1] * RATE:
                continue
            pause = 0.0 if rng.random() < 0.25 else rng.uniform(0.05, 0.6)
            start, length = length, length + len(clip.samples_S)
            place = len(words), len(words) + len(clip.words) - 1
            laid.append(Laid(*place, start / RATE, length / RATE, before, pause))
            words += clip.words
            parts += [clip.samples_S, np.zeros(int(pause * RATE), dtype=np.float32)]
            length, before = length + len(parts[-1]), pause
        parts.append(np.zeros(int(rng.uniform(0.05, 0.3) * RATE), dtype=np.float32))
        speech_S = np.concatenate(parts)
        spectrum = np.fft.rfft(rng.standard_normal(len(speech_S)))
        spectrum[1:] /= np.sqrt(np.arange(1, len(spectrum)))
        spectrum[0] = 0
        noise_S = np.fft.irfft(spectrum, len(speech_S))
        noise_S *= LOUD / np.sqrt((noise_S**2).mean()) * 10 ** (-noise_db / 20)
        laid[-1] = laid[-1]._replace(pause_behind=1.0)
        found.append(Recording((0.7 * (speech_S + noise_S)).astype(np.float32), words, language, laid))
    return found


def batches(aligner: Aligner, found: list[Recording], size: int) -> Iterator[Batch]:
    """Yield batches by length; ids are the numbers of the recordings."""
    order = sorted(range(len(found)), key=lambda i: len(found[i].samples_S))
    for start in range(0, len(order), size):
        clips = []
        for i in order[start : start + size]:
            text = " ".join(found[i].words)
            tokens = aligner.tokens_of(text)
            clips.append(DecodedUtterance(str(i), text, found[i].language, found[i].samples_S, tokens))
        yield collate(clips, 0, FINISHED)


def errors_of(clips: list[AlignedClip], found: list[Recording]) -> dict[str, list[float]]:
    """Return the errors in seconds by what they are of."""
    errors: dict[str, list[float]] = defaultdict(list)
    for clip in clips:
        recording = found[int(clip.id)]
        assert [word.text for word in clip.words] == recording.words
        for laid in recording.laid:
            start = clip.words[laid.first].start_seconds - laid.start
            end = clip.words[laid.last].end_seconds - laid.end
            beside = ["no pause" if pause == 0 else "pause" for pause in (laid.pause_before, laid.pause_behind)]
            for name in ("all", recording.language, f"{recording.language}, starts", beside[0]):
                errors[name].append(start)
            for name in ("all", recording.language, f"{recording.language}, ends", beside[1]):
                errors[name].append(end)
            emitted = clip.words[laid.first].emitted_seconds
            errors["starts by the lattice alone"].append(emitted - laid.start)
    return errors


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    model = move_to_device(load_model(arguments.model), arguments.device)
    set_head(model, arguments.head, arguments.model)
    mask_once(model)
    aligner, clips = Aligner(model), prompts()
    result: dict[str, Any] = {"model": arguments.model, "machine": machine(), "noise": {}}
    for noise_db in arguments.noise:
        found = recordings(clips, arguments.recordings, arguments.seed, noise_db)
        made = list(batches(aligner, found, arguments.batch_size))
        aligner.align(made[0])  # kernels are compiled, memory is there
        started, processor = time.perf_counter(), time.process_time()
        aligned = [clip for batch in made for clip in aligner.align(batch)]
        seconds, processor = time.perf_counter() - started, time.process_time() - processor
        audio = sum(len(recording.samples_S) for recording in found) / RATE
        moved = [x for clip in aligned for x in clip.moved_frames]
        result["noise"][f"{noise_db:g} dB"] = {
            "recordings": len(found),
            "audio_seconds": round(audio),
            "rtfx": round(audio / seconds, 1),
            "rtfx_of_processor_time": round(audio / processor, 1),
            "moved_frames_median": round(float(np.median(moved)), 2),
            "errors_ms": {
                name: {"edges": len(values), **in_milliseconds(values)}
                for name, values in sorted(errors_of(aligned, found).items())
            },
        }
        print_noise(noise_db, result["noise"][f"{noise_db:g} dB"])
    return result


def in_milliseconds(values: list[float]) -> dict[str, float]:
    off = np.abs(values)
    named = {"median": np.median(off), "p95": np.percentile(off, 95), "bias": np.median(values)}
    return {name: round(1000 * float(value), 1) for name, value in named.items()}


def print_noise(noise_db: float, result: dict[str, Any]) -> None:
    print(f"noise {noise_db:g} dB below speech: {result['rtfx']} times real time", flush=True)
    for name, row in result["errors_ms"].items():
        values = f"median {row['median']:6.1f} ms, 95th percentile {row['p95']:6.1f} ms, bias {row['bias']:6.1f} ms"
        print(f"  {name:<28} {row['edges']:>5} edges: {values}", flush=True)


def machine() -> dict[str, Any]:
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1),
        "processor": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "examples" / "base" / "fastconformer_tdt_3m.nemo"))
    parser.add_argument("--head", choices=("transducer", "ctc"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--recordings", type=int, default=400)
    parser.add_argument("--noise", type=float, nargs="+", default=[35.0, 20.0, 10.0], metavar="DB")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    set_up_logging()
    result = measure(arguments)
    if arguments.json:
        write_json(arguments.json, result)


if __name__ == "__main__":
    main()
