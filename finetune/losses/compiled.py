"""Kernels on the CPU, compiled by numba."""

from collections.abc import Callable

import numba


def compiled(kernel: Callable) -> Callable:
    """Compile at the first call, once on a machine where numba finds a folder to cache in; runs without the GIL."""
    try:
        return numba.njit(cache=True, nogil=True, error_model="numpy")(kernel)
    except RuntimeError:  # no folder that it may write to
        return numba.njit(nogil=True, error_model="numpy")(kernel)
