"""`finetune/train.py --dry-run`: each part of a run once and small, with go or no-go for each."""

import contextlib
import functools
import itertools
import json
import shutil
import time
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from finetune.callbacks.defaults import add_step_callbacks
from finetune.config.schema import RunConfig
from finetune.data.filters import in_words
from finetune.data.guard_halves import few_words, measure_halves
from finetune.data.normalization import normalize_text
from finetune.data.overlap import find_overlap, warnings_about
from finetune.data.quarantine import BadUtterance, Reasons, Record, exceeds_bad_fraction, kind_of
from finetune.data.reader import group_sources
from finetune.data.retry import Unreachable
from finetune.data.run_file import new_sources, with_filters
from finetune.data.sources import OpenSource
from finetune.data.survey import length_of, spread_rows
from finetune.data.utterances import text_encoder
from finetune.distributed import broadcast, gather, on_main
from finetune.errors import UserError
from finetune.models.adapters import merged_state_dict
from finetune.models.loading import load_model
from finetune.models.nemo_archive import save_nemo
from finetune.models.prompts import prompt_slots
from finetune.models.protocols import AsrModel
from finetune.strategies.optimizers import state_tensors, stored_tensors, unwrap_optimizer
from finetune.strategies.sharded import count_parameters
from finetune.strategies.strategy import Strategy, engine_with
from finetune.tools.planning.accounting import HasPartition
from finetune.tools.preflight import auto_batch, trial
from finetune.tools.preflight.attempts import Attempts, Found
from finetune.tools.report.formats import duration
from finetune.training import checkpoints, run
from finetune.training.data import make_stream, prompts_of_rows
from finetune.training.trainer import Trainer

TEXTS, TEXT_SECONDS = 1000, 20.0
OVERLAP_SECONDS, OVERLAP_SECONDS_WITH_AUDIO = 300.0, 30.0
CLIPS = 200
EVALUATED = 20
SHUFFLE_BUFFER = 64  # utterances of each worker, in place of the run's buffer, which takes long to fill
TIMED_STEPS, TIMED_SECONDS = 8, 15.0
GIB = 2**30


def dry_run(config: RunConfig, strategy: Strategy, observe: Callable[[Trainer], None] | None = None) -> int:
    """Try the run, log go or no-go, and write OUTPUT_DIR/dry_run.json; a run that is there stays as it is.

    Returns:
        Exit code: 0 go, 1 no-go.
    """
    attempts = Attempts(config, strategy)
    parts = DryRun(config, strategy, attempts)
    attempt = attempts.attempt
    if not attempt("configuration", parts.configuration):
        attempt("sources", parts.open_sources)
        return attempts.close()
    with trial.trial_folder(parts.accelerator, parts.settings):
        opened = attempt("sources", parts.open_sources)
        if opened and len(parts.sources) > 1:
            attempt("overlap", parts.compare_splits)
        if opened and config.data.guard_limit is not None:
            attempt("guard", parts.halve_guard)
        loaded = attempt("model", parts.load_model)
        if opened and loaded:
            attempt("tokenizer", parts.encode_texts)
            if prompt_slots(parts.model):
                attempt("languages", parts.count_languages)
            attempt("what is left", parts.look_at_usable)
            attempt("clips", parts.decode_clips)
            if attempt("engine", functools.partial(parts.build_trainer, observe)):
                # Before the first step, as in a run: it is the base model's WER.
                attempt("evaluation", parts.evaluate)
                stepped = attempt("worst batch", parts.step_on_worst_batches)
                if stepped:
                    attempt("checkpoint", parts.save_and_resume)
                attempt("model file", parts.export)
                if stepped:
                    attempt("time", parts.time_steps)
    code = attempts.close()
    parts.accelerator.end_training()
    return code


class DryRun:
    """The parts of a run: each tries one thing, and returns what it found or raises what is wrong."""

    def __init__(self, config: RunConfig, strategy: Strategy, attempts: Attempts):
        self.config, self.strategy, self.attempts, self.warn = config, strategy, attempts, attempts.warn
        self.settings = trial.trial_config(config, "dry_run")
        self.sources: dict[str, list[OpenSource]] = {}
        self.accelerator: Accelerator
        self.model: AsrModel
        self.trainer: Trainer
        self.clips_per_second: float | None = None
        """Of an evaluation."""
        self.write_seconds = 0.0
        """Of a checkpoint."""

    # ---- before there is a trainer ---------------------------------------------------------------------------------

    def configuration(self) -> Found:
        self.accelerator = run.build_accelerator(self.settings, self.strategy)
        self.attempts.accelerator = self.accelerator
        t, wanted = self.settings.training, self.config.training
        output_dir = Path(wanted.output_dir)
        holds_run = (output_dir / "config.yaml").is_file() or bool(checkpoints.checkpoints_of(output_dir))
        if holds_run and not wanted.resume_from_checkpoint and not wanted.overwrite_output_dir:
            self.warn(
                f"{output_dir} holds a run: the training will want training.resume_from_checkpoint=true, "
                "training.overwrite_output_dir=true or another training.output_dir"
            )
        processes, device = self.accelerator.num_processes, self.accelerator.device
        line = (
            f"strategy {'+'.join(self.strategy.names) or 'none'}, engine "
            f"{engine_with(self.strategy.engine, processes)}, {processes} "
            f"process{'es' if processes > 1 else ''} on {device.type}, "
            f"{'bf16' if t.bf16 else 'fp16' if t.fp16 else 'fp32'}, optimizer {t.optimizer}"
        )
        return line, {"processes": processes, "device": str(device)}

    def open_sources(self) -> Found:
        self.sources = run.open_sources(self.settings)
        opened = {**self.sources, "train": new_sources(self.sources["train"])}
        if rehearsal := self.sources["train"][len(opened["train"]) :]:
            opened["rehearsal"] = rehearsal
        rows = {key: count_rows(sources) for key, sources in opened.items()}
        line = ", ".join(f"{key} {'an unknown number of' if n is None else f'{n:,}'} rows" for key, n in rows.items())
        return line, {"rows": rows}

    def compare_splits(self) -> Found:
        """Look for what is evaluated in data.train.

        Raises:
            UserError: clips stand in both, without data.allow_overlap.
        """
        line, sets, warnings = on_main(self._overlap)
        for text in warnings:
            self.warn(text)
        return line, {"in_common": sets}

    def _overlap(self) -> tuple[str, list[dict[str, Any]], list[str]]:
        with_audio = any(source.reads_audio for opened in self.sources.values() for source in opened)
        seconds = OVERLAP_SECONDS_WITH_AUDIO if with_audio else OVERLAP_SECONDS
        found = find_overlap(self.sources, self.config, seconds)
        sets, warnings = found.by_set(), warnings_about(found, self.sources, self.config)
        clips, texts = (sum(one[kind] for one in sets) for kind in ("same_clips", "same_texts"))
        line = f"{found.scope()}: {clips or 'no'} equal clips, {texts or 'no'} equal texts"
        return line, sets, warnings

    def halve_guard(self) -> Found:
        """Cut data.guard in two, as data.guard_limit needs it.

        Raises:
            UserError: a half is empty.
        """
        guard, limit = self.sources["guard"], self.settings.data.max_eval_samples
        found = on_main(lambda: measure_halves(guard, limit, OVERLAP_SECONDS_WITH_AUDIO))
        for text in few_words(found):
            self.warn(text)
        return str(found), {"words": found.words, "texts": found.texts}

    def load_model(self) -> Found:
        self.model = run.build_model(self.accelerator, self.settings, self.sources)
        parameters = count_parameters(self.model)
        return f"{self.settings.model.name}: {parameters / 1e6:.1f} M parameters", {"parameters": parameters}

    def encode_texts(self) -> Found:
        """Look for what the tokenizer cannot write in texts from all over data.train.

        Raises:
            UserError: more texts would be lost than data.max_bad_fraction.
        """
        d, sources = self.settings.data, self.sources["train"]
        grouped = group_sources(with_filters(sources, d), d.max_samples)
        options = make_stream(self.accelerator, self.model, self.settings, sources, training=True).options
        encode = text_encoder(self.model.tokenizer)
        texts = characters = tokens = 0
        seconds = 0.0
        lost: list[str] = []
        unknown: Counter[str] = Counter()

        def count_tokens(text: str) -> int | None:
            with contextlib.suppress(BadUtterance):
                return len(encode(text))

        @functools.cache
        def is_known(character: str) -> bool:
            return character.isspace() or count_tokens(character) is not None

        for ref, row in spread_rows(grouped, options, TEXTS, TEXT_SECONDS):
            source, _ = grouped.groups[ref[0]][ref[2]]
            text = row.get(source.columns["text"])
            if not isinstance(text, str):
                continue
            text = normalize_text(text, source.source.text_normalization or d.text_normalization)
            texts, characters = texts + 1, characters + len(text)
            unknown.update(character for character in text if not is_known(character))
            count = count_tokens(text)
            if count is None:
                lost.append(text)
                continue
            with contextlib.suppress(BadUtterance, Unreachable):
                seconds += length_of(source, row)
                tokens += count
        if not texts:
            raise UserError("data.train: not one text was found in the rows that were read.", exit_code=1)
        rate = tokens / seconds if seconds else None
        values = {
            "texts": texts,
            "texts_lost": len(lost),
            "characters": characters,
            "characters_unknown": unknown.total(),
            "unknown": dict(unknown.most_common(100)),
            "tokens_per_second": rate,
        }
        density = f", {rate:.1f} tokens a second of audio" if rate is not None else ""
        if not lost:
            return f"writes all of {texts} texts{density}", values
        most = " ".join(f"{character} {n}x" for character, n in unknown.most_common(20))
        line = (
            f"cannot write {len(lost)} of {texts} texts ({len(lost) / texts:.1%}), {unknown.total()} of {characters} "
            f"characters ({unknown.total() / max(characters, 1):.2%}): {most}{density}"
        )
        try:
            encode(lost[0])
        except BadUtterance as reason:
            line += f"; {lost[0]!r}: {reason}"
        if len(lost) > d.max_bad_fraction * texts:
            raise UserError(f"{line}. That is more than data.max_bad_fraction={d.max_bad_fraction:g}.")
        self.warn("texts with unknown characters go to quarantine")
        return line, values

    def count_languages(self) -> Found:
        """Find the prompts of the languages that rows from all over data.train name.

        Raises:
            UserError: more rows have none than data.max_bad_fraction.
        """
        stream = make_stream(self.accelerator, self.model, self.settings, self.sources["train"], training=True)
        line, taken, refused = prompts_of_rows(stream, self.settings.data.max_bad_fraction)
        for reason, rows in refused.items():
            self.warn(f"{rows} rows go into quarantine: {reason}")
        return line, {"prompts": taken, "without_prompt": refused}

    def look_at_usable(self) -> Found:
        """Judge rows from all over data.train without decoding them.

        Raises:
            UserError: more than half of them are left out, without data.allow_large_losses.
        """
        stream = make_stream(self.accelerator, self.model, self.settings, self.sources["train"], training=True)
        line, found, problem, warnings = run.how_much_is_left(stream, self.settings, self.accelerator.num_processes)
        if problem is not None and not self.settings.data.allow_large_losses:
            raise UserError(f"{line}. {problem}", exit_code=1)
        for text in (*warnings, *filter(None, [problem])):
            self.warn(text)
        return line.removeprefix("data.train: ").replace("\n", "; "), vars(found)

    def decode_clips(self) -> Found:
        """Take the first utterances through the run's own stream and workers.

        Raises:
            UserError: the data cannot be read, no utterance is left, or more are bad than data.max_bad_fraction.
        """
        sources = self.sources["train"]
        stream = make_stream(self.accelerator, self.model, self.settings, sources, training=True)
        stream.options.shuffle_buffer_size = min(SHUFFLE_BUFFER, stream.options.shuffle_buffer_size)
        wanted = -(-CLIPS // self.accelerator.num_processes)
        clips, audio_seconds, first, error = 0, 0.0, None, None
        quarantined: list[Record] = []
        filtered: Counter[str] = Counter()
        started = time.perf_counter()
        with contextlib.closing(stream.batches()) as batches:
            for batch in batches:
                error = batch.error
                quarantined += batch.quarantined
                filtered.update(batch.filtered)
                if batch.ids:
                    first = first or time.perf_counter() - started
                    clips += len(batch.ids)
                    audio_seconds += float(batch.audio_lengths_B.sum()) / stream.options.sample_rate
                if error or clips + len(quarantined) + filtered.total() >= wanted:
                    break
        clips_R, seconds_R, quarantined_R, filtered_R, errors_R = zip(
            *gather((clips, audio_seconds, quarantined, filtered, error))
        )
        if any(errors_R):
            raise UserError(f"data.train: {next(filter(None, errors_R))}", exit_code=1)
        clips, filtered = sum(clips_R), sum(filtered_R, Counter())
        quarantined = list(itertools.chain(*quarantined_R))
        rows = clips + len(quarantined) + filtered.total()
        bounds = [source.filters for source in with_filters(sources, self.settings.data)]
        line = f"{clips} of {rows} clips decoded"
        line += "".join(f", {n} {in_words(reason, bounds)}" for reason, n in filtered.most_common())
        if quarantined:
            kinds = Reasons()
            for record in quarantined:
                kinds.add(kind_of(record["reason"]), record["id"])
            line += f", {len(quarantined)} unusable: {kinds}; {quarantined[0]['id']}: {quarantined[0]['reason']}"
        if not clips:
            raise UserError(f"data.train: no clip is left to train on: {line}", exit_code=1)
        limit = self.settings.data.max_bad_fraction
        if len(quarantined) > limit * rows:
            problem = f"{line}. More than data.max_bad_fraction={limit:g}: mend the data, or raise it."
            all_read = rows >= sum(source.clips or rows + 1 for source in sources)
            if exceeds_bad_fraction(len(quarantined), rows, limit, all_read):
                raise UserError(problem, exit_code=1)
            self.warn(problem)
        return line, {
            "decoded": clips,
            "quarantined": len(quarantined),
            "filtered": filtered,
            "audio_seconds": sum(seconds_R),
            "seconds_to_first_batch": first,
        }

    def build_trainer(self, observe: Callable[[Trainer], None] | None) -> Found:
        auto_batch.set_bounds(self.accelerator, self.settings, self.strategy)
        steps = run.plan_steps(self.accelerator, self.settings, self.sources)
        self.trainer = run.build_trainer(self.accelerator, self.model, self.sources, self.settings, steps)
        add_step_callbacks(self.trainer)
        self.trainer.begin(None)
        if observe is not None:
            observe(self.trainer)
        return f"{type(unwrap_optimizer(self.trainer.optimizer)).__name__}, {steps:,} steps", {"steps": steps}

    # ---- with a trainer --------------------------------------------------------------------------------------------

    def evaluate(self) -> Found:
        """Measure the base model's WER on some utterances of each split that the run evaluates.

        Raises:
            UserError: a split cannot be read, or has no words.
        """
        limit = self.settings.data.max_eval_samples
        few = min(EVALUATED, limit) if limit >= 0 else EVALUATED
        lines, rates = [], {}
        clips = seconds = 0.0
        with self.trainer.whole_model() as model:
            for split in (s for s in ("validation", "test", "guard") if s in self.sources):
                started = time.perf_counter()
                wer = self.trainer.evaluator.evaluate_split(model, split, max_clips=few)
                seconds, clips = seconds + time.perf_counter() - started, clips + wer.total.clips
                bad = wer.quarantined
                if not wer.total.words:
                    why = f", such as {bad[0]['reason']}" if bad else "."
                    none = f"no clip with words among the first {EVALUATED}; {len(bad)} cannot be used{why}"
                    raise UserError(f"data.{split}: {none}", exit_code=1)
                rate = rates[split] = wer.total.rates()["wer"]
                lines.append(f"WER {rate:.3f} on {wer.total.clips} clips of {split}")
                if bad:
                    self.warn(f"data.{split}: {len(bad)} clip(s) cannot be used, such as {bad[0]}")
                if rate >= 1 and not self.settings.model.name.endswith((".yaml", ".yml")):
                    why = "the model does not know this language yet, or these are not its texts"
                    self.warn(f"data.{split}: WER {rate:.2f}: {why}")
        if not lines:
            self.warn("no data.validation: nothing can tell whether the model gets better")
            return "nothing to evaluate", {}
        self.clips_per_second = clips / seconds
        return ", ".join(lines), {"wer": rates, "clips_per_second": self.clips_per_second}

    def step_on_worst_batches(self) -> Found:
        """Take two optimizer steps with each of the batches that need most.

        Raises:
            UserError: memory does not suffice, or a loss is not finite.
        """
        trainer = self.trainer
        worst, survey = trial.worst_batches(trainer)
        meter = trial.MemoryMeter(trainer, self.strategy)
        trainer.module.train()
        peaks: list[tuple[int, str]] = []
        memory: dict[str, Any] = {}
        for name, step_batches in trial.worst_steps(trainer, worst):
            line = f"{name}: {trial.format_batch(trial.describe_step(trainer.model, step_batches))}"
            try:
                result, memory = meter.train_on(step_batches)
            except trial.StepDoesNotFit as error:
                raise UserError(f"{name}: {error}") from error
            if result.skipped is not None and self.accelerator.scaler is None:
                raise UserError(f"{line}: loss or gradient is not finite. Lower training.learning_rate.", exit_code=1)
            peaks.append((memory["peak_tensors"] or memory["peak_resident"], line))
        peak, line = max(gather(max(peaks)))
        if not trial.saw_all(survey):
            self.warn(f"{survey}; longer ones may come, up to data.max_duration={self.settings.data.max_duration:g} s")
        kind = "tensors" if memory["peak_tensors"] is not None else "resident memory"
        of = f" of the GPU's {memory['total'] / GIB:.1f} GiB" if meter.gpu else ""
        values = {"peak_gib": peak / GIB, "total_gib": memory["total"] / GIB, "rows_looked_at": survey.looked}
        return f"peak {trial.format_bytes(peak)} of {kind}{of}, with {line}", values

    def save_and_resume(self) -> Found:
        """Write a checkpoint, overwrite what is in memory, resume and compare.

        Raises:
            UserError: something is restored wrongly, or the disk is too small for the checkpoints of the run.
        """
        t, trainer = self.settings.training, self.trainer
        started = time.perf_counter()
        trainer.save(wait=True)
        write_seconds = time.perf_counter() - started
        path = checkpoints.checkpoint_path(trainer.output_dir, trainer.progress.step)
        before = checkpoint_digest(trainer)
        for tensors in checkpointed_tensors(trainer).values():
            for tensor in tensors:
                tensor.zero_()
        trainer.progress.restore({})
        started = time.perf_counter()
        trainer.begin(path)
        read_seconds = time.perf_counter() - started
        after = checkpoint_digest(trainer)
        different = [name for name in before if before[name] != after[name]]
        if different:
            raise UserError(f"a checkpoint came back with other {' and '.join(different)} than saved.", exit_code=1)
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        count = 1 + (t.save_total_limit or max(1, trainer.total_steps // max(t.save_steps, 1)))
        needed, free = size * count, shutil.disk_usage(trainer.output_dir).free
        line = (
            f"{trial.format_bytes(size)}, written in {write_seconds:.1f} s, read back in {read_seconds:.1f} s "
            f"with equal weights, optimizer state and progress; {count} of them need {trial.format_bytes(needed)}, "
            f"{trial.format_bytes(free)} are free"
        )
        if needed > free:
            advice = "Set a smaller training.save_total_limit, or training.output_dir on a larger disk."
            raise UserError(f"{line}: too little. {advice}", exit_code=1)
        self.write_seconds = write_seconds
        seconds = {"write_seconds": write_seconds, "read_seconds": read_seconds}
        return line, {"checkpoint_bytes": size, "free_bytes": free, "checkpoints": count, **seconds}

    def export(self) -> Found:
        """Write the model as .nemo and open it again.

        Raises:
            UserError: it has other weights then.
        """
        path = self.trainer.output_dir / "model.nemo"
        weights: dict[str, torch.Tensor] = {}
        with self.trainer.whole_model() as model:
            if self.accelerator.is_main_process:
                save_nemo(model, path)
                weights = {name: tensor.cpu() for name, tensor in merged_state_dict(model).items()}
        self.accelerator.wait_for_everyone()
        if not self.accelerator.is_main_process:
            return "opened by the first process", {}
        opened = load_model(str(path)).state_dict()
        same = {
            n for n, tensor in opened.items() if n in weights and torch.equal(tensor.to(weights[n].dtype), weights[n])
        }
        if different := sorted(weights.keys() - same)[:4]:
            raise UserError(
                f"model.nemo has other weights when it is opened again: {', '.join(different)}.", exit_code=1
            )
        size = path.stat().st_size
        return f"model.nemo, {trial.format_bytes(size)}, opens with the same weights", {"model_bytes": size}

    def time_steps(self) -> Found:
        """Time ordinary steps with the run's own stream, and estimate the whole run.

        Raises:
            UserError: no utterance is left, or the data cannot be read.
        """
        t, trainer = self.settings.training, self.trainer
        trainer.module.train()
        audio, times = 0.0, []
        with contextlib.closing(trial.ordinary_steps(trainer)) as steps:
            trainer.train_on(next(steps))  # workers start, buffers fill
            begun = time.perf_counter()
            while len(times) < TIMED_STEPS:
                started = time.perf_counter()
                step_batches = next(steps)
                trainer.train_on(step_batches)
                times.append(time.perf_counter() - started)
                audio += step_batches.audio_seconds
                # Ranks stop together, or some would wait for others in a step that these do not take.
                if broadcast(time.perf_counter() - begun > TIMED_SECONDS):
                    break
        per_step, total = sum(times) / len(times), trainer.total_steps
        evaluations = (total // t.eval_steps if t.eval_steps else 0) + 1
        clips = count_rows(self.sources.get("validation", [])) or 0
        if self.settings.data.max_eval_samples >= 0:
            clips = min(clips, self.settings.data.max_eval_samples)
        evaluating = evaluations * clips / self.clips_per_second if self.clips_per_second else 0.0
        saving = (total // t.save_steps if t.save_steps else 0) * self.write_seconds
        hours = {"training": per_step * total / 3600, "evaluations": evaluating / 3600, "checkpoints": saving / 3600}
        audio_rate = audio / sum(times)
        line = (
            f"{per_step:.2f} s a step ({audio_rate:.0f} s of audio a second), {total:,} steps in "
            f"{duration(per_step * total)}, validation {duration(evaluating)}, checkpoints {duration(saving)}: "
            f"{duration(per_step * total + evaluating + saving)} in all"
        )
        values = {"seconds_per_step": per_step, "timed_steps": len(times), "steps": total, "hours": hours}
        return line, {**values, "audio_seconds_per_second": audio_rate}


def count_rows(sources: list[OpenSource]) -> int | None:
    """Return the rows of all sources; None where one does not tell."""
    counts = [source.clips for source in sources if source.clips is not None]
    return sum(counts) if len(counts) == len(sources) else None


def checkpointed_tensors(trainer: Trainer) -> dict[str, list[torch.Tensor]]:
    """Return the plain tensors of this process that a checkpoint has to restore."""
    engine = [p for group in unwrap_optimizer(trainer.optimizer).param_groups for p in group["params"]]
    partitions = [p.ds_tensor for p in trainer.module.parameters() if isinstance(p, HasPartition)]
    outer = [*trainer.loss_module.state_dict().values(), *engine, *partitions]
    weights = {id(t): t for o in outer if isinstance(o, torch.Tensor) for t in stored_tensors(o.detach())}
    return {"weights": list(weights.values()), "optimizer state": state_tensors(trainer.optimizer)}


def checkpoint_digest(trainer: Trainer) -> dict[str, Any]:
    """Return what tells whether a checkpoint restored everything; clocks, which go on, are left out."""
    progress = {k: v for k, v in trainer.progress.snapshot().items() if k not in ("wall_seconds", "train_seconds")}
    sums = {name: [checksum(t) for t in tensors] for name, tensors in checkpointed_tensors(trainer).items()}
    return {**sums, "progress": json.dumps(progress)}


def checksum(tensor: torch.Tensor) -> int:
    """Return the CRC-32 of a tensor's bytes."""
    return zlib.crc32(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
