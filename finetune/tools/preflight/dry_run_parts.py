"""The parts of `--dry-run`: each tries one thing of a run and returns what to say and what to keep, or raises what is wrong."""

import json
import shutil
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from finetune.data.normalization import normalize_text
from finetune.data.quarantine import BAD_FRACTION_JUDGED_AFTER, BadUtterance
from finetune.data.reader import group_sources
from finetune.data.retry import Unreachable
from finetune.data.run_file import with_filters
from finetune.data.survey import length_of, spread_rows
from finetune.data.utterances import text_encoder
from finetune.distributed import broadcast
from finetune.errors import UserError
from finetune.models.adapters import merged_state_dict
from finetune.models.loading import load_model
from finetune.models.nemo_archive import save_nemo
from finetune.strategies.optimizers import state_tensors, stored_tensors, unwrap_optimizer
from finetune.strategies.strategy import engine_with
from finetune.tools.preflight import trial
from finetune.training import checkpoints
from finetune.training.data import make_stream
from finetune.training.out_of_memory import is_out_of_memory
from finetune.training.trainer import Trainer

if TYPE_CHECKING:
    from finetune.tools.preflight.dry_run import Attempts

TEXTS, TEXT_SECONDS = 1000, 20.0
CLIPS = 200
EVALUATED = 20
WAITING_CLIPS = 64  # in each worker, in place of the run's buffer, which takes long to fill
TIMED_STEPS, TIMED_SECONDS = 8, 15.0
GIB = 2**30
CLOCKS = ("wall_seconds", "train_seconds")

Found = tuple[str, dict[str, Any]]

# ---- what does not need the engine ---------------------------------------------------------------------------------


def tokenizer_coverage(attempts: "Attempts", settings: Any, model: Any, sources: list[Any]) -> Found:
    """What the tokenizer cannot write of texts from all over data.train.

    Raises:
        UserError: more texts would be lost than data.max_bad_fraction.
    """
    d, accelerator = settings.data, attempts.accelerator
    grouped = group_sources(with_filters(sources, d), d.max_samples)
    options = make_stream(accelerator, model, settings, sources, training=True).options
    encode = text_encoder(model.tokenizer)
    texts = characters = tokens = 0
    seconds = 0.0
    lost: list[str] = []
    unknown: dict[str, int] = {}
    known: dict[str, bool] = {}

    def is_known(character: str) -> bool:
        if character not in known:
            known[character] = character.isspace() or _writes(encode, character)
        return known[character]

    for ref, row in spread_rows(grouped, options, TEXTS, TEXT_SECONDS):
        source, _ = grouped.groups[ref[0]][ref[2]]
        text = row.get(source.columns["text"])
        if not isinstance(text, str):
            continue
        text = normalize_text(text, source.source.text_normalization or d.text_normalization)
        texts, characters = texts + 1, characters + len(text)
        for character in text:
            if not is_known(character):
                unknown[character] = unknown.get(character, 0) + 1
        try:
            ids = encode(text)
            length = length_of(source, row)
        except (BadUtterance, Unreachable):
            if not _writes(encode, text):
                lost.append(text)
            continue
        tokens, seconds = tokens + len(ids), seconds + length
    if not texts:
        raise UserError("data.train: not one text was found in the rows that were looked at.", exit_code=1)
    most = sorted(unknown.items(), key=lambda pair: -pair[1])
    values = {
        "texts": texts,
        "texts_lost": len(lost),
        "characters": characters,
        "characters_unknown": sum(unknown.values()),
        "unknown": dict(most[:100]),
        "tokens_per_second": tokens / seconds if seconds else None,
    }
    pace = f", {values['tokens_per_second']:.1f} tokens a second of audio" if seconds else ""
    if not lost:
        return f"writes all of {texts} texts{pace}", values
    said = (
        f"cannot write {len(lost)} of {texts} texts ({len(lost) / texts:.1%}), {sum(unknown.values())} of {characters} characters "
        f"({sum(unknown.values()) / max(characters, 1):.2%}): {' '.join(f'{c} {n}x' for c, n in most[:20])}{pace}"
    )
    advice = "normalise the texts (data.text_normalization: basic), or give the model pieces for them (model.tokenizer.extend_from)"
    if len(lost) > d.max_bad_fraction * texts:
        raise UserError(
            f"{said}. More than data.max_bad_fraction={d.max_bad_fraction:g}: {advice}, such as {lost[0]!r}."
        )
    attempts.warn(f"texts with unknown characters go to quarantine; {advice}")
    return said, values


def _writes(encode: Callable[[str], list[int]], text: str) -> bool:
    try:
        encode(text)
    except BadUtterance:
        return False
    return True


def decode_clips(attempts: "Attempts", settings: Any, model: Any, sources: list[Any]) -> Found:
    """The first clips through the run's own stream and workers, with what filters and quarantine take of them.

    Raises:
        UserError: the data cannot be read, no clip is left, or more are bad than data.max_bad_fraction.
    """
    accelerator = attempts.accelerator
    stream = make_stream(accelerator, model, settings, sources, training=True)
    size = min(WAITING_CLIPS, stream.options.shuffle_buffer_size)
    stream.options.shuffle_buffer_size = size
    wanted = -(-CLIPS // accelerator.num_processes)
    clips = 0
    audio_seconds = 0.0
    first: float | None = None
    quarantined: list[dict[str, str]] = []
    filtered: dict[str, int] = {}
    error = None
    started = time.perf_counter()
    batches = stream.batches()
    for batch in batches:
        error = batch.error
        quarantined += batch.quarantined
        for reason, n in batch.filtered.items():
            filtered[reason] = filtered.get(reason, 0) + n
        if batch.ids:
            first = first or time.perf_counter() - started
            clips += len(batch.ids)
            audio_seconds += float(batch.audio_lengths_B.sum()) / stream.options.sample_rate
        if error or clips + len(quarantined) + sum(filtered.values()) >= wanted:
            break
    batches.close()
    parts = trial.gathered(accelerator, (clips, quarantined, filtered, error, audio_seconds))
    clips, audio_seconds = sum(part[0] for part in parts), sum(part[4] for part in parts)
    quarantined = [report for part in parts for report in part[1]]
    filtered = {reason: sum(part[2].get(reason, 0) for part in parts) for part in parts for reason in part[2]}
    errors = [part[3] for part in parts if part[3]]
    if errors:
        raise UserError(f"data.train: {errors[0]}", exit_code=1)
    left_out, judged = sum(filtered.values()), clips + len(quarantined) + sum(filtered.values())
    reasons = "".join(f", {n} {reason}" for reason, n in sorted(filtered.items(), key=lambda pair: -pair[1]))
    said = f"{clips} of {judged} clips decoded; filters take {left_out}{reasons}; quarantine takes {len(quarantined)}"
    if quarantined:
        said += f", such as {quarantined[0]['id']}: {quarantined[0]['reason']}"
    if not clips:
        raise UserError(f"data.train: no clip is left to train on: {said}", exit_code=1)
    limit = settings.data.max_bad_fraction
    if len(quarantined) > limit * judged:
        problem = f"{said}. More than data.max_bad_fraction={limit:g}: mend the data, or raise it."
        if judged >= BAD_FRACTION_JUDGED_AFTER or judged >= sum(s.clips or judged + 1 for s in sources):
            raise UserError(problem, exit_code=1)
        attempts.warn(problem)
    return said, {
        "decoded": clips,
        "quarantined": len(quarantined),
        "filtered": filtered,
        "audio_seconds": audio_seconds,
        "seconds_to_first_batch": first,
    }


# ---- what needs the engine ----------------------------------------------------------------------------------------------


def evaluate_some(attempts: "Attempts", trainer: Trainer) -> Found:
    """WER of the base model on some clips of each split that the run evaluates.

    Raises:
        UserError: a split cannot be read, or has no words.
    """
    limit = trainer.config.data.max_eval_samples
    few = min(EVALUATED, limit) if limit >= 0 else EVALUATED
    said, wer = [], {}
    clips = seconds = 0.0
    with trainer.whole_model() as model:
        for split in (s for s in ("validation", "test", "guard") if s in trainer.sources):
            started = time.perf_counter()
            board = trainer.evaluator.evaluate_split(model, split, max_clips=few)
            seconds, clips = seconds + time.perf_counter() - started, clips + board.total.clips
            if not board.total.words:
                raise UserError(
                    f"data.{split}: no clip with words among the first {EVALUATED}; {len(board.quarantined)} cannot be used"
                    + (f", such as {board.quarantined[0]['reason']}" if board.quarantined else "."),
                    exit_code=1,
                )
            wer[split] = board.total.rates()["wer"]
            said.append(f"WER {wer[split]:.3f} on {board.total.clips} clips of {split}")
            if board.quarantined:
                attempts.warn(
                    f"data.{split}: {len(board.quarantined)} clip(s) cannot be used, such as {board.quarantined[0]}"
                )
            if wer[split] >= 1 and not trainer.config.model.name.endswith((".yaml", ".yml")):
                attempts.warn(
                    f"data.{split}: WER {wer[split]:.2f} is that of a model that does not know this language"
                )
    if not said:
        attempts.warn("no data.validation: nothing can tell whether the model gets better")
        return "nothing to evaluate", {}
    return ", ".join(said), {"wer": wer, "clips_per_second": clips / seconds}


def worst_batch(attempts: "Attempts", trainer: Trainer) -> Found:
    """Two optimizer steps with each of the batches that need most: the second one has the optimizer's states beside it.

    Raises:
        UserError: memory does not suffice, or a loss is not finite.
    """
    accelerator = trainer.accelerator
    worst, survey = trial.worst_batches(trainer)
    meter = trial.MemoryMeter(trainer)
    trainer.module.train()
    peaks: list[tuple[int, str]] = []
    said = ""
    for _ in range(2):
        for name, batch in worst.items():
            said = f"{name}: {trial.say_batch(trial.batch_size(trainer.model, batch))}"
            step_batches = trial.worst_step(trainer, batch)
            try:
                with meter.step(step_batches.batches):
                    result = trainer.train_on(step_batches)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                engine = engine_with(attempts.strategy.engine, accelerator.num_processes)
                raise UserError(f"{name}: {trial.say_out_of_memory(error, trainer, engine, step_batches)}") from error
            if result.skipped is not None and accelerator.scaler is None:
                raise UserError(f"{said}: loss or gradient is not finite. Lower training.learning_rate.", exit_code=1)
            memory = meter.read()
            peaks.append((memory["peak_tensors"] or memory["peak_resident"], said))
    by_rank = trial.gathered(accelerator, max(peaks))
    peak, said = max(by_rank)
    kind = "tensors" if memory["peak_tensors"] is not None else "resident memory"
    if survey.rows is None or survey.looked < survey.rows:
        attempts.warn(
            f"{survey}; longer ones may come, up to data.max_duration={trainer.config.data.max_duration:g} s"
        )
    values = {"peak_gib": peak / GIB, "total_gib": memory["total"] / GIB, "rows_looked_at": survey.looked}
    of = f" of the GPU's {memory['total'] / GIB:.1f} GiB" if meter.gpu else ""
    return f"peak {trial.say_bytes(peak)} of {kind}{of}, with {said}", values


def save_and_read(trainer: Trainer) -> Found:
    """Writes a checkpoint, spoils what is in memory, reads it back and compares.

    Raises:
        UserError: something came back otherwise, or the disk is too small for the checkpoints of the run.
    """
    t = trainer.config.training
    started = time.perf_counter()
    trainer.save(wait=True)
    written = time.perf_counter() - started
    path = checkpoints.checkpoint_path(trainer.output_dir, trainer.progress.step)
    before = {name: checksums(tensors) for name, tensors in held(trainer).items()}
    progress = {
        k: v for k, v in asdict(trainer.progress).items() if k not in CLOCKS
    }  # each process has clocks of its own
    for tensors in held(trainer).values():
        for tensor in tensors:
            tensor.zero_()
    trainer.progress.restore({})
    started = time.perf_counter()
    trainer.begin(path)
    read = time.perf_counter() - started
    after = {name: checksums(tensors) for name, tensors in held(trainer).items()}
    different = [name for name in before if before[name] != after[name]]
    if json.dumps(progress) != json.dumps({k: v for k, v in asdict(trainer.progress).items() if k not in CLOCKS}):
        different.append("progress")
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    if different:
        raise UserError(f"a checkpoint came back with other {' and '.join(different)} than were saved.", exit_code=1)
    keep = t.save_total_limit or max(1, trainer.total_steps // max(t.save_steps, 1))
    needed, free = size * (keep + 1), shutil.disk_usage(trainer.output_dir).free
    said = (
        f"{trial.say_bytes(size)}, written in {written:.1f} s, read back in {read:.1f} s with equal weights, optimizer state and progress; "
        f"{keep + 1} of them need {trial.say_bytes(needed)}, {trial.say_bytes(free)} are free"
    )
    if needed > free:
        raise UserError(
            f"{said}: too little. Set a smaller training.save_total_limit, or training.output_dir on a larger disk.",
            exit_code=1,
        )
    values = {"checkpoint_bytes": size, "free_bytes": free, "checkpoints": keep + 1, "write_seconds": written}
    return said, {**values, "read_seconds": read}


def held(trainer: Trainer) -> dict[str, list[torch.Tensor]]:
    """The plain tensors of this process that a checkpoint has to bring back."""
    engine = [p for group in unwrap_optimizer(trainer.optimizer).param_groups for p in group["params"]]
    parts = [p.ds_tensor for p in trainer.module.parameters() if hasattr(p, "ds_tensor")]
    outer = [*trainer.loss_module.state_dict().values(), *engine, *parts]
    weights = {id(t): t for o in outer if isinstance(o, torch.Tensor) for t in stored_tensors(o.detach())}
    return {"weights": list(weights.values()), "optimizer state": state_tensors(trainer.optimizer)}


def checksums(tensors: Iterable[torch.Tensor]) -> list[int]:
    """One number a tensor, of its bytes."""
    flat = (tensor.detach().cpu().contiguous().reshape(-1) for tensor in tensors)
    return [zlib.crc32(tensor.view(torch.uint8).numpy()) if tensor.numel() else 0 for tensor in flat]


def export(trainer: Trainer) -> Found:
    """Writes the model as .nemo and opens it again.

    Raises:
        UserError: it has other weights then.
    """
    path = trainer.output_dir / "model.nemo"
    with trainer.whole_model() as model:
        if trainer.accelerator.is_main_process:
            save_nemo(model, path)
            weights = {name: tensor.cpu() for name, tensor in merged_state_dict(model).items()}
    trainer.accelerator.wait_for_everyone()
    if not trainer.accelerator.is_main_process:
        return "opened by the first process", {}
    opened = load_model(str(path)).state_dict()
    different = [
        n for n, tensor in weights.items() if n not in opened or not torch.equal(opened[n].to(tensor.dtype), tensor)
    ]
    if different:
        raise UserError(
            f"model.nemo has other weights when it is opened again: {', '.join(different[:4])}.", exit_code=1
        )
    size = path.stat().st_size
    return f"model.nemo, {trial.say_bytes(size)}, opens with the same weights", {"model_bytes": size}


def time_steps(trainer: Trainer, costs: dict[str, Any]) -> Found:
    """Ordinary steps with the run's own stream, and what the whole plan takes at that pace.

    Args:
        trainer: after its first steps.
        costs: clips_per_second of evaluations and write_seconds of checkpoints, where known.

    Raises:
        UserError: no clip is left, or the data cannot be read.
    """
    t = trainer.config.training
    trainer.module.train()
    steps = trial.ordinary_steps(trainer)
    trainer.train_on(next(steps))  # workers start, buffers fill
    audio, times = 0.0, []
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
    steps.close()
    a_step, total = sum(times) / len(times), trainer.total_steps
    evaluations = (total // t.eval_steps if t.eval_steps else 0) + 1
    clips = [s.clips for s in trainer.sources.get("validation", ())]
    judged = 0 if not clips or None in clips else sum(clips)
    if trainer.config.data.max_eval_samples >= 0:
        judged = min(judged, trainer.config.data.max_eval_samples)
    evaluating = evaluations * judged / costs["clips_per_second"] if "clips_per_second" in costs else 0.0
    saving = (total // t.save_steps if t.save_steps else 0) * costs.get("write_seconds", 0.0)
    hours = {"training": a_step * total / 3600, "evaluations": evaluating / 3600, "checkpoints": saving / 3600}
    said = (
        f"{a_step:.2f} s a step ({audio / sum(times):.0f} s of audio a second), {total:,} steps in {hours['training']:.1f} h, validation "
        f"{hours['evaluations']:.1f} h, checkpoints {hours['checkpoints']:.1f} h: {sum(hours.values()):.1f} h in all"
    )
    values = {"seconds_per_step": a_step, "timed_steps": len(times), "steps": total, "hours": hours}
    return said, {**values, "audio_seconds_per_second": audio / sum(times)}
