"""Options that several commands share. Nothing heavy is imported, so that --help answers at once."""

import argparse
import contextlib
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from finetune.errors import UserError

if TYPE_CHECKING:
    from finetune.models.boosting import Boosting

MODEL = "a .nemo file, a run's directory, an adapter's or a Hugging Face directory, a hub name, or a NeMo model YAML"
DATA = "a NeMo manifest, a folder or glob of parquet or tar shards, an audio folder, or a hub data set name"

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it: 128 and the number of SIGINT."""
SIGTERM = "SIGTERM"
TERMINATED = 143
"""Exit code after SIGTERM where `stopping_on_sigterm` catches it."""


def run_command(main: Callable[[], int]) -> int:
    """Return a command's exit code; after Ctrl-C say so in one sentence, with what the KeyboardInterrupt adds."""
    try:
        return main()
    except KeyboardInterrupt as stop:
        start = "\n" if sys.stderr.isatty() else ""  # behind the terminal's ^C
        print(f"{start}interrupted{f': {stop}' if stop.args else ''}", file=sys.stderr)
        return TERMINATED if str(stop) == SIGTERM else INTERRUPTED


@contextlib.contextmanager
def stopping_on_sigterm() -> Iterator[None]:
    """Within, SIGTERM ends a command as Ctrl-C does, so that it cleans up: KeyboardInterrupt(SIGTERM) is raised."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(SIGTERM)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def command(name: str, description: str, *examples: str) -> argparse.ArgumentParser:
    """Return the parser of `python -m finetune.NAME`, which has --verbose already.

    Args:
        description: may be a module's docstring.
        examples: command lines to copy, shown below the options.
    """
    from finetune.logs import add_verbose  # needs a package, and `doctor` reports those that are missing

    parser = argparse.ArgumentParser(
        prog=f"python -m finetune.{name}",
        description=description,
        epilog="\n  ".join(["examples:" if len(examples) > 1 else "example:", *examples]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_verbose(parser)
    return parser


def positive(text: str) -> int:
    """Parse an integer from 1 on, for argparse."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError("has to be 1 or more")
    return int(text)


def add_model(parser: argparse.ArgumentParser, *, required: bool) -> None:
    parser.add_argument("--model", required=required, metavar="M", help=MODEL)
    parser.add_argument("--tokenizer", metavar="DIR", help="tokenizer directory, for a NeMo model YAML")


def add_data(parser: argparse.ArgumentParser, purpose: str, split: str = "test") -> None:
    parser.add_argument("--data", nargs="+", metavar="D", help=f"{purpose}; each {DATA}")
    parser.add_argument("--split", help=f"split of a folder or hub data set (default: {split})")
    parser.add_argument("--max-samples", type=int, default=-1, metavar="N", help="only the first N clips")


def add_decoding(parser: argparse.ArgumentParser, batch_size: int, what: str = "clips") -> None:
    parser.add_argument(
        "--batch-size",
        type=positive,
        default=batch_size,
        metavar="N",
        help=f"{what} decoded together (default: {batch_size})",
    )
    parser.add_argument("--device", help="such as cpu or cuda:1 (default: cuda if there is a GPU, else cpu)")


def add_dtype(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of weights and activations; bfloat16 is several times faster on a GPU (default: float32)",
    )


def add_head(parser: argparse.ArgumentParser) -> None:
    default = "the transducer, or CTC where model.ctc_loss_weight was 1"
    parser.add_argument(
        "--head", choices=("transducer", "ctc"), help=f"the head of a hybrid model that decodes (default: {default})"
    )


def add_language(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--language",
        metavar="CODE",
        help=f"of a prompt model, such as de-DE, or auto: the model finds it (default: {default})",
    )


def add_look_ahead(parser: argparse.ArgumentParser, purpose: str) -> None:
    frames = "in encoder frames, such as 13 or 13,6,1; of a unified model chunk+right context, such as 7+7"
    parser.add_argument("--look-ahead", metavar="N", help=f"{purpose}: {frames} (docs/streaming.md)")


BOOST_WEIGHT, LM_WEIGHT = 0.4, 0.2


def add_boosting(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--boost", type=Path, metavar="FILE", help="phrases to listen for, one a line (docs/boosting.md)")
    add("--boost-weight", type=weight, metavar="W", help=f"how much; 0: not at all (default: {BOOST_WEIGHT:g})")
    add(
        "--lm", type=Path, metavar="DIR", help="a language model of finetune.language_model, or an ARPA file of tokens"
    )
    add("--lm-weight", type=weight, metavar="W", help=f"how much of it; 0: nothing (default: {LM_WEIGHT:g})")
    beam = "texts that a transducer weighs up at a time with --boost or --lm (default: 1, greedy); 4 finds far more"
    add("--beam", type=positive, default=1, metavar="N", help=beam)


def weight(text: str) -> float:
    """Parse a number from 0 on, for argparse."""
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError("has to be 0 or more")
    return value


def check_boosting(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """End with a usage error where a weight has nothing to weigh."""
    for name in ("boost", "lm"):
        if getattr(arguments, f"{name}_weight") is not None and getattr(arguments, name) is None:
            parser.error(f"--{name}-weight goes with --{name}")
    if arguments.beam > 1 and arguments.boost is None and arguments.lm is None:
        parser.error("--beam goes with --boost or --lm")


def boosting_of(arguments: argparse.Namespace) -> "Boosting | None":
    """Return what `add_boosting` asks for; None: nothing.

    Raises:
        UserError: the file of phrases cannot be used.
    """
    a = arguments
    if a.boost is None and a.lm is None:
        return None
    from finetune.data.phrases import read_phrases
    from finetune.models.boosting import Boosting

    return Boosting(
        file=a.boost,
        phrases=read_phrases(a.boost) if a.boost is not None else [],
        weight=BOOST_WEIGHT if a.boost_weight is None else a.boost_weight,
        lm=a.lm,
        lm_weight=LM_WEIGHT if a.lm_weight is None else a.lm_weight,
        beam=a.beam,
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here")


def check_json(path: Path) -> None:
    """Raise UserError where `--json` names no file that could be written."""
    if path.is_dir():
        raise UserError(f"--json: {path} is a directory. Name a file.")
    check_folder("--json", path.parent)


def check_folder(option: str, folder: Path) -> None:
    """Raise UserError where nothing can be written into a folder that an option names, whether it is there or not."""
    folder = folder.absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir():
        raise UserError(f"{option}: {there} is a file, and a directory is needed. Name another one.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"{option}: {there} cannot be written to. Name another directory.")


@contextlib.contextmanager
def writing(option: str, path: Path | None) -> Iterator[None]:
    """Turn a failure to write what an option names into a UserError.

    Raises:
        UserError: the file or folder cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise UserError(f"{option}: {path} cannot be written: {error}", exit_code=1) from error


def device_of(arguments: argparse.Namespace) -> str:
    """The device of `--device`, or the default."""
    if arguments.device is None:
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"
    return arguments.device
