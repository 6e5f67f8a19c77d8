"""Predict memory and time of every strategy, before anything runs.

No GPU is needed, no weights are read. Lengths and texts are sampled from data.train where it is on this machine.

Exit codes: 0 a strategy fits, 1 none does, 2 bad arguments or configuration.
"""

from __future__ import annotations

import argparse
import logging
import sys
from dataclasses import asdict
from pathlib import Path

from finetune.tools.command_line import command, run_command


def make_parser() -> argparse.ArgumentParser:
    parser = command(
        "plan",
        __doc__ or "",
        "python -m finetune.plan --config RUN.yaml --gpu a100-80gb",
        "python -m finetune.plan --config RUN.yaml --gpu-memory 24GB --gpus 4 --hours 10000 --json plan.json",
    )
    parser.add_argument("--config", type=Path, required=True, help="run file")
    parser.add_argument("--strategy", action="append", default=[], metavar="NAME", help="combined, as one more row")
    parser.add_argument("--strategies", metavar="A,B+C", help="these in place of all")
    parser.add_argument("--gpu", help="such as a100-80gb (default: the one in this machine)")
    parser.add_argument("--gpu-memory", metavar="SIZE", help="such as 24GB, for a card that is not in the list")
    parser.add_argument("--gpus", type=int, default=1, help="how many")
    parser.add_argument("--check", type=Path, help="folder of finetune.check: lengths and hours of the data")
    parser.add_argument("--hours", type=float, help="audio of the whole data set")
    parser.add_argument("--mean-seconds", type=float, help="mean length of the clips")
    parser.add_argument("--tokens-per-second", type=float, help="of the texts")
    parser.add_argument("--json", type=Path, help="write the plan there too")
    parser.add_argument("--picture", type=Path, help="write stacked bars against the card's memory there (PNG or SVG)")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="settings that replace those of the run file"
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Print the plan; return the exit code."""
    a = make_parser().parse_intermixed_args(argv)
    from finetune.logs import print_error, set_up_logging

    set_up_logging(a.verbose)
    if not logging.getLogger("finetune").isEnabledFor(logging.DEBUG):
        logging.getLogger("finetune").setLevel(logging.WARNING)

    from finetune.config.load import load_config
    from finetune.durable_files import write_json
    from finetune.errors import UserError
    from finetune.strategies.strategy import resolve_strategy
    from finetune.tools.planning import presentation
    from finetune.tools.planning.dataset import data_of
    from finetune.tools.planning.gpus import card_here, card_named, card_with_memory
    from finetune.tools.planning.prediction import all_combinations, make_plan

    try:
        if a.gpus < 1:
            raise UserError("--gpus: at least 1.")
        if a.gpu and a.gpu_memory:
            raise UserError("--gpu and --gpu-memory both name a card; give one of them.")

        card = card_named(a.gpu) if a.gpu else card_with_memory(a.gpu_memory) if a.gpu_memory else card_here()
        if not card.is_gpu:
            print("no GPU here: this plan is for the processor. For a GPU elsewhere: --gpu NAME or --gpu-memory SIZE")
        resolve_strategy(a.strategy)  # unknown names end the command, not one row
        config, _ = load_config(a.config, a.strategy, a.overrides)
        data = data_of(config, a.check, a.hours, a.mean_seconds, a.tokens_per_second)
        combinations = all_combinations(a.strategy, a.strategies)
        plan = make_plan(a.config, a.overrides, combinations, card, a.gpus, data, _progress)
        print(presentation.table(plan))
        if a.json:
            write_json(a.json, asdict(plan))
        if a.picture:
            presentation.draw(plan, a.picture)
        return 0 if any(row.fits for row in plan.strategies) and plan.recommended else 1
    except UserError as error:
        print_error(error)
        return error.exit_code


def _progress(done: int, of: int) -> None:
    """Show progress on a terminal, in a line that is written over."""
    if of and sys.stderr.isatty():
        end = "\r\033[K" if done == of else ""
        print(f"\r\033[Kfollowing steps: {done} of {of}{end}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(run_command(main))
