"""The policies that a round can follow, by name: which candidate tree to grow and which of its rows to want.

Each maps (candidates, edges, anchors [R] int64, max_rows, threshold, cost) to the candidate tree, keep [R, N] bool
(ancestor-closed, anchors included) and survival [R, N] float32, by which the batch's budget is filled afterwards.
A policy that has no use for edges, threshold or cost ignores it: the baselines know the draft's marginals only.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from sglang_d3tree.policy.cost import VerifyCost
from sglang_d3tree.tree.budget import whole_tree
from sglang_d3tree.tree.build import CandidateTree, build_tree, chain_tree
from sglang_d3tree.tree.candidates import Candidates
from sglang_d3tree.tree.edges import Edges
from sglang_d3tree.tree.survival import conditional_survival, path_product

Plan = tuple[CandidateTree, Tensor, Tensor]
Policy = Callable[[Candidates, Edges, Tensor, int, Tensor | float, VerifyCost], Plan]


def _draft_survival(tree: CandidateTree) -> Tensor:
    return path_product(conditional_survival(tree), tree)


def chain(
    candidates: Candidates, edges: Edges, anchors: Tensor, max_rows: int, threshold: Tensor | float, cost: VerifyCost
) -> Plan:
    """DFlash: the best token of every depth, all of them verified."""
    tree = chain_tree(candidates, anchors, max_rows)
    return tree, tree.valid, _draft_survival(tree)


def ddtree(
    candidates: Candidates, edges: Edges, anchors: Tensor, max_rows: int, threshold: Tensor | float, cost: VerifyCost
) -> Plan:
    """DDTree: best-first, a fixed number of rows per request."""
    tree = build_tree(candidates, anchors, max_rows)
    return tree, tree.valid, _draft_survival(tree)


def caddtree(
    candidates: Candidates, edges: Edges, anchors: Tensor, max_rows: int, threshold: Tensor | float, cost: VerifyCost
) -> Plan:
    """Cost-aware DDTree: per request the node count n with the highest expected tokens per unit of cost (METHOD 2),

        (1 + sum of the n best path probabilities) / (draft cost + verify cost of n nodes).

    Raises ValueError if cost knows fewer than max_rows rows.
    """
    if cost.verify.shape[0] < max_rows:
        raise ValueError(f"verify costs for {cost.verify.shape[0]} rows do not cover trees of {max_rows} rows")
    tree = build_tree(candidates, anchors, max_rows)
    survival = _draft_survival(tree)
    # The anchor's survival of 1 is the formula's 1: the bonus token that every round emits.
    speed = survival.cumsum(1) / (cost.draft + cost.verify[:max_rows])
    last_row = speed.where(tree.valid, -torch.inf).argmax(1, keepdim=True)
    keep = tree.valid & (torch.arange(max_rows, device=survival.device) <= last_row)
    return tree, keep, survival


def d3tree(
    candidates: Candidates, edges: Edges, anchors: Tensor, max_rows: int, threshold: Tensor | float, cost: VerifyCost
) -> Plan:
    """D3Tree's whole tree: best-first, then only the nodes whose survival reaches the threshold (METHOD 3 and 8)."""
    tree = build_tree(candidates, anchors, max_rows, edges)
    survival = path_product(conditional_survival(tree, edges), tree)
    return tree, whole_tree(tree, survival, threshold), survival


POLICIES: dict[str, Policy] = {"chain": chain, "ddtree": ddtree, "caddtree": caddtree, "d3tree": d3tree}

# Policies whose kept nodes compete for one budget over the batch; the others verify all that they keep.
BUDGETED = frozenset({"d3tree"})
# Policies that read a trained head's survival; to the others the draft's own probabilities are all there is.
LEARNED = frozenset({"d3tree"})
