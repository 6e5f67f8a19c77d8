"""Train a SentencePiece tokenizer on the texts of data sets, or give an old one more pieces, and say how well it writes them.

    python -m finetune.tokenizer --data D [D ...] --size N --output DIR
    python -m finetune.tokenizer --data D --size N --output DIR --extend nvidia/parakeet-tdt-0.6b-v3 --report-on OLD
    python -m finetune.tokenizer --data D --size N --output DIR --against M --json report.json

D is a data set as everywhere, or a .txt file with one text a line. M is a model, a tokenizer directory or a .model file.
Exit codes: 0 done, 1 failed, 2 bad arguments.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from finetune.config.tokenizer_setting import NEW_PIECES
from finetune.data.normalization import NORMALIZATIONS
from finetune.data.text_corpus import Text, read_texts
from finetune.errors import UserError
from finetune.logs import print_error, set_up_logging
from finetune.models.loading import is_tokenizer, read_tokenizer
from finetune.models.sentencepiece_model import KINDS, kind_of, train_tokenizer, write_tokenizer
from finetune.models.tokenizer_coverage import compare, table
from finetune.models.tokenizer_growth import Growth, grow_from_tokenizer, grow_on_texts

COVERAGE = 0.9995  # SentencePiece's own default


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m finetune.tokenizer", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--data",
        nargs="+",
        required=True,
        metavar="D",
        help="data sets whose texts are learned from; with --extend also a tokenizer",
    )
    add("--split", default="train", help="split of a data set (default: train)")
    add(
        "--size",
        type=int,
        required=True,
        metavar="N",
        help="pieces of the tokenizer; with --extend: pieces that are appended at most",
    )
    add(
        "--output",
        type=Path,
        required=True,
        metavar="DIR",
        help="directory for tokenizer.model, tokenizer.vocab and vocab.txt",
    )
    add("--type", choices=sorted(KINDS.values()), default=None, help="default: bpe; with --extend that of the old one")
    add("--byte-fallback", action="store_true", help="spell characters without a piece as bytes (256 pieces)")
    add(
        "--coverage",
        type=float,
        help=f"share of the texts' characters that get a piece (default: {COVERAGE}; with --extend: 1)",
    )
    add("--normalization", default="none", choices=NORMALIZATIONS, help="of the texts, as data.text_normalization")
    add("--against", metavar="M", help="tokenizer to compare with (default: that of --extend)")
    add("--extend", metavar="M", help="append pieces to this tokenizer; the old ones keep their ids")
    add("--pieces", choices=NEW_PIECES, help="with --extend: those with a new character (default), or all")
    add(
        "--report-on",
        nargs="+",
        default=[],
        metavar="D",
        help="further texts for the report, such as languages the model has",
    )
    add("--json", type=Path, metavar="FILE", help="write the report as JSON")
    arguments = parser.parse_args(argv)
    if arguments.size < 1:
        parser.error(f"--size: a number of pieces from 1 on is expected, found {arguments.size}")
    if arguments.coverage is not None and not 0.9 <= arguments.coverage <= 1:
        parser.error(f"--coverage: a share from 0.9 to 1 is expected, found {arguments.coverage}")
    if arguments.extend and (arguments.type or arguments.byte_fallback):
        parser.error("--type and --byte-fallback are of a new tokenizer; --extend keeps those of the old one")
    if arguments.pieces and not arguments.extend:
        parser.error("--pieces: it chooses what --extend appends")
    return arguments


def make(arguments: argparse.Namespace, texts: list[Text]) -> tuple[Any, Growth | None]:
    """The new tokenizer, and how it grew out of an old one."""
    plain = [text.text for text in texts]
    if not arguments.extend:
        coverage = COVERAGE if arguments.coverage is None else arguments.coverage
        kind = arguments.type or "bpe"
        return train_tokenizer(
            plain, arguments.size, kind=kind, byte_fallback=arguments.byte_fallback, coverage=coverage, key="--size"
        ), None
    old = read_tokenizer(arguments.extend, "--extend")
    pieces = arguments.pieces or NEW_PIECES[0]
    if len(arguments.data) == 1 and is_tokenizer(arguments.data[0]):
        other = read_tokenizer(arguments.data[0], "--data")
        growth = grow_from_tokenizer(old, other, arguments.size, pieces=pieces, key="--size")
    else:
        coverage = 1.0 if arguments.coverage is None else arguments.coverage
        growth = grow_on_texts(old, plain, arguments.size, pieces=pieces, coverage=coverage, key="--size")
    return growth.model, growth


def main(argv: list[str] | None = None) -> int:
    """Makes a tokenizer as its arguments say; returns the exit code."""
    set_up_logging()
    arguments = parse_arguments(argv)
    try:
        from_tokenizer = bool(arguments.extend) and len(arguments.data) == 1 and is_tokenizer(arguments.data[0])
        texts = (
            [] if from_tokenizer else read_texts(arguments.data, "--data", arguments.normalization, arguments.split)
        )
        model, growth = make(arguments, texts)
        against = arguments.against or arguments.extend
        old = read_tokenizer(against, "--against" if arguments.against else "--extend") if against else None
        if arguments.report_on:
            texts = texts + read_texts(arguments.report_on, "--report-on", arguments.normalization, arguments.split)
    except UserError as error:
        print_error(error)
        return error.exit_code
    write_tokenizer(model, arguments.output)
    report: dict[str, Any] = {"tokenizer": str(arguments.output), "type": kind_of(model), "pieces": len(model.pieces)}
    if old is not None:
        report["against"] = {"tokenizer": against, "type": kind_of(old), "pieces": len(old.pieces)}
    if growth is not None:
        report["growth"] = growth.as_json()
    if texts:
        report |= compare(texts, model, old)
    print(f"{report['type']} tokenizer of {report['pieces']} pieces in {arguments.output}")
    if growth is not None:
        print(growth)
    if texts:
        print(table(report))
        if report["not_written"]:
            shown = ", ".join(f"{c!r} {n}" for c, n in report["not_written"][:10])
            print(f"characters without a piece, and how often they occur: {shown}")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
