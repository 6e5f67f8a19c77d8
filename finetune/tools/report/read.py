"""Read the folder of a run, finished, going or dead: what is missing or half written is left out."""

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune.config.guard_limit import GuardLimit, parse_guard_limit
from finetune.data.guard_halves import CHOICE
from finetune.errors import UserError
from finetune.paths import near_path
from finetune.security.documents import parse_json, parse_yaml
from finetune.security.secrets import clean, known_secrets

EXAMPLES = 3
SPLITS = ("train", "rehearsal", "validation", "test", "guard")


@dataclass
class Reason:
    """Quarantined clips of one reason."""

    text: str
    clips: int = 0
    examples: list[dict[str, str]] = field(default_factory=list)


@dataclass
class Rates:
    """Error rates of one language on one split, as fractions; None: not measured."""

    language: str | None
    """None is all of them together."""
    clips: int | None
    words: int | None
    wer_before: float | None
    wer_after: float | None
    cer_before: float | None
    cer_after: float | None
    interval_before: list[float] | None
    interval_after: list[float] | None
    """95 % confidence interval of the WER."""
    test: dict[str, Any]
    """The test of the change, as in summary.json; empty where there was none."""

    @property
    def is_measured(self) -> bool:
        return self.wer_before is not None or self.wer_after is not None


@dataclass
class Run:
    """What a run has left so far."""

    folder: Path
    config: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The resolved configuration; like the environment without secrets."""
    environment: dict[str, Any] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    quarantine: list[Reason] = field(default_factory=list)
    """The most frequent reason first."""
    summary: dict[str, Any] = field(default_factory=dict)
    """Empty before the end."""
    mistakes: dict[str, Any] = field(default_factory=dict)
    """errors-SPLIT.json of the newest evaluation that has one, of the chosen model where the run is done."""
    plan: dict[str, Any] = field(default_factory=dict)
    vocabulary: dict[str, Any] = field(default_factory=dict)
    """tokenizer/report.json, of a run that grew or replaced the model's vocabulary."""

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def finished(self) -> bool:
        return bool(self.summary)

    @property
    def has_gpu(self) -> bool:
        return bool(self.environment.get("gpus"))

    def setting(self, section: str, key: str, default: Any = None) -> Any:
        """A value of the configuration."""
        value = (self.config.get(section) or {}).get(key)
        return default if value is None else value

    def normalization(self, split: str) -> str:
        """Normalisation of a split's WER: that of its source, else `data.wer_normalization`."""
        source = self.setting("data", split)
        first = source[0] if isinstance(source, list) and source else source
        own = first.get("wer_normalization") if isinstance(first, dict) else None
        return str(own or self.setting("data", "wer_normalization", "basic"))

    @property
    def step(self) -> int:
        """The last known step."""
        steps = [row["step"] for row in self.metrics + self.evaluations]
        return int(max([*steps, number(self.summary.get("steps")) or 0]))

    @property
    def best_step(self) -> int | None:
        """The step of the chosen model; before the end that of the best evaluation so far."""
        return self.summary.get("best_step", self.best(self.judged_on).get(None, {}).get("step"))

    @property
    def strategy(self) -> str:
        return " + ".join(self.summary.get("strategy") or self.environment.get("strategy") or []) or "none"

    def logged(self, key: str) -> list[float]:
        """All finite values of a key of metrics.jsonl."""
        return [value for row in self.metrics if (value := number(row.get(key))) is not None]

    @property
    def throughput(self) -> float | None:
        """Audio seconds per second: of the whole run, or of the last 20 logged lines."""
        speed = number(self.summary.get("audio_seconds_per_second"))
        last = self.logged("audio_seconds_per_second")[-20:]
        return sum(last) / len(last) if speed is None and last else speed

    @property
    def training_seconds(self) -> float | None:
        """Seconds in optimizer steps, without evaluations."""
        seconds = number(self.summary.get("train_seconds"))
        if seconds is not None or not self.metrics:
            return seconds
        total, before = 0.0, 0
        for row in self.metrics:
            total += (number(row.get("seconds_per_step")) or 0.0) * (row["step"] - before)
            before = row["step"]
        return total

    @property
    def peak_memory(self) -> float | None:
        """GiB."""
        peak = number(self.summary.get("peak_memory_gib"))
        return max(self.logged("peak_memory_gib"), default=None) if peak is None else peak

    @property
    def peak_memory_is(self) -> str:
        """What `peak_memory` is the peak of."""
        of = "CUDA allocator" if self.has_gpu else "resident memory of the process"
        return str(self.summary.get("peak_memory_is") or of)

    @property
    def quarantined(self) -> int:
        return sum(reason.clips for reason in self.quarantine)

    @property
    def judged_on(self) -> str:
        """The split of the headline numbers: test, once the chosen model has been measured on it."""
        return "test" if self._closing("test") else "validation"

    def _closing(self, split: str) -> list[dict[str, Any]]:
        """Evaluation of the chosen model at the end."""
        return [row for row in self.evaluations if row["split"] == split and row.get("model") == "best"]

    def rows(self, split: str) -> list[dict[str, Any]]:
        """Evaluations of the weights as they are trained, neither averaged nor chosen, of all languages."""
        return [
            row
            for row in self.evaluations
            if row["split"] == split and row.get("model") != "best" and row.get("weights", "raw") == "raw"
        ]

    def curve_rows(self, split: str) -> list[dict[str, Any]]:
        """The same, with the closing evaluation where its step has no other row."""
        rows = self.rows(split)
        steps = {row["step"] for row in rows}
        closing = [row for row in self._closing(split) if row["step"] not in steps]
        return sorted([*rows, *closing], key=lambda row: row["step"])

    def best(self, split: str) -> dict[str | None, dict[str, Any]]:
        """Evaluation of the best model by language: as measured in the end, or the best one so far."""
        found = self._closing(split)
        if not found:
            rows = self.rows(split)
            whole = [row for row in rows if row.get("language") is None and row.get("wer") is not None]
            if split == "validation" and self.highest_guard_wer is not None:
                guard = {row["step"]: bound_of(row) for row in self.rows(CHOICE) if row.get("language") is None}
                whole = [row for row in whole if self.keeps_limit(row["step"], guard.get(row["step"]))]
            step = min(whole, key=lambda row: (row["wer"], row["step"]))["step"] if whole else None
            found = [row for row in rows if row["step"] == step]
        return {row.get("language"): row for row in found}

    @property
    def guard_limit(self) -> tuple[GuardLimit, float] | None:
        """data.guard_limit and the base model's WER on guard_choice; None where either is missing."""
        rows = [row for row in self.rows(CHOICE) if row["step"] == 0 and row.get("language") is None]
        base = number(rows[0].get("wer")) if rows else None
        try:
            limit = parse_guard_limit(str(self.setting("data", "guard_limit")))
        except ValueError:  # there is none
            return None
        return None if base is None else (limit, base)

    @property
    def highest_guard_wer(self) -> float | None:
        """The highest WER on guard_choice that keeps data.guard_limit; None without one, or without a base model."""
        if self.guard_limit is None:
            return None
        limit, base = self.guard_limit
        return limit.highest(base)

    def keeps_limit(self, step: float, wer: float | None) -> bool:
        """Return whether a model keeps data.guard_limit with this WER on guard_choice, or the bound of it that
        data.guard_confidence asks for; the base model does."""
        if step == 0 or wer is None or self.guard_limit is None:
            return step == 0
        limit, base = self.guard_limit
        return limit.keeps(wer, base)

    def rates(self, split: str) -> dict[str | None, Rates]:
        """Error rates of the base model and of the best one by language; None, for all of them, comes first."""
        base = {row.get("language"): row for row in self.rows(split) if row["step"] == 0}
        best = self.best(split)
        tested = (self.summary.get("significance") or {}).get(split) or {}
        tests = {**(tested.get("by_language") or {}), None: tested}
        rates, languages = {}, {*base, *best} - {None}
        # A single one that no clip names says nothing that the row of all does not.
        for language in [None, *(sorted(languages) if languages != {"unknown"} else ())]:
            before, after, test = base.get(language, {}), best.get(language, {}), tests.get(language, {})
            # Without a base model to compare with, the interval of the chosen one stands here only.
            whole = self.summary if language is None and split == self.judged_on else {}
            rates[language] = Rates(
                language=language,
                clips=after.get("clips", before.get("clips")),
                words=after.get("words", before.get("words")),
                wer_before=number(before.get("wer")),
                wer_after=number(after.get("wer")),
                cer_before=number(before.get("cer")),
                cer_after=number(after.get("cer")),
                interval_before=whole.get("wer_before_interval") or test.get("interval_a"),
                interval_after=whole.get("wer_after_interval") or test.get("interval_b"),
                test=test,
            )
        return rates


def read_run(folder: Path) -> Run:
    """Read what is there.

    Raises:
        UserError: the folder is not that of a run.
    """
    if not is_run(folder):
        raise UserError(
            f"{folder} is no run's folder: it has no config.yaml, metrics.jsonl or summary.json. "
            f"Name a training.output_dir.{near_path(str(folder))}"
        )
    config = {k: v for k, v in read_mapping(folder / "config.yaml").items() if isinstance(v, dict)}
    environment = read_mapping(folder / "environment.json")
    evaluations = [row for row in _rows_of_steps(folder / "evaluations.jsonl") if isinstance(row.get("split"), str)]
    # The page is passed on. Its readers may know whose run it is: names and paths stay.
    secrets = known_secrets(config, environment, environment={})
    return Run(
        folder=folder,
        config=clean(config, secrets, personal=False),
        environment=clean(environment, secrets, personal=False),
        metrics=_rows_of_steps(folder / "metrics.jsonl"),
        evaluations=evaluations,
        quarantine=quarantine_reasons(folder / "quarantine.jsonl"),
        summary=read_mapping(folder / "summary.json"),
        mistakes=_mistakes(folder, evaluations),
        plan=read_mapping(folder / "plan.json"),
        vocabulary=read_mapping(folder / "tokenizer" / "report.json"),
    )


def is_run(folder: Path) -> bool:
    """Return whether a run began in this folder."""
    return any(os.path.isfile(folder / name) for name in ("config.yaml", "metrics.jsonl", "summary.json"))


def stage_folders(folder: Path) -> list[Path]:
    """Return the folders of the stages that a plan trained here, in order."""
    found = [path for path in folder.glob("stage-*") if path.name[6:].isdecimal() and is_run(path)]
    return sorted(found, key=lambda path: int(path.name[6:]))


def number(value: object) -> float | None:
    """Return a finite number as it is, None for everything else."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return value if -sys.float_info.max <= value <= sys.float_info.max else None


def bound_of(row: dict[str, Any]) -> float | None:
    """Return the WER of an evaluation of guard_choice that has to keep data.guard_limit."""
    return number(row.get("wer_bound", row.get("wer")))


def _rows_of_steps(path: Path) -> list[dict[str, Any]]:
    return [row for row in json_lines(path) if number(row.get("step")) is not None]


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON-lines file; lines that are cut off or broken are left out."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                row = parse_json(line)
            except ValueError:  # cut off when the run died
                continue
            if isinstance(row, dict):
                yield row


def read_mapping(path: Path) -> dict[str, Any]:
    """Return the mapping in a JSON or YAML file as it was written; empty where there is none."""
    parse = parse_json if path.suffix == ".json" else parse_yaml
    try:
        value = parse(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _mistakes(folder: Path, evaluations: list[dict[str, Any]]) -> dict[str, Any]:
    # A run continued from an earlier step knows fewer evaluations than it has files.
    known = {(row["step"], row["split"]) for row in evaluations}
    found = [read_mapping(folder / f"errors-{split}.json") for split in ("test", "validation")]
    found = [m for m in found if (m.get("step"), m.get("split")) in known]
    return max(found, key=lambda m: (m.get("model") == "best", m["step"]), default={})


def quarantine_reasons(path: Path) -> list[Reason]:
    """Group the lines of quarantine.jsonl by reason, ignoring what differs from clip to clip."""
    found: dict[str, Reason] = {}
    for row in json_lines(path):
        text = re.sub(r"'[^']*'|\"[^\"]*\"|\S*/\S+|\d+(\.\d+)?", "…", str(row.get("reason") or "no reason"))[:200]
        reason = found.setdefault(text, Reason(text))
        reason.clips += 1
        if len(reason.examples) < EXAMPLES:
            reason.examples.append({key: str(row.get(key, "")) for key in ("id", "source", "reason")})
    return sorted(found.values(), key=lambda reason: -reason.clips)
