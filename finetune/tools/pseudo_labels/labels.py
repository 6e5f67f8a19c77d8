"""One labelling: the job over labelled clips and audio, the calibration, and what is kept."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from finetune.data.sources import split_to_read
from finetune.durable_files import write_json
from finetune.errors import UserError
from finetune.evaluation.dataset import open_sources
from finetune.models.nemo_archive import archive_of
from finetune.tools.jobs.engines import EngineSettings
from finetune.tools.jobs.job import Job
from finetune.tools.jobs.running import run_job
from finetune.tools.pseudo_labels.audio import open_audio_sources
from finetune.tools.pseudo_labels.calibration import calibrate
from finetune.tools.pseudo_labels.labelling import MakeLabeller
from finetune.tools.pseudo_labels.outputs import Summary, summarise
from finetune.tools.pseudo_labels.selection import read_labelled, select

log = logging.getLogger(__name__)


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


def label(model: str, settings: LabelSettings, engine: EngineSettings, folder: Path) -> Summary | None:
    """Label audio into a folder; return its summary, None where other tasks of an array are still at work.

    A labelling that was cut short goes on. Another precision, certainty or normalisation does not transcribe again.

    Raises:
        UserError: model or data cannot be used, or the precision cannot be promised.
    """
    s = settings
    labelled = open_sources(s.calibrate, split_to_read(s.calibrate, s.calibrate_split, "validation"), "--calibrate")
    audio = open_audio_sources(s.data, s.split, folder)
    for source in [*labelled, *audio]:
        if s.language is not None and source.source.language is None:
            source.source = source.source.model_copy(update={"language": s.language})
    shards = sum(len(source.shards) for source in labelled)
    make = MakeLabeller(model, shards, s.tokenizer, s.head, s.language, s.device, s.batch_size, s.longest)
    identity = {"model": model, "model_file": _version(model), **{k: v for k, v in vars(make).items() if k != "model"}}
    identity.pop("device")
    job = Job("pseudo_label", folder / "labels", identity, [*labelled, *audio], make, max_failed=s.max_failed)
    totals = run_job(job, engine)
    if not totals.is_whole:
        log.info(
            "%d of %d shards are done; the last --shard chooses among the labels", totals.shards_done, totals.shards
        )
        return None
    heard = read_labelled(job, s.normalization)
    calibration = calibrate(heard.labelled, s.precision, s.certainty)
    selection = select(job, shards, calibration, folder, s.keep_silence, totals)
    options = {k: v for k, v in asdict(s).items() if k not in ("precision", "certainty", "device")}
    summary = summarise(calibration, heard, selection, {"model": model, **options})
    write_json(folder / "summary.json", summary)
    return summary


def _version(model: str) -> list[Any] | None:
    """Return what tells a model's file from a later one of the same name; None where there is no such file."""
    archive = archive_of(Path(model))
    if archive is None or not archive.is_file():
        return None
    return [archive.stat().st_size, archive.stat().st_mtime_ns]


def check_settings(settings: LabelSettings) -> None:
    """Raise UserError for numbers that mean nothing."""
    if not 0 < settings.precision < 1:
        raise UserError(f"--precision: {settings.precision:g} is no share between 0 and 1, such as 0.95.")
    if not 0.5 <= settings.certainty < 1:
        raise UserError(f"--certainty: {settings.certainty:g} is no probability from 0.5 to below 1, such as 0.9.")
    if not 1 <= settings.longest <= 120:
        raise UserError(f"--longest: {settings.longest:g} s: from 1 to 120 seconds are expected.")
