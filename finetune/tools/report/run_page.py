"""What stands in a run's page: the values that templates/run.html shows."""

import json
import shlex
from typing import Any, NamedTuple

import yaml

from finetune.evaluation.significance import describe_difference
from finetune.tools.report import plots
from finetune.tools.report.formats import change, duration, gib, hours, millions, percent, speed, text_of
from finetune.tools.report.guard_plot import axes_of, guard_plot, points_of
from finetune.tools.report.plots import Plot
from finetune.tools.report.read import SPLITS, Run, number

LISTED_PIECES = 20
LISTED_CLIPS, LISTED_REASONS = 100, 50
AUDIO_BYTES = 3_000_000  # of all clips together, as text
AUDIO_SECONDS = 20  # that errors-SPLIT.json keeps of an utterance
WEIGHTS = {"ema": "moving average of the weights, ", "average": "mean of evaluated states, "}
LIMIT_RATES = {"validation_wer": "validation", "guard_wer": "guard_choice"}
NAVIGATION = [
    ("result", "Result"),
    ("run", "The run"),
    ("curves", "Curves"),
    ("memory-section", "Memory"),
    ("batches", "Batches"),
    ("errors", "Errors"),
    ("left-out", "Left out"),
    ("use", "Use"),
    ("reproduce", "Reproduce"),
]


class Tile(NamedTuple):
    """A headline number."""

    name: str
    value: str
    below: str = ""
    kind: str = ""
    """good or bad, for what stands below."""


def run_values(run: Run) -> tuple[dict[str, Any], list[Plot | None]]:
    """Return the values of a run's page, and its plots."""
    curves = plots.run_curves(run)
    guard = guard_plot(points_of(run), run.highest_guard_wer, axes_of(run))
    memory, bar = predicted_memory(run)
    lengths = plots.lengths_plot(run)
    model = run.folder / "model.nemo"
    filtered = run.summary.get("filtered")
    config = yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True)
    values = {
        "run": run,
        "navigation": NAVIGATION,
        "intro": status(run),
        "tiles": tiles(run),
        "languages": language_rows(run),
        "notes": result_notes(run),
        "what_was_run": what_was_run(run),
        "guard_plot": guard,
        "curve_plots": curves,
        "memory": memory,
        "memory_bar": bar,
        "padding": padding_fraction(run),
        "grouped": run.setting("data", "group_by_duration", True) and run.setting("data", "shuffle", True),
        "lengths": lengths,
        "clips": worst_clips(run),
        "reasons": reason_rows(run),
        "examples": [[e["id"], e["source"], e["reason"]] for r in run.quarantine[:LISTED_REASONS] for e in r.examples],
        "filtered": None if filtered is None else sorted(filtered.items(), key=lambda item: -item[1]),
        "model_megabytes": model.stat().st_size / 1e6 if model.is_file() else None,
        "use": commands_for_use(run),
        "reproduce": commands_to_reproduce(run),
        "config_yaml": config if run.config else "# config.yaml is missing",
        "versions": (run.environment.get("versions") or {}).items(),
    }
    return values, [guard, *curves, bar, lengths]


def status(run: Run) -> str:
    """Return how far the run is, in a sentence or two."""
    if run.finished:
        took = duration(number(run.summary.get("wall_seconds")))
        if why := run.summary.get("diverged"):
            return f"Stopped after {text_of(run.summary.get('steps'))} steps in {took}: {why}"
        return f"Done: {text_of(run.summary.get('steps'))} steps in {took}."
    total = run.environment.get("total_steps")
    so_far = f"step {run.step:,}" + (f" of {total:,}" if isinstance(total, int) else "")
    return (
        f"Not done: the last that is known is {so_far}. If the run has died, "
        "training.resume_from_checkpoint=true continues it from its last checkpoint."
    )


# ---- result --------------------------------------------------------------------------------------------------------


def tiles(run: Run) -> list[Tile]:
    """Return the headline numbers, error rates beside those of the base model."""
    split, s = run.judged_on, run.summary
    rates, guard = run.rates(split)[None], run.rates("guard")[None]
    last = run.metrics[-1] if run.metrics else {}
    found = [
        rate_tile(f"WER on {split}", rates.wer_after, rates.wer_before),
        rate_tile(f"CER on {split}", rates.cer_after, rates.cer_before),
    ]
    if run.finished and guard.wer_after is not None:
        found.append(rate_tile("WER on guard", guard.wer_after, guard.wer_before))
    best = str(s.get("best_weights", ""))
    weights = WEIGHTS.get(best, f"{best} from the base model, " if best.startswith("way ") else "")
    return [
        *found,
        Tile("Best step", text_of(run.best_step), f"{weights}chosen by WER on validation"),
        Tile("Throughput", speed(run.throughput), "seconds of audio a second"),
        Tile("Peak memory", gib(run.peak_memory), run.peak_memory_is),
        Tile("Training time", duration(run.training_seconds), f"{text_of(s.get('steps', run.step))} steps"),
        Tile(
            "Audio trained on",
            hours(s.get("audio_hours", last.get("audio_hours"))),
            f"{text_of(s.get('samples', last.get('samples')))} clips",
        ),
        Tile(
            "Trained parameters",
            millions(s.get("trainable_parameters")),
            f"of {millions(s.get('parameters'))}" if s else "known at the end",
        ),
    ]


def rate_tile(name: str, now: float | None, before: float | None) -> Tile:
    """Return an error rate with the base model's and the change."""
    if now is None:
        return Tile(name, "–", "not measured yet")
    if before is None:
        return Tile(name, f"{100 * now:.1f} %", "base model not measured")
    kind = "good" if now < before else "bad" if now > before else ""
    below = ", ".join(filter(None, [f"base {100 * before:.1f} %", change(now, before)]))
    return Tile(name, f"{100 * now:.1f} %", below, kind)


def language_rows(run: Run) -> list[list[Any]]:
    """Return error rates by language, before and after; empty before the first evaluation."""
    return [
        [
            r.language or "all",
            *(percent(r.wer_before), percent(r.wer_after), change(r.wer_after, r.wer_before)),
            *(percent(r.cer_before), percent(r.cer_after), r.clips),
        ]
        for r in run.rates(run.judged_on).values()
        if r.is_measured
    ]


def result_notes(run: Run) -> list[str]:
    """Return whether the changes are more than chance, and what the reader must know of the base model."""
    notes = []
    for split in (run.judged_on, "guard"):
        test = run.rates(split)[None].test
        if test:
            interval = test["interval_b"]
            within = f", 95 % interval {100 * interval[0]:.2f} to {100 * interval[1]:.2f}" if interval else ""
            changed = describe_difference(test, "significantly better", "significantly worse")
            notes.append(f"On {split} WER is {percent(test['wer_b'])} %{within}; against the base model: {changed}.")
    if limit := run.summary.get("guard_limit"):
        notes += limit_notes(limit)
    rates = run.rates(run.judged_on)[None]
    if rates.wer_after is not None and rates.wer_before is None:
        notes.append("The base model was not measured (training.eval_on_start).")
    if run.setting("data", "allow_overlap"):
        notes.append("Clips of the training data were allowed in the evaluation sets (data.allow_overlap).")
    if run.finished and run.summary.get("best_step") == 0:
        without = ", or none kept data.guard_limit" if limit else ""
        notes.append(f"No evaluation was better than the base model{without}: model.nemo is the base model.")
    return notes


def limit_notes(limit: dict[str, Any]) -> list[str]:
    """Return whether data.guard_limit was kept on both halves of data.guard, and what it cost."""
    halves = (("guard_choice, which chose", "choice"), ("guard, which did not choose", "test"))
    highest = {"choice": limit.get("highest_wer"), "test": limit.get("test_highest_wer")}
    notes = []
    for name, key in halves:
        wer, changed = limit.get(f"{key}_wer"), limit.get(f"{key}_change")
        if wer is None or highest[key] is None:
            continue
        kept = limit.get("kept" if key == "choice" else "test_kept")
        interval = (changed or {}).get("difference_interval")
        within = f" ({100 * interval[0]:+.2f} to {100 * interval[1]:+.2f} points, 95 % interval)" if interval else ""
        notes.append(
            f"The limit {limit.get('limit')} is {'kept' if kept else 'not kept'} on {name}: "
            f"WER {percent(wer)} %{within}, {percent(highest[key])} % at most."
        )
    free = limit.get("best_without_limit") or {}
    if free and not free.get("kept"):
        rates = [f"{percent(free.get(key))} % on {on}" for key, on in LIMIT_RATES.items()]
        which = f" ({free['weights']})" if free.get("weights", "raw") != "raw" else ""
        notes.append(f"Without the limit step {free.get('step')}{which} would be the best: WER {', '.join(rates)}.")
    return notes


# ---- the run -------------------------------------------------------------------------------------------------------


def training_rows(run: Run) -> list[tuple[str, str]]:
    """Return how a run trains, for its page and for the model card."""
    s, e = run.summary, run.environment
    processes = e.get("processes") or s.get("world_size") or 1
    accumulated = run.setting("training", "gradient_accumulation_steps", 1)
    batch = f"{run.setting('training', 'per_device_train_batch_size', 1)} clips"
    if seconds := run.setting("data", "batch_duration"):
        batch = f"{seconds:g} s of audio"
    elif run.setting("data", "batch_bounds") or run.setting("training", "auto_batch"):
        batch = "as many clips of like length as fit"
    precision = next((name for name in ("bf16", "fp16") if run.setting("training", name)), "fp32")
    schedule = run.setting("training", "lr_scheduler_type", "")
    warmup = run.setting("training", "warmup_steps") or run.setting("training", "warmup_ratio")
    return [
        ("Strategy", run.strategy),
        ("Optimizer", s.get("optimizer") or run.setting("training", "optimizer")),
        ("Precision", f"{precision}, weights in {run.setting('model', 'dtype', 'float32')}"),
        ("A step", f"{processes} process{'es' if processes > 1 else ''} × {accumulated} accumulated × {batch}"),
        ("Learning rate", f"{text_of(run.setting('training', 'learning_rate'))}, {schedule}, warm-up {warmup or 0}"),
    ]


def what_was_run(run: Run) -> list[tuple[str, Any]]:
    """Return what was trained, how, on what data and on what machine."""
    s, e = run.summary, run.environment
    machine = f"no GPU, {e.get('cpus', '?')} CPU threads ({e.get('processor', '?')})"
    rows = [
        ("Model", run.setting("model", "name", "–")),
        ("Vocabulary", vocabulary_text(run)),
        *training_rows(run),
        *((f"Data: {split}", source_text(run.setting("data", split))) for split in SPLITS),
        ("Machine", ", ".join(map(str, e.get("gpus") or [])) or machine),
        ("System", f"{e.get('system', '?')}, Python {e.get('python', '?')}"),
        ("Continued from", f"step {s['resumed_from']}" if s.get("resumed_from") is not None else None),
    ]
    return [(name, value) for name, value in rows if value is not None]


def vocabulary_text(run: Run) -> str | None:
    """Return how the vocabulary was changed, with the new pieces; None where it was not."""
    pieces, growth = run.vocabulary.get("pieces"), run.vocabulary.get("growth")
    if pieces is None or growth is None:
        return None if pieces is None else f"replaced: {pieces:,} pieces"
    listed = growth.get("new_pieces") or growth["new_characters"]
    kind = "new pieces" if "new_pieces" in growth else "new characters"
    more = " …" if len(listed) > LISTED_PIECES else ""
    text = f"extended by {growth['pieces_added']:,} pieces to {pieces:,}"
    return f"{text}; {kind}: {' '.join(listed[:LISTED_PIECES])}{more}" if listed else text


def source_text(value: object) -> str | None:
    """Return a data source as one line."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(v, str) for v in value):
        return ", ".join(value)
    return json.dumps(value, ensure_ascii=False, default=str)


def predicted_memory(run: Run) -> tuple[str, Plot | None]:
    """Return predicted and measured memory in words, and their bar."""
    measured = run.peak_memory
    entry = (run.plan.get("strategies") or [{}])[0]
    predicted, parts = number(entry.get("peak_memory_gib")), entry.get("parts_gib") or {}
    text = (
        "Nothing has been measured yet." if measured is None else f"Measured: {gib(measured)}, {run.peak_memory_is}."
    )
    if predicted is None:
        why = f" ({entry['reason']})" if entry.get("reason") else ""
        return f"{text} No prediction was made for this run{why}.", None
    gpu = f" for {run.plan['gpu']}" if isinstance(run.plan.get("gpu"), str) else ""
    text = f"Predicted: {gib(predicted)}{gpu}. {text}"
    if run.has_gpu and measured:
        text += f" The prediction is off by {change(predicted, measured)}."
    elif not run.has_gpu:
        text += (
            " Without a GPU the measured peak holds the interpreter, the libraries and the data loader as well; "
            "the prediction counts the tensors of a step only."
        )
    return text, plots.memory_bar(parts or {"peak": predicted}, measured)


def padding_fraction(run: Run) -> float | None:
    """Return the share of the batches that was padding; None before the first logged step."""
    padding = number(run.summary.get("padding_fraction"))
    if padding is None:
        sums = plots.batch_sums(run).values()
        padded = sum(values[3] for values in sums)
        padding = 1 - sum(values[2] for values in sums) / padded if padded else None
    return padding


# ---- errors --------------------------------------------------------------------------------------------------------


def worst_clips(run: Run) -> list[dict[str, Any]]:
    """Return the worst utterances of the last evaluation that listed them."""
    found, held = [], 0
    for place, clip in enumerate((run.mistakes.get("clips") or [])[:LISTED_CLIPS], 1):
        seconds, audio = number(clip.get("seconds")), str(clip.get("audio") or "")
        held += len(audio)
        audio = audio if held <= AUDIO_BYTES else ""
        length = "" if seconds is None else f", {seconds:.1f} s"
        errors = f"{clip.get('word_errors')} errors in {clip.get('words')} words"
        found.append(
            {
                **clip,
                "place": place,
                "about": f"{clip.get('language') or 'language unknown'}{length}, {errors}",
                "audio": audio if audio.startswith("data:audio/") else "",
                "is_cut": seconds is not None and seconds > AUDIO_SECONDS,
            }
        )
    return found


def reason_rows(run: Run) -> list[list[Any]]:
    """Return the reasons of the quarantine with clips and examples; the rare ones of many as one."""
    shown, rest = run.quarantine[:LISTED_REASONS], run.quarantine[LISTED_REASONS:]
    rows: list[list[Any]] = [[r.text, r.clips, ", ".join(e["id"] for e in r.examples)] for r in shown]
    return rows + [[f"{len(rest):,} other reasons", sum(r.clips for r in rest), ""]] * bool(rest)


# ---- commands ------------------------------------------------------------------------------------------------------


def commands_for_use(run: Run) -> str:
    """Return what to do with the model."""
    folder = shlex.quote(str(run.setting("training", "output_dir", run.folder)))
    return f"""\
# Transcribe files of any length
python -m finetune.transcribe --model {folder} FILE.wav --timestamps

# WER and CER on other data
python -m finetune.evaluate --model {folder} --data DATA --json result.json

# A .nemo that plain NeMo restores
python -m finetune.export --model {folder} --to nemo --output exported"""


def commands_to_reproduce(run: Run) -> str:
    """Return the revision, its packages and the command of the run."""
    command, revision = run.environment.get("command"), run.environment.get("git_revision")
    return "\n".join(
        [
            f"git checkout {revision}" if revision else "# the git revision is not known",
            "pip install -c constraints.txt -e .",
            shlex.join(map(str, command)) if command else "# the command line is not known",
        ]
    )
