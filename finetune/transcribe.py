"""Transcribe audio files of any length; one JSON line a file.

    python -m finetune.transcribe --model M FILES... [--timestamps]
    python -m finetune.transcribe --model M FILES... --format srt,vtt --output subtitles
    python -m finetune.transcribe --model M FILES... --boost phrases.txt
    python -m finetune.transcribe --model M FILES... --streaming [--look-ahead N]
    find talks -name '*.wav' | python -m finetune.transcribe --model M -

M may also be a directory that `finetune.export` wrote for onnx-asr or sherpa-onnx: its runtime gives the texts, on the
CPU, and long files are cut at quiet places without an overlap.

Files: whatever soundfile reads (WAV, FLAC, MP3, Ogg), any sample rate, any number of channels. `-` reads paths from
standard input, one a line. Audio is read block by block and decoded in chunks that overlap, so that hours take no more
memory than minutes. With --streaming each file is held whole, and its text comes as it grows, then its JSON line.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.errors import UserError
from finetune.evaluation.long_audio import CHUNK_SECONDS, OVERLAP_SECONDS
from finetune.logs import print_error, set_up_logging
from finetune.paths import near_path
from finetune.tools.command_line import (
    add_boosting,
    add_decoding,
    add_head,
    add_language,
    add_look_ahead,
    add_model,
    boosting_of,
    check_boosting,
    command,
    device_of,
    positive,
    run_command,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from finetune.models.protocols import AsrModel

log = logging.getLogger("finetune.transcribe")  # under python -m, __name__ is __main__

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
    add("--streaming", action="store_true", help="recognise chunk by chunk with a streaming model, one file at a time")
    add_look_ahead(parser, "of --streaming (default: the model's first)")
    add_decoding(parser, 8, "chunks of one file or several")
    add_head(parser)
    add_language(parser, "auto")
    add_boosting(parser)
    return parser


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser()
    arguments = parser.parse_args(argv)
    check_boosting(parser, arguments)
    if arguments.look_ahead is not None and not arguments.streaming:
        parser.error("--look-ahead belongs to --streaming")
    whole = ("timestamps", "format", "output", "chunk", "overlap", "attention", "context", "batch_size", "beam")
    if arguments.streaming and any(getattr(arguments, key) != parser.get_default(key) for key in whole):
        parser.error(f"--streaming prints text as it grows: leave out {', '.join(f'--{key}' for key in whole)}")
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


OF_EXPORTS = {
    "timestamps": "its texts come without times",
    "format": "subtitles need times",
    "overlap": "chunks that overlap are joined by times",
    "streaming": "it recognises whole recordings",
    "attention": "its graph is fixed",
    "head": "it has one head",
    "language": "it takes no prompt",
    "tokenizer": "it has its own",
    "boost": "its runtime decodes without phrases here; sherpa-onnx takes those of --to hotwords (docs/boosting.md)",
    "lm": "its runtime decodes without a language model",
    "beam": "its runtime decodes greedily here",
    "device": "it runs on the CPU",
}
"""Options that an exported model cannot follow, and why."""


def main(argv: list[str] | None = None) -> int:
    """Transcribe; return 0 if every file could be read, else 1."""
    arguments = parse_arguments(argv)
    set_up_logging(arguments.verbose)
    files: list[str] = []
    for name in arguments.files:
        files += [line.strip() for line in sys.stdin if line.strip()] if name == "-" else [name]
    try:
        from finetune.tools.export.using import is_export

        exported = is_export(arguments.model)
        failed = (transcribe_exported if exported else transcribe)(arguments, files)
    except UserError as error:
        print_error(error)
        return error.exit_code
    if failed:
        print(f"{failed} of {len(files)} file(s) could not be transcribed", file=sys.stderr)
    return 1 if failed else 0


def transcribe(arguments: argparse.Namespace, files: list[str]) -> int:
    """Transcribe files and print or write the results; return the number of files that could not be read."""
    from finetune.evaluation.long_audio import Cutting
    from finetune.evaluation.recognise import evaluation_mode, frame_seconds
    from finetune.models.boosting import boost
    from finetune.models.loading import load_option, move_to_device
    from finetune.models.nemo import set_head, warn_about_search
    from finetune.models.prompts import check_language
    from finetune.strategies.attention import use_local_attention
    from finetune.tools.transcription.files import output_files, transcribe_files
    from finetune.tools.transcription.words import enable_timestamps

    paths = output_files(files, arguments.output, arguments.format) if arguments.output else {}
    timed = arguments.timestamps or arguments.format != ("json",)
    boosting = boosting_of(arguments)
    model = move_to_device(load_option(arguments.model, arguments.tokenizer), device_of(arguments))
    set_head(model, arguments.head, arguments.model)
    warn_about_search(model)
    check_language(model, arguments.language)
    if timed:
        enable_timestamps(model)
    if boosting is not None:
        boost(model, boosting)
    if arguments.streaming:
        return transcribe_streaming(model, files, arguments.look_ahead, arguments.language)
    if arguments.attention == "local":
        use_local_attention(model, arguments.context)
    seconds = frame_seconds(model)
    cutting = Cutting.of_seconds(model.preprocessor._sample_rate, seconds, arguments.chunk, arguments.overlap)
    rows = transcribe_files(
        model, files, cutting, batch_size=arguments.batch_size, timestamps=timed, language=arguments.language
    )
    with evaluation_mode(model):
        return give_out(rows, len(files), arguments, paths)


def transcribe_exported(arguments: argparse.Namespace, files: list[str]) -> int:
    """Transcribe files with an exported model and print or write the results; return the number of files that could
    not be read."""
    import torch

    from finetune.tools.export.using import open_unchanged, refuse_options, transcribe_files
    from finetune.tools.transcription.files import output_files

    refuse_options(arguments, parse_arguments(["--model", arguments.model, "any.wav"]), OF_EXPORTS)
    paths = output_files(files, arguments.output, arguments.format) if arguments.output else {}
    exported = open_unchanged(Path(arguments.model), torch.get_num_threads())
    rows = transcribe_files(exported, files, arguments.chunk, arguments.batch_size)
    return give_out(rows, len(files), arguments, paths)


def give_out(
    rows: Iterable[dict[str, Any]], files: int, arguments: argparse.Namespace, paths: dict[str, dict[str, Path]]
) -> int:
    """Print or write the results of so many files; return the number of those that could not be read."""
    from tqdm import tqdm

    from finetune.security.safe_text import json_line, one_line
    from finetune.tools.transcription.files import write_formats

    failed = 0
    for row in tqdm(rows, total=files, unit="file", disable=files == 1, delay=2, leave=False):
        if "error" in row:
            failed += 1
            print_error(f"{one_line(row['file'])}: {one_line(row['error'] + near_path(row['file']))}")
        shown = row if arguments.timestamps else {k: v for k, v in row.items() if k not in ("words", "segments")}
        if not arguments.output:
            print(json_line(shown), flush=True)
        elif "error" not in row:
            write_formats(row, shown, paths[row["file"]])
    return failed


def transcribe_streaming(model: AsrModel, files: list[str], look_ahead: str | None, language: str | None) -> int:
    """Print each file's text as it grows, and its JSON line; return the number of files that could not be read."""
    from finetune.evaluation.recognise import evaluation_mode, frame_seconds
    from finetune.evaluation.streaming import normalizes_chunks
    from finetune.models.look_ahead import latency_of
    from finetune.security.safe_text import json_line, one_line
    from finetune.tools.transcription.streaming import chosen_context, stream_file

    context, failed = chosen_context(model, look_ahead), 0
    log.info(
        "attention context %s: text comes %.0f ms after the sound at most, without the time to compute it",
        list(context),
        latency_of(context, frame_seconds(model)).latency_ms,
    )
    if normalizes_chunks(model):
        log.warning("the model normalises the features of whole recordings; streaming normalises those of each chunk")
    with evaluation_mode(model):
        for file in files:
            row = stream_file(model, file, context, language, lambda text: print(one_line(text), end="", flush=True))
            if row.get("text"):
                print()
            if "error" in row:
                failed += 1
                print_error(f"{one_line(file)}: {one_line(row['error'])}")
            print(json_line(row), flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(run_command(main))
