"""Reads a whole data set and says what is in it, what training would leave out and why, and what its batches would be like.

    python -m finetune.check --data D [--split train] [--model M] [--output-dir check]
    python -m finetune.check --config RUN.yaml                     # data.train with the filters of the run file

D: a NeMo manifest, a folder or glob of parquet or tar shards, an audio folder, or a hub data set name. With a model (or a run
file, which names one) texts are tokenised and clips judged by what its encoder's frames can carry. An interrupted check goes on
where it was. Leaves report.html, check.json, and problems.jsonl with each clip that cannot be used or comes twice: a file for
`data.leave_out`.

Exit codes: 0 all is usable but what filters leave out, 1 more than data.max_bad_fraction of the clips are bad, 2 bad arguments.
"""

import argparse
import hashlib
import json
import logging
import math
import multiprocessing
import os
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from finetune.data.audio_root import check_root
from finetune.data.batching import BatchLimits, Buffer, Entry
from finetune.data.decode import BadClip, Unreachable
from finetune.data.filters import FilteredClip, Filters, level, parse_filters
from finetune.data.leave_out import DUPLICATE, hash_of
from finetune.data.options import StreamOptions
from finetune.data.reader import UnreadableShard, rows_from
from finetune.data.shards import Shard
from finetune.data.sources import OpenSource, open_source, parse_sources
from finetune.data.utterances import examine, read_clip, row_id, text_encoder
from finetune.data.worker_lifetime import ends_with_this_process
from finetune.errors import UserError
from finetune.logs import print_error, set_up_logging

log = logging.getLogger(__name__)

BINS = {
    "seconds": (0.0, 40.0, 80),
    "characters per second": (0.0, 40.0, 80),
    "tokens": (0.0, 400.0, 80),
    "level in dB of full scale": (-80.0, 0.0, 80),
}
SAMPLED_A_SHARD = 200
"""Clips of each shard whose lengths may take part in the estimate of padding."""
PADDING_SAMPLE = 20_000


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m finetune.check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", nargs="+", help="one data set or several, read as one")
    parser.add_argument("--config", type=Path, help="run file: its data.train, filters and model")
    parser.add_argument("--split", default="train", help="split of a folder or hub data set (default: train)")
    parser.add_argument("--model", help="model whose tokenizer and frames are used")
    parser.add_argument("--tokenizer", help="tokenizer directory, for a NeMo model YAML")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes that read and decode")
    parser.add_argument("--output-dir", type=Path, default=Path("check"))
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the run file")
    arguments = parser.parse_intermixed_args(argv)
    if bool(arguments.data) == bool(arguments.config):
        parser.error("give either --data or --config")
    if arguments.overrides and not arguments.config:
        parser.error(f"{arguments.overrides[0]}: settings need --config")
    if arguments.workers < 1:
        parser.error("--workers has to be 1 or more")
    return arguments


# ---- one shard -----------------------------------------------------------------------------------------------------


@dataclass
class Work:
    """What the processes that read shards share. They inherit it: a tokenizer cannot be sent to them."""

    sources: list[OpenSource]
    shards: list[tuple[int, int]]
    options: StreamOptions
    encode: Any
    parts: Path


_work: list[Work] = []


def check_shard(index: int) -> Path:
    """Reads a shard and writes its counts; one that has been read to its end before is left as it is."""
    work = _work[0]
    options, encode = work.options, work.encode
    s, number = work.shards[index]
    source, shard = work.sources[s], work.sources[s].shards[number]
    file = work.parts / f"{index:06d}.json"
    if file.is_file() and json.loads(file.read_text(encoding="utf-8"))["error"] is None:
        return file
    found: dict[str, Any] = {
        "rows": 0,
        "clips": 0,
        "seconds_by_language": Counter(),
        "clips_by_language": Counter(),
        "filtered": Counter(),
        "problems": [],
        "sample_rates": Counter(),
        "channels": Counter(),
        "histograms": {name: np.zeros(bins, dtype=np.int64) for name, (_, _, bins) in BINS.items()},
        "sample": [],
        "error": None,
    }
    names, random = [], np.random.default_rng(index)
    try:
        for row_number, row in rows_from(shard, 0, options.read_retries if source.remote else 0):
            found["rows"] += 1
            place = shard.place(row_number)
            try:
                entry = examine(source, place, (0, 0, 0, row_number), row, options, encode)
                samples_SC, rate, audio_S = read_clip(entry, options)
                if options.fits is not None and not options.fits([len(audio_S)], [len(entry.tokens)])[0]:
                    raise FilteredClip("more_tokens_than_frames")
            except FilteredClip as reason:
                found["filtered"][str(reason)] += 1
                continue
            except BadClip as reason:
                found["problems"].append({"id": row_id(source, place, row), "source": place, "reason": str(reason)})
                continue
            _count(found, entry, len(audio_S) / options.sample_rate, samples_SC, rate, random)
            # Parts of one file share its path.
            part = f" from {entry.offset}" if entry.has_offset else ""
            names.append((hash_of(_whole_id(source, shard, row, place) + part), row_number))
    except (UnreadableShard, Unreachable) as error:
        found["error"] = str(error)
    found["histograms"] = {name: counts.tolist() for name, counts in found["histograms"].items()}
    np.save(file.with_suffix(".npy"), np.array(names, dtype=np.uint64).reshape(-1, 2))
    aside = file.with_suffix(".tmp")
    aside.write_text(json.dumps(found), encoding="utf-8")
    os.replace(aside, file)
    return file


def _whole_id(source: OpenSource, shard: Shard, row: dict[str, Any], place: str) -> str:
    """A clip's id in all of the data: paths and the keys of tar members are those of their folder or file only."""
    if row.get(source.columns.get("id", "")) and source.columns["id"] != "__key__":
        return row_id(source, place, row)
    return f"{source.folder if source.is_manifest else shard.file}\0{row_id(source, place, row)}"


def _count(
    found: dict[str, Any], entry: Entry, seconds: float, samples_SC: np.ndarray, rate: int, random: np.random.Generator
) -> None:
    found["clips"] += 1
    found["clips_by_language"][entry.language or "?"] += 1
    found["seconds_by_language"][entry.language or "?"] += seconds
    found["sample_rates"][str(rate)] += 1
    found["channels"][str(samples_SC.shape[1] if samples_SC.ndim == 2 else 1)] += 1
    values = {
        "seconds": seconds,
        "characters per second": len(entry.text) / max(seconds, 1e-3),
        "tokens": len(entry.tokens),
        "level in dB of full scale": level(samples_SC),
    }
    for name, value in values.items():
        low, high, bins = BINS[name]
        place = int((min(max(value, low), high) - low) / (high - low) * bins)
        found["histograms"][name][min(place, bins - 1)] += 1
    pair = [round(seconds, 3), len(entry.tokens)]
    if len(found["sample"]) < SAMPLED_A_SHARD:
        found["sample"].append(pair)
    elif (place := int(random.integers(found["clips"]))) < SAMPLED_A_SHARD:
        found["sample"][place] = pair


# ---- all of them ---------------------------------------------------------------------------------------------------


def gather(files: list[Path]) -> dict[str, Any]:
    """The sums over all shards."""
    total: dict[str, Any] = {"rows": 0, "clips": 0, "errors": []}
    lengths: list[np.ndarray] = []
    counters = ("seconds_by_language", "clips_by_language", "filtered", "sample_rates", "channels")
    sums: dict[str, Counter[str]] = {name: Counter() for name in counters}
    histograms = {name: np.zeros(bins, dtype=np.int64) for name, (_, _, bins) in BINS.items()}
    problems: Counter[str] = Counter()
    for file in files:
        part = json.loads(file.read_text(encoding="utf-8"))
        total["rows"] += part["rows"]
        total["clips"] += part["clips"]
        lengths.append(np.array(part["sample"], dtype=np.float64).reshape(-1, 2))  # lists take ten times as much
        total["errors"] += [part["error"]] if part["error"] else []
        for name in counters:
            sums[name].update(part[name])
        for name in histograms:
            histograms[name] += np.array(part["histograms"][name])
        problems.update(kind_of(problem["reason"]) for problem in part["problems"])
    total["sample"] = np.concatenate(lengths)
    total["duplicates"] = find_duplicates(files)
    return {
        **total,
        **{name: dict(sorted(counter.items())) for name, counter in sums.items()},
        "hours": sum(sums["seconds_by_language"].values()) / 3600,
        "bad": sum(problems.values()),
        "problems": dict(problems.most_common()),
        "duplicate_ids": sum(len(rows) for rows in total["duplicates"].values()),
        "histograms": {
            name: {"from": BINS[name][0], "to": BINS[name][1], "counts": counts.tolist()}
            for name, counts in histograms.items()
        },
    }


def find_duplicates(files: list[Path]) -> dict[int, list[int]]:
    """Rows of each shard that are fit to train on, and whose id a fit row before them has."""
    arrays = [np.load(file.with_suffix(".npy")) for file in files]
    names = np.concatenate([array[:, 0] for array in arrays])
    again = np.ones(len(names), dtype=bool)
    again[np.unique(names, return_index=True)[1]] = False
    parts = np.split(again, np.cumsum([len(array) for array in arrays])[:-1])
    return {
        i: array[part, 1].tolist() for i, (array, part) in enumerate(zip(arrays, parts, strict=True)) if part.any()
    }


def kind_of(reason: str) -> str:
    """A reason without what differs from clip to clip, so that equal ones can be counted."""
    for word in ("there is no file", "the tokenizer has no piece", "the row says", "offset"):
        if reason.startswith(word):
            return word
    return reason.split(":")[0].split(" (")[0]


def estimate_padding(sample: list[list[float]], limits: BatchLimits, buffer_size: int) -> dict[str, float]:
    """Share of padding of batches by duration and at random, drawn from lengths (seconds, tokens) as the stream draws."""
    found = {}
    for name, group in (("by duration", True), ("at random", False)):
        buffer, used, padded, draws = Buffer(limits, True, group), 0.0, 0.0, 0
        rest = [
            Entry((0, 0, 0, i), s, [0] * int(n), 0, "", "", "", "", None, None, None, False, None, 0)
            for i, (s, n) in enumerate(sample)
        ]
        while rest or buffer.entries:
            while rest and len(buffer.entries) < buffer_size:
                buffer.add(rest.pop())
            batch = buffer.draw((0, draws), last=not rest)
            draws += 1
            used += sum(e.seconds for e in batch)
            padded += len(batch) * max(e.seconds for e in batch)
        found[name] = 1 - used / padded if padded else 0.0
    return found


def check(arguments: argparse.Namespace) -> dict[str, Any]:
    """All figures, after the shards that were missing have been read."""
    sources, options, encode, limits, bad_limit = prepare(arguments)
    shards = [(s, n) for s, source in enumerate(sources) for n in range(len(source.shards))]
    parts = arguments.output_dir / "parts"
    there = begin(parts, sources, options, (arguments.model, arguments.tokenizer))
    if there:
        log.info("goes on: %d of %d shards have been read before", there, len(shards))
    _work[:] = [Work(sources, shards, options, encode, parts)]
    files = read_all(shards, sources, arguments.workers)
    (parts / "of.txt").unlink()  # the next check reads everything again: audio may have changed
    found = gather(files)
    sample, duplicates = found.pop("sample"), found.pop("duplicates")
    some = np.random.default_rng(0).permutation(len(sample))[:PADDING_SAMPLE]
    found["padding"] = estimate_padding(sample[some].tolist(), limits, options.shuffle_buffer_size)
    found["bad_fraction"] = found["bad"] / max(found["rows"], 1)
    found["max_bad_fraction"] = bad_limit
    with (arguments.output_dir / "problems.jsonl").open("w", encoding="utf-8", errors="backslashreplace") as out:
        for index, file in enumerate(files):
            problems = json.loads(file.read_text(encoding="utf-8"))["problems"]
            s, number = shards[index]
            places = [sources[s].shards[number].place(row) for row in duplicates.get(index, ())]
            problems += [{"source": place, "reason": DUPLICATE} for place in places]
            out.writelines(json.dumps(problem, ensure_ascii=False) + "\n" for problem in problems)
    return found


def read_all(shards: list[tuple[int, int]], sources: list[OpenSource], workers: int) -> list[Path]:
    """The parts of all shards."""
    with ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), ends_with_this_process()) as pool:
        waiting = {pool.submit(check_shard, index): index for index in range(len(shards))}
        files: dict[int, Path] = {}
        try:
            for done in tqdm(as_completed(waiting), total=len(shards), desc="check", unit="shard"):
                files[waiting[done]] = done.result()
        except BrokenProcessPool as error:
            s, number = shards[min(set(range(len(shards))) - set(files))]
            shard = sources[s].shards[number]
            raise UserError(
                f"a process was killed, most likely for want of memory, at {shard.place(0)} or in one of the {workers} shards behind it. "
                "What has been read is kept: start again, with fewer --workers.",
                exit_code=1,
            ) from error
    return [files[index] for index in range(len(shards))]


def prepare(arguments: argparse.Namespace) -> tuple[list[OpenSource], StreamOptions, Any, BatchLimits, float]:
    """Opened sources with their filters, options, tokenizer, limits of a batch, and the share of bad clips that is borne."""
    if arguments.config:
        from finetune.config.load import load_config
        from finetune.config.tokenizer_setting import tokenizer_setting
        from finetune.training.data import plain, train_limits, with_filters

        config, _ = load_config(arguments.config, [], arguments.overrides)
        data = config.data
        sources = [open_source(s, "data.train") for s in parse_sources(plain(data.train), "data.train", "train")]
        root = check_root(data.root)
        sources, limits = with_filters([replace(s, root=root) for s in sources], config), train_limits(config)
        arguments.model, arguments.tokenizer = config.model.name, tokenizer_setting(config).dir
        normalization, size, bad_limit = data.text_normalization, data.shuffle_buffer_size, data.max_bad_fraction
    else:
        parsed = parse_sources(list(arguments.data), "--data", arguments.split)
        sources = [open_source(source, "--data") for source in parsed]
        sources = [replace(s, filters=parse_filters(s.source.filters, "--data", Filters())) for s in sources]
        normalization, size, bad_limit, limits = "none", 2048, 0.05, BatchLimits(clips=16)
    options = StreamOptions(
        limits=limits,
        sample_rate=16_000,
        shuffle_buffer_size=size,
        text_normalization=normalization,
        check_durations=True,
    )
    if arguments.model is None:
        return sources, options, len_of_characters, limits, bad_limit
    from finetune.models.loading import load_model
    from finetune.training.data import fits_of
    from finetune.training.vocabulary_change import tokenizer_of_run

    model = load_model(arguments.model, arguments.tokenizer)
    tokenizer = tokenizer_of_run(model, config) if arguments.config else model.tokenizer
    options = replace(options, sample_rate=model.preprocessor._sample_rate, fits=fits_of(model))
    return sources, options, text_encoder(tokenizer), limits, bad_limit


def len_of_characters(text: str) -> list[int]:
    """Without a model a token is four characters."""
    return [0] * math.ceil(len(text) / 4)


def begin(parts: Path, sources: list[OpenSource], options: StreamOptions, model: Any) -> int:
    """Makes the folder of the parts, and counts those there; parts of another check, or of one that was finished, are removed."""
    shards = [[shard.file, shard.first, shard.rows] for source in sources for shard in source.shards]
    files = sorted({shard.file for source in sources for shard in source.shards})
    shards += [[file, os.stat(file).st_size, os.stat(file).st_mtime_ns] for file in files if os.path.isfile(file)]
    filters = [(asdict(source.filters), asdict(source.source)) for source in sources]
    key = json.dumps([shards, filters, options.text_normalization, options.sample_rate, model], default=str)
    mark = parts / "of.txt"
    digest = hashlib.sha256(key.encode()).hexdigest()
    parts.mkdir(parents=True, exist_ok=True)
    if not mark.is_file() or mark.read_text() != digest:
        for file in parts.iterdir():
            file.unlink()
    mark.write_text(digest)
    return sum(1 for _ in parts.glob("*.json"))


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    set_up_logging()
    arguments = parse_arguments(argv)
    try:
        found = check(arguments)
    except UserError as error:
        print_error(error)
        return error.exit_code
    except OSError as error:
        print(f"error: --output-dir: {arguments.output_dir} cannot be written: {error}", file=sys.stderr)
        return 1
    from finetune.tools.data_check.report import write_report

    for file in filter(None, (arguments.output_dir / "check.json", arguments.json)):
        file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    write_report(found, arguments.output_dir / "report.html")
    for error in found["errors"]:
        print_error(error)
    print(
        f"{found['rows']} rows, {found['clips']} clips to train on, {found['hours']:.2f} h; left out by filters: "
        f"{sum(found['filtered'].values())}; bad: {found['bad']}; the report: {arguments.output_dir / 'report.html'}"
    )
    return 1 if found["errors"] or found["bad_fraction"] > found["max_bad_fraction"] else 0


if __name__ == "__main__":
    sys.exit(main())
