"""Average the weights of models of one layout, such as those of several runs from the same base model.

    python -m finetune.average --models A.nemo B.nemo ... --output DIR [--data D] [--split test] [--json FILE]

Writes DIR/model.nemo: the mean of all weights and BatchNorm statistics, summed in float32, with everything else from
the first model. The models need the same tensors and the same tokens. With --data each of them and the mean are
evaluated.
"""

import argparse
import sys
from pathlib import Path

from finetune.data.normalization import NORMALIZATIONS
from finetune.durable_files import write_json
from finetune.errors import UserError
from finetune.logs import print_error, set_up_logging
from finetune.tools.command_line import MODEL, add_data, add_decoding, add_json, command, device_of, run_command

EXAMPLE = "python -m finetune.average --models runs/one runs/two --output runs/mean --data examples/voice_prompts"


def make_parser() -> argparse.ArgumentParser:
    parser = command("average", __doc__ or "", EXAMPLE)
    parser.add_argument("--models", required=True, nargs="+", metavar="M", help=f"two or more, each {MODEL}")
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="directory for model.nemo")
    add_data(parser, "data sets on which the models and their mean are evaluated")
    add_decoding(parser, 16)
    parser.add_argument("--normalization", default="basic", choices=NORMALIZATIONS, help="of both texts")
    add_json(parser)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Average; return the exit code."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if len(arguments.models) < 2:
        parser.error("--models: a mean takes two models or more")
    if arguments.split and not arguments.data:
        parser.error("--split is of --data")
    set_up_logging(arguments.verbose)
    from finetune.data.sources import split_to_read
    from finetune.evaluation.dataset import EvaluationSettings
    from finetune.tools.averaging import write_mean

    settings = None
    try:
        if arguments.data:
            settings = EvaluationSettings(
                data=arguments.data,
                split=split_to_read(arguments.data, arguments.split, "test"),
                batch_size=arguments.batch_size,
                normalization=arguments.normalization,
                max_samples=arguments.max_samples,
                device=device_of(arguments),
                resamples=0,
            )
        path, rows = write_mean(arguments.models, arguments.output, settings)
    except UserError as error:
        print_error(error)
        return error.exit_code
    for row in rows if arguments.data else ():
        print(f"{100 * row['wer']:7.2f} % WER {100 * row['cer']:7.2f} % CER on {row['clips']} clips  {row['model']}")
    size = path.stat().st_size / 1e6
    print(f"{path} ({size:.1f} MB): the mean of {len(arguments.models)} models, read again and equal")
    if arguments.json:
        write_json(arguments.json, {"output": str(path), "models": rows, "data": arguments.data})
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
