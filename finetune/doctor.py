"""Check what this machine can run: each line is OK, warning or missing, with the remedy.

    python -m finetune.doctor [--config RUN.yaml] [--strategy NAME ...] [key=value ...] [--bundle FILE.zip]

With a strategy or a run file it checks whether that can run here, else the installation. What is reported as usable
was tried. The bundle is for bug reports: report, versions and the run's records, without secrets, audio or texts.

Exit codes: 0 it can run here, 1 it cannot (the lines that say missing), 2 bad arguments or configuration.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.errors import UserError
from finetune.tools.command_line import add_json, command, run_command

if TYPE_CHECKING:
    from finetune.tools.doctor.findings import Finding, Wanted

EXAMPLE = (
    "python -m finetune.doctor --config finetune/configs/quickstart.yaml --strategy adamw_8bit training.bf16=true"
)


def make_parser() -> argparse.ArgumentParser:
    parser = command("doctor", __doc__ or "", EXAMPLE)
    add = parser.add_argument
    add("--config", type=Path, metavar="RUN.yaml", help="run file: model, data and output_dir are checked too")
    add("--strategy", action="append", default=[], metavar="NAME", help="memory strategy; repeat to combine")
    add_json(parser)
    add("--bundle", type=Path, metavar="FILE.zip", help="pack report and records for a bug report, without secrets")
    add("overrides", nargs="*", metavar="key=value", help="settings that replace the run file's")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the checks and print the findings; return the exit code."""
    try:
        arguments = make_parser().parse_intermixed_args(argv)
        from finetune.logs import print_error, set_up_logging
        from finetune.tools.doctor.examination import wanted_run
    except ImportError as error:  # a broken installation
        print(f"missing: {error}. Install what this project needs: bash scripts/setup.sh", file=sys.stderr)
        return 1
    set_up_logging(arguments.verbose)
    try:
        wanted = wanted_run(arguments.config, arguments.strategy, arguments.overrides)
        return examine(arguments, wanted)
    except UserError as error:
        print_error(error)
        return error.exit_code


def examine(arguments: argparse.Namespace, wanted: Wanted) -> int:
    """Run the checks, print the findings, and write what --json and --bundle ask for; return the exit code."""
    from finetune.durable_files import write_json
    from finetune.tools.doctor.bundle import write_bundle
    from finetune.tools.doctor.examination import conclusion, format_finding, run_checks
    from finetune.tools.doctor.findings import MISSING

    started = time.perf_counter()
    width = max(min(shutil.get_terminal_size((120, 24)).columns, 140), 70)
    printed: list[str] = []
    findings: list[Finding] = []

    def show(text: str) -> None:
        printed.append(text)
        print(text, flush=True)

    for finding in run_checks(wanted):
        if not findings or findings[-1].section != finding.section:
            show(finding.section)
        findings.append(finding)
        show(format_finding(finding, width))
    verdict = conclusion(findings, wanted)
    show(f"\n{verdict}")
    can_run = not any(finding.state == MISSING for finding in findings)
    report = {
        "can_run": can_run,
        "verdict": verdict,
        "config": str(arguments.config) if arguments.config else None,
        "strategy": wanted.names,
        "overrides": arguments.overrides,
        "engine": wanted.engine,
        "seconds": round(time.perf_counter() - started, 1),
        "lines": [asdict(finding) for finding in findings],
    }
    output_dir = Path(wanted.config.training.output_dir) if arguments.config else None
    names: list[str] = []
    try:
        if arguments.json:
            write_json(arguments.json, report)
        if arguments.bundle:
            names = write_bundle(arguments.bundle, report, "\n".join(printed) + "\n", arguments.config, output_dir)
    except OSError as error:
        raise UserError(f"--json or --bundle cannot be written: {error}") from error
    if names:
        caution = "Recognised secrets are removed; look into it before you send it."
        print(f"{arguments.bundle}: {', '.join(names)}. {caution}")
    return 0 if can_run else 1


if __name__ == "__main__":
    sys.exit(run_command(main))
