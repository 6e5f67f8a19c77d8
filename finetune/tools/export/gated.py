"""Write a model for onnx-asr or sherpa-onnx, kept only if that runtime gives its texts."""

from __future__ import annotations

import logging
import shlex
import shutil
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune.durable_files import sha256_of
from finetune.errors import UserError
from finetune.evaluation.dataset import open_sources
from finetune.models.nemo_archive import archive_of
from finetune.tools.export import RUNTIMES
from finetune.tools.export.beside import write_beside
from finetune.tools.export.gate import MAX_LOSS, REPORT
from finetune.tools.export.gate.gate import Gate, Outcome, choose_clips, gather_clips
from finetune.tools.export.gate.mixed import Block, advice, search_precision
from finetune.tools.export.gate.one_ranking import nodes_of
from finetune.tools.export.gate.report import (
    HEADS,
    bytes_of,
    changes,
    hashes_of,
    machine,
    read_report,
    table,
    write_report,
)
from finetune.tools.export.gate.sides import run_alone
from finetune.tools.export.layouts import PARTS, check_output, whole_or_nothing, write_layout
from finetune.tools.export.onnx import graphs_of
from finetune.tools.export.own_data import own_data
from finetune.tools.export.precision import size_of
from finetune.tools.export.runtimes import SAMPLE_RATE, check_installed, cut_of_directory, is_ctc, layout_of

if TYPE_CHECKING:
    from collections.abc import Collection

    from finetune.tools.export.gate.clips import Clips
    from finetune.tools.export.gate.sides import Request
    from finetune.tools.export.graphs import Graphs

log = logging.getLogger(__name__)

HEAD_NAMES = {"ctc": "CTC", "transducer": "transducer"}
RANKING_CLIPS = 4
"""Clips on which the harm of int8 to each layer is measured."""
CALIBRATION_CLIPS, READ_CLIPS = 64, 512
"""Clips that static int8 is calibrated on, and the first ones among which they are taken evenly."""


@dataclass
class Wanted:
    """What is to be exported, and what it is held to."""

    model: str
    to: str
    """onnx or sherpa."""
    precision: str = "fp32"
    head: str | None = None
    """transducer or ctc, of a hybrid model."""
    tokenizer: str | None = None
    data: list[str] | None = None
    """Validation clips; None: the run's own data.validation."""
    split: str = "validation"
    max_samples: int = -1
    max_loss: float | None = None
    """Points of WER; None: MAX_LOSS, and equal texts for fp32."""
    look_ahead: str | None = None
    """Of a streaming model, in encoder frames, for sherpa-onnx's online recogniser."""
    calibrate: list[str] | None = None
    """Clips whose activations give static int8 its ranges; None: the run's own data.train."""

    @property
    def runtime(self) -> str:
        return RUNTIMES[self.to]

    @property
    def limit(self) -> dict[str, Any]:
        """What `Gate.check` holds an export to. sherpa-onnx's features are not NeMo's, so that equal networks give it
        other texts: there a loss can be accepted for fp32 as well."""
        exact = self.precision == "fp32" and (self.to != "sherpa" or self.max_loss is None)
        return {"exact": exact, "max_loss": MAX_LOSS if self.max_loss is None else self.max_loss}


def export_gated(wanted: Wanted, output: Path) -> str:
    """Write an export whole, or leave the report of why it was not kept.

    Args:
        output: the directory; if it exists, it has to be empty.

    Returns:
        What was written and measured, in lines to print.

    Raises:
        UserError: the model cannot be expressed, there are no clips, or (exit code 1) the export did not pass:
            `output` then holds export.json and export.html alone.
    """
    w = wanted
    check_installed(w.runtime)
    data, key = choose_clips(w.model, w.data)
    open_sources(data, w.split, key)  # a wrong name is said before minutes of work
    if w.calibrate:
        open_sources(w.calibrate, "train", "--calibrate")
    with (
        whole_or_nothing(output) as aside,
        tempfile.TemporaryDirectory(prefix=f".{output.name}.work-", dir=aside.parent) as name,
    ):
        work = Path(name)
        (work / "graphs").mkdir()
        graphs = graphs_of(w.model, work / "graphs", w.to, w.head, w.tokenizer, w.look_ahead)
        clips = gather_clips(data, w.split, graphs.sample_rate, work / "clips", key, w.max_samples)
        head = "ctc" if graphs.kind == "ctc" else "transducer"
        gate = Gate(w.model, head, w.tokenizer, clips, look_ahead=w.look_ahead)
        # transformers has no caches of what was heard
        if w.look_ahead is None and (nemo := archive_of(Path(w.model), "--model")) is not None:
            gate.measure_transformers(nemo, work / "hf")
            shutil.rmtree(work / "hf", ignore_errors=True)
        outcome, tries = write_and_check(w, graphs, gate, aside, work)
        report = report_of(w, gate, outcome, tries, hashes_of(aside))
        if not report["passed"]:
            for path in aside.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        write_report(aside, report)
    if not report["passed"]:
        told = ". ".join([report["reason"], *(note.rstrip(".") for note in report["notes"])])
        raise UserError(f"{told}. The model was not kept; {output / REPORT} says more.", exit_code=1)
    return describe(output, report)


def check_again(wanted: Wanted, directory: Path, output: Path | None = None) -> str:
    """Hold an export that is there already to its original.

    Args:
        wanted: what it is compared with; what it is for, and its precision, the directory itself says.
        directory: of the export.
        output: gets the report; None: it is not written.

    Returns:
        What was measured, in lines to print.

    Raises:
        UserError: it is no export, there are no clips, or (exit code 1) it does not pass.
    """
    layout = layout_of(directory) if directory.is_dir() else None
    if layout is None:
        raise UserError(f"--check: {directory} is no directory of `python -m finetune.export --to onnx` or sherpa.")
    cut = cut_of_directory(directory, layout[1]) if layout[0] == "sherpa" else None
    if cut is not None and cut.look_ahead < 0:
        raise UserError(
            f"--check: {directory} does not say which look-ahead it is made for; it is of another program."
        )
    w = replace(wanted, to=layout[0], precision=layout[1], look_ahead=None if cut is None else str(cut.look_ahead))
    w = as_before(w, directory)
    check_installed(w.runtime)
    if output is not None:
        check_output(output)
    data, key = choose_clips(w.model, w.data)
    with tempfile.TemporaryDirectory(prefix="finetune-check-") as name:
        clips = gather_clips(data, w.split, SAMPLE_RATE, Path(name), key, w.max_samples)
        gate = Gate(w.model, w.head, w.tokenizer, clips, look_ahead=w.look_ahead)
        outcome = gate.check(directory, w.runtime, **w.limit)
    changed = changed_files(directory)
    outcome.parts += changed
    report = report_of(w, gate, outcome, [], hashes_of(directory))
    if output is not None:
        with whole_or_nothing(output) as aside:
            write_report(aside, report)
    if not report["passed"]:
        raise UserError(f"{report['reason']}.", exit_code=1)
    return "\n".join([describe(directory, report), *(f"warning: {row['note']}" for row in changed if row["note"])])


def as_before(wanted: Wanted, directory: Path) -> Wanted:
    """Return what an export is held to: to its own head, and to the limit of its report where the command names none.

    Raises:
        UserError: the command names the other head, or the report cannot be read.
    """
    report = read_report(directory, "--check") if (directory / REPORT).is_file() else {}
    head = "ctc" if is_ctc(directory) else "transducer"
    if wanted.head not in (None, head):
        raise UserError(f"--head: {directory} holds a model with a {HEAD_NAMES[head]} head. Leave --head out.")
    limit = report.get("max_loss") if wanted.max_loss is None else wanted.max_loss
    return replace(wanted, head=head, max_loss=limit if isinstance(limit, int | float) else None)


def changed_files(directory: Path) -> list[dict[str, Any]]:
    """Compare the files of an export with the hashes in its report; a row of the parts, or none without a report."""
    if not (directory / REPORT).is_file():
        return []
    wrong = changes(directory)
    note = f"files were changed after the export: {', '.join(wrong)}" if wrong else ""
    return [{"part": "files", "state": "differs" if wrong else "equal", "difference": None, "note": note}]


def write_and_check(
    wanted: Wanted, graphs: Graphs, gate: Gate, aside: Path, work: Path
) -> tuple[Outcome, list[dict[str, Any]]]:
    """Write the layout and let its runtime decode it; where int8 does not pass, the layers that it hurts most stay in
    float32.

    Args:
        work: for files that are made on the way.

    Returns:
        What the gate says of the export that lies in `aside`, and each way of int8 that was tried.
    """
    w = wanted
    outcome: Outcome | None = None
    encoder = graphs.files.get("encoder") or graphs.files["model"]
    online = None if graphs.online is None else graphs.online.metadata()
    ranges = work / "ranges.json"

    def write(keep_float: Collection[str], static: bool = False) -> int:
        write_layout(graphs, aside, w.to, w.precision, keep_float, ranges if static else None)
        write_beside(graphs, aside, w.to, w.precision)
        return bytes_of(aside)

    def check() -> Outcome:
        nonlocal outcome
        outcome = gate.check(aside, w.runtime, **w.limit)
        return outcome

    def calibrate() -> bool:
        clips = calibration_clips(w, graphs.sample_rate, work / "calibration")
        if clips is None:
            return False
        measure_ranges(gate.request, clips, encoder, ranges, online)
        return True

    def rank(static: bool) -> list[Block]:
        log.info("measuring which layers int8 hurts most")
        chosen = list(range(min(RANKING_CLIPS, len(gate.clips))))
        request = {**vars(gate.request), "graph": str(encoder), "work": str(work), "chosen": chosen, "online": online}
        request["ranges"] = str(ranges) if static else None
        rows = run_alone("finetune.tools.export.gate.one_ranking", request, gate.threads)["blocks"]
        blocks = [Block(**row) for row in rows]
        assert outcome is not None
        joint = next((part for part in outcome.parts if part["part"] == "decoder and joint"), None)
        if joint is not None and joint["difference"] is not None:
            parts = [path for part, path in graphs.files.items() if part in PARTS[w.to] and part != "encoder"]
            nodes = [node for path in parts for found in nodes_of(path).values() for node in found]
            blocks.append(Block("decoder and joint", nodes, float(joint["difference"])))
        return sorted(blocks, key=lambda block: -block.harm)

    if w.precision == "int8":
        float_bytes = sum(size_of(graphs.files[part]) for part in PARTS[w.to] if part in graphs.files)
        return search_precision(write, check, calibrate, rank, float_bytes)
    write(())
    return check(), []


def calibration_clips(wanted: Wanted, rate: int, folder: Path) -> Clips | None:
    """Keep the clips that static int8 is calibrated on in a folder; None, with a warning, where there are none.

    Args:
        rate: of the model, in Hz.

    Raises:
        UserError: those of --calibrate cannot be used.
    """
    if wanted.calibrate:
        return gather_clips(wanted.calibrate, "train", rate, folder, "--calibrate", READ_CLIPS)
    reason = f"{wanted.model} is of no run with data.train"
    if own := own_data(wanted.model, "train"):
        try:
            return gather_clips(own, "train", rate, folder, "data.train", READ_CLIPS)
        except UserError as error:
            reason = str(error)
    log.warning("static int8 is not tried: %s. Name clips with --calibrate", reason)
    return None


def measure_ranges(
    original: Request, clips: Clips, encoder: Path, ranges: Path, online: dict[str, Any] | None = None
) -> None:
    """Measure the ranges of an encoder's activations for static int8, in a process of its own.

    Args:
        original: the side whose features the encoder gets.
        clips: among which CALIBRATION_CLIPS are taken evenly.
        encoder: file of its graph.
        ranges: new file for the ranges.
        online: of an encoder that hears chunks, its metadata.

    Raises:
        SideFailed: the process ended without a result.
    """
    log.info("measuring the ranges of activations on clips of %s", clips.source)
    chosen = sorted({int(i) for i in np.linspace(0, len(clips) - 1, CALIBRATION_CLIPS)})
    request = {**vars(original), "clips": clips.folder, "graph": str(encoder), "chosen": chosen}
    request |= {"online": online, "ranges": str(ranges)}
    run_alone("finetune.tools.export.gate.one_calibration", request, original.threads)


def report_of(
    wanted: Wanted,
    gate: Gate,
    outcome: Outcome,
    tries: list[dict[str, Any]],
    files: dict[str, dict[str, Any]],
) -> dict[str, Any]:
    """Return export.json."""
    w, clips, verdict = wanted, gate.clips, outcome.verdict
    notes = []
    if w.precision != "fp32" and (bound := verdict.share_bound) is not None:
        notes.append(
            f"No text differs. That bounds the share of such clips that get another text at {100 * bound:.1f} % (95 % "
            "confidence)."
        )
    if not verdict.passed and len(tries) > 1:
        notes.append(f"{advice(tries)}.")
    return {
        "passed": verdict.passed,
        "reason": outcome.reason,
        "notes": notes,
        "to": w.to,
        "runtime": w.runtime,
        "precision": w.precision,
        "look_ahead": w.look_ahead,
        "model": w.model,
        "model_sha256": None if (nemo := archive_of(Path(w.model), "--model")) is None else sha256_of(nemo),
        "head": gate.request.head,
        "data": clips.source,
        "clips": len(clips),
        "audio_seconds": clips.seconds,
        "passed_over": clips.passed_over,
        "max_loss": None if w.limit["exact"] else w.limit["max_loss"],
        "clips_needed": verdict.clips_needed,
        "threads": gate.threads,
        "batch": gate.request.batch,
        "comparison": verdict.comparison,
        "differing": verdict.differing,
        "sides": outcome.sides,
        "parts": outcome.parts,
        "tries": tries,
        "files": files,
        "machine": machine(),
        "command": shlex.join(["python", "-m", "finetune.export", *sys.argv[1:]]),
    }


def describe(output: Path, report: dict[str, Any]) -> str:
    """Return the lines to print of an export that was kept."""
    size = sum(entry["bytes"] for entry in report["files"].values())
    rows = [list(HEADS), *table(report)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(
        [
            f"{output} (for {report['runtime']}, {report['precision']}, {size / 1e6:.1f} MB): {report['reason']}",
            *report["notes"],
            *lines,
        ]
    )
