"""Exports of a model for other runtimes, as their gate measured them."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.durable_files import sha256_of
from finetune.errors import UserError
from finetune.models.nemo_archive import archive_of
from finetune.tools.export.gate import PAGE, REPORT
from finetune.tools.export.gate.report import changes, read_report
from finetune.tools.publishing.private import last_part
from finetune.tools.report.read import number

log = logging.getLogger(__name__)

NEVER = (REPORT, PAGE)
"""Not uploaded: they hold texts of clips, and names of this machine."""
NUMBERS = ("equal", "wer", "difference", "rtfx", "disk_bytes", "peak_bytes", "start_seconds")


@dataclass
class Export:
    """An export that was kept, and what the card says of it."""

    directory: Path
    runtime: str
    precision: str
    clips: int
    processor: str
    threads: int
    sides: list[dict[str, Any]]
    """Name, runtime and figures of the original, of transformers where it was beside it, and of the export."""
    uploaded: bool
    files: frozenset[str]
    """Those that the gate has checked."""

    @property
    def name(self) -> str:
        """Its folder in the repository."""
        return self.directory.resolve().name

    @property
    def own(self) -> dict[str, Any]:
        """The figures of the export itself."""
        return self.sides[-1]


def exports_of(model: Path, given: list[Path] | None) -> list[Export]:
    """Return the exports of a model: those that are given, which are uploaded, else its own that lie in its folder.

    Raises:
        UserError: one that is given is no export, is of another model, was not kept, or its files were changed since.
    """
    nemo = archive_of(model, "--model")
    own = functools.cache(lambda: None if nemo is None else sha256_of(nemo))

    def is_of_another(report: dict[str, Any]) -> bool:
        told = report.get("model_sha256")
        return told is not None and nemo is not None and told != own()

    if given:
        if len({path.resolve().name for path in given}) < len(given):
            raise UserError("--export: two directories have one name, and each becomes a folder of the repository.")
        for path in given:
            if is_of_another(report := read_report(path, "--export")):
                raise UserError(f"--export: {path} is of another model, {report.get('model')}. Export {model} itself.")
        return [_read(path, uploaded=True) for path in given]
    folder = model if model.is_dir() else model.parent
    found = []
    for path in sorted(folder.glob(f"*/{REPORT}")):
        try:
            report = read_report(path.parent, "--model")
        except UserError as error:
            log.warning("an export is left out of the card: %s", error)
            continue
        # Beside a .nemo there may be those of other models; in a run's folder they are its own.
        if report["passed"] and not is_of_another(report) and (model.is_dir() or report.get("model_sha256")):
            found.append(_read(path.parent, uploaded=False))
    return found


def _read(directory: Path, uploaded: bool) -> Export:
    report = read_report(directory, "--export")
    if not report["passed"]:
        raise UserError(f"--export: {directory} holds the report of an export that was not kept: {report['reason']}.")
    if uploaded and (wrong := changes(directory)):
        raise UserError(f"--export: {directory} is not the export that was checked: {', '.join(wrong)}.")
    sides = [
        {
            "name": str(side.get("name")),
            "runtime": str(side.get("runtime")),
            **{key: number(side.get(key)) for key in NUMBERS},
            "wer_interval": _interval(side.get("wer_interval")),
            "difference_interval": _interval(side.get("difference_interval")),
        }
        for side in report.get("sides") or []
        if isinstance(side, dict) and "failed" not in side
    ]
    if not sides:
        raise UserError(f"--export: {directory / REPORT} has no figures.")
    return Export(
        directory,
        str(report.get("runtime")),
        str(report.get("precision")),
        int(number(report.get("clips")) or 0),
        last_part(str((report.get("machine") or {}).get("processor"))),
        int(number(report.get("threads")) or 0),
        sides,
        uploaded,
        frozenset(report["files"]),
    )


def _interval(value: Any) -> list[float] | None:
    ends = [number(end) for end in value] if isinstance(value, list) else []
    return [end for end in ends if end is not None] if len(ends) == 2 and None not in ends else None
