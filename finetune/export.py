"""Writes a trained model for use elsewhere, as a .nemo or as a directory that Hugging Face's transformers loads.

    python -m finetune.export --model M --to nemo --output DIR
    python -m finetune.export --model M --to hf --output DIR [--data D]

M: a .nemo file, a run's or an adapter's directory, or a hub name; with --to nemo also a Hugging Face directory or a NeMo model YAML.

What is written is checked before it counts. A .nemo is restored and has to give the source's weights and texts. A Hugging Face
directory is loaded by transformers and compared with NeMo on clips, single and batched: encoder and joint outputs, and texts. The clips
are the first of --data, else of the run's data.validation. The export itself needs no NeMo; the comparison uses it where it is installed.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch

from finetune.errors import UserError
from finetune.evaluation.recognise import evaluation_mode, recognise_batch
from finetune.logs import print_error, set_up_logging
from finetune.models.huggingface.writing import DTYPES
from finetune.models.loading import load_model
from finetune.models.nemo_archive import save_nemo
from finetune.tools.export.hugging_face import CLIPS, TOLERANCE, export_hugging_face, say_result


def export_nemo(model_name: str, output: Path, tokenizer: str | None = None) -> Path:
    """Writes `output`/model.nemo and compares it with its source.

    Raises:
        UserError: the file does not give the same encoder outputs and texts when it is read again.
    """
    path = output / "model.nemo"
    if path.exists() and any(
        path.samefile(p) for p in (Path(model_name), Path(model_name) / "model.nemo") if p.exists()
    ):
        raise UserError(f"--output: {path} is the model itself. Name another directory.")
    model = load_model(model_name, tokenizer)
    aside = output / ".export.tmp.nemo"
    try:
        save_nemo(model, aside)
        _compare(model, load_model(str(aside)), path)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    return path


def _compare(model: Any, again: Any, path: Path) -> None:
    """Raises UserError where the two do not have equal weights and texts."""
    rate = model.preprocessor._sample_rate
    audio_BS = torch.randn(2, 3 * rate, generator=torch.Generator().manual_seed(0)) * 0.1
    lengths_B = torch.tensor([3 * rate, 2 * rate])
    with evaluation_mode(model), evaluation_mode(again):
        texts = [[h.text for h in recognise_batch(m, audio_BS, lengths_B)] for m in (model, again)]
        weights = all(
            torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True)
        )
    if texts[0] != texts[1] or not weights:
        raise UserError(
            f"{path} read again is not the same model (texts {texts[0]} and {texts[1]}); nothing was kept.", 1
        )


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m finetune.export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        required=True,
        help="a .nemo file, a run's output directory, an adapter's or a Hugging Face directory, or a hub name",
    )
    parser.add_argument("--to", choices=("nemo", "hf"), default="nemo", help="format (default: nemo)")
    parser.add_argument("--output", type=Path, required=True, help="directory for the result")
    parser.add_argument("--tokenizer", help="tokenizer directory, for a NeMo model YAML")
    only = parser.add_argument_group("only with --to hf")
    only.add_argument(
        "--data", nargs="+", help=f"data whose first {CLIPS} clips are compared (default: the run's data.validation)"
    )
    only.add_argument("--split", default="validation", help="split of --data (default: validation)")
    only.add_argument(
        "--tolerance",
        type=float,
        default=TOLERANCE,
        help=f"largest difference of encoder and joint outputs, in parts of the largest value (default: {TOLERANCE:g})",
    )
    only.add_argument("--dtype", choices=DTYPES, default="float32", help="of the written weights (default: float32)")
    arguments = parser.parse_args(argv)
    if arguments.to == "nemo" and (arguments.data or arguments.dtype != "float32"):
        parser.error("--data and --dtype are for --to hf")
    if not arguments.tolerance > 0:
        parser.error("--tolerance has to be above 0")
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Runs the export; returns the exit code."""
    set_up_logging()
    arguments = parse_arguments(argv)
    try:
        if arguments.to == "hf":
            samples, agreement = export_hugging_face(
                arguments.model,
                arguments.output,
                data=arguments.data,
                split=arguments.split,
                tolerance=arguments.tolerance,
                dtype=arguments.dtype,
            )
            print(say_result(arguments.output, samples, agreement, arguments.tolerance, arguments.dtype))
            return 0
        path = export_nemo(arguments.model, arguments.output, arguments.tokenizer)
    except UserError as error:
        print_error(error)
        return error.exit_code
    print(f"{path} ({path.stat().st_size / 1e6:.1f} MB), read again and equal")
    return 0


if __name__ == "__main__":
    sys.exit(main())
