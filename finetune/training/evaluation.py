"""Evaluations during a run, and the best model by WER on validation, with data.guard_limit of those that keep it.

All ranks decode their share and merge their counts. Candidates for the best model are the weights in training (raw),
those that callbacks add beside them (ema), and at the end the mean of some evaluated states (average) and points on
the way from the base model (way 0.5).
"""

import contextlib
import logging
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from finetune.config.guard_limit import parse_guard_limit
from finetune.config.schema import RunConfig
from finetune.data.batch import Batch
from finetune.data.guard_halves import CHOICE, GUARDS
from finetune.data.quarantine import Quarantine
from finetune.data.sources import OpenSource
from finetune.distributed import broadcast, gather, on_main, sum_over_ranks
from finetune.durable_files import put_in_place, sha256_of, write_json
from finetune.errors import UserError
from finetune.evaluation.mistakes import Mistakes
from finetune.evaluation.recognise import batched_decoding_differs, score_stream
from finetune.evaluation.scores import WerAccumulator
from finetune.evaluation.utterance_counts import BEST, BEST_TRAINED, UtteranceCounts, compare_evaluations
from finetune.models.adapters import write_adapter
from finetune.models.nemo import learning_batchnorms
from finetune.models.nemo_archive import load_weights, write_nemo
from finetune.models.protocols import AsrModel
from finetune.signals import CutShort, requested
from finetune.training.callbacks import Callback, Candidate, EvaluationResult
from finetune.training.checkpoints import CANNOT_WRITE
from finetune.training.data import make_stream
from finetune.training.guard_limit import GuardJudge
from finetune.training.outputs import LineFile, check_best, read_best
from finetune.training.progress import Progress

log = logging.getLogger(__name__)


@dataclass
class FinalResult:
    """What the end of a run evaluates."""

    wer: dict[str, WerAccumulator] = field(default_factory=dict)
    """Of the best model, by split."""
    candidates: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Of final candidates by the name of their weights: validation_wer, best_single_validation_wer, taken."""


class Evaluator:
    """Evaluates a run's model and keeps the best one.

    Args:
        require_finite: raises UserError where a model's weights are not finite.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        config: RunConfig,
        sources: dict[str, list[OpenSource]],
        progress: Progress,
        quarantine: Quarantine,
        callbacks: list[Callback],
        require_finite: Callable[[AsrModel | None], None],
    ):
        self.accelerator, self.config, self.sources, self.progress = accelerator, config, sources, progress
        self.quarantine, self.callbacks, self.require_finite = quarantine, callbacks, require_finite
        self.output_dir = Path(config.training.output_dir)
        self.file = LineFile(self.output_dir / "evaluations.jsonl")
        self.keeps_models = True
        """False measures a run without writing model.nemo."""
        self.judge = _judge_of(config, sources, progress)
        self.chosen_by = ("validation",) if self.judge is None else ("validation", CHOICE)
        """Splits that decide which model is best."""
        self._on_choice: tuple[dict[str, Any] | None, float | None] = None, None
        """On the main process, of the last evaluation of guard_choice: the change since the base model, and the bound
        of its WER."""

    def evaluate_split(self, model: AsrModel, split: str, max_clips: int | None = None) -> WerAccumulator:
        """Count the errors on a split over all ranks; every rank gets the merged counts.

        Args:
            model: whole, on the device.
            max_clips: instead of data.max_eval_samples.

        Raises:
            CutShort: on all ranks, where one of them was asked to stop.
        """
        config, sources = self.config, self.sources[split]
        limit = config.data.max_eval_samples if max_clips is None else max_clips
        stream = make_stream(self.accelerator, model, config, sources, training=False, max_clips=limit)
        clips = [s.clips for s in sources if s.clips]
        share = None
        if len(clips) == len(sources):
            total = min(sum(clips), limit) if limit >= 0 else sum(clips)
            share = math.ceil(total / self.accelerator.num_processes)

        def on_batch(batch: Batch, hypotheses: list[str], wer: WerAccumulator) -> None:
            if requested():
                raise CutShort
            for callback in self.callbacks:
                callback.on_evaluation_batch(split, batch, hypotheses, wer)

        for callback in self.callbacks:
            callback.on_evaluation_begin(split, share)
        own = None
        with contextlib.suppress(CutShort):
            own = score_stream(
                model,
                stream,
                normalization=sources[0].source.wer_normalization or config.data.wer_normalization,
                description=f"evaluate {split}",
                keep_pairs=config.training.sample_predictions,
                keep_worst=config.training.report_clips,
                show_progress=False,
                on_batch=on_batch,
            )
        parts = [part for part in gather(own) if part is not None]
        if own is None or len(parts) < self.accelerator.num_processes:
            for callback in self.callbacks:
                callback.on_evaluation_cancelled(split)
            raise CutShort("a signal came in an evaluation; the last checkpoint counts")
        if len(parts) == 1:
            return own
        merged = WerAccumulator(own.normalization, own.keep_pairs)
        if own.mistakes is not None:
            merged.mistakes = Mistakes(own.mistakes.keep_clips, own.mistakes.sample_rate)
        for part in parts:
            merged.merge(part)
        return merged

    def _evaluate_splits(
        self, model: AsrModel, splits: tuple[str, ...], step: int, weights: str = "raw", is_best: bool = False
    ) -> dict[str, WerAccumulator]:
        """Evaluate those splits that the run file names, write their lines, and tell the callbacks.

        What step 0 finds is kept as the base model's; later evaluations of data.guard are compared with it.
        """
        p, folder, main = self.progress, self.output_dir, self.accelerator.is_main_process
        marks = ({"model": "best"} if is_best else {}) | ({} if weights == "raw" else {"weights": weights})
        found: dict[str, WerAccumulator] = {}
        for split in (s for s in splits if s in self.sources):
            found[split] = wer = self.evaluate_split(model, split)
            self.quarantine.add(wer.quarantined)
            if not (is_best and split == "validation"):  # said when it became the best
                log_evaluation(step, split if weights == "raw" else f"{split} ({weights})", wer)
            bad, clips = len(wer.quarantined), len(wer.quarantined) + wer.total.clips
            if bad > self.config.data.max_bad_fraction * clips:
                log.warning(
                    f"{bad} of {clips} clips of {split} cannot be used, more than "
                    f"data.max_bad_fraction={self.config.data.max_bad_fraction:g}: its WER speaks for the others only"
                )
            rate, change, bound = wer.total.rates()["wer"], None, None
            if marks == {} and p.step == 0 and rate is not None:
                p.base_wer[split] = rate
                if main:
                    keep_base(folder, split, wer)
            elif (split == CHOICE or (split in GUARDS and marks == {})) and main:
                change = compare_with_base(folder, split, wer)
                if split == CHOICE and self.judge is not None:
                    bound = self.judge.bound(rate, base_counts(folder, split), wer.utterance_counts)
            if split == CHOICE:
                self._on_choice = change, bound
            if main:
                counts = {None: wer.total, **dict(sorted(wer.by_language.items()))}  # None: all languages
                rows = [{"step": step, "split": split, "language": n, **c.rates()} for n, c in counts.items()]
                if bound is not None:
                    rows[0]["wer_bound"] = bound
                self.file.append(*({**row, **marks} for row in rows))
                if weights == "raw" or is_best:  # the page shows mistakes of the model in training, then of the best
                    write_mistakes(folder, step, split, wer, marks)
            result = EvaluationResult(p.step, split, wer, weights, is_best, p.base_wer.get(split), change)
            for callback in self.callbacks:
                callback.on_evaluation_end(result)
        return found

    # ---- during the run ---------------------------------------------------------------------------------------------

    def evaluate(self, model: AsrModel, splits: tuple[str, ...], last: bool = False) -> dict[str, WerAccumulator]:
        """Evaluate the splits, and the callbacks' candidates on validation; keep the best model by validation WER.

        In the `last` evaluation of a run, data.guard follows where the closing one will be of an earlier step. With
        data.guard_limit its half `guard_choice` is in each evaluation instead, and the other, after the base model's,
        in the closing one only.
        """
        p = self.progress
        if self.judge is not None and "validation" in splits:
            splits = (*(s for s in splits if p.step == 0 or s != "guard"), CHOICE)
        found = self._evaluate_splits(model, splits, p.step)
        if "validation" in found:
            p.last_evaluated = p.step
            if self.judge is not None and p.step == 0:
                self.judge.check_base()
            self._offer(model, found, "raw")
            if p.step:
                if found["validation"].total.words:
                    for callback in self.callbacks:
                        callback.on_validated(model, p.step, found["validation"].total.rates()["wer"])
                for candidate in self._candidates(model, final=False):
                    self._evaluate_candidate(model, candidate)
            closing = last and self.judge is None and self.config.training.guard_steps
            if closing and p.best_step not in (None, p.step):
                self._evaluate_splits(model, ("guard",), p.step)
        for callback in self.callbacks:
            callback.on_evaluations_done()
        return found

    def _candidates(self, model: AsrModel, final: bool) -> Iterator[Candidate]:
        """Yield the callbacks' candidates; each is made when the one before is evaluated."""
        for callback in self.callbacks:
            yield from callback.candidates(model, final)

    def _evaluate_candidate(self, model: AsrModel, candidate: Candidate) -> tuple[float | None, bool]:
        """Return the candidate's WER on validation, and whether it is the best model now."""
        with candidate.inside:
            found = self._evaluate_splits(model, self.chosen_by, self.progress.step, candidate.weights)
            taken = self._offer(model, found, candidate.weights)
        return found["validation"].total.rates()["wer"], taken

    def _offer(self, model: AsrModel, found: dict[str, WerAccumulator], weights: str) -> bool:
        """Keep the model where its validation WER is the best so far, of those that keep data.guard_limit; return
        whether it is."""
        p, rate = self.progress, found["validation"].total.rates()["wer"]
        if self.judge is not None:
            change, bound = broadcast(self._on_choice)
            if not self.judge.judge(weights, rate, found[CHOICE].total.rates()["wer"], change, bound):
                return False
        if rate is None:
            return False
        main, best_trained = self.accelerator.is_main_process, False
        if p.step and (p.best_trained_wer is None or rate < p.best_trained_wer):
            p.best_trained_wer, best_trained = rate, True
        if p.best_wer is not None and rate >= p.best_wer:
            if best_trained and p.best_step == 0 and main:
                keep_counts(self.output_dir / BEST_TRAINED, found["validation"])
            return False
        p.best_wer, p.best_step, p.best_weights = rate, p.step, weights
        self.keep_model(model)
        if self.keeps_models and main:
            keep_counts(self.output_dir / BEST, found["validation"])
            (self.output_dir / BEST_TRAINED).unlink(missing_ok=True)
        return True

    def keep_model(self, model: AsrModel) -> None:
        """Write the present weights as model.nemo, and the adapter beside it where there is one.

        Raises:
            UserError: they are not finite, or the disk does not take them.
        """
        if not self.keeps_models:
            return
        self.require_finite(model)
        on_main(lambda: self._write_model(model))

    def _write_model(self, model: AsrModel) -> None:
        p, folder = self.progress, self.output_dir
        try:
            (folder / "checkpoints").mkdir(exist_ok=True)
            aside = write_nemo(model, folder / "model.nemo")
            best = {"step": p.best_step, "validation_wer": p.best_wer, "weights": p.best_weights}
            if self.judge is not None:
                best |= {key: p.guard_judged[-1][key] for key in ("guard_wer", "guard_bound")}
            best |= {"bytes": aside.stat().st_size, "sha256": sha256_of(aside)}
            # Of the one before, too: it is the one that lies there if the process dies between the next two lines.
            before = read_best(folder)
            earlier = before.pop("previous", None) if before is not None else None
            same = before is not None and (before["step"], before["weights"]) == (p.best_step, p.best_weights)
            write_json(folder / "checkpoints" / "best.json", {**best, "previous": earlier if same else before})
            put_in_place(aside, folder / "model.nemo")
            if getattr(model, "lora_base", None) is not None:
                write_adapter(model, folder / "adapter")
            else:  # an earlier one would not be that of this model
                shutil.rmtree(folder / "adapter", ignore_errors=True)
        except torch.OutOfMemoryError:
            raise
        except CANNOT_WRITE as error:
            for remains in folder.glob(".model.nemo.tmp*"):
                remains.unlink(missing_ok=True)
            raise UserError(
                f"{folder / 'model.nemo'}, the best model so far (step {p.best_step}), cannot be written: {error}. "
                "Make room or mend the disk, then start the same command again with "
                "training.resume_from_checkpoint=true: the evaluation is made again.",
                exit_code=1,
            ) from error

    def check_decoding(self, model: AsrModel) -> None:
        """Compare batched with single decoding on a few utterances; a difference makes every WER doubtful."""
        split = next((s for s in ("validation", "test") if s in self.sources), None)
        if split is None or not self.accelerator.is_main_process:
            return
        stream = make_stream(self.accelerator, model, self.config, self.sources[split], training=False)
        stream.workers = 0
        batch = next((b for b in stream.batches() if b.ids), None)
        if batch is None:
            return
        differing = batched_decoding_differs(model, batch)
        if not differing:
            log.debug("batched and single decoding agree")
            return
        text = "batched decoding differs from single decoding on %d of 4 clips, such as %s: %r alone, %r in a batch"
        log.warning(text, len(differing), *differing[0])

    # ---- the end of the run -----------------------------------------------------------------------------------------

    def finish(self, model: AsrModel) -> FinalResult:
        """Settle which weights are best, and evaluate them on the test set (else validation) and data.guard."""
        p, result, replaced = self.progress, FinalResult(), False
        if p.best_step is None and self.judge is None:  # nothing to choose by
            self.keep_model(model)
        single = p.best_wer
        for candidate in self._candidates(model, final=True):
            before, before_weights = p.best_wer, p.best_weights
            rate, taken = self._evaluate_candidate(model, candidate)
            replaced = True  # a final candidate may leave its weights in the model
            log.info(
                f"{candidate.description}: WER {_four_digits(rate)} on validation, the best so far "
                f"({before_weights}) {_four_digits(before)}: {candidate.weights if taken else before_weights} is "
                "model.nemo"
            )
            found = {"validation_wer": rate, "best_single_validation_wer": single, "taken": taken}
            result.candidates[candidate.weights] = {**candidate.details, **found}
        if p.best_step is None and self.judge is not None:
            raise UserError(
                "data.guard_limit: there is no model that keeps it. The base model, which would be the best one then, "
                f"was in {self.output_dir / 'model.nemo'}, which is damaged or gone. The last weights are in "
                "checkpoints. Begin anew with training.overwrite_output_dir=true.",
                exit_code=1,
            )
        if p.best_step == 0 and self.judge is None:
            log.info(
                "no evaluation was better than the base model's WER %.3f: model.nemo is the base model", p.best_wer
            )
        present = p.best_step is None or (p.best_step == p.step and p.best_weights == "raw")
        if replaced or not present:
            if broadcast(self.accelerator.is_main_process and check_best(self.output_dir)[1]):
                raise UserError(
                    f"{self.output_dir / 'model.nemo'} is damaged: its checksum is not that of step {p.best_step}. "
                    "Start the same command again with training.resume_from_checkpoint=true: the best model is "
                    "chosen anew.",
                    exit_code=1,
                )
            load_weights(model, self.output_dir / "model.nemo")
        step = p.step if p.best_step is None else p.best_step
        splits = ("test" if "test" in self.sources else "validation", "guard")
        result.wer = self._evaluate_splits(model, splits, step, p.best_weights, is_best=True)
        return result

    # ---- resuming ---------------------------------------------------------------------------------------------------

    def cut_lines_after_resume(self) -> None:
        """Drop the lines behind the resumed step, and those of an evaluation that will be made again as a whole."""
        p = self.progress
        # It was cut short, or the checkpoint does not know of it.
        again = p.last_evaluated != p.step if "validation" in self.sources else p.evaluation_due
        self.file.cut_after_step(p.step - 1 if again else p.step)

    def check_best_after_resume(self) -> None:
        """Make the progress agree with model.nemo: it may be newer than the checkpoint, damaged or another run's."""
        p, main = self.progress, self.accelerator.is_main_process
        kept, damaged = broadcast(check_best(self.output_dir) if main else (None, False))
        if kept is not None and main and kept != read_best(self.output_dir):
            write_json(self.output_dir / "checkpoints" / "best.json", kept)  # of the one that really lies there
        if p.best_step is None:
            return
        if kept is None:
            what = "model.nemo is damaged (its checksum differs)" if damaged else "there is no model.nemo"
            log.warning("%s in %s: the best model is chosen anew", what, self.output_dir)
            p.best_step, p.best_wer, p.best_weights = None, None, "raw"
        else:
            p.best_step, p.best_wer, p.best_weights = kept["step"], kept["validation_wer"], kept["weights"]

    def check_limit_after_resume(self) -> None:
        """Judge what was judged before by the limit of now.

        Raises:
            UserError: as from `GuardJudge.check_after_resume`; or what data.guard_confidence needs is lost.
        """
        if self.judge is None:
            return
        self.judge.check_after_resume(on_main(lambda: read_best(self.output_dir)))
        if self.judge.confidence > 0.5 and on_main(lambda: base_counts(self.output_dir, CHOICE) is None):
            raise UserError(
                f"data.guard_confidence: {self.output_dir / f'base-{CHOICE}.npz'}, the base model's errors by clip, "
                "is not there or damaged, so that no bound can be told. Copy it from the directory of the run that "
                "wrote the checkpoint, or begin anew (training.overwrite_output_dir=true)."
            )


def _judge_of(config: RunConfig, sources: dict[str, list[OpenSource]], progress: Progress) -> GuardJudge | None:
    """Return what judges by data.guard_limit; None without a limit, or where the guard is not in its halves."""
    d = config.data
    if d.guard_limit is None or CHOICE not in sources:
        return None
    hashes = [source.texts for split in GUARDS for source in sources[split]]
    texts = None if None in hashes else sum(filter(None, hashes)) % 2**64
    normalization = sources[CHOICE][0].source.wer_normalization or d.wer_normalization
    return GuardJudge(parse_guard_limit(d.guard_limit), d.guard_confidence, progress, normalization, texts)


def _four_digits(wer: float | None) -> str:
    return "unknown" if wer is None else f"{wer:.4f}"


def splits_due(step: int, last: bool, eval_steps: int, guard_steps: int) -> tuple[str, ...]:
    """Return the splits of an evaluation during the run.

    data.guard is in the first one after each `guard_steps`, in all where that is below 0, in none where it is 0; and
    not in the last one, since `Evaluator.evaluate` knows whether the best model's follows at the same step.
    """
    guarded = guard_steps < 0 or (guard_steps > 0 and step // guard_steps > (step - eval_steps) // guard_steps)
    return ("validation", "guard") if guarded and not last else ("validation",)


def average_batchnorm(model: AsrModel) -> None:
    """Average BatchNorm's running statistics over the ranks: under DDP each rank has its own, and the means are
    evaluated and saved."""
    if torch.distributed.is_initialized():
        for module in learning_batchnorms(model):
            for statistics in (module.running_mean, module.running_var):
                if isinstance(statistics, torch.Tensor):
                    sum_over_ranks(statistics).div_(torch.distributed.get_world_size())


# ---- what an evaluation leaves --------------------------------------------------------------------------------------


def write_mistakes(folder: Path, step: int, split: str, wer: WerAccumulator, marks: dict[str, str]) -> None:
    """Write errors-SPLIT.json, over that of the evaluation before: confused words and the worst utterances with their
    audio."""
    if wer.mistakes is None:
        return
    path = folder / f"errors-{split}.json"
    try:
        write_json(path, {"step": step, "split": split, **marks, **wer.mistakes.result()})
    except OSError as error:  # the page lacks these utterances; no training ends for that
        log.warning("%s cannot be written: %s", path, error)


def log_evaluation(step: int, split: str, wer: WerAccumulator) -> None:
    """Log one line of rates, and what was left out."""
    rates = wer.total.rates()
    if rates["wer"] is None:
        log.warning("evaluation of %s: no clip with words in it", split)
        return
    languages = [f"{n} {c.rates()['wer']:.3f}" for n, c in sorted(wer.by_language.items()) if c.words]
    each = f" ({' '.join(languages)})" if len(languages) > 1 else ""
    figures = f"WER {rates['wer']:.3f} CER {rates['cer']:.3f}{each} on {rates['clips']} clips"
    log.info("step %d %s: %s", step, split, figures)
    if wer.left_out:
        log.info("  %d clips of %s have no reference after normalisation and are left out", wer.left_out, split)
    if wer.normalization == "open_asr" and "unknown" in wer.by_language:
        log.info("  %d clips of %s name no language: taken for English", wer.by_language["unknown"].clips, split)


def keep_base(folder: Path, split: str, wer: WerAccumulator) -> None:
    """Keep the base model's counts by utterance in the run's folder, where a resumed run finds them."""
    wer.utterance_counts.save(folder / f"base-{split}.npz")


def keep_counts(path: Path, wer: WerAccumulator) -> None:
    """Keep counts by utterance, with which runs are compared."""
    try:
        wer.utterance_counts.save(path)
    except OSError as error:  # the run cannot be compared with others; no training ends for that
        log.warning("%s cannot be written: %s", path, error)


def forget_base(folder: Path) -> None:
    """Remove what another run kept."""
    for path in (*folder.glob("base-*.npz"), *folder.glob("best-*.npz")):
        path.unlink()


def base_counts(folder: Path, split: str) -> UtteranceCounts | None:
    """Return the base model's counts on a split; None where it was not measured."""
    try:
        return UtteranceCounts.load(folder / f"base-{split}.npz")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning("the base model's counts cannot be read, so that %s is not compared with it: %s", split, error)
        return None


def compare_with_base(folder: Path, split: str, wer: WerAccumulator) -> dict[str, Any] | None:
    """Compare the base model (a) with an evaluation of the same split (b): `utterance_counts.compare_evaluations`.

    None where the base model was not measured, or no utterance with words is in both.
    """
    base = base_counts(folder, split)
    result = None if base is None else compare_evaluations(base, wer.utterance_counts)
    return result if result and result["words"] else None
