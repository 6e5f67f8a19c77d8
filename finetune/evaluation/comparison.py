"""Compare two models on the same utterances: which is better, whether that is more than chance, and on which
utterances."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune.errors import UserError
from finetune.evaluation.scores import Utterance, normalize_for_scores, score_pair
from finetune.evaluation.significance import RESAMPLES, block_names, compare_counts, describe_difference
from finetune.security.documents import parse_json

if TYPE_CHECKING:
    from pathlib import Path

LISTED = 5
"""Utterances shown as most improved and as most worsened."""


def read_utterances(path: Path) -> tuple[list[Utterance], str | None]:
    """Read a file that `evaluate --utterances` wrote; also the normalisation that it was scored with, if it names one.

    Raises:
        UserError: the file cannot be read, or a line is not of that kind.
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
                        f"--compare: line {number} of {path} was not written by `evaluate --utterances`: it needs id, "
                        "reference and hypothesis, as texts."
                    ) from error
                found.append(Utterance(*texts))
                normalization = row.get("normalization")
                normalizations.add(normalization if isinstance(normalization, str) else None)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--compare: {path} cannot be read: {error}.") from error
    return found, normalizations.pop() if len(normalizations) == 1 else None


def compare_utterances(
    first: list[Utterance],
    second: list[Utterance],
    normalization: str,
    *,
    block_pattern: str | None = None,
    resamples: int = RESAMPLES,
) -> dict[str, Any]:
    """Compare, by `finetune.evaluation.significance.compare_counts`, the utterances that are in both with the same
    reference.

    The result has these keys as well: only_in_a, only_in_b and other_reference count utterances that are not compared;
    left_out, those that the normalisation leaves out; unchanged, better and worse count utterances by their errors;
    most_improved and most_worsened list some.

    Args:
        first, second: the same utterances by two models.
        normalization: of `finetune.evaluation.scores.score_pair`.
        block_pattern: regular expression; utterances in whose ids it matches the same are drawn and exchanged
            together.

    Raises:
        UserError: no utterance with words is in both.
    """
    waiting = by_occurrence(first)
    skipped = dict.fromkeys(("only_in_b", "other_reference", "left_out"), 0)
    counts, languages = [], []
    compared: list[tuple[int, Utterance, Utterance]] = []
    for key, b in by_occurrence(second).items():
        a = waiting.pop(key, None)
        if a is None:
            skipped["only_in_b"] += 1
            continue
        if a.reference != b.reference and _scored_reference(a, normalization) != _scored_reference(b, normalization):
            skipped["other_reference"] += 1
            continue
        language = a.language or b.language
        score_a, score_b = (score_pair(u.reference, u.hypothesis, normalization, language) for u in (a, b))
        if not score_a.clips:
            skipped["left_out"] += 1
            continue
        counts.append((score_a.word_errors, score_b.word_errors, score_a.words))
        languages.append(language or "unknown")
        compared.append((score_b.word_errors - score_a.word_errors, a, b))
    if not sum(words for _, _, words in counts):
        raise UserError(
            "nothing to compare: no clip with words is in both with the same reference "
            f"({len(waiting)} only in the first, {skipped['only_in_b']} only in the second, "
            f"{skipped['other_reference']} with another reference)."
        )
    counts_NC = np.asarray(counts, dtype=np.int64)
    names = None if block_pattern is None else block_names([b.id for _, _, b in compared], block_pattern)
    result = compare_counts(
        counts_NC[:, 0], counts_NC[:, 1], counts_NC[:, 2], languages, names_N=names, resamples=resamples
    )
    compared.sort(key=lambda entry: (entry[0], entry[1].id))  # the most improved first
    better, worse = [e for e in compared if e[0] < 0], [e for e in compared if e[0] > 0]
    return {
        "normalization": normalization,
        **result,
        "verdict": describe_difference(result, "the second model is better", "the second model is worse"),
        "only_in_a": len(waiting),
        **skipped,
        "better": len(better),
        "worse": len(worse),
        "unchanged": len(compared) - len(better) - len(worse),
        "most_improved": [_as_row(*entry) for entry in better[:LISTED]],
        "most_worsened": [_as_row(*entry) for entry in reversed(worse[-LISTED:])],
    }


def by_occurrence(utterances: list[Utterance]) -> dict[tuple[str, int], Utterance]:
    """By id, and by its occurrence where an id comes twice."""
    seen: Counter[str] = Counter()
    found = {}
    for utterance in utterances:
        found[utterance.id, seen[utterance.id]] = utterance
        seen[utterance.id] += 1
    return found


def _scored_reference(utterance: Utterance, normalization: str) -> str:
    return normalize_for_scores(utterance.reference, normalization, utterance.language)


def _as_row(more_errors: int, a: Utterance, b: Utterance) -> dict[str, Any]:
    return {
        "id": a.id,
        "more_errors": more_errors,
        "reference": a.reference,
        "hypothesis_a": a.hypothesis,
        "hypothesis_b": b.hypothesis,
    }
