"""LoRA (arXiv 2106.09685): low-rank updates of the encoder's linear layers, through Hugging Face's PEFT.

`finetune.models.adapters` merges what is trained here into its base weights, and writes and reads it as files.
"""

import re
from typing import cast

import torch

from finetune.errors import UserError
from finetune.models.nemo import head_modules
from finetune.models.protocols import AsrModel


def add_lora(
    model: AsrModel,
    *,
    rank: int,
    alpha: float | None = None,
    dropout: float = 0.0,
    targets: list[str] | None = None,
    train_decoder: bool = True,
) -> int:
    """Add adapters to linear layers of each Conformer layer, in place, and freeze the rest of the encoder.

    The heads are trained as usual unless `train_decoder` is false. BatchNorm keeps its stored
    statistics, which belong to the frozen weights; the model's own dropout stays on in training. At first the adapters
    add nothing: their second factor is zero.

    Args:
        rank: of the updates.
        alpha: updates are scaled by alpha / rank; None: twice the rank.
        dropout: probability before the adapters.
        targets: names of linear layers within a Conformer layer.
        train_decoder: train prediction network, joint, CTC head and prompt kernel; else they are frozen too.

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
            "model.lora_targets: the Conformer layers have no linear layer "
            f"{', '.join(unknown) or '(the list is empty)'}; they have {', '.join(sorted(linears))}. Write a list of "
            "these names."
        )
    alpha = 2 * rank if alpha is None else alpha
    if rank < 1 or alpha <= 0 or not 0 <= dropout < 1:
        raise UserError(
            f"model.lora_rank={rank}, lora_alpha={alpha:g}, lora_dropout={dropout:g}: the rank has to be 1 or more, "
            "alpha above 0 and dropout from 0 to below 1. Try lora_rank: 16, lora_alpha: null, lora_dropout: 0.0."
        )
    names = "|".join(re.escape(name) for name in targets)
    settings = LoraConfig(
        r=rank, lora_alpha=cast(int, alpha), lora_dropout=dropout, target_modules=rf"layers\.\d+\.(.*\.)?({names})"
    )
    inject_adapter_in_model(settings, model.encoder)  # also freezes what is no adapter
    model.freeze_batchnorm = True
    model.lora_scaling = alpha / rank
    model.lora_settings = {"rank": rank, "alpha": float(alpha), "dropout": dropout, "targets": list(targets)}
    model.lora_settings["train_decoder"] = train_decoder
    if not train_decoder:
        for part in head_modules(model).values():
            part.requires_grad_(False)
    return sum(hasattr(module, "lora_A") for module in model.encoder.modules())
