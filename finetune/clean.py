"""Find labels that do not fit their audio, by a model: exchanged texts, words left out or put in, audio cut off.

Listens to each clip with the model, compares what it hears with the given text, and takes its thresholds from the
data. Leaves problems.jsonl, which `data.leave_out` takes, and clean.html to look through: its download,
decisions.jsonl, goes back into this command, which then writes a cleaned manifest beside the old one. An interrupted
job goes on where it was.

Exit codes: 0 done, whether there are problems or not; 1 too many clips cannot be read; 2 bad arguments.
"""

import argparse
import sys
from pathlib import Path

from finetune.errors import UserError
from finetune.logs import print_error, set_up_logging
from finetune.security.safe_text import one_line
from finetune.tools.command_line import (
    add_data,
    add_decoding,
    add_head,
    add_language,
    add_model,
    command,
    run_command,
)
from finetune.tools.jobs.arguments import add_engine, engine_of, worker_device

OF_FINDING = (
    "tokenizer", "max_samples", "batch_size", "device", "head", "language", "engine", "workers", "address", "shard",
    "max_failed",
)  # fmt: skip
"""Options of finding problems, which --decisions goes without."""


def make_parser() -> argparse.ArgumentParser:
    parser = command(
        "clean",
        __doc__ or "",
        "python -m finetune.clean --model runs/quickstart --data examples/voice_prompts --output cleaning",
        "python -m finetune.clean --decisions decisions.jsonl cleaning/problems.jsonl --data D --output cleaned",
    )
    add_model(parser, required=False)
    add_data(parser, "one data set or several, judged together", split="train")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder of the result")
    add_decoding(parser, 16)
    add_head(parser)
    add_language(parser, "each clip's own")
    parser.add_argument(
        "--decisions",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="write DIR/cleaned.jsonl by the page's download; clips of a problems.jsonl named beside it that it does "
        "not decide about are left out",
    )
    parser.add_argument(
        "--write-audio", action="store_true", help="with --decisions: write audio that lies in shards as files"
    )
    add_engine(parser)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Clean, or apply decisions; return the exit code."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if not arguments.data:
        parser.error("--data is needed")
    if bool(arguments.model) == bool(arguments.decisions):
        parser.error("give --model to find problems, or --decisions to write a cleaned manifest")
    if arguments.write_audio and not arguments.decisions:
        parser.error("--write-audio goes with --decisions")
    idle = [
        f"--{name.replace('_', '-')}" for name in OF_FINDING if getattr(arguments, name) != parser.get_default(name)
    ]
    if arguments.decisions and idle:
        parser.error(f"--decisions goes without {', '.join(idle)}: it is applied to all rows, without a model")
    set_up_logging(arguments.verbose)
    try:
        return apply(arguments) if arguments.decisions else find(arguments)
    except UserError as error:
        print_error(error)
        return error.exit_code


def find(arguments: argparse.Namespace) -> int:
    """Find problems."""
    from finetune.tools.cleaning.finding import find_problems
    from finetune.tools.cleaning.outputs import PAGE, PROBLEMS

    a = arguments
    found = find_problems(a, engine_of(a), worker_device(a))
    if found is None:
        print(f"this part is done; start the command once more when all parts are: {a.output}")
        return 0
    for sentence in found.said:
        print(one_line(sentence))
    for kind, n in found.kinds:
        print(f"  {n:>7,}  {kind}")
    if found.failed:
        print(f"  {found.failed:>7,}  clips could not be judged: {a.output / 'failed.jsonl'}")
    print(f"{a.output / PAGE}   {a.output / PROBLEMS}")
    return 0


def apply(arguments: argparse.Namespace) -> int:
    """Write the cleaned manifest."""
    from finetune.data.sources import split_to_read
    from finetune.evaluation.dataset import open_sources
    from finetune.tools.cleaning.decisions import CLEANED, read_decisions, write_cleaned

    a = arguments
    decisions = read_decisions(a.decisions)
    sources = open_sources(a.data, split_to_read(a.data, a.split, "train"))
    counts = write_cleaned(sources, decisions, a.output, a.write_audio)
    if counts["unknown"]:
        print(
            f"warning: {counts['unknown']} of the decisions are about rows that --data does not have", file=sys.stderr
        )
    print(
        f"{a.output / CLEANED}: {counts['written']} clips, {counts['corrected']} of them with a new text; "
        f"{counts['dropped']} left out"
    )
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
