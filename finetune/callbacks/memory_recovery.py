"""When memory runs out in a step: the batch is named and kept, the bound for clips of that length is halved, and the step is made again.

B batch, S samples, U target tokens.
"""

import gc
import json
import logging
from pathlib import Path
from typing import Any

import torch

from finetune.data.batch import Batch, cut, describe_batch
from finetune.data.batching import bound_at, lower_bounds
from finetune.distributed import broadcast
from finetune.durable_files import write_json
from finetune.errors import UserError
from finetune.models.nemo import encoder_lengths
from finetune.strategies.optimizers import RELEASES_GRADIENTS
from finetune.training.out_of_memory import is_out_of_memory, out_of_memory_message

log = logging.getLogger(__name__)

LIMITS_FILE = "batch_limits.json"
BATCHES_KEPT = 3
REDUCED_AT_ONCE = 25 * 2**20  # bytes of gradients in one exchange


class MemoryGuard:
    """Bounds of batches that memory has shown to be too large, and what happens when it runs out.

    The stream's own bounds stay as they are, so that the order of the clips does: a batch that is too large for the bounds here is
    cut into smaller ones, over which gradients add up to the same.

    Args:
        trainer: of the run.
        bounds: pairs (seconds, clips) that the stream makes batches by.
    """

    def __init__(self, trainer: Any, bounds: list[list[float]]):
        self.trainer = trainer
        self.file: Path = trainer.output_dir / LIMITS_FILE
        self.bounds = [list(pair) for pair in bounds]
        self.batch: Batch | None = None
        """The batch at work."""
        accelerator = trainer.accelerator
        self.distributed = accelerator.num_processes > 1
        self.ddp = isinstance(trainer.module, torch.nn.parallel.DistributedDataParallel)
        # Engines that exchange while they compute cannot take a step back, nor can weights that were stepped in backward.
        alone = not self.distributed and accelerator.distributed_type == "NO"
        engine_steps_back = alone or (self.ddp and not trainer.config.model.sync_batchnorm)
        self.steps_back = engine_steps_back and trainer.config.training.optimizer not in RELEASES_GRADIENTS
        self.sample_rate = trainer.model.preprocessor._sample_rate

    def take(self, bounds: list[list[float]]) -> None:
        """Bounds of an earlier part of the run."""
        self.bounds = [list(pair) for pair in bounds]

    # ---- a step ----------------------------------------------------------------------------------------------------

    def gradients(self, group: list[Batch], batches: int, *options: Any) -> torch.Tensor:
        """Forward and backward over a step's batches, again with smaller ones where memory runs out; the sum of the losses.

        Args:
            group: of this rank.
            batches: the most that any rank has.
            options: for the trainer's `forward_and_backward`.

        Raises:
            UserError: one clip alone does not fit, or the engine cannot take a step back.
        """
        trainer = self.trainer
        while True:
            cut = self.cut(group)
            failed, loss = None, torch.zeros(())
            try:
                # DDP would wait for ranks that ran out of memory: gradients are exchanged when all have theirs.
                most = self._most(max(len(cut), batches))
                loss = trainer.forward_and_backward(cut, most, *options, exchange=not self.ddp)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                failed = {**self.describe(self.batch), "reason": " ".join(str(error).split("\n")[0].split())}
                if not self.steps_back:
                    self._give_up(failed, error)
            # The error's frames hold the step's tensors; they are gone here.
            reports = self._of_all_ranks(failed)
            if not reports:
                if self.ddp:
                    self._average_gradients()
                return loss
            if failed:
                self._keep_batch()
            self.batch = None
            trainer.optimizer.zero_grad()
            gc.collect()
            if trainer.accelerator.device.type == "cuda":
                torch.cuda.empty_cache()
            self._halve(reports)

    def cut(self, group: list[Batch]) -> list[Batch]:
        """The batches, those above their bound in pieces."""
        return [part for batch in group for part in cut(batch, bound_at(self.bounds, self._seconds(batch)))]

    def _most(self, batches: int) -> int:
        """The most batches of any rank, now that some may be cut."""
        if not self.distributed:
            return batches
        count = torch.tensor([batches], device=self.trainer.accelerator.device)
        torch.distributed.all_reduce(count, torch.distributed.ReduceOp.MAX)
        return int(count)

    def _of_all_ranks(self, failed: dict[str, Any] | None) -> list[dict[str, Any]]:
        """What ran out on any rank: one small exchange, and a larger one only where something did."""
        if not self.distributed:
            return [failed] if failed else []
        flag = torch.tensor([1 if failed else 0], device=self.trainer.accelerator.device)
        torch.distributed.all_reduce(flag)
        if not int(flag):
            return []
        found: list[Any] = [None] * self.trainer.accelerator.num_processes
        torch.distributed.all_gather_object(found, failed)
        return [report for report in found if report]

    def _average_gradients(self) -> None:
        """What DDP does in its backward pass: means over the ranks, a piece at a time."""
        ranks = self.trainer.accelerator.num_processes
        waiting: list[torch.Tensor] = []

        def exchange() -> None:
            flat = torch.cat([grad.reshape(-1) for grad in waiting]).div_(ranks)
            torch.distributed.all_reduce(flat)
            for grad, mean in zip(waiting, flat.split([grad.numel() for grad in waiting])):
                grad.copy_(mean.view_as(grad))
            waiting.clear()

        for p in self.trainer.module.parameters():
            if p.requires_grad and p.grad is not None:
                if waiting and (
                    waiting[0].dtype != p.grad.dtype
                    or sum(g.nbytes for g in waiting) + p.grad.nbytes > REDUCED_AT_ONCE
                ):
                    exchange()
                waiting.append(p.grad)
        if waiting:
            exchange()

    # ---- memory ran out --------------------------------------------------------------------------------------------

    def _seconds(self, batch: Batch) -> float:
        return float(batch.audio_lengths_B.max()) / self.sample_rate

    def describe(self, batch: Batch) -> dict[str, Any]:
        frames_B = encoder_lengths(self.trainer.model, batch.audio_lengths_B)
        return {**describe_batch(batch, frames_B, self.sample_rate), "ids": batch.ids[:16]}

    def _halve(self, reports: list[dict[str, Any]]) -> None:
        """Halves the bound of the batch that ran out, and of all longer clips that have a larger one; alike on all ranks."""
        p, step = self.trainer.progress, self.trainer.progress.step + 1
        p.out_of_memory += 1
        for report in reports:
            fewer = self._lower(report)
            log.warning(
                "step %d: out of memory with %s; clips of up to %.1f s come %d at most from here on, and the step is made again",
                step,
                say(report),
                report["longest_seconds"],
                fewer,
            )
        if self.trainer.accelerator.is_main_process:
            self.write()

    def _lower(self, report: dict[str, Any]) -> int:
        """Half the clips of a batch as the bound for its length and all above; that number.

        Raises:
            UserError: it was one clip.
        """
        if report["clips"] == 1:
            raise self._hopeless(report)
        fewer = report["clips"] // 2
        lower_bounds(self.bounds, report["longest_seconds"], fewer)
        return fewer

    def write(self) -> None:
        """Keeps the bounds for a run that goes on later."""
        d = self.trainer.config.data
        write_json(self.file, {"bounds": [list(pair) for pair in d.batch_bounds], "now": self.bounds})

    def _hopeless(self, report: dict[str, Any]) -> UserError:
        t = self.trainer
        engine = "ddp" if self.ddp else "none"
        gpu = t.accelerator.device.type == "cuda"
        message = out_of_memory_message(MemoryError(report["reason"]), t.config, gpu, engine)
        return UserError(f"{say(report)}: {message}", exit_code=1)

    def _give_up(self, failed: dict[str, Any], error: BaseException) -> None:
        """Where a step cannot be taken back: the bound is halved for the next start."""
        self._keep_batch()
        fewer = self._lower(failed)
        self.write()  # whichever rank this is: the others wait for it and are ended by the launcher
        raise UserError(
            f"out of memory with {say(failed)}: {failed['reason']}\nThis engine or optimizer cannot take a step back. Clips of that length come "
            f"{fewer} at most in the next start: training.resume_from_checkpoint=true goes on from the last checkpoint.",
            exit_code=1,
        ) from error

    def _keep_batch(self) -> None:
        """The batch as a file, of the first few."""
        t = self.trainer
        folder = t.output_dir / "out_of_memory"
        file = folder / f"step-{t.progress.step + 1:08d}-rank-{t.accelerator.process_index}.pt"
        try:
            folder.mkdir(exist_ok=True)
            if len(list(folder.glob("*.pt"))) < BATCHES_KEPT:
                names = ("ids", "texts", "audio_BS", "audio_lengths_B", "tokens_BU", "token_lengths_B")
                torch.save({name: getattr(self.batch, name) for name in names}, file)
                log.warning("the batch is kept in %s", file)
        except (OSError, RuntimeError) as error:  # torch.save has its own error for a full disk
            log.warning("the batch cannot be kept: %s", error)


def say(report: dict[str, Any]) -> str:
    """A batch in words."""
    ids = ", ".join(report["ids"][:3]) + (", ..." if report["clips"] > 3 else "")
    return (
        f"{report['clips']} clip{'s' if report['clips'] > 1 else ''} of up to {report['longest_seconds']:.1f} s, {report['tokens']} tokens, "
        f"{report['cells']} cells ({ids})"
    )


def earlier_limits(output_dir: Path) -> dict[str, Any] | None:
    """What `write` left, the same for all ranks; None where there is nothing."""
    try:
        found = json.loads((output_dir / LIMITS_FILE).read_text(encoding="utf-8"))
        found = found if found["bounds"] and found["now"] else None
    except (OSError, ValueError, KeyError):
        found = None
    return broadcast(found)
