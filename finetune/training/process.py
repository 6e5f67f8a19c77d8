"""Settings of the process that have to stand before the model is made: random states, precision of products, the GPU's allocator."""

import logging
import os
import random

import numpy as np
import torch

from finetune.errors import UserError

log = logging.getLogger(__name__)


def allow_tf32(allowed: bool) -> None:
    """Lets float32 products of a GPU round their factors to TensorFloat-32. Without it torch's own choice stays: products no,
    convolutions yes."""
    if not allowed:
        return
    if not torch.cuda.is_available():
        log.warning("training.tf32 has no effect: there is no GPU")
        return
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    log.info("float32 products and convolutions in TF32")


def seed_everything(seed: int) -> None:
    """Seeds Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def set_allocator(cuda_alloc_conf: str | None) -> None:
    """Settings of the GPU's memory allocator, which have to stand before the first tensor on a GPU."""
    if not cuda_alloc_conf:
        return
    theirs = os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF")
    if theirs is not None and theirs != cuda_alloc_conf:
        log.warning(
            "training.cuda_alloc_conf: the environment's allocator settings %r count, not %r", theirs, cuda_alloc_conf
        )
        return
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = cuda_alloc_conf
    if torch.cuda.is_available():
        # The variable may have been read already; a setting that torch does not know is refused here.
        try:
            torch.cuda.memory._set_allocator_settings(cuda_alloc_conf)
        except (RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"training.cuda_alloc_conf: {cuda_alloc_conf!r} is not understood: {reason}") from error
