"""The fused TDT loss against references that share no code with it.

Shape suffixes: B batch, T encoder frames, U target tokens, V vocabulary, D durations, H hidden, O joint outputs.
"""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from finetune.losses import FusedTDTLoss, feasible_clips, fused_tdt_loss, lattice
from finetune.losses.dropout import _torch_mask, dropout_mask

TDT = (0, 1, 2, 3, 4)
DURATION_SETS = [TDT, (0, 1, 2), (1, 2), (0, 2, 4, 8), (2, 0, 1), ()]


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """The tensors here are tiny: on a busy machine waiting for a second thread costs more than the work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_case(frames, tokens, durations=TDT, V=7, H=5, dtype=torch.float64, seed=0, extra=0):
    """Positional arguments of fused_tdt_loss for clips of these lengths; `extra` frames and tokens of padding."""
    g = torch.Generator().manual_seed(seed)
    B, T, U, outputs = len(frames), max(frames) + extra, max(tokens) + extra, V + 1 + len(durations)
    shapes = (B, T, H), (B, U + 1, H), (outputs, H), (outputs,)
    tensors = [torch.randn(s, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]
    targets = torch.randint(0, V, (B, U), generator=g)
    return [*tensors, targets, torch.tensor(frames), torch.tensor(tokens)]


def joint_logits(enc_BTH, pred_BUH, weight_OH, bias_O, activation=torch.relu):
    return activation(enc_BTH[:, :, None] + pred_BUH[:, None]) @ weight_OH.t() + bias_O


def all_alignments_loss(logits_TUO, targets, durations, sigma, rnnt=False):
    """-log of the summed probability of every alignment of one clip, by walking each of them (float64, autograd follows)."""
    T, U1, outputs = logits_TUO.shape
    V = outputs - 1 - len(durations)
    token_logp = torch.log_softmax(logits_TUO[..., : V + 1], -1) - (0.0 if rnnt else sigma)
    duration_logp = None if rnnt else torch.log_softmax(logits_TUO[..., V + 1 :], -1)
    found = []

    def walk(t, u, logp):
        if rnnt:
            arcs = [(1, True, 0.0), (0, False, 0.0)]
        else:
            arcs = [(d, blank, duration_logp[t, u, i]) for i, d in enumerate(durations) for blank in (True, False)]
        for d, blank, duration in arcs:
            if blank and d > 0:
                after = logp + token_logp[t, u, V] + duration
                if t + d == T and u == U1 - 1:
                    found.append(after)
                elif t + d < T:
                    walk(t + d, u, after)
            elif not blank and u < U1 - 1 and t + d < T:
                walk(t + d, u + 1, logp + token_logp[t, u, targets[u]] + duration)

    if T > 0:
        walk(0, 0, torch.zeros((), dtype=logits_TUO.dtype))
    return -torch.logsumexp(torch.stack(found), 0) if found else torch.tensor(math.inf, dtype=logits_TUO.dtype)


def all_alignments_losses(case, durations, sigma=0.0, rnnt=False, activation=torch.relu):
    *tensors, targets_BU, frames_B, tokens_B = case
    logits_BTUO = joint_logits(*tensors, activation)
    clips = zip(logits_BTUO, targets_BU, frames_B.tolist(), tokens_B.tolist())
    return torch.stack([all_alignments_loss(z[:t, : u + 1], y, durations, sigma, rnnt) for z, y, t, u in clips])


def transformers_losses(case, sigma=0.0, reduction="none"):
    from transformers.loss.loss_tdt import tdt_loss

    *tensors, targets_BU, frames_B, tokens_B = case
    logits_BTUO = joint_logits(*tensors)
    V = logits_BTUO.shape[-1] - 1 - len(TDT)
    tokens, durations = logits_BTUO[..., : V + 1], logits_BTUO[..., V + 1 :]
    return tdt_loss(tokens, durations, targets_BU, frames_B, tokens_B, V, list(TDT), sigma=sigma, reduction=reduction)


def gradients(loss, case):
    return torch.autograd.grad(loss, case[:4], retain_graph=True)


def assert_same(actual, expected, rtol):
    """Largest difference relative to the largest number of each tensor."""
    for a, e in zip(actual, expected):
        assert torch.isfinite(e).all()
        assert (a - e).abs().max() <= rtol * e.abs().max().clamp(min=1e-30), (a - e).abs().max() / e.abs().max()


# ------------------------------------------------------------------------------------------------------------ against references


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
    """The gradient is that of sum_arcs posterior * log-probability, with label arcs of the token outputs weighing 1 + lambda."""
    case, weight = make_case([4, 3], [2, 1]), 0.4
    frames_B, tokens_B, V = case[5], case[6], 7
    logits_BTUO = joint_logits(*case[:4])
    token_logp = torch.log_softmax(logits_BTUO[..., : V + 1], -1)
    duration_logp = torch.log_softmax(logits_BTUO[..., V + 1 :], -1)
    # all_alignments_loss takes log-probabilities for logits: log_softmax leaves them alone, and its gradient gives the posteriors.
    heads = [token_logp.detach().requires_grad_(), duration_logp.detach().requires_grad_()]
    unnormalised = torch.cat([h - h.logsumexp(-1, keepdim=True).detach() for h in heads], -1)
    total = 0.0
    for b in range(2):
        t, u = frames_B[b].item(), tokens_B[b].item()
        total = total + _loss_of_log_probabilities(unnormalised[b, :t, : u + 1], case[4][b], V)
    token_posterior, duration_posterior = (-g for g in torch.autograd.grad(total, heads))
    weighed = torch.cat([token_posterior[..., :V] * (1 + weight), token_posterior[..., V:]], -1)
    expected = -(weighed * token_logp).sum() - (duration_posterior * duration_logp).sum()
    actual = fused_tdt_loss(*case, fastemit_lambda=weight, reduction="sum")
    plain = fused_tdt_loss(*case, reduction="sum")
    assert_same([actual], [plain * (1 + weight)], 1e-12)
    assert_same(gradients(actual, case), gradients(expected, case), 1e-10)


def _loss_of_log_probabilities(logp_TUO, targets, V):
    T, U1, _ = logp_TUO.shape
    found = []

    def walk(t, u, logp):
        for i, d in enumerate(TDT):
            blank, label = logp + logp_TUO[t, u, V] + logp_TUO[t, u, V + 1 + i], logp + logp_TUO[t, u, V + 1 + i]
            if d > 0 and t + d == T and u == U1 - 1:
                found.append(blank)
            elif d > 0 and t + d < T:
                walk(t + d, u, blank)
            if u < U1 - 1 and t + d < T:
                walk(t + d, u + 1, label + logp_TUO[t, u, targets[u]])

    walk(0, 0, torch.zeros((), dtype=logp_TUO.dtype))
    return -torch.logsumexp(torch.stack(found), 0)


def test_clamp_limits_the_token_gradient_of_a_cell():
    # With one frame and no token there is one cell, whose token gradient reaches the bias unmixed.
    case = make_case([1], [0])
    free = gradients(fused_tdt_loss(*case, reduction="sum"), case)[3]
    limit = free[:8].abs().max().item() / 3
    clamped = gradients(3 * fused_tdt_loss(*case, clamp=limit, reduction="sum"), case)[3]
    assert (free[:8].abs() > limit).any()
    assert torch.allclose(clamped[:8], 3 * free[:8].clamp(-limit, limit), atol=1e-15)
    assert torch.allclose(clamped[8:], 3 * free[8:], atol=1e-15)


# ------------------------------------------------------------------------------------------------------------------ properties

lengths = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 5)), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(lengths, st.sampled_from(DURATION_SETS), st.integers(0, 1000), st.integers(1, 6_000), st.integers(0, 2))
def test_any_batch_equals_the_pytorch_lattice_and_each_clip_alone(clips, durations, seed, budget, extra):
    frames, tokens = zip(*clips)
    case = make_case(frames, tokens, durations, seed=seed, extra=extra)
    options = {"durations": durations, "sigma": 0.1, "reduction": "none"}
    losses = fused_tdt_loss(*case, joint_memory_budget=budget, **options)
    feasible = feasible_clips(case[5], case[6], durations)
    assert torch.equal(torch.isfinite(losses), feasible)
    grads = gradients(losses[feasible].sum() + 0 * case[0].sum(), case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lattice, "_numba_kernel", lambda: None)
        others = fused_tdt_loss(*case, **options)
    assert torch.allclose(losses[feasible], others[feasible], rtol=1e-12, atol=0)
    assert torch.equal(torch.isfinite(others), feasible)
    for a, e in zip(grads, gradients(others[feasible].sum() + 0 * case[0].sum(), case)):
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
    whole = fused_tdt_loss(*case, dropout=0.3, rnnt_draw=False, reduction="sum", joint_memory_budget=2**30)
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
    assert started == [4]
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


# ------------------------------------------------------------------------------------------------- infeasible clips, empty batches


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


# ------------------------------------------------------------------------------------------------------------- omega and dropout


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
    """The same loss from plain autograd, with the masks given: forward, backward and recomputation must use one mask."""
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
    assert torch.equal(mask, _torch_mask(cells, 64, int(probability * 2**32), 99))
    kept = mask.double()
    spread = math.sqrt(probability * (1 - probability))
    assert abs(kept.mean() - (1 - probability)) < 5 * spread / math.sqrt(kept.numel())
    assert (kept.mean(0) - (1 - probability)).abs().max() < 6 * spread / math.sqrt(kept.shape[0])
    for other in (kept.roll(1, 0), kept.roll(1, 1), dropout_mask(cells, 64, probability, 100).double()):
        correlation = ((kept - kept.mean()) * (other - other.mean())).mean() / spread**2
        assert abs(correlation) < 5 / math.sqrt(kept.numel())
    assert not torch.equal(mask[:1_000], mask[3_000:])


def test_module_is_plain_in_eval_mode():
    case = make_case([6, 4], [3, 1])
    module = FusedTDTLoss(dropout=0.5, omega=1.0, sigma=0.1, reduction="mean")
    assert module.eval()(*case).item() == fused_tdt_loss(*case, sigma=0.1, reduction="mean").item()
    torch.manual_seed(0)
    trained = module.train()(*case).item()
    torch.manual_seed(0)
    assert trained == fused_tdt_loss(*case, dropout=0.5, omega=1.0, sigma=0.1, reduction="mean").item()
    assert (
        module.eval()(*case, rnnt_draw=True).item() == fused_tdt_loss(*case, rnnt_draw=True, reduction="mean").item()
    )


# -------------------------------------------------------------------------------------------- precision, work left out, memory


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_memory_stays_within_the_budget(dtype, dropout):
    case = make_case([60] * 4, [20] * 4, V=500, H=32, dtype=dtype)
    budget = 512 * 1024
    with Watch() as watch:
        loss = fused_tdt_loss(*case, joint_memory_budget=budget, dropout=dropout)
        gradients(loss, case)
    full = 4 * 60 * 21 * 506 * 4
    inputs = max(x.numel() * 4 for x in case)
    assert budget / 4 < watch.largest <= max(budget, inputs)
    assert watch.largest < full / 10


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
    # Products with rows of cells are the logits and their gradient, with the 106 rows of the weight's own gradient beside them.
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


def test_half_inputs_keep_their_dtype():
    case = make_case([9], [4], H=16, dtype=torch.float16)
    with torch.no_grad():
        case[2].mul_(0.2)
    loss = fused_tdt_loss(*case)
    assert loss.dtype == torch.float32
    grads = gradients(loss * 16, case)
    doubles = [x.detach().double().requires_grad_() if i < 4 else x for i, x in enumerate(case)]
    for a, e in zip(grads, gradients(fused_tdt_loss(*doubles) * 16, doubles)):
        assert a.dtype == torch.float16
        assert torch.isfinite(a).all()
        assert (a - e).norm() / e.norm() < 1e-2


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
    assert asked == [False]
    assert not evaluated.requires_grad
    assert evaluated.item() == pytest.approx(loss.item(), rel=1e-12)


# ------------------------------------------------------------------------------------------------------------ arguments, caching


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
    ],
    ids=str,
)
def test_wrong_options_are_named(option):
    with pytest.raises(ValueError, match=next(iter(option)) + ": expected"):
        fused_tdt_loss(*make_case([6, 4], [3, 1]), **option)
    with pytest.raises(ValueError, match=next(iter(option)) + ": expected"):
        FusedTDTLoss(**option)


def test_feasible_clips_checks_its_lengths():
    with pytest.raises(ValueError, match="same shape"):
        feasible_clips(torch.tensor([1, 2]), torch.tensor([1]))
    with pytest.raises(ValueError, match=">= 0"):
        feasible_clips(torch.tensor([-1]), torch.tensor([1]), (1, 2))


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
print(fused_tdt_loss(torch.zeros(1, 2, 3), torch.zeros(1, 2, 3), torch.zeros(9, 3), None, torch.zeros(1, 1).long(), *lengths).item())
"""
    root = Path(__file__).parents[1]
    env = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert math.isfinite(float(run.stdout))
