"""Cards by name: memory and published rates (the makers' data sheets, dense matrix products, 16-bit factors summed in
32 bits).
"""

import re
from dataclasses import dataclass, replace

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


# name: GiB that programs see (about), TFLOP/s in 16 bits, TFLOP/s in 32 bits, GB/s, GB/s between cards, has bf16
Rates = tuple[float, float, float, float, float, bool]
_CARDS: dict[str, Rates] = {
    "t4": (14.6, 65, 8.1, 320, 12, False),
    "v100-16gb": (15.8, 125, 15.7, 900, 130, False),
    "v100-32gb": (31.7, 125, 15.7, 900, 130, False),
    "rtx-3060": (11.8, 51, 12.7, 360, 12, True),
    "rtx-3090": (23.6, 71, 35.6, 936, 12, True),
    "rtx-4070-ti-super": (15.7, 88, 44.1, 672, 12, True),
    "rtx-4080": (15.7, 97, 48.7, 717, 12, True),
    "rtx-4090": (23.6, 165, 82.6, 1008, 12, True),
    "rtx-5090": (31.4, 209, 104.8, 1792, 25, True),
    "a10": (22.1, 125, 31.2, 600, 12, True),
    "a10g": (22.1, 70, 35.0, 600, 12, True),
    "l4": (22.0, 121, 30.3, 300, 12, True),
    "a6000": (47.4, 155, 38.7, 768, 28, True),
    "l40s": (44.4, 362, 91.6, 864, 12, True),
    "a100-40gb": (39.4, 312, 19.5, 1555, 300, True),
    "a100-80gb": (79.1, 312, 19.5, 2039, 300, True),
    "h100-pcie": (79.1, 756, 51, 2000, 60, True),
    "h100-80gb": (79.1, 989, 67, 3350, 450, True),
    "h200-141gb": (139.8, 989, 67, 4800, 450, True),
    "b200-180gb": (178.3, 2250, 80, 8000, 900, True),
}
# What a card of so many GB on the label shows to programs at least, GiB.
_SHOWN = {80: 79.1, 40: 39.4, 24: 22.0, 16: 14.6, 12: 11.7, 141: 139.8, 180: 178.3, 32: 31.4, 48: 44.4}


def _words(key: str) -> set[str]:
    """A card's name in words, without its memory."""
    return {word for word in key.split("-") if not re.fullmatch(r"\d+gb", word)}


def card_named(name: str) -> Card:
    """A card by its name, such as a100-80gb; the memory may be left out where there is one such card.

    Raises:
        UserError: none has that name, or several.
    """
    key = re.sub(r"[ _]+", "-", name.lower().strip())
    found = [k for k in _CARDS if k == key or "-".join(w for w in k.split("-") if w in _words(k)) == key]
    found = [k for k in found if k == key] or found
    if len(found) > 1:
        raise UserError(f"--gpu: {name} may be {' or '.join(found)}; give one of them.")
    if not found:
        raise UserError(
            f"--gpu: {name} is not in the list: {', '.join(_CARDS)}. Give its memory instead, such as --gpu-memory "
            "24GB."
        )
    rates = _CARDS[found[0]]
    return _card(found[0], rates[0] * GIB, rates)


def _card(name: str, memory: float, rates: Rates) -> Card:
    _, flops_16, flops_32, bandwidth, link, bf16 = rates
    return Card(name, memory, flops_16 * 1e12, flops_32 * 1e12, bandwidth * 1e9, link * 1e9, bf16)


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


def rates_of(name: str, memory: float) -> Rates | None:
    """Return the rates of a card that names itself, such as "NVIDIA A100-SXM4-80GB"; None where it is not listed."""
    words = set(re.findall(r"[a-z0-9]+", name.lower()))
    alike = [key for key in _CARDS if _words(key) <= words]
    alike.sort(key=lambda key: (-len(_words(key)), abs(_CARDS[key][0] * GIB - memory)))
    return _CARDS[alike[0]] if alike else None


def card_here() -> Card:
    """The GPU of this machine; without one its processor and memory."""
    if not torch.cuda.is_available():
        memory = psutil.virtual_memory().total
        return Card("the processor of this machine", memory, None, None, None, 5e9, is_gpu=False)
    properties = torch.cuda.get_device_properties(0)
    name, memory = properties.name, properties.total_memory
    rates = rates_of(name, memory)
    card = _card(name, memory, rates) if rates else Card(name, memory, None, None, None, 12e9)
    return replace(card, bf16=torch.cuda.is_bf16_supported())
