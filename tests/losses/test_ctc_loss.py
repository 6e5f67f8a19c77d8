"""CTC by utterance, against all alignments one by one."""

import itertools
import math

import pytest
import torch

from finetune.losses import ctc_losses, feasible_ctc_clips


def collapsed(path: tuple[int, ...], blank: int) -> list[int]:
    return [label for label, _ in itertools.groupby(path) if label != blank]


def test_losses_and_feasibility_are_those_of_all_alignments():
    draw, V = torch.Generator().manual_seed(0), 3
    cases = [(T, ids) for T in range(5) for U in range(4) for ids in itertools.product(range(V - 1), repeat=U)]
    frames_B = torch.tensor([T for T, _ in cases])
    tokens_BU = torch.tensor([[*ids, *[1] * (3 - len(ids))] for _, ids in cases])
    lengths_B = torch.tensor([len(ids) for _, ids in cases])
    log_probs_BTV = torch.randn(len(cases), 5, V, generator=draw).log_softmax(-1).requires_grad_()
    losses_B = ctc_losses(log_probs_BTV, tokens_BU, frames_B, lengths_B)
    expected = []
    for (T, ids), log_probs_TV in zip(cases, log_probs_BTV.detach().double(), strict=True):
        paths = [p for p in itertools.product(range(V), repeat=T) if T and collapsed(p, V - 1) == list(ids)]
        total = sum(math.exp(sum(float(log_probs_TV[t, v]) for t, v in enumerate(p))) for p in paths)
        expected.append(-math.log(total) if paths else math.inf)
    assert losses_B.tolist() == pytest.approx(expected, rel=1e-5)
    feasible_B = feasible_ctc_clips(frames_B, tokens_BU, lengths_B)
    assert feasible_B.tolist() == [x < math.inf for x in expected]
    assert 0 < feasible_B.sum() < len(cases)
    losses_B[feasible_B].sum().backward()
    assert log_probs_BTV.grad is not None
    assert torch.isfinite(log_probs_BTV.grad).all()
    assert (log_probs_BTV.grad[~feasible_B] == 0).all()


def test_no_tokens_in_the_whole_batch():
    frames_B, none_B = torch.tensor([3, 0]), torch.tensor([0, 0])
    assert feasible_ctc_clips(frames_B, torch.zeros(2, 0, dtype=torch.int64), none_B).tolist() == [True, False]
