"""What a misspelt name was probably meant to be."""

import difflib
import re
from collections.abc import Iterable

OTHER_SECTION = 0.15
"""By how much a name of another section is less likely."""


def closest(word: str, known: Iterable[str], most: int = 1) -> list[str]:
    """Return the names most like a word, best first; none if none is like it.

    Names are compared by their parts in any order (`8bit_adamw`, `adamw_8bit`), by their initials (`lr`,
    `learning_rate`), by whether they contain all parts of the word (`epochs`, `num_train_epochs`), and by spelling.

    Args:
        word: as written, such as "adam" or "training.lr".
        known: names, dotted or not; what follows the last dot is compared.
        most: how many at most; those clearly worse than the best are left out.
    """
    section = word.rpartition(".")[0]
    scores = {
        name: _likeness(_last(word), _last(name)) - (0.0 if name.rpartition(".")[0] == section else OTHER_SECTION)
        for name in known
    }
    best = max(scores.values(), default=0.0)
    near = [name for name, score in scores.items() if score >= max(0.5, best - 0.1)]
    return sorted(near, key=lambda name: -scores[name])[:most]


def did_you_mean(word: str, known: Iterable[str], most: int = 1) -> str:
    """Return " Did you mean X?", or nothing if no name is like the word."""
    near = closest(word, known, most)
    return f" Did you mean {' or '.join(near)}?" if near else ""


def _last(name: str) -> str:
    return name.rsplit(".", 1)[-1].lower()


def _likeness(word: str, name: str) -> float:
    """Return 0 to 1."""
    parts, known = re.findall(r"[a-z]+|\d+", word), re.findall(r"[a-z]+|\d+", name)
    if word == name or (parts and sorted(parts) == sorted(known)):
        return 1.0
    if len(word) > 1 and word == "".join(part[0] for part in known):
        return 0.95
    by_spelling = max(
        difflib.SequenceMatcher(None, word, name).ratio(),
        difflib.SequenceMatcher(None, " ".join(sorted(parts)), " ".join(sorted(known))).ratio(),
    )
    contained = bool(parts) and set(parts) <= set(known)
    return max(by_spelling, 0.65 + 0.3 * len(parts) / len(known)) if contained else by_spelling
