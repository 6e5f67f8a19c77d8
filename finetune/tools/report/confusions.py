"""The section on what the model gets wrong."""

from typing import Any

from finetune.tools.report.markup import escape, more, section, table
from finetune.tools.report.read import Run, number

LISTED = 15
OPEN = 6  # clips that are seen without opening anything


def errors_section(run: Run) -> str:
    """Confused words, and the worst clips with audio and alignment."""
    m = run.mistakes
    if not m:
        none = "<p>No account of errors was kept (training.report_clips), or nothing has been evaluated yet.</p>"
        return section("errors", "What it gets wrong", none)
    whose = "the chosen model" if m.get("model") == "best" else "the model"
    intro = f"Of {whose} at step {m['step']:,} on {m['split']}."
    tables = [
        words_table("Taken for another word", ["said", "recognised", "times"], m.get("substitutions")),
        words_table("Not recognised", ["said", "times"], m.get("deletions")),
        words_table("Recognised, but not said", ["recognised", "times"], m.get("insertions")),
    ]
    clips = [clip for clip in m.get("clips") or [] if isinstance(clip, dict)]
    articles = [clip_html(clip, place) for place, clip in enumerate(clips, 1)]
    shown = "".join(articles[:OPEN]) or "<p>none: no clip had an error</p>"
    if articles[OPEN:]:
        shown += more(f"{len(articles) - OPEN} more", "".join(articles[OPEN:]))
    return section(
        "errors",
        "What it gets wrong",
        f"<p>{escape(intro)}</p>",
        f"<div class='columns'>{''.join(tables)}</div>",
        "<h3>Worst clips</h3>",
        "<p>Ordered by word errors times word error rate. Above: what was said; below: what was recognised. "
        "</p><p class='words legend'><span class='sub'>taken for another word</span><span class='del'>not recognised</span>"
        "<span class='ins'>not said</span></p>",
        shown,
    )


def words_table(title: str, heads: list[str], rows: Any) -> str:
    """The most frequent mistakes of a kind."""
    rows = [row for row in rows or [] if isinstance(row, list) and len(row) == len(heads)][:LISTED]
    return f"<div><h3>{escape(title)}</h3>{table(heads, rows, row_heads=False, label=title)}</div>"


def clip_html(clip: dict[str, Any], place: int) -> str:
    """One clip: its texts for screen readers, the alignment for the others, and its audio."""
    seconds = number(clip.get("seconds"))
    length = f", {seconds:.1f} s" if seconds is not None else ""
    about = f"{clip.get('language') or 'language unknown'}{length}, {clip.get('word_errors')} errors in {clip.get('words')} words"
    audio = str(clip.get("audio") or "")
    player = ""
    if audio.startswith("data:audio/"):
        player = f"<audio controls preload='none' src='{escape(audio)}' aria-label='Audio of clip {place}'></audio>"
        if seconds is not None and seconds > 20:
            player += "<p class='muted'>The first 20 seconds.</p>"
    reference, hypothesis = (escape(clip.get(key) or "(nothing)") for key in ("reference", "hypothesis"))
    return (
        f"<article class='clip'><h3>{place}. <code>{escape(clip.get('id'))}</code> <span class='muted'>{escape(about)}</span></h3>{player}"
        f"<p class='hidden'>Said: {reference}. Recognised: {hypothesis}.</p>"
        f"<div class='words' aria-hidden='true'>{''.join(map(pair_html, clip.get('pairs') or []))}</div></article>"
    )


def pair_html(pair: Any) -> str:
    """A word over the word that it was recognised as."""
    said, recognised = (escape(word) for word in pair)
    if said == recognised:
        return f"<span><b>{said}</b></span>"
    kind = "sub" if said and recognised else "del" if said else "ins"
    return f"<span class='{kind}'><b>{said or '&nbsp;'}</b><i>{recognised or '&nbsp;'}</i></span>"
