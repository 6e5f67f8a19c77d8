"""Retries of reads over a network: opening a source, reading a shard (`finetune.data.reader`), downloading a file."""

import random
import time

RETRIES = 5  # after a failed read, where `data.read_retries` does not say
FIRST_DELAY, LONGEST_DELAY = 1.0, 30.0  # seconds


class Unreachable(Exception):
    """Storage that does not answer, which says nothing about the utterance; the text names the address."""


class UnreadableShard(Exception):
    """A shard that cannot be read on; the text names it and the row."""


def delay_before(attempt: int) -> float:
    """Return the seconds to wait before attempt 2, 3, ...: doubling, and jittered to spread the readers."""
    # A generator of its own: the global ones decide what a run does.
    return min(FIRST_DELAY * 2 ** (attempt - 2), LONGEST_DELAY) * random.Random().uniform(0.5, 1.5)


def wait_before(attempt: int) -> None:
    """Sleep for `delay_before` seconds."""
    time.sleep(delay_before(attempt))
