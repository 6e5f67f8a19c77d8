"""Says what this machine can run, and why not: each line OK, warning or missing, with the remedy.

    python -m finetune.doctor [--config RUN.yaml] [--strategy NAME ...] [key=value ...] [--json FILE] [--bundle FILE.zip]

With a strategy or a run file it judges whether that can run here, else the installation. What is called usable has been tried. The
bundle is for bug reports: it has the report, versions and the run's records, without secrets, audio or texts of clips.

Exit codes: 0 it can run here, 1 it cannot (the lines that say missing), 2 bad arguments or configuration.
"""

import argparse
import json
import logging
import shutil
import sys
import textwrap
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

try:
    from finetune.config.load import load_config
    from finetune.errors import UserError
    from finetune.logs import print_error, set_up_logging
    from finetune.paths import ROOT
    from finetune.strategies.strategy import resolve_precision, resolve_strategy
    from finetune.tools.doctor import gpu, packages, system
    from finetune.tools.doctor import hub_access as hub
    from finetune.tools.doctor import run_file_checks as run_file
    from finetune.tools.doctor.bundle import write_bundle
    from finetune.tools.doctor.findings import MISSING, WARNING, Line, Wanted, run_checks
except ImportError as error:  # a doctor of a broken installation has to say so
    print(f"missing: {error}. Install what this project needs: bash scripts/setup.sh", file=sys.stderr)
    raise SystemExit(1) from error

SECTIONS = {
    "installation": [system.python, packages.versions, packages.decoders],
    "machine": [
        system.memory,
        system.limits,
        gpu.gpus,
        gpu.allocator,
        gpu.process_groups,
        system.main_port,
        gpu.loss_kernels,
    ],
    "optimizers and engines": [
        packages.optimizers,
        packages.deepspeed,
        system.compilers,
        system.deepspeed_locks,
        system.cpu_adam,
    ],
    "the run": [
        run_file.compatibility,
        run_file.gpu_count,
        run_file.model,
        run_file.data,
        hub.hub,
        run_file.output_disk,
    ],
}
# Strategies without a run file are laid over this one; its model and data are not looked at.
NEUTRAL = ROOT / "finetune" / "configs" / "quickstart.yaml"


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line; what is neither an option nor `key=value` is refused."""
    parser = argparse.ArgumentParser(
        prog="python -m finetune.doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, help="run file: model, data and output_dir are looked for too")
    parser.add_argument(
        "--strategy", action="append", default=[], metavar="NAME", help="memory strategy; repeat to combine"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the lines here too")
    parser.add_argument(
        "--bundle", type=Path, metavar="FILE.zip", help="pack report and records for a bug report, without secrets"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="settings that replace those of the run file"
    )
    return parser.parse_intermixed_args(argv)


def what_is_wanted(arguments: argparse.Namespace) -> Wanted:
    """The run that the arguments mean.

    Raises:
        UserError: a configuration that training would refuse on any machine.
    """
    project = logging.getLogger("finetune")
    level = project.level
    project.setLevel(logging.WARNING)  # what replaces what is told by the training
    try:
        strategy = resolve_strategy(arguments.strategy)
        config, _ = load_config(arguments.config or NEUTRAL, strategy.names, arguments.overrides)
    finally:
        project.setLevel(level)
    precision = resolve_precision(config.training.bf16, config.training.fp16, strategy)
    config.training.bf16, config.training.fp16 = precision == "bf16", precision == "fp16"
    return Wanted(config, arguments.config, strategy.names, strategy.engine)


def as_text(line: Line, width: int) -> str:
    """A line of the report, wrapped, with its remedy below."""
    hang = " " * 32
    head = f"  {line.state:<8} {line.name:<20}"
    head = head + " " if len(head) < len(hang) else head + "\n"
    options = {"width": width, "subsequent_indent": hang, "break_long_words": False, "break_on_hyphens": False}
    first, _, last = head.rpartition("\n")
    text = (first + "\n" if first else "") + textwrap.fill(
        line.found, initial_indent=last + " " * max(len(hang) - len(last), 0), **options
    )
    if line.remedy:
        text += "\n" + textwrap.fill(
            line.remedy, initial_indent=hang + "-> ", **{**options, "subsequent_indent": hang + "   "}
        )
    return text


def verdict(lines: list[Line], wanted: Wanted) -> str:
    """One sentence: whether it can run here, and which lines say that it cannot."""
    parts = [str(wanted.config_file)] if wanted.config_file else []
    parts += ["--strategy " + " --strategy ".join(wanted.names)] if wanted.names else []
    subject = " with ".join(parts) or "the installation"
    missing = list(dict.fromkeys(line.name for line in lines if line.state == MISSING))
    if missing:
        return (
            f"{subject} cannot {'run' if wanted.chosen else 'be used'} here: {', '.join(missing)} missing, see above."
        )
    warned = sum(line.state == WARNING for line in lines)
    after = f" ({warned} warning{'s' if warned > 1 else ''} above)" if warned else ""
    return f"{subject} can {'run' if wanted.chosen else 'be used'} here{after}."


def main(argv: list[str] | None = None) -> int:
    """Runs the checks and prints them; returns the exit code."""
    set_up_logging()
    started = time.perf_counter()
    width = max(min(shutil.get_terminal_size((120, 24)).columns, 140), 70)
    printed: list[str] = []

    def say(text: str) -> None:
        printed.append(text)
        print(text, flush=True)

    sections: set[str] = set()

    def tell(line: Line) -> None:
        if line.section not in sections:
            sections.add(line.section)
            say(line.section)
        say(as_text(line, width))

    try:
        arguments = parse_arguments(argv)
        wanted = what_is_wanted(arguments)
        lines = run_checks(SECTIONS, wanted, tell)
        sentence = verdict(lines, wanted)
        say(f"\n{sentence}")
        report: dict[str, Any] = {
            "can_run": not any(line.state == MISSING for line in lines),
            "verdict": sentence,
            "config": str(arguments.config) if arguments.config else None,
            "strategy": wanted.names,
            "overrides": arguments.overrides,
            "engine": wanted.engine,
            "seconds": round(time.perf_counter() - started, 1),
            "lines": [asdict(line) for line in lines],
        }
        if arguments.json:
            _write(arguments.json, json.dumps(report, indent=2, ensure_ascii=False) + "\n")
        if arguments.bundle:
            output_dir = Path(wanted.config.training.output_dir) if arguments.config else None
            names = write_bundle(arguments.bundle, report, "\n".join(printed) + "\n", arguments.config, output_dir)
            print(
                f"{arguments.bundle}: {', '.join(names)}. Secrets that were recognised are out; look into it before you send it."
            )
    except UserError as error:
        print_error(error)
        return error.exit_code
    return 0 if report["can_run"] else 1


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--json: {path} cannot be written: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
