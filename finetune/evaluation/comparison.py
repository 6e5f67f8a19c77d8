"""Two models on the same clips: which is better, whether that is more than chance, and on which clips. N clips."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from finetune.errors import UserError
from finetune.evaluation.scores import normalize_for_scores, score_pair
from finetune.evaluation.significance import FEW, RESAMPLES, as_text, block_names, compare_counts, verdict
from finetune.security.documents import parse_json
from finetune.security.safe_text import one_line

LISTED = 5
"""Clips that are shown on either side."""


@dataclass
class Utterance:
    """One clip as one model heard it."""

    id: str
    language: str
    reference: str
    hypothesis: str


def read_utterances(path: Path) -> tuple[list[Utterance], str | None]:
    """The clips of a file that `evaluate --utterances` wrote, and the normalisation that it was scored with, where it says so.

    Raises:
        UserError: it cannot be read, or a line is not of that kind.
    """
    found, normalizations = [], set()
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    row = parse_json(line)
                    texts = [row["id"], row.get("language") or "", row["reference"], row["hypothesis"]]
                    if not all(isinstance(text, str) for text in texts):
                        raise ValueError("not text")
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    raise UserError(
                        f"--compare: line {number} of {path} is no clip of `evaluate --utterances`: id, reference and hypothesis are "
                        "needed, as texts."
                    ) from error
                found.append(Utterance(*texts))
                named = row.get("normalization")
                normalizations.add(named if isinstance(named, str) else None)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--compare: {path} cannot be read: {error}.") from error
    return found, normalizations.pop() if len(normalizations) == 1 else None


def compare_utterances(
    first: Iterable[Utterance],
    second: Iterable[Utterance],
    normalization: str,
    *,
    block_pattern: str | None = None,
    resamples: int = RESAMPLES,
) -> dict[str, Any]:
    """`finetune.evaluation.significance.compare_counts` of the clips that are in both with the same reference.

    Beside its keys there are: only_in_a, only_in_b and other_reference, counts of clips that are not compared; left_out, of those
    that the normalisation leaves out; unchanged, better and worse, of clips by their errors; most_improved and most_worsened.
    The texts of one side are held in memory.

    Args:
        first, second: the same clips by two models.
        normalization: of `finetune.evaluation.scores.score_pair`.
        block_pattern: regular expression; clips in whose ids it finds the same are drawn and exchanged together.

    Raises:
        UserError: no clip with words is in both.
    """
    waiting = {}
    seen: Counter[str] = Counter()
    for heard in first:  # an id that comes twice is told apart by its place
        waiting[heard.id, seen[heard.id]] = heard
        seen[heard.id] += 1
    seen.clear()
    counted: Counter[str] = Counter(only_in_b=0, other_reference=0, left_out=0)
    numbers, languages, ids = [], [], []
    changed: list[tuple[int, Utterance, Utterance]] = []
    for b in second:
        key = (b.id, seen[b.id])
        seen[b.id] += 1
        a = waiting.pop(key, None)
        if a is None:
            counted["only_in_b"] += 1
            continue
        if a.reference != b.reference and _scored(a, normalization) != _scored(b, normalization):
            counted["other_reference"] += 1
            continue
        language = a.language or b.language
        counts = [score_pair(heard.reference, heard.hypothesis, normalization, language) for heard in (a, b)]
        if not counts[0].clips:
            counted["left_out"] += 1
            continue
        numbers.append((counts[0].word_errors, counts[1].word_errors, counts[0].words))
        languages.append(language or "unknown")
        ids.append(b.id)
        fewer = counts[1].word_errors - counts[0].word_errors
        if fewer:
            changed.append((fewer, a, b))
            if len(changed) > 10_000:  # the far ends are enough
                changed = _ends(changed, 100)
    if not sum(words for _, _, words in numbers):
        raise UserError(
            f"nothing to compare: no clip with words is in both with the same reference ({len(waiting)} only in the first, "
            f"{counted['only_in_b']} only in the second, {counted['other_reference']} with another reference)."
        )
    values_NC = np.asarray(numbers, dtype=np.int64)
    names = None if block_pattern is None else block_names(ids, block_pattern)
    result = compare_counts(*values_NC.T, languages, names_N=names, resamples=resamples)
    ends = _ends(changed, LISTED)
    difference_N = values_NC[:, 1] - values_NC[:, 0]
    return {
        "normalization": normalization,
        **result,
        "verdict": verdict(result, "the second model is better", "the second model is worse"),
        "only_in_a": len(waiting),
        **counted,
        "better": int((difference_N < 0).sum()),
        "worse": int((difference_N > 0).sum()),
        "unchanged": int((difference_N == 0).sum()),
        "most_improved": [_told(*entry) for entry in ends if entry[0] < 0],
        "most_worsened": [_told(*entry) for entry in reversed(ends) if entry[0] > 0],
    }


def _scored(heard: Utterance, normalization: str) -> str:
    return normalize_for_scores(heard.reference, normalization, heard.language)


def _ends(changed: list[tuple[int, Utterance, Utterance]], keep: int) -> list[tuple[int, Utterance, Utterance]]:
    """The most improved first, the most worsened last."""
    ordered = sorted(changed, key=lambda entry: (entry[0], entry[1].id))
    better, worse = [e for e in ordered if e[0] < 0], [e for e in ordered if e[0] > 0]
    return better[:keep] + worse[-keep:]


def _told(more_errors: int, a: Utterance, b: Utterance) -> dict[str, Any]:
    return {
        "id": a.id,
        "more_errors": more_errors,
        "reference": a.reference,
        "hypothesis_a": a.hypothesis,
        "hypothesis_b": b.hypothesis,
    }


def print_comparison(result: dict[str, Any]) -> None:
    """The comparison as a table, a verdict, and the clips that changed most."""

    def percent(value: float | None) -> str:
        return "-" if value is None else f"{100 * value:.2f}"

    def interval(value: list[float] | None, signed: bool = False) -> str:
        if value is None:
            return "-"
        return "[" + ", ".join(f"{100 * v:+.2f}" if signed else f"{100 * v:.2f}" for v in value) + "]"

    print(f"a: {result['a']}\nb: {result['b']}\n")
    heads = ("language", "WER a %", "95 %", "WER b %", "95 %", "b - a", "95 %", "p", "words", "clips")
    widths = (10, 8, 16, 8, 16, 7, 16, 8, 8, 7)
    print(" ".join(f"{head:{'<' if i == 0 else '>'}{width}}" for i, (head, width) in enumerate(zip(heads, widths))))
    languages = result["by_language"].items() if len(result["by_language"]) > 1 else []
    for name, r in [*languages, ("all", result)]:
        p_value = r.get("p_value_holm", r["p_value"]) if name != "all" else r["p_value"]
        difference = "-" if r["difference"] is None else f"{100 * r['difference']:+.2f}"
        cells = (
            *(percent(r["wer_a"]), interval(r["interval_a"]), percent(r["wer_b"]), interval(r["interval_b"])),
            *(difference, interval(r["difference_interval"], signed=True), as_text(p_value), r["words"], r["clips"]),
        )
        print(f"{one_line(name):10} " + " ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths[1:])))
    if languages:
        print("(p of the languages: corrected for their number after Holm)")
    if result["blocks"] != result["clips"]:
        print(f"({result['clips']} clips in {result['blocks']} blocks, drawn and exchanged as blocks)")
    if result["blocks"] < FEW:
        print(f"(with fewer than {FEW} clips or blocks intervals are too short)")
    print(f"\n{result['verdict']}")
    print(f"clips better {result['better']}, worse {result['worse']}, with as many errors {result['unchanged']}")
    missing = [
        f"{result[key]} {text}"
        for key, text in (
            ("only_in_a", "only in a"),
            ("only_in_b", "only in b"),
            ("other_reference", "with another reference"),
            ("left_out", "without a reference"),
        )
        if result[key]
    ]
    if missing:
        print(f"not compared: {', '.join(missing)}")
    for title, key in (("most improved", "most_improved"), ("most worsened", "most_worsened")):
        for clip in result[key]:
            print(f"\n{title}: {one_line(clip['id'])} ({clip['more_errors']:+d} errors)")
            for name, text in (("reference", "reference"), ("a", "hypothesis_a"), ("b", "hypothesis_b")):
                print(f"  {name:<9} {one_line(clip[text])}")
