"""The study: trials one after the other, resumable, and shared where several machines use one storage."""

import contextlib
import fcntl
import json
import logging
import math
import shutil
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.engine import make_url
from sqlalchemy.exc import SQLAlchemyError

from finetune.config.redaction import without_secrets
from finetune.config.schema import RunConfig, option_of, schema_fields
from finetune.durable_files import write_json
from finetune.errors import UserError
from finetune.security.safe_text import one_line
from finetune.security.secrets import clean_text, clean_urls, known_secrets
from finetune.tools.report.formats import duration
from finetune.tools.report.read import read_mapping
from finetune.tools.search import trials
from finetune.tools.search.space import Parameter, Settings, settings_of

log = logging.getLogger(__name__)

EVALUATIONS = 4
"""Evaluations of a trial, by which bad ones are noticed early; more where the run file has more."""
STARTUP = 5
"""Trials that are drawn at random, and as many that have to be done before one is stopped early."""
GUESSES = (3.0, 1 / 3)
"""Factors of the learning rate that are tried first: it matters most, and its right size is rarely known."""
HEARTBEAT, GRACE = 60, 300  # seconds
UNIMPORTANT_GROUPS = ("checkpoints", "logging", "ranks")
UNIMPORTANT = {
    *("data.test", "training.dataloader_num_workers", "training.dataloader_prefetch_factor"),
    *("training.dataloader_pin_memory", "training.num_threads"),
}
"""Settings that two versions of a run file may differ in without being another search."""
FINISHED = (TrialState.COMPLETE, TrialState.PRUNED)


@dataclass
class Search:
    """What is searched, and how.

    Attributes:
        config: of the run file, strategies and `key=value`.
        run_file: as the user named it.
        strategies, overrides: the command line's.
        folder: of everything that the search leaves.
        parameters: the space.
        steps: of each trial; None: as the run file has them.
        trials: finished trials at which the search ends; None: no end but that of `minutes`.
        minutes: after which no trial is started.
        storage: URL of a database; None: study.db in the folder.
        name: of the study; None: made of the settings.
        training: words that start a training.
    """

    config: RunConfig
    run_file: Path
    strategies: list[str]
    overrides: list[str]
    folder: Path
    parameters: list[Parameter]
    steps: int | None
    trials: int | None
    minutes: float | None
    storage: str | None = None
    name: str | None = None
    training: tuple[str, ...] = trials.TRAIN
    owner: str = ""
    began: float = field(default_factory=time.monotonic)

    @property
    def own_values(self) -> dict[str, Any]:
        return {p.name: p.own for p in self.parameters}

    @property
    def limit(self) -> str | float | None:
        """data.guard_limit, where the schema has it and the run file sets it."""
        return getattr(self.config.data, "guard_limit", None)

    def folder_of(self, number: int) -> Path:
        return self.folder / f"trial-{number:04d}"


def settings_that_matter(search: Search) -> dict[str, Any]:
    """Return what makes two searches the same: settings without secrets, strategies, steps and space."""
    values, _ = without_secrets(search.config)
    found: dict[str, Any] = {
        f"{section}.{name}": value for section, inside in values.items() for name, value in inside.items()
    }
    for key, schema_field in schema_fields().items():
        if key in UNIMPORTANT or option_of(schema_field).group in UNIMPORTANT_GROUPS:
            del found[key]
    found |= {"--strategy": search.strategies, "--steps": search.steps}
    found |= {f"--space {p.name}": p.describe() for p in search.parameters}
    return json.loads(json.dumps(found, default=str))


def check_same(before: dict[str, Any], now: dict[str, Any], where: str) -> None:
    """Refuse to go on with a study of other settings.

    Raises:
        UserError: names the keys that differ.
    """
    nothing = object()
    differ = [key for key in {**before, **now} if before.get(key, nothing) != now.get(key, nothing)]
    if differ:
        listed = "\n".join(f"  {key}: {_value(before, key)} there, {_value(now, key)} now" for key in differ[:12])
        more = f"\n  and {len(differ) - 12} more" if len(differ) > 12 else ""
        raise UserError(
            f"{where} is of another version of the run file. These differ:\n{listed}{more}\nTo go on with it, give "
            "the run file, strategies, --steps and --space that it was begun with; else name another --output (and "
            "another --study)."
        )


def _value(settings: dict[str, Any], key: str) -> str:
    return one_line(json.dumps(settings[key], ensure_ascii=False))[:120] if key in settings else "nothing"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make the folder and hold it for this search alone.

    Raises:
        UserError: it cannot be written, or another search uses it.
    """
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((folder / ".lock").open("w"))
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"--output: {folder} is in use by another search. Wait, or name another folder.") from None
        except OSError as error:
            raise UserError(f"--output: {folder} cannot be written: {error.strerror}.") from error
        yield


def open_study(search: Search) -> optuna.Study:
    """Open the study, or begin it; trials of this folder that a kill cut short are put in the queue again.

    Raises:
        UserError: the storage cannot be used, or the study is of another version of the run file.
    """
    settings = settings_that_matter(search)
    record = search.folder / "study.json"
    kept = read_mapping(record)
    if kept:
        check_same(kept.get("settings") or {}, settings, f"--output: the search in {search.folder}")
        if search.name not in (None, kept.get("name")):
            raise UserError(f"--output: {search.folder} holds the study {kept.get('name')}. Name another folder.")
    digest = blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=6).hexdigest()
    search.name = search.name or kept.get("name") or f"search-{digest}"
    search.owner = kept.get("owner") or uuid.uuid4().hex
    url = search.storage or f"sqlite:///{(search.folder / 'study.db').resolve()}"
    with _storage_errors(url):
        storage = optuna.storages.RDBStorage(
            url,
            engine_kwargs={"connect_args": {"timeout": 60}} if url.startswith("sqlite") else None,
            heartbeat_interval=HEARTBEAT,
            grace_period=GRACE,
            heartbeat_stale_trial_callback=enqueue_again,
        )
        study = optuna.create_study(
            storage=storage,
            study_name=search.name,
            pruner=optuna.pruners.MedianPruner(n_startup_trials=STARTUP, n_min_trials=3),
            load_if_exists=True,
        )
        if "settings" in study.user_attrs:
            check_same(study.user_attrs["settings"], settings, f"the study {search.name}")
        study.sampler = optuna.samplers.TPESampler(
            n_startup_trials=STARTUP,
            multivariate=True,
            seed=search.config.training.seed + len(study.trials),  # machines that share a study draw differently
            constraints_func=None if search.limit is None else (lambda t: (t.user_attrs.get("excess", 0.0),)),
        )
        write_json(record, {"name": search.name, "owner": search.owner, "settings": settings})
        if "settings" not in study.user_attrs:
            study.set_user_attr("settings", settings)
            _enqueue_first(study, search)
        for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if trial.user_attrs.get("owner") == search.owner:  # the folder is locked, so nothing runs it
                study.tell(trial.number, state=TrialState.FAIL)
                enqueue_again(study, trial)
                shutil.rmtree(search.folder_of(trial.number), ignore_errors=True)
                log.info("trial %d was cut short; its settings are tried again", trial.number)
    return study


@contextlib.contextmanager
def _storage_errors(url: str) -> Iterator[None]:
    try:
        yield
    except (SQLAlchemyError, ImportError, RuntimeError, ValueError, optuna.exceptions.OptunaError) as error:
        hidden = set()
        with contextlib.suppress(SQLAlchemyError, ValueError):
            parsed = make_url(url)
            hidden = known_secrets(dict(parsed.query), {"password": parsed.password or ""}, environment={})
            hidden |= {str(parsed.password)} if parsed.password else set()
        text = one_line(clean_text(str(error).splitlines()[0], hidden, personal=False))
        raise UserError(f"--storage: {clean_urls(url)} cannot be used: {text}", exit_code=1) from None


def _enqueue_first(study: optuna.Study, search: Search) -> None:
    """Queue the run file's own values, and other learning rates."""
    own = search.own_values
    study.enqueue_trial(own, user_attrs={"default": True})
    rate = next((p for p in search.parameters if p.name == "training.learning_rate" and not p.choices), None)
    for factor in GUESSES if rate is not None else ():
        assert rate is not None
        assert isinstance(rate.own, float | int)
        study.enqueue_trial({**own, rate.name: min(max(rate.own * factor, rate.low), rate.high)})


def enqueue_again(study: optuna.Study, trial: FrozenTrial) -> None:
    """Queue the settings of a trial that came to no end."""
    study.enqueue_trial(trial.params, user_attrs={"default": True} if trial.user_attrs.get("default") else None)


# ---- trials -----------------------------------------------------------------------------------------------------


def finished_trials(study: optuna.Study) -> list[FrozenTrial]:
    """Return trials with an outcome, bad and stopped ones included."""
    return study.get_trials(deepcopy=False, states=FINISHED)


def best_of(found: list[FrozenTrial]) -> FrozenTrial | None:
    """Return the best trial within data.guard_limit, else the one that came nearest to it."""
    good = [t for t in found if t.state == TrialState.COMPLETE and "reason" not in t.user_attrs]

    def order(trial: FrozenTrial) -> tuple[float, float, int]:
        return max(trial.user_attrs.get("excess", 0.0), 0.0), trial.value or 0.0, trial.number

    return min(good, key=order, default=None)


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
        while _trials_left(study, search) != 0 and _seconds_left(search) > 0:
            study.optimize(lambda trial: _run_trial(trial, study, search, [*words, *search.overrides]), n_trials=1)
            _keep_the_best_model(study, search)
            _log_trial(study, search)
    finally:
        copy.unlink(missing_ok=True)


def _trials_left(study: optuna.Study, search: Search) -> int | None:
    """Return how many trials are still to be started here; None: as many as the time allows."""
    if search.trials is None:
        return None
    running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
    elsewhere = sum(t.user_attrs.get("owner") not in (None, search.owner) for t in running)
    return max(search.trials - len(finished_trials(study)) - elsewhere, 0)


def _seconds_left(search: Search) -> float:
    return math.inf if search.minutes is None else 60 * search.minutes - (time.monotonic() - search.began)


def trial_settings(search: Search, number: int, chosen: Settings, is_default: bool) -> Settings:
    """Return all that a trial sets: what was chosen, and what makes its run short, quiet and comparable."""
    t = search.config.training
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
        "data.test": None,
        # The base model is the same in all trials; where a guard is, each run judges by it.
        "training.eval_on_start": is_default or bool(search.config.data.guard),
    }
    if steps > 0:
        often = -(-steps // EVALUATIONS)
        fixed |= {"training.max_steps": steps, "training.eval_steps": min(t.eval_steps or often, often)}
    return {**chosen, **fixed}


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
            if trial.should_prune():
                stopped = "pruned"
            elif 2 * step >= steps and trials.has_diverged(best.wer, found.base_wer or base_wer):
                stopped = trials.DIVERGED
        return bool(stopped)

    words = trials.training_words(search.training, run, settings)
    log_file = folder.with_suffix(".log")
    try:
        ended = trials.run_training(words, log_file, watch)
    except KeyboardInterrupt:
        study.enqueue_trial(trial.params, user_attrs={"default": True} if is_default else None)
        shutil.rmtree(folder, ignore_errors=True)
        raise
    found = trials.read_evaluations(folder, search.limit)
    if found.base_wer is not None and base_wer is None:
        base_wer = found.base_wer
        study.set_user_attr("base_wer", base_wer)
        study.set_user_attr("base_guard", found.base_guard)
    best, reason = found.best, None
    trial.set_user_attr("seconds", round(ended.seconds, 1))
    if best is not None:
        seen = {"wer": best.wer, "guard": best.guard, "excess": best.excess, "step": best.step}
        for name, value in seen.items():
            if value is not None:
                trial.set_user_attr(name, value)
    if stopped == "pruned":
        raise optuna.TrialPruned
    if ended.code:
        reason = trials.reason_of(ended.code, log_file)
        if ended.code == trials.CONFIGURATION and is_default:
            raise UserError(f"the run file's own settings are refused: {reason}\n{log_file} has all of it.")
    elif best is None:
        reason = "no evaluation of data.validation" + (" and of the guard" if search.limit is not None else "")
    elif stopped == trials.DIVERGED or trials.has_diverged(best.wer, base_wer):
        reason = f"{trials.DIVERGED}: WER {best.wer:.3f}, of the base model {base_wer:.3f}"
    if reason is None and best is not None:
        return best.wer
    trial.set_user_attr("reason", reason)
    if search.limit is not None:
        trial.set_user_attr("excess", 1.0)
    return max([1.0, base_wer or 0.0, *(t.value for t in finished_trials(study) if t.value is not None)])


def describe(settings: Settings) -> str:
    """Return settings in one line."""
    return " ".join(f"{key}={value}" for key, value in settings.items()) or "the run file's own values"


def outcome_of(trial: FrozenTrial) -> str:
    """Return in a few words what came of a trial."""
    if "reason" in trial.user_attrs:
        return f"bad: {trial.user_attrs['reason']}"
    if trial.state == TrialState.PRUNED:
        return "stopped early: worse than most at the same point"
    text = f"WER {trial.user_attrs['wer']:.4f}"
    if "guard" in trial.user_attrs:
        text += f", guard {trial.user_attrs['guard']:.4f}"
    return text + (" (over the limit)" if trial.user_attrs.get("excess", 0.0) > 0 else "")


def _log_trial(study: optuna.Study, search: Search) -> None:
    """Log the outcome of the last trial of this search, the best one so far, and how long the rest may take."""
    found = finished_trials(study)
    own = [t for t in found if t.user_attrs.get("owner") == search.owner]
    if not own:
        return
    last, best = max(own, key=lambda t: t.number), best_of(found)
    seconds = [t.user_attrs.get("seconds", 0.0) for t in own]
    so_far = f"; best so far {best.user_attrs['wer']:.4f} (trial {best.number})" if best is not None else ""
    to_go, left = _trials_left(study, search), max(_seconds_left(search), 0.0)
    rest = ""
    if to_go is not None:
        left = min(left, to_go * sum(seconds) / len(seconds))
        rest = f"{to_go} to go, "
    rest = f"; {rest}about {duration(left)} left" if left else ""
    took = duration(seconds[own.index(last)])
    log.info("trial %d: %s, in %s%s%s", last.number, outcome_of(last), took, so_far, rest)


def _keep_the_best_model(study: optuna.Study, search: Search) -> None:
    """Remove models, pages and checkpoints of all trials but the best."""
    best = best_of(finished_trials(study))
    for folder in search.folder.glob("trial-*/"):
        is_best = best is not None and folder == search.folder_of(best.number)
        trials.remove_large_files(folder, ("model.nemo", "report.html") if is_best else ())
