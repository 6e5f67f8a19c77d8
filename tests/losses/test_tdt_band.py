"""The band of cells that a clip's alignments pass through: certified, exact within its tolerance, and narrow where a
model has learnt.

Shape suffixes: B batch, T encoder frames, U target tokens, V vocabulary, H hidden, O joint outputs, N lattice cells.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import TDT, assert_same, learnt_case

from finetune.losses import band, fused_tdt_loss, rows
from finetune.losses.hidden import hidden
from finetune.losses.operations import Operations


def random_case(frames, tokens, durations=TDT, V=20, H=6, scale=1.0, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    B, T, U = len(frames), max(frames), max(max(tokens), 1)
    shapes = (B, T, H), (B, U + 1, H), (V + 1 + len(durations), H), (V + 1 + len(durations),)
    tensors = [(scale * torch.randn(s, generator=g)).to(dtype).requires_grad_() for s in shapes]
    return [*tensors, torch.randint(0, V, (B, U), generator=g), torch.tensor(frames), torch.tensor(tokens)]


class Counted:
    """How many cells got their full log-sum-exp."""

    def __init__(self, monkeypatch):
        self.cells, whole = 0, band.log_sum_exp

        def log_sum_exp(joint, cells):
            self.cells += len(cells)
            return whole(joint, cells)

        monkeypatch.setattr(band, "log_sum_exp", log_sum_exp)


def everything(monkeypatch, case, **options):
    """Loss and gradients with the log-sum-exp of every cell."""
    with monkeypatch.context() as patch:
        patch.setattr(band, "WIDEST_BAND", -1.0)
        losses = fused_tdt_loss(*case, reduction="none", **options)
        return losses, torch.autograd.grad(losses.sum(), case[:4])


@pytest.mark.parametrize("durations", [TDT, (1, 2), ()], ids=str)
def test_a_learnt_lattice_needs_few_cells_and_is_as_exact(monkeypatch, durations):
    case = learnt_case([60, 45, 30], [20, 12, 0], durations)
    losses, gradients = everything(monkeypatch, case, durations=durations)
    counted = Counted(monkeypatch)
    actual = fused_tdt_loss(*case, durations=durations, reduction="none", occupancy_threshold=1e-12)
    cells = 60 * 21 + 45 * 13 + 30
    assert 0 < counted.cells < 0.55 * cells
    assert torch.allclose(actual, losses, rtol=0, atol=1e-11)
    for a, e in zip(torch.autograd.grad(actual.sum(), case[:4]), gradients):
        assert torch.allclose(a, e, rtol=0, atol=1e-9 * float(e.abs().max()))


def test_flat_lattices_are_computed_whole_and_once(monkeypatch):
    case = random_case([20, 15], [6, 4])
    losses, gradients = everything(monkeypatch, case)
    counted = Counted(monkeypatch)
    actual = fused_tdt_loss(*case, reduction="none")
    assert counted.cells == 20 * 7 + 15 * 5
    assert torch.equal(actual, losses)
    assert all(torch.equal(a, e) for a, e in zip(torch.autograd.grad(actual.sum(), case[:4]), gradients))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    clips=st.lists(st.tuples(st.integers(0, 14), st.integers(0, 6)), min_size=1, max_size=3),
    tolerance=st.sampled_from([1e-2, 1e-4, 1e-8]),
    durations=st.sampled_from([TDT, (1, 2), (0, 2, 4, 8), ()]),
    scale=st.sampled_from([0.3, 2.0, 8.0]),
    sharp=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_the_loss_is_above_the_exact_one_by_no_more_than_certified(clips, tolerance, durations, scale, sharp, seed):
    frames, tokens = [t for t, _ in clips], [u for _, u in clips]
    if max(frames) == 0:
        return
    make = (lambda: learnt_case(frames, tokens, durations, V=9, sharp=scale, seed=seed)) if sharp else (
        lambda: random_case(frames, tokens, durations, V=9, scale=scale, seed=seed)
    )  # fmt: skip
    case = make()
    with pytest.MonkeyPatch.context() as patch:
        exact, _ = everything(patch, case, durations=durations)
        # Bands of any width, so that small lattices have one too.
        patch.setattr(band, "WIDEST_BAND", 1.0)
        losses = fused_tdt_loss(*case, durations=durations, reduction="none", occupancy_threshold=tolerance)
    finite = torch.isfinite(exact)
    assert torch.equal(finite, torch.isfinite(losses))
    excess = (losses - exact)[finite]
    assert (excess >= -1e-9).all()
    assert (excess <= tolerance / (1 - tolerance) + 1e-9).all()


@pytest.mark.parametrize("threshold", [1e-3, 1e-2])
def test_a_threshold_leaves_out_what_the_docstring_says_and_no_more(monkeypatch, threshold):
    """Rows of backward, cell by cell: each off by at most 8 thresholds, those left out by less than 8 of theirs."""
    case = learnt_case([40], [12], sharp=3.0)
    made = {}

    def rows_of(options):
        """The gradient of each cell's outputs, zeros where it is left out."""
        found, whole, number = torch.zeros(40 * 13, case[2].shape[0], dtype=torch.float64), rows.gradient_rows, []

        def hidden_of(enc, pred, number_N, *more):
            number[:] = [number_N]
            return hidden(enc, pred, number_N, *more)

        def gradient_rows(*arguments, **more):
            found[number[0]] = whole(*arguments, **more)
            return found[number[0]]

        operations = Operations(hidden=hidden_of, gradient_rows=gradient_rows)
        fused_tdt_loss(*case, reduction="sum", operations=operations, **options).backward()
        return found

    with monkeypatch.context() as patch:
        patch.setattr(band, "WIDEST_BAND", -1.0)
        made["exact"] = rows_of({})
    made["near"] = rows_of({"occupancy_threshold": threshold})
    error_N = (made["near"] - made["exact"]).abs().sum(1)
    left_out = made["near"].abs().sum(1) == 0
    assert 0.2 * 520 < left_out.sum() < 520
    assert 0 < error_N.max() <= 8 * threshold
    assert error_N[~left_out].max() <= 6 * threshold
    kept_N = made["exact"].abs().sum(1) > 8 * threshold
    assert not (left_out & kept_N).any(), "a cell with more than two thresholds of occupancy is never left out"


def test_repeated_tokens_count_once(monkeypatch):
    """A row summed twice would make the bound from below a bound from nowhere."""
    case = random_case([12], [6], V=9, scale=3.0)
    case[4] = torch.zeros_like(case[4])
    exact, _ = everything(monkeypatch, case)
    monkeypatch.setattr(band, "WIDEST_BAND", 1.0)
    losses = fused_tdt_loss(*case, reduction="none", occupancy_threshold=1e-8)
    assert torch.allclose(losses, exact, rtol=0, atol=1e-7)


def test_numbers_that_are_none_are_not_hidden_outside_the_band():
    case = learnt_case([40], [12])
    with torch.no_grad():
        case[0][0, 20] = float("nan")
    loss = fused_tdt_loss(*case)
    assert torch.isnan(loss)
    assert torch.isnan(torch.autograd.grad(loss, case[0])[0]).any()


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    clips=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5)), min_size=1, max_size=4),
    durations=st.sampled_from([TDT, ()]),
    bias=st.booleans(),
    whole=st.booleans(),
    budget=st.sampled_from([None, 3000, 20000]),
    seed=st.integers(0, 2**20),
)
def test_blocks_over_many_clips_give_the_losses_and_gradients_of_clip_by_clip(
    clips, durations, bias, whole, budget, seed
):
    """As on a GPU, with and without the band."""
    frames, tokens = [t for t, _ in clips], [u for _, u in clips]
    if max(frames) == 0:
        return
    case = random_case(frames, tokens, durations, V=9, scale=2.0, seed=seed)
    leaves = case[:4] if bias else case[:3]
    case[3] = case[3] if bias else None
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(band, "GPU_FLOPS", 1e30 if whole else 1e-30)
        for operations in (Operations(), Operations(has_kernels=lambda *_: True)):
            torch.manual_seed(seed)
            losses = fused_tdt_loss(
                *case, durations=durations, reduction="none", dropout=0.3, joint_memory_budget=budget,
                occupancy_threshold=1e-9, operations=operations,
            )  # fmt: skip
            kept = torch.isfinite(losses)
            if not kept.any():
                return
            found.append([losses[kept], *torch.autograd.grad(losses[kept].sum(), leaves)])
    for actual, expected in zip(*found):
        assert_same([actual.detach()], [expected.detach()], 1e-7)
