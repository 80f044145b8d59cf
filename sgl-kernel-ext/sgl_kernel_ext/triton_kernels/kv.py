"""KV rows of all layers moved in one launch. Never ran on a GPU yet (see the package)."""

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def compact_kv_kernel(pointers, target, source, moves, words, M: tl.constexpr, BLOCK: tl.constexpr):
    """One program per request, cache and block of words: it reads all its rows, waits for all threads, and writes."""
    request = tl.program_id(0).to(tl.int64)
    cache = tl.load(pointers + tl.program_id(1)).to(tl.pointer_type(tl.int32))
    word = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    move = tl.arange(0, M)
    to = tl.load(target + request * moves + move, mask=move < moves, other=0)
    origin = tl.load(source + request * moves + move, mask=move < moves, other=0)
    active = (to != origin)[:, None] & (word < words)[None, :]
    rows = tl.load(cache + origin[:, None] * words + word[None, :], mask=active, other=0)
    tl.debug_barrier()  # a row may be another one's target
    tl.store(cache + to[:, None] * words + word[None, :], rows, mask=active)


@functools.lru_cache(maxsize=8)
def _device_pointers(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(addresses, dtype=torch.int64, device=device)


def compact_kv(caches: Sequence[Tensor], target: Tensor, source: Tensor) -> None:
    """As `reference.kv.compact_kv`, for caches with contiguous rows of a multiple of four bytes.

    The caches' addresses go to the device once; call it once before capturing a graph. Raises ValueError for a cache
    that is not contiguous or has rows of another size.
    """
    requests, moves = target.shape
    by_words: dict[int, list[int]] = {}
    for cache in caches:
        size = cache[0].numel() * cache.element_size()
        if not cache.is_contiguous() or size % 4:
            raise ValueError(f"need contiguous rows of whole 32-bit words, got {tuple(cache.shape)} {cache.dtype}")
        by_words.setdefault(size // 4, []).append(cache.data_ptr())
    for words, addresses in by_words.items():
        padded = triton.next_power_of_2(moves)
        block = min(triton.next_power_of_2(words), max(32, 4096 // padded))
        compact_kv_kernel[(requests, len(addresses), triton.cdiv(words, block))](
            _device_pointers(tuple(addresses), target.device), target.contiguous(), source.contiguous(), moves, words,
            M=padded, BLOCK=block,
        )  # fmt: skip
