"""Candidates -> trees, and survival along their paths. Never ran on a GPU yet (see the package)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

NO_NODE = tl.constexpr((1 << 63) - 1)  # its cost is NaN, which is below no number


@triton.jit
def key_cost(keys):
    """The cost float32 in the upper word of a node's key."""
    return (keys >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def build_tree_kernel(
    token_ids, log_probs, anchors, tokens, parents, depths, ranks, log_scores, valid, horizon, topk, max_rows,
    W: tl.constexpr, K: tl.constexpr, PER_PARENT: tl.constexpr,
):  # fmt: skip
    """One program per request, a beam of W nodes per depth: every kept parent with every candidate, the best stay.

    As in the reference a node's key is its cost above its place (depth, position of the parent in its beam, rank).
    """
    request = tl.program_id(0).to(tl.int64)
    inf = float("inf")
    index = tl.arange(0, W)
    rank = tl.arange(0, K)
    beam = tl.where(index == 0, 0.0, inf)
    beam_rank = tl.zeros((W,), tl.int32)
    best = tl.full((W,), NO_NODE, tl.int64)
    for depth in range(horizon):
        at = request * horizon + depth
        if PER_PARENT:
            row = (at * topk + beam_rank)[:, None] * topk
            # Places behind the beam hold no node, and their rank may be one that no candidate has.
            step = -tl.load(
                log_probs + row + rank[None, :],
                mask=(rank < topk)[None, :] & (beam_rank < topk)[:, None],
                other=float("-inf"),
            )
        else:
            step = -tl.load(log_probs + at * topk + rank, mask=rank < topk, other=float("-inf"))[None, :]
        cost = (beam[:, None] + step).to(tl.int32, bitcast=True).to(tl.int64)
        place = (depth * W + index[:, None]) * K + rank[None, :]
        keys = tl.topk(tl.reshape((cost << 32) | place, (W * K,)), W, descending=False)
        beam = key_cost(keys)
        beam_rank = (keys & 0xFFFFFFFF).to(tl.int32) % K
        best = tl.topk(tl.reshape(tl.join(best, keys), (2 * W,)), W, descending=False)

    cost = key_cost(best)
    ok = (cost < inf) & (index < max_rows - 1)
    place = (best & 0xFFFFFFFF).to(tl.int32)
    node_rank = place % K
    parent_position = (place // K) % W
    depth = place // (W * K)
    # The nodes kept of a depth are the first ones of its beam, in the same order: counting gives back the position.
    is_before = (depth[None, :] == depth[:, None]) & (index[None, :] < index[:, None])
    position = tl.sum(is_before.to(tl.int32), axis=1)
    is_parent = (depth[None, :] + 1 == depth[:, None]) & (position[None, :] == parent_position[:, None]) & ok[None, :]
    parent = tl.sum(tl.where(is_parent, index[None, :] + 1, 0), axis=1)

    row = request * max_rows + 1 + index
    inside = index < max_rows - 1
    token = tl.load(token_ids + (request * horizon + depth) * topk + node_rank, mask=ok, other=0)
    tl.store(tokens + row, token, mask=inside)
    tl.store(parents + row, tl.where(ok, parent, 0), mask=inside)
    tl.store(depths + row, tl.where(ok, depth + 1, 0), mask=inside)
    tl.store(ranks + row, tl.where(ok, node_rank, 0), mask=inside)
    tl.store(log_scores + row, tl.where(ok, -cost, float("-inf")), mask=inside)
    tl.store(valid + row, ok, mask=inside)

    anchor = request * max_rows
    tl.store(tokens + anchor, tl.load(anchors + request))
    tl.store(parents + anchor, 0)
    tl.store(depths + anchor, 0)
    tl.store(ranks + anchor, 0)
    tl.store(log_scores + anchor, 0.0)
    tl.store(valid + anchor, True)


@triton.jit
def path_product_kernel(conditional, parents, survival, rows, horizon, N: tl.constexpr):
    """One program per request: downwards by one depth at a time, so that rounding never lifts a child."""
    begin = tl.program_id(0).to(tl.int64) * rows
    index = tl.arange(0, N)
    factor = tl.load(conditional + begin + index, mask=index < rows, other=0.0)
    factor = tl.where(index == 0, 1.0, factor)
    parent = tl.load(parents + begin + index, mask=index < rows, other=0).to(tl.int32)
    product = factor
    for _ in range(horizon - 1):
        product = factor * tl.gather(product, parent, 0)
    tl.store(survival + begin + index, product, mask=index < rows)


def build_tree(
    token_ids: Tensor, log_probs: Tensor, anchors: Tensor, max_rows: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `reference.tree.build_tree`, a beam per depth in one kernel: a request's tree never leaves its program."""
    requests, horizon, topk = token_ids.shape
    width, candidates = max(2, triton.next_power_of_2(max_rows - 1)), triton.next_power_of_2(topk)
    if horizon * width * candidates >= 1 << 31:
        raise ValueError(f"{max_rows} rows over {horizon} x {topk} candidates cannot be ordered in 32 bits")
    device = token_ids.device
    tokens, parents, depths, ranks = torch.empty(4, requests, max_rows, dtype=torch.int64, device=device)
    log_scores = torch.empty(requests, max_rows, dtype=torch.float32, device=device)
    valid = torch.empty(requests, max_rows, dtype=torch.bool, device=device)
    build_tree_kernel[(requests,)](
        token_ids.contiguous(), log_probs.contiguous(), anchors.contiguous(),
        tokens, parents, depths, ranks, log_scores, valid, horizon, topk, max_rows, W=width, K=candidates,
        PER_PARENT=log_probs.shape[2] > 1,
    )  # fmt: skip
    return tokens, parents, depths, ranks, log_scores, valid


def path_product(conditional: Tensor, parents: Tensor, horizon: int) -> Tensor:
    """As `reference.tree.path_product`."""
    requests, rows = conditional.shape
    survival = torch.empty(requests, rows, dtype=torch.float32, device=conditional.device)
    path_product_kernel[(requests,)](
        conditional.contiguous(), parents.contiguous(), survival, rows, horizon, N=triton.next_power_of_2(rows)
    )
    return survival
