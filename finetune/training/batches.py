"""The batches of one optimizer step, its counts over all ranks, and the account of what was left out on the way."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from accelerate import Accelerator

from finetune.config.schema import RunConfig
from finetune.data.batch import Batch
from finetune.data.quarantine import REPORT_AFTER_ROWS, Record, check_bad_fraction, new_records, nothing_left
from finetune.distributed import gather, gather_rows
from finetune.errors import UserError
from finetune.losses import feasible_clips
from finetune.models.nemo import encoder_lengths
from finetune.models.protocols import Transducer
from finetune.training.outputs import LineFile
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


class Quarantine:
    """quarantine.jsonl of a run: each unusable utterance once, with its reason.

    Args:
        accelerator: only the main process writes.
        file: quarantine.jsonl.
        progress: counts the lines.
    """

    def __init__(self, accelerator: Accelerator, file: LineFile, progress: Progress):
        self.is_main, self.file, self.progress = accelerator.is_main_process, file, progress
        self.known: set[tuple[str, str]] = set()
        """(source, id) of the utterances that are written."""

    def add(self, reports: list[Record]) -> None:
        """Write bad utterances; one that returns in a later epoch is not written again."""
        new = new_records(reports, self.known)
        self.progress.quarantine_lines += len(new)
        if new and self.is_main:
            self.file.append(*new)
            log.warning("%d clip(s) put in quarantine, such as %s: %s", len(new), new[0]["id"], new[0]["reason"])

    def resume(self) -> None:
        """Take over the lines that the restored progress counts, and drop later ones."""
        lines = self.progress.quarantine_lines
        self.known = self.file.pairs("source", "id", lines=lines)
        if self.is_main:
            self.file.cut(lines)


class StepBatcher:
    """Collects the batches of each step.

    Args:
        accelerator: of the run.
        model: gives sample rate and encoder lengths.
        durations: of its TDT head.
        config: of the run.
        progress: its counters are added to.
        quarantine: takes the bad utterances.
        wishes: whether this rank wants the run to stop, and a checkpoint; what any rank wants comes with each step's
            counts.
        on_part: called with the part of the step that begins.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: Transducer,
        durations: tuple[int, ...],
        config: RunConfig,
        progress: Progress,
        quarantine: Quarantine,
        wishes: Callable[[], tuple[bool, bool]] = lambda: (False, False),
        on_part: Callable[[str], None] = lambda part: None,
    ):
        self.accelerator, self.model, self.durations, self.config = accelerator, model, durations, config
        self.progress, self.quarantine, self.wishes, self.on_part = progress, quarantine, wishes, on_part
        self.stop_wanted = self.save_wanted = False
        """What any rank asked for at the last step."""
        self.finished_ranks: list[int] = []
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
        p = self.progress
        clips = tokens = 0
        without_alignment: list[str] = []
        samples = padded = 0.0
        for batch in batches:
            frames_B = encoder_lengths(self.model, batch.audio_lengths_B)
            feasible_B = feasible_clips(frames_B, batch.token_lengths_B, self.durations)
            batch.feasible_B = feasible_B
            clips += int(feasible_B.sum())
            tokens += int(batch.token_lengths_B[feasible_B].sum())
            without_alignment += [i for i, ok in zip(batch.ids, feasible_B.tolist(), strict=True) if not ok]
            samples += float(batch.audio_lengths_B.sum())
            padded += float(batch.audio_BS.numel())
        infeasible = len(without_alignment)
        error = next((b.error for b in received if b.error), None)
        rows = sum(b.rows_read for b in received)
        reporting = bool(without_alignment) or any(b.quarantined or b.filtered or b.error for b in received)
        counts = [clips, tokens, infeasible, rows, samples, padded, not exhausted, reporting, *self.wishes()]
        sums, micro_batches, finished = self._over_ranks(counts, len(batches))
        more, self.stop_wanted, self.save_wanted = sums[6] > 0, sums[8] > 0, sums[9] > 0
        self._log_finished_ranks(finished)
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
        self.quarantine.add(reports)
        if more or p.audio_seconds:  # without one usable utterance `nothing_left` says more
            limit = self.config.data.max_bad_fraction
            check_bad_fraction(p.quarantined, p.rows_read, limit, not more, self.quarantine.file.path)
        samples = int(clips + infeasible)
        step_batches = StepBatches(batches, micro_batches, clips, tokens, samples, audio_seconds, padded_seconds)
        return step_batches, not more

    def _over_ranks(self, values: list[float], micro_batches: int) -> tuple[list[float], int, list[int]]:
        """Return sums over the ranks, the most micro-batches of any rank, and the ranks that have run out of
        utterances.

        One small exchange a step: a rank that has run out keeps step with the others instead of hanging them.
        """
        if self.accelerator.num_processes == 1:
            return [float(v) for v in values], micro_batches, []
        self.on_part("communication")
        row = torch.tensor([[*values, micro_batches]], dtype=torch.float64, device=self.accelerator.device)
        table_RN = gather_rows(self.accelerator, row)
        self.on_part("data")
        finished = [rank for rank, more in enumerate(table_RN[:, 6].tolist()) if not more]
        return table_RN[:, :-1].sum(0).tolist(), int(table_RN[:, -1].max()), finished

    def _log_finished_ranks(self, finished: list[int]) -> None:
        """Log once an epoch which ranks have no more utterances while others go on."""
        if len(finished) == self.accelerator.num_processes:
            self.finished_ranks = []
            return
        new = [rank for rank in finished if rank not in self.finished_ranks]
        self.finished_ranks += new
        if new:
            log.info(
                "step %d: rank %s has no more clips in this epoch and keeps step with the others without adding to "
                "the gradient",
                self.progress.step + 1,
                ", ".join(map(str, new)),
            )

    def _reports_of_ranks(
        self, received: list[Batch], error: str | None, without_alignment: list[str], anything: bool
    ) -> tuple[list[Record], dict[str, int], list[str], list[str]]:
        """Return quarantined utterances, filter counts, errors and utterances without alignment of all ranks.

        The ranks exchange them only where any has some.
        """
        reports = [q for b in received for q in b.quarantined]
        own = (reports, [b.filtered for b in received], [error] if error else [], without_alignment)
        parts = gather(own) if anything else [own]
        filtered: Counter[str] = Counter()
        for _, counts, _, _ in parts:
            for count in counts:
                filtered.update(count)
        return (
            [report for part in parts for report in part[0]],
            dict(filtered),
            [e for part in parts for e in part[2]],
            [i for part in parts for i in part[3]],
        )

    def nothing_left(self) -> UserError:
        """Return the error for an epoch without a single usable utterance."""
        p = self.progress
        return nothing_left(p.rows_read, p.quarantined, p.filtered, self.quarantine.file.path)
