"""Splitting data into manifests for training, validation and test by hashes of speakers or texts.

N utterances, G groups of utterances that stay together.
"""

import contextlib
import hashlib
import json
import logging
import math
import os
import shlex
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import yaml
from tqdm import tqdm

from finetune.data.leave_out import LeaveOut, hash_of
from finetune.data.normalization import normalize_text
from finetune.data.quarantine import BadUtterance
from finetune.data.reader import rows_from
from finetune.data.retry import RETRIES, Unreachable, UnreadableShard
from finetune.data.shards import BAD_LINE, Row, Shard, parse_line
from finetune.data.sources import COLUMNS, OpenSource, open_source, parse_sources
from finetune.data.survey import length_of, read_light
from finetune.data.utterances import row_id, row_language
from finetune.durable_files import put_in_place
from finetune.errors import UserError
from finetune.tools.command_line import writing

log = logging.getLogger(__name__)

PARTS = ("train", "validation", "test")
TRAIN, VALIDATION, TEST = range(3)
MOST_ADVISED = 0.5  # held out
CUTTING = ("offset", "duration")  # of a manifest's rows: they say which part of the audio is meant
NOT_IN_A_MANIFEST = ("weight", "filters", "text_normalization")
"""Keys of a source that belong to the run file."""

FAR = 2.0  # times more or less than was asked
STEPS = 1000  # shares that are advised are multiples of 1 / STEPS

Amount = tuple[float, str, dict[str, float]]
"""A number, its unit ("%" of the clips, "h" hours of audio, or "" clips), and the shares of single languages in %."""


@dataclass
class Utterances:
    """What is known of each utterance, 29 bytes; those without a text are only counted."""

    text_N: array = field(default_factory=lambda: array("Q"))
    """Hash of the normalised text."""
    speaker_N: array = field(default_factory=lambda: array("Q"))
    """Hash of speaker or session; 0 without one."""
    language_N: array = field(default_factory=lambda: array("I"))
    seconds_N: array = field(default_factory=lambda: array("d"))
    """NaN where the audio cannot be read."""
    usable: bytearray = field(default_factory=bytearray)
    """By row, whether it is one of the N."""
    languages: dict[str, int] = field(default_factory=dict)
    columns: Counter[str] = field(default_factory=Counter)
    """Utterances by the column that names their speaker."""
    refused: Counter[str] = field(default_factory=Counter)
    """Rows that are in no part, by the reason."""
    example: str = ""
    """The first of them: its line, or its audio."""
    unreadable: str = ""
    """The first clip whose audio cannot be read."""


def split_data(
    data: list[str],
    split: str,
    folder: Path,
    validation: Amount,
    test: Amount,
    *,
    by: str | None = None,
    leave_out: list[str] | None = None,
    write_audio: bool = False,
    overwrite: bool = False,
) -> "Division":
    """Write a manifest for each part into `folder`; return what each of them holds.

    Args:
        data: paths, hub names, or mappings of the run file in YAML; read as one.
        split: of a folder or hub data set.
        validation, test: how much goes there.
        by: column of speakers or sessions, or "text"; None takes a column that is called so.
        leave_out: lists of a check of `data`; the rows that they name are in no part.
        write_audio: write audio that lies in shards as files.
        overwrite: replace earlier manifests.

    Raises:
        UserError: bad sources, amounts or lists, manifests that are there, audio in shards without `write_audio`, or a
            file that cannot be written.
    """
    sources = _open(data, split, by)
    files = {part: folder / f"{part}.jsonl" for part in PARTS}
    there = [str(file) for file in files.values() if file.exists()]
    read = {os.path.realpath(shard.file) for source in sources for shard in source.shards}
    if there and (not overwrite or read & {os.path.realpath(file) for file in there}):
        raise UserError(
            f"--output: {', '.join(there)} would be written over. Name another directory, or add --overwrite."
        )
    for source in sources:
        check_audio(source, write_audio, folder)
    left_out = LeaveOut(leave_out, "--leave-out") if leave_out else None
    if left_out is not None:
        left_out.check_files({shard.file for source in sources for shard in source.shards}, "--data")
    found = _read(sources, by, left_out)
    if not found.text_N:
        raise UserError(f"--data: no row of {', '.join(data)} has a text ({_reasons(found)}).", exit_code=1)
    division = _divide(found, validation, test, by)
    division.folder = folder
    if leave_out:
        division.again += f" --leave-out {shlex.join(leave_out)}"
    wanted = [part for number, part in enumerate(PARTS) if (division.part_N == number).any()]
    asides = {part: folder / f".{part}.jsonl.tmp" for part in wanted}
    try:
        with writing("--output", folder), contextlib.ExitStack() as opened:
            held_out = _held_out(files)
            folder.mkdir(parents=True, exist_ok=True)
            outputs = {
                PARTS.index(part): opened.enter_context(aside.open("w", encoding="utf-8", errors="backslashreplace"))
                for part, aside in asides.items()
            }
            moved = _write(sources, found, division.part_N, outputs, folder, held_out)
        with writing("--output", folder):
            for part, aside in asides.items():
                put_in_place(aside, files[part])
            for part in PARTS:
                if part not in wanted:
                    files[part].unlink(missing_ok=True)  # of an earlier split
    finally:
        for aside in asides.values():
            with contextlib.suppress(OSError):
                aside.unlink(missing_ok=True)
    if moved:
        division.warnings.append(
            f"{moved:,} clips of the earlier validation and test are now in train: models trained on either split "
            "cannot be compared on them."
        )
    return division


def _open(data: list[str], split: str, by: str | None) -> list[OpenSource]:
    try:
        values = [yaml.safe_load(entry) if entry.lstrip().startswith("{") else entry for entry in data]
    except yaml.YAMLError as error:
        raise UserError(f"--data: no mapping in YAML, such as '{{path: D, language: it}}': {error}") from error
    parsed = parse_sources(values, "--data", split)
    for source in parsed:
        named = [key for key in NOT_IN_A_MANIFEST if getattr(source, key) is not None]
        if named:
            raise UserError(f"--data: {', '.join(named)} of {source.path} belongs to the run file, not to manifests.")
    column = None if by in (None, "text") else by
    return [open_source(s.model_copy(update={"speaker_column": column or s.speaker_column}), "--data") for s in parsed]


def check_audio(source: OpenSource, write_audio: bool, folder: Path) -> None:
    """Raise UserError where a manifest could not point at the audio."""
    for _, _, _, row in all_rows([source], light=False):
        audio = row.get(source.columns["audio"])
        if isinstance(audio, dict) and audio.get("bytes") is not None and not write_audio:
            raise UserError(
                f"--data: {source.source.path} holds its audio inside of its shards, where no manifest can point. "
                f"--write-audio writes it as files to {folder / 'audio'}."
            )
        return


def all_rows(
    sources: list[OpenSource], light: bool, skip_damage: bool = False
) -> Iterator[tuple[OpenSource, Shard, int, Row]]:
    """Yield all rows in their order.

    Args:
        light: without the audio where lengths are known without it.
        skip_damage: go on behind a shard that is damaged, such as where a job has noted its rows.

    Raises:
        UserError: a shard cannot be read on.
    """
    for source in sources:
        for shard in tqdm(source.shards, desc=source.source.path, unit="shard", leave=False, delay=2, disable=None):
            read = replace(shard, read=partial(read_light, shard, lengths=True)) if light else shard
            try:
                for number, row in rows_from(read, 0, RETRIES if source.remote else 0):
                    yield source, shard, number, row
            except UnreadableShard as error:
                if not skip_damage or error.is_outage(source.remote):
                    raise UserError(f"--data: {error}", exit_code=1) from error


def _read(sources: list[OpenSource], by: str | None, leave_out: LeaveOut | None) -> Utterances:
    """Read texts, speakers, languages and lengths."""
    found = Utterances()
    for source, shard, number, row in all_rows(sources, light=True):
        text = row.get(source.columns["text"])
        place = shard.place(number)
        reason = row.get(BAD_LINE) or (None if isinstance(text, str) else "no text")
        if leave_out is not None and leave_out.reason(place):
            reason = "listed in --leave-out"
        found.usable.append(reason is None)
        if reason is not None:
            found.refused[str(reason).split(":")[0]] += 1
            found.example = found.example or (place if source.is_manifest else row_id(source, place, row))
            continue
        # An empty text keeps nothing together.
        text = normalize_text(str(text), "basic") or f"\0{row_id(source, place, row)}"
        found.text_N.append(hash_of(text))
        named = source.columns.get("speaker")
        column = next((c for c in ((named,) if named else COLUMNS["speaker"]) if row.get(c) not in (None, "")), None)
        column = None if by == "text" else column
        found.speaker_N.append(hash_of(f"\1{row[column]}") if column else 0)
        if column:
            found.columns[column] += 1
        language = row_language(source, row)
        found.language_N.append(found.languages.setdefault(language, len(found.languages)))
        try:
            found.seconds_N.append(length_of(source, row))
        except (BadUtterance, Unreachable):
            found.seconds_N.append(float("nan"))
            found.unreadable = found.unreadable or row_id(source, place, row)
    if by not in (None, "text") and not found.columns:
        raise UserError(f"--by: no row has a column {by!r}.")
    return found


@dataclass
class Division:
    """Which part each utterance belongs to, and how that was decided."""

    found: Utterances
    part_N: np.ndarray
    """(N,) uint8: TRAIN, VALIDATION or TEST."""
    decided_by: str
    again: str
    """Options that split more data the same way."""
    warnings: list[str]
    folder: Path = Path()

    def as_json(self) -> dict[str, Any]:
        languages_N, seconds_N = np.array(self.found.language_N), np.nan_to_num(np.array(self.found.seconds_N))
        return {
            "decided_by": self.decided_by,
            "again": self.again,
            "warnings": self.warnings,
            "in_no_part": dict(self.found.refused),
            "unknown_lengths": int(np.isnan(np.array(self.found.seconds_N)).sum()),
            "parts": {
                part: {
                    "file": str(self.folder / f"{part}.jsonl"),
                    "clips": int((own_N := self.part_N == number).sum()),
                    "hours": float(seconds_N[own_N].sum()) / 3600,
                    "share": float(own_N.mean()),
                    "clips_by_language": {
                        language: int((own_N & (languages_N == code)).sum())
                        for language, code in sorted(self.found.languages.items())
                    },
                }
                for number, part in enumerate(PARTS)
                if (self.part_N == number).any()
            },
        }

    def __str__(self) -> str:
        found = self.as_json()
        parts = found["parts"]
        lines = [f"split by {self.decided_by}", f"{'':<10}  {'clips':>9}     hours  share of the clips"]
        for part, p in parts.items():
            lines.append(f"{part:<10}  {p['clips']:>9,}  {p['hours']:8.2f}  {100 * p['share']:.1f} %")
        if len(self.found.languages) > 1:
            for language in sorted(self.found.languages):
                counts = {part: p["clips_by_language"][language] for part, p in parts.items()}
                shares = (f"{part} {n:,} ({n / sum(counts.values()):.1%})" for part, n in counts.items())
                lines.append(f"{language or '(no language)'}: {', '.join(shares)}")
        lines += [f"warning: {text}" for text in self.warnings]
        lines += [f"to split more data the same way: {self.again}", "", "data:"]
        lines += [f"  {part}: {p['file']}" for part, p in parts.items()]
        return "\n".join([*lines, "", f"next: parakeet-finetune check --data {shlex.quote(parts['train']['file'])}"])


def _divide(found: Utterances, validation: Amount, test: Amount, by: str | None) -> Division:
    """Decide the part of each utterance.

    Raises:
        UserError: a part would be empty.
    """
    text_N, speaker_N, language_N = np.array(found.text_N), np.array(found.speaker_N), np.array(found.language_N)
    share_L = {VALIDATION: _shares("--validation", validation, found), TEST: _shares("--test", test, found)}
    asked = sum(float(own_L[language_N].mean()) for own_L in share_L.values())
    if not 0 < asked < 1 or (share_L[VALIDATION] + share_L[TEST]).max() >= 1:
        raise UserError(
            f"--validation, --test: they take {asked:.0%} of {len(text_N):,} clips; there has to be "
            "something for each part."
        )
    speakers, warnings = len(np.unique(speaker_N[speaker_N > 0])), []
    column = ", ".join(found.columns)
    if by is None and speakers and speakers * min(s for own_L in share_L.values() for s in own_L if s) < 1:
        warnings.append(
            f"{column} names only {speakers}, too few to split by; splitting by text instead. --by "
            f"{found.columns.most_common(1)[0][0]} forces it."
        )
        speakers = 0
    group_N = np.where(speaker_N > 0, speaker_N, text_N) if speakers else text_N
    part_N = assign(group_N, {part: own_L[language_N] for part, own_L in share_L.items()})
    unit = column if speakers else "texts"
    by_text = ["--by text"] if speakers else []
    everything = {part: float(own_L[language_N].mean()) for part, own_L in share_L.items()}
    if not {TRAIN, *(part for part, share in everything.items() if share)} <= {*part_N.tolist()}:
        problem, mended = _compare(group_N, part_N, everything, unit)
        ways = (
            [_options(mended)] if mended else ["smaller parts"] * (TRAIN not in part_N and len(np.unique(group_N)) > 2)
        )
        advice = " or ".join([*ways, *by_text])
        raise UserError(f"--validation, --test: {problem}; {f'take {advice}' if advice else 'too few'}.")
    asked = {part: _share(amount, found) for part, amount in ((VALIDATION, validation), (TEST, test))}
    shares = {
        language: {part: float(own_L[code]) for part, own_L in share_L.items()}
        for language, code in sorted(found.languages.items())
    }
    nearer: dict[str, dict[int, float]] = {}
    problems = []
    for language, share in shares.items():
        own_N = language_N == found.languages[language]
        problem, mended = _compare(group_N[own_N], part_N[own_N], share, unit)
        if problem:
            name = f"{language or '(no language)'}: " if len(shares) > 1 else ""
            problems.append(f"{name}{problem}{'' if mended or speakers else '; too few'}.")
        nearer |= {language: mended} if mended else {}
    ways = (
        [_options(asked, shares | nearer) if len(shares) > 1 else _options(next(iter(nearer.values())))]
        if nearer
        else []
    )
    if problems and (ways := [*ways, *by_text]):
        problems.append(f"for shares nearer to what was asked, take {' or '.join(ways)}.")
    warnings += problems
    if speakers:
        for part in (VALIDATION, TEST):
            own_N = part_N == part
            again = int(np.isin(text_N[own_N], text_N[part_N == TRAIN]).sum())
            if again:
                warnings.append(
                    f"{again:,} of {own_N.sum():,} clips of {PARTS[part]} have a text that others speak in train: "
                    "--by text keeps equal texts together."
                )
    texts = f"normalised text ({len(np.unique(text_N)):,} texts)"
    no_column = "" if by or found.columns else "; no column names speakers or sessions"
    decided_by = f"{column} ({speakers:,} values)" if speakers else texts + no_column
    if speakers and (without := int((speaker_N == 0).sum())):
        decided_by += f", and {without:,} clips without one by text"
    unknown = int(np.isnan(np.array(found.seconds_N)).sum())
    if unknown:
        clips = "1 clip" if unknown == 1 else f"{unknown:,} clips"
        warnings.append(f"the audio of {clips} cannot be read, such as {found.unreadable}: not in the hours.")
    if rows := found.refused.total():
        warnings.append(f"{rows:,} row{'s are' if rows > 1 else ' is'} in no part: {_reasons(found)}.")
    how = f"--by {column} " if speakers else "--by text "
    if speakers and len(found.columns) > 1:  # the default, which no option is
        how = ""
    return Division(found, part_N, decided_by, how + _options(asked, shares), warnings)


def _reasons(found: Utterances) -> str:
    return ", ".join(f"{n:,} {reason}" for reason, n in found.refused.most_common(3)) + f", such as {found.example}"


def _shares(option: str, amount: Amount, found: Utterances) -> np.ndarray:
    """Return the share (L,) of each language that goes to a part."""
    if strange := sorted(amount[2].keys() - found.languages):
        there = ", ".join(sorted(filter(None, found.languages))) or "none"
        raise UserError(f"{option}: no row is in {', '.join(strange)}; the languages are: {there}.")
    share = _share(amount, found)
    return np.array([amount[2][name] / 100 if name in amount[2] else share for name in found.languages])


def _share(amount: Amount, found: Utterances) -> float:
    value, unit, _ = amount
    if unit == "%":
        return value / 100
    whole = float(np.nansum(np.array(found.seconds_N))) / 3600 if unit == "h" else len(found.text_N)
    return float(f"{value / max(whole, 1e-9):.4g}")  # as it is printed for more data


def _options(share: dict[int, float], of_languages: dict[str, dict[int, float]] | None = None) -> str:
    """Write shares as options; of a language those that are its own."""

    def option(part: int) -> str:
        own = {name: of[part] for name, of in (of_languages or {}).items() if name and of[part] != share[part]}
        languages = "".join(f",{name}={100 * value:.8g}%" for name, value in sorted(own.items()))
        return f"--{PARTS[part]} {100 * share[part]:.8g}%{languages}"

    return " ".join(map(option, (VALIDATION, TEST)))


def assign(group_N: np.ndarray, share_N: dict[int, np.ndarray]) -> np.ndarray:
    """Return the part (N,) uint8 of each utterance: thresholds on the hash of its group, which more data do not move.

    Args:
        group_N: (N,) uint64, evenly distributed.
        share_N: of VALIDATION and TEST, by the utterance's language; a group in several languages stays together, by
            the largest.
    """
    u_N = group_N / 2.0**64
    for part, own_N in share_N.items():
        if own_N.min() < own_N.max():
            _, number_N = np.unique(group_N, return_inverse=True)
            largest_G = np.zeros(number_N.max() + 1)
            np.maximum.at(largest_G, number_N, own_N)
            share_N = {**share_N, part: largest_G[number_N]}
    test_N, held_out_N = share_N[TEST], share_N[TEST] + share_N[VALIDATION]
    return np.select([u_N < test_N, u_N < held_out_N], [TEST, VALIDATION], TRAIN).astype(np.uint8)


def _compare(
    group_N: np.ndarray, part_N: np.ndarray, share: dict[int, float], unit: str
) -> tuple[str, dict[int, float]]:
    """Compare what falls into each part with what was asked.

    Returns:
        What is empty or FAR from its share, "" where nothing is; and the shares that give what was asked, {} where
        none do.
    """
    clips, u_N = len(part_N), np.sort(group_N / 2.0**64)
    empty = [PARTS[part] for part, asked in ((TRAIN, 1), *sorted(share.items())) if asked and part not in part_N]
    problems = [f"none of {len(np.unique(group_N)):,} {unit} falls into {' and '.join(empty)}"] if empty else []

    def is_far(got: int, asked: float) -> bool:
        return asked > 0 and not max(1, asked * clips // FAR) <= got <= FAR * asked * clips + 1

    start, helps, mended = 0.0, TRAIN in part_N, {}
    for part in (TEST, VALIDATION):
        own, got = share[part], int((part_N == part).sum())
        if got and is_far(got, own):
            problems.append(
                f"{PARTS[part]} gets {100 * got / clips:.3g} % of {clips:,} clips in place of {100 * own:.3g} %"
            )
        behind_N, wanted = u_N[u_N >= start], max(round(own * clips), 1)
        if is_far(int((behind_N < start + own).sum()), own):
            if wanted <= len(behind_N):
                own = math.floor(STEPS * (behind_N[wanted - 1] - start) + 1) / STEPS
            helps &= not is_far(int((behind_N < start + own).sum()), share[part])
        mended[part], start = own, start + own
    changed = any(mended[part] != share[part] for part in mended)
    return " and ".join(problems), mended if changed and helps and start <= MOST_ADVISED else {}


def _held_out(files: Mapping[str, Path]) -> set[int]:
    """Return the clips of earlier manifests of validation and test, as hashes of their audio."""
    held = set()
    for file in (files[PARTS[part]] for part in (VALIDATION, TEST)):
        if file.is_file():
            with file.open("rb") as lines:
                held |= {_clip(parse_line(line)) for line in lines}
    return held


def _clip(row: Row) -> int:
    return hash((str(row.get("audio_filepath")), str(row.get("offset"))))


def _write(
    sources: list[OpenSource],
    found: Utterances,
    part_N: np.ndarray,
    outputs: Mapping[int, TextIO],
    folder: Path,
    held_out: set[int],
) -> int:
    """Write the manifests; return how many clips of `held_out` are in train."""
    parts, usable, moved = iter(part_N.tolist()), iter(found.usable), 0
    for source, _, _, row in all_rows(sources, light=False):
        if next(usable, False):
            part, new = next(parts), manifest_row(source, row, folder)
            moved += part == TRAIN and _clip(new) in held_out
            outputs[part].write(json.dumps(new, ensure_ascii=False) + "\n")
    if next(parts, None) is not None:
        raise UserError("--data: the data changed while they were read; start again.", exit_code=1)
    return moved


def manifest_row(source: OpenSource, row: Row, folder: Path) -> Row:
    """Return a row as a NeMo manifest's, with an absolute path; audio within it is written below `folder`."""
    columns = source.columns
    if source.is_manifest:
        new = dict(row)
    else:  # `offset` and `duration` would cut the audio
        new = {k: v for k, v in row.items() if isinstance(v, str | int | float | bool) and k not in CUTTING}
    audio = row.get(columns["audio"])
    data, path = (audio.get("bytes"), audio.get("path")) if isinstance(audio, dict) else (None, audio)
    if isinstance(data, bytes):
        new["audio_filepath"] = _write_audio(data, str(path or ""), folder.absolute() / "audio")
    elif isinstance(path, str) and path:
        new["audio_filepath"] = _absolute(path, source.folder)
    new["text"] = row[columns["text"]]
    if columns.get("id") in row and columns["id"] not in ("id", "__key__"):
        new["id"] = row[columns["id"]]
    language = row_language(source, row)
    if language != next((str(new[c]) for c in ("lang", *COLUMNS["language"]) if new.get(c)), ""):
        new["lang"] = language
    return new


def _absolute(path: str, folder: str | None) -> str:
    if "://" in path:
        return path
    if folder is not None and "://" in folder:
        return f"{folder.rstrip('/')}/{path}"
    return os.path.abspath(path if folder is None else os.path.join(folder, path))


def _write_audio(data: bytes, name: str, folder: Path) -> str:
    """Write audio under a name of its content, and return its path."""
    digest = hashlib.blake2b(data, digest_size=12).hexdigest()
    file = folder / digest[:2] / f"{digest}{Path(name).suffix}"
    if not file.is_file() or file.stat().st_size != len(data):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    return str(file)
