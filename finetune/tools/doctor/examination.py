"""The doctor's checks in their order, and the run that they are about."""

from __future__ import annotations

import textwrap
import time
from typing import TYPE_CHECKING

from finetune.config.load import load_config
from finetune.paths import ROOT
from finetune.strategies.strategy import resolve_precision, resolve_strategy
from finetune.tools.doctor import compiled_operations, gpu, packages, run_file_checks, system
from finetune.tools.doctor.findings import MISSING, WARNING, Check, Finding, Wanted, reason_of, warning

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SECTIONS: dict[str, list[Check]] = {
    "installation": [system.python, packages.versions, packages.decoders],
    "machine": [
        system.memory,
        system.limits,
        system.shared_memory,
        gpu.gpus,
        gpu.allocator,
        gpu.process_groups,
        system.main_port,
        gpu.loss_kernels,
    ],
    "optimizers and engines": [
        packages.bitsandbytes,
        packages.torchao,
        packages.flashoptim,
        compiled_operations.deepspeed,
        compiled_operations.compilers,
        compiled_operations.deepspeed_locks,
        compiled_operations.cpu_adam,
    ],
    "the run": [
        run_file_checks.compatibility,
        run_file_checks.gpu_count,
        run_file_checks.model,
        run_file_checks.data,
        run_file_checks.hub,
        run_file_checks.output_disk,
    ],
}
# Strategies without a run file are applied to this one; its model and data are not checked.
NEUTRAL = ROOT / "finetune" / "configs" / "quickstart.yaml"


def wanted_run(config_file: Path | None, strategies: list[str], overrides: list[str]) -> Wanted:
    """Read the configuration of the run to be checked.

    Raises:
        UserError: training would refuse it on any machine.
    """
    strategy = resolve_strategy(strategies)
    config, _ = load_config(config_file or NEUTRAL, strategy.names, overrides)
    precision = resolve_precision(config.training.bf16, config.training.fp16, strategy)
    config.training.bf16, config.training.fp16 = precision == "bf16", precision == "fp16"
    return Wanted(config, config_file, strategy.names, strategy.engine)


def run_checks(wanted: Wanted) -> Iterator[Finding]:
    """Run all checks in their order; a check that raises becomes a warning that names it."""
    for section, checks in SECTIONS.items():
        for check in checks:
            started = time.perf_counter()
            try:
                findings = list(check(wanted))
            except Exception as error:
                name = check.__name__.replace("_", " ")
                findings = [warning(name, f"this check failed: {reason_of(error)}", "Report it, with --bundle.")]
            seconds = time.perf_counter() - started
            for finding in findings:
                finding.section = section
                finding.found += f" (checked in {seconds:.0f} s)" if seconds > 10 else ""
                yield finding


def format_finding(finding: Finding, width: int) -> str:
    """A finding as wrapped lines, with its remedy below."""
    hang = " " * 32
    head = f"  {finding.state:<8} {finding.name:<20} "
    wrapper = textwrap.TextWrapper(width, head, hang, break_long_words=False, break_on_hyphens=False)
    lines = wrapper.wrap(finding.found)
    wrapper.initial_indent, wrapper.subsequent_indent = f"{hang}-> ", f"{hang}   "
    return "\n".join(lines + wrapper.wrap(finding.remedy))


def conclusion(findings: list[Finding], wanted: Wanted) -> str:
    """One sentence: whether the run can run here, and which checks say that it cannot."""
    parts = [str(wanted.config_file)] if wanted.config_file else []
    parts += ["--strategy " + " --strategy ".join(wanted.names)] if wanted.names else []
    subject, verb = " with ".join(parts) or "the installation", "run" if wanted.chosen else "be used"
    missing = list(dict.fromkeys(finding.name for finding in findings if finding.state == MISSING))
    if missing:
        return f"{subject} cannot {verb} here: {', '.join(missing)} missing, see above."
    warnings = sum(finding.state == WARNING for finding in findings)
    after = f" ({warnings} warning{'s' if warnings > 1 else ''} above)" if warnings else ""
    return f"{subject} can {verb} here{after}."
