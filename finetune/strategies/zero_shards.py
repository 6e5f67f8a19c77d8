"""Reshard the optimizer's state of a ZeRO checkpoint that another number of processes wrote.

Each process of a ZeRO run leaves a file with its part of the flattened state, which DeepSpeed loads only with as many
processes. Here every process reads all parts, assembles each parameter's tensors, and takes its own part of them.
DeepSpeed's universal checkpoint would write a converted copy of the whole checkpoint with the full unpickler, has to
be chosen before the engine is made, and does not continue ZeRO-3 with the same losses (0.19.8).
"""

import copy
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

PARTS = "zero_pp_rank_*_mp_rank_00_optim_states.pt"
SHAPES = "zero_pp_rank_0_mp_rank_00_model_states.pt"

States: TypeAlias = dict[str, dict[str, torch.Tensor]]
"""The optimizer's tensors of each parameter, flat, by name and key."""
Place: TypeAlias = tuple[torch.nn.Parameter, int, int, int]
"""Which part of a parameter this process keeps: its beginning in the flat tensor and in the parameter, its length."""


def redistribute(engine: "DeepSpeedEngine", checkpoint: Path) -> int:
    """Fill the optimizer of a DeepSpeed engine from a checkpoint of any number of processes under the same ZeRO stage.

    Args:
        engine: DeepSpeed's, whose parameters have the checkpoint's weights already.

    Returns:
        The number of parameters whose state was found.

    Raises:
        ValueError: the checkpoint holds no state for a parameter that is trained.
    """
    folder = checkpoint / "pytorch_model"
    paths = sorted(folder.glob(PARTS), key=lambda p: int(re.findall(r"\d+", p.name)[0]))
    parts = [_load(p)["optimizer_state_dict"] for p in paths]
    if not parts:
        raise ValueError("it holds no parts of the optimizer's state")
    cut_each = engine.zero_optimization_stage() == 3
    if cut_each:
        whole, step = _of_stage_3(parts, _load(folder / SHAPES)["param_shapes"])
    else:
        whole, step = _of_stage_1_and_2(parts)
    names = {id(p): name for name, p in cast(torch.nn.Module, engine.module).named_parameters() if p.requires_grad}
    missing = sorted(set(names.values()) - set(whole))
    if missing:
        raise ValueError(f"it holds no state of the optimizer for {missing[0]}")
    zero: Any = engine.optimizer  # of another class for each stage
    groups = zero.fp16_groups if cut_each else zero.bit16_groups
    flats = zero.fp32_partitioned_groups_flat if cut_each else zero.single_partition_of_fp32_groups
    places = _places_of_stage_3 if cut_each else _places_of_stage_1_and_2
    for group, flat in zip(groups, flats, strict=True):
        # DeepSpeed makes these tensors in the first step; what is there by then is taken.
        state = {key: torch.zeros_like(flat, requires_grad=False) for key in whole[names[id(group[0])]]}
        for parameter, here, there, numel in places(group):
            for key, full in whole[names[id(parameter)]].items():
                state[key].narrow(0, here, numel).copy_(full.narrow(0, there, numel))
        zero.optimizer.state[flat] = state if step is None else {**state, "step": copy.deepcopy(step)}
    return len(names)


def _load(path: Path) -> dict[str, Any]:
    """Load a file of DeepSpeed's; only the few classes that it writes into them are unpickled."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    with torch.serialization.safe_globals([DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]):
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def _places_of_stage_1_and_2(group: list[Any]) -> Iterator[Place]:
    for parameter in group:
        fragment = parameter._hp_mapping  # None where all of it belongs to other processes
        if fragment is not None:
            own, of_whole = fragment.hp_fragment_address, fragment.lp_fragment_address
            yield parameter, own.start, of_whole.start, own.numel


def _places_of_stage_3(group: list[Any]) -> Iterator[Place]:
    """Each process keeps an equal piece of every parameter, the last one padded."""
    rank, here = torch.distributed.get_rank(), 0
    for parameter in group:
        piece = parameter.partition_numel()
        there = min(rank * piece, parameter.ds_numel)
        yield parameter, here, there, min(piece, parameter.ds_numel - there)
        here += piece


def _tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors with an element for each weight, without the count of steps."""
    return {key: value for key, value in state.items() if torch.is_tensor(value) and value.numel() > 1}


def _of_stage_1_and_2(parts: list[dict[str, Any]]) -> tuple[States, Any]:
    """Assemble the state of each parameter; return it with the optimizer's count of steps."""
    pieces: dict[str, dict[str, list[torch.Tensor]]] = {}
    for part in parts:
        for group, mapping in enumerate(part["param_slice_mappings"]):
            flats = _tensors(part["base_optimizer_state"]["state"][group])
            for name, place in mapping.items():
                for key, flat in flats.items():
                    found = pieces.setdefault(name, {}).setdefault(key, [])
                    found.append(flat.narrow(0, place.start, place.numel))
    return _joined(pieces), parts[0]["base_optimizer_state"]["state"][0].get("step")


def _of_stage_3(parts: list[dict[str, Any]], shapes: list[dict[str, torch.Size]]) -> tuple[States, Any]:
    """The same, each parameter cut into as many equal pieces as there were processes, the last one padded."""
    pieces: dict[str, dict[str, list[torch.Tensor]]] = {}
    for rank, part in enumerate(parts):
        for group, names in enumerate(shapes):
            flats = _tensors(part["optimizer_state_dict"]["state"][group])
            offset = 0
            for name, shape in names.items():
                numel = math.prod(shape)
                piece = math.ceil(numel / len(parts))
                filled = max(0, min(piece, numel - rank * piece))
                for key, flat in flats.items():
                    pieces.setdefault(name, {}).setdefault(key, []).append(flat.narrow(0, offset, filled))
                offset += piece
    return _joined(pieces), parts[0]["optimizer_state_dict"]["state"][0].get("step")


def _joined(pieces: dict[str, dict[str, list[torch.Tensor]]]) -> States:
    return {name: {key: torch.cat(found) for key, found in state.items()} for name, state in pieces.items()}
