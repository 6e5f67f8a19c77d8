"""What passes between host and device: each upload in one copy that nobody waits for, each answer in one transfer."""

import numpy as np
import torch


def upload(device: torch.device, *arrays: np.ndarray) -> list[torch.Tensor]:
    """Return arrays of whole numbers as int64 tensors on the device, by one copy out of page-locked memory."""
    packed = np.concatenate([a.ravel() for a in arrays]).astype(np.int64, copy=False)
    parts = send(device, torch.from_numpy(packed)).split([a.size for a in arrays])
    return [part.view(a.shape) for part, a in zip(parts, arrays)]


def send(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the host's on the device; a GPU copies it when it gets there, out of page-locked memory."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def counts(*masks: torch.Tensor) -> list[int]:
    """Return how many elements of each mask are set, by one transfer."""
    return torch.stack([mask.sum() for mask in masks]).cpu().tolist()


def on_host(*tensors: torch.Tensor) -> list[np.ndarray]:
    """Return tensors of whole numbers as int64 arrays; by one transfer where any of them is on a device."""
    if any(x.device.type != "cpu" for x in tensors):
        device = next(x.device for x in tensors if x.device.type != "cpu")
        packed = torch.cat([x.reshape(-1).to(device, torch.int64) for x in tensors]).cpu()
        tensors = tuple(x.view(y.shape) for x, y in zip(packed.split([x.numel() for x in tensors]), tensors))
    return [x.numpy().astype(np.int64, copy=False) for x in tensors]
