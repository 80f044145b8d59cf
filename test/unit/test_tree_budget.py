"""Survival and the batch-wide choice of rows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tree_build import random_candidates

from sglang_d3tree.tree.budget import fill_rows, whole_tree
from sglang_d3tree.tree.build import CandidateTree, build_tree
from sglang_d3tree.tree.survival import conditional_survival, path_product

trees = st.builds(
    lambda seed, requests, horizon, topk, max_rows, levels: build_tree(
        random_candidates(seed, requests, horizon, topk, levels), torch.arange(requests) + 1000, max_rows
    ),
    seed=st.integers(0, 2**31),
    requests=st.integers(1, 5),
    horizon=st.integers(1, 6),
    topk=st.integers(1, 5),
    max_rows=st.integers(1, 24),
    levels=st.sampled_from([None, 1, 4]),
)


def random_survival(tree: CandidateTree, seed: int, kind: str) -> torch.Tensor:
    """A learned head's answer: any conditional in [0, 1]; `coarse` makes ties, `near_one` tempts rounding."""
    conditional = torch.rand(tree.valid.shape, generator=torch.Generator().manual_seed(seed))
    if kind == "coarse":
        conditional = (conditional * 4).round() / 4
    elif kind == "near_one":
        conditional = 1 - conditional * 2e-7
    return path_product(conditional, tree)


kinds = st.sampled_from(["smooth", "coarse", "near_one"])


def is_ancestor_closed(tree: CandidateTree, keep: torch.Tensor) -> bool:
    return bool((keep <= (keep.gather(1, tree.parents) & tree.valid)).all()) and bool(keep[:, 0].all())


@settings(max_examples=60, deadline=None)
@given(tree=trees)
def test_draft_survival_is_the_path_probability(tree):
    conditional = conditional_survival(tree)
    survival = path_product(conditional, tree)
    torch.testing.assert_close(survival, tree.log_scores.exp(), atol=1e-6, rtol=1e-4)
    assert (survival[:, 0] == 1).all() and (survival[~tree.valid] == 0).all()
    assert ((conditional >= 0) & (conditional <= 1)).all()


@settings(max_examples=80, deadline=None)
@given(tree=trees, seed=st.integers(0, 2**31), kind=kinds)
def test_survival_is_the_product_and_never_rises(tree, seed, kind):
    conditional = torch.rand(tree.valid.shape, generator=torch.Generator().manual_seed(seed))
    survival = path_product(conditional, tree)
    for request in range(tree.valid.shape[0]):
        for row in range(1, int(tree.valid[request].sum())):
            parent = tree.parents[request, row]
            expected = survival[request, parent] * conditional[request, row]
            assert survival[request, row] == expected
    survival = random_survival(tree, seed, kind)
    assert (survival <= survival.gather(1, tree.parents)).all()
    assert (survival[~tree.valid] == 0).all()


@settings(max_examples=80, deadline=None)
@given(tree=trees, seed=st.integers(0, 2**31), kind=kinds, threshold=st.floats(0, 1.5))
def test_whole_tree_is_ancestor_closed(tree, seed, kind, threshold):
    survival = random_survival(tree, seed, kind)
    keep = whole_tree(tree, survival, threshold)
    assert is_ancestor_closed(tree, keep)
    nodes = torch.arange(keep.shape[1]) > 0
    assert torch.equal(keep[:, nodes], (tree.valid & (survival >= threshold))[:, nodes])
    assert torch.equal(keep, whole_tree(tree, survival, torch.tensor(threshold)))


def fill_by_sorting(tree: CandidateTree, survival: torch.Tensor, keep: torch.Tensor, total: int):
    """Anchors, then kept nodes, then dropped nodes; each class by (survival desc, depth, request, row)."""
    order = []
    for request, row in tree.valid.nonzero().tolist():
        tier = 0 if row == 0 else 1 if keep[request, row] else 2
        depth = int(tree.depths[request, row])
        order.append((tier, -float(survival[request, row]), depth, request, row))
    chosen = torch.zeros_like(keep)
    for *_, request, row in sorted(order)[:total]:
        chosen[request, row] = True
    return chosen


@settings(max_examples=200, deadline=None)
@given(tree=trees, seed=st.integers(0, 2**31), kind=kinds, threshold=st.floats(0, 1), extra=st.integers(0, 130))
def test_fill_rows_matches_sorting(tree, seed, kind, threshold, extra):
    survival = random_survival(tree, seed, kind)
    keep = whole_tree(tree, survival, threshold)
    requests = tree.valid.shape[0]
    total = requests + extra
    filled = fill_rows(tree, survival, keep, total)
    assert torch.equal(filled, fill_by_sorting(tree, survival, keep, total))
    assert is_ancestor_closed(tree, filled)
    assert filled.sum() == min(total, int(tree.valid.sum()))
    if keep.sum() <= total:
        assert (filled >= keep).all()
    else:
        assert (filled <= keep).all()


@settings(max_examples=60, deadline=None)
@given(tree=trees, seed=st.integers(0, 2**31), cut=st.integers(1, 24), extra=st.integers(0, 60))
def test_fill_rows_respects_a_policys_choice(tree, seed, cut, extra):
    """keep need not follow survival: a policy may have cut by its own rule."""
    keep = tree.valid & (torch.arange(tree.valid.shape[1]) < cut)
    survival = random_survival(tree, seed, "smooth")
    total = tree.valid.shape[0] + extra
    filled = fill_rows(tree, survival, keep, total)
    assert torch.equal(filled, fill_by_sorting(tree, survival, keep, total))
    assert is_ancestor_closed(tree, filled)


def test_the_batch_shares_its_rows():
    """METHOD 8's example of heavy load: a certain request takes the rows that a doubtful one would waste."""
    tree = build_tree(random_candidates(1, 2, 4, 4), torch.tensor([1, 2]), 12)
    tree = CandidateTree(
        tree.token_ids[[0, 0]],
        tree.parents[[0, 0]],
        tree.depths[[0, 0]],
        tree.ranks[[0, 0]],
        tree.log_scores[[0, 0]],
        tree.valid[[0, 0]],
        4,
    )
    conditional = torch.tensor([0.9, 0.1])[:, None].expand(2, 12)
    survival = path_product(conditional, tree)
    filled = fill_rows(tree, survival, tree.valid, 2)
    assert filled.sum(1).tolist() == [1, 1]
    nodes_at_depth_one = int((tree.depths[0] == 1).sum())
    filled = fill_rows(tree, survival, tree.valid, 2 + nodes_at_depth_one)
    assert filled[0].sum() > filled[1].sum() == 1


def test_a_broken_head_cannot_drop_an_anchor():
    tree = build_tree(random_candidates(5, 3, 4, 4), torch.tensor([1, 2, 3]), 10)
    survival = torch.full(tree.valid.shape, float("nan"))
    keep = whole_tree(tree, survival, 0.5)
    assert keep.sum(1).tolist() == [1, 1, 1]
    filled = fill_rows(tree, survival, keep, 8)
    assert is_ancestor_closed(tree, filled)
    survival = torch.full(tree.valid.shape, 0.9)
    survival[:, 0] = float("nan")
    assert torch.equal(fill_rows(tree, survival, tree.valid, 3), torch.arange(10).expand(3, 10) == 0)


def test_minus_zero_is_no_survival_and_nothing_else():
    tree = build_tree(random_candidates(5, 3, 4, 4), torch.tensor([1, 2, 3]), 10)
    survival = torch.full(tree.valid.shape, -0.0)
    assert torch.equal(fill_rows(tree, survival, tree.valid, 9), fill_rows(tree, survival.abs(), tree.valid, 9))
    assert torch.equal(fill_rows(tree, survival, tree.valid, 3), torch.arange(10).expand(3, 10) == 0)


def test_errors():
    tree = build_tree(random_candidates(5, 3, 4, 4), torch.tensor([1, 2, 3]), 10)
    with pytest.raises(ValueError):
        fill_rows(tree, tree.log_scores.exp(), tree.valid, 2)
