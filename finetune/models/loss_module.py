"""The module that is trained: from audio and tokens to one loss per utterance, around NeMo's own modules.

B batch, S samples, F mel bins, T encoder frames, U target tokens, H joint width, V tokens and blank.
"""

import contextlib
import functools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import nn

from finetune.data.decode import as_float
from finetune.losses import Teacher, ctc_losses, fused_tdt_loss
from finetune.losses.dropin import ACTIVATION_OF, in_forward_of
from finetune.losses.operations import REAL, Operations
from finetune.losses.transfers import send
from finetune.models.features import log_mel
from finetune.models.frozen_base import FrozenBase
from finetune.models.look_ahead import Context, attending
from finetune.models.nemo import (
    chosen_head,
    ctc_head,
    ctc_log_probs,
    ctc_loss_weight,
    has_transducer,
    set_train_mode,
    tdt_durations,
    weight_dtype,
)
from finetune.models.prompts import encode
from finetune.models.protocols import AsrModel


@dataclass(frozen=True)
class OnHost:
    """What the loss would fetch from the device; no tuple of tensors, which DDP and FSDP would move there."""

    frames_B: torch.Tensor
    """Encoder frames."""
    tokens_BU: torch.Tensor
    token_lengths_B: torch.Tensor
    distillation_B: torch.Tensor | None = None
    """Factor of each utterance's distillation; None: 1."""


class LossModule(nn.Module):
    """The module that Accelerate prepares: `forward` returns the losses, so DDP, ZeRO and FSDP see every parameter.

    Args:
        nemo_model: a NeMo EncDecRNNTBPEModel, a hybrid or a CTC model.
        sigma, omega, fastemit_lambda: settings of the loss; None takes the model's own.
        encoder_context: makes a context manager around the encoder's forward (activation offload).
        joint_memory_budget: MiB for a block of joint outputs; None chooses by device.
        length_bucket: seconds; features are padded to a multiple of it. 0: no padding.
        frozen_base: to distil from; None: none.
        distillation: weight of that.
        operations: of the loss, as in `fused_tdt_loss`.
    """

    def __init__(
        self,
        nemo_model: AsrModel,
        *,
        sigma: float | None = None,
        omega: float | None = None,
        fastemit_lambda: float | None = None,
        occupancy_threshold: float = 0.0,
        joint_memory_budget: int | None = None,
        encoder_context: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
        length_bucket: float = 0.0,
        frozen_base: FrozenBase | None = None,
        distillation: float = 0.0,
        operations: Operations = REAL,
    ):
        super().__init__()
        self.nemo = nemo_model
        self.encoder_context = encoder_context
        self.ctc_weight = ctc_loss_weight(nemo_model)
        self.ctc_loss = operations.ctc_loss
        self.ctc_losses_B: torch.Tensor | None = None
        """The CTC part of a hybrid model's latest losses, without a gradient; inf where CTC has no alignment."""
        self.frozen_base = frozen_base if distillation else None
        self.distillation = distillation
        self.distilled_B: torch.Tensor | None = None
        """What distillation adds to each of the latest losses, without a gradient; None: nothing was distilled."""
        self.bucket_frames = round(length_bucket / nemo_model.cfg.preprocessor.window_stride)
        self.durations = tdt_durations(nemo_model)
        own = nemo_model.cfg.get("loss") or {}
        kwargs = own.get("tdt_kwargs" if self.durations else "warprnnt_numba_kwargs") or {}
        if fastemit_lambda is None:
            fastemit_lambda = float(kwargs.get("fastemit_lambda") or 0.0)
        sigma = float(sigma if sigma is not None else kwargs.get("sigma", 0.0)) if self.durations else 0.0
        self.omega = float(omega if omega is not None else kwargs.get("omega", 0.0)) if self.durations else 0.0
        activation = type(nemo_model.joint.joint_net[0]) if has_transducer(nemo_model) else nn.ReLU
        self.loss: Callable[..., torch.Tensor] = functools.partial(
            fused_tdt_loss,
            durations=self.durations,
            activation=ACTIVATION_OF[activation],
            sigma=sigma,
            omega=self.omega,
            fastemit_lambda=fastemit_lambda,
            occupancy_threshold=occupancy_threshold,
            joint_memory_budget=None if joint_memory_budget is None else joint_memory_budget * 2**20,
            reduction="none",
            operations=operations,
        )

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        if mode:
            set_train_mode(self.nemo)
        return self

    def forward(
        self,
        inputs: torch.Tensor,
        input_lengths_B: torch.Tensor,
        tokens_BU: torch.Tensor,
        token_lengths_B: torch.Tensor,
        slots_B: torch.Tensor | None = None,
        rnnt_draw: bool = False,
        context: Context | None = None,
        on_host: OnHost | None = None,
    ) -> torch.Tensor:
        """Return one loss per utterance, (B,) fp32, in nats; inf where no alignment exists.

        Of a hybrid model (1 - w) x transducer + w x CTC, with w its `aux_ctc.ctc_loss_weight`, as in NeMo. An
        utterance that has a transducer alignment but none of CTC has the transducer's part alone.

        Args:
            inputs: (B, S) waveforms at the model's sample rate, zero-padded; float32, or int16 in 1/32768. Or the
                (B, F, T) log-mel features of such, as `finetune.models.features.log_mel` returns them.
            input_lengths_B: (B,) samples, or mel frames.
            tokens_BU: (B, U) token ids, padded with anything.
            token_lengths_B: (B,) tokens.
            slots_B: (B,) slots of the language prompts; None: `auto`. No effect on models without prompts.
            rnnt_draw: this batch's draw of omega; True trains it with the plain RNN-T loss.
            context: this batch's attention context (`finetune.models.look_ahead`); None: the model's default.
            on_host: lengths and tokens, for a transducer's loss, and factors of the distillation; None: it waits for
                the device to give them.
        """
        nemo = self.nemo
        mel_BFT, mel_lengths_B = inputs, input_lengths_B
        with torch.autocast(inputs.device.type, enabled=False):
            if inputs.dim() == 2:
                mel_BFT, mel_lengths_B = log_mel(nemo.preprocessor, as_float(inputs), input_lengths_B)
        teacher = None
        if self.frozen_base is not None and self.training:
            factor_B = None if on_host is None else on_host.distillation_B
            if factor_B is None or bool(factor_B.any()):
                clean = self._padded(mel_BFT), mel_lengths_B
                which_C = None
                if factor_B is not None and not bool(factor_B.all()):
                    which_C = send(mel_BFT.device, factor_B.nonzero().squeeze(1))
                teacher = self.frozen_base.hear(*clean, tokens_BU, token_lengths_B, slots_B, context, which_C)
                teacher = self._weighted(teacher, factor_B)
                del clean
        if nemo.spec_augmentation is not None and self.training:
            with torch.autocast(inputs.device.type, enabled=False):
                mel_BFT = nemo.spec_augmentation(input_spec=mel_BFT, length=mel_lengths_B)
        mel_BFT = self._padded(mel_BFT).to(weight_dtype(nemo))
        with attending(nemo.encoder, context):
            enc_BHT, enc_lengths_B = encode(nemo, mel_BFT, mel_lengths_B, slots_B, self.encoder_context)
        targets = enc_lengths_B, tokens_BU, token_lengths_B
        if self.ctc_weight == 1:
            return self._ctc_losses(enc_BHT, *targets)
        losses_B = self._transducer_losses(enc_BHT, *targets, rnnt_draw, on_host, teacher)
        part_B = None if teacher is None else teacher.part_B
        self.distilled_B = None if part_B is None else part_B.mul_(1 - self.ctc_weight)
        if not self.ctc_weight:
            return losses_B
        ctc_losses_B = self._ctc_losses(enc_BHT, *targets)
        self.ctc_losses_B = ctc_losses_B.detach()
        ctc_losses_B = ctc_losses_B.masked_fill(ctc_losses_B == math.inf, 0.0)
        return (1 - self.ctc_weight) * losses_B + self.ctc_weight * ctc_losses_B

    def losses_of(
        self, enc_BHT: torch.Tensor, enc_lengths_B: torch.Tensor, texts_BU: torch.Tensor, text_lengths_B: torch.Tensor
    ) -> torch.Tensor:
        """Return -log P(text | audio) by the head that decodes, (B,) fp32 in nats, of encoder outputs (B, H, T) that
        are there already; inf where no alignment exists."""
        targets = enc_BHT, enc_lengths_B, texts_BU, text_lengths_B
        if chosen_head(self.nemo) == "ctc":
            return self._ctc_losses(*targets)
        return self._transducer_losses(*targets, rnnt_draw=False, on_host=None, teacher=None)

    def _padded(self, mel_BFT: torch.Tensor) -> torch.Tensor:
        more = -mel_BFT.size(2) % self.bucket_frames if self.bucket_frames else 0
        return nn.functional.pad(mel_BFT, (0, more)) if more else mel_BFT

    def _weighted(self, teacher: Teacher, factor_B: torch.Tensor | None) -> Teacher:
        """Return the teacher with the weights of its clips, and a place for what they add to the losses."""
        device, B = teacher.enc_BTH.device, len(teacher.enc_BTH)
        weight_B = torch.full((B,), self.distillation) if factor_B is None else self.distillation * factor_B.float()
        return replace(teacher, weight=send(device, weight_B), part_B=torch.zeros(B, device=device))

    def _ctc_losses(
        self,
        enc_BHT: torch.Tensor,
        enc_lengths_B: torch.Tensor,
        tokens_BU: torch.Tensor,
        token_lengths_B: torch.Tensor,
    ) -> torch.Tensor:
        head = ctc_head(self.nemo)
        assert head is not None
        log_probs_BTV = ctc_log_probs(head, enc_BHT)
        return ctc_losses(log_probs_BTV, tokens_BU, enc_lengths_B, token_lengths_B, self.ctc_loss)

    def _transducer_losses(
        self,
        enc_BHT: torch.Tensor,
        enc_lengths_B: torch.Tensor,
        tokens_BU: torch.Tensor,
        token_lengths_B: torch.Tensor,
        rnnt_draw: bool,
        on_host: OnHost | None,
        teacher: Teacher | None,
    ) -> torch.Tensor:
        nemo = self.nemo
        pred_BHU, _, _ = nemo.decoder(targets=tokens_BU, target_length=token_lengths_B)
        enc_BTH = nemo.joint.project_encoder(enc_BHT.transpose(1, 2))
        pred_BUH = nemo.joint.project_prednet(pred_BHU.transpose(1, 2))
        head = nemo.joint.joint_net[-1]
        on_host = on_host or OnHost(enc_lengths_B, tokens_BU, token_lengths_B)
        dropout = next((m.p for m in nemo.joint.joint_net if isinstance(m, nn.Dropout)), 0.0)

        def loss(enc_BTH: torch.Tensor, pred_BUH: torch.Tensor) -> torch.Tensor:
            return self.loss(
                enc_BTH,
                pred_BUH,
                head.weight,
                head.bias,
                on_host.tokens_BU,
                on_host.frames_B,
                on_host.token_lengths_B,
                dropout=dropout if self.training else 0.0,
                rnnt_draw=rnnt_draw,
                teacher=teacher,
            )

        return in_forward_of(head, loss, enc_BTH, pred_BUH)
