"""Retries of reads over a network: opening a source, reading a shard (`finetune.data.reader`), downloading a file."""

import random
import tarfile
import time
import zlib
from gzip import BadGzipFile

RETRIES = 5  # after a failed read, where `data.read_retries` does not say
FIRST_DELAY, LONGEST_DELAY = 1.0, 30.0  # seconds
DAMAGE = (
    ValueError,
    TypeError,
    LookupError,
    EOFError,
    NotImplementedError,
    BadGzipFile,
    tarfile.TarError,
    zlib.error,
)
"""What readers raise over content that they cannot take."""


class Unreachable(Exception):
    """Storage that does not answer, which says nothing about the utterance; the text names the address."""


class UnreadableShard(Exception):
    """A shard that cannot be read on; the text names it and the row."""

    def is_outage(self, remote: bool) -> bool:
        """Return whether storage is at fault, which may answer later, and not what is in the file.

        Args:
            remote: whether it is read over a network, where a client's errors may be of any kind.
        """
        cause = self.__cause__
        if isinstance(cause, DAMAGE) or (type(cause) is OSError and cause.errno is None):  # the latter is pyarrow's
            return False
        return remote or isinstance(cause, OSError)


def delay_before(attempt: int) -> float:
    """Return the seconds to wait before attempt 2, 3, ...: doubling, and jittered to spread the readers."""
    # A generator of its own: the global ones decide what a run does.
    return min(FIRST_DELAY * 2 ** (attempt - 2), LONGEST_DELAY) * random.Random().uniform(0.5, 1.5)


def wait_before(attempt: int) -> None:
    """Sleep for `delay_before` seconds."""
    time.sleep(delay_before(attempt))
