"""One labelling: the job over labelled clips and audio, the calibration, and what is kept."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import statistics
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.data.quarantine import BadUtterance
from finetune.data.reader import rows_from
from finetune.data.retry import RETRIES, UnreadableShard
from finetune.data.sources import split_to_read
from finetune.data.survey import length_of
from finetune.durable_files import write_json
from finetune.errors import UserError
from finetune.evaluation.dataset import open_sources
from finetune.tools.command_line import writing
from finetune.tools.jobs.engines import EngineSettings
from finetune.tools.jobs.job import MOST_CLIPS, Job
from finetune.tools.jobs.running import run_job
from finetune.tools.pseudo_labels.audio import RECORDINGS, open_audio_sources
from finetune.tools.pseudo_labels.calibration import Calibration, calibrate
from finetune.tools.pseudo_labels.labelling import MakeLabeller
from finetune.tools.pseudo_labels.outputs import Summary, summarise
from finetune.tools.pseudo_labels.selection import Heard, read_labelled, select

if TYPE_CHECKING:
    from collections.abc import Callable

    from finetune.data.sources import OpenSource
    from finetune.tools.jobs.job import Totals

log = logging.getLogger(__name__)

SHARD_SECONDS = 6000.0
LOOKED_AT = 20
"""Rows of each source."""
NOT_THE_RESULT = ("device", "labelled", "batch_size")


@dataclass(frozen=True)
class LabelSettings:
    """What is labelled, and what is promised."""

    data: list[str]
    calibrate: list[str]
    split: str | None = None
    """Of folders and hub data sets of `data`; None: train."""
    calibrate_split: str | None = None
    """None: validation."""
    precision: float = 0.95
    certainty: float = 0.9
    normalization: str = "basic"
    keep_silence: bool = False
    tokenizer: str | None = None
    head: str | None = None
    language: str | None = None
    longest: float = 20.0
    batch_size: int = 16
    device: str | None = None
    max_failed: float = 0.05


def label(
    model: str,
    settings: LabelSettings,
    engine: EngineSettings,
    folder: Path,
    run: Callable[[Job, EngineSettings], Totals] = run_job,
) -> Summary | None:
    """Label audio into a folder; return its summary, None where other tasks of an array are still at work.

    A labelling that was cut short goes on. Another precision, certainty or normalisation transcribes nothing again,
    and other labelled clips only these.

    Raises:
        UserError: model or data cannot be used, the folder holds other things, or the precision cannot be promised.
    """
    s = settings
    check_output(folder, "labels")
    labelled = open_sources(s.calibrate, split_to_read(s.calibrate, s.calibrate_split, "validation"), "--calibrate")
    audio = open_audio_sources(s.data, s.split, folder)
    for source in [*labelled, *audio]:
        if s.language is not None and source.source.language is None:
            source.source = source.source.model_copy(update={"language": s.language})
    make = MakeLabeller(model, False, s.tokenizer, s.head, s.language, s.device, s.batch_size, s.longest)
    identity: dict[str, Any] = {k: v for k, v in vars(make).items() if k not in NOT_THE_RESULT}
    job = Job("pseudo_label", folder / "labels", identity, audio, make, clips_a_shard(audio), max_failed=s.max_failed)
    job.begin()  # another job is refused before anything is heard
    theirs = Job("pseudo_label", folder, identity, labelled, replace(make, labelled=True), max_failed=s.max_failed)
    digest = hashlib.blake2b(json.dumps(theirs.identity()).encode(), digest_size=4).hexdigest()
    theirs.directory = folder / f"calibration-{digest}"
    calibrated = None
    if run(theirs, engine).is_whole:  # what cannot be promised is said before hours of audio are heard
        calibrated = _calibrated(theirs, s)
    totals = run(job, engine)
    if calibrated is None and totals.is_whole and theirs.totals().is_whole:  # which other tasks have finished since
        calibrated = _calibrated(theirs, s)
    if calibrated is None or not totals.is_whole:
        log.info("%d of %d shards are done", totals.shards_done, totals.shards)
        return None
    heard, calibration = calibrated
    selection = select(job, heard, calibration, folder, s.keep_silence, totals)
    options = {k: v for k, v in asdict(s).items() if k not in ("precision", "certainty", "device")}
    summary = summarise(calibration, heard, selection, {"model": model, **options})
    with writing("--output", folder):
        write_json(folder / "summary.json", summary)
    return summary


def _calibrated(job: Job, s: LabelSettings) -> tuple[Heard, Calibration]:
    """Return what was heard in the labelled clips, and what the confidence is worth by them."""
    heard = read_labelled(job, s.normalization)
    return heard, calibrate(heard.labelled, s.precision, s.certainty)


def clips_a_shard(sources: list[OpenSource]) -> int | None:
    """Return how many rows make about `SHARD_SECONDS`, by the first ones of each source: what a kill costs at most;
    None where a shard of any job has less."""
    lengths = []
    for source in sources:
        for shard in source.shards[:1]:
            with contextlib.suppress(UnreadableShard):
                for _, row in itertools.islice(rows_from(shard, 0, RETRIES if source.remote else 0), LOOKED_AT):
                    with contextlib.suppress(BadUtterance):
                        lengths.append(length_of(source, row))
    mean = statistics.fmean(lengths) if lengths else 0.0
    return None if mean * MOST_CLIPS <= SHARD_SECONDS else max(1, round(SHARD_SECONDS / mean))


def check_output(folder: Path, ours: str) -> None:
    """Raise UserError for a directory that is not empty and not of such labels.

    Args:
        ours: what only they have in it.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--output: {folder} is no directory.")
    if (folder / ours).exists() or not folder.exists():
        return
    other = [p.name for p in folder.iterdir() if not p.name.startswith(".") and p.name != RECORDINGS]
    if other and not (folder / ours).exists():  # another task of an array may have begun by now
        raise UserError(f"--output: {folder} holds other things ({min(other)}). Name a new or an empty directory.")


def check_settings(settings: LabelSettings) -> None:
    """Raise UserError for numbers that mean nothing."""
    if not 0 < settings.precision < 1:
        raise UserError(f"--precision: {settings.precision:g} is no share between 0 and 1, such as 0.95.")
    if not 0.5 <= settings.certainty < 1:
        raise UserError(f"--certainty: {settings.certainty:g} is no probability from 0.5 to below 1, such as 0.9.")
    if not 1 <= settings.longest <= 120:
        raise UserError(f"--longest: {settings.longest:g} s: from 1 to 120 seconds are expected.")
