"""The fused loss inside models that others train: NeMo's transducers under Lightning, transformers' ParakeetForTDT.

    from finetune.losses import use_in_nemo, use_in_transformers
    use_in_nemo(model)           # a loaded EncDecRNNTBPEModel; then trainer.fit(model) as before
    use_in_transformers(model)   # a loaded ParakeetForTDT; then Trainer(model, ...) as before

Shape suffixes: B batch, T encoder frames, U target tokens, H hidden (the joint's width).
"""

import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch
from torch import nn

from finetune.losses.tdt import fused_tdt_loss

if TYPE_CHECKING:
    from nemo.collections.asr.modules import RNNTJoint

Model = TypeVar("Model", bound=nn.Module)
ACTIVATION_OF = {nn.ReLU: "relu", nn.Tanh: "tanh", nn.Sigmoid: "sigmoid"}


class JointInputs(NamedTuple):
    """What the joint would have multiplied out: (B, T, D) encoder and (B, U + 1, D) prediction network outputs."""

    enc_BTD: torch.Tensor
    pred_BUD: torch.Tensor


def in_forward_of(module: nn.Module, function: Callable[..., torch.Tensor], *inputs: Any) -> torch.Tensor:
    """Call `function` as the module's forward, so that hooks which gather its weights (ZeRO-3, FSDP) run.

    Args:
        module: whose weights the function uses.
        function: takes `inputs`, returns what needs a gradient.

    Raises:
        ValueError: the module's forward has been replaced by someone else.
    """
    # Accelerate's hooks (offloading) put a forward of their own on the module, which calls this one.
    name = "_old_forward" if "_hf_hook" in module.__dict__ else "forward"
    if name == "forward" and name in module.__dict__:
        name = type(module).__name__
        raise ValueError(f"{name}: its forward has been replaced by {module.forward!r}: no place for the fused loss")
    before = module.__dict__.get(name)
    setattr(module, name, function)
    try:
        return module(*inputs)
    finally:
        if before is None:
            delattr(module, name)
        else:
            setattr(module, name, before)


def use_in_nemo(model: Any, *, occupancy_threshold: float = 0.0, joint_memory_budget: int | None = None) -> Any:
    """Put the fused loss into a loaded NeMo transducer, in place; validation and decoding stay as they are.

    Works with and without `fuse_loss_wer`. Durations, sigma, omega, FastEmit and clamp are those of the model's own
    loss. Call it after `change_vocabulary`, which makes a new joint and a new loss.

    Args:
        model: EncDecRNNTBPEModel or a relative with `joint` and `loss`, TDT or RNN-T head.
        occupancy_threshold, joint_memory_budget: as in `fused_tdt_loss`.

    Returns:
        The model.

    Raises:
        ValueError: the model's joint or loss is of a kind that the fused loss does not compute.
    """
    joint, config = model.joint, model.cfg.get("loss") or {}
    name = config.get("loss_name", "default")
    kwargs = config.get(f"{name}_kwargs") or config.get("warprnnt_numba_kwargs") or {}
    if name not in ("tdt", "default", "warprnnt_numba", "warprnnt", "pytorch"):
        raise ValueError(f"loss.loss_name: expected a TDT or RNN-T loss, got {name!r}")
    if type(joint).__name__ != "RNNTJoint" or type(joint.joint_net[0]) not in ACTIVATION_OF:
        got = f"{type(joint).__name__} with {joint.joint_net[0]}"
        raise ValueError(f"joint: expected NeMo's RNNTJoint with relu, tanh or sigmoid, got {got}")
    head = joint.joint_net[-1]
    if type(head) is not nn.Linear:
        raise ValueError(
            f"joint.joint_net: expected Linear at the end, got {type(head).__name__}: merge adapters first"
        )
    if getattr(joint, "masking_prob", 0) > 0:
        raise ValueError(
            f"joint.masking_prob: expected 0, got {joint.masking_prob}: predictions are not masked (HAINAN)"
        )
    if joint.is_adapter_available():
        raise ValueError("joint: expected no adapters, which the fused loss would leave out")
    durations = tuple(kwargs.get("durations") or ()) if joint.num_extra_outputs else ()
    if len(durations) != joint.num_extra_outputs:
        expected = f"{joint.num_extra_outputs} durations, as the joint has"
        raise ValueError(f"loss.tdt_kwargs.durations: expected {expected}, got {list(durations)}")
    options = {
        "durations": durations,
        "sigma": float(kwargs.get("sigma", 0.0)) if durations else 0.0,
        "omega": float(kwargs.get("omega", 0.0)) if durations else 0.0,
        "fastemit_lambda": float(kwargs.get("fastemit_lambda", 0.0)),
        "clamp": max(float(kwargs.get("clamp", 0.0)), 0.0),
        "occupancy_threshold": occupancy_threshold,
        "joint_memory_budget": joint_memory_budget,
    }

    def loss_forward(self: Any, *, log_probs: JointInputs | torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
        if not isinstance(log_probs, JointInputs):
            return type(self).forward(self, log_probs=log_probs, **inputs)
        joint: RNNTJoint = self.__dict__["fused_joint"]
        layers = list(joint.joint_net)
        head = cast("nn.Linear", layers[-1])
        dropout = next((m.p for m in layers if isinstance(m, nn.Dropout)), 0.0)

        def loss(enc_BTH: torch.Tensor, pred_BUH: torch.Tensor) -> torch.Tensor:
            return fused_tdt_loss(
                enc_BTH,
                pred_BUH,
                head.weight,
                head.bias,
                inputs["targets"],
                inputs["input_lengths"],
                inputs["target_lengths"],
                activation=ACTIVATION_OF[type(layers[0])],
                dropout=dropout if self.training else 0.0,
                reduction=self.reduction or "none",
                **options,
            )

        return in_forward_of(
            head, loss, joint.project_encoder(log_probs.enc_BTD), joint.project_prednet(log_probs.pred_BUD)
        )

    def joint_forward(
        self: Any,
        *,
        encoder_outputs: torch.Tensor,
        decoder_outputs: torch.Tensor | None,
        compute_wer: bool = False,
        **inputs: Any,
    ) -> Any:
        def plain(decoder_outputs: torch.Tensor | None) -> Any:
            outputs = {"encoder_outputs": encoder_outputs, "decoder_outputs": decoder_outputs}
            return type(self).forward(self, **outputs, compute_wer=compute_wer, **inputs)

        if not self.training or decoder_outputs is None:
            return plain(decoder_outputs)
        joint_inputs = JointInputs(encoder_outputs.transpose(1, 2), decoder_outputs.transpose(1, 2))
        if not self.fuse_loss_wer:
            return joint_inputs  # for the loss, which the training step calls next
        value = self.__dict__["fused_loss"](
            log_probs=joint_inputs,
            targets=inputs["transcripts"],
            input_lengths=inputs["encoder_lengths"],
            target_lengths=inputs["transcript_lengths"],
        )
        wer = (None, None, None)
        if compute_wer:
            with torch.no_grad():
                _, *wer = plain(None)
        return value, *wer

    model.loss.forward = types.MethodType(loss_forward, model.loss)
    # They know each other past nn.Module's book-keeping, since the model owns both.
    joint.__dict__["fused_loss"], model.loss.__dict__["fused_joint"] = model.loss, joint
    joint.forward = types.MethodType(joint_forward, joint)
    return model


def use_in_transformers(
    model: Model,
    *,
    reduction: str | None = None,
    sigma: float = 0.0,
    occupancy_threshold: float = 0.0,
    joint_memory_budget: int | None = None,
) -> Model:
    """Put the fused loss into a ParakeetForTDT, in place.

    In training, `model(..., labels=...)` returns it with `logits` None. In eval mode and without labels nothing
    changes.

    Args:
        model: transformers' ParakeetForTDT or ParakeetForRNNT.
        reduction: one of transformers'; None takes its defaults, "mean" for TDT and "mean_volume" for RNN-T.
        sigma, occupancy_threshold, joint_memory_budget: as in `fused_tdt_loss`.

    Returns:
        The model.

    Raises:
        ValueError: it is another model, or its joint is of a kind that the fused loss does not compute.
    """
    from transformers import ParakeetForRNNT, ParakeetForTDT
    from transformers.models.parakeet.generation_parakeet import ParakeetRNNTDecoderCache
    from transformers.models.parakeet.modeling_parakeet import ParakeetRNNTOutput
    from transformers.utils.generic import can_return_tuple

    if not isinstance(model, ParakeetForTDT | ParakeetForRNNT):
        raise ValueError(f"model: expected ParakeetForTDT or ParakeetForRNNT, got {type(model).__name__}")
    is_tdt, config, head = isinstance(model, ParakeetForTDT), model.config, model.joint.head
    if config.hidden_act not in ACTIVATION_OF.values():
        raise ValueError(f"config.hidden_act: expected relu, tanh or sigmoid, got {config.hidden_act!r}")
    if config.blank_token_id != config.vocab_size - 1:
        last = config.vocab_size - 1
        raise ValueError(f"config.blank_token_id: expected the last token, {last}, got {config.blank_token_id}")
    if type(head) is not nn.Linear:
        raise ValueError(f"joint.head: expected Linear, got {type(head).__name__}: merge adapters first")
    # Which labels count differs between the two: RNN-T labels are padded with the blank.
    padding = config.pad_token_id if is_tdt else config.blank_token_id
    options = {
        "durations": tuple(config.durations) if is_tdt else (),
        "activation": config.hidden_act,
        "sigma": sigma,
        "reduction": reduction or ("mean" if is_tdt else "mean_volume"),
        "occupancy_threshold": occupancy_threshold,
        "joint_memory_budget": joint_memory_budget,
    }

    @can_return_tuple
    def forward(
        self: Any,
        input_features: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        decoder_cache: Any = None,
        use_decoder_cache: bool | None = None,
        encoder_outputs: Any = None,
        labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        if labels is None or not self.training:
            return type(self).forward(
                self,
                input_features=input_features,
                attention_mask=attention_mask,
                decoder_input_ids=decoder_input_ids,
                decoder_cache=decoder_cache,
                use_decoder_cache=use_decoder_cache,
                encoder_outputs=encoder_outputs,
                labels=labels,
                **kwargs,
            )
        if encoder_outputs is None:
            encoder_outputs = self.get_audio_features(
                input_features=input_features, attention_mask=attention_mask, **kwargs
            )
        if use_decoder_cache and decoder_cache is None:
            decoder_cache = ParakeetRNNTDecoderCache(self.config)
        pred_BUH, head = self.decoder(decoder_input_ids, cache=decoder_cache), self.joint.head

        def loss(enc_BTH: torch.Tensor, pred_BUH: torch.Tensor) -> torch.Tensor:
            return fused_tdt_loss(
                enc_BTH,
                pred_BUH,
                head.weight,
                head.bias,
                labels.clamp(min=0),  # -100 pads in transformers' trainers
                encoder_outputs.attention_mask.sum(-1),
                ((labels != padding) & (labels >= 0)).sum(-1),
                **options,
            )

        return ParakeetRNNTOutput(
            loss=in_forward_of(head, loss, encoder_outputs.pooler_output, pred_BUH),
            logits=None,
            last_hidden_state=encoder_outputs.last_hidden_state,
            pooler_output=encoder_outputs.pooler_output,
            hidden_states=encoder_outputs.hidden_states,
            attentions=encoder_outputs.attentions,
            decoder_cache=decoder_cache,
        )

    model.forward = types.MethodType(forward, model)
    return model
