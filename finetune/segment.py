"""Cut a recording of any length, with its text, into clips to train on.

    python -m finetune.segment --model M --audio LONG --text FILE --output DIR
    python -m finetune.segment --model M --audio FOLDER --text FOLDER --output DIR [--engine ray]    many of them

The text is plain, SRT or VTT. Clips begin and end in pauses; speech that has no text, text that was not read, and
places where the two differ are left out and counted. DIR/manifest.jsonl names parts of LONG by offset and duration;
with --shards the clips' audio lies in DIR/shards as well. The same command goes on where it was ended.

Exit codes: 0 done, 1 failed or no clip, 2 bad arguments, a text of another recording, or DIR is that of another job.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.errors import UserError
from finetune.logs import print_error, set_up_logging
from finetune.security.safe_text import one_line
from finetune.tools.command_line import (
    add_decoding,
    add_head,
    add_language,
    add_model,
    command,
    device_of,
    run_command,
    writing,
)
from finetune.tools.jobs.arguments import add_engine, engine_of, worker_device

if TYPE_CHECKING:
    from finetune.tools.segmentation.recording import SegmentSettings

EXAMPLE = "python -m finetune.segment --model runs/quickstart --audio book.flac --text book.txt --output data/book"
MAX_FAILED = 0.5  # of recordings, of which there may be few


def make_parser() -> argparse.ArgumentParser:
    parser = command("segment", __doc__ or "", EXAMPLE)
    add_model(parser, required=True)
    add = parser.add_argument
    long = "a recording, in any format that soundfile reads, or a folder of recordings"
    add("--audio", required=True, type=Path, metavar="LONG", help=long)
    text = "its text: .srt, .vtt, or anything else as plain text; of a folder, one with a text of each one's name"
    add("--text", required=True, type=Path, metavar="FILE", help=text)
    add(
        "--output",
        required=True,
        type=Path,
        metavar="DIR",
        help="a new directory, or one of the same job to go on with",
    )
    kinds = "write the clips' audio too: tar files of .flac and .txt, or parquet (default: none)"
    add("--shards", choices=("tar", "parquet"), help=kinds)
    least = "shortest clip; shorter ones are left out and counted (default: 0.5)"
    add("--min-seconds", type=float, default=0.5, metavar="S", help=least)
    add("--max-seconds", type=float, default=20.0, metavar="S", help="neighbours are joined up to this (default: 20)")
    add("--min-pause", type=float, default=0.3, metavar="S", help="a pause to cut at (default: 0.3)")
    add("--longest-pause", type=float, default=1.0, metavar="S", help="within a clip (default: 1)")
    unsure = "leave out stretches whose words have a lower mean confidence (default: 0)"
    add("--min-confidence", type=float, default=0.0, metavar="C", help=unsure)
    early = "speech without a trace of the text before the command gives up (default: 10)"
    add("--patience", type=float, default=10.0, metavar="MINUTES", help=early)
    add_decoding(parser, 8, "stretches of speech")
    add_head(parser)
    add_language(parser, "auto")
    add_engine(parser, what="recordings", max_failed=MAX_FAILED)
    return parser


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser()
    a = parser.parse_args(argv)
    if not 2 <= a.max_seconds <= 120:
        parser.error("--max-seconds has to lie between 2 and 120")
    if not 0 <= a.min_seconds < a.max_seconds:
        parser.error("--min-seconds has to be 0 or more, and less than --max-seconds")
    if not 0.05 <= a.min_pause <= 10:
        parser.error("--min-pause has to lie between 0.05 and 10 seconds")
    if not a.longest_pause >= 0:
        parser.error("--longest-pause has to be 0 seconds or more")
    if not 0 <= a.min_confidence <= 1:
        parser.error("--min-confidence has to lie between 0 and 1")
    if not a.patience > 0:
        parser.error("--patience has to be more than 0 minutes")
    return a


def main(argv: list[str] | None = None) -> int:
    """Segment a recording; return the exit code."""
    arguments = parse_arguments(argv)
    set_up_logging(arguments.verbose)
    try:
        summary = segment(arguments)
    except UserError as error:
        print_error(error)
        return error.exit_code
    return 0 if summary is None or summary["clips"] else 1


def segment(a: argparse.Namespace) -> dict[str, Any] | None:
    """Cut one recording, or those of a folder; print what came of it and return the summary, None where other tasks of
    an array are still at work."""
    if a.audio.is_dir() != a.text.is_dir() and a.audio.exists() and a.text.exists():
        raise UserError(
            "--audio and --text are a file each, or a folder each, whose files go together by their names."
        )
    return segment_folder(a) if a.audio.is_dir() else segment_file(a)


def segment_file(a: argparse.Namespace) -> dict[str, Any]:
    from finetune.tools.segmentation.output import table
    from finetune.tools.segmentation.recording import load_segmenter, open_recording, opened, segment_recording

    if (a.engine, a.workers, a.address, a.shard, a.retry_failed) != ("local", None, None, (0, 1), False):
        raise UserError(
            "--engine, --workers, --address, --shard and --retry-failed are for many recordings: name folders of "
            "these."
        )
    settings, recording = settings_of(a), open_recording(a.audio, a.text)
    with writing("--output", a.output), opened(a.output, recording, settings):
        model = load_segmenter(settings, device_of(a))
        summary = segment_recording(model, a.output, recording, settings, show=True)
    print(table(summary))
    print(f"{a.output / 'manifest.jsonl'}" if summary["clips"] else "no clip: left_out.jsonl tells why")
    return summary


def segment_folder(a: argparse.Namespace) -> dict[str, Any] | None:
    from finetune.tools.segmentation.output import table
    from finetune.tools.segmentation.recordings import pairs_in, segment_recordings

    engine, pairs = engine_of(a), pairs_in(a.audio, a.text)
    with writing("--output", a.output):
        summary, totals = segment_recordings(
            pairs, a.output, settings_of(a), engine, device=worker_device(a), max_failed=a.max_failed
        )
    if summary is None:
        print(f"{totals.shards_done} of {totals.shards} recordings are done; the last --shard writes the manifest")
        return None
    print(f"{totals.clips - len(totals.failed)} of {totals.clips} recordings")
    print(table(summary))
    for record in totals.failed:
        print(one_line(f"failed: {record['id']}: {record['reason']}"))
    print(f"{a.output / 'manifest.jsonl'}" if summary["clips"] else "no clip: left_out.jsonl tells why")
    return summary


def settings_of(a: argparse.Namespace) -> SegmentSettings:
    from finetune.tools.segmentation.recording import SegmentSettings

    return SegmentSettings(**{field.name: getattr(a, field.name) for field in fields(SegmentSettings)})


if __name__ == "__main__":
    sys.exit(run_command(main))
