"""The optimizer's state in a DeepSpeed checkpoint that another number of processes wrote: put together, and dealt out anew.

Each process of a ZeRO run leaves a file with its part of the flattened state. DeepSpeed loads it with as many processes only; here every
process reads all parts, makes each parameter's tensors whole again, and DeepSpeed keeps what belongs to it.
"""

import logging
import math
import re
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger(__name__)

PARTS = "zero_pp_rank_*_mp_rank_00_optim_states.pt"
SHAPES = "zero_pp_rank_0_mp_rank_00_model_states.pt"


def redistribute(engine: Any, checkpoint: Path) -> int:
    """Fills the optimizer of a DeepSpeed engine from a checkpoint of any number of processes under the same ZeRO stage, in place.

    Args:
        engine: DeepSpeed's, whose parameters have the checkpoint's weights already.
        checkpoint: a whole checkpoint.

    Returns:
        Parameters that got their state.

    Raises:
        ValueError: the checkpoint holds no state for a parameter that is trained.
    """
    from deepspeed.utils import safe_set_full_optimizer_state

    folder = checkpoint / "pytorch_model"
    paths = sorted(folder.glob(PARTS), key=lambda p: int(re.findall(r"\d+", p.name)[0]))
    # DeepSpeed pickles classes of its own into these files; they are checked against the checkpoint's checksums.
    parts = [torch.load(p, map_location="cpu", weights_only=False, mmap=True)["optimizer_state_dict"] for p in paths]
    if not parts:
        raise ValueError("it holds no parts of the optimizer's state")
    if engine.zero_optimization_stage() == 3:
        shapes = torch.load(folder / SHAPES, map_location="cpu", weights_only=False, mmap=True)["param_shapes"]
        whole, steps = _of_stage_3(parts, shapes)
    else:
        whole, steps = _of_stage_1_and_2(parts)
    trained = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
    missing = sorted(set(trained) - set(whole))
    if missing:
        raise ValueError(f"it holds no state of the optimizer for {missing[0]}")
    for name, parameter in trained.items():
        shape = getattr(parameter, "ds_shape", parameter.shape)
        for key, flat in whole[name].items():
            safe_set_full_optimizer_state(parameter, flat.reshape(shape).to(engine.device), key)
    _set_steps(engine.optimizer.optimizer, steps)
    return len(trained)


def _tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What has an element for each weight; not the count of steps."""
    return {key: value for key, value in state.items() if torch.is_tensor(value) and value.numel() > 1}


def _of_stage_1_and_2(parts: list[dict[str, Any]]) -> tuple[dict[str, dict[str, torch.Tensor]], list[Any]]:
    """Each parameter's state by name and key, and the step of each group."""
    pieces: dict[str, dict[str, list[torch.Tensor]]] = {}
    for part in parts:
        for group, mapping in enumerate(part["param_slice_mappings"]):
            flats = _tensors(part["base_optimizer_state"]["state"][group])
            for name, place in mapping.items():
                for key, flat in flats.items():
                    found = pieces.setdefault(name, {}).setdefault(key, [])
                    found.append(flat.narrow(0, place.start, place.numel))
    states = parts[0]["base_optimizer_state"]["state"]
    return _joined(pieces), [states[group].get("step") for group in sorted(states)]


def _of_stage_3(
    parts: list[dict[str, Any]], shapes: list[dict[str, torch.Size]]
) -> tuple[dict[str, dict[str, torch.Tensor]], list[Any]]:
    """The same where each parameter is cut into as many equal pieces as there were processes, the last one padded."""
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
    states = parts[0]["optimizer_state_dict"]["state"]
    return _joined(pieces), [states[group].get("step") for group in sorted(states)]


def _joined(pieces: dict[str, dict[str, list[torch.Tensor]]]) -> dict[str, dict[str, torch.Tensor]]:
    return {name: {key: torch.cat(found) for key, found in state.items()} for name, state in pieces.items()}


def _set_steps(optimizer: Any, steps: list[Any]) -> None:
    """The count of steps, which corrects Adam's bias, in every state of the optimizer beneath DeepSpeed's."""
    for state, step in zip(optimizer.state.values(), steps * len(optimizer.state), strict=False):
        if step is not None and "step" in state:
            present = state["step"]
            state["step"] = torch.full_like(present, float(step)) if torch.is_tensor(present) else int(step)
