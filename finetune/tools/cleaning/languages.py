"""Which of the data's own languages a text reads like, by the statistics of its letters."""

from collections.abc import Iterator

import numpy as np

from finetune.data.leave_out import hash_of

CELLS = 2**16  # of each language's table of three letters
SMOOTHING = 0.05


class Languages:
    """Counts of three letters in a row, by the language that rows name."""

    def __init__(self) -> None:
        self.counts: dict[str, np.ndarray] = {}

    def add(self, text: str, language: str) -> None:
        table = self.counts.setdefault(language, np.zeros(CELLS, dtype=np.int64))
        for cell in _cells(text):
            table[cell] += 1

    def of(self, text: str, own: str) -> tuple[str, float]:
        """Return the other language that a text reads most like, and by how many nats more than like its own; what the
        text itself added to its own language is taken out."""
        cells = list(_cells(text))
        if len(self.counts) < 2 or own not in self.counts or not cells:
            return own, 0.0
        log_p = {}
        for language, table in self.counts.items():
            less = {cell: cells.count(cell) for cell in cells} if language == own else {}
            total = table.sum() - sum(less.values()) + SMOOTHING * CELLS
            log_p[language] = sum(np.log((table[c] - less.get(c, 0) + SMOOTHING) / total) for c in cells)
        best = max(log_p.keys() - {own}, key=log_p.__getitem__)
        return best, float(log_p[best] - log_p[own])


def _cells(text: str) -> Iterator[int]:
    padded = f"  {text.lower()} "
    for i in range(len(padded) - 2):
        yield hash_of(padded[i : i + 3]) % CELLS
