"""Steps that must not count, and weights that must not be kept: a loss or gradient that is not finite, a spike,
exploded weights.

A skipped step changes nothing on any rank: not parameters, the optimizer's state, BatchNorm's statistics, a moving
average or the schedule. Most engines are asked after the backward pass, before they step. DeepSpeed steps inside
Accelerate's backward and by itself skips, on all ranks, a step whose gradient norm is not finite: where the loss
forbids a step, its gradients are made not finite. flash_adamw_gradient_release steps while the backward pass runs, so
a forbidden step never enters it.

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
from finetune.distributed import gather, sum_over_ranks
from finetune.errors import UserError
from finetune.models.features import log_mel
from finetune.models.nemo import learning_batchnorms
from finetune.models.protocols import AsrModel
from finetune.training.checkpoints import checkpoints_of
from finetune.training.outputs import LineFile
from finetune.training.progress import Progress

log = logging.getLogger(__name__)

SCALE_FLOOR = 1.0
"""fp16's loss scale is not lowered below; gradients that are not finite even so are not the scale's fault."""
JUDGED_AFTER = 20
"""Steps that the spike window holds before it judges, where it is not smaller itself."""
CLIPS_NAMED = 16
NAMES_SHOWN = 5
NOT_FINITE = {
    "loss": "the loss is not finite",
    "gradient": "a gradient is not finite",
    "scale": "a gradient is not finite at fp16's present loss scale",
}


class StepFilter:
    """Decides which steps count, and keeps the account of those that do not. All ranks decide alike.

    Args:
        other_weights: returns tensors that are saved beside the model's weights, by name.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: AsrModel,
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
        self.file = LineFile(self.output_dir / "skipped_steps.jsonl")
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

    def load_state_dict(self, state: dict[str, Any]) -> None:
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
        total = sum_over_ranks(loss_sum.clone())
        good = torch.isfinite(total) & (total <= self.limits[0])
        if self.deepspeed:
            return loss * torch.where(good, 1.0, math.nan).to(loss.dtype)
        return loss if bool(good) else None

    def step(
        self, loss_sum: torch.Tensor, grad_norm: torch.Tensor | float | None
    ) -> tuple[float, float | None, str | None]:
        """Step the optimizer, or leave it and everything else as it was. All ranks enter, and decide alike.

        Args:
            loss_sum: of this rank.
            grad_norm: before clipping; None where the engine does not report it.

        Returns:
            The loss over all ranks, this rank's norm, and why the step is skipped: loss, gradient, spike, scale
            (fp16's, while it is found); None where it counts.
        """
        if isinstance(grad_norm, torch.Tensor):
            own = grad_norm.detach().to(loss_sum)
        else:
            own = torch.full_like(loss_sum, grad_norm or 0.0)
        totals = sum_over_ranks(torch.stack([loss_sum, own]))  # both: not finite on one rank is skipped on all
        # The only time in a step that the host waits for the device.
        loss, norm, own_norm = torch.cat([totals, own[None]]).tolist()
        grad_norm, norm = None if grad_norm is None else own_norm, norm / self.accelerator.num_processes
        reason = self._reason_to_skip(loss, norm)
        if reason is None or self.deepspeed:  # DeepSpeed has decided already
            self.optimizer.step()
            left_out = bool(getattr(self.optimizer, "step_was_skipped", False))
            if reason is not None and not left_out:
                raise UserError(
                    f"step {self.progress.step + 1}: {self._describe(reason, loss, norm)}, but DeepSpeed stepped "
                    "with it and the weights are spoilt. Continue from the last checkpoint "
                    "(training.resume_from_checkpoint=true) with --strategy fsdp2 or ddp.",
                    exit_code=1,
                )
            reason = "gradient" if reason is None and left_out else reason
        elif self.accelerator.scaler is not None:
            lowered = self._update_scale(self.accelerator.scaler, reason)
            if reason == "scale" and not lowered:  # finite gradients, whose norm alone is not
                reason = "gradient"
        if reason is not None:
            self._restore_statistics()
            return loss, grad_norm, reason
        self.in_a_row, self.recent = 0, []
        if self.factor:  # DeepSpeed reports a norm only after it has stepped, so none is in its window
            self.window.append((loss, None if grad_norm is None or self.deepspeed else norm))
        return loss, grad_norm, None

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
        """Return the loss (0) or gradient norm (1) above which a step is a spike."""
        values = [value for pair in self.window if (value := pair[which]) is not None]
        if not self.factor or len(values) < min(JUDGED_AFTER, self.window.maxlen or 0):
            return math.inf
        median = statistics.median(values)
        return self.factor * median if median > 0 else math.inf

    def _update_scale(self, scaler: torch.amp.GradScaler, reason: str) -> bool:
        """Lower the loss scale of a skipped step where gradients overflowed; return whether it is lower now."""
        before = scaler.get_scale()
        scaler.update(new_scale=before if reason in ("loss", "spike") else None)
        if scaler.get_scale() < SCALE_FLOOR:
            scaler.update(new_scale=SCALE_FLOOR)
        return scaler.get_scale() < before

    def _statistics(self) -> list[torch.Tensor]:
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
        p, step, scaler = self.progress, self.progress.step + 1, self.accelerator.scaler
        clips = [clip for part in gather(self._clips()) for clip in part]
        scale = None if scaler is None else scaler.get_scale()
        if self.accelerator.is_main_process:
            norm = None if grad_norm is None else _json_number(grad_norm)
            row = {"step": step, "reason": reason, "loss": _json_number(loss), "grad_norm": norm, "scale": scale}
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
        log.warning("step %d: %s, the step is skipped; %s", step, what, _describe_clips(clips))
        self.in_a_row += 1
        self.recent.append({"reason": reason, "clips": clips})
        if self.allowed and self.in_a_row >= self.allowed:
            raise UserError(self._diagnosis(), exit_code=1)

    def _describe(self, reason: str, loss: float, grad_norm: float | None) -> str:
        if reason != "spike":
            return NOT_FINITE[reason]
        what = f"the loss {loss:.4g}" if loss > self.limits[0] else f"the gradient norm {grad_norm or 0.0:.4g}"
        return f"{what} is above {self.factor:g} times its median over {len(self.window)} steps"

    def _clips(self) -> list[dict[str, Any]]:
        """Return this rank's utterances of the step."""
        found = []
        for batch, losses_B in self.losses:
            assert batch.feasible_B is not None
            audio_finite_B = torch.isfinite(as_float(batch.audio_BS)).all(1)
            found += [
                {
                    "id": batch.ids[i],
                    "rank": self.accelerator.process_index,
                    # What has no alignment is left out of the loss, so its own loss is not the cause.
                    "loss": _json_number(loss) if batch.feasible_B[i] else None,
                    "seconds": int(batch.audio_lengths_B[i]) / self.model.preprocessor._sample_rate,
                    "tokens": int(batch.token_lengths_B[i]),
                    "audio_finite": bool(audio_finite_B[i]),
                }
                for i, loss in enumerate(losses_B.tolist())
            ]
        return found

    # ---- weights ---------------------------------------------------------------------------------------------------

    def require_finite(self, model: AsrModel | None = None) -> None:
        """Check, before anything is kept, that weights and statistics are finite on every rank. All ranks enter.

        Args:
            model: what is to be written; None: the one in training, and what is saved beside it.

        Raises:
            UserError: some are not.
        """
        tensors = _weights_of(self.model) | self.other_weights() if model is None else _weights_of(model)
        spoilt = torch.tensor(0.0 if _all_finite(tensors.values()) else 1.0, device=self.accelerator.device)
        if not sum_over_ranks(spoilt):
            return
        names, step = self._spoilt_names(tensors), self.progress.step
        when = f"at step {step}" if step else "before the first step: the base model is spoilt"
        advice = f" {self._go_back()} Then {self._calmer()}." if step else ""
        text = f"the weights are not finite {when} ({names}); nothing of it is written.{advice}"
        raise UserError(text, exit_code=1)

    def _spoilt_names(self, tensors: dict[str, torch.Tensor]) -> str:
        """Describe the tensors of any rank that are not finite; "" where all are."""
        own = [name for name, t in tensors.items() if not _all_finite([t])]
        found = sorted({name for names in gather(own) for name in names})
        return f"{len(found)} of {len(tensors)} tensors: {_some(found, NAMES_SHOWN)}" if found else ""

    # ---- diagnosis -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _features_finite(self) -> bool:
        """Return whether the features of the last batches are finite on all ranks."""
        fine, device = True, self.accelerator.device
        for batch, _ in self.losses:
            mel_BFT = batch.mel_BFM
            if mel_BFT is None:
                audio_BS, lengths_B = as_float(batch.audio_BS.to(device)), batch.audio_lengths_B.to(device)
                with torch.autocast(device.type, enabled=False):
                    mel_BFT, _ = log_mel(self.model.preprocessor, audio_BS, lengths_B)
            fine = fine and bool(torch.isfinite(mel_BFT).all())
        return all(gather(fine))

    def _diagnosis(self) -> str:
        """Explain why so many steps in a row were skipped, as far as it shows, and what to change."""
        t, scaler, steps = self.config.training, self.accelerator.scaler, len(self.recent)
        reasons = Counter(step["reason"] for step in self.recent)
        often = Counter(clip["id"] for step in self.recent for clip in step["clips"])
        last = self.recent[-1]["clips"]
        bad_audio = [clip["id"] for clip in last if not clip["audio_finite"]]
        weights = self._spoilt_names(_weights_of(self.model))
        features = self._features_finite()
        in_all = [name for name, n in often.items() if n == steps > 1 and len(often) > len(last)]
        calmer = self._calmer()
        if weights:
            advice = f"{self._go_back()} Then {calmer}."
        elif bad_audio or not features:
            advice = "Look at these clips, and name what is bad in data.leave_out."
        elif in_all:
            advice = f"Look at {in_all[0]}, which is in all of them, and name it in data.leave_out if it is bad."
        elif set(reasons) == {"spike"}:
            advice = (
                "The loss has risen for good, not for a step: look at the data from here on, or set a larger "
                f"training.spike_threshold (now {self.factor:g}); or {calmer}."
            )
        else:
            advice = f"{calmer[0].upper()}{calmer[1:]}."
        counts = ", ".join(f"{reason} {n}" for reason, n in reasons.most_common())
        audio = f"not finite: {', '.join(bad_audio[:NAMES_SHOWN])}" if bad_audio else "finite"
        clips = ", ".join(f"{name} ({n} of {steps})" for name, n in often.most_common(NAMES_SHOWN))
        rates = dict.fromkeys(f"{group['lr']:.3g}" for group in self.optimizer.param_groups)
        precision = "bf16" if t.bf16 else "fp16" if t.fp16 else "float32"
        scale = "" if scaler is None else f", loss scale {scaler.get_scale():g}"
        return (
            f"{self.in_a_row} steps in a row were skipped (training.max_skipped_steps={self.allowed}): {counts}. "
            f"{self.file.path} lists their clips.\n"
            f"  weights: {f'not finite, {weights}' if weights else 'finite'}\n"
            f"  audio of the last step: {audio}; its features: {'finite' if features else 'not finite'}\n"
            f"  clips in most of these steps: {clips}\n"
            f"  learning rate: {', '.join(rates)}\n"
            f"  precision: {precision}, weights in {self.config.model.dtype}{scale}\n"
            f"  what to change: {advice}"
        )

    def _go_back(self) -> str:
        found = checkpoints_of(self.output_dir)
        if not found:
            return "There is no checkpoint to go back to: start anew (training.overwrite_output_dir=true)."
        return f"Go back to {found[-1]} (training.resume_from_checkpoint=true)."

    def _calmer(self) -> str:
        t = self.config.training
        changes = [f"lower training.learning_rate (now {t.learning_rate:g})", "lengthen training.warmup_steps"]
        changes += [] if t.max_grad_norm else ["set training.max_grad_norm=1"]
        changes += ["use training.bf16 instead of training.fp16"] if t.fp16 else []
        return f"{', '.join(changes[:-1])}, or {changes[-1]}"


def _json_number(value: float) -> float | str:
    """Return a number as JSON can hold it: nan and inf as words."""
    return value if math.isfinite(value) else str(value)


def _some(names: list[str], most: int) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def _describe_clips(clips: list[dict[str, Any]]) -> str:
    """Describe the utterances of a step: those whose own loss is not finite, and some of all."""
    bad = [f"{clip['id']} ({clip['loss']}, rank {clip['rank']})" for clip in clips if isinstance(clip["loss"], str)]
    text = f"its {len(clips)} clips: {_some([clip['id'] for clip in clips], CLIPS_NAMED)}"
    return f"not finite for {_some(bad, CLIPS_NAMED)}; {text}" if 0 < len(bad) < len(clips) else text


def _weights_of(model: AsrModel) -> dict[str, torch.Tensor]:
    """Return what this process holds of a model's parameters, and its buffers, by name."""
    found = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        tensor = getattr(tensor, "ds_tensor", tensor)  # ZeRO-3's own part
        found[name] = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


def _all_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether all floating-point tensors are finite, with fused reductions."""
    values = [t.detach() for t in tensors if t.is_floating_point() and t.numel()]
    largest = torch.nn.utils.get_total_norm(values, math.inf)  # the 2-norm overflows where values do not
    return bool(largest.isfinite())
