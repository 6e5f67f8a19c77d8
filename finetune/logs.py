"""Plain log lines on the main process; third-party chatter turned down."""

import logging
import os
import sys
import warnings

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


class _TqdmHandler(logging.Handler):
    """Writes above a progress bar instead of through it."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=sys.stderr)


def set_up_logging() -> None:
    """INFO of this project on rank 0, warnings elsewhere; errors only from other libraries."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault(
        "TQDM_MININTERVAL", "0.1" if sys.stderr.isatty() else "20"
    )  # few lines where it is no terminal
    handler = _TqdmHandler()
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
