"""Dropout masks that are drawn in blocks: torch's own, and its random state afterwards."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from finetune.models.dropout import bernoulli, draws_as_torch, use_fast_dropout
from finetune.models.loss_module import LossModule
from finetune.strategies.checkpointing import enable_gradient_checkpointing


@pytest.mark.parametrize("kept", [0.9, 0.75, 0.003])
@pytest.mark.parametrize("elements", [1, 2, 311, 312, 2000])
def test_numbers_are_those_of_torch_and_so_is_what_follows(kept: float, elements: int) -> None:
    for words_before in (0, 1, 2, 623, 624, 1247):
        torch.manual_seed(words_before)
        torch.empty(words_before).random_()  # a word each
        with torch.random.fork_rng(devices=[]):
            # On every processor torch draws doubles one by one, as it draws masks where it has no MKL for them.
            expected = torch.rand(elements, dtype=torch.float64) < kept
            state = torch.get_rng_state()
        noise = bernoulli(torch.empty(elements), kept)
        assert torch.equal(noise != 0, expected)
        assert torch.equal(noise[expected], torch.ones(int(expected.sum())).div_(kept))
        assert torch.equal(torch.get_rng_state(), state)


def layers_and_inputs() -> list[tuple[torch.nn.Dropout, torch.Tensor]]:
    inputs = [
        torch.randn(3, 7, 11),
        torch.randn(3, 7, 11).transpose(1, 2),
        torch.randn(4, 6, 5)[:, ::2],
        torch.ones(()),
    ]
    inputs += [torch.randn(4, 5, dtype=torch.bfloat16), torch.empty(0, 3)]
    return [(torch.nn.Dropout(p), x) for p in (0.1, 0.5, 1.0) for x in inputs]


def test_module_gives_what_it_gave() -> None:
    for layer, x in layers_and_inputs():
        found = []
        for switch in (lambda model: None, use_fast_dropout):
            switch(layer)
            torch.manual_seed(0)
            found.append((layer(x), torch.get_rng_state()))
        (plain, state), (fast, state_after) = found
        assert torch.equal(plain, fast)
        assert plain.stride() == fast.stride()
        assert torch.equal(state, state_after)
        assert layer.eval()(x) is x


def test_losses_and_gradients_stay(tiny: Callable[..., Any]) -> None:
    audio_BS, lengths_B = 0.1 * torch.randn(2, 16_000), torch.tensor([16_000, 12_000])
    found = []
    for checkpointed, fast in ((False, False), (False, True), (True, True)):
        model = tiny(dropout=0.2)
        model.preprocessor.featurizer.dither = 0.0
        assert not fast or bool(use_fast_dropout(model)) == draws_as_torch()
        if checkpointed:
            enable_gradient_checkpointing(model)
        torch.manual_seed(0)
        losses_B = LossModule(model).train()(audio_BS, lengths_B, torch.tensor([[1, 2], [3, 4]]), torch.tensor([2, 2]))
        losses_B.sum().backward()
        found.append([losses_B.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))
