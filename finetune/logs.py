"""Plain log lines on the main process; third-party chatter turned down."""

import contextlib
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

_console: Any = None


class _AboveHandler(logging.Handler):
    """Writes above a progress bar or a panel instead of through it."""

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        if _console is None:
            tqdm.write(text, file=sys.stderr)
            return
        whole = not getattr(record, "one_line", False)
        overflow = None if whole else "crop"
        _console.print(
            text, markup=False, highlight=False, emoji=False, soft_wrap=whole, no_wrap=not whole, overflow=overflow
        )


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
