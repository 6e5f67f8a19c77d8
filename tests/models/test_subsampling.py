"""The subsampling masks its padding less often than NeMo does."""

import copy
from typing import Any

import pytest
import torch

from finetune.models.nemo import import_nemo
from finetune.models.subsampling import mask_once

B, T, F = 3, 83, 16


@pytest.fixture(scope="module")
def encoder() -> Any:
    import_nemo()
    from nemo.collections.asr.modules import ConformerEncoder

    return ConformerEncoder(
        feat_in=F, n_layers=1, d_model=8, n_heads=2, subsampling="dw_striding", subsampling_factor=8,
        subsampling_conv_channels=4,
    ).pre_encode  # fmt: skip


def steps(pre_encode: Any) -> tuple[list[torch.Tensor], int]:
    """Outputs and gradients; and the bytes that are kept for the backward pass."""
    kept: dict[int, int] = {}

    def count(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    torch.manual_seed(0)
    mel_BTF = torch.randn(B, T, F, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        out_BTH, lengths_B = pre_encode(mel_BTF, torch.tensor([83, 40, 5]))
    out_BTH.backward(torch.randn_like(out_BTH))
    assert mel_BTF.grad is not None
    return [out_BTH, lengths_B, mel_BTF.grad, *(p.grad for p in pre_encode.parameters())], sum(kept.values())


def test_same_outputs_and_gradients_from_less_memory(encoder: Any) -> None:
    holder = torch.nn.Module()
    holder.encoder = torch.nn.Module()
    holder.encoder.pre_encode = copy.deepcopy(encoder)
    assert mask_once(holder)  # pyright: ignore[reportArgumentType]
    copied = copy.deepcopy(holder.encoder.pre_encode)  # a copy works with its own weights
    torch.nn.init.zeros_(holder.encoder.pre_encode.conv[0].weight)
    (expected, kept), (found, kept_now) = steps(encoder), steps(copied)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert kept_now < 0.8 * kept


def test_another_activation_stays_as_it_is(encoder: Any) -> None:
    holder = torch.nn.Module()
    holder.encoder = torch.nn.Module()
    holder.encoder.pre_encode = copy.deepcopy(encoder)
    holder.encoder.pre_encode.conv[1] = torch.nn.Sigmoid()  # of which a padding of zeros would not stay one
    assert not mask_once(holder)  # pyright: ignore[reportArgumentType]
