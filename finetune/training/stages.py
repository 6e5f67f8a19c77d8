"""A plan of stages: the same run on more and more of the data, each stage judged before the next one begins."""

import itertools
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from finetune.config.schema import RunConfig
from finetune.distributed import broadcast
from finetune.errors import UserError
from finetune.training.elastic_restart import is_same_launch, own_agent

log = logging.getLogger(__name__)

SECTIONS = ("model", "data", "training")
OWN_KEYS = ("max_samples", "seen")


@dataclass(frozen=True, eq=False)
class Stage:
    """One stage of a plan."""

    number: int
    """From 1 on."""
    folder: Path
    """Its training.output_dir."""
    settings: dict[str, Any]
    """What it sets over the run file, the strategies and the command line, in nested form."""

    @property
    def name(self) -> str:
        return f"stage {self.number}"


def stages_of(stages: list[Any], output_dir: Path) -> list[Stage]:
    """Return the stages of `training.stages`: each trains in a directory of its own and begins with the model of the
    one before.

    Raises:
        UserError: an entry that is no stage, or one with less data than the one before that is to skip what was seen.
    """
    found: list[Stage] = []
    limit_before = 0
    for number, entry in enumerate(stages, 1):
        key = f"training.stages, stage {number}"
        if not isinstance(entry, dict) or set(entry) - {*SECTIONS, *OWN_KEYS}:
            raise UserError(f"{key}: a mapping of {', '.join((*OWN_KEYS, *SECTIONS))} is expected, found {entry!r}.")
        settings = {name: dict(entry.get(name) or {}) for name in SECTIONS}
        folder = output_dir / f"stage-{number}"
        if "max_samples" in entry:
            settings["data"]["max_samples"] = entry["max_samples"]
        limit = settings["data"].get("max_samples", -1)
        seen = entry.get("seen", "repeat")
        if seen not in ("repeat", "skip"):
            raise UserError(f"{key}: seen is repeat or skip, found {seen!r}.")
        if seen == "skip":
            if limit_before < 0 or 0 <= limit <= limit_before:
                raise UserError(
                    f"{key}: nothing is left where the {limit_before} clips of the stage before are skipped. Set a "
                    "larger max_samples, or seen: repeat."
                )
            settings["data"]["skip_samples"] = limit_before
        if found:
            settings["model"].setdefault("name", str(found[-1].folder))
            settings["model"].setdefault("adapter", None)  # it belongs to the first stage's base model
        settings["training"]["output_dir"] = str(folder)
        found.append(Stage(number, folder, settings))
        limit_before = limit
    return found


def run_stages(
    stages: list[Stage], train: Callable[[Stage], None], *, resume: bool | str, margin: float, only: int | None = None
) -> None:
    """Train stage after stage. One that has been finished is not run again on resume.

    Args:
        resume: `training.resume_from_checkpoint`.
        margin: by how much WER may be worse than after the stage before.
        only: number of the one stage to run.

    Raises:
        UserError: WER got worse than the margin; a stage diverged, whether now or before; the stage before `only` has
            not been finished; or a checkpoint is named.
    """
    if not isinstance(resume, bool):
        raise UserError(
            "training.resume_from_checkpoint: a plan of stages goes on by itself with true. To continue from a "
            "checkpoint of one stage, remove the later ones and take true."
        )
    for stage in stages if only is None else [stage_numbered(stages, only)]:
        previous = stages[stage.number - 2] if stage.number > 1 else None
        before = broadcast(read_summary(previous.folder)) if previous else None
        if previous and before is None:
            raise UserError(f"--stage {stage.number}: {previous.name} has not been finished ({previous.folder}).")
        if previous:
            _check_diverged(previous, before)
        finished = broadcast(read_summary(stage.folder)) if resume else None
        _check_diverged(stage, finished)
        if finished is not None:
            log.info("%s of %d is finished: %s", stage.name, len(stages), stage.folder)
        else:
            log.info("%s of %d in %s", stage.name, len(stages), stage.folder)
            train(stage)
            set_aside(stages[stage.number :])
        check_progress(stage, broadcast(read_summary(stage.folder)) or {}, before, margin)


def _check_diverged(stage: Stage, done: dict[str, Any] | None) -> None:
    """Raise UserError where a stage ended since it diverged: nothing goes on from it."""
    if done is not None and done.get("diverged"):
        raise UserError(f"{stage.name} ({stage.folder}): {done['diverged']}", exit_code=1)


def was_restarted(stages: list[Stage]) -> bool:
    """Return whether the launcher that started this process has begun one of the stages already."""
    own = own_agent()
    return own is not None and any(is_same_launch(stage.folder, [own]) for stage in stages)


def stage_numbered(stages: list[Stage], number: int) -> Stage:
    """Return the stage of a number; UserError where there is none."""
    if not 1 <= number <= len(stages):
        raise UserError(f"--stage {number}: the plan has stages 1 to {len(stages)}.")
    return stages[number - 1]


def config_to_try(stage: Stage, config: RunConfig, first: RunConfig) -> RunConfig:
    """Return the configuration of a stage that is only tried: where the stage before has left no model yet, that of
    the plan's `first` configuration stands in."""
    before = stage.folder.parent / f"stage-{stage.number - 1}"
    if config.model.name == str(before) and not (before / "model.nemo").is_file():
        log.info("%s has left no model yet: %s takes its place", before, first.model.name)
        config.model.name = first.model.name
    return config


def set_aside(stages: list[Stage]) -> None:
    """Rename what later stages left: it came from an older model of the stage that has just been trained."""
    if torch.distributed.is_initialized() and torch.distributed.get_rank():
        return
    for stage in stages:
        if stage.folder.exists():
            names = (stage.folder.with_name(f"{stage.folder.name}.old-{n}") for n in itertools.count(1))
            aside = stage.folder.rename(next(name for name in names if not name.exists()))
            log.warning("%s came from an older model of the stage before: its folder is %s now", stage.name, aside)


def check_progress(stage: Stage, done: dict[str, Any], before: dict[str, Any] | None, margin: float) -> None:
    """Stop the plan where a stage made the model worse by more than the margin."""
    now, then = done.get("wer_after"), before.get("wer_after") if before else done.get("wer_before")
    if before and None not in (done.get("best_validation_wer"), before.get("best_validation_wer")):
        now, then = done["best_validation_wer"], before["best_validation_wer"]
    if now is None or then is None:
        log.warning("stage %d cannot be judged: data.validation or data.test is needed for that", stage.number)
        return
    log.info("%s: WER %.3f, %.3f before it", stage.name, now, then)
    if now > then + margin:
        raise UserError(
            f"stage {stage.number} made WER worse, {then:.3f} to {now:.3f}, more than "
            f"training.stage_margin={margin:g}: the plan stops. The model before it is that of "
            f"{'the base' if before is None else f'stage {stage.number - 1}'}.",
            exit_code=1,
        )


def read_summary(folder: Path) -> dict[str, Any] | None:
    """Return summary.json of a finished run; None where there is none."""
    file = folder / "summary.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
