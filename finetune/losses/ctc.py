"""The CTC loss (Graves et al., "Connectionist Temporal Classification", ICML 2006), by utterance, around torch's.

B batch, T encoder frames, U target tokens, V tokens and blank, which is the last.
"""

import math
from collections.abc import Callable

import torch


def ctc_losses(
    log_probs_BTV: torch.Tensor,
    targets_BU: torch.Tensor,
    enc_lengths_B: torch.Tensor,
    target_lengths_B: torch.Tensor,
    ctc_loss: Callable[..., torch.Tensor] = torch.nn.functional.ctc_loss,
) -> torch.Tensor:
    """Return -log P(targets) of each utterance, (B,) float32, in nats; inf, with zero gradient, without an alignment.

    Args:
        log_probs_BTV: normalised; float32, or a narrower type.
        targets_BU: (B, U) token ids, padded with anything.
        enc_lengths_B, target_lengths_B: (B,) frames and tokens.
        ctc_loss: torch's, or a stand-in for tensors without values.
    """
    with torch.autocast(log_probs_BTV.device.type, enabled=False):
        losses_B = ctc_loss(
            log_probs_BTV.float().transpose(0, 1),
            targets_BU,
            enc_lengths_B,
            target_lengths_B,
            blank=log_probs_BTV.size(-1) - 1,
            reduction="none",
            zero_infinity=True,  # else the gradient of an utterance without an alignment is NaN
        )
    return torch.where(feasible_ctc_clips(enc_lengths_B, targets_BU, target_lengths_B), losses_B, math.inf)


def feasible_ctc_clips(
    enc_lengths_B: torch.Tensor, targets_BU: torch.Tensor, target_lengths_B: torch.Tensor
) -> torch.Tensor:
    """Return which utterances have an alignment, (B,) bool: a frame for each token, one more between two equal ones,
    and one at least."""
    places_U = torch.arange(1, max(targets_BU.size(1), 1), device=targets_BU.device)
    repeats_B = ((targets_BU[:, 1:] == targets_BU[:, :-1]) & (places_U < target_lengths_B[:, None])).sum(1)
    return enc_lengths_B >= (target_lengths_B + repeats_B).clamp(min=1)
