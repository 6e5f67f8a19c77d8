"""Evaluations during a run: all ranks decode their share, the counts are merged."""

import contextlib
import logging
from pathlib import Path
from typing import Any

import torch

from finetune import signals as stopping
from finetune.callbacks.trackers import SAMPLES_TO_HEAR, HeardClip, keep_clips
from finetune.data.batch import Batch
from finetune.durable_files import write_json
from finetune.evaluation.mistakes import Mistakes
from finetune.evaluation.recognise import batched_decoding_differs, score_stream
from finetune.evaluation.scores import WerAccumulator
from finetune.models.nemo import learning_batchnorms
from finetune.training.data import make_stream

log = logging.getLogger(__name__)


def evaluate_split(
    accelerator: Any, model: Any, config: Any, sources: list[Any], split: str, view: Any
) -> tuple[WerAccumulator, list[HeardClip]]:
    """WER of a split over all ranks, the merged result on each of them; and a few clips of this rank to listen to.

    Args:
        view: `finetune.callbacks.panel.View`, which shows how far it is.

    Raises:
        CutShort: on all ranks, where one of them was asked to stop.
    """
    stream = make_stream(accelerator, model, config, sources, training=False)
    clips = [s.clips for s in sources]
    limit = config.data.max_eval_samples
    total = sum(clips) if all(clips) else None
    if total is not None and limit >= 0:
        total = min(total, limit)
    heard: list[HeardClip] = []
    wanted = SAMPLES_TO_HEAR if accelerator.is_main_process and accelerator.trackers else 0
    wanted = min(wanted, config.training.sample_predictions)

    def on_batch(batch: Batch, hypotheses: list[str], board: WerAccumulator) -> None:
        if stopping.requested():
            raise stopping.CutShort
        if wanted:
            heard[:] = keep_clips(heard, batch, hypotheses, wanted)
        advance(board.total.clips, board.total.rates()["wer"])

    board = None
    share = None if total is None else -(-total // accelerator.num_processes)
    with contextlib.suppress(stopping.CutShort), view.evaluating(split, share) as advance:
        board = score_stream(
            model,
            stream,
            normalization=config.data.wer_normalization,
            description=f"evaluate {split}",
            keep_pairs=config.training.sample_predictions,
            keep_worst=config.training.report_clips,
            show_progress=False,
            on_batch=on_batch,
        )
    parts = [board]
    if accelerator.num_processes > 1:
        from accelerate.utils import gather_object

        parts = gather_object(parts)
    if any(part is None for part in parts):
        raise stopping.CutShort("a signal came in an evaluation; the last checkpoint counts")
    if len(parts) > 1:
        merged = WerAccumulator(board.normalization, board.keep_pairs)
        if board.mistakes is not None:
            merged.mistakes = Mistakes(board.mistakes.keep_clips, board.mistakes.sample_rate)
        for part in parts:
            merged.merge(part)
        board = merged
    return board, heard


def judge_split(
    accelerator: Any, model: Any, config: Any, sources: dict[str, list[Any]], split: str, intake: Any, view: Any
) -> tuple[WerAccumulator, list[HeardClip]]:
    """Counts of a split, with its bad clips in quarantine and said; and a few clips of this rank to listen to."""
    board, heard = evaluate_split(accelerator, model, config, sources[split], split, view)
    intake.write_quarantine(board.quarantined)
    bad, limit = len(board.quarantined), config.data.max_bad_fraction
    if bad > limit * (bad + board.total.clips):
        log.warning(
            "%d of %d clips of %s cannot be used, more than data.max_bad_fraction=%g: its WER speaks for the others only",
            bad,
            bad + board.total.clips,
            split,
            limit,
        )
    return board, heard


def check_decoding(accelerator: Any, model: Any, config: Any, sources: dict[str, list[Any]]) -> None:
    """Compares batched with single decoding on a few clips; a difference makes every WER doubtful."""
    split = next((s for s in ("validation", "test") if s in sources), None)
    if split is None or not accelerator.is_main_process:
        return
    stream = make_stream(accelerator, model, config, sources[split], training=False)
    stream.workers = 0
    batch = next((b for b in stream.batches() if b.ids), None)
    if batch is None:
        return
    differing = batched_decoding_differs(model, batch)
    if differing:
        clip_id, alone, batched = differing[0]
        log.warning(
            "batched decoding differs from single decoding on %d of 4 clips, such as %s: %r alone, %r in a batch",
            len(differing),
            clip_id,
            alone,
            batched,
        )
    else:
        log.info("batched and single decoding agree")


def average_batchnorm(accelerator: Any, model: Any, config: Any) -> None:
    """Under DDP each rank has its own running statistics; what is judged and saved are their means."""
    if accelerator.num_processes > 1:
        for module in learning_batchnorms(model):
            for statistics in (module.running_mean, module.running_var):
                torch.distributed.all_reduce(statistics)
                statistics /= accelerator.num_processes


def evaluation_rows(step: int, split: str, board: WerAccumulator) -> list[dict[str, Any]]:
    """Lines of evaluations.jsonl: the whole split (language null), then each language."""
    rows = [{"step": step, "split": split, "language": None, **board.total.rates()}]
    rows += [{"step": step, "split": split, "language": n, **c.rates()} for n, c in sorted(board.by_language.items())]
    return rows


def write_mistakes(folder: Path, step: int, split: str, board: WerAccumulator, mark: dict[str, str]) -> None:
    """Writes errors-SPLIT.json, over that of the evaluation before: confused words and the worst clips with their audio."""
    if board.mistakes is None:
        return
    path = folder / f"errors-{split}.json"
    try:
        write_json(path, {"step": step, "split": split, **mark, **board.mistakes.result()})
    except OSError as error:  # the page lacks these clips; no training ends for that
        log.warning("%s cannot be written: %s", path, error)


def log_board(step: int, split: str, board: WerAccumulator) -> None:
    """One line of rates, then the sample pairs."""
    rates = board.total.rates()
    if rates["wer"] is None:
        log.warning("evaluation of %s: no clip with words in it", split)
        return
    by_language = " ".join(
        f"{name} {counts.rates()['wer']:.3f}" for name, counts in sorted(board.by_language.items()) if counts.words
    )
    log.info(
        "step %d %s: WER %.3f CER %.3f (%s) on %d clips",
        step,
        split,
        rates["wer"],
        rates["cer"],
        by_language,
        rates["clips"],
    )
    if board.left_out:
        log.info("  %d clips of %s have no reference after normalisation and are left out", board.left_out, split)
    if board.normalization == "open_asr" and "unknown" in board.by_language:
        log.info("  %d clips of %s name no language: taken for English", board.by_language["unknown"].clips, split)
