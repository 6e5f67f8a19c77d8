"""What the comparisons of losses with NeMo's share: a prepared model, a batch of noise, and equal gradients."""

from pathlib import Path
from typing import Any

import torch

from finetune.models.loading import load_model
from finetune.models.nemo import prepare_for_training


def prepared(path: str | Path, **options: Any) -> Any:
    """The model as training takes it, with nothing random in it."""
    model = load_model(str(path))
    prepare_for_training(model, spec_augment=False, dropout=0.0, freeze_batchnorm=True, **options)
    model.preprocessor.featurizer.dither = 0.0
    return model


def batch_of(model: Any) -> tuple[torch.Tensor, ...]:
    """Three utterances of noise, with texts of 7, 3 and 1 tokens."""
    draw = torch.Generator().manual_seed(0)
    audio_BS = 0.1 * torch.randn(3, 24_000, generator=draw)
    tokens_BU = torch.randint(1, model.tokenizer.vocab_size, (3, 7), generator=draw)
    return audio_BS, torch.tensor([24_000, 20_000, 9_000]), tokens_BU, torch.tensor([7, 3, 1])


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the gradients, by parameter."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_equal_gradients(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    """Equal to 1e-5 of the largest gradient."""
    assert ours.keys() == theirs.keys()
    largest = max(float(g.abs().max()) for g in theirs.values())
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-5, atol=1e-5 * largest, msg=name)
