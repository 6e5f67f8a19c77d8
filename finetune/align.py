"""Where each word of a clip's text is in its audio: start, end and confidence, by the model's alignment lattice.

    python -m finetune.align --model M --data D --output words.jsonl
    python -m finetune.align --model M --data D --output grids --format textgrid,srt    one file a clip

Data: whatever training takes. What cannot be aligned is counted, and named beside the output. A run that was stopped
goes on with the same line. docs/align.md says what the times and confidences mean.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.data.normalization import NORMALIZATIONS
from finetune.errors import UserError
from finetune.logs import print_error, set_up_logging
from finetune.tools.command_line import (
    add_data,
    add_decoding,
    add_dtype,
    add_head,
    add_language,
    add_model,
    command,
    run_command,
    writing,
)
from finetune.tools.jobs.arguments import add_engine, engine_of, worker_device

if TYPE_CHECKING:
    from finetune.tools.jobs.job import Job

log = logging.getLogger("finetune.align")  # under python -m, __name__ is __main__

FORMATS = ("json", "textgrid", "srt")


def make_parser() -> argparse.ArgumentParser:
    parser = command(
        "align",
        __doc__ or "",
        "python -m finetune.align --model runs/quickstart --data examples/voice_prompts --output words.jsonl",
    )
    add_model(parser, required=True)
    add_data(parser, "one data set or several, with texts")
    add = parser.add_argument
    add("--output", type=Path, required=True, metavar="F", help="a file of JSON lines; else a directory of files")
    kinds = f"{', '.join(FORMATS)}, or several with commas: what to write (default: json)"
    add("--format", default="json", metavar="F[,F]", help=kinds)
    without = "none, or basic where the model's vocabulary has no capitals"
    how = f"of texts before they are tokenised; words stay as written (default: {without})"
    add("--normalization", choices=NORMALIZATIONS, help=how)
    emitted = "encoder frames by which words begin behind the frames that emit them (default: 0.35; docs/align.md)"
    add("--shift", type=float, metavar="FRAMES", help=emitted)
    add_decoding(parser, 16)
    add_dtype(parser)
    add_head(parser)
    add_language(parser, "each clip's own")
    add_engine(parser)
    return parser


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser()
    arguments = parser.parse_args(argv)
    arguments.format = tuple(arguments.format.split(","))
    if unknown := [f for f in arguments.format if f not in FORMATS]:
        parser.error(f"--format: there is no {unknown[0]!r}; choose from {', '.join(FORMATS)}")
    if arguments.shift is not None and not -20 <= arguments.shift <= 20:
        parser.error("--shift is a number of encoder frames, from -20 to 20")
    if not arguments.data:
        parser.error("--data is needed")
    return arguments


def check_output(output: Path, formats: tuple[str, ...]) -> None:
    """Raise UserError where --output is a directory and a file is meant, or the other way round, or /, beside which
    nothing can lie."""
    if formats == ("json",) and output.is_dir():
        raise UserError(f"--output: {output} is a directory. JSON lines go to a file: name one in it.")
    if formats != ("json",) and output.is_file():
        raise UserError(f"--output: {output} is a file. --format {','.join(formats)} writes into a directory.")
    if not Path(os.path.abspath(output)).name:
        raise UserError(f"--output: {output} is the root of the file system. Name a directory in it.")


def job_of(arguments: argparse.Namespace) -> Job:
    """Return the job of these arguments.

    Raises:
        UserError: the data cannot be opened.
    """
    from finetune.data.sources import split_to_read
    from finetune.evaluation.alignment import SHIFT
    from finetune.evaluation.dataset import open_sources
    from finetune.tools.alignment.worker import AlignmentSettings, MakeAlignmentWorker
    from finetune.tools.jobs.job import Job

    a, output = arguments, Path(os.path.abspath(arguments.output))  # . and .. have no name
    settings = AlignmentSettings(
        model=a.model,
        tokenizer=a.tokenizer,
        head=a.head,
        language=a.language,
        normalization=a.normalization,
        shift=SHIFT if a.shift is None else a.shift,
        dtype=a.dtype,
        batch_size=a.batch_size,
    )
    return Job(
        command="align",
        directory=output.with_name(f".{output.name}.job"),
        settings={key: value for key, value in vars(settings).items() if key != "batch_size"},
        sources=open_sources(a.data, split_to_read(a.data, a.split, "test")),
        make_worker=MakeAlignmentWorker(settings, worker_device(a)),
        max_samples=a.max_samples,
        max_failed=a.max_failed,
    )


def main(argv: list[str] | None = None) -> int:
    """Align a data set; return 0, or 1 where nothing could be aligned."""
    arguments = parse_arguments(argv)
    set_up_logging(arguments.verbose)
    from finetune.tools.alignment.results import write_failed, write_results
    from finetune.tools.jobs.running import run_job

    a = arguments
    try:
        check_output(a.output, a.format)
        engine = engine_of(a)
        job = job_of(a)
        with writing("--output", a.output):
            a.output.parent.mkdir(parents=True, exist_ok=True)
            totals = run_job(job, engine)
            if not totals.is_whole:
                print(f"{totals.shards_done} of {totals.shards} shards are done; the last --shard writes {a.output}")
                return 0
            summary = write_results(job.results(), a.output, a.format)
            failed = write_failed(totals, a.output, a.format)
            if engine.part == (0, 1):
                shutil.rmtree(job.directory)
    except UserError as error:
        print_error(error)
        return error.exit_code
    for line in summary.lines(job.settings["shift"], totals):
        print(line)
    if failed is not None:
        print(f"what could not be aligned, with reasons: {failed}")
    if not summary.clips:
        print_error(UserError(f"--data: {' '.join(a.data)} holds no clip that can be aligned."))
        return 1
    print(f"written: {a.output}")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
