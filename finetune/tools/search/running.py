"""Trials one after the other: what each sets, when it is stopped, and what counts as its outcome."""

import logging
import math
import shutil
import warnings
from dataclasses import asdict
from time import monotonic, sleep

import optuna
from optuna.trial import FrozenTrial, TrialState

from finetune.errors import UserError
from finetune.tools.report.formats import duration
from finetune.tools.search import trials
from finetune.tools.search.space import BY_LENGTH, Settings, problem_of, settings_of
from finetune.tools.search.study import GRACE, Search, best_of, enqueue_again, excess_of, finished_trials

log = logging.getLogger(__name__)

WAIT_SECONDS = 5
EVALUATIONS = 4
"""Evaluations of a trial, by which bad ones are noticed early; more where the run file has more."""


def run_trials(study: optuna.Study, search: Search) -> None:
    """Run trials until there are enough, or the time is over.

    Raises:
        UserError: a training refuses the run file's own settings.
        KeyboardInterrupt: the trial in progress is queued again.
    """
    copy = search.folder / "run.yaml"  # a run file that is edited meanwhile does not mix two searches
    shutil.copyfile(search.run_file, copy)
    words = ["--config", str(copy), *(w for name in search.strategies for w in ("--strategy", name))]
    try:
        while _is_one_to_start(study, search):
            study.optimize(lambda trial: _run_trial(trial, study, search, [*words, *search.overrides]), n_trials=1)
            _keep_the_best_model(study, search)
            _log_trial(study, search)
    finally:
        copy.unlink(missing_ok=True)


def _trials_left(study: optuna.Study, search: Search) -> int | None:
    """Return how many trials are still to be started here; None: as many as the time allows."""
    if search.trials is None:
        return None
    return max(search.trials - len(finished_trials(study)) - _running_elsewhere(study, search), 0)


def _running_elsewhere(study: optuna.Study, search: Search) -> int:
    running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
    return sum(t.user_attrs.get("owner") not in (None, search.owner) for t in running)


def _is_one_to_start(study: optuna.Study, search: Search) -> bool:
    """Return whether a trial is to be started. Where others run the last ones, wait for their end: the trial of a
    machine that is not heard of any more is tried here."""
    said = False
    while _seconds_left(search) > 0:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            optuna.storages.fail_stale_trials(study)
        if _trials_left(study, search) != 0:
            return True
        others = _running_elsewhere(study, search)
        if not others:
            return False
        if not said:
            log.info(
                "waiting for %d trial(s) of other machines; that of one that is not heard of for %d seconds is tried "
                "here. Ctrl-C: end with the results so far",
                others,
                GRACE,
            )
        said = True
        sleep(min(WAIT_SECONDS, max(_seconds_left(search), 0.0)))
    return False


def _seconds_left(search: Search) -> float:
    return math.inf if search.minutes is None else 60 * search.minutes - (monotonic() - search.began)


def trial_settings(search: Search, number: int, chosen: Settings, is_default: bool) -> Settings:
    """Return all that a trial sets: what was chosen, what goes with its length, and what makes its run short, quiet
    and comparable."""
    t = search.config.training
    by_length = {key: search.config.get(key) for key in BY_LENGTH if search.steps is not None}
    steps = search.steps or chosen.get("training.max_steps", t.max_steps)
    fixed: Settings = {
        "training.output_dir": str(search.folder_of(number)),
        "training.overwrite_output_dir": True,
        "training.resume_from_checkpoint": False,
        "training.report_to": "none",
        "training.report_clips": 0,
        "training.log_clips": False,
        "training.save_steps": 0,
        "training.save_minutes": 0.0,
        "training.stop_if_diverged": True,
        "data.test": None,
        # The base model is the same in all trials; where a guard is, each run judges by it.
        "training.eval_on_start": is_default or bool(search.config.data.guard),
    }
    if steps > 0:
        often = -(-steps // EVALUATIONS)
        fixed |= {"training.max_steps": steps, "training.eval_steps": min(t.eval_steps or often, often)}
    return {**{key: value for key, value in by_length.items() if value}, **chosen, **fixed}


def _run_trial(trial: optuna.Trial, study: optuna.Study, search: Search, run: list[str]) -> float:
    """Train with the settings of a trial; return its WER, of a bad trial the worst there is.

    Raises:
        TrialPruned: its evaluations are worse than those of most trials at the same point.
    """
    trial.set_user_attr("owner", search.owner)
    is_default, folder = bool(trial.user_attrs.get("default")), search.folder_of(trial.number)
    values = {p.name: p.suggest(trial) for p in search.parameters}
    chosen = {} if is_default else settings_of(search.parameters, values, search.config)
    trial.set_user_attr("settings", chosen)
    settings = trial_settings(search, trial.number, chosen, is_default)
    steps = settings.get("training.max_steps")
    log.info("trial %d: %s", trial.number, describe(chosen))
    base_wer = study.user_attrs.get("base_wer")
    reported: list[int] = []
    stopped = ""

    def watch() -> bool:
        nonlocal stopped
        found = trials.read_evaluations(folder, search.limit)
        for step in sorted({s.step for s in found.standings} - set(reported)):
            best = min((s for s in found.standings if s.step <= step), key=lambda s: s.score)
            trial.report(best.score, len(reported))
            reported.append(step)
            if steps is None or step >= steps:
                continue  # it ends by itself
            if trial.should_prune() and not is_default:
                stopped = "pruned"
            elif 2 * step >= steps and trials.has_diverged(best.wer, found.base_wer or base_wer):
                stopped = trials.DIVERGED
        return bool(stopped)

    log_file = folder.with_suffix(".log")
    problem = problem_of(search.config, chosen)
    if problem is not None:  # each of its settings is allowed, not all of them together
        return _bad(trial, study, search, f"excluded: {problem}")
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier study, whose evaluations would be taken for this one's
    try:
        words = [*search.training, *run, *trials.setting_words(settings)]
        code, seconds = trials.run_training(words, log_file, watch)
    except KeyboardInterrupt:
        enqueue_again(study, trial)
        shutil.rmtree(folder, ignore_errors=True)
        raise
    found = trials.read_evaluations(folder, search.limit)
    if found.base_wer is not None and base_wer is None:
        base_wer = found.base_wer
        study.set_user_attr("base_wer", base_wer)
        study.set_user_attr("base_guard", found.base_guard)
    best = found.best
    trial.set_user_attr("seconds", round(seconds, 1))
    for name, value in asdict(best).items() if best is not None else ():
        if value is not None:
            trial.set_user_attr(name, value)
    if stopped == "pruned":
        raise optuna.TrialPruned
    if code:
        reason = trials.reason_of(code, log_file)
        untrained = not any("wer" in t.user_attrs for t in finished_trials(study))
        if code == trials.CONFIGURATION and untrained:  # no fault of these settings
            enqueue_again(study, trial)
            raise UserError(f"the run file's own settings are refused: {reason}\n{log_file} has all of it.")
    elif best is None:
        reason = "no evaluation of data.validation" + (" and of the guard" if search.limit is not None else "")
    elif stopped == trials.DIVERGED or trials.has_diverged(best.wer, base_wer):
        reason = f"{trials.DIVERGED}: WER {best.wer:.3f}, of the base model {base_wer:.3f}"
    else:
        return best.wer
    return _bad(trial, study, search, reason)


def _bad(trial: optuna.Trial, study: optuna.Study, search: Search, reason: str) -> float:
    """Note why a trial is bad; return the worst WER there is."""
    trial.set_user_attr("reason", reason)
    if search.limit is not None:
        trial.set_user_attr("excess", 1.0)
    worst = [t.value for t in finished_trials(study) if t.value is not None]
    return max([1.0, study.user_attrs.get("base_wer", 0.0), *worst])


def describe(settings: Settings) -> str:
    """Return settings in one line."""
    return " ".join(f"{key}={value}" for key, value in settings.items()) or "the run file's own values"


def outcome_of(trial: FrozenTrial) -> str:
    """Return in a few words what came of a trial."""
    found = trial.user_attrs
    if "reason" in found:
        return f"bad: {found['reason']}"
    if trial.state == TrialState.PRUNED:
        return "stopped early: worse than most at the same point"
    guard = f", guard {found['guard']:.4f}" if "guard" in found else ""
    return f"WER {found['wer']:.4f}{guard}{' (over the limit)' if excess_of(trial) else ''}"


def _log_trial(study: optuna.Study, search: Search) -> None:
    """Log the outcome of the last trial of this search, the best one so far, and how long the rest may take."""
    found = finished_trials(study)
    own = [t for t in found if t.user_attrs.get("owner") == search.owner]  # by number
    if not own:
        return
    seconds, last, best = [t.user_attrs.get("seconds", 0.0) for t in own], own[-1], best_of(found)
    so_far = f"; best so far {best.user_attrs['wer']:.4f} (trial {best.number})" if best is not None else ""
    to_go, left, rest = _trials_left(study, search), max(_seconds_left(search), 0.0), ""
    if to_go is not None:
        left, rest = min(left, to_go * sum(seconds) / len(seconds)), f"{to_go} to go, "
    rest = f"; {rest}about {duration(left)} left" if left else ""
    log.info("trial %d: %s, in %s%s%s", last.number, outcome_of(last), duration(seconds[-1]), so_far, rest)


def _keep_the_best_model(study: optuna.Study, search: Search) -> None:
    """Remove models, pages and checkpoints of all trials but the best."""
    best = best_of(finished_trials(study))
    for folder in search.folder.glob("trial-*/"):
        is_best = best is not None and folder == search.folder_of(best.number)
        trials.remove_large_files(folder, ("model.nemo", "report.html") if is_best else ())
