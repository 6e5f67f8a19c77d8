"""summary.json and the closing lines: what a run did to the error rates, and whether that is more than chance."""

import json
import logging
from pathlib import Path
from typing import Any

import torch

from finetune.config.redaction import without_secrets
from finetune.durable_files import write_json
from finetune.evaluation.scores import WerAccumulator
from finetune.evaluation.significance import describe_difference, rate_interval
from finetune.strategies.optimizers import describe_optimizer
from finetune.strategies.sharded import count_parameters
from finetune.strategies.strategy import Strategy
from finetune.training.callbacks import LOST_ON_GUARD
from finetune.training.evaluation import FinalResult, compare_with_base
from finetune.training.guard_limit import log_outcome
from finetune.training.outputs import peak_memory_gib, peak_rss_gib
from finetune.training.trainer import Trainer

log = logging.getLogger(__name__)

MOSTLY_CLIPPED = 0.5
"""Share of the steps with clipped gradients from which on it is said."""


def write_summary(trainer: Trainer, strategy: Strategy, result: FinalResult) -> None:
    """Write summary.json, and log what came of the run. On the main process."""
    if trainer.accelerator.is_main_process:
        summary = summarise(trainer, strategy, result)
        write_json(trainer.output_dir / "summary.json", summary)
        after = result.wer.get(summary["judged_on"])
        if trainer.evaluator.judge is not None:
            log_outcome(trainer.evaluator.judge.outcome(), summary["guard_limit"])
        log_result(summary, trainer.progress.wer_before, after, trainer.output_dir)
    trainer.accelerator.wait_for_everyone()


def summarise(trainer: Trainer, strategy: Strategy, result: FinalResult) -> dict[str, Any]:
    """Return the run as one object."""
    p, config, accelerator = trainer.progress, trainer.config, trainer.accelerator
    judged = "test" if "test" in trainer.sources else "validation"
    before = p.wer_before or {}
    after = result.wer[judged].result() if judged in result.wer else {}
    by_language = {"before": before.get("by_language", {}), "after": after.get("by_language", {})}
    languages = sorted(set(by_language["before"]) | set(by_language["after"]))
    adapter, model = trainer.output_dir / "adapter", trainer.output_dir / "model.nemo"
    logged = trainer.metrics.path.read_text(encoding="utf-8").splitlines()
    summary = {
        "strategy": strategy.names,
        "engine": strategy.engine,
        **describe_optimizer(trainer.optimizer),
        "world_size": accelerator.num_processes,
        "mixed_precision": "bf16" if config.training.bf16 else "fp16" if config.training.fp16 else "no",
        "steps": p.step,
        "total_steps": trainer.total_steps,
        "samples": p.samples,
        "rehearsal": {"share": p.rehearsed / max(p.samples, 1), "clips": p.rehearsed}
        if config.data.rehearsal
        else None,
        "epochs": p.epoch,
        "audio_hours": p.audio_seconds / 3600,
        "judged_on": judged,
        "wer_before": before.get("wer"),
        "wer_after": after.get("wer"),
        "cer_before": before.get("cer"),
        "cer_after": after.get("cer"),
        "wer_by_language": {
            name: {when: rates.get(name, {}).get("wer") for when, rates in by_language.items()} for name in languages
        },
        "best_step": p.best_step,
        "best_validation_wer": p.best_wer,
        "best_weights": p.best_weights,
        "model_bytes": model.stat().st_size if model.is_file() else None,
        "adapter_bytes": sum(file.stat().st_size for file in adapter.iterdir()) if adapter.is_dir() else None,
        "peak_memory_gib": peak_memory_gib(),
        "peak_memory_is": "CUDA allocator" if torch.cuda.is_available() else "resident memory of the process",
        "peak_rss_gib": peak_rss_gib(),
        "trainable_parameters": count_parameters(trainer.model, trainable=True),
        "parameters": count_parameters(trainer.model),
        "audio_seconds_per_second": p.audio_seconds / p.train_seconds if p.train_seconds else None,
        "train_seconds": p.train_seconds,
        "wall_seconds": p.wall_seconds,
        "padding_fraction": 1 - p.audio_seconds / p.padded_seconds if p.padded_seconds else None,
        "quarantined": p.quarantine_lines,
        "filtered": p.filtered,
        "infeasible": p.infeasible,
        "infeasible_ctc": p.infeasible_ctc,
        "skipped_steps": p.skipped_steps,
        "spikes": p.spikes,
        "scale_skips": p.scale_skips,
        "clipped_steps": p.clipped_steps,
        "out_of_memory": p.out_of_memory,
        "batch_bounds": None,
        "drift_warnings": p.drift_warnings,
        "diverged": p.diverged,
        "saving_seconds": p.saving_seconds,
        "failed_checkpoints": p.failed_checkpoints,
        "resumed_from": trainer.resumed_from,
        "final_loss": json.loads(logged[-1])["loss"] if logged else None,
        "effective_settings": json.loads(json.dumps(without_secrets(config)[0])),
        **significance(trainer.output_dir, result.wer, judged),
        "average_checkpoints": result.candidates.get("average"),
        "guard_limit": None,
    }
    for callback in trainer.callbacks:
        summary |= callback.summary()
    if "guard" in result.wer:
        summary["guard_wer_before"] = p.guard_before
        summary["guard_wer_after"] = result.wer["guard"].total.rates()["wer"]
    if (judge := trainer.evaluator.judge) is not None:
        rates = p.guard_before, summary.get("guard_wer_after")
        summary["guard_limit"] = judge.summary(*rates, summary["significance"].get("guard"))
    return summary


def significance(folder: Path, results: dict[str, WerAccumulator], judged: str) -> dict[str, Any]:
    """Return `significance` by split, and of the judged split the intervals of both WERs and the p-value of the
    change."""
    found = {split: compare_with_base(folder, split, wer) for split, wer in results.items()}
    change = found.get(judged) or {}
    after = change.get("interval_b")
    if after is None and judged in results:
        word_errors, words, *_ = results[judged].utterance_counts.table().T
        after = rate_interval(word_errors, words)
    return {
        "wer_before_interval": change.get("interval_a"),
        "wer_after_interval": after,
        "wer_p_value": change.get("p_value"),
        "significance": {split: result for split, result in found.items() if result is not None},
    }


def log_result(
    summary: dict[str, Any], before: dict[str, Any] | None, after: WerAccumulator | None, output_dir: Path
) -> None:
    """Log both WERs, the same utterances before and after, and where everything is."""
    judged, found = summary["judged_on"], summary["significance"]
    was, now = summary["wer_before"], summary["wer_after"]
    if was is not None and now is not None and before and after:
        text = "  reference  %s\n           before     %s\n           after      %s"
        for old, new in zip(before["pairs"], after.pairs, strict=False):
            log.info(text, old["reference"], old["hypothesis"], new["hypothesis"])
        before_after = f"{was:.3f}{_interval(summary['wer_before_interval'])} before, "
        before_after += f"{now:.3f}{_interval(summary['wer_after_interval'])} after"
        percent, best = 100 * (now - was) / was if was else 0.0, (summary["best_step"], summary["best_weights"])
        log.info("WER on %s: %s (%+.0f %%), best step %s (%s weights)", judged, before_after, percent, *best)
        if judged in found:
            log.info("  %s", _describe_change(found[judged]))
        by_language = found.get(judged, {}).get("by_language", {})
        for name, pair in summary["wer_by_language"].items():
            if None not in pair.values() and len(summary["wer_by_language"]) > 1:
                change = f": {_describe_change(by_language[name])}" if name in by_language else ""
                log.info("  %s: %.3f before, %.3f after%s", name, pair["before"], pair["after"], change)
        if now < was and summary["best_step"] == summary["steps"] and not summary.get("diverged"):
            log.info("the last evaluation was the best: with more steps the WER may fall further")
    guard_before, guard_after = summary.get("guard_wer_before"), summary.get("guard_wer_after")
    if guard_before is not None and guard_after is not None:
        change = found.get("guard")
        text = f": {_describe_change(change)}" if change else ""
        log.info("WER on guard: %.3f before, %.3f after%s", guard_before, guard_after, text)
        within_limit = (summary.get("guard_limit") or {}).get("test_kept")
        if guard_after > guard_before and (change is None or change["significant"]) and not within_limit:
            log.warning("the model lost on data.guard. %s", LOST_ON_GUARD)
    clipped, steps = summary["clipped_steps"], summary["steps"]
    if clipped > MOSTLY_CLIPPED * steps:
        limit = summary["effective_settings"]["training"]["max_grad_norm"]
        text = (
            "gradients were clipped in %d of %d steps, all to the same norm (training.max_grad_norm=%g); that is no "
            "fault, but then the learning rate alone sets the size of a step"
        )
        log.info(text, clipped, steps, limit)
    if summary["adapter_bytes"]:
        sizes = summary["adapter_bytes"] / 1e6, summary["model_bytes"] / 1e6
        log.info("adapter: %s, %.2f MB beside model.nemo's %.2f MB", output_dir / "adapter", *sizes)
    log.info("model: %s   summary: %s", output_dir / "model.nemo", output_dir / "summary.json")
    log.info("transcribe a file: parakeet-finetune transcribe --model %s FILE", output_dir)


def _describe_change(result: dict[str, Any]) -> str:
    """Put the change since the base model in words."""
    text = "significantly {} than the base model"
    text = describe_difference(result, text.format("better"), text.format("worse"))
    return text + (f"; {result['unmatched']} clips are in one of the two only" if result.get("unmatched") else "")


def _interval(interval: list[float] | None) -> str:
    return f" [{interval[0]:.3f}, {interval[1]:.3f}]" if interval else ""
