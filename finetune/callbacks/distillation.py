"""The frozen base of a run that distils from it: the same one after a resume."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from finetune.distributed import on_main
from finetune.errors import UserError
from finetune.models.frozen_base import FrozenBase
from finetune.training.callbacks import Callback

KEY, FILE = "distillation_base", "distillation_rows.safetensors"


class DistillationBase(Callback):
    """Keeps in checkpoints which model the run distils from, and the rows of a changed vocabulary, which no file has;
    refuses to go on with another.

    Args:
        base: as the run has built it from `model.name`.
    """

    def __init__(self, base: FrozenBase):
        self.base = base
        self.sha256: str | None = None

    def frozen_tensors(self) -> Iterable[torch.Tensor]:
        return [tensor.detach() for tensor in self.base.model.state_dict().values()]

    def _digest(self) -> str:
        if self.sha256 is None:
            self.sha256 = on_main(self.base.digest)
        return self.sha256

    def before_save(self, is_main: bool) -> tuple[dict[str, Any], dict[str, dict[str, torch.Tensor]]]:
        state = {KEY: {"name": self.base.name, "sha256": self._digest()}}
        if not (self.base.changed and is_main):
            return state, {}
        return state, {FILE: {n: t.detach().cpu().clone() for n, t in self.base.rows().items()}}

    @torch.no_grad()
    def on_resume(self, checkpoint: Path, state: dict[str, Any]) -> None:
        """Take the rows of the checkpoint, and compare.

        Raises:
            UserError: the base is another than the one that the run began with.
        """
        kept, file = state.get(KEY), checkpoint / FILE
        if kept is None:  # the run distils from here on only
            return
        if self.base.changed and file.is_file():
            rows = self.base.rows()
            for name, tensor in load_file(file).items():
                if name in rows and rows[name].shape == tensor.shape:
                    rows[name].copy_(tensor)
        found = self._digest()
        if found != kept["sha256"]:
            raise UserError(
                f"model.distillation: the run began with another base: the weights of {kept['name']} had the SHA-256 "
                f"{kept['sha256'][:12]}..., those of {self.base.name} have {found[:12]}... now. Put the file back "
                "that was there, or set model.distillation: 0 to go on without it."
            )
