"""`data.guard_limit` in a run: which models may become the best one, and what is said of it in the end."""

import logging
from typing import Any

from finetune.config.guard_limit import GuardLimit
from finetune.data.guard_halves import CHOICE
from finetune.errors import UserError
from finetune.evaluation.significance import increase_bound
from finetune.evaluation.utterance_counts import UtteranceCounts, paired
from finetune.training.progress import Progress

log = logging.getLogger(__name__)


class GuardJudge:
    """Judges each evaluation by its WER on guard_choice. What it found is in `Progress.guard_judged`, and so in
    checkpoints: step, weights, validation_wer, guard_wer, guard_bound, kept, and the change since the base model.

    Args:
        confidence: `data.guard_confidence`.
        normalization: of the guard's texts.
        texts: what tells the guard's clips from others; None: not known.
    """

    def __init__(
        self,
        limit: GuardLimit,
        confidence: float,
        progress: Progress,
        normalization: str = "basic",
        texts: int | None = None,
    ):
        self.limit, self.confidence, self.progress = limit, confidence, progress
        self.judged_by = {"confidence": confidence, "normalization": normalization, "texts": texts}
        """What may not change in a run, since WERs and bounds of before do not compare with those of then."""

    @property
    def base_wer(self) -> float:
        """WER of the base model on guard_choice."""
        return self.progress.base_wer[CHOICE]

    @property
    def highest(self) -> float:
        """The highest WER on guard_choice that keeps the limit."""
        return self.limit.highest(self.base_wer)

    def check_base(self) -> None:
        """Raise UserError where the base model gives nothing to compare with."""
        base = self.progress.base_wer.get(CHOICE)
        if base is None:
            raise UserError(
                "data.guard_limit: no clip with words of guard_choice, a half of data.guard, could be used, so that "
                "there is nothing to choose by. Look at quarantine.jsonl and mend data.guard, or leave the limit out."
            )
        if "validation" not in self.progress.base_wer:
            raise UserError(
                "data.guard_limit: no clip with words of data.validation could be used, so that there is nothing to "
                "choose by. Look at quarantine.jsonl and mend data.validation, or leave the limit out."
            )
        if base == 0 and self.limit.relative:
            raise UserError(
                f"data.guard_limit: {self.limit} of a WER of 0 is 0: the base model makes no error on guard_choice. "
                "Give the limit as WER, such as data.guard_limit=+0.01."
            )
        self.progress.guard_judged_by = dict(self.judged_by)

    def bound(self, wer: float | None, before: UtteranceCounts | None, after: UtteranceCounts) -> float | None:
        """Return the WER on guard_choice that has to keep the limit: with confidence 0.5 the measured one, else its
        upper bound beside the base model's; None where nothing can be compared.

        Args:
            wer: as measured.
            before, after: the clips of the base model and of the one that is judged; None: they are lost.
        """
        if wer is None or self.confidence == 0.5:
            return wer
        if before is None:
            return None
        errors_a_N, errors_b_N, words_N, _, _ = paired(before, after)
        if not words_N.sum():
            return None
        increase = increase_bound(errors_a_N, errors_b_N, words_N, self.confidence, relative=self.limit.relative)
        return max(wer, self.base_wer * (1 + increase) if self.limit.relative else self.base_wer + increase)

    def judge(
        self,
        weights: str,
        validation_wer: float | None,
        guard_wer: float | None,
        change: dict[str, Any] | None,
        bound: float | None,
    ) -> bool:
        """Note an evaluation of the present step, in place of an earlier one of the same weights; return whether it
        keeps the limit.

        Args:
            weights: which were evaluated.
            validation_wer, guard_wer: theirs on validation and guard_choice.
            change: on guard_choice, see `finetune.evaluation.utterance_counts.compare_evaluations`.
            bound: see `bound`; None: the limit is not kept. The base model's does not matter.
        """
        p = self.progress
        row = {"step": p.step, "weights": weights, "validation_wer": validation_wer, "guard_wer": guard_wer}
        row["guard_bound"] = bound if p.step else guard_wer
        kept = self._keeps(row)
        others = [r for r in p.guard_judged if (r["step"], r["weights"]) != (p.step, weights)]
        p.guard_judged = [*others, {**row, "kept": kept, "change": shortened(change)}]
        if p.step and guard_wer is not None:
            verdict = "kept" if kept else "not kept"
            up_to = "" if bound == guard_wer else f" (up to {'anything' if bound is None else f'{bound:.4f}'})"
            log.info(
                f"  data.guard_limit {self.limit}: WER {guard_wer:.4f}{up_to} on guard_choice, "
                f"{self.highest:.4f} at most: {verdict}{in_words(change)}"
            )
        return kept

    def _keeps(self, row: dict[str, Any]) -> bool:
        """Return whether a model keeps the limit; the base model does."""
        bound = row["guard_bound"]
        return row["step"] == 0 or (bound is not None and self.limit.keeps(bound, self.base_wer))

    def check_after_resume(self, best: dict[str, Any] | None) -> None:
        """Judge what was judged before by the limit of now.

        Args:
            best: checkpoints/best.json, which also knows a candidate that was judged after the last checkpoint.

        Raises:
            UserError: the base model was not measured, or not by what judges now; or model.nemo does not keep the
                limit, or was not judged.
        """
        p = self.progress
        if CHOICE not in p.base_wer:
            raise UserError(
                "data.guard_limit: the run began without it, so that the base model's WER on guard_choice is not "
                "known. Begin anew (training.overwrite_output_dir=true), or leave data.guard_limit out."
            )
        anew = "begin anew (training.overwrite_output_dir=true)"
        before = p.guard_judged_by
        was = {key: before[key] for key in before if None not in (before[key], self.judged_by[key])}
        changes = [
            _changed(key, value, self.judged_by[key]) for key, value in was.items() if value != self.judged_by[key]
        ]
        if changes:
            raise UserError(
                f"data.guard_limit: {'; '.join(changes)}. What was judged so far does not compare with that. "
                f"Set it as it was, or {anew}."
            )
        for row in p.guard_judged:
            row["kept"] = self._keeps(row)
        wer, bound = (best or {}).get("guard_wer"), (best or {}).get("guard_bound")
        if p.best_step and best is not None and bound is None:
            raise UserError(
                f"data.guard_limit: model.nemo (step {p.best_step}) was chosen without it, so that nothing tells "
                f"whether it keeps {self.limit}. Leave data.guard_limit out, or {anew}."
            )
        if p.best_step and bound is not None and not self.limit.keeps(bound, self.base_wer):
            raise UserError(
                f"data.guard_limit: model.nemo (step {p.best_step}, WER {wer:.4f} on guard_choice"
                f"{'' if bound == wer else f', up to {bound:.4f}'}) "
                f"was chosen by another limit and does not keep {self.limit} ({self.highest:.4f} at most). Set the "
                f"limit as it was, or {anew}."
            )
        # One of a later step is judged again.
        if best is not None and wer is not None and best["step"] == p.step and self.taken() is None:
            row = {"step": best["step"], "weights": best["weights"], "validation_wer": best["validation_wer"]}
            p.guard_judged.append({**row, "guard_wer": wer, "guard_bound": bound, "kept": True, "change": None})

    @property
    def only_base(self) -> bool:
        """Whether nothing but the base model keeps the limit."""
        return not any(row["step"] and row["kept"] for row in self.progress.guard_judged)

    # ---- the end ----------------------------------------------------------------------------------------------------

    def taken(self) -> dict[str, Any] | None:
        """Return what was judged of the best model."""
        p = self.progress
        same = (row for row in p.guard_judged if (row["step"], row["weights"]) == (p.best_step, p.best_weights))
        return next(same, None)

    def best_without_limit(self) -> dict[str, Any] | None:
        """Return the evaluation with the lowest validation WER, whether it keeps the limit or not."""
        rows = [row for row in self.progress.guard_judged if row["validation_wer"] is not None]
        return min(rows, key=lambda row: row["validation_wer"], default=None)

    def nearest(self) -> dict[str, Any] | None:
        """Return the evaluation, of those that do not keep the limit, that is nearest to it."""
        rows = [row for row in self.progress.guard_judged if not row["kept"] and row["guard_bound"] is not None]
        return min(rows, key=lambda row: row["guard_bound"], default=None)

    def outcome(self) -> str:
        """Say in a line which model keeps the limit, and what would have been chosen without it."""
        taken, free, nearest = self.taken(), self.best_without_limit(), self.nearest()
        sure = "" if self.confidence == 0.5 else f" with {self.confidence:.0%} confidence"
        line = f"data.guard_limit {self.limit} (WER on guard_choice {self.highest:.4f} at most{sure}): "
        if not self.only_base:
            line += f"{_described(taken)} is the best that keeps it" if taken is not None else "kept"
        elif nearest is None:
            return line + "only the base model was judged"
        else:
            line += f"only the base model keeps it; the nearest is {_described(nearest)}"
            if free is nearest:
                return line + ", which is also the best on validation"
        if free is None or free["kept"]:
            return line
        return f"{line}; the best on validation without it is {_described(free)}"

    def summary(self, test_before: float | None, test_after: float | None, change: dict[str, Any] | None) -> Any:
        """Return the entry `guard_limit` of summary.json.

        Args:
            test_before, test_after: WER of the base model and of the chosen one on the other half, `guard`.
            change: between them.
        """
        taken = self.taken() or {}
        known = test_before is not None and test_after is not None
        return {
            "limit": str(self.limit),
            "base_wer": self.base_wer,
            "highest_wer": self.highest,
            "confidence": self.confidence,
            "choice_wer": taken.get("guard_wer"),
            "choice_bound": taken.get("guard_bound"),
            "choice_change": taken.get("change"),
            "kept": taken.get("kept"),
            "only_base": self.only_base,
            "test_base_wer": test_before,
            "test_highest_wer": None if test_before is None else self.limit.highest(test_before),
            "test_wer": test_after,
            "test_change": shortened(change),
            "test_kept": self.limit.keeps(test_after or 0.0, test_before or 0.0) if known else None,
            "best_without_limit": self.best_without_limit(),
            "nearest": self.nearest(),
            "judged": self.progress.guard_judged,
        }


def log_outcome(outcome: str, found: dict[str, Any]) -> None:
    """Log how a run ended under its limit; `found` is the entry of summary.json."""
    log.info("%s", outcome)
    if found["test_kept"] is None:
        return
    on_guard = f"WER {found['test_wer']:.4f} on guard, the other half, {found['test_highest_wer']:.4f} at most"
    if found["test_kept"]:
        log.info("  kept there as well: %s%s", on_guard, in_words(found["test_change"]))
    else:
        log.warning(
            "the limit is kept on the half of data.guard that chose, and not on the other: %s%s. The model stays: "
            "choosing again would make that half part of the choice. A larger data.guard or a lower data.guard_limit "
            "leaves more room.",
            on_guard,
            in_words(found["test_change"]),
        )


def shortened(change: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return difference, interval and p-value of a comparison with the base model."""
    if change is None:
        return None
    return {key: change[key] for key in ("difference", "difference_interval", "p_value")}


def in_words(change: dict[str, Any] | None) -> str:
    """Return a comparison with the base model as the end of a sentence."""
    if change is None:
        return ""
    interval = change["difference_interval"]
    within = f" (95 % interval {100 * interval[0]:+.2f} to {100 * interval[1]:+.2f})" if interval else ""
    return f"; {100 * change['difference']:+.2f} points since the base model{within}"


def _changed(key: str, was: Any, now: Any) -> str:
    """Say that one of `GuardJudge.judged_by` is another."""
    if key == "confidence":
        return f"data.guard_confidence was {was:g} when the run began, and is {now:g}"
    if key == "normalization":
        return f"data.wer_normalization of data.guard was {was} when the run began, and is {now}"
    return "data.guard has other clips than when the run began (data.guard, data.max_eval_samples)"


def _described(row: dict[str, Any]) -> str:
    """Return an evaluation in words."""
    who = "the base model" if row["step"] == 0 else f"step {row['step']}"
    who += "" if row["weights"] == "raw" else f" ({row['weights']})"
    rates = ((row["validation_wer"], "validation"), (row["guard_wer"], "guard_choice"))
    said = f"{who}, " + ", ".join(f"WER {rate:.4f} on {split}" for rate, split in rates if rate is not None)
    if row["step"] and row["guard_bound"] not in (None, row["guard_wer"]):
        said += f" (up to {row['guard_bound']:.4f})"
    return said
