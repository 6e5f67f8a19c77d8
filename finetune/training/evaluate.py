"""Evaluations during a run: all ranks decode their share, the counts are merged."""

import logging
from typing import Any

from finetune.evaluation.recognise import score_stream
from finetune.evaluation.scores import Scoreboard
from finetune.training.data import make_stream

log = logging.getLogger(__name__)


def evaluate_split(accelerator: Any, model: Any, config: Any, sources: list[Any], split: str) -> Scoreboard:
    """WER of a split over all ranks; every rank gets the merged result."""
    stream = make_stream(accelerator, model, config, sources, training=False)
    clips = [s.clips for s in sources]
    limit = config.data.max_eval_samples
    total = sum(clips) if all(clips) else None
    if total is not None and limit >= 0:
        total = min(total, limit)
    board = score_stream(
        model,
        stream,
        normalization=config.data.wer_normalization,
        description=f"evaluate {split}",
        total=None if total is None else -(-total // accelerator.num_processes),
        keep_pairs=config.training.sample_predictions,
        show_progress=accelerator.is_main_process,
    )
    if accelerator.num_processes > 1:
        from accelerate.utils import gather_object

        merged = Scoreboard(board.normalization, board.keep_pairs)
        for part in gather_object([board]):
            merged.merge(part)
        board = merged
    return board


def evaluation_rows(step: int, split: str, board: Scoreboard) -> list[dict[str, Any]]:
    """Lines of evaluations.jsonl: the whole split (language null), then each language."""
    rows = [{"step": step, "split": split, "language": None, **board.total.rates()}]
    rows += [{"step": step, "split": split, "language": n, **c.rates()} for n, c in sorted(board.by_language.items())]
    return rows


def log_board(step: int, split: str, board: Scoreboard) -> None:
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
