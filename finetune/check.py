"""Read a whole data set; report what is in it, what training would leave out and why, and how its batches would be.

D is a NeMo manifest, a folder or glob of parquet or tar shards, an audio folder, or a hub data set name. With a model
(or a run file, which names one) texts are tokenised and utterances judged by what its encoder's frames can carry. An
interrupted check goes on where it was. Leaves report.html, check.json, and problems.jsonl with each utterance that
cannot be used, comes twice, or stands in data.validation, test or guard of the run file as well, which
`data.leave_out` takes.

Exit codes: 0 all is usable but what filters leave out, 1 more than data.max_bad_fraction is bad or clips of
data.validation, test or guard stand in data.train, 2 bad arguments.
"""

import argparse
import json
import os
import sys
from pathlib import Path

from finetune.logs import print_error, set_up_logging
from finetune.tools.command_line import add_json, command, positive


def make_parser() -> argparse.ArgumentParser:
    parser = command(
        "check",
        __doc__ or "",
        "python -m finetune.check --data my_data/train.jsonl",
        "python -m finetune.check --config RUN.yaml --output-dir runs/check     # data.train, filtered as in training",
    )
    parser.add_argument("--data", nargs="+", metavar="D", help="one data set or several, read as one")
    parser.add_argument("--config", type=Path, help="run file: its data.train, filters and model")
    parser.add_argument("--split", default="train", help="split of a folder or hub data set (default: train)")
    parser.add_argument("--model", help="model whose tokenizer and frames are used")
    parser.add_argument("--tokenizer", help="tokenizer directory, for a NeMo model YAML")
    parser.add_argument("--workers", type=positive, default=os.cpu_count(), help="processes that read and decode")
    parser.add_argument("--output-dir", type=Path, default=Path("check"), help="folder of the report (default: check)")
    add_json(parser)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the run file")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Check a data set; return the exit code."""
    parser = make_parser()
    arguments = parser.parse_intermixed_args(argv)
    if bool(arguments.data) == bool(arguments.config):
        parser.error("give either --data or --config")
    if arguments.overrides and not arguments.config:
        parser.error(f"{arguments.overrides[0]}: settings need --config")
    set_up_logging(arguments.verbose)

    from finetune.errors import UserError
    from finetune.tools.data_check import inspection
    from finetune.tools.data_check.report import write_report

    a, folder = arguments, arguments.output_dir
    try:
        if a.config:
            work = inspection.work_on_run_file(a.config, a.overrides, folder)
        else:
            work = inspection.work_on_data(a.data, a.split, a.model, a.tokenizer, folder)
        found = inspection.inspect(work, folder, a.workers)
    except UserError as error:
        print_error(error)
        return error.exit_code
    except OSError as error:
        print(f"error: --output-dir: {folder} cannot be written: {error}", file=sys.stderr)
        return 1
    for file in filter(None, (folder / "check.json", a.json)):
        file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    write_report(found, folder / "report.html")
    for error in found["errors"]:
        print_error(error)
    for line in found["same_clips"] + found["same_texts"]:
        print(line)
    print(
        f"{found['rows']} rows, {found['clips']} clips to train on, {found['hours']:.2f} h; left out by filters: "
        f"{sum(found['filtered'].values())}; bad: {found['bad']}; the report: {folder / 'report.html'}"
    )
    if found["same_clips"]:
        print(f"data.leave_out={folder / 'problems.jsonl'} trains without the clips that are evaluated")
    return 1 if found["errors"] or found["same_clips"] or found["bad_fraction"] > found["max_bad_fraction"] else 0


if __name__ == "__main__":
    sys.exit(main())
