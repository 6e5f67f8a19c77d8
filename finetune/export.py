"""Write a trained model for use elsewhere: a .nemo, or a directory for transformers, onnx-asr or sherpa-onnx.

    python -m finetune.export --model M --to nemo --output DIR
    python -m finetune.export --model M --to hf --output DIR [--data D]
    python -m finetune.export --model M --to onnx|sherpa [--precision fp32|fp16|int8] --output DIR [--data D]
    python -m finetune.export --model M --to sherpa --look-ahead N [--precision fp32|int8] --output DIR [--data D]
    python -m finetune.export --model M --check DIR [--data D]
    python -m finetune.export --model M --to hotwords --boost FILE --output DIR

--to hf takes a .nemo file, a run's or an adapter's directory, or a hub name.

The result is checked before it is kept. A .nemo is restored and has to give the source's weights and texts. A Hugging
Face directory is loaded by transformers and compared with NeMo on clips, single and batched: encoder and joint
outputs, and texts. The clips are the first of --data, else of the run's data.validation. The export itself needs no
NeMo; the comparison uses it if it is installed.

What onnx-asr or sherpa-onnx shall run is decoded by it, beside NeMo, on all clips: fp32 has to give the same texts,
fp16 and int8 a WER whose loss is within --max-loss. int8 is tried in several ways (docs/export.md). What does not pass
is not kept; DIR then holds the report.
With --look-ahead a streaming model is written for sherpa-onnx's online recogniser, for one look-ahead a directory, and
compared with NeMo's cache-aware inference.
--check holds a directory that was exported before to the same, and changes nothing.
--to hotwords writes phrases as sherpa-onnx takes them beside an export of the model (docs/boosting.md).
"""

import argparse
import sys
from pathlib import Path

from finetune.errors import UserError
from finetune.logs import print_error, set_up_logging
from finetune.security.safe_text import one_line
from finetune.tools.command_line import add_model, command, run_command, stopping_on_sigterm
from finetune.tools.export import CLIPS, DTYPES, PRECISIONS, RUNTIMES, TOLERANCE
from finetune.tools.export.gate import MAX_LOSS


def make_parser() -> argparse.ArgumentParser:
    parser = command(
        "export", __doc__ or "", "python -m finetune.export --model runs/quickstart --to hf --output exported"
    )
    add_model(parser, required=True)
    add = parser.add_argument
    add("--to", choices=("nemo", "hf", *RUNTIMES, "hotwords"), help="format (default: nemo)")
    add("--output", type=Path, metavar="DIR", help="directory for the result; with --check for the report")
    add("--check", type=Path, metavar="DIR", help="an export for onnx-asr or sherpa-onnx, to be checked again")
    add("--boost", type=Path, metavar="FILE", help="phrases, one a line, for --to hotwords")
    score = "with --to hotwords: of each token of a phrase in sherpa-onnx (default: 0.5)"
    add("--hotwords-score", type=float, metavar="S", help=score)
    compared = f"data to compare on, with --to hf its first {CLIPS} clips (default: the run's data.validation)"
    add("--data", nargs="+", metavar="D", help=f"{compared}; not with --to nemo")
    add("--split", help="split of --data (default: validation)")
    heads = "of a hybrid model, not with --to nemo: its transducer (TDT or RNN-T, the default), or its CTC head"
    add("--head", choices=("transducer", "ctc"), help=heads)
    only = parser.add_argument_group("only with --to onnx and sherpa")
    only.add_argument("--precision", choices=PRECISIONS, help="of the weights (default: fp32)")
    only.add_argument(
        "--max-loss",
        type=float,
        metavar="POINTS",
        help=f"of WER, that the upper end of the 95 %% interval may reach (default: {MAX_LOSS:g}; fp32: equal texts)",
    )
    only.add_argument(
        "--look-ahead",
        metavar="N",
        help="with --to sherpa, of a streaming model: in encoder frames, such as 13 (docs/streaming.md)",
    )
    only.add_argument(
        "--calibrate",
        nargs="+",
        metavar="D",
        help="with --precision int8: clips for static int8, if dynamic does not pass (default: the run's data.train)",
    )
    only.add_argument("--max-samples", type=int, default=-1, metavar="N", help="compare on the first N clips only")
    only = parser.add_argument_group("only with --to hf")
    only.add_argument(
        "--tolerance",
        type=float,
        default=TOLERANCE,
        help=f"largest difference of encoder and joint outputs, relative to the largest (default: {TOLERANCE:g})",
    )
    only.add_argument("--dtype", choices=DTYPES, default="float32", help="of the written weights (default: float32)")
    return parser


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if arguments.check is not None and (arguments.to or arguments.precision):
        parser.error("--check takes an export as it is: leave out --to and --precision")
    arguments.to = arguments.to or "nemo"
    if arguments.output is None and arguments.check is None:
        parser.error("--output names the directory for the result")
    for_runtime = arguments.to in RUNTIMES or arguments.check is not None
    if arguments.to != "hf" and (arguments.dtype != "float32" or arguments.tolerance != TOLERANCE):
        parser.error("--dtype and --tolerance are for --to hf")
    if (arguments.to == "hotwords") != (arguments.boost is not None):
        parser.error("--to hotwords and --boost FILE go together")
    if arguments.hotwords_score is not None and (arguments.to != "hotwords" or not arguments.hotwords_score > 0):
        parser.error("--hotwords-score is for --to hotwords, and above 0")
    if arguments.to == "hf" and arguments.check is None and arguments.tokenizer:
        parser.error("--tokenizer is for a model YAML, which --to hf does not take")
    if arguments.to in ("nemo", "hotwords") and not for_runtime and (arguments.data or arguments.head):
        parser.error(f"--data and --head are not for --to {arguments.to}")
    if not for_runtime and (arguments.precision or arguments.max_loss is not None or arguments.max_samples >= 0):
        parser.error("--precision, --max-loss and --max-samples are for --to onnx and sherpa")
    if arguments.look_ahead is not None and (arguments.to != "sherpa" or arguments.check is not None):
        parser.error("--look-ahead is for --to sherpa: other formats hear whole recordings, and --check reads it")
    if arguments.look_ahead is not None and arguments.precision == "fp16":
        parser.error("--look-ahead goes with --precision fp32 or int8")
    if arguments.calibrate and arguments.precision != "int8":
        parser.error("--calibrate is for --precision int8")
    if arguments.max_loss is not None and arguments.to == "onnx" and arguments.precision in (None, "fp32"):
        parser.error("--max-loss is not for fp32 in onnx-asr, which has to give equal texts")
    if arguments.max_loss is not None and not 0 <= arguments.max_loss <= 100:
        parser.error("--max-loss is in points of WER, from 0 to 100")
    if arguments.max_samples == 0:
        parser.error("--max-samples has to be 1 or more")
    if arguments.split and not arguments.data:
        parser.error("--split is of --data")
    if not arguments.tolerance > 0:
        parser.error("--tolerance has to be above 0")
    return arguments


def for_runtimes(arguments: argparse.Namespace) -> str:
    """Export for onnx-asr or sherpa-onnx, or check such an export; return the lines to print."""
    from finetune.data.sources import split_to_read
    from finetune.tools.export.gated import Wanted, check_again, export_gated

    a = arguments
    wanted = Wanted(
        a.model,
        a.to,
        a.precision or "fp32",
        a.head,
        a.tokenizer,
        a.data,
        split_to_read(a.data or [], a.split, "validation"),
        a.max_samples,
        a.max_loss,
        a.look_ahead,
        a.calibrate,
    )
    return check_again(wanted, a.check, a.output) if a.check is not None else export_gated(wanted, a.output)


def main(argv: list[str] | None = None) -> int:
    """Export; return the exit code."""
    arguments = parse_arguments(argv)
    set_up_logging(arguments.verbose)
    try:
        with stopping_on_sigterm():
            export(arguments)
    except UserError as error:
        print_error(error)
        return error.exit_code
    return 0


def export(arguments: argparse.Namespace) -> None:
    """Export as the arguments say, and print what was written.

    Raises:
        UserError: it cannot be written, or is not what the model is.
    """
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
    elif arguments.to in RUNTIMES or arguments.check is not None:
        print(for_runtimes(arguments))
    elif arguments.to == "hotwords":
        from finetune.data.phrases import read_phrases
        from finetune.tools.export.hotwords import SCORE, how_to_use, write_hotwords

        score = SCORE if arguments.hotwords_score is None else arguments.hotwords_score
        tokens = arguments.tokenizer or arguments.model
        left_out = write_hotwords(tokens, read_phrases(arguments.boost), arguments.output, score)
        for phrase, reason in left_out.items():
            print(f"left out: {one_line(phrase)}: {reason}", file=sys.stderr)
        print(how_to_use(arguments.output, score))
    else:
        from finetune.tools.export.nemo import export_nemo

        path = export_nemo(arguments.model, arguments.output, arguments.tokenizer)
        print(f"{path} ({path.stat().st_size / 1e6:.1f} MB), read again and equal")


if __name__ == "__main__":
    sys.exit(run_command(main))
