"""Split data into manifests for training, validation and test, which name the audio where it lies.

    python -m finetune.split --data D [D ...] --output DIR [--validation 5%] [--test 5%]

A hash decides, not chance: the same command splits the same way. With the options of the line "to split more data the
same way", data that are added later move no clip. All clips of a speaker (or session) stay together where a column
names them, else all clips with the same text, capitals and punctuation aside. Each language gets its share up to
chance; one that is far from it is named, and 5%,fi=12% gives it a share of its own. D is as in a run file: a path, a
hub data set, or a mapping such as '{path: D, text_column: sentence, language: it}'.

Exit codes: 0 done, 1 failed, 2 bad arguments, or DIR holds an earlier result.
"""

import argparse
import sys
from pathlib import Path

from finetune.durable_files import write_json
from finetune.errors import UserError
from finetune.logs import print_error, set_up_logging
from finetune.tools.command_line import DATA, add_json, command, run_command, writing

EXAMPLE = "python -m finetune.split --data my_data/all.jsonl --output my_data/split --validation 5% --test 5%"


def amount(text: str) -> tuple[float, str, dict[str, float]]:
    """Parse 5% (a share of the clips), 500 (clips) or 2h (hours), maybe with shares of languages (5%,fi=12%)."""
    first, *others = text.split(",")
    unit = first[-1:] if first[-1:] in ("%", "h") else ""
    value = float(first.removesuffix(unit))
    if not 0 <= value < (100 if unit == "%" else float("inf")) or (not unit and not value.is_integer()):
        raise argparse.ArgumentTypeError("write a share (5%), a number of clips (500) or hours (2h)")
    by_language = {}
    for language, sign, share in (other.rpartition("=") for other in others):
        if not language or not sign or not share.endswith("%") or not 0 <= float(share[:-1]) < 100:
            raise argparse.ArgumentTypeError("write the share of a language as 5%,fi=12%")
        by_language[language] = float(share[:-1])
    return value, unit, by_language


def make_parser() -> argparse.ArgumentParser:
    parser = command("split", __doc__ or "", EXAMPLE)
    add = parser.add_argument
    add("--data", required=True, nargs="+", metavar="D", help=f"read as one; each {DATA}")
    add("--split", help="split of a folder or hub data set (default: train)")
    add("--output", required=True, type=Path, metavar="DIR", help="folder for train, validation and test.jsonl")
    for part in ("validation", "test"):
        add(
            f"--{part}",
            type=amount,
            default="5%",
            metavar="N",
            help="such as 5%%, 500, 2h or 5%%,fi=12%% (default: 5%%)",
        )
    add("--by", metavar="COLUMN", help="column whose clips stay together; text: none (default: a column of speakers)")
    add("--leave-out", nargs="+", metavar="FILE", help="problems.jsonl or suspicious.jsonl of a check of D")
    add("--write-audio", action="store_true", help="write audio that lies in shards to files in DIR/audio")
    add("--overwrite", action="store_true", help="replace the manifests of an earlier split in DIR")
    add_json(parser)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Split data; return the exit code."""
    arguments = make_parser().parse_args(argv)
    set_up_logging(arguments.verbose)
    from finetune.data.sources import split_to_read
    from finetune.tools.splits import split_data

    a = arguments
    try:
        split = split_to_read(a.data, a.split, "train")
        options = {"by": a.by, "leave_out": a.leave_out, "write_audio": a.write_audio, "overwrite": a.overwrite}
        found = split_data(a.data, split, a.output, a.validation, a.test, **options)
        print(found)
        with writing("--json", a.json):
            if a.json:
                write_json(a.json, found.as_json())
    except UserError as error:
        print_error(error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
