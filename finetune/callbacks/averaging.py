"""Averages of weights over a run: a moving one beside the training (EMA), and the mean of evaluated states at its end.

Both average what training changes (finetune.training.trained_state).
"""

import contextlib
import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from finetune.config.schema import RunConfig
from finetune.distributed import broadcast, on_main
from finetune.durable_files import put_in_place
from finetune.errors import UserError
from finetune.models.protocols import AsrModel
from finetune.training.callbacks import Callback, Candidate, StepResult
from finetune.training.checkpoints import CANNOT_WRITE
from finetune.training.outputs import read_best
from finetune.training.progress import Progress
from finetune.training.trained_state import all_tensors, averaged_tensors, local_part, take_over, whole_tensor

log = logging.getLogger(__name__)

EMA_FILE = "ema.safetensors"


class Ema(Callback):
    """An exponential moving average of the weights in float32 (Polyak and Juditsky 1992, by exponential weights).

    With update n, counted from 1, average <- d average + (1 - d) weights, where d = min(decay, (1 + n) / (10 + n)) as
    in TensorFlow's ExponentialMovingAverage, so that the first weights are forgotten soon. It begins as the weights
    are. Sharded parameters (FSDP2) have their average sharded alike. Running statistics of BatchNorm are averaged with
    the same d.

    Args:
        model: as it is trained, prepared by its engine.
        decay: from 0 to below 1.
        device: `same` as the weights, or `cpu`.
        processes: of the run.
    """

    def __init__(self, model: AsrModel, decay: float, device: str = "same", processes: int = 1):
        self.model, self.decay, self.processes, self.updates = model, decay, processes, 0
        self.average: dict[str, torch.Tensor] = {}
        for name, tensor in averaged_tensors(model).items():
            copy = tensor.detach().to(torch.float32, copy=True)
            self.average[name] = copy.cpu() if device == "cpu" else copy

    @torch.no_grad()
    def on_step_end(self, result: StepResult) -> None:
        """Take the present weights in, after a step that counts."""
        if result.skipped is not None:
            return
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        weights = averaged_tensors(self.model)
        pairs = [(local_part(average), local_part(weights[name].detach())) for name, average in self.average.items()]
        alike = [(a, w) for a, w in pairs if (a.dtype, a.device) == (w.dtype, w.device)]
        if alike:
            torch._foreach_lerp_([a for a, _ in alike], [w for _, w in alike], 1 - decay)
        for average, weight in pairs:
            if (average.dtype, average.device) != (weight.dtype, weight.device):
                average.lerp_(weight.to(average), 1 - decay)  # one by one: a copy of all would double the memory

    def held_tensors(self) -> dict[str, torch.Tensor]:
        return {f"moving average {i}": local_part(tensor) for i, tensor in enumerate(self.average.values())}

    def candidates(self, model: AsrModel, final: bool) -> list[Candidate]:
        if final:
            return []
        self.mean_over_processes()
        return [Candidate("ema", self._inside(model))]

    @torch.no_grad()
    def before_save(self, is_main: bool) -> tuple[dict[str, Any], dict[str, dict[str, torch.Tensor]]]:
        self.mean_over_processes()
        state = {}
        for name, tensor in self.average.items():
            whole = whole_tensor(tensor)  # all ranks take part
            if is_main:
                state[name] = whole.to("cpu", copy=True).contiguous()
        return {"ema_updates": self.updates}, {EMA_FILE: state}

    @torch.no_grad()
    def on_resume(self, checkpoint: Path, state: dict[str, Any]) -> None:
        """Take over the average of a checkpoint of any engine and number of processes; where it has none of these
        tensors, begin as the weights are."""
        file, updates = checkpoint / EMA_FILE, state.get("ema_updates")
        saved = load_file(file) if updates is not None and file.is_file() else {}
        if {n: t.shape for n, t in saved.items()} != {n: t.shape for n, t in self.average.items()}:
            text = "%s holds no moving average of what is trained now: it starts anew from the present weights"
            log.warning(text, checkpoint.name)
            saved, updates = averaged_tensors(self.model), 0
        self.updates = updates or 0
        for name, average in self.average.items():
            take_over(average, saved[name].detach())

    @torch.no_grad()
    def mean_over_processes(self) -> None:
        """Average the running statistics over the ranks, as each has its own. All ranks enter."""
        if self.processes > 1:
            parameters = dict(self.model.named_parameters())
            device = next(iter(parameters.values())).device
            for name, average in self.average.items():  # in one order on all of them
                if name not in parameters:
                    statistics = average.to(device, copy=True)
                    torch.distributed.all_reduce(statistics)
                    average.copy_(statistics / self.processes)

    @contextlib.contextmanager
    @torch.no_grad()
    def _inside(self, model: AsrModel) -> Iterator[None]:
        """Put the average in place of a model's weights; on exit they are as before.

        Args:
            model: the one that is trained, or its whole replica under an engine that shards; all processes enter.
        """
        targets, before = all_tensors(model), {}
        for name, average in self.average.items():
            target = targets[name]
            # No copy where type and device are the weights' own.
            before[name], target.data = target.data, whole_tensor(average).to(target.device, target.dtype)
        try:
            yield
        finally:
            for name, tensor in before.items():
                targets[name].data = tensor


class CheckpointAverage(Callback):
    """Keeps the weights of some evaluations, and offers their mean as the best model at the end."""

    def __init__(self, accelerator: Accelerator, config: RunConfig, progress: Progress, model: AsrModel):
        t = config.training
        self.accelerator, self.progress, self.model = accelerator, progress, model
        self.output_dir, self.number, self.by = Path(t.output_dir), t.average_checkpoints, t.average_by
        self.folder = self.output_dir / "checkpoints" / "average"
        self.earlier: dict[str, Any] | None = None
        """What summary.json of this run says of the average already."""

    def on_fresh_run(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def on_validated(self, model: AsrModel, step: int, wer: float) -> None:
        on_main(lambda: self._keep(model, step, wer))

    def candidates(self, model: AsrModel, final: bool) -> list[Candidate]:
        if not final or self._already_judged():
            return []
        if self.accelerator.is_main_process:  # the settings may be others than when the states were kept
            self._prune()
        states = broadcast(self._kept())
        if len(states) < 2:
            log.info("training.average_checkpoints: %d state(s) of weights were kept; a mean takes two", len(states))
            return []
        steps = [step for _, step, _ in states]
        description = f"mean of the weights of steps {', '.join(map(str, steps))}"
        averaged = self._averaged(model, [path for path, _, _ in states])
        return [Candidate("average", averaged, description, {"steps": steps})]

    def on_resume(self, checkpoint: Path, state: dict[str, Any]) -> None:
        """Remove states behind the step, which belong to a course that is given up, and those of other tensors."""
        if not self.accelerator.is_main_process:
            return
        shapes = {n: list(t.shape) for n, t in averaged_tensors(self.model).items()}
        for path, step, _ in self._kept():
            with safe_open(path, "pt") as file:
                same = {name: list(file.get_slice(name).get_shape()) for name in file.keys()} == shapes  # noqa: SIM118
            if step > self.progress.step or not same:
                path.unlink()
            if not same:
                log.warning("%s holds other tensors than are trained now: it is left out of the average", path)

    def summary(self) -> dict[str, Any]:
        return {} if self.earlier is None else {"average_checkpoints": self.earlier}

    def _keep(self, model: AsrModel, step: int, wer: float) -> None:
        """Write the weights of an evaluation, and remove those that are not among the ones to keep any more."""
        path, state = self.folder / f"step-{step:08d}.safetensors", all_tensors(model)
        whole = {n: state[n].detach().to("cpu", copy=True).contiguous() for n in averaged_tensors(self.model)}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            aside = path.with_name(f".{path.name}.tmp")
            save_file(whole, aside, metadata={"kept": json.dumps({"step": step, "validation_wer": wer})})
            put_in_place(aside, path)
        except CANNOT_WRITE as error:
            raise UserError(
                f"the weights of step {step}, kept for training.average_checkpoints, cannot be written: {error}. "
                "Make room or mend the disk, then start the same command again with "
                "training.resume_from_checkpoint=true.",
                exit_code=1,
            ) from error
        self._prune()

    def _kept(self) -> list[tuple[Path, int, float]]:
        """Return file, step and validation WER of the states that are there, in the order of their steps."""
        found = []
        for path in sorted(self.folder.glob("step-*.safetensors")):
            with safe_open(path, "pt") as file:
                kept = json.loads(file.metadata()["kept"])
            found.append((path, kept["step"], kept["validation_wer"]))
        return found

    def _prune(self) -> None:
        """Remove all but the last states, or the best by validation WER."""
        states = self._kept()
        if self.by == "best":
            states.sort(key=lambda state: (-state[2], -state[1]))
        for path, _, _ in states[: -self.number]:
            path.unlink()

    @contextlib.contextmanager
    @torch.no_grad()
    def _averaged(self, model: AsrModel, paths: list[Path]) -> Iterator[None]:
        """Put the mean, summed up in float32, into the model, and leave it there: a copy of the weights would double
        the memory."""
        sums: dict[str, torch.Tensor] = {}
        for path in paths:
            for name, tensor in load_file(path).items():
                sums[name] = sums[name].add_(tensor.float()) if name in sums else tensor.float()
        targets = all_tensors(model)
        for name, total in sums.items():
            targets[name].copy_(total / len(paths))
        yield

    def _already_judged(self) -> bool:
        """Return whether this is a finished run that was started again.

        A run that died after the mean was taken is judged once more against the single model before it.
        """
        p = self.progress
        if p.best_weights != "average" or p.best_step != p.step:
            return False
        finished = self.output_dir / "summary.json"
        if finished.is_file():
            self.earlier = json.loads(finished.read_text(encoding="utf-8")).get("average_checkpoints")
            return True
        single = (broadcast(read_best(self.output_dir)) or {}).get("previous") or {}
        p.best_step, p.best_wer = single.get("step"), single.get("validation_wer")
        p.best_weights = single.get("weights", "raw")
        return False
