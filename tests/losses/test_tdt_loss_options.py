"""Options of the fused TDT loss: omega, dropout, precision, budget, thresholds, and what it refuses.

Shape suffixes: B batch, T encoder frames, U target tokens, V vocabulary, D durations, H hidden, O joint outputs.
"""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from loss_cases import (
    TDT,
    all_alignments_loss,
    all_alignments_losses,
    assert_same,
    gradients,
    make_case,
    transformers_losses,
)
from torch.utils._python_dispatch import TorchDispatchMode

from finetune.losses import feasible_clips, fused_tdt_loss, lattice
from finetune.losses.dropout import dropout_mask, torch_mask

pytestmark = pytest.mark.usefixtures("one_thread")

# ------------------------------------------------------------------------------------------------------------- omega
# and dropout


def test_omega_draw_chooses_rnnt_on_the_token_outputs():
    case = make_case([4, 3], [2, 1])
    tdt = all_alignments_losses(case, TDT, sigma=0.2).sum()
    rnnt = all_alignments_losses(case, TDT, rnnt=True).sum()  # sigma has no part in it, as in NeMo
    options = {"sigma": 0.2, "reduction": "sum"}
    for draw, expected in ((True, rnnt), (False, tdt)):
        forced = fused_tdt_loss(*case, omega=0.5, rnnt_draw=draw, **options)
        drawn = fused_tdt_loss(*case, omega=1.0 if draw else 0.0, **options)
        assert_same([forced, drawn], [expected, expected], 1e-12)
        assert_same(gradients(forced, case), gradients(expected, case), 1e-12)
    assert (tdt - rnnt).abs() > 0.1
    duration_rows = gradients(fused_tdt_loss(*case, rnnt_draw=True, **options), case)[2][8:]
    assert duration_rows.shape[0] == 5
    assert not duration_rows.any()


def test_omega_draws_follow_the_generator_alone():
    case = make_case([4], [2])
    tdt, rnnt = (fused_tdt_loss(*case, rnnt_draw=draw).item() for draw in (False, True))

    def draws(seed):
        generator = torch.Generator().manual_seed(seed)
        torch.rand(3)  # the global generator has no say
        return [fused_tdt_loss(*case, omega=0.3, generator=generator).item() for _ in range(200)]

    first = draws(1)
    assert first == draws(1)
    assert first != draws(2)
    assert set(first) == {tdt, rnnt}
    assert 35 <= first.count(rnnt) <= 85


def test_dropout_equals_the_joint_with_its_own_mask():
    """Plain autograd with the same masks gives the same loss: forward, backward and recomputation use one mask."""
    case = make_case([5, 3], [2, 1], H=11)
    torch.manual_seed(3)
    seed = int(torch.randint(2**31 - 1, ()))
    enc, pred, weight, bias, targets, frames, tokens = case
    total, first = 0.0, 0
    for b in range(2):
        t, u1 = frames[b].item(), tokens[b].item() + 1
        mask = dropout_mask(torch.arange(first, first + t * u1), 11, 0.4, seed).view(t, u1, 11)
        assert 0 < mask.double().mean() < 1
        hidden = torch.tanh(enc[b, :t, None] + pred[b, None, :u1]) * mask / 0.6
        total, first = total + all_alignments_loss(hidden @ weight.t() + bias, targets[b], TDT, 0.0), first + t * u1
    torch.manual_seed(3)
    actual = fused_tdt_loss(*case, dropout=0.4, activation="tanh", reduction="sum", joint_memory_budget=4_000)
    assert_same([actual], [total], 1e-12)
    assert_same(gradients(actual, case), gradients(total, case), 1e-12)


def test_dropout_gradient_by_finite_differences():
    case = make_case([5], [2], V=3, H=3)

    def loss(*tensors):
        torch.manual_seed(11)
        return fused_tdt_loss(*tensors, *case[4:], dropout=0.3, activation="sigmoid", occupancy_threshold=0.0)

    assert torch.autograd.gradcheck(loss, case[:4], atol=1e-7, rtol=1e-6)


def test_dropout_follows_the_global_seed():
    case = make_case([6], [3])
    values = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        values.append(fused_tdt_loss(*case, dropout=0.5).item())
    assert values[0] == values[1] != values[2]


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_dropout_masks_are_random_and_equal_in_numba_and_torch(probability):
    cells = torch.cat([torch.arange(3_000), torch.arange(2**33, 2**33 + 1_000)])
    mask = dropout_mask(cells, 64, probability, 99)
    assert torch.equal(mask, torch_mask(cells, 64, int(probability * 2**32), 99))
    kept = mask.double()
    spread = math.sqrt(probability * (1 - probability))
    assert abs(kept.mean() - (1 - probability)) < 5 * spread / math.sqrt(kept.numel())
    assert (kept.mean(0) - (1 - probability)).abs().max() < 6 * spread / math.sqrt(kept.shape[0])
    for other in (kept.roll(1, 0), kept.roll(1, 1), dropout_mask(cells, 64, probability, 100).double()):
        correlation = ((kept - kept.mean()) * (other - other.mean())).mean() / spread**2
        assert abs(correlation) < 5 / math.sqrt(kept.numel())
    assert not torch.equal(mask[:1_000], mask[3_000:])


# -------------------------------------------------------------------------------------------- precision, work left
# out, memory


class Watch(TorchDispatchMode):
    """Largest tensor that any operation returned, in bytes, and the rows of the products with the output layer."""

    def __init__(self):
        super().__init__()
        self.largest, self.product_rows, self.autocast_dtypes = 0, 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor):
                self.largest = max(self.largest, x.numel() * x.element_size())
        if func in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default):
            self.product_rows += out.shape[0]
            self.autocast_dtypes.add(out.dtype)
        return out


def peak_bytes(function):
    """The most bytes that tensors made during the call held at once."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        function()
    held = peak = 0
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_memory_stays_within_the_budget(dtype, dropout):
    case = make_case([60] * 4, [20] * 4, V=2000, H=32, dtype=dtype)
    with torch.no_grad():
        case[2].mul_(0.02)  # a flat lattice: every cell takes part in backward
        case[3].mul_(0.02)
    cells, budget, losses = 4 * 60 * 21, 4 * 2**20, []
    forward = peak_bytes(lambda: losses.append(fused_tdt_loss(*case, joint_memory_budget=budget, dropout=dropout)))
    backward = peak_bytes(lambda: gradients(losses[0], case))
    weight_bytes = case[2].numel() * 4
    for peak in (forward, backward):
        assert budget / 3 < peak <= budget + 200 * cells + 3 * weight_bytes
        assert peak < cells * 2006 * 4 / 6


def test_occupancy_threshold_skips_cells_and_errs_little():
    case = make_case([60, 40], [20, 15], V=100, H=32, dtype=torch.float32)
    cells = 60 * 21 + 40 * 16
    results = {}
    for threshold in (0.0, 1e-4):
        loss = fused_tdt_loss(*case, reduction="sum", occupancy_threshold=threshold)
        with Watch() as watch:
            results[threshold] = gradients(loss, case), watch.product_rows
        results[threshold] += (loss.item(),)
    (exact, exact_rows, value), (near, near_rows, near_value) = results[0.0], results[1e-4]
    assert value == near_value
    assert near_rows < 0.6 * exact_rows
    for a, e in zip(near, exact):
        error = (a - e).norm() / e.norm()
        assert 0 < error < 1e-2
    # The bias gathers the rows themselves: no more than 4 thresholds for each cell left out.
    assert (near[3] - exact[3]).abs().sum() <= 4 * 1e-4 * cells


def test_occupancies_that_no_sum_can_tell_are_skipped_by_default():
    case = make_case([60, 40], [20, 15], V=100, H=32, dtype=torch.float32)
    with torch.no_grad():
        case[2].mul_(3)  # a sharp lattice: most cells are next to impossible
    doubles = [x.detach().double().requires_grad_() if i < 4 else x for i, x in enumerate(case)]
    loss, expected = fused_tdt_loss(*case, reduction="sum"), transformers_losses(doubles).sum()
    with Watch() as watch:
        grads = gradients(loss, case)
    # Products with rows of cells are the logits and their gradient, with the 106 rows of the weight's own gradient
    # beside them.
    assert watch.product_rows < 1.5 * (60 * 21 + 40 * 16)
    assert_same(grads, gradients(expected, doubles), 5e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_finite_and_near(dtype):
    case = make_case([20, 15], [8, 5], V=40, H=32, dtype=torch.float32)
    with torch.no_grad():
        case[2].mul_(0.2)
    exact = fused_tdt_loss(*case)
    exact_grads = gradients(exact, case)
    with torch.autocast("cpu", dtype), Watch() as watch:
        loss = fused_tdt_loss(*case)
        # Far beyond float16's range: the loss scale must not pass through the half-precision rows.
        grads = gradients(loss * 2**20, case)
    assert watch.autocast_dtypes == {dtype}
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=5e-3)
    for a, e in zip(grads, exact_grads):
        assert a.dtype == torch.float32
        assert (a / 2**20 - e).norm() / e.norm() < 3e-2


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "learnt"), [(torch.bfloat16, True), (torch.float16, False)])
def test_five_minutes_in_one_clip_are_finite(dtype, learnt):
    """4,000 frames and 400 tokens: alignments of probability e^-4,000 and less from 1.6 million cells, far outside of
    float32's range."""
    T, U = 4000, 400
    case = make_case([T], [U], V=12, H=8, dtype=torch.float32)
    if (
        learnt
    ):  # one hidden unit wakes where frame and token are due together; elsewhere a token that is no target wins
        with torch.no_grad():
            case[0].fill_(-4)[0, torch.arange(T), torch.arange(T) * 8 // T] += 3
            case[1].zero_()[0, torch.arange(U + 1), torch.arange(U + 1) * 8 // (U + 1)] += 3
            case[2].zero_()[[*range(11), 12]] += 4
            case[3].zero_()[11] += 4
            case[4].clamp_(max=10)
    with torch.autocast("cpu", dtype):
        loss = fused_tdt_loss(*case)
        grads = gradients(loss, case)
    assert 1000 < loss.item() < math.inf
    for grad in grads:
        assert torch.isfinite(grad).all()
        assert grad.abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_inputs_keep_their_dtype(dtype):
    case = make_case([9], [4], H=16, dtype=dtype)
    with torch.no_grad():
        case[2].mul_(0.2)
    loss = fused_tdt_loss(*case)
    assert loss.dtype == torch.float32
    grads = gradients(loss * 16, case)
    doubles = [x.detach().double().requires_grad_() if i < 4 else x for i, x in enumerate(case)]
    for a, e in zip(grads, gradients(fused_tdt_loss(*doubles) * 16, doubles)):
        assert a.dtype == dtype
        assert torch.isfinite(a).all()
        assert (a - e).norm() / e.norm() < (1e-2 if dtype == torch.float16 else 5e-2)


def test_numbers_that_are_none_reach_loss_and_gradient():
    case = make_case([5], [2])
    with torch.no_grad():
        case[0][0, 1, 0] = math.nan
    loss = fused_tdt_loss(*case, activation="tanh")
    assert loss.isnan()
    assert gradients(loss, case)[2].isnan().any()


def test_frozen_weights_and_no_grad_do_less_work():
    case = make_case([20], [8], V=30, H=8)
    expected = gradients(fused_tdt_loss(*case), case)
    frozen = [*case[:2], case[2].detach(), case[3].detach(), *case[4:]]
    loss = fused_tdt_loss(*frozen)
    with Watch() as watch:
        grads = torch.autograd.grad(loss, frozen[:2])
    assert_same(grads, expected[:2], 1e-12)
    cells = 20 * 9
    assert watch.product_rows <= 2 * cells  # the logits again and their gradient, no product for the weight
    asked = []
    solve = lattice._solve_numba
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(lattice, "_solve_numba", lambda *a: asked.append(a[-1]) or solve(*a))
        evaluated = fused_tdt_loss(*case)
    assert asked == [True, False]  # posteriors for the band, none for the loss
    assert not evaluated.requires_grad
    assert evaluated.item() == pytest.approx(loss.item(), rel=1e-12)


# ------------------------------------------------------------------------------------------------------------
# arguments, caching


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: torch.zeros(2, 6)}, "enc_BTH: .*(B, T, H)"),
        ({1: torch.zeros(2, 4, 9)}, r"pred_BUH: .*\(2, U \+ 1, 5\)"),
        ({1: torch.zeros(3, 4, 5)}, r"pred_BUH: .*\(2, U \+ 1, 5\)"),
        ({2: torch.zeros(13, 4)}, r"weight_OH: .*5 durations, 5\)"),
        ({2: torch.zeros(4, 5)}, r"weight_OH: .*5 durations, 5\)"),
        ({2: torch.zeros(13, 5, dtype=torch.int64)}, "weight_OH: expected a floating-point"),
        ({3: torch.zeros(12)}, r"bias_O: .*\(13,\)"),
        ({4: torch.zeros(2, 4, dtype=torch.int64)}, r"targets_BU: .*\(2, 3\)"),
        ({4: torch.zeros(2, 3)}, "targets_BU: expected int32 or int64"),
        ({4: torch.full((2, 3), 7)}, "targets_BU: expected token ids from 0 to V - 1 = 6"),
        ({4: torch.full((2, 3), -1)}, "targets_BU: expected token ids from 0"),
        ({5: torch.tensor([7, 4])}, "enc_lengths_B: expected lengths from 0 to 6"),
        ({5: torch.tensor([6])}, r"enc_lengths_B: .*\(2,\)"),
        ({6: torch.tensor([3, -1])}, "target_lengths_B: expected lengths from 0 to 3"),
        ({6: [3, 1]}, "target_lengths_B: expected int32 or int64"),
    ],
)
def test_wrong_tensors_are_named(change, message):
    case = make_case([6, 4], [3, 1])
    for position, value in change.items():
        case[position] = value
    with pytest.raises(ValueError, match=message.replace("(B, T, H)", r"\(B, T, H\)")):
        fused_tdt_loss(*case)


@pytest.mark.parametrize(
    "option",
    [
        {"durations": (0,)},
        {"durations": (0, 1, 1)},
        {"durations": (-1, 1)},
        {"durations": (0.5, 1)},
        {"activation": "gelu"},
        {"dropout": 1.0},
        {"sigma": -0.1},
        {"omega": 1.5},
        {"reduction": "median"},
        {"occupancy_threshold": 1.0},
        {"fastemit_lambda": -1.0},
        {"joint_memory_budget": 0},
        {"clamp": math.nan},
        {"sigma": math.inf},
        {"dropout": None},
    ],
    ids=str,
)
def test_wrong_options_are_named(option):
    with pytest.raises(ValueError, match=next(iter(option)) + ": expected"):
        fused_tdt_loss(*make_case([6, 4], [3, 1]), **option)


def test_feasible_clips_checks_its_lengths():
    with pytest.raises(ValueError, match="same shape"):
        feasible_clips(torch.tensor([1, 2]), torch.tensor([1]))
    with pytest.raises(ValueError, match=">= 0"):
        feasible_clips(torch.tensor([-1]), torch.tensor([1]), (1, 2))


@pytest.mark.slow
def test_works_where_numba_may_write_no_cache(tmp_path):
    """numba refuses cache=True when it finds no folder to write to; the loss must then compile without one."""
    script = """
import numba.core.caching as caching
class Nowhere(caching._CacheLocator):
    @classmethod
    def from_function(cls, function, path): return None
caching.CacheImpl._locator_classes = [Nowhere]
import torch
from finetune.losses import fused_tdt_loss
lengths = torch.tensor([2]), torch.tensor([1])
print(fused_tdt_loss(torch.zeros(1, 2, 3), torch.zeros(1, 2, 3), torch.zeros(9, 3), None, torch.zeros(1, 1).long(),
*lengths).item())
"""
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert math.isfinite(float(run.stdout))
