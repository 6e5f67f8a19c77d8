"""Memory of a model that works on a CPU."""

import contextlib
import ctypes


def keep_freed_memory() -> None:
    """Let the C library keep what a step frees for the next one; no effect where it is not glibc.

    It would give large tensors back to the kernel, which hands each page out anew in every step, filled with zeros: an
    eighth of the processor's time of a training step on a CPU, a fifth of that of an evaluation.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: never
        libc.mallopt(-4, 0)  # M_MMAP_MAX: no allocation of its own for a large tensor
        libc.mallopt(-2, 64 * 2**20)  # M_TOP_PAD: grow by so much at least, bytes


def return_freed_memory() -> None:
    """Give the kernel what the C library has kept; no effect where it is not glibc.

    What is freed comes in pieces of many sizes, of which the next ones fit some: without this the memory of a process
    that works for hours on clips of many lengths grows, although what it uses does not.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
