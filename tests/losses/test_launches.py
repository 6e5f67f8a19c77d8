"""Kernels and waits of the loss on a GPU, counted on fake tensors (scripts/gpu/count_launches.py)."""

import sys
from collections import defaultdict

import pytest
import torch
import triton
from conftest import ROOT, slow
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from finetune.losses import hidden_triton, lattice_triton, rows_triton
from finetune.losses.form import Form

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
        slow({"B": 16, "T": 2000, "U": 500}, None, 5000),
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


def test_batches_of_any_size_take_few_compilations(monkeypatch):
    """Each takes a second on a GPU, in the midst of a training."""
    compilations = defaultdict(set)
    backend = make_backend(GPUTarget("cuda", 90, 32))

    def run(kernel, *args, grid, warmup, **kwargs):
        bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        compilations[kernel.fn.__name__].add(str(bind(*args, **kwargs)[1:]))

    monkeypatch.setattr(triton.runtime.JITFunction, "run", run)
    form, enc = Form("relu", 0.2, 5, torch.bfloat16), torch.zeros(40, 16, dtype=torch.bfloat16)
    for outputs in range(8, 137, 8):  # of the clips' own tokens
        rows_triton.log_sum_exp(enc.new_zeros(4, outputs)[:, : outputs - 5])
    for start, N in ((0, 16), (1, 16), (2, 17), (3, 18)):  # of blocks of cells
        number_N, lse_N = torch.zeros(64, dtype=torch.int64)[start:][:N], torch.zeros(64)[start:][:N]
        grads = torch.zeros(40, 16), torch.zeros(40, 16)
        of_cell = (*[lse_N] * 6, torch.zeros(64, 5)[start:][:N], number_N, lse_N)
        rows_triton.log_sum_exp(enc.new_zeros(N, 8200)[:, :8193])
        rows_triton.gradient_(enc.new_zeros(N, 8200), *of_cell, V=8192, D=5, clamp=0.0)
        hidden_triton.dropped(enc, enc, number_N, number_N, number_N, form)
        hidden_triton.add_gradient(enc[:N], enc, enc, number_N, number_N, number_N, form, *grads)
    for clips in range(1, 9):
        for tokens in (3, 20, 31):
            N = clips * 3 * (tokens + 1)
            scores = torch.zeros(N), torch.zeros(N), torch.zeros(N, 5)
            lattice_triton.solve(*scores, [3] * clips, [tokens] * clips, (0, 1, 2, 3, 4), 5, True)
    assert {name: len(found) for name, found in compilations.items()} == {
        "_log_sum_exp": 2, "_gradient": 1, "_dropped": 1, "_add_gradient": 1, "_arcs": 1, "_walk": 1, "_posteriors": 1,
    }  # fmt: skip
