"""Best paths and posteriors of given texts against all alignments, one by one."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import TDT, joint_logits, learnt_case, make_case

from finetune.losses import ctc_losses, feasible_clips, feasible_ctc_clips, fused_tdt_loss
from finetune.losses.alignment import Alignment, align_ctc, align_transducer


def transducer_paths(logits_TUO, targets, durations):
    """All alignments of a clip: score, frames of the tokens, their durations and scores, blank scores by position."""
    T, U1, outputs = logits_TUO.shape
    D = len(durations)
    V = outputs - 1 - D
    token_logp = torch.log_softmax(logits_TUO[..., : V + 1], -1).tolist()
    duration_logp = torch.log_softmax(logits_TUO[..., V + 1 :], -1).tolist() if D else None
    found = []

    def walk(t, u, score, emitted, blanks):
        arcs = [(d, duration_logp[t][u][i]) for i, d in enumerate(durations)] if D else [(0, 0.0), (1, 0.0)]
        for d, duration in arcs:
            blank, after = token_logp[t][u][V], [*blanks]
            after[u] += blank
            if d > 0 and t + d == T and u == U1 - 1:
                found.append((score + blank + duration, emitted, after))
            elif d > 0 and t + d < T:
                walk(t + d, u, score + blank + duration, emitted, after)
            if u < U1 - 1 and t + d < T and (D or d == 0):
                label = token_logp[t][u][int(targets[u])]
                walk(t + d, u + 1, score + label + duration, [*emitted, (t, d, label)], blanks)

    if T:
        walk(0, 0, 0.0, [], [0.0] * U1)
    return found


def ctc_paths(log_probs_TV, targets):
    """All alignments of a clip by CTC, as above; a token's score is that of its surest frame."""
    T, outputs = log_probs_TV.shape
    blank, scores, found = outputs - 1, log_probs_TV.tolist(), []
    for labels in itertools.product(range(outputs), repeat=T):
        runs = [(label, [t for t, _ in run]) for label, run in itertools.groupby(enumerate(labels), lambda x: x[1])]
        runs = [(label, frames) for label, frames in runs]
        said = [run for run in runs if run[0] != blank]
        if [label for label, _ in said] != list(targets):
            continue
        blanks, u = [0.0] * (len(targets) + 1), 0
        for label, frames in runs:
            if label == blank:
                blanks[u] += sum(scores[t][blank] for t in frames)
            else:
                u += 1
        emitted = [(ts[0], len(ts), max(scores[t][label] for t in ts)) for label, ts in said]
        found.append((sum(scores[t][label] for t, label in enumerate(labels)), emitted, blanks))
    return found


def check(found: Alignment, paths, *, is_ctc=False):
    score_P = np.array([score for score, _, _ in paths])
    z = np.logaddexp.reduce(score_P)
    weight_P = np.exp(score_P - z)
    assert found.loss == pytest.approx(-z)
    assert found.best_loss == pytest.approx(-score_P.max())
    best = [path for path in paths if path[0] > score_P.max() - 1e-9]
    way = [(int(t), int(d)) for t, d in zip(found.frame_U, found.duration_U, strict=True)]
    assert way in [[(t, d) for t, d, _ in emitted] for _, emitted, _ in best]
    frame_PU = np.array([[t for t, _, _ in emitted] for _, emitted, _ in paths], dtype=float)
    mean_U = weight_P @ frame_PU
    np.testing.assert_allclose(found.mean_U, mean_U, atol=1e-9)
    np.testing.assert_allclose(found.spread_U, np.sqrt(weight_P @ (frame_PU - mean_U) ** 2), atol=1e-6)
    np.testing.assert_allclose(found.near_U, weight_P @ (abs(frame_PU - found.frame_U) <= 1), atol=1e-9)
    np.testing.assert_allclose(found.blank_log_p_P, weight_P @ np.array([b for _, _, b in paths]), atol=1e-9)
    if is_ctc:
        match = best[[[(t, d) for t, d, _ in emitted] for _, emitted, _ in best].index(way)]
        np.testing.assert_allclose(found.log_p_U, [score for _, _, score in match[1]], atol=1e-9)
    else:
        label_PU = np.array([[score for _, _, score in emitted] for _, emitted, _ in paths], dtype=float)
        np.testing.assert_allclose(found.log_p_U, weight_P @ label_PU, atol=1e-9)


@settings(max_examples=40, deadline=None)
@given(
    clips=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), min_size=1, max_size=3),
    durations=st.sampled_from([TDT, (), (0, 1), (1, 2), (0, 3)]),
    seed=st.integers(0, 99),
)
def test_transducer_lattices_equal_the_sum_over_all_alignments(clips, durations, seed):
    case = make_case([t for t, _ in clips], [u for _, u in clips], durations, seed=seed, extra=1)
    feasible = feasible_clips(case[5], case[6], durations).tolist()
    logits_BTUO, targets = joint_logits(*case[:4]).detach(), case[4].tolist()
    for b, found in enumerate(align_transducer(*case, durations=durations)):
        T, U = clips[b]
        assert (found is not None) == feasible[b]
        if found is not None:
            check(found, transducer_paths(logits_BTUO[b, :T, : U + 1], targets[b], durations))


@settings(max_examples=40, deadline=None)
@given(
    clips=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3)), min_size=1, max_size=3), seed=st.integers(0, 99)
)
def test_ctc_states_equal_the_sum_over_all_alignments(clips, seed):
    g = torch.Generator().manual_seed(seed)
    log_probs_BTV = torch.randn(len(clips), 6, 4, generator=g, dtype=torch.float64).log_softmax(-1)
    targets_BU = torch.randint(0, 3, (len(clips), 4), generator=g)
    frames_B, tokens_B = torch.tensor([t for t, _ in clips]), torch.tensor([u for _, u in clips])
    feasible = feasible_ctc_clips(frames_B, targets_BU, tokens_B).tolist()
    for b, found in enumerate(align_ctc(log_probs_BTV, targets_BU, frames_B, tokens_B)):
        T, U = clips[b]
        assert (found is not None) == feasible[b]
        if found is not None:
            check(found, ctc_paths(log_probs_BTV[b, :T], targets_BU[b, :U].tolist()), is_ctc=True)


@pytest.mark.parametrize("durations", [TDT, ()])
def test_a_model_that_has_learnt_says_where_its_tokens_are(durations):
    """The frames at which `learnt_case` lets each token sound, in clips long enough for a band within the lattice."""
    frames, tokens = [120, 90], [30, 25]
    case = learnt_case(frames, tokens, durations, dtype=torch.float32)
    enc_BTH, targets_BU = case[0].detach(), case[4]
    found = align_transducer(*case, durations=durations)
    losses_B = fused_tdt_loss(*case, durations=durations, reduction="none")
    for b, alignment in enumerate(found):
        assert alignment is not None
        U = tokens[b]
        spoken = enc_BTH[b, alignment.frame_U, targets_BU[b, :U]] if durations == () else None
        if spoken is not None:
            assert (spoken > 0).all()
        assert alignment.loss == pytest.approx(float(losses_B[b].detach()), rel=1e-5)
        assert alignment.loss <= alignment.best_loss + 1e-6
        assert (np.diff(alignment.frame_U) >= 0).all()
        assert (np.diff(alignment.mean_U) >= -1e-6).all()


def test_blocks_of_any_size_give_the_same():
    case = learnt_case([60, 41], [14, 9], dtype=torch.float64)
    whole, cut = align_transducer(*case), align_transducer(*case, joint_memory_budget=20_000)
    for a, b in zip(whole, cut, strict=True):
        assert a is not None
        assert b is not None
        for x, y in zip(a, b, strict=True):
            np.testing.assert_allclose(x, y, atol=1e-8)


def test_ctc_losses_are_those_of_torch():
    log_probs_BTV = torch.randn(2, 30, 9, generator=torch.Generator().manual_seed(3)).log_softmax(-1)
    targets = torch.tensor([[1, 1, 2, 7], [3, 0, 0, 0]]), torch.tensor([30, 12]), torch.tensor([4, 1])
    losses_B = ctc_losses(log_probs_BTV, *targets).tolist()
    assert [a.loss if a else math.inf for a in align_ctc(log_probs_BTV, *targets)] == pytest.approx(losses_B, rel=1e-5)


def test_wrong_arguments_are_named():
    case = make_case([4], [2])
    with pytest.raises(ValueError, match="target_lengths_B"):
        align_transducer(*case[:6], torch.tensor([3]))
