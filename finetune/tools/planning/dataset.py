"""What a plan knows of the data: from the command line, a data check, a sample of data.train, or as a guess."""

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from finetune.config.schema import RunConfig
from finetune.config.tokenizer_setting import tokenizer_setting
from finetune.data.batching import BatchLimits
from finetune.data.filters import FilteredUtterance
from finetune.data.normalization import normalize_text
from finetune.data.options import StreamOptions
from finetune.data.quarantine import BadUtterance
from finetune.data.reader import group_sources
from finetune.data.retry import Unreachable
from finetune.data.run_file import count_clips, open_rehearsal, training_keys, with_filters
from finetune.data.sources import open_source, parse_sources
from finetune.data.storage import expand
from finetune.data.survey import length_of, spread_rows
from finetune.errors import UserError
from finetune.models.huggingface.reading import cached_file
from finetune.models.loading import read_tokenizer
from finetune.models.sentencepiece_model import processor
from finetune.security.documents import read_settings

TOKENS_A_SECOND = 5.0
ROWS, ROWS_WITH_AUDIO, SECONDS = 2000, 100, 5.0
"""Sampled at most: rows of manifests, rows of sources that hold the audio as well, and the time for it."""


@dataclass(frozen=True)
class Data:
    """Lengths in seconds, and the size of the data set."""

    longest: float
    mean: float
    hours: float | None
    """Of the whole data set."""
    tokens_a_second: float = TOKENS_A_SECOND
    assumed: tuple[str, ...] = ()
    """Of `mean` and `tokens_a_second`, what nobody has measured or given."""
    source: str = ""
    """Where the figures come from that were not given, in words."""


def data_of(
    config: RunConfig, check: Path | None, hours: float | None, mean: float | None, tokens_a_second: float | None
) -> Data:
    """Put together what is known; arguments have priority over the check, and the check over a sample of data.train.

    Args:
        config: of the run; `data.max_duration` bounds the lengths.
        check: file or folder of finetune.check.
        hours, mean, tokens_a_second: from the command line.

    Raises:
        UserError: `check` is no result of finetune.check.
    """
    longest, source = config.data.max_duration, ""
    if check is not None:
        file = check / "check.json" if check.is_dir() else check
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            checked_mean = 3600 * found["hours"] / max(found["clips"], 1)
            last_second, _ = _last_and_mean(found["histograms"]["seconds"])
            _, tokens = _last_and_mean(found["histograms"]["tokens"])
            hours = found["hours"] if hours is None else hours
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"--check: {file} is no result of a data check ({error}). Make one: python -m finetune.check --data D "
                f"--output-dir {check}"
            ) from error
        longest, source = min(longest, last_second or longest), f"from {file}"
        if tokens and checked_mean:
            tokens_a_second = tokens_a_second or tokens / checked_mean
        mean = mean or checked_mean
    elif not (hours and mean and tokens_a_second):
        sampled_hours, sampled_mean, sampled_tokens, source = sample(config)
        hours, mean = hours or sampled_hours, mean or sampled_mean
        tokens_a_second = tokens_a_second or sampled_tokens
    given = {"mean": mean, "tokens_a_second": tokens_a_second}
    return Data(
        float(longest),
        float(min(mean or longest / 2, longest)),
        hours,
        float(tokens_a_second or TOKENS_A_SECOND),
        tuple(name for name, value in given.items() if not value),
        source,
    )


def sample(config: RunConfig) -> tuple[float | None, float | None, float | None, str]:
    """Return hours of an epoch, mean seconds and tokens a second of data.train, with its share of data.rehearsal, from
    rows of all parts, and a word on it.

    Nothing is decoded, and only what lies on this machine is read. None: not known.
    """
    d = config.data
    try:
        named = parse_sources(d.train, "data.train", "train")
        named += parse_sources(d.rehearsal, "data.rehearsal", "train") if d.rehearsal else []
        away = [source.path for source in named if not (os.path.exists(source.path) or _matches(source.path))]
        if away:
            return None, None, None, f"{away[0]} is not on this machine's disk"
        sources = [open_source(source, "data.train") for source in parse_sources(d.train, "data.train", "train")]
        sources = with_filters(sources + open_rehearsal(d), d)
    except (UserError, OSError) as error:
        return None, None, None, f"data.train cannot be read: {error}"
    trained = training_keys(sources)
    encoder, grouped = _encoder(config), group_sources(sources, d.max_samples)
    options = StreamOptions(limits=BatchLimits(), sample_rate=16_000, skip_samples=d.skip_samples)
    looked, kept, seconds, tokens = 0, 0, 0.0, 0
    rows = ROWS if all(source.is_manifest for source in sources) else ROWS_WITH_AUDIO
    for ref, row in spread_rows(grouped, options, rows, SECONDS):
        source, text = grouped.groups[ref[0]][ref[2]][0], None
        looked += 1
        with contextlib.suppress(BadUtterance, FilteredUtterance, Unreachable, OSError):
            text = row.get(source.columns["text"])
            length = length_of(source, row, d.read_retries)
            source.filters.check_duration(length)
            if isinstance(text, str) and text:
                kept, seconds = kept + 1, seconds + length
                text = normalize_text(text, source.source.text_normalization or d.text_normalization)
                tokens += len(encoder.encode(text)) if encoder is not None else 0
    if not seconds:
        return None, None, None, f"none of {looked} rows of {trained} has a text and a length to train on"
    clips = count_clips(sources, d.max_samples, d.skip_samples)
    of = "" if clips is None or looked > clips else f" of {clips:,}"  # a mixture's pass may have fewer
    hours = None if clips is None else clips * kept / looked * seconds / kept / 3600
    # Rounded, so that a step which was followed with them is found again.
    rate = round(tokens / seconds, 1) if tokens else None
    return hours, seconds / kept, rate, f"from {looked:,}{of} rows of {trained}"


def _matches(path: str) -> bool:
    return "://" not in path and any(c in path for c in "*?[") and bool(expand(path))


def _encoder(config: RunConfig) -> Any:
    """Return what encodes texts with the model's tokenizer; None where that is not on this machine."""
    name = tokenizer_setting(config).dir or config.model.name
    with contextlib.suppress(UserError, OSError, ValueError, KeyError, TypeError, AttributeError):
        if name.endswith((".yaml", ".yml")):
            name = read_settings(Path(name), "model.name")["model"]["tokenizer"]["dir"]
        if not Path(name).exists():
            name = str(cached_file(name, f"{Path(name).name}.nemo"))
        return processor(read_tokenizer(name, "model.name")) if Path(name).exists() else None
    return None


def _last_and_mean(histogram: dict[str, Any]) -> tuple[float, float]:
    """Return the upper bound of the last bin that holds any, and the mean by the bins' centres; zeros if none does."""
    counts = np.array(histogram["counts"], float)
    if not counts.any():
        return 0.0, 0.0
    edges = np.linspace(histogram["from"], histogram["to"], len(counts) + 1)
    last = float(edges[1:][counts > 0].max())
    return last, float(np.average((edges[1:] + edges[:-1]) / 2, weights=counts))
