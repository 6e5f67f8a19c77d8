"""Transcribe files of any length, several at a time, and write the results in the formats of `--format`."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.data.audio_blocks import read_blocks
from finetune.data.quarantine import BadUtterance
from finetune.errors import UserError
from finetune.evaluation.long_audio import Chunk, Cutting, Pieces, Stitcher, chunks_of
from finetune.evaluation.recognise import frame_seconds, recognise_chunks, text_of
from finetune.tools.transcription.subtitles import cues_of, srt, vtt
from finetune.tools.transcription.words import segments_of, words_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np

    from finetune.models.protocols import AsrModel


@dataclass
class Transcript:
    """A file in progress."""

    file: str
    stitcher: Stitcher
    samples: int = 0
    pending: int = 0
    """Chunks that are not recognised yet."""
    error: str | None = None

    def blocks(self, sample_rate: int) -> Iterator[np.ndarray]:
        """Read the file block by block, counting samples."""
        for block_S in read_blocks(self.file, sample_rate):
            self.samples += len(block_S)
            yield block_S


def transcribe_files(
    model: AsrModel,
    files: list[str],
    cutting: Cutting,
    *,
    batch_size: int,
    timestamps: bool,
    language: str | None = None,
) -> Iterator[dict[str, Any]]:
    """Transcribe files; call inside `evaluation_mode`.

    Chunks of several files are decoded together, so that many short files take as few steps as one long one.

    Args:
        cutting: how files become chunks.
        batch_size: chunks decoded together; one more chunk and one block of audio are held.
        timestamps: rows have words and segments.
        language: for the prompt of a prompt model; None: `auto`.

    Yields:
        One row a file, in their order: file, duration in seconds, text, and on demand words and segments. For a file
            that cannot be read: file and error, and duration and text of what was recognised before the error.
    """
    pieces, rate = Pieces(model.tokenizer), model.preprocessor._sample_rate
    waiting: deque[Transcript] = deque()
    batch: list[tuple[Transcript, Chunk]] = []

    def recognise() -> None:
        found = recognise_chunks(model, [chunk for _, chunk in batch], pieces, language)
        for (transcript, chunk), tokens in zip(batch, found, strict=True):
            transcript.stitcher.add(chunk, tokens)
            transcript.pending -= 1
        batch.clear()

    for file in files:
        transcript = Transcript(file, Stitcher(cutting))
        waiting.append(transcript)
        try:
            for chunk in chunks_of(transcript.blocks(rate), cutting):
                batch.append((transcript, chunk))
                transcript.pending += 1
                if len(batch) == batch_size:
                    recognise()
        except BadUtterance as reason:
            transcript.error = str(reason)
        while waiting and not waiting[0].pending:
            yield row_of(model, waiting.popleft(), timestamps)
    if batch:
        recognise()
    for transcript in waiting:
        yield row_of(model, transcript, timestamps)


def row_of(model: AsrModel, transcript: Transcript, timestamps: bool) -> dict[str, Any]:
    """Return the row of a file, as `transcribe_files` yields it."""
    tokens, duration = transcript.stitcher.tokens, transcript.samples / model.preprocessor._sample_rate
    row: dict[str, Any] = {"file": transcript.file}
    if transcript.error is not None:
        row["error"] = transcript.error
        if not tokens:
            return row
    row.update(duration=round(duration, 3), text=text_of(model, tokens))
    if timestamps:
        row["words"] = words_of(model, tokens, frame_seconds(model), duration)
        row["segments"] = segments_of(row["words"])
    return row


def output_files(files: list[str], folder: Path, formats: tuple[str, ...]) -> dict[str, dict[str, Path]]:
    """Name the results of each file, FOLDER/NAME.FORMAT, and make the folder."""
    files_by_stem: dict[str, str] = {}
    for file in files:
        stem = Path(file).stem
        if files_by_stem.setdefault(stem, file) != file:
            raise UserError(
                f"--output: {files_by_stem[stem]} and {file} would both be written to {folder / stem}.{formats[0]}; "
                "call once for each directory of files."
            )
    folder.mkdir(parents=True, exist_ok=True)
    return {file: {f: folder / f"{Path(file).stem}.{f}" for f in formats} for file in files}


def write_formats(row: dict[str, Any], shown: dict[str, Any], paths: dict[str, Path]) -> None:
    """Write the result of one file in each format; JSON has the part that is shown."""
    for kind, path in paths.items():
        if kind == "json":
            text = json.dumps(shown, ensure_ascii=False, indent=1) + "\n"
        elif kind == "txt":
            text = "".join(segment["text"] + "\n" for segment in row["segments"])
        else:
            text = (srt if kind == "srt" else vtt)(cues_of(row["words"]))
        path.write_text(text, encoding="utf-8")
