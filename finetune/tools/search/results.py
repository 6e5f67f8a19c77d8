"""What came of a search: its best trial, how that compares, and what the evidence carries."""

import json
import logging
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import optuna
from optuna.trial import FrozenTrial

from finetune.evaluation.utterance_counts import best_trained_counts, compare_evaluations
from finetune.tools.report.formats import duration, percent
from finetune.tools.search.running import describe, outcome_of
from finetune.tools.search.study import Search, best_of, excess_of, finished_trials, is_good, rank_of
from finetune.tools.search.trials import DIVERGED, OUT_OF_MEMORY

log = logging.getLogger(__name__)

ENOUGH = 10
"""Trials with a WER from which on it is said which settings mattered."""
SIGNIFICANT = 0.05


@dataclass
class Result:
    """What came of a search.

    Attributes:
        finished: trials with an outcome, by number.
        default: the trial of the run file's own values; None before it has an outcome.
        best: the best trial; None where all are bad.
        comparison: of the default (a) with the best (b), by utterance; None where they are the same, or counts are
            missing. p_value_corrected is for the best of as many.
        importances: parameter -> share; empty with too few trials.
        advice: sentences that the evidence carries.
    """

    search: Search
    study: optuna.Study
    finished: list[FrozenTrial]
    default: FrozenTrial | None
    best: FrozenTrial | None
    comparison: dict[str, Any] | None = None
    importances: dict[str, float] = field(default_factory=dict)
    advice: list[str] = field(default_factory=list)

    @property
    def good(self) -> list[FrozenTrial]:
        return [t for t in self.finished if is_good(t)]

    @property
    def base_wer(self) -> float | None:
        return self.study.user_attrs.get("base_wer")

    @property
    def keeps_limit(self) -> bool:
        return self.best is not None and not excess_of(self.best)

    @property
    def commonest_reason(self) -> str | None:
        """The reason that most bad trials have, in the words of the first of them."""
        reasons = [t.user_attrs["reason"] for t in self.finished if "reason" in t.user_attrs]
        kinds = [_kind(reason) for reason in reasons]
        return reasons[kinds.index(Counter(kinds).most_common(1)[0][0])] if reasons else None


def _kind(reason: str) -> str:
    """Return a reason without what differs from trial to trial."""
    kind = next((kind for kind in (OUT_OF_MEMORY, DIVERGED) if reason.startswith(kind)), None)
    return kind or re.sub(r"\S*/\S+|\d+(\.\d+)?", "…", reason)


def result_of(study: optuna.Study, search: Search) -> Result:
    """Judge what the study has so far."""
    finished = finished_trials(study)
    default = next((t for t in finished if t.user_attrs.get("default")), None)
    result = Result(search, study, finished, default, best_of(finished))
    if result.best is not None and default is not None and result.best.number != default.number:
        result.comparison = _compared(search, default, result.best, len(finished) - 1)
    good = result.good
    varied = len({json.dumps(t.user_attrs.get("settings")) for t in good}) > 1
    if len(good) >= ENOUGH and varied:
        try:
            result.importances = optuna.importance.get_param_importances(study_of(good))
        except (RuntimeError, ValueError) as error:  # such as WERs that are all the same
            log.debug("no importances: %s", error)
    result.advice = list(_advice(result))
    return result


def _compared(search: Search, default: FrozenTrial, best: FrozenTrial, tried: int) -> dict[str, Any] | None:
    """Compare two trials on the same utterances; None where this machine lacks the counts of one, or has those of
    another evaluation than the one that the trial is judged by."""
    try:
        counts = [best_trained_counts(search.folder_of(t.number)) for t in (default, best)]
    except (OSError, ValueError):
        return None
    if any(c.wer() != t.user_attrs.get("wer") for c, t in zip(counts, (default, best), strict=True)):
        return None
    found = compare_evaluations(*counts)
    if not found["words"]:
        return None
    # The best of many is better by chance alone (Bonferroni).
    return {**found, "tried": tried, "p_value_corrected": min(1.0, found["p_value"] * tried)}


def study_of(trials: list[FrozenTrial]) -> optuna.Study:
    """Return a study in memory of these trials alone: bad ones have no WER of their own."""
    study = optuna.create_study()
    study.add_trials(trials)
    return study


# ---- in words ---------------------------------------------------------------------------------------------------


def _advice(result: Result) -> Iterator[str]:
    best, default, limit = result.best, result.default, result.search.limit
    if best is None:
        return
    attributes = best.user_attrs
    if limit is not None and not result.keeps_limit:
        yield (
            f"No trial keeps data.guard_limit {limit}. Trial {best.number} comes nearest: guard WER "
            f"{attributes['guard']:.4f}, {attributes['excess']:.4f} over it."
        )
    elif default is None:
        yield "The run file's own values have not been tried to their end: nothing is said against them."
    elif best.number == default.number:
        others = len(result.finished) - 1
        yield f"None of the {others} others is better than the run file's own values: WER {best.value:.4f}."
    elif "reason" in default.user_attrs:
        yield f"The run file's own values failed ({default.user_attrs['reason']}); trial {best.number} did not."
    elif excess_of(default) > 0 == excess_of(best):
        yield (
            f"The run file's own values exceed data.guard_limit {limit} in each evaluation; trial {best.number} keeps "
            f"it: WER {attributes['wer']:.4f}, guard {attributes['guard']:.4f}."
        )
    else:
        yield _difference(result, best, default)
    if result.base_wer is not None and attributes["wer"] >= result.base_wer:
        trial = "trial within the limit" if limit is not None else "trial"
        figure = f"whose WER is {result.base_wer:.4f}"
        yield f"No {trial} is better than the base model, {figure}: more steps or other data may be."
    if result.importances:
        name, share = next(iter(result.importances.items()))
        over = f"over {len(result.good)} trials with a WER (PED-ANOVA)"
        yield f"{name} mattered most: {100 * share:.0f} % of the importance {over}."
    else:
        yield f"Which setting mattered is not said: {len(result.good)} trials have a WER, it takes {ENOUGH}."
    if default is not None and best.number != default.number:
        for p in result.search.parameters:
            if best.params[p.name] != p.own and p.is_at_the_end(best.params[p.name]):
                value = f"{p.name}={best.params[p.name]:.4g}"
                yield f"{value} is at an end of its range, {p.low:g} to {p.high:g}; --space can widen it."
    if result.search.steps is not None:
        yield f"Found in runs of {result.search.steps} steps; longer runs may want other values."


def _difference(result: Result, best: FrozenTrial, default: FrozenTrial) -> str:
    """Put the best trial against the run file's own values in one sentence."""
    found = result.comparison
    if found is None:
        return (
            f"Trial {best.number}: WER {best.user_attrs['wer']:.4f} against {default.user_attrs['wer']:.4f} of the "
            "run file's own values. Whether that is chance is not tested: the counts by clip are not in this folder."
        )
    was, now, p = found["wer_a"], found["wer_b"], found["p_value_corrected"]
    figures = f"WER {now:.4f} against {was:.4f}"
    if was:
        low, high = sorted(-100 * v / was for v in found["difference_interval"] or (0.0, 0.0))
        figures += f", {100 * (was - now) / was:.1f} % relative (95 % interval {low:.1f} to {high:.1f} %)"
    chance = f"p = {p:.2g} for the best of {found['tried']} beside the run file's own"
    if p < SIGNIFICANT and now < was:
        return f"Trial {best.number} is better than the run file's own values: {figures}; {chance}."
    return (
        f"The run file's own values are as good, as far as these clips tell. Trial {best.number}: {figures}; {chance}."
    )


HEADS = ["trial", "WER, %", "guard WER, %", "outcome", "time", "settings"]


def table_rows(result: Result) -> list[list[Any]]:
    """Return a row for each trial with an outcome, the best first, the bad ones last."""
    rows = []
    for t in sorted(result.finished, key=rank_of):
        found = t.user_attrs
        marks = {
            "best": t == result.best,
            "over the limit": is_good(t) and excess_of(t),
            outcome_of(t): not is_good(t),
        }
        rates, took = (percent(found.get(name)) for name in ("wer", "guard")), duration(found.get("seconds"))
        outcome = ", ".join(mark for mark, is_so in marks.items() if is_so)
        rows.append([t.number, *rates, outcome or None, took, describe(found.get("settings") or {})])
    return rows


def row_of(trial: FrozenTrial) -> dict[str, Any]:
    known = ("wer", "guard", "excess", "step", "seconds", "reason", "settings")
    return {
        "number": trial.number,
        "state": "bad" if "reason" in trial.user_attrs else trial.state.name.lower(),
        **{name: trial.user_attrs.get(name) for name in known},
        "params": trial.params,
        "evaluations": trial.intermediate_values,
    }
