"""Plain log lines on the main process; third-party chatter turned down."""

import contextlib
import copy
import errno
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from finetune.security.safe_text import Block, lines, one_line
from finetune.security.secrets import REMOVED, TOKENS, clean_urls, secrets_of_the_environment

NOISY = (
    "datasets",
    "transformers",
    "accelerate",
    "deepspeed",
    "DeepSpeed",
    "torch.distributed",
    "fsspec",
    "numba",
    "httpx",
    "urllib3",
    "absl",
    "matplotlib",
    "lhotse",
    "nv_one_logger",
    "nemo_logger",
    "filelock",
)


ONE_LINE = {"one_line": True}
"""`extra` of records that are cut off at the end of a terminal's line, as rows of a table are."""

GONE = (errno.EIO, errno.EPIPE, errno.ENXIO)
"""What a write says when the terminal was closed or nobody reads the pipe."""

_console: Any = None


class _AboveHandler(logging.Handler):
    """Writes above a progress bar or a panel instead of through it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._write(record)
        except OSError as error:  # a log that cannot be written ends no run
            let_go(error)

    def _write(self, record: logging.LogRecord) -> None:
        text = without_secrets(lines(self.format(_plain(record))))
        if _console is None:
            tqdm.write(text, file=sys.stderr)
            return
        whole = not getattr(record, "one_line", False)
        overflow = None if whole else "crop"
        _console.print(
            text, markup=False, highlight=False, emoji=False, soft_wrap=whole, no_wrap=not whole, overflow=overflow
        )


def _plain(record: logging.LogRecord) -> logging.LogRecord:
    """The record with texts that cannot break its line or act on the terminal; line breaks of its own format stay."""
    if isinstance(record.args, tuple) and any(isinstance(a, str | Path | BaseException) for a in record.args):
        record = copy.copy(record)
        record.args = tuple(_argument(value) for value in record.args or ())
    return record


def _argument(value: Any) -> Any:
    if isinstance(value, BaseException | Block):
        return lines(value)  # a message may have lines
    return one_line(value) if isinstance(value, str | Path) else value


def without_secrets(text: str) -> str:
    """A line without the secrets of the environment, tokens of known forms and passwords of addresses."""
    for value in sorted(secrets_of_the_environment(), key=len, reverse=True):
        text = text.replace(value, REMOVED)
    text = TOKENS.sub(REMOVED, text)
    return clean_urls(text) if "://" in text else text


def print_error(error: Any, before: str = "error: ") -> None:
    """A message to the user on stderr, which cannot act on the terminal and holds no secret."""
    print(f"{before}{without_secrets(lines(error))}", file=sys.stderr)


def _say_crash(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """A traceback, cleaned as a message is."""
    print_error("".join(traceback.format_exception(kind, error, trace)).rstrip("\n"), before="")


def let_go(error: OSError) -> None:
    """Where the terminal or the pipe behind the errors is gone for good, what is written to it from here on goes nowhere; this process's
    other streams that led there do the same."""
    if error.errno not in GONE:
        return
    with contextlib.suppress(OSError):
        lost = sys.stderr.fileno()
        place = os.fstat(lost)
        null = os.open(os.devnull, os.O_WRONLY)
        for number in {lost, 1, 2}:
            with contextlib.suppress(OSError):  # closed
                if os.path.samestat(os.fstat(number), place):
                    os.dup2(null, number)
        os.close(null)


@contextlib.contextmanager
def above(console: Any) -> Iterator[None]:
    """Until the end records are printed on this rich Console, above the panel that it shows."""
    global _console
    before, _console = _console, console
    try:
        yield
    finally:
        _console = before


def set_up_logging() -> None:
    """INFO of this project on rank 0, warnings elsewhere; errors only from other libraries."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault(
        "TQDM_MININTERVAL", "0.1" if sys.stderr.isatty() else "20"
    )  # few lines where it is no terminal
    sys.excepthook = _say_crash
    handler = _AboveHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    project = logging.getLogger("finetune")
    project.handlers[:] = [handler]
    project.propagate = False
    project.setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.ERROR)
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)
    # DeepSpeed sets its level and handler when it is imported, so a filter has to hold it.
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)
    warnings.filterwarnings("ignore")
