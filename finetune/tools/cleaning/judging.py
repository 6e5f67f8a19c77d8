"""From the scores of all clips to problems with a kind and a confidence.

The scores are read two times: numbers of all clips into arrays, texts of the suspects only. N clips.
"""

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import combinations, islice
from typing import Any

import numpy as np
from rapidfuzz.distance import Levenshtein

from finetune.tools.cleaning.edits import MISSING, NOT_SAID, OTHER, Edit, align_words, key_of, split_words
from finetune.tools.cleaning.evidence import CutEvidence, LikelihoodRatio
from finetune.tools.cleaning.languages import Languages
from finetune.tools.cleaning.mixtures import Mixture, fit_mixture, probability
from finetune.tools.cleaning.repeats import repeated
from finetune.tools.data_check.doubts import SILENT

Result = dict[str, Any]
TEXT = "text"
WORDS = (MISSING, NOT_SAID, OTHER)
SURE = 0.5  # confidence from which on a clip is a problem
SUSPECT = 0.1  # from which on a partner is looked for
LONG_SILENT_TEXT = 0.99  # quantile of speech without words
UNLIKELY = -6.0  # log-odds below which letters and edges make no suspect
FEWEST_WORDS_HEARD = 0.5  # of the given ones, for judgements about single words
POWER = 0.75  # of the clips, in which another clip's text has to fit worse than the given one: halfway from chance
FEWEST_UNHEARD = 1.0  # seconds of speech without words
NEAREST, MOST_OF_A_GRAM = 8, 1000  # clips that are compared with one, and that four letters lead to


@dataclass
class Problem:
    """A clip whose label is suspicious."""

    kind: str
    confidence: float
    row: Result
    difference: str
    score: float
    edit: Edit | None = None
    """What would mend it."""
    partner: str | None = None
    """The place of the clip that has its text."""
    of_text: bool = False
    """Whether the text is suspicious as a whole, so that a partner is looked for."""


@dataclass
class Judgement:
    """What is said of the whole data set."""

    problems: list[Problem] = field(default_factory=list)
    clips: int = 0
    words: int = 0
    wer: float = 0.0
    """Of the model against the labels."""
    compared: int = 0
    """Clips whose text was compared with another one's."""
    power: float = 0.0
    """Share of these in which the other text fits worse than the given one; chance has 0.5."""
    languages: int = 2
    """That the rows name; with one, no text is told to be in another."""
    mixtures: dict[str, Mixture | None] = field(default_factory=dict)
    label_words: int = 0
    """Words of the labels that are wrong by the problems listed."""
    model_words: int = 0
    """Other words in which the model differs from the labels."""

    @property
    def judges_words(self) -> bool:
        return self.judges_texts and self.wer <= 1 - FEWEST_WORDS_HEARD

    @property
    def judges_texts(self) -> bool:
        return self.power >= POWER


def text_score(loss: float, row: Result) -> float:
    """Return how much less probable a text is than what is heard, in nats against what chance makes of its length."""
    return float(np.log1p(max(loss - row["heard_loss"], 0.0) / max(row["tokens"], 1) ** 0.5))


def gain_score(edit: Result, row: Result) -> float:
    """Return what an edit gains, in nats against the model's own uncertainty of the clip; negative where it loses."""
    against = edit["gain"] / (1 + max(row["heard_loss"], 0.0)) ** 0.5
    return float(np.copysign(np.log1p(abs(against)), against))


def best_edit(row: Result, kind: str) -> Result | None:
    """Return the edit of a kind that gains most."""
    return max((edit for edit in row["edits"] if edit["kind"] == kind), key=lambda e: e["gain"], default=None)


def mended_loss(row: Result) -> float:
    """Return the loss of the text with the edit that gains most."""
    return row["loss"] - max([0.0, *(edit["gain"] for edit in row["edits"])])


def rate_of(row: Result) -> float:
    """Return tokens a second."""
    return row["tokens"] / max(row["duration"], 0.01)


@dataclass(frozen=True)
class Evidence:
    """What speaks for a kind beside the model."""

    languages: Languages
    language: LikelihoodRatio | None
    cut: CutEvidence


@dataclass
class _Numbers:
    text_N: array = field(default_factory=lambda: array("d"))
    """With the edit that gains most."""
    given_N: array = field(default_factory=lambda: array("d"))
    """As it is."""
    wrong_N: array = field(default_factory=lambda: array("d"))
    """The score of another clip's text; NaN without one."""
    gains_N: dict[str, array] = field(default_factory=lambda: {kind: array("d") for kind in WORDS})
    """NaN where there is no such edit."""
    head_N: array = field(default_factory=lambda: array("d"))
    middle_N: array = field(default_factory=lambda: array("d"))
    tail_N: array = field(default_factory=lambda: array("d"))
    rate_N: array = field(default_factory=lambda: array("d"))
    unheard_N: array = field(default_factory=lambda: array("d"))
    words: int = 0
    word_errors: int = 0
    languages: Languages = field(default_factory=Languages)

    def add(self, row: Result) -> None:
        self.text_N.append(text_score(mended_loss(row), row))
        self.given_N.append(text_score(row["loss"], row))
        other = row["other"]
        self.wrong_N.append(np.nan if other is None else text_score(other * max(row["tokens"], 1), row))
        for kind in WORDS:
            edit = best_edit(row, kind)
            self.gains_N[kind].append(np.nan if edit is None else gain_score(edit, row))
        self.head_N.append(row["head"])
        self.middle_N.append(row["middle"])
        self.tail_N.append(row["tail"])
        self.rate_N.append(rate_of(row))
        self.unheard_N.append(row["unheard"])
        given, heard = _keys(row["text"]), _keys(row["heard"])
        self.words += len(given)
        self.word_errors += Levenshtein.distance(given, heard)
        self.languages.add(row["text"], row["language"])


def _keys(text: str) -> list[str]:
    return [key_of(word) for word in split_words(text)]


def judge(results: Callable[[], Iterable[Result]]) -> Judgement:
    """Judge all clips; `results` gives the scores anew at each call, in one order."""
    numbers = _Numbers()
    for row in results():
        numbers.add(row)
    clips = len(numbers.text_N)
    judgement = Judgement(clips=clips, words=numbers.words, languages=len(numbers.languages.counts))
    if not clips:
        return judgement
    judgement.wer = numbers.word_errors / max(numbers.words, 1)
    text_N, wrong_N = np.array(numbers.text_N), np.array(numbers.wrong_N)
    compared_N = ~np.isnan(wrong_N)
    wrong_N = wrong_N[compared_N]
    worse_N = wrong_N > np.array(numbers.given_N)[compared_N]
    judgement.compared = len(wrong_N)
    judgement.power = float(worse_N.mean()) if len(wrong_N) else 0.0
    whole = judgement.mixtures[TEXT] = fit_mixture(text_N, wrong_N)
    fits_N = np.full(clips, True) if whole is None else whole.log_odds(text_N) < 0
    for kind in WORDS:
        judgement.mixtures[kind] = fit_mixture(np.array(numbers.gains_N[kind])[fits_N])
    cut = CutEvidence.of(*map(np.array, (numbers.head_N, numbers.middle_N, numbers.tail_N, numbers.rate_N)))
    longest_unheard = max(float(np.quantile(numbers.unheard_N, LONG_SILENT_TEXT)), FEWEST_UNHEARD)
    evidence = Evidence(numbers.languages, _language_ratio(results(), fits_N, numbers.languages), cut)
    for row in results():
        problem = _problem(row, judgement, evidence, longest_unheard)
        if problem is not None and problem.confidence >= SUSPECT:
            judgement.problems.append(problem)
    return judgement


def _language_ratio(rows: Iterable[Result], fits_N: np.ndarray, languages: Languages) -> LikelihoodRatio | None:
    """Return how much likelier a text of another language makes each margin of its letters, by the texts that fit:
    between two languages, the margin of a text in the wrong one is that in the right one with the other sign."""
    if len(languages.counts) < 2:
        return None
    margin_N = np.array(
        [languages.of(row["text"], row["language"])[1] for row, fits in zip(rows, fits_N, strict=True) if fits]
    )
    return LikelihoodRatio.of(margin_N, -margin_N)


def _problem(row: Result, judgement: Judgement, evidence: Evidence, longest_unheard: float) -> Problem | None:
    problem = _plain_problem(row)
    of_text = False
    if problem is None and judgement.judges_texts:
        problem = _text_problem(row, judgement.mixtures[TEXT], evidence)
        of_text = problem is not None and problem.confidence >= SUSPECT
    if judgement.judges_words and (problem is None or problem.confidence < SURE):
        problem = _word_problem(row, judgement.mixtures, evidence.cut) or problem
    if row["unheard"] > longest_unheard and (problem is None or problem.confidence < SURE):
        ratio = row["unheard"] / longest_unheard
        difference = f"{row['unheard']:.1f} s of speech in which no word is heard"
        problem = Problem("speech_without_words", 1 - 0.5 / ratio, row, difference, row["unheard"])
    if problem is not None:
        problem.of_text = of_text
    return problem


def _plain_problem(row: Result) -> Problem | None:
    if row["level"] <= SILENT and row["text"]:
        return Problem("silence", 1.0, row, f"{row['level']:.0f} dB of full scale, and a text", row["level"])
    if (found := repeated(row["text"])) and not repeated(row["heard"]):
        return Problem("repeated", 1.0, row, f"'{found[0]}' {found[1]} times in the text", float(found[1]))
    if row["heard"] and not row["text"]:
        words = tuple(split_words(row["heard"]))
        confidence = 1 - float(np.exp(-max(row["loss"] - row["heard_loss"], 0.0)))
        difference = f"no text, but heard: {row['heard']}"
        return Problem("speech_without_words", confidence, row, difference, confidence, Edit(MISSING, 0, 0, words))
    return None


def _word_problem(row: Result, mixtures: dict[str, Mixture | None], cut: CutEvidence) -> Problem | None:
    """Return the problem that the edit mends that gains most, if it is sure."""
    given = split_words(row["text"])
    found: list[tuple[float, Result, float, float]] = []
    for kind in WORDS:
        mixture, entry = mixtures[kind], best_edit(row, kind)
        if mixture is None or entry is None:
            continue
        log_odds, at_edge = float(mixture.log_odds(np.array(gain_score(entry, row)))), 0.0
        if _may_be_cut(entry, given):
            at_edge = _cut_off(row, cut, entry["start"] == 0, entry["end"] == len(given))
            log_odds += float(np.logaddexp(at_edge, 0.0) - np.log(2))
        if log_odds >= 0:
            found.append((entry["gain"], entry, float(probability(log_odds)), at_edge))
    if not found:
        return None
    gain, entry, confidence, at_edge = max(found, key=lambda each: each[0])
    kind, start, end, words = entry["kind"], entry["start"], entry["end"], tuple(entry["words"])
    edit, of_text = Edit(kind, start, end, words), " ".join(given[start:end])
    if at_edge > 0:
        side = "end" if end == len(given) else "beginning"
        return Problem("cut_off", confidence, row, f"the audio lacks the {side} of the text: {of_text}", gain, edit)
    what = {
        NOT_SAID: f"not said: {of_text}",
        MISSING: f"said, but not in the text: {' '.join(words)}",
        OTHER: f"{of_text}: {' '.join(words)} was said",
    }
    return Problem(kind, confidence, row, what[kind], gain, edit)


def _may_be_cut(edit: Result, given: list[str]) -> bool:
    """Return whether an edit takes away an end of the text, or leaves a part of its last or first word."""
    start, end = edit["start"], edit["end"]
    if (start == 0) == (end == len(given)):
        return False
    gone, left = (len("".join(map(key_of, words))) for words in (given[start:end], edit["words"]))
    return edit["kind"] == NOT_SAID or (edit["kind"] == OTHER and left < gone)


def _cut_off(row: Result, cut: CutEvidence, at_start: bool, at_end: bool) -> float:
    """Return the log-likelihood ratio of audio that is cut off at one of these ends."""
    rate = rate_of(row)
    return max(
        cut.at_start(row["head"], rate) if at_start else -np.inf, cut.at_end(row["tail"], rate) if at_end else -np.inf
    )


def _text_problem(row: Result, mixture: Mixture | None, evidence: Evidence) -> Problem | None:
    """Return the problem of a text that fits as a whole so badly; `exchanged` follows with the partners.

    The text is that of another clip, or of audio that is cut off, or in another language: equally likely each, before
    edges, rate and letters are looked at.
    """
    if mixture is None:
        return None
    score = (row["loss"] - row["heard_loss"]) / max(row["tokens"], 1)
    log_odds = float(mixture.log_odds(np.array(text_score(mended_loss(row), row))))
    if log_odds < UNLIKELY:
        return None
    ratios = {"wrong_text": 0.0, "cut_off": _cut_off(row, evidence.cut, True, True)}
    reads_like = ""
    if evidence.language is not None:
        reads_like, margin = evidence.languages.of(row["text"], row["language"])
        ratios["other_language"] = evidence.language.at(margin)
    confidence = float(probability(log_odds + np.logaddexp.reduce(list(ratios.values())) - np.log(len(ratios))))
    differences = {
        "wrong_text": "the text does not fit the audio",
        "cut_off": "the audio lacks a part of the text",
        "other_language": f"the text reads like {reads_like}, the clip is {row['language'] or 'of no language'}",
    }
    kind = max(ratios, key=ratios.__getitem__)
    return Problem(kind, confidence, row, differences[kind], score)


def possible_pairs(problems: list[Problem], most: int) -> list[tuple[int, int]]:
    """Return pairs of clips whose texts may be exchanged, by their numbers: the likest first, where one's text is
    nearer to what is heard in the other than the other's own is; then, up to `most`, others of one language."""
    own = [_letters(problem.row["text"]) for problem in problems]
    index: dict[str, list[int]] = {}
    for n, letters in enumerate(own):
        for gram in _grams(letters):
            index.setdefault(gram, []).append(n)
    heard = [_letters(problem.row["heard"]) for problem in problems]
    found: dict[tuple[int, int], float] = {}
    for n, letters in enumerate(heard):
        votes: dict[int, int] = {}
        for gram in _grams(letters):
            for other in index.get(gram, ())[:MOST_OF_A_GRAM]:
                votes[other] = votes.get(other, 0) + 1
        for other in sorted(votes, key=votes.__getitem__, reverse=True)[:NEAREST]:
            there, back = _unlike(letters, own[other]), _unlike(heard[other], own[n])
            if other != n and there < _unlike(letters, own[n]):
                found[min(n, other), max(n, other)] = there + back
    languages = [problem.row["language"] for problem in problems]
    others = ((a, b) for a, b in combinations(range(len(problems)), 2) if languages[a] == languages[b])
    pairs = sorted(found, key=found.__getitem__)[:most]
    return [*pairs, *islice((pair for pair in others if pair not in found), most - len(pairs))]


def _unlike(a: str, b: str) -> float:
    return Levenshtein.normalized_distance(a, b)


def _letters(text: str) -> str:
    return " ".join(filter(None, map(key_of, text.split())))


def _grams(letters: str) -> set[str]:
    return {letters[i : i + 4] for i in range(max(len(letters) - 3, 1))}


def count_words(judgement: Judgement) -> None:
    """Count whose words are wrong where model and labels differ: of each problem as many as its confidence expects."""
    expected = 0.0
    for problem in judgement.problems:
        edit, given = problem.edit, split_words(problem.row["text"])
        words = len(given) if edit is None else max(edit.end - edit.start, len(edit.words))
        expected += problem.confidence * words
    judgement.label_words = round(expected)
    judgement.model_words = max(round(judgement.wer * judgement.words) - judgement.label_words, 0)


def aligned_pairs(given: str, heard: str) -> list[tuple[str, str, bool]]:
    """Return the words of two texts side by side, and whether they differ."""
    left, right = split_words(given), split_words(heard)
    pairs = []
    for i, j in align_words(left, right):
        a, b = "" if i is None else left[i], "" if j is None else right[j]
        pairs.append((a, b, key_of(a) != key_of(b)))
    return pairs
