"""Transcribe audio files of any length; one JSON line a file.

    python -m finetune.transcribe --model M FILES... [--timestamps]
    python -m finetune.transcribe --model M FILES... --format srt,vtt --output subtitles
    find talks -name '*.wav' | python -m finetune.transcribe --model M -

Files: whatever soundfile reads (WAV, FLAC, MP3, Ogg), any sample rate, any number of channels. `-` reads paths from
standard input, one a line. Audio is read block by block and decoded in chunks that overlap, so that hours take no more
memory than minutes.
"""

import argparse
import sys
from pathlib import Path

from finetune.errors import UserError
from finetune.evaluation.long_audio import CHUNK_SECONDS, OVERLAP_SECONDS
from finetune.logs import print_error, set_up_logging
from finetune.tools.command_line import (
    add_decoding,
    add_head,
    add_language,
    add_model,
    command,
    device_of,
    positive,
)

FORMATS = ("json", "srt", "vtt", "txt")
EXAMPLE = "python -m finetune.transcribe --model runs/quickstart talk.mp3 --format srt --output subtitles"


def make_parser() -> argparse.ArgumentParser:
    parser = command("transcribe", __doc__ or "", EXAMPLE)
    add_model(parser, required=True)
    add = parser.add_argument
    add("files", nargs="+", metavar="FILE", help="audio files, or - for a list on standard input")
    add("--timestamps", action="store_true", help="add words and segments: start and end in seconds, and a confidence")
    kinds = f"{', '.join(FORMATS)}: files to write into --output, one for each input (default: json)"
    add("--format", default="json", metavar="F[,F]", help=kinds)
    instead = "directory for the files of --format, instead of JSON lines on stdout"
    add("--output", type=Path, metavar="DIR", help=instead)
    longest = f"longest stretch decoded at once (default: {CHUNK_SECONDS:g}; with --attention local the whole file)"
    add("--chunk", "--longest", type=float, metavar="SECONDS", help=longest)
    overlap = f"of two chunks (default: {OVERLAP_SECONDS:g}, a quarter of short chunks); 0 cuts at silence only"
    add("--overlap", type=float, metavar="SECONDS", help=overlap)
    local = "local: each frame sees --context frames on either side, so that a whole file can be decoded at once"
    add("--attention", default="full", choices=("full", "local"), help=local)
    add("--context", type=positive, default=256, metavar="FRAMES", help="of --attention local (default: 256)")
    add_decoding(parser, 8, "chunks of one file or several")
    add_head(parser)
    add_language(parser, "auto")
    return parser


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if arguments.chunk is None and arguments.attention == "full":
        arguments.chunk = CHUNK_SECONDS
    arguments.format = tuple(arguments.format.split(","))
    if unknown := [f for f in arguments.format if f not in FORMATS]:
        parser.error(f"--format: there is no {unknown[0]!r}; choose from {', '.join(FORMATS)}")
    if arguments.output is None and arguments.format != ("json",):
        parser.error(f"--format {','.join(arguments.format)} writes files: name their directory with --output")
    if arguments.chunk is not None and not 1 <= arguments.chunk < float("inf"):
        parser.error("--chunk has to be 1 second or more")
    overlap = arguments.overlap or 0.0
    if not 0 <= overlap < float("inf"):
        parser.error("--overlap has to be 0 seconds or more")
    if arguments.chunk is not None and arguments.chunk <= 2 * overlap:
        parser.error(f"--chunk has to be more than twice --overlap ({overlap:g} s)")
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Transcribe; return 0 if every file could be read, else 1."""
    arguments = parse_arguments(argv)
    set_up_logging(arguments.verbose)
    files: list[str] = []
    for name in arguments.files:
        files += [line.strip() for line in sys.stdin if line.strip()] if name == "-" else [name]
    try:
        failed = transcribe(arguments, files)
    except UserError as error:
        print_error(error)
        return error.exit_code
    if failed:
        print(f"{failed} of {len(files)} file(s) could not be transcribed", file=sys.stderr)
    return 1 if failed else 0


def transcribe(arguments: argparse.Namespace, files: list[str]) -> int:
    """Transcribe files and print or write the results; return the number of files that could not be read."""
    from tqdm import tqdm

    from finetune.evaluation.long_audio import Cutting
    from finetune.evaluation.recognise import evaluation_mode, frame_seconds
    from finetune.models.loading import load_model, move_to_device
    from finetune.models.nemo import set_head
    from finetune.models.prompts import check_language
    from finetune.security.safe_text import json_line, one_line
    from finetune.strategies.attention import use_local_attention
    from finetune.tools.transcription.files import output_files, transcribe_files, write_formats
    from finetune.tools.transcription.words import enable_timestamps

    paths = output_files(files, arguments.output, arguments.format) if arguments.output else {}
    timed = arguments.timestamps or arguments.format != ("json",)
    model = move_to_device(load_model(arguments.model, arguments.tokenizer), device_of(arguments))
    set_head(model, arguments.head, arguments.model)
    check_language(model, arguments.language)
    if arguments.attention == "local":
        use_local_attention(model, arguments.context)
    if timed:
        enable_timestamps(model)
    seconds = frame_seconds(model)
    cutting = Cutting.of_seconds(model.preprocessor._sample_rate, seconds, arguments.chunk, arguments.overlap)
    rows = transcribe_files(
        model, files, cutting, batch_size=arguments.batch_size, timestamps=timed, language=arguments.language
    )
    failed = 0
    with evaluation_mode(model):
        for row in tqdm(rows, total=len(files), unit="file", disable=len(files) == 1, delay=2):
            if "error" in row:
                failed += 1
                print_error(f"{one_line(row['file'])}: {one_line(row['error'])}")
            shown = row if arguments.timestamps else {k: v for k, v in row.items() if k not in ("words", "segments")}
            if not arguments.output:
                print(json_line(shown), flush=True)
            elif "error" not in row:
                written = paths[row["file"]]
                write_formats(row, shown, written)
                print(f"{one_line(row['file'])} -> {', '.join(one_line(p) for p in written.values())}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
