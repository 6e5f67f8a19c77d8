"""Search for better settings of a run file by short runs of it, with Optuna.

Trial 0 has the run file's own values, and all trials have as many steps, so the result says what the search brought.
The goal is the WER on data.validation, within data.guard_limit where the run file sets one; data.test is not used. The
same command goes on after a kill. Exit codes: 0 done, 1 all trials are bad or none keeps the limit, 2 bad arguments,
75 stopped by SIGTERM and 130 by Ctrl-C, with the results so far.
"""

import argparse
import sys
from pathlib import Path

from finetune.tools.command_line import SIGTERM, command, positive, run_command, stopping_on_sigterm

EXAMPLE = "python -m finetune.search --config finetune/configs/quickstart.yaml --output runs/search --steps 100"
TRIALS = 20


def make_parser() -> argparse.ArgumentParser:
    parser = command("search", __doc__ or "", EXAMPLE)
    add = parser.add_argument
    add("--config", required=True, type=Path, metavar="RUN.yaml", help="run file")
    add("--output", required=True, type=Path, metavar="DIR", help="folder for trials, best.yaml and search.html")
    add("--strategy", action="append", default=[], metavar="NAME", help="of each trial; repeat to combine")
    add(
        "--trials",
        type=positive,
        metavar="N",
        help=f"end with N finished trials (default: {TRIALS} without --minutes)",
    )
    add("--minutes", type=_minutes, metavar="M", help="start no trial after M minutes")
    add("--steps", type=positive, metavar="N", help="optimizer steps of a trial (default: as in the run file)")
    add("--space", type=Path, metavar="FILE", help="YAML of what is searched (docs/search.md)")
    add("--storage", metavar="URL", help="database that several machines share (default: DIR/study.db)")
    add("--study", metavar="NAME", help="name of the study (default: made of the settings)")
    add("overrides", nargs="*", metavar="key=value", help="settings that replace those of the run file")
    return parser


def _minutes(text: str) -> float:
    if not float(text) > 0:
        raise argparse.ArgumentTypeError("has to be above 0")
    return float(text)


def main(argv: list[str] | None = None, training: tuple[str, ...] | None = None) -> int:
    """Search; return the exit code.

    Args:
        argv: command line; None takes the process's own.
        training: words that start a training, in place of finetune/train.py.
    """
    arguments = make_parser().parse_intermixed_args(argv)
    from finetune.errors import UserError
    from finetune.logs import print_error, set_up_logging

    set_up_logging(arguments.verbose)
    try:
        return _search(arguments, training)
    except UserError as error:
        print_error(error)
        return error.exit_code


def _search(arguments: argparse.Namespace, training: tuple[str, ...] | None) -> int:
    from finetune.errors import UserError
    from finetune.signals import EXIT_CODE

    try:
        import optuna
    except ImportError as error:
        raise UserError(
            "search needs Optuna, which is not installed: pip install -c constraints.txt -e '.[search]'", exit_code=1
        ) from error
    from finetune.config.load import load_config
    from finetune.strategies.strategy import resolve_strategy
    from finetune.tools.search.outputs import print_table, write_files
    from finetune.tools.search.results import result_of
    from finetune.tools.search.running import run_trials
    from finetune.tools.search.space import as_long_as, default_space, read_space
    from finetune.tools.search.study import Search, locked, open_study
    from finetune.tools.search.trials import TRAIN

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    resolve_strategy(arguments.strategy)  # refuses unknown ones
    config, _ = load_config(arguments.config, arguments.strategy, arguments.overrides)
    if not config.data.validation:
        raise UserError("search compares trials by data.validation, which the run file does not set.")
    if config.training.stages:
        raise UserError("search takes one run; the run file has training.stages. Search the settings of one of them.")
    if arguments.steps is None and config.training.max_steps < 1:
        raise UserError("search compares runs of equal steps; the run file goes by epochs. Give --steps N.")
    config = as_long_as(arguments.steps, config)
    space = read_space(arguments.space, config) if arguments.space else default_space(config, arguments.steps)
    search = Search(
        config,
        arguments.config,
        arguments.strategy,
        arguments.overrides,
        arguments.output,
        space,
        arguments.steps,
        arguments.trials or (TRIALS if arguments.minutes is None else None),
        arguments.minutes,
        arguments.storage,
        arguments.study,
        training or TRAIN,
    )
    with locked(search.folder), stopping_on_sigterm():
        study, stopped = open_study(search), None
        try:
            run_trials(study, search)
        except KeyboardInterrupt as stop:
            stopped = stop
        result = result_of(study, search)
        if result.finished:
            write_files(result)
            print_table(result)
            print(f"{search.folder / 'search.html'}" + (f"   {search.folder / 'best.yaml'}" if result.best else ""))
    if stopped is not None:
        again = "start the same command again to go on"
        if str(stopped) == SIGTERM:
            print(f"stopped by SIGTERM: {again}", file=sys.stderr)
            return EXIT_CODE
        raise KeyboardInterrupt(again)
    if not result.finished:
        raise UserError("no trial has come to its end: --minutes is over.", exit_code=1)
    if result.best is None:
        raise UserError(
            f"all {len(result.finished)} trials are bad. The commonest reason: {result.commonest_reason}", 1
        )
    return 0 if result.keeps_limit else 1


if __name__ == "__main__":
    sys.exit(run_command(main))
