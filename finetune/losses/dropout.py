"""Dropout masks that can be made again for any subset of lattice cells, on any device.

Shape suffixes: N lattice cells, H hidden.

The mask of an element is a hash of (seed, cell number, hidden unit), so neither the block size nor the cells that
backward leaves out change it. The hash is lowbias32 (Chris Wellons, public domain), two rounds of xor-shift and
multiply on 32-bit numbers.
"""

import numpy as np
import torch

from finetune.losses.compiled import compiled


def draw_seed() -> int:
    """Draw the seed of one call's masks from torch's global CPU generator."""
    return int(torch.randint(2**31 - 1, ()))


def threshold_of(probability: float) -> int:
    """Hashes below this, of 2^32, drop their element."""
    return min(int(probability * 2**32), 2**32 - 1)


def dropout_mask(cell_N: torch.Tensor, H: int, probability: float, seed: int) -> torch.Tensor:
    """(N, H) bool, True where the element is kept.

    Args:
        cell_N: (N,) int64 numbers of the cells.
        H: hidden units of a cell.
        probability: with which an element is dropped, 0 <= probability < 1.
        seed: below 2^31.
    """
    threshold = threshold_of(probability)
    if cell_N.device.type != "cpu":
        return torch_mask(cell_N, H, threshold, seed)
    mask_NH = torch.empty(cell_N.shape[0], H, dtype=torch.bool)
    _fill_mask(cell_N.contiguous().numpy(), np.uint32(threshold), np.uint32(seed), mask_NH.numpy())
    return mask_NH


def torch_mask(cell_N: torch.Tensor, H: int, threshold: int, seed: int) -> torch.Tensor:
    low = 0xFFFFFFFF
    row_N1 = _mix(((cell_N ^ (cell_N >> 32)) & low) ^ seed)[:, None]
    column_H = _mix(torch.arange(H, device=cell_N.device) ^ 0x9E3779B9 ^ seed)
    return _mix(row_N1 ^ column_H) >= threshold


def _mix(x: torch.Tensor) -> torch.Tensor:
    """lowbias32 on int64 that holds 32-bit numbers: products stay below 2^63."""
    low = 0xFFFFFFFF
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & low
    x = x ^ (x >> 15)
    # 0x846CA68B needs 32 bits: split it so that no product reaches 2^63.
    x = (((x * 0x846C) & 0xFFFF) * 0x10000 + x * 0xA68B) & low
    return x ^ (x >> 16)


@compiled
def _mix32(x):
    """`_mix` on uint32, which drops what does not fit."""
    x = np.uint32(x ^ (x >> np.uint32(16)))
    x = np.uint32(x * np.uint32(0x7FEB352D))
    x = np.uint32(x ^ (x >> np.uint32(15)))
    x = np.uint32(x * np.uint32(0x846CA68B))
    return np.uint32(x ^ (x >> np.uint32(16)))


@compiled
def _fill_mask(cell_N, threshold, seed, mask_NH):
    """`torch_mask` in one pass."""
    N, H = mask_NH.shape
    column_H = np.empty(H, dtype=np.uint32)
    for h in range(H):
        column_H[h] = _mix32(np.uint32(np.uint32(h) ^ np.uint32(0x9E3779B9) ^ seed))
    for n in range(N):
        row = _mix32(np.uint32(np.uint32(cell_N[n] ^ (cell_N[n] >> 32)) ^ seed))
        for h in range(H):
            mask_NH[n, h] = _mix32(np.uint32(row ^ column_H[h])) >= threshold
