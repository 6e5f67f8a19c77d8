"""Moments on a device's own time line: CUDA events on a GPU, whose work lags behind the host's."""

import time

import torch

Moment = float | torch.cuda.Event


def moment(device: torch.device) -> Moment:
    """Return the present moment."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(began: Moment, ended: Moment) -> float:
    """Return the seconds between two moments of one device; waits until a GPU has passed them."""
    if isinstance(began, torch.cuda.Event):
        assert isinstance(ended, torch.cuda.Event)
        ended.synchronize()
        return began.elapsed_time(ended) / 1000
    assert not isinstance(ended, torch.cuda.Event)
    return ended - began
