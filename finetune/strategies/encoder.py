"""Everything under `model:` that changes how the encoder is trained, in the one order in which it fits together."""

import logging
from typing import TYPE_CHECKING

from finetune.models.protocols import AsrModel
from finetune.strategies.attention import use_scaled_dot_product_attention
from finetune.strategies.checkpointing import enable_gradient_checkpointing
from finetune.strategies.compilation import compile_layers
from finetune.strategies.freezing import freeze_encoder
from finetune.strategies.lora import add_lora

if TYPE_CHECKING:
    from finetune.config.schema import ModelConfig

log = logging.getLogger(__name__)


def apply_encoder_options(model: AsrModel, m: "ModelConfig") -> None:
    """Apply attention kernel, freezing, adapters, compilation and checkpointing, in place.

    Raises:
        UserError: the model has no such layers, or not so many.
    """
    total = len(model.encoder.layers)
    if m.scaled_dot_product_attention:
        layers = use_scaled_dot_product_attention(model)
        log.info("attention of %d encoder layers through torch's scaled_dot_product_attention", layers)
    if m.freeze_encoder:
        freeze_encoder(model, m.unfreeze_encoder_layers)
        log.info("the encoder is frozen but the last %d of its %d layers", m.unfreeze_encoder_layers, total)
    if m.lora_rank:
        adapters = add_lora(
            model,
            rank=m.lora_rank,
            alpha=m.lora_alpha,
            dropout=m.lora_dropout,
            targets=list(m.lora_targets),
            train_decoder=m.lora_train_decoder,
        )
        log.info(
            "LoRA of rank %d, scaled by %g, on %d linear layers of the encoder, which is frozen otherwise%s",
            m.lora_rank,
            model.lora_scaling,
            adapters,
            "" if m.lora_train_decoder else ", as are the heads",
        )
    if m.compile:
        log.info("compiling %d encoder layers in the first step", compile_layers(model))
    if m.gradient_checkpointing:
        layers = enable_gradient_checkpointing(model, m.gradient_checkpointing_every)
        log.info("gradient checkpointing of %d of %d encoder layers", layers, total)
