"""One model out of several: their mean, task vectors, TIES, and points between a base model and a tuned one."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from finetune.errors import UserError
from finetune.evaluation.batchnorm import estimate_batchnorm
from finetune.evaluation.dataset import EvaluationSettings, count_errors, open_sources
from finetune.models.adapters import LORA_KEY
from finetune.models.interpolation import State, weighted_mean, with_task_vectors, with_ties
from finetune.models.loading import load_model, move_to_device
from finetune.models.nemo import pieces_of
from finetune.models.vocabulary_rows import grown_like
from finetune.tools.export.nemo import output_file, write_checked

if TYPE_CHECKING:
    from collections.abc import Iterator

    from finetune.data.sources import OpenSource
    from finetune.models.protocols import AsrModel

EXAMPLES_OF_DIFFERENCES = 4


@dataclass(frozen=True)
class Recipe:
    """What is made of which models."""

    models: list[str]
    method: str = "mean"
    weights: list[float] = field(default_factory=list)
    """One for each model, or one for all; none: 1."""
    base: str | None = None
    density: float = 0.2
    batchnorm: str = "interpolate"

    @property
    def weight_of_each(self) -> list[float]:
        """The weights, one for each model."""
        weights = self.weights or [1.0]
        return weights * len(self.models) if len(weights) == 1 else weights

    @property
    def sources(self) -> list[str]:
        """All that is read, which nothing may replace."""
        named = [*self.models, *filter(None, [self.base])]
        return named + [str(run_of(name)) for name in named if run_of(name) is not None]

    def merge(self, states: Iterator[State], base: State | None) -> State:
        """Merge the states of the models, taken one after another."""
        if self.method == "mean":
            return weighted_mean(states, self.weight_of_each)
        assert base is not None
        if self.method == "task":
            return with_task_vectors(base, states, self.weight_of_each)
        return with_ties(base, states, self.weight_of_each, self.density)


class Judge:
    """Evaluates models on validation and guard data, where these are given."""

    def __init__(self, data: EvaluationSettings | None, guard: EvaluationSettings | None):
        self.data, self.guard = data, guard
        self.sources = {id(s): open_sources(s.data, s.split, key) for s, key in self._given()}

    def _given(self) -> list[tuple[EvaluationSettings, str]]:
        return [(s, key) for s, key in ((self.data, "--data"), (self.guard, "--guard")) if s is not None]

    @property
    def data_sources(self) -> list[OpenSource]:
        assert self.data is not None
        return self.sources[id(self.data)]

    def rates(self, model: AsrModel) -> dict[str, Any]:
        """Return wer, cer and clips on the data, and the same with `guard_` before them on the guard.

        Raises:
            UserError: a data set has no words.
        """
        found = {}
        for settings, key in self._given():
            counts = count_errors(move_to_device(model, settings.device), self.sources[id(settings)], settings).total
            if not counts.words:
                raise UserError(f"{key}: {' '.join(settings.data)} holds no clip with words that can be used.", 1)
            before = "guard_" if settings is self.guard else ""
            found |= {f"{before}{name}": counts.rates()[name] for name in ("wer", "cer", "clips")}
        model.cpu()
        return found

    def estimate_batchnorm(self, model: AsrModel) -> None:
        """Estimate BatchNorm's statistics anew on the data."""
        assert self.data is not None
        estimate_batchnorm(move_to_device(model, self.data.device), self.data_sources, self.data)
        model.cpu()


class Merger:
    """Makes the state that a recipe asks for. `model`, the first one, holds everything that is no weight."""

    def __init__(self, recipe: Recipe, judge: Judge):
        self.recipe, self.judge = recipe, judge
        self.model = load(recipe.models[0])
        self.new_pieces: list[str] = []
        """Of the tuned models, where they grew the base's vocabulary."""
        self.rows: list[dict[str, Any]] = []
        self.base = None if recipe.base is None else self._base_state(recipe.base)

    def _base_state(self, name: str) -> State:
        """Return the base model's weights, with the vocabulary of the first model."""
        base = load(name, "--base")
        state = base.state_dict()
        if pieces_of(base) != pieces_of(self.model) and (grown := grown_like(base, self.model)) is not None:
            state, self.new_pieces = grown
        else:
            _check_tokens(name, base, self.recipe.models[0], self.model, "--base")
        _check_layout(name, state, self.recipe.models[0], self.model.state_dict(), "--base")
        return state

    @torch.no_grad()
    def merged(self, rate: bool) -> State:
        """Return the merged weights; with `rate` each model gets a row of its rates."""
        return self.recipe.merge(self._states(rate), self.base)

    def _states(self, rate: bool) -> Iterator[State]:
        first = self.recipe.models[0]
        for i, name in enumerate(self.recipe.models):
            model = load(name) if i else self.model
            if i:
                _check_tokens(name, model, first, self.model)
                _check_layout(name, model.state_dict(), first, self.model.state_dict())
            if rate:
                self.rows.append({"model": name, **self.judge.rates(model)})
            yield model.state_dict()

    @torch.no_grad()
    def put(self, state: State, estimate: bool) -> None:
        """Put weights into `model`, with statistics of BatchNorm estimated anew or as they are in the state."""
        for name, tensor in self.model.state_dict().items():
            if tensor.is_floating_point():  # BatchNorm's count of batches stays the first model's
                tensor.copy_(state[name].to(tensor.dtype))
        if estimate:
            self.judge.estimate_batchnorm(self.model)


def write_average(recipe: Recipe, output: Path, judge: Judge) -> tuple[Path, list[dict[str, Any]]]:
    """Write what a recipe makes of its models as `output`/model.nemo.

    Returns:
        The file, and a row for each model and the result: model, and what `Judge.rates` finds.

    Raises:
        UserError: the models have different layouts, or the file would replace one of them.
    """
    path = output_file(output, recipe.sources)
    merger = Merger(recipe, judge)
    merger.put(merger.merged(rate=True), recipe.batchnorm == "estimate")
    rows = [*merger.rows, {"model": recipe.method, **judge.rates(merger.model)}]
    write_checked(merger.model, path)
    return path, rows


# ---- weights that a run keeps ---------------------------------------------------------------------------------------


def run_of(name: str) -> Path | None:
    """Return the directory of the run that keeps these weights; None where the name is that of a whole model."""
    folder = Path(name).absolute().parent.parent
    return folder.parent if name.endswith(".safetensors") and folder.name == "checkpoints" else None


@torch.no_grad()
def load(name: str, option: str = "--models") -> AsrModel:
    """Load a model, or the weights that a run keeps in its checkpoints (`training.average_checkpoints`): those of what
    it trains, with all else from its model.nemo.

    Args:
        option: that names it.

    Raises:
        UserError: the run has no model.nemo, or one of another layout, or the file cannot be read or holds factors.
    """
    run = run_of(name)
    if run is None:
        return load_model(name)
    whole = run / "model.nemo"
    if not whole.is_file():
        raise UserError(
            f"{option}: {name} holds what the run trains, and the rest comes from {whole}, which is not there. A run "
            "writes it at its end: let it go on to that."
        )
    try:
        kept = load_file(name)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{option}: {name} cannot be read: {error}.") from error
    if any(LORA_KEY.match(tensor) for tensor in kept):
        raise UserError(
            f"{option}: {name} holds the factors of LoRA, which model.nemo has in its weights, so that nothing tells "
            "what they are added to. Give whole models, such as the directories of LoRA runs."
        )
    model = load_model(str(whole))
    state = model.state_dict()
    _check_layout(name, kept, str(whole), {n: t for n, t in state.items() if n in kept}, option)
    for tensor, value in kept.items():
        state[tensor].copy_(value)
    return model


# ---- models that cannot be merged -----------------------------------------------------------------------------------


def _check_tokens(name: str, model: AsrModel, first: str, other: AsrModel, option: str = "--models") -> None:
    """Raise UserError where two models have other tokens."""
    ours, theirs = pieces_of(model), pieces_of(other)
    if ours == theirs:
        return
    if len(ours) != len(theirs):
        why = f"{name} has {len(ours)} tokens, {first} has {len(theirs)}"
        odd = next((piece for piece in ours if piece not in set(theirs)), None)
        why += f"; {odd!r} is a token of the former alone" if odd is not None else ""
    else:
        places = [i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b]
        i = places[0]
        why = (
            f"{name} and {first} have other tokenizers: {len(places)} of {len(ours)} tokens differ, such as token "
            f"{i}, {ours[i]!r} in one and {theirs[i]!r} in the other"
        )
    raise UserError(
        f"{option}: {why}. Only models of one layout and one tokenizer can be merged; --base may have a vocabulary "
        "that the models have grown."
    )


def _check_layout(name: str, state: State, first: str, other: State, option: str = "--models") -> None:
    """Raise UserError where two models have other tensors."""
    ours, theirs = ({n: tuple(t.shape) for n, t in tensors.items()} for tensors in (state, other))
    odd = sorted(n for n in {*ours, *theirs} if ours.get(n) != theirs.get(n))
    if not odd:
        return

    def size(shapes: dict[str, tuple[int, ...]], tensor: str) -> str:
        return str(shapes[tensor]) if tensor in shapes else "missing"

    lines = [f"{n} is {size(ours, n)} and {size(theirs, n)}" for n in odd[:EXAMPLES_OF_DIFFERENCES]]
    more = f"; and {len(odd) - len(lines)} more" if len(odd) > len(lines) else ""
    raise UserError(
        f"{option}: {name} and {first} have other layouts: {len(odd)} of {len({*ours, *theirs})} tensors differ: "
        f"{'; '.join(lines)}{more}. Only models of one layout and one tokenizer can be merged."
    )
