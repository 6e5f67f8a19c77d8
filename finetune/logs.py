"""Plain log lines of this project on the main process. What libraries report is shown with --verbose only.

Records of other libraries below ERROR, Python warnings and their launch banners become DEBUG records of the logger
`finetune.third_party`.
"""

import argparse
import contextlib
import copy
import errno
import io
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from tqdm import tqdm

from finetune.security.safe_text import Block, lines, one_line
from finetune.security.secrets import REMOVED, TOKENS, clean_urls, secrets_of_the_environment

if TYPE_CHECKING:
    from rich.console import Console

VERBOSE = "FINETUNE_VERBOSE"
"""Environment variable that stands for --verbose; processes that this one starts inherit it."""

OWN_HANDLERS = ("DeepSpeed", "nemo_logger", "torch.utils.cpp_extension")
"""Loggers to which their libraries add handlers when they are imported."""

QUIET = {
    "TRANSFORMERS_VERBOSITY": "error",
    "DATASETS_VERBOSITY": "error",
    "TORCH_LOGS": "-all",  # errors only
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
"""Environment of libraries that report past the root logger; it counts when they are imported."""

UNIMPORTANT_ERRORS = ("nv_one_logger",)
"""Loggers whose ERROR records say nothing about the run: telemetry that is not set up."""

ONE_LINE = {"one_line": True}
"""`extra` of records that are cut off at the end of a terminal's line, as rows of a table are."""

GONE = (errno.EIO, errno.EPIPE, errno.ENXIO)
"""Errors of a write where the terminal was closed or nobody reads the pipe."""

_console: "Console | None" = None


class _ConsoleHandler(logging.Handler):
    """Write above a progress bar or a panel instead of through it."""

    def emit(self, record: logging.LogRecord) -> None:
        text = without_secrets(lines(self.format(_printable(record))))
        cut = getattr(record, "one_line", False)
        try:
            if _console is None:
                tqdm.write(text, file=sys.stderr)
            else:
                overflow = "crop" if cut else None
                _console.print(
                    text, markup=False, highlight=False, emoji=False, soft_wrap=not cut, no_wrap=cut, overflow=overflow
                )
        except OSError as error:  # a log that cannot be written ends no run
            silence_lost_terminal(error)


def _pass_on(record: logging.LogRecord) -> bool:
    """Log a library's record as `finetune.third_party`, below ERROR as DEBUG, and keep it from other handlers."""
    unimportant = record.levelno < logging.ERROR or record.name.startswith(UNIMPORTANT_ERRORS)
    try:
        text = record.getMessage()
    except (TypeError, ValueError):  # its arguments do not fit its format
        text = str(record.msg)
    level = logging.DEBUG if unimportant else record.levelno
    logging.getLogger("finetune.third_party").log(level, "%s: %s", record.name, Block(text.rstrip("\n")))
    return False


_third_party = logging.Handler()
"""Of the root logger, where the records of all other libraries arrive; its filter takes them all."""
_third_party.addFilter(_pass_on)


def _printable(record: logging.LogRecord) -> logging.LogRecord:
    """Return the record with arguments that cannot break its line or act on the terminal; a warning begins with the
    word."""
    record = copy.copy(record)
    if isinstance(record.args, tuple):
        record.args = tuple(_argument(value) for value in record.args)
    if record.levelno == logging.WARNING:
        record.msg = f"warning: {record.msg}"
    return record


def _argument(value: object) -> object:
    if isinstance(value, BaseException | Block):
        return lines(value)  # a message may have lines
    return one_line(value) if isinstance(value, str | Path) else value


def without_secrets(text: str) -> str:
    """Return a text without the secrets of the environment, tokens of known forms and passwords of addresses."""
    for value in sorted(secrets_of_the_environment(), key=len, reverse=True):
        text = text.replace(value, REMOVED)
    text = TOKENS.sub(REMOVED, text)
    return clean_urls(text) if "://" in text else text


def print_error(error: object, before: str = "error: ") -> None:
    """Print a message on stderr that cannot act on the terminal and holds no secret."""
    print(f"{before}{without_secrets(lines(error))}", file=sys.stderr)


def _print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    print_error("".join(traceback.format_exception(kind, error, trace)).rstrip("\n"), before="")


def silence_lost_terminal(error: OSError) -> None:
    """Where the terminal or pipe behind stderr is gone for good, send all streams that led there to /dev/null."""
    if error.errno not in GONE:
        return
    with contextlib.suppress(OSError):
        lost = sys.stderr.fileno()
        target = os.fstat(lost)
        null = os.open(os.devnull, os.O_WRONLY)
        for number in {lost, 1, 2}:
            with contextlib.suppress(OSError):  # closed
                if os.path.samestat(os.fstat(number), target):
                    os.dup2(null, number)
        os.close(null)


@contextlib.contextmanager
def above(console: "Console") -> Iterator[None]:
    """Within, print records on this rich Console, above the panel that it shows."""
    global _console
    before, _console = _console, console
    try:
        yield
    finally:
        _console = before


@contextlib.contextmanager
def capture_prints() -> Iterator[None]:
    """Within, keep what libraries print on stdout; log it as `finetune.third_party` afterwards."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            yield
        finally:
            for line in filter(str.strip, printed.getvalue().splitlines()):
                logging.getLogger("finetune.third_party").debug("%s", line)


def add_verbose(parser: argparse.ArgumentParser) -> None:
    """Add `--verbose`, for `set_up_logging(arguments.verbose)`."""
    parser.add_argument("--verbose", action="store_true", help=f"show what libraries report, too (or {VERBOSE}=1)")


def set_up_logging(verbose: bool = False) -> None:
    """Show INFO of this project on rank 0 and errors elsewhere; of other libraries, show errors only.

    Call it before heavy imports: libraries report while they are imported.

    Args:
        verbose: show DEBUG of this project on all ranks, and what libraries report. So does FINETUNE_VERBOSE=1.
    """
    verbose = verbose or os.environ.get(VERBOSE, "") not in ("", "0")
    if verbose:
        os.environ[VERBOSE] = "1"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    # few lines where it is no terminal
    os.environ.setdefault("TQDM_MININTERVAL", "0.1" if sys.stderr.isatty() else "20")
    sys.excepthook = _print_traceback
    handler = _ConsoleHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    project = logging.getLogger("finetune")
    project.handlers[:] = [handler]
    project.propagate = False
    level = logging.INFO if os.environ.get("RANK", "0") == "0" else logging.ERROR
    project.setLevel(logging.DEBUG if verbose else level)

    root = logging.getLogger()
    root.addHandler(_third_party)
    root.setLevel(logging.INFO if verbose else logging.WARNING)
    for name in OWN_HANDLERS:
        logging.getLogger(name).addFilter(_pass_on)
    for name, value in QUIET.items():
        if not verbose:
            os.environ.setdefault(name, value)
        elif os.environ.get(name) == value:
            del os.environ[name]
    logging.captureWarnings(verbose)
    warnings.simplefilter("default" if verbose else "ignore")
