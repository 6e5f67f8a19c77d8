"""Training without the encoder, or with its last layers only."""

from finetune.errors import UserError
from finetune.models.protocols import AsrModel


def freeze_encoder(model: AsrModel, trained_layers: int = 0) -> None:
    """Freeze the encoder but its last Conformer layers, in place.

    What is frozen gets no gradients and so no optimizer states, stores no activations, and stays in evaluation mode
    (`set_train_mode`): its BatchNorm uses the stored statistics, its dropout is off. A weight that frozen and trained
    layers share (position biases that are not untied) stays frozen.

    Args:
        trained_layers: Conformer layers, counted from the last, that are trained.

    Raises:
        UserError: the encoder has fewer layers.
    """
    layers = list(model.encoder.layers)
    if not 0 <= trained_layers <= len(layers):
        raise UserError(
            f"model.unfreeze_encoder_layers: {trained_layers} layers are to be trained, but the encoder has "
            f"{len(layers)}. Write a number from 0 to {len(layers)}, or model.freeze_encoder: false to train the "
            "whole encoder."
        )
    trained = {module for layer in layers[len(layers) - trained_layers :] for module in layer.modules()}
    model.frozen_modules = [module for module in model.encoder.modules() if module not in trained]
    for module in model.frozen_modules:
        for parameter in module.parameters(recurse=False):
            parameter.requires_grad_(False)
