"""Judging the model during a run, and keeping the best one by WER on validation: of the weights as they are trained (raw), of their
moving average (ema), and at the end of the mean of some evaluated states (average)."""

import json
import logging
import shutil
from typing import Any

import torch

from finetune.callbacks import averaging, trackers
from finetune.distributed import broadcast
from finetune.durable_files import put_in_place, sha256_of, write_json
from finetune.errors import UserError
from finetune.models.nemo import load_weights, write_nemo
from finetune.strategies.lora_adapters import write_adapter
from finetune.tools.report.page import write_report
from finetune.training import verdict
from finetune.training.checkpoints import CANNOT_WRITE
from finetune.training.evaluation import average_batchnorm, evaluation_rows, judge_split, log_board, write_mistakes
from finetune.training.outputs import check_best, read_best

log = logging.getLogger(__name__)


def evaluate(trainer: Any, splits: tuple[str, ...]) -> dict[str, Any]:
    """Evaluates the splits that the run file names, and the moving average on validation; keeps the best model by validation WER."""
    trainer.step_guard.require_finite()
    average_batchnorm(trainer.accelerator, trainer.model, trainer.config)
    p, t = trainer.progress, trainer.config.training
    with trainer.whole_model() as model:
        boards = judge(trainer, model, splits, p.step, {})
        if "validation" in boards:
            p.last_evaluated = p.step
            offer(trainer, model, boards["validation"], "raw")
            if t.average_checkpoints and p.step and boards["validation"].total.words:
                _keep_state(trainer, model, boards["validation"].total.rates()["wer"])
            if trainer.ema is not None and p.step:
                trainer.ema.mean_over_processes(trainer.accelerator.num_processes)
                with trainer.ema.inside(model):
                    board = judge(trainer, model, ("validation",), p.step, {"weights": "ema"})["validation"]
                    offer(trainer, model, board, "ema")
    if trainer.accelerator.is_main_process:
        write_report(trainer.output_dir)
    return boards


def offer(trainer: Any, model: Any, board: Any, weights: str) -> bool:
    """Keeps the model where its validation WER is the best so far; returns whether it is.

    Args:
        board: counts on validation.
        weights: raw, ema or average.
    """
    p = trainer.progress
    if not board.total.words:
        return False
    wer = board.total.rates()["wer"]
    if p.best_wer is not None and wer >= p.best_wer:
        return False
    p.best_wer, p.best_step, p.best_weights = wer, p.step, weights
    trainer._keep(model)
    return True


def evaluate_best(trainer: Any, splits: tuple[str, ...]) -> dict[str, Any]:
    """Evaluates the chosen model, read again from model.nemo where it is not the present one; its lines carry the best step."""
    p = trainer.progress
    with trainer.whole_model() as model:
        # The attempt at an average leaves other weights in the model.
        present = p.best_step == p.step and p.best_weights == "raw" and not trainer.config.training.average_checkpoints
        if (p.best_step is not None or trainer.config.training.average_checkpoints) and not present:
            _check_kept(trainer)
            load_weights(model, trainer.output_dir / "model.nemo")
        mark = {"model": "best"} if p.best_weights == "raw" else {"model": "best", "weights": p.best_weights}
        return judge(trainer, model, splits, p.step if p.best_step is None else p.best_step, mark)


def _check_kept(trainer: Any) -> None:
    """Raises UserError where model.nemo is not as it was written."""
    main = trainer.accelerator.is_main_process
    if broadcast(main and check_best(trainer.output_dir)[1]):
        raise UserError(
            f"{trainer.output_dir / 'model.nemo'} is damaged: it is not as it was written at step {trainer.progress.best_step} (its "
            "checksum differs). Start the same command again with training.resume_from_checkpoint=true: the best model is chosen anew.",
            exit_code=1,
        )


def try_average(trainer: Any) -> dict[str, Any] | None:
    """Averages the kept states, evaluates the mean, and takes it for model.nemo where it is better than the best single state.

    The model is left with the mean's weights, so this is for the end of a run.

    Returns:
        What summary.json says of it; None where fewer than two states were kept.
    """
    p, t, folder = trainer.progress, trainer.config.training, trainer.output_dir
    if p.best_weights == "average" and p.best_step == p.step:
        if (folder / "summary.json").is_file():  # a finished run that was started again
            return json.loads((folder / "summary.json").read_text(encoding="utf-8")).get("average_checkpoints")
        # The run died after the mean was taken: it is judged once more against the single model before it.
        single = (broadcast(read_best(folder)) or {}).get("previous") or {}
        p.best_step, p.best_wer = single.get("step"), single.get("validation_wer")
        p.best_weights = single.get("weights", "raw")
    if trainer.accelerator.is_main_process:  # the settings may be others than when the states were kept
        averaging.prune(folder, t.average_checkpoints, t.average_by)
    states = broadcast([(s.step, s.wer, s.path) for s in averaging.kept_states(trainer.output_dir)])
    if len(states) < 2:
        log.info(
            "training.average_checkpoints: %d state(s) of the weights were kept, and a mean takes two", len(states)
        )
        return None
    steps, before, weights = [step for step, _, _ in states], p.best_wer, p.best_weights
    with trainer.whole_model() as model:
        averaging.put_in(model, averaging.mean_of([path for _, _, path in states]))
        board = judge(trainer, model, ("validation",), p.step, {"weights": "average"})["validation"]
        taken = offer(trainer, model, board, "average")
    wer = board.total.rates()["wer"]
    log.info(
        "mean of the weights of steps %s: WER %s on validation, the best single model's (%s) %s: the %s is model.nemo",
        ", ".join(map(str, steps)),
        _rate(wer),
        weights,
        _rate(before),
        "mean" if taken else "single model",
    )
    return {"steps": steps, "validation_wer": wer, "best_single_validation_wer": before, "taken": taken}


def _rate(wer: float | None) -> str:
    return "unknown" if wer is None else f"{wer:.4f}"


def judge(trainer: Any, model: Any, splits: tuple[str, ...], step: int, mark: dict[str, str]) -> dict[str, Any]:
    """Evaluates the splits that the run file names, and writes the lines, each with `mark`."""
    boards = {}
    for split in splits:
        if split in trainer.sources:
            board, heard = judge_split(
                trainer.accelerator, model, trainer.config, trainer.sources, split, trainer.intake, trainer.view
            )
            boards[split] = board
            weights = mark.get("weights")
            log_board(step, split if weights is None else f"{split} ({weights})", board)
            if trainer.accelerator.is_main_process:
                rows = evaluation_rows(step, split, board)
                trainer.evaluations.append(*({**row, **mark} for row in rows))
                if (
                    weights is None or "model" in mark
                ):  # the page shows mistakes of the model in training, then of the best
                    write_mistakes(trainer.output_dir, step, split, board, mark)
                _show(trainer, split, board, heard, mark)
    return boards


def _show(trainer: Any, split: str, board: Any, heard: list[Any], mark: dict[str, str]) -> None:
    """On the main process: trackers, view and watch. What is not the model in training is named as such."""
    p = trainer.progress
    whose = mark.get("model") or mark.get("weights")
    rate = trainer.model.preprocessor._sample_rate
    name = f"{whose}/{split}" if whose else split
    trackers.log_evaluation(trainer.accelerator, p.step, name, board, heard, rate, split not in trainer.heard)
    trainer.heard.add(split)
    if not whose:
        verdict.note(trainer, split, board)
    trainer.view.evaluated(p.step, split if whose in (None, "best") else f"{split} ({whose})", board)


def keep(trainer: Any, model: Any) -> None:
    """Writes a model as model.nemo, and its adapter beside it where there is one."""
    p, folder, problem = trainer.progress, trainer.output_dir, None
    trainer.step_guard.require_finite(model)
    if trainer.accelerator.is_main_process:
        try:
            (folder / "checkpoints").mkdir(exist_ok=True)
            aside = write_nemo(model, folder / "model.nemo")
            best = {"step": p.best_step, "validation_wer": p.best_wer, "weights": p.best_weights}
            best |= {"bytes": aside.stat().st_size, "sha256": sha256_of(aside)}
            # Of the one before, too: it is the one that lies there if the process dies before the next line but one.
            before = read_best(folder)
            earlier = before.pop("previous", None) if before is not None else None
            same = before is not None and (before["step"], before["weights"]) == (p.best_step, p.best_weights)
            best["previous"] = earlier if same else before
            write_json(folder / "checkpoints" / "best.json", best)
            put_in_place(aside, folder / "model.nemo")
            if getattr(model, "lora_base", None) is not None:
                write_adapter(model, folder / "adapter")
            else:  # an earlier one would not be that of this model
                shutil.rmtree(folder / "adapter", ignore_errors=True)
        except torch.OutOfMemoryError:
            raise
        except CANNOT_WRITE as error:
            problem = (
                f"{folder / 'model.nemo'}, the best model so far (step {p.best_step}), cannot be written: {error}. Make room or mend "
                "the disk, then start the same command again with training.resume_from_checkpoint=true: the evaluation is made again."
            )
            for remains in folder.glob(".model.nemo.tmp*"):
                remains.unlink(missing_ok=True)
    problem = broadcast(problem)
    if problem:
        raise UserError(problem, exit_code=1)


def _keep_state(trainer: Any, model: Any, wer: float) -> None:
    """Keeps the present weights for the average at the end."""
    t, problem = trainer.config.training, None
    if trainer.accelerator.is_main_process:
        state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        names = averaging.averaged_tensors(trainer.model)
        try:
            averaging.keep_state(trainer.output_dir, {n: state[n] for n in names}, trainer.progress.step, wer)
        except CANNOT_WRITE as error:
            problem = (
                f"the weights of step {trainer.progress.step}, kept for training.average_checkpoints, cannot be written: {error}. Make "
                "room or mend the disk, then start the same command again with training.resume_from_checkpoint=true."
            )
        averaging.prune(trainer.output_dir, t.average_checkpoints, t.average_by)
    problem = broadcast(problem)
    if problem:
        raise UserError(problem, exit_code=1)


def sizes(trainer: Any) -> dict[str, int | None]:
    """Bytes of model.nemo, and of the adapter beside it where there is one."""
    adapter, model = trainer.output_dir / "adapter", trainer.output_dir / "model.nemo"
    return {
        "model_bytes": model.stat().st_size if model.is_file() else None,
        "adapter_bytes": sum(file.stat().st_size for file in adapter.iterdir()) if adapter.is_dir() else None,
    }
