"""The model card: front matter as the Hub reads it, and a text that says what is known and what is not."""

import re
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from finetune.security.safe_text import escape_markdown
from finetune.tools.publishing.base import Base, terms
from finetune.tools.publishing.facts import Data, Facts, Row
from finetune.tools.publishing.private import VOCABULARY_CHANGES
from finetune.tools.publishing.use import use_section
from finetune.tools.report.markup import duration
from finetune.tools.report.read import number

TASK = "automatic-speech-recognition"
TASK_NAME = "Automatic speech recognition"
LONGEST_NAME = 120  # characters
NORMALIZERS = {
    "none": "as they are, case and punctuation included",
    "lower": "in lower case, with punctuation",
    "basic": "in lower case and without punctuation but apostrophes inside words (`basic`)",
    "open_asr": "after the normalisation of the Open ASR Leaderboard (`open_asr`)",
}
FEW_CLIPS = 500


def plain(text: Any) -> str:
    """A text from a run's data as Markdown that shows it and does nothing else: on one line, of bounded length."""
    one_line = " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())
    if len(one_line) > LONGEST_NAME:
        one_line = one_line[: LONGEST_NAME - 1] + "…"
    return escape_markdown(one_line)


def make_card(
    facts: Facts,
    repo: str,
    formats: set[str],
    *,
    architecture: dict[str, Any],
    licence: str | None,
    languages: list[str],
    revision: str | None = None,
) -> ModelCard:
    """The card of a model.

    Args:
        facts: what is known.
        repo: OWNER/NAME.
        formats: which of nemo, hf and adapter are uploaded.
        architecture: NeMo's configuration of the model; empty where it is not at hand.
        licence: of the model itself; None: that of its base.
        languages: as the hub's front matter wants them.
        revision: branch that it is uploaded to; None: main.
    """
    name = repo.rpartition("/")[2]
    data = front_matter(facts, name, formats, architecture, licence, languages)
    parts = [
        f"# {plain(name)}",
        introduction(facts, architecture),
        results_section(facts),
        data_section(facts),
        training_section(facts),
        use_section(repo, formats, revision, facts.base.hub),
        limits_section(facts, languages),
        # An adapter leaves the vocabulary of its base as it is.
        licence_section(facts.base, licence, None if formats == {"adapter"} else vocabulary_change(architecture)),
    ]
    card = ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(part for part in parts if part) + "\n")
    card.data = data
    return card


# ---- front matter -----------------------------------------------------------------------------------------------------


def front_matter(
    facts: Facts, name: str, formats: set[str], architecture: dict[str, Any], licence: str | None, languages: list[str]
) -> ModelCardData:
    """What the Hub reads: licence, base, languages, library, data sets, tags and results."""
    base = facts.base
    only_adapter = formats == {"adapter"}
    own = licence is not None and licence != base.licence
    results = eval_results(facts)
    tags = ["speech", *architecture_tags(architecture), *(["LoRA"] if "adapter" in formats else [])]
    return ModelCardData(
        license=licence or base.licence,
        license_name=None if own else base.licence_name,
        license_link=None if own else base.licence_link,
        language=languages or None,
        library_name="nemo" if "nemo" in formats else "transformers" if "hf" in formats else "peft",
        pipeline_tag=TASK,
        base_model=base.hub,
        base_model_relation=None if base.hub is None else "adapter" if only_adapter else "finetune",
        datasets=list(dict.fromkeys(source.hub for source in facts.data.get("train", []) if source.hub)) or None,
        metrics=["wer", "cer"] if results else None,
        tags=tags,
        model_name=name if results else None,
        eval_results=results or None,
    )


def architecture_tags(architecture: dict[str, Any]) -> list[str]:
    """Tags of a model's parts, from its configuration."""
    target = str((architecture.get("encoder") or {}).get("_target_", ""))
    encoder = architecture.get("encoder") or {}
    tags = []
    if target.endswith("ConformerEncoder"):
        tags.append("FastConformer" if encoder.get("subsampling") == "dw_striding" else "Conformer")
    if architecture.get("joint"):
        tags.append("Transducer")
    if (architecture.get("loss") or {}).get("loss_name") == "tdt":
        tags.append("TDT")
    return tags


def eval_results(facts: Facts) -> list[EvalResult]:
    """WER and CER after training in per cent, overall and by language."""
    if facts.judged_on is None:
        return []
    sources = facts.data.get(facts.judged_on, [])
    hub = sources[0].hub if len(sources) == 1 else None
    name = ", ".join(dict.fromkeys(source.name for source in sources)) or "unknown"
    found = []
    for row in facts.rows:
        for metric, value in (("wer", row.wer_after), ("cer", row.cer_after)):
            if value is None:
                continue
            found.append(
                EvalResult(
                    task_type=TASK,
                    task_name=TASK_NAME,
                    dataset_type=hub or "custom",
                    dataset_name=_one_line(f"{name} ({facts.judged_on})"),
                    # The hub merges results whose data sets have equal type, configuration and split.
                    dataset_config=_one_line(row.language) if row.language else sources[0].config if hub else None,
                    dataset_split=(sources[0].split if hub else None) or facts.judged_on,
                    dataset_args={"language": _one_line(row.language)} if row.language else None,
                    metric_type=metric,
                    metric_name=f"{facts.judged_on.capitalize()} {metric.upper()}",
                    metric_value=round(100 * value, 2),
                )
            )
    return found


def _one_line(text: str) -> str:
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())[:LONGEST_NAME]


# ---- text -------------------------------------------------------------------------------------------------------------


def introduction(facts: Facts, architecture: dict[str, Any]) -> str:
    """What it is, in two sentences."""
    base, trained = facts.base, facts.data.get("train", [])
    on = " on " + " and ".join(described(source) for source in trained) if trained else ""
    if base.random:
        what = f"A speech recogniser, trained{on} from random weights."
    elif base.name:
        what = f"A speech recogniser: {base_link(base)}, fine-tuned{on}."
    else:
        what = "A speech recogniser. What it was trained from and on is not known to this card."
    earlier = [plain(name) for name in dict.fromkeys((base.through, base.went_on)) if name]
    if earlier:
        of = f"an earlier run ({earlier[0]})" if len(earlier) == 1 else f"earlier runs ({', '.join(earlier)})"
        what += (
            f" The training continued {of}, whose data and settings this card does not describe; before means "
            f"{'that run' if len(earlier) == 1 else 'the last of them'}'s model."
        )
    tags = architecture_tags(architecture)
    of = {"FastConformer": "FastConformer encoder", "Conformer": "Conformer encoder", "TDT": "TDT decoder"}
    parts = [of[tag] for tag in tags if tag in of]
    size = number(facts.summary.get("parameters"))
    if size:
        parts.append(f"{size / 1e6:,.1f} M parameters")
    if architecture.get("sample_rate"):
        parts.append(f"audio of {architecture['sample_rate']} Hz")
    said = [what, ", ".join(parts) + "." if parts else ""]
    vocabulary = vocabulary_change(architecture)
    if vocabulary:
        said.append(vocabulary[0].upper() + vocabulary[1:] + ".")
    if facts.config and not facts.finished:
        said.append("**The run that made it was not finished:** what follows is what it had reached.")
    if facts.summary.get("best_weights") not in (None, "raw"):
        said.append(f"Its weights are a mean over training steps ({plain(facts.summary['best_weights'])}).")
    if facts.finished and facts.summary.get("best_step") == 0:
        said.append(
            "**No evaluation of the run was better than the base model's, so these are the base model's weights.**"
        )
    return " ".join(part for part in said if part)


def vocabulary_change(architecture: dict[str, Any]) -> str | None:
    """What became of the vocabulary, from the notes in a model's configuration; None where it was not changed."""
    changes = architecture.get(VOCABULARY_CHANGES)
    if not isinstance(changes, list) or not changes:
        return None
    settings = [change.get("setting") if isinstance(change, dict) else None for change in changes]
    words = {"extend_from": "extended", "replace_with": "replaced"}
    done = [
        next((word for key, word in words.items() if isinstance(setting, dict) and key in setting), "changed")
        for setting in settings
    ]
    labels, decoder = architecture.get("labels"), architecture.get("decoder") or {}
    pieces = len(labels) if isinstance(labels, list) else number(decoder.get("vocab_size"))
    now = f": {pieces:,} pieces now" if pieces else ""
    return f"its vocabulary was {' and '.join(dict.fromkeys(done))}{now}"


def base_link(base: Base) -> str:
    """The base model's name, as a link where the hub has it."""
    return f"[{base.hub}](https://huggingface.co/{base.hub})" if base.hub else plain(base.name)


def described(source: Data) -> str:
    """A source's name, as a link where the hub has it."""
    name = f"[{source.hub}](https://huggingface.co/datasets/{source.hub})" if source.hub else plain(source.name)
    return f"{name} ({plain(source.language)})" if source.language else name


def percent(value: float | None, interval: tuple[float, float] | None = None) -> str:
    """A fraction in per cent, with its interval."""
    if value is None:
        return "not measured"
    return f"{100 * value:.2f}" + (f" ({100 * interval[0]:.2f} to {100 * interval[1]:.2f})" if interval else "")


def table(head: list[str], rows: list[list[str]], left: int = 1) -> str:
    """A Markdown table whose first `left` columns are aligned to the left."""
    lines = [head, ["---"] * left + ["---:"] * (len(head) - left), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def rates_table(rows: list[Row]) -> str:
    """Error rates in per cent before and after."""
    head = ["language", "clips", "words", "WER % before", "WER % after", "CER % before", "CER % after"]
    lines = [
        [
            plain(row.language) if row.language else "all",
            "unknown" if row.clips is None else f"{row.clips:,}",
            "unknown" if row.words is None else f"{row.words:,}",
            percent(row.wer_before, row.interval_before),
            percent(row.wer_after, row.interval_after),
            percent(row.cer_before),
            percent(row.cer_after),
        ]
        for row in rows
    ]
    return table(head, lines)


def results_section(facts: Facts) -> str:
    """Error rates before and after on the judged split, and on the guard set."""
    if not facts.rows:
        return "## Results\n\nNo error rate of this model is known to this card."
    sources = facts.data.get(facts.judged_on or "", [])
    on = f" ({', '.join(described(source) for source in sources)})" if sources else ""
    normalizer = facts.setting("data", "wer_normalization")
    texts = f" Texts are compared {NORMALIZERS[normalizer]}." if normalizer in NORMALIZERS else ""
    said = [
        "## Results",
        f"Word and character error rates on the {facts.judged_on or 'evaluation'} split{on}, greedy decoding. Before is the model that training "
        f"began from, after is the model in this repository.{texts}",
        rates_table(facts.rows),
    ]
    if facts.guard:
        said += ["On the guard set, which stands for what the base model could do before:", rates_table(facts.guard)]
    if any(row.interval_before or row.interval_after for row in [*facts.rows, *facts.guard]):
        said.append("In brackets: the 95 % confidence interval.")
    said += [
        f"The change of WER on the {split} set is {row.change}."
        for split, row in (
            [(facts.judged_on, row) for row in facts.rows[:1]] + [("guard", row) for row in facts.guard[:1]]
        )
        if row.change
    ]
    return "\n\n".join(said)


def data_section(facts: Facts) -> str:
    """Sources, what of them was seen, and what was left out."""
    if not facts.config:
        return "## Training data\n\nNot known to this card."
    lines = []
    for split in ("train", "validation", "test", "guard"):
        for source in facts.data.get(split, []):
            more = [f"split {plain(source.split)}"] if source.split else []
            more += [f"configuration {plain(source.config)}"] if source.config else []
            more += [f"weight {source.weight:g}"] if source.weight is not None else []
            more += [f"licence {plain(source.licence)}"] if source.licence else []
            lines.append(f"* {split}: {', '.join([described(source), *more])}")
    s = facts.summary
    seen = []
    if number(s.get("samples")) is not None:
        seen.append(f"{s['samples']:,} clips")
    if number(s.get("audio_hours")) is not None:
        seen.append(f"{s['audio_hours']:.1f} hours of audio")
    if seen:
        lines.append(f"* seen in training, with repetitions: {', '.join(seen)}")
    filtered = s.get("filtered") if isinstance(s.get("filtered"), dict) else {}
    for reason, clips in filtered.items():
        lines.append(
            f"* left out by a filter, counted anew in each pass: {clips:,} clips ({plain(str(reason).replace('_', ' '))})"
        )
    if number(s.get("quarantined")) is not None:
        lines.append(f"* unreadable or invalid clips that were put aside: {s['quarantined']:,}")
    if s.get("infeasible"):
        lines.append(f"* clips with more text than their audio can hold, left out: {s['infeasible']:,}")
    normalization = facts.setting("data", "text_normalization")
    if normalization in NORMALIZERS:
        lines.append(f"* training texts: {NORMALIZERS[normalization]}")
    return "## Training data\n\n" + "\n".join(lines)


def training_section(facts: Facts) -> str:
    """Hyperparameters, cost and versions."""
    if not facts.config:
        return ""
    s, e = facts.summary, facts.environment
    t = facts.config.get("training") or {}
    strategy = s.get("strategy", e.get("strategy"))
    batch = "by length of the clips"
    if not (facts.setting("data", "batch_duration") or facts.setting("data", "batch_bounds") or t.get("auto_batch")):
        processes = s.get("world_size", e.get("processes")) or 1
        parts = (t.get("per_device_train_batch_size"), t.get("gradient_accumulation_steps"), processes)
        batch = f"{parts[0]} clips x {parts[1]} accumulated x {parts[2]} process(es)" if None not in parts else None
    precision = s.get("mixed_precision", "bf16" if t.get("bf16") else "fp16" if t.get("fp16") else "no")
    warmup = t.get("warmup_steps") or t.get("warmup_ratio")
    trained, total = number(s.get("trainable_parameters")), number(s.get("parameters"))
    hardware = ", ".join(plain(name) for name in e.get("gpus") or [])
    if not hardware and e.get("cpus"):
        hardware = f"{e['cpus']} CPU cores ({plain(e.get('processor', 'unknown'))}), no GPU"
    peak = number(s.get("peak_memory_gib"))
    versions = {"python": e.get("python"), **(e.get("versions") or {})}
    rows = [
        ("strategy", " + ".join(map(plain, strategy)) or "none" if isinstance(strategy, list) else None),
        ("engine", plain(s["engine"]) if s.get("engine") else None),
        ("optimizer", plain(s.get("optimizer") or t.get("optimizer"))),
        ("learning rate", f"{t['learning_rate']:g}" if number(t.get("learning_rate")) is not None else None),
        *(
            (f"learning rate, {part}", f"{t[k]:g}")
            for part in ("encoder", "decoder", "joint")
            if number(t.get(k := f"{part}_learning_rate")) is not None
        ),
        ("schedule", f"{plain(t['lr_scheduler_type'])}, warm-up {warmup}" if t.get("lr_scheduler_type") else None),
        ("weight decay", f"{t['weight_decay']:g}" if number(t.get("weight_decay")) is not None else None),
        (
            "steps",
            f"{s['steps']:,} of {s.get('total_steps', s['steps']):,}; the best at {s.get('best_step')}"
            if number(s.get("steps")) is not None
            else None,
        ),
        ("batch", batch),
        ("mixed precision", plain(precision)),
        (
            "trained parameters",
            f"{trained / 1e6:,.2f} M of {total / 1e6:,.2f} M" if trained is not None and total else None,
        ),
        ("seed", str(t["seed"]) if t.get("seed") is not None else None),
        ("hardware", hardware or None),
        (
            "peak memory",
            f"{peak:.2f} GiB ({plain(s.get('peak_memory_is', 'of the process'))})" if peak is not None else None,
        ),
        ("time", duration(s["wall_seconds"]) if number(s.get("wall_seconds")) is not None else None),
        ("versions", ", ".join(f"{plain(name)} {plain(version)}" for name, version in versions.items() if version)),
    ]
    known = [[name, value] for name, value in rows if value]
    return "## Training\n\n" + table(["setting", "value"], known, left=2)


def limits_section(facts: Facts, languages: list[str]) -> str:
    """Only what is known."""
    lines = []
    measured = {row.language for row in facts.rows if row.language}
    whole = next((row for row in facts.rows if row.language is None), None)
    if whole is None:
        lines.append("How well it recognises speech was not measured.")
    else:
        if whole.clips is not None and whole.clips < FEW_CLIPS:
            lines.append(f"It was measured on {whole.clips:,} clips only: the error rates above are rough.")
        if facts.judged_on == "validation":
            lines.append(
                "The error rates are those of the validation split, on which the best model was chosen too: they flatter it."
            )
    missing = [name for name in languages if name not in measured]
    if missing:
        lines.append(f"Languages without an evaluation: {', '.join(map(plain, missing))}.")
    if facts.config:
        lines += guard_limits(facts)
        longest = number(facts.setting("data", "max_duration"))
        if longest is not None:
            lines.append(f"It was trained on clips of up to {longest:g} s.")
        if facts.setting("data", "text_normalization") == "basic":
            lines.append("It was trained on lower-case texts without punctuation, and writes such.")
    lines.append("Nothing is known about other accents, noise and domains than those of the data above.")
    return "## Limits\n\n" + "\n".join(f"* {line}" for line in lines)


def guard_limits(facts: Facts) -> list[str]:
    """Whether it forgot what the base model could do."""
    whole = next((row for row in facts.guard if row.language is None), None)
    if whole is None or whole.wer_after is None:
        return (
            []
            if facts.base.random
            else ["Whether it lost in the domains of its base model was not measured (no guard set)."]
        )
    if whole.wer_before is None:
        return []
    before, after = f"{100 * whole.wer_before:.2f} %", f"{100 * whole.wer_after:.2f} %"
    if whole.wer_after > whole.wer_before:
        return [f"It is worse than its base model on the guard set: WER {after}, {before} before."]
    return [f"On the guard set it is no worse than its base model: WER {after}, {before} before."]


def licence_section(base: Base, licence: str | None, vocabulary: str | None) -> str:
    """The licence, and the credit that the base model's licence asks for.

    Args:
        base: the base model.
        licence: of the model itself; None: that of its base.
        vocabulary: what became of the base's vocabulary; None: nothing.
    """
    said = ["## Licence"]
    own = licence or base.licence
    if own:
        said.append(f"This model: {licence_text(own, base if own == base.licence else None)}.")
    elif base.random:
        said.append("No licence was chosen for this model.")
    else:
        said.append("The licence of the base model is not known to this card.")
    if base.name and base.licence:
        by = f" by {plain(base.hub.partition('/')[0])}" if base.hub else ""
        said.append(
            f"It is a modified version of {base_link(base)}{by}, which is under {licence_text(base.licence, base)}. Changes: its weights were "
            f"trained further, as described above{f'; {vocabulary}' if vocabulary else ''}. The authors of the base model do not endorse this version."
        )
    return "\n\n".join(said)


def licence_text(licence: str, base: Base | None) -> str:
    """A licence's name, as a link where its text has an address."""
    name = (base.licence_name if base else None) or licence
    link = (base.licence_link if base else None) or terms(licence)
    if link and re.fullmatch(r"https?://[^\s<>()\"']+", link):
        return f"[{plain(name)}]({link})"
    return plain(name)
