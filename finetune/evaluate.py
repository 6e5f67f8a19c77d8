"""Word and character error rates of a model on a data set, overall and per language; and whether two models differ.

    python -m finetune.evaluate --model M --data D [--split test] [--json FILE] [--utterances FILE]
    python -m finetune.evaluate --model M --data D --look-ahead all    a streaming model, chunk by chunk
    python -m finetune.evaluate --model M --data D --output DIR [--engine ray]    in shards, which a killed one goes on
    python -m finetune.evaluate --model M --data D --boost FILE       phrases that matter, with and without
    python -m finetune.evaluate --model M --data D --boost FILE --tune-boost    on validation data: how much of it
    python -m finetune.evaluate --model A --against B --data D
    python -m finetune.evaluate --compare A.jsonl B.jsonl              files that --utterances wrote

M, A and B may also be directories that `finetune.export` wrote for onnx-asr or sherpa-onnx.

What intervals and p-values mean: docs/evaluation.md.
"""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.data.normalization import SCORE_NORMALIZATIONS
from finetune.durable_files import write_json
from finetune.errors import UserError
from finetune.evaluation.long_audio import LONGEST_AT_ONCE
from finetune.evaluation.significance import RESAMPLES, block_names
from finetune.evaluation.tables import (
    print_boost_or_train,
    print_boosting,
    print_comparison,
    print_rates,
    print_streaming,
    print_tried_weights,
)
from finetune.logs import print_error, set_up_logging
from finetune.tools.command_line import (
    add_boosting,
    add_data,
    add_decoding,
    add_dtype,
    add_head,
    add_json,
    add_language,
    add_look_ahead,
    add_model,
    boosting_of,
    check_boosting,
    command,
    device_of,
    run_command,
)
from finetune.tools.jobs.arguments import WORKERS, add_engine, engine_of, worker_device

if TYPE_CHECKING:
    from finetune.evaluation.dataset import EvaluationSettings
    from finetune.evaluation.scores import Utterance
    from finetune.models.boosting import Boosting


OF_EXPORTS = {
    "dtype": "its precision is what it was exported with",
    "head": "it has one head",
    "language": "it takes no prompt",
    "look_ahead": "it recognises whole clips",
    "output": "it is evaluated in one process",
    "tokenizer": "it has its own",
    "boost": "its runtime decodes without phrases here; sherpa-onnx takes those of --to hotwords (docs/boosting.md)",
    "lm": "its runtime decodes without a language model",
    "beam": "its runtime decodes greedily here",
    "device": "it runs on the CPU",
}
"""Options that an exported model cannot follow, and why."""
OF_JOBS = ("engine", "address", "shard", "max_failed", "retry_failed")


def make_parser() -> argparse.ArgumentParser:
    parser = command(
        "evaluate",
        __doc__ or "",
        "python -m finetune.evaluate --model runs/quickstart --data examples/voice_prompts --json result.json",
    )
    add_model(parser, required=False)
    parser.add_argument("--against", metavar="M", help="a second model, compared with the first on the same clips")
    parser.add_argument("--compare", nargs=2, type=Path, metavar="FILE", help="compare two files of --utterances")
    add_data(parser, "one data set or several, evaluated together")
    add_decoding(parser, 16)
    add_dtype(parser)
    add_head(parser)
    add_language(parser, "each clip's own")
    add_look_ahead(parser, "also recognise chunk by chunk, with each of these look-aheads (or all)")
    add_boosting(parser)
    tune = "choose --boost-weight and --lm-weight on this data (default split: validation), and print them"
    parser.add_argument("--tune-boost", action="store_true", help=tune)
    parser.add_argument(
        "--chunk",
        type=float,
        default=LONGEST_AT_ONCE,
        metavar="SECONDS",
        help=f"longer clips are decoded in chunks of so many seconds (default: {LONGEST_AT_ONCE:g})",
    )
    parser.add_argument(
        "--normalization",
        choices=SCORE_NORMALIZATIONS,
        help="of both texts (default: basic; for --compare the files' own); open_asr: as the Open ASR Leaderboard did",
    )
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help=f"processes that read and decode audio (default: 1); with --output, {WORKERS}",
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help="do it in shards here; a killed one goes on")
    add_engine(parser, workers=False)
    parser.add_argument(
        "--bootstrap",
        type=int,
        default=RESAMPLES,
        metavar="N",
        help=f"resamples for the intervals; 0: none (default: {RESAMPLES})",
    )
    parser.add_argument(
        "--bootstrap-by-id",
        metavar="REGEX",
        help="clips in whose ids it finds the same, such as a speaker, are drawn as one block: '^([^-]+)-'",
    )
    add_json(parser)
    parser.add_argument(
        "--utterances",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="write one JSON line a clip here; a second file is for --against",
    )
    return parser


def is_set(parser: argparse.ArgumentParser, arguments: argparse.Namespace, name: str) -> bool:
    """Return whether an option is other than its default."""
    return getattr(arguments, name) != parser.get_default(name)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if arguments.workers is not None and arguments.workers < (1 if arguments.output else 0):
        parser.error("--workers has to be 0 or more, with --output 1 or more")
    if arguments.output is None and (alone := [name for name in OF_JOBS if is_set(parser, arguments, name)]):
        parser.error(f"--{alone[0].replace('_', '-')} goes with --output DIR, where the shards are kept")
    check_boosting(parser, arguments)
    boosts = arguments.boost is not None or arguments.lm is not None
    if boosts and (arguments.output is not None or arguments.look_ahead is not None):
        parser.error("--boost and --lm decode whole clips in one process: leave out --output and --look-ahead")
    if boosts and arguments.compare:
        parser.error("--compare reads what was decoded before: leave out --boost and --lm")
    if arguments.tune_boost and (not boosts or arguments.against or arguments.utterances):
        parser.error("--tune-boost goes with --boost or --lm, and without --against and --utterances")
    if arguments.tune_boost and None not in (
        arguments.boost_weight if arguments.boost else 0.0,
        arguments.lm_weight if arguments.lm else 0.0,
    ):
        parser.error("--tune-boost chooses --boost-weight and --lm-weight: leave one of them out")
    if arguments.output is not None and arguments.look_ahead is not None:
        parser.error("--output keeps texts of whole clips: leave out --look-ahead")
    if not 1 <= arguments.chunk < float("inf"):
        parser.error("--chunk has to be 1 second or more")
    if arguments.look_ahead is not None and arguments.dtype != "float32":
        parser.error("--look-ahead decodes in float32: leave out --dtype")
    if arguments.bootstrap < 0:
        parser.error("--bootstrap has to be 0 or more")
    if arguments.compare and (arguments.model or arguments.against or arguments.data or arguments.utterances):
        parser.error("--compare reads what was decoded before: leave out --model, --against, --data and --utterances")
    if not arguments.compare and not (arguments.model and arguments.data):
        parser.error("--model and --data are needed, or --compare with two files")
    if arguments.bootstrap_by_id is not None:
        try:
            block_names([], arguments.bootstrap_by_id)
        except UserError as error:
            parser.error(str(error))
    if len(arguments.utterances) > (2 if arguments.against else 1):
        parser.error("--utterances takes one file, and a second one with --against")
    for path in (arguments.json, *arguments.utterances):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
    return arguments


def evaluate(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """Evaluate --model on --data, and compare it with --against if given; None: other processes have shards to do."""
    from finetune.data.sources import split_to_read
    from finetune.evaluation.comparison import compare_utterances
    from finetune.evaluation.dataset import EvaluationSettings, evaluate_model
    from finetune.tools.export.using import evaluate_exported, is_export, refuse_options

    settings = EvaluationSettings(
        data=arguments.data,
        split=split_to_read(arguments.data, arguments.split, "validation" if arguments.tune_boost else "test"),
        batch_size=arguments.batch_size,
        chunk=arguments.chunk,
        normalization=arguments.normalization or "basic",
        max_samples=arguments.max_samples,
        workers=1 if arguments.workers is None else arguments.workers,
        device=device_of(arguments),
        dtype=arguments.dtype,
        head=arguments.head,
        language=arguments.language,
        tokenizer=arguments.tokenizer,
        resamples=arguments.bootstrap,
        block_pattern=arguments.bootstrap_by_id,
        look_ahead=arguments.look_ahead,
    )
    boosting = boosting_of(arguments)
    if boosting is not None:
        return evaluate_with_boosting(arguments, settings, boosting)
    file, second_file, *_ = [*arguments.utterances, None, None]

    def evaluate_one(
        model: str, file: Path | None, keep: "list[Utterance] | None", part: str
    ) -> dict[str, Any] | None:
        if is_export(model):
            defaults = parse_arguments(["--model", model, "--data", *arguments.data])
            refuse_options(argparse.Namespace(**{**vars(arguments), "model": model}), defaults, OF_EXPORTS)
            return evaluate_exported(model, settings, file, keep)
        if arguments.output is None:
            return evaluate_model(model, settings, file, keep)
        return in_shards(arguments, settings, arguments.output / part, model, file, keep)

    if not arguments.against:
        return evaluate_one(arguments.model, file, None, "")
    a, b = [], []  # the texts of both are held in memory
    results = [
        evaluate_one(arguments.model, file, a, "a"),
        evaluate_one(arguments.against, second_file, b, "b"),
    ]
    if None in results:
        return None
    comparison = compare_utterances(
        a, b, settings.normalization, block_pattern=settings.block_pattern, resamples=settings.resamples
    )
    return {"a": arguments.model, "b": arguments.against, **comparison, "models": results}


def evaluate_with_boosting(
    arguments: argparse.Namespace, settings: "EvaluationSettings", boosting: "Boosting"
) -> dict[str, Any]:
    """Evaluate --model with and without phrases, compare it with --against if given, or choose the weights."""
    from finetune.evaluation.boosting import choose_weights, compare_with_tuned, evaluate_boosted
    from finetune.evaluation.comparison import compare_utterances
    from finetune.tools.export.using import is_export, refuse_options

    defaults = make_parser().parse_args(["--model", arguments.model])
    for model in filter(None, (arguments.model, arguments.against)):
        if is_export(model):
            refuse_options(argparse.Namespace(**{**vars(arguments), "model": model}), defaults, OF_EXPORTS)
    if arguments.tune_boost:
        weights = {name: getattr(arguments, name) for name in ("boost_weight", "lm_weight")}
        return choose_weights(arguments.model, settings, boosting, **weights)
    file, second_file, *_ = [*arguments.utterances, None, None]
    if not arguments.against:
        return evaluate_boosted(arguments.model, settings, boosting, file)
    boosted, tuned = [], []
    results = [
        evaluate_boosted(arguments.model, settings, boosting, file, boosted),
        evaluate_boosted(arguments.against, settings, boosting, second_file, tuned, plain=True),
    ]
    comparison = compare_utterances(
        boosted, tuned, settings.normalization, block_pattern=settings.block_pattern, resamples=settings.resamples
    )
    names = {"a": f"{arguments.model} {boosting}", "b": arguments.against}
    phrases = compare_with_tuned(boosted, tuned, boosting, settings) if boosting.phrases else {}
    return {**names, **comparison, **phrases, "models": results}


def in_shards(
    arguments: argparse.Namespace,
    settings: "EvaluationSettings",
    directory: Path,
    model: str,
    file: Path | None,
    keep: "list[Utterance] | None",
) -> dict[str, Any] | None:
    """Evaluate one model in shards."""
    from finetune.tools.evaluation_job import evaluate_in_shards

    a = arguments
    return evaluate_in_shards(
        model,
        settings,
        directory,
        engine_of(a),
        device=worker_device(a),
        max_failed=a.max_failed,
        file=file,
        keep=keep,
    )


def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    """Compare two files of --utterances.

    Raises:
        UserError: they cannot be read, were scored differently, or have no utterance in common.
    """
    from finetune.evaluation.comparison import compare_utterances, read_utterances

    path_a, path_b = arguments.compare
    (a, was_a), (b, was_b) = read_utterances(path_a), read_utterances(path_b)
    if arguments.normalization is None and None not in (was_a, was_b) and was_a != was_b:
        raise UserError(
            f"--compare: {path_a} was scored with --normalization {was_a}, {path_b} with {was_b}. Choose one for both "
            "with --normalization; the files hold the texts as they were before it."
        )
    comparison = compare_utterances(
        a,
        b,
        arguments.normalization or was_a or was_b or "basic",
        block_pattern=arguments.bootstrap_by_id,
        resamples=arguments.bootstrap,
    )
    return {"a": str(path_a), "b": str(path_b), **comparison}


def main(argv: list[str] | None = None) -> int:
    """Evaluate or compare; return the exit code."""
    arguments = parse_arguments(argv)
    set_up_logging(arguments.verbose)
    try:
        result = compare(arguments) if arguments.compare else evaluate(arguments)
    except (UserError, RuntimeError) as error:
        print_error(error)
        return getattr(error, "exit_code", 1)
    if result is None:
        print(f"this part is done; --output {arguments.output} without --shard puts all parts together")
        return 0
    if arguments.tune_boost:
        print_tried_weights(result)
    elif not arguments.compare:
        for rates in result.get("models", [result]):
            print_rates(rates)
            if "streaming" in rates:
                print_streaming(rates)
            if "boosting" in rates:
                print_boosting(rates["boosting"])
    if arguments.compare or arguments.against:
        print_comparison(result)
        if "missed" in result:
            print_boost_or_train(result)
    if arguments.json:
        write_json(arguments.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
