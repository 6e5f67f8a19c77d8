"""Writes the page of a run anew, or lays several runs side by side.

    python -m finetune.report RUN                            # RUN/report.html
    python -m finetune.report RUN_A RUN_B ... [--output FILE]   # compare.html in this directory

RUN: a training.output_dir, also of a run that is not done or has died, or of a stage; the directory of a plan of stages stands for
all its stages. Exit codes: 0 done, 2 a folder that is no run's or a page that cannot be written.
"""

import argparse
import sys
from pathlib import Path

from finetune.errors import UserError
from finetune.logs import print_error
from finetune.tools.report.compare import write_comparison
from finetune.tools.report.page import write_report
from finetune.tools.report.read import is_run, stage_folders


def main(argv: list[str] | None = None) -> int:
    """Writes the page; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m finetune.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's output directory")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="the page (default: RUN/report.html, or compare.html)"
    )
    arguments = parser.parse_args(argv)
    try:
        folders = []
        for run in arguments.runs:
            stages = [] if is_run(run) else stage_folders(run)
            folders += stages or [run]
        if len(folders) == 1:
            path = write_report(folders[0], arguments.output)
        else:
            path = write_comparison(folders, arguments.output or Path("compare.html"))
    except UserError as error:
        print_error(error)
        return error.exit_code
    print(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
