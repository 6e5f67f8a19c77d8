"""Write the page of a run anew, or lay several runs side by side.

RUN is a training.output_dir, also of a run that is not done or has died, or of a stage; the directory of a plan of
stages stands for all its stages. Exit codes: 0 done, 2 a folder that is no run's or a page that cannot be written.
"""

import argparse
import sys
from pathlib import Path

from finetune.tools.command_line import command, run_command


def make_parser() -> argparse.ArgumentParser:
    parser = command(
        "report",
        __doc__ or "",
        "python -m finetune.report RUN                                # RUN/report.html",
        "python -m finetune.report RUN_A RUN_B --output compare.html  # several runs side by side",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's output directory")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="the page (default: RUN/report.html; of several runs compare.html in the first RUN)",
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Write the page; return the exit code."""
    arguments = make_parser().parse_args(argv)
    from finetune.errors import UserError
    from finetune.logs import print_error, set_up_logging

    set_up_logging(arguments.verbose)
    from finetune.tools.report.compare import write_comparison
    from finetune.tools.report.page import write_run_page
    from finetune.tools.report.read import is_run, stage_folders

    folders: list[Path] = []
    for run in arguments.runs:
        stages = [] if is_run(run) else stage_folders(run)
        folders += stages or [run]
    try:
        if len(folders) == 1:
            path = write_run_page(folders[0], arguments.output)
        else:
            path = write_comparison(folders, arguments.output or arguments.runs[0] / "compare.html")
    except UserError as error:
        print_error(error)
        return error.exit_code
    print(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
