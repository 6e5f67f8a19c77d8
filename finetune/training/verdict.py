"""What a run did to the error rates, and whether that is more than chance: each evaluation beside the base model's, clip by clip."""

import logging
from pathlib import Path
from typing import Any

from finetune.evaluation.significance import describe_difference, rate_interval
from finetune.evaluation.utterance_counts import UtteranceCounts, compare_evaluations

log = logging.getLogger(__name__)

LOST_ON_GUARD = (
    "Less forgetting: a lower training.learning_rate, fewer steps, or a share of the original domain's data in data.train (a second "
    "source, each with a weight)."
)


def _base_file(folder: Path, split: str) -> Path:
    return folder / f"base-{split}.npz"


def keep_base(folder: Path, split: str, board: Any) -> None:
    """Keeps the base model's counts by clip in the run's folder, where a run that is continued finds them."""
    board.utterance_counts.save(_base_file(folder, split))


def forget_base(folder: Path) -> None:
    """Removes what another run kept."""
    for path in folder.glob("base-*.npz"):
        path.unlink()


def note(trainer: Any, split: str, board: Any) -> None:
    """Of an evaluation of the model in training, on the main process: step 0 is kept as the base model's, later ones are watched."""
    p, wer = trainer.progress, board.total.rates()["wer"]
    if wer is None:
        return
    if p.step == 0:
        p.base_wer[split] = wer
        keep_base(trainer.output_dir, split, board)
        return
    change = against_base(trainer.output_dir, split, board) if split == "guard" else None
    trainer.watch.evaluated(p.step, split, wer, p.base_wer.get(split), change)


def against_base(folder: Path, split: str, board: Any) -> dict[str, Any] | None:
    """`finetune.evaluation.utterance_counts.compare_evaluations` of the base model (a) with an evaluation of the same split (b).

    None where the base model was not measured, or no clip with words is in both.
    """
    try:
        base = UtteranceCounts.load(_base_file(folder, split))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning("the base model's counts cannot be read, so that %s is not compared with it: %s", split, error)
        return None
    result = compare_evaluations(base, board.utterance_counts)
    return result if result["words"] else None


def significance(folder: Path, boards: dict[str, Any], judged: str) -> dict[str, Any]:
    """For summary.json: `significance` by split, and of the judged split the intervals of both WERs and the p-value of the change."""
    found = {split: against_base(folder, split, board) for split, board in boards.items()}
    told = found.get(judged) or {}
    after = told.get("interval_b")
    if after is None and judged in boards:
        word_errors, words, *_ = boards[judged].utterance_counts.table().T
        after = rate_interval(word_errors, words)
    return {
        "wer_before_interval": told.get("interval_a"),
        "wer_after_interval": after,
        "wer_p_value": told.get("p_value"),
        "significance": {split: result for split, result in found.items() if result is not None},
    }


def say_result(summary: dict[str, Any], before: dict[str, Any] | None, after: Any, output_dir: Path) -> None:
    """The closing lines: both WERs, the same clips before and after, and where everything is."""
    judged, found = summary["judged_on"], summary["significance"]
    if before and after is not None and before.get("wer") is not None:
        for old, new in zip(before["pairs"], after.pairs, strict=False):
            log.info(
                "  reference  %s\n           before     %s\n           after      %s",
                old["reference"],
                old["hypothesis"],
                new["hypothesis"],
            )
        change = (
            (summary["wer_after"] - summary["wer_before"]) / summary["wer_before"] if summary["wer_before"] else 0.0
        )
        log.info(
            "WER on %s: %.3f%s before, %.3f%s after (%+.0f %%), best step %s (%s weights)",
            judged,
            summary["wer_before"],
            _range(summary["wer_before_interval"]),
            summary["wer_after"],
            _range(summary["wer_after_interval"]),
            100 * change,
            summary["best_step"],
            summary["best_weights"],
        )
        if judged in found:
            log.info("  %s", sentence(found[judged]))
        by_language = found.get(judged, {}).get("by_language", {})
        for name, pair in summary["wer_by_language"].items():
            if None not in pair.values():
                told = f": {sentence(by_language[name])}" if len(by_language) > 1 and name in by_language else ""
                log.info("  %s: %.3f before, %.3f after%s", name, pair["before"], pair["after"], told)
    guard_before, guard_after = summary.get("guard_wer_before"), summary.get("guard_wer_after")
    if guard_before is not None and guard_after is not None:
        told = found.get("guard")
        log.info(
            "WER on guard: %.3f before, %.3f after%s",
            guard_before,
            guard_after,
            f": {sentence(told)}" if told else "",
        )
        if guard_after > guard_before and (told is None or told["significant"]):
            log.warning("the model lost on data.guard. %s", LOST_ON_GUARD)
    if summary["adapter_bytes"]:
        log.info(
            "adapter: %s, %.2f MB beside model.nemo's %.2f MB",
            output_dir / "adapter",
            summary["adapter_bytes"] / 1e6,
            summary["model_bytes"] / 1e6,
        )
    log.info("model: %s   summary: %s", output_dir / "model.nemo", output_dir / "summary.json")
    log.info("transcribe a file: python -m finetune.transcribe --model %s FILE", output_dir)


def sentence(result: dict[str, Any]) -> str:
    """The change since the base model in words."""
    text = describe_difference(
        result, "significantly better than the base model", "significantly worse than the base model"
    )
    return text + (f"; {result['unmatched']} clips are in one of the two only" if result.get("unmatched") else "")


def _range(interval: list[float] | None) -> str:
    return f" [{interval[0]:.3f}, {interval[1]:.3f}]" if interval else ""
