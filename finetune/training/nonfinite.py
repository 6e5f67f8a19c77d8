"""Steps that must not count, and weights that must not be kept: a loss or gradient that is not finite, a spike,
exploded weights.

A skipped step changes nothing on any rank: not parameters, the optimizer's state, BatchNorm's statistics, a moving
average or the schedule. Most engines are asked after the backward pass, before they step. DeepSpeed steps inside
Accelerate's backward and by itself
skips, on all ranks, a step whose gradient norm is not finite: where the loss forbids a step, its gradients are made
not finite. flash_adamw_gradient_release steps while the backward pass runs, so a forbidden step never enters it.

B batch, S samples, U target tokens.
"""

import logging
import math
import statistics
from collections import Counter, deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer

from finetune.config.schema import RunConfig
from finetune.data.batch import Batch
from finetune.data.decode import as_float
from finetune.distributed import gather
from finetune.errors import UserError
from finetune.models.nemo import learning_batchnorms
from finetune.models.protocols import Transducer
from finetune.training.checkpoints import checkpoints_of
from finetune.training.outputs import LineFile
from finetune.training.progress import Progress

log = logging.getLogger(__name__)

SKIPPED_FILE = "skipped_steps.jsonl"
SCALE_FLOOR = 1.0
"""fp16's loss scale is not lowered below; gradients that are not finite even so are not the scale's fault."""
JUDGED_AFTER = 20
"""Steps that the spike window holds before it judges, where it is not smaller itself."""
CLIPS_NAMED = 16
NAMES_SHOWN = 5


class StepFilter:
    """Decides which steps count, and keeps the account of those that do not. All ranks decide alike.

    Args:
        accelerator, model, optimizer: of the run.
        config: of the run.
        progress: its counters are added to.
        other_weights: returns tensors that are saved beside the model's weights, by name.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: Transducer,
        optimizer: AcceleratedOptimizer,
        config: RunConfig,
        progress: Progress,
        other_weights: Callable[[], dict[str, torch.Tensor]] = dict,
    ):
        t = config.training
        self.accelerator, self.model, self.optimizer, self.config = accelerator, model, optimizer, config
        self.progress, self.other_weights = progress, other_weights
        self.factor, self.allowed = t.spike_threshold, t.max_skipped_steps
        self.output_dir = Path(t.output_dir)
        self.file = LineFile(self.output_dir / SKIPPED_FILE)
        self.deepspeed = accelerator.distributed_type == "DEEPSPEED"
        self.releases = t.optimizer == "flash_adamw_gradient_release"
        self.window: deque[tuple[float, float | None]] = deque(maxlen=t.spike_window)
        """Loss and gradient norm of the last steps that counted."""
        self.in_a_row = 0
        self.recent: list[dict[str, Any]] = []
        """The skipped steps of the present row."""
        self.losses: list[tuple[Batch, torch.Tensor]] = []
        """The present step's batches with the losses of their utterances."""
        self.limits = math.inf, math.inf
        self.norms = learning_batchnorms(model)
        self.before = [b.clone() for b in self._statistics()]
        self.moved = False

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to decide alike."""
        return {"window": [list(pair) for pair in self.window], "in_a_row": self.in_a_row}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Take over a `state_dict`."""
        if state is not None:
            self.window.extend((loss, norm) for loss, norm in state["window"])
            self.in_a_row = state["in_a_row"]

    # ---- a step ----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a step: keep BatchNorm's statistics, and settle what a spike would be."""
        if self.norms:
            torch._foreach_copy_(self.before, self._statistics())
        self.moved = False
        self.limits = self._limit(0), self._limit(1)

    def begin_forward(self) -> None:
        """Begin the step's forward passes, perhaps again after memory ran out in them."""
        self.losses = []
        if self.moved:
            self._restore_statistics()
        self.moved = True

    def add_losses(self, batch: Batch, losses_B: torch.Tensor) -> None:
        """Keep the losses of a batch's utterances for the account."""
        self.losses.append((batch, losses_B.detach()))

    def filter_loss(self, loss: torch.Tensor, loss_sum: torch.Tensor) -> torch.Tensor | None:
        """Return what to run the step's last backward pass on, for engines that cannot take it back. All ranks enter.

        Args:
            loss: of the last batch.
            loss_sum: of this rank's batches with it.

        Returns:
            The loss; NaN where DeepSpeed is to skip the step; None where no backward pass may run.
        """
        if not (self.deepspeed or self.releases):
            return loss
        total = loss_sum.clone()
        if self.accelerator.num_processes > 1:
            torch.distributed.all_reduce(total)
        good = torch.isfinite(total) & (total <= self.limits[0])
        if self.deepspeed:
            return loss * torch.where(good, 1.0, math.nan).to(loss.dtype)
        return loss if bool(good) else None

    def step(self, loss_sum: torch.Tensor, grad_norm: float | None) -> tuple[float, str | None]:
        """Step the optimizer, or leave it and everything else as it was. All ranks enter, and decide alike.

        Args:
            loss_sum: of this rank.
            grad_norm: before clipping; None where the engine does not report it.

        Returns:
            The loss over all ranks, and why the step is skipped: loss, gradient, spike, scale (fp16's, while it is
            found); None where it counts.
        """
        accelerator, optimizer = self.accelerator, self.optimizer
        norm = 0.0 if grad_norm is None else grad_norm
        totals = torch.stack([loss_sum, torch.tensor(norm, dtype=loss_sum.dtype, device=loss_sum.device)])
        if accelerator.num_processes > 1:  # both: what is not finite on one rank is skipped on all
            torch.distributed.all_reduce(totals)
        loss, norm = float(totals[0]), float(totals[1]) / accelerator.num_processes
        reason = self._reason_to_skip(loss, norm)
        scaler = accelerator.scaler
        if reason is None or self.deepspeed:  # DeepSpeed has decided already
            optimizer.step()
            left_out = bool(getattr(optimizer, "step_was_skipped", False))
            if reason is not None and not left_out:
                raise UserError(
                    f"step {self.progress.step + 1}: {self._describe(reason, loss, norm)}, but DeepSpeed stepped "
                    "with it and the weights are spoilt. Continue from the last checkpoint "
                    "(training.resume_from_checkpoint=true) with --strategy fsdp2 or ddp.",
                    exit_code=1,
                )
            reason = "gradient" if reason is None and left_out else reason
        elif scaler is not None:
            before = scaler.get_scale()
            self._update_scale(scaler, reason)
            if reason == "scale" and scaler.get_scale() >= before:  # finite gradients, whose norm alone is not
                reason = "gradient"
        if reason is None:
            self.in_a_row, self.recent = 0, []
            if self.factor:
                self.window.append((loss, None if grad_norm is None or self.deepspeed else norm))
        else:
            self._restore_statistics()
        return loss, reason

    def _reason_to_skip(self, loss: float, norm: float) -> str | None:
        if not math.isfinite(loss):
            return "loss"
        if loss > self.limits[0]:
            return "spike"
        if not math.isfinite(norm):
            scaler = self.accelerator.scaler
            return "scale" if scaler is not None and scaler.get_scale() > SCALE_FLOOR else "gradient"
        return "spike" if norm > self.limits[1] else None

    def _limit(self, which: int) -> float:
        """Return the loss (0) or gradient norm (1) above which a step is a spike.

        DeepSpeed reports a norm only after it has stepped, so none is in its window.
        """
        values = [value for pair in self.window if (value := pair[which]) is not None]
        if not self.factor or len(values) < min(JUDGED_AFTER, self.window.maxlen or 0):
            return math.inf
        median = statistics.median(values)
        return self.factor * median if median > 0 else math.inf

    def _update_scale(self, scaler: torch.amp.GradScaler, reason: str) -> None:
        """Update the loss scale of a skipped step: lower it where gradients overflowed, else keep it."""
        if reason in ("loss", "spike"):
            scaler.update(new_scale=scaler.get_scale())
        else:
            scaler.update()
            if scaler.get_scale() < SCALE_FLOOR:
                scaler.update(new_scale=SCALE_FLOOR)

    def _statistics(self) -> list[torch.Tensor]:
        """Return BatchNorm's own, where it learns."""
        found = (b for m in self.norms for b in (m.running_mean, m.running_var, m.num_batches_tracked))
        return [b for b in found if isinstance(b, torch.Tensor)]

    def _restore_statistics(self) -> None:
        if self.norms:
            torch._foreach_copy_(self._statistics(), self.before)

    # ---- the account -----------------------------------------------------------------------------------------------

    def record(self, reason: str, loss: float, grad_norm: float | None) -> None:
        """Count, log and write down a skipped step. All ranks enter.

        Raises:
            UserError: `training.max_skipped_steps` of them came in a row.
        """
        p = self.progress
        clips = [clip for part in gather(self._clips()) for clip in part]
        scale = None if self.accelerator.scaler is None else self.accelerator.scaler.get_scale()
        step = p.step + 1
        if self.accelerator.is_main_process:
            norm = None if grad_norm is None else json_number(grad_norm)
            row = {"step": step, "reason": reason, "loss": json_number(loss), "grad_norm": norm, "scale": scale}
            self.file.append({**row, "clips": clips})
        what = self._describe(reason, loss, grad_norm)
        if reason == "scale":
            p.scale_skips += 1
            log.info("step %d: %s; it is lowered to %g and the step is skipped", step, what, scale)
            return
        if reason == "spike":
            p.spikes += 1
        else:
            p.skipped_steps += 1
        log.warning("step %d: %s, the step is skipped; %s", step, what, describe_clips(clips))
        self.in_a_row += 1
        self.recent.append({"reason": reason, "clips": clips})
        if self.allowed and self.in_a_row >= self.allowed:
            raise UserError(self._diagnosis(), exit_code=1)

    def _describe(self, reason: str, loss: float, grad_norm: float | None) -> str:
        if reason == "loss":
            return "the loss is not finite"
        if reason == "gradient":
            return "a gradient is not finite"
        if reason == "scale":
            return "a gradient is not finite at fp16's present loss scale"
        median = f"{self.factor:g} times its median over {len(self.window)} steps"
        if loss > self.limits[0]:
            return f"the loss {loss:.4g} is above {median}"
        return f"the gradient norm {grad_norm or 0.0:.4g} is above {median}"

    def _clips(self) -> list[dict[str, Any]]:
        """Return this rank's utterances of the step."""
        rank, rate = self.accelerator.process_index, self.model.preprocessor._sample_rate
        found = []
        for batch, losses_B in self.losses:
            audio_finite_B = torch.isfinite(as_float(batch.audio_BS)).all(1).tolist()
            assert batch.feasible_B is not None
            # What has no alignment is left out of the loss, so its own loss is not the cause.
            losses = [json_number(x) if ok else None for x, ok in zip(losses_B.tolist(), batch.feasible_B.tolist())]
            found += [
                {"id": i, "rank": rank, "loss": x, "seconds": n / rate, "tokens": u, "audio_finite": finite}
                for i, x, n, u, finite in zip(
                    batch.ids, losses, batch.audio_lengths_B.tolist(), batch.token_lengths_B.tolist(), audio_finite_B
                )
            ]
        return found

    # ---- weights ---------------------------------------------------------------------------------------------------

    def require_finite(self, model: Transducer | None = None) -> None:
        """Check, before anything is kept, that weights and statistics are finite on every rank. All ranks enter.

        Args:
            model: what is to be written; None: the one in training, and what is saved beside it.

        Raises:
            UserError: some are not.
        """
        tensors = dict(weights_of(self.model if model is None else model))
        if model is None:
            tensors |= self.other_weights()
        spoilt = torch.tensor([0.0 if all_finite(tensors.values()) else 1.0], device=self.accelerator.device)
        if self.accelerator.num_processes > 1:
            torch.distributed.all_reduce(spoilt)
        if float(spoilt):
            names, step = self._spoilt_names(tensors), self.progress.step
            when = f"at step {step}" if step else "before the first step: the base model is spoilt"
            advice = [self._go_back(), "Then " + self._calmer() + "."] if step else []
            text = f"the weights are not finite {when} ({names}); nothing of it is written."
            raise UserError(" ".join([text, *advice]), exit_code=1)

    def _spoilt_names(self, tensors: dict[str, torch.Tensor]) -> str:
        """Describe the tensors of any rank that are not finite."""
        own = [name for name, t in tensors.items() if not all_finite([t])]
        found = sorted({name for names in gather(own) for name in names})
        more = f" and {len(found) - NAMES_SHOWN} more" if len(found) > NAMES_SHOWN else ""
        return f"{len(found)} of {len(tensors)} tensors: {', '.join(found[:NAMES_SHOWN])}{more}" if found else ""

    # ---- diagnosis -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _features_finite(self) -> bool:
        """Return whether the features of the last batches are finite on all ranks."""
        fine = True
        for batch, _ in self.losses:
            audio_BS = as_float(batch.audio_BS.to(self.accelerator.device))
            lengths_B = batch.audio_lengths_B.to(audio_BS.device)
            with torch.autocast(audio_BS.device.type, enabled=False):
                mel_BFT, _ = self.model.preprocessor(input_signal=audio_BS, length=lengths_B)
            fine = fine and bool(torch.isfinite(mel_BFT).all())
        return all(gather(fine))

    def _diagnosis(self) -> str:
        """Explain why so many steps in a row were skipped, as far as it shows, and what to change."""
        t = self.config.training
        reasons = Counter(step["reason"] for step in self.recent)
        often = Counter(clip["id"] for step in self.recent for clip in step["clips"])
        last = self.recent[-1]["clips"]
        bad_audio = [clip["id"] for clip in last if not clip["audio_finite"]]
        weights = self._spoilt_names(dict(weights_of(self.model)))
        features = self._features_finite()
        steps, (clip_id, times) = len(self.recent), (often.most_common(1) or [("", 0)])[0]
        rates = [f"{group['lr']:.3g}" for group in self.optimizer.param_groups]
        audio = f"not finite: {', '.join(bad_audio[:NAMES_SHOWN])}" if bad_audio else "finite"
        scaler = self.accelerator.scaler
        lines = [
            f"{self.in_a_row} steps in a row were skipped (training.max_skipped_steps={self.allowed}): "
            + ", ".join(f"{reason} {n}" for reason, n in reasons.most_common())
            + f". {self.file.path} lists their clips.",
            f"  weights: {f'not finite, {weights}' if weights else 'finite'}",
            f"  audio of the last step: {audio}; its features: {'finite' if features else 'not finite'}",
            "  clips in most of these steps: "
            + ", ".join(f"{name} ({n} of {steps})" for name, n in often.most_common(NAMES_SHOWN)),
            f"  learning rate: {', '.join(dict.fromkeys(rates))}",
            f"  precision: {'bf16' if t.bf16 else 'fp16' if t.fp16 else 'float32'}, weights in "
            f"{self.config.model.dtype}" + ("" if scaler is None else f", loss scale {scaler.get_scale():g}"),
        ]
        if weights:
            advice = f"{self._go_back()} Then {self._calmer()}."
        elif bad_audio or not features:
            advice = "Look at these clips, and name what is bad in data.leave_out."
        elif steps > 1 and times == steps and len(often) > len(last):
            advice = f"Look at {clip_id}, which is in all of them, and name it in data.leave_out if it is bad."
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
        found = checkpoints_of(self.output_dir)
        if not found:
            return "There is no checkpoint to go back to: start anew (training.overwrite_output_dir=true)."
        return f"Go back to {found[-1]} (training.resume_from_checkpoint=true)."

    def _calmer(self) -> str:
        t = self.config.training
        changes = [
            f"lower training.learning_rate (now {t.learning_rate:g})",
            "lengthen training.warmup_steps",
        ]
        if not t.max_grad_norm:
            changes.append("set training.max_grad_norm=1")
        if t.fp16:
            changes.append("use training.bf16 instead of training.fp16")
        return ", ".join(changes[:-1]) + f", or {changes[-1]}"


def json_number(value: float) -> float | str:
    """Return a number as JSON can hold it: nan and inf as words."""
    return value if math.isfinite(value) else str(value)


def describe_clips(clips: list[dict[str, Any]]) -> str:
    """Describe the utterances of a step: those whose own loss is not finite, and some of all."""
    ids = [clip["id"] for clip in clips]
    bad = [f"{clip['id']} ({clip['loss']}, rank {clip['rank']})" for clip in clips if isinstance(clip["loss"], str)]
    more = f" and {len(ids) - CLIPS_NAMED} more" if len(ids) > CLIPS_NAMED else ""
    text = f"its {len(ids)} clips: {', '.join(ids[:CLIPS_NAMED])}{more}"
    if bad and len(bad) < len(clips):
        more = f" and {len(bad) - CLIPS_NAMED} more" if len(bad) > CLIPS_NAMED else ""
        text = f"not finite for {', '.join(bad[:CLIPS_NAMED])}{more}; {text}"
    return text


def weights_of(model: Transducer) -> list[tuple[str, torch.Tensor]]:
    """Return what this process holds of a model's parameters, and its buffers, by name."""
    found = []
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        tensor = getattr(tensor, "ds_tensor", tensor)  # ZeRO-3's own part
        found.append((name, tensor.to_local() if hasattr(tensor, "to_local") else tensor))
    return found


@torch.no_grad()
def all_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether all floating-point tensors are finite: one fused reduction and one synchronisation a device."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.is_floating_point() and tensor.numel():
            by_device.setdefault(tensor.device, []).append(tensor.detach())
    for group in by_device.values():
        largest = torch._foreach_norm(group, math.inf)  # not the 2-norm, which overflows where values do not
        if not bool(torch.stack([n.float() for n in largest]).isfinite().all()):
            return False
    return True
