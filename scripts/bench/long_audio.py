"""What transcribing long audio costs, and what cutting it does to the text.

    python scripts/bench/long_audio.py --model M [--minutes 60] [--json docs/benchmarks/long_audio_cpu.json]

Held-out prompts of examples/voice_prompts, in a new random order in each round, make recordings with known text: one
with pauses between the prompts, and one without any, which gives no cut an easy place. Each way of decoding hears the
same samples in this one process. Memory is that of a process of its own for each length.

The reference of everything is each prompt decoded by itself, which no long recording can be expected to better.
"""

import argparse
import datetime
import io
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jiwer
import numpy as np
import pyarrow.parquet as pq
import soundfile
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from finetune.data.normalization import normalize_text
from finetune.durable_files import write_json
from finetune.evaluation.long_audio import Chunk, Cutting, Pieces, Stitcher, chunks_of
from finetune.evaluation.recognise import evaluation_mode, frame_seconds, recognise_chunks, text_of
from finetune.logs import set_up_logging
from finetune.models.loading import load_model, move_to_device
from finetune.strategies.attention import use_local_attention
from finetune.tools.transcription.words import enable_timestamps, words_of

RATE = 16_000
BATCH_SIZE = 4
# Name, seconds of a chunk (None: all at once), of the overlap, and of the search for a quiet place.
WAYS = [
    ("overlap 2 s, seam at the quietest place", 30.0, 2.0, 5.0),
    ("overlap 4 s, seam at the quietest place", 30.0, 4.0, 5.0),
    ("overlap 2 s, seam anywhere", 30.0, 2.0, 0.0),
    ("no overlap, cut at the quietest place", 30.0, 0.0, 5.0),
    ("no overlap, cut anywhere", 30.0, 0.0, 0.0),
]


def prompts() -> list[tuple[np.ndarray, str, str]]:
    """Samples, text and language of the validation and test clips."""
    files = sorted((ROOT / "examples" / "voice_prompts" / "data").glob("[tv][ea][sl]*.parquet"))
    rows = [row for file in files for row in pq.read_table(file).to_pylist()]
    return [
        (soundfile.read(io.BytesIO(r["audio"]["bytes"]), dtype="float32")[0], r["text"], r["language"]) for r in rows
    ]


def trimmed(samples_S: np.ndarray) -> np.ndarray:
    """A prompt without the quiet at its ends (40 dB below its peak)."""
    loud = np.flatnonzero(np.abs(samples_S) > 0.01 * np.abs(samples_S).max())
    return samples_S[loud[0] : loud[-1] + 1]


def recording(
    clips: list[tuple[np.ndarray, str, str]], minutes: float, pauses: bool
) -> tuple[np.ndarray, list[tuple[float, int]]]:
    """A recording of so many minutes, and the prompts in it as (start in seconds, number of the prompt)."""
    rng, parts, places, length = np.random.default_rng(0), [], [], 0
    while length < minutes * 60 * RATE:
        # All of one language, then all of the other, in an order of their own in each round.
        for i in sorted(rng.permutation(len(clips)), key=lambda i: clips[i][2]):
            samples_S = clips[i][0] if pauses else trimmed(clips[i][0])
            places.append((length / RATE, int(i)))
            gap_S = np.zeros(int(rng.uniform(0.3, 0.8) * RATE) if pauses else 0, dtype=np.float32)
            parts += [samples_S, gap_S]
            length += len(samples_S) + len(gap_S)
            if length >= minutes * 60 * RATE:
                break
    audio_S = np.concatenate(parts)
    # A little noise everywhere, as in a room: silence is not nothing.
    return audio_S + rng.normal(0, 1e-4, len(audio_S)).astype(np.float32), places


def decode(model: Any, audio_S: np.ndarray, cutting: Cutting) -> tuple[list[Any], int]:
    """Tokens of a recording, and the number of its chunks."""
    pieces, stitcher, waiting, n = Pieces(model.tokenizer), Stitcher(cutting), [], 0
    for chunk in chunks_of(iter([audio_S]), cutting):
        waiting.append(chunk)
        n += 1
        if len(waiting) == BATCH_SIZE:
            _add(model, waiting, pieces, stitcher)
    if waiting:
        _add(model, waiting, pieces, stitcher)
    return stitcher.tokens, n


def _add(model: Any, waiting: list[Chunk], pieces: Pieces, stitcher: Stitcher) -> None:
    for chunk, tokens in zip(waiting, recognise_chunks(model, waiting, pieces), strict=True):
        stitcher.add(chunk, tokens)
    waiting.clear()


def alone(model: Any, clips: list[np.ndarray]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Text and words of each prompt decoded by itself."""
    pieces, found = Pieces(model.tokenizer), []
    for samples_S in clips:
        (tokens,) = recognise_chunks(model, [Chunk(0, samples_S, 0)], pieces)
        words = words_of(model, tokens, frame_seconds(model), len(samples_S) / RATE)
        found.append((text_of(model, tokens), words))
    return found


def judge(reference: str, words: list[dict[str, Any]], by_itself: list[tuple[str, float]]) -> dict[str, Any]:
    """Return WER, and the distance of word starts from those in the single prompts, where both heard the same word."""
    ours = [normalize_text(w["word"], "basic") for w in words]
    counts = jiwer.process_words(reference, " ".join(ours))
    result: dict[str, Any] = {
        "wer": round(counts.wer, 4),
        "substitutions": counts.substitutions,
        "deletions": counts.deletions,
        "insertions": counts.insertions,
    }
    kept = [(w, t["start"]) for w, t in zip(ours, words, strict=True) if w]
    kept = [(part, start) for w, start in kept for part in w.split()]
    aligned = jiwer.process_words(" ".join(w for w, _ in by_itself), " ".join(w for w, _ in kept))
    apart = []
    for part in aligned.alignments[0]:
        if part.type == "equal":
            pairs = zip(
                by_itself[part.ref_start_idx : part.ref_end_idx],
                kept[part.hyp_start_idx : part.hyp_end_idx],
                strict=True,
            )
            apart += [abs(a[1] - b[1]) for a, b in pairs]
    result["words_as_alone"] = round(len(apart) / max(len(by_itself), 1), 4)
    result["start_seconds_apart"] = {
        "median": round(statistics.median(apart), 3),
        "95%": round(float(np.quantile(apart, 0.95)), 3),
    }
    return result


def compare(model: Any, local: Any, minutes: float, pauses: bool, full_minutes: float) -> dict[str, Any]:
    """All ways on one recording."""
    clips = prompts()
    audio_S, places = recording(clips, minutes, pauses)
    reference = " ".join(normalize_text(clips[i][1], "basic") for _, i in places)
    seconds = len(audio_S) / RATE
    step = frame_seconds(model)
    started = time.perf_counter()
    heard = alone(model, [c if pauses else trimmed(c) for c, *_ in clips])
    pace = (time.perf_counter() - started) / sum(len(c) / RATE for c, *_ in clips)
    by_itself = [
        (part, start + w["start"])
        for start, i in places
        for w in heard[i][1]
        for part in normalize_text(w["word"], "basic").split()
    ]
    rows = [
        {
            "way": "each prompt by itself",
            "wer": round(jiwer.wer(reference, " ".join(normalize_text(heard[i][0], "basic") for _, i in places)), 4),
            "real_time_factor": round(pace, 4),
        }
    ]

    def add(way: str, decoder: Any, cutting: Cutting) -> None:
        started = time.perf_counter()
        tokens, chunks = decode(decoder, audio_S, cutting)
        took = time.perf_counter() - started
        words = words_of(decoder, tokens, step, seconds)
        rows.append(
            {
                "way": way,
                "chunks": chunks,
                **judge(reference, words, by_itself),
                "seconds": round(took, 1),
                "real_time_factor": round(took / seconds, 4),
            }
        )
        print(json.dumps(rows[-1]), flush=True)

    print(json.dumps(rows[0]), flush=True)
    for way, chunk, overlap, search in WAYS:
        add(f"{way} ({chunk:g} s)", model, Cutting.of_seconds(RATE, step, chunk, overlap, search))
    if full_minutes:
        add(f"full attention over {full_minutes:g} minutes", model, Cutting.of_seconds(RATE, step, 60 * full_minutes))
    add("local attention, all at once", local, Cutting.of_seconds(RATE, step, None))
    return {"minutes": round(seconds / 60, 1), "words": len(reference.split()), "pauses": pauses, "ways": rows}


def memory(model: str, minutes: float, *arguments: str) -> dict[str, Any]:
    """Largest resident memory of a process that transcribes so many minutes."""
    with tempfile.TemporaryDirectory() as folder:
        audio_S, _ = recording(prompts(), min(minutes, 10), pauses=True)
        path = f"{folder}/long.flac"
        with soundfile.SoundFile(path, "w", RATE, 1) as file:
            left = int(minutes * 60 * RATE)
            while left > 0:
                file.write(audio_S[:left])
                left -= len(audio_S)
        command = [sys.executable, "-m", "finetune.transcribe", "--model", model, "--device", "cpu", path, *arguments]
        started = time.perf_counter()
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        took = time.perf_counter() - started
    row = {
        "minutes": minutes,
        "arguments": " ".join(arguments),
        "peak_mib": round(usage.ru_maxrss / 1024),
        "seconds_with_start": round(took, 1),
        "exit": os.waitstatus_to_exitcode(status),
    }
    print(json.dumps(row), flush=True)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="of the recording with pauses; a quarter without them"
    )
    parser.add_argument(
        "--full-minutes", type=float, default=5.0, help="decoded at once with full attention, without pauses"
    )
    parser.add_argument("--context", type=int, default=256, help="frames, of local attention")
    parser.add_argument("--memory-minutes", type=float, nargs="*", default=[10.0, 120.0])
    parser.add_argument("--local-minutes", type=float, nargs="*", default=[10.0, 30.0], help="for its memory")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    set_up_logging()
    model, local = (move_to_device(load_model(arguments.model), arguments.device) for _ in range(2))
    use_local_attention(local, arguments.context)
    for each in (model, local):
        enable_timestamps(each)
    result: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python", "scripts/bench/long_audio.py", *sys.argv[1:]]),
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {arguments.device}, "
        f"{torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "recordings": [],
        "memory": [],
    }
    with evaluation_mode(model), evaluation_mode(local):
        for minutes, pauses, full in (
            (arguments.minutes, True, 0),
            (arguments.minutes / 4, False, arguments.full_minutes),
        ):
            result["recordings"].append(compare(model, local, minutes, pauses, full))
            if arguments.json:
                write_json(arguments.json, result)
    for minutes, options in (
        *((m, ("--attention", "local")) for m in arguments.local_minutes),
        *((m, ()) for m in arguments.memory_minutes),
    ):
        result["memory"].append(memory(arguments.model, minutes, *options))
        if arguments.json:
            write_json(arguments.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
