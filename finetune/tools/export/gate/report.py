"""What a gate leaves: export.json, and export.html with the same as a page."""

from __future__ import annotations

import datetime
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.durable_files import sha256_of, write_json
from finetune.errors import UserError
from finetune.security.documents import parse_json
from finetune.tools.export.gate import PAGE, REPORT
from finetune.tools.report.page import write_page

if TYPE_CHECKING:
    from finetune.tools.export.gate.verdict import Verdict

SHOWN = 50
"""Clips with another text that the page lists."""
PACKAGES = ("torch", "nemo_toolkit", "transformers", "onnx", "onnxruntime", "onnx-asr", "sherpa-onnx")
HEADS = (
    "",
    "texts as NeMo's",
    "WER, %",
    "difference, points",
    "RTFx",
    "MB on disk",
    "MB in memory, at most",
    "start-up, s",
)


def machine() -> dict[str, Any]:
    """Return what figures were taken on."""
    return {
        "processor": processor(),
        "cpus": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "versions": {name: version_of(name) for name in PACKAGES},
        "date": datetime.date.today().isoformat(),
    }


def processor() -> str:
    """Return the processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    return next((x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), platform.machine())


def version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def bytes_of(path: Path) -> int:
    """Return the size of a file, or of all files in a folder."""
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def hashes_of(directory: Path) -> dict[str, dict[str, Any]]:
    """Return size and SHA-256 of each file of an export, but the report itself."""
    return {
        path.relative_to(directory).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name not in (REPORT, PAGE)
    }


def changes(directory: Path) -> list[str]:
    """Return the files of an export that are not those of its report.

    Raises:
        UserError: the report cannot be read.
    """
    wrong = []
    for name, entry in read_report(directory, "--model")["files"].items():
        path = directory / name
        if not path.is_file():
            wrong.append(f"{name} is gone")
        elif path.stat().st_size != entry["bytes"] or sha256_of(path) != entry["sha256"]:
            wrong.append(f"{name} is another")
    return wrong


def side_row(name: str, side: dict[str, Any], disk_bytes: int | None, verdict: Verdict | None) -> dict[str, Any]:
    """Return what the report says of one side.

    Args:
        side: of `sides.run_side`.
        disk_bytes: of its model.
        verdict: its texts against NeMo's; None: it is NeMo.
    """
    row = {"name": name, **{key: value for key, value in side.items() if key != "texts"}, "disk_bytes": disk_bytes}
    if verdict is not None:
        row |= {"equal": verdict.clips - len(verdict.differing), "clips": verdict.clips}
        if verdict.comparison is not None:
            keys = {"wer_b": "wer", "interval_b": "wer_interval", "difference": "difference"}
            row |= {own: verdict.comparison[key] for key, own in keys.items()}
            row["difference_interval"] = verdict.comparison["difference_interval"]
    return row


def with_original(rows: list[dict[str, Any]], verdict: Verdict) -> None:
    """Give NeMo's row, the first, its WER."""
    if verdict.comparison is not None:
        rows[0] |= {"wer": verdict.comparison["wer_a"], "wer_interval": verdict.comparison["interval_a"]}


def table(report: dict[str, Any]) -> list[list[str]]:
    """Return the cells of the table of sides, below `HEADS`."""
    return [cells(row) for row in report["sides"]]


def cells(row: dict[str, Any]) -> list[str]:
    """Return a side's cells."""
    if "failed" in row:
        return [row["name"], *["–"] * (len(HEADS) - 1)]
    return [
        row["name"] if row["name"] == row["runtime"] else f"{row['name']} ({row['runtime']})",
        f"{row['equal']} of {row['clips']}" if "equal" in row else "–",
        _points(row.get("wer"), row.get("wer_interval"), ""),
        _points(row.get("difference"), row.get("difference_interval"), "+"),
        f"{row['rtfx']:.1f}",
        _mb(row["disk_bytes"]),
        _mb(row["peak_bytes"]),
        f"{row['start_seconds']:.1f}",
    ]


def _points(value: float | None, interval: list[float] | None, sign: str) -> str:
    if value is None:
        return "–"
    within = f" [{100 * interval[0]:{sign}.2f}, {100 * interval[1]:{sign}.2f}]" if interval else ""
    return f"{100 * value:{sign}.2f}{within}"


def _mb(value: int | None) -> str:
    return "–" if value is None else f"{value / 1e6:,.1f}"


def write_report(directory: Path, report: dict[str, Any]) -> None:
    """Write export.json and export.html into a directory.

    Raises:
        UserError: they cannot be written.
    """
    try:
        write_json(directory / REPORT, report)
    except OSError as error:
        raise UserError(f"--output: {directory / REPORT} cannot be written: {error}", exit_code=1) from error
    about = report["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items() if version)
    write_page(
        "export.html",
        directory / PAGE,
        f"Export to {report['runtime']}, {report['precision']}",
        [],
        navigation=[
            ("result", "Result"),
            ("parts", "Parts"),
            ("texts", "Texts that differ"),
            ("tries", "Precision"),
            ("how", "How it was measured"),
        ],
        intro=f"{report['model']}: {'kept' if report['passed'] else 'not kept'}",
        report=report,
        heads=list(HEADS),
        rows=table(report),
        parts=[[part[key] for key in ("part", "state", "difference", "note")] for part in report["parts"]],
        tries=[[t["inputs"], t["kept"], f"{t['bytes'] / 1e6:,.1f}", t["reason"]] for t in report["tries"]],
        differing=[[d["id"], d["reference"], d["original"], d["exported"]] for d in report["differing"][:SHOWN]],
        not_shown=max(0, len(report["differing"]) - SHOWN),
        files=[[name, f"{entry['bytes']:,}", entry["sha256"]] for name, entry in report["files"].items()],
        how=[
            ("Clips", f"{report['clips']} of {report['data']}, {report['audio_seconds']:.0f} s"),
            ("Passed over, too long", report["passed_over"] or None),
            ("Look-ahead, in frames", report.get("look_ahead")),
            ("Threads", report["threads"]),
            ("Clips decoded together", report["batch"]),
            ("Machine", f"{about['processor']}, {about['cpus']} CPU(s)"),
            ("Versions", versions),
            ("Date", about["date"]),
            ("Command", report["command"]),
        ],
    )


def read_report(directory: Path, key: str) -> dict[str, Any]:
    """Read export.json of a directory.

    Args:
        key: the option that names it, for messages.

    Raises:
        UserError: there is none, or it is damaged.
    """
    path = directory / REPORT
    try:
        report = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{key}: {directory} holds no {REPORT}: it is no export of this project.") from error
    except ValueError as error:
        raise UserError(f"{key}: {path} cannot be read: {error}.") from error
    if not isinstance(report, dict) or not isinstance(report.get("files"), dict) or "passed" not in report:
        raise UserError(f"{key}: {path} is no report of an export.")
    for name, entry in report["files"].items():
        if not isinstance(entry, dict) or not {"bytes", "sha256"} <= entry.keys():
            raise UserError(f"{key}: {path} is damaged: it has no size and SHA-256 of {name}.")
    return report
