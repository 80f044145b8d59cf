"""KV slots of the request-to-token table, in plain torch.

SGLang's own versions are Triton kernels; these serve devices without Triton and are what the worker itself uses
everywhere, since reading a window of a table is one gather.
"""

from __future__ import annotations

import torch


def slot_window(
    req_to_token: torch.Tensor, req_pool_indices: torch.Tensor, start: torch.Tensor, width: int
) -> torch.Tensor:
    """KV slots of ``width`` consecutive positions of every request.

    Args:
        req_to_token: [requests_max, context_max] int32, slot of every position.
        req_pool_indices: [R] int64, the requests' rows in the table.
        start: [R] int64, first position.

    Returns:
        [R, width] int64.
    """
    positions = start.unsqueeze(1) + torch.arange(width, device=start.device)
    return req_to_token[req_pool_indices.unsqueeze(1), positions].to(torch.int64)


def extend_cache_locs(
    *,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
    device: torch.device | str,
) -> torch.Tensor:
    """Slots of ``draft_token_num`` positions per request, flattened; SGLang's platform hook for its DFLASH.

    Returns:
        [batch_size * draft_token_num] int64.
    """
    return slot_window(req_to_token, req_pool_indices, start_offset, draft_token_num).flatten()


def assign_req_to_token(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    """Write newly allocated slots into the table, in place.

    Args:
        start_offset, end_offset: [R] first and one-past-last position to fill.
        out_cache_loc: [sum(end - start)] slots, request-major.
    """
    counts = (end_offset - start_offset).to(torch.int64)
    request = torch.repeat_interleave(torch.arange(batch_size, device=counts.device), counts)
    first = torch.cumsum(counts, 0) - counts
    within = torch.arange(request.numel(), device=counts.device) - first[request]
    positions = start_offset.to(torch.int64)[request] + within
    req_to_token[req_pool_indices[request], positions] = out_cache_loc[: request.numel()].to(req_to_token.dtype)


def last_slots(req_to_token: torch.Tensor, req_pool_indices: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Slot of every request's last token [R], -1 for an empty request.

    SGLang has this in torch, but picks the Triton version for every backend it does not know by name.
    """
    from sglang.srt.mem_cache.allocation import get_last_loc_torch

    return get_last_loc_torch(req_to_token, req_pool_indices, lengths)
