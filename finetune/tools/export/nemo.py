"""Write a model as a .nemo file, kept only if it is the same model when it is read again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from finetune.errors import UserError
from finetune.evaluation.recognise import evaluation_mode, recognise_batch
from finetune.models.loading import load_model, load_option
from finetune.models.nemo_archive import save_nemo
from finetune.tools.command_line import check_folder, writing
from finetune.training.checkpoints import CANNOT_WRITE

if TYPE_CHECKING:
    from finetune.models.protocols import AsrModel

SHOWN = 60
"""Characters of a text in a message."""


def output_file(output: Path, models: list[str]) -> Path:
    """`output`/model.nemo.

    Raises:
        UserError: that is the file of one of the models, or nothing can be written there.
    """
    check_folder("--output", output)
    path = output / "model.nemo"
    if path.is_dir():
        raise UserError(f"--output: {path} is a directory. Name another one, or remove it.")
    for name in models:
        for source in (Path(name), Path(name) / "model.nemo"):
            if path.is_file() and source.is_file() and path.samefile(source):
                which = "the model itself" if len(models) == 1 else "one of the models"
                raise UserError(f"--output: {path} is {which}. Name another directory.")
    return path


def write_checked(model: AsrModel, path: Path) -> None:
    """Write a .nemo file, and put it in place if it has the same weights and texts when it is read again.

    Raises:
        UserError: it has not, or cannot be written.
    """
    aside = path.with_name(f".{path.stem}.tmp.nemo")
    try:
        _save(model, aside, path)
        _compare(model, load_model(str(aside)), path)
        with writing("--output", path):
            os.replace(aside, path)
    finally:
        for remains in path.parent.glob(f".*{aside.name}*"):
            remains.unlink(missing_ok=True)
        aside.unlink(missing_ok=True)


def _save(model: AsrModel, aside: Path, path: Path) -> None:
    try:
        save_nemo(model, aside)
    except torch.OutOfMemoryError:
        raise
    except CANNOT_WRITE as error:
        raise UserError(f"--output: {path} cannot be written: {error}. Nothing was kept.", exit_code=1) from error


def _compare(model: AsrModel, again: AsrModel, path: Path) -> None:
    rate = model.preprocessor._sample_rate
    audio_BS = torch.randn(2, 3 * rate, generator=torch.Generator().manual_seed(0)) * 0.1
    lengths_B = torch.tensor([3 * rate, 2 * rate])
    with evaluation_mode(model), evaluation_mode(again):
        texts, texts_again = ([h.text for h in recognise_batch(m, audio_BS, lengths_B)] for m in (model, again))
    weights, weights_again = model.state_dict(), again.state_dict()
    equal = weights.keys() == weights_again.keys() and all(
        torch.equal(t, weights_again[n]) for n, t in weights.items()
    )
    differ = [f"it writes {a[:SHOWN]!r}, not {b[:SHOWN]!r}" for a, b in zip(texts_again, texts, strict=True) if a != b]
    if differ or not equal:
        why = differ[0] if differ else "its weights differ"
        raise UserError(f"{path} read again is not the same model: {why}. Nothing was kept.", 1)


def export_nemo(model_name: str, output: Path, tokenizer: str | None = None) -> Path:
    """Write a model as `output`/model.nemo.

    Raises:
        UserError: the file does not give the same texts when it is read again.
    """
    path = output_file(output, [model_name])
    write_checked(load_option(model_name, tokenizer), path)
    return path
