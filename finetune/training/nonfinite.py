"""Steps that must not count, and weights that must not be kept: a loss or gradient that is not finite, a spike, weights that exploded.

Such a step changes nothing on any rank: not parameters, the optimizer's state, BatchNorm's statistics, the moving average or the schedule.
Most engines are asked after the backward pass, before they step. DeepSpeed steps inside of Accelerate's backward, and leaves a step out by
itself, on all ranks, where the norm of the gradients is not finite: a step that its loss forbids is given gradients that are not.
flash_adamw_gradient_release steps while the backward pass runs, which a forbidden step therefore never enters.

B batch, S samples, U target tokens.
"""

import logging
import math
import statistics
from collections import Counter, deque
from typing import Any

import torch

from finetune.data.decode import as_float
from finetune.data.stream import Batch
from finetune.errors import UserError
from finetune.models.nemo import learning_batchnorms
from finetune.training import checkpoints
from finetune.training.outputs import LineFile

log = logging.getLogger(__name__)

SKIPPED_FILE = "skipped_steps.jsonl"
SCALE_FLOOR = 1.0
"""fp16's loss scale is not lowered below; gradients that are not finite even so are not the scale's fault."""
JUDGED_AFTER = 20
"""Steps that a spike's window has to hold, where it is not smaller itself."""
CLIPS_NAMED = 16
NAMES_SHOWN = 5


class StepGuard:
    """Decides which steps count, and keeps the account of those that do not.

    Args:
        trainer: of the run.
    """

    def __init__(self, trainer: Any):
        t = trainer.config.training
        self.trainer, self.factor, self.allowed = trainer, t.spike_threshold, t.max_skipped_steps
        self.file = LineFile(trainer.output_dir / SKIPPED_FILE)
        self.deepspeed = trainer.accelerator.distributed_type == "DEEPSPEED"
        self.releases = t.optimizer == "flash_adamw_gradient_release"
        self.window: deque[tuple[float, float | None]] = deque(maxlen=t.spike_window)
        """Loss and gradient norm of the last steps that counted."""
        self.in_a_row = 0
        self.recent: list[dict[str, Any]] = []
        """The skipped steps of the present row."""
        self.given: list[tuple[Batch, torch.Tensor]] = []
        """The present step's batches with the losses of their clips."""
        self.limits = math.inf, math.inf
        self.norms = learning_batchnorms(trainer.model)
        self.before = [b.clone() for b in self._statistics()]
        self.moved = False

    def state_dict(self) -> dict[str, Any]:
        """What a continued run needs to decide alike."""
        return {"window": [list(pair) for pair in self.window], "in_a_row": self.in_a_row}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        if state is not None:
            self.window.extend((loss, norm) for loss, norm in state["window"])
            self.in_a_row = state["in_a_row"]

    # ---- a step ----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A step begins: keeps BatchNorm's statistics, and settles what a spike would be."""
        if self.norms:
            torch._foreach_copy_(self.before, self._statistics())
        self.moved = False
        self.limits = self._limit(0), self._limit(1)

    def begin_forward(self) -> None:
        """The step's forward passes begin, perhaps again where memory ran out in them."""
        self.given = []
        if self.moved:
            self._restore_statistics()
        self.moved = True

    def note(self, batch: Batch, losses_B: torch.Tensor) -> None:
        """Keeps the losses of a batch's clips, for the account."""
        self.given.append((batch, losses_B.detach()))

    def admit(self, loss: torch.Tensor, loss_sum: torch.Tensor) -> torch.Tensor | None:
        """What the step's last backward pass is given where it cannot be taken back afterwards. All ranks enter.

        Args:
            loss: of the last batch.
            loss_sum: of this rank's batches with it.

        Returns:
            The loss; not a number where DeepSpeed is to leave the step out; None where there must be no backward pass.
        """
        if not (self.deepspeed or self.releases):
            return loss
        total = loss_sum.clone()
        if self.trainer.accelerator.num_processes > 1:
            torch.distributed.all_reduce(total)
        good = torch.isfinite(total) & (total <= self.limits[0])
        if self.deepspeed:
            return loss * torch.where(good, 1.0, math.nan).to(loss.dtype)
        return loss if bool(good) else None

    def step(self, loss_sum: torch.Tensor, grad_norm: float | None) -> tuple[float, str | None]:
        """Steps the optimizer, or leaves it and everything else as it was. All ranks enter, and decide alike.

        Args:
            loss_sum: of this rank.
            grad_norm: before clipping; None where the engine does not tell.

        Returns:
            The loss over all ranks, and why the step does not count: loss, gradient, spike, scale (fp16's, while it is found); or None.
        """
        accelerator, optimizer = self.trainer.accelerator, self.trainer.optimizer
        norm = 0.0 if grad_norm is None else grad_norm
        totals = torch.stack([loss_sum, torch.tensor(norm, dtype=loss_sum.dtype, device=loss_sum.device)])
        if accelerator.num_processes > 1:  # of both: what is not finite on one rank is not for any
            torch.distributed.all_reduce(totals)
        loss, norm = float(totals[0]), float(totals[1]) / accelerator.num_processes
        reason = self._judge(loss, norm)
        scaler = accelerator.scaler
        if reason is None or self.deepspeed:  # DeepSpeed has decided already
            optimizer.step()
            left_out = bool(getattr(optimizer, "step_was_skipped", False))
            if reason is not None and not left_out:
                raise UserError(
                    f"step {self.trainer.progress.step + 1}: {self._say(reason, loss, norm)}, but DeepSpeed stepped with it and the weights "
                    "are spoilt. Continue from the last checkpoint (training.resume_from_checkpoint=true) with --strategy fsdp2 or ddp.",
                    exit_code=1,
                )
            reason = "gradient" if reason is None and left_out else reason
        elif scaler is not None:
            before = scaler.get_scale()
            self._settle_scale(scaler, reason)
            if reason == "scale" and scaler.get_scale() >= before:  # finite gradients, whose norm alone is not
                reason = "gradient"
        if reason is None:
            self.in_a_row, self.recent = 0, []
            if self.factor:
                self.window.append((loss, None if grad_norm is None or self.deepspeed else norm))
        else:
            self._restore_statistics()
        return loss, reason

    def _judge(self, loss: float, norm: float) -> str | None:
        if not math.isfinite(loss):
            return "loss"
        if loss > self.limits[0]:
            return "spike"
        if not math.isfinite(norm):
            scaler = self.trainer.accelerator.scaler
            return "scale" if scaler is not None and scaler.get_scale() > SCALE_FLOOR else "gradient"
        return "spike" if norm > self.limits[1] else None

    def _limit(self, which: int) -> float:
        """Above which a loss (0) or gradient norm (1) is a spike; DeepSpeed tells a norm only when it has stepped."""
        values = [pair[which] for pair in self.window if pair[which] is not None]
        if not self.factor or len(values) < min(JUDGED_AFTER, self.window.maxlen or 0):
            return math.inf
        median = statistics.median(values)
        return self.factor * median if median > 0 else math.inf

    def _settle_scale(self, scaler: Any, reason: str) -> None:
        """The loss scale of a step that is left out: lowered where gradients overflowed, else as it was."""
        if reason in ("loss", "spike"):
            scaler.update(new_scale=scaler.get_scale())
        else:
            scaler.update()
            if scaler.get_scale() < SCALE_FLOOR:
                scaler.update(new_scale=SCALE_FLOOR)

    def _statistics(self) -> list[torch.Tensor]:
        """BatchNorm's own, where it learns."""
        return [b for m in self.norms for b in (m.running_mean, m.running_var, m.num_batches_tracked)]

    def _restore_statistics(self) -> None:
        if self.norms:
            torch._foreach_copy_(self._statistics(), self.before)

    # ---- the account -----------------------------------------------------------------------------------------------

    def count(self, reason: str, loss: float, grad_norm: float | None) -> None:
        """Counts, says and writes down a step that does not count. All ranks enter.

        Raises:
            UserError: `training.max_skipped_steps` of them came in a row.
        """
        p, accelerator = self.trainer.progress, self.trainer.accelerator
        clips = self._of_all_ranks(self._clips())
        scale = None if accelerator.scaler is None else accelerator.scaler.get_scale()
        row = {
            "step": p.step + 1,
            "reason": reason,
            "loss": plain(loss),
            "grad_norm": None if grad_norm is None else plain(grad_norm),
            "scale": scale,
            "clips": clips,
        }
        if accelerator.is_main_process:
            self.file.append(row)
        what = self._say(reason, loss, grad_norm)
        if reason == "scale":
            p.scale_skips += 1
            log.info("step %d: %s; it is lowered to %g and the step is skipped", row["step"], what, scale)
            return
        if reason == "spike":
            p.spikes += 1
        else:
            p.skipped_steps += 1
        log.warning("step %d: %s, the step is skipped; %s", row["step"], what, say_clips(clips))
        self.in_a_row += 1
        self.recent.append({"reason": reason, "clips": clips})
        if self.allowed and self.in_a_row >= self.allowed:
            raise UserError(self._diagnosis(), exit_code=1)

    def _say(self, reason: str, loss: float, grad_norm: float | None) -> str:
        if reason == "loss":
            return "the loss is not finite"
        if reason == "gradient":
            return "a gradient is not finite"
        if reason == "scale":
            return "a gradient is not finite at fp16's present loss scale"
        if loss > self.limits[0]:
            return f"the loss {loss:.4g} is above {self.factor:g} times its median over {len(self.window)} steps"
        return f"the gradient norm {grad_norm or 0.0:.4g} is above {self.factor:g} times its median over {len(self.window)} steps"

    def _clips(self) -> list[dict[str, Any]]:
        """This rank's clips of the step."""
        rank, rate = self.trainer.accelerator.process_index, self.trainer.model.preprocessor._sample_rate
        found = []
        for batch, losses_B in self.given:
            audio_finite_B = torch.isfinite(as_float(batch.audio_BS)).all(1).tolist()
            # What has no alignment is left out of the loss: it is not the one.
            losses = [plain(x) if ok else None for x, ok in zip(losses_B.tolist(), batch.feasible_B.tolist())]
            found += [
                {"id": i, "rank": rank, "loss": x, "seconds": n / rate, "tokens": u, "audio_finite": finite}
                for i, x, n, u, finite in zip(
                    batch.ids, losses, batch.audio_lengths_B.tolist(), batch.token_lengths_B.tolist(), audio_finite_B
                )
            ]
        return found

    def _of_all_ranks(self, values: list[Any]) -> list[Any]:
        if self.trainer.accelerator.num_processes == 1:
            return values
        from accelerate.utils import gather_object

        return gather_object(values)

    # ---- weights ---------------------------------------------------------------------------------------------------

    def require_finite(self, model: Any | None = None) -> None:
        """Before anything is kept: weights and statistics are finite, on every rank. All ranks enter.

        Args:
            model: that is to be written; None: the one in training and its moving average.

        Raises:
            UserError: some are not.
        """
        tensors = dict(weights_of(self.trainer.model if model is None else model))
        if model is None and self.trainer.ema is not None:
            tensors |= {f"moving average {i}": t for i, t in enumerate(self.trainer.ema.tensors())}
        accelerator = self.trainer.accelerator
        spoilt = torch.tensor([0.0 if all_finite(tensors.values()) else 1.0], device=accelerator.device)
        if accelerator.num_processes > 1:
            torch.distributed.all_reduce(spoilt)
        if float(spoilt):
            names = self._spoilt_names(tensors)
            p = self.trainer.progress
            when = f"at step {p.step}" if p.step else "before the first step: the base model is spoilt"
            advice = [self._go_back(), "Then " + self._calmer() + "."] if p.step else []
            raise UserError(
                " ".join([f"the weights are not finite {when} ({names}); nothing of it is written.", *advice]),
                exit_code=1,
            )

    def _spoilt_names(self, tensors: dict[str, torch.Tensor]) -> str:
        """The tensors of any rank that are not finite, in words."""
        found = sorted(set(self._of_all_ranks([name for name, t in tensors.items() if not all_finite([t])])))
        more = f" and {len(found) - NAMES_SHOWN} more" if len(found) > NAMES_SHOWN else ""
        return f"{len(found)} of {len(tensors)} tensors: {', '.join(found[:NAMES_SHOWN])}{more}" if found else ""

    # ---- diagnosis -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _features_finite(self) -> bool:
        """Of the last batches of all ranks."""
        fine, model = True, self.trainer.model
        for batch, _ in self.given:
            audio_BS = as_float(batch.audio_BS.to(self.trainer.accelerator.device))
            lengths_B = batch.audio_lengths_B.to(audio_BS.device)
            with torch.autocast(audio_BS.device.type, enabled=False):
                mel_BFT, _ = model.preprocessor(input_signal=audio_BS, length=lengths_B)
            fine = fine and bool(torch.isfinite(mel_BFT).all())
        return all(self._of_all_ranks([fine]))

    def _diagnosis(self) -> str:
        """Why so many steps in a row did not count, as far as can be told, and what to change."""
        accelerator, t = self.trainer.accelerator, self.trainer.config.training
        reasons = Counter(step["reason"] for step in self.recent)
        often = Counter(clip["id"] for step in self.recent for clip in step["clips"])
        last = self.recent[-1]["clips"]
        dumb = [clip["id"] for clip in last if not clip["audio_finite"]]
        weights = self._spoilt_names(dict(weights_of(self.trainer.model)))
        features = self._features_finite()
        steps, (clip_id, times) = len(self.recent), (often.most_common(1) or [("", 0)])[0]
        rates = [f"{group['lr']:.3g}" for group in self.trainer.optimizer.param_groups]
        lines = [
            f"{self.in_a_row} steps in a row were skipped (training.max_skipped_steps={self.allowed}): "
            + ", ".join(f"{reason} {n}" for reason, n in reasons.most_common())
            + f". {self.file.path} tells their clips.",
            f"  weights: {f'not finite, {weights}' if weights else 'finite'}",
            f"  audio of the last step: {'not finite: ' + ', '.join(dumb[:NAMES_SHOWN]) if dumb else 'finite'}; its features: "
            f"{'finite' if features else 'not finite'}",
            "  clips in most of these steps: "
            + ", ".join(f"{name} ({n} of {steps})" for name, n in often.most_common(NAMES_SHOWN)),
            f"  learning rate: {', '.join(dict.fromkeys(rates))}",
            f"  precision: {'bf16' if t.bf16 else 'fp16' if t.fp16 else 'float32'}, weights in {self.trainer.config.model.dtype}"
            + ("" if accelerator.scaler is None else f", loss scale {accelerator.scaler.get_scale():g}"),
        ]
        if weights:
            advice = f"{self._go_back()} Then {self._calmer()}."
        elif dumb or not features:
            advice = "Look at these clips, and name what is bad in data.leave_out."
        elif steps > 1 and times == steps and len(often) > len(last):
            advice = f"Look at {clip_id}, which is in all of them, and name it in data.leave_out where it is bad."
        elif set(reasons) == {"spike"}:
            advice = (
                "The loss has risen for good, not for a step: look at the data from here on, or set a larger "
                f"training.spike_threshold (now {self.factor:g}); or {self._calmer()}."
            )
        else:
            advice = f"{self._calmer()}."
            advice = advice[0].upper() + advice[1:]
        return "\n".join([*lines, f"  what to change: {advice}"])

    def _go_back(self) -> str:
        found = checkpoints.checkpoints_of(self.trainer.output_dir)
        if not found:
            return "There is no checkpoint to go back to: start anew (training.overwrite_output_dir=true)."
        return f"Go back to {found[-1]} (training.resume_from_checkpoint=true)."

    def _calmer(self) -> str:
        t = self.trainer.config.training
        changes = [
            f"lower training.learning_rate (now {t.learning_rate:g})",
            "lengthen training.warmup_steps",
        ]
        if not t.max_grad_norm:
            changes.append("set training.max_grad_norm=1")
        if t.fp16:
            changes.append("use training.bf16 instead of training.fp16")
        return ", ".join(changes[:-1]) + f", or {changes[-1]}"


def plain(value: float) -> float | str:
    """A number as JSON has it: nan and inf are words."""
    return value if math.isfinite(value) else str(value)


def say_clips(clips: list[dict[str, Any]]) -> str:
    """The clips of a step in words: those whose own loss is not finite, and some of all."""
    ids = [clip["id"] for clip in clips]
    bad = [f"{clip['id']} ({clip['loss']}, rank {clip['rank']})" for clip in clips if isinstance(clip["loss"], str)]
    more = f" and {len(ids) - CLIPS_NAMED} more" if len(ids) > CLIPS_NAMED else ""
    told = f"its {len(ids)} clips: {', '.join(ids[:CLIPS_NAMED])}{more}"
    if bad and len(bad) < len(clips):
        more = f" and {len(bad) - CLIPS_NAMED} more" if len(bad) > CLIPS_NAMED else ""
        told = f"not finite for {', '.join(bad[:CLIPS_NAMED])}{more}; {told}"
    return told


def weights_of(model: Any) -> list[tuple[str, torch.Tensor]]:
    """What this process holds of a model's parameters, and its buffers, by name."""
    found = []
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        tensor = getattr(tensor, "ds_tensor", tensor)  # ZeRO-3's own part
        found.append((name, tensor.to_local() if hasattr(tensor, "to_local") else tensor))
    return found


@torch.no_grad()
def all_finite(tensors: Any) -> bool:
    """Whether all floating-point tensors are finite: one fused reduction and one synchronisation for each device."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.is_floating_point() and tensor.numel():
            by_device.setdefault(tensor.device, []).append(tensor.detach())
    for group in by_device.values():
        largest = torch._foreach_norm(group, math.inf)  # not the 2-norm, which overflows where values do not
        if not bool(torch.stack([n.float() for n in largest]).isfinite().all()):
            return False
    return True
