"""Many recordings, each with its text: a job with a directory for each of them, and their clips together.

DIR/recordings/FILE/   what `segment_recording` leaves of the recording FILE
DIR/manifest.jsonl, left_out.jsonl, failed.jsonl, summary.json   of all of them
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from finetune.data.augment import AUDIO_SUFFIXES
from finetune.data.sources import Source, open_source
from finetune.durable_files import aside_of, put_in_place, write_json
from finetune.errors import UserError
from finetune.security.safe_text import json_line
from finetune.tools.jobs.job import Job, stamp, write_failed
from finetune.tools.jobs.running import run_job
from finetune.tools.segmentation.output import name_in_ids, open_job, remove_results, sum_of
from finetune.tools.segmentation.recording import (
    SegmentSettings,
    load_segmenter,
    open_recording,
    opened,
    segment_recording,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from finetune.tools.jobs.clips import Clips
    from finetune.tools.jobs.engines import EngineSettings
    from finetune.tools.jobs.job import Totals
    from finetune.tools.jobs.work import Result

log = logging.getLogger("finetune.segment")

TEXT_SUFFIXES = (".txt", ".srt", ".vtt")
SHOWN = 3
Pair = tuple[Path, Path, Path]
"""The folder of a recording, the recording in it, and its text."""


def pairs_in(audio: Path, text: Path) -> dict[str, Pair]:
    """Return recordings and their texts by name: the path below the folder, without its suffix.

    Raises:
        UserError: no recording, a recording without a text, two files of one name, or two recordings whose clips
            would have the same ids.
    """
    recordings, texts = _by_name(audio, AUDIO_SUFFIXES, "--audio"), _by_name(text, TEXT_SUFFIXES, "--text")
    if not recordings:
        raise UserError(f"--audio: {audio} holds no recording ({', '.join(AUDIO_SUFFIXES)}).")
    if bare := sorted(recordings.keys() - texts.keys()):
        shown = ", ".join(str(recordings[name]) for name in bare[:SHOWN])
        raise UserError(
            f"--text: {text} has no text for {len(bare):,} of {len(recordings):,} recordings, such as {shown}. The "
            "text of talks/a.flac is talks/a.txt, .srt or .vtt."
        )
    by_id: dict[str, str] = {}
    for name in recordings:
        if (other := by_id.setdefault(name_in_ids(name), name)) != name:
            raise UserError(
                f"--audio: the clips of {recordings[other]} and {recordings[name]} would have the same ids, "
                f"{name_in_ids(name)}-000000 and so on. Rename one of the recordings, and its text."
            )
    if unused := len(texts.keys() - recordings.keys()):
        log.warning("--text: %d of %d texts have no recording in %s", unused, len(texts), audio)
    return {name: (audio, recordings[name], texts[name]) for name in sorted(recordings)}


def _by_name(folder: Path, suffixes: tuple[str, ...], option: str) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() in suffixes and not path.name.startswith(".") and path.is_file():
            name = path.relative_to(folder).with_suffix("").as_posix()
            if name in found:
                raise UserError(f"{option}: {found[name]} and {path} have one name. Keep one of them in {folder}.")
            found[name] = path
    return found


@dataclass(frozen=True)
class MakeSegmenter:
    """Loads the model in the worker's process. Without a device it is the GPU, where the worker has one."""

    settings: SegmentSettings
    folder: Path
    device: str | None

    def __call__(self) -> Segmenter:
        return Segmenter(self)


class Segmenter:
    """Cuts the recordings that it gets; one that cannot be cut is noted with its reason."""

    def __init__(self, made_of: MakeSegmenter):
        self.settings, self.folder = made_of.settings, made_of.folder
        device = made_of.device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.model = load_segmenter(self.settings, device)

    def process(self, clips: Clips) -> Iterator[Result]:
        for _, place, _, row in clips.rows():
            folder = self.folder / "recordings" / row["folder"]
            try:
                recording = open_recording(Path(row["audio_filepath"]), Path(row["text"]), row["id"])
                with opened(folder, recording, self.settings, renew=True):
                    summary = segment_recording(self.model, folder, recording, self.settings)
            except UserError as error:
                clips.fail("bad", place, str(error))
            else:
                own = {"id": row["id"], "folder": row["folder"], "source": place}
                yield {**own, "duration": recording.seconds, "summary": summary}


def segment_recordings(
    pairs: dict[str, Pair],
    folder: Path,
    s: SegmentSettings,
    engine: EngineSettings,
    *,
    device: str | None,
    max_failed: float,
) -> tuple[dict[str, Any] | None, Totals]:
    """Cut all recordings into the directory; return the sum of their summaries and what the job counted.

    A start that finds earlier work goes on with it; other thresholds, other texts and more recordings are taken up.

    Returns:
        None for the sum where other processes (`engine.part`) are still at work.

    Raises:
        UserError: the directory holds another job, a model cannot be loaded, or too many recordings fail.
    """
    open_job(folder, {"command": "segment", "of": "recordings", **s.fixed()})
    work = _listed(pairs, folder, s)
    job = Job(
        command="segment",
        directory=work.with_suffix(""),
        settings=vars(s),
        sources=[open_source(Source(path=str(work)), "--audio")],
        make_worker=MakeSegmenter(s, folder.resolve(), device),
        clips_a_shard=1,
        max_failed=max_failed,
    )
    totals = run_job(job, engine)
    if not totals.is_whole:
        return None, totals
    results = list(job.results())
    folders = {result["id"]: folder / "recordings" / result["folder"] for result in results}
    _leave_only(folder / "recordings", set(folders.values()))
    _together(folder / "manifest.jsonl", folders, lambda name, row: row)
    _together(folder / "left_out.jsonl", folders, lambda name, row: {"recording": name, **row})
    write_failed(totals, folder / "failed.jsonl")
    total = sum_of([result["summary"] for result in results])
    by_name = {result["id"]: result["summary"] for result in results}
    write_json(folder / "summary.json", {**total, "failed": len(totals.failed), "recordings": by_name})
    if engine.part == (0, 1):
        for old in folder.glob(".work-*"):  # this start's, and those of starts with other texts that were given up
            old.unlink() if old.is_file() else shutil.rmtree(old)
    return total, totals


def _listed(pairs: dict[str, Pair], folder: Path, s: SegmentSettings) -> Path:
    """Write the recordings as a manifest whose name says what it holds and how they are cut: with another text or
    threshold all of them are gone through again, which takes seconds where a recording was heard already."""
    lines = [
        {
            "id": name,
            "folder": audio.relative_to(root).as_posix(),
            "audio_filepath": str(audio.resolve()),
            "text": str(text.resolve()),
            "stamps": [stamp(audio), stamp(text)],
        }
        for name, (root, audio, text) in pairs.items()
    ]
    content = "".join(json_line(line) + "\n" for line in lines)
    digest = hashlib.blake2b((content + repr(s)).encode(), digest_size=4).hexdigest()
    path = folder / f".work-{digest}.jsonl"
    aside = aside_of(path)
    aside.write_text(content, encoding="utf-8")
    os.utime(aside, (0, 0))  # a part of the job's identity, and several tasks of an array may write it
    put_in_place(aside, path)
    return path


def _leave_only(folder: Path, wanted: set[Path]) -> None:
    """Take away the clips of recordings that are there no more, or can be cut no more, lest a training by a glob of
    shards takes them; what was heard in them stays."""
    others = [file.parent for file in folder.rglob("job.json") if file.is_file() and file.parent not in wanted]
    if removed := [path.relative_to(folder).as_posix() for path in sorted(others) if remove_results(path)]:
        log.warning(
            "the clips of %d recordings of earlier starts, such as %s, are none of this result and are taken away; "
            "what was heard in them stays", len(removed), removed[0],
        )  # fmt: skip


def _together(file: Path, folders: dict[str, Path], change: Callable[[str, dict[str, Any]], dict[str, Any]]) -> None:
    """Write the rows of all recordings into one file, whole or not at all."""
    aside = aside_of(file)
    with aside.open("w", encoding="utf-8") as written:
        for name, folder in folders.items():
            with (folder / file.name).open(encoding="utf-8") as lines:
                written.writelines(json_line(change(name, json.loads(line))) + "\n" for line in lines)
    put_in_place(aside, file)
