"""Rounds of labelling and training, as a plan of stages that goes on where it was cut short.

DIR/rounds.json          the settings, and the stages that are done
DIR/round-N/             a labelling
DIR/round-N/run/         the training on its labels, for the next round
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune import signals
from finetune.config.load import load_config
from finetune.durable_files import sha256_of, write_json, write_text
from finetune.errors import UserError
from finetune.tools.command_line import writing
from finetune.tools.pseudo_labels.audio import ROUNDS
from finetune.tools.pseudo_labels.labels import LabelSettings, check_output, label
from finetune.tools.search.trials import POLL_SECONDS, TRAIN, reason_of, setting_words, start_training

if TYPE_CHECKING:
    from collections.abc import Callable

    from finetune.config.schema import RunConfig
    from finetune.tools.jobs.engines import EngineSettings
    from finetune.tools.pseudo_labels.outputs import Summary

log = logging.getLogger(__name__)

RESULTS = ("manifest.jsonl", "left_out.jsonl", "summary.json")
NOT_THE_RESULT = ("device", "batch_size", "max_failed")


@dataclass(frozen=True)
class Rounds:
    """What is done in turns."""

    model: str
    settings: LabelSettings
    config_file: Path
    strategies: list[str]
    overrides: list[str]
    rounds: int
    weight: float | None = None
    """Of the pseudo-labelled clips, in a mixture with weights."""
    training: tuple[str, ...] = TRAIN
    """Words that start a training."""
    labelling: Callable[[str, LabelSettings, EngineSettings, Path], Summary | None] = label


def run_rounds(plan: Rounds, engine: EngineSettings, folder: Path) -> Summary:
    """Label, train, label again with the trained model, ...; return the summary of the last labelling, whose files
    are also in `folder`.

    Raises:
        UserError: a labelling or a training fails, the folder holds other rounds, or a signal came (exit code 75).
        KeyboardInterrupt: Ctrl-C; the same line goes on.
    """
    config, _ = load_config(plan.config_file, plan.strategies, plan.overrides)
    sources = training_sources(plan, config)
    state = _open_state(plan, folder)
    done: dict[str, Any] = state["stages"]
    model, summary = plan.model, {}
    for number in range(1, plan.rounds + 1):
        own = folder / f"round-{number}"
        name = f"label {number}"
        if name not in done:
            log.info("round %d of %d: label with %s", number, plan.rounds, model)
            found = plan.labelling(model, plan.settings, engine, own)
            assert found is not None  # an array of tasks takes no rounds
            done[name] = {k: found[k] for k in ("kept_clips", "kept_hours", "share", "expected_wer")}
            _save_state(folder, state)
        summary = json.loads((own / "summary.json").read_text(encoding="utf-8"))
        if not summary["kept_clips"]:
            raise UserError(f"round {number} keeps no clip: {own / 'left_out.jsonl'} has the reasons.", exit_code=1)
        if number == plan.rounds:
            break
        run, name = own / "run", f"train {number}"
        if name not in done:
            log.info("round %d of %d: train on its labels; %s has the log", number, plan.rounds, own / "train.log")
            train(_training_words(plan, [*sources, _labels(own, plan.weight)], run), own / "train.log")
            done[name] = _of_training(run)
            _save_state(folder, state)
        model = str(run)
    with writing("--output", folder):
        for name in RESULTS:
            write_text(folder / name, (folder / f"round-{plan.rounds}" / name).read_text(encoding="utf-8"))
    return summary


def _save_state(folder: Path, state: dict[str, Any]) -> None:
    with writing("--output", folder):
        write_json(folder / ROUNDS, state)


def training_sources(plan: Rounds, config: RunConfig) -> list[dict[str, Any]]:
    """Return the run file's own sources of `data.train`, as mappings.

    Raises:
        UserError: the run file cannot be used for rounds.
    """
    listed = config.data.train if isinstance(config.data.train, list) else [config.data.train]
    sources = [{"path": entry} if isinstance(entry, str) else dict(entry) for entry in listed]
    if config.training.stages:
        raise UserError("--config: rounds take one run; the run file has training.stages.")
    weighted = any("weight" in source for source in sources)
    if weighted and plan.weight is None:
        raise UserError("--config: data.train has weights; give the pseudo-labelled clips one with --weight.")
    if not weighted and plan.weight is not None:
        raise UserError("--weight has no effect: the sources of data.train have no weights.")
    split = plan.settings.calibrate_split or "validation"
    for source in sources:
        same = any(os.path.realpath(str(source["path"])) == os.path.realpath(c) for c in plan.settings.calibrate)
        if same and (os.path.isfile(str(source["path"])) or source.get("split", "train") == split):
            raise UserError(
                f"--calibrate: {source['path']} is trained on by the run file, so that the model is surer of it than "
                "of other audio. Calibrate on clips that no training sees."
            )
    return sources


def _labels(folder: Path, weight: float | None) -> dict[str, Any]:
    source: dict[str, Any] = {"path": str((folder / "manifest.jsonl").absolute())}
    return source if weight is None else {**source, "weight": weight}


def _training_words(plan: Rounds, sources: list[dict[str, Any]], run: Path) -> list[str]:
    words = [*plan.training, "--config", str(plan.config_file)]
    words += [word for name in plan.strategies for word in ("--strategy", name)]
    words += plan.overrides
    ours = {"data.train": sources, "training.output_dir": str(run), "training.resume_from_checkpoint": True}
    return words + setting_words({**ours, **({"data.keep_empty_text": True} if plan.settings.keep_silence else {})})


def _of_training(run: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        found = json.loads((run / "summary.json").read_text(encoding="utf-8"))
        return {key: found[key] for key in ("best_step", "best_validation_wer") if key in found}
    return {}


def _open_state(plan: Rounds, folder: Path) -> dict[str, Any]:
    """Read rounds.json, or begin it.

    Raises:
        UserError: it is of other settings.
    """
    settings = {k: v for k, v in asdict(plan.settings).items() if k not in NOT_THE_RESULT}
    wanted = {
        "model": plan.model,
        **settings,
        "config": sha256_of(plan.config_file),
        "strategy": plan.strategies,
        "overrides": plan.overrides,
        "weight": plan.weight,
    }
    wanted = json.loads(json.dumps(wanted))
    file = folder / ROUNDS
    check_output(folder, file.name)
    if not file.is_file():
        state = {"settings": wanted, "stages": {}}
        with writing("--output", folder):
            folder.mkdir(parents=True, exist_ok=True)
            write_json(file, state)
        return state
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
        found = dict(state["settings"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"--output: {file} cannot be read: {error}", exit_code=1) from error
    differing = [f"{k} was {found.get(k)!r}, is {v!r}" for k, v in wanted.items() if found.get(k) != v]
    if differing:
        raise UserError(f"--output: {folder} holds other rounds: {'; '.join(differing)}. Name another directory.")
    return state


def train(words: list[str], log_file: Path) -> None:
    """Run a training to its end; a signal to this process lets it save a checkpoint first.

    Raises:
        UserError: it fails, or a signal came (exit code 75).
        KeyboardInterrupt: Ctrl-C.
    """
    with log_file.open("ab") as output, signals.listening(), signals.saving_first():
        process = start_training(words, output)
        asked = None
        try:
            while process.poll() is None:
                if asked is None and (asked := signals.requested()) is not None:
                    os.killpg(process.pid, signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(POLL_SECONDS)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    again = "the same line goes on there"
    if asked == "SIGINT":
        raise KeyboardInterrupt(f"the training saved a checkpoint; {again}")
    if asked is not None:
        raise UserError(f"{asked} came: the training saved a checkpoint; {again}.", signals.EXIT_CODE)
    if process.returncode:
        raise UserError(
            f"the training failed: {reason_of(process.returncode, log_file)}\n{log_file} has all of it.", 1
        )
