"""NeMo transducers outside of Lightning: importing NeMo, preparing a model for training, and its training mode."""

import logging
import os
import random
import warnings
from typing import Any

import torch
from omegaconf import OmegaConf, open_dict

from finetune.errors import UserError
from finetune.models.protocols import Transducer

log = logging.getLogger(__name__)


def import_nemo() -> Any:
    """Import NeMo's ASR models, which takes 10 s, with NeMo's own logging turned down; returns the module."""
    os.environ.setdefault("ONE_LOGGER_JOB_CATEGORY", "test")
    warnings.filterwarnings("ignore", category=UserWarning, module="(pydub|lightning|nemo|lhotse|torch.jit).*")
    warnings.filterwarnings("ignore", category=SyntaxWarning)
    for noisy in ("nv_one_logger", "numexpr", "lhotse", "matplotlib", "lightning", "lightning.pytorch"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    from nemo.collections.asr import models

    return models


def build(config: dict[str, Any], name: str) -> Transducer:
    """Return a model of a checked NeMo configuration with random weights, an EncDecRNNTBPEModel unless `target` names
    a class; raise UserError if NeMo cannot build it."""
    kind = getattr(import_nemo(), str(config.get("target") or "EncDecRNNTBPEModel").rpartition(".")[2])
    try:
        return kind(cfg=OmegaConf.create(config))
    except Exception as error:
        raise UserError(f"model.name: NeMo cannot build {name}: {type(error).__name__}: {error}") from error


def check_head(model: Transducer, name: str) -> None:
    """Raise UserError if the joint's outputs are not tokens, blank and durations: its loss would be the wrong one."""
    durations = tdt_durations(model)
    outputs = model.joint.joint_net[-1].out_features
    expected = model.tokenizer.vocab_size + 1 + len(durations)
    if outputs != expected:
        raise UserError(
            f"model.name: {name}: the joint has {outputs} outputs, but tokenizer ({model.tokenizer.vocab_size}) + "
            f"blank + durations {list(durations)} make {expected}. The loss settings were probably lost in a change "
            "of vocabulary: restore `loss.loss_name: tdt` and `loss.tdt_kwargs.durations` in the model's "
            "configuration."
        )


def tdt_durations(model: Transducer) -> tuple[int, ...]:
    """Return the durations of the TDT head in encoder frames; empty for a plain RNN-T."""
    if model.joint.num_extra_outputs == 0:
        return ()
    kwargs = (model.cfg.get("loss") or {}).get("tdt_kwargs") or {}
    durations = kwargs.get("durations") or model.cfg.decoding.get("durations")
    if not durations:
        raise UserError(
            f"model.name: the joint has {model.joint.num_extra_outputs} outputs for durations, but the model's "
            "configuration names none (loss.tdt_kwargs.durations)."
        )
    return tuple(int(d) for d in durations)


def ctc_loss_weight(model: Transducer) -> float:
    """Return the share of the CTC loss in that of a hybrid model (`aux_ctc.ctc_loss_weight`); 0 for other models."""
    if not hasattr(model, "ctc_decoder"):
        return 0.0
    return float((model.cfg.get("aux_ctc") or {}).get("ctc_loss_weight") or 0.0)


def prepare_for_training(
    model: Transducer,
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
    # A collective in the encoder's forward would hang when ranks take different numbers of evaluation batches.
    model.encoder.sync_max_audio_length = False
    if not spec_augment:
        model.spec_augmentation = None
    for module in model.modules():
        # NeMo's SpecAugment keeps a private unseeded generator; the global one is seeded and saved in checkpoints.
        if hasattr(module, "_rng"):
            object.__setattr__(module, "_rng", random)
    if dropout is not None:
        _set_dropout(model, dropout)
    if hasattr(model, "ctc_decoder"):
        if ctc_weight is not None:
            with open_dict(model.cfg):
                model.cfg.aux_ctc.ctc_loss_weight = ctc_weight
        weight = ctc_loss_weight(model)
        model.ctc_decoder.requires_grad_(weight > 0)
        if weight:
            log.info("a hybrid model: the loss is %g x transducer + %g x CTC", 1 - weight, weight)
        else:
            log.info("a hybrid model without a share of the CTC loss: its CTC head stays as it is")
    elif ctc_weight:
        log.warning("model.ctc_loss_weight has no effect: the model has no CTC head")
    model.freeze_batchnorm = freeze_batchnorm
    if hasattr(model.decoding.decoding, "disable_cuda_graphs"):
        model.decoding.decoding.disable_cuda_graphs()  # they disturb later work in the same process (NeMo issue 15423)


def _set_dropout(model: Transducer, p: float) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = p
        elif isinstance(module, torch.nn.LSTM):
            module.dropout = p
    for layer in model.encoder.layers:
        layer.self_attn.dropout_rate = p


def cast_parameters(model: Transducer, dtype: torch.dtype) -> None:
    """Cast parameters and buffers of encoder, prediction network, joint and CTC head, in place.

    BatchNorm stays in float32, since its running statistics would stand still in bf16; so does the preprocessor.
    """
    parts = [model.encoder, model.decoder, model.joint]
    if hasattr(model, "ctc_decoder"):
        parts.append(model.ctc_decoder)
    for part in parts:
        for module in part.modules():
            if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
                continue
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(dtype)
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point():
                    setattr(module, name, buffer.to(dtype))


def set_train_mode(model: Transducer) -> None:
    """Call `model.train()`, but keep frozen modules, and BatchNorm where the run file says so, in evaluation mode."""
    model.train()
    for module in getattr(model, "frozen_modules", ()):
        module.training = False
    if getattr(model, "freeze_batchnorm", False):
        set_batchnorm_mode(model, training=False)


def set_batchnorm_mode(model: Transducer, training: bool) -> None:
    """Let BatchNorm use and update the statistics of the batch, or use its stored ones."""
    for module in model.modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            module.train(training)


def learning_batchnorms(model: Transducer) -> list[torch.nn.Module]:
    """Return the BatchNorm modules whose statistics change in training."""
    if getattr(model, "freeze_batchnorm", False):
        return []
    frozen = set(getattr(model, "frozen_modules", ()))
    norms = [m for m in model.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]
    return [norm for norm in norms if norm not in frozen]


def encoder_lengths(model: Transducer, audio_lengths_B: torch.Tensor) -> torch.Tensor:
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
