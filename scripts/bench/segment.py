"""How much of a recording with a faulty text `finetune.segment` saves, and how much wrong text it lets through.

    python scripts/bench/segment.py --model M [--trained-on MANIFEST] [--minutes 10 120 40] [--seeds 0 1] [--json FILE]

The recording is made of English voice prompts in random order, with pauses of 0.3 to 2 s, noise, and a text of which a
tenth is wrong or missing: of every fifty prompts one has no text, one that of another prompt, one lacks a word, one
has a word exchanged, and beside one stands a text that is not read. What was said is known, and what should come out.
The prompts that the model was trained on, if it says on which, are also counted apart from the others.
"""

import argparse
import datetime
import importlib.metadata
import io
import itertools
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
    """Whether the model was trained on it."""


def prompts(trained_on: Path | None, language: str = "en") -> list[tuple[np.ndarray, str, bool]]:
    """Return samples, text, and whether its text is in a manifest, of all prompts of a language."""
    lines = trained_on.read_text(encoding="utf-8").splitlines() if trained_on else []
    seen = {normalize_text(json.loads(line)["text"], "basic") for line in lines}
    found = []
    for file in sorted((ROOT / "examples" / "voice_prompts" / "data").glob("*.parquet")):
        for row in pq.read_table(file).to_pylist():
            if row["language"] == language:
                audio_S, _ = soundfile.read(io.BytesIO(row["audio"]["bytes"]), dtype="float32")
                found.append((audio_S, row["text"], normalize_text(row["text"], "basic") in seen))
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


def judge(rows: list[dict[str, Any]], truth: list[Prompt]) -> dict[str, Any]:
    """Compare clips with what was said.

    Good speech are the prompts whose own text is right. Wrong words are those of a clip's text that have to be put in,
    left out or exchanged to give what was said there. Neighbouring clips without speech between them are compared
    together, so that a word that is lost between two of them counts; only where a prompt is cut off by a clip that is
    missing is it unknown how many of its words the clip should have, and the best part of it is taken.
    """
    covered = np.zeros(len(truth))
    runs: list[tuple[float, float, list[str], list[int]]] = []
    for row in rows:
        start, end = row["offset"], row["offset"] + row["duration"]
        inside = [i for i, t in enumerate(truth) if min(t.end, end) - max(t.start, start) > 0.05]
        for i in inside:
            covered[i] += min(truth[i].end, end) - max(truth[i].start, start)
        words = normalize_text(row["text"], "basic").split()
        if runs and inside and runs[-1][3] and inside[0] <= runs[-1][3][-1] + 1 and _quiet(truth, runs[-1][1], start):
            before = runs.pop()
            runs.append((before[0], end, before[2] + words, sorted({*before[3], *inside})))
        else:
            runs.append((start, end, words, inside))
    wrong = total = 0
    places = []
    for start, end, words, inside in runs:
        spoken = [normalize_text(truth[i].spoken, "basic").split() for i in inside]
        free = (
            bool(inside) and truth[inside[0]].start < start - 0.5,
            bool(inside) and truth[inside[-1]].end > end + 0.5,
        )
        errors = distance(words, [w for own in spoken for w in own], *free)
        wrong, total = wrong + errors, total + len(words)
        if errors:
            places.append({"offset": start, "wrong_words": errors})
    length = np.array([t.end - t.start for t in truth])
    kinds = np.array([t.kind for t in truth])
    good = (kinds == "") | (kinds == KINDS[-1])
    seen = np.array([t.seen for t in truth])
    # Prompts begin and end with silence of their own, which is left out: 85 % of one is all of it.
    part = np.where(covered > 0.85 * length, length, covered)

    def share(which: np.ndarray) -> float | None:
        return float(part[which].sum() / length[which].sum()) if which.any() else None

    return {
        "good_speech_out": share(good),
        "good_speech_out_of_prompts_trained_on": share(good & seen),
        "good_speech_out_of_other_prompts": share(good & ~seen),
        "good_prompts": int(good.sum()),
        "of_them_trained_on": int((good & seen).sum()),
        "planted": {kind: int((kinds == kind).sum()) for kind in KINDS},
        "planted_out": {kind: share(kinds == kind) for kind in KINDS},
        "wrong_words": wrong,
        "words": total,
        "wrong_text": wrong / max(total, 1),
        "wrong_places": places,
    }


def _quiet(truth: list[Prompt], start: float, end: float) -> bool:
    """Return whether no more than 0.3 s of prompts lie between two times."""
    return sum(max(0.0, min(t.end, end) - max(t.start, start)) for t in truth) < 0.3


def distance(words: list[str], spoken: list[str], free_start: bool, free_end: bool) -> int:
    """Return the edit distance, where the beginning or the end of what was said may be left out for nothing."""
    before = [0 if free_start else n for n in range(len(spoken) + 1)]
    for i, word in enumerate(words, 1):
        now = [i]
        for j, other in enumerate(spoken, 1):
            now.append(min(before[j - 1] + (word != other), before[j] + 1, now[-1] + 1))
        before = now
    return min(before) if free_end else before[-1]


def segment(model: str, folder: Path, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run the command in a process of its own; return its summary, and its seconds and largest memory."""
    command = [sys.executable, "-m", "finetune.segment", "--model", model, "--audio", str(folder / f"{name}.flac")]
    command += ["--text", str(folder / f"{name}.txt"), "--output", str(folder / name)]
    started = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} failed")
    summary = json.loads((folder / name / "summary.json").read_text())
    return summary, {"seconds": time.perf_counter() - started, "peak_mib": usage.ru_maxrss / 1024}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--minutes", type=float, nargs="+", default=[40.0])
    parser.add_argument("--trained-on", type=Path, metavar="MANIFEST")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--json", type=Path)
    a = parser.parse_args()
    clips, runs = prompts(a.trained_on), []
    result = {
        "command": f"python scripts/bench/segment.py --model M --trained-on MANIFEST --minutes "
        f"{' '.join(f'{m:g}' for m in a.minutes)} --seeds {' '.join(map(str, a.seeds))}",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "runs": runs,
    }
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        for minutes, seed in itertools.product(a.minutes, a.seeds):
            name = f"{minutes:g}-{seed}"
            audio_S, text, truth = make_recording(clips, minutes, seed)
            soundfile.write(folder / f"{name}.flac", audio_S, RATE)
            (folder / f"{name}.txt").write_text(text, encoding="utf-8")
            summary, cost = segment(a.model, folder, name)
            cost["real_time_factor"] = 60 * summary["recording_minutes"] / summary["seconds"]
            rows = [json.loads(line) for line in (folder / name / "manifest.jsonl").read_text().splitlines()]
            runs.append({"minutes": minutes, "seed": seed, **cost, **judge(rows, truth), "summary": summary})
            print(json.dumps(runs[-1], indent=1))
            if a.json:
                write_json(a.json, result)


if __name__ == "__main__":
    main()
