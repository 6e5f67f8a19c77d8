"""What the texts of a data set are made of, and what looks wrong in them, by language."""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from finetune.data.normalization import normalize_text

EXAMPLE_CHARACTERS = 40  # around what is shown
EXAMPLES_A_SHARD = 200  # characters that get one, the rarest of a shard first
RARE = 1e-3  # share of a language's characters below which one is listed with an example
LISTED = 20  # of the rare characters, on the screen, over all languages

NUMBER_WORDS = (
    "two three five seven eight nine hundred zwei drei fünf sieben acht hundert deux trois cinq huit "
    "cinco ocho ciento cinque dieci cento três oito twee drie vijf zeven acht honderd "
    "dwa trzy pięć siedem osiem två fem sju åtta hundra syv otte kaksi kolme seitsemän kahdeksan "
    "dva tři pět päť sedm sedem osm osem două trei cinci șapte három öt nyolc száz два три пять семь восемь "
    "сто п'ять сім вісім δύο τρία πέντε επτά οκτώ εκατό seitse kaheksa divi trīs pieci trys penki üç beş"
)
"""Of the languages of Parakeet's European models, and a few more: those that are no other word in any of them."""

_LEADS = "\u00c2-\u00c5\u00ce-\u00d1\u00d7-\u00d9"
_FOLLOWING = "\u0080-\u00bf" + bytes(set(range(0x80, 0xA0)) - {0x81, 0x8D, 0x8F, 0x90, 0x9D}).decode("cp1252")
QUESTION, BEFORE_SMALL = "'?' inside or in place of letters", "'?' before a small letter"
PATTERNS = {
    QUESTION: re.compile(
        r"[^\W\d_]\?+[^\W\d_]"  # perch?no
        r"|(?<!\S)\?+[^\W\d_]"  # ?uvre
        r"|\?[.,;:]|\?{4,}"
    ),
    "U+FFFD, a character that was lost": re.compile("\ufffd"),
    "UTF-8 that was read as Latin-1": re.compile(f"[{_LEADS}][{_FOLLOWING}]|[\u00e0-\u00ef][{_FOLLOWING}]{{2}}"),
    "two scripts in one word": re.compile(
        "[A-Za-z\u00c0-\u024f][\u0370-\u03ff\u0400-\u052f]|[\u0370-\u03ff\u0400-\u052f][A-Za-z\u00c0-\u024f]"
        "|[\u0370-\u03ff][\u0400-\u052f]|[\u0400-\u052f][\u0370-\u03ff]"
    ),
    "markup": re.compile(r"<[^<>]{1,60}>|\[[^\[\]]{1,60}\]|\{[^{}]{1,60}\}|&#?\w{2,8};|\*\*|https?://|\\[nt]"),
}
CAPITALS, DIGITS, WORDS = "capitals only", "digits", "number words"
WITHIN_A_SENTENCE = re.compile(r"\?\s+([^\W\d_])")  # sar? pronto
DIGIT = re.compile(r"\d")
NUMBER_WORD = re.compile(rf"\b(?:{'|'.join(NUMBER_WORDS.split())})\b", re.IGNORECASE)
CAPITAL_LETTERS = 4  # at least, since OK and TV are no shouting; nor is M S D N, spelt out


def findings(text: str) -> Iterator[tuple[str, int]]:
    """Yield what looks wrong in a text as it stands in the data, and where."""
    for name, pattern in PATTERNS.items():
        if found := pattern.search(text):
            yield name, found.start()
        elif name == QUESTION and (places := [m for m in WITHIN_A_SENTENCE.finditer(text) if m[1].islower()]):
            yield BEFORE_SMALL, places[0].start()
    if text.isupper() and sum(map(str.isalpha, text)) >= CAPITAL_LETTERS and max(map(len, text.split())) > 1:
        yield CAPITALS, 0
    if found := DIGIT.search(text):
        yield DIGITS, found.start()
    if found := NUMBER_WORD.search(text):
        yield WORDS, found.start()


@dataclass
class Texts:
    """The texts of a language: counts of characters and findings, each with an example."""

    texts: int = 0
    characters: Counter[str] = field(default_factory=Counter)
    found: Counter[str] = field(default_factory=Counter)
    """Texts by what looks wrong in them."""
    deleted: Counter[str] = field(default_factory=Counter)
    """Characters that normalisation takes out."""
    examples: dict[str, str] = field(default_factory=dict)
    """By the character or the finding."""

    def add(self, text: str, normalization: str) -> list[str]:
        """Count a text as it stands in the data; return what is wrong in it by itself."""
        self.texts += 1
        counts = Counter(text)
        self.characters.update(counts)
        for c in counts.keys() - self.examples.keys():
            self.examples[c] = excerpt(text, text.index(c))
        wrong = list(findings(text))
        for name, place in wrong:
            self.found[name] += 1
            self.examples.setdefault(name, excerpt(text, place))
        if normalization != "none":
            # As it is composed and cased afterwards, so that only what is gone counts.
            before = Counter(unicodedata.normalize("NFC", text).lower().replace("\u2019", "'"))
            before.subtract(normalize_text(text, normalization).lower())
            self.deleted.update({c: n for c, n in before.items() if n > 0 and not c.isspace()})
        return [name for name, _ in wrong if name in PATTERNS or name == BEFORE_SMALL]

    def as_json(self) -> dict[str, Any]:
        """Return plain values of a shard, with the examples of its rarest characters."""
        rare = {c for c, _ in self.characters.most_common()[: -EXAMPLES_A_SHARD - 1 : -1]}
        examples = {name: text for name, text in self.examples.items() if name in rare or name in self.found}
        return {**vars(self), "examples": examples}

    def merge(self, part: dict[str, Any]) -> None:
        """Add what `as_json` of another shard returned."""
        self.texts += part["texts"]
        for name in ("characters", "found", "deleted"):
            getattr(self, name).update(part[name])
        self.examples = part["examples"] | self.examples

    @property
    def has_capitals(self) -> bool:
        """Whether sentences seem to begin with capitals, so that a '?' before a small letter is within one."""
        return sum(n for c, n in self.characters.items() if c.isupper()) > RARE * self.characters.total()

    def suspicious(self) -> list[tuple[str, int, str]]:
        """Return what looks wrong, in how many texts, with an example: digits only beside number words, and a '?'
        before a small letter only where sentences begin with capitals."""
        found = dict(self.found.most_common())
        if (small := found.pop(BEFORE_SMALL, 0)) and self.has_capitals:
            found[QUESTION] = found.get(QUESTION, 0) + small
            self.examples.setdefault(QUESTION, self.examples[BEFORE_SMALL])
        digits, words = found.pop(DIGITS, 0), found.pop(WORDS, 0)
        rows = [(name, n, self.examples[name]) for name, n in found.items()]
        if digits and words:
            example = f"{self.examples[DIGITS]} | {self.examples[WORDS]}"
            rows.append((f"{DIGITS}, beside {words:,} with {WORDS}", digits, example))
        return rows


def excerpt(text: str, place: int) -> str:
    """Return the text around a place, on one line."""
    start = max(place - EXAMPLE_CHARACTERS // 2, 0)
    end = start + EXAMPLE_CHARACTERS
    inside = " ".join(text[start:end].split()).encode("utf-8", "backslashreplace").decode("utf-8")
    return f"{'...' if start else ''}{inside}{'...' if end < len(text) else ''}"


def name_of(character: str) -> str:
    """Return a character, with its name where it cannot be seen."""
    shown = character.isprintable() and not character.isspace() and not unicodedata.combining(character)
    return character if shown else f"U+{ord(character):04X} {unicodedata.name(character, '')}".rstrip()


def lines_about(language: str, texts: Texts, languages: int) -> Iterator[str]:
    """Yield lines for the screen about the texts of one of so many languages."""
    total, listed = texts.characters.total(), max(LISTED // languages, 3)
    counts = [(name_of(c), c, n) for c, n in texts.characters.most_common() if c != " "]
    bound = max(RARE * total, 2)
    common = " ".join(f"{name} {n:,}" for name, _, n in counts if n >= bound)
    rare = sorted((row for row in counts if row[2] < bound), key=lambda row: (row[2], row[1].isalpha()))
    named = "without a language" if language == "?" else language
    yield f"texts {named}: {texts.texts:,}, of {len(counts)} characters: {common}"
    for name, c, n in rare[:listed]:
        yield f"  {n:>7,}  {name}  in: {texts.examples.get(c, '')}"
    if len(rare) > listed:
        yield f"  {len(rare) - listed:>7,}  other characters that are as rare: check.json"
    for name, n, example in texts.suspicious():
        yield f"  {n:>7,}  texts with {name}: {example}"
    if texts.deleted:
        deleted = " ".join(f"{name_of(c)} {n:,}" for c, n in texts.deleted.most_common(LISTED))
        yield f"  {texts.deleted.total():>7,}  characters that data.text_normalization takes out: {deleted}"
