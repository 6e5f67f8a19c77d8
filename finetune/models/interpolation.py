"""Weights between, and out of, the weights of several models: a point on the way, a mean, task vectors, TIES.

A state is a model's weights by name. Sums are made in float32. Task vectors are weights minus those of the base model.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch

State = dict[str, torch.Tensor]


def is_statistic(name: str) -> bool:
    """Return whether a tensor is a running mean or variance of BatchNorm, and no weight."""
    return name.endswith((".running_mean", ".running_var"))


def on_the_way(base: torch.Tensor, tuned: torch.Tensor, way: float, least: float = 0.0) -> torch.Tensor:
    """Return (1 - way) base + way tuned, in the type and on the device of `tuned`, which is not changed.

    At 0 and 1 it is exactly either end. Whole numbers, such as counts, are those of `tuned`.

    Args:
        least: values that have changed by less stay those of the base.
    """
    if not tuned.is_floating_point() or (way == 1 and not least):
        return tuned
    base = base.to(tuned.device)
    if way == 0:
        return base.to(tuned.dtype)
    start, end = base.float(), tuned.float()
    if least:
        end = torch.where((end - start).abs() >= least, end, start)
    return torch.lerp(start, end, way).to(tuned.dtype)


def least_of_largest(base: State, tuned: State, density: float, sample: int = 2**24) -> float:
    """Return the magnitude from which on changes of the weights are among the `density` largest of all, from `sample`
    of them at most, evenly spread."""
    names = [name for name, tensor in tuned.items() if tensor.is_floating_point() and not is_statistic(name)]
    every = 1 + sum(tuned[name].numel() for name in names) // sample
    changes = [(tuned[n].flatten()[::every].float() - base[n].flatten()[::every].float()).abs() for n in names]
    changes_N = torch.cat(changes)
    kept = max(1, round(density * len(changes_N)))
    return float(changes_N.kthvalue(len(changes_N) - kept + 1).values)


def lora_start(name: str, base: Mapping[str, torch.Tensor]) -> bool:
    """Return whether `name` is the first factor of a LoRA update that is zero in the base, its second factor being so.

    The update at a point is then `way` times that of the tuned model with the first factor as it is: factors that both
    move would make it way squared times.
    """
    second = base.get(name.replace(".lora_A.", ".lora_B."))
    return ".lora_A." in name and second is not None and not second.any()


def weighted_mean(states: Iterable[State], weights: Sequence[float]) -> State:
    """Return the mean of states, weighted by `weights` over their sum. Whole numbers are those of the first.

    States are taken one after another, so that a generator needs memory for one.
    """
    merged: State = {}
    for state, weight in zip(states, weights, strict=True):
        share = weight / sum(weights)
        for name, tensor in state.items():
            if name not in merged:
                merged[name] = share * tensor.float() if tensor.is_floating_point() else tensor.clone()
            elif tensor.is_floating_point():
                merged[name] += share * tensor.float()
    return merged


def with_task_vectors(base: State, states: Iterable[State], weights: Sequence[float]) -> State:
    """Return base + sum of w_i (state_i - base) (Ilharco et al., "Editing Models with Task Arithmetic", arXiv
    2212.04089), states one after another. A variance of BatchNorm is never less than the least of the models'."""
    merged = {name: start.float() if start.is_floating_point() else start for name, start in base.items()}
    least = {name: start.clone() for name, start in merged.items() if name.endswith(".running_var")}
    for state, weight in zip(states, weights, strict=True):
        for name, start in base.items():
            if start.is_floating_point():
                merged[name] = merged[name] + weight * (state[name].float() - start.float())
            if name in least:
                least[name] = torch.minimum(least[name], state[name].float())
    return merged | {name: torch.maximum(merged[name], variance) for name, variance in least.items()}


def with_ties(base: State, states: Iterable[State], weights: Sequence[float], density: float) -> State:
    """Return base plus the task vectors merged by TIES (Yadav et al., "TIES-Merging", arXiv 2306.01708, algorithm 1):
    each is trimmed to its largest values, the sign of the larger sum of each weight is elected, and the values of that
    sign are averaged, each times its `weights`.

    Running statistics of BatchNorm are no weights: they are added up as by `with_task_vectors`, with `weights` over
    the number of models.

    Args:
        density: share of the values of a task vector that stays, over all its tensors together as in the paper.
    """
    # PEFT's `ties` trims each tensor for itself; signs and mean are the paper's.
    from peft.utils.merge_utils import calculate_majority_sign_mask, disjoint_merge

    states = list(states)
    names = [name for name, start in base.items() if start.is_floating_point() and not is_statistic(name)]
    rest = {name: start for name, start in base.items() if name not in set(names)}
    merged = with_task_vectors(rest, states, [w / len(states) for w in weights])
    bounds = [least_of_largest(base, state, density) for state in states]
    factors = torch.tensor(list(weights))
    for name in names:
        start = base[name].float()
        steps = torch.stack([state[name].float() - start for state in states])
        bound = torch.tensor(bounds).view(-1, *[1] * start.dim())
        steps = torch.where(steps.abs() >= bound, steps, torch.zeros(()))
        elected = calculate_majority_sign_mask(steps)
        merged[name] = start + disjoint_merge(steps * factors.view(bound.shape), elected)
    return {name: merged[name] for name in base}
