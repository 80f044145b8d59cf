"""From survival to verify rows and back to accepted children. Never ran on a GPU yet (see the package)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_FLAT_BITS = 23  # as in the reference
_BLOCK = 256


@triton.jit
def fill_keys_kernel(survival, depths, valid, keep, keys, size, capacity, BLOCK: tl.constexpr):
    """The reference's order of rows (tier, survival, depth, row) as one int64 per row."""
    flat = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = flat < size
    is_valid = tl.load(valid + flat, mask=inside, other=0).to(tl.int64)
    is_kept = tl.load(keep + flat, mask=inside, other=0).to(tl.int64)
    value = tl.load(survival + flat, mask=inside, other=0.0)
    value = tl.where(value > 0.0, tl.where(value < 1.0, value, 1.0), 0.0)  # NaN and -0 count as 0
    tier = 3 - is_valid - is_kept * is_valid - (flat % capacity == 0).to(tl.int64)
    by_survival = (1 << 30) - 1 - value.to(tl.int32, bitcast=True).to(tl.int64)
    depth = tl.load(depths + flat, mask=inside, other=0)
    key = ((((tier << 30) | by_survival) << 8) | depth) << 23 | flat
    tl.store(keys + flat, key, mask=inside)


@triton.jit
def layout_kernel(
    token_ids, parents, depths, keep, row_offsets,
    out_tokens, out_depths, out_requests, out_tree_rows, out_parents, packed, ancestor_mask, is_padding,
    requests, width, capacity, horizon, N: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Programs below `requests` write the kept rows of one request, the others a block of padding rows.

    A row's ancestors are bits of int64 words: its parent's bits and its own, handed down one depth at a time.
    """
    program = tl.program_id(0)
    if program < requests:
        request = program.to(tl.int64)
        index = tl.arange(0, N)
        inside = index < width
        source = request * width + index
        kept = tl.load(keep + source, mask=inside, other=0).to(tl.int32)
        column = tl.cumsum(kept, axis=0) - 1
        begin = tl.load(row_offsets + request)
        row = begin + column
        write = (kept > 0) & (row < capacity)  # a surplus is cut off, as in the reference
        parent = tl.load(parents + source, mask=inside, other=0).to(tl.int32)
        tl.store(out_tokens + row, tl.load(token_ids + source, mask=inside, other=0), mask=write)
        tl.store(out_depths + row, tl.load(depths + source, mask=inside, other=0), mask=write)
        tl.store(out_requests + row, tl.zeros((N,), tl.int64) + request, mask=write)
        tl.store(out_tree_rows + row, index, mask=write)
        tl.store(out_parents + row, begin + tl.gather(column, parent, 0), mask=write)
        tl.store(is_padding + row, tl.zeros((N,), tl.int1), mask=write)
        for word in tl.static_range(WORDS):
            bit = tl.full((N,), 1, tl.int64) << (column % 64).to(tl.int64)
            own = tl.where((kept > 0) & (column // 64 == word), bit, 0)
            path = own
            for _ in range(horizon):
                path = own | tl.gather(path, parent, 0)
            tl.store(packed + row * WORDS + word, path, mask=write)
            lane = tl.arange(0, 64)
            bits = (path[:, None] >> lane[None, :].to(tl.int64)) & 1
            at = row[:, None] * width + word * 64 + lane[None, :]
            tl.store(ancestor_mask + at, bits != 0, mask=write[:, None] & (word * 64 + lane < width)[None, :])
    else:
        row = (program - requests) * N + tl.arange(0, N)
        row = row.to(tl.int64)
        pad = (row >= tl.load(row_offsets + requests)) & (row < capacity)
        zero = tl.zeros((N,), tl.int64)
        tl.store(out_tokens + row, zero, mask=pad)
        tl.store(out_depths + row, zero, mask=pad)
        tl.store(out_requests + row, zero, mask=pad)
        tl.store(out_tree_rows + row, zero, mask=pad)
        tl.store(out_parents + row, row, mask=pad)
        tl.store(is_padding + row, zero == 0, mask=pad)
        for word in tl.static_range(WORDS):
            tl.store(packed + row * WORDS + word, zero + (1 if word == 0 else 0), mask=pad)
            column = word * 64 + tl.arange(0, 64)
            at = row[:, None] * width + column[None, :]
            first = (zero == 0)[:, None] & (column == 0)[None, :]
            tl.store(ancestor_mask + at, first, mask=pad[:, None] & (column < width)[None, :])


@triton.jit
def matching_child_kernel(token_ids, parents, next_tokens, child, rows, BLOCK: tl.constexpr):
    """child [T] holds -1 before; equal siblings cannot happen, the maximum settles them as in the reference."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    parent = tl.load(parents + row, mask=inside, other=0)
    wanted = tl.load(next_tokens + parent, mask=inside, other=0)
    matches = inside & (parent != row) & (tl.load(token_ids + row, mask=inside, other=0) == wanted)
    tl.atomic_max(child + parent, row, mask=matches)


def fill_rows(survival: Tensor, depths: Tensor, valid: Tensor, keep: Tensor, total_rows: int) -> Tensor:
    """As `reference.tree.fill_rows`. Triton makes the keys; torch.sort orders them on the device, all at once."""
    requests, capacity = survival.shape
    size = requests * capacity
    if size >= 1 << _FLAT_BITS:
        raise ValueError(f"{requests} x {capacity} rows exceed the {(1 << _FLAT_BITS) - 1} that one batch can order")
    valid = valid.contiguous()
    keys = torch.empty(requests, capacity, dtype=torch.int64, device=survival.device)
    fill_keys_kernel[(triton.cdiv(size, _BLOCK),)](
        survival.contiguous(), depths.contiguous(), valid, keep.contiguous(), keys, size, capacity, BLOCK=_BLOCK
    )
    last = keys.flatten().sort().values[min(total_rows, size) - 1]
    return (keys <= last) & valid


def layout_rows_packed(
    token_ids: Tensor, parents: Tensor, depths: Tensor, keep: Tensor, capacity: int, horizon: int
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
    """`layout_rows`, and its ancestor mask in bits: [T, ceil(N / 64)] int64, column c is bit c % 64 of word c // 64."""
    requests, width = keep.shape
    device = keep.device
    words, padded = triton.cdiv(width, 64), max(16, triton.next_power_of_2(width))
    row_offsets = torch.nn.functional.pad(keep.sum(1).cumsum(0), (1, 0))
    tokens, out_depths, request, tree_row, parent = torch.empty(5, capacity, dtype=torch.int64, device=device)
    packed = torch.empty(capacity, words, dtype=torch.int64, device=device)
    ancestor_mask = torch.empty(capacity, width, dtype=torch.bool, device=device)
    is_padding = torch.empty(capacity, dtype=torch.bool, device=device)
    layout_kernel[(requests + triton.cdiv(capacity, padded),)](
        token_ids.contiguous(), parents.contiguous(), depths.contiguous(), keep.contiguous(), row_offsets,
        tokens, out_depths, request, tree_row, parent, packed, ancestor_mask, is_padding,
        requests, width, capacity, horizon, N=padded, WORDS=words,
    )  # fmt: skip
    return (tokens, out_depths, request, tree_row, parent, row_offsets, ancestor_mask, is_padding), packed


def layout_rows(
    token_ids: Tensor, parents: Tensor, depths: Tensor, keep: Tensor, capacity: int, horizon: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `reference.tree.layout_rows`; the offsets of the requests come from two torch calls on the device."""
    return layout_rows_packed(token_ids, parents, depths, keep, capacity, horizon)[0]


def matching_child(token_ids: Tensor, parent: Tensor, next_tokens: Tensor) -> Tensor:
    """As `reference.tree.matching_child`."""
    rows = token_ids.shape[0]
    child = torch.full_like(parent, -1)
    matching_child_kernel[(triton.cdiv(rows, _BLOCK),)](
        token_ids.contiguous(), parent.contiguous(), next_tokens.contiguous(), child, rows, BLOCK=_BLOCK
    )
    return child
