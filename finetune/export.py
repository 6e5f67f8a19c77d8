"""Write a trained model for use elsewhere, as a .nemo or as a directory that Hugging Face's transformers loads.

    python -m finetune.export --model M --to nemo --output DIR
    python -m finetune.export --model M --to hf --output DIR [--data D]
    python -m finetune.export --model M --to hotwords --boost FILE --output DIR

--to hf takes a .nemo file, a run's or an adapter's directory, or a hub name.

The result is checked before it is kept. A .nemo is restored and has to give the source's weights and texts. A Hugging
Face directory is loaded by transformers and compared with NeMo on clips, single and batched: encoder and joint
outputs, and texts. The clips are the first of --data, else of the run's data.validation. The export itself needs no
NeMo; the comparison uses it if it is installed.

--to hotwords writes phrases as sherpa-onnx takes them beside an export of the model (docs/boosting.md).
"""

import argparse
import sys
from pathlib import Path

from finetune.errors import UserError
from finetune.logs import print_error, set_up_logging
from finetune.security.safe_text import one_line
from finetune.tools.command_line import add_model, command, run_command
from finetune.tools.export import CLIPS, DTYPES, TOLERANCE


def make_parser() -> argparse.ArgumentParser:
    parser = command(
        "export", __doc__ or "", "python -m finetune.export --model runs/quickstart --to hf --output exported"
    )
    add_model(parser, required=True)
    parser.add_argument("--to", choices=("nemo", "hf", "hotwords"), default="nemo", help="format (default: nemo)")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="directory for the result")
    parser.add_argument("--boost", type=Path, metavar="FILE", help="phrases, one a line, for --to hotwords")
    only = parser.add_argument_group("only with --to hf")
    only.add_argument(
        "--data",
        nargs="+",
        metavar="D",
        help=f"data whose first {CLIPS} clips are compared (default: the run's data.validation)",
    )
    only.add_argument("--split", help="split of --data (default: validation)")
    only.add_argument(
        "--tolerance",
        type=float,
        default=TOLERANCE,
        help=f"largest difference of encoder and joint outputs, relative to the largest (default: {TOLERANCE:g})",
    )
    only.add_argument(
        "--head",
        choices=("transducer", "ctc"),
        help="of a hybrid model: its transducer (TDT or RNN-T, the default), or its CTC head",
    )
    only.add_argument("--dtype", choices=DTYPES, default="float32", help="of the written weights (default: float32)")
    return parser


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if (arguments.to == "hotwords") != (arguments.boost is not None):
        parser.error("--to hotwords and --boost FILE go together")
    if arguments.to != "hf" and (arguments.data or arguments.head or arguments.dtype != "float32"):
        parser.error("--data, --head and --dtype are for --to hf")
    if arguments.split and not arguments.data:
        parser.error("--split is of --data")
    if not arguments.tolerance > 0:
        parser.error("--tolerance has to be above 0")
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Export; return the exit code."""
    arguments = parse_arguments(argv)
    set_up_logging(arguments.verbose)
    try:
        if arguments.to == "hf":
            from finetune.data.sources import split_to_read
            from finetune.tools.export.hugging_face import export_hugging_face

            split = split_to_read(arguments.data or [], arguments.split, "validation")
            report = export_hugging_face(
                arguments.model,
                arguments.output,
                data=arguments.data,
                split=split,
                tolerance=arguments.tolerance,
                dtype=arguments.dtype,
                head=arguments.head,
            )
            print(report)
        elif arguments.to == "hotwords":
            from finetune.data.phrases import read_phrases
            from finetune.tools.export.hotwords import how_to_use, write_hotwords

            for phrase, reason in write_hotwords(
                arguments.model, read_phrases(arguments.boost), arguments.output
            ).items():
                print(f"left out: {one_line(phrase)}: {reason}", file=sys.stderr)
            print(how_to_use(arguments.output))
        else:
            from finetune.tools.export.nemo import export_nemo

            path = export_nemo(arguments.model, arguments.output, arguments.tokenizer)
            print(f"{path} ({path.stat().st_size / 1e6:.1f} MB), read again and equal")
    except UserError as error:
        print_error(error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
