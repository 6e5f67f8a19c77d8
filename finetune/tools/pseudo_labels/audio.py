"""The audio to label: data sources without texts, and files and folders of recordings."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import soundfile

from finetune.data.sources import OpenSource, Source, open_source, parse_sources, split_to_read
from finetune.durable_files import put_in_place
from finetune.errors import UserError
from finetune.paths import check_access
from finetune.security.safe_text import json_line
from finetune.tools.command_line import writing

log = logging.getLogger(__name__)

DATA_SUFFIXES = {".parquet", ".arrow", ".tar", ".json", ".jsonl", ".ndjson", ".csv"}
RECORDINGS = "recordings.jsonl"
ROUNDS = "rounds.json"
"""In a directory of rounds, each of which labels into a directory below it."""


def open_audio_sources(data: list[str], split: str | None, folder: Path) -> list[OpenSource]:
    """Open what is to be labelled; audio files are listed in `folder`/recordings.jsonl, which stands for them.

    Raises:
        UserError: something is missing or holds no audio, or the folder is of other recordings.
    """
    files: list[str] = []
    others: list[str] = []
    output = folder.parent if (folder.parent / ROUNDS).is_file() else folder
    for name in data:
        check_access(name, "--data")
        found = recordings_of(name, output)
        files += found
        others += [] if found else [name]
    if split is not None and not others:
        raise UserError(f"--split {split} has no effect on audio files. Leave it out.")
    sources = []
    if others:
        named = split_to_read(others, split, "train")
        sources = [open_source(s, "--data", needs_text=False) for s in parse_sources(others, "--data", named)]
    if files:
        listed = folder / RECORDINGS
        text = "".join(json_line({"audio_filepath": file}) + "\n" for file in files)
        with writing("--output", folder):
            if not listed.is_file():
                folder.mkdir(parents=True, exist_ok=True)
                aside = folder / f".{RECORDINGS}.{os.getpid()}.tmp"
                aside.write_text(text, encoding="utf-8")
                os.utime(aside, (0, 0))  # the same file for the job, whichever task of an array writes it last
                put_in_place(aside, listed)
        if listed.read_text(encoding="utf-8") != text:
            raise UserError(
                f"--output: {folder} holds labels of other recordings than --data has. Name another directory, and "
                "give it the new recordings only."
            )
        sources.append(open_source(Source(path=str(listed)), "--data", needs_text=False))
    return sources


def recordings_of(name: str, output: Path) -> list[str]:
    """Return the absolute paths of audio files that a name stands for, sorted: the file, or all below a folder that
    holds no shards, manifests or tables; none for a data source. Hidden files, such as macOS's ._a.wav, and what this
    command leaves in `output` do not count."""
    suffixes = {f".{kind.lower()}" for kind in soundfile.available_formats()} | {".opus", ".aif"}
    path = Path(name)
    if path.is_file():
        return [str(path.absolute())] if path.suffix.lower() in suffixes else []
    found: list[str] = []
    for folder, folders, files in os.walk(path):
        folders[:] = sorted(
            below for below in folders if below[0] != "." and Path(folder, below).resolve() != output.resolve()
        )
        shown = sorted(file for file in files if file[0] != ".")
        found += [os.path.abspath(os.path.join(folder, f)) for f in shown if Path(f).suffix.lower() in suffixes]
        table = next((os.path.join(folder, f) for f in shown if Path(f).suffix.lower() in DATA_SUFFIXES), None)
        if table is not None:
            if found:
                log.info("--data: %s is a data source and no folder of recordings, since it holds %s", name, table)
            return []
    return found
