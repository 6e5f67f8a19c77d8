"""Where a given text and what a model heard differ, and what the given text would be with one difference mended."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from rapidfuzz.distance import Levenshtein

from finetune.data.normalization import normalize_text

MISSING, NOT_SAID, OTHER = "words_missing", "words_not_said", "other_word"
GAP = 0.75  # of a word without a counterpart; another word costs up to DIFFERENT, so that it comes before two gaps
DIFFERENT = 1.3
LONGEST_ALIGNED = 400  # words; of longer texts only the whole is compared
MOST_EDITS = 12  # of a clip, that are scored


@dataclass(frozen=True)
class Edit:
    """A mended difference: the words of the given text from `start` to before `end` give way to `words`."""

    kind: str
    start: int
    end: int
    words: tuple[str, ...]

    def applied_to(self, given: list[str]) -> str:
        """Return the text of the given words with this edit."""
        return " ".join([*given[: self.start], *self.words, *given[self.end :]])


def split_words(text: str) -> list[str]:
    """Split a text into words; signs between blanks, such as a dash, belong to the word before."""
    words: list[str] = []
    for word in text.split():
        if words and not key_of(word):
            words[-1] += " " + word
        else:
            words.append(word)
    return words


def key_of(word: str) -> str:
    """Return a word as it is compared: without case and punctuation."""
    return normalize_text(word, "basic").replace(" ", "")


def align_words(given: list[str], heard: list[str]) -> list[tuple[int | None, int | None]]:
    """Return index pairs of given and heard words; None stands for a missing one.

    The alignment has the least cost where a word of like letters costs less than another one, so that a word that was
    put in beside a misheard one is told from it.
    """
    keys, others = [key_of(w) for w in given], [key_of(w) for w in heard]
    if max(len(keys), len(others)) > LONGEST_ALIGNED:
        return [*((i, None) for i in range(len(keys))), *((None, j) for j in range(len(others)))]
    rows, columns = len(keys) + 1, len(others) + 1
    cost = [[GAP * j for j in range(columns)]]
    for i, key in enumerate(keys, start=1):
        row, above = [GAP * i], cost[-1]
        for j, other in enumerate(others, start=1):
            row.append(min(above[j - 1] + _distance(key, other), above[j] + GAP, row[-1] + GAP))
        cost.append(row)
    pairs: list[tuple[int | None, int | None]] = []
    i, j = rows - 1, columns - 1
    while i or j:
        if i and j and cost[i][j] == cost[i - 1][j - 1] + _distance(keys[i - 1], others[j - 1]):
            i, j = i - 1, j - 1
            pairs.append((i, j))
        elif i and cost[i][j] == cost[i - 1][j] + GAP:
            i -= 1
            pairs.append((i, None))
        else:
            j -= 1
            pairs.append((None, j))
    return pairs[::-1]


def _distance(a: str, b: str) -> float:
    return 0.0 if a == b else DIFFERENT * Levenshtein.normalized_distance(a, b)


def same(given: list[str], heard: list[str], pair: tuple[int | None, int | None]) -> bool:
    i, j = pair
    return i is not None and j is not None and key_of(given[i]) == key_of(heard[j])


def edits_of(given: list[str], heard: list[str]) -> list[Edit]:
    """Return the edits that each mend one difference: single words, runs of words that are missing or were not said,
    and all that remains at the text's beginning or end where its other part was heard."""
    pairs = align_words(given, heard)
    place, found = 0, []
    for index, pair in enumerate(pairs):
        i, j = pair
        if not same(given, heard, pair):
            kind = MISSING if i is None else NOT_SAID if j is None else OTHER
            found.append((index, Edit(kind, place, place + (i is not None), () if j is None else (heard[j],))))
        place += i is not None
    edits = [*_ends(given, heard, pairs), *_runs(found), *(edit for _, edit in found)]
    if 2 * len(found) > len(pairs):  # it is another text, unless only its end or beginning differs
        edits = [edit for edit in edits if edit.kind == NOT_SAID and edit.end - edit.start > 1]
    return list(dict.fromkeys(edits))[:MOST_EDITS]


def _runs(found: list[tuple[int, Edit]]) -> Iterator[Edit]:
    """Join edits of one kind that follow each other; each with its index in the alignment."""
    neighbours = groupby(enumerate(found), lambda entry: (entry[1][1].kind, entry[1][0] - entry[0]))
    for (kind, _), group in neighbours:
        run = [edit for _, (_, edit) in group]
        if len(run) > 1 and kind != OTHER:
            yield Edit(kind, run[0].start, run[-1].end, tuple(w for edit in run for w in edit.words))


def _ends(given: list[str], heard: list[str], pairs: list[tuple[int | None, int | None]]) -> Iterator[Edit]:
    """Yield the removals of the text's end and beginning behind or before the last or first word that was heard, with
    one word more that may be half there."""
    equal = [pair[0] for pair in pairs if same(given, heard, pair)]
    if not equal:
        return
    first, last = equal[0], equal[-1]
    assert first is not None
    assert last is not None
    for begin in range(last + 1, min(last + 3, len(given))):
        if len(given) - begin > 1:
            yield Edit(NOT_SAID, begin, len(given), ())
    for end in range(first, max(first - 2, 1), -1):
        yield Edit(NOT_SAID, 0, end, ())
