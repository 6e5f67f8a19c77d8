"""The batches of one optimizer step, its counts over all ranks, and the account of what was left out on the way."""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from accelerate import Accelerator

from finetune.config.schema import RunConfig
from finetune.data.batch import Batch
from finetune.data.quarantine import REPORT_AFTER_ROWS, Quarantine, check_bad_fraction, nothing_left
from finetune.distributed import gather, gather_rows
from finetune.errors import UserError
from finetune.losses import feasible_ctc_clips
from finetune.models.nemo import clips_with_alignment, ctc_loss_weight, encoder_lengths
from finetune.models.protocols import AsrModel
from finetune.training.progress import Progress

log = logging.getLogger(__name__)


@dataclass
class StepBatches:
    """The micro-batches of this rank and the counts of all ranks."""

    batches: list[Batch]
    micro_batches: int
    """Micro-batches that every rank runs: the most that any rank has. 0 ends the epoch."""
    clips: float
    """Utterances that have an alignment."""
    tokens: float
    """Tokens of these utterances."""
    samples: int
    """All utterances."""
    audio_seconds: float
    padded_seconds: float
    rehearsed: int = 0
    """Utterances of data.rehearsal."""


class StepBatcher:
    """Collects the batches of each step.

    Args:
        wishes: whether this rank wants the run to stop, and a checkpoint; what any rank wants comes with each step's
            counts.
        on_part: called with the part of the step that begins.
        keys: of the training sources, for messages.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: AsrModel,
        config: RunConfig,
        progress: Progress,
        quarantine: Quarantine,
        wishes: Callable[[], tuple[bool, bool]],
        on_part: Callable[[str], None],
        keys: str,
    ):
        self.accelerator, self.model, self.config = accelerator, model, config
        self.progress, self.quarantine, self.wishes, self.on_part = progress, quarantine, wishes, on_part
        self.keys = keys
        self.has_both_losses = 0 < ctc_loss_weight(model) < 1
        self.stop_wanted = self.save_wanted = False
        """What any rank asked for at the last step."""
        self.finished_ranks: set[int] = set()
        """Ranks that have no more utterances in this epoch."""
        self.waited = 0.0

    def next_step(self, iterator: Iterator[Batch]) -> StepBatches:
        """Return the micro-batches of the next optimizer step; fewer at the end of the epoch, none behind it.

        Raises:
            UserError: a rank cannot read its data, or too large a share of the utterances is bad.
        """
        while True:
            batches: list[Batch] = []
            received: list[Batch] = []
            exhausted = False
            while len(batches) < self.config.training.gradient_accumulation_steps:
                began = time.perf_counter()
                batch = next(iterator, None)
                self.waited += time.perf_counter() - began
                if batch is None:
                    exhausted = True
                    break
                received.append(batch)
                if batch.error or (not batch.ids and batch.rows_read >= REPORT_AFTER_ROWS):
                    break  # account for what was left out before more is read
                if batch.ids:
                    batches.append(batch)
            step_batches, ended = self._account(batches, received, exhausted)
            if step_batches.micro_batches > 0 or ended:
                return step_batches

    def take_waited(self) -> float:
        """Return the seconds this rank waited for batches since the last call, without its waiting for other ranks."""
        waited, self.waited = self.waited, 0.0
        return waited

    def _account(self, batches: list[Batch], received: list[Batch], exhausted: bool) -> tuple[StepBatches, bool]:
        """Count over all ranks; return also whether every rank is at the end of its epoch."""
        p, rate = self.progress, self.model.preprocessor._sample_rate
        clips = tokens = audio = padded = without_ctc = rehearsed = 0
        without_alignment: list[str] = []
        for batch in batches:
            batch.frames_B = frames_B = encoder_lengths(self.model, batch.audio_lengths_B)
            targets = frames_B, batch.tokens_BU, batch.token_lengths_B
            batch.feasible_B = feasible_B = clips_with_alignment(self.model, *targets)
            if self.has_both_losses:
                without_ctc += int((feasible_B & ~feasible_ctc_clips(*targets)).sum())
            clips += int(feasible_B.sum())
            tokens += int(batch.token_lengths_B[feasible_B].sum())
            without_alignment += [i for i, ok in zip(batch.ids, feasible_B.tolist(), strict=True) if not ok]
            audio += int(batch.audio_lengths_B.sum())
            padded += batch.audio_BS.numel()
            rehearsed += sum(batch.from_rehearsal)
        reporting = bool(without_alignment) or any(b.quarantined or b.filtered or b.error for b in received)
        table_RN = self._gather_counts(
            [
                *(clips, tokens, len(without_alignment), sum(b.rows_read for b in received), audio, padded),
                *(not exhausted, reporting, *self.wishes(), without_ctc, rehearsed, len(batches)),
            ]
        )
        sums = table_RN.sum(0).tolist()
        clips, tokens, infeasible, rows, audio, padded, more, anything, stop, save, without_ctc, rehearsed, _ = sums
        seconds, padded_seconds = audio / rate, padded / rate
        self.stop_wanted, self.save_wanted = stop > 0, save > 0
        self._log_finished_ranks({rank for rank, left in enumerate(table_RN[:, 6].tolist()) if not left})
        quarantined = [record for b in received for record in b.quarantined]
        error = next((b.error for b in received if b.error), None)
        own = (quarantined, [b.filtered for b in received], error, without_alignment)
        by_rank = gather(own) if anything else [own]  # exchanged only where any rank has something to report
        without_alignment = [clip for part in by_rank for clip in part[3]]
        if without_alignment:
            text = (
                "no alignment exists for %s: too few encoder frames for the tokens; left out of the loss and counted"
            )
            log.warning(text, ", ".join(without_alignment))
        errors = [part[2] for part in by_rank if part[2]]
        if errors:
            raise UserError(f"{self.keys}: {errors[0]}", exit_code=1)
        p.rows_read += int(rows)
        p.audio_seconds += seconds
        p.padded_seconds += padded_seconds
        p.infeasible += int(infeasible)
        if without_ctc and not p.infeasible_ctc:
            log.warning(
                "a clip has more tokens than encoder frames for CTC: the transducer's loss alone trains such clips; "
                "infeasible_ctc in metrics.jsonl and summary.json counts them"
            )
        p.infeasible_ctc += int(without_ctc)
        for counts in (counts for part in by_rank for counts in part[1]):
            for reason, n in counts.items():
                p.filtered[reason] = p.filtered.get(reason, 0) + n
        quarantined = [record for part in by_rank for record in part[0]]
        p.quarantined += len(quarantined)
        self.quarantine.add(quarantined)
        if more or p.audio_seconds:  # without one usable utterance `nothing_left` says more
            limit = self.config.data.max_bad_fraction
            check_bad_fraction(p.quarantined, p.rows_read, limit, not more, self.quarantine.reasons)
        micro_batches, samples = int(table_RN[:, -1].max()), int(clips + infeasible)
        step = StepBatches(batches, micro_batches, clips, tokens, samples, seconds, padded_seconds, int(rehearsed))
        return step, not more

    def _gather_counts(self, counts: list[float]) -> torch.Tensor:
        """Return a row of counts for each rank.

        One small exchange a step: a rank that has run out keeps step with the others instead of hanging them.
        """
        if self.accelerator.num_processes == 1:
            return torch.tensor([counts], dtype=torch.float64)
        self.on_part("communication")
        row = torch.tensor([counts], dtype=torch.float64, device=self.accelerator.device)
        table_RN = gather_rows(self.accelerator, row)
        self.on_part("data")
        return table_RN

    def _log_finished_ranks(self, finished: set[int]) -> None:
        """Log once an epoch which ranks have no more utterances while others go on."""
        if len(finished) == self.accelerator.num_processes:
            self.finished_ranks = set()
            return
        new = ", ".join(map(str, sorted(finished - self.finished_ranks)))
        self.finished_ranks |= finished
        if new:
            text = "step %d: rank %s has no more clips in this epoch and keeps step with the others, at weight zero"
            log.info(text, self.progress.step + 1, new)

    def nothing_left(self) -> UserError:
        """Return the error for an epoch without a single usable utterance."""
        p = self.progress
        return nothing_left(p.rows_read, p.quarantined, p.filtered, self.quarantine.reasons)
