"""What the target says after every node of whole candidate trees: one ancestor-masked pass (METHOD 3, labels)."""

from __future__ import annotations

import torch

from sglang_d3tree.train.answers import ImagePrompt
from sglang_d3tree.train.tower import KVCache, LanguageTower
from sglang_d3tree.tree.build import CandidateTree
from sglang_d3tree.tree.layout import layout_rows


def prefill(tower: LanguageTower, tokens: torch.Tensor, image: ImagePrompt | None = None) -> KVCache:
    """Keys and values of one conversation, tokens [T] int64, its image's features in their places."""
    count = tokens.shape[0]
    cache = tower.new_cache(1, count)
    embeds, positions = tower.embedding[tokens], torch.arange(count).repeat(3, 1)
    if image is not None:
        prompt = image.embeds.shape[0]
        embeds[:prompt] = image.embeds
        positions += image.offset
        positions[:, :prompt] = image.positions
    tower.forward(embeds[None], torch.zeros(1, dtype=torch.long), cache, slice(0, 1), positions[:, None])
    return cache


def verify_trees(
    tower: LanguageTower, cache: KVCache, tree: CandidateTree, places: torch.Tensor, offset: int = 0
) -> torch.Tensor:
    """The target's last states [R, N, H] (before its final norm) at every row of R trees in one conversation.

    cache: the conversation's keys and values (``prefill``). places [R] int64: the index of each tree's anchor in the
    conversation; a row sees what comes before its anchor, its ancestors and itself, as in serving. offset: of the
    image's positions. Invalid rows come out as copies of the anchor's position with a token that means nothing.
    """
    d = tower.dims
    requests, rows = tree.valid.shape
    length, group = cache.k.shape[3], d.num_heads // d.num_kv_heads
    laid = layout_rows(tree, torch.ones_like(tree.valid), requests * rows)
    own = laid.ancestor_mask.view(requests, 1, 1, rows, rows)
    prefix = (torch.arange(length) < places[:, None]).view(requests, 1, 1, 1, length)
    angle = (places[:, None] + tree.depths + offset)[..., None, None].float() * tower.inv_freq

    def attend(i: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q = q.view(requests, rows, d.num_kv_heads, group, d.head_dim).permute(2, 0, 3, 1, 4) * d.head_dim**-0.5
        k, v = k.permute(2, 0, 3, 1), v.permute(2, 0, 1, 3)  # [kv, R, D, N] and [kv, R, N, D]
        flat = q.reshape(d.num_kv_heads, -1, d.head_dim)
        shape = (d.num_kv_heads, requests, group, rows, -1)
        to_prefix = (flat @ cache.k[i][0].transpose(1, 2)).view(shape)
        to_own = (q.reshape(d.num_kv_heads, requests, -1, d.head_dim) @ k).view(shape)
        to_prefix = to_prefix.masked_fill(~prefix.view(1, requests, 1, 1, length), float("-inf"))
        to_own = to_own.masked_fill(~own.view(1, requests, 1, rows, rows), float("-inf"))
        weights = torch.cat((to_prefix, to_own), dim=-1).softmax(dim=-1)
        out = (weights[..., :length].reshape(d.num_kv_heads, -1, length) @ cache.v[i][0]).view(shape)
        out = out + (weights[..., length:].reshape(d.num_kv_heads, requests, -1, rows) @ v).view(shape)
        return out.permute(1, 3, 0, 2, 4).reshape(requests, rows, -1)

    hidden, _ = tower.run_layers(tower.embedding[tree.token_ids], angle.cos(), angle.sin(), attend)
    return hidden
