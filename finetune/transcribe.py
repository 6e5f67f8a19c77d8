"""Transcribes audio files of any length; one JSON line a file.

    python -m finetune.transcribe --model M FILES... [--timestamps]
    python -m finetune.transcribe --model M FILES... --format srt,vtt --output subtitles
    find talks -name '*.wav' | python -m finetune.transcribe --model M -

M: a .nemo file, a run's output directory, a Hugging Face directory, a hub name, or a NeMo model YAML. Files: whatever soundfile reads
(WAV, FLAC, MP3, Ogg), any sample rate, any number of channels. `-` reads paths from standard input, one a line.

Audio is read block by block and decoded in chunks that overlap, so that hours take no more memory than minutes.
"""

import argparse
import json
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from finetune.data.audio_blocks import read_blocks
from finetune.data.quarantine import BadUtterance
from finetune.errors import UserError
from finetune.evaluation.long_audio import CHUNK_SECONDS, OVERLAP_SECONDS, Chunk, Cutting, Pieces, Stitcher, chunks_of
from finetune.evaluation.recognise import evaluation_mode, frame_seconds, recognise_chunks, text_of
from finetune.logs import print_error, set_up_logging
from finetune.models.loading import load_model, move_to_device
from finetune.security.safe_text import json_line, one_line
from finetune.strategies.attention import use_local_attention
from finetune.tools.transcription.subtitles import cues_of, srt, vtt
from finetune.tools.transcription.words import enable_timestamps, segments_of, words_of

FORMATS = ("json", "srt", "vtt", "txt")


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m finetune.transcribe", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("files", nargs="+", metavar="FILE", help="audio files, or - for a list on standard input")
    parser.add_argument(
        "--timestamps", action="store_true", help="add words and segments: start and end in seconds, and a confidence"
    )
    parser.add_argument(
        "--format",
        default="json",
        metavar="F[,F]",
        help="json, srt, vtt, txt: files to write into --output, one for each input (default: json)",
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help="directory for the files of --format")
    parser.add_argument(
        "--chunk",
        "--longest",
        type=float,
        metavar="SECONDS",
        help=f"longest stretch that is decoded at once (default: {CHUNK_SECONDS:g}; with --attention local the whole file)",
    )
    parser.add_argument(
        "--overlap",
        type=float,
        metavar="SECONDS",
        help=f"what two chunks share (default: {OVERLAP_SECONDS:g}, of short chunks a quarter); 0 cuts at silence only",
    )
    parser.add_argument(
        "--attention",
        default="full",
        choices=("full", "local"),
        help="local: each frame sees --context frames on either side, so that a whole file can be decoded at once",
    )
    parser.add_argument(
        "--context", type=int, default=256, metavar="FRAMES", help="of --attention local (default: 256)"
    )
    parser.add_argument("--batch-size", type=int, default=8, help="chunks, of one file or several, decoded together")
    parser.add_argument("--tokenizer", help="tokenizer directory, for a NeMo model YAML")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args(argv)
    if arguments.chunk is None and arguments.attention == "full":
        arguments.chunk = CHUNK_SECONDS
    arguments.format = tuple(arguments.format.split(","))
    if unknown := [f for f in arguments.format if f not in FORMATS]:
        parser.error(f"--format: there is no {unknown[0]!r}; choose from {', '.join(FORMATS)}")
    if arguments.output is None and arguments.format != ("json",):
        parser.error(f"--format {','.join(arguments.format)} writes files: name their directory with --output")
    if arguments.batch_size < 1:
        parser.error("--batch-size has to be 1 or more")
    if arguments.chunk is not None and not 1 <= arguments.chunk < float("inf"):
        parser.error("--chunk has to be 1 second or more")
    overlap = arguments.overlap or 0.0
    if not 0 <= overlap < float("inf"):
        parser.error("--overlap has to be 0 seconds or more")
    if arguments.chunk is not None and arguments.chunk <= 2 * overlap:
        parser.error(f"--chunk has to be more than twice --overlap ({overlap:g} s)")
    if arguments.context < 1:
        parser.error("--context has to be 1 frame or more")
    return arguments


@dataclass
class Transcript:
    """One file on its way."""

    file: str
    stitcher: Stitcher
    samples: int = 0
    pending: int = 0
    """Chunks that wait to be recognised."""
    error: str | None = None
    read: bool = False

    @property
    def done(self) -> bool:
        return self.read and self.pending == 0


def transcribe_files(
    model: Any, files: list[str], cutting: Cutting, *, batch_size: int, timestamps: bool
) -> Iterator[dict[str, Any]]:
    """Rows of files in their order; call inside `evaluation_mode`.

    Chunks of several files are decoded together, so that many short files take as few steps as one long one.

    Args:
        cutting: how files become chunks.
        batch_size: chunks decoded together; besides them one chunk and one block of audio are held.
        timestamps: rows have words and segments.

    Yields:
        file, duration in seconds, text, and on demand words and segments. For a file that cannot be read: file and error; and
        duration and text of what was recognised before the fault, where that was anything.
    """
    pieces, waiting = Pieces(model.tokenizer), deque()
    batch: list[tuple[Transcript, Chunk]] = []

    def recognise() -> None:
        for (transcript, chunk), tokens in zip(
            batch, recognise_chunks(model, [c for _, c in batch], pieces), strict=True
        ):
            transcript.stitcher.add(chunk, tokens)
            transcript.pending -= 1
        batch.clear()

    for file in files:
        transcript = Transcript(file, Stitcher(cutting))
        waiting.append(transcript)
        try:
            for chunk in chunks_of(_counted(transcript, read_blocks(file, model.preprocessor._sample_rate)), cutting):
                batch.append((transcript, chunk))
                transcript.pending += 1
                if len(batch) == batch_size:
                    recognise()
        except BadUtterance as reason:
            transcript.error = str(reason)
        transcript.read = True
        while waiting and waiting[0].done:
            yield row_of(model, waiting.popleft(), timestamps)
    if batch:
        recognise()
    for transcript in waiting:
        yield row_of(model, transcript, timestamps)


def _counted(transcript: Transcript, blocks: Iterator[Any]) -> Iterator[Any]:
    for block_S in blocks:
        transcript.samples += len(block_S)
        yield block_S


def row_of(model: Any, transcript: Transcript, timestamps: bool) -> dict[str, Any]:
    """What is said of one file."""
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
    """Where the results of each file go: DIR/NAME.FORMAT.

    Raises:
        UserError: two inputs would be written to one file.
    """
    taken: dict[str, str] = {}
    for file in files:
        stem = Path(file).stem
        if taken.setdefault(stem, file) != file:
            raise UserError(
                f"--output: {taken[stem]} and {file} would both be written to {folder / stem}.{formats[0]}; "
                "call once for each directory of files."
            )
    return {file: {f: folder / f"{Path(file).stem}.{f}" for f in formats} for file in files}


def write_formats(row: dict[str, Any], paths: dict[str, Path], timestamps: bool) -> None:
    """Writes what `--format` asks for."""
    if not timestamps:
        shown = {k: v for k, v in row.items() if k not in ("words", "segments")}
    else:
        shown = row
    for kind, path in paths.items():
        if kind == "json":
            text = json.dumps(shown, ensure_ascii=False, indent=1) + "\n"
        elif kind == "txt":
            text = "".join(segment["text"] + "\n" for segment in row["segments"])
        else:
            text = (srt if kind == "srt" else vtt)(cues_of(row["words"]))
        path.write_text(text, encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    """Transcribes; 0 when every file could be read, else 1."""
    set_up_logging()
    arguments = parse_arguments(argv)
    files: list[str] = []
    for name in arguments.files:
        files += [line.strip() for line in sys.stdin if line.strip()] if name == "-" else [name]
    timed = arguments.timestamps or any(f != "json" for f in arguments.format)
    try:
        paths = output_files(files, arguments.output, arguments.format) if arguments.output else {}
        if arguments.output:
            arguments.output.mkdir(parents=True, exist_ok=True)
        model = move_to_device(load_model(arguments.model, arguments.tokenizer), arguments.device)
        if arguments.attention == "local":
            use_local_attention(model, arguments.context)
    except UserError as error:
        print_error(error)
        return error.exit_code
    if timed:
        enable_timestamps(model)
    cutting = Cutting.of_seconds(
        model.preprocessor._sample_rate, frame_seconds(model), arguments.chunk, arguments.overlap
    )
    failed = 0
    rows = transcribe_files(model, files, cutting, batch_size=arguments.batch_size, timestamps=timed)
    with evaluation_mode(model):
        for row in tqdm(rows, total=len(files), unit="file", disable=len(files) == 1, delay=2):
            if "error" in row:
                failed += 1
                print_error(f"{one_line(row['file'])}: {one_line(row['error'])}")
            elif arguments.output:
                write_formats(row, paths[row["file"]], arguments.timestamps)
            if not arguments.timestamps:
                row.pop("words", None), row.pop("segments", None)
            print(json_line(row), flush=True)
    if failed:
        print(f"{failed} of {len(files)} file(s) could not be transcribed", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
