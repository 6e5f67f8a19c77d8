"""Train a SentencePiece tokenizer on texts, or add pieces to an existing one, and report how well it encodes them.

    python -m finetune.tokenizer --data D [D ...] --size N --output DIR
    python -m finetune.tokenizer --data D --size N --output DIR --extend nvidia/parakeet-tdt-0.6b-v3 --report-on OLD
    python -m finetune.tokenizer --data D --size N --output DIR --against M --json report.json

D: a data set as everywhere, or a .txt file with one text a line. M: a model, a tokenizer directory or a .model file.
Exit codes: 0 done, 1 failed, 2 bad arguments.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.config.tokenizer_setting import NEW_PIECES
from finetune.data.normalization import NORMALIZATIONS
from finetune.durable_files import write_json
from finetune.errors import UserError
from finetune.logs import print_error, set_up_logging
from finetune.tools.command_line import add_json, command, positive, run_command

if TYPE_CHECKING:
    from finetune.data.text_corpus import Text
    from finetune.models.tokenizer_growth import Growth

EXAMPLE = "python -m finetune.tokenizer --data examples/voice_prompts --size 128 --output tokenizer --json report.json"
COVERAGE = 0.9995  # SentencePiece's own default


def make_parser() -> argparse.ArgumentParser:
    parser = command("tokenizer", __doc__ or "", EXAMPLE)
    add = parser.add_argument
    add("--data", nargs="+", required=True, metavar="D", help="texts to learn from; with --extend also a tokenizer")
    add("--split", help="split of a data set (default: train)")
    add("--size", type=positive, required=True, metavar="N", help="pieces; with --extend: at most so many new ones")
    add("--output", type=Path, required=True, metavar="DIR", help="for tokenizer.model, tokenizer.vocab and vocab.txt")
    add("--type", choices=("bpe", "unigram"), help="default: bpe; with --extend that of the old one")
    add("--byte-fallback", action="store_true", help="spell characters without a piece as bytes (256 pieces)")
    share = f"share of the texts' characters that get a piece (default: {COVERAGE}; with --extend: 1)"
    add("--coverage", type=float, help=share)
    add("--normalization", default="none", choices=NORMALIZATIONS, help="of the texts, as data.text_normalization")
    add("--against", metavar="M", help="tokenizer to compare with (default: that of --extend)")
    add("--extend", metavar="M", help="append pieces to this tokenizer; the old ones keep their ids")
    add("--pieces", choices=NEW_PIECES, help="with --extend: those with a new character (default), or all")
    more = "further texts for the report, such as languages the model has"
    add("--report-on", nargs="+", default=[], metavar="D", help=more)
    add_json(parser)
    return parser


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if arguments.coverage is not None and not 0.9 <= arguments.coverage <= 1:
        parser.error(f"--coverage: a share from 0.9 to 1 is expected, found {arguments.coverage}")
    if arguments.extend and (arguments.type or arguments.byte_fallback):
        parser.error("--type and --byte-fallback are for a new tokenizer; --extend keeps those of the old one")
    if arguments.pieces and not arguments.extend:
        parser.error("--pieces chooses what --extend appends")
    return arguments


def make_tokenizer(arguments: argparse.Namespace) -> tuple[Any, Growth | None, list[Text]]:
    """Return the SentencePiece message, how it grew if it extends an old one, and the texts that it learned from."""
    from finetune.data.sources import split_to_read
    from finetune.data.text_corpus import read_texts
    from finetune.models.loading import is_tokenizer, read_tokenizer
    from finetune.models.sentencepiece_model import train_tokenizer
    from finetune.models.tokenizer_growth import grow_from_tokenizer, grow_on_texts

    a = arguments
    old = read_tokenizer(a.extend, "--extend") if a.extend else None
    pieces = a.pieces or NEW_PIECES[0]
    if old is not None and len(a.data) == 1 and is_tokenizer(a.data[0]):
        growth = grow_from_tokenizer(old, read_tokenizer(a.data[0], "--data"), a.size, pieces=pieces, key="--size")
        return growth.model, growth, []
    split = split_to_read(a.data + a.report_on, a.split, "train")
    texts = read_texts(a.data, "--data", a.normalization, split)
    plain = [text.text for text in texts]
    if old is not None:
        coverage = 1.0 if a.coverage is None else a.coverage
        growth = grow_on_texts(old, plain, a.size, pieces=pieces, coverage=coverage, key="--size")
        return growth.model, growth, texts
    coverage = COVERAGE if a.coverage is None else a.coverage
    kind = a.type or "bpe"
    model = train_tokenizer(plain, a.size, kind=kind, byte_fallback=a.byte_fallback, coverage=coverage, key="--size")
    return model, None, texts


def main(argv: list[str] | None = None) -> int:
    """Make a tokenizer and report on it; return the exit code."""
    arguments = parse_arguments(argv)
    set_up_logging(arguments.verbose)
    from finetune.data.text_corpus import read_texts
    from finetune.models.loading import read_tokenizer
    from finetune.models.sentencepiece_model import kind_of, write_tokenizer
    from finetune.models.tokenizer_coverage import compare, table

    try:
        model, growth, texts = make_tokenizer(arguments)
        against = arguments.against or arguments.extend
        old = read_tokenizer(against, "--against" if arguments.against else "--extend") if against else None
        if arguments.report_on:
            texts = texts + read_texts(
                arguments.report_on, "--report-on", arguments.normalization, arguments.split or "train"
            )
    except UserError as error:
        print_error(error)
        return error.exit_code
    write_tokenizer(model, arguments.output)
    report: dict[str, Any] = {"tokenizer": str(arguments.output), "type": kind_of(model), "pieces": len(model.pieces)}
    print(f"{report['type']} tokenizer of {report['pieces']} pieces in {arguments.output}")
    if old is not None:
        report["against"] = {"tokenizer": against, "type": kind_of(old), "pieces": len(old.pieces)}
    if growth is not None:
        report["growth"] = growth.as_json()
        print(growth)
    if texts:
        report |= compare(texts, model, old)
        print(table(report))
        if report["not_written"]:
            shown = ", ".join(f"{c!r} {n}" for c, n in report["not_written"][:10])
            print(f"characters without a piece, and how often they occur: {shown}")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        write_json(arguments.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
