"""The torch MurmurHash3 that seeds stand on equals the published algorithm, byte by byte."""

from __future__ import annotations

import struct

import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_d3tree.runtime.seeds_cpu import murmur_hash32


def murmur3_of_bytes(data: bytes) -> int:
    """MurmurHash3_x86_32 with seed 0 for a length that is a multiple of 4, in Python's integers."""

    def rotate(x: int, r: int) -> int:
        return ((x << r) | (x >> (32 - r))) % 2**32

    h = 0
    for (k,) in struct.iter_unpack("<I", data):
        h ^= rotate(k * 0xCC9E2D51 % 2**32, 15) * 0x1B873593 % 2**32
        h = (rotate(h, 13) * 5 + 0xE6546B64) % 2**32
    h ^= len(data)
    h = (h ^ h >> 16) * 0x85EBCA6B % 2**32
    h = (h ^ h >> 13) * 0xC2B2AE35 % 2**32
    return h ^ h >> 16


def test_reference_knows_published_values() -> None:
    assert murmur3_of_bytes(b"test") == 0xBA6BD213
    assert murmur3_of_bytes(b"\x00\x00\x00\x00") == 0x2362F9DE


@given(
    st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**31 - 1)), min_size=1, max_size=4),
    st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5),
)
def test_hash_of_seed_position_and_column(rows: list[tuple[int, int]], columns: list[int]) -> None:
    seeds = torch.tensor([seed for seed, _ in rows], dtype=torch.uint64)
    positions = torch.tensor([position for _, position in rows])
    found = murmur_hash32(seeds, positions, torch.tensor(columns))
    expected = [[murmur3_of_bytes(struct.pack("<QII", s, p, c)) for c in columns] for s, p in rows]
    assert found.tolist() == expected
