"""The data stream against what it could do at best, and against others: both sides in one run.

    python scripts/bench/data.py [--json FILE] [--cases decode,padding,manifest,train,features,soak] [--lines 5200000]

decode    clips a second of one worker, against soundfile.read of the same bytes in a bare loop; and of two workers
          against one
padding   share of padding on log-normal lengths of 0.5 to 30 s: by duration, at random, and lhotse's
          DynamicBucketingSampler
manifest  5.2 M lines: time to the first batch, memory and its growth, and resume at line 4,000,000. Audio is not read
          here: decoding is replaced by 0.1 s of silence.
soak      memory and open files of two workers over a million clips that are decoded
train     audio seconds a second of training the sample base model, with batches by duration against random ones
features  log-mel features of a batch, ours against NeMo's; and audio seconds a second of training the sample base
          model with features in the workers against those in the model

Timed parts alternate in rounds, and medians are reported.
"""

import argparse
import io
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np
import psutil
import soundfile
from tqdm import tqdm

from finetune.data import worker_shards
from finetune.data.batching import BatchLimits
from finetune.data.options import StreamOptions
from finetune.data.sources import open_source, parse_sources
from finetune.data.stream import UtteranceStream
from finetune.data.utterances import DecodedUtterance

RATE = 16_000
ROUNDS = 5
WORDS = [f"word{i:03d}" for i in range(500)]


def lengths(count: int, seed: int = 0) -> np.ndarray:
    """Seconds of clips: log-normal with a median of 6.5 s, cut to 0.5 to 30 s."""
    drawn = np.random.default_rng(seed).lognormal(np.log(6.5), 0.75, size=2 * count)
    return np.round(drawn[(drawn >= 0.5) & (drawn <= 30.0)][:count], 2)


def texts(seconds: np.ndarray, seed: int = 1) -> list[str]:
    """About 2.5 words a second, more or fewer by a fifth."""
    random = np.random.default_rng(seed)
    counts = np.maximum(1, np.round(2.5 * seconds * random.normal(1.0, 0.2, size=len(seconds)))).astype(int)
    return [" ".join(WORDS[i] for i in random.integers(0, len(WORDS), size=n)) for n in counts]


def encode(text: str) -> list[int]:
    """Two tokens a word, without a tokenizer's time."""
    return [1] * (2 * (text.count(" ") + 1))


def make_stream(path: str, *, workers: int = 0, **options: Any) -> UtteranceStream:
    sources = [open_source(source, "data") for source in parse_sources(path, "data", "train")]
    limits = options.pop("limits", BatchLimits(clips=16))
    settings = {"sample_rate": RATE, "seed": 1, "group_by_duration": True, **options}
    return UtteranceStream(sources, StreamOptions(limits=limits, **settings), encode, workers=workers)


# ---- decoding ------------------------------------------------------------------------------------------------------


def write_clips(folder: Path, kind: str, count: int) -> list[bytes]:
    """Speech-like noise as parquet shards of audio bytes; the same bytes as a list."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    random = np.random.default_rng(0)
    seconds, rows = lengths(count), []
    for i, (length, text) in enumerate(zip(seconds, texts(seconds), strict=True)):
        samples_S = np.cumsum(random.standard_normal(int(length * RATE))) * 0.002
        samples_S = 0.3 * np.tanh(samples_S - samples_S.mean())
        file = io.BytesIO()
        options = {"format": "FLAC"} if kind == "FLAC" else {"format": "OGG", "subtype": "OPUS"}
        soundfile.write(file, samples_S, RATE, **options)
        rows.append(
            {"id": str(i), "audio": {"bytes": file.getvalue(), "path": None}, "text": text, "duration": float(length)}
        )
    for shard in range(4):
        pq.write_table(pa.Table.from_pylist(rows[shard::4]), folder / f"train-{shard}.parquet", row_group_size=100)
    return [row["audio"]["bytes"] for row in rows]


def seconds_of(run: Callable[[], Any]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def bench_decode(folder: Path, clips: int) -> dict[str, Any]:
    """Clips a second of a bare loop and of the stream without, with one and with two workers."""
    # Opus takes five times as long to decode.
    return {
        kind: decode_one_format(folder / kind, kind, count) for kind, count in (("FLAC", clips), ("OPUS", clips // 5))
    }


def decode_one_format(folder: Path, kind: str, clips: int) -> dict[str, Any]:
    """The sides for one format of audio, in rounds."""
    folder.mkdir()
    contents = write_clips(folder, kind, clips)

    def bare() -> None:
        for content in contents:
            soundfile.read(io.BytesIO(content), dtype="float32")

    def streamed(workers: int) -> float:
        """Return clips a second from first to last batch; workers start, fill a buffer of 64 and end once a run."""
        stream = make_stream(f"{folder}/train-*.parquet", workers=workers, shuffle_buffer_size=64)
        first, last, count = None, 0.0, 0
        for batch in stream.batches():
            last = time.perf_counter()
            if first is None:
                first = last
            else:
                count += len(batch.ids)
        return count / (last - first)

    sides: dict[str, list[float]] = {"bare loop": [], "in the process": [], "1 worker": [], "2 workers": []}
    for _ in tqdm(range(ROUNDS), desc=f"decode {kind}", unit="round"):
        sides["bare loop"].append(len(contents) / seconds_of(bare))
        for name, workers in (("in the process", 0), ("1 worker", 1), ("2 workers", 2)):
            sides[name].append(streamed(workers))
    medians = {name: statistics.median(values) for name, values in sides.items()}
    tqdm.write(f"{kind}, clips a second: " + ", ".join(f"{name} {value:.0f}" for name, value in medians.items()))
    return {
        "clips": clips,
        "clips_per_second": medians,
        "one_worker_of_bare_loop": medians["1 worker"] / medians["bare loop"],
        "two_workers_of_one": medians["2 workers"] / medians["1 worker"],
    }


# ---- padding -------------------------------------------------------------------------------------------------------


def silence(entries: list[Any], options: Any, epoch: int, report: Any) -> list[DecodedUtterance]:
    """In place of decoding: 0.1 s of silence a clip."""
    return [
        DecodedUtterance(e.id, e.text, e.language, np.zeros(RATE // 10, dtype=np.float32), e.tokens) for e in entries
    ]


def write_manifest(path: Path, count: int, at_once: int = 100_000) -> None:
    with path.open("w", encoding="utf-8") as file:
        for first in tqdm(
            range(0, count, at_once), desc="manifest", unit_scale=at_once, unit="line", disable=count <= at_once
        ):
            seconds = lengths(min(at_once, count - first), seed=first)
            for i, (length, text) in enumerate(
                zip(seconds.tolist(), texts(seconds, seed=first + 1), strict=True), first
            ):
                row = {"audio_filepath": f"clips/{i:07d}.flac", "duration": length, "text": text, "lang": "en"}
                file.write(json.dumps(row) + "\n")


def share_of_padding(batches: Iterator[list[tuple[float, int]]]) -> dict[str, float]:
    """Of the audio, and of the tokens, over batches of (seconds, tokens)."""
    used = padded = used_tokens = padded_tokens = batches_seen = 0
    for batch in batches:
        used += sum(seconds for seconds, _ in batch)
        padded += len(batch) * max(seconds for seconds, _ in batch)
        used_tokens += sum(tokens for _, tokens in batch)
        padded_tokens += len(batch) * max(tokens for _, tokens in batch)
        batches_seen += 1
    return {"audio": 1 - used / padded, "tokens": 1 - used_tokens / padded_tokens, "batches": batches_seen}


def bench_padding(folder: Path, clips: int) -> dict[str, Any]:
    """Padding of the stream's batches, of random ones, and of lhotse's, with as many clips in the buffer."""
    from lhotse import CutSet, MonoCut, SupervisionSegment
    from lhotse.cut import Cut
    from lhotse.dataset import DynamicBucketingSampler

    manifest = folder / "padding.jsonl"
    write_manifest(manifest, clips)
    rows = [json.loads(line) for line in manifest.read_text().splitlines()]
    by_id = {row["audio_filepath"]: (row["duration"], len(encode(row["text"]))) for row in rows}
    decode_all, worker_shards.decode_all = worker_shards.decode_all, silence
    buffer = 2048

    def streamed(**options: Any) -> Iterator[list[tuple[float, int]]]:
        for batch in make_stream(str(manifest), shuffle_buffer_size=buffer, **options).batches():
            if batch.ids:
                yield [by_id[i] for i in batch.ids]

    def cuts() -> Iterator[Cut]:
        for row in rows:
            cut = MonoCut(row["audio_filepath"], 0.0, row["duration"], 0)
            cut.supervisions = [SupervisionSegment(cut.id, cut.id, 0.0, row["duration"], text=row["text"])]
            yield cut

    def by_lhotse(**options: Any) -> Iterator[list[tuple[float, int]]]:
        sampler = DynamicBucketingSampler(
            CutSet.from_cuts(cuts()).to_eager(), num_buckets=30, shuffle=True, buffer_size=buffer, seed=1, **options
        )
        for batch in sampler:
            yield [by_id[cut.id] for cut in batch]

    sides = {
        "16 clips, by duration": streamed(),
        "16 clips, at random": streamed(group_by_duration=False),
        "16 clips, lhotse": by_lhotse(max_cuts=16, max_duration=None),
        "200 s, by duration": streamed(limits=BatchLimits(seconds=200.0)),
        "200 s, at random": streamed(limits=BatchLimits(seconds=200.0), group_by_duration=False),
        "200 s, lhotse": by_lhotse(max_duration=200.0),
    }
    try:
        return {
            "clips": clips,
            "buffer": buffer,
            "sides": {name: share_of_padding(side) for name, side in tqdm(sides.items(), desc="padding", unit="side")},
        }
    finally:
        worker_shards.decode_all = decode_all


# ---- training ------------------------------------------------------------------------------------------------------


BY_DURATION = {
    "16 clips, at random": ["data.group_by_duration=false"],
    "16 clips, by duration": ["data.group_by_duration=true"],
    "40 s, by duration": ["data.group_by_duration=true", "data.batch_duration=40"],
}
BY_FEATURES = {f"features in the {where}": [f"data.features={where}"] for where in ("model", "workers")}


def bench_train(folder: Path, sides: dict[str, list[str]], steps: int, rounds: int = 2) -> dict[str, Any]:
    """Return audio seconds a second of training the base model, in alternating runs; compare with the first side."""
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    padding = {}
    for number in range(rounds):
        for name, settings in tqdm(sides.items(), desc=f"train, round {number + 1} of {rounds}", unit="run"):
            run = folder / f"run-{number}"
            command = [
                sys.executable, str(ROOT / "finetune" / "train.py"),
                "--config", str(ROOT / "finetune" / "configs" / "quickstart.yaml"),
                f"training.output_dir={run}", "training.overwrite_output_dir=true", f"training.max_steps={steps}",
                "training.eval_on_start=false", "training.eval_steps=0", "training.save_steps=0",
                "training.report_to=none", "data.validation=null", "data.test=null", *settings,
            ]  # fmt: skip
            subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
            lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][2:]
            speeds[name].append(statistics.median(line["audio_seconds_per_second"] for line in lines))
            padding[name] = json.loads((run / "summary.json").read_text())["padding_fraction"]
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    base = medians[next(iter(sides))]
    return {
        "steps": steps,
        "audio_seconds_per_second": speeds,
        "padding": padding,
        "against_first": {name: value / base for name, value in medians.items()},
    }


def bench_features(folder: Path, steps: int, clips: int = 16, seconds: float = 4.0) -> dict[str, Any]:
    """Milliseconds for the features of a batch as NeMo computes them and as we do, with dither, then `bench_train`."""
    import torch

    from finetune.models.features import log_mel
    from finetune.models.loading import load_model

    preprocessor = load_model(str(ROOT / "examples" / "base" / "fastconformer_tdt_3m.nemo")).preprocessor.train()
    audio_BS = 0.1 * torch.randn(clips, int(seconds * RATE), generator=torch.Generator().manual_seed(0))
    lengths_B = torch.full((clips,), audio_BS.size(1))
    sides: dict[str, Callable[[], object]] = {
        "NeMo's": lambda: preprocessor(input_signal=audio_BS, length=lengths_B),
        "ours": lambda: log_mel(preprocessor, audio_BS, lengths_B),
    }
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(4 * ROUNDS):
        for name, side in sides.items():
            began = time.perf_counter()
            side()
            taken[name].append(1000 * (time.perf_counter() - began))
    medians = {name: statistics.median(values) for name, values in taken.items()}
    return {
        "clips": clips,
        "seconds": seconds,
        "threads": torch.get_num_threads(),
        "median_ms": medians,
        "fastest_ms": {name: min(values) for name, values in taken.items()},
        "ratio": medians["NeMo's"] / medians["ours"],
        "training": bench_train(folder, BY_FEATURES, steps),
    }


# ---- a large manifest ----------------------------------------------------------------------------------------------


def bench_manifest(folder: Path, lines: int) -> dict[str, Any]:
    """Start, memory and resume on a manifest of so many lines. Audio reads are faked."""
    manifest = folder / "large.jsonl"
    write_manifest(manifest, lines)
    worker_shards.decode_all = silence
    process = psutil.Process()

    def resident() -> float:
        return process.memory_info().rss / 2**20

    before = resident()
    started = time.perf_counter()
    stream = make_stream(str(manifest), limits=BatchLimits(clips=64))
    opened = time.perf_counter() - started
    iterator = stream.batches()
    next(iterator)
    found: dict[str, Any] = {
        "lines": lines,
        "bytes": manifest.stat().st_size,
        "open_seconds": opened,
        "first_batch_seconds": time.perf_counter() - started,
        "rss_mib_before": before,
        "rss_mib_at_first_batch": resident(),
    }
    seen, at, state, expected = 64, {}, None, None
    marks = [int(lines * share) for share in (100 / 5200, 0.25, 0.5, 0.75, 1.0)]
    resume_at = int(lines * 4000 / 5200)
    with tqdm(total=lines, desc="manifest", unit="line") as bar:
        for batch in iterator:
            seen += len(batch.ids)
            bar.update(len(batch.ids))
            if expected is None and state is not None:
                expected = batch.ids
            if state is None and seen >= resume_at:
                state = json.dumps(stream.state_dict())
            while marks and seen >= marks[0]:
                at[marks.pop(0)] = resident()
    found["lines_per_second"] = seen / (time.perf_counter() - started)
    found["rss_mib_at_line"] = {str(line): value for line, value in at.items()}
    values = list(at.values())
    found["growth_mib"] = max(values) - values[0]
    found["lines_read"] = seen
    started = time.perf_counter()
    resumed = make_stream(str(manifest), limits=BatchLimits(clips=64))
    resumed.load_state_dict([json.loads(state)])
    following = next(resumed.batches())
    found["resume_at_line"] = resume_at
    found["resume_seconds"] = time.perf_counter() - started
    found["resume_gives_the_right_batch"] = following.ids == expected
    found["state_bytes"] = len(state)
    return found


# ---- memory of workers ----------------------------------------------------------------------------------------------


def bench_soak(folder: Path, lines: int, files: int = 200) -> dict[str, Any]:
    """Memory of two workers that decode short FLAC files, again and again, to so many clips."""
    random = np.random.default_rng(0)
    for i in range(files):
        samples_S = 0.1 * random.standard_normal(int(random.uniform(0.3, 0.9) * RATE))
        soundfile.write(folder / f"{i}.flac", samples_S, RATE)
    manifest = folder / "soak.jsonl"
    with manifest.open("w", encoding="utf-8") as file:
        for i in range(lines):
            row = {"audio_filepath": f"{i % files}.flac", "text": f"{WORDS[i % 500]} {WORDS[i % 499]}", "id": str(i)}
            file.write(json.dumps({**row, "duration": 0.3 + 0.6 * (i % files) / files}) + "\n")
    process = psutil.Process()

    def measured() -> dict[str, list[float]]:
        everyone = [process, *process.children()]
        return {
            "rss_mib": [round(p.memory_info().rss / 2**20, 1) for p in everyone],
            "open_files": [p.num_fds() for p in everyone],
        }

    seen, at, started = 0, {}, time.perf_counter()
    marks = [lines * share // 10 for share in range(1, 10)]
    with tqdm(total=lines, desc="soak", unit="clip", mininterval=10) as bar:
        for batch in make_stream(str(manifest), workers=2, limits=BatchLimits(clips=64)).batches():
            seen += len(batch.ids)
            bar.update(len(batch.ids))
            while marks and seen >= marks[0]:
                at[str(marks.pop(0))] = measured()
    first, last = next(iter(at.values())), list(at.values())[-1]
    return {
        "clips": seen,
        "clips_per_second": seen / (time.perf_counter() - started),
        "training process and two workers at clip": at,
        "growth_mib": [b - a for a, b in zip(first["rss_mib"], last["rss_mib"], strict=True)],
    }


def machine() -> dict[str, Any]:
    import torch

    text = Path("/proc/cpuinfo").read_text().splitlines()
    return {
        "cpu": next((line.split(":")[1].strip() for line in text if "model name" in line), ""),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "soundfile": soundfile.__version__,
        "date": date.today().isoformat(),
    }


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="decode,padding,manifest,train,features,soak")
    parser.add_argument("--clips", type=int, default=3000, help="clips that are decoded in a round")
    parser.add_argument("--steps", type=int, default=60, help="of each training")
    parser.add_argument("--padding-clips", type=int, default=60_000)
    parser.add_argument("--lines", type=int, default=5_200_000)
    parser.add_argument("--soak-clips", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path, help="results; those of other cases in the file are kept")
    arguments = parser.parse_args()
    about = {"machine": machine(), "command": "python scripts/bench/data.py " + " ".join(sys.argv[1:])}
    found = json.loads(arguments.json.read_text()) if arguments.json and arguments.json.is_file() else {}
    cases = {
        "decode": lambda folder: bench_decode(folder, arguments.clips),
        "padding": lambda folder: bench_padding(folder, arguments.padding_clips),
        "manifest": lambda folder: bench_manifest(folder, arguments.lines),
        "train": lambda folder: bench_train(folder, BY_DURATION, arguments.steps),
        "features": lambda folder: bench_features(folder, arguments.steps),
        "soak": lambda folder: bench_soak(folder, arguments.soak_clips),
    }
    for name in arguments.cases.split(","):
        with tempfile.TemporaryDirectory() as folder:
            found[name] = {**about, **cases[name](Path(folder))}
        print(json.dumps(found[name], indent=1))
        if arguments.json:
            arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
