"""What somebody decided about the problems, and the manifest that follows from it."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from finetune.data.sources import OpenSource
from finetune.errors import UserError
from finetune.security.documents import parse_json
from finetune.security.safe_text import json_line
from finetune.tools.command_line import writing
from finetune.tools.splits import all_rows, check_audio, manifest_row

KEEP, DROP, TAKE = "keep", "drop", "take"
CLEANED = "cleaned.jsonl"


@dataclass
class Decisions:
    """What becomes of each clip, by the place of its row; clips without a decision stay as they are."""

    dropped: set[str] = field(default_factory=set)
    kept: set[str] = field(default_factory=set)
    texts: dict[str, str] = field(default_factory=dict)
    """New texts."""

    def add(self, place: str, decision: str, text: str | None) -> None:
        """Add a decision; the first one about a clip counts."""
        if place in self.kept or place in self.dropped or place in self.texts:
            return
        if decision == TAKE:
            self.texts[place] = text or ""
        else:
            (self.kept if decision == KEEP else self.dropped).add(place)


def read_decisions(files: list[Path]) -> Decisions:
    """Read files of the page's download, and problems.jsonl, whose clips are dropped where no other file decides, in
    whichever order they come.

    Raises:
        UserError: a file cannot be read or holds other things.
    """
    decisions, problems = Decisions(), []
    for file in files:
        number = 0
        try:
            with file.open(encoding="utf-8") as lines:
                for line in lines:
                    number += 1
                    row = parse_json(line)
                    place, decision = row["source"], row.get("decision", DROP)
                    if not isinstance(place, str) or decision not in (KEEP, DROP, TAKE):
                        raise ValueError
                    text = row.get("text")
                    if decision == TAKE and not (isinstance(text, str) and text.strip()):
                        raise ValueError
                    if "decision" in row:
                        decisions.add(place, decision, text)
                    else:
                        problems.append(place)
        except OSError as error:
            raise UserError(f"--decisions: {file} cannot be read: {error.strerror or error}.") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f'--decisions: line {number or 1} of {file} is no {{"source": "FILE line N", "decision": '
                '"keep, drop or take", "text": "..."}, as the page of problems writes it.'
            ) from error
    for place in problems:
        decisions.add(place, DROP, None)
    return decisions


def write_cleaned(
    sources: list[OpenSource], decisions: Decisions, folder: Path, write_audio: bool = False
) -> Counter[str]:
    """Write DIR/cleaned.jsonl: the rows of all sources without those that are dropped, with the new texts.

    Returns:
        Rows written, dropped and corrected, and decisions about rows that are not there (`unknown`).

    Raises:
        UserError: the audio lies in shards, no decision is about a row that there is, or the manifest cannot be
            written, or stands among the sources.
    """
    file = folder / CLEANED
    if any(Path(shard.file).resolve() == file.resolve() for source in sources for shard in source.shards):
        raise UserError(f"--output: {file} is read from. Name another directory: the old manifest stays as it is.")
    for source in sources:
        check_audio(source, write_audio, folder)
    counts: Counter[str] = Counter()
    decided = {*decisions.dropped, *decisions.kept, *decisions.texts}
    missing = set(decided)
    with writing("--output", file):
        folder.mkdir(parents=True, exist_ok=True)
        aside = file.with_suffix(".part")
        with aside.open("w", encoding="utf-8") as lines:
            for source, shard, number, row in all_rows(sources, light=False):
                place = shard.place(number)
                missing.discard(place)
                if place in decisions.dropped or not isinstance(row.get(source.columns["text"]), str):
                    counts["dropped"] += 1
                    continue
                new = manifest_row(source, row, folder)
                if place in decisions.texts:
                    new["text"] = decisions.texts[place]
                    counts["corrected"] += 1
                counts["written"] += 1
                lines.write(json_line(new) + "\n")
        if decided and missing == decided:
            aside.unlink()
            read = min(shard.file for source in sources for shard in source.shards)
            raise UserError(
                f"--decisions: none of the {len(decided):,} decisions is about a row of --data: they name rows such "
                f"as {min(decided)}, --data reads {read}. Write its paths as they were written when the problems "
                "were found."
            )
        aside.replace(file)
    counts["unknown"] = len(missing)
    return counts
