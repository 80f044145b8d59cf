"""Paged attention in plain torch: the specification that every faster implementation is tested against."""

from __future__ import annotations

from typing import Literal, get_args

import torch

AttentionMode = Literal["causal", "bidirectional", "tree"]
ATTENTION_MODES: tuple[str, ...] = get_args(AttentionMode)


def check_attention_inputs(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    mode: str,
    ancestor_mask: torch.Tensor | None,
) -> None:
    """Raise ValueError when shapes, mode or mask cannot belong to one `paged_attention` call."""
    if mode not in ATTENTION_MODES:
        raise ValueError(f"attention mode must be one of {', '.join(ATTENTION_MODES)}, not {mode!r}")
    if (mode == "tree") != (ancestor_mask is not None):
        raise ValueError("an ancestor mask is required in tree mode and accepted in no other mode")
    if q.dim() != 3 or k_cache.dim() != 3 or v_cache.dim() != 3:
        raise ValueError("q, k_cache and v_cache must have three dimensions: rows or slots, heads, head_dim")
    if k_cache.shape[:2] != v_cache.shape[:2]:
        raise ValueError("k_cache and v_cache must hold the same slots and KV heads")
    if k_cache.shape[2] != q.shape[2]:
        raise ValueError(f"q has head_dim {q.shape[2]} but k_cache has {k_cache.shape[2]}")
    if q.shape[1] % k_cache.shape[1] != 0:
        raise ValueError(f"{q.shape[1]} query heads cannot share {k_cache.shape[1]} KV heads evenly")


def visible_keys(
    prefix_len: int,
    rows: int,
    mode: str,
    row_mask: torch.Tensor | None,
    sliding_window: int,
    device: torch.device,
) -> torch.Tensor:
    """Which keys each row of one request may attend to.

    Args:
        prefix_len: keys before the request's own rows.
        rows: the request's query rows; their keys follow the prefix.
        mode: "causal", "bidirectional" or "tree".
        row_mask: bool [rows, rows] in tree mode, else None; entry (i, j): row i descends from, or is, row j.
        sliding_window: keys further than this from the row's position are hidden; negative: no window.
        device: where the result lives.

    Returns:
        bool [rows, prefix_len + rows].
    """
    row = torch.arange(rows, device=device)
    if row_mask is not None:
        own = row_mask
        row_position = prefix_len + row_mask.sum(dim=1) - 1
    else:
        own = (row[None, :] <= row[:, None]) if mode == "causal" else row.new_ones(rows, rows).bool()
        row_position = prefix_len + row
    visible = torch.cat([row.new_ones(rows, prefix_len).bool(), own], dim=1)
    if sliding_window >= 0:
        key_position = torch.cat([torch.arange(prefix_len, device=device), row_position])
        distance = row_position[:, None] - key_position[None, :]
        visible &= (distance <= sliding_window) & (distance >= -sliding_window)
    return visible


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_table: torch.Tensor,
    req_rows: torch.Tensor,
    prefix_lens: torch.Tensor,
    row_offsets: torch.Tensor,
    scaling: float,
    mode: AttentionMode,
    ancestor_mask: torch.Tensor | None = None,
    logit_cap: float = 0.0,
    sliding_window: int = -1,
) -> torch.Tensor:
    """Attention of ragged query rows over a paged KV cache.

    The rows' own keys and values are already in the cache, at slots
    `slot_table[req_rows[r], prefix_lens[r] + i]` for row i of request r. Every row sees its request's prefix;
    of its request's rows it sees, by mode: "causal" the earlier ones and itself, "bidirectional" all of them,
    "tree" those its ancestor mask names. Plain decoding is "causal" with one row and a prefix of
    sequence length - 1.

    Args:
        q: [T, Hq, Dh] query rows, float32 or bfloat16 (float16 works too); requests lie one after another.
        k_cache: [S, Hkv, Dh] keys by slot; Hq / Hkv consecutive query heads share a KV head.
        v_cache: [S, Hkv, Dv] values by slot.
        slot_table: [*, L] int32 or int64, SGLang's `req_to_token`: position -> slot.
        req_rows: [R] integer, the row of `slot_table` that belongs to each request.
        prefix_lens: [R] integer, committed tokens before the request's rows.
        row_offsets: [R + 1] integer; request r owns the rows `row_offsets[r] .. row_offsets[r + 1]`. Rows
            behind the last offset are padding and come out as zeros.
        scaling: factor on q.k, usually Dh ** -0.5.
        mode: "causal", "bidirectional" or "tree".
        ancestor_mask: bool [>= row_offsets[R], N] in tree mode, N at least the rows of any request: entry
            (t, j) is True if row t may see row j of its own request (its ancestors and itself).
        logit_cap: soft cap c on the scaled logits s, c * tanh(s / c); 0 switches it off.
        sliding_window: a row at position p sees keys at positions p - w .. p (bidirectional: .. p + w);
            negative: no window. Row i is at position prefix + i, in tree mode at prefix + its depth.

    Returns:
        [T, Hq, Dv] in q's dtype; the softmax is computed in float32. A row that sees no key gives zeros.

    Raises:
        ValueError: shapes, mode and mask do not fit together.

    Example:
        >>> import torch
        >>> from sgl_kernel_ext.reference.attention import paged_attention
        >>> q = torch.zeros(2, 2, 4)                       # two rows of one request, two heads over a KV head
        >>> k = torch.zeros(8, 1, 4)
        >>> v = torch.arange(8.0).view(8, 1, 1).expand(8, 1, 4)
        >>> table = torch.tensor([[5, 6, 7]])              # one prefix token, then the two rows
        >>> one = torch.tensor([1])
        >>> out = paged_attention(q, k, v, table, one - 1, one, torch.tensor([0, 2]), 0.5, "causal")
        >>> out[:, 0, 0].tolist()
        [5.5, 6.0]
    """
    check_attention_inputs(q, k_cache, v_cache, mode, ancestor_mask)
    total_rows, num_heads, head_dim = q.shape
    num_kv_heads, value_dim = v_cache.shape[1], v_cache.shape[2]
    group = num_heads // num_kv_heads
    out = q.new_zeros(total_rows, num_heads, value_dim)

    offsets = row_offsets.tolist()
    requests = zip(req_rows.tolist(), prefix_lens.tolist(), offsets[:-1], offsets[1:], strict=True)
    for table_row, prefix_len, begin, end in requests:
        rows = end - begin
        if rows == 0:
            continue
        slots = slot_table[table_row, : prefix_len + rows].long()
        keys, values = k_cache[slots].float(), v_cache[slots].float()
        queries = q[begin:end].float().view(rows, num_kv_heads, group, head_dim)

        logits = torch.einsum("rhgd,khd->hgrk", queries, keys) * scaling
        if logit_cap > 0:
            logits = logit_cap * torch.tanh(logits / logit_cap)
        row_mask = None if ancestor_mask is None else ancestor_mask[begin:end, :rows].bool()
        visible = visible_keys(prefix_len, rows, mode, row_mask, sliding_window, q.device)
        weights = torch.softmax(logits.masked_fill(~visible, float("-inf")), dim=-1)
        weights = weights.masked_fill(~visible, 0.0)

        mixed = torch.einsum("hgrk,khd->rhgd", weights, values)
        out[begin:end] = mixed.reshape(rows, num_heads, value_dim).to(q.dtype)
    return out
