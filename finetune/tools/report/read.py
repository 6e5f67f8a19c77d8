"""Read the folder of a run, finished, going or dead: what is missing or half written is left out."""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune.errors import UserError
from finetune.security.documents import parse_json, parse_yaml
from finetune.security.secrets import clean, known_secrets

EXAMPLES = 3


@dataclass
class Reason:
    """Quarantined clips of one reason."""

    text: str
    clips: int = 0
    examples: list[dict[str, str]] = field(default_factory=list)


@dataclass
class Run:
    """What a run has left so far."""

    folder: Path
    config: dict[str, dict[str, Any]]
    """The resolved configuration; like the environment without secrets."""
    environment: dict[str, Any]
    metrics: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    quarantine: list[Reason]
    """The most frequent reason first."""
    summary: dict[str, Any]
    """Empty before the end."""
    mistakes: dict[str, Any]
    """errors-SPLIT.json of the newest evaluation that has one, of the chosen model where the run is done."""
    plan: dict[str, Any]
    """plan.json."""
    vocabulary: dict[str, Any]
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

    @property
    def step(self) -> int:
        """The last step that is known of."""
        return int(
            max([row["step"] for row in self.metrics + self.evaluations] + [number(self.summary.get("steps")) or 0])
        )

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
    def judged_on(self) -> str:
        """The split of the headline numbers: test, once the chosen model has been measured on it."""
        return "test" if any(row["split"] == "test" for row in self.evaluations if _of_best(row)) else "validation"

    def rows(self, split: str) -> list[dict[str, Any]]:
        """Evaluations of the model in training, all languages."""
        return [row for row in self.evaluations if row["split"] == split and not _of_best(row) and _is_raw(row)]

    def curve_rows(self, split: str) -> list[dict[str, Any]]:
        """The same, with the closing evaluation of the chosen model where its step has no other row."""
        rows = self.rows(split)
        steps = {row["step"] for row in rows}
        closing = [
            row for row in self.evaluations if row["split"] == split and row["step"] not in steps and _of_best(row)
        ]
        return sorted([*rows, *closing], key=lambda row: row["step"])

    def base(self, split: str) -> dict[str | None, dict[str, Any]]:
        """Evaluation of the base model by language, None for all; empty where it was not measured."""
        return {row.get("language"): row for row in self.rows(split) if row["step"] == 0}

    def best(self, split: str) -> dict[str | None, dict[str, Any]]:
        """Evaluation of the best model by language: as measured in the end, or the best one so far."""
        final = [row for row in self.evaluations if row["split"] == split and _of_best(row)]
        if final:
            return {row.get("language"): row for row in final}
        whole = [row for row in self.rows(split) if row.get("language") is None and row.get("wer") is not None]
        if not whole:
            return {}
        step = min(whole, key=lambda row: (row["wer"], row["step"]))["step"]
        return {row.get("language"): row for row in self.rows(split) if row["step"] == step}


def read_run(folder: Path) -> Run:
    """Read what is there.

    Raises:
        UserError: the folder is not that of a run.
    """
    if not is_run(folder):
        raise UserError(
            f"{folder} is no run's folder: it has no config.yaml, metrics.jsonl or summary.json. "
            "Name a training.output_dir."
        )
    evaluations = [
        row for row in json_lines(folder / "evaluations.jsonl") if _is_step(row) and isinstance(row.get("split"), str)
    ]
    config = {k: v for k, v in read_mapping(folder / "config.yaml").items() if isinstance(v, dict)}
    environment = read_mapping(folder / "environment.json")
    # The page is passed on. Its readers may know whose run it is: names and paths stay.
    secrets = known_secrets(config, environment, environment={})
    return Run(
        folder=folder,
        config=clean(config, secrets, personal=False),
        environment=clean(environment, secrets, personal=False),
        metrics=[row for row in json_lines(folder / "metrics.jsonl") if _is_step(row)],
        evaluations=evaluations,
        quarantine=quarantine_reasons(folder / "quarantine.jsonl"),
        summary=read_mapping(folder / "summary.json"),
        mistakes=_mistakes(folder, evaluations),
        plan=read_mapping(folder / "plan.json"),
        vocabulary=read_mapping(folder / "tokenizer" / "report.json"),
    )


def is_run(folder: Path) -> bool:
    """Return whether a run began in this folder."""
    return any((folder / name).is_file() for name in ("config.yaml", "metrics.jsonl", "summary.json"))


def stage_folders(folder: Path) -> list[Path]:
    """Return the folders of the stages that a plan trained here, in order."""
    found = [path for path in folder.glob("stage-*") if path.name[6:].isdecimal() and is_run(path)]
    return sorted(found, key=lambda path: int(path.name[6:]))


def number(value: object) -> float | None:
    """Return a finite number as it is, None for everything else."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return value if -sys.float_info.max <= value <= sys.float_info.max else None


def _of_best(row: dict[str, Any]) -> bool:
    return row.get("model") == "best"


def _is_raw(row: dict[str, Any]) -> bool:
    """Of the weights as they are trained, not of an average."""
    return row.get("weights", "raw") == "raw"


def _is_step(row: dict[str, Any]) -> bool:
    return number(row.get("step")) is not None


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
    return max(found, key=lambda m: (_of_best(m), m["step"]), default={})


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
