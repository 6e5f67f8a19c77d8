"""Fine-tune a Parakeet transducer.

    accelerate launch finetune/train.py --config RUN.yaml [--strategy NAME ...] [key=value ...]
    accelerate launch --config_file accelerate_configs/NAME.yaml finetune/train.py --config RUN.yaml
    deepspeed --num_gpus=1 finetune/train.py --config RUN.yaml --strategy zero2_offload
    torchrun --nproc_per_node 2 finetune/train.py --config RUN.yaml --strategy ddp
    ... finetune/train.py --config RUN.yaml --dry-run       go or no-go, before a night is lost
    ... finetune/train.py --config RUN.yaml --smoke 100     whether memory suffices and stays

Exit codes: 0 done or verdict good, 1 failed or verdict bad, 2 bad arguments or configuration, 75 stopped by a signal
with a checkpoint saved: start it again with training.resume_from_checkpoint=true.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import errno
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

# Under a launcher this file's folder comes first on sys.path, where our evaluate.py would shadow Hugging Face's.
_HERE = Path(__file__).resolve().parent
sys.path[:] = [str(_HERE.parent)] + [p for p in sys.path if Path(p or ".").resolve() not in (_HERE, _HERE.parent)]


from finetune import signals as stopping  # noqa: E402
from finetune.errors import UserError  # noqa: E402
from finetune.logs import print_error, set_up_logging  # noqa: E402
from finetune.rank_monitor import client as ranks  # noqa: E402
from finetune.tools.command_line import INTERRUPTED, command, positive, run_command  # noqa: E402

if TYPE_CHECKING:
    from finetune.callbacks.eta import Place
    from finetune.config.schema import RunConfig
    from finetune.strategies.strategy import Strategy
    from finetune.training.trainer import Trainer

DISK_TROUBLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE, errno.EFBIG)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    example = "python finetune/train.py --config finetune/configs/quickstart.yaml training.max_steps=100"
    parser = command("train", __doc__ or "", example)
    parser.prog = "finetune/train.py"
    add = parser.add_argument
    add("--config", type=Path, help="run file (default: ./config.yaml)")
    add("--strategy", action="append", default=[], metavar="NAME", help="memory strategy; repeat to combine")
    add("--deepspeed", metavar="FILE", help="DeepSpeed JSON file, such as ds_configs/zero2_offload.json")
    add("--stage", type=int, metavar="K", help="run stage K of the plan training.stages alone")
    instead = parser.add_mutually_exclusive_group().add_argument
    instead("--dry-run", action="store_true", help="try everything once, say go or no-go, leave only dry_run.json")
    instead(
        "--smoke",
        type=positive,
        metavar="N",
        help="N steps, the longest clips first: peak, leaks, headroom; leaves smoke.json",
    )
    add("--profile", type=positive, metavar="N", help="record N steps with torch.profiler: a table, and a trace")
    add("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)  # DeepSpeed's launcher adds it
    add("overrides", nargs="*", metavar="key=value", help="settings that replace those of the run file")
    return parser


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; refuse what is neither an option nor `key=value`."""
    parser = make_parser()
    arguments, rest = parser.parse_known_intermixed_args(argv)
    if rest:
        from finetune.config.load import FIELDS
        from finetune.config.suggestions import closest

        near = closest(rest[0].lstrip("-").split("=")[0], FIELDS)
        hint = f", such as {near[0]}=..." if near else ""
        parser.error(f"unknown arguments {' '.join(rest)}; settings are given as key=value{hint}")
    if arguments.config is None:
        if not Path("config.yaml").is_file():
            parser.print_usage(sys.stderr)
            raise UserError(
                "no --config, and no config.yaml in this directory. Try --config finetune/configs/quickstart.yaml."
            )
        arguments.config = Path("config.yaml")
    return arguments


def train(
    config: RunConfig,
    strategy: Strategy,
    observe: Callable[[Trainer], None] | None = None,
    last: bool = True,
    place: Place | None = None,
    profile_steps: int | None = None,
) -> None:
    """One run, from its configuration to its summary. UserError where it diverged (training.stop_if_diverged).

    Args:
        config: of the run.
        strategy: how it fits in memory.
        observe: called with the Trainer before it begins.
        last: no other run follows in this process.
        place: in the plan of stages.
        profile_steps: steps to record with torch.profiler.
    """
    from finetune.callbacks.defaults import add_run_callbacks, add_step_callbacks
    from finetune.callbacks.eta import Place
    from finetune.callbacks.profiler import check_steps_left
    from finetune.tools.preflight import auto_batch
    from finetune.tools.report.page import write_report
    from finetune.training import run
    from finetune.training.summary import write_summary

    accelerator = run.build_accelerator(config, strategy)
    with run.output_directory(accelerator, config):
        sources = run.open_sources(config)
        checkpoint = run.find_checkpoint(config)
        run.check_overlap(config, sources, checkpoint)
        sources = run.halve_guard(config, sources)
        prediction = auto_batch.set_bounds(accelerator, config, strategy)
        total_steps = run.plan_steps(accelerator, config, sources)
        model = run.build_model(accelerator, config, sources, checkpoint)
        trainer = run.build_trainer(accelerator, model, sources, config, total_steps, checkpoint)
        run.check_languages(trainer)
        run.check_what_is_left(trainer, checkpoint is not None)
        recovery = add_step_callbacks(trainer)
        panel = add_run_callbacks(trainer, write_report, place or Place(), profile_steps)
        if observe is not None:
            observe(trainer)
        trainer.begin(checkpoint)
        run.describe(trainer, strategy)
        if checkpoint is None:
            auto_batch.keep_prediction(trainer, strategy, prediction)
            auto_batch.confirm(trainer, recovery)
        if profile_steps is not None:
            check_steps_left(profile_steps, trainer.progress, trainer.total_steps, trainer.max_epochs)
        with panel.shown():
            if checkpoint is None:
                trainer.evaluate_base()
            trainer.train()
            result = trainer.finish()
            write_summary(trainer, strategy, result)
            trainer.end()
    if last:
        accelerator.end_training()
    else:
        run.end_stage(accelerator)
    if trainer.progress.diverged is not None:
        raise UserError(trainer.progress.diverged, exit_code=1)


@contextlib.contextmanager
def explaining_memory(config: RunConfig, strategy: Strategy) -> Iterator[None]:
    """Within, where memory runs out, raise a message that names the settings which need less."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        from finetune.callbacks.out_of_memory import is_out_of_memory, out_of_memory_message
        from finetune.strategies.strategy import engine_with, number_of_processes

        if not is_out_of_memory(error):
            raise
        ranks.failed(error)
        gpu = type(error).__name__ == "OutOfMemoryError"
        engine = engine_with(strategy.engine, number_of_processes())
        raise UserError(out_of_memory_message(error, config, gpu, engine), exit_code=1) from error


def run_as_told(arguments: argparse.Namespace, observe: Callable[[Trainer], None] | None) -> int:
    """Train, or try the training, as the arguments say; return the exit code."""
    from finetune.config.load import load_config
    from finetune.strategies.strategy import check_num_gpus, resolve_strategy

    strategy = resolve_strategy(arguments.strategy, arguments.deepspeed)
    config, _ = load_config(arguments.config, strategy.names, arguments.overrides)
    check_num_gpus(config.training.num_gpus)
    tried = arguments.dry_run or arguments.smoke is not None
    if config.training.stages:
        from finetune.callbacks.eta import place_in_plan
        from finetune.training import stages

        t = config.training
        plan = stages.stages_of(t.stages, Path(t.output_dir))
        configs = {
            stage: load_config(arguments.config, strategy.names, arguments.overrides, (stage.settings, stage.name))[0]
            for stage in plan
        }

        def train_stage(stage: stages.Stage) -> None:
            place = place_in_plan(stage.number, [configs[s].training.max_steps for s in plan])
            with explaining_memory(configs[stage], strategy):
                train(configs[stage], strategy, observe, stage is plan[-1], place, arguments.profile)

        if not tried:
            resume = t.resume_from_checkpoint or stages.was_restarted(plan)
            stages.run_stages(plan, train_stage, resume=resume, margin=t.stage_margin, only=arguments.stage)
            return 0
        stage = stages.stage_numbered(plan, 1 if arguments.stage is None else arguments.stage)
        config = stages.config_to_try(stage, configs[stage], configs[plan[0]])
    elif arguments.stage is not None:
        raise UserError("--stage: the run file has no training.stages.")
    with explaining_memory(config, strategy):
        if arguments.dry_run:
            from finetune.tools.preflight.dry_run import dry_run

            return dry_run(config, strategy, observe)
        if arguments.smoke is not None:
            from finetune.tools.preflight.smoke import smoke

            return smoke(config, strategy, arguments.smoke, observe)
        train(config, strategy, observe, profile_steps=arguments.profile)
    return 0


def main(argv: list[str] | None = None, observe: Callable[[Trainer], None] | None = None) -> int:
    """Run a training as its arguments say; return the exit code.

    Args:
        argv: command line; None takes the process's own.
        observe: called with the Trainer before it begins.
    """
    set_up_logging()
    with stopping.listening():
        try:
            arguments = parse_arguments(argv)
            set_up_logging(arguments.verbose)
            return run_as_told(arguments, observe)
        except UserError as error:
            ranks.failed(str(error))
            print_error(error)
            return error.exit_code
        except (stopping.Stopped, stopping.CutShort) as stop:
            again = "Start the same command again with training.resume_from_checkpoint=true to go on."
            agreed = isinstance(stop, stopping.CutShort) or stop.on_all_ranks
            if not agreed or os.environ.get("RANK", "0") == "0":
                print_error(f"{stop}. {again}", before="stopped: ")
            return stopping.EXIT_CODE
        except KeyboardInterrupt:
            again = "training.resume_from_checkpoint=true continues from the last checkpoint"
            print_error(again, before="interrupted: ")
            return INTERRUPTED
        except OSError as error:
            if error.errno not in DISK_TROUBLE:
                raise
            ranks.failed(error)
            print_error(
                f"{error.filename or 'a file'} cannot be written: {error.strerror}. Make room or mend the disk, then "
                "start the same command again with training.resume_from_checkpoint=true."
            )
            return 1


def leave(code: int) -> None:
    """End the process, and leave its exit code in the file that FINETUNE_EXIT_CODE_FILE names (run_training.sh).

    In a process group it does not take the interpreter down first: a thread of gloo that asks for it then is killed,
    which aborts the process, and the launcher calls a run failed that is done.
    """
    ranks.report_exit(code)
    stopping.write_exit_code(code)
    code = stopping.code_for_launcher(code)
    if "RANK" in os.environ:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        stopping.end_torchrun(code)
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    with stopping.alone_at_the_terminal():
        try:
            code = run_command(main)
        except BaseException as error:
            given = error.code if isinstance(error, SystemExit) else None
            stopping.write_exit_code(given if isinstance(given, int) else 1)
            raise
    leave(code)
