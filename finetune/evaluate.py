"""Word and character error rates of a model on a data set, overall and per language; and whether two models differ.

    python -m finetune.evaluate --model M --data D [--split test] [--json FILE] [--utterances FILE]
    python -m finetune.evaluate --model A --against B --data D
    python -m finetune.evaluate --compare A.jsonl B.jsonl              files that --utterances wrote

M: a .nemo file, a run's output directory, a Hugging Face directory, a hub name, or a NeMo model YAML. D: a NeMo manifest, a folder or
glob of parquet or tar shards, an audio folder, or a hub data set name. What intervals and p-values mean: docs/evaluation.md.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from finetune.data.normalization import SCORE_NORMALIZATIONS
from finetune.data.options import StreamOptions
from finetune.data.sources import open_source, parse_sources
from finetune.data.stream import UtteranceStream
from finetune.data.utterances import no_tokens
from finetune.durable_files import write_json
from finetune.errors import UserError
from finetune.evaluation.comparison import Utterance, compare_utterances, print_comparison, read_utterances
from finetune.evaluation.recognise import LONGEST_AT_ONCE, evaluation_limits, score_stream
from finetune.evaluation.significance import FEW, RESAMPLES, block_names
from finetune.logs import print_error, set_up_logging
from finetune.models.loading import load_model, move_to_device
from finetune.security.safe_text import one_line
from finetune.training.outputs import LineFile


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m finetune.evaluate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model")
    parser.add_argument("--against", help="a second model, compared with the first on the same clips")
    parser.add_argument("--compare", nargs=2, type=Path, metavar="FILE", help="compare two files of --utterances")
    parser.add_argument("--data", nargs="+", help="one data set or several, judged together")
    parser.add_argument("--split", default="test", help="split of a folder or hub data set (default: test)")
    parser.add_argument("--batch-size", type=int, default=16, help="clips decoded together")
    parser.add_argument(
        "--chunk", type=float, default=LONGEST_AT_ONCE, help="longer clips are decoded in chunks of so many seconds"
    )
    parser.add_argument(
        "--normalization",
        choices=SCORE_NORMALIZATIONS,
        help="of both texts (default: basic; for --compare the files' own); open_asr: as the Open ASR Leaderboard did",
    )
    parser.add_argument("--max-samples", type=int, default=-1, help="only the first N clips")
    parser.add_argument("--workers", type=int, default=1, help="processes that read and decode audio")
    parser.add_argument("--tokenizer", help="tokenizer directory, for a NeMo model YAML")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--bootstrap", type=int, default=RESAMPLES, help="resamples for the intervals; 0: none")
    parser.add_argument(
        "--bootstrap-by-id",
        metavar="REGEX",
        help="clips in whose ids it finds the same, such as a speaker, are drawn as one block: '^([^-]+)-'",
    )
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument(
        "--utterances", type=Path, nargs="+", help="write one JSON line a clip here; a second file is for --against"
    )
    arguments = parser.parse_args(argv)
    if arguments.batch_size < 1 or arguments.workers < 0:
        parser.error("--batch-size has to be 1 or more, --workers 0 or more")
    if not 1 <= arguments.chunk < float("inf"):
        parser.error("--chunk has to be 1 second or more")
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
    arguments.utterances = arguments.utterances or []
    if len(arguments.utterances) > (2 if arguments.against else 1):
        parser.error("--utterances takes one file, and a second one with --against")
    for path in (arguments.json, *arguments.utterances):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
    return arguments


def evaluate(
    arguments: argparse.Namespace, name: str, file: Path | None = None, keep: list[Utterance] | None = None
) -> dict[str, Any]:
    """The result of one model as one object: wer, cer and their intervals, clips, counts, by_language, rtfx, quarantined.

    Args:
        name: the model.
        file: for one line a clip.
        keep: gets every clip.
    """
    sources = [open_source(s, "--data") for s in parse_sources(list(arguments.data), "--data", arguments.split)]
    model = move_to_device(load_model(name, arguments.tokenizer), arguments.device)
    options = StreamOptions(
        limits=evaluation_limits(arguments.batch_size, arguments.chunk),
        sample_rate=model.preprocessor._sample_rate,
        shuffle=False,
        max_samples=arguments.max_samples,
        keep_empty_text=True,
    )
    stream = UtteranceStream(sources, options, no_tokens, workers=arguments.workers)
    normalization = arguments.normalization or "basic"
    blocks_of_clips: list[str] = []
    lines = LineFile(file) if file else None
    if lines is not None:
        lines.cut(0)

    def take_clip(clip_id: str, language: str, reference: str, hypothesis: str, counts: Any) -> None:
        if keep is not None:
            keep.append(Utterance(clip_id, language, reference, hypothesis))
        if arguments.bootstrap_by_id is not None and counts.clips:
            blocks_of_clips.extend(
                block_names([clip_id], arguments.bootstrap_by_id)
            )  # a wrong pattern fails here, not at the end
        if lines is not None:
            row = {"id": clip_id, "language": language, "reference": reference, "hypothesis": hypothesis}
            numbers = {"words": counts.words, "word_errors": counts.word_errors, "normalization": normalization}
            lines.append({**row, **numbers})

    started = time.perf_counter()
    clips = [s.clips for s in sources]
    total = sum(clips) if all(clips) else None
    if total is not None and arguments.max_samples >= 0:
        total = min(total, arguments.max_samples)
    board = score_stream(
        model,
        stream,
        normalization=normalization,
        description="evaluate",
        longest=arguments.chunk,
        total=total,
        on_clip=take_clip,
    )
    seconds = time.perf_counter() - started
    if lines is not None and not lines.sync():
        raise UserError(
            f"{file}: {len(lines.waiting)} lines could not be written. Make room, or name another file.", 1
        )
    if board.total.clips == 0:
        raise UserError(
            f"--data: {' '.join(arguments.data)} holds no clip that can be used ({len(board.quarantined)} in quarantine, "
            f"{board.left_out} without a reference).",
            1,
        )
    result = {
        "model": name,
        "data": arguments.data,
        "normalization": normalization,
        **board.result(),
        "left_out": board.left_out,
        "audio_seconds": board.audio_seconds,
        "decoding_seconds": board.decoding_seconds,
        "seconds": seconds,
        "rtfx": board.audio_seconds / board.decoding_seconds,
        "rtfx_whole": board.audio_seconds / seconds,
        "quarantined": board.quarantined,
        "filtered": board.filtered,
    }
    if arguments.bootstrap:
        blocks = None
        if arguments.bootstrap_by_id is not None:
            names, blocks = np.unique(blocks_of_clips, return_inverse=True)
            result["blocks"] = len(names)
        intervals = board.clip_counts.intervals(arguments.bootstrap, blocks)
        for language, found in intervals.pop("by_language").items():
            result["by_language"][language].update(found)
        result.update(intervals)
    return result


def compare_models(arguments: argparse.Namespace) -> dict[str, Any]:
    """Decodes the data with both models and compares them; the texts of both are held in memory."""
    files: list[Path | None] = [*arguments.utterances, None, None][:2]
    kept: list[list[Utterance]] = [[], []]
    names = (arguments.model, arguments.against)
    results = [evaluate(arguments, name, file, keep) for name, file, keep in zip(names, files, kept, strict=True)]
    comparison = compare_utterances(
        *kept,
        arguments.normalization or "basic",
        block_pattern=arguments.bootstrap_by_id,
        resamples=arguments.bootstrap,
    )
    return {"a": arguments.model, "b": arguments.against, **comparison, "models": results}


def compare_files(arguments: argparse.Namespace) -> dict[str, Any]:
    """Compares what two evaluations kept.

    Raises:
        UserError: they cannot be read, were scored differently, or have no clip in common.
    """
    (first, was_a), (second, was_b) = (read_utterances(path) for path in arguments.compare)
    if arguments.normalization is None and None not in (was_a, was_b) and was_a != was_b:
        raise UserError(
            f"--compare: {arguments.compare[0]} was scored with --normalization {was_a}, {arguments.compare[1]} with {was_b}. Say "
            "with --normalization which one both are to have; the texts in the files are as they were before it."
        )
    comparison = compare_utterances(
        first,
        second,
        arguments.normalization or was_a or was_b or "basic",
        block_pattern=arguments.bootstrap_by_id,
        resamples=arguments.bootstrap,
    )
    return {"a": str(arguments.compare[0]), "b": str(arguments.compare[1]), **comparison}


def print_table(result: dict[str, Any]) -> None:
    """The rates as an aligned table, the speed, and what was left out."""

    def percent(value: float | None) -> str:
        return "-" if value is None else f"{100 * value:.2f}"

    def interval(value: list[float] | None) -> str:
        return f"[{percent(value[0])}, {percent(value[1])}]" if value else "-"

    print(
        f"{'language':10} {'WER %':>7} {'95 %':>16} {'CER %':>7} {'95 %':>16} {'sub':>6} {'del':>6} {'ins':>6} {'words':>7} "
        f"{'clips':>6}"
    )
    for name, r in [*result["by_language"].items(), ("all", result)]:
        print(
            f"{one_line(name):10} {percent(r['wer']):>7} {interval(r.get('wer_interval')):>16} {percent(r['cer']):>7} "
            f"{interval(r.get('cer_interval')):>16} {r['substitutions']:6d} {r['deletions']:6d} {r['insertions']:6d} "
            f"{r['words']:7d} {r['clips']:6d}"
        )
    print(
        f"{result['audio_seconds']:.0f} s of audio: RTFx {result['rtfx']:.1f} decoding, {result['rtfx_whole']:.1f} with reading "
        "the data"
    )
    if "wer_interval" in result and result.get("blocks", result["clips"]) < FEW:
        print(f"with fewer than {FEW} clips or blocks intervals are too short")
    if result["left_out"]:
        print(f"{result['left_out']} clip(s) without a reference after normalisation are left out")
    if result["normalization"] == "open_asr" and "unknown" in result["by_language"]:
        print(f"{result['by_language']['unknown']['clips']} clip(s) name no language: normalised as English")
    if result["quarantined"]:
        first = result["quarantined"][0]
        print(
            f"{len(result['quarantined'])} clip(s) could not be used, such as {one_line(first['id'])}: {one_line(first['reason'])}"
        )


def main(argv: list[str] | None = None) -> int:
    """Runs the evaluation; returns the exit code."""
    set_up_logging()
    arguments = parse_arguments(argv)
    try:
        if arguments.compare:
            result = compare_files(arguments)
        elif arguments.against:
            result = compare_models(arguments)
        else:
            result = evaluate(arguments, arguments.model, *arguments.utterances)
    except (UserError, RuntimeError) as error:
        print_error(error)
        return getattr(error, "exit_code", 1)
    for one in result.get("models", [] if arguments.compare else [result]):
        print_table(one)
    if arguments.compare or arguments.against:
        print_comparison(result)
    if arguments.json:
        write_json(arguments.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
