"""Writes a trained model for use elsewhere.

    python -m finetune.export --model M --to nemo --output DIR

The .nemo is checked before it counts: plain NeMo restores it, and its texts on a test signal equal the source model's.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch

from finetune.errors import UserError
from finetune.evaluation.recognise import evaluation_mode, recognise_batch
from finetune.logs import set_up_logging
from finetune.models.nemo import load_model, save_nemo


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


def main(argv: list[str] | None = None) -> int:
    """Runs the export; returns the exit code."""
    set_up_logging()
    parser = argparse.ArgumentParser(
        prog="python -m finetune.export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a .nemo file, a run's output directory, or a hub name")
    parser.add_argument("--to", choices=("nemo",), default="nemo", help="format")
    parser.add_argument("--output", type=Path, required=True, help="directory for the result")
    parser.add_argument("--tokenizer", help="tokenizer directory, for a NeMo model YAML")
    arguments = parser.parse_args(argv)
    try:
        path = export_nemo(arguments.model, arguments.output, arguments.tokenizer)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(f"{path} ({path.stat().st_size / 1e6:.1f} MB), read again and equal")
    return 0


if __name__ == "__main__":
    sys.exit(main())
