"""What an alignment job leaves: rows and files in their formats, each whole or as before, and a summary."""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from finetune.durable_files import aside_of, put_in_place, sync_directory, write_text
from finetune.security.safe_text import json_line, one_line
from finetune.tools.alignment.formats import file_name, subtitles, text_grid
from finetune.tools.report.formats import duration

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path
    from typing import TextIO

    from finetune.tools.jobs.job import Totals


ROWS = "alignments.jsonl"
UNSURE = 0.5
"""Words below this confidence are counted."""
MOST_SHIFT = 0.3
"""Frames by which words behind pauses may lie off, by their median, before a shift is advised."""
LEAST_PAUSES = 20


@dataclass
class Summary:
    """Numbers of all rows."""

    clips: int = 0
    words: int = 0
    unsure: int = 0
    seconds: float = 0.0
    token_losses: Counter[float] = field(default_factory=Counter)
    """Clips by their nats a token, to the hundredth: a few hundred numbers for millions of clips."""
    moved_frames: Counter[float] = field(default_factory=Counter)
    """Pauses by how far the words behind them lie off, to the hundredth of a frame."""

    def add(self, row: dict[str, Any], moved_frames: list[float]) -> None:
        self.clips += 1
        self.words += len(row["words"])
        self.unsure += sum(word["confidence"] < UNSURE for word in row["words"])
        self.seconds += row["duration"]
        self.token_losses[round(row["loss"] / max(len(row["tokens"]), 1), 2)] += 1
        self.moved_frames.update(round(frames, 2) for frames in moved_frames)

    def lines(self, shift: float, totals: Totals) -> list[str]:
        """Return the summary in words.

        Args:
            shift: as the aligner had it.
            totals: of the job: what was left out.
        """
        said = [f"{self.clips:,} clips aligned: {self.words:,} words in {duration(self.seconds)}"]
        if self.words:
            said.append(
                f"loss: {median(self.token_losses):.2f} nats a token in the median clip; "
                f"{self.unsure / self.words:.1%} of the words have a confidence below {UNSURE}"
            )
        if (pauses := self.moved_frames.total()) >= LEAST_PAUSES:
            off = median(self.moved_frames)
            if abs(off) > MOST_SHIFT:
                said.append(
                    f"the model's tokens come {abs(off):.2f} frames {'before' if off > 0 else 'behind'} the words "
                    f"behind {pauses:,} pauses: with --shift {shift + off:.2f} words inside speech "
                    "are placed better"
                )
        for reason, n in totals.filtered.most_common():
            said.append(f"  {n:>7,}  left out: {reason.replace('_', ' ')}")
        examples = {record["kind"]: record for record in totals.failed}
        for kind, n in Counter(record["kind"] for record in totals.failed).most_common():
            record = examples[kind]
            said.append(f"  {n:>7,}  {kind.replace('_', ' ')}, such as {record['id']}: {record['reason']}")
        return [one_line(line) for line in said]


def median(counts: Counter[float]) -> float:
    """Return the middle of numbers that are counted by their value; of two the mean."""
    values = sorted(counts)
    up_to = list(itertools.accumulate(counts[value] for value in values))
    middle = [values[bisect.bisect_right(up_to, n)] for n in ((up_to[-1] - 1) // 2, up_to[-1] // 2)]
    return sum(middle) / 2


def write_results(rows: Iterable[dict[str, Any]], output: Path, formats: tuple[str, ...]) -> Summary:
    """Write all rows: to the file `output`, or with other formats than JSON into the directory `output`; without a row
    nothing is touched."""
    rows = iter(rows)
    if (first := next(rows, None)) is None:
        return Summary()
    summary, taken, alone = Summary(), dict[str, int](), formats == ("json",)
    file = output if alone else output / ROWS
    file.parent.mkdir(parents=True, exist_ok=True)
    with _whole(file) if "json" in formats else _nothing() as lines:
        for row in itertools.chain([first], rows):
            moved_frames = row.pop("moved_frames")
            summary.add(row, moved_frames)
            if lines is not None:
                lines.write(json_line(row) + "\n")
            if alone:
                continue
            name = file_name(row["id"], taken)
            for kind, suffix, text in (("textgrid", "TextGrid", text_grid), ("srt", "srt", subtitles)):
                if kind in formats:
                    aside = aside_of(output / suffix)
                    aside.write_text(text(row), encoding="utf-8")
                    aside.replace(output / f"{name}.{suffix}")
    if not alone:
        sync_directory(output)
    return summary


def write_failed(totals: Totals, output: Path, formats: tuple[str, ...]) -> Path | None:
    """Write what failed beside the results; return the file, or None where nothing did."""
    alone = formats == ("json",)
    file = output.with_name(f"{output.stem}.failed.jsonl") if alone else output / "failed.jsonl"
    file.unlink(missing_ok=True)
    if not totals.failed:
        return None
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, "".join(json_line(record) + "\n" for record in totals.failed))
    return file


@contextmanager
def _whole(file: Path) -> Iterator[TextIO]:
    """Write a file aside and give it its name at the end."""
    aside = aside_of(file)
    try:
        with aside.open("w", encoding="utf-8", errors="backslashreplace") as lines:
            yield lines
        put_in_place(aside, file)
    finally:
        aside.unlink(missing_ok=True)


@contextmanager
def _nothing() -> Iterator[None]:
    yield None
