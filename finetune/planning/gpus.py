"""Cards by name: memory and published rates (the makers' data sheets, dense matrix products, 16-bit factors summed in 32 bits)."""

import re
from dataclasses import dataclass

import psutil
import torch

from finetune.errors import UserError

GIB = 2**30
# What a card's driver, CUDA context and libraries take before the first tensor.
CONTEXT = 0.8 * GIB
# The allocator cannot use every hole.
USABLE = 0.95


@dataclass(frozen=True)
class Card:
    """A GPU, or this machine's processor."""

    name: str
    memory: float
    """Bytes that the card says it has."""
    flops_16: float | None
    """Matrix products a second with 16-bit factors; None where nothing is known of its speed."""
    flops_32: float | None
    bandwidth: float | None
    """Bytes a second of its memory."""
    link: float
    """Bytes a second to another card of the same machine."""
    bf16: bool = True
    is_gpu: bool = True

    @property
    def usable(self) -> float:
        """Bytes for tensors."""
        return self.memory * 0.9 if not self.is_gpu else (self.memory - CONTEXT) * USABLE


# name: GB, TFLOP/s in 16 bits, TFLOP/s in 32 bits, GB/s, GB/s between cards, has bf16
_CARDS = {
    "t4": (16, 65, 8.1, 320, 12, False),
    "v100-16gb": (16, 125, 15.7, 900, 130, False),
    "v100-32gb": (32, 125, 15.7, 900, 130, False),
    "rtx-3060": (12, 51, 12.7, 360, 12, True),
    "rtx-3090": (24, 71, 35.6, 936, 12, True),
    "rtx-4070-ti-super": (16, 88, 44.1, 672, 12, True),
    "rtx-4080": (16, 97, 48.7, 717, 12, True),
    "rtx-4090": (24, 165, 82.6, 1008, 12, True),
    "rtx-5090": (32, 209, 104.8, 1792, 25, True),
    "a10": (24, 125, 31.2, 600, 12, True),
    "l4": (24, 121, 30.3, 300, 12, True),
    "a6000": (48, 155, 38.7, 768, 28, True),
    "l40s": (48, 362, 91.6, 864, 12, True),
    "a100-40gb": (40, 312, 19.5, 1555, 300, True),
    "a100-80gb": (80, 312, 19.5, 2039, 300, True),
    "h100-pcie": (80, 756, 51, 2000, 60, True),
    "h100-80gb": (80, 989, 67, 3350, 450, True),
    "h200-141gb": (141, 989, 67, 4800, 450, True),
    "b200-180gb": (180, 2250, 80, 8000, 900, True),
}
# What a card of so many GB on the label shows to programs, GiB; others show what the label says in GiB.
_SHOWN = {80: 79.2, 40: 39.4, 24: 23.6, 16: 15.7, 12: 11.7, 141: 139.8, 180: 178.0, 32: 31.7, 48: 47.4}


def card_named(name: str) -> Card:
    """A card by its name, such as a100-80gb.

    Raises:
        UserError: none has that name.
    """
    key = name.lower().replace("_", "-").replace(" ", "-")
    key = next((k for k in _CARDS if key in (k, k.rsplit("-", 1)[0]) or key == k.replace("-", "")), key)
    if key not in _CARDS:
        raise UserError(
            f"--gpu: {name} is not in the list: {', '.join(_CARDS)}. Give its memory instead, such as --gpu-memory 24GB."
        )
    gb, flops_16, flops_32, bandwidth, link, bf16 = _CARDS[key]
    return Card(key, _SHOWN[gb] * GIB, flops_16 * 1e12, flops_32 * 1e12, bandwidth * 1e9, link * 1e9, bf16)


def card_with_memory(text: str) -> Card:
    """A card of which only the memory is known, such as 24GB or 23.5GiB.

    Raises:
        UserError: no size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(GB|GiB|G)?\s*", text, re.IGNORECASE)
    if match is None or float(match[1]) <= 0:
        raise UserError(f"--gpu-memory: {text!r} is no size; write it as 24GB or 23.6GiB.")
    size, unit = float(match[1]), (match[2] or "GB").lower()
    memory = size * GIB if unit == "gib" else _SHOWN.get(int(size), size) * GIB
    return Card(f"a GPU of {size:g} {match[2] or 'GB'}", memory, None, None, None, 12e9)


def card_here() -> Card:
    """The GPU of this machine; without one its processor and memory."""
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        short = properties.name.lower().replace("nvidia", "").replace("geforce", "").strip().replace(" ", "-")
        known = next((k for k in sorted(_CARDS, key=len, reverse=True) if k.split("-gb")[0] in short), None)
        known = known or next((k for k in _CARDS if k.rsplit("-", 1)[0] in short), None)
        rates = _CARDS[known] if known else None
        return Card(
            properties.name,
            properties.total_memory,
            rates and rates[1] * 1e12,
            rates and rates[2] * 1e12,
            rates and rates[3] * 1e9,
            rates[4] * 1e9 if rates else 12e9,
            torch.cuda.is_bf16_supported(),
        )
    return Card("the processor of this machine", psutil.virtual_memory().total, None, None, None, 5e9, is_gpu=False)
