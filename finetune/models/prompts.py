"""The encoder with the language prompt behind it, of models that have one (NeMo's EncDecRNNTBPEModelWithPrompt).

Such a model appends a one-hot vector of the prompt's slot to each encoder frame and projects both back
(`prompt_kernel`); prediction network and joint are those of any transducer.

B batch, F mel bins, T frames, H width, P slots.
"""

import contextlib
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from finetune.data.language_prompts import AUTO, prompt_of
from finetune.data.quarantine import BadUtterance
from finetune.errors import UserError
from finetune.models.protocols import AsrModel

log = logging.getLogger(__name__)

DEFAULT_AUTO_RATIO = 0.5
"""NeMo's `unified_auto_ratio` where a configuration names none."""


def prompt_slots(model: AsrModel) -> dict[str, int]:
    """Return the slots of the model's prompts by name; empty for a model without prompts."""
    if not hasattr(model, "prompt_kernel"):
        return {}
    return {str(name): slot for name, slot in (model.cfg.model_defaults.get("prompt_dictionary") or {}).items()}


def check_prompts(model: AsrModel, name: str) -> None:
    """Raise UserError if the model's `prompt_dictionary` has no prompts, or slots that its prompt kernel lacks."""
    if not hasattr(model, "prompt_kernel"):
        return
    key, slots = "model_defaults.prompt_dictionary", prompt_slots(model)
    if not slots:
        raise UserError(f"model.name: {name} takes a language prompt, but its {key} is empty.")
    for prompt, slot in slots.items():
        if type(slot) is not int or not 0 <= slot < model.num_prompts:
            raise UserError(
                f"model.name: {name}: {key}.{prompt[:40]}: a slot from 0 to {model.num_prompts - 1} is expected, "
                f"found {slot!r}."
            )


def auto_ratio(model: AsrModel, ratio: float | None) -> float:
    """Return the share of training clips with the prompt `auto`: `model.unified_auto_ratio`, or the model's own.

    Raises:
        UserError: the run file wants a share, and the model has no such prompt.
    """
    slots = prompt_slots(model)
    if not slots or AUTO not in slots:
        if slots and ratio:
            raise UserError(
                f"model.unified_auto_ratio: {ratio:g} is set, but the model has no prompt `auto`; it has "
                f"{', '.join(list(slots)[:12])}. Leave the key out."
            )
        if ratio is not None and not slots:
            log.warning("model.unified_auto_ratio has no effect: the model takes no prompts")
        return 0.0
    if ratio is not None:
        return ratio
    trained = model.cfg.get("train_ds") or {}
    alone = {"langID": 0.0, "auto": 1.0}.get(str(trained.get("default_prompt_mode", "unified")))
    return alone if alone is not None else float(trained.get("unified_auto_ratio", DEFAULT_AUTO_RATIO))


def check_language(model: AsrModel, language: str | None, key: str = "--language") -> None:
    """Check a language that was asked for; None asks for `auto` of a prompt model, and nothing of others.

    Raises:
        UserError: the model takes no language, or has no prompt for it.
    """
    slots = prompt_slots(model)
    if not slots:
        if language is not None:
            raise UserError(f"{key}: the model takes no language: it has no prompts. Leave the option out.")
        return
    try:
        prompt_of(language or AUTO, slots)
    except BadUtterance as reason:
        raise UserError(f"{key}: {reason}") from reason


def slots_of(model: AsrModel, languages: Sequence[str]) -> torch.Tensor | None:
    """Return the (B,) slots of the prompts of languages that `check_language` or the stream let pass; None for a model
    without prompts."""
    slots = prompt_slots(model)
    return torch.tensor([slots[prompt_of(name, slots)] for name in languages]) if slots else None


def encode(
    model: AsrModel,
    mel_BFT: torch.Tensor,
    mel_lengths_B: torch.Tensor,
    slots_B: torch.Tensor | None = None,
    encoder_context: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the encoder's outputs (B, H, T), with the prompt where the model takes one, and their lengths (B,).

    Args:
        mel_BFT: features, in the type of the encoder's weights.
        slots_B: as `with_prompt`.
        encoder_context: makes a context manager around the encoder's forward.
    """
    with encoder_context():
        enc_BHT, enc_lengths_B = model.encoder(audio_signal=mel_BFT, length=mel_lengths_B)
    return with_prompt(model, enc_BHT, slots_B), enc_lengths_B


def with_prompt(model: AsrModel, enc_BHT: torch.Tensor, slots_B: torch.Tensor | None = None) -> torch.Tensor:
    """Return encoder outputs (B, H, T) with the prompt mixed in; those of a model without prompts as they are.

    Args:
        slots_B: of the prompts; None: `auto`, or the first slot of a model that has no `auto`.
    """
    if not hasattr(model, "prompt_kernel"):
        return enc_BHT
    if slots_B is None:
        slots = prompt_slots(model)
        slots_B = torch.full((enc_BHT.size(0),), slots.get(AUTO, next(iter(slots.values()), 0)))
    enc_BTH = enc_BHT.transpose(1, 2)
    index_BT1 = slots_B.to(enc_BHT.device)[:, None, None].expand(-1, enc_BTH.size(1), 1)
    prompt_BTP = enc_BTH.new_zeros(*enc_BTH.shape[:2], model.num_prompts).scatter_(2, index_BT1, 1.0)
    mixed_BTH = model.prompt_kernel(torch.cat([enc_BTH, prompt_BTP], dim=-1))
    return mixed_BTH.to(enc_BHT.dtype).transpose(1, 2)
