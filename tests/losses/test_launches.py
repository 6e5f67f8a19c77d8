"""Kernels and waits of the loss on a GPU, counted on fake tensors (scripts/gpu/count_launches.py)."""

import sys

import pytest
import torch
from conftest import ROOT

sys.path.insert(0, str(ROOT / "scripts" / "gpu"))
from count_launches import LaunchCounter, count_loss, pretended_cuda

# Of the cells: first round of the band, what the certificate finds beside it, what backward keeps (the sample base).
LEARNT = (0.05, 0.0, 0.024)


def total(found):
    return sum(found.launches.values())


def test_the_counter_sees_kernels_copies_and_waits():
    counter = LaunchCounter([3])
    with pretended_cuda(counter):
        x = torch.zeros(4, 5, device="cuda")  # a fill
        y = (x.t()[1:] + 1).contiguous()  # views, an addition, a copy
        torch.empty_like(y).view(-1).index_add_(0, torch.empty(3, dtype=torch.int64, device="cuda"), x[0, :3])
        assert (total(counter), counter.copies, sum(counter.waits.values())) == (4, 0, 0)
        torch.zeros(7).pin_memory().to("cuda", non_blocking=True)
        assert (total(counter), counter.copies, sum(counter.waits.values())) == (4, 1, 0)
        torch.zeros(7).to("cuda", non_blocking=True)  # out of pageable memory
        y.cpu()
        assert (total(counter), counter.copies, sum(counter.waits.values())) == (4, 3, 2)
        assert y.sum().item() == 3
        assert (total(counter), sum(counter.waits.values())) == (5, 3)


@pytest.mark.parametrize(
    ("sizes", "shares", "most"),
    [
        ({"B": 16, "T": 250, "U": 100}, None, 600),
        ({"B": 16, "T": 250, "U": 100}, LEARNT, 350),
        ({"B": 16, "T": 2000, "U": 500}, None, 5000),
    ],
    ids=["flat", "learnt", "long"],
)
def test_a_loss_launches_no_more_than_its_goal_and_waits_twice(sizes, shares, most):
    found = count_loss(**sizes, shares=shares)
    assert total(found) <= most, found.launches
    assert dict(found.waits) == {"aten._to_copy cuda to cpu": 2}


def test_a_small_loss_takes_all_outputs_at_once_however_many_its_clips():
    few, many = (count_loss(B, 20, 10, V=64, H=16, shares=LEARNT) for B in (4, 12))
    assert total(few) == total(many)
    assert few.operations["triton._log_sum_exp"] == 1


def test_a_second_round_of_the_band_costs_one_more_wait():
    found = count_loss(16, 250, 100, shares=(0.05, 0.001, 0.024, 0.0, 0.024))
    assert sum(found.waits.values()) == 3
