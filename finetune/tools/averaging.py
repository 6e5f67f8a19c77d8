"""The mean of several models' weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from finetune.errors import UserError
from finetune.evaluation.dataset import EvaluationSettings, count_errors, open_sources
from finetune.models.loading import load_model, move_to_device
from finetune.models.nemo import pieces_of
from finetune.tools.export.nemo import output_file, write_checked

if TYPE_CHECKING:
    from pathlib import Path

    from finetune.data.sources import OpenSource
    from finetune.models.protocols import AsrModel


def write_mean(
    names: list[str], output: Path, settings: EvaluationSettings | None
) -> tuple[Path, list[dict[str, Any]]]:
    """Write the mean of models as `output`/model.nemo.

    Returns:
        The file, and a row for each model and the mean: model, and wer, cer and clips with settings to evaluate.

    Raises:
        UserError: the models have different layouts, or the file would replace one of them.
    """
    path = output_file(output, names)
    sources = open_sources(settings.data, settings.split) if settings else []
    sums: dict[str, torch.Tensor] = {}
    tokens: list[str] = []
    rows = []
    with torch.no_grad():
        for name in names:
            model = load_model(name)
            state = model.state_dict()
            if not sums:
                tokens, sums = pieces_of(model), {n: t.float().clone() for n, t in state.items()}
            else:
                _check_layout(name, model, names[0], tokens, sums)
                for n, tensor in state.items():
                    sums[n] += tensor.float()
            rows.append({"model": name, **_rates(model, sources, settings)})
        mean = load_model(names[0])
        for name, tensor in mean.state_dict().items():
            if tensor.is_floating_point():  # BatchNorm's count of batches stays the first model's
                tensor.copy_((sums[name] / len(names)).to(tensor.dtype))
        rows.append({"model": "mean", **_rates(mean, sources, settings)})
        write_checked(mean, path)
    return path, rows


def _check_layout(name: str, model: AsrModel, first: str, tokens: list[str], tensors: dict[str, torch.Tensor]) -> None:
    """Raise UserError where a model has other tokens or tensors than the first one."""
    ours = pieces_of(model)
    shapes, theirs = ({n: tuple(t.shape) for n, t in state.items()} for state in (tensors, model.state_dict()))
    if len(ours) != len(tokens):
        why = f"{name} has {len(ours)} tokens, {first} has {len(tokens)}"
    elif ours != tokens:
        i, a, b = next((i, a, b) for i, (a, b) in enumerate(zip(ours, tokens, strict=True)) if a != b)
        why = f"{name} and {first} have other tokenizers: token {i} is {a!r} in one and {b!r} in the other"
    elif theirs != shapes:
        odd = min(n for n in {*theirs, *shapes} if theirs.get(n) != shapes.get(n))
        sizes = f"{odd} is {theirs.get(odd, 'missing')} and {shapes.get(odd, 'missing')}"
        why = f"{name} and {first} have other layouts: {sizes}"
    else:
        return
    raise UserError(f"--models: {why}. Only models of one layout and one tokenizer have a mean.")


def _rates(model: AsrModel, sources: list[OpenSource], settings: EvaluationSettings | None) -> dict[str, Any]:
    if settings is None:
        return {}
    counts = count_errors(move_to_device(model, settings.device), sources, settings).total
    if not counts.words:
        raise UserError(f"--data: {' '.join(settings.data)} holds no clip with words that can be used.", 1)
    model.cpu()
    return {name: counts.rates()[name] for name in ("wer", "cer", "clips")}
