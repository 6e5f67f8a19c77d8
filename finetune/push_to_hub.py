"""Share a trained model on the Hugging Face Hub, with a model card that is filled from the run.

Without --yes it shows what would be uploaded, and asks nobody; with --yes it uploads it, in one commit. RUN_DIR is a
run's output directory. A .nemo file or an exported Hugging Face directory can be given too; its card says less. A new
repository is private unless --public is given. The token is that of `hf auth login` or HF_TOKEN. See docs/sharing.md.
"""

import argparse
import os
import sys
from pathlib import Path

from finetune.tools.command_line import command, run_command


def make_parser() -> argparse.ArgumentParser:
    example = "python -m finetune.push_to_hub --model runs/quickstart --repo OWNER/NAME --yes"
    parser = command("push_to_hub", __doc__ or "", example)
    parser.add_argument("--model", required=True, type=Path, metavar="RUN_DIR", help="what is shared")
    parser.add_argument("--repo", required=True, metavar="OWNER/NAME", help="where it goes")
    parser.add_argument(
        "--format",
        choices=("nemo", "hf", "both", "adapter"),
        default="nemo",
        help="what is uploaded (default: nemo)",
    )
    parser.add_argument(
        "--hf-dir",
        type=Path,
        metavar="DIR",
        help="a Hugging Face export of the model, for --format hf or both (default: it is made)",
    )
    parser.add_argument(
        "--export",
        type=Path,
        nargs="+",
        metavar="DIR",
        help="exports for onnx-asr or sherpa-onnx, uploaded in folders of their own and measured in the card",
    )
    seen = parser.add_mutually_exclusive_group()
    seen.add_argument("--private", action="store_true", help="make a new repository private (the default)")
    seen.add_argument(
        "--public", action="store_true", help="make a new repository public; needed for one that is public already"
    )
    parser.add_argument("--revision", metavar="BRANCH", help="branch, made where it is not there (default: main)")
    parser.add_argument(
        "--language",
        nargs="+",
        metavar="CODE",
        help="languages, such as en fr (default: those that the run measured or names)",
    )
    parser.add_argument(
        "--base-model", metavar="OWNER/NAME", help="Hub name of the base model, where the run had it as a file"
    )
    parser.add_argument(
        "--base-licence",
        "--base-license",
        metavar="ID",
        help="licence of the base model as the Hub names it, such as cc-by-4.0",
    )
    parser.add_argument(
        "--licence", "--license", metavar="ID", help="licence of this model (default: that of the base)"
    )
    parser.add_argument(
        "--data-name",
        nargs="+",
        metavar="NAME",
        help="what the training data is called, in place of file names; OWNER/NAME is a data set on the Hub",
    )
    parser.add_argument("--message", default="Upload the model and its card", help="of the commit")
    parser.add_argument(
        "--yes", action="store_true", help="upload; without it nothing is asked of the Hub and nothing sent"
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Show or upload; return the exit code."""
    arguments = make_parser().parse_args(argv)
    from finetune.logs import print_error, set_up_logging

    set_up_logging(arguments.verbose)

    from finetune.errors import UserError
    from finetune.tools.publishing.share import share

    try:
        share(arguments, sys.argv[1:] if argv is None else argv)
    except UserError as error:
        print_error(error)
        return error.exit_code
    except BrokenPipeError:  # `| head`: nobody reads on, and Python would report that once more when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
