"""How good a drafter is, without a server: accept lengths as chain and as best-first tree."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from sglang_d3tree.train.answers import Conversation
from sglang_d3tree.train.drafter_blocks import BlockBatch, anchor_range, make_blocks
from sglang_d3tree.train.drafter_checkpoint import TargetEnds
from sglang_d3tree.train.drafter_model import DrafterModel


def tree_accept_length(log_probs: list[list[float]], ids: list[list[int]], truth: list[int], nodes: int) -> int:
    """Tokens emitted in a round whose tree holds the ``nodes`` best paths of the marginals (bonus included).

    log_probs, ids: [depths][candidates], best first. truth: the target's next tokens.
    """
    heap = [(-log_probs[0][0], 0, 0, True)]  # (-path score, depth, rank, every ancestor is right)
    accepted = 0
    for _ in range(nodes):
        if not heap:
            break
        score, depth, rank, right = heapq.heappop(heap)
        parent = score + log_probs[depth][rank]
        if rank + 1 < len(ids[depth]):
            heapq.heappush(heap, (parent - log_probs[depth][rank + 1], depth, rank + 1, right))
        hit = right and ids[depth][rank] == truth[depth]
        if hit:
            accepted = max(accepted, depth + 1)
        if depth + 1 < len(ids):
            heapq.heappush(heap, (score - log_probs[depth + 1][0], depth + 1, 0, hit))
    return accepted + 1


@torch.no_grad()
def _round_lengths(
    model: DrafterModel, ends: TargetEnds, batch: BlockBatch, nodes: int
) -> tuple[list[list[int]], list[list[int]], torch.Tensor]:
    """Per block of one batch: accept length as chain and as tree [S][A], and top-1 hits [S, A, B - 1]."""
    hidden = model(ends.embedding[batch.block_ids], batch.anchors, batch.target_hidden)[..., 1:, :]
    chain, tree, hits = [], [], []
    for i in range(hidden.shape[0]):
        scores = F.linear(hidden[i], ends.head)
        best = scores.topk(min(nodes, scores.shape[-1]), dim=-1)
        log_probs = (best.values - scores.logsumexp(dim=-1, keepdim=True)).tolist()
        ids, truth = best.indices.tolist(), batch.labels[i].tolist()
        hit = best.indices[..., 0] == batch.labels[i]
        hits.append(hit)
        chain.append((hit.long().cumprod(dim=-1).sum(dim=-1) + 1).tolist())
        tree.append([tree_accept_length(p, c, t, nodes) for p, c, t in zip(log_probs, ids, truth, strict=True)])
    return chain, tree, torch.stack(hits)


@dataclass(frozen=True)
class Validation:
    """Accept lengths (tokens per round, bonus included) on held-out conversations. top1: hit rate per depth."""

    blocks: int
    chain: float
    tree: float
    top1: list[float]


def evaluate(
    model: DrafterModel,
    ends: TargetEnds,
    conversations: Sequence[Conversation],
    *,
    blocks: int = 256,
    per_conversation: int = 4,
    nodes: int = 31,
    seed: int = 0,
) -> Validation:
    """Blocks at random anchors: cheap, for the training curve. Random anchors overrate a drafter a little."""
    rng = torch.Generator().manual_seed(seed)
    b = model.config.block_size
    usable = [c for c in conversations if len(anchor_range(c)) >= b + per_conversation]
    chain: list[int] = []
    tree: list[int] = []
    hits = []
    while len(chain) < blocks and usable:
        rows = [usable[int(torch.randint(len(usable), (), generator=rng))] for _ in range(4)]
        spans = [anchor_range(c) for c in rows]
        anchors = torch.stack(
            [r.start + torch.randint(len(r) - b + 1, (per_conversation,), generator=rng) for r in spans]
        )
        batch = make_blocks(rows, anchors, b, model.config.mask_token_id)
        c_len, t_len, hit = _round_lengths(model, ends, batch, nodes)
        chain += itertools.chain.from_iterable(c_len)
        tree += itertools.chain.from_iterable(t_len)
        hits.append(hit.flatten(0, 1))
    if not chain:
        raise ValueError("no held-out conversation is long enough for validation")
    top1 = torch.cat(hits).float().mean(dim=0).tolist()
    return Validation(len(chain), sum(chain) / len(chain), sum(tree) / len(tree), [round(x, 3) for x in top1])


def walk(
    model: DrafterModel, ends: TargetEnds, conversations: Sequence[Conversation], *, nodes: int = 31
) -> dict[str, Any]:
    """Replay whole answers round by round, as serving does: each round starts where the last one stopped.

    Returns rounds, emitted tokens and accept lengths, overall and per prompt kind.
    """
    emitted: dict[str, dict[str, list[int]]] = {}
    for c in conversations:
        span = anchor_range(c)
        if not len(span):
            continue
        batch = make_blocks([c], torch.tensor([list(span)]), model.config.block_size, model.config.mask_token_id)
        chain, tree, _ = _round_lengths(model, ends, batch, nodes)
        for name, lengths in (("chain", chain[0]), ("tree", tree[0])):
            at = 0
            while at < len(span):
                step = min(lengths[at], len(span) - at)
                emitted.setdefault(c.kind, {}).setdefault(name, []).append(step)
                at += step
    report: dict[str, Any] = {}
    for name in ("chain", "tree"):
        steps = [s for kind in emitted.values() for s in kind[name]]
        report[name] = sum(steps) / len(steps)
        report[f"{name}_rounds"] = len(steps)
        report[f"{name}_by_kind"] = {k: round(sum(v[name]) / len(v[name]), 3) for k, v in sorted(emitted.items())}
    return report
