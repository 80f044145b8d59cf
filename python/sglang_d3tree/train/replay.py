"""Accept lengths without a server: recorded answers of the target replayed round by round, under any policy.

A round accepts exactly the nodes that continue the recorded answer, whether that is greedy or a sample: the target
draws its token without regard to the tree, and a kept child that carries it is the next row (METHOD 6).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_d3tree.policy.baselines import POLICIES
from sglang_d3tree.policy.cost import VerifyCost
from sglang_d3tree.tree.build import CandidateTree
from sglang_d3tree.tree.candidates import Candidates
from sglang_d3tree.tree.edges import Edges, draft_edges
from sglang_d3tree.tree.head import TreeHead, head_edges

EdgesOf = Callable[[Candidates, Tensor, Tensor], Edges]
"""(candidates, draft states, anchors) -> edges."""


@dataclass(frozen=True)
class Drafts:
    """A drafts and what the target says after their anchors. D horizon, K candidates.

    anchors [A] int64; states [A, D, H]; candidates over A requests; continuation [A, D] int64, the target's tokens
    after each anchor, -1 where they are not known.
    """

    anchors: Tensor
    states: Tensor
    candidates: Candidates
    continuation: Tensor


def answer_drafts(tokens: Tensor, states: Tensor, candidates: Candidates) -> Drafts:
    """Drafts at every place of an answer, tokens [A + 1] int64 of which the last ends it."""
    horizon = states.shape[1]
    continuation = torch.nn.functional.pad(tokens[1:], (0, horizon - 1), value=-1).unfold(0, horizon, 1)
    return Drafts(tokens[:-1], states, candidates, continuation)


@dataclass(frozen=True)
class Grown:
    """What a policy may verify in each of A rounds, in the order in which it keeps rows, the anchor first.

    survival [A, N] float32, never rising; accepted [A, N] bool, rows that the target accepts; valid [A, N] bool.
    """

    survival: Tensor
    accepted: Tensor
    valid: Tensor


def head_or_draft(head: TreeHead | None) -> EdgesOf:
    """Edges of a trained head, or the draft's own."""
    if head is None:
        return lambda candidates, states, anchors: draft_edges(candidates)
    return lambda candidates, states, anchors: head_edges(head, candidates, states, anchors)


def accepted_nodes(tree: CandidateTree, continuation: Tensor) -> Tensor:
    """Rows [A, N] bool whose whole path is what the target says, continuation [A, D] as in Drafts; anchors always."""
    says = continuation.gather(1, (tree.depths - 1).clamp(min=0))
    right = tree.valid & (says == tree.token_ids)
    return whole_paths(tree.valid & (tree.depths == 0), right, tree.depths, tree.parents, tree.horizon)


def whole_paths(anchors: Tensor, right: Tensor, depths: Tensor, parents: Tensor, horizon: int) -> Tensor:
    """Rows [A, N] bool that are right together with all their ancestors: anchors, right [A, N] bool, depths and
    parents [A, N] as in CandidateTree."""
    accepted = anchors
    for depth in range(1, horizon + 1):
        accepted = accepted | (right & (depths == depth) & accepted.gather(1, parents))
    return accepted


def grow(drafts: Drafts, policy: str, edges_of: EdgesOf, max_rows: int) -> Grown:
    """One policy's trees for all drafts, rows in the order of their survival."""
    edges = edges_of(drafts.candidates, drafts.states, drafts.anchors)
    free = VerifyCost(0.0, torch.zeros(max_rows))
    # Which rows are kept is ``kept_rows``' business: here every policy's whole tree. caddtree grows ddtree's.
    plan = POLICIES["ddtree" if policy == "caddtree" else policy]
    tree, _, survival = plan(drafts.candidates, edges, drafts.anchors, max_rows, 0.0, free)
    key = survival.where(tree.valid, -torch.inf)
    key[:, 0] = torch.inf
    order = key.sort(dim=1, descending=True, stable=True).indices  # stable: parents before children
    accepted, valid = accepted_nodes(tree, drafts.continuation).gather(1, order), tree.valid.gather(1, order)
    return Grown(survival.gather(1, order).where(valid, 0.0), accepted, valid)


def kept_rows(grown: Grown, policy: str, limit: float) -> Tensor:
    """How many rows [A] int64 of each place's ranking a policy keeps, ``limit`` being its one knob.

    chain, ddtree: the first ``limit`` rows. caddtree: the count n that maximises (1 + sum of path probabilities) / (1
    + limit * n), the cost-aware rule of METHOD 2 with verify costs linear in rows. d3tree: survival >= limit
    (METHOD 8, threshold; one limit over all requests is what a budget over a large batch comes to).
    """
    available = grown.valid.sum(1)
    if policy in ("chain", "ddtree"):
        return available.clamp(max=int(limit))
    if policy == "caddtree":
        count = torch.arange(1, grown.survival.shape[1] + 1)
        speed = grown.survival.cumsum(1) / (1.0 + limit * count)
        return speed.where(grown.valid, -torch.inf).argmax(1) + 1
    above = (grown.survival >= limit) & grown.valid
    above[:, 0] = True
    return above.long().cumprod(1).sum(1)


@dataclass(frozen=True)
class Replayed:
    """Rounds of one answer: emitted tokens and verified rows, anchors included, added up."""

    tokens: int
    rounds: int
    rows: int


def replay(grown: Grown, kept: Tensor) -> Replayed:
    """Walk one answer: each round starts where the last one stopped. kept [A]: rows of a round at each place.

    The bonus counts; nothing beyond the answer's end does. The first token comes from the prefill.
    """
    inside = torch.arange(grown.accepted.shape[1]) < kept[:, None]
    lengths = (grown.accepted & inside).sum(1).tolist()  # accepted nodes, and one for the anchor's bonus
    rows = kept.tolist()
    end, at, rounds, verified = len(lengths), 0, 0, 0
    while at < end:
        rounds += 1
        verified += rows[at]
        at += lengths[at]
    return Replayed(end, rounds, verified)


def total(replays: Iterable[Replayed]) -> Replayed:
    """All answers together."""
    found = list(replays)
    return Replayed(
        sum(r.tokens for r in found), sum(r.rounds for r in found), sum(r.rows for r in found)
    )


def match_rows(grown: Sequence[Grown], policy: str, mean_rows: float) -> tuple[float, list[Replayed]]:
    """The limit with which a policy verifies ``mean_rows`` rows per round on average, and its replays.

    Bisection; where a policy has fewer rows than that, it keeps all. Rounds depend on what earlier ones accepted, so
    the mean jumps in small steps: of the two limits left at the end, the one that stays within the rows is taken.
    """

    def run(limit: float) -> list[Replayed]:
        return [replay(g, kept_rows(g, policy, limit)) for g in grown]

    if policy in ("chain", "ddtree"):
        return mean_rows, run(mean_rows)
    low, high = -40.0, 0.0  # log2 of the limit, for caddtree's slope and d3tree's threshold: the higher, the fewer rows
    if policy == "caddtree":
        high = 6.0
    for _ in range(18):
        middle = (low + high) / 2
        whole = total(run(2.0**middle))
        low, high = (middle, high) if whole.rows > mean_rows * whole.rounds else (low, middle)
    limit = 2.0**high
    return limit, run(limit)
