"""The sections of a run's page."""

import json
import shlex
from typing import Any

import yaml

from finetune.evaluation.significance import describe_difference
from finetune.tools.report import plots
from finetune.tools.report.confusions import errors_section
from finetune.tools.report.markup import code, duration, escape, facts, figure, more, section, table, text_of, tile
from finetune.tools.report.plots import Plot
from finetune.tools.report.read import Run, number


def run_sections(run: Run) -> tuple[str, list[tuple[str, str, str]], list[Plot | None]]:
    """Introduction, sections (id, name in the navigation, HTML) and plots of a run's page."""
    curves = [
        plots.loss_plot(run),
        plots.wer_plot(run),
        plots.wer_plot(run, "guard") if any(row["step"] for row in run.rows("guard")) else None,
        plots.rates_plot(run),
        plots.throughput_plot(run),
        plots.memory_plot(run),
        plots.gradient_plot(run),
        plots.waiting_plot(run),
    ]
    bar, memory = memory_section(run)
    lengths = plots.lengths_plot(run)
    drawn = "".join(map(figure, curves)) or "<p>No step has been logged yet.</p>"
    found = [
        ("result", "Result", result_section(run)),
        ("run", "The run", what_section(run)),
        ("curves", "Curves", section("curves", "Curves", f"<div class='plots'>{drawn}</div>")),
        ("memory-section", "Memory", memory),
        ("batches", "Batches", batches_section(run, lengths)),
        ("errors", "Errors", errors_section(run)),
        ("left-out", "Left out", left_out_section(run)),
        ("use", "Use", use_section(run)),
        ("reproduce", "Reproduce", reproduce_section(run)),
    ]
    return f"<p>{escape(status(run))}</p>", found, [*curves, bar, lengths]


def status(run: Run) -> str:
    """How far the run is, in one sentence or two."""
    total = run.summary.get("total_steps") or run.environment.get("total_steps")
    if run.finished:
        took = duration(number(run.summary.get("wall_seconds")))
        return f"Done: {text_of(run.summary.get('steps'))} steps in {took}."
    so_far = f"step {run.step:,}" + (f" of {total:,}" if isinstance(total, int) else "")
    return (
        f"Not done: the last that is known is {so_far}. If the run has died, training.resume_from_checkpoint=true continues it "
        "from its last checkpoint."
    )


def result_section(run: Run) -> str:
    """Headline numbers with the base model beside them, and all languages."""
    split = run.judged_on
    base, best = run.base(split), run.best(split)
    now, before = best.get(None, {}), base.get(None, {})
    s, last = run.summary, run.metrics[-1] if run.metrics else {}
    kind = {"ema": "moving average of the weights, ", "average": "mean of evaluated states, "}.get(
        s.get("best_weights"), ""
    )
    tiles = [
        rate_tile(f"WER on {split}", now.get("wer"), before.get("wer")),
        rate_tile(f"CER on {split}", now.get("cer"), before.get("cer")),
        tile("Best step", text_of(s.get("best_step", now.get("step"))), f"{kind}chosen by WER on validation"),
        tile("Throughput", *throughput(run)),
        tile("Peak memory", gib(measured_memory(run)), memory_kind(run)),
        tile("Training time", duration(training_seconds(run)), f"{text_of(s.get('steps', run.step))} steps"),
        tile(
            "Audio trained on",
            hours(s.get("audio_hours", last.get("audio_hours"))),
            f"{text_of(s.get('samples', last.get('samples')))} clips",
        ),
        tile(
            "Trained parameters",
            millions(s.get("trainable_parameters")),
            f"of {millions(s.get('parameters'))}" if s else "known at the end",
        ),
    ]
    if s.get("guard_wer_after") is not None:
        tiles.insert(2, rate_tile("WER on guard", s["guard_wer_after"], s.get("guard_wer_before")))
    rows = []
    for name in [None, *sorted({*base, *best} - {None})]:
        old, new = base.get(name, {}), best.get(name, {})
        rates = [percent(row.get(key)) for key in ("wer", "cer") for row in (old, new)]
        rows.append(
            [name or "all", *rates[:2], change(new.get("wer"), old.get("wer")), *rates[2:], (new or old).get("clips")]
        )
    heads = ["language", "WER base, %", "WER, %", "change", "CER base, %", "CER, %", "clips"]
    caption = f"On {split}, normalisation {run.setting('data', 'wer_normalization', 'basic')}"
    languages = table(heads, rows, caption) if best else "<p>Nothing has been evaluated yet.</p>"
    languages += significance_text(run, split)
    if best and not base:
        languages += "<p class='muted'>The base model was not measured (training.eval_on_start).</p>"
    if best and run.finished and s.get("best_step") == 0:
        languages += "<p>No evaluation was better than the base model: model.nemo is the base model.</p>"
    return section("result", "Result", f"<dl class='tiles'>{''.join(tiles)}</dl>", "<h3>By language</h3>", languages)


def significance_text(run: Run, split: str) -> str:
    """Whether the change is more than chance, on the split of the headline and on the guard set."""
    found = run.summary.get("significance")
    told = []
    for name in (split, "guard"):
        result = found.get(name) if isinstance(found, dict) else None
        if isinstance(result, dict) and {"difference", "difference_interval", "p_value", "significant"} <= set(result):
            interval = result.get("interval_b")
            sure = f", 95 % interval {100 * interval[0]:.2f} to {100 * interval[1]:.2f}" if interval else ""
            changed = describe_difference(
                {"clips_needed": None, **result}, "significantly better", "significantly worse"
            )
            told.append(f"On {name} WER is {percent(result.get('wer_b'))} %{sure}; against the base model: {changed}.")
    return "".join(f"<p>{escape(line)}</p>" for line in told)


def rate_tile(name: str, now: Any, before: Any) -> str:
    """An error rate with the base model's and the change."""
    if number(now) is None:
        return tile(name, "–", "not measured yet")
    if number(before) is None:
        return tile(name, f"{100 * now:.1f} %", "base model not measured")
    kind = "good" if now < before else "bad" if now > before else ""
    return tile(name, f"{100 * now:.1f} %", f"base {100 * before:.1f} %, {change(now, before)}", kind)


def change(now: Any, before: Any) -> str | None:
    """Relative change in words."""
    if number(now) is None or not number(before):
        return None
    return f"{100 * (now - before) / before:+.0f} %".replace("-", "−")


def percent(value: Any) -> str | None:
    """Percent with two decimals, without the sign."""
    return None if number(value) is None else f"{100 * value:.2f}"


def throughput(run: Run) -> tuple[str, str]:
    """Audio seconds a second of the whole run, or of the last lines."""
    speed = number(run.summary.get("audio_seconds_per_second"))
    if speed is None:
        found = [v for row in run.metrics[-20:] if (v := number(row.get("audio_seconds_per_second"))) is not None]
        speed = sum(found) / len(found) if found else None
    return ("–", "") if speed is None else (f"{speed:.1f}", "seconds of audio a second")


def training_seconds(run: Run) -> float | None:
    """Seconds in optimizer steps, without evaluations."""
    told = number(run.summary.get("train_seconds"))
    if told is not None or not run.metrics:
        return told
    total, before = 0.0, 0
    for row in run.metrics:
        total += (number(row.get("seconds_per_step")) or 0.0) * (row["step"] - before)
        before = row["step"]
    return total


def measured_memory(run: Run) -> float | None:
    """Peak memory, GiB."""
    told = number(run.summary.get("peak_memory_gib"))
    found = [v for row in run.metrics if (v := number(row.get("peak_memory_gib"))) is not None]
    return told if told is not None else max(found, default=None)


def memory_kind(run: Run) -> str:
    """What the peak is a peak of."""
    told = run.summary.get("peak_memory_is")
    return str(told) if told else "CUDA allocator" if run.has_gpu else "resident memory of the process"


def gib(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f} GiB"


def hours(value: Any) -> str:
    return "–" if number(value) is None else f"{value:,.2f} h" if value < 100 else f"{value:,.0f} h"


def millions(value: Any) -> str:
    return "–" if number(value) is None else f"{value / 1e6:,.1f} M"


def what_section(run: Run) -> str:
    """What was trained, how, on what data and on what machine."""
    s, e = run.summary, run.environment
    batch = [e.get("processes") or s.get("world_size") or 1] + [
        run.setting("training", key, 1) for key in ("gradient_accumulation_steps", "per_device_train_batch_size")
    ]
    clips = f"{batch[0]} process(es) × {batch[1]} accumulated × {batch[2]} clips"
    if run.setting("data", "batch_duration"):
        clips = (
            f"{batch[0]} process(es) × {batch[1]} accumulated × {run.setting('data', 'batch_duration'):g} s of audio"
        )
    precision = "bf16" if run.setting("training", "bf16") else "fp16" if run.setting("training", "fp16") else "fp32"
    rows = [
        ("Model", run.setting("model", "name")),
        ("Strategy", " + ".join(s.get("strategy") or e.get("strategy") or []) or "none"),
        ("Optimizer", s.get("optimizer") or run.setting("training", "optimizer")),
        ("Precision", f"{precision}, weights in {run.setting('model', 'dtype', 'float32')}"),
        ("A step", clips),
        (
            "Learning rate",
            f"{text_of(run.setting('training', 'learning_rate'))}, {run.setting('training', 'lr_scheduler_type', '')}",
        ),
        *(
            (f"Data: {split}", source_text(run.setting("data", split)))
            for split in ("train", "validation", "test", "guard")
            if run.setting("data", split)
        ),
        (
            "Machine",
            ", ".join(map(str, e.get("gpus") or []))
            or f"no GPU, {e.get('cpus', '?')} CPU threads ({e.get('processor', '?')})",
        ),
        ("System", f"{e.get('system', '?')}, Python {e.get('python', '?')}"),
    ]
    if s.get("resumed_from") is not None:
        rows.append(("Continued from", f"step {s['resumed_from']}"))
    return section("run", "What was run, on what", facts(rows))


def source_text(value: Any) -> str | None:
    """A data source as one line."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(v, str) for v in value):
        return ", ".join(value)
    return json.dumps(value, ensure_ascii=False, default=str)


def memory_section(run: Run) -> tuple[Plot | None, str]:
    """The bar of predicted and measured memory, and its section."""
    measured = measured_memory(run)
    entries = run.plan.get("strategies")
    entry = entries[0] if isinstance(entries, list) and entries and isinstance(entries[0], dict) else {}
    parts = entry.get("parts_gib")
    parts = {str(k): v for k, v in parts.items() if number(v) is not None} if isinstance(parts, dict) else {}
    predicted = number(entry.get("peak_memory_gib"))
    if not parts and predicted is not None:
        parts = {"peak": predicted}
    kind = (
        f"Measured: {gib(measured)}, {memory_kind(run)}." if measured is not None else "Nothing has been measured yet."
    )
    if not parts:
        why = f" ({entry['reason']})" if entry.get("reason") else ""
        return None, section(
            "memory-section", "Memory", f"<p>{escape(kind)} No prediction was made for this run{escape(why)}.</p>"
        )
    if predicted is None:
        predicted = sum(parts.values())
    bar = plots.memory_bar(run, parts, measured)
    said = (
        f"Predicted: {gib(predicted)}"
        + (f" for {run.plan['gpu']}" if isinstance(run.plan.get("gpu"), str) else "")
        + f". {kind}"
    )
    if run.has_gpu and measured:
        said += f" The prediction is off by {change(predicted, measured)}."
    elif not run.has_gpu:
        said += (
            " Without a GPU the measured peak holds the interpreter, the libraries and the data loader as well; the prediction "
            "counts the tensors of a step only."
        )
    return bar, section("memory-section", "Memory", f"<p>{escape(said)}</p>", figure(bar))


def batches_section(run: Run, lengths: Plot | None) -> str:
    """Padding, and the lengths of the batches."""
    padding = number(run.summary.get("padding_fraction"))
    if padding is None:
        sums = plots.batch_sums(run).values()
        padded = sum(values[3] for values in sums)
        padding = 1 - sum(values[2] for values in sums) / padded if padded else None
    if padding is None:
        return section("batches", "Buckets and padding", "<p>No step has been logged yet.</p>")
    grouped = run.setting("data", "group_by_duration", True) and run.setting("data", "shuffle", True)
    how = "grouped by length (data.group_by_duration)" if grouped else "not grouped by length (data.group_by_duration)"
    said = f"{100 * padding:.1f} % of what was computed was padding; batches were {how}."
    return section("batches", "Buckets and padding", f"<p>{escape(said)}</p>", figure(lengths))


def left_out_section(run: Run) -> str:
    """Quarantine by reason, and what the filters left out."""
    reasons = [[reason.text, reason.clips, ", ".join(e["id"] for e in reason.examples)] for reason in run.quarantine]
    total = sum(reason.clips for reason in run.quarantine)
    examples = [[e["id"], e["source"], e["reason"]] for reason in run.quarantine for e in reason.examples]
    parts = [
        f"<p>{total:,} clips could not be used; each stands in quarantine.jsonl.</p>",
        table(["reason", "clips", "such as"], reasons, "In quarantine by reason") if reasons else "",
        more("Examples with the whole reason", table(["id", "source", "reason"], examples, label="examples"))
        if examples
        else "",
    ]
    filtered = run.summary.get("filtered")
    if isinstance(filtered, dict):
        rows = [[str(name).replace("_", " "), n] for name, n in sorted(filtered.items(), key=lambda item: -item[1])]
        parts += ["<h3>Left out by filters</h3>", table(["filter", "clips"], rows, label="filters")]
        counted = [
            ("Clips without an alignment", "infeasible"),
            ("Steps skipped, not finite", "skipped_steps"),
            ("Steps skipped, spikes", "spikes"),
            ("Steps skipped while fp16's scale was found", "scale_skips"),
        ]
        parts.append(facts([(name, run.summary.get(key, 0)) for name, key in counted]))
    else:
        parts.append("<p class='muted'>What filters left out is known at the end of the run.</p>")
    return section("left-out", "Left out", *parts)


def use_section(run: Run) -> str:
    """Commands for the model."""
    folder = shlex.quote(str(run.setting("training", "output_dir", run.folder)))
    if not (run.folder / "model.nemo").is_file():
        return section(
            "use",
            "How to use the result",
            "<p>There is no model yet: model.nemo is written with the first best evaluation.</p>",
        )
    lines = [
        "# Transcribe files of any length",
        f"python -m finetune.transcribe --model {folder} FILE.wav --timestamps",
        "",
        "# WER and CER on other data",
        f"python -m finetune.evaluate --model {folder} --data DATA --json result.json",
        "",
        "# A .nemo that plain NeMo restores",
        f"python -m finetune.export --model {folder} --to nemo --output exported",
    ]
    size = (run.folder / "model.nemo").stat().st_size / 1e6
    return section(
        "use",
        "How to use the result",
        f"<p>The best model by WER on validation is model.nemo ({size:,.0f} MB).</p>",
        code("\n".join(lines)),
    )


def reproduce_section(run: Run) -> str:
    """Command, revision, versions, seed and configuration."""
    e = run.environment
    command = e.get("command")
    words = shlex.join(map(str, command)) if isinstance(command, list) and command else None
    revision = e.get("git_revision")
    lines = [
        f"git checkout {revision}" if revision else "# the git revision is not known",
        "pip install -c constraints.txt -e .",
        words or "# the command line is not known",
    ]
    changed = "<p>The working tree had changes that were not committed.</p>" if e.get("git_changes") else ""
    versions = e.get("versions") if isinstance(e.get("versions"), dict) else {}
    config = (
        yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True) if run.config else "# config.yaml is missing"
    )
    return section(
        "reproduce",
        "How to reproduce the run",
        f"<p>Seed {escape(text_of(e.get('seed', run.setting('training', 'seed'))))}. "
        "The configuration below is the resolved one: run file, strategies and command line together.</p>",
        changed,
        code("\n".join(lines)),
        more("config.yaml", code(config)),
        more("Versions", facts(versions.items())),
    )
