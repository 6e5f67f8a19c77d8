"""Texts that go round in circles."""

MOST_WORDS = 8  # of what is repeated
FEWEST_TIMES = 4


def repeated(text: str) -> tuple[str, int] | None:
    """Return the words that follow themselves most often, with how often; None below four times."""
    words = text.lower().split()
    best: tuple[str, int] | None = None
    for size in range(1, min(MOST_WORDS, len(words) // FEWEST_TIMES) + 1):
        run = 0
        for i in range(size, len(words)):
            run = run + 1 if words[i] == words[i - size] else 0
            times = run // size + 1
            if times >= FEWEST_TIMES and (best is None or times * size > best[1] * len(best[0].split())):
                best = " ".join(words[i - size + 1 : i + 1]), times
    return best
