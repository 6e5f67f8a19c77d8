"""What one optimizer step takes in: its batches, its counts over all ranks, and what was left out on the way."""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from finetune.data.batch import Batch
from finetune.data.quarantine import BAD_FRACTION_JUDGED_AFTER, REPORT_AFTER_ROWS
from finetune.errors import UserError
from finetune.losses import feasible_clips
from finetune.models.nemo import encoder_lengths
from finetune.training.outputs import LineFile

log = logging.getLogger(__name__)


@dataclass
class StepInput:
    """The micro-batches of this rank and the counts of all ranks."""

    group: list[Batch]
    batches: int
    """Micro-batches that every rank runs: the most that any rank has. 0 ends the epoch."""
    clips: float
    """Clips that have an alignment."""
    tokens: float
    """Tokens of these clips."""
    samples: int
    """All clips."""
    audio_seconds: float
    padded_seconds: float


class Intake:
    """Collects the batches of each step and keeps the account of quarantine and filters.

    Args:
        accelerator: Accelerate's Accelerator.
        model: NeMo transducer.
        durations: of its TDT head.
        config: the run's configuration.
        progress: the run's counters, which are added to.
        quarantine: the file for bad clips.
    """

    def __init__(
        self,
        accelerator: Any,
        model: Any,
        durations: tuple[int, ...],
        config: Any,
        progress: Any,
        quarantine: LineFile,
    ):
        self.accelerator, self.model, self.durations, self.config = accelerator, model, durations, config
        self.progress, self.quarantine = progress, quarantine
        self.asks: Callable[[], tuple[bool, bool]] = lambda: (False, False)
        """Whether this rank wants the run to stop, and a checkpoint; what all ranks want comes with each step's counts."""
        self.asked_to_stop = self.asked_to_save = False
        self.quarantined_before: set[tuple[str, str]] = set()
        self.short: list[int] = []
        self.waited = 0.0

    def next_step(self, iterator: Iterator[Batch]) -> StepInput:
        """The micro-batches of the next optimizer step; fewer at the end of the epoch, none behind it.

        Raises:
            UserError: a rank cannot read its data, or too large a share of the clips is bad.
        """
        while True:
            group: list[Batch] = []
            received: list[Batch] = []
            exhausted = False
            while len(group) < self.config.training.gradient_accumulation_steps:
                began = time.perf_counter()
                batch = next(iterator, None)
                self.waited += time.perf_counter() - began
                if batch is None:
                    exhausted = True
                    break
                received.append(batch)
                if batch.error or (not batch.ids and batch.rows_read >= REPORT_AFTER_ROWS):
                    break  # what was left out is accounted for before more is read
                if batch.ids:
                    group.append(batch)
            step_input, ended = self._account(group, received, exhausted)
            if step_input.batches > 0 or ended:
                return step_input

    def take_waited(self) -> float:
        """Seconds in which this rank waited for batches since the last call, without its waiting for other ranks."""
        waited, self.waited = self.waited, 0.0
        return waited

    def _account(self, group: list[Batch], received: list[Batch], exhausted: bool) -> tuple[StepInput, bool]:
        """Counts over all ranks, and whether every rank is at the end of its epoch."""
        p = self.progress
        clips = tokens = infeasible = 0
        without_alignment: list[str] = []
        for batch in group:
            frames_B = encoder_lengths(self.model, batch.audio_lengths_B)
            batch.feasible_B = feasible_clips(frames_B, batch.token_lengths_B, self.durations)
            clips += int(batch.feasible_B.sum())
            tokens += int(batch.token_lengths_B[batch.feasible_B].sum())
            impossible = [i for i, ok in zip(batch.ids, batch.feasible_B.tolist(), strict=True) if not ok]
            infeasible += len(impossible)
            without_alignment += impossible
        error = next((b.error for b in received if b.error), None)
        rows = sum(b.rows_read for b in received)
        samples = sum(float(b.audio_lengths_B.sum()) for b in group)
        padded = sum(float(b.audio_BS.numel()) for b in group)
        reporting = bool(without_alignment) or any(b.quarantined or b.filtered or b.error for b in received)
        counts = [clips, tokens, infeasible, rows, samples, padded, not exhausted, reporting, *self.asks()]
        sums, batches, ended = self._over_ranks(counts, len(group))
        self.asked_to_stop, self.asked_to_save = sums[8] > 0, sums[9] > 0
        self._name_short_ranks(ended)
        reports, filtered, errors, without_alignment = self._reports_of_ranks(
            received, error, without_alignment, anything=sums[7] > 0
        )
        if without_alignment:
            log.warning(
                "no alignment exists for %s: too few encoder frames for the tokens; left out of the loss and counted",
                ", ".join(without_alignment),
            )
        if errors:
            raise UserError(f"data.train: {errors[0]}", exit_code=1)
        rate = self.model.preprocessor._sample_rate
        clips, tokens, infeasible, rows, audio_seconds, padded_seconds = sums[:4] + [sums[4] / rate, sums[5] / rate]
        p.rows_read += int(rows)
        p.audio_seconds += audio_seconds
        p.padded_seconds += padded_seconds
        p.infeasible += int(infeasible)
        for reason, n in filtered.items():
            p.filtered[reason] = p.filtered.get(reason, 0) + n
        p.quarantined += len(reports)
        self.write_quarantine(reports)
        self._check_bad_fraction(ended=sums[6] == 0)
        step_input = StepInput(group, batches, clips, tokens, int(clips + infeasible), audio_seconds, padded_seconds)
        return step_input, sums[6] == 0

    def _over_ranks(self, values: list[float], batches: int) -> tuple[list[float], int, list[int]]:
        """Sums over the ranks, the most batches of any rank, and the ranks that have run out of clips.

        One small exchange a step: a rank that has run out of clips keeps step with the others instead of hanging them.
        """
        accelerator = self.accelerator
        if accelerator.num_processes == 1:
            return [float(v) for v in values], batches, []
        row = torch.tensor([[*values, batches]], dtype=torch.float64, device=accelerator.device)
        table_RN = accelerator.gather(row).cpu()
        ended = [rank for rank, more in enumerate(table_RN[:, 6].tolist()) if not more]
        return table_RN[:, :-1].sum(0).tolist(), int(table_RN[:, -1].max()), ended

    def _name_short_ranks(self, ended: list[int]) -> None:
        """Says once an epoch which ranks have no more clips while others go on."""
        if not ended or len(ended) == self.accelerator.num_processes:
            self.short = [] if len(ended) == self.accelerator.num_processes else self.short
            return
        new = [rank for rank in ended if rank not in self.short]
        self.short += new
        if new:
            log.info(
                "step %d: rank %s has no more clips in this epoch and keeps step with the others without adding to the gradient",
                self.progress.step + 1,
                ", ".join(map(str, new)),
            )

    def _reports_of_ranks(
        self, received: list[Batch], error: str | None, without_alignment: list[str], anything: bool
    ) -> tuple[list[dict[str, str]], dict[str, int], list[str], list[str]]:
        """Quarantined clips, filter counts, errors and clips without alignment of all ranks; exchanged only where any has some."""
        reports = [q for b in received for q in b.quarantined]
        counts = [b.filtered for b in received]
        errors = [error] if error else []
        if anything and self.accelerator.num_processes > 1:
            from accelerate.utils import gather_object

            parts = gather_object([(reports, counts, errors, without_alignment)])
            reports = [q for part in parts for q in part[0]]
            counts = [c for part in parts for c in part[1]]
            errors = [e for part in parts for e in part[2]]
            without_alignment = [i for part in parts for i in part[3]]
        filtered: dict[str, int] = {}
        for count in counts:
            for reason, n in count.items():
                filtered[reason] = filtered.get(reason, 0) + n
        return reports, filtered, errors, without_alignment

    def write_quarantine(self, reports: list[dict[str, str]]) -> None:
        """Writes bad clips; one that comes again in a later epoch is not written again."""
        new = []
        for report in reports:
            key = (report["source"], report["id"])
            if key not in self.quarantined_before:
                self.quarantined_before.add(key)
                new.append(report)
        self.progress.quarantine_lines += len(new)
        if new and self.accelerator.is_main_process:
            self.quarantine.append(*new)
            log.warning("%d clip(s) put in quarantine, such as %s: %s", len(new), new[0]["id"], new[0]["reason"])

    def _check_bad_fraction(self, ended: bool) -> None:
        """Judges once enough rows are read, or all of an epoch."""
        p, limit = self.progress, self.config.data.max_bad_fraction
        if ended and p.audio_seconds == 0:
            return  # not one clip that can be used: `nothing_left` says more
        if (ended or p.rows_read >= BAD_FRACTION_JUDGED_AFTER) and p.quarantined > limit * p.rows_read:
            raise UserError(
                f"{p.quarantined} of {p.rows_read} clips had to be put in quarantine, more than "
                f"data.max_bad_fraction={limit:g}. The reasons are in {self.quarantine.path}. Mend the data, or "
                "raise data.max_bad_fraction.",
                exit_code=1,
            )

    def nothing_left(self) -> UserError:
        """The error for an epoch without a single clip."""
        p = self.progress
        filtered = ", ".join(f"{n} {reason}" for reason, n in sorted(p.filtered.items())) or "none"
        return UserError(
            f"data.train: no clip is left to train on. Read {p.rows_read}, put {p.quarantined} in quarantine (reasons in "
            f"{self.quarantine.path}), left out by filters: {filtered}. Check data.min_duration, data.max_duration "
            "and the reasons.",
            exit_code=1,
        )
