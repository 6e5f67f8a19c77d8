"""The model card: front matter as the Hub reads it, and a text that says what is known and what is not."""

import re
from collections.abc import Set
from functools import cache
from typing import Any

import jinja2
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from markupsafe import Markup

from finetune.evaluation.significance import p_value_text
from finetune.security.safe_text import escape_markdown
from finetune.tools.publishing.base import Base, terms
from finetune.tools.publishing.facts import Data, Facts
from finetune.tools.publishing.private import VOCABULARY_CHANGES
from finetune.tools.report.formats import duration, gib, text_of
from finetune.tools.report.read import Rates, number
from finetune.tools.report.run_page import LISTED_PIECES, training_rows

TASK = "automatic-speech-recognition"
TASK_NAME = "Automatic speech recognition"
LONGEST_NAME = 120  # characters
FEW_CLIPS = 500
NORMALIZERS = {
    "none": "as they are, case and punctuation included",
    "lower": "in lower case, with punctuation",
    "basic": Markup("in lower case and without punctuation but apostrophes inside words (`basic`)"),
    "open_asr": Markup("after the normalisation of the Open ASR Leaderboard (`open_asr`)"),
}
PARTS = {"FastConformer": "FastConformer encoder", "Conformer": "Conformer encoder", "TDT": "TDT decoder"}


def make_card(
    facts: Facts,
    repo: str,
    formats: Set[str],
    *,
    architecture: dict[str, Any],
    licence: str | None,
    languages: list[str],
    revision: str | None = None,
) -> ModelCard:
    """Return the card of a model.

    Args:
        formats: which of nemo, hf and adapter are uploaded.
        architecture: NeMo's configuration of the model; empty where it is not at hand.
        licence: of the model itself; None: that of its base.
        languages: as the Hub's front matter wants them.
        revision: branch that it is uploaded to; None: main.
    """
    name, summary = repo.rpartition("/")[2], facts.run.summary
    data = front_matter(facts, name, formats, architecture, licence, languages)
    trained = trained_on(facts)
    seen = []
    if number(summary.get("samples")) is not None:
        seen.append(f"{summary['samples']:,} clips")
    if number(summary.get("audio_hours")) is not None:
        seen.append(f"{summary['audio_hours']:.1f} hours of audio")
    values = {
        "name": name,
        "facts": facts,
        "base": facts.base,
        "run": facts.run,
        "summary": summary,
        "formats": formats,
        # These stand in code, where an escape would be a part of it.
        "repo": Markup(repo),
        "repo_name": Markup(name),
        "revision": revision and Markup(revision),
        "trained_on": Markup(" on " + " and ".join(map(data_link, trained)) if trained else ""),
        "earlier": list(dict.fromkeys(filter(None, (facts.base.through, facts.base.went_on)))),
        "parts": parts_of(architecture, summary),
        "vocabulary": vocabulary_change(architecture),
        "new_pieces": " ".join(((facts.run.vocabulary.get("growth") or {}).get("new_pieces") or [])[:LISTED_PIECES]),
        "has_intervals": any(row.interval_before or row.interval_after for row in [*facts.rows, *facts.guard]),
        "seen": seen,
        "filtered": [(reason.replace("_", " "), n) for reason, n in (summary.get("filtered") or {}).items()],
        "settings": settings_of(facts) if facts.run.config else [],
        "limits": limits_of(facts, languages),
        "exports": facts.exports,
        "licence": licence,
    }
    text = environment().get_template("card.md").render(values)
    card = ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + re.sub(r"\n{3,}", "\n\n", text).strip() + "\n")
    card.data = data
    return card


@cache
def environment() -> jinja2.Environment:
    """Return what renders the card: each value that is not `Markup`, here Markdown, is escaped."""
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("finetune.tools.publishing"),
        autoescape=True,
        finalize=lambda value: value if hasattr(value, "__html__") else Markup(plain(value)),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(
        base_link=base_link, data_link=data_link, percent=percent, count=count, megabytes=megabytes, figure=figure
    )
    made.globals.update(normalizers=NORMALIZERS, licence_text=licence_text, change_of=change_of)
    return made


def plain(text: object) -> str:
    """Return a text from a run's data as Markdown that shows it and does nothing else: one line of bounded length."""
    line = one_line(text)
    return escape_markdown(line if len(line) <= LONGEST_NAME else line[: LONGEST_NAME - 1] + "…")


def one_line(text: object) -> str:
    return " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())


# ---- front matter --------------------------------------------------------------------------------------------------


def trained_on(facts: Facts) -> list[Data]:
    """Return the sources that a run trained on."""
    return [*facts.data.get("train", []), *facts.data.get("rehearsal", [])]


def front_matter(
    facts: Facts, name: str, formats: Set[str], architecture: dict[str, Any], licence: str | None, languages: list[str]
) -> ModelCardData:
    """Return what the Hub reads: licence, base, languages, library, data sets, tags and results."""
    base, results = facts.base, eval_results(facts)
    own = licence is not None and licence != base.licence
    relation = "adapter" if formats == {"adapter"} else "finetune"
    return ModelCardData(
        license=licence or base.licence,
        license_name=None if own else base.licence_name,
        license_link=None if own else base.licence_link,
        language=languages or None,
        library_name="nemo" if "nemo" in formats else "transformers" if "hf" in formats else "peft",
        pipeline_tag=TASK,
        base_model=base.hub,
        base_model_relation=relation if base.hub else None,
        datasets=list(dict.fromkeys(source.hub for source in trained_on(facts) if source.hub)) or None,
        metrics=["wer", "cer"] if results else None,
        tags=["speech", *architecture_tags(architecture), *(["LoRA"] if "adapter" in formats else [])],
        model_name=name if results else None,
        eval_results=results or None,
    )


def architecture_tags(architecture: dict[str, Any]) -> list[str]:
    """Return tags of a model's parts, from its configuration."""
    encoder, tags = architecture.get("encoder") or {}, []
    if str(encoder.get("_target_", "")).endswith("ConformerEncoder"):
        tags.append("FastConformer" if encoder.get("subsampling") == "dw_striding" else "Conformer")
    if architecture.get("joint"):
        tags.append("Transducer")
    if (architecture.get("loss") or {}).get("loss_name") == "tdt":
        tags.append("TDT")
    if architecture.get("aux_ctc") or (architecture.get("decoder") and not architecture.get("joint")):
        tags.append("CTC")
    return tags


def eval_results(facts: Facts) -> list[EvalResult]:
    """Return WER and CER after training in per cent, overall and by language."""
    split = facts.run.judged_on
    sources = facts.data.get(split, [])
    on_hub = sources[0] if len(sources) == 1 and sources[0].hub else None
    name = ", ".join(dict.fromkeys(source.name for source in sources)) or "unknown"
    found = []
    for row in facts.rows:
        language = one_line(row.language)[:LONGEST_NAME] if row.language else None
        for metric, value in (("wer", row.wer_after), ("cer", row.cer_after)):
            if value is None:
                continue
            found.append(
                EvalResult(
                    task_type=TASK,
                    task_name=TASK_NAME,
                    dataset_type=(on_hub and on_hub.hub) or "custom",
                    dataset_name=one_line(f"{name} ({split})")[:LONGEST_NAME],
                    # The Hub merges results whose data sets have equal type, configuration and split.
                    dataset_config=language or (on_hub.config if on_hub else None),
                    dataset_split=(on_hub.split if on_hub else None) or split,
                    dataset_args={"language": language} if language else None,
                    metric_type=metric,
                    metric_name=f"{split.capitalize()} {metric.upper()}",
                    metric_value=round(100 * value, 2),
                )
            )
    return found


# ---- pieces of Markdown --------------------------------------------------------------------------------------------


def base_link(base: Base) -> Markup:
    """Return the base model's name, as a link where the Hub has it."""
    return Markup(f"[{base.hub}](https://huggingface.co/{base.hub})" if base.hub else plain(base.name))


def data_link(source: Data) -> Markup:
    """Return a source's name, as a link where the Hub has it."""
    name = f"[{source.hub}](https://huggingface.co/datasets/{source.hub})" if source.hub else plain(source.name)
    return Markup(f"{name} ({plain(source.language)})" if source.language else name)


def percent(value: float | None, interval: list[float] | None = None) -> Markup:
    """Return a fraction in per cent, with its interval."""
    if value is None:
        return Markup("not measured")
    within = f" ({100 * interval[0]:.2f} to {100 * interval[1]:.2f})" if interval else ""
    return Markup(f"{100 * value:.2f}{within}")


def megabytes(value: float | None) -> Markup:
    """Return bytes in MB."""
    return Markup("not measured" if value is None else f"{value / 1e6:,.1f}")


def figure(value: float | None) -> Markup:
    """Return a figure with one decimal."""
    return Markup("not measured" if value is None else f"{value:.1f}")


def count(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,}"


def change_of(rates: Rates) -> Markup | None:
    """Return the change of WER in words, where it was tested."""
    if not rates.test or rates.wer_before is None or rates.wer_after is None:
        return None
    change = "not significantly different from"
    if rates.test["significant"]:
        change = f"significantly {'better' if rates.wer_after < rates.wer_before else 'worse'} than"
    return Markup(f"{change} before ({p_value_text(rates.test)})")


def licence_text(licence: str, base: Base | None) -> Markup:
    """Return a licence's name, as a link where its text has an address."""
    name = plain((base.licence_name if base else None) or licence)
    link = (base.licence_link if base else None) or terms(licence)
    is_safe = link and re.fullmatch(r"https?://[^\s<>()\"']+", link)
    return Markup(f"[{name}]({link})" if is_safe else name)


# ---- what the sections say -----------------------------------------------------------------------------------------


def parts_of(architecture: dict[str, Any], summary: dict[str, Any]) -> list[str]:
    """Return what the model consists of."""
    parts = [PARTS[tag] for tag in architecture_tags(architecture) if tag in PARTS]
    if size := number(summary.get("parameters")):
        parts.append(f"{size / 1e6:,.1f} M parameters")
    if rate := architecture.get("sample_rate"):
        parts.append(f"audio of {rate} Hz")
    return parts


def vocabulary_change(architecture: dict[str, Any]) -> str | None:
    """Return what became of the vocabulary, from the notes in a model's configuration; None where nothing did."""
    settings = [change.get("setting") or {} for change in architecture.get(VOCABULARY_CHANGES) or []]
    if not settings:
        return None
    done = dict.fromkeys("extended" if "extend_from" in setting else "replaced" for setting in settings)
    pieces = len(architecture.get("labels") or []) or (architecture.get("decoder") or {}).get("vocab_size")
    return " and ".join(done) + (f": {pieces:,} pieces now" if pieces else "")


def settings_of(facts: Facts) -> list[tuple[str, Any]]:
    """Return hyperparameters, cost and versions, as far as they are known."""
    run, s, e = facts.run, facts.run.summary, facts.run.environment
    rates = {f"{part}_learning_rate": f"Learning rate, {part}" for part in ("encoder", "decoder", "joint")}
    names = {**rates, "weight_decay": "Weight decay", "seed": "Seed"}
    settings = ((name, run.setting("training", key)) for key, name in names.items())
    steps, best = number(s.get("steps")), s.get("best_step")
    trained, total = number(s.get("trainable_parameters")), number(s.get("parameters"))
    no_gpu = f"{e['cpus']} CPU cores ({e.get('processor', 'unknown')}), no GPU" if e.get("cpus") else None
    versions = {"python": e.get("python"), **(e.get("versions") or {})}
    rows = [
        *training_rows(run),
        ("Engine", s.get("engine")),
        *((name, None if value is None else text_of(value)) for name, value in settings),
        ("Steps", f"{steps:,} of {s.get('total_steps', steps):,}; the best at {best}" if steps is not None else None),
        ("Trained parameters", f"{trained / 1e6:,.2f} M of {total / 1e6:,.2f} M" if trained and total else None),
        ("Hardware", Markup(", ".join(map(plain, e.get("gpus") or []))) or no_gpu),
        ("Peak memory", f"{gib(run.peak_memory)} ({run.peak_memory_is})" if run.peak_memory is not None else None),
        ("Time", duration(s["wall_seconds"]) if "wall_seconds" in s else None),
        ("Versions", Markup(", ".join(f"{plain(name)} {plain(v)}" for name, v in versions.items() if v))),
    ]
    return [(name, value) for name, value in rows if value]


def limits_of(facts: Facts, languages: list[str]) -> list[Markup]:
    """Return what is known of the model's limits."""
    limits = []
    measured = {row.language for row in [*facts.rows, *facts.guard] if row.wer_after is not None}
    whole = _overall(facts.rows)
    if whole is None:
        limits.append("How well it recognises speech was not measured.")
    else:
        if whole.clips is not None and whole.clips < FEW_CLIPS:
            limits.append(f"It was measured on {whole.clips:,} clips only: the error rates above are rough.")
        if facts.run.judged_on == "validation":
            limits.append(
                "The error rates are those of the validation split, on which the best model was chosen too: "
                "they flatter it."
            )
        if facts.run.setting("data", "allow_overlap"):
            limits.append(
                "Clips that stand in the training data and in an evaluation set were allowed (data.allow_overlap): "
                "the error rates above may flatter it."
            )
    if missing := [name for name in languages if name not in measured]:
        limits.append(f"Languages without an evaluation: {', '.join(map(plain, missing))}.")
    if facts.run.config:
        limits += guard_limits(facts)
        longest = number(facts.run.setting("data", "max_duration"))
        if longest is not None:
            limits.append(f"It was trained on clips of up to {longest:g} s.")
        if facts.run.setting("data", "text_normalization") == "basic":
            limits.append("It was trained on lower-case texts without punctuation, and writes such.")
    limits.append("Nothing is known about other accents, noise and domains than those of the data above.")
    return [Markup(limit) for limit in limits]


def guard_limits(facts: Facts) -> list[str]:
    """Return whether the model forgot what its base could do."""
    guard = _overall(facts.guard)
    if guard is None or guard.wer_after is None:
        untested = "Whether it lost in the domains of its base model was not measured (no guard set)."
        return [] if facts.base.random else [untested]
    if guard.wer_before is None:
        return []
    is_now = "On the guard set it is no worse than its base model"
    if guard.wer_after > guard.wer_before:
        is_now = "It is worse than its base model on the guard set"
    half = " (the half of it that did not choose the model)" if facts.run.setting("data", "guard_limit") else ""
    return [f"{is_now}{half}: WER {100 * guard.wer_after:.2f} %, {100 * guard.wer_before:.2f} % before."]


def _overall(rows: list[Rates]) -> Rates | None:
    return next((row for row in rows if row.language is None), None)
