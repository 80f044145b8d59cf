"""Draft logits -> best tokens and log-probabilities, in two stages. Never ran on a GPU yet (see the package)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgl_kernel_ext.triton_kernels.order import NO_KEY, key_position, key_value, largest_first_key, take_largest

CHUNK = 64  # vocabulary entries that one maximum stands for
CHUNKS = 64  # maxima per program of the first stage, which thus reads 4096 entries


@triton.jit
def summarise_kernel(
    logits, maxima, tops, sums, vocabulary, parts, CHUNK: tl.constexpr, CHUNKS: tl.constexpr
):  # fmt: skip
    """Stage 1, one program per row and part: the maximum of every chunk, the part's maximum and sum of exponentials."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    chunk = part * CHUNKS + tl.arange(0, CHUNKS)
    entries = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    values = tl.load(logits + row * vocabulary + entries, mask=entries < vocabulary, other=float("-inf"))
    values = values.to(tl.float32)
    numbers = tl.where(values == values, values, float("-inf")) + 0.0
    chunk_max = tl.max(numbers, axis=1)
    top = tl.max(chunk_max, axis=0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.sum(tl.exp(values - shift), axis=1), axis=0)  # NaN stays NaN
    tl.store(maxima + row * parts * CHUNKS + chunk, chunk_max)
    tl.store(tops + row * parts + part, top)
    tl.store(sums + row * parts + part, total)


@triton.jit
def select_kernel(
    logits, maxima, tops, sums, horizons, token_ids, log_probs, vocabulary, parts, depth, topk,
    K: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, MAXIMA: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Stage 2, one program per row: the best entries lie in the K chunks of the best maxima; search only those."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, MAXIMA)
    chunk_max = tl.load(maxima + row * parts * CHUNKS + place, mask=place < parts * CHUNKS, other=float("-inf"))
    chunk_keys = tl.where(place < parts * CHUNKS, largest_first_key(chunk_max, place), NO_KEY)
    chunk = key_position(take_largest(chunk_keys, K))

    entries = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    inside = entries < vocabulary
    values = tl.load(logits + row * vocabulary + entries, mask=inside, other=float("-inf")).to(tl.float32)
    numbers = tl.where(values == values, values, float("-inf"))
    keys = tl.where(inside, largest_first_key(numbers, entries), NO_KEY)
    best = take_largest(tl.reshape(keys, (K * CHUNK,)), K)

    part = tl.arange(0, PARTS)
    part_top = tl.load(tops + row * parts + part, mask=part < parts, other=float("-inf"))
    part_sum = tl.load(sums + row * parts + part, mask=part < parts, other=0.0)
    top = tl.max(part_top, axis=0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    log_sum = shift + tl.log(tl.sum(part_sum * tl.exp(part_top - shift), axis=0))

    log_prob = key_value(best) - log_sum
    usable = (row % depth < tl.load(horizons + row // depth)) & (log_prob == log_prob)
    log_prob = tl.where(usable, tl.where(log_prob < 0.0, log_prob, 0.0), float("-inf"))
    rank = tl.arange(0, K)
    tl.store(token_ids + row * topk + rank, key_position(best), mask=rank < topk)
    tl.store(log_probs + row * topk + rank, log_prob, mask=rank < topk)


def draft_candidates(logits: Tensor, topk: int, horizons: Tensor) -> tuple[Tensor, Tensor]:
    """As `reference.tree.draft_candidates`: the vocabulary is read once, then topk * 64 entries of it per row."""
    requests, depth, vocabulary = logits.shape
    topk = min(topk, vocabulary)
    logits = logits.contiguous()
    rows, parts = requests * depth, triton.cdiv(vocabulary, CHUNK * CHUNKS)
    maxima = torch.empty(rows, parts * CHUNKS, dtype=torch.float32, device=logits.device)
    tops = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
    sums = torch.empty_like(tops)
    token_ids = torch.empty(requests, depth, topk, dtype=torch.int64, device=logits.device)
    log_probs = torch.empty(requests, depth, topk, dtype=torch.float32, device=logits.device)
    if rows == 0:
        return token_ids, log_probs
    summarise_kernel[(rows, parts)](logits, maxima, tops, sums, vocabulary, parts, CHUNK=CHUNK, CHUNKS=CHUNKS)
    padded = triton.next_power_of_2(topk)
    select_kernel[(rows,)](
        logits, maxima, tops, sums, horizons, token_ids, log_probs, vocabulary, parts, depth, topk,
        K=padded, CHUNK=CHUNK, CHUNKS=CHUNKS, MAXIMA=max(padded, triton.next_power_of_2(parts * CHUNKS)),
        PARTS=triton.next_power_of_2(parts),
    )  # fmt: skip
    return token_ids, log_probs
