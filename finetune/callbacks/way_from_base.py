"""Points on the way from the base model to the trained one, as candidates for the best model at the end of a run with
`data.guard_limit` (Wortsman et al., "Robust fine-tuning of zero-shot models", arXiv 2109.01903).

The way goes by the larger half of the changes of the weights; the rest stays the base model's, as in TIES (arXiv
2306.01708). It costs little of what was learnt, and on the guard less is lost.

What the run changes is kept as it is in the base model, in checkpoints/interpolation/base.safetensors.
"""

import contextlib
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from finetune.config.schema import RunConfig
from finetune.config.tokenizer_setting import changes_vocabulary
from finetune.distributed import broadcast, on_main
from finetune.durable_files import put_in_place
from finetune.errors import UserError
from finetune.models.adapters import LORA_KEY
from finetune.models.interpolation import is_statistic, least_of_largest, lora_start, on_the_way
from finetune.models.loading import load_model
from finetune.models.protocols import AsrModel
from finetune.training.callbacks import Callback, Candidate
from finetune.training.checkpoints import CANNOT_WRITE
from finetune.training.outputs import WAY
from finetune.training.progress import Progress
from finetune.training.trained_state import all_tensors, averaged_tensors, copy_to_host

log = logging.getLogger(__name__)

FINEST = 1 / 16
"""How near the point taken is to one that does not keep the limit."""
DENSITY = 0.5
"""Share of the changes, the largest, that the way goes by."""
SHOWN = ("validation_wer", "guard_wer", "kept")


class WayFromBase(Callback):
    """Looks for the largest step from the base model towards the last weights that keeps the limit: from the end of
    the way in quarters, then by bisection; nothing where the last weights keep it."""

    def __init__(self, accelerator: Accelerator, config: RunConfig, progress: Progress, model: AsrModel):
        assert config.data.guard_limit is not None
        self.accelerator, self.config, self.progress, self.model = accelerator, config, progress, model
        self.output_dir = Path(config.training.output_dir)
        self.file = self.output_dir / "checkpoints" / "interpolation" / "base.safetensors"

    # ---- the base model ---------------------------------------------------------------------------------------------

    def on_fresh_run(self) -> None:
        shutil.rmtree(self.file.parent, ignore_errors=True)

    def on_train_begin(self) -> None:
        """Keep the base model, where the first step has not changed it yet."""
        if self.progress.step == 0:
            state = copy_to_host(self.model, self.accelerator.is_main_process)
            on_main(lambda: self._keep(state))

    def on_resume(self, checkpoint: Path, state: dict[str, Any]) -> None:
        """Look whether the base model that was kept is there and is of what is trained now; else make it anew from
        model.name, or say why it cannot be."""
        if self.progress.step:
            on_main(self._find_base)

    def _find_base(self) -> None:
        trained = self._shapes()
        why = f"{self.file} is not there"
        if self.file.is_file():
            try:
                with safe_open(self.file, "pt") as kept:
                    names = kept.keys()
                    if {name: tuple(kept.get_slice(name).get_shape()) for name in names} == trained:
                        return
                why = f"{self.file} holds other tensors than are trained now"
            except SafetensorError as error:
                why = f"{self.file} is damaged ({error})"
        made, problem = self._from_name()
        if made is None:
            self.file.unlink(missing_ok=True)
            log.warning(
                "data.guard_limit: %s, and the base model cannot be made anew: %s. There will be no points between "
                "the base model and the trained one",
                why,
                problem,
            )
            return
        log.warning("data.guard_limit: %s: the base model is read anew from model.name", why)
        self._keep(made)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of what is trained, as whole tensors."""
        return {name: tuple(getattr(t, "ds_shape", t.shape)) for name, t in averaged_tensors(self.model).items()}

    def _from_name(self) -> tuple[dict[str, torch.Tensor] | None, str]:
        """Return what is trained as it is in `model.name`, or why that is not known."""
        m, shapes = self.config.model, self._shapes()
        if str(m.name).endswith((".yaml", ".yml")):
            return None, "model.name is a layout, with random weights"
        if m.adapter:
            return None, "the run began with model.adapter"
        if changes_vocabulary(self.config):  # a replaced one may have as many pieces
            return None, "model.tokenizer gives the base model another vocabulary, which is in no file"
        try:
            found = load_model(m.name).state_dict()
        except UserError as error:
            return None, str(error)
        types = {name: tensor.dtype for name, tensor in averaged_tensors(self.model).items()}
        made = {}
        for name, shape in shapes.items():
            if LORA_KEY.match(name):
                made[name] = torch.zeros(shape, dtype=types[name])  # which adds nothing, as at the start
                continue
            tensor = found.get(name)
            if tensor is None or tuple(tensor.shape) != shape:
                size = "missing" if tensor is None else str(tuple(tensor.shape))
                return None, f"{name} is {size} in model.name and {shape} in the run, which changed it"
            made[name] = tensor.to(types[name]).contiguous()
        return made, ""

    def _keep(self, state: dict[str, torch.Tensor]) -> None:
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            aside = self.file.with_name(f".{self.file.name}.tmp")
            save_file(state, aside)
            put_in_place(aside, self.file)
        except CANNOT_WRITE as error:
            raise UserError(
                f"{self.file}, the base model that data.guard_limit keeps, cannot be written: {error}. Make room or "
                "mend the disk, then start the same command again.",
                exit_code=1,
            ) from error

    # ---- the search -------------------------------------------------------------------------------------------------

    def candidates(self, model: AsrModel, final: bool) -> Iterator[Candidate]:
        if not final or not self.progress.step:
            return
        if self._kept("raw"):
            limit = self.config.data.guard_limit
            log.info("the last weights keep data.guard_limit %s: no way back to the base model is looked at", limit)
            return
        if not broadcast(self.file.is_file()):
            return
        targets = all_tensors(model)
        tuned = {name: targets[name].detach().to("cpu", copy=True) for name in self._shapes()}
        base = load_file(self.file)
        # Factors of LoRA are no changes of weights.
        factors = any(lora_start(name, base) for name in tuned)
        least = 0.0 if factors else least_of_largest(base, tuned, DENSITY)
        del base  # twice the trained weights would be held while they are evaluated
        # The guard's WER need not rise steadily: bisection from the middle would miss what keeps the limit above a
        # point that does not.
        low, high = 0.0, 1.0
        ways = [1.0, 0.75, 0.5, 0.25][factors:]  # the end of a LoRA's way is the last weights themselves
        while high - low > FINEST:
            way = ways.pop(0) if ways else (low + high) / 2
            name = f"{WAY}{way:g}"
            inside = self._inside(targets, tuned, way, least)
            yield Candidate(name, inside, f"{100 * way:g} % of the way from the base model")
            if self._kept(name):
                low, ways = way, []
            else:
                high = way
        with torch.no_grad():
            for name, tensor in tuned.items():
                targets[name].copy_(tensor)
        if low == 0:
            log.info("no point on the way from the base model keeps data.guard_limit %s", self.config.data.guard_limit)

    def _judged(self) -> dict[str, dict[str, Any]]:
        """Return what was judged of weights of the present step, by their name (`Progress.guard_judged`)."""
        return {row["weights"]: row for row in self.progress.guard_judged if row["step"] == self.progress.step}

    def _kept(self, weights: str) -> bool:
        return self._judged().get(weights, {}).get("kept", False)

    @contextlib.contextmanager
    @torch.no_grad()
    def _inside(
        self, targets: dict[str, torch.Tensor], tuned: dict[str, torch.Tensor], way: float, least: float
    ) -> Iterator[None]:
        """Put the weights of a point into the model, tensor by tensor, and leave them there.

        Args:
            least: change from which on a weight goes the way; statistics of BatchNorm always do.
        """
        base = load_file(self.file)
        for name, end in tuned.items():
            # Of a LoRA update only the second factor goes the way, so that the update is `way` times the trained one.
            own = 0.0 if is_statistic(name) else least
            targets[name].copy_(end if lora_start(name, base) else on_the_way(base[name], end, way, own))
        yield

    def summary(self) -> dict[str, Any]:
        """Return the points, from the base model on, and the name of the one that is the best model now."""
        points = [
            {"weights": name, "way": float(name.removeprefix(WAY)), **{key: row[key] for key in SHOWN}}
            for name, row in self._judged().items()
            if name.startswith(WAY)
        ]
        points.sort(key=lambda point: point["way"])
        best = self.progress.best_weights
        return {"way_from_base": {"points": points, "taken": best if best.startswith(WAY) else None}}
