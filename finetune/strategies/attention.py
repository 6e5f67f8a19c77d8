"""The encoder's attention through torch's scaled_dot_product_attention."""

import torch
from torch.nn.attention import SDPBackend

from finetune.errors import UserError
from finetune.models.protocols import AsrModel


def use_scaled_dot_product_attention(model: AsrModel) -> int:
    """Switch NeMo's attention modules to torch's fused kernel, in place; the mathematics stays the same.

    The relative position scores become the kernel's additive mask, so one (B, heads, T, T) tensor is kept for the
    backward pass instead of four. Rows of padding, which are masked as a whole, come out as zeros as before.

    Returns:
        The number of layers.

    Raises:
        UserError: the encoder's attention is local, for which NeMo has no such path.
    """
    layers = list(model.encoder.layers)
    kind = model.encoder.self_attention_model
    if kind not in ("rel_pos", "abs_pos"):
        raise UserError(
            f"model.scaled_dot_product_attention: the encoder's attention is {kind}, which torch's kernel does not "
            "compute. Set model.scaled_dot_product_attention: false."
        )
    for layer in layers:
        attention = layer.self_attn
        # NeMo turns the names of a layout into torch's constants only where the layout itself asks for the kernel.
        names = attention.use_pytorch_sdpa_backends or []
        attention.use_pytorch_sdpa_backends = [getattr(SDPBackend, n) if isinstance(n, str) else n for n in names]
        attention.use_pytorch_sdpa = True
    return len(layers)


def use_local_attention(model: AsrModel, context: int) -> None:
    """Switch NeMo's encoder from full to local attention, in place; the weights stay.

    Memory and time then grow linearly with the length of an utterance, not with its square. A model that was trained
    with full attention sees less than it learned to look at, so its texts may differ.

    Args:
        model: NeMo transducer with relative positions.
        context: frames that each frame sees on either side.

    Raises:
        UserError: NeMo has no local attention for this encoder.
    """
    kind = getattr(model.encoder, "self_attention_model", None)
    if kind not in ("rel_pos", "rel_pos_local_attn"):
        raise UserError(
            f"--attention local: the encoder's attention is {kind}; NeMo has a local form of rel_pos only."
        )
    before = [layer.self_attn for layer in model.encoder.layers]
    device = next(model.parameters()).device
    model.encoder.use_pytorch_sdpa = False  # NeMo's local attention has no such path
    model.encoder.change_attention_model("rel_pos_local_attn", [context, context], update_config=False, device=device)
    for old, layer in zip(before, model.encoder.layers, strict=True):
        layer.self_attn.to(dtype=old.linear_q.weight.dtype)
        layer.self_attn.train(old.training)
        # NeMo makes the new layers with biases, whatever the layout says, and nothing gives those their values.
        for name, linear in old.named_children():
            if isinstance(linear, torch.nn.Linear) and linear.bias is None:
                layer.self_attn.get_submodule(name).register_parameter("bias", None)
    # The convolutions before the encoder see the mel frames of the whole clip: in parts where they would be too large
    # for one.
    model.encoder.change_subsampling_conv_chunking_factor(1)
