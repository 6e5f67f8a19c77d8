"""Memory that a training on a CPU frees stays with the process."""

import resource

import torch

from finetune.training.run import keep_freed_memory


def pages_handed_out() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(2**24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_freed_memory_stays() -> None:
    keep_freed_memory()
    torch.ones(2**24)  # 64 MiB, 16,384 pages
    assert pages_handed_out() < 1000
