"""The fused TDT loss against references that share no code with it.

Shape suffixes: B batch, T encoder frames, U target tokens, V vocabulary, D durations, H hidden, O joint outputs.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import (
    TDT,
    all_alignments_losses,
    assert_same,
    dense_losses,
    gradients,
    joint_logits,
    make_case,
    transformers_losses,
    walk_alignments,
)

from finetune.losses import feasible_clips, fused_tdt_loss, lattice

pytestmark = pytest.mark.usefixtures("one_thread")
DURATION_SETS = [TDT, (0, 1, 2), (1, 2), (0, 2, 4, 8), (2, 0, 1), ()]


# ------------------------------------------------------------------------------------------------------------ against
# references


@pytest.mark.parametrize("sigma", [0.0, 0.05])
def test_equals_transformers_in_value_and_gradients(sigma):
    case = make_case([25, 20, 13, 1, 6], [9, 3, 0, 2, 6], V=30, H=16, dtype=torch.float32, extra=2)
    expected, actual = transformers_losses(case, sigma), fused_tdt_loss(*case, sigma=sigma, reduction="none")
    weights = torch.tensor([1.0, -0.5, 2.0, 0.3, 0.7])
    assert_same([actual], [expected], 1e-5)
    assert_same(gradients((actual * weights).sum(), case), gradients((expected * weights).sum(), case), 1e-5)


@pytest.mark.parametrize("reduction", ["mean_batch", "mean_volume", "mean", "sum"])
def test_reductions_equal_transformers(reduction):
    case = make_case([9, 7], [4, 2], dtype=torch.float32)
    expected, actual = transformers_losses(case, reduction=reduction), fused_tdt_loss(*case, reduction=reduction)
    assert_same([actual], [expected], 1e-5)
    assert_same(gradients(actual, case), gradients(expected, case), 1e-5)


@pytest.mark.parametrize("sigma", [0.0, 0.3])
@pytest.mark.parametrize("durations", DURATION_SETS, ids=str)
def test_equals_the_sum_over_all_alignments(durations, sigma):
    case = make_case([5, 4, 3, 1, 2, 4], [2, 3, 1, 0, 0, 1], durations, extra=1)
    expected = all_alignments_losses(case, durations, sigma, rnnt=not durations)
    actual = fused_tdt_loss(*case, durations=durations, sigma=sigma, reduction="none")
    possible = torch.isfinite(expected)
    assert possible.any()
    assert torch.equal(torch.isfinite(actual), possible)
    assert torch.equal(feasible_clips(case[5], case[6], durations), possible)
    assert_same([actual[possible]], [expected[possible]], 1e-12)
    assert_same(gradients(actual[possible].sum(), case), gradients(expected[possible].sum(), case), 1e-12)


def test_plain_rnnt_equals_torchaudio():
    from torchaudio.functional import rnnt_loss

    case = make_case([12, 9, 1], [5, 3, 2], (), V=20, H=8, dtype=torch.float32)
    *tensors, targets_BU, frames_B, tokens_B = case
    lengths = frames_B.int(), tokens_B.int()
    expected = rnnt_loss(joint_logits(*tensors), targets_BU.int(), *lengths, blank=20, reduction="none")
    actual = fused_tdt_loss(*case, durations=(), reduction="none")
    assert_same([actual], [expected], 1e-5)
    # torchaudio's lattice runs in float32; exactness is the business of the test over all alignments.
    assert_same(gradients(actual.sum(), case), gradients(expected.sum(), case), 1e-4)


@pytest.mark.parametrize("activation", ["relu", "tanh", "sigmoid"])
def test_activations(activation):
    case = make_case([4, 3], [2, 1])
    expected = all_alignments_losses(case, TDT, activation=getattr(torch, activation)).sum()
    actual = fused_tdt_loss(*case, activation=activation, reduction="sum")
    assert_same([actual], [expected], 1e-12)
    assert_same(gradients(actual, case), gradients(expected, case), 1e-12)


@pytest.mark.parametrize("durations", [TDT, (1, 2), ()], ids=str)
def test_gradcheck(durations):
    case = make_case([5, 4], [2, 1], durations, V=3, H=3)

    def loss(*tensors):
        options = {"durations": durations, "sigma": 0.1, "activation": "tanh", "reduction": "none"}
        return fused_tdt_loss(*tensors, *case[4:], joint_memory_budget=2_000, **options)

    assert torch.autograd.gradcheck(loss, case[:4], atol=1e-7, rtol=1e-6)


def test_fastemit_weighs_label_arcs():
    """The gradient is that of sum_arcs posterior * log-probability, with label arcs of the token outputs weighing 1 +
    lambda."""
    case, weight = make_case([4, 3], [2, 1]), 0.4
    frames_B, tokens_B, V = case[5], case[6], 7
    logits_BTUO = joint_logits(*case[:4])
    token_logp = torch.log_softmax(logits_BTUO[..., : V + 1], -1)
    duration_logp = torch.log_softmax(logits_BTUO[..., V + 1 :], -1)
    heads = token_logp.detach().requires_grad_(), duration_logp.detach().requires_grad_()
    total = 0.0
    for b in range(2):
        t, u = frames_B[b].item(), tokens_B[b].item()
        total = total + walk_alignments(*(head[b, :t, : u + 1] for head in heads), case[4][b], TDT)
    token_posterior, duration_posterior = (-g for g in torch.autograd.grad(total, heads))
    weighed = torch.cat([token_posterior[..., :V] * (1 + weight), token_posterior[..., V:]], -1)
    expected = -(weighed * token_logp).sum() - (duration_posterior * duration_logp).sum()
    actual = fused_tdt_loss(*case, fastemit_lambda=weight, reduction="sum")
    plain = fused_tdt_loss(*case, reduction="sum")
    assert_same([actual], [plain * (1 + weight)], 1e-12)
    assert_same(gradients(actual, case), gradients(expected, case), 1e-10)


def test_clamp_limits_the_token_gradient_of_a_cell():
    # With one frame and no token there is one cell, whose token gradient reaches the bias unmixed.
    case = make_case([1], [0])
    free = gradients(fused_tdt_loss(*case, reduction="sum"), case)[3]
    limit = free[:8].abs().max().item() / 3
    clamped = gradients(3 * fused_tdt_loss(*case, clamp=limit, reduction="sum"), case)[3]
    assert (free[:8].abs() > limit).any()
    assert torch.allclose(clamped[:8], 3 * free[:8].clamp(-limit, limit), atol=1e-15)
    assert torch.allclose(clamped[8:], 3 * free[8:], atol=1e-15)


# ------------------------------------------------------------------------------------------------------------------
# properties

lengths = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 5)), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(lengths, st.sampled_from(DURATION_SETS), st.integers(0, 1000), st.integers(1, 6_000), st.integers(0, 2))
def test_any_batch_equals_the_dense_lattice_and_each_clip_alone(clips, durations, seed, budget, extra):
    frames, tokens = zip(*clips)
    case = make_case(frames, tokens, durations, seed=seed, extra=extra)
    options = {"durations": durations, "sigma": 0.1, "reduction": "none"}
    losses = fused_tdt_loss(*case, joint_memory_budget=budget, **options)
    feasible = feasible_clips(case[5], case[6], durations)
    assert torch.equal(torch.isfinite(losses), feasible)
    grads = gradients(losses[feasible].sum() + sum(0 * x.sum() for x in case[:4]), case)
    others = dense_losses(case, durations, sigma=0.1)
    assert torch.allclose(losses[feasible], others[feasible], rtol=1e-12, atol=0)
    assert torch.equal(torch.isfinite(others), feasible)
    for a, e in zip(grads, gradients(others[feasible].sum() + sum(0 * x.sum() for x in case[:4]), case)):
        assert torch.allclose(a, e, rtol=1e-9, atol=1e-12)
    for b, (t, u) in enumerate(clips):
        enc, pred, targets = case[0][b : b + 1, :t], case[1][b : b + 1, : u + 1], case[4][b : b + 1, :u]
        alone = fused_tdt_loss(enc, pred, *case[2:4], targets, case[5][b : b + 1], case[6][b : b + 1], **options)
        assert torch.allclose(alone[0], losses[b], rtol=1e-12, atol=0)
        assert not grads[0][b, t:].any()
        assert not grads[1][b, u + 1 :].any()


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.integers(0, 12),
    st.integers(0, 6),
    st.sets(st.integers(0, 9), min_size=1, max_size=4).filter(lambda d: max(d) > 0),
)
def test_feasibility_is_whether_the_durations_sum_to_the_frames(T, U, durations):
    sums = {0}
    for _ in range(U):
        sums = {s + d for s in sums for d in durations}
    reached = set()
    fresh = {s + d for s in sums for d in durations if d > 0 and s + d <= T}
    while fresh:
        reached |= fresh
        fresh = {s + d for s in fresh for d in durations if d > 0 and s + d <= T} - reached
    answer = feasible_clips(torch.tensor([T, 50]), torch.tensor([U, 6]), tuple(durations))
    assert answer[0].item() == (T in reached)


def test_block_size_changes_nothing():
    case = make_case([15, 11, 4], [6, 2, 5], V=12, H=8)
    torch.manual_seed(5)
    whole = fused_tdt_loss(*case, dropout=0.3, reduction="sum", joint_memory_budget=2**30)
    for budget in (1, 3_000, 20_000):
        torch.manual_seed(5)
        blocks = fused_tdt_loss(*case, dropout=0.3, reduction="sum", joint_memory_budget=budget)
        assert_same([blocks], [whole], 1e-13)
        assert_same(gradients(blocks, case), gradients(whole, case), 1e-12)


def test_many_clips_over_threads_equal_one_thread(monkeypatch):
    case = make_case([20] * 7 + [3], [8, 0, 3, 8, 1, 2, 5, 7])
    expected = fused_tdt_loss(*case, reduction="none")
    monkeypatch.setattr(lattice, "CELLS_WORTH_A_THREAD", 50)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    started = []
    pool = lattice.ThreadPoolExecutor
    monkeypatch.setattr(lattice, "ThreadPoolExecutor", lambda n: started.append(n) or pool(n))
    threaded = fused_tdt_loss(*case, reduction="none")
    assert started
    assert set(started) == {4}
    assert torch.equal(threaded, expected)
    for a, e in zip(gradients(threaded.sum(), case), gradients(expected.sum(), case)):
        assert torch.equal(a, e)


def test_layouts_integer_types_and_unused_padding():
    case = make_case([6, 4], [3, 1], V=9, H=6)
    expected = fused_tdt_loss(*case, reduction="none")
    grads = gradients(expected.sum(), case)
    enc, pred, weight = (x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in case[:3])
    bias = torch.stack([case[3], case[3]], 1)[:, 0]
    targets = case[4].clone()
    targets[1, 1:] = -100
    assert not enc.is_contiguous()
    assert not bias.is_contiguous()
    actual = fused_tdt_loss(enc, pred, weight, bias, targets.int(), case[5].int(), case[6].int(), reduction="none")
    assert torch.allclose(actual, expected, rtol=1e-13)
    assert_same(gradients(actual.sum(), case), grads, 1e-12)


def test_outputs_can_be_used_twice_and_backward_repeated():
    case = make_case([6, 4], [3, 1])
    losses = fused_tdt_loss(*case, reduction="none")
    once = gradients(losses.sum(), case)
    assert_same(gradients(losses.sum() + (2 * losses).sum(), case), [3 * g for g in once], 1e-12)
    assert_same(gradients(losses.sum(), case), once, 1e-15)


def test_no_bias():
    case = make_case([4], [2])
    zero = torch.zeros_like(case[3])
    assert torch.equal(fused_tdt_loss(*case[:3], None, *case[4:]), fused_tdt_loss(*case[:3], zero, *case[4:]))


# ------------------------------------------------------------------------------------------------- infeasible clips,
# empty batches


@pytest.mark.parametrize("reduction", ["mean_batch", "mean_volume", "mean", "sum"])
def test_infeasible_clips_count_for_nothing(reduction):
    durations = (1, 2)
    both = make_case([5, 2, 4], [2, 3, 1], durations)  # three labels of one frame or more do not fit into two frames
    assert feasible_clips(both[5], both[6], durations).tolist() == [True, False, True]
    good = torch.tensor([0, 2])
    without = [both[0][good], both[1][good], *both[2:4], *(x[good] for x in both[4:])]
    actual = fused_tdt_loss(*both, durations=durations, reduction=reduction)
    expected = fused_tdt_loss(*without, durations=durations, reduction=reduction)
    assert_same([actual], [expected], 1e-13)
    assert_same(gradients(actual, both), gradients(expected, both), 1e-12)


def test_infeasible_clips_are_infinite_without_gradient():
    case = make_case([5, 2, 0], [2, 3, 0], (1, 2), extra=1)
    losses = fused_tdt_loss(*case, durations=(1, 2), reduction="none")
    assert torch.isfinite(losses).tolist() == [True, False, False]
    assert (losses[1:] == math.inf).all()
    grads = gradients(losses.sum(), case)
    assert all(torch.isfinite(g).all() for g in grads)
    assert grads[0][0].any()
    assert not grads[0][1:].any()
    assert not grads[1][1:].any()


@pytest.mark.parametrize("frames", [[0, 0], []])
def test_nothing_to_align_is_zero_with_zero_gradients(frames):
    case = make_case([0, 0], [2, 0])
    case = [x[: len(frames)] if i in (0, 1, 4, 5, 6) else x for i, x in enumerate(case)]
    for reduction in ("mean_batch", "mean_volume", "mean", "sum"):
        loss = fused_tdt_loss(*case, reduction=reduction)
        assert loss.item() == 0
        assert not any(g.any() for g in gradients(loss, case))


def test_clip_without_tokens_in_means_per_token():
    case = make_case([3, 4], [0, 2])
    first, second = fused_tdt_loss(*case, reduction="none").tolist()
    assert fused_tdt_loss(*case, reduction="mean").item() == pytest.approx((first / 1 + second / 2) / 2)
    assert fused_tdt_loss(*case, reduction="mean_volume").item() == pytest.approx((first + second) / 2)
