"""summary.json, and what is printed of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from finetune.security.safe_text import one_line

if TYPE_CHECKING:
    from finetune.tools.pseudo_labels.calibration import Calibration, Point
    from finetune.tools.pseudo_labels.selection import Heard, Selection, Tally

HARDER = 0.05
"""Mean confidence that the audio has less than the labelled clips, from which on a warning says so."""
Summary = dict[str, Any]


def summarise(calibration: Calibration, heard: Heard, selection: Selection, settings: dict[str, Any]) -> Summary:
    """Return what goes into summary.json.

    Args:
        settings: model, data and options, to say what the figures are of.
    """
    languages = {
        language: {
            **_tally("heard", tally),
            **_tally("kept", kept),
            "share": kept.seconds / tally.seconds if kept is not None and tally.seconds else 0.0,
            **_expected(calibration.choice(language).point if kept is not None else None),
            "promised": kept is not None and language not in calibration.too_few,
        }
        for language, tally in sorted(selection.heard.items())
        for kept in (selection.kept.get(language),)
    }
    found = {"expected_wer": None, "expected_wer_interval": None, "expected_wholly_right": None}
    parts = [(tally, calibration.choice(language).point) for language, tally in selection.kept.items()]
    weighted = [(tally.words, tally.clips, point) for tally, point in parts if point is not None and tally.words]
    if weighted:
        words, clips = sum(w for w, _, _ in weighted), sum(c for _, c, _ in weighted)
        ends = [(w, point.wer_interval) for w, _, point in weighted if point.wer_interval]
        found = {
            "expected_wer": sum(w * (1 - point.precision) for w, _, point in weighted) / words,
            "expected_wer_interval": [sum(w * interval[i] for w, interval in ends) / words for i in (0, 1)],
            "expected_wholly_right": sum(c * point.wholly_right for _, c, point in weighted) / clips,
        }
    clips, seconds = (sum(getattr(t, name) for t in selection.heard.values()) for name in ("clips", "seconds"))
    kept_clips, kept_seconds = (
        sum(getattr(t, name) for t in selection.kept.values()) for name in ("clips", "seconds")
    )
    return {
        **settings,
        "precision": calibration.precision,
        "certainty": calibration.certainty,
        "clips": clips,
        "hours": seconds / 3600,
        "kept_clips": kept_clips,
        "kept_hours": kept_seconds / 3600,
        "share": kept_seconds / seconds if seconds else 0.0,
        "silent_clips": selection.silent.clips,
        "silent_hours": selection.silent.seconds / 3600,
        **found,
        "left_out": dict(selection.left_out.most_common()),
        "by_language": languages,
        "calibration": {
            "clips": len(heard.labelled),
            "heard_nothing": len(heard.nothing),
            "with_words_but_silent": heard.silent_with_words(calibration.precision),
            "mean_confidence": _mean_confidence(calibration, heard),
            "too_few": calibration.too_few,
            "all": calibration.together.as_json(),
            "by_language": {name: choice.as_json() for name, choice in calibration.by_language.items()},
        },
        "warnings": _warnings(calibration, heard, selection),
    }


def _tally(name: str, tally: Tally | None) -> dict[str, Any]:
    return {
        f"{name}_clips": tally.clips if tally else 0,
        f"{name}_hours": tally.seconds / 3600 if tally else 0.0,
        f"{name}_mean_confidence": tally.mean_confidence if tally else None,
    }


def _expected(point: Point | None) -> dict[str, Any]:
    return {
        "threshold": point and point.threshold,
        "expected_wer": point and 1 - point.precision,
        "expected_wer_interval": point and point.wer_interval,
        "expected_wholly_right": point and point.wholly_right,
    }


def _mean_confidence(calibration: Calibration, heard: Heard) -> float:
    """Return the mean over the words of the labelled clips."""
    confidence_N = calibration.regression.confidence(heard.labelled.signals_NF)
    words_N = heard.labelled.words_N
    return float((confidence_N * words_N).sum() / max(words_N.sum(), 1))


def _warnings(calibration: Calibration, heard: Heard, selection: Selection) -> list[str]:
    found = []
    for language, clips in calibration.too_few.items():
        if language in selection.heard:
            found.append(
                f"{language}: {clips} labelled clips are too few for a threshold of its own; that of all languages is "
                "taken, and promises nothing for this one."
            )
    if "" in selection.heard and len(calibration.by_language) > 1:
        found.append("clips name no language, and take the threshold of all: --language says which one it is.")
    words = sum(tally.words for tally in selection.heard.values())
    own = sum(tally.confidence for tally in selection.heard.values()) / words if words else None
    theirs = _mean_confidence(calibration, heard)
    if own is not None and own < theirs - HARDER:
        found.append(
            f"the audio is harder than the labelled clips (mean confidence {own:.2f}, theirs {theirs:.2f}); the "
            "precision is promised for audio like theirs. Label some clips of this audio to calibrate on."
        )
    if n := heard.silent_with_words(calibration.precision):
        found.append(f"in {n} labelled clips with words the model is sure of silence; --keep-silence may keep such.")
    return found


def table(summary: Summary) -> str:
    """Return the few lines that are printed."""
    rows: list[tuple[str, ...]] = [
        ("language", "hours", "kept", "share", "threshold", "expected WER", "95 %", "wholly right")
    ]
    languages = summary["by_language"]
    for name, found in languages.items():
        rows.append(_line(name or "-", found["heard_hours"], found["kept_hours"], found))
    if len(languages) > 1:
        rows.append(_line("all", summary["hours"], summary["kept_hours"], summary))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for name, *cells in rows:
        lines.append("  ".join([name.ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(cells, widths[1:]))]))
    lines.append(
        f"kept {summary['kept_clips']:,} of {summary['clips']:,} clips"
        + (f", and {summary['silent_clips']:,} silent ones" if summary["silent_clips"] else "")
    )
    reasons = ", ".join(f"{clips:,} {kind.replace('_', ' ')}" for kind, clips in summary["left_out"].items())
    lines += [f"left out: {reasons}"] if reasons else []
    lines += [f"warning: {one_line(text)}" for text in summary["warnings"]]
    return "\n".join(lines)


def _line(name: str, hours: float, kept: float, found: Summary) -> tuple[str, ...]:
    wer, interval, right = (found[f"expected_{key}"] for key in ("wer", "wer_interval", "wholly_right"))
    return (
        one_line(name),
        f"{hours:.3f}",
        f"{kept:.3f}",
        f"{found['share']:.1%}",
        "-" if found.get("threshold") is None else f"{found['threshold']:.4f}",
        "-" if wer is None else f"{100 * wer:.1f} %",
        "-" if not interval else f"[{100 * interval[0]:.1f}, {100 * interval[1]:.1f}]",
        "-" if right is None else f"{right:.0%}",
    )
