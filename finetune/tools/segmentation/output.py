"""Files of a job: its settings, the manifest, the shards of audio, what was left out, and the summary. S samples."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import tarfile
from typing import TYPE_CHECKING, Any

import numpy as np
import soundfile

from finetune.data.audio_blocks import read_blocks
from finetune.data.language_prompts import AUTO
from finetune.durable_files import write_json, write_text
from finetune.errors import UserError
from finetune.security.safe_text import json_line
from finetune.tools.segmentation.clips import NOT_READ, REASONS
from finetune.tools.segmentation.texts import joined

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from finetune.tools.segmentation.clips import Clip, Result
    from finetune.tools.segmentation.texts import Word

CLIPS_PER_SHARD = 1000
ROWS_PER_GROUP = 50
CONTENT = ("model_files", "text_sha256", "audio_time")
"""Settings whose values say nothing to people."""


def open_job(folder: Path, settings: dict[str, Any]) -> None:
    """Make the folder of a job, or take up the same job in it.

    Raises:
        UserError: the folder holds another job, or other files.
    """
    try:
        if before := settings_in(folder):
            differing = [
                key if key in CONTENT else f"{key} ({before.get(key)!r}, now {settings.get(key)!r})"
                for key in keys_differing(before, settings)
            ]
            if differing:
                raise UserError(
                    f"--output: {folder} holds another job: it differs in {', '.join(differing)}. Choose another "
                    "directory."
                )
            return
        if folder.exists() and any(not p.name.startswith(".") for p in folder.iterdir()):
            raise UserError(f"--output: {folder} holds files that are not of this command. Choose another directory.")
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "job.json", settings)
    except OSError as error:
        raise UserError(f"--output: {folder} cannot be used: {error}", exit_code=1) from error


def settings_in(folder: Path) -> dict[str, Any]:
    """Return the settings of a folder's job; none where it has no job.

    Raises:
        UserError: its job.json cannot be read.
    """
    try:
        path = folder / "job.json"
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"--output: {folder} cannot be used: {error}", exit_code=1) from error


def keys_differing(before: dict[str, Any], settings: dict[str, Any]) -> list[str]:
    """Return in which settings two jobs differ; both ways."""
    return [key for key in {**settings, **before} if before.get(key) != settings.get(key)]


def remove_results(folder: Path) -> bool:
    """Take away what became of a recording, but for what was heard in it; return whether there was a manifest."""
    for name in ("shards", "shards.tmp"):
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in ("judged.jsonl", "left_out.jsonl", "summary.json"):
        (folder / name).unlink(missing_ok=True)
    manifest = folder / "manifest.jsonl"
    was_there = manifest.exists()
    manifest.unlink(missing_ok=True)
    return was_there


def name_in_ids(recording: str) -> str:
    """Return what the ids of a recording's clips begin with, which are names of files in shards too."""
    return re.sub(r"\W+", "-", recording)


def rows_of(
    clips: list[Clip], name: str, text: list[Word], audio: Path, rate: int, language: str | None = None
) -> list[dict[str, Any]]:
    """Return the lines of the manifest, each with a part of the recording; ids are made of the recording's name."""
    name = name_in_ids(name)
    spoken = {} if language in (None, AUTO) else {"lang": language}
    return [
        {
            "audio_filepath": str(audio),
            "offset": round(clip.start / rate, 4),
            "duration": round((clip.behind - clip.start) / rate, 4),
            "text": joined(text[clip.first : clip.end]),
            "id": f"{name}-{number:06d}",
            **spoken,
            "confidence": round(clip.confidence, 4),
            "lowest_confidence": round(clip.lowest, 4),
            "line": text[clip.first].line,
        }
        for number, clip in enumerate(clips)
    ]


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write JSON lines, whole or not at all."""
    write_text(path, "".join(json_line(row) + "\n" for row in rows))


def write_shards(
    folder: Path, kind: str | None, audio: str, rate: int, clips: list[Clip], rows: list[dict[str, Any]]
) -> None:
    """Write the clips' audio as FLAC into FOLDER/shards, as tar files of .flac and .txt, or as parquet; None takes
    away those of an earlier start."""
    aside, final = folder / "shards.tmp", folder / "shards"
    for old in (aside, final):
        shutil.rmtree(old, ignore_errors=True)
    if kind is None or not rows:
        return
    aside.mkdir()
    sounds = cut(read_blocks(audio, rate), [(clip.start, clip.behind) for clip in clips])
    count = -(-len(clips) // CLIPS_PER_SHARD)
    for shard in range(count):
        own = rows[shard * CLIPS_PER_SHARD : (shard + 1) * CLIPS_PER_SHARD]
        path = aside / f"train-{shard:05d}-of-{count:05d}.{kind}"
        (_write_tar if kind == "tar" else _write_parquet)(path, own, sounds, rate)
    os.replace(aside, final)


def cut(blocks: Iterable[np.ndarray], places: list[tuple[int, int]]) -> Iterator[np.ndarray]:
    """Yield the samples of places in order that do not overlap, holding one of them and one block."""
    held_S, origin = np.zeros(0, dtype=np.float32), 0
    blocks = iter(blocks)
    for start, end in places:
        while origin + len(held_S) < end and (block_S := next(blocks, None)) is not None:
            skipped = min(max(start - origin, 0), len(held_S))
            held_S, origin = np.concatenate([held_S[skipped:], block_S]), origin + skipped
        yield held_S[start - origin : end - origin]


def _flac(samples_S: np.ndarray, rate: int) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples_S, rate, format="FLAC", subtype="PCM_16")
    return file.getvalue()


def _write_tar(path: Path, rows: list[dict[str, Any]], sounds: Iterator[np.ndarray], rate: int) -> None:
    with tarfile.open(path, "w") as archive:
        for row in rows:
            for suffix, content in (("flac", _flac(next(sounds), rate)), ("txt", row["text"].encode())):
                member = tarfile.TarInfo(f"{row['id']}.{suffix}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


def _write_parquet(path: Path, rows: list[dict[str, Any]], sounds: Iterator[np.ndarray], rate: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    audio = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    columns = [("id", pa.string()), ("audio", audio), ("text", pa.string())]
    columns += [("lang", pa.string())] if "lang" in rows[0] else []
    numbers = [(name, pa.float64()) for name in ("duration", "offset", "confidence", "lowest_confidence")]
    schema = pa.schema([*columns, *numbers])
    with pq.ParquetWriter(path, schema) as writer:
        for first in range(0, len(rows), ROWS_PER_GROUP):
            group = [
                {**row, "audio": {"bytes": _flac(next(sounds), rate), "path": f"{row['id']}.flac"}}
                for row in rows[first : first + ROWS_PER_GROUP]
            ]
            table = [{name: row[name] for name in schema.names} for row in group]
            writer.write_table(pa.Table.from_pylist(table, schema=schema))


def summary_of(result: Result, text: list[Word], duration: float, rate: int) -> dict[str, Any]:
    """Return what became of the recording and of the text."""
    seconds = [(clip.behind - clip.start) / rate for clip in result.clips]
    words = sum(clip.end - clip.first for clip in result.clips)
    return {
        "recording_minutes": duration / 60,
        "clips": len(seconds),
        "clip_minutes": sum(seconds) / 60,
        "mean_clip_seconds": sum(seconds) / len(seconds) if seconds else None,
        "confidence": sum(c.confidence * (c.end - c.first) for c in result.clips) / words if words else None,
        "text_words": len(text),
        "clip_words": words,
        "left_out_minutes": {reason: result.seconds[reason] / 60 for reason in REASONS},
        "left_out_words": {reason: result.words[reason] for reason in (*REASONS, NOT_READ)},
    }


def sum_of(summaries: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the summary of several recordings together."""

    def total(key: str) -> float:
        return sum(summary[key] for summary in summaries)

    def by_reason(key: str) -> dict[str, float]:
        reasons = summaries[0][key] if summaries else {}
        return {reason: sum(summary[key][reason] for summary in summaries) for reason in reasons}

    clips, words = total("clips"), total("clip_words")
    confident = sum((s["confidence"] or 0) * s["clip_words"] for s in summaries)
    return {
        "recording_minutes": total("recording_minutes"),
        "clips": clips,
        "clip_minutes": total("clip_minutes"),
        "mean_clip_seconds": 60 * total("clip_minutes") / clips if clips else None,
        "confidence": confident / words if words else None,
        "text_words": total("text_words"),
        "clip_words": words,
        "left_out_minutes": by_reason("left_out_minutes"),
        "left_out_words": by_reason("left_out_words"),
        "seconds": total("seconds"),
    }


def table(summary: dict[str, Any]) -> str:
    """Format a summary."""
    pauses = summary["recording_minutes"] - summary["clip_minutes"] - sum(summary["left_out_minutes"].values())
    rows = [("", "minutes", "words"), (f"{summary['clips']:,} clips", summary["clip_minutes"], summary["clip_words"])]
    for reason, words in summary["left_out_words"].items():
        minutes = summary["left_out_minutes"].get(reason, 0.0)
        if minutes or words:
            rows.append((reason, minutes, words))
    rows += [("pauses", pauses, 0), ("in all", summary["recording_minutes"], summary["text_words"])]
    width = max(len(row[0]) for row in rows)
    lines = [f"{rows[0][0]:<{width}}  {rows[0][1]:>9}  {rows[0][2]:>9}"]
    return "\n".join(lines + [f"{name:<{width}}  {minutes:9.1f}  {words:9,}" for name, minutes, words in rows[1:]])
