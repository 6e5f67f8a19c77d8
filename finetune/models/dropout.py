"""Dropout on a CPU: torch's own masks, drawn several times as fast.

Where torch has no vectorised generator for it (it has MKL's, for Intel's processors alone), it draws a mask element by
element, which is a tenth of a training step. Here the same numbers of the same Mersenne Twister (Matsumoto and
Nishimura, ACM TOMACS 1998) are drawn in blocks: masks, losses and torch's random state stay as they are, bit for bit.
"""

import math
import types

import numpy as np
import torch
from torch import nn

from finetune.losses.compiled import compiled

WORDS, SHIFT = 624, 397  # of the Mersenne Twister
_STATE = slice(24, 24 + 8 * WORDS)  # its words in the bytes of torch's random state, 64 bits each
_LEFT, _NEXT = slice(8, 12), slice(16, 24)  # where it stands among them


def use_fast_dropout(model: nn.Module) -> int:
    """Let the dropout modules of a model on a CPU draw their masks in blocks, in place, if these are torch's masks on
    this machine; return their number."""
    layers = [module for module in model.modules() if type(module) is nn.Dropout and module.p > 0]
    if not layers or not draws_as_torch():
        return 0
    for layer in layers:
        layer.forward = types.MethodType(_dropout, layer)
    return len(layers)


def draws_as_torch() -> bool:
    """Return whether `bernoulli` and torch leave the same numbers and the same random state."""
    found = []
    with torch.random.fork_rng(devices=[]):
        for draw in (lambda x: x.bernoulli_(0.9).div_(0.9), lambda x: bernoulli(x, 0.9)):
            torch.manual_seed(1)
            torch.rand(1)  # the words of a number then lie in two blocks
            found.append((draw(torch.empty(2 * WORDS)), torch.get_rng_state()))
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def bernoulli(noise: torch.Tensor, kept: float) -> torch.Tensor:
    """Fill a float32 tensor without gaps, in the order of its memory, with 1 / kept where torch would keep an element
    with this probability, else 0; return it."""
    state = torch.get_rng_state()
    bytes_ = state.numpy()
    words = bytes_[_STATE].view(np.uint64).astype(np.uint32)
    left = int(bytes_[_LEFT].view(np.int32)[0])
    value = torch.ones(()).div_(kept).numpy()[()]
    noise_N = noise.as_strided((noise.numel(),), (1,)).numpy()
    used = _fill(words, WORDS + 1 - left, math.ceil(kept * 2**53), value, noise_N)
    bytes_[_STATE].view(np.uint64)[:] = words
    bytes_[_LEFT].view(np.int32)[0], bytes_[_NEXT].view(np.uint64)[0] = WORDS + 1 - used, used
    torch.set_rng_state(state)
    return noise


def _dropout(self: nn.Dropout, input: torch.Tensor) -> torch.Tensor:
    if not self.training or not 0 < self.p < 1 or input.dtype != torch.float32 or not input.numel():
        return nn.functional.dropout(input, self.p, self.training)
    return input * bernoulli(torch.empty_like(input, requires_grad=False), 1 - self.p)


@compiled
def _temper(words, out):
    for i in range(out.shape[0]):
        y = words[i]
        y ^= y >> np.uint32(11)
        y ^= (y << np.uint32(7)) & np.uint32(0x9D2C5680)
        y ^= (y << np.uint32(15)) & np.uint32(0xEFC60000)
        out[i] = y ^ (y >> np.uint32(18))


@compiled
def _twist_part(old, far, new):
    for i in range(new.shape[0]):
        y = (old[i] & np.uint32(0x80000000)) | (old[i + 1] & np.uint32(0x7FFFFFFF))
        new[i] = far[i] ^ (y >> np.uint32(1)) ^ ((np.uint32(0) - (y & np.uint32(1))) & np.uint32(0x9908B0DF))


@compiled
def _twist(words, old):
    """Make the next block of words, in parts that read what those before have written."""
    old[:WORDS] = words
    split = WORDS - SHIFT
    _twist_part(old[: split + 1], old[SHIFT:], words[:split])
    _twist_part(old[split : 2 * split + 1], words[:split], words[split : 2 * split])
    old[WORDS] = words[0]
    _twist_part(old[2 * split :], words[split:SHIFT], words[2 * split :])


@compiled
def _fill_part(pairs, threshold, value, noise_N):
    for i in range(noise_N.shape[0]):
        first_low = pairs[i]
        number = ((first_low & np.uint64(0x1FFFFF)) << np.uint64(32)) | (first_low >> np.uint64(32))
        noise_N[i] = value if np.int64(number) < threshold else np.float32(0)


@compiled
def _fill(words, used, threshold, value, noise_N):
    """Fill the noise from the words behind the first `used` of a block; return how many are used then. As in torch, a
    number is the lower 53 bits of two words, of which the first is the higher one."""
    N, n = noise_N.shape[0], 0
    old, buffer = np.empty(WORDS + 1, dtype=np.uint32), np.empty(WORDS + 2, dtype=np.uint32)
    held = WORDS - used
    _temper(words[used:], buffer[:held])
    while True:
        pairs = min(held // 2, N - n)
        _fill_part(buffer.view(np.uint64)[:pairs], threshold, value, noise_N[n : n + pairs])
        n += pairs
        if n == N:
            return WORDS - (held - 2 * pairs)
        if held % 2:
            buffer[0] = buffer[held - 1]
        held %= 2
        _twist(words, old)
        _temper(words, buffer[held : held + WORDS])
        held += WORDS
