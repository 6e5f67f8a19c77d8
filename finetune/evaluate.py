"""Word and character error rates of a model on a data set, overall and per language.

    python -m finetune.evaluate --model M --data D [--split test] [--json FILE] [--utterances FILE]

M: a .nemo file, a run's output directory, a hub name, or a NeMo model YAML. D: a NeMo manifest, a folder or glob of parquet
or tar shards, an audio folder, or a hub data set name.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch

from finetune.data.options import StreamOptions
from finetune.data.sources import open_source, parse_sources
from finetune.data.stream import ClipStream
from finetune.errors import UserError
from finetune.evaluation.recognise import LONGEST_AT_ONCE, evaluation_limits, score_stream
from finetune.logs import set_up_logging
from finetune.models.nemo import load_model, move_to_device
from finetune.training.data import no_tokens
from finetune.training.outputs import LineFile, write_json


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m finetune.evaluate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True, nargs="+", help="one data set or several, judged together")
    parser.add_argument("--split", default="test", help="split of a folder or hub data set (default: test)")
    parser.add_argument("--batch-size", type=int, default=16, help="clips decoded together")
    parser.add_argument(
        "--chunk", type=float, default=LONGEST_AT_ONCE, help="longer clips are decoded in chunks of so many seconds"
    )
    parser.add_argument("--normalization", default="basic", choices=("none", "lower", "basic"), help="of both texts")
    parser.add_argument("--max-samples", type=int, default=-1, help="only the first N clips")
    parser.add_argument("--workers", type=int, default=1, help="processes that read and decode audio")
    parser.add_argument("--tokenizer", help="tokenizer directory, for a NeMo model YAML")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--utterances", type=Path, help="write one JSON line a clip here")
    arguments = parser.parse_args(argv)
    if arguments.batch_size < 1 or arguments.workers < 0:
        parser.error("--batch-size has to be 1 or more, --workers 0 or more")
    if not 1 <= arguments.chunk < float("inf"):
        parser.error("--chunk has to be 1 second or more")
    for path in (arguments.json, arguments.utterances):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
    return arguments


def evaluate(arguments: argparse.Namespace) -> dict[str, Any]:
    """The result as one object: wer, cer, clips, counts, by_language, real_time_factor, quarantined."""
    sources = [open_source(s, "--data") for s in parse_sources(list(arguments.data), "--data", arguments.split)]
    model = move_to_device(load_model(arguments.model, arguments.tokenizer), arguments.device)
    options = StreamOptions(
        limits=evaluation_limits(arguments.batch_size, arguments.chunk),
        sample_rate=model.preprocessor._sample_rate,
        shuffle=False,
        max_samples=arguments.max_samples,
        keep_empty_text=True,
    )
    stream = ClipStream(sources, options, no_tokens, workers=arguments.workers)
    lines = LineFile(arguments.utterances) if arguments.utterances else None
    if lines is not None:
        lines.cut(0)

    def write_clip(clip_id: str, language: str, reference: str, hypothesis: str, counts: Any) -> None:
        if lines is not None:
            row = {"id": clip_id, "language": language, "reference": reference, "hypothesis": hypothesis}
            lines.append({**row, "words": counts.words, "word_errors": counts.word_errors})

    started = time.perf_counter()
    clips = [s.clips for s in sources]
    board = score_stream(
        model,
        stream,
        normalization=arguments.normalization,
        description="evaluate",
        longest=arguments.chunk,
        total=sum(clips) if all(clips) else None,
        on_clip=write_clip,
    )
    if board.total.clips == 0:
        raise UserError(
            f"--data: {' '.join(arguments.data)} holds no clip that can be used ({len(board.quarantined)} in quarantine).",
            1,
        )
    return {
        "model": arguments.model,
        "data": arguments.data,
        "normalization": arguments.normalization,
        **board.result(),
        "seconds": time.perf_counter() - started,
        "quarantined": board.quarantined,
        "filtered": board.filtered,
    }


def print_table(result: dict[str, Any]) -> None:
    """The rates as an aligned table."""

    def percent(value: float | None) -> str:
        return "-" if value is None else f"{100 * value:.2f}"

    print(f"{'language':10} {'WER %':>7} {'CER %':>7} {'sub':>6} {'del':>6} {'ins':>6} {'words':>7} {'clips':>6}")
    for name, r in [*result["by_language"].items(), ("all", result)]:
        print(
            f"{name:10} {percent(r['wer']):>7} {percent(r['cer']):>7} {r['substitutions']:6d} {r['deletions']:6d} "
            f"{r['insertions']:6d} {r['words']:7d} {r['clips']:6d}"
        )
    if result["quarantined"]:
        first = result["quarantined"][0]
        print(f"{len(result['quarantined'])} clip(s) could not be used, such as {first['id']}: {first['reason']}")


def main(argv: list[str] | None = None) -> int:
    """Runs the evaluation; returns the exit code."""
    set_up_logging()
    arguments = parse_arguments(argv)
    try:
        result = evaluate(arguments)
    except (UserError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return getattr(error, "exit_code", 1)
    print_table(result)
    if arguments.json:
        write_json(arguments.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
