"""Attention contexts of streaming models: what a training draws, what the encoder then sees, and their names."""

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from loss_equality import prepared

from finetune.errors import UserError
from finetune.models.look_ahead import (
    OFFLINE,
    attending,
    choose_contexts,
    draw_context,
    latency_of,
    streaming_contexts,
    training_contexts,
)
from finetune.models.loss_module import LossModule
from finetune.strategies.checkpointing import enable_gradient_checkpointing

STEPS = 4000


@pytest.fixture
def load(archive_of: Callable[..., Path]) -> Callable[[str], Any]:
    return lambda name: prepared(archive_of(name))


def shares(contexts: list[Any], probabilities: list[float]) -> dict[Any, float]:
    drawn = Counter(draw_context(contexts, probabilities, 1, step) for step in range(STEPS))
    return {context: count / STEPS for context, count in drawn.items()}


def losses(model: Any, **options: Any) -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    module = LossModule(model)
    module.train()
    audio_BS = 0.1 * torch.randn(2, 40_000, generator=draw)
    tokens_BU = torch.randint(1, model.tokenizer.vocab_size, (2, 5), generator=draw)
    return module(audio_BS, torch.tensor([40_000, 30_000]), tokens_BU, torch.tensor([5, 4]), **options)


def test_shares_of_look_aheads_follow_the_probabilities(load):
    model = load("streaming")
    found = shares(*training_contexts(model))
    assert set(found) == {(70, 13), (70, 6), (70, 1), (70, 0)}
    assert all(share == pytest.approx(0.25, abs=0.03) for share in found.values())
    model.encoder.att_context_probs = [0.7, 0.1, 0.2, 0.0]
    found = shares(*training_contexts(model))
    assert found == pytest.approx({(70, 13): 0.7, (70, 6): 0.1, (70, 1): 0.2}, abs=0.03)


def test_a_unified_model_mixes_whole_recordings_and_chunks(load):
    model = load("unified")
    found = shares(*training_contexts(model))
    assert found[OFFLINE] == pytest.approx(0.3, abs=0.03), "the model's own streaming_loss_weight is 0.7"
    assert set(found) - {OFFLINE} == {(70, c, r) for c in (1, 2, 7, 13) for r in (0, 1, 2, 3, 4, 7, 13)}
    assert shares(*training_contexts(model, 0.5))[OFFLINE] == pytest.approx(0.5, abs=0.03)
    assert shares(*training_contexts(model, 0.0)) == {OFFLINE: 1.0}
    assert OFFLINE not in shares(*training_contexts(model, 1.0))
    del model.cfg.loss.streaming_loss_weight, model.cfg.loss.offline_loss_weight
    assert shares(*training_contexts(model))[OFFLINE] == pytest.approx(0.5, abs=0.03)


def test_a_draw_depends_on_seed_and_step_alone():
    contexts, probabilities = [(70, 13), (70, 0)], [0.5, 0.5]
    first = [draw_context(contexts, probabilities, 1, step) for step in range(50)]
    random.seed(7)
    assert [draw_context(contexts, probabilities, 1, step) for step in reversed(range(50))][::-1] == first
    assert [draw_context(contexts, probabilities, 2, step) for step in range(50)] != first


@pytest.mark.parametrize(("name", "context"), [("streaming", (70, 1)), ("unified", (70, 2, 1)), ("unified", OFFLINE)])
def test_the_loss_sees_the_context_and_no_other(load, name, context):
    model = load(name)
    drawn_before = random.getstate()
    ours = losses(model, context=context)
    assert random.getstate() == drawn_before, "NeMo's encoder has drawn one of its own"
    assert losses(model).tolist() == losses(model).tolist(), "without a context it is the default, each time"
    different = losses(model).tolist() != ours.tolist()
    assert different == (context != OFFLINE)
    # What NeMo itself computes where the model has only this context.
    model.encoder.att_context_size, model.encoder.att_context_size_all = list(context), [list(context)]
    assert losses(model).tolist() == ours.tolist()


def test_gradients_under_checkpointing_are_those_of_the_same_context(load):
    gradients = []
    for checkpointed in (False, True):
        model = load("streaming")
        if checkpointed:
            enable_gradient_checkpointing(model)
        losses(model, context=(70, 1)).sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-6, atol=1e-7)


def test_the_context_is_the_models_own_again_afterwards(load):
    encoder = load("streaming").encoder
    with attending(encoder, (70, 0)):
        assert encoder.att_context_size == [70, 0]
    assert encoder.att_context_size == [70, 13]
    assert encoder.att_context_size_all == [[70, 13], [70, 6], [70, 1], [70, 0]]


def test_names_of_look_aheads(load, tiny):
    model = load("streaming")
    assert streaming_contexts(model) == {"13": (70, 13), "6": (70, 6), "1": (70, 1), "0": (70, 0)}
    assert choose_contexts(model, "6, 0") == {"6": (70, 6), "0": (70, 0)}
    with pytest.raises(UserError, match=r"not trained with 2; .*look-ahead\): 13, 6, 1, 0, or all"):
        choose_contexts(model, "6,2")
    unified = load("unified")
    assert len(choose_contexts(unified, "all")) == 28
    assert choose_contexts(unified, "7+13") == {"7+13": (70, 7, 13)}
    with pytest.raises(UserError, match=r"not trained with 7; .*chunk\+right context\): 1\+0, 1\+1"):
        choose_contexts(unified, "7")
    with pytest.raises(
        UserError, match=r"no streaming model: .*att_context_style regular, att_context_size \[-1, -1\]"
    ):
        choose_contexts(tiny(), "1")


def test_latency_is_that_of_the_models_card():
    assert vars(latency_of((70, 13), 0.08)) == {"look_ahead_ms": 1040, "chunk_ms": 1120, "latency_ms": 1120}
    assert vars(latency_of((70, 0), 0.08)) == {"look_ahead_ms": 0, "chunk_ms": 80, "latency_ms": 80}
    assert latency_of((70, 7, 7), 0.08).latency_ms == 1120
    assert latency_of((70, 1, 3), 0.08).latency_ms == 320
