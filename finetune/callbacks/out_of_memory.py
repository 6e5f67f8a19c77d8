"""When memory runs out in a step: repeat it with the allocator's cache emptied. If that does not help, name and keep
the batch, halve the bound for utterances of that length, and repeat the step.

B batch, S samples, U target tokens.
"""

import gc
import json
import logging
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer

from finetune.config.compatibility import find_conflicts
from finetune.config.schema import RunConfig
from finetune.data.batch import Batch, cut, describe_batch
from finetune.data.batching import bound_at, lower_bounds
from finetune.distributed import broadcast, gather, sum_over_ranks
from finetune.durable_files import write_json
from finetune.errors import UserError
from finetune.models.nemo import encoder_lengths
from finetune.models.protocols import AsrModel
from finetune.strategies.optimizers import RELEASES_GRADIENTS
from finetune.training.callbacks import Callback, ComputeGradients
from finetune.training.progress import Progress

log = logging.getLogger(__name__)

LIMITS_FILE = "batch_limits.json"
BATCHES_KEPT = 3
# Of the allocators, and of cuBLAS, cuFFT and cuDNN where they cannot allocate their workspaces.
OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "ALLOC_FAILED", "_ALLOCATION_FAILED")
REDUCED_AT_ONCE = 25 * 2**20  # bytes of gradients in one exchange


class MemoryRecovery(Callback):
    """Bounds of batches that memory has shown to be too large, and what happens when it runs out.

    A batch that is too large for the bounds is cut into smaller ones, over which gradients add up to the same.

    Args:
        module, optimizer: prepared.
        resumed: whether the run goes on, with the bounds that its earlier part left.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        config: RunConfig,
        progress: Progress,
        module: torch.nn.Module,
        optimizer: AcceleratedOptimizer,
        model: AsrModel,
        resumed: bool = False,
    ):
        self.accelerator, self.config, self.progress = accelerator, config, progress
        self.module, self.optimizer, self.model = module, optimizer, model
        self.output_dir = Path(config.training.output_dir)
        self.file = self.output_dir / LIMITS_FILE
        earlier = earlier_limits(self.output_dir) if resumed else None
        self.bounds = [list(pair) for pair in (earlier["now"] if earlier else config.data.batch_bounds)]
        self.batch: Batch | None = None
        """The batch at work."""
        self.distributed = accelerator.num_processes > 1
        self.ddp = isinstance(module, torch.nn.parallel.DistributedDataParallel)
        # Engines that communicate while they compute cannot take a step back, nor can weights that were stepped in
        # backward.
        alone = not self.distributed and accelerator.distributed_type == "NO"
        engine_steps_back = alone or (self.ddp and not config.model.sync_batchnorm)
        self.steps_back = engine_steps_back and config.training.optimizer not in RELEASES_GRADIENTS
        self.has_cache = accelerator.device.type == "cuda"
        """Whether memory that was freed may lie in the allocator's cache in pieces that are too small."""
        self.sample_rate = model.preprocessor._sample_rate

    def on_batch_begin(self, batch: Batch) -> None:
        self.batch = batch

    def wrap_gradients(self, compute: ComputeGradients) -> ComputeGradients:
        def gradients(batches: list[Batch], micro_batches: int, exchange: bool = True) -> torch.Tensor:
            return self.gradients(compute, batches, micro_batches)

        return gradients

    def summary(self) -> dict[str, Any]:
        return {"batch_bounds": self.bounds}

    # ---- a step ----------------------------------------------------------------------------------------------------

    def gradients(self, compute: ComputeGradients, batches: list[Batch], micro_batches: int) -> torch.Tensor:
        """Compute a step's gradients, again with smaller batches where memory runs out; return the sum of the losses.

        Raises:
            UserError: one utterance alone does not fit, or the engine cannot take a step back.
        """
        in_pieces = self.has_cache  # the memory that lacks may lie there
        while True:
            # The stream's own bounds stay, and with them the order of the utterances: what is too large is cut here.
            parts = [p for batch in batches for p in cut(batch, bound_at(self.bounds, self._seconds(batch)))]
            failed, loss = None, torch.zeros(())
            try:
                most = torch.tensor(max(len(parts), micro_batches), device=self.accelerator.device)
                if self.distributed:
                    torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
                # DDP would wait for ranks that ran out of memory: gradients are exchanged when all have theirs.
                loss = compute(parts, int(most), exchange=not self.ddp)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                assert self.batch is not None
                failed = {**self.describe(self.batch), "reason": " ".join(str(error).split("\n")[0].split())}
                if not self.steps_back:
                    self._give_up(failed, error)
            # The error's frames hold the step's tensors; they are gone here.
            anywhere = sum_over_ranks(torch.tensor(1 if failed else 0, device=self.accelerator.device))
            if not anywhere:
                if self.ddp:
                    self._average_gradients()
                return loss
            reports = [report for report in gather(failed) if report]
            if failed and not in_pieces:
                self._keep_batch()
            self.batch = None
            self.optimizer.zero_grad()
            gc.collect()
            if self.accelerator.device.type == "cuda":
                torch.cuda.empty_cache()
            if in_pieces:
                in_pieces = False
                text = "step %d: out of memory with %s; it is repeated with the allocator's cache emptied"
                log.info(text, self.progress.step + 1, describe_report(reports[0]))
            else:
                self._halve(reports)

    def _average_gradients(self) -> None:
        """Average over the ranks as DDP does in its backward pass, a piece at a time."""
        pieces: list[list[torch.Tensor]] = []
        for grad in (p.grad for p in self.module.parameters() if p.requires_grad and p.grad is not None):
            last = pieces[-1] if pieces else []
            if last and last[0].dtype == grad.dtype and sum(g.nbytes for g in last) + grad.nbytes <= REDUCED_AT_ONCE:
                last.append(grad)
            else:
                pieces.append([grad])
        for piece in pieces:
            flat = torch.cat([grad.reshape(-1) for grad in piece]).div_(self.accelerator.num_processes)
            torch.distributed.all_reduce(flat)
            for grad, mean in zip(piece, flat.split([grad.numel() for grad in piece])):
                grad.copy_(mean.view_as(grad))

    # ---- memory ran out --------------------------------------------------------------------------------------------

    def _seconds(self, batch: Batch) -> float:
        return float(batch.audio_lengths_B.max()) / self.sample_rate

    def describe(self, batch: Batch) -> dict[str, Any]:
        """Return `describe_batch` and some ids."""
        frames_B = encoder_lengths(self.model, batch.audio_lengths_B)
        return {**describe_batch(batch, frames_B, self.sample_rate), "ids": batch.ids[:16]}

    def _halve(self, reports: list[dict[str, Any]]) -> None:
        """Halve the bound of the batch that ran out, and of all longer clips that have a larger one; alike on all
        ranks."""
        self.progress.out_of_memory += 1
        text = "step %d: out of memory with %s; it is repeated, and clips of up to %.1f s come %d at most from here on"
        for report in reports:
            fewer, longest = self._lower(report), report["longest_seconds"]
            log.warning(text, self.progress.step + 1, describe_report(report), longest, fewer)
        if self.accelerator.is_main_process:
            self.write()

    def _lower(self, report: dict[str, Any]) -> int:
        """Take half the clips of a batch as the bound for its length and all above; return that number.

        Raises:
            UserError: it was one clip.
        """
        if report["clips"] == 1:
            gpu, engine = self.accelerator.device.type == "cuda", "ddp" if self.ddp else "none"
            message = out_of_memory_message(MemoryError(report["reason"]), self.config, gpu, engine)
            raise UserError(f"{describe_report(report)}: {message}", exit_code=1)
        fewer = report["clips"] // 2
        lower_bounds(self.bounds, report["longest_seconds"], fewer)
        return fewer

    def write(self) -> None:
        """Keeps the bounds for a run that goes on later."""
        d = self.config.data
        write_json(self.file, {"bounds": [list(pair) for pair in d.batch_bounds], "now": self.bounds})

    def _give_up(self, failed: dict[str, Any], error: BaseException) -> None:
        """Where a step cannot be taken back: the bound is halved for the next start."""
        self._keep_batch()
        fewer = self._lower(failed)
        self.write()  # whichever rank this is: the others wait for it and are ended by the launcher
        raise UserError(
            f"out of memory with {describe_report(failed)}: {failed['reason']}\nThis engine or optimizer cannot take "
            f"a step back. Clips of that length come {fewer} at most in the next start: "
            "training.resume_from_checkpoint=true goes on from the last checkpoint.",
            exit_code=1,
        ) from error

    def _keep_batch(self) -> None:
        """The batch as a file, of the first few."""
        folder = self.output_dir / "out_of_memory"
        file = folder / f"step-{self.progress.step + 1:08d}-rank-{self.accelerator.process_index}.pt"
        try:
            folder.mkdir(exist_ok=True)
            if len(list(folder.glob("*.pt"))) < BATCHES_KEPT:
                names = ("ids", "texts", "audio_BS", "audio_lengths_B", "tokens_BU", "token_lengths_B")
                torch.save({name: getattr(self.batch, name) for name in names}, file)
                log.warning("the batch is kept in %s", file)
        except (OSError, RuntimeError) as error:  # torch.save has its own error for a full disk
            log.warning("the batch cannot be kept: %s", error)


def describe_report(report: dict[str, Any]) -> str:
    """A batch in words."""
    ids = ", ".join(report["ids"][:3]) + (", ..." if report["clips"] > 3 else "")
    return (
        f"{report['clips']} clip{'s' if report['clips'] > 1 else ''} of up to {report['longest_seconds']:.1f} s, "
        f"{report['tokens']} tokens, {report['cells']} cells ({ids})"
    )


def earlier_limits(output_dir: Path) -> dict[str, Any] | None:
    """What `write` left, the same for all ranks; None where there is nothing."""
    try:
        found = json.loads((output_dir / LIMITS_FILE).read_text(encoding="utf-8"))
        found = found if found["bounds"] and found["now"] else None
    except (OSError, ValueError, KeyError):
        found = None
    return broadcast(found)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the GPU's or the host's memory ran out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY)


def remedies(config: RunConfig, gpu: bool, engine: str = "none") -> list[str]:
    """Return settings that would help, are not in use yet, and go with the rest of the configuration, cheapest first.

    Args:
        config: the run's configuration.
        gpu: whether it is a GPU's memory.
        engine: of the run, as in finetune.config.compatibility.
    """
    m, t, d, found = config.model, config.training, config.data, []

    def add(helps: bool, remedy: str, sets: dict[str, Any] | None = None) -> None:
        if helps and not find_conflicts(config.replaced(sets or {}), engine):
            found.append(remedy)

    narrow = m.dtype == "bfloat16"
    fragments = gpu and "expandable_segments" not in (t.cuda_alloc_conf or "")
    add(fragments, "training.cuda_alloc_conf=expandable_segments:True (memory lost to fragments)")
    evaluates = t.per_device_eval_batch_size > 2
    add(evaluates, "training.per_device_eval_batch_size=2 (where it happened in an evaluation)")
    wide = gpu and not (t.bf16 or t.fp16 or narrow)
    add(wide, "training.bf16=true (half the activations)", {"training.bf16": True})
    small = "adamw_8bit_ao" if narrow or engine.startswith("fsdp") else "adamw_8bit"
    states = not any(word in t.optimizer for word in ("8bit", "4bit", "fp8", "offload", "flash"))
    add(states, f"--strategy {small} (a quarter of the optimizer's state)", {"training.optimizer": small})
    add(
        not m.gradient_checkpointing and not (m.freeze_encoder and m.unfreeze_encoder_layers == 0),
        "--strategy gradient_checkpointing (the encoder's activations are recomputed)",
        {"model.gradient_checkpointing": True},
    )
    if d.batch_duration:
        key, half, helps = "data.batch_duration", d.batch_duration / 2, d.batch_duration / 2 >= d.max_duration
    else:
        key, size = "training.per_device_train_batch_size", t.per_device_train_batch_size
        half, helps = size // 2, size > 1 and size % 2 == 0
    pieces = f"training.gradient_accumulation_steps={2 * t.gradient_accumulation_steps}"
    add(
        helps,
        f"{key}={half:g} with {pieces} (the same step in smaller pieces)",
        {key: half, "training.gradient_accumulation_steps": 2 * t.gradient_accumulation_steps},
    )
    add(d.max_duration > 20, "data.max_duration=20 (the longest clips need most)")
    add(
        gpu and m.gradient_checkpointing and not narrow,
        "--strategy bf16_full (weights and gradients in two bytes)",
        {"model.dtype": "bfloat16", "training.optimizer": "adamw_8bit_ao"},
    )
    add(
        gpu and not m.activation_offload and not m.freeze_encoder,
        "--strategy activation_offload (the encoder's activations in host memory)",
        {"model.activation_offload": True},
    )
    add(
        gpu and not t.optimizer.startswith("cpu_offload"),
        "--strategy cpu_offload_ao (the optimizer in host memory; slower)",
        {"training.optimizer": "cpu_offload_ao"},
    )
    shared = "in place of the one with ddp (parameters, gradients and states shared out over the GPUs)"
    for name, other in (("fsdp2", "fsdp"), ("zero3", "deepspeed_zero3")):
        add(gpu and engine == "ddp" and not find_conflicts(config, other), f"--strategy {name} {shared}")
    caches = gpu and not t.empty_cache_each_epoch
    add(caches, "training.empty_cache_each_epoch=true (where it happens after an evaluation or epoch)")
    few = "--strategy lora (gradients and states for a few percent of the encoder)"
    add(m.lora_rank == 0, few, {"model.lora_rank": 16})
    return found


def out_of_memory_message(error: BaseException, config: RunConfig, gpu: bool, engine: str = "none") -> str:
    """One message: what ran out, and what would help."""
    reason = " ".join(str(error).split("\n")[0].split()) or type(error).__name__
    lines = "\n".join(f"  - {remedy}" for remedy in remedies(config, gpu, engine))
    where = "GPU" if gpu else "host"
    return f"the {where} is out of memory: {reason}\nWhat would help, cheapest first:\n{lines}"
