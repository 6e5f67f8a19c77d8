"""Plain log lines on the main process; third-party chatter turned down."""

import contextlib
import errno
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from tqdm import tqdm

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
        text = self.format(record)
        if _console is None:
            tqdm.write(text, file=sys.stderr)
            return
        whole = not getattr(record, "one_line", False)
        overflow = None if whole else "crop"
        _console.print(
            text, markup=False, highlight=False, emoji=False, soft_wrap=whole, no_wrap=not whole, overflow=overflow
        )


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
