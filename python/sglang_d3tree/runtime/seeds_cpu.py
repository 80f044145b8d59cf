"""The hash behind request seeds, in torch.

SGLang draws the noise of a seeded sample from MurmurHash3 (32 bit) over seed, position and token id: the same seed
gives the same text, whatever else is in the batch. Its CPU version sits in a library that needs a GPU driver.
"""

from __future__ import annotations

import torch

_MASK = 0xFFFFFFFF


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    """MurmurHash3 of the 16 bytes (seed: 8, position: 4, column: 4, all little-endian) with hash seed 0.

    Args:
        seed: [R], 64-bit integers of any type. positions: [R]. col_indices: [V].

    Returns:
        [R, V] int64 in 0 .. 2**32 - 1.
    """
    # Products of 32-bit numbers overflow int64, which keeps the low 32 bits that the mask leaves.
    seed = seed.view(torch.int64) if seed.dtype == torch.uint64 else seed.to(torch.int64)
    state = torch.zeros_like(seed)
    for block in (seed & _MASK, (seed >> 32) & _MASK, positions.to(torch.int64) & _MASK):
        state = _mix(state, block)
    state = _mix(state.unsqueeze(1), col_indices.to(torch.int64).unsqueeze(0) & _MASK) ^ 16
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & _MASK
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & _MASK
    return state ^ (state >> 16)


def _mix(state: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    block = (block * 0xCC9E2D51) & _MASK
    block = (_rotate(block, 15) * 0x1B873593) & _MASK
    return (_rotate(state ^ block, 13) * 5 + 0xE6546B64) & _MASK


def _rotate(value: torch.Tensor, bits: int) -> torch.Tensor:
    return ((value << bits) | (value >> (32 - bits))) & _MASK
