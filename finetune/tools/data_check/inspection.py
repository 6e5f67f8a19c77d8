"""Inspection of a data set: shards are read and decoded in parallel, and their counts are put together.

Each shard leaves a part (`parts/NNNNNN.json` and `.npy`), so that an interrupted inspection resumes there.

S samples, C channels.
"""

import contextlib
import hashlib
import json
import logging
import math
import os
import shlex
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import open_dict
from tqdm import tqdm

from finetune.config.load import Layers, load_config, parse_overrides
from finetune.config.schema import RunConfig
from finetune.config.tokenizer_setting import tokenizer_setting
from finetune.data.audio_root import check_root
from finetune.data.batching import BatchLimits, Buffer, Entry
from finetune.data.filters import FilteredUtterance, in_words, level
from finetune.data.leave_out import DUPLICATE, LeaveOut, hash_of
from finetune.data.leave_out import REASONS as LEFT_OUT
from finetune.data.options import StreamOptions
from finetune.data.overlap import EVALUATION_SETS, HeldOut, Overlap, hold_out
from finetune.data.quarantine import BadUtterance, kind_of
from finetune.data.reader import rows_from
from finetune.data.retry import Unreachable, UnreadableShard
from finetune.data.run_file import DEFAULT_SPLIT, open_rehearsal, train_limits, training_keys, with_filters
from finetune.data.shards import Row, Shard
from finetune.data.sources import OpenSource, Source, open_source, parse_sources
from finetune.data.utterances import LONGEST_TEXT, examine, read_samples, row_id, row_language, text_encoder
from finetune.data.worker_lifetime import task_processes
from finetune.durable_files import write_text
from finetune.errors import UserError
from finetune.tools.data_check.doubts import doubt_about_file, doubts_about
from finetune.tools.data_check.texts import BEFORE_SMALL, Texts, lines_about

log = logging.getLogger(__name__)

BINS = {
    "seconds": (0.0, 40.0, 80),
    "characters per second": (0.0, 40.0, 80),
    "tokens": (0.0, 400.0, 80),
    "level in dB of full scale": (-80.0, 0.0, 80),
}
COUNTED = {"clips_by_language": "language", "sample_rates": "sample_rate", "channels": "channels"}
COUNTERS = ("seconds_by_language", "filtered", "doubts", *COUNTED)
SUSPICIOUS_A_SHARD = 1000  # that are listed
SAMPLED_A_SHARD = 200  # utterances whose lengths may take part in the estimate of padding
PADDING_SAMPLE = 20_000
NO_MODEL = "(no model)"


@dataclass
class Work:
    """What is inspected, and how. Processes that read shards inherit it: a tokenizer cannot be sent to them."""

    sources: list[OpenSource]
    options: StreamOptions
    encode: Callable[[str], list[int]]
    model: tuple[str | None, str | None]
    """Name and tokenizer directory."""
    max_bad_fraction: float
    parts: Path
    held: HeldOut | None = None
    """What the run file evaluates, to be found in its data.train."""

    def __post_init__(self) -> None:
        self.shards = [(source, shard) for source in self.sources for shard in source.shards]


_inherited: list[Work] = []


def work_on_data(
    data: list[str], split: str, model: str | None, tokenizer: str | None, overrides: list[str], folder: Path
) -> Work:
    """Inspect data sets as `data.train` of a run with these settings; a model's tokenizer and frames count where one
    is named."""
    layers = Layers()
    named = {"name": model or NO_MODEL, "tokenizer": tokenizer}
    values = {"model": named, "data": {"train": data}, "training": {"output_dir": str(folder)}}
    layers.apply(values, "--data")
    layers.apply(parse_overrides(overrides), "command line")
    return _work_on(layers.finish(), "--data", split, folder)


def work_on_run_file(file: Path, overrides: list[str], folder: Path) -> Work:
    """Inspect `data.train` and `data.rehearsal` of a run file with its filters, model and batches."""
    return _work_on(load_config(file, [], overrides)[0], "data.train", "train", folder)


def _work_on(config: RunConfig, key: str, split: str, folder: Path) -> Work:
    d = config.data
    sources = [open_source(s, key) for s in parse_sources(d.train, key, split)] + open_rehearsal(d)
    root = check_root(d.root)
    options = StreamOptions(
        train_limits(config),
        sample_rate=16_000,
        shuffle_buffer_size=d.shuffle_buffer_size,
        text_normalization=d.text_normalization,
        check_durations=True,
        leave_out=LeaveOut(d.leave_out, "data.leave_out") if d.leave_out else None,
    )
    sources = with_filters([replace(s, root=root) for s in sources], d)
    model = None if config.model.name == NO_MODEL else config.model.name
    evaluated = {
        name: [open_source(s, f"data.{name}") for s in parse_sources(value, f"data.{name}", DEFAULT_SPLIT[name])]
        for name in EVALUATION_SETS
        if not d.allow_overlap and (value := getattr(d, name))
    }
    held = hold_out(evaluated, config, math.inf, with_audio=True) if evaluated else None
    named = model, tokenizer_setting(config).dir
    work = Work(sources, options, len_of_characters, named, d.max_bad_fraction, folder / "parts", held)
    return work if model is None else _with_model(work, config)


def _with_model(work: Work, config: RunConfig) -> Work:
    """Tokenise as the run does, and judge by its encoder's frames."""
    from finetune.models.loading import load_model
    from finetune.models.prompts import prompt_slots
    from finetune.training.data import fits_of
    from finetune.training.vocabulary_change import tokenizer_of_run

    model = load_model(config.model.name, tokenizer_setting(config).dir)
    if config.model.ctc_loss_weight is not None and hasattr(model, "ctc_decoder"):
        with open_dict(model.cfg):
            model.cfg.aux_ctc.ctc_loss_weight = config.model.ctc_loss_weight  # 1: CTC's alignments count
    options = replace(
        work.options, sample_rate=model.preprocessor._sample_rate, fits=fits_of(model), prompts=prompt_slots(model)
    )
    return replace(work, options=options, encode=text_encoder(tokenizer_of_run(model, config)))


def len_of_characters(text: str) -> list[int]:
    """Stand in for a tokenizer: four characters a token."""
    return [0] * math.ceil(len(text) / 4)


def inspect_shard(index: int) -> Path:
    """Read a shard and write its part; one that was read to its end before is left as it is."""
    work = _inherited[0]
    options, (source, shard) = work.options, work.shards[index]
    file = work.parts / f"{index:06d}.json"
    if file.is_file() and json.loads(file.read_text(encoding="utf-8"))["error"] is None:
        return file
    found: dict[str, Any] = {
        "rows": 0,
        "filtered": Counter(),
        "problems": [],
        "doubts": Counter(),
        "suspicious": [],
        "in_common": [],
        "left_out": [],
        "error": None,
    }
    examples: dict[str, str] = {}
    texts: dict[str, Texts] = defaultdict(Texts)
    clips: list[dict[str, Any]] = []
    names: list[tuple[int, int]] = []
    try:
        for number, row in rows_from(shard, 0, options.read_retries if source.remote else 0):
            found["rows"] += 1
            place = shard.place(number)
            text = row.get(source.columns["text"])
            doubts: list[tuple[str, str]] = []
            if isinstance(text, str) and len(text) <= LONGEST_TEXT:
                normalization = source.source.text_normalization or options.text_normalization
                wrong = texts[row_language(source, row) or "?"].add(text, normalization)
                doubts += [("", f"the text has {name}") for name in wrong]  # `texts` counts them
            try:
                entry = examine(source, place, (0, 0, 0, number), row, options, work.encode)
                samples_SC, rate, audio_S = read_samples(entry, options)
                if not entry.has_offset:
                    doubts += doubt_about_file(entry.audio, source.folder, len(samples_SC) / rate)
                if options.fits is not None and not options.fits([len(audio_S)], [entry.tokens])[0]:
                    raise FilteredUtterance("more_tokens_than_frames")
            except FilteredUtterance as reason:
                found["filtered"][str(reason)] += 1
                examples.setdefault(str(reason), row_id(source, place, row))
                if str(reason) in LEFT_OUT:  # stays in the list, which may replace the one that was read
                    found["left_out"].append((number, str(reason)))
                else:
                    _note(found, examples, row_id(source, place, row), place, row_language(source, row), doubts)
                continue
            except BadUtterance as reason:
                name = row_id(source, place, row)
                found["problems"].append({"id": name, "source": place, "reason": str(reason)})
                examples.setdefault(kind_of(str(reason)), f"{name}: {reason}")
                continue
            seconds, loudness = len(audio_S) / options.sample_rate, level(samples_SC)
            doubts += doubts_about(loudness, entry.text, seconds)
            _note(found, examples, row_id(source, place, row), place, row_language(source, row), doubts)
            clips.append(
                {
                    "language": entry.language or "?",
                    "sample_rate": str(rate),
                    "channels": str(samples_SC.shape[1] if samples_SC.ndim == 2 else 1),
                    "seconds": seconds,
                    "characters per second": len(entry.text) / max(seconds, 1e-3),
                    "tokens": len(entry.tokens),
                    "level in dB of full scale": loudness,
                }
            )
            part = f" from {entry.offset}" if entry.has_offset else ""  # parts of one file share its path
            names.append((hash_of(_whole_id(source, shard, row, place) + part), number))
            if work.held and (hits := work.held.find(source, shard, number, row)):
                found["in_common"].append((number, hits))
    except (UnreadableShard, Unreachable) as error:
        found["error"] = str(error)
    np.save(file.with_suffix(".npy"), np.array(names, dtype=np.uint64).reshape(-1, 2))
    found |= {"examples": examples, "texts": {language: own.as_json() for language, own in texts.items()}}
    write_text(file, json.dumps(found | figures_of(clips, index)))
    return file


def _note(
    found: dict[str, Any],
    examples: dict[str, str],
    name: str,
    place: str,
    language: str,
    doubts: list[tuple[str, str]],
) -> None:
    """Count what is suspicious in a clip, and list the clip."""
    for kind, how in doubts:
        if kind:
            found["doubts"][kind] += 1
            examples.setdefault(kind, f"{name}: {how}")
    if doubts and len(found["suspicious"]) < SUSPICIOUS_A_SHARD:
        reasons = [f"{kind}: {how}" if kind else how for kind, how in doubts]
        found["suspicious"].append({"id": name, "source": place, "language": language or "?", "reasons": reasons})


def write_suspicious(file: Path, problems: Path, parts: list[Path], texts: dict[str, Texts]) -> int:
    """Write the lines of problems.jsonl and those of suspicious clips; return the number of the latter."""
    listed, small = 0, f"the text has {BEFORE_SMALL}"
    with file.open("w", encoding="utf-8", errors="backslashreplace") as out:
        out.write(problems.read_text(encoding="utf-8", errors="backslashreplace"))
        for part in parts:
            for one in json.loads(part.read_text(encoding="utf-8"))["suspicious"]:
                known = texts[one.pop("language")].has_capitals
                if reasons := [reason for reason in one.pop("reasons") if known or reason != small]:
                    out.write(json.dumps(one | {"reason": "; ".join(reasons)}, ensure_ascii=False) + "\n")
                    listed += 1
    return listed


def _whole_id(source: OpenSource, shard: Shard, row: Row, place: str) -> str:
    """Return an id that is unique in all of the data, as paths and keys of tar members are not."""
    if row.get(source.columns.get("id", "")) and source.columns["id"] != "__key__":
        return row_id(source, place, row)
    return f"{source.folder if source.is_manifest else shard.file}\0{row_id(source, place, row)}"


def figures_of(clips: list[dict[str, Any]], seed: int) -> dict[str, Any]:
    """Return counts and histograms of a shard's clips, and the lengths of some of them."""
    seconds: Counter[str] = Counter()
    for clip in clips:
        seconds[clip["language"]] += clip["seconds"]
    some = np.random.default_rng(seed).permutation(len(clips))[:SAMPLED_A_SHARD]
    return {
        "clips": len(clips),
        "seconds_by_language": seconds,
        **{name: Counter(clip[column] for clip in clips) for name, column in COUNTED.items()},
        "histograms": {
            name: np.histogram(np.clip([clip[name] for clip in clips], low, high), bins, (low, high))[0].tolist()
            for name, (low, high, bins) in BINS.items()
        },
        "sample": [[round(clips[i]["seconds"], 3), clips[i]["tokens"]] for i in some],
    }


def gather(files: list[Path]) -> dict[str, Any]:
    """Return the sums over all shards."""
    rows, clips, errors = 0, 0, []
    lengths: list[np.ndarray] = []
    sums: dict[str, Counter[str]] = {name: Counter() for name in COUNTERS}
    histograms = {name: np.zeros(bins, dtype=np.int64) for name, (_, _, bins) in BINS.items()}
    problems: Counter[str] = Counter()
    examples: dict[str, str] = {}
    texts: dict[str, Texts] = defaultdict(Texts)
    for file in files:
        part = json.loads(file.read_text(encoding="utf-8"))
        rows += part["rows"]
        clips += part["clips"]
        errors += [part["error"]] if part["error"] else []
        lengths.append(np.array(part["sample"], dtype=np.float64).reshape(-1, 2))  # lists take ten times as much
        for name in COUNTERS:
            sums[name].update(part[name])
        for name in histograms:
            histograms[name] += np.array(part["histograms"][name])
        problems.update(kind_of(problem["reason"]) for problem in part["problems"])
        examples = part["examples"] | examples
        for language, own in part["texts"].items():
            texts[language].merge(own)
    duplicates = find_duplicates(files)
    return {
        "rows": rows,
        "clips": clips,
        "errors": errors,
        "sample": np.concatenate(lengths),
        "duplicates": duplicates,
        **{name: dict(sorted(counter.items())) for name, counter in sums.items()},
        "hours": sum(sums["seconds_by_language"].values()) / 3600,
        "bad": sum(problems.values()),
        "problems": dict(problems.most_common()),
        "examples": examples,
        "texts": {language: texts[language] for language in sorted(texts, key=lambda name: -texts[name].texts)},
        "duplicate_ids": sum(map(len, duplicates.values())),
        "histograms": {
            name: {"from": low, "to": high, "counts": histograms[name].tolist()}
            for name, (low, high, _) in BINS.items()
        },
    }


def find_duplicates(files: list[Path]) -> dict[int, list[int]]:
    """Return the usable rows of each shard whose id a usable row before them has."""
    arrays = [np.load(file.with_suffix(".npy")) for file in files]
    names = np.concatenate([array[:, 0] for array in arrays])
    again = np.ones(len(names), dtype=bool)
    again[np.unique(names, return_index=True)[1]] = False
    parts = np.split(again, np.cumsum([len(array) for array in arrays])[:-1])
    return {
        i: array[part, 1].tolist() for i, (array, part) in enumerate(zip(arrays, parts, strict=True)) if part.any()
    }


def estimate_padding(sample: list[list[float]], limits: BatchLimits, buffer_size: int) -> dict[str, float]:
    """Return the share of padding in batches by duration and at random, from pairs (seconds, tokens)."""
    found, nowhere = {}, OpenSource(Source(path=""), [])
    for name, group in (("by duration", True), ("at random", False)):
        buffer, used, padded, draws = Buffer(limits, True, group), 0.0, 0.0, 0
        rest = [
            Entry((0, 0, 0, i), s, [0] * int(n), 0, "", "", "", "", None, nowhere, None, False, None, 0)
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


def inspect(work: Work, folder: Path, read: Callable[[int], Iterator[Path]]) -> dict[str, Any]:
    """Return all figures, after reading the shards that were missing, and write problems.jsonl.

    Args:
        read: inspects so many shards and yields their parts in order: `read_here`, or a cluster.
    """
    there = begin(work)
    if there:
        log.info("goes on: %d of %d shards have been read before", there, len(work.shards))
    _inherited[:] = [work]
    files = read_all(work, read)
    (work.parts / "of.txt").unlink()  # the next inspection reads everything again: audio may have changed
    found = gather(files)
    sample, duplicates = found.pop("sample"), found.pop("duplicates")
    some = np.random.default_rng(0).permutation(len(sample))[:PADDING_SAMPLE]
    found["padding"] = estimate_padding(sample[some].tolist(), work.options.limits, work.options.shuffle_buffer_size)
    found["bad_fraction"] = found["bad"] / max(found["rows"], 1)
    found["max_bad_fraction"] = work.max_bad_fraction
    bounds = [source.filters for source in work.sources]
    left_out = sorted(found["filtered"].items(), key=lambda item: -item[1])
    found["left_out"] = [(in_words(name, bounds), n, found["examples"][name]) for name, n in left_out]
    texts = found.pop("texts")
    found["texts"] = {
        language: {"texts": own.texts, "characters": dict(own.characters.most_common()), "deleted": own.deleted}
        | {"examples": own.examples, "suspicious": own.suspicious()}
        for language, own in texts.items()
    }
    found["said"] = [line for language, own in texts.items() for line in lines_about(language, own, len(texts))]
    common = Overlap(work.held or HeldOut(), found["clips"], trained=training_keys(work.sources))
    for file, (_, shard) in zip(files, work.shards, strict=True):
        for row, hits in json.loads(file.read_text(encoding="utf-8"))["in_common"]:
            common.add(hits, shard.place(row))
    with (folder / "problems.jsonl").open("w", encoding="utf-8", errors="backslashreplace") as out:
        for index, (file, (_, shard)) in enumerate(zip(files, work.shards, strict=True)):
            part = json.loads(file.read_text(encoding="utf-8"))
            problems = part["problems"]
            for row, hits in part["in_common"]:
                if splits := common.sets_of(hits):
                    problems.append({"source": shard.place(row), "reason": f"also in data.{', '.join(splits)}"})
            again = [*part["left_out"], *((row, DUPLICATE) for row in duplicates.get(index, ()))]
            problems += [{"source": shard.place(row), "reason": reason} for row, reason in again]
            out.writelines(json.dumps(problem, ensure_ascii=False) + "\n" for problem in problems)
    found["suspicious"] = write_suspicious(folder / "suspicious.jsonl", folder / "problems.jsonl", files, texts)
    found["in_common"] = common.by_set()
    found["same_clips"], found["same_texts"] = common.said()
    listed = shlex.quote(f"data.leave_out={folder / 'problems.jsonl'}")
    found["way_out"] = common.way_out(work.sources, f"add {listed} to train without these clips")
    return found


def read_here(workers: int, shards: int) -> Iterator[Path]:
    """Inspect so many shards in forked processes; yield their parts in order."""
    with task_processes(workers) as pool:
        yield from pool.map(inspect_shard, range(shards))


def read_all(work: Work, read: Callable[[int], Iterator[Path]]) -> list[Path]:
    """Inspect all shards in parallel; return their parts in order."""
    shards, files = work.shards, []
    try:
        with contextlib.closing(tqdm(total=len(shards), desc="check", unit="shard", leave=False)) as bar:
            for part in read(len(shards)):
                files.append(part)
                bar.update()
    except KeyboardInterrupt:
        there = len([*work.parts.glob("*.json")])
        raise KeyboardInterrupt(f"{there} of {len(shards)} shards are read; the same line goes on there") from None
    except BrokenProcessPool as error:
        raise UserError(
            f"a process was killed, most likely for want of memory, at {shards[len(files)][1].place(0)} or in a "
            "shard close behind it. What has been read is kept: start again, with fewer --workers.",
            exit_code=1,
        ) from error
    return files


def begin(work: Work) -> int:
    """Make the folder of parts and count them; parts of another or finished inspection are removed."""
    shards: list[list[Any]] = [[shard.file, shard.first, shard.rows] for _, shard in work.shards]
    files = sorted({shard.file for _, shard in work.shards})
    shards += [[file, os.stat(file).st_size, os.stat(file).st_mtime_ns] for file in files if os.path.isfile(file)]
    filters = [(source.filters.model_dump(), source.source.model_dump()) for source in work.sources]
    options = work.options
    held = [(row.split, row.place, row.text) for row in work.held.rows] if work.held else []
    left_out = hashlib.sha256(options.leave_out.hashes.tobytes()).hexdigest() if options.leave_out else None
    settings = [options.text_normalization, options.sample_rate, left_out]
    key = json.dumps([shards, held, filters, settings, work.model], default=str)
    mark = work.parts / "of.txt"
    digest = hashlib.sha256(key.encode()).hexdigest()
    work.parts.mkdir(parents=True, exist_ok=True)
    if not mark.is_file() or mark.read_text() != digest:
        for file in work.parts.iterdir():
            file.unlink()
    mark.write_text(digest)
    return sum(1 for _ in work.parts.glob("*.json"))
