"""Texts of the synthetic corpus: a sentence grammar, number words, prompt recombinations and dictionary words.

A text is made as the speech synthesiser reads it (punctuation, single letters in capitals); its transcript is
sample_data.normalise_text of it, in lower case with a-z, accented letters, apostrophes and spaces only.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import sample_data as sd

LANGUAGES = ("en", "fr")
SPLITS = ("train", "validation", "test")
HELD_OUT_SHARE = 0.02  # of the texts, for synthetic validation and for synthetic test each
MAX_WORDS = 20
DICTIONARIES = {"en": Path("/usr/share/dict/american-english"), "fr": Path("/usr/share/dict/french")}
LETTERS = {"en": "a-z", "fr": "a-zàâæçéèêëîïôœùûüÿ"}
KINDS = {"grammar": 0.43, "prompt": 0.11, "recombined": 0.17, "words": 0.16, "short": 0.13}

EN_ONES = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
EN_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
EN_ORDINALS = {"one": "first", "two": "second", "three": "third", "five": "fifth", "eight": "eighth", "nine": "ninth",
               "twelve": "twelfth"}  # fmt: skip
FR_ONES = [
    "zéro",
    "un",
    "deux",
    "trois",
    "quatre",
    "cinq",
    "six",
    "sept",
    "huit",
    "neuf",
    "dix",
    "onze",
    "douze",
    "treize",
    "quatorze",
    "quinze",
    "seize",
    "dix-sept",
    "dix-huit",
    "dix-neuf",
]
FR_TENS = {2: "vingt", 3: "trente", 4: "quarante", 5: "cinquante", 6: "soixante"}
EN_MONTHS = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
]
FR_MONTHS = [
    "janvier",
    "février",
    "mars",
    "avril",
    "mai",
    "juin",
    "juillet",
    "août",
    "septembre",
    "octobre",
    "novembre",
    "décembre",
]
FR_MUTE_H = "h(?:istoire|orloge|eure|ôtel|ôpital|ôte|omme|iver|uile|enri|élène)"


def english_number(value: int) -> str:
    """0 to 9999 in English words."""
    if value < 20:
        return EN_ONES[value]
    if value < 100:
        rest = f"-{EN_ONES[value % 10]}" if value % 10 else ""
        return EN_TENS[value // 10 - 2] + rest
    unit, name = (1000, "thousand") if value >= 1000 else (100, "hundred")
    rest = f" {english_number(value % unit)}" if value % unit else ""
    return f"{english_number(value // unit)} {name}{rest}"


def french_number(value: int) -> str:
    """0 to 9999 in French words."""
    if value < 20:
        return FR_ONES[value]
    if value < 70:
        ten, one = divmod(value, 10)
        return FR_TENS[ten] + ("" if one == 0 else " et un" if one == 1 else f"-{FR_ONES[one]}")
    if value < 80:
        return "soixante et onze" if value == 71 else f"soixante-{FR_ONES[value - 60]}"
    if value < 100:
        return "quatre-vingts" if value == 80 else f"quatre-vingt-{FR_ONES[value - 80]}"
    unit, name = (1000, "mille") if value >= 1000 else (100, "cent")
    head, rest = divmod(value, unit)
    return " ".join(([french_number(head)] if head > 1 else []) + [name] + ([french_number(rest)] if rest else []))


def number(value: int, language: str) -> str:
    """0 to 9999 in words."""
    return english_number(value) if language == "en" else french_number(value)


def ordinal(value: int, language: str) -> str:
    """1 to 99 as an ordinal in words."""
    words = number(value, language)
    if language == "fr":
        if value == 1:
            return "premier"
        words = re.sub(r"quatre-vingts$", "quatre-vingt", words)
        words = re.sub(r"cinq$", "cinqu", re.sub(r"neuf$", "neuv", re.sub(r"e$", "", words)))
        return words + "ième"
    head, _, last = words.rpartition("-")
    last = EN_ORDINALS.get(last, f"{last[:-1]}ieth" if last.endswith("y") else f"{last}th")
    return f"{head}-{last}" if head else last


def clock(rng: random.Random, language: str) -> str:
    """A time of day in words."""
    minute = rng.choice([0, 0, 5, 10, 15, 20, 25, 30, 30, 35, 40, 45, 50, 55, rng.randrange(1, 60)])
    if language == "fr":
        hour = rng.randrange(1, 24)
        name = "une" if hour == 1 else french_number(hour).replace("vingt et un", "vingt et une")
        name += " heure" if hour == 1 else " heures"
        if hour == 12 and rng.random() < 0.5:
            name = "midi"
        if minute == 0:
            return name
        if minute in (15, 30, 45) and rng.random() < 0.5:
            half = " et demi" if name == "midi" else " et demie"
            return name + {15: " et quart", 30: half, 45: " moins le quart"}[minute]
        return f"{name} {french_number(minute)}"
    hour = rng.randrange(1, 13)
    name = english_number(hour)
    form = rng.random()
    if form < 0.2 and minute in (15, 30):
        return f"{'a quarter' if minute == 15 else 'half'} past {name}"
    if form < 0.2 and minute == 45:
        return f"a quarter to {name}"
    text = name if minute == 0 else f"{name} {'oh ' if minute < 10 else ''}{english_number(minute)}"
    if minute == 0 and form < 0.4:
        return f"{name} o'clock"
    if minute == 0 or form > 0.6:
        text += rng.choice([" A M", " P M", " P M", " in the morning", " in the evening"])
    return text


def date(rng: random.Random, language: str) -> str:
    """A day of the year in words."""
    day, month = rng.randrange(1, 32), rng.randrange(12)
    if language == "fr":
        return f"{'premier' if day == 1 else french_number(day)} {FR_MONTHS[month]}"
    if rng.random() < 0.3:
        return f"the {ordinal(day, 'en')} of {EN_MONTHS[month]}"
    return f"{EN_MONTHS[month]} {ordinal(day, 'en') if rng.random() < 0.7 else english_number(day)}"


def year(rng: random.Random, language: str) -> str:
    """A year between 1900 and 2039 in words."""
    value = rng.randrange(1900, 2040)
    if language == "fr":
        return french_number(value)
    if value >= 2000:
        plain_form = value < 2010 or rng.random() < 0.5
        return english_number(value) if plain_form else f"twenty {english_number(value - 2000)}"
    rest = value - 1900
    return "nineteen " + ("hundred" if rest == 0 else f"oh {EN_ONES[rest]}" if rest < 10 else english_number(rest))


def money(rng: random.Random, language: str) -> str:
    """A sum of money in words."""
    units = rng.choice([rng.randrange(2, 20), rng.randrange(2, 100), rng.randrange(100, 1000)])
    cents = rng.randrange(2, 100)
    if language == "fr":
        text = f"{french_number(units)} {rng.choice(['euros', 'dollars', 'francs'])}"
        return f"{text} {french_number(cents)}" if rng.random() < 0.3 else text
    text = f"{english_number(units)} {rng.choice(['dollars', 'dollars', 'pounds', 'euros'])}"
    return f"{text} and {english_number(cents)} cents" if rng.random() < 0.3 else text


def elide(text: str) -> str:
    """Mend French articles before vowels: de anne -> d'anne, ma horloge -> mon horloge, à le -> au."""
    vowel = f"(?=[aeiouàâéèêëîïôûœæ]|{FR_MUTE_H})(?!onz|oui|un\\b|une\\b|ouistiti|et\\b|ou\\b)"
    text = re.sub(rf"\b([Dd]|[Ll]|[Jj]|[Nn]|[Ss]|[Qq]u|[Mm]|[Tt])[ea] {vowel}", r"\1'", text)
    text = re.sub(rf"\b(m|t|s)a {vowel}", r"\1on ", text)
    text = re.sub(rf"\bce {vowel}(?!est|ét)", "cet ", text)
    for before, after in (("beau", "bel"), ("nouveau", "nouvel"), ("vieux", "vieil")):
        text = re.sub(rf"\b{before} {vowel}", f"{after} ", text)
    return re.sub(r"\bde le (?!{|faire|voir)", "du ", re.sub(r"\bà le ", "au ", text))


class Grammar:
    """Sentences drawn at random from a grammar file."""

    def __init__(self, path: Path, language: str) -> None:
        self.language = language
        self.slots: dict[str, list[str]] = {}
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("#") or "=" not in line:
                continue
            name, _, alternatives = line.partition(" =")
            # One blank after "=" and around "|" belongs to the notation; further blanks to the alternative.
            parts = [part.removeprefix(" ").removesuffix(" ") for part in alternatives.split("|")]
            self.slots.setdefault(name.strip(), []).extend(parts)
        used = {n for parts in self.slots.values() for part in parts for n in re.findall(r"{([a-zA-Z_0-9]+)}", part)}
        missing = used - set(self.slots) - {"time", "date", "year", "money"}
        if missing:
            raise ValueError(f"{path.name}: slots without alternatives: {', '.join(sorted(missing))}")

    def _expand(self, text: str, rng: random.Random) -> str:
        def replace(match: re.Match[str]) -> str:
            name, low, high = match.group(1), match.group(2), match.group(3)
            if low is None:
                builtin = {"time": clock, "date": date, "year": year, "money": money}.get(name)
                return builtin(rng, self.language) if builtin else self._expand(rng.choice(self.slots[name]), rng)
            count = rng.randint(int(low), int(high))
            if name == "digits":
                digits = [number(rng.randrange(10), self.language) for _ in range(count)]
                if self.language == "en" and rng.random() < 0.2:
                    digits = ["oh" if digit == "zero" else digit for digit in digits]
                return " ".join(digits)
            if name == "spell":
                return " ".join(rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(count))
            return (ordinal if name == "ord" else number)(count, self.language)

        return re.sub(r"{([a-zA-Z_0-9]+)(?::(\d+)-(\d+))?}", replace, text)

    def sentence(self, rng: random.Random) -> str:
        """One sentence, as the synthesiser reads it."""
        text = " ".join(self._expand(rng.choice(self.slots["S"]), rng).split())
        text = re.sub(r"\s+([.,?!])", r"\1", re.sub(r"[.?!]+(?=[.,])", "", text))
        return elide(text) if self.language == "fr" else text


def load_words(language: str, count: int = 20_000) -> list[str]:
    """Common words of a language, most common first where the wordfreq package is installed."""
    path = DICTIONARIES[language]
    if not path.is_file():
        package = "wamerican" if language == "en" else "wfrench"
        raise FileNotFoundError(f"the word list {path} is missing: apt-get install {package}")
    pattern = re.compile(rf"(?=.*[aeiouyàâéèêëîïôùûœ])[{LETTERS[language]}]{{3,14}}")
    listed = [word for word in path.read_text(encoding="utf-8").split("\n") if pattern.fullmatch(word)]
    try:
        import wordfreq
    except ImportError:
        listed = sorted((word for word in listed if len(word) < 10), key=lambda w: hashlib.sha256(w.encode()).digest())
        return listed[:count]
    known = set(listed)
    return [word for word in wordfreq.top_n_list(language, 3 * count) if word in known][:count]


@dataclass(frozen=True)
class HeldOut:
    """Texts that no synthetic clip may say: those of the prompts' validation and test splits."""

    keys: frozenset[str]
    phrases: frozenset[str] = field(default_factory=frozenset)  # of three or more words, between blanks

    @classmethod
    def of(cls, texts: Iterable[str]) -> HeldOut:
        """Held-out set of the given texts."""
        normalised = [sd.normalise_text(text) for text in texts]
        phrases = {plain(text) for text in normalised if len(text.split()) >= 3}
        return cls(frozenset(sd.split_key(text) for text in normalised), frozenset(phrases))

    def forbids(self, text: str) -> bool:
        """True where the text equals a held-out one or has one of three or more words inside it."""
        if sd.split_key(text) in self.keys:
            return True
        words = plain(sd.normalise_text(text))
        return any(phrase in words for phrase in self.phrases)


def plain(text: str) -> str:
    """Words without accents between blanks, for phrase search."""
    return " " + " ".join(sd.split_key(word) for word in text.replace("'", " ").split()) + " "


def bucket(text: str) -> str:
    """Synthetic split that a text belongs to, fixed by its hash."""
    digest = hashlib.sha256(b"synthetic:" + sd.split_key(text).encode()).digest()
    value = int.from_bytes(digest[:8], "big") / 2**64
    return "test" if value < HELD_OUT_SHARE else "validation" if value < 2 * HELD_OUT_SHARE else "train"


class TextSource:
    """Random texts of one language for the synthetic splits."""

    def __init__(self, language: str, prompts: Iterable[str], held_out: HeldOut, words: list[str]) -> None:
        folder = Path(__file__).resolve().parent
        self.language, self.held_out, self.words = language, held_out, words
        self.grammar = Grammar(folder / f"grammar_{language}.txt", language)
        # Phrases of the training prompts between punctuation, and whole prompts of bearable length.
        self.prompts = sorted({p for p in prompts if len(p.split()) <= MAX_WORDS})
        cut = [phrase for prompt in sorted(set(prompts)) for phrase in re.split(r"[.,;:?!]+\s*", prompt)]
        self.phrases = sorted({p for p in cut if p.strip() and len(p.split()) <= MAX_WORDS})
        self.prompt_keys = {sd.split_key(text) for text in [*self.prompts, *prompts]}
        self.pattern = re.compile(rf"[{LETTERS[language]}' ]+")

    def _recombined(self, rng: random.Random) -> str:
        form = rng.random()
        if form < 0.4:  # a run of words of one phrase
            words = rng.choice(self.phrases).split()
            length = rng.randint(1, min(8, len(words)))
            start = rng.randint(0, len(words) - length)
            return " ".join(words[start : start + length])
        if form < 0.75:  # two or three phrases in a row
            return ", ".join(rng.choice(self.phrases) for _ in range(rng.choice([2, 2, 3])))
        return " ".join(rng.choice(rng.choice(self.phrases).split()) for _ in range(rng.randint(2, 7)))

    def _word(self, rng: random.Random) -> str:
        return self.words[int(len(self.words) * rng.random() ** 2)]

    def draw(self, rng: random.Random, kind: str) -> str:
        """A text of one kind, unchecked."""
        if kind == "grammar":
            count = 1 if rng.random() < 0.6 else 2
            return " ".join(self.grammar.sentence(rng) for _ in range(count))
        if kind == "prompt":
            text = rng.choice(self.prompts if rng.random() < 0.7 else self.phrases)
            return text.upper() if len(text) == 1 else text
        if kind == "recombined":
            return self._recombined(rng)
        if kind == "words":
            return " ".join(self._word(rng) for _ in range(rng.randint(3, 9)))
        if rng.random() < 0.35:
            return self._word(rng)
        words = self.grammar.sentence(rng).split()
        length = min(len(words), rng.randint(1, 4))
        start = rng.randint(0, len(words) - length)
        return " ".join(words[start : start + length]).strip(" ,")

    def text(self, rng: random.Random, split: str) -> str:
        """A text of the wanted split that no held-out rule forbids."""
        kinds = dict(KINDS)
        if split != "train" or not self.prompts:
            kinds = {kind: KINDS[kind] for kind in ("grammar", "words", "short")}
        while True:
            text = self.draw(rng, rng.choices(list(kinds), list(kinds.values()))[0])
            transcript = sd.normalise_text(text)
            if not transcript or len(transcript.split()) > MAX_WORDS or not self.pattern.fullmatch(transcript):
                continue
            own = "train" if sd.split_key(transcript) in self.prompt_keys else bucket(transcript)
            if own == split and not self.held_out.forbids(transcript):
                return text
