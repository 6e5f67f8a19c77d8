"""Make one model out of several of one layout, or find the best point between a base model and a tuned one.

    python -m finetune.average A.nemo B.nemo ... --output DIR [--weights W ...] [--data D] [--guard G] [--json FILE]
    python -m finetune.average A.nemo B.nemo ... --base BASE --method task|ties --output DIR
    python -m finetune.average TUNED.nemo --base BASE --data D --guard G --limit "+5 %" --output DIR --sweep [POINTS]

Writes DIR/model.nemo, read again and compared. The mean, task vectors (arXiv 2212.04089) and TIES (arXiv 2306.01708)
are summed in float32; everything that is no weight is the first model's. With --data and --guard the models and the
result are evaluated. --sweep evaluates points from the base (0) to the model (1), draws them as DIR/sweep.svg, and
takes the best on --data of those that keep --limit on --guard. The models need the same tensors and the same tokens;
the base may have a vocabulary that they have grown. A run's kept states (RUN/checkpoints/average/*.safetensors) are
models as well, with all that the run does not train from RUN/model.nemo.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.data.normalization import NORMALIZATIONS
from finetune.durable_files import write_json
from finetune.errors import UserError
from finetune.logs import print_error, set_up_logging
from finetune.tools.command_line import (
    DATA,
    MODEL,
    add_data,
    add_decoding,
    add_json,
    check_json,
    command,
    device_of,
    run_command,
    writing,
)

if TYPE_CHECKING:
    from finetune.config.guard_limit import GuardLimit
    from finetune.evaluation.dataset import EvaluationSettings
    from finetune.tools.averaging import Judge, Recipe

EXAMPLES = (
    "python -m finetune.average runs/one runs/two --output runs/mean --data examples/voice_prompts",
    'python -m finetune.average runs/one --base BASE.nemo --data D --guard G --limit "+5 %" --output DIR --sweep',
)


def make_parser() -> argparse.ArgumentParser:
    parser = command("average", __doc__ or "", *EXAMPLES)
    add = parser.add_argument
    add("models", nargs="*", metavar="M", help=f"each {MODEL}, or a state that a run keeps")
    add("--models", dest="more", nargs="+", default=[], metavar="M", help="more of them")
    add("--output", required=True, type=Path, metavar="DIR", help="directory for model.nemo")
    add("--base", metavar="M", help="the model from which the others were trained, for task, ties and --sweep")
    add("--method", default="mean", choices=("mean", "task", "ties"), help="how models are merged (default: mean)")
    add("--weights", nargs="+", type=float, default=[], metavar="W", help="of the models; one: of each (default: 1)")
    add(
        "--density", type=float, default=0.2, metavar="D", help="share of a task vector that ties keeps (default: 0.2)"
    )
    add("--sweep", nargs="?", const="", metavar="POINTS", help="such as 0,0.5,0.8,1 (default: 0, 0.1 ... 1)")
    add("--limit", metavar="L", help="on the WER of --guard: '+5 %%' of the base model's, or '+0.01' above it")
    add(
        "--batchnorm",
        default="interpolate",
        choices=("interpolate", "estimate"),
        help="running statistics: as the weights, or anew from --data (default: interpolate)",
    )
    add_data(parser, "data sets on which the models and the result are evaluated")
    add("--guard", nargs="+", metavar="D", help=f"data sets of what is not to be forgotten; each {DATA}")
    add("--guard-split", help="split of --guard (default: as of --data)")
    add_decoding(parser, 16)
    add("--normalization", default="basic", choices=NORMALIZATIONS, help="of both texts")
    add_json(parser)
    return parser


def check(arguments: argparse.Namespace) -> str | None:
    """Return what is wrong with options that do not go together, or None."""
    a, count, swept = arguments, len(arguments.models), arguments.sweep is not None
    least = 1 if swept or a.method != "mean" else 2
    problems = {
        f"give {'a model' if least == 1 else 'two models or more'}": count < least,
        f"--method {a.method} needs --base": a.method != "mean" and a.base is None,
        "--sweep needs --base, where the way begins": swept and a.base is None,
        "--sweep needs --data, whose WER chooses": swept and not a.data,
        "--base is for --method task, --method ties and --sweep": a.base is not None
        and not swept
        and a.method == "mean",
        "--limit needs --sweep and --guard": a.limit is not None and not (swept and a.guard),
        "--batchnorm estimate needs --data": a.batchnorm == "estimate" and not a.data,
        f"--weights: {len(a.weights)} weights for {count} models": len(a.weights) not in (0, 1, count),
        "--weights: the weights are finite numbers": not all(map(math.isfinite, a.weights)),
        "--weights: the weights of a mean are 0 or more, and not all 0": a.method == "mean"
        and bool(a.weights)
        and (min(a.weights) < 0 or max(a.weights) == 0),
        "--density has to be above 0 and at most 1": not 0 < a.density <= 1,
        "--split is of --data": bool(a.split) and not a.data,
        "--guard-split is of --guard": bool(a.guard_split) and not a.guard,
    }
    return next((text for text, wrong in problems.items() if wrong), None)


def _settings(arguments: argparse.Namespace, data: list[str], split: str | None, default: str) -> EvaluationSettings:
    from finetune.data.sources import split_to_read
    from finetune.evaluation.dataset import EvaluationSettings

    return EvaluationSettings(
        data=data,
        split=split_to_read(data, split, default),
        batch_size=arguments.batch_size,
        normalization=arguments.normalization,
        max_samples=arguments.max_samples,
        device=device_of(arguments),
        resamples=0,
    )


def main(argv: list[str] | None = None) -> int:
    """Average or sweep; return the exit code."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    arguments.models += arguments.more
    if problem := check(arguments):
        parser.error(problem)
    set_up_logging(arguments.verbose)
    from finetune.config.guard_limit import parse_guard_limit
    from finetune.tools.averaging import Judge, Recipe
    from finetune.tools.averaging_sweep import TENTHS, parse_points

    a = arguments
    try:
        try:
            limit = parse_guard_limit(a.limit) if a.limit is not None else None
        except ValueError as error:
            raise UserError(f"--limit {error}") from error
        points = parse_points(a.sweep) if a.sweep else TENTHS
        if a.json:
            check_json(a.json)
        default = "test" if a.sweep is None else "validation"
        data = _settings(a, a.data, a.split, default) if a.data else None
        guard = _settings(a, a.guard, a.guard_split, data.split if data else default) if a.guard else None
        recipe = Recipe(a.models, a.method, a.weights, a.base, a.density, a.batchnorm)
        if a.sweep is None:
            told = _average(recipe, a.output, Judge(data, guard))
        else:
            told = _sweep(recipe, a.output, Judge(data, guard), points, limit)
        if a.json:
            with writing("--json", a.json):
                a.json.parent.mkdir(parents=True, exist_ok=True)
                write_json(a.json, {**told, "data": a.data, "guard": a.guard, **_of_recipe(recipe)})
    except UserError as error:
        print_error(error)
        return error.exit_code
    return 0


def _of_recipe(recipe: Recipe) -> dict[str, Any]:
    return {
        "method": recipe.method,
        "weights": recipe.weight_of_each,
        "base": recipe.base,
        "density": recipe.density if recipe.method == "ties" else None,
        "batchnorm": recipe.batchnorm,
    }


def _average(recipe: Recipe, output: Path, judge: Judge) -> dict[str, Any]:
    from finetune.tools.averaging import write_average

    path, rows = write_average(recipe, output, judge)
    for row in rows if judge.data or judge.guard else ():
        data = (
            f"{100 * row['wer']:7.2f} % WER {100 * row['cer']:7.2f} % CER on {row['clips']} clips"
            if judge.data
            else ""
        )
        guard = f"{100 * row['guard_wer']:7.2f} % WER on {row['guard_clips']} of the guard" if judge.guard else ""
        print("  ".join(part for part in (data, guard, row["model"]) if part))
    size, many = path.stat().st_size / 1e6, len(recipe.models)
    how = {"mean": "the mean", "task": "the task vectors", "ties": "the task vectors by TIES"}[recipe.method]
    print(f"{path} ({size:.1f} MB): {how} of {many} model{'s' if many > 1 else ''}, read again and equal")
    return {"output": str(path), "models": rows}


def _sweep(
    recipe: Recipe, output: Path, judge: Judge, points: list[float], limit: GuardLimit | None
) -> dict[str, Any]:
    from finetune.tools.averaging_sweep import PLOT, sweep

    found = sweep(recipe, output, judge, points, limit)
    if found.new_pieces:
        pieces = ", ".join(found.new_pieces[:5]) + (", ..." if len(found.new_pieces) > 5 else "")
        print(
            f"{len(found.new_pieces)} pieces of the tuned model are new ({pieces}): the base has no rows of them, so "
            "that every point has the tuned model's"
        )
    print(found.table())
    if found.bound is not None:
        print(f"limit on the guard: {limit}, WER {100 * found.bound:.2f} % at most")
    print(f"{found.path} ({found.path.stat().st_size / 1e6:.1f} MB): {found.taken['name']}, read again and equal")
    if judge.guard is not None:
        print(f"{output / PLOT}: the points, WER on validation against WER on the guard")
    return {
        "output": str(found.path),
        "points": found.rows,
        "limit": str(limit) if limit is not None else None,
        "limit_wer": found.bound,
        "taken": found.taken["name"],
        "new_pieces": found.new_pieces,
    }


if __name__ == "__main__":
    sys.exit(run_command(main))
