"""The reference attention against torch's own SDPA, one request and one mode at a time."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from sgl_kernel_ext.reference.attention import paged_attention

HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM = 4, 2, 8, 12
PREFIXES, ROWS = [0, 5, 17], [3, 1, 6]


def make_batch(seed: int = 0) -> dict[str, torch.Tensor]:
    """Three requests with their tokens scattered over a small cache, and one padding row behind them."""
    gen = torch.Generator().manual_seed(seed)
    lengths = [prefix + rows for prefix, rows in zip(PREFIXES, ROWS, strict=True)]
    slots = torch.randperm(64, generator=gen)[: sum(lengths)].split(lengths)
    table = torch.full((5, 32), -1, dtype=torch.int32)
    req_rows = torch.tensor([4, 0, 2])
    for row, own in zip(req_rows.tolist(), slots, strict=True):
        table[row, : len(own)] = own.int()
    return {
        "q": torch.randn(sum(ROWS) + 1, HEADS, HEAD_DIM, generator=gen),
        "k_cache": torch.randn(64, KV_HEADS, HEAD_DIM, generator=gen),
        "v_cache": torch.randn(64, KV_HEADS, VALUE_DIM, generator=gen),
        "slot_table": table,
        "req_rows": req_rows,
        "prefix_lens": torch.tensor(PREFIXES),
        "row_offsets": torch.tensor([0, *torch.tensor(ROWS).cumsum(0).tolist()]),
    }


def chain_mask(rows: list[int]) -> torch.Tensor:
    return torch.cat([torch.ones(n, max(rows)).tril().bool() for n in rows])


def dense(batch: dict[str, torch.Tensor], request: int, visible: torch.Tensor) -> torch.Tensor:
    """SDPA over one request's gathered keys. Returns [rows, Hq, Dv]."""
    begin, end = batch["row_offsets"][request : request + 2].tolist()
    length = PREFIXES[request] + end - begin
    slots = batch["slot_table"][batch["req_rows"][request], :length].long()
    q, k, v = batch["q"][begin:end], batch["k_cache"][slots], batch["v_cache"][slots]
    out = scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (q, k, v)), attn_mask=visible, scale=0.3, enable_gqa=True
    )
    return out[0].transpose(0, 1)


@pytest.mark.parametrize("mode", ["causal", "bidirectional", "tree"])
@pytest.mark.parametrize("window", [-1, 0, 4])
def test_matches_sdpa_with_the_mask_written_out(mode: str, window: int) -> None:
    batch = make_batch()
    mask = chain_mask(ROWS) if mode == "tree" else None
    out = paged_attention(**batch, scaling=0.3, mode=mode, ancestor_mask=mask, sliding_window=window)
    for request, (prefix, rows) in enumerate(zip(PREFIXES, ROWS, strict=True)):
        q_pos = prefix + torch.arange(rows)[:, None]
        k_pos = torch.arange(prefix + rows)[None, :]
        visible = torch.ones(rows, prefix + rows).bool() if mode == "bidirectional" else k_pos <= q_pos
        if window >= 0:
            visible &= (k_pos - q_pos).abs() <= window
        begin, end = batch["row_offsets"][request : request + 2].tolist()
        torch.testing.assert_close(out[begin:end], dense(batch, request, visible))


def test_padding_rows_are_zero_and_leave_the_others_alone() -> None:
    batch = make_batch()
    out = paged_attention(**batch, scaling=0.3, mode="causal")
    assert out[-1].eq(0).all()
    batch["q"] = batch["q"][:-1]
    torch.testing.assert_close(out[:-1], paged_attention(**batch, scaling=0.3, mode="causal"), rtol=0, atol=0)


def test_tree_rows_see_their_ancestors_only() -> None:
    """Two branches under one anchor: each node's output equals that of its own path verified as a chain."""
    batch = make_batch()
    parents = [-1, 0, 0, 1, 2, 3]
    mask = torch.eye(6).bool()
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
    begin, end = batch["row_offsets"][2:4].tolist()
    table_row, prefix = int(batch["req_rows"][2]), PREFIXES[2]
    one = dict(batch, req_rows=batch["req_rows"][2:], prefix_lens=batch["prefix_lens"][2:])
    one["row_offsets"] = torch.tensor([0, end - begin])
    one["q"] = batch["q"][begin:end]
    tree = paged_attention(**one, scaling=0.3, mode="tree", ancestor_mask=mask, sliding_window=7)
    for node in range(6):
        path = mask[node].nonzero().flatten()
        chain = dict(one, q=one["q"][path], row_offsets=torch.tensor([0, len(path)]))
        chain["slot_table"] = batch["slot_table"].clone()
        moved = batch["slot_table"][table_row, prefix + path]
        chain["slot_table"][table_row, prefix : prefix + len(path)] = moved
        expected = paged_attention(**chain, scaling=0.3, mode="causal", sliding_window=7)
        torch.testing.assert_close(tree[node], expected[-1])


def test_a_row_that_sees_nothing_is_zero() -> None:
    batch = make_batch()
    mask = chain_mask(ROWS)
    mask[0] = False
    out = paged_attention(**batch, scaling=0.3, mode="tree", ancestor_mask=mask)
    assert out[0].eq(0).all() and out.isfinite().all()


def test_logit_cap_bounds_the_logits() -> None:
    batch = make_batch()
    batch["q"] = batch["q"] * 1e6
    flat = paged_attention(**batch, scaling=1.0, mode="causal", logit_cap=1e-6)
    batch["q"] = batch["q"] * 0
    mean = paged_attention(**batch, scaling=1.0, mode="causal")
    torch.testing.assert_close(flat, mean, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"mode": "sideways"}, "attention mode must be one of"),
        ({"mode": "tree"}, "ancestor mask is required"),
        ({"ancestor_mask": torch.ones(10, 6).bool()}, "ancestor mask is required"),
        ({"k_cache": torch.zeros(64, 2, 9)}, "head_dim"),
        ({"k_cache": torch.zeros(64, 3, 8), "v_cache": torch.zeros(64, 3, 8)}, "evenly"),
        ({"v_cache": torch.zeros(63, 2, 8)}, "same slots"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(change: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        paged_attention(**{**make_batch(), "scaling": 0.3, "mode": "causal", **change})
