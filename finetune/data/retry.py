"""Waiting before another attempt at what failed over a network."""

import random
import time

FIRST_DELAY, LONGEST_DELAY = 1.0, 30.0  # seconds


def delay_before(attempt: int) -> float:
    """Seconds before attempt 2, 3, ...: they double, and are jittered so that many readers do not come back at once."""
    # A generator of its own: the global ones decide what a run does.
    return min(FIRST_DELAY * 2 ** (attempt - 2), LONGEST_DELAY) * random.Random().uniform(0.5, 1.5)


def wait_before(attempt: int) -> None:
    """Waits so long."""
    time.sleep(delay_before(attempt))
