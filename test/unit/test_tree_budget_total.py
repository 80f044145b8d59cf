"""How large the batch's verify pass is: the best total of rows, against trying them all (METHOD 8)."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tree_budget import is_ancestor_closed, kinds, random_survival, trees
from torch._subclasses.fake_tensor import FakeTensorMode

from sglang_d3tree.tree.budget import (
    TOTALS_PER_DOUBLING,
    candidate_totals,
    choose_total,
    expected_tokens,
    fill_rows,
    floor_first,
    whole_tree,
)

tiles = st.sampled_from([1, 4, 8, 64])


def test_method_8s_example():
    totals = candidate_totals(requests=20, max_rows=32, tile=64)
    assert totals[:4] == [20, 64, 128, 192] and totals[-1] == 640


@given(requests=st.integers(1, 300), max_rows=st.integers(1, 64), tile=tiles, data=st.data())
def test_totals_are_tile_multiples_or_the_anchors(requests, max_rows, tile, data):
    min_rows = data.draw(st.integers(1, max_rows))
    totals = candidate_totals(requests, max_rows, tile, min_rows)
    assert totals == sorted(set(totals))
    tiled = totals
    if min_rows == 1:
        assert totals[0] == requests
        tiled = totals[1:]
    assert all(t % tile == 0 and t >= requests * min_rows for t in tiled)
    if requests * max_rows > requests:
        assert totals[-1] >= requests * max_rows
    # Never more than a tile, or a sixteenth, away from what one would like.
    assert all(b - a <= max(tile, a / TOTALS_PER_DOUBLING) for a, b in itertools.pairwise(tiled))


@pytest.mark.parametrize("arguments", [(0, 4, 1), (1, 4, 0), (1, 4, 1, 5), (1, 4, 1, 0)])
def test_impossible_totals_are_refused(arguments):
    with pytest.raises(ValueError):
        candidate_totals(*arguments)


def by_trying(tree, survival, keep, ranking, totals, seconds):
    """Speed of every total by actually filling it; -inf for totals that nothing kept would open."""
    speeds = []
    opened = -1
    for total, cost in zip(totals, seconds, strict=True):
        filled = fill_rows(tree, ranking, keep, total)
        nodes = filled & (tree.depths > 0)
        tokens = keep.shape[0] + float(survival.double()[nodes].sum())
        speeds.append(tokens / cost if opened < int(keep.sum()) else -math.inf)
        opened = total
    return speeds


costs = st.builds(
    lambda base, per_row, step: lambda total: base + per_row * total + step * -(-total // 16),
    base=st.floats(0.1, 10),
    per_row=st.floats(0, 1),
    step=st.floats(0, 2),
)


@settings(max_examples=200, deadline=None)
@given(
    tree=trees,
    seed=st.integers(0, 2**31),
    kind=kinds,
    threshold=st.sampled_from([0.0, 0.05, 0.5]),
    tile=tiles,
    cost=costs,
    floor=st.integers(1, 4),
)
def test_the_chosen_total_is_the_fastest(tree, seed, kind, threshold, tile, cost, floor):
    survival = random_survival(tree, seed, kind)
    keep = whole_tree(tree, survival, threshold)
    requests, max_rows = keep.shape
    totals = candidate_totals(requests, max_rows, tile, min(floor, max_rows))
    if not totals:
        return
    seconds = [cost(t) for t in totals]
    ranking = floor_first(survival, keep, min(floor, max_rows))
    tokens = expected_tokens(survival, tree.valid, keep, torch.tensor(totals), ranking)
    index = int(choose_total(tokens, torch.tensor(seconds)))
    speeds = by_trying(tree, survival, keep, ranking, totals, seconds)
    assert speeds[index] == pytest.approx(max(speeds), rel=1e-5)
    # Light load: all whole trees, plus what completes the tile. Heavy load: nothing but whole trees.
    filled = fill_rows(tree, ranking, keep, totals[index])
    assert is_ancestor_closed(tree, filled)
    if totals[index] >= keep.sum():
        assert (filled >= keep).all()
        assert filled.sum() == min(totals[index], int(tree.valid.sum()))
    else:
        assert (filled <= keep).all() and filled.sum() == totals[index]


@settings(max_examples=100, deadline=None)
@given(tree=trees, seed=st.integers(0, 2**31), kind=kinds, threshold=st.floats(0, 1), floor=st.integers(1, 6))
def test_nobody_gets_less_than_the_floor(tree, seed, kind, threshold, floor):
    survival = random_survival(tree, seed, kind)
    keep = whole_tree(tree, survival, threshold)
    requests, max_rows = keep.shape
    floor = min(floor, max_rows)
    ranking = floor_first(survival, keep, floor)
    for total in {requests * floor, requests * floor + 3}:
        filled = fill_rows(tree, ranking, keep, total)
        assert is_ancestor_closed(tree, filled)
        assert (filled.sum(1) >= keep.sum(1).clamp(max=floor)).all()
    if floor == 1:
        assert ranking is survival


def test_free_rows_are_all_taken_and_dear_ones_none():
    tree_survival = torch.tensor([[1.0, 0.9, 0.5, 0.1], [1.0, 0.2, 0.1, 0.05]])
    valid = torch.ones(2, 4, dtype=torch.bool)
    totals = torch.tensor(candidate_totals(2, 4, 2))
    tokens = expected_tokens(tree_survival, valid, valid, totals)
    torch.testing.assert_close(tokens, torch.tensor([2.0, 3.4, 3.7, 3.85]))
    assert totals[choose_total(tokens, torch.ones(4))] == 8
    assert totals[choose_total(tokens, totals.float())] == 2
    assert totals[choose_total(tokens, 2 + totals.float())] == 4


def test_a_broken_head_leaves_the_anchors_alone():
    survival = torch.full((3, 8), float("nan"))
    valid = torch.ones(3, 8, dtype=torch.bool)
    keep = torch.arange(8).expand(3, 8) == 0
    totals = torch.tensor(candidate_totals(3, 8, 4))
    tokens = expected_tokens(survival, valid, keep, totals)
    assert tokens[0] == 3 and torch.isneginf(tokens[1:]).all()


def test_choosing_a_total_reads_nothing_on_the_host():
    with FakeTensorMode():
        survival, valid = torch.rand(4, 16), torch.ones(4, 16, dtype=torch.bool)
        totals = torch.arange(4, 64)
        ranking = floor_first(survival, valid, 3)
        index = choose_total(expected_tokens(survival, valid, valid, totals, ranking), torch.rand(60))
    assert index.shape == ()
