"""The model as a run begins, frozen, which training distils from (`model.distillation`).

B batch, F mel bins, T frames, U target tokens, H joint width.
"""

import hashlib
from dataclasses import dataclass
from typing import Any, Self

import torch

from finetune.losses import Teacher
from finetune.models.adapters import LORA_KEY
from finetune.models.look_ahead import Context, attending
from finetune.models.nemo import weight_dtype
from finetune.models.prompts import encode
from finetune.models.protocols import AsrModel

HEARD = ("encoder.", "decoder.", "joint.", "prompt_kernel.")


@dataclass(frozen=True, eq=False)
class FrozenBase:
    """A model in evaluation mode without gradients, as an attribute of the one that is trained. No module itself, so
    it is in no checkpoint and no engine's hands; a copy of the trained model shares it.

    Attributes:
        model: of its own, on the training device.
        name: `model.name`.
        changed: whether the run changed the vocabulary, so that rows of the heads are in no file.
    """

    model: AsrModel
    name: str
    changed: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    @torch.no_grad()
    def hear(
        self,
        mel_BFT: torch.Tensor,
        mel_lengths_B: torch.Tensor,
        tokens_BU: torch.Tensor,
        token_lengths_B: torch.Tensor,
        slots_B: torch.Tensor | None,
        context: Context | None,
        which_C: torch.Tensor | None = None,
    ) -> Teacher:
        """Return what it says of clips, as `finetune.models.loss_module.LossModule.forward` takes them, by their clean
        features.

        Args:
            which_C: indices of the clips that it hears; of the others it says zeros. None: all.
        """
        model, B = self.model, len(mel_BFT)
        if which_C is not None:
            mel_BFT, mel_lengths_B = mel_BFT.index_select(0, which_C), mel_lengths_B.index_select(0, which_C)
            tokens_BU, token_lengths_B = tokens_BU.index_select(0, which_C), token_lengths_B.index_select(0, which_C)
            slots_B = None if slots_B is None else slots_B.index_select(0, which_C)
        with attending(model.encoder, context):
            enc_BHT, _ = encode(model, mel_BFT.to(weight_dtype(model)), mel_lengths_B, slots_B)
        pred_BHU, _, _ = model.decoder(targets=tokens_BU, target_length=token_lengths_B)
        head = model.joint.joint_net[-1]
        enc_BTH = model.joint.project_encoder(enc_BHT.transpose(1, 2))
        pred_BUH = model.joint.project_prednet(pred_BHU.transpose(1, 2))
        if which_C is not None:
            enc_BTH, pred_BUH = (x.new_zeros(B, *x.shape[1:]).index_copy_(0, which_C, x) for x in (enc_BTH, pred_BUH))
        return Teacher(enc_BTH, pred_BUH, head.weight, head.bias)

    def digest(self) -> str:
        """Return the SHA-256 of names, shapes, types and values of the weights that are heard."""
        found = hashlib.sha256()
        own = self.model.state_dict()
        # Fresh adapters add nothing; those of model.adapter are a part of the base.
        fresh = all(not t.any() for n, t in own.items() if LORA_KEY.match(n) and ".lora_B." in n)
        state = {n.replace(".base_layer.", "."): t for n, t in own.items() if not (fresh and LORA_KEY.match(n))}
        for name in sorted(name for name in state if name.startswith(HEARD)):
            tensor = state[name].detach().cpu().contiguous()
            found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            found.update(tensor.reshape(-1).view(torch.uint8).numpy())
        return found.hexdigest()

    def rows(self) -> dict[str, torch.Tensor]:
        """Return the tensors with a row for each piece of the vocabulary, by name; the model's own."""
        last = f"joint.joint_net.{len(self.model.joint.joint_net) - 1}."
        return {n: t for n, t in self.model.state_dict().items() if n.startswith(("decoder.prediction.embed.", last))}
