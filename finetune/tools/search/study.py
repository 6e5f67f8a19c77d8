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
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.engine import make_url
from sqlalchemy.exc import SQLAlchemyError

from finetune.config.guard_limit import GuardLimit, parse_guard_limit
from finetune.config.redaction import without_secrets
from finetune.config.schema import RunConfig, option_of, schema_fields
from finetune.durable_files import write_json
from finetune.errors import UserError
from finetune.security.safe_text import one_line
from finetune.security.secrets import clean_text, clean_urls, known_secrets
from finetune.tools.report.read import read_mapping
from finetune.tools.search.space import Parameter
from finetune.tools.search.trials import TRAIN

log = logging.getLogger(__name__)

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
        config: of the run file, strategies and `key=value`; what goes with the length of a run is that of a trial.
        folder: of everything that the search leaves.
        parameters: the space.
        steps: of each trial; None: as the run file has them.
        trials: finished trials at which the search ends; None: no end but that of `minutes`.
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
    training: tuple[str, ...] = TRAIN
    owner: str = ""
    began: float = field(default_factory=time.monotonic)

    @property
    def own_values(self) -> dict[str, Any]:
        return {p.name: p.own for p in self.parameters}

    @cached_property
    def limit(self) -> GuardLimit | None:
        text = self.config.data.guard_limit
        return None if text is None else parse_guard_limit(text)

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
    was, is_now = ({key: one_line(json.dumps(v, ensure_ascii=False)) for key, v in s.items()} for s in (before, now))
    differ = [key for key in was | is_now if was.get(key) != is_now.get(key)]
    if differ:
        lines = (f"{was.get(key, 'nothing')[:120]} there, {is_now.get(key, 'nothing')[:120]} now" for key in differ)
        listed = "\n".join(f"  {key}: {line}" for key, line in zip(differ[:12], lines, strict=False))
        more = f"\n  and {len(differ) - 12} more" if len(differ) > 12 else ""
        raise UserError(
            f"{where} is of another version of the run file. These differ:\n{listed}{more}\nTo go on with it, give "
            "the run file, strategies, --steps and --space that it was begun with; else name another --output (and "
            "another --study)."
        )


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
            heartbeat_stale_trial_callback=_cut_short,
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
            constraints_func=None if search.limit is None else (lambda t: (excess_of(t),)),
        )
        write_json(record, {"name": search.name, "owner": search.owner, "settings": settings})
        is_new = "settings" not in study.user_attrs
        if is_new:
            study.set_user_attr("settings", settings)
        for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if trial.user_attrs.get("owner") == search.owner:  # the folder is locked, so nothing runs it
                study.tell(trial.number, state=TrialState.FAIL)
                _cut_short(study, trial)
                shutil.rmtree(search.folder_of(trial.number), ignore_errors=True)
        there = study.get_trials(deepcopy=False, states=(*FINISHED, TrialState.WAITING, TrialState.RUNNING))
        if not any(trial.user_attrs.get("default") for trial in there):  # none yet, or it was refused, or failed
            study.enqueue_trial(search.own_values, user_attrs={"default": True})
        rate = next((p for p in search.parameters if p.name == "training.learning_rate" and not p.choices), None)
        for factor in GUESSES if is_new and rate is not None else ():
            assert rate is not None
            assert isinstance(rate.own, float | int)
            study.enqueue_trial(search.own_values | {rate.name: min(max(rate.own * factor, rate.low), rate.high)})
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


def enqueue_again(study: optuna.Study, trial: FrozenTrial | optuna.Trial) -> None:
    """Queue the settings of a trial that came to no end."""
    study.enqueue_trial(trial.params, user_attrs={"default": True} if trial.user_attrs.get("default") else None)


def _cut_short(study: optuna.Study, trial: FrozenTrial) -> None:
    enqueue_again(study, trial)
    log.info("trial %d was cut short; its settings are tried again", trial.number)


def finished_trials(study: optuna.Study) -> list[FrozenTrial]:
    """Return trials with an outcome, bad and stopped ones included."""
    return study.get_trials(deepcopy=False, states=FINISHED)


def is_good(trial: FrozenTrial) -> bool:
    """Return whether a trial has a WER of its own: it came to its end and is not bad."""
    return trial.state == TrialState.COMPLETE and "reason" not in trial.user_attrs


def excess_of(trial: FrozenTrial) -> float:
    """Return how far a trial's guard WER is above what data.guard_limit allows."""
    return max(trial.user_attrs.get("excess", 0.0), 0.0)


def rank_of(trial: FrozenTrial) -> tuple[bool, float, float, int]:
    """Return what trials are ordered by: good ones within the limit first, then by WER."""
    return not is_good(trial), excess_of(trial), trial.user_attrs.get("wer", math.inf), trial.number


def best_of(found: list[FrozenTrial]) -> FrozenTrial | None:
    """Return the best trial within data.guard_limit, else the one that came nearest to it."""
    return min(filter(is_good, found), key=rank_of, default=None)
