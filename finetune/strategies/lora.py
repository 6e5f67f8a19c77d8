"""LoRA (arXiv 2106.09685): low-rank updates of the encoder's linear layers, through Hugging Face's PEFT.

A checkpoint keeps base weights and adapters apart, so that a run continues exactly. A .nemo file holds their sum under the
original names, so that plain NeMo reads it.
"""

import re
from typing import Any

import torch

from finetune.errors import UserError

LORA_KEY = re.compile(r"^(.*)\.lora_([AB])\.\w+\.weight$")


def add_lora(
    model: Any,
    *,
    rank: int,
    alpha: float | None = None,
    dropout: float = 0.0,
    targets: list[str] | None = None,
    train_decoder: bool = True,
) -> int:
    """Puts adapters beside linear layers of each Conformer layer, in place, and freezes everything else of the encoder.

    Prediction network and joint stay as they are, trained, unless `train_decoder` is false. BatchNorm keeps its stored statistics, which belong to the frozen
    weights; the model's own dropout stays on in training. At first the adapters add nothing: their second factor is zero.

    Args:
        rank: of the updates.
        alpha: updates are scaled by alpha / rank; None: twice the rank.
        dropout: probability before the adapters.
        targets: names of linear layers within a Conformer layer.
        train_decoder: train prediction network and joint; else they are frozen too.

    Returns:
        The number of linear layers with an adapter.

    Raises:
        UserError: the Conformer layers have no linear layer of that name, or a number makes no sense.
    """
    from peft import LoraConfig, inject_adapter_in_model

    linears = {
        name.rsplit(".", 1)[-1]
        for layer in model.encoder.layers
        for name, module in layer.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    unknown = sorted(set(targets or ()) - linears)
    if unknown or not targets:
        raise UserError(
            f"model.lora_targets: the Conformer layers have no linear layer {', '.join(unknown) or '(the list is empty)'}; "
            f"they have {', '.join(sorted(linears))}. Write a list of these names."
        )
    alpha = 2 * rank if alpha is None else alpha
    if rank < 1 or alpha <= 0 or not 0 <= dropout < 1:
        raise UserError(
            f"model.lora_rank={rank}, model.lora_alpha={alpha:g}, model.lora_dropout={dropout:g}: expected a rank of 1 or more, an "
            "alpha above 0 and a dropout from 0 to below 1. Try lora_rank: 16, lora_alpha: null, lora_dropout: 0.0."
        )
    names = "|".join(re.escape(name) for name in targets)
    settings = LoraConfig(
        r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=rf"layers\.\d+\.(.*\.)?({names})"
    )
    inject_adapter_in_model(settings, model.encoder)  # also freezes what is no adapter
    model.freeze_batchnorm = True
    model.lora_scaling = alpha / rank
    model.lora_settings = {
        "rank": rank,
        "alpha": float(alpha),
        "dropout": dropout,
        "targets": list(targets),
        "train_decoder": train_decoder,
    }
    for part in () if train_decoder else (model.decoder, model.joint):
        part.requires_grad_(False)
    return sum(hasattr(module, "lora_A") for module in model.encoder.modules())


def merge_saved_lora(state: dict[str, torch.Tensor], scaling: float) -> dict[str, torch.Tensor]:
    """The state dict with the adapters added to their base weights, under the names of a model without adapters.

    Args:
        state: state dict of a model or checkpoint, with any prefix; not changed. Without adapters in it, it is returned as it is.
        scaling: alpha / rank.

    Returns:
        A new dict; tensors without an adapter are those of `state`. Sums are made in float32 and kept in the base weight's type.
    """
    adapters: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in state.items():
        if found := LORA_KEY.match(key):
            adapters.setdefault(found[1], {})[found[2]] = tensor
    merged = type(state)()
    for key, tensor in state.items():
        if LORA_KEY.match(key):
            continue
        linear, _, name = key.rpartition(".base_layer.")
        if linear in adapters and name == "weight":
            update = scaling * (adapters[linear]["B"].float() @ adapters[linear]["A"].float())
            tensor = (tensor.float() + update.to(tensor.device)).to(tensor.dtype)
        merged[f"{linear}.{name}" if linear else key] = tensor
    return merged


def merged_state_dict(model: Any) -> dict[str, torch.Tensor]:
    """The weights as a model without adapters has them; the model's own are not changed.

    Args:
        model: NeMo transducer, with adapters from `add_lora` or without.
    """
    state = model.state_dict()
    return merge_saved_lora(state, model.lora_scaling) if hasattr(model, "lora_scaling") else state


def load_merged_state_dict(model: Any, weights: dict[str, torch.Tensor]) -> None:
    """Puts weights without adapters into the model, in place: into the base layers, with adapters that then add nothing.

    Args:
        model: NeMo transducer, with adapters from `add_lora` or without.
        weights: what `merged_state_dict` returned.
    """
    full = {}
    names = ((key.replace(".base_layer.", "."), tensor) for key, tensor in model.state_dict().items())
    present = {tensor.data_ptr(): name for name, tensor in names if name in weights}
    for key, tensor in model.state_dict().items():
        found = LORA_KEY.match(key)
        if found:
            full[key] = torch.zeros_like(tensor) if found[2] == "B" else tensor
        else:
            name = key.replace(".base_layer.", ".")
            # A file keeps a tensor that modules share under one of its names only.
            full[key] = weights[name] if name in weights else weights[present[tensor.data_ptr()]]
    unexpected = sorted(set(weights) - {key.replace(".base_layer.", ".") for key in full})
    if unexpected:
        raise KeyError(f"weights without a place in the model: {', '.join(unexpected[:8])}")
    model.load_state_dict(full)
