"""Memory that a model on a CPU frees stays with the process."""

import resource

import torch

from finetune.models.host_memory import keep_freed_memory


def test_freed_memory_stays() -> None:
    sizes = [(40 + 7 * i % 24) * 2**20 for i in range(40)]  # too large for the C library to keep unasked
    keep_freed_memory()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for size in sizes:
        torch.ones(size // 4)
    handed_out = (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize()
    assert handed_out < sum(sizes) / 4  # not 0: an aligned tensor does not always fit where one of its size was
