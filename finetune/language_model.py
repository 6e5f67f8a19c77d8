"""Make an n-gram language model of a model's tokens out of texts, for --lm of transcribe and evaluate.

    python -m finetune.language_model --data D [D ...] --model M --output DIR [--order 4]

D: a data set as everywhere, or a .txt file with one text a line. M: whose tokens they are: a model, a tokenizer
directory or a .model file. DIR: lm.arpa, which NeMo's own programs read too, and the same in a form that loads at
once.
Exit codes: 0 done, 1 failed, 2 bad arguments.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from finetune.data.normalization import NORMALIZATIONS
from finetune.errors import UserError
from finetune.logs import print_error, set_up_logging
from finetune.tools.command_line import MODEL, command, positive, run_command, writing

EXAMPLE = "python -m finetune.language_model --data examples/voice_prompts --model runs/quickstart --output lm"
ORDERS = range(2, 11)


def make_parser() -> argparse.ArgumentParser:
    parser = command("language_model", __doc__ or "", EXAMPLE)
    add = parser.add_argument
    add("--data", nargs="+", required=True, metavar="D", help="texts to learn from")
    add("--split", help="split of a data set (default: train)")
    add("--model", required=True, metavar="M", help=f"{MODEL}; or a tokenizer")
    add("--output", type=Path, required=True, metavar="DIR", help="for lm.arpa, lm.safetensors and lm.json")
    add("--order", type=int, default=4, metavar="N", help="tokens of the longest n-grams (default: 4)")
    least = "leave out n-grams of three tokens and more that come less often (default: 1, none)"
    add("--least", type=positive, default=1, metavar="TIMES", help=least)
    own = "of the texts, as data.text_normalization (default: basic for a vocabulary without capitals, else none)"
    add("--normalization", choices=NORMALIZATIONS, help=own)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Make a language model; return the exit code."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if arguments.order not in ORDERS:
        parser.error(f"--order: from {ORDERS[0]} to {ORDERS[-1]} is expected, found {arguments.order}")
    set_up_logging(arguments.verbose)
    from finetune.data.sources import split_to_read
    from finetune.tools.language_model.making import make_language_model

    a = arguments
    try:
        with writing("--output", a.output):
            about = make_language_model(
                a.data,
                split_to_read(a.data, a.split, "train"),
                a.model,
                a.output,
                order=a.order,
                least=a.least,
                normalization=a.normalization,
            )
    except UserError as error:
        print_error(error)
        return error.exit_code
    counts = ", ".join(f"{n:,} of {order}" for order, n in enumerate(about["ngrams"], 1))
    print(f"{about['texts']:,} texts, {about['text_tokens']:,} tokens; n-grams: {counts}")
    if about["left_out"]:
        print(f"{about['left_out']:,} texts have characters without a token, and are left out")
    print(f"--lm {a.output}")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
