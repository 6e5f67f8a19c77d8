"""Averages the weights of models of one layout, such as those of several runs from the same base model.

    python -m finetune.average --models A.nemo B.nemo ... --output DIR [--data D] [--split test] [--json FILE]

Writes DIR/model.nemo: the mean of all weights and BatchNorm statistics, summed up in float32, with everything else from the first
model. The models have to have the same tensors and the same tokens. With --data each of them and the mean are evaluated.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch

from finetune.data.batching import BatchLimits
from finetune.data.options import StreamOptions
from finetune.data.sources import open_source, parse_sources
from finetune.data.stream import UtteranceStream
from finetune.data.utterances import no_tokens
from finetune.durable_files import write_json
from finetune.errors import UserError
from finetune.evaluation.recognise import score_stream
from finetune.logs import print_error, set_up_logging
from finetune.models.loading import load_model, move_to_device
from finetune.models.nemo_archive import save_nemo


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m finetune.average", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", required=True, nargs="+", metavar="M", help=".nemo files, run directories, adapters"
    )
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="directory for model.nemo")
    parser.add_argument(
        "--data", nargs="+", metavar="D", help="data sets on which the models and their mean are judged"
    )
    parser.add_argument("--split", default="test", help="split of a folder or hub data set (default: test)")
    parser.add_argument("--batch-size", type=int, default=16, help="clips decoded together")
    parser.add_argument("--normalization", default="basic", choices=("none", "lower", "basic"), help="of both texts")
    parser.add_argument("--max-samples", type=int, default=-1, help="only the first N clips")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="write the result here")
    arguments = parser.parse_args(argv)
    if len(arguments.models) < 2:
        parser.error("--models: a mean takes two models or more")
    if arguments.batch_size < 1:
        parser.error("--batch-size has to be 1 or more")
    return arguments


def difference(name: str, model: Any, first: str, tokens: list[str], shapes: dict[str, tuple[int, ...]]) -> str:
    """Why a model cannot be averaged with the first one; empty where it can.

    Args:
        name: of the model.
        first: name of the first one.
        tokens, shapes: of the first one.
    """
    ours, theirs = list(model.joint.vocabulary), {n: tuple(t.shape) for n, t in model.state_dict().items()}
    if ours != tokens:
        if len(ours) != len(tokens):
            return f"{name} has {len(ours)} tokens, {first} has {len(tokens)}"
        i = next(i for i, (a, b) in enumerate(zip(ours, tokens, strict=True)) if a != b)
        return (
            f"{name} and {first} have other tokenizers: token {i} is {ours[i]!r} in one and {tokens[i]!r} in the other"
        )
    if theirs != shapes:
        odd = sorted(n for n in {*theirs, *shapes} if theirs.get(n) != shapes.get(n))[0]
        return f"{name} and {first} have other layouts: {odd} is {theirs.get(odd, 'missing')} and {shapes.get(odd, 'missing')}"
    return ""


def average(names: list[str], judge: Any) -> tuple[Any, list[dict[str, Any]]]:
    """The mean as a model, and what `judge` says of each model.

    Args:
        names: of the models, as `model.name`.
        judge: model -> counts of errors, or None.

    Raises:
        UserError: the models are not of one layout.
    """
    sums: dict[str, torch.Tensor] = {}
    tokens: list[str] = []
    rows = []
    for name in names:
        model = load_model(name)
        state = {n: t.detach().clone() for n, t in model.state_dict().items()}
        if not sums:
            tokens, sums = list(model.joint.vocabulary), {n: t.float() for n, t in state.items()}
        else:
            why = difference(name, model, names[0], tokens, {n: tuple(t.shape) for n, t in sums.items()})
            if why:
                raise UserError(f"--models: {why}. Only models of one layout and one tokenizer have a mean.")
            for n, tensor in state.items():
                sums[n] += tensor.float()
        rows.append({"model": name, **judge(model)})
    model = load_model(names[0])
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():  # BatchNorm's count of batches stays the first model's
            tensor.copy_((sums[name] / len(names)).to(tensor.dtype))
    return model, [*rows, {"model": "mean", **judge(model)}]


def judge_on(arguments: argparse.Namespace) -> Any:
    """Model -> its error rates on --data; an empty mapping without."""

    def judge(model: Any) -> dict[str, Any]:
        if not arguments.data:
            return {}
        sources = [open_source(s, "--data") for s in parse_sources(list(arguments.data), "--data", arguments.split)]
        options = StreamOptions(
            limits=BatchLimits(clips=arguments.batch_size),
            sample_rate=model.preprocessor._sample_rate,
            shuffle=False,
            max_samples=arguments.max_samples,
            keep_empty_text=True,
        )
        stream = UtteranceStream(sources, options, no_tokens, workers=1)
        model = move_to_device(model, arguments.device)
        board = score_stream(model, stream, normalization=arguments.normalization, description="evaluate")
        if not board.total.words:
            raise UserError(f"--data: {' '.join(arguments.data)} holds no clip with words that can be used.", 1)
        model.cpu()
        return {name: board.total.rates()[name] for name in ("wer", "cer", "clips")}

    return judge


def write_mean(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Writes the mean, reads it again, and returns a row for each model."""
    path = arguments.output / "model.nemo"
    inputs = [p for name in arguments.models for p in (Path(name), Path(name) / "model.nemo") if p.is_file()]
    if path.exists() and any(path.samefile(p) for p in inputs):
        raise UserError(f"--output: {path} is one of the models. Name another directory.")
    model, rows = average(arguments.models, judge_on(arguments))
    aside = arguments.output / ".average.tmp.nemo"
    try:
        save_nemo(model, aside)
        again = load_model(str(aside)).state_dict()
        if not all(torch.equal(tensor, again[name]) for name, tensor in model.state_dict().items()):
            raise UserError(f"{path} read again has other weights; nothing was kept.", 1)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    return rows


def main(argv: list[str] | None = None) -> int:
    """Averages; returns the exit code."""
    set_up_logging()
    arguments = parse_arguments(argv)
    try:
        with torch.no_grad():
            rows = write_mean(arguments)
    except UserError as error:
        print_error(error)
        return error.exit_code
    for row in rows if arguments.data else ():
        print(f"{100 * row['wer']:7.2f} % WER {100 * row['cer']:7.2f} % CER on {row['clips']} clips  {row['model']}")
    path = arguments.output / "model.nemo"
    print(
        f"{path} ({path.stat().st_size / 1e6:.1f} MB): the mean of {len(arguments.models)} models, read again and equal"
    )
    if arguments.json:
        write_json(arguments.json, {"output": str(path), "models": rows, "data": arguments.data})
    return 0


if __name__ == "__main__":
    sys.exit(main())
