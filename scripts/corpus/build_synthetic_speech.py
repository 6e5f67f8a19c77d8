#!/usr/bin/env python3
"""Build a synthetic corpus of English and French speech as parquet shards with train, validation and test splits.

Speech: espeak-ng (all its English and French voices), flite and festival (English), with noise, rooms and telephone
bands on a part. No text of the voice_prompts validation and test splits is spoken; the texts of the synthetic
splits are disjoint, and the voices of the synthetic test split occur nowhere else.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import sys
import time
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import sample_data as sd
import synthetic_speech as ss
import synthetic_text as st
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[2]
CHUNK_CLIPS = 250  # one parquet shard
ENGLISH_SHARE = 0.55
MIN_SECONDS, MAX_SECONDS = 0.4, 8.0
MAX_LETTERS_PER_SECOND = 22.0  # a few espeak-ng variants rush

_sources: dict[str, st.TextSource] = {}
_engines: list[str] = []


def text_sources(prompts: Path) -> dict[str, st.TextSource]:
    """Text source of each language, with the prompts' validation and test texts held out."""
    train = sd.read_texts(prompts / "data", ["train"])
    held_out = st.HeldOut.of(text for text, _ in sd.read_texts(prompts / "data", ["validation", "test"]))
    return {
        language: st.TextSource(
            language, [t for t, own in train if own == language], held_out, st.load_words(language)
        )
        for language in st.LANGUAGES
    }


def start_worker(prompts: Path, engines: list[str]) -> None:
    """Load the text sources once in each process."""
    _sources.update(text_sources(prompts))
    _engines[:] = engines


def build_chunk(split: str, index: int, clips: int, seed: int, path: Path) -> dict[str, dict[str, float]]:
    """Make one shard; returns clips, seconds and words a language. The same arguments give the same shard."""
    rng = random.Random(f"{seed} {split} {index}")
    noise_rng = np.random.default_rng([seed, st.SPLITS.index(split), index])
    items: list[tuple[str, ss.Voice]] = []
    languages: list[str] = []
    for _ in range(clips):
        language = "en" if rng.random() < ENGLISH_SHARE else "fr"
        text = _sources[language].text(rng, split)
        spelled = re.search(r"\b(?!I\b)[A-Z]\b", text) is not None
        items.append((text, ss.draw_voice(rng, language, split, spelled, _engines)))
        languages.append(language)
    speech = ss.synthesise(items)
    rows: list[dict[str, Any]] = []
    totals = {language: {"clips": 0, "seconds": 0.0, "words": 0} for language in st.LANGUAGES}
    for number, ((text, voice), language, clip) in enumerate(zip(items, languages, speech, strict=True)):
        if clip is None:
            continue
        others = [other for other in speech[max(0, number - 8) : number] if other is not None]
        samples = ss.degrade(clip, others, noise_rng)
        seconds = len(samples) / sd.SAMPLE_RATE
        if not MIN_SECONDS <= seconds <= MAX_SECONDS:
            continue
        transcript = sd.normalise_text(text)
        if len(transcript) > MAX_LETTERS_PER_SECOND * len(clip) / sd.SAMPLE_RATE:
            continue
        name = f"{split}-{index:04d}-{number:03d}-{voice.label}"
        data = sd.encode_audio(samples, "FLAC", "PCM_16")
        audio = {"bytes": data, "path": f"{name}.flac"}
        rows.append({"id": name, "audio": audio, "text": transcript, "language": language, "duration": seconds})
        total = totals[language]
        total["clips"] += 1
        total["seconds"] += seconds
        total["words"] += len(transcript.split())
    sd.write_shard(path, rows)
    return totals


def build_split(
    pool: ProcessPoolExecutor, split: str, hours: float, clips: int, seed: int, folder: Path, jobs: int
) -> dict[str, dict[str, float]]:
    """Make shards of one split until it has the wanted hours (or, where that is 0, the wanted clips)."""
    totals = {language: {"clips": 0, "seconds": 0.0, "words": 0} for language in st.LANGUAGES}
    made: list[Path] = []
    waiting: list[tuple[Path, Future[dict[str, dict[str, float]]]]] = []
    started = 0
    goal = hours * 3600 if hours else clips
    with tqdm(total=round(goal), desc=split, unit="s" if hours else "clip", mininterval=2.0) as bar:
        while bar.n < goal:
            while len(waiting) < jobs + 1 and (hours or started * CHUNK_CLIPS < clips):
                size = CHUNK_CLIPS if hours else min(CHUNK_CLIPS, clips - started * CHUNK_CLIPS)
                path = folder / f"{split}-{started:05d}.part"
                waiting.append((path, pool.submit(build_chunk, split, started, size, seed, path)))
                started += 1
            if not waiting:
                break
            path, future = waiting.pop(0)
            done = future.result()
            made.append(path)
            for language, total in totals.items():
                for key, value in done[language].items():
                    total[key] += value
            bar.update(round(sum(done[lang]["seconds" if hours else "clips"] for lang in st.LANGUAGES)))
    for path, future in waiting:  # started ahead of need
        future.result()
        path.unlink()
    for index, path in enumerate(made):
        path.rename(sd.shard_path(folder, split, index, len(made)))
    return totals


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for the data set (its data/ is replaced)")
    parser.add_argument("--hours", type=float, default=12.0, help="hours of training speech")
    parser.add_argument("--held-out-clips", type=int, default=250, help="clips of validation and of test each")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same corpus")
    parser.add_argument("--jobs", type=int, default=2, help="processes at once (no effect on the result)")
    parser.add_argument(
        "--prompts", type=Path, default=ROOT / "examples" / "voice_prompts", help="voice_prompts folder"
    )
    parser.add_argument("--no-festival", action="store_true", help="do without festival's voices")
    args = parser.parse_args()
    missing = ss.missing_engines(with_festival=not args.no_festival)
    if missing:
        raise SystemExit("\n".join(missing) + "\n(--no-festival does without festival)")
    try:
        text_sources(args.prompts)
    except FileNotFoundError as error:
        raise SystemExit(str(error)) from None
    if args.hours <= 0:
        raise SystemExit(f"--hours must be above 0, not {args.hours}")
    engines = ["espeak-ng", "flite"] + ([] if args.no_festival else ["festival"])
    folder = args.output / "data"
    folder.mkdir(parents=True, exist_ok=True)
    sd.remove_shards(folder, st.SPLITS)
    begun = time.monotonic()
    table = ["| split | language | clips | hours | words |", "|---|---|---:|---:|---:|"]
    with ProcessPoolExecutor(args.jobs, initializer=start_worker, initargs=(args.prompts, engines)) as pool:
        for split in ("validation", "test", "train"):
            hours = args.hours if split == "train" else 0.0
            totals = build_split(pool, split, hours, args.held_out_clips, args.seed, folder, args.jobs)
            for language, total in totals.items():
                hours_made = total["seconds"] / 3600
                table.append(f"| {split} | {language} | {total['clips']} | {hours_made:.2f} | {total['words']} |")
    print("\n".join(table))
    size = sum(path.stat().st_size for path in folder.glob("*.parquet"))
    print(f"{size / 1e6:.0f} MB under {folder} in {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
