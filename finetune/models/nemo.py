"""NeMo's models outside of Lightning: importing NeMo, a model's heads, preparation for training, training mode.

B batch, U target tokens.
"""

import logging
import os
import random
import warnings
from typing import Any, cast

import torch
from omegaconf import OmegaConf, open_dict

from finetune.errors import UserError
from finetune.losses import feasible_clips, feasible_ctc_clips
from finetune.models.host_lstm import use_native_lstm
from finetune.models.protocols import AsrModel, CtcHead
from finetune.models.subsampling import mask_once

log = logging.getLogger(__name__)

HEADS = ("transducer", "ctc")
HEAD_MODULES = ("decoder", "joint", "ctc_decoder", "prompt_kernel")
"""The networks above the encoder, by their names in NeMo's models."""


def import_nemo() -> Any:
    """Import NeMo's ASR models, which takes 10 s, with NeMo's own logging turned down; returns the module."""
    os.environ.setdefault("ONE_LOGGER_JOB_CATEGORY", "test")
    warnings.filterwarnings("ignore", category=UserWarning, module="(pydub|lightning|nemo|lhotse|torch.jit).*")
    warnings.filterwarnings("ignore", category=SyntaxWarning)
    for noisy in ("nv_one_logger", "numexpr", "lhotse", "matplotlib", "lightning", "lightning.pytorch"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    from nemo.collections.asr import models

    return models


def class_of(config: dict[str, Any]) -> str:
    """Return the name of NeMo's class for a checked configuration; by its sections where it has no `target`."""
    if config.get("target"):
        return str(config["target"]).rpartition(".")[2]
    if "joint" not in config:
        return "EncDecCTCModelBPE"
    return "EncDecHybridRNNTCTCBPEModel" if config.get("aux_ctc") else "EncDecRNNTBPEModel"


def build(config: dict[str, Any], name: str) -> AsrModel:
    """Return a model of a checked NeMo configuration with random weights; raise UserError if NeMo cannot build it."""
    models = import_nemo()
    try:
        return getattr(models, class_of(config))(cfg=OmegaConf.create(config))
    except Exception as error:
        raise UserError(f"model.name: NeMo cannot build {name}: {type(error).__name__}: {error}") from error


# ---- heads ----------------------------------------------------------------------------------------------------------


def check_heads(model: AsrModel, name: str) -> None:
    """Raise UserError if the outputs of a head are not tokens, blank and, of a joint, durations: its loss would be the
    wrong one."""
    tokens = model.tokenizer.vocab_size
    if has_transducer(model):
        durations = tdt_durations(model)
        outputs = model.joint.joint_net[-1].out_features
        if outputs != tokens + 1 + len(durations):
            raise UserError(
                f"model.name: {name}: the joint has {outputs} outputs, but tokenizer ({tokens}) + blank + durations "
                f"{list(durations)} make {tokens + 1 + len(durations)}. The loss settings were probably lost in a "
                "change of vocabulary: restore `loss.loss_name: tdt` and `loss.tdt_kwargs.durations` in the model's "
                "configuration."
            )
    head = ctc_head(model)
    if head is not None and head.num_classes_with_blank != tokens + 1:
        raise UserError(
            f"model.name: {name}: the CTC head has {head.num_classes_with_blank} outputs, but tokenizer ({tokens}) + "
            f"blank make {tokens + 1}. The model's configuration and its tokenizer do not belong together."
        )


def has_transducer(model: AsrModel) -> bool:
    """Return whether the model has a prediction network and a joint; a CTC model has none."""
    return hasattr(model, "joint")


def ctc_head(model: AsrModel) -> CtcHead | None:
    """Return the CTC head of a hybrid or a CTC model; None for other models."""
    if has_transducer(model):
        return getattr(model, "ctc_decoder", None)
    return cast("CtcHead", model.decoder)


def head_modules(model: AsrModel) -> dict[str, torch.nn.Module]:
    """Return the networks above the encoder by name: those of HEAD_MODULES that the model has."""
    return {name: getattr(model, name) for name in HEAD_MODULES if hasattr(model, name)}


def set_head(model: AsrModel, head: str | None, name: str = "the model") -> None:
    """Decode with one of the model's heads from here on.

    Args:
        head: transducer or ctc; None: the transducer, but CTC where only that is there or was trained last (a loss
            weight of 1).
        name: of the model, for the message.

    Raises:
        UserError: the model has no such head.
    """
    heads = {"transducer": has_transducer(model), "ctc": ctc_head(model) is not None}
    if head is None:
        head = "ctc" if ctc_loss_weight(model) == 1 else "transducer"
    if not heads[head]:
        if head == "ctc":
            remedy = "Leave --head out to decode with its transducer; training with model.add_ctc gives it one."
            raise UserError(f"--head ctc: {name} has no CTC head. {remedy}")
        raise UserError(f"--head transducer: {name} is a CTC model. Leave --head out.")
    if hasattr(model, "ctc_decoder"):  # NeMo's hybrid models keep it there, under NeMo's names
        model.cur_decoder = "ctc" if head == "ctc" else "rnnt"


def ctc_log_probs(head: CtcHead, enc_BHT: torch.Tensor) -> torch.Tensor:
    """Return the CTC head's log-probabilities (B, T, V + 1) in float32: NeMo's are in the weights' type, and bfloat16
    has steps of 0.06 where they matter."""
    if head.is_adapter_available():
        return head(encoder_output=enc_BHT).float()
    logits_BTV = head.decoder_layers(enc_BHT).transpose(1, 2).float()
    return (logits_BTV / head.temperature).log_softmax(-1)


def warn_about_search(model: AsrModel) -> None:
    """Log that a CTC head decodes greedily where the model's configuration has a search."""
    if chosen_head(model) == "ctc":
        section = model.cfg.aux_ctc if has_transducer(model) else model.cfg
        strategy = (section.get("decoding") or {}).get("strategy") or "greedy"
        if not strategy.startswith("greedy"):
            log.warning("decoding.strategy %s has no effect: CTC decodes greedily here", strategy)


def chosen_head(model: AsrModel) -> str:
    """Return the head that decodes: transducer or ctc."""
    if not has_transducer(model):
        return "ctc"
    return "ctc" if getattr(model, "cur_decoder", "rnnt") == "ctc" else "transducer"


def pieces_of(model: AsrModel) -> list[str]:
    """Return the tokens as the heads' configuration has them, without the blank."""
    head = model.joint if has_transducer(model) else cast("CtcHead", model.decoder)
    return [str(piece) for piece in head.vocabulary]


def weight_dtype(model: AsrModel) -> torch.dtype:
    """Return the type of the parameters; BatchNorm's may be wider."""
    return next(next(iter(head_modules(model).values())).parameters()).dtype


def tdt_durations(model: AsrModel) -> tuple[int, ...]:
    """Return the durations of the TDT head in encoder frames; empty for a plain RNN-T and a CTC model."""
    if not has_transducer(model) or model.joint.num_extra_outputs == 0:
        return ()
    kwargs = (model.cfg.get("loss") or {}).get("tdt_kwargs") or {}
    durations = kwargs.get("durations") or model.cfg.decoding.get("durations")
    if not durations:
        raise UserError(
            f"model.name: the joint has {model.joint.num_extra_outputs} outputs for durations, but the model's "
            "configuration names none (loss.tdt_kwargs.durations)."
        )
    return tuple(int(d) for d in durations)


def ctc_loss_weight(model: AsrModel) -> float:
    """Return the share of the CTC loss: of a hybrid model its `aux_ctc.ctc_loss_weight`, 1 for a CTC model, else 0."""
    if not has_transducer(model):
        return 1.0
    if not hasattr(model, "ctc_decoder"):
        return 0.0
    return float((model.cfg.get("aux_ctc") or {}).get("ctc_loss_weight") or 0.0)


def clips_with_alignment(
    model: AsrModel, enc_lengths_B: torch.Tensor, tokens_BU: torch.Tensor, token_lengths_B: torch.Tensor
) -> torch.Tensor:
    """Return which utterances have an alignment under the model's loss, (B,) bool: the transducer's, or CTC's where
    that is the whole loss.

    Args:
        enc_lengths_B: (B,) encoder frames.
        tokens_BU, token_lengths_B: as in `LossModule.forward`.
    """
    if ctc_loss_weight(model) == 1:
        return feasible_ctc_clips(enc_lengths_B, tokens_BU, token_lengths_B)
    return feasible_clips(enc_lengths_B, token_lengths_B, tdt_durations(model))


# ---- training -------------------------------------------------------------------------------------------------------


def prepare_for_training(
    model: AsrModel,
    *,
    spec_augment: bool,
    dropout: float | None,
    freeze_batchnorm: bool,
    ctc_weight: float | None = None,
) -> None:
    """Remove what only works under Lightning, and apply the run file's choices, in place.

    Args:
        ctc_weight: `ctc_loss_weight` from here on; None keeps the model's own.
    """
    prepare_for_decoding(model)
    mask_once(model)
    use_native_lstm(model)
    if not spec_augment:
        model.spec_augmentation = None
    for module in model.modules():
        # NeMo's SpecAugment keeps a private unseeded generator; the global one is seeded and saved in checkpoints.
        if hasattr(module, "_rng"):
            object.__setattr__(module, "_rng", random)
    if dropout is not None:
        _set_dropout(model, dropout)
    if hasattr(model, "ctc_decoder"):
        _share_loss(model, ctc_weight)
    elif ctc_weight is not None and has_transducer(model) and ctc_weight > 0:
        log.warning("model.ctc_loss_weight has no effect: the model has no CTC head (model.add_ctc gives it one)")
    elif ctc_weight not in (None, 1) and not has_transducer(model):
        log.warning("model.ctc_loss_weight has no effect: the CTC loss of a CTC model is the whole loss")
    if (model.cfg.get("interctc") or {}).get("loss_weights"):
        log.warning("the model's CTC losses between its layers (interctc) are not trained")
    model.freeze_batchnorm = freeze_batchnorm


def prepare_for_decoding(model: AsrModel) -> None:
    """Let a rank decode as it likes, in place."""
    # A collective in the encoder's forward would hang when ranks take different numbers of evaluation batches.
    model.encoder.sync_max_audio_length = False
    if hasattr(model.decoding.decoding, "disable_cuda_graphs"):
        model.decoding.decoding.disable_cuda_graphs()  # they disturb later work in the same process (NeMo issue 15423)


def _share_loss(model: AsrModel, ctc_weight: float | None) -> None:
    """Set the share of the CTC loss of a hybrid model, freeze the head that has none, and decode with one that has."""
    if ctc_weight is not None:
        with open_dict(model.cfg):
            model.cfg.aux_ctc.ctc_loss_weight = ctc_weight
    weight = ctc_loss_weight(model)
    model.ctc_decoder.requires_grad_(weight > 0)
    for part in (model.decoder, model.joint):
        part.requires_grad_(weight < 1)
    set_head(model, None)
    if weight == 1:
        log.info(
            "a hybrid model whose loss is CTC alone: evaluations decode with the CTC head; prediction network and "
            "joint stay as they are, and fit the encoder less with each step unless it is frozen"
        )
    elif weight:
        log.info("a hybrid model: the loss is %g x transducer + %g x CTC", 1 - weight, weight)
    else:
        log.info("a hybrid model without a share of the CTC loss: its CTC head stays as it is")


def _set_dropout(model: AsrModel, p: float) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = p
        elif isinstance(module, torch.nn.LSTM):
            module.dropout = p
    for layer in model.encoder.layers:
        layer.self_attn.dropout_rate = p


def cast_parameters(model: AsrModel, dtype: torch.dtype) -> None:
    """Cast parameters and buffers of the encoder and the heads, in place.

    BatchNorm stays in float32, since its running statistics would stand still in bf16; so does the preprocessor.
    """
    for part in (model.encoder, *head_modules(model).values()):
        for module in part.modules():
            if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
                continue
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(dtype)
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point():
                    setattr(module, name, buffer.to(dtype))


def set_train_mode(model: AsrModel) -> None:
    """Call `model.train()`, but keep frozen modules, and BatchNorm where the run file says so, in evaluation mode."""
    model.train()
    for module in getattr(model, "frozen_modules", ()):
        module.training = False
    if getattr(model, "freeze_batchnorm", False):
        set_batchnorm_mode(model, training=False)


def set_batchnorm_mode(model: AsrModel, training: bool) -> None:
    """Let BatchNorm use and update the statistics of the batch, or use its stored ones."""
    for module in model.modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            module.train(training)


def learning_batchnorms(model: AsrModel) -> list[torch.nn.Module]:
    """Return the BatchNorm modules whose statistics change in training."""
    if getattr(model, "freeze_batchnorm", False):
        return []
    frozen = set(getattr(model, "frozen_modules", ()))
    norms = [m for m in model.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]
    return [norm for norm in norms if norm not in frozen]


def encoder_lengths(model: AsrModel, audio_lengths_B: torch.Tensor) -> torch.Tensor:
    """Return the encoder frames of each clip.

    Args:
        audio_lengths_B: (B,) samples at the model's sample rate.

    Returns:
        (B,) frames after subsampling, int64.
    """
    from nemo.collections.asr.parts.submodules.subsampling import calc_length

    mel_lengths_B = model.preprocessor.featurizer.get_seq_len(audio_lengths_B)
    pre_encode, factor = model.encoder.pre_encode, model.encoder.subsampling_factor
    if not hasattr(pre_encode, "_stride"):  # a plain linear stacking of frames
        return torch.div(mel_lengths_B + factor - 1, factor, rounding_mode="floor").long()
    return calc_length(
        mel_lengths_B,
        all_paddings=pre_encode._left_padding + pre_encode._right_padding,
        kernel_size=pre_encode._kernel_size,
        stride=pre_encode._stride,
        ceil_mode=pre_encode._ceil_mode,
        repeat_num=pre_encode._sampling_num,
    ).long()
