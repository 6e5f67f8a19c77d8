"""Cut a recording of any length, with its text, into clips to train on.

    python -m finetune.segment --model M --audio LONG --text FILE --output DIR

The text is plain, SRT or VTT. Clips begin and end in pauses; speech that has no text, text that was not read, and
places where the two differ are left out and counted. DIR/manifest.jsonl names parts of LONG by offset and duration;
with --shards the clips' audio lies in DIR/shards as well. The same command goes on where it was ended.

Exit codes: 0 done, 1 failed or no clip, 2 bad arguments, a text of another recording, or DIR is that of another job.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.errors import UserError
from finetune.logs import print_error, set_up_logging
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

if TYPE_CHECKING:
    from finetune.models.protocols import AsrModel
    from finetune.tools.segmentation.texts import Word

EXAMPLE = "python -m finetune.segment --model runs/quickstart --audio book.flac --text book.txt --output data/book"


def make_parser() -> argparse.ArgumentParser:
    parser = command("segment", __doc__ or "", EXAMPLE)
    add_model(parser, required=True)
    add = parser.add_argument
    add("--audio", required=True, type=Path, metavar="LONG", help="a recording, in any format that soundfile reads")
    add(
        "--text", required=True, type=Path, metavar="FILE", help="its text: .srt, .vtt, or anything else as plain text"
    )
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
    return 0 if summary["clips"] else 1


def segment(arguments: argparse.Namespace) -> dict[str, Any]:
    """Check what was given, do the job and return its summary."""
    from finetune.data.decode import audio_seconds
    from finetune.data.quarantine import BadUtterance
    from finetune.paths import near_path
    from finetune.tools.jobs.job import alone_in
    from finetune.tools.segmentation.output import open_job
    from finetune.tools.segmentation.texts import read_words

    a, audio = arguments, str(arguments.audio.resolve())
    try:
        if not (duration := audio_seconds(audio)):
            raise BadUtterance("the audio is empty")
    except BadUtterance as reason:
        raise UserError(f"--audio: {str(reason).rstrip('.')}.{near_path(str(a.audio))}") from reason
    text = read_words(a.text, duration)
    open_job(a.output, settings_of(a))
    with writing("--output", a.output), alone_in(a.output):
        return write_clips(a, audio, text, duration)


def write_clips(arguments: argparse.Namespace, audio: str, text: list[Word], duration: float) -> dict[str, Any]:
    """Write the files of the job, print what came of it, and return the summary."""
    from finetune.data.quarantine import BadUtterance
    from finetune.durable_files import write_json
    from finetune.models.loading import load_model, move_to_device
    from finetune.models.nemo import set_head, warn_about_search
    from finetune.models.prompts import check_language
    from finetune.tools.segmentation.clips import Limits, make_clips
    from finetune.tools.segmentation.output import rows_of, summary_of, table, write_lines, write_shards

    a, started = arguments, time.monotonic()
    model = move_to_device(load_model(a.model, a.tokenizer), device_of(a))
    set_head(model, a.head, a.model)
    warn_about_search(model)
    check_language(model, a.language)
    rate = model.preprocessor._sample_rate
    try:
        heard, spans, judged, unwritable = hear_and_judge(a, model, audio, text, duration)
    except BadUtterance as reason:
        raise UserError(f"--audio: {str(reason).rstrip('.')}.", exit_code=1) from reason
    limits = Limits(a.min_seconds, a.max_seconds, a.longest_pause, a.min_confidence)
    result = make_clips(heard, spans, judged, text, unwritable, rate, limits)
    rows = rows_of(result.clips, text, Path(audio), rate, a.language)
    write_shards(a.output, a.shards, audio, rate, result.clips, rows)
    write_lines(a.output / "left_out.jsonl", result.left_out)
    write_lines(a.output / "manifest.jsonl", rows)
    summary = {**summary_of(result, text, duration, rate), "seconds": time.monotonic() - started}
    write_json(a.output / "summary.json", summary)
    print(table(summary))
    print(f"{a.output / 'manifest.jsonl'}" if rows else "no clip: left_out.jsonl tells why")
    return summary


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what the work of an earlier start depends on; the other options may change, and take seconds."""
    from finetune.durable_files import sha256_of
    from finetune.tools.jobs.job import stamp

    a = arguments
    keys = ("tokenizer", "max_seconds", "min_pause", "head", "language")
    return {
        "command": "segment",
        "model": str(a.model),
        "model_files": stamp(a.model),
        "audio": str(a.audio.resolve()),
        "audio_bytes": a.audio.stat().st_size,
        "text_sha256": sha256_of(a.text),
        **{key: getattr(a, key) for key in keys},
    }


def hear_and_judge(
    arguments: argparse.Namespace, model: AsrModel, audio: str, text: list[Word], duration: float
) -> Any:
    """Return the stretches, their spans of the text, what the model says about them, and words it cannot write."""
    from tqdm import tqdm

    from finetune.evaluation.alignment import Aligner
    from finetune.evaluation.recognise import evaluation_mode
    from finetune.tools.segmentation.hearing import Pauses, Progress, SameRecording, hear, stretches_of
    from finetune.tools.segmentation.judging import Writing, judge
    from finetune.tools.segmentation.spans import spans_of

    a, rate = arguments, model.preprocessor._sample_rate
    pauses = Pauses(a.max_seconds, a.min_pause)
    writing = Writing(model, text, a.text.name)
    same = SameRecording(text, a.text.name, rate, a.patience)
    minutes = round(duration / 60, 1)

    def bar(name: str) -> tqdm:
        return tqdm(total=minutes, desc=name, unit="min", disable=None, delay=2, leave=False)

    with evaluation_mode(model):
        with bar("listening") as shown:
            heard = hear(
                model,
                stretches_of(audio, rate, pauses),
                Progress(a.output / "heard.jsonl"),
                batch_size=a.batch_size,
                language=a.language,
                check=same,
                on_stretch=lambda row: shown.update(round(row.end / rate / 60 - shown.n, 1)),
            )
        spans = spans_of(heard, text, rate)
        with bar("aligning") as shown:
            judged = judge(
                Aligner(model, language=a.language, normalization=writing.mode),
                stretches_of(audio, rate, pauses),
                spans,
                text,
                writing,
                Progress(a.output / "judged.jsonl"),
                batch_size=a.batch_size,
                on_stretch=lambda i: shown.update(round(heard[i].end / rate / 60 - shown.n, 1)),
            )
    return heard, spans, judged, writing.unwritable


if __name__ == "__main__":
    sys.exit(run_command(main))
