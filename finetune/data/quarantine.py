"""Quarantine: utterances that cannot be used, how they are reported, and when there are too many.

Reading or decoding an unusable row raises `BadUtterance`. The worker adds it to the `Report` that travels with its
next batch; `Quarantine` writes those of all ranks to quarantine.jsonl, and `check_bad_fraction` ends the run.
Utterances that a filter leaves out (`finetune.data.filters`) are counted in the same report and never in the fraction.
"""

import logging
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from finetune.errors import UserError

log = logging.getLogger(__name__)

BAD_FRACTION_JUDGED_AFTER = 200  # rows read, or all of an epoch that has fewer
REPORT_AFTER_ROWS = 200  # a worker that finds nothing usable for so long reports without a batch

Record = dict[str, str]
"""One line of quarantine.jsonl: `id`, `source` (file and line or row) and `reason`."""


class BadUtterance(Exception):
    """An utterance that cannot be used; the text is the reason in quarantine.jsonl."""


KINDS = {
    "there is no file": "without a file",
    "no text": "without a text",
    "no audio": "without audio",
    "the tokenizer has no piece": "with characters the tokenizer lacks",
    "the text has": "with a text that is too long",
    "the model has no prompt": "in a language the model has no prompt for",
    "the row says": "of another length than the row says",
    "offset": "with an offset outside of the audio",
    "the audio is empty": "with empty audio",
    "the audio cannot be decoded": "with audio that cannot be decoded",
    "the audio is too short": "too short for one frame of features",
    "the audio holds samples": "with samples that are not finite",
}
"""What reasons begin with, and how a number of clips with such a reason is described."""


def kind_of(reason: str) -> str:
    """Strip from a reason what differs between utterances, so that equal ones can be counted."""
    kind = next((kind for start, kind in KINDS.items() if reason.startswith(start)), None)
    return kind or reason.split(":")[0].split(" (")[0]


@dataclass
class Reasons:
    """Why utterances are left out: how many, and the first of them, by the kind of reason."""

    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)

    def add(self, kind: str, name: str) -> None:
        self.counts[kind] += 1
        self.first.setdefault(kind, name)

    def __str__(self) -> str:
        return ", ".join(f"{n} {kind} (such as {self.first[kind]})" for kind, n in self.counts.most_common())


@dataclass
class Report:
    """What a worker read and left out since its last batch."""

    rows_read: int = 0
    quarantined: list[Record] = field(default_factory=list)
    filtered: dict[str, int] = field(default_factory=dict)
    error: str | None = None

    def count_filtered(self, reason: str) -> None:
        self.filtered[reason] = self.filtered.get(reason, 0) + 1

    def quarantine(self, name: str, place: str, reason: str) -> None:
        self.quarantined.append({"id": name, "source": place, "reason": reason})


def new_records(records: list[Record], known: set[tuple[str, str]]) -> list[Record]:
    """Return the records that no earlier epoch wrote, and add their (source, id) to `known`."""
    new = []
    for record in records:
        key = (record["source"], record["id"])
        if key not in known:
            known.add(key)
            new.append(record)
    return new


class Lines(Protocol):
    """A file of JSON lines (training's LineFile)."""

    path: Path

    def append(self, *rows: dict[str, Any]) -> None: ...
    def pairs(self, first: str, second: str, lines: int) -> set[tuple[str, str]]: ...
    def cut(self, lines: int) -> None: ...


class CountsLines(Protocol):
    """The progress of a run, which a checkpoint holds."""

    quarantine_lines: int


class Quarantine:
    """quarantine.jsonl of a run, written by the main process: each unusable utterance once, with its reason."""

    def __init__(self, is_main: bool, file: Lines, progress: CountsLines):
        self.is_main, self.file, self.progress = is_main, file, progress
        self.known: set[tuple[str, str]] = set()
        """(source, id) of the utterances that are written."""
        self.reasons = Reasons()
        """Of all that were put in quarantine, again in each epoch."""

    def add(self, reports: list[Record]) -> None:
        """Write bad utterances; one that returns in a later epoch is not written again."""
        for record in reports:
            self.reasons.add(kind_of(record["reason"]), record["id"])
        new = new_records(reports, self.known)
        self.progress.quarantine_lines += len(new)
        if new and self.is_main:
            self.file.append(*new)
            log.warning("%d clip(s) put in quarantine, such as %s: %s", len(new), new[0]["id"], new[0]["reason"])

    def resume(self) -> None:
        """Take over the lines that the restored progress counts, and drop later ones."""
        lines = self.progress.quarantine_lines
        self.known = self.file.pairs("source", "id", lines=lines)
        for reason, name in self.file.pairs("reason", "id", lines=lines):
            self.reasons.add(kind_of(reason), name)
        if self.is_main:
            self.file.cut(lines)


def exceeds_bad_fraction(quarantined: int, rows_read: int, limit: float, all_read: bool) -> bool:
    """Return whether more than `limit` of the rows are bad; False until enough rows, or all, are read."""
    return (all_read or rows_read >= BAD_FRACTION_JUDGED_AFTER) and quarantined > limit * rows_read


def check_bad_fraction(quarantined: int, rows_read: int, limit: float, all_read: bool, reasons: Reasons) -> None:
    """Raise UserError with the reasons where `exceeds_bad_fraction`."""
    if exceeds_bad_fraction(quarantined, rows_read, limit, all_read):
        raise UserError(
            f"{quarantined} of {rows_read} clips had to be put in quarantine, more than "
            f"data.max_bad_fraction={limit:g}: {reasons}. quarantine.jsonl of the run lists them. Mend the data, or "
            "raise data.max_bad_fraction.",
            exit_code=1,
        )


def nothing_left(rows_read: int, quarantined: int, filtered: dict[str, int], reasons: Reasons) -> UserError:
    """Return the error for an epoch without a single usable utterance."""
    by_filter = ", ".join(f"{n} {reason}" for reason, n in sorted(filtered.items())) or "none"
    return UserError(
        f"data.train: no clip is left to train on. Read {rows_read}, put {quarantined} in quarantine"
        f"{f': {reasons}' if quarantined else ''}; left out by filters: {by_filter}.",
        exit_code=1,
    )
